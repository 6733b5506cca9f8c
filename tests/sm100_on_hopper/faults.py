"""Faults to plant in the matrix product; each must show in the mode that it is listed with."""

from __future__ import annotations

from sm100_on_hopper import matmul
from sm100_on_hopper.lowering import LAZY, PLAIN, Fault, Mode, descriptor_fault

A, B = 0, 1  # matrix descriptors
STRIDE, LEADING, SWIZZLE = (64 ^ 32) << 32, (512 ^ 256) << 16, 2 << 61  # bits of descriptors
DESCRIPTORS = {
    "stride of A": (A, STRIDE),
    "stride of B": (B, STRIDE),
    "leading distance of B": (B, LEADING),
    "swizzle of A": (A, SWIZZLE),
    "swizzle of B": (B, SWIZZLE),
}

KIND = 136381584  # instruction descriptor: 128 x 128, bf16, B transposed
COMMIT = r"tcgen05\.commit\.[\w.:]+\s+(\[[^\]]+\]);"
STAGE_FREE, TILE_DONE = 0, 1  # commits
ARRIVAL = r"mbarrier.arrive.release.cluster.shared::cluster.b64 _, \1;"
CHANGES = {
    "offset along k": (PLAIN, Fault(r"(add\.s32\s+%r\d+, %r\d+, )384;", r"\g<1>256;", 0)),
    "transposition of B": (PLAIN, Fault(rf"\b{KIND};", f"{KIND ^ 1 << 16};", 0)),
    "sum that starts anew": (PLAIN, Fault(r"(mov\.pred\s+%p\d+, )-1;", r"\g<1>0;", 0)),
    "column of a load": (PLAIN, Fault(r"(tcgen05\.ld\.[^;]*, \[%r\d+)\];", r"\g<1>+32];", 0)),
    "second commit of a stage": (PLAIN, Fault(COMMIT, r"\g<0>\n\g<0>", STAGE_FREE)),
    "second commit of a tile": (PLAIN, Fault(COMMIT, r"\g<0>\n\g<0>", TILE_DONE)),
    "arrival for the commit of a stage": (LAZY, Fault(COMMIT, ARRIVAL, STAGE_FREE)),
    "arrival for the commit of a tile": (LAZY, Fault(COMMIT, ARRIVAL, TILE_DONE)),
}
# These end a launch in one way only.
MISSING_COMMITS = (Fault(COMMIT, "", STAGE_FREE), Fault(COMMIT, "", TILE_DONE))
NO_COMMITS = Fault(COMMIT, ARRIVAL)
NO_DEALLOC = Fault(r"tcgen05\.dealloc\.[^;]*;", "")
OTHER_LANES = Fault(r"(tcgen05\.ld\.[^;]*, \[%r\d+)\];", rf"\g<1>+{32 << 16}];", 0)

NAMES = (*DESCRIPTORS, *CHANGES)


def named(name: str) -> tuple[Mode, Fault]:
    """The fault of a name, and the mode in which it shows."""
    if name in CHANGES:
        return CHANGES[name]
    return PLAIN, descriptor_fault(matmul.ptx(), *DESCRIPTORS[name])
