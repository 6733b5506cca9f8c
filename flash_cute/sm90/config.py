"""Tiles, stages and registers of the SM90 forward kernel, and the rules they must obey.

Pure Python: readable and checkable without the DSL, a driver or a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from flash_cute.specialization import ForwardSpecialization, TileFacts, TileOfHeads

SMEM_BYTES = 232_448  # 227 KB, what one CTA may have on SM90
RESERVED_SMEM_BYTES = 1024  # of each CTA
REGISTERS_PER_SM = 65_536
THREADS_PER_WARPGROUP = 128
ELEMENT_BYTES = 2
TILE_HEAD_DIMS = (64, 96, 128, 192, 256)  # head dims are rounded up to one of these
MLA_TILE_D, MLA_TILE_DV = 64, 512  # head dims of q and k, and of qv and v, are rounded up to these


@dataclass(frozen=True)
class ForwardConfigSm90(TileOfHeads):
    """One way to run the SM90 forward kernel.

    Shapes: a CTA owns (tile_m queries) x (all keys), visited tile_n keys at a time; every consumer
            warpgroup owns 64 of the tile_m rows.
    """

    tile_m: int
    tile_n: int
    num_stages: int = 2
    regs_load: int = 24
    regs_mma: int = 240
    ctas_per_sm: int = 1
    is_persistent: ClassVar[bool] = True  # CTAs take further tiles from a counter
    use_ping_pong: bool = True  # consumer warpgroups take turns at the tensor cores
    skips_blocks: bool = False  # a warpgroup passes over blocks that none of its rows see
    waits_late: bool = False  # for O of the block before: after the weights, which takes registers
    rescale_threshold: float = 8.0  # log2: how far the running maximum may lag behind the true one

    @property
    def tile(self) -> tuple[int, int]:
        """Queries and keys of one block of scores."""
        return self.tile_m, self.tile_n

    @property
    def num_mma_warpgroups(self) -> int:
        return self.tile_m // 64

    @property
    def merges_parts(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Where a tile has few rows; elsewhere the code for it would take registers."""
        return self.tile_m == 64

    @property
    def num_threads(self) -> int:
        return THREADS_PER_WARPGROUP * (self.num_mma_warpgroups + 1)

    def ctas_to_saturate(self, spec: ForwardSpecialization) -> int:
        """CTAs of a multiprocessor that together read as fast as memory delivers.

        With one the four warps that gather keys have too little under way (1.6 times as long).
        """
        return self.ctas_per_sm if spec.gathers_keys else 1

    def smem_bytes(self, spec: ForwardSpecialization) -> int:
        """Bytes of shared memory for Q, the K and V rings and the barriers."""
        q = self.tile_m * spec.tile_d
        kv = self.num_stages * self.tile_n * (spec.tile_d + spec.tile_dv)
        barriers = 1024
        return (q + kv) * ELEMENT_BYTES + barriers

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
        if spec.is_split and (spec.has_block_mask or not spec.has_lse):
            broken.append("the keys are split: lists of blocks cannot be, and lse is needed")
        if spec.gathers_keys and self.tile_n > 128:
            broken.append(f"tile_n is {self.tile_n}, at most 128 where keys are gathered")
        elif not spec.gathers_keys and spec.page_rows:
            if spec.page_rows % 8 or self.tile_n % spec.page_rows:
                broken.append(
                    f"rows of a page's load are {spec.page_rows}, expected 1, or a multiple of 8 "
                    f"that divides tile_n, {self.tile_n}"
                )
        if not 1 <= spec.pack_heads <= self.tile_m // 8:
            broken.append(f"heads a tile are {spec.pack_heads}, at most {self.tile_m // 8}")
        smem = self.smem_bytes(spec)
        most = (SMEM_BYTES + RESERVED_SMEM_BYTES) // self.ctas_per_sm - RESERVED_SMEM_BYTES
        if smem > most:
            broken.append(f"shared memory is {smem} bytes, at most {most}")
        if self.skips_blocks and (self.use_ping_pong or spec.has_block_mask):
            broken.append("skips_blocks is True: no turns can be taken and no lists followed")
        roles = (self.regs_load, *[self.regs_mma] * self.num_mma_warpgroups)
        return broken + check_registers(roles, self.ctas_per_sm)


@dataclass(frozen=True)
class MlaConfigSm90:
    """One way to run the SM90 kernel for qv.

    Shapes: a CTA owns 64 rows, of (query, head) pairs, x (all keys), visited tile_n keys at a time;
            its two consumer warpgroups own half of the columns of the output each.
    """

    tile_n: int = 64
    num_stages: int = 2
    regs_load: int = 56
    regs_mma: int = 224
    rescale_threshold: float = 8.0  # as in ForwardConfigSm90

    is_persistent: ClassVar[bool] = True
    merges_parts: ClassVar[bool] = False  # a warp has half of the columns of its rows
    tile_m: ClassVar[int] = 64
    num_mma_warpgroups: ClassVar[int] = 2
    num_threads: ClassVar[int] = 3 * THREADS_PER_WARPGROUP
    ctas_per_sm: ClassVar[int] = 1

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and keys of one block of scores."""
        return self.tile_m, self.tile_n

    def positions(self, spec: ForwardSpecialization) -> int:
        """Queries of each head in a tile, at least; where no head is packed all rows."""
        return self.tile_m // spec.pack_heads

    def ctas_to_saturate(self, spec: ForwardSpecialization) -> int:
        """CTAs of a multiprocessor that together read as fast as memory delivers: there is one."""
        return 1

    def divides(self, block_size: tuple[int, int], spec: ForwardSpecialization) -> bool:
        """Whether blocks of a block mask are whole numbers of tiles: not where heads are rows."""
        return False

    def smem_bytes(self, spec: ForwardSpecialization) -> int:
        """Bytes of shared memory for Q, the ring of keys and values, row maxima and barriers."""
        dims = spec.tile_d + spec.tile_dv
        return (self.tile_m + self.num_stages * self.tile_n) * dims * ELEMENT_BYTES + 4096

    def check(self, spec: ForwardSpecialization) -> list[str]:
        """Broken rules as sentences; an empty list means the config can run `spec`."""
        broken: list[str] = []
        if self.tile_n not in (32, 64):
            broken.append(f"tile_n is {self.tile_n}, expected 32 or 64: weights lie where keys did")
        if self.num_stages < 2:
            broken.append(f"num_stages is {self.num_stages}, expected at least 2")
        if (spec.tile_d, spec.tile_dv) != (MLA_TILE_D, MLA_TILE_DV):
            broken.append(
                f"tiled head dims are ({spec.tile_d}, {spec.tile_dv}), expected "
                f"({MLA_TILE_D}, {MLA_TILE_DV})"
            )
        if not spec.has_qv or spec.has_block_mask or spec.score_mod or spec.mask_mod:
            broken.append("it is for qv, without callbacks and block masks")
        if spec.is_split and not spec.has_lse:
            broken.append("the keys are split: lse is needed")
        if spec.page_rows % 8 or (spec.page_rows and self.tile_n % spec.page_rows):
            broken.append(
                f"rows of a page's load are {spec.page_rows}, expected a multiple of 8 that "
                f"divides tile_n, {self.tile_n}"
            )
        if not 1 <= spec.pack_heads <= self.tile_m:
            broken.append(f"heads a tile are {spec.pack_heads}, at most {self.tile_m}")
        smem = self.smem_bytes(spec)
        if smem > SMEM_BYTES:
            broken.append(f"shared memory is {smem} bytes, at most {SMEM_BYTES}")
        return broken + check_registers((self.regs_load, self.regs_mma, self.regs_mma))


def check_registers(roles: tuple[int, ...], ctas_per_sm: int = 1) -> list[str]:
    """The broken rule, if the registers of a thread of each warpgroup are more than there are.

    A CTA divides among its warpgroups what it has when it is launched, as many for each thread, a
    multiple of 8: a warpgroup that asks for more waits for ever.
    """
    num_threads = THREADS_PER_WARPGROUP * len(roles)
    most = REGISTERS_PER_SM // (num_threads * ctas_per_sm) // 8 * 8 * len(roles)
    if sum(roles) <= most:
        return []
    return [f"registers of a thread of each warpgroup are {sum(roles)} together, at most {most}"]


ConfigSm90 = ForwardConfigSm90 | MlaConfigSm90

SMALLEST_TILE_N = 16
DECODE_ROWS = 64  # of a tile: so few queries take the shape of tile below
SHORT_SEQLEN = 1536  # keys; below it a causal mask hides a large share of a 192-row tile


def choose_config(spec: ForwardSpecialization, facts: TileFacts) -> ConfigSm90:
    """The config of a problem."""
    if spec.has_qv:
        return MlaConfigSm90()
    if facts.few_rows is not None and facts.few_rows <= DECODE_ROWS:
        return decode_config(spec)
    return default_config(spec, facts.seqlen_k, facts.block_size)


def default_config(
    spec: ForwardSpecialization, seqlen_k: int, block_size: tuple[int, int] | None = None
) -> ForwardConfigSm90:
    """The config measured fastest on an H200 (2026-11-30; DECISIONS.md 17).

    Args:
        seqlen_k: says whether the keys are few; a hint that changes no result.
        block_size: (queries, keys) of a block mask's blocks, which the tile divides where it can.
    """
    if spec.has_block_mask:
        return _sparse_config(spec, block_size or (128, 128))
    is_narrow = spec.has_window_left or spec.has_chunk
    config = _window_config(spec) if is_narrow else _dense_config(spec, seqlen_k)
    if spec.page_rows:  # looking pages up, and gathering keys, takes the load warp more registers
        roles = {"tile_m": 128, "regs_load": 56, "regs_mma": 224, "waits_late": False}
        config = replace(config, num_stages=min(config.num_stages, 4), **roles)
    return config


def decode_config(spec: ForwardSpecialization) -> ForwardConfigSm90:
    """Few queries and many keys: one consumer warpgroup, and all the rest for keys under way."""
    config = ForwardConfigSm90(64, 64, num_stages=3, regs_load=56, use_ping_pong=False)
    if spec.tile_d == 256 or spec.tile_dv == 192:
        return config
    tile_n, num_stages = {64: (128, 3), 96: (64, 4), 128: (64, 3), 192: (64, 2)}[spec.tile_d]
    return replace(config, tile_n=tile_n, num_stages=num_stages, ctas_per_sm=2, regs_mma=200)


def _dense_config(spec: ForwardSpecialization, seqlen_k: int) -> ForwardConfigSm90:
    tile_d, tile_dv = spec.tile_d, spec.tile_dv
    is_busy = _is_busy(spec)
    if spec.looks_up_keys:  # a load for every score in flight
        tile_n = {64: 96, 96: 64, 128: 64, 192: 64, 256: 32}[tile_d]
        late = tile_d in (96, 128)
        return ForwardConfigSm90(128, tile_n, use_ping_pong=False, waits_late=late)
    if tile_d == 64:
        if is_busy or (spec.is_causal and seqlen_k <= SHORT_SEQLEN):
            return ForwardConfigSm90(128, 128)
        return ForwardConfigSm90(192, 128, num_stages=3, regs_load=32, regs_mma=160)
    if tile_d == 96:
        return ForwardConfigSm90(128, 128, waits_late=True)
    if tile_d == 128:
        return ForwardConfigSm90(128, 128, use_ping_pong=spec.is_causal, waits_late=True)
    if tile_d == 192:
        return ForwardConfigSm90(128, 128 if tile_dv <= 128 else 96)
    return ForwardConfigSm90(128, 64 if is_busy else 80)


def _window_config(spec: ForwardSpecialization) -> ForwardConfigSm90:
    """Few keys a query: small blocks, and no warpgroup waits for the others' keys or turns."""
    config = ForwardConfigSm90(128, 64, use_ping_pong=False, skips_blocks=True, regs_load=32)
    if spec.tile_d == 64 and not _is_busy(spec):
        return replace(config, tile_m=192, num_stages=6, regs_mma=160)
    if spec.tile_d == 256:
        return replace(config, regs_mma=232)
    num_stages = 3 if spec.tile_d == 192 else 4
    return replace(config, regs_mma=232, num_stages=num_stages, waits_late=True)


def _sparse_config(spec: ForwardSpecialization, block_size: tuple[int, int]) -> ForwardConfigSm90:
    """Tiles divide the blocks; walking the lists takes the load warp more registers."""
    tile_m = 64 if block_size[0] % 128 else 128
    is_small = spec.tile_d == 256 or spec.tile_dv == 192 or (tile_m == 64 and _is_busy(spec))
    largest_n = 64 if is_small else 128
    fitting = [n for n in range(16, largest_n + 1, 16) if block_size[1] % n == 0]
    tile_n = max(fitting, default=largest_n)
    config = ForwardConfigSm90(tile_m, tile_n, regs_load=56, regs_mma=224)
    if tile_m == 128:
        return config
    config = replace(config, use_ping_pong=False)
    # One warpgroup: two CTAs overlap instead, where shared memory has room.
    regs_load, regs_mma = (72, 184) if spec.gathers_keys else (56, 200)
    halved = replace(config, ctas_per_sm=2, regs_load=regs_load, regs_mma=regs_mma)
    return replace(config, regs_mma=240) if halved.check(spec) else halved


def _is_busy(spec: ForwardSpecialization) -> bool:
    """Whether what is done to every score sets the pace, and needs more registers."""
    return spec.modifies_scores or spec.mask_mod is not None
