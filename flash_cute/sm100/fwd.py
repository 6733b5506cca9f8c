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
    warp 13            device/load.py: issues every TMA and fetches tiles; warps 14, 15 idle, but
                       for warp 14 where keys are gathered: device/gather.py

Where tensor memory has no room for two O, or a tile's queries are few, it has 128 rows: blocks of
keys then alternate between the buffers and the softmax warpgroups, which pass on the maximum.

Timeline of the products (j counts blocks as they are visited, halves 0 and 1):
    S0_0 S1_0 | O0_0 S0_1 O1_0 S1_1 | O0_1 S0_2 O1_1 S1_2 | ...   or, with 128 rows,
    S_0 S_1 | O_0 S_2 | O_1 S_3 | ...

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
from flash_cute.device.primitives import fresh_thread_idx, pack_halves, zero_rows
from flash_cute.sm100 import tensor_memory
from flash_cute.sm100.config import ROWS, THREADS_PER_WARPGROUP, ForwardConfigSm100
from flash_cute.sm100.load import GatherWarpsSm100, LoadWarpSm100
from flash_cute.sm100.mma import MmaWarp, TensorMemory
from flash_cute.sm100.params import ForwardParams, LaunchDescriptionSm100
from flash_cute.sm100.pipes import (
    BUFFERS,
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
COLUMNS = 16  # of O that the correction holds at a time
PAST_QUERIES = 2**30  # a row that no sequence has
WORDS = 16  # of P that are stored at a time


@dataclass(frozen=True)
class Consumer:
    """What a softmax thread holds across tiles."""

    buffer: Int32  # of its scores
    scores: Int32  # their address in tensor memory
    factors: cute.Tensor  # (rows,) of the buffer, in shared memory
    running: cute.Tensor  # (rows, buffer), in shared memory
    blocks: cute.Tensor  # numbers of blocks, in shared memory
    row_max: cute.Tensor  # (1,) f32, as row_sum and o_scale
    row_sum: cute.Tensor
    o_scale: cute.Tensor


@dataclass(frozen=True)
class Phases:
    """Of the signals that a softmax warpgroup waits for next."""

    scores: Int32
    maximum: Int32  # of the other buffer
    visited: Int32  # blocks before the tile, with a block mask


@dataclass(frozen=True)
class CorrectionPhases:
    """Of the signals that the correction waits for next."""

    scale: Int32  # with 128 queries a bit for each buffer
    output: Int32
    tile: Int32


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
    waits_by_itself = True

    def __init__(self, spec: ForwardSpecialization, config: ForwardConfigSm100):
        super().__init__(spec, config, LaunchDescriptionSm100(spec, config))
        self.exchange = Exchange(spec, config, self.dtype)
        self.num_load_warps = config.num_load_warps(spec)
        if spec.gathers_keys:
            place = (LOAD_WARP, self.num_load_warps)
            self.loader = GatherWarpsSm100(self.exchange, self.mask, place)
        else:
            self.loader = LoadWarpSm100(self.exchange, self.mask)
        self.signals, self.memory = Signals(config.num_tiles_q), TensorMemory(spec, config)
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
        self.await_kernel_before()
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
            elif warp < LOAD_WARP + self.num_load_warps:
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

    def num_blocks(self, work: Work) -> Int32:
        """Blocks of keys that are visited for a tile: one where a block mask lists none."""
        if self.spec.has_block_mask:
            return cutlass.max(work.num_partial + work.num_full, 1)
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
        s_phase, max_phase, free_phase, visited = Int32(0), Int32(0), Int32(1), Int32(0)
        pipes.tile.consumer_wait(tile_state)
        m_block = smem.tiles[0, tile_state.index]
        while m_block >= 0:
            work = self.receive(p, smem, tile_state.index)
            c.row_max.fill(-Float32.inf)
            c.row_sum.fill(0.0)
            states = (Phases(s_phase, max_phase, visited), Int32(0))
            if const_expr(self.spec.has_block_mask):
                phases, num_visits = self.visit_lists(p, c, pipes, states, work)
                visited += num_visits
            else:
                phases, num_visits = self.visit_range(p, c, pipes, states, work)
            s_phase, max_phase = phases.scores, phases.maximum
            if const_expr(self.config.num_tiles_q == 1):
                # Where the other buffer had the last block, its maximum was not waited for.
                max_phase ^= (num_visits ^ c.buffer ^ 1) & 1
            self.signals.wait(pipes, Signal.STATS_FREE, c.buffer, free_phase)
            free_phase ^= 1
            row = fresh_thread_idx() % THREADS_PER_WARPGROUP
            smem.sums[row, c.buffer] = c.row_sum[0]
            smem.maxima[row, c.buffer] = c.row_max[0]
            self.signals.arrive(pipes, Signal.STATS, c.buffer, Role.SOFTMAX)
            self.exchange.release_tile(pipes, tile_state)
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
            running=smem.running,
            blocks=smem.blocks,
            row_max=cute.make_rmem_tensor(1, Float32),
            row_sum=cute.make_rmem_tensor(1, Float32),
            o_scale=cute.make_rmem_tensor(1, Float32),
        )

    def place(self, thread: Int32):
        """Row within the query tile and first column within a key block of a softmax thread.

        Rows that hold nothing are far behind the queries: they see what they like, unwritten.
        """
        row = thread % self.config.rows_q
        if self.config.tile_m < self.config.rows_q:
            row = cutlass.select_(row < self.config.tile_m, row, Int32(PAST_QUERIES))
        return row, 0

    @cute.jit
    def first_block(self, p: ForwardParams, c: Consumer, pipes: Pipes, kv_state, work, n_block):
        """Scores and weights of a tile's first block; returns the states of the next one.

        The states are Phases and the number of blocks visited.
        """
        phases, num_visits = kv_state
        block = (self.block_or_slot(n_block, kv_state), True, False, True)
        if const_expr(self.config.num_tiles_q == 2):
            phases = self.weigh_block(p, c, pipes, phases, work, block)
        elif c.buffer == 0:
            phases = self.weigh_block(p, c, pipes, phases, work, block)
        return phases, num_visits + 1

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
        phases, num_visits = kv_state
        block = (self.block_or_slot(n_block, kv_state), is_masked, may_be_edge, False)
        if const_expr(self.config.num_tiles_q == 2):
            phases = self.weigh_block(p, c, pipes, phases, work, block)
        elif num_visits & 1 == c.buffer:
            phases = self.weigh_block(p, c, pipes, phases, work, block)
        return phases, num_visits + 1

    def block_or_slot(self, n_block, kv_state):
        """The number of a block, or where it will be when its scores are there."""
        if not self.spec.has_block_mask:
            return n_block
        phases, num_visits = kv_state
        return (phases.visited + num_visits) % self.exchange.block_slots

    @cute.jit
    def weigh_block(self, p: ForwardParams, c: Consumer, pipes: Pipes, phases, work: Work, block):
        """From S to P of a block of this warpgroup's; returns the next phases.

        block: (number or slot, whether it is masked, whether it may be, whether it is a tile's
            first)
        """
        n_block, is_masked, may_be_edge, is_first = block
        S = self.read_scores(c, pipes, phases.scores)
        if const_expr(self.spec.has_block_mask):
            n_block = c.blocks[n_block]
        place = self.place(fresh_thread_idx())
        self.modify_scores(p, S, work, n_block, place, is_masked, may_be_edge)
        if const_expr(is_first):
            self.hide_if_empty(S, work)
            self.first_weights(p, c, pipes, S)
        else:
            self.next_weights(p, c, pipes, phases, S)
        self.write_weights(p, c, pipes, S)
        max_phase = phases.maximum if const_expr(is_first) else phases.maximum ^ 1
        return Phases(phases.scores ^ 1, max_phase, phases.visited)

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
    def first_weights(self, p: ForwardParams, c: Consumer, pipes: Pipes, S: cute.Tensor):
        """Start the running maximum; the sum is 0."""
        c.row_max[0] = row_maximum(softmax.row_values(S, 0))
        self.pass_maximum_on(c, pipes)

    @cute.jit
    def next_weights(self, p: ForwardParams, c: Consumer, pipes: Pipes, phases, S: cute.Tensor):
        """Raise the running maximum, rescale the sum, and tell the correction to rescale O."""
        block_max = row_maximum(softmax.row_values(S, 0))
        scale_log2, threshold = self.scale_log2(p), self.config.rescale_threshold
        row = fresh_thread_idx() % THREADS_PER_WARPGROUP
        before = c.row_max[0]
        if const_expr(self.config.num_tiles_q == 1):
            self.signals.wait(pipes, Signal.MAX, c.buffer ^ 1, phases.maximum)
            before = c.running[row, c.buffer ^ 1]
        new_max, o_scale = softmax.raise_row(before, block_max, scale_log2, threshold)
        new_max = cutlass.select_(block_max == block_max, new_max, block_max)  # NaN stays
        sum_scale = o_scale
        if const_expr(self.config.num_tiles_q == 1):
            sum_scale = softmax.rise_factor(c.row_max[0], new_max, scale_log2)
        c.row_sum[0] = c.row_sum[0] * sum_scale
        c.row_max[0] = new_max
        self.pass_maximum_on(c, pipes)
        c.factors[row] = o_scale
        self.signals.arrive(pipes, Signal.SCALE, c.buffer, Role.SOFTMAX)

    @cute.jit
    def pass_maximum_on(self, c: Consumer, pipes: Pipes):
        """Tell the other warpgroup, where it has the next block, the running maximum."""
        if const_expr(self.config.num_tiles_q == 1):
            c.running[fresh_thread_idx() % THREADS_PER_WARPGROUP, c.buffer] = c.row_max[0]
            self.signals.arrive(pipes, Signal.MAX, c.buffer, Role.SOFTMAX)

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
        first, second = packed_sum(sums)
        c.row_sum[0] = c.row_sum[0] + (first + second)

    # -- correction

    @cute.jit
    def correct(self, p: ForwardParams, smem: SharedTensors, pipes: Pipes, tmem: Int32):
        """Correction warpgroup: rescales O between products, and writes it when they are done."""
        consumer = pipeline.PipelineUserType.Consumer
        tile_state = pipeline.make_pipeline_state(consumer, TILE_STAGES)
        v_state = pipeline.make_pipeline_state(consumer, self.config.num_stages)
        phases, visited = CorrectionPhases(Int32(0), Int32(0), Int32(0)), Int32(0)
        c = Finished(cute.make_rmem_tensor(1, Float32), cute.make_rmem_tensor(1, Float32))
        output = self.memory.output(tmem, 0) + self.lanes()
        pipes.tile.consumer_wait(tile_state)
        m_block = smem.tiles[0, tile_state.index]
        while m_block >= 0:
            work = self.receive(p, smem, tile_state.index)
            v_place = (v_state, visited)
            if const_expr(self.config.num_tiles_q == 2):
                phases, v_place = self.correct_halves(smem, pipes, output, phases, v_place, work)
            else:
                phases, v_place = self.correct_in_turns(smem, pipes, output, phases, v_place, work)
            v_state, visited = v_place
            # Read anew: the tile's place then occupies no registers during the loop.
            work = self.receive(p, smem, tile_state.index)
            if const_expr(self.config.num_tiles_q == 2):
                for i in cutlass.range_constexpr(BUFFERS):
                    c.row_sum[0], c.row_max[0] = self.take_stats(smem, pipes, i, phases.tile)
                    self.signals.wait(pipes, Signal.O, i, phases.output)
                    self.store_tile(p, c, work, output + i * self.spec.tile_dv, i)
            else:
                self.join_stats(p, c, smem, pipes, phases.tile)
                self.signals.wait(pipes, Signal.O, 0, phases.output)
                self.store_tile(p, c, work, output, 0)
            phases = CorrectionPhases(phases.scale, phases.output ^ 1, phases.tile ^ 1)
            self.exchange.release_tile(pipes, tile_state)
            tile_state.advance()
            pipes.tile.consumer_wait(tile_state)
            m_block = smem.tiles[0, tile_state.index]

    @cute.jit
    def correct_halves(self, smem, pipes: Pipes, output: Int32, phases, v_place, work: Work):
        """Rescale both O of a tile before the products that need it.

        Returns the next phases and the next place of V, as `clear_tail`.
        """
        v_place = self.clear_tail(smem, pipes, v_place, work, True)
        for i in cutlass.range_constexpr(BUFFERS):
            self.signals.arrive(pipes, Signal.P, i, Role.CORRECTION)
        scale_phase = phases.scale
        for _ in cutlass.range(self.num_blocks(work) - 1, unroll=1):
            v_place = self.clear_tail(smem, pipes, v_place, work, False)
            for i in cutlass.range_constexpr(BUFFERS):
                self.signals.wait(pipes, Signal.SCALE, i, scale_phase)
                row = fresh_thread_idx() % THREADS_PER_WARPGROUP
                self.rescale(output + i * self.spec.tile_dv, smem.factors[row, i])
                self.signals.arrive(pipes, Signal.P, i, Role.CORRECTION)
            scale_phase ^= 1
        return CorrectionPhases(scale_phase, phases.output, phases.tile), v_place

    @cute.jit
    def correct_in_turns(self, smem, pipes: Pipes, output: Int32, phases, v_place, work: Work):
        """`correct_halves` of a tile of 128 queries, whose blocks alternate between the buffers."""
        v_place = self.clear_tail(smem, pipes, v_place, work, True)
        self.signals.arrive(pipes, Signal.P, 0, Role.CORRECTION)
        scale_phases, output_phase = phases.scale, phases.output
        for j in cutlass.range(1, self.num_blocks(work), unroll=1):
            v_place = self.clear_tail(smem, pipes, v_place, work, False)
            buffer = j & 1
            self.signals.wait(pipes, Signal.SCALE, buffer, scale_phases >> buffer & 1)
            scale_phases ^= 1 << buffer
            factor = smem.factors[fresh_thread_idx() % THREADS_PER_WARPGROUP, buffer]
            self.signals.wait(pipes, Signal.O, 0, output_phase)  # of the block before
            output_phase ^= 1
            self.rescale(output, factor)
            self.signals.arrive(pipes, Signal.P, buffer, Role.CORRECTION)
        return CorrectionPhases(scale_phases, output_phase, phases.tile), v_place

    @cute.jit
    def take_stats(self, smem: SharedTensors, pipes: Pipes, buffer: int, phase: Int32):
        """(sum, maximum) of this thread's row in a buffer, when its tile is done."""
        self.signals.wait(pipes, Signal.STATS, buffer, phase)
        row = fresh_thread_idx() % THREADS_PER_WARPGROUP
        row_sum, row_max = smem.sums[row, buffer], smem.maxima[row, buffer]
        self.signals.arrive(pipes, Signal.STATS_FREE, buffer, Role.CORRECTION)
        return row_sum, row_max

    @cute.jit
    def join_stats(self, p: ForwardParams, c: Finished, smem: SharedTensors, pipes: Pipes, phase):
        """Sum and maximum of a row whose blocks both buffers had; the larger maximum is O's."""
        sum_0, max_0 = self.take_stats(smem, pipes, 0, phase)
        sum_1, max_1 = self.take_stats(smem, pipes, 1, phase)
        row_max, scale_log2 = cute.arch.fmax(max_0, max_1), self.scale_log2(p)
        total = sum_0 * softmax.rise_factor(max_0, row_max, scale_log2)
        total = total + sum_1 * softmax.rise_factor(max_1, row_max, scale_log2)
        c.row_sum[0], c.row_max[0] = total, row_max

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
        row, _ = self.place(i * ROWS + fresh_thread_idx() % THREADS_PER_WARPGROUP)
        rows, factor = self.store_lse(p, c, work, row)
        for col in cutlass.range_constexpr(0, self.spec.tile_dv, COLUMNS):
            O = cute.make_rmem_tensor((1, COLUMNS), Float32)
            for k, value in enumerate(tensor_memory.load(output + col, COLUMNS)):
                O[0, k] = value
            softmax.scale_rows(O, factor)
            self.store_columns(p, O, rows, work, col)
        tensor_memory.order_before()

    @cute.jit
    def clear_tail(
        self,
        smem: SharedTensors,
        pipes: Pipes,
        v_place,
        work: Work,
        is_first: cutlass.Constexpr[bool],
    ):
        """Zero the rows of a V block that belong to no key: 0 times their NaN would be NaN.

        v_place: (state of V, blocks visited); returns those of the next block
        """
        v_state, visited = v_place
        if const_expr(self.spec.is_ragged_k):
            # The last keys come first, but for those of lists.
            if const_expr(is_first or self.spec.has_block_mask):
                n_block = work.blocks.end - 1
                if const_expr(self.spec.has_block_mask):
                    pipes.v.consumer_wait(v_state)  # the number is there before
                    n_block = smem.blocks[visited % self.exchange.block_slots]
                num_valid = work.seqlen.seqlen_k - n_block * self.config.tile_n
                if num_valid < self.config.tile_n:
                    pipes.v.consumer_wait(v_state)
                    first_row = cutlass.max(num_valid, 0)
                    sV = smem.sV[None, None, v_state.index]
                    zero_rows(sV, first_row, THREADS_PER_WARPGROUP)
            v_state.advance()
            visited += 1
        return v_state, visited
