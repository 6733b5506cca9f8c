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
    def row(self, batch: Int32, head: Int32, block_row: Int32) -> Int32:
        """Index of a row of blocks among all."""
        return batch * self.batch_rows + head * self.head_rows + block_row

    @cute.jit
    def count(self, batch: Int32, head: Int32, block_row: Int32) -> Int32:
        """Listed blocks of a row; none past the last one, where packed sequences may reach."""
        found = Int32(0)
        if block_row < self.num_rows:
            found = self.counts[self.row(batch, head, block_row)]
        return found


@dataclass(frozen=True)
class BlockLists:
    """Both lists of a problem."""

    partial: BlockList
    full: BlockList  # None where every listed block is partial
    sub_m: Int32
    sub_n: Int32

    @cute.jit
    def counts(self, m_block: Int32, head: Int32, batch: Int32):
        """Tiles of keys to visit for a query tile: (partial ones, full ones)."""
        block_row = m_block // self.sub_m
        num_partial = self.partial.count(batch, head, block_row) * self.sub_n
        num_full = Int32(0)
        if const_expr(self.full is not None):
            num_full = self.full.count(batch, head, block_row) * self.sub_n
        return num_partial, num_full

    @cute.jit
    def visit(self, i: Int32, counts, m_block: Int32, head: Int32, batch: Int32):
        """The i-th key tile to visit, with `counts` as above; 0 where nothing is listed."""
        num_partial, num_full = counts
        block_row = m_block // self.sub_m
        n_block = Int32(0)
        if i < num_partial:
            n_block = self.listed(self.partial, i, self.partial.row(batch, head, block_row))
        elif const_expr(self.full is not None):
            if i < num_partial + num_full:
                row = self.full.row(batch, head, block_row)
                n_block = self.listed(self.full, i - num_partial, row)
        return n_block

    @cute.jit
    def listed(self, blocks: BlockList, i: Int32, row: Int32) -> Int32:
        """Key tile number i of a list."""
        column = i // self.sub_n
        return blocks.indices[row, column] * self.sub_n + i - column * self.sub_n


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
