"""What the attention kernels of all architectures share: order of blocks, scores, rows, output.

A kernel class derives from `AttentionKernel` and adds how it loads operands and multiplies them. It
says where its threads are (`place`, `first_column`). A consumer, `c`, is any object with `acc_O`,
`row_max` and `row_sum`, in `first_weights` also `rP` and `o_scale`; the parameters are any with the
fields of ForwardParams that the steps here read.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from flash_cute.arguments import ForwardArguments
from flash_cute.device import epilogue, softmax
from flash_cute.device.mask import AttentionMask, BlockRange
from flash_cute.device.pack_gqa import Rows
from flash_cute.device.partials import RowMerger
from flash_cute.device.primitives import (
    as_rows_cols,
    column_offset,
    fresh_thread_idx,
    pack_halves,
)
from flash_cute.device.score import ScoreUnits, trace_mask_mod, trace_score_mod
from flash_cute.device.seqlen import SeqlenInfo
from flash_cute.device.tile_scheduler import Tile
from flash_cute.errors import InvalidProblem
from flash_cute.features import Feature
from flash_cute.specialization import ForwardSpecialization
from flash_cute.variant import NATIVE, callback_for


@dataclass(frozen=True)
class Work:
    """A tile with its sequence and its blocks of keys."""

    tile: Tile
    seqlen: SeqlenInfo
    blocks: BlockRange
    num_partial: Int32  # listed blocks of a block mask; 0 without one
    num_full: Int32
    is_empty: cutlass.Boolean  # a split without a block of its own


class AttentionKernel:
    """The common part of the kernel classes; see the module docstring.

    Contract: a derived class has `kernel` and `place`, and `rows_per_thread`, the rows that a
              thread has of its accumulators. One that visits blocks by `visit_range` and
              `visit_lists` has also `first_block` and `step`, which take and return the states of
              its loops.
    """

    label: ClassVar[str]  # of the kernel's name
    rows_per_thread: int
    lanes_per_row: ClassVar[int] = 4  # threads that share a row of the accumulators
    lacks: ClassVar[frozenset[Feature]] = frozenset()
    waits_by_itself: ClassVar[bool] = False  # split keys: see `await_kernel_before`

    @classmethod
    def config_for(cls, spec: ForwardSpecialization, config):
        """The config to run `spec` with, given the package's choice; for subclasses to override.

        Query heads are packed for the config that this returns, so spec has none packed yet.
        """
        return config

    def __init__(self, spec: ForwardSpecialization, config, description):
        if broken := config.check(spec):
            raise InvalidProblem(f"{config} cannot run {spec.label}: {'; '.join(broken)}")
        self.spec, self.config, self.description = spec, config, description
        self.dtype = description.dtype
        owner = "" if "label" in vars(type(self)) else type(self).__name__ + "_"
        self.name = f"{self.label}_{owner}{spec.label}_m{config.tile_m}n{config.tile_n}"
        self.score_mod = callback_for(spec.score_mod) if spec.score_mod is not None else None
        self.mask_mod = callback_for(spec.mask_mod) if spec.mask_mod is not None else None
        self.block_mod = callback_for(spec.block_mod) if spec.block_mod is not None else None
        self.smem_bytes = config.smem_bytes(spec)
        self.starts_early = self.waits_by_itself and spec.is_split
        self.mask = AttentionMask(
            is_causal=spec.is_causal,
            has_window_left=spec.has_window_left,
            has_window_right=spec.has_window_right,
            has_chunk=spec.has_chunk,
            tile_n=config.tile_n,
            column_offset=self.column_offset,
        )

    # ---------------------------------------------------------------- host

    def compile_args(self) -> tuple:
        """Arguments that stand for the real ones while compiling."""
        return self.description.compile_args()

    @cute.jit
    def __call__(self, *launch_args):
        """Host side: describe the launch from flat ForwardArguments, then launch."""
        num_arguments = len(ForwardArguments._fields)
        args = ForwardArguments(*launch_args[:num_arguments])
        params = self.description.params(args, launch_args[num_arguments:])
        self.kernel(params).launch(
            grid=[args.num_ctas, 1, 1],
            block=[self.config.num_threads, 1, 1],
            stream=args.stream,
            min_blocks_per_mp=self.config.ctas_per_sm,
            preferred_smem_carveout=100,  # given, as the DSL else asks the driver for its size
            use_pdl=self.starts_early,
        )

    # ---------------------------------------------------------------- device

    def await_kernel_before(self):
        """Wait for the kernel before this one in the stream.

        A step of decoding is three short kernels: counting of the parts, attention and merge. They
        are launched as programmatic dependent ones, whose CTAs are there before they may run.
        Contract: nothing that another kernel writes is read before, nor anything written.
        """
        if self.starts_early:
            cute.arch.griddepcontrol_wait()

    @cute.jit
    def blocks_of(self, p, tile: Tile, seqlen: SeqlenInfo):
        """(the blocks of keys of a tile, whether it has none of its own)."""
        first_query, num_queries = p.packing.queries(tile)
        blocks = self.mask.block_range(first_query, num_queries, seqlen, p.bounds)
        is_empty = cutlass.Boolean(False)
        if const_expr(self.spec.is_split):
            part = (tile.split, tile.num_splits, p.split_blocks)
            blocks, is_empty = self.mask.split_range(blocks, *part)
        return blocks, is_empty

    @staticmethod
    def column_offset(i: int) -> int:
        """Columns between a thread's first score and its i-th."""
        return column_offset(i)

    def first_column(self, c) -> Int32 | int:
        """The first column of O in this thread's warpgroup."""
        return 0

    # -- the order of blocks

    @cute.jit
    def visit_range(self, p, c, pipes, kv_state, work: Work):
        """All blocks of a tile: upper edge, full blocks, lower edge; returns the states."""
        blocks = work.blocks
        n_block = blocks.end - 1
        k_state, v_state = self.first_block(p, c, pipes, kv_state, work, n_block)
        if const_expr(self.mask.has_end):
            for _ in cutlass.range(n_block - blocks.full_end, unroll=1):
                n_block -= 1
                kv_state = (k_state, v_state)
                k_state, v_state = self.step(p, c, pipes, kv_state, work, n_block, True)
        for _ in cutlass.range(n_block - blocks.full_begin, unroll=1):
            n_block -= 1
            k_state, v_state = self.step(p, c, pipes, (k_state, v_state), work, n_block, False)
        if const_expr(self.mask.has_begin):
            for _ in cutlass.range(n_block - blocks.begin, unroll=1):
                n_block -= 1
                kv_state = (k_state, v_state)
                k_state, v_state = self.step(p, c, pipes, kv_state, work, n_block, True)
        return k_state, v_state

    @cute.jit
    def visit_lists(self, p, c, pipes, kv_state, work: Work):
        """All listed blocks of a tile: partial ones, full ones; returns the states.

        The kernel knows their numbers. A tile without any visits block 0 and sees nothing.
        """
        k_state, v_state = self.first_block(p, c, pipes, kv_state, work, None)
        num_left = cutlass.max(work.num_partial - 1, 0)
        for _ in cutlass.range(num_left, unroll=1):
            k_state, v_state = self.step(p, c, pipes, (k_state, v_state), work, None, True)
        num_full = work.num_partial + work.num_full - 1 - num_left
        num_edges = num_full
        if const_expr(not self.mask.has_end and not self.mask.has_begin):
            # Where no block can reach past the keys a loop without the question.
            has_edges = p.blocks.end_tile() * self.config.tile_n > work.seqlen.seqlen_k
            num_edges = cutlass.select_(has_edges, num_full, Int32(0))
            for _ in cutlass.range(num_full - num_edges, unroll=1):
                kv_state = (k_state, v_state)
                k_state, v_state = self.step(p, c, pipes, kv_state, work, None, False)
        for _ in cutlass.range(num_edges, unroll=1):
            kv_state = (k_state, v_state)
            k_state, v_state = self.step(p, c, pipes, kv_state, work, None, False, True)
        return k_state, v_state

    # -- scores

    @cute.jit
    def modify_scores(
        self,
        p,
        S: cute.Tensor,
        work: Work,
        n_block: Int32,
        place,
        is_masked: cutlass.Constexpr[bool],
        may_be_edge: cutlass.Constexpr[bool] = False,
        row_max: cute.Tensor | None = None,
    ):
        """Everything between Q K^T and the softmax: softcap, score_mod, then the masks.

        Units: with a score_mod and row_max, which is then the rows' maximum so far, scores are left
               as ``(score - row_max) * log2(e)``
        """
        row, col = place
        rows = p.packing.rows(work.tile, row, self.rows_per_thread, work.seqlen.seqlen_q)
        first_col = n_block * self.config.tile_n + col
        if const_expr(self.spec.has_softcap):
            softmax.softcap(S, p.scale_log2, p.softcap)
        elif const_expr(self.spec.negate_scores):
            S.store(-S.load())
        place_of_S = (work, rows, first_col, is_masked)
        if const_expr(self.spec.score_mod is not None):
            self.apply_score_mod(p, S, place_of_S, row_max)
        if const_expr(self.spec.mask_mod is not None):
            self.hide(self.mask_mod, p.captured.mask, S, place_of_S)
        if const_expr(self.spec.block_mod is not None and is_masked):
            if work.num_partial > 0:  # else the first block is a full one
                self.hide(self.block_mod, p.captured.block, S, (work, rows, first_col, True))
        if const_expr(is_masked):
            self.mask.apply(S, rows.q_idx, first_col, work.seqlen, p.bounds)
        elif const_expr(may_be_edge):
            blocks = work.blocks
            if n_block < blocks.full_begin or n_block >= blocks.full_end:
                self.mask.apply(S, rows.q_idx, first_col, work.seqlen, p.bounds)

    @cute.jit
    def hide_if_empty(self, S: cute.Tensor, work: Work):
        """Hide the first block of a tile that has none: one was visited all the same."""
        if const_expr(self.spec.has_block_mask):
            if work.num_partial + work.num_full == 0:
                S.fill(-Float32.inf)
        if const_expr(self.spec.is_split):
            if work.is_empty:
                S.fill(-Float32.inf)

    def apply_score_mod(self, p, S: cute.Tensor, place, row_max: cute.Tensor | None):
        """score_mod on every score of the thread; the units are those of `modify_scores`."""
        units = ScoreUnits(None if self.spec.has_softcap else p.scale_log2)
        for cells, indices in self.groups(self.score_mod, S, place):
            if row_max is not None:
                shift = softmax.finite_or_zero(row_max[cells[0][0]]) * -softmax.LOG2_E
                units = replace(units, unit=softmax.LOG2_E, shift=shift)
            products, tensors = [S[cell] for cell in cells], p.captured.score
            seqlen = place[0].seqlen
            new = trace_score_mod(self.score_mod, products, indices, tensors, seqlen, units)
            for cell, score in zip(cells, new, strict=True):
                S[cell] = score

    def hide(self, mask_mod, tensors, S: cute.Tensor, place):
        """Set the scores that a mask_mod does not show to -inf."""
        for cells, indices in self.groups(mask_mod, S, place):
            visible = trace_mask_mod(mask_mod, indices, tensors, place[0].seqlen)
            for cell, is_visible in zip(cells, visible, strict=True):
                S[cell] = cutlass.select_(is_visible, S[cell], -Float32.inf)

    def groups(self, callback, S: cute.Tensor, place):
        """Yield the thread's scores by the groups that a callback takes, and their indices.

        Shapes: place (work, rows, column of the first score, whether the block is an edge); a group
                is its places in S and (b, h, q_idx, one kv_idx for each)

        Rows past the queries get the index of the last one and so do, in edge blocks, columns past
        the keys, for a native callback: their scores count for nothing, but it may look them up in
        a table. What portable ones look up is within the table anyway, and the indices of a row
        are then sums of which the first part is shared.
        """
        work, rows, first_col, is_edge = place
        last_q, last_k = work.seqlen.seqlen_q - 1, cutlass.max(work.seqlen.seqlen_k - 1, 0)
        for r in range(cute.size(S, mode=[0])):
            h, q_idx = rows.heads[r], cutlass.min(rows.q_idx[r], last_q)
            for i in range(0, cute.size(S, mode=[1]), callback.key.width):
                columns = range(i, i + callback.key.width)
                kv_idx = [(first_col, self.column_offset(c)) for c in columns]
                if is_edge and callback.key.form == NATIVE:
                    kv_idx = [cutlass.min(col + offset, last_k) for col, offset in kv_idx]
                yield [(r, c) for c in columns], (work.tile.batch, h, q_idx, kv_idx)

    def scale_log2(self, p) -> Float32:
        """Factor from the scores as `modify_scores` leaves them to powers of two."""
        return Float32(softmax.LOG2_E) if self.spec.modifies_scores else p.scale_log2

    # -- from scores to weights: steps that another kind of attention overrides

    @cute.jit
    def first_weights(self, p, c, work: Work, acc_S):
        """P of a tile's first block of scores; starts the running maximum and sum."""
        S, scale_log2 = as_rows_cols(acc_S), self.scale_log2(p)
        softmax.softmax_step(S, c.row_max, c.row_sum, c.o_scale, scale_log2, 0.0, True)
        self.round_weights(acc_S, c.rP)

    @cute.jit
    def close_rows(self, p, c, work: Work, rows: Rows, factor, lse):
        """What a tile's rows of O must be multiplied by, and their log-sum-exp."""
        sinks_log2 = None
        if const_expr(self.spec.sink_dtype is not None):
            sinks_log2 = tuple(p.mSink[h].to(Float32) * softmax.LOG2_E for h in rows.heads)
            if const_expr(self.spec.is_split):  # it counts once
                is_first = work.tile.split == 0
                sinks_log2 = tuple(
                    cutlass.select_(is_first, sink, -Float32.inf) for sink in sinks_log2
                )
        state, scale_log2 = (c.row_max, c.row_sum), self.scale_log2(p)
        lanes = self.lanes_per_row
        softmax.finalize(*state, factor, lse, scale_log2, sinks_log2, lanes)

    @cute.jit
    def round_weights(self, weights, rP):
        """P = weights in the input dtype; accumulator and A fragment share one element order."""
        words = cute.recast_tensor(rP, Int32)
        for i in cutlass.range_constexpr(cute.size(words)):
            words[i] = pack_halves(weights[2 * i], weights[2 * i + 1], self.dtype)

    # -- output

    @cute.jit
    def store(self, p, c, work: Work):
        """Close the rows, scale them and write this warpgroup's columns of the tile."""
        rows, factor = self.store_lse(p, c, work, self.place(fresh_thread_idx())[0])
        O = as_rows_cols(c.acc_O)
        softmax.scale_rows(O, factor)
        self.store_columns(p, O, rows, work, self.first_column(c))
        if const_expr(self.spec.is_split and self.config.merges_parts):
            self.merge_parts(p, work, rows)

    @cute.jit
    def store_lse(self, p, c, work: Work, first_row: Int32):
        """Close the rows and write their lse; returns them and what O must be multiplied by."""
        tile, seqlen = work.tile, work.seqlen
        rows = p.packing.rows(tile, first_row, self.rows_per_thread, seqlen.seqlen_q)
        factor = cute.make_rmem_tensor(self.rows_per_thread, Float32)
        lse = cute.make_rmem_tensor(self.rows_per_thread, Float32)
        self.close_rows(p, c, work, rows, factor, lse)
        if const_expr(self.spec.is_split):
            if tile.num_splits > 1:
                self.write_lse(p.parts.lse, self.part_of(p, tile), lse, rows, seqlen)
            elif p.mLSE.iterator.toint() != 0:
                self.write_lse(p.mLSE, self.batch_of(tile), lse, rows, seqlen)
        elif const_expr(self.spec.has_lse):
            self.write_lse(p.mLSE, self.batch_of(tile), lse, rows, seqlen)
        return rows, factor

    @cute.jit
    def write_lse(self, mLSE: cute.Tensor, batch, lse: cute.Tensor, rows: Rows, seqlen: SeqlenInfo):
        """Write the log-sum-exp of rows, of the results or of a part."""
        mLSE = cute.domain_offset((seqlen.offset_q, 0), mLSE[None, None, batch])
        lane = fresh_thread_idx() % 32
        epilogue.store_lse(lse, mLSE, rows, lane, seqlen.seqlen_q, self.lanes_per_row)

    def batch_of(self, tile: Tile):
        """The batch of a tile's results."""
        return 0 if self.spec.is_packed_q else tile.batch

    def part_of(self, p, tile: Tile):
        """The batch of a part's results in the workspace."""
        return self.batch_of(tile) + tile.split * self.batches_of_part(p)

    def batches_of_part(self, p):
        """Batches of the workspace that a part has, of all sequences."""
        return 1 if self.spec.is_packed_q else p.sequences.batch

    @cute.jit
    def store_columns(self, p, O: cute.Tensor, rows: Rows, work: Work, first_col: Int32 | int):
        """Write columns of finished rows, as ``as_rows_cols`` views them, from first_col on."""
        place = (rows, work.seqlen, p.head_dim_v, first_col)
        if const_expr(self.spec.is_split):
            if work.tile.num_splits > 1:
                self.write_columns(p.parts.out, self.part_of(p, work.tile), O, *place)
            else:
                self.write_columns(p.mO, self.batch_of(work.tile), O, *place)
        else:
            self.write_columns(p.mO, self.batch_of(work.tile), O, *place)

    @cute.jit
    def write_columns(
        self, mO: cute.Tensor, batch, O: cute.Tensor, rows: Rows, seqlen, head_dim_v, first_col
    ):
        """Write columns of the results, or in float32 of a part."""
        mO = cute.domain_offset((seqlen.offset_q, first_col, 0), mO[None, None, None, batch])
        num_cols, lane = head_dim_v - first_col, fresh_thread_idx() % 32
        if const_expr(self.lanes_per_row == 1):
            epilogue.store_row(O, mO, rows, seqlen.seqlen_q, num_cols)
        elif const_expr(mO.element_type is Float32):
            epilogue.store_floats(O, mO, rows, lane, seqlen.seqlen_q, num_cols)
        else:
            epilogue.store_output(O, mO, rows, lane, seqlen.seqlen_q, num_cols)

    @cute.jit
    def merge_parts(self, p, work: Work, rows: Rows):
        """Merge the rows of a warp if it has written the last part of them, and is to merge."""
        tile, seqlen = work.tile, work.seqlen
        if p.parts.has_arrivals() and tile.num_splits > 1:
            first_query, _ = p.packing.queries(tile)
            first_row = self.batch_of(tile) * p.sequences.seqlen_q + seqlen.offset_q + first_query
            warps = self.config.num_threads // 32
            tile_idx = first_row * p.scheduler.num_heads + tile.head
            if p.parts.is_last(tile_idx * warps + fresh_thread_idx() // 32, tile.num_splits):
                place, batch = (seqlen.offset_q, 0, 0), self.batch_of(tile)
                RowMerger(
                    out=cute.domain_offset((*place, batch), p.parts.out),
                    lse=cute.domain_offset((seqlen.offset_q, 0, batch), p.parts.lse),
                    mO=cute.domain_offset(place, p.mO[None, None, None, batch]),
                    mLSE=cute.domain_offset((seqlen.offset_q, 0), p.mLSE[None, None, batch]),
                    has_lse=p.mLSE.iterator.toint() != 0,
                    end=seqlen.seqlen_q,
                    num_parts=tile.num_splits,
                    step=self.batches_of_part(p),
                    head_dim=p.head_dim_v,
                    tile_dv=self.spec.tile_dv,
                ).merge(rows, self.lanes_per_row)
