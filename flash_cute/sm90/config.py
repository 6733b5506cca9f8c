"""Tiles, stages and registers of the SM90 forward kernel, and the rules they must obey.

Pure Python: readable and checkable without the DSL, a driver or a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from flash_cute.specialization import ForwardSpecialization

SMEM_BYTES = 232_448  # 227 KB, what one CTA may have on SM90
REGISTERS_PER_SM = 65_536
THREADS_PER_WARPGROUP = 128
ELEMENT_BYTES = 2
TILE_HEAD_DIMS = (64, 96, 128, 192, 256)  # head dims are rounded up to one of these


@dataclass(frozen=True)
class ForwardConfigSm90:
    """One way to run the SM90 forward kernel.

    Shapes: a CTA owns (tile_m queries) x (all keys), visited tile_n keys at a time; every consumer
            warpgroup owns 64 of the tile_m rows.
    """

    tile_m: int
    tile_n: int
    num_stages: int = 2
    regs_load: int = 24
    regs_mma: int = 240
    use_ping_pong: bool = True  # consumer warpgroups take turns at the tensor cores
    rescale_threshold: float = 8.0  # log2: how far the running maximum may lag behind the true one

    @property
    def tile(self) -> tuple[int, int]:
        """Queries and keys of one block of scores."""
        return self.tile_m, self.tile_n

    @property
    def num_mma_warpgroups(self) -> int:
        return self.tile_m // 64

    @property
    def num_threads(self) -> int:
        return THREADS_PER_WARPGROUP * (self.num_mma_warpgroups + 1)

    def smem_bytes(self, spec: ForwardSpecialization) -> int:
        """Bytes of shared memory for Q, the K and V rings and the barriers."""
        q = self.tile_m * spec.tile_d
        kv = self.num_stages * self.tile_n * (spec.tile_d + spec.tile_dv)
        barriers = 1024
        return (q + kv) * ELEMENT_BYTES + barriers

    def divides(self, block_size: tuple[int, int]) -> bool:
        """Whether blocks of a block mask are whole numbers of tiles."""
        return block_size[0] % self.tile_m == 0 and block_size[1] % self.tile_n == 0

    def check(self, spec: ForwardSpecialization) -> list[str]:
        """Broken rules as sentences; an empty list means the config can run `spec`."""
        broken: list[str] = []
        if self.tile_m not in (64, 128, 192):
            broken.append(f"tile_m is {self.tile_m}, expected 64, 128 or 192 (1 to 3 warpgroups)")
        if self.tile_n % 16 or not 16 <= self.tile_n <= 256:
            broken.append(f"tile_n is {self.tile_n}, expected a multiple of 16 from 16 to 256")
        if spec.tile_d not in TILE_HEAD_DIMS or spec.tile_dv not in TILE_HEAD_DIMS:
            broken.append(
                f"tiled head dims are ({spec.tile_d}, {spec.tile_dv}), expected {TILE_HEAD_DIMS}"
            )
        for key in (spec.score_mod, spec.mask_mod, spec.block_mod):
            if key is not None and self.tile_n % (4 * key.width):
                broken.append(
                    f"tile_n is {self.tile_n}, expected a multiple of {4 * key.width}, since "
                    f"{key.kind}.__vec_size__ is {key.width} and a thread has tile_n / 4 columns"
                )
        smem = self.smem_bytes(spec)
        if smem > SMEM_BYTES:
            broken.append(f"shared memory is {smem} bytes, at most {SMEM_BYTES}")
        registers = THREADS_PER_WARPGROUP * (
            self.regs_load + self.num_mma_warpgroups * self.regs_mma
        )
        if registers > REGISTERS_PER_SM:
            broken.append(f"registers are {registers}, at most {REGISTERS_PER_SM}")
        return broken


LONG_SEQLEN = 2**30
SHORT_SEQLEN = 1536  # keys; below it a causal mask hides a large share of a 192-row tile


def default_config(spec: ForwardSpecialization, seqlen_k: int) -> ForwardConfigSm90:
    """The config measured fastest on an H200 (2026-11-30; DECISIONS.md 17).

    seqlen_k only says whether the keys are few; it is a hint and changes no result.
    """
    tile_d, tile_dv = spec.tile_d, spec.tile_dv
    # What is done to every score sets the pace then, and needs more registers.
    is_busy = spec.modifies_scores or spec.mask_mod is not None
    if spec.has_block_mask:
        # Tiles divide mask blocks of 128; walking the lists takes the load warp more registers.
        tile_n = 64 if tile_d == 256 or tile_dv == 192 else 128
        return ForwardConfigSm90(128, tile_n, regs_load=56, regs_mma=224)
    if tile_d == 64:
        if is_busy or (spec.is_causal and seqlen_k <= SHORT_SEQLEN):
            return ForwardConfigSm90(128, 128)
        return ForwardConfigSm90(192, 128, num_stages=3, regs_load=32, regs_mma=160)
    if tile_d == 96:
        return ForwardConfigSm90(128, 128)
    if tile_d == 128:
        return ForwardConfigSm90(128, 128, use_ping_pong=spec.is_causal)
    if tile_d == 192:
        return ForwardConfigSm90(128, 128 if tile_dv <= 128 else 96)
    return ForwardConfigSm90(128, 64 if is_busy else 80)
