"""FlashAttention forward for Hopper: TMA loads, wgmma, warp-specialised, persistent.

Algorithm, per tile of tile_m queries of one head, keys visited from the last block to the first:
    S = Q K_j^T                          wgmma, issued while the softmax of block j+1 is finished
    mask S in edge blocks; P = exp2(S * scale - max), with the maximum of earlier blocks where it
    still serves (device/softmax.py); rescale O when it had to rise
    O = O + P V_j                        wgmma with P from registers
    out = O / row_sum, lse = log(row_sum) + max

Roles (128 threads each; the pipelines between them: pipes.py):
    warpgroup 0        load.py: one warp issues every TMA and fetches tiles; the others idle
    warpgroups 1..n    mma: 64 query rows each; softmax and both products; write their own output

Timeline of one consumer warpgroup (ping-pong: the turn at the tensor cores passes at ``|``):
    issue S_j, issue O += P V_{j+1} | wait S_j, softmax, wait O, rescale O, P = bf16(S_j), ...

Budget: shared memory in ForwardConfigSm90.smem_bytes; registers per consumer thread hold S
(tile_n / 2), P (tile_n / 4) and O (tile_dv / 2).
"""

import enum
from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import warpgroup

from flash_cute.device import softmax
from flash_cute.device.announce import TILE_STAGES
from flash_cute.device.forward import Work
from flash_cute.device.gather import GatherWarps
from flash_cute.device.load import LoadWarp
from flash_cute.device.primitives import as_rows_cols, fresh_thread_idx
from flash_cute.device.tma import TmaOperand
from flash_cute.sm90.base import ROWS_PER_THREAD, ROWS_PER_WARP, AttentionKernelSm90
from flash_cute.sm90.config import THREADS_PER_WARPGROUP, ForwardConfigSm90
from flash_cute.sm90.params import ForwardParams, LaunchDescriptionSm90
from flash_cute.sm90.pipes import WARPS_PER_WARPGROUP, Exchange, Pipes, SharedTensors
from flash_cute.specialization import ForwardSpecialization

ROWS_PER_WARPGROUP = 64


class Barrier(enum.IntEnum):
    """Named barriers; 0 is the CTA's own."""

    TURN = 1  # + consumer warpgroup: its turn at the tensor cores
    CLEARED = 4  # + consumer warpgroup: its threads have cleared the tail of V, or of Q


@dataclass(frozen=True)
class Consumer:
    """What a consumer thread holds across tiles: its place, operand descriptors and registers."""

    warpgroup: Int32
    tSrQ: cute.Tensor
    tSrK: cute.Tensor
    tOrV: cute.Tensor
    sV: cute.Tensor
    blocks: cute.Tensor
    acc_O: cute.Tensor
    rP: cute.Tensor
    row_max: cute.Tensor  # (rows,) f32, as row_sum and o_scale
    row_sum: cute.Tensor
    o_scale: cute.Tensor


class FlashAttentionForwardSm90(AttentionKernelSm90):
    """One CTA = a stream of (m_block, head, batch) tiles; see the module docstring.

    Contract: a derived class overrides steps, usually of those under "from scores to weights", and
              is passed as `kernel=`. It finds what is compiled in in self.spec and self.config.
              What its steps no longer do it says in `lacks`; calls that need it are refused.
    """

    label = "flash_fwd_sm90"

    def __init__(self, spec: ForwardSpecialization, config: ForwardConfigSm90):
        super().__init__(spec, config, LaunchDescriptionSm90(spec, config))
        self.exchange = Exchange(spec, config, self.dtype)
        self.num_load_warps = WARPS_PER_WARPGROUP if spec.gathers_keys else 1
        if spec.gathers_keys:
            self.loader = GatherWarps(self.exchange, self.mask, (0, self.num_load_warps))
        else:
            self.loader = LoadWarp(self.exchange, self.mask)

    # ---------------------------------------------------------------- device

    def tma_operands(self, p: ForwardParams) -> tuple[TmaOperand, ...]:
        """What TMA reads."""
        return p.q, p.k, p.v

    # -- consumers

    @cute.jit
    def mma(self, p: ForwardParams, smem: SharedTensors, pipes: Pipes):
        """Consumer warpgroup: both products, the softmax and the output of its 64 rows."""
        consumer = pipeline.PipelineUserType.Consumer
        q_state = pipeline.make_pipeline_state(consumer, 1)
        k_state = pipeline.make_pipeline_state(consumer, self.config.num_stages)
        v_state = pipeline.make_pipeline_state(consumer, self.config.num_stages)
        tile_state = pipeline.make_pipeline_state(consumer, TILE_STAGES)
        c = self.start_consumer(p, smem)
        num_used = self.config.rows_used(self.spec)
        if const_expr(num_used < self.config.tile_m):
            # Rows that no load writes: NaN in them would not reach the others, but cost them time.
            self.clear_rows(c, smem.sQ[None, None, 0], Int32(num_used))
        self.grant_first_turn(c)
        pipes.tile.consumer_wait(tile_state)
        m_block = smem.tiles[0, tile_state.index]
        while m_block >= 0:
            work = self.receive(p, smem, tile_state.index)
            outer = work.blocks
            c.acc_O.fill(0.0)
            pipes.q.consumer_wait(q_state)
            if const_expr(self.config.skips_blocks):
                work = self.visible_blocks(p, c, work)
                num_above = outer.end - work.blocks.end
                k_state, v_state = self.skip(pipes, (k_state, v_state), num_above)
            kv_state = (k_state, v_state)
            if const_expr(self.spec.has_block_mask):
                k_state, v_state = self.visit_lists(p, c, pipes, kv_state, work)
            else:
                k_state, v_state = self.visit_range(p, c, pipes, kv_state, work)
            pipes.q.consumer_release(q_state)
            q_state.advance()
            v_state = self.last_product(p, c, pipes, v_state)
            if const_expr(self.config.skips_blocks):
                num_below = work.blocks.begin - outer.begin
                k_state, v_state = self.skip(pipes, (k_state, v_state), num_below)
            # Read anew: the tile's place then occupies no registers during the loops.
            self.store(p, c, self.receive(p, smem, tile_state.index))
            pipes.tile.consumer_release(tile_state)
            tile_state.advance()
            pipes.tile.consumer_wait(tile_state)
            m_block = smem.tiles[0, tile_state.index]

    @cute.jit
    def visible_blocks(self, p: ForwardParams, c: Consumer, work: Work) -> Work:
        """The same work, with only those blocks that the warpgroup's own rows see any key of.

        A warpgroup whose rows are all past the queries takes the blocks of the last query: the
        bounds of rows that are not there contradict each other.
        """
        if const_expr(p.packing.heads == 1 and not self.spec.is_split):
            first_row = work.tile.m_block * self.config.tile_m + c.warpgroup * ROWS_PER_WARPGROUP
            first_row = cutlass.min(first_row, work.seqlen.seqlen_q - 1)
            blocks = self.mask.block_range(
                first_row, ROWS_PER_WARPGROUP, work.seqlen, p.bounds, work.blocks
            )
            work = replace(work, blocks=blocks)
        return work

    @cute.jit
    def skip(self, pipes: Pipes, kv_state, num_blocks: Int32):
        """Free the K and V of blocks that hold nothing for this warpgroup."""
        k_state, v_state = kv_state
        for _ in cutlass.range(num_blocks, unroll=1):
            pipes.k.consumer_wait(k_state)  # else the release could count for an earlier filling
            pipes.k.consumer_release(k_state)
            pipes.v.consumer_wait(v_state)
            pipes.v.consumer_release(v_state)
            k_state.advance()
            v_state.advance()
        return k_state, v_state

    def start_consumer(self, p: ForwardParams, smem: SharedTensors) -> Consumer:
        """Partition the operands for this thread and allocate its registers."""
        tile_m, tile_n, tile_dv = self.config.tile_m, self.config.tile_n, self.spec.tile_dv
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        index = warp // WARPS_PER_WARPGROUP - 1
        # Descriptors are the same for a whole warpgroup: slice by its first thread.
        wg_qk = p.mma_qk.get_slice(index * THREADS_PER_WARPGROUP)
        wg_pv = p.mma_pv.get_slice(index * THREADS_PER_WARPGROUP)
        sVt = cute.make_tensor(smem.sV.iterator, cute.select(smem.sV.layout, mode=[1, 0, 2]))
        return Consumer(
            warpgroup=index,
            tSrQ=wg_qk.make_fragment_A(wg_qk.partition_A(smem.sQ))[None, None, None, 0],
            tSrK=wg_qk.make_fragment_B(wg_qk.partition_B(smem.sK)),
            tOrV=wg_pv.make_fragment_B(wg_pv.partition_B(sVt)),
            sV=smem.sV,
            blocks=smem.blocks,
            acc_O=cute.make_rmem_tensor(wg_pv.partition_shape_C((tile_m, tile_dv)), Float32),
            rP=cute.make_rmem_tensor(wg_pv.partition_shape_A((tile_m, tile_n)), self.dtype),
            row_max=cute.make_rmem_tensor(ROWS_PER_THREAD, Float32),
            row_sum=cute.make_rmem_tensor(ROWS_PER_THREAD, Float32),
            o_scale=cute.make_rmem_tensor(ROWS_PER_THREAD, Float32),
        )

    @cute.jit
    def first_block(self, p: ForwardParams, c: Consumer, pipes: Pipes, kv_state, work, n_block):
        """Scores and weights of a tile's first block; there is no product with V to overlap yet."""
        k_state, v_state = kv_state
        acc_S = self.new_scores(p)
        pipes.k.consumer_wait(k_state)
        n_block = self.block_in(c, k_state, n_block)
        self.issue_gemm(p.mma_qk, acc_S, c.tSrQ, c.tSrK[None, None, None, k_state.index], True)
        place = self.place(fresh_thread_idx())
        warpgroup.wait_group(0)
        pipes.k.consumer_release(k_state)
        S = as_rows_cols(acc_S)
        self.modify_scores(p, S, work, n_block, place, True)
        self.hide_if_empty(S, work)
        self.first_weights(p, c, work, acc_S)
        self.clear_tail(c, pipes, v_state, work, n_block)
        k_state.advance()
        return k_state, v_state

    @cute.jit
    def block_in(self, c: Consumer, k_state, n_block):
        """Number of the block in a stage of K: known, or told by the load warp."""
        if const_expr(self.spec.has_block_mask):
            n_block = c.blocks[k_state.index]
        return n_block

    @cute.jit
    def clear_tail(self, c: Consumer, pipes: Pipes, v_state, work: Work, n_block: Int32):
        """Zero the rows of a V block that belong to no key: 0 times their NaN would be NaN.

        Every warpgroup clears all of them for itself, so that none waits for another's turn.
        """
        if const_expr(self.spec.is_ragged_k):
            num_valid = work.seqlen.seqlen_k - n_block * self.config.tile_n
            if num_valid < self.config.tile_n:
                pipes.v.consumer_wait(v_state)
                first_row = cutlass.max(num_valid, 0)
                self.clear_rows(c, c.sV[None, None, v_state.index], first_row)

    @cute.jit
    def clear_rows(self, c: Consumer, sX: cute.Tensor, first_row: Int32):
        """`zero_rows`, and wait for the warpgroup's threads."""
        self.zero_rows(sX, first_row)
        cute.arch.barrier(
            barrier_id=Barrier.CLEARED + c.warpgroup, number_of_threads=THREADS_PER_WARPGROUP
        )

    @cute.jit
    def step(
        self,
        p: ForwardParams,
        c: Consumer,
        pipes: Pipes,
        kv_state,
        work: Work,
        n_block: Int32 | None,
        is_masked: cutlass.Constexpr[bool],
        may_be_edge: cutlass.Constexpr[bool] = False,
    ):
        """One block: S of this one and O of the one before share the tensor cores, then softmax.

        Args:
            may_be_edge: it is not masked throughout, but the mask may cut it.

        Contract: returns the advanced (k_state, v_state), which the caller rebinds.
        """
        k_state, v_state = kv_state
        acc_S = self.new_scores(p)
        pipes.k.consumer_wait(k_state)
        n_block = self.block_in(c, k_state, n_block)
        self.take_turn(c)
        self.issue_gemm(p.mma_qk, acc_S, c.tSrQ, c.tSrK[None, None, None, k_state.index], True)
        pipes.v.consumer_wait(v_state)
        self.issue_gemm(p.mma_pv, c.acc_O, c.rP, c.tOrV[None, None, None, v_state.index], False)
        self.pass_turn(c)
        place = self.place(fresh_thread_idx())  # while the product is under way
        warpgroup.wait_group(1)
        pipes.k.consumer_release(k_state)
        S = as_rows_cols(acc_S)
        row_max = c.row_max if self.has_relative_scores(is_masked) else None
        self.modify_scores(p, S, work, n_block, place, is_masked, may_be_edge, row_max)
        self.next_weights(p, c, pipes, work, v_state, acc_S, is_masked)
        k_state.advance()
        v_state.advance()
        if const_expr(self.spec.has_block_mask):  # else the last keys come first
            self.clear_tail(c, pipes, v_state, work, n_block)
        return k_state, v_state

    def place(self, thread: Int32):
        """First row within the query tile and column within a key block of a consumer thread.

        Its rows are 8 apart; its columns as `column_offset` says.
        """
        row = (thread // 32 - WARPS_PER_WARPGROUP) * ROWS_PER_WARP + thread % 32 // 4
        return row, 2 * (thread % 4)

    def has_relative_scores(self, is_masked: bool) -> bool:
        """Whether `weigh_speculatively` gets scores relative to the maximum, in powers of two.

        What a score_mod adds to a row and the maximum then cost one multiply-add together. A
        derived class with steps of its own gets scores as they are.
        """
        own = FlashAttentionForwardSm90
        steps = ("next_weights", "weigh_speculatively")
        is_ours = all(getattr(type(self), step) is getattr(own, step) for step in steps)
        return self.spec.score_mod is not None and not is_masked and is_ours

    # -- from scores to weights: the steps that another kind of attention overrides

    @cute.jit
    def next_weights(
        self,
        p: ForwardParams,
        c: Consumer,
        pipes: Pipes,
        work: Work,
        v_state,
        acc_S,
        is_masked: cutlass.Constexpr[bool],
    ):
        """P of a later block, as soon as `finish_product` says that the P before is used up."""
        if const_expr(is_masked):
            self.weigh_exactly(p, c, pipes, v_state, acc_S)
        else:
            self.weigh_speculatively(p, c, pipes, v_state, acc_S)

    @cute.jit
    def weigh_exactly(self, p: ForwardParams, c: Consumer, pipes: Pipes, v_state, acc_S):
        """Weights against the true running maximum; rescales O where it rose enough."""
        threshold = self.config.rescale_threshold
        S = as_rows_cols(acc_S)
        scale_log2 = self.scale_log2(p)
        softmax.softmax_step(S, c.row_max, c.row_sum, c.o_scale, scale_log2, threshold, False)
        O = as_rows_cols(c.acc_O)
        if const_expr(self.config.waits_late):
            if softmax.any_rescaled(c.o_scale, c.row_sum):
                self.finish_product(pipes, v_state)
                self.round_weights(acc_S, c.rP)
                softmax.scale_rows(O, c.o_scale)
            else:
                self.finish_product(pipes, v_state)
                self.round_weights(acc_S, c.rP)
        else:
            self.finish_product(pipes, v_state)
            self.round_weights(acc_S, c.rP)
            if softmax.any_rescaled(c.o_scale, c.row_sum):
                softmax.scale_rows(O, c.o_scale)

    @cute.jit
    def weigh_speculatively(self, p: ForwardParams, c: Consumer, pipes: Pipes, v_state, acc_S):
        """Weights against the last known maximum; falls back where they outgrow it.

        The scores stay in registers until the check, so the fall-back needs no second product.
        """
        S = as_rows_cols(acc_S)
        weights = self.new_scores(p)
        headroom = self.config.rescale_threshold
        block_sum = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
        row_max, scale_log2 = c.row_max, self.scale_log2(p)
        if const_expr(self.has_relative_scores(False)):
            row_max, scale_log2 = softmax.relative_max(c.row_max), Float32(1.0)
        softmax.speculative_step(S, as_rows_cols(weights), row_max, block_sum, scale_log2)
        if const_expr(self.has_relative_scores(False)):
            softmax.mark_unseen(c.row_max, block_sum)
        is_outgrown = softmax.any_outgrown(block_sum, headroom)
        if const_expr(not self.config.waits_late):
            self.finish_product(pipes, v_state)
            self.round_weights(weights, c.rP)
        if is_outgrown:
            if const_expr(self.has_relative_scores(False)):
                softmax.catch_up_relative(S, c.row_max, c.row_sum, c.o_scale, block_sum, headroom)
            else:
                softmax.catch_up(
                    S, c.row_max, c.row_sum, c.o_scale, block_sum, scale_log2, headroom
                )
            if const_expr(self.config.waits_late):
                self.finish_product(pipes, v_state)
            self.round_weights(acc_S, c.rP)
            softmax.scale_rows(as_rows_cols(c.acc_O), c.o_scale)
        else:
            for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                c.row_sum[r] = c.row_sum[r] + block_sum[r]
            if const_expr(self.config.waits_late):
                self.finish_product(pipes, v_state)
                self.round_weights(weights, c.rP)

    @cute.jit
    def finish_product(self, pipes: Pipes, v_state):
        """Wait for O of the block before, and free its V."""
        warpgroup.wait_group(0)
        pipes.v.consumer_release(v_state)

    @cute.jit
    def last_product(self, p: ForwardParams, c: Consumer, pipes: Pipes, v_state):
        """O of the tile's last block."""
        pipes.v.consumer_wait(v_state)
        self.issue_gemm(p.mma_pv, c.acc_O, c.rP, c.tOrV[None, None, None, v_state.index], False)
        self.finish_product(pipes, v_state)
        v_state.advance()
        return v_state

    def new_scores(self, p: ForwardParams):
        """A fresh accumulator per block: its registers are free between blocks."""
        shape = p.mma_qk.partition_shape_C((self.config.tile_m, self.config.tile_n))
        return cute.make_rmem_tensor(shape, Float32)

    # -- ping-pong

    @cute.jit
    def grant_first_turn(self, c: Consumer):
        """The last warpgroup passes the turn to the first before anyone took it."""
        if const_expr(self.config.use_ping_pong):
            if c.warpgroup == self.config.num_mma_warpgroups - 1:
                self.pass_turn(c)

    @cute.jit
    def take_turn(self, c: Consumer):
        """Wait for this warpgroup's turn at the tensor cores."""
        if const_expr(self.config.use_ping_pong):
            cute.arch.barrier(
                barrier_id=Barrier.TURN + c.warpgroup, number_of_threads=2 * THREADS_PER_WARPGROUP
            )

    @cute.jit
    def pass_turn(self, c: Consumer):
        """Let the next warpgroup issue; its softmax then overlaps with our products."""
        if const_expr(self.config.use_ping_pong):
            is_last = c.warpgroup == self.config.num_mma_warpgroups - 1
            successor = cutlass.select_(is_last, Int32(0), c.warpgroup + 1)
            cute.arch.barrier_arrive(
                barrier_id=Barrier.TURN + successor, number_of_threads=2 * THREADS_PER_WARPGROUP
            )
