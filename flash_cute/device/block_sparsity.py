"""Block sparsity: the tile's blocks of keys come from two lists instead of a range.

Blocks of the partial list apply the block mask's own mask_mod, blocks of the full list do not. A
block of the mask is made of sub_m x sub_n tiles of the kernel; the lists are walked tile by tile,
partial ones first.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

# Launch arguments: sub_m, sub_n, then per list the addresses of counts and indices, the distances
# between batches and heads in rows of blocks (0 where one list serves all), the rows of one list
# and the columns; BlockStructure.launch_arguments is the host's end of it.
NUM_LIST_ARGS = 6


@dataclass(frozen=True)
class BlockList:
    """Column numbers of one kind of block, by (batch, head, row of blocks).

    Shapes: counts (rows,), indices (rows, cols) int32 over all batches and heads
    """

    counts: cute.Tensor
    indices: cute.Tensor
    batch_rows: Int32
    head_rows: Int32
    num_rows: Int32  # of one batch and head

    @cute.jit
    def head_of(self, batch: Int32, head: Int32, block_row: Int32):
        """(listed blocks, index of the row among all, first block) of a row of blocks.

        None are listed past the last row, where packed sequences may reach.
        """
        within = cutlass.min(block_row, self.num_rows - 1)
        row = batch * self.batch_rows + head * self.head_rows + within
        count = cutlass.select_(block_row < self.num_rows, self.counts[row], Int32(0))
        return count, row, self.indices[row, 0]


@dataclass(frozen=True)
class Place:
    """Where the load warp is in the lists: column of one, tile within the block, key tile."""

    column: Int32
    sub: Int32
    n_block: Int32


@dataclass(frozen=True)
class BlockLists:
    """Both lists of a problem."""

    partial: BlockList
    full: BlockList  # None where every listed block is partial
    sub_m: Int32
    sub_n: Int32

    def end_tile(self) -> Int32:
        """One past the last key tile that the list of full blocks has a column for."""
        blocks = self.partial if self.full is None else self.full
        return cute.size(blocks.indices, mode=[1]) * self.sub_n

    @cute.jit
    def open(self, m_block: Int32, head: Int32, batch: Int32):
        """The lists of a query tile: (partial, full) tiles to visit, their rows, the first place.

        What is read does not depend on one another, so that the latencies pass together. Where
        nothing is listed the first place is key tile 0.
        """
        block_row = m_block // self.sub_m
        partial_count, partial_row, n_block = self.partial.head_of(batch, head, block_row)
        full_count, full_row = Int32(0), Int32(0)
        if const_expr(self.full is not None):
            full_count, full_row, full_block = self.full.head_of(batch, head, block_row)
            n_block = cutlass.select_(partial_count > 0, n_block, full_block)
        n_block = cutlass.select_(partial_count + full_count > 0, n_block * self.sub_n, Int32(0))
        counts = (partial_count * self.sub_n, full_count * self.sub_n)
        return counts, (partial_row, full_row), Place(Int32(0), Int32(0), n_block)

    @cute.jit
    def advance(self, place: Place, i: Int32, num_partial: Int32, rows):
        """The place of the i-th key tile, from that of the one before."""
        column, sub, n_block = place.column, place.sub + 1, place.n_block + 1
        if sub == self.sub_n:
            sub, column = Int32(0), column + 1
            if i == num_partial:
                column = Int32(0)
            if i < num_partial:
                n_block = self.partial.indices[rows[0], column] * self.sub_n
            elif const_expr(self.full is not None):
                n_block = self.full.indices[rows[1], column] * self.sub_n
        return Place(column, sub, n_block)


def block_args(has_full: bool) -> tuple:
    """Placeholders of the launch arguments, for ``compile_args``."""
    address = cute.runtime.nullptr(Int32, cute.AddressSpace.gmem, 4)
    one_list = (address, address, *[Int32(1)] * (NUM_LIST_ARGS - 2))
    return (Int32(1), Int32(1), *one_list, *(one_list if has_full else ()))


def block_lists(args, num_lists: Int32) -> BlockLists:
    """The lists out of their launch arguments; `num_lists` is batch * heads."""
    sub_m, sub_n, *rest = args
    lists: list = []
    for begin in range(0, len(rest), NUM_LIST_ARGS):
        counts, indices, batch_rows, head_rows, rows, cols = rest[begin : begin + NUM_LIST_ARGS]
        num_rows = num_lists * rows
        lists.append(
            BlockList(
                cute.make_tensor(counts, cute.make_layout(num_rows)),
                cute.make_tensor(
                    indices, cute.make_layout((num_rows, cols), stride=(cutlass.Int64(cols), 1))
                ),
                batch_rows,
                head_rows,
                rows,
            )
        )
    lists.append(None)
    return BlockLists(lists[0], lists[1], sub_m, sub_n)
