"""What the harness on Hopper cannot show: that the PTX of the SM100 kernel waits and fences.

`check_order` walks the text. It knows roles by the `setmaxnreg` that each begins with, and takes
the text for the order of execution, which holds for the straight pieces between two barriers.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

from flash_cute.sm100.config import SMEM_BYTES, choose_config
from flash_cute.specialization import ForwardSpecialization, TileFacts

SOFTMAX, CORRECTION, OTHER = 1, 2, 3  # roles, by the number of setmaxnreg before them
WAIT = "mbarrier.try_wait"
ARRIVE = re.compile(r"mbarrier\.arrive\.shared|tcgen05\.commit")
PRODUCT_WITH_P = re.compile(r"@q tcgen05\.mma\S* \[[^]]*\], \[")  # A in tensor memory
FROM_PLACES = re.compile(r"cp\.async\.cg")


class Walk:
    """The state of one role while its lines are read."""

    def __init__(self, role: int):
        self.role = role
        self.is_ordered = True  # a fence follows the last wait
        self.is_loaded = False  # a load of tensor memory that no wait::ld follows yet
        self.is_stored = False  # a store without its wait::st and fence
        self.is_waited = False  # that wait::st
        self.is_read = False  # a load without a fence, which an arrival of the correction needs
        self.is_generic = False  # a copy into shared memory that no proxy fence follows

    def step(self, line: str) -> None:
        """Take one line.

        Raises: AssertionError, with the line, where something is missing before it.
        """
        touches = line.startswith(("tcgen05.ld", "tcgen05.st.")) or PRODUCT_WITH_P.search(line)
        assert self.is_ordered or not touches, f"no fence after the wait: {line}"
        is_load = line.startswith("tcgen05.ld")
        is_ld_wait = line.startswith("tcgen05.wait::ld")
        assert is_load or is_ld_wait or not self.is_loaded, f"no wait::ld before: {line}"
        self.is_loaded = is_load
        if ARRIVE.search(line) and self.role != OTHER:
            assert not self.is_stored, f"a store may come after: {line}"
            assert not (self.is_read and self.role == CORRECTION), f"a load may come after: {line}"
        if ARRIVE.search(line):
            assert not self.is_generic, f"no proxy fence before: {line}"
        self._note(line, is_load)

    def _note(self, line: str, is_load: bool) -> None:
        if line.startswith(WAIT):
            self.is_ordered = False
        elif line.startswith("tcgen05.fence::after"):
            self.is_ordered = True
        elif line.startswith("tcgen05.st."):
            self.is_stored, self.is_waited = True, False
        elif line.startswith("tcgen05.wait::st"):
            self.is_waited = True
        elif line.startswith("tcgen05.fence::before"):
            assert not self.is_stored or self.is_waited, "no wait::st before the fence"
            self.is_stored = self.is_read = False
        elif line.startswith("fence.proxy.async"):
            self.is_generic = False
        self.is_read |= is_load
        self.is_generic |= bool(FROM_PLACES.search(line)) or is_zeroing(line, self.role)


def is_zeroing(line: str, role: int) -> bool:
    """Whether the correction clears a row of V: nothing else of its is 16 bytes wide."""
    return role == CORRECTION and line.startswith("st.shared.v4")


def check_order(ptx: str) -> None:
    """Check that all loads and stores of tensor memory are waited for and fenced, and the like.

    Raises: AssertionError.
    """
    walk = Walk(0)
    for line in map(str.strip, ptx.splitlines()):
        if line.startswith("setmaxnreg"):
            walk = Walk(walk.role + 1)
        walk.step(line)
    assert walk.role == OTHER


# ---- The kernel's PTX ----------------------------------------------------------------------------

CELLS: dict[str, dict[str, Any]] = {
    "dense": {"is_causal": True},
    "in turns": {"tile_d": 256, "tile_dv": 256},
    "ragged": {"has_seqused_k": True},
    "gathered": {"has_seqused_k": True, "page_rows": 1},
}
# What is taken out of the text, and the cell in which it must be missed.
NEEDED = {
    "wait::ld": (r"tcgen05\.wait::ld[^;]*;", "dense"),
    "wait::st": (r"tcgen05\.wait::st[^;]*;", "dense"),
    "fence before": (r"tcgen05\.fence::before_thread_sync;", "dense"),
    "fence after": (r"tcgen05\.fence::after_thread_sync;", "dense"),
    "fence after, in turns": (r"tcgen05\.fence::after_thread_sync;", "in turns"),
    "proxy fence of cleared rows": (r"fence\.proxy\.async[^;]*;", "ragged"),
    "proxy fence of gathered rows": (r"fence\.proxy\.async[^;]*;", "gathered"),
}


@functools.cache
def ptx_of(cell: str) -> str:
    pytest.importorskip("cutlass")
    from flash_cute.compile import inspect_kernel
    from flash_cute.sm100.fwd import FlashAttentionForwardSm100

    base = {"dtype": "bf16", "tile_d": 64, "tile_dv": 64, "is_causal": False, "has_lse": True}
    spec = ForwardSpecialization(**(base | CELLS[cell]))
    config = choose_config(spec, TileFacts(8192, None, None, SMEM_BYTES))
    return inspect_kernel(FlashAttentionForwardSm100(spec, config), "sm_100a").ptx


@pytest.mark.compile
@pytest.mark.parametrize("cell", CELLS)
def test_everything_is_waited_for_and_fenced(cell: str):
    check_order(ptx_of(cell))


@pytest.mark.compile
@pytest.mark.parametrize("name", NEEDED)
def test_each_missing_wait_and_fence_is_found(name: str):
    pattern, cell = NEEDED[name]
    ptx = ptx_of(cell)
    places = [found.span() for found in re.finditer(pattern, ptx)]
    assert places
    missed = 0
    for begin, end in places:
        with_fault = ptx[:begin] + ptx[end:]
        try:
            check_order(with_fault)
        except AssertionError:
            missed += 1
    # Those at the kernel's begin and end, and behind signals that guard no tensor memory, are not.
    assert missed >= min(len(places), 5)
