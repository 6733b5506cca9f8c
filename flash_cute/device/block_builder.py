"""Block masks from a mask_mod: which blocks of scores are hidden, partial or full, and their lists.

Algorithm, two kernels on one stream; nothing of the size of the scores is ever stored:
    kernel        one warp per block: evaluates elements until it has seen both a visible and a
                  hidden one, or all of them; writes the block's class, one byte
    list_blocks   one warp per row and per column of blocks: counts its partial and its full blocks,
                  then writes their numbers, 32 classes at a time

A lane's elements are keys 32 apart, so that what a mask_mod reads by key is read coalesced and what
it reads by query is one address per warp. Rows and keys past the end stand for the last ones, which
changes neither "some" nor "all"; a block that reaches past the end is never full, as in PyTorch.
Nothing here belongs to one architecture.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int8, Int32

from flash_cute.arguments import BlockBuilderArguments
from flash_cute.device.placeholders import placeholders
from flash_cute.device.score import tensor_args, tensors_from, trace_mask_mod
from flash_cute.device.seqlen import SeqlenInfo
from flash_cute.variant import CallbackKey, callback_for

WARP = 32
WARPS_PER_CTA = 4
ROWS_PER_STEP = 8  # evaluated between two votes, times keys_per_lane keys
PARTIAL, FULL = 1, 2  # classes; 0 is hidden


@dataclass(frozen=True)
class BlockGrid:
    """The blocks of all (batch, head) pairs, and the sizes that they come from."""

    num_heads: Int32
    num_rows: Int32
    num_cols: Int32
    num_blocks: Int32  # of all pairs
    num_lines: Int32  # rows and columns of all pairs
    block_q: Int32
    block_k: Int32
    seqlen_q: Int32
    seqlen_k: Int32


@dataclass(frozen=True)
class ClassLists:
    """The lists along one direction, rows or columns of blocks.

    Shapes: counts: (lines,), indices: (lines * extent,) int32, over all (batch, head) pairs
    """

    partial_counts: cute.Tensor
    partial_indices: cute.Tensor
    full_counts: cute.Tensor
    full_indices: cute.Tensor


class BlockMaskBuilder:
    """Classes and lists of blocks for one mask_mod; see the module docstring."""

    smem_bytes = 0

    def __init__(self, mask_mod: CallbackKey, keys_per_lane: int):
        self.key, self.keys_per_lane = mask_mod, keys_per_lane
        self.mask_mod = callback_for(mask_mod)
        self.name = f"flash_block_mask_{mask_mod.digest[:8]}_k{WARP * keys_per_lane}"

    # ---------------------------------------------------------------- host

    def compile_args(self) -> tuple:
        """Arguments that stand for the real ones while compiling."""
        args = placeholders(BlockBuilderArguments, {"classes": Int8})
        return args + tensor_args(self.key)

    @cute.jit
    def __call__(self, *launch_args):
        """Host side: from flat BlockBuilderArguments to the two launches."""
        num_arguments = len(BlockBuilderArguments._fields)
        args = BlockBuilderArguments(*launch_args[:num_arguments])
        captured = tensors_from(self.key, launch_args[num_arguments:])
        num_pairs = args.batch * args.num_heads
        grid = BlockGrid(
            num_heads=args.num_heads,
            num_rows=args.num_rows,
            num_cols=args.num_cols,
            num_blocks=num_pairs * args.num_rows * args.num_cols,
            num_lines=num_pairs * (args.num_rows + args.num_cols),
            block_q=args.block_q,
            block_k=args.block_k,
            seqlen_q=args.seqlen_q,
            seqlen_k=args.seqlen_k,
        )
        classes = cute.make_tensor(args.classes, cute.make_layout(grid.num_blocks))
        rows = self.lists(args, "rows", num_pairs * args.num_rows, grid.num_blocks)
        cols = self.lists(args, "cols", num_pairs * args.num_cols, grid.num_blocks)
        self.kernel(grid, classes, captured).launch(
            grid=[cute.ceil_div(grid.num_blocks, WARPS_PER_CTA), 1, 1],
            block=[WARP * WARPS_PER_CTA, 1, 1],
            stream=args.stream,
        )
        self.list_blocks(grid, classes, rows, cols).launch(
            grid=[cute.ceil_div(grid.num_lines, WARPS_PER_CTA), 1, 1],
            block=[WARP * WARPS_PER_CTA, 1, 1],
            stream=args.stream,
        )

    def lists(self, args: BlockBuilderArguments, direction: str, lines, blocks) -> ClassLists:
        """The lists of one direction out of their addresses."""
        sizes = {"counts": lines, "indices": blocks}
        return ClassLists(
            *(
                cute.make_tensor(
                    getattr(args, f"{kind}_{direction}_{what}"), cute.make_layout(size)
                )
                for kind in ("partial", "full")
                for what, size in sizes.items()
            )
        )

    # ---------------------------------------------------------------- device

    @cute.kernel
    def kernel(self, grid: BlockGrid, classes: cute.Tensor, captured: tuple):
        """Write the class of each block; one warp each."""
        block = self.warp_in_grid()
        if block < grid.num_blocks:
            n_block = block % grid.num_cols
            m_block = (block // grid.num_cols) % grid.num_rows
            pair = block // (grid.num_cols * grid.num_rows)
            is_visible, is_hidden = self.seen(grid, captured, pair, m_block, n_block)
            if cute.arch.lane_idx() == 0:
                found = Int32(0)
                if is_visible:
                    found = Int32(FULL)
                    if is_hidden:
                        found = Int32(PARTIAL)
                classes[block] = found.to(Int8)

    def warp_in_grid(self) -> Int32:
        """The warp's number among those of all CTAs."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        return cute.arch.block_idx()[0] * WARPS_PER_CTA + warp

    @cute.jit
    def seen(self, grid: BlockGrid, tensors: tuple, pair: Int32, m_block: Int32, n_block: Int32):
        """(whether some element of a block is visible, whether some is hidden or past the end)."""
        batch, head = pair // grid.num_heads, pair % grid.num_heads
        first_q, first_k = m_block * grid.block_q, n_block * grid.block_k
        end_q = cutlass.min(first_q + grid.block_q, grid.seqlen_q)
        end_k = cutlass.min(first_k + grid.block_k, grid.seqlen_k)
        is_visible = Boolean(False)
        is_hidden = (first_q + grid.block_q > grid.seqlen_q) | (
            first_k + grid.block_k > grid.seqlen_k
        )
        info = SeqlenInfo(grid.seqlen_q, grid.seqlen_k, Int32(0), Int32(0))
        q, k = first_q, first_k
        while k < end_k and not (is_visible and is_hidden):
            some, every = Boolean(False), Boolean(True)
            for j in cutlass.range_constexpr(self.keys_per_lane):
                kv_idx = cutlass.min(k + WARP * j + cute.arch.lane_idx(), end_k - 1)
                for i in cutlass.range_constexpr(ROWS_PER_STEP):
                    q_idx = cutlass.min(q + i, end_q - 1)
                    place = (batch, head, q_idx, [kv_idx] * self.key.width)
                    shown = trace_mask_mod(self.mask_mod, place, tensors, info)[0]
                    some, every = some | shown, every & shown
            is_visible = is_visible | cute.arch.vote_any_sync(some)
            is_hidden = is_hidden | cute.arch.vote_any_sync(~every)
            q += ROWS_PER_STEP
            if q >= end_q:
                q = first_q
                k += WARP * self.keys_per_lane
        return is_visible, is_hidden

    @cute.kernel
    def list_blocks(
        self, grid: BlockGrid, classes: cute.Tensor, rows: ClassLists, cols: ClassLists
    ):
        """Write the lists of each row and each column of blocks; one warp each."""
        warp = self.warp_in_grid()
        if warp < grid.num_lines:
            lines_per_pair = grid.num_rows + grid.num_cols
            pair, line = warp // lines_per_pair, warp % lines_per_pair
            first = pair * grid.num_rows * grid.num_cols
            if line < grid.num_rows:
                row = pair * grid.num_rows + line
                begin = first + line * grid.num_cols
                self.list_line(classes, rows, row, begin, Int32(1), grid.num_cols)
            else:
                col = line - grid.num_rows
                begin = first + col
                col += pair * grid.num_cols
                self.list_line(classes, cols, col, begin, grid.num_cols, grid.num_rows)

    @cute.jit
    def list_line(
        self,
        classes: cute.Tensor,
        lists: ClassLists,
        line: Int32,
        begin: Int32,
        step: Int32,
        extent: Int32,
    ):
        """Lists of one line: its blocks' classes are at begin, begin + step, ..."""
        lane = cute.arch.lane_idx()
        num_partial, num_full = Int32(0), Int32(0)
        for base in cutlass.range(0, extent, WARP, unroll=1):
            found = self.class_of(classes, begin, step, base + lane, extent)
            num_partial += cute.arch.popc(cute.arch.vote_ballot_sync(found == PARTIAL))
            num_full += cute.arch.popc(cute.arch.vote_ballot_sync(found == FULL))
        if lane == 0:
            lists.partial_counts[line] = num_partial
            lists.full_counts[line] = num_full
        partial_before, full_before = Int32(0), Int32(0)
        for base in cutlass.range(0, extent, WARP, unroll=1):
            place = base + lane
            found = self.class_of(classes, begin, step, place, extent)
            partial = cute.arch.vote_ballot_sync(found == PARTIAL)
            full = cute.arch.vote_ballot_sync(found == FULL)
            if place < extent:
                first = line * extent
                self.put(lists.partial_indices, first, place, partial, partial_before, num_partial)
                self.put(lists.full_indices, first, place, full, full_before, num_full)
            partial_before += cute.arch.popc(partial)
            full_before += cute.arch.popc(full)

    @cute.jit
    def class_of(self, classes: cute.Tensor, begin, step, place, extent) -> Int32:
        """The class of a line's block number `place`; hidden past the end."""
        found = Int32(0)
        if place < extent:
            found = classes[begin + place * step].to(Int32)
        return found

    @cute.jit
    def put(self, indices: cute.Tensor, first, place, ballot, before, total):
        """Write a block's number where it belongs: listed ones first, then the others, in order.

        ballot: which of the warp's blocks are listed; before: listed ones ahead of them
        """
        lane = cute.arch.lane_idx()
        rank = before + cute.arch.popc(ballot & ((Int32(1) << lane) - 1))
        target = total + place - rank
        if ((ballot >> lane) & 1) != 0:
            target = rank
        indices[first + target] = place


# In profiles both kernels are told by name; the first has its own through the kernel protocol.
BlockMaskBuilder.list_blocks.set_name_prefix(
    "flash_block_lists", remove_cutlass_symbol=True, keep_mangled_name=False
)
