"""The warp of the SM100 forward kernel that issues every matrix product."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, pipeline

from flash_cute.device.announce import TILE_STAGES
from flash_cute.sm100 import tensor_memory
from flash_cute.sm100.config import ROWS, ForwardConfigSm100
from flash_cute.sm100.params import ForwardParams
from flash_cute.sm100.pipes import BUFFERS, Pipes, SharedTensors, Signal
from flash_cute.sm100.tensor_memory import MMA_DEPTH, SmemOperand
from flash_cute.specialization import ForwardSpecialization


@dataclass(frozen=True)
class TensorMemory:
    """Columns of tensor memory: S and P of both buffers, and O of every tile of queries.

    P takes the first half of the columns of its S: a thread writes it where it alone has read.
    """

    spec: ForwardSpecialization
    config: ForwardConfigSm100

    def scores(self, base: Int32, buffer) -> Int32:
        """Address of S, and of P, of a buffer."""
        return base + buffer * self.config.tile_n

    def output(self, base: Int32, tile) -> Int32:
        """Address of O of a tile of queries."""
        return base + (2 * self.config.tile_n + tile * self.spec.tile_dv)

    @property
    def columns(self) -> int:
        """Columns to allocate: a power of two."""
        return 1 << (self.config.tmem_columns(self.spec) - 1).bit_length()


@dataclass(frozen=True)
class Operands:
    """What the products need: places in tensor memory and descriptors without their stages."""

    tmem: Int32
    is_issuer: Int32
    q: tuple  # lower words, one for each tile of queries
    k: Int32  # lower words of the first stage
    v: Int32


class MmaWarp:
    """One warp; all lanes run the code, one of them issues.

    kernel: the kernel, which knows its signals, its tensor memory and the blocks of a tile
    """

    def __init__(self, kernel):
        spec, config, dtype = kernel.spec, kernel.config, kernel.dtype
        self.spec, self.config, self.kernel = spec, config, kernel
        self.signals, self.memory = kernel.signals, kernel.memory
        self.q = SmemOperand(config.rows_q, spec.tile_d)
        self.k = SmemOperand(config.tile_n, spec.tile_d)
        self.v = SmemOperand(config.tile_n, spec.tile_dv)
        self.kind_qk = tensor_memory.instruction(ROWS, config.tile_n, dtype, False)
        self.kind_pv = tensor_memory.instruction(ROWS, spec.tile_dv, dtype, True)

    @cute.jit
    def run(self, p: ForwardParams, smem: SharedTensors, pipes: Pipes, tmem: Int32):
        """All tiles of the CTA."""
        consumer = pipeline.PipelineUserType.Consumer
        q_state = pipeline.make_pipeline_state(consumer, 1)
        k_state = pipeline.make_pipeline_state(consumer, self.config.num_stages)
        v_state = pipeline.make_pipeline_state(consumer, self.config.num_stages)
        tile_state = pipeline.make_pipeline_state(consumer, TILE_STAGES)
        p_phases = Int32(0)
        o = self.operands(smem, tmem)
        pipes.tile.consumer_wait(tile_state)
        m_block = smem.tiles[0, tile_state.index]
        while m_block >= 0:
            num_blocks = self.kernel.num_blocks(self.kernel.receive(p, smem, tile_state.index))
            self.kernel.exchange.release_tile(pipes, tile_state)
            tile_state.advance()
            pipes.q.consumer_wait(q_state)
            kv_state = (k_state, v_state)
            if const_expr(self.config.num_tiles_q == 2):
                kv_state = self.multiply_halves(pipes, o, q_state, kv_state, p_phases, num_blocks)
                p_phases ^= num_blocks & 1
            else:
                kv_state = self.multiply_in_turns(pipes, o, q_state, kv_state, p_phases, num_blocks)
                p_phases ^= num_blocks + 1 >> 1 & 1 | num_blocks & 2
            k_state, v_state = kv_state
            q_state.advance()
            pipes.tile.consumer_wait(tile_state)
            m_block = smem.tiles[0, tile_state.index]

    @cute.jit
    def multiply_halves(self, pipes: Pipes, o: Operands, q_state, kv_state, p_phase, num_blocks):
        """A tile of two halves of queries: while one is weighed the other is multiplied.

        p_phase: of P of the first block; returns the advanced states
        """
        k_state, v_state = kv_state
        pipes.k.consumer_wait(k_state)
        for i in cutlass.range_constexpr(BUFFERS):
            self.multiply_keys(o, i, i, k_state.index)
            self.signals.commit(pipes, Signal.S, i, o.is_issuer)
        self.release(pipes.k, k_state, o)
        k_state.advance()
        for j in cutlass.range(num_blocks - 1, unroll=1):
            pipes.k.consumer_wait(k_state)
            pipes.v.consumer_wait(v_state)
            for i in cutlass.range_constexpr(BUFFERS):
                self.signals.wait(pipes, Signal.P, i, p_phase)
                self.multiply_values(o, i, i, v_state.index, j > 0)
                self.multiply_keys(o, i, i, k_state.index)
                self.signals.commit(pipes, Signal.S, i, o.is_issuer)
            self.release(pipes.k, k_state, o)
            self.release(pipes.v, v_state, o)
            k_state.advance()
            v_state.advance()
            p_phase ^= 1
        self.release(pipes.q, q_state, o)
        pipes.v.consumer_wait(v_state)
        for i in cutlass.range_constexpr(BUFFERS):
            self.signals.wait(pipes, Signal.P, i, p_phase)
            self.multiply_values(o, i, i, v_state.index, num_blocks > 1)
            self.signals.commit(pipes, Signal.O, i, o.is_issuer)
        self.release(pipes.v, v_state, o)
        v_state.advance()
        return k_state, v_state

    @cute.jit
    def multiply_in_turns(self, pipes: Pipes, o: Operands, q_state, kv_state, p_phases, num_blocks):
        """A tile of 128 queries: while a block is weighed the one before and after are multiplied.

        p_phases: of P of the first block in each buffer, a bit each; returns the advanced states
        """
        k_state, v_state = kv_state
        for j in cutlass.range(cutlass.min(num_blocks, BUFFERS), unroll=1):
            pipes.k.consumer_wait(k_state)
            self.multiply_keys(o, 0, j, k_state.index)
            self.signals.commit(pipes, Signal.S, j, o.is_issuer)
            self.release(pipes.k, k_state, o)
            k_state.advance()
        for j in cutlass.range(num_blocks, unroll=1):
            buffer = j & 1
            pipes.v.consumer_wait(v_state)
            self.signals.wait(pipes, Signal.P, buffer, p_phases >> buffer & 1)
            p_phases ^= 1 << buffer
            self.multiply_values(o, 0, buffer, v_state.index, j > 0)
            self.signals.commit(pipes, Signal.O, 0, o.is_issuer)
            self.release(pipes.v, v_state, o)
            v_state.advance()
            if j + BUFFERS < num_blocks:
                pipes.k.consumer_wait(k_state)
                self.multiply_keys(o, 0, buffer, k_state.index)
                self.signals.commit(pipes, Signal.S, buffer, o.is_issuer)
                self.release(pipes.k, k_state, o)
                k_state.advance()
        self.release(pipes.q, q_state, o)
        return k_state, v_state

    def operands(self, smem: SharedTensors, tmem: Int32) -> Operands:
        """The operands of this CTA."""
        q = smem.sQ.iterator.toint()
        return Operands(
            tmem=tmem,
            is_issuer=tensor_memory.elect(),
            q=tuple(
                self.q.lower(q + i * ROWS * self.q.row_bytes, False)
                for i in range(self.config.num_tiles_q)
            ),
            k=self.k.lower(smem.sK.iterator.toint(), False),
            v=self.v.lower(smem.sV.iterator.toint(), True),
        )

    def release(self, pipe, state, o: Operands):
        """Free a stage when the products that were issued are done."""
        tensor_memory.commit(pipe.consumer_get_barrier(state), o.is_issuer)

    def multiply_keys(self, o: Operands, i: int, buffer, stage: Int32):
        """S = Q K^T of 128 queries, the i-th of the tile."""
        acc, k_stage = self.memory.scores(o.tmem, buffer), o.k + stage * (self.k.tile_bytes >> 4)
        for k in range(self.spec.tile_d // MMA_DEPTH):
            a = (o.q[i] + (self.q.along_dim(k) >> 4), self.q.upper)
            b = (k_stage + (self.k.along_dim(k) >> 4), self.k.upper)
            tensor_memory.multiply(acc, a, b, self.kind_qk, int(k > 0), o.is_issuer)

    def multiply_values(self, o: Operands, i: int, buffer, stage: Int32, is_added):
        """O (+)= P V of 128 queries, the i-th of the tile."""
        acc, weights = self.memory.output(o.tmem, i), self.memory.scores(o.tmem, buffer)
        v_stage = o.v + stage * (self.v.tile_bytes >> 4)
        for k in range(self.config.tile_n // MMA_DEPTH):
            b = (v_stage + (self.v.along_rows(k) >> 4), self.v.upper)
            is_added = Int32(is_added) if k == 0 else 1
            a = weights + k * (MMA_DEPTH // 2)
            tensor_memory.multiply(acc, a, b, self.kind_pv, is_added, o.is_issuer)
