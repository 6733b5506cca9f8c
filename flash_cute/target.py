"""The GPU a kernel is built for: architecture name, number of SMs, shared memory of one block.

Detected by the caller (`Target.from_capability`) or given by name for compiling without a GPU
(`Target.from_arch`). No torch and no driver here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from flash_cute.errors import InvalidProblem, UnsupportedProblem

_KIB = 1024


@dataclass(frozen=True)
class _Arch:
    """Facts of one compute capability, and the SM count of its best-known product."""

    name: str  # as the compiler spells it; the "a" is what gives wgmma and tcgen05
    smem_kib: int  # per block, with opt-in: the SM's shared memory less 1 KiB kept by the driver
    num_sms: int
    product: str


# Shared memory: CUDA C++ Programming Guide, technical specifications per compute capability; the
# same numbers in CCCL, libcudacxx/include/cuda/__device/arch_traits.h @ 004ad198. Note that 86 and
# 89 have less than 80: a tile that fits an A100 need not fit an A40 or L40S.
_ARCHS = {
    (8, 0): _Arch("sm_80", 163, 108, "A100"),
    (8, 6): _Arch("sm_86", 99, 84, "A40"),
    (8, 7): _Arch("sm_87", 163, 16, "Jetson AGX Orin"),
    (8, 9): _Arch("sm_89", 99, 142, "L40S"),
    (9, 0): _Arch("sm_90a", 227, 132, "H100 SXM, H200"),
    (10, 0): _Arch("sm_100a", 227, 148, "B200"),
    (10, 3): _Arch("sm_103a", 227, 148, "B300"),
    (12, 0): _Arch("sm_120a", 99, 188, "RTX PRO 6000 Blackwell"),
    (12, 1): _Arch("sm_121a", 99, 48, "DGX Spark"),
}

KNOWN_ARCHS = tuple(arch.name for arch in _ARCHS.values())


@dataclass(frozen=True)
class Target:
    """A GPU to compile for and to plan the grid of.

    Units: smem_bytes: dynamic shared memory one thread block may opt into.
    """

    arch: str
    num_sms: int
    smem_bytes: int

    @classmethod
    def from_arch(cls, arch: str, num_sms: int | None = None) -> Target:
        """Build the target of an architecture name: "sm_90a", "sm_90" or "90".

        `num_sms` defaults to the architecture's best-known product; it plans grids and shapes no
        code, so a kernel compiled here runs on every product of the architecture.
        Raises: InvalidProblem for something that is no architecture name, UnsupportedProblem for
                one that is not in the table.
        """
        match = re.fullmatch(r"(?:sm_?)?(\d{2,3})([a-z]?)", arch.strip().lower())
        if match is None:
            raise InvalidProblem(f"arch is {arch!r}, expected one of {', '.join(KNOWN_ARCHS)}")
        number = int(match.group(1))
        target = cls.from_capability(number // 10, number % 10, num_sms)
        if not target.arch.endswith(match.group(2)):
            raise InvalidProblem(f"arch is {arch!r}, expected {target.arch}")
        return target

    @classmethod
    def from_capability(cls, major: int, minor: int, num_sms: int | None = None) -> Target:
        """Build the target of a compute capability, as the driver reports it.

        Raises: UnsupportedProblem when the capability is not in the table; InvalidProblem when
                num_sms is not positive.
        """
        known = _ARCHS.get((major, minor))
        if known is None:
            raise UnsupportedProblem(
                f"compute capability {major}.{minor} is not known to flash_cute, "
                f"expected one of {', '.join(f'{a}.{b}' for a, b in _ARCHS)}"
            )
        if num_sms is not None and num_sms < 1:
            raise InvalidProblem(f"num_sms is {num_sms}, expected at least 1")
        sms = known.num_sms if num_sms is None else num_sms
        return cls(known.name, sms, known.smem_kib * _KIB)

    def without(self, num_sms: int) -> Target:
        """The same GPU with so many multiprocessors left to others, but for one."""
        return replace(self, num_sms=max(1, self.num_sms - num_sms)) if num_sms else self

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability: (9, 0) for sm_90a."""
        number = int(re.sub(r"\D", "", self.arch))
        return number // 10, number % 10

    @property
    def has_dependent_launch(self) -> bool:
        """Whether a kernel may start while the one before it ends, and wait for it by itself."""
        return self.capability >= (9, 0)
