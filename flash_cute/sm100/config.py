"""Tiles, stages and registers of the SM100 forward kernel, and the rules they must obey.

Pure Python: readable and checkable without the DSL, a driver or a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from flash_cute.specialization import ForwardSpecialization, TileFacts, TileOfHeads

SMEM_BYTES = 232_448  # 227 KB, what one CTA may have on SM100
REGISTERS_PER_SM = 65_536
THREADS_PER_WARP = 32
THREADS_PER_WARPGROUP = 128
ROWS = 128  # of a matrix product: the lanes of tensor memory
TMEM_COLUMNS = 512  # of 32 bits in each lane
ELEMENT_BYTES = 2
TILE_HEAD_DIMS = (64, 96, 128, 192, 256)  # head dims are rounded up to one of these
WEIGHTS_PER_GROUP = 32  # of which `num_polynomial` are computed by a polynomial


@dataclass(frozen=True)
class ForwardConfigSm100(TileOfHeads):
    """One way to run the SM100 forward kernel.

    Shapes: a CTA owns (tile_m queries) x (all keys), visited tile_n keys at a time. Each of two
            softmax warpgroups owns 128 of the tile_m rows, or, with tile_m 128 and 64, every other
            block of keys.
    Units:  num_polynomial: of every 32 weights as many are 2**x by a polynomial on the FMA units,
            an even number; the others take the exponential unit.
    """

    tile_m: int = 256
    tile_n: int = 128
    num_stages: int = 2
    num_polynomial: int = 6
    regs_softmax: int = 208
    regs_correction: int = 48
    regs_other: int = 48  # of the warps that load and multiply
    rescale_threshold: float = 8.0  # log2: how far the running maximum may lag behind the true one
    is_persistent: ClassVar[bool] = True  # CTAs take further tiles from a counter
    ctas_per_sm: ClassVar[int] = 1  # pyright: ignore[reportIncompatibleVariableOverride]
    num_threads: ClassVar[int] = 4 * THREADS_PER_WARPGROUP

    @property
    def tile(self) -> tuple[int, int]:
        """Queries and keys of one block of scores."""
        return self.tile_m, self.tile_n

    @property
    def num_tiles_q(self) -> int:
        """Products of 128 rows that a tile of queries takes."""
        return self.rows_q // ROWS

    @property
    def rows_q(self) -> int:
        """Rows of Q in shared memory: in a tile of 64 queries the upper half holds nothing."""
        return max(self.tile_m, ROWS)

    def num_load_warps(self, spec: ForwardSpecialization) -> int:
        """Warps that load: one issues every TMA; keys are gathered by two, a row for each lane."""
        return 2 if spec.gathers_keys else 1

    def tmem_columns(self, spec: ForwardSpecialization) -> int:
        """Columns of tensor memory: two blocks of scores, where P lies too, and the output."""
        return 2 * self.tile_n + self.num_tiles_q * spec.tile_dv

    def smem_bytes(self, spec: ForwardSpecialization) -> int:
        """Bytes of shared memory for Q, the K and V rings, row factors and barriers."""
        q = self.rows_q * spec.tile_d
        kv = self.num_stages * self.tile_n * (spec.tile_d + spec.tile_dv)
        return (q + kv) * ELEMENT_BYTES + 5 * 1024

    def check(self, spec: ForwardSpecialization) -> list[str]:
        """Broken rules as sentences; an empty list means the config can run `spec`."""
        broken: list[str] = []
        if self.tile_m not in (ROWS // 2, ROWS, 2 * ROWS):
            broken.append(f"tile_m is {self.tile_m}, expected 64, 128 or 256")
        if self.tile_n not in (32, 64, 128):
            broken.append(f"tile_n is {self.tile_n}, expected 32, 64 or 128")
        if spec.tile_d not in TILE_HEAD_DIMS or spec.tile_dv not in TILE_HEAD_DIMS:
            broken.append(
                f"tiled head dims are ({spec.tile_d}, {spec.tile_dv}), expected {TILE_HEAD_DIMS}"
            )
        columns = self.tmem_columns(spec)
        if columns > TMEM_COLUMNS:
            broken.append(f"columns of tensor memory are {columns}, at most {TMEM_COLUMNS}")
        if self.num_polynomial % 2 or not 0 <= self.num_polynomial <= WEIGHTS_PER_GROUP:
            broken.append(
                f"num_polynomial is {self.num_polynomial}, expected an even number from 0 to "
                f"{WEIGHTS_PER_GROUP}"
            )
        for key in (spec.score_mod, spec.mask_mod, spec.block_mod):
            if key is not None and self.tile_n % key.width:
                broken.append(
                    f"tile_n is {self.tile_n}, expected a multiple of {key.width}, the "
                    f"{key.kind}.__vec_size__"
                )
        if spec.has_qv:
            broken.append("qv is not supported on SM100")
        most = THREADS_PER_WARP * self.num_load_warps(spec)
        if spec.gathers_keys and self.tile_n > most:
            broken.append(f"tile_n is {self.tile_n}, at most {most} where keys are gathered")
        if spec.is_split and (spec.has_block_mask or not spec.has_lse):
            broken.append("the keys are split: lists of blocks cannot be, and lse is needed")
        if not spec.gathers_keys and (
            spec.page_rows % 8 or (spec.page_rows and self.tile_n % spec.page_rows)
        ):
            broken.append(
                f"rows of a page's load are {spec.page_rows}, expected a multiple of 8 that "
                f"divides tile_n, {self.tile_n}"
            )
        if not 1 <= spec.pack_heads <= self.tile_m // 8:
            broken.append(f"heads a tile are {spec.pack_heads}, at most {self.tile_m // 8}")
        smem = self.smem_bytes(spec)
        if smem > SMEM_BYTES:
            broken.append(f"shared memory is {smem} bytes, at most {SMEM_BYTES}")
        registers = THREADS_PER_WARPGROUP * (
            2 * self.regs_softmax + self.regs_correction + self.regs_other
        )
        if registers > REGISTERS_PER_SM:
            broken.append(f"registers are {registers}, at most {REGISTERS_PER_SM}")
        return broken


def choose_config(spec: ForwardSpecialization, facts: TileFacts) -> ForwardConfigSm100:
    """The config of a problem, reckoned and not measured: as many stages as fit."""
    config = ForwardConfigSm100()
    if spec.tile_d > ROWS or spec.gathers_keys:
        config = replace(config, tile_n=64)
    has_few_rows = facts.few_rows is not None and facts.few_rows <= ROWS
    if spec.tile_d == 256 or spec.tile_dv > ROWS or has_few_rows:  # two O would find no room
        config = replace(config, tile_m=ROWS)
    if spec.has_block_mask:  # tiles divide its blocks
        block_q, block_k = facts.block_size or (2 * ROWS, ROWS)
        tile_m = next((m for m in (256, 128) if m <= config.tile_m and block_q % m == 0), 64)
        tile_n = next((n for n in (128, 64) if n <= config.tile_n and block_k % n == 0), 32)
        config = replace(config, tile_m=tile_m, tile_n=tile_n, regs_softmax=200, regs_correction=64)
    if config.tile_n <= 64:  # few scores a thread
        config = replace(config, regs_softmax=160, regs_correction=96, regs_other=96)
    if spec.modifies_scores or spec.mask_mod is not None:
        config = replace(config, num_polynomial=0)  # the FMA units have enough to do
    fitting = (replace(config, num_stages=n) for n in (4, 3, 2))
    return next((c for c in fitting if c.smem_bytes(spec) <= SMEM_BYTES), config)
