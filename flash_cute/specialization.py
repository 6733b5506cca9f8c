"""What shapes the code of a forward kernel: the facts of a problem that are compiled in.

Everything else (lengths, strides, scale, head counts) is a launch argument and never recompiles.
Plain values only, so that a specialization can be a cache key and be read without torch or the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from flash_cute.variant import CallbackKey


LONG_SEQLEN = 2**30  # stands for a number of keys that is not known


@dataclass(frozen=True)
class TileFacts:
    """What chooses tiles beside the specialization.

    Units: seqlen_k: keys, LONG_SEQLEN where their number is but a hint; few_rows: rows that the
           queries of the heads of one key/value head take, None where the shape of a tile for
           decoding is out of the question; block_size: (queries, keys) of a block mask's blocks;
           smem_bytes: shared memory that a CTA may have; may_split: whether keys may be split
    """

    seqlen_k: int
    few_rows: int | None
    block_size: tuple[int, int] | None
    smem_bytes: int
    may_split: bool = False


@dataclass(frozen=True)
class ForwardSpecialization:
    """Compile-time facts of one forward kernel.

    Shapes: tile_d, tile_dv: head dimensions as tiled, at least the problem's own (loads past the
            end read zeros, stores past it are dropped).
    Units:  dtype is "bf16" or "fp16", of q, k, v and out.
    """

    dtype: str
    tile_d: int
    tile_dv: int
    is_causal: bool
    has_lse: bool
    negate_scores: bool = False  # softmax_scale < 0: the kernel sees -scale and flips q·k
    has_window_left: bool = False
    has_window_right: bool = False  # a right bound other than the causal one
    has_chunk: bool = False
    has_softcap: bool = False
    sink_dtype: str | None = None
    is_packed_q: bool = False
    is_packed_k: bool = False
    has_seqused_q: bool = False
    has_seqused_k: bool = False
    score_mod: CallbackKey | None = None
    mask_mod: CallbackKey | None = None
    has_block_mask: bool = False
    has_full_blocks: bool = False
    block_mod: CallbackKey | None = None  # mask_mod of the block mask: partial blocks only
    pack_heads: int = 1  # query heads of one key/value head in a tile, with qv at most
    page_rows: int = 0  # keys of one load from a page; 1: gathered; 0 where keys are not paged
    is_split: bool = False  # the keys of a tile are split; partial results leave the kernel
    has_split_counts: bool = False  # into a number of parts that each sequence has of its own
    has_batch_idx: bool = False  # sequences lie in chosen rows of the cache or page table
    has_leftpad: bool = False  # and begin after a padding of their own
    has_qv: bool = False  # scores are q·k + qv·v
    is_only_qv: bool = False  # scores are qv·v: there are no q and k

    @property
    def modifies_scores(self) -> bool:
        """Whether scores become scaled ones, in natural units, before the softmax."""
        return self.has_softcap or self.score_mod is not None

    @property
    def looks_up_keys(self) -> bool:
        """Whether a callback that runs on every score loads something for each."""
        mods = (self.score_mod, self.mask_mod)
        return any(key is not None and key.looks_up_keys for key in mods)

    @property
    def gathers_keys(self) -> bool:
        """Whether keys are found one by one, since pages or paddings fit no tile of theirs."""
        return self.page_rows == 1

    @property
    def is_ragged_k(self) -> bool:
        """Whether keys end inside a tensor, with foreign rows behind them."""
        return self.is_packed_k or self.has_seqused_k or self.page_rows > 0

    @property
    def label(self) -> str:
        """Readable part of the kernel's name, e.g. ``bf16_d192_v128_causal_lse``."""
        score = self.score_mod.digest[:8] if self.score_mod else ""
        mask = self.mask_mod.digest[:8] if self.mask_mod else ""
        block = self.block_mod.digest[:8] if self.block_mod else ""
        parts = {
            self.dtype: True,
            f"d{self.tile_d}": True,
            f"v{self.tile_dv}": self.tile_dv != self.tile_d,
            "causal": self.is_causal,
            "left": self.has_window_left,
            "right": self.has_window_right,
            "chunk": self.has_chunk,
            "softcap": self.has_softcap,
            f"score{score}": self.score_mod is not None,
            f"mask{mask}": self.mask_mod is not None,
            f"blocks{block}": self.has_block_mask,
            "full": self.has_full_blocks,
            f"sink{self.sink_dtype}": self.sink_dtype is not None,
            "packedq": self.is_packed_q,
            "packedk": self.is_packed_k,
            "usedq": self.has_seqused_q,
            "usedk": self.has_seqused_k,
            "qv": self.has_qv and not self.is_only_qv,
            "onlyqv": self.is_only_qv,
            f"pack{self.pack_heads}": self.pack_heads > 1,
            f"pages{self.page_rows}": self.page_rows > 0,
            "split": self.is_split and not self.has_split_counts,
            "splits": self.has_split_counts,
            "rows": self.has_batch_idx,
            "leftpad": self.has_leftpad,
            "lse": self.has_lse,
            "negated": self.negate_scores,
        }
        return "_".join(part for part, is_present in parts.items() if is_present)


class TileOfHeads:
    """What all configs say of their tile: how packed heads lie in it, and what it divides."""

    tile_m: int
    tile_n: int
    ctas_per_sm: int
    merges_parts: ClassVar[bool] = False  # the kernel can, of split keys: `splitting.num_arrivals`

    def positions(self, spec: ForwardSpecialization) -> int:
        """Queries of each head in a tile; all rows where heads are not packed.

        With a block mask a power of two, which divides its blocks.
        """
        if spec.pack_heads == 1:
            return self.tile_m
        most = self.tile_m // spec.pack_heads
        return 1 << most.bit_length() - 1 if spec.has_block_mask else most // 8 * 8

    def rows_used(self, spec: ForwardSpecialization) -> int:
        """Rows of a tile that hold queries."""
        return spec.pack_heads * self.positions(spec)

    def ctas_to_saturate(self, spec: ForwardSpecialization) -> int:
        """CTAs of a multiprocessor that together read as fast as memory delivers."""
        return self.ctas_per_sm

    def divides(self, block_size: tuple[int, int], spec: ForwardSpecialization) -> bool:
        """Whether blocks of a block mask are whole numbers of tiles."""
        return block_size[0] % self.positions(spec) == 0 and block_size[1] % self.tile_n == 0
