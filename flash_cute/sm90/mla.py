"""Attention with a second query for Hopper (absorbed MLA): scores are q·k + qv·v.

Algorithm, per tile of 64 (query, head) rows that share their keys, from the last block of keys to
the first. Blocks belong to the two consumer warpgroups in turn; the owner of block j computes
    S = Q K_j^T + Qv V_j^T               wgmma, 64 x tile_n
    the maximum of each row, at least as high as that of the block before; P = exp2(S * scale - max)
and puts P and the maxima into shared memory, where P takes the place of K_j. Then both compute
    O = O + P V_j                        wgmma, each for half of the columns, O rescaled before
so that V_j is loaded once for both products, and 64 x 512 outputs fit into registers.

Roles (128 threads each; the pipelines between them: mla_pipes.py):
    warpgroup 0        mla_load.py: one warp issues every TMA and fetches tiles; three copy queries
    warpgroups 1, 2    mma: the blocks in turn, and their half of the output

Timeline (owner of j | other): wait K_j, V_j, S, softmax, P | O of j - 1, wait; both at EXCHANGE: O
of j, free the stage; the other owns j + 1. One block is computed while the next one is loaded.

Budget: shared memory in MlaConfigSm90.smem_bytes; registers per consumer thread hold O (128), S and
P (tile_n / 2, tile_n / 4).

Hazards: a warp that has its scores may not write P before the owner's other warps have read K_j
(OWN); the last reader of P_j frees the stage with V_j; row maxima have a slot for each stage.
"""

import enum
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import warpgroup

from flash_cute.device import softmax
from flash_cute.device.announce import TILE_STAGES
from flash_cute.device.forward import Work
from flash_cute.device.pack_gqa import ROW_STEP
from flash_cute.device.primitives import (
    as_rows_cols,
    column_offset,
    fresh_thread_idx,
    pack_halves,
)
from flash_cute.device.tma import TmaOperand
from flash_cute.sm90.base import ROWS_PER_THREAD, ROWS_PER_WARP, AttentionKernelSm90
from flash_cute.sm90.config import THREADS_PER_WARPGROUP, MlaConfigSm90
from flash_cute.sm90.mla_load import MlaLoadWarps
from flash_cute.sm90.mla_params import HALVES, MlaDescription, MlaParams
from flash_cute.sm90.mla_pipes import MlaExchange, MlaPipes, MlaTensors
from flash_cute.sm90.pipes import WARPS_PER_WARPGROUP
from flash_cute.specialization import ForwardSpecialization


class Barrier(enum.IntEnum):
    """Named barriers; 0 is the CTA's own."""

    EXCHANGE = 1  # both warpgroups: what one has written, the other may read
    OWN = 2  # + consumer warpgroup: its warps have their scores


@dataclass(frozen=True)
class Consumer:
    """What a consumer thread holds across tiles: its place, operand descriptors and registers."""

    warpgroup: Int32
    tSrQ: cute.Tensor
    tSrK: cute.Tensor
    tSrQv: cute.Tensor
    tSrV: cute.Tensor
    tOrP: cute.Tensor
    tOrV: cute.Tensor  # the warpgroup's half of the columns
    smem: MlaTensors
    acc_O: cute.Tensor
    row_max: cute.Tensor  # (rows,) f32, as row_sum and o_scale; the same in both warpgroups
    row_sum: cute.Tensor  # of the warpgroup's own blocks
    o_scale: cute.Tensor


class FlashAttentionMlaSm90(AttentionKernelSm90):
    """One CTA = a stream of (m_block, key/value head, batch) tiles; see the module docstring."""

    label = "flash_mla_sm90"

    def __init__(self, spec: ForwardSpecialization, config: MlaConfigSm90):
        super().__init__(spec, config, MlaDescription(spec, config))
        self.exchange = MlaExchange(spec, config, self.dtype)
        self.num_load_warps = WARPS_PER_WARPGROUP
        self.loader = MlaLoadWarps(self.exchange, self.mask)

    # ---------------------------------------------------------------- device

    def tma_operands(self, p: MlaParams) -> tuple[TmaOperand, ...]:
        """What TMA reads."""
        return (p.v,) if self.spec.is_only_qv else (p.k, p.v)

    # -- consumers

    @cute.jit
    def mma(self, p: MlaParams, smem: MlaTensors, pipes: MlaPipes):
        """Consumer warpgroup: scores of every other block, and half of the output's columns."""
        consumer = pipeline.PipelineUserType.Consumer
        q_state = pipeline.make_pipeline_state(consumer, 1)
        state = pipeline.make_pipeline_state(consumer, self.config.num_stages)
        tile_state = pipeline.make_pipeline_state(consumer, TILE_STAGES)
        c = self.start_consumer(p, smem)
        pipes.tile.consumer_wait(tile_state)
        m_block = smem.tiles[0, tile_state.index]
        while m_block >= 0:
            work = self.receive(p, smem, tile_state.index)
            c.acc_O.fill(0.0)
            c.row_max.fill(-Float32.inf)
            c.row_sum.fill(0.0)
            pipes.q.consumer_wait(q_state)
            last = work.blocks.end - 1
            for i in cutlass.range(work.blocks.end - work.blocks.begin, unroll=1):
                state = self.step(p, c, pipes, state, work, last - i, i % 2 == c.warpgroup)
            pipes.q.consumer_release(q_state)
            q_state.advance()
            self.add_sums(c)
            # Read anew: the tile's place then occupies no registers during the loop.
            self.store(p, c, self.receive(p, smem, tile_state.index))
            pipes.tile.consumer_release(tile_state)
            tile_state.advance()
            pipes.tile.consumer_wait(tile_state)
            m_block = smem.tiles[0, tile_state.index]

    def start_consumer(self, p: MlaParams, smem: MlaTensors) -> Consumer:
        """Partition the operands for this warpgroup and allocate its registers."""
        tile_m, tile_n, half = self.config.tile_m, self.config.tile_n, self.spec.tile_dv // HALVES
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        index = warp // WARPS_PER_WARPGROUP - 1
        # Descriptors are the same for a whole warpgroup: slice by its first thread.
        qk, pv = p.mma_qk.get_slice(0), p.mma_pv.get_slice(0)
        sVt = cute.make_tensor(smem.sV.iterator, cute.select(smem.sV.layout, mode=[1, 0, 2]))
        sVt = cute.local_tile(sVt, (half, tile_n), (index, 0, None))
        return Consumer(
            warpgroup=index,
            tSrQ=qk.make_fragment_A(qk.partition_A(smem.sQ)),
            tSrK=qk.make_fragment_B(qk.partition_B(smem.sK)),
            tSrQv=qk.make_fragment_A(qk.partition_A(smem.sQv)),
            tSrV=qk.make_fragment_B(qk.partition_B(smem.sV)),
            tOrP=pv.make_fragment_A(pv.partition_A(smem.sP)),
            tOrV=pv.make_fragment_B(pv.partition_B(sVt)),
            smem=smem,
            acc_O=cute.make_rmem_tensor(pv.partition_shape_C((tile_m, half)), Float32),
            row_max=cute.make_rmem_tensor(ROWS_PER_THREAD, Float32),
            row_sum=cute.make_rmem_tensor(ROWS_PER_THREAD, Float32),
            o_scale=cute.make_rmem_tensor(ROWS_PER_THREAD, Float32),
        )

    @cute.jit
    def step(self, p: MlaParams, c: Consumer, pipes: MlaPipes, state, work: Work, n_block, is_own):
        """One block: its weights by their owner, then O; returns the advanced state."""
        if is_own:
            acc_S = self.scores(p, c, pipes, state)
            self.weigh(p, c, work, n_block, acc_S)
            self.publish(c, state.index, work, n_block, acc_S)
        else:
            pipes.low.consumer_wait(state)
            pipes.high.consumer_wait(state)
        self.meet()
        if not is_own:
            row, _ = self.place(fresh_thread_idx())
            maxima = [c.smem.maxima[row + ROW_STEP * r, state.index] for r in (0, 1)]
            scale_log2 = self.scale_log2(p)
            softmax.follow_max(c.row_max, c.row_sum, c.o_scale, maxima, scale_log2)
        if softmax.any_rescaled(c.o_scale, c.row_sum):
            softmax.scale_rows(as_rows_cols(c.acc_O), c.o_scale)
        P, V = c.tOrP[None, None, None, state.index], c.tOrV[None, None, None, state.index]
        self.issue_gemm(p.mma_pv, c.acc_O, P, V, False)
        warpgroup.wait_group(0)
        pipes.low.consumer_release(state)
        pipes.high.consumer_release(state)
        state.advance()
        return state

    @cute.jit
    def scores(self, p: MlaParams, c: Consumer, pipes: MlaPipes, state):
        """S of a block, whose halves are used as they come."""
        shape = p.mma_qk.partition_shape_C((self.config.tile_m, self.config.tile_n))
        acc_S = cute.make_rmem_tensor(shape, Float32)
        V = c.tSrV[None, None, None, state.index]
        is_first = True
        pipes.low.consumer_wait(state)
        if const_expr(not self.spec.is_only_qv):
            self.issue_gemm(p.mma_qk, acc_S, c.tSrQ, c.tSrK[None, None, None, state.index], True)
            is_first = False
        self.issue_gemm(p.mma_qk, acc_S, c.tSrQv, V, is_first, (0, HALVES))
        pipes.high.consumer_wait(state)
        self.issue_gemm(p.mma_qk, acc_S, c.tSrQv, V, False, (1, HALVES))
        warpgroup.wait_group(0)
        return acc_S

    @cute.jit
    def weigh(self, p: MlaParams, c: Consumer, work: Work, n_block: Int32, acc_S):
        """Weights of a block in place of its scores; the running maximum and sum follow."""
        S = as_rows_cols(acc_S)
        place = self.place(fresh_thread_idx())
        self.modify_scores(p, S, work, n_block, place, False, may_be_edge=True)
        if const_expr(self.spec.is_split):
            if work.is_empty:
                S.fill(-Float32.inf)
        scale_log2, threshold = self.scale_log2(p), self.config.rescale_threshold
        softmax.softmax_step(S, c.row_max, c.row_sum, c.o_scale, scale_log2, threshold, False)

    @cute.jit
    def publish(self, c: Consumer, stage: Int32, work: Work, n_block: Int32, acc_S):
        """Put P = weights in the input dtype and the maxima where both warpgroups find them."""
        cute.arch.barrier(
            barrier_id=Barrier.OWN + c.warpgroup, number_of_threads=THREADS_PER_WARPGROUP
        )
        if const_expr(self.spec.is_ragged_k):
            # Rows of V that belong to no key: 0 times their NaN would be NaN.
            num_valid = work.seqlen.seqlen_k - n_block * self.config.tile_n
            if num_valid < self.config.tile_n:
                self.zero_rows(c.smem.sV[None, None, stage], cutlass.max(num_valid, 0))
        thread = fresh_thread_idx()
        first_row, first_col = self.place(thread)
        S, sP = as_rows_cols(acc_S), c.smem.sP[None, None, stage]
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            row = first_row + ROW_STEP * r
            if thread % 4 == 0:
                c.smem.maxima[row, stage] = c.row_max[r]
            for i in cutlass.range_constexpr(0, cute.size(S, mode=[1]), 2):
                pair = cute.make_rmem_tensor(2, self.dtype)
                word = cute.recast_tensor(pair, Int32)
                word[0] = pack_halves(S[r, i], S[r, i + 1], self.dtype)
                slot = cute.local_tile(sP, (1, 2), (row, (first_col + column_offset(i)) // 2))
                cute.autovec_copy(pair, slot[0, None])
        cute.arch.fence_view_async_shared()

    @cute.jit
    def meet(self):
        """Wait for the other warpgroup."""
        cute.arch.barrier(
            barrier_id=Barrier.EXCHANGE, number_of_threads=HALVES * THREADS_PER_WARPGROUP
        )

    @cute.jit
    def add_sums(self, c: Consumer):
        """Add the row sums of the other warpgroup's blocks to those of the own."""
        sums, thread = c.smem.sums, fresh_thread_idx() % THREADS_PER_WARPGROUP
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            sums[r, thread, c.warpgroup] = c.row_sum[r]
        self.meet()
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            c.row_sum[r] = c.row_sum[r] + sums[r, thread, 1 - c.warpgroup]

    def place(self, thread: Int32):
        """First row within the tile and column within a key block of a consumer thread.

        Its rows are 8 apart; its columns as `column_offset` says.
        """
        row = (thread >> 5 & WARPS_PER_WARPGROUP - 1) * ROWS_PER_WARP + (thread >> 2 & 7)
        return row, 2 * (thread & 3)

    def first_column(self, c: Consumer) -> Int32:
        """The first column of O in this thread's warpgroup."""
        return c.warpgroup * (self.spec.tile_dv // HALVES)
