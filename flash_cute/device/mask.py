"""Which keys a query sees: block ranges for the loops, and the mask inside an edge block.

Bottom-right aligned. With the diagonal of row i at d = i + seqlen_k - seqlen_q, its visible keys
are begin(i) <= j < end(i), both nondecreasing in i:
    end    = min(seqlen_k, d + 1 if causal, d + right + 1 if windowed, the end of d's chunk)
    begin  = max(0, d - left if windowed, the begin of d's chunk)
"""

import typing
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from flash_cute.device.primitives import column_offset
from flash_cute.device.seqlen import SeqlenInfo


@dataclass(frozen=True)
class MaskBounds:
    """Run-time numbers of a mask; those whose kind is absent are never read."""

    window_left: Int32
    window_right: Int32
    chunk: Int32


@dataclass(frozen=True)
class BlockRange:
    """Key blocks of a query tile, visited downwards from `end` - 1 to `begin`.

    Blocks [full_begin, full_end) hide nothing; those above and below are edges. There is always a
    block to visit, so that rows without visible keys still write their zeros.
    """

    begin: Int32
    full_begin: Int32
    full_end: Int32
    end: Int32


@dataclass(frozen=True)
class AttentionMask:
    """The kind of mask a kernel is compiled for; the methods take numbers and a tile."""

    is_causal: bool
    has_window_left: bool
    has_window_right: bool
    has_chunk: bool
    tile_n: int
    column_offset: typing.Callable[[int], int] = column_offset  # of a thread's scores

    @property
    def has_end(self) -> bool:
        """Whether a row's last visible key depends on the row."""
        return self.is_causal or self.has_window_right or self.has_chunk

    @property
    def has_begin(self) -> bool:
        """Whether a row's first visible key depends on the row."""
        return self.has_window_left or self.has_chunk

    @cute.jit
    def end_of(self, row: Int32, seqlen: SeqlenInfo, bounds: MaskBounds) -> Int32:
        """One past the last key that `row` sees; may be below 0."""
        end = seqlen.seqlen_k
        diagonal = row + seqlen.seqlen_k - seqlen.seqlen_q
        if const_expr(self.is_causal):
            end = cutlass.min(end, diagonal + 1)
        if const_expr(self.has_window_right):
            end = cutlass.min(end, diagonal + bounds.window_right + 1)
        if const_expr(self.has_chunk):
            end = cutlass.min(end, floor_to(diagonal, bounds.chunk) + bounds.chunk)
        return end

    @cute.jit
    def begin_of(self, row: Int32, seqlen: SeqlenInfo, bounds: MaskBounds) -> Int32:
        """The first key that `row` sees, at least 0; may be past the end."""
        begin = Int32(0)
        diagonal = row + seqlen.seqlen_k - seqlen.seqlen_q
        if const_expr(self.has_window_left):
            begin = cutlass.max(begin, diagonal - bounds.window_left)
        if const_expr(self.has_chunk):
            begin = cutlass.max(begin, floor_to(diagonal, bounds.chunk))
        return begin

    @cute.jit
    def block_range(
        self,
        first_row: Int32,
        num_rows: Int32 | int,
        seqlen: SeqlenInfo,
        bounds: MaskBounds,
        outer: typing.Any = None,
    ) -> BlockRange:
        """The blocks of `num_rows` queries.

        Args:
            outer: the BlockRange of a whole tile, which that of some of its rows does not leave.
        """
        last_row = cutlass.min(first_row + num_rows, seqlen.seqlen_q) - 1
        begin = self.begin_of(first_row, seqlen, bounds) // self.tile_n
        end_key = cutlass.max(self.end_of(last_row, seqlen, bounds), 0)
        end = (end_key + self.tile_n - 1) // self.tile_n
        if const_expr(outer is not None):
            begin = cutlass.min(begin, outer.end - 1)
            end = cutlass.min(end, outer.end)
        end = cutlass.max(end, begin + 1)
        full_end_key = cutlass.max(self.end_of(first_row, seqlen, bounds), 0)
        full_end = cutlass.max(full_end_key // self.tile_n, begin)
        full_begin = begin
        if const_expr(self.has_begin):
            full_begin_key = self.begin_of(last_row, seqlen, bounds)
            full_begin = (full_begin_key + self.tile_n - 1) // self.tile_n
            # Without a full block all are lower edge: a mask without `has_end` has no upper one.
            is_any_full = full_begin < full_end
            full_begin = cutlass.select_(is_any_full, full_begin, end)
            full_end = cutlass.select_(is_any_full, full_end, end)
        return BlockRange(begin, full_begin, full_end, end)

    @cute.jit
    def split_range(self, blocks: BlockRange, split: Int32, num_splits: Int32, size: Int32):
        """(the part number `split` of the blocks, whether it is empty).

        An empty part gets a block all the same, in which nothing may be seen.

        Args:
            size: blocks of a part, the last of which has all that are left; 0 for equal parts.
        """
        even_size = (blocks.end - blocks.begin + num_splits - 1) // num_splits
        size = cutlass.select_(size > 0, size, even_size)
        first = blocks.begin + split * size
        past = cutlass.select_(split == num_splits - 1, blocks.end, first + size)
        begin = cutlass.min(first, blocks.end - 1)
        end = cutlass.max(cutlass.min(past, blocks.end), begin + 1)
        full_begin = cutlass.max(cutlass.min(blocks.full_begin, end), begin)
        full_end = cutlass.max(cutlass.min(blocks.full_end, end), begin)
        return BlockRange(begin, full_begin, full_end, end), first >= blocks.end

    @cute.jit
    def apply(
        self,
        scores: cute.Tensor,
        q_idx: tuple[Int32, ...],
        first_col: Int32,
        seqlen: SeqlenInfo,
        bounds: MaskBounds,
    ):
        """Set the scores of invisible keys to -inf.

        Shapes: scores: (rows, cols) of this thread, as ``as_rows_cols``; q_idx: the query of each
                row; the first column is key first_col
        """
        for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            num_visible = self.end_of(q_idx[r], seqlen, bounds) - first_col
            num_hidden = Int32(0)
            if const_expr(self.has_begin):
                num_hidden = self.begin_of(q_idx[r], seqlen, bounds) - first_col
            for i in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                is_visible = num_visible > self.column_offset(i)
                if const_expr(self.has_begin):
                    is_visible = is_visible & (num_hidden <= self.column_offset(i))
                scores[r, i] = cutlass.select_(is_visible, scores[r, i], -Float32.inf)


@cute.jit
def floor_to(x: Int32, multiple: Int32) -> Int32:
    """The largest multiple of `multiple` that is at most x, also for negative x."""
    remainder = x % multiple
    remainder = cutlass.select_(remainder < 0, remainder + multiple, remainder)
    return x - remainder
