"""FlashAttention forward for Blackwell: TMA loads, tcgen05 products, tensor memory, persistent.

Algorithm, per tile of 256 queries of one head, keys visited from the last block to the first; each
half of the queries has a buffer of scores in tensor memory, and while one is weighed the other is
multiplied:
    S = Q K_j^T                          tcgen05.mma, both operands in shared memory
    mask S in edge blocks; P = exp2(S * scale - max), one row a thread, P over the columns of S
    rescale O in tensor memory where the maximum has risen by more than 2^8
    O = O + P V_j                        tcgen05.mma with P from tensor memory
    out = O / row_sum, lse = log(row_sum) + max

Roles (the pipelines and signals between them: pipes.py):
    warpgroups 0, 1    softmax: the scores of one half of the queries each
    warpgroup 2        correction: rescales O, and writes the output
    warp 12            mma.py: issues every product
    warp 13            device/load.py: issues every TMA and fetches tiles; warps 14, 15 idle

Timeline of the products (j counts blocks as they are visited, halves 0 and 1):
    S0_0 S1_0 | O0_0 S0_1 O1_0 S1_1 | O0_1 S0_2 O1_1 S1_2 | ...

Budget: shared memory in ForwardConfigSm100.smem_bytes; tensor memory is two S of tile_n columns and
an O of tile_dv for each half; registers of a softmax thread hold tile_n scores.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from flash_cute.device import softmax
from flash_cute.device.announce import TILE_STAGES
from flash_cute.device.forward import AttentionKernel, Work
from flash_cute.device.load import LoadWarp
from flash_cute.device.primitives import fresh_thread_idx, pack_halves, zero_rows
from flash_cute.sm100 import tensor_memory
from flash_cute.sm100.config import ROWS, THREADS_PER_WARPGROUP, ForwardConfigSm100
from flash_cute.sm100.mma import MmaWarp, TensorMemory
from flash_cute.sm100.params import ForwardParams, LaunchDescriptionSm100
from flash_cute.sm100.pipes import (
    WARPS_PER_WARPGROUP,
    Exchange,
    Pipes,
    Role,
    SharedTensors,
    Signal,
    Signals,
)
from flash_cute.sm100.softmax import packed_sum, row_maximum, weights_of
from flash_cute.specialization import ForwardSpecialization

CORRECTION_WARP = 2 * WARPS_PER_WARPGROUP  # the first one, as the others
MMA_WARP = 3 * WARPS_PER_WARPGROUP
LOAD_WARP = MMA_WARP + 1
COLUMNS = 32  # of O that the correction holds at a time
WORDS = 16  # of P that are stored at a time


@dataclass(frozen=True)
class Consumer:
    """What a softmax thread holds across tiles."""

    buffer: Int32  # of its scores
    scores: Int32  # their address in tensor memory
    factors: cute.Tensor  # (rows,) of the buffer, in shared memory
    row_max: cute.Tensor  # (1,) f32, as row_sum and o_scale
    row_sum: cute.Tensor
    o_scale: cute.Tensor


@dataclass(frozen=True)
class Finished:
    """The state of a row whose tile is done."""

    row_max: cute.Tensor  # (1,) f32, as row_sum
    row_sum: cute.Tensor


class FlashAttentionForwardSm100(AttentionKernel):
    """One CTA = a stream of (m_block, head, batch) tiles; see the module docstring.

    Contract: a derived class overrides steps, usually of those under "from scores to weights", and
              is passed as `kernel=`. It finds what is compiled in in self.spec and self.config.
              What its steps no longer do it says in `lacks`; calls that need it are refused.
    """

    label = "flash_fwd_sm100"
    rows_per_thread = 1
    lanes_per_row = 1

    def __init__(self, spec: ForwardSpecialization, config: ForwardConfigSm100):
        super().__init__(spec, config, LaunchDescriptionSm100(spec, config))
        self.exchange = Exchange(spec, config, self.dtype)
        self.loader = LoadWarp(self.exchange, self.mask)
        self.signals, self.memory = Signals(), TensorMemory(spec, config)
        self.mma = MmaWarp(self)

    @staticmethod
    def column_offset(i: int) -> int:
        """A thread has whole rows."""
        return i

    # ---------------------------------------------------------------- device

    @cute.kernel
    def kernel(self, p):
        """Device side: shared and tensor memory, pipelines, then one branch per role."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOAD_WARP:
            for operand in (p.q, p.k, p.v):
                cpasync.prefetch_descriptor(operand.atom)
        storage = SmemAllocator().allocate(self.exchange.storage(p))
        pipes = self.exchange.pipelines(storage)
        smem = self.exchange.tensors(p, storage)
        if warp == MMA_WARP:
            tensor_memory.allocate(smem.tmem.iterator, self.memory.columns)
        cute.arch.mbarrier_init_fence()
        tensor_memory.order_before()
        cute.arch.sync_threads()
        tensor_memory.order_after()
        tmem = smem.tmem[0]
        if warp < CORRECTION_WARP:
            cute.arch.setmaxregister_increase(self.config.regs_softmax)
            self.softmax(p, smem, pipes, tmem)
        elif warp < MMA_WARP:
            cute.arch.setmaxregister_decrease(self.config.regs_correction)
            self.correct(p, smem, pipes, tmem)
        else:
            cute.arch.setmaxregister_decrease(self.config.regs_other)
            if warp == MMA_WARP:
                self.mma.run(p, smem, pipes, tmem)
            elif warp == LOAD_WARP:
                self.loader.run(p, smem, pipes)
        tensor_memory.order_before()
        cute.arch.sync_threads()
        tensor_memory.order_after()
        if warp == MMA_WARP:
            tensor_memory.free(tmem, self.memory.columns)
        self.signals.check_sites()

    @cute.jit
    def receive(self, p: ForwardParams, smem: SharedTensors, slot: Int32) -> Work:
        """The announced tile."""
        said = self.exchange.receive(smem, slot)
        blocks, is_empty = self.blocks_of(p, said.tile, said.seqlen)
        return Work(said.tile, said.seqlen, blocks, said.num_partial, said.num_full, is_empty)

    @cute.jit
    def release_tile(self, pipes: Pipes, tile_state):
        """Free the slot of an announcement that this warp has read."""
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            pipes.tile.consumer_release(tile_state)

    def num_blocks(self, work: Work) -> Int32:
        """Blocks of keys that are visited for a tile."""
        return work.blocks.end - work.blocks.begin

    def lanes(self) -> Int32:
        """The lanes of tensor memory that this warp reaches, as part of an address."""
        return cute.arch.warp_idx() % WARPS_PER_WARPGROUP * 32 << 16

    # -- softmax

    @cute.jit
    def softmax(self, p: ForwardParams, smem: SharedTensors, pipes: Pipes, tmem: Int32):
        """Softmax warpgroup: from scores to weights, one row a thread."""
        consumer = pipeline.PipelineUserType.Consumer
        tile_state = pipeline.make_pipeline_state(consumer, TILE_STAGES)
        c = self.start_consumer(smem, tmem)
        s_phase, free_phase = Int32(0), Int32(1)
        pipes.tile.consumer_wait(tile_state)
        m_block = smem.tiles[0, tile_state.index]
        while m_block >= 0:
            work = self.receive(p, smem, tile_state.index)
            s_phase, _ = self.visit_range(p, c, pipes, (s_phase, Int32(0)), work)
            self.signals.wait(pipes, Signal.STATS_FREE, c.buffer, free_phase)
            free_phase ^= 1
            row = fresh_thread_idx() % THREADS_PER_WARPGROUP
            smem.sums[row, c.buffer] = c.row_sum[0]
            smem.maxima[row, c.buffer] = c.row_max[0]
            self.signals.arrive(pipes, Signal.STATS, c.buffer, Role.SOFTMAX)
            self.release_tile(pipes, tile_state)
            tile_state.advance()
            pipes.tile.consumer_wait(tile_state)
            m_block = smem.tiles[0, tile_state.index]

    def start_consumer(self, smem: SharedTensors, tmem: Int32) -> Consumer:
        """This thread's place and registers."""
        buffer = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // WARPS_PER_WARPGROUP
        return Consumer(
            buffer=buffer,
            scores=self.memory.scores(tmem, buffer) + self.lanes(),
            factors=smem.factors[None, buffer],
            row_max=cute.make_rmem_tensor(1, Float32),
            row_sum=cute.make_rmem_tensor(1, Float32),
            o_scale=cute.make_rmem_tensor(1, Float32),
        )

    def place(self, thread: Int32):
        """Row within the query tile and first column within a key block of a softmax thread."""
        return thread, 0

    @cute.jit
    def first_block(self, p: ForwardParams, c: Consumer, pipes: Pipes, kv_state, work, n_block):
        """Scores and weights of a tile's first block; returns the states of the next one."""
        s_phase, unused = kv_state
        S = self.read_scores(c, pipes, s_phase)
        self.modify_scores(p, S, work, n_block, self.place(fresh_thread_idx()), True)
        self.hide_if_empty(S, work)
        self.first_weights(p, c, work, S)
        self.write_weights(p, c, pipes, S)
        return s_phase ^ 1, unused

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
        """Scores and weights of a later block; returns the states of the next one."""
        s_phase, unused = kv_state
        S = self.read_scores(c, pipes, s_phase)
        place = self.place(fresh_thread_idx())
        self.modify_scores(p, S, work, n_block, place, is_masked, may_be_edge)
        self.next_weights(p, c, pipes, work, S)
        self.write_weights(p, c, pipes, S)
        return s_phase ^ 1, unused

    @cute.jit
    def read_scores(self, c: Consumer, pipes: Pipes, s_phase: Int32):
        """(1, tile_n): this thread's row of a block of scores, once it is there."""
        self.signals.wait(pipes, Signal.S, c.buffer, s_phase)
        num = self.config.tile_n
        S = cute.make_rmem_tensor((1, num), Float32)
        for i, score in enumerate(tensor_memory.load(c.scores, num)):
            S[0, i] = score
        return S

    # -- from scores to weights: steps that another kind of attention overrides

    @cute.jit
    def first_weights(self, p: ForwardParams, c: Consumer, work: Work, S: cute.Tensor):
        """Start the running maximum and sum."""
        c.row_max[0] = row_maximum(softmax.row_values(S, 0))
        c.row_sum[0] = Float32(0.0)

    @cute.jit
    def next_weights(self, p: ForwardParams, c: Consumer, pipes: Pipes, work: Work, S: cute.Tensor):
        """Raise the running maximum, rescale the sum, and tell the correction to rescale O."""
        block_max = row_maximum(softmax.row_values(S, 0))
        scale_log2, threshold = self.scale_log2(p), self.config.rescale_threshold
        c.row_max[0], o_scale = softmax.raise_row(c.row_max[0], block_max, scale_log2, threshold)
        c.row_sum[0] = c.row_sum[0] * o_scale
        c.factors[fresh_thread_idx() % THREADS_PER_WARPGROUP] = o_scale
        self.signals.arrive(pipes, Signal.SCALE, c.buffer, Role.SOFTMAX)

    @cute.jit
    def write_weights(self, p: ForwardParams, c: Consumer, pipes: Pipes, S: cute.Tensor):
        """P against the running maximum into tensor memory, and its sum."""
        scale_log2 = self.scale_log2(p)
        shift = -(softmax.finite_or_zero(c.row_max[0]) * scale_log2)
        values = softmax.row_values(S, 0)
        sums = []
        for i in cutlass.range_constexpr(0, self.config.tile_n, 2 * WORDS):
            part, num_polynomial = values[i : i + 2 * WORDS], self.config.num_polynomial
            pairs = weights_of(part, shift, scale_log2, num_polynomial, self.dtype)
            words = [pack_halves(low, high, self.dtype) for low, high in pairs]
            tensor_memory.store(c.scores + i // 2, words)
            sums.append(packed_sum(pairs))
        tensor_memory.wait_for_stores()
        self.signals.arrive(pipes, Signal.P, c.buffer, Role.SOFTMAX)
        for block_sum in sums:
            c.row_sum[0] = c.row_sum[0] + block_sum

    # -- correction

    @cute.jit
    def correct(self, p: ForwardParams, smem: SharedTensors, pipes: Pipes, tmem: Int32):
        """Correction warpgroup: rescales O between products, and writes it when they are done."""
        consumer = pipeline.PipelineUserType.Consumer
        tile_state = pipeline.make_pipeline_state(consumer, TILE_STAGES)
        v_state = pipeline.make_pipeline_state(consumer, self.config.num_stages)
        scale_phase, tile_phase = Int32(0), Int32(0)
        num_tiles_q = self.config.num_tiles_q
        lanes = self.lanes()
        c = Finished(cute.make_rmem_tensor(1, Float32), cute.make_rmem_tensor(1, Float32))
        pipes.tile.consumer_wait(tile_state)
        m_block = smem.tiles[0, tile_state.index]
        while m_block >= 0:
            work = self.receive(p, smem, tile_state.index)
            num_blocks = self.num_blocks(work)
            self.clear_tail(smem, pipes, v_state, work, work.blocks.end - 1)
            for i in cutlass.range_constexpr(num_tiles_q):
                self.signals.arrive(pipes, Signal.P, i, Role.CORRECTION)
            for _ in cutlass.range(num_blocks - 1, unroll=1):
                for i in cutlass.range_constexpr(num_tiles_q):
                    self.signals.wait(pipes, Signal.SCALE, i, scale_phase)
                    row = fresh_thread_idx() % THREADS_PER_WARPGROUP
                    self.rescale(self.memory.output(tmem, i) + lanes, smem.factors[row, i])
                    self.signals.arrive(pipes, Signal.P, i, Role.CORRECTION)
                scale_phase ^= 1
            if const_expr(self.spec.is_ragged_k):
                for _ in cutlass.range(num_blocks, unroll=1):
                    v_state.advance()
            # Read anew: the tile's place then occupies no registers during the loop.
            work = self.receive(p, smem, tile_state.index)
            for i in cutlass.range_constexpr(num_tiles_q):
                self.signals.wait(pipes, Signal.STATS, i, tile_phase)
                row = fresh_thread_idx() % THREADS_PER_WARPGROUP
                c.row_sum[0], c.row_max[0] = smem.sums[row, i], smem.maxima[row, i]
                self.signals.arrive(pipes, Signal.STATS_FREE, i, Role.CORRECTION)
                self.signals.wait(pipes, Signal.O, i, tile_phase)
                self.store_tile(p, c, work, self.memory.output(tmem, i) + lanes, i)
            tile_phase ^= 1
            self.release_tile(pipes, tile_state)
            tile_state.advance()
            pipes.tile.consumer_wait(tile_state)
            m_block = smem.tiles[0, tile_state.index]

    @cute.jit
    def rescale(self, output: Int32, factor: Float32):
        """Multiply this warp's rows of O by their factors, where one is not 1."""
        if cute.arch.vote_any_sync(factor != 1.0):
            for col in cutlass.range_constexpr(0, self.spec.tile_dv, COLUMNS):
                values = tensor_memory.load(output + col, COLUMNS)
                words = []
                for i in cutlass.range_constexpr(0, COLUMNS, 2):
                    pair = cute.arch.mul_packed_f32x2(values[i : i + 2], (factor, factor))
                    words += [value.bitcast(Int32) for value in pair]
                tensor_memory.store(output + col, words)
            tensor_memory.wait_for_stores()

    @cute.jit
    def store_tile(
        self, p: ForwardParams, c: Finished, work: Work, output: Int32, i: cutlass.Constexpr[int]
    ):
        """Close the rows of one product's tile, scale them and write them."""
        row = i * ROWS + fresh_thread_idx() % THREADS_PER_WARPGROUP
        rows, factor = self.store_lse(p, c, work, row)
        for col in cutlass.range_constexpr(0, self.spec.tile_dv, COLUMNS):
            O = cute.make_rmem_tensor((1, COLUMNS), Float32)
            for k, value in enumerate(tensor_memory.load(output + col, COLUMNS)):
                O[0, k] = value
            softmax.scale_rows(O, factor)
            self.store_columns(p, O, rows, work, col)
        tensor_memory.order_before()

    @cute.jit
    def clear_tail(self, smem: SharedTensors, pipes: Pipes, v_state, work: Work, n_block: Int32):
        """Zero the rows of a V block that belong to no key: 0 times their NaN would be NaN."""
        if const_expr(self.spec.is_ragged_k):
            num_valid = work.seqlen.seqlen_k - n_block * self.config.tile_n
            if num_valid < self.config.tile_n:
                pipes.v.consumer_wait(v_state)
                first_row = cutlass.max(num_valid, 0)
                zero_rows(smem.sV[None, None, v_state.index], first_row, THREADS_PER_WARPGROUP)
