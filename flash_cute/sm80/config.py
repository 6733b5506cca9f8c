"""Tiles, warps and stages of the SM80 forward kernel, and the rules they must obey.

Pure Python: readable and checkable without the DSL, a driver or a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from flash_cute.specialization import ForwardSpecialization, TileFacts, TileOfHeads

RESERVED_SMEM_BYTES = 1024  # of each CTA, beside what it asks for
REGISTERS_PER_SM = 65_536
MOST_REGISTERS = 255  # of a thread
ELEMENT_BYTES = 2
PLACE_FIELDS = 9  # words of a tile's place
SMEM_STEP = 1024  # bytes of shared memory are a whole number of the tiles' alignment
TILE_HEAD_DIMS = (64, 96, 128, 192, 256)  # head dims are rounded up to one of these


@dataclass(frozen=True)
class ForwardConfigSm80(TileOfHeads):
    """One way to run the SM80 forward kernel.

    Shapes: a CTA owns (tile_m queries) x (all keys), visited tile_n keys at a time; every warp owns
            tile_m / num_warps neighbouring rows, 16 or 32. Where two warps share 32 rows, each has
            one half of the keys of S and one of the columns of O
    Units:  smem_limit: bytes of shared memory that a CTA may have on the GPU it is for
    """

    is_persistent: ClassVar[bool] = False  # a CTA for each tile
    tile_m: int
    tile_n: int
    num_warps: int = 4
    num_stages: int = 1
    ctas_per_sm: int = 1
    keeps_q: bool = False  # Q in registers: read from shared memory once, not for every block
    shares_rows: bool = False  # two neighbouring warps
    skips_warps: bool = False  # those without queries only copy; packed heads are neighbouring rows
    smem_limit: int = 163 * 1024
    rescale_threshold: float = 8.0  # log2: how far the running maximum may lag behind the true one

    @property
    def tile(self) -> tuple[int, int]:
        """Queries and keys of one block of scores."""
        return self.tile_m, self.tile_n

    @property
    def num_threads(self) -> int:
        return 32 * self.num_warps

    @property
    def rows_per_warp(self) -> int:
        return self.tile_m * self.warps_per_row // self.num_warps

    @property
    def warps_per_row(self) -> int:
        return 2 if self.shares_rows else 1

    @property
    def keys_per_warp(self) -> int:
        """Keys of a block of which a warp has the scores."""
        return self.tile_n // self.warps_per_row

    def exchange_bytes(self) -> tuple[int, int]:
        """Bytes of shared memory for P, and for a number of each row of each warp."""
        if not self.shares_rows:
            return 0, 0
        return self.tile_m * self.tile_n * ELEMENT_BYTES, 2 * self.tile_m * 4

    def smem_bytes(self, spec: ForwardSpecialization) -> int:
        """Bytes of shared memory for Q, the K and V rings, what warps exchange, the place."""
        q = self.tile_m * spec.tile_d
        kv = self.num_stages * self.tile_n * (spec.tile_d + spec.tile_dv)
        weights, rows = self.exchange_bytes()
        rest = -(-(PLACE_FIELDS * 4 + rows) // SMEM_STEP) * SMEM_STEP
        return (q + kv) * ELEMENT_BYTES + weights + rest

    def registers(self, spec: ForwardSpecialization) -> int:
        """Registers of a thread that hold O and S, and Q where it is kept: the most of them."""
        kept = spec.tile_d // 2 if self.keeps_q else 0
        columns = (spec.tile_dv + self.tile_n) // self.warps_per_row
        return self.rows_per_warp * (columns + kept) // 32

    def check(self, spec: ForwardSpecialization) -> list[str]:
        """Broken rules as sentences; an empty list means the config can run `spec`."""
        broken: list[str] = []
        if self.num_warps not in (4, 8) or self.tile_m not in (
            16 * self.num_warps,
            32 * self.num_warps,
        ):
            broken.append(
                f"tile_m is {self.tile_m} with {self.num_warps} warps, expected 4 or 8 warps of 16 "
                "or 32 rows each"
            )
        if self.tile_n % 16 or not 16 <= self.tile_n <= 256:
            broken.append(f"tile_n is {self.tile_n}, expected a multiple of 16 from 16 to 256")
        if self.shares_rows and (
            self.rows_per_warp != 32 or self.tile_n % 64 or spec.tile_dv % 128
        ):
            broken.append(
                "two warps share rows: expected 32 rows each, a tile_n of 64 or a multiple, and a "
                "tiled head dim of v of 128 or 256"
            )
        if self.num_stages < 1:
            broken.append(f"num_stages is {self.num_stages}, expected at least 1")
        if spec.tile_d not in TILE_HEAD_DIMS or spec.tile_dv not in TILE_HEAD_DIMS:
            broken.append(
                f"tiled head dims are ({spec.tile_d}, {spec.tile_dv}), expected {TILE_HEAD_DIMS}"
            )
        return broken + self._check_features(spec) + self._check_resources(spec)

    def _check_features(self, spec: ForwardSpecialization) -> list[str]:
        broken: list[str] = []
        for key in (spec.score_mod, spec.mask_mod, spec.block_mod):
            if key is not None and self.keys_per_warp % (4 * key.width):
                broken.append(
                    f"tile_n is {self.tile_n}, expected a multiple of "
                    f"{4 * key.width * self.warps_per_row}, since {key.kind}.__vec_size__ is "
                    f"{key.width} and a thread has tile_n / {4 * self.warps_per_row} columns"
                )
        if spec.is_split and (spec.has_block_mask or not spec.has_lse):
            broken.append("the keys are split: lists of blocks cannot be, and lse is needed")
        if self.skips_warps and (spec.has_block_mask or self.shares_rows):
            broken.append("warps are skipped: they cannot follow lists of blocks nor share rows")
        if spec.page_rows not in (0, 1):
            broken.append(f"rows of a page's load are {spec.page_rows}, expected 1 (gathered)")
        if spec.gathers_keys and self.tile_n > 32 * self.num_warps:
            broken.append(
                f"tile_n is {self.tile_n}, at most a row a thread where keys are gathered"
            )
        if not 1 <= spec.pack_heads <= self.tile_m // 8:
            broken.append(f"heads a tile are {spec.pack_heads}, at most {self.tile_m // 8}")
        return broken

    def _check_resources(self, spec: ForwardSpecialization) -> list[str]:
        broken: list[str] = []
        smem = self.smem_bytes(spec)
        most = (self.smem_limit + RESERVED_SMEM_BYTES) // self.ctas_per_sm - RESERVED_SMEM_BYTES
        if smem > most:
            broken.append(f"shared memory is {smem} bytes, at most {most}")
        registers = self.registers(spec)
        share = REGISTERS_PER_SM // (self.num_threads * self.ctas_per_sm)
        most = min(MOST_REGISTERS, share) * 4 // 5
        if registers > most:
            broken.append(f"registers of O, S and Q are {registers}, at most {most}")
        return broken


DECODE_ROWS = 64  # of a tile: so few queries take the shape of tile for decoding


def choose_config(spec: ForwardSpecialization, facts: TileFacts) -> ForwardConfigSm80:
    """The first config of a list that fits.

    It divides the blocks of a block mask if any of the list can.
    """
    is_decode = facts.few_rows is not None and facts.few_rows <= DECODE_ROWS
    listed = _decode_configs(spec) if is_decode else _configs(spec, facts.may_split)
    listed = [replace(config, smem_limit=facts.smem_bytes) for config in listed]
    fitting = [config for config in listed if not config.check(spec)]
    if facts.block_size is not None:
        fitting = [_dividing(config, facts.block_size[1]) for config in fitting]
        dividing = [config for config in fitting if config.divides(facts.block_size, spec)]
        fitting = [config for config in dividing if not config.check(spec)] or fitting
    return fitting[0]


def _dividing(config: ForwardConfigSm80, keys: int) -> ForwardConfigSm80:
    """The config with the largest tile_n that divides a number of keys, if there is one."""
    dividing = [n for n in range(16, config.tile_n + 1, 16) if keys % n == 0]
    return replace(config, tile_n=max(dividing, default=config.tile_n))


def _configs(spec: ForwardSpecialization, may_split: bool) -> list[ForwardConfigSm80]:
    """Configs by falling preference; the last ones fit everywhere.

    As many keys at a time as registers are there for, with 32 rows a warp where they hold O. Those
    of what a tile of split keys writes are more.
    """
    is_busy = spec.modifies_scores or spec.mask_mod is not None or spec.has_block_mask
    is_narrow = spec.has_window_left or spec.has_window_right or spec.has_chunk
    is_plain = not (is_busy or is_narrow or spec.gathers_keys)
    is_padded = not (spec.is_packed_q or spec.is_packed_k)  # else registers are short
    first: list[ForwardConfigSm80] = []
    if spec.tile_dv == 256 and not is_busy:
        first = [ForwardConfigSm80(128, 64, num_warps=8, shares_rows=True)]
        if is_plain and spec.is_causal:
            first.insert(0, ForwardConfigSm80(64, 64, ctas_per_sm=2, shares_rows=True))
        elif is_plain and is_padded and not may_split:
            first.insert(0, ForwardConfigSm80(128, 128, num_warps=8, shares_rows=True))
    elif spec.tile_d == 64 and is_plain and is_padded:
        tile_n = 96 if spec.is_causal else 64
        first = [ForwardConfigSm80(128, tile_n, ctas_per_sm=2, keeps_q=True)]
    elif spec.tile_d == spec.tile_dv == 128 and is_plain:
        first = [ForwardConfigSm80(128, 64, num_stages=2, ctas_per_sm=2)]
    tile_ns = (64, 32)
    if spec.tile_dv > 128:
        tile_ns = (32,) if is_busy else tile_ns
        configs = [ForwardConfigSm80(128, n, num_warps=8) for n in tile_ns]
    else:
        if spec.tile_dv == 128 and (is_busy or is_narrow or spec.gathers_keys):
            tile_ns = (32,)
        elif spec.tile_dv == 128 and spec.tile_d > 128:
            tile_ns = (48, 32)
        elif spec.tile_d == 64 and not is_busy:
            tile_ns = (96, 64, 32)
        elif spec.tile_d > 64 and is_busy:
            tile_ns = (32,)
        configs = [ForwardConfigSm80(128, n, ctas_per_sm=c) for c in (2, 1) for n in tile_ns]
        if spec.looks_up_keys:  # a load for every score in flight
            configs, tile_ns = [], (64, 32)
    configs = first + configs
    return configs + [ForwardConfigSm80(64, n, ctas_per_sm=c) for c in (2, 1) for n in tile_ns]


def _decode_configs(spec: ForwardSpecialization) -> list[ForwardConfigSm80]:
    """Few queries and many keys: small tiles of queries, and all the rest for keys under way."""
    tile_n = 128 if spec.tile_d == 64 else 32 if spec.tile_dv > 128 else 64
    shapes = [(n, ctas, stages) for n in (tile_n, 32) for ctas in (2, 1) for stages in (3, 2, 1)]
    return [
        ForwardConfigSm80(
            64, n, num_stages=stages, ctas_per_sm=ctas, skips_warps=not spec.has_block_mask
        )
        for n, ctas, stages in shapes
    ]
