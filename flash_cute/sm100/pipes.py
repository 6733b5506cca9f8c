"""What the warps of the SM100 forward kernel exchange: shared memory, pipelines, signals.

Pipelines (full = bytes landed, empty = arrivals):
    q     1 stage      load -> mma   empty: the commit after the tile's last products with Q
    k, v  num_stages   load -> mma   empty: the commit after the last product with the stage
                       where keys are gathered, full: one arrival for each thread that gathers
    tile  2 stages     load -> all   full: one arrival; empty: one arrival per warp that reads it

Signals, two of each, one for each buffer of scores; `arrivals` has who arrives how often. The
buffers belong to the two halves of the queries or, where a tile has but 128 queries, to every other
block of keys, in the order of visits. Whoever waits sees every phase: none is two ahead, since
    S           a block of scores is done: the next one is not issued before P of this one.
    P           P is there, and O is rescaled for it (or, for a tile's first block, is read out).
                O is rescaled when S of the block, or O of the one before, is done.
    O           a tile's output is done, or, with 128 queries, a block's part of it: the next one
                waits for P, which waits for who reads this. In that case only the first is used.
    SCALE       the factor of the next rescaling is there: the next one comes after S, which waits
                for P, which waits for who reads this.
    STATS       sums and maxima of a tile are there.
    STATS_FREE  they have been read.
    MAX         with 128 queries, the running maximum of a block is there for the next block, which
                the other buffer has: the next one comes after that block's. The last one of a tile
                is not waited for, but is there before S of the next tile.
"""

import enum
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, pipeline

from flash_cute.device.announce import TILE_STAGES, TileExchange
from flash_cute.sm100 import tensor_memory
from flash_cute.sm100.config import ROWS
from flash_cute.sm100.params import ForwardParams

WARPS_PER_WARPGROUP = 4
BUFFERS = 2  # of scores


class Role(enum.Enum):
    """Warps with one task."""

    SOFTMAX = enum.auto()
    CORRECTION = enum.auto()
    MMA = enum.auto()


class Signal(enum.IntEnum):
    """Barriers beside the pipelines; see the module docstring."""

    S = 0
    P = 1
    O = 2
    SCALE = 3
    STATS = 4
    STATS_FREE = 5
    MAX = 6


ARRIVALS = {
    Signal.S: {Role.MMA: 1},
    Signal.P: {Role.SOFTMAX: WARPS_PER_WARPGROUP, Role.CORRECTION: WARPS_PER_WARPGROUP},
    Signal.O: {Role.MMA: 1},
    Signal.SCALE: {Role.SOFTMAX: WARPS_PER_WARPGROUP},
    Signal.STATS: {Role.SOFTMAX: WARPS_PER_WARPGROUP},
    Signal.STATS_FREE: {Role.CORRECTION: WARPS_PER_WARPGROUP},
    Signal.MAX: {Role.SOFTMAX: WARPS_PER_WARPGROUP},
}


def arrivals(num_tiles_q: int) -> dict[Signal, dict[Role, int]]:
    """Who arrives at each signal how often a phase."""
    counts = {**ARRIVALS}
    if num_tiles_q == 2:
        del counts[Signal.MAX]
    return counts


# Two warpgroups of softmax, the correction, and the warp that multiplies.
TILE_READERS = 3 * WARPS_PER_WARPGROUP + 1


class Pipes(NamedTuple):
    """The pipelines from the load warp, and the first of the signals' barriers."""

    q: pipeline.PipelineTmaAsync
    k: pipeline.PipelineTmaAsync | pipeline.PipelineAsync
    v: pipeline.PipelineTmaAsync | pipeline.PipelineAsync
    tile: pipeline.PipelineAsync
    signals: cute.Pointer


class SharedTensors(NamedTuple):
    """Shared memory: (tile, dim, stage) rings, tile announcements, numbers of rows."""

    sQ: cute.Tensor
    sK: cute.Tensor
    sV: cute.Tensor
    tiles: cute.Tensor  # (fields, TILE_STAGES) int32
    factors: cute.Tensor  # (rows, buffer) f32: of the next rescaling
    sums: cute.Tensor  # (rows, buffer) f32: of a tile, as maxima
    maxima: cute.Tensor
    running: cute.Tensor  # (rows, buffer) f32: maximum so far, for the next block
    tmem: cute.Tensor  # (1,) int32: address of the tensor memory
    blocks: cute.Tensor  # (block_slots,) int32: numbers of the newest blocks, with a block mask


class Exchange(TileExchange):
    """Lays out shared memory and opens the pipelines of one specialization with one config."""

    @property
    def block_slots(self) -> int:
        """Numbers of blocks that are kept.

        A stage of K is filled anew when its product is done; that was issued when P of the second
        block before it was there at the latest. Numbers of later blocks may still be read.
        """
        return self.config.num_stages + BUFFERS

    def storage(self, p: ForwardParams):
        """The struct of shared memory."""
        num_stages, dtype = self.config.num_stages, self.dtype

        @cute.struct
        class SharedStorage:
            """Barriers first, then the tiles, each aligned for the 128-byte swizzle."""

            q_barriers: cute.struct.MemRange[Int64, 2]
            k_barriers: cute.struct.MemRange[Int64, 2 * num_stages]
            v_barriers: cute.struct.MemRange[Int64, 2 * num_stages]
            tile_barriers: cute.struct.MemRange[Int64, 2 * TILE_STAGES]
            signals: cute.struct.MemRange[Int64, BUFFERS * len(Signal)]
            tmem: cute.struct.MemRange[Int32, 1]
            blocks: cute.struct.MemRange[Int32, self.block_slots]
            tiles: cute.struct.MemRange[Int32, self.tile_fields * TILE_STAGES]
            factors: cute.struct.MemRange[Float32, ROWS * BUFFERS]
            sums: cute.struct.MemRange[Float32, ROWS * BUFFERS]
            maxima: cute.struct.MemRange[Float32, ROWS * BUFFERS]
            running: cute.struct.MemRange[Float32, ROWS * BUFFERS]
            sQ: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(p.q.layout)], 1024]
            sK: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(p.k.layout)], 1024]
            sV: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(p.v.layout)], 1024]

        return SharedStorage

    def tensors(self, p: ForwardParams, storage) -> SharedTensors:
        """Views of the allocated struct."""
        rows = cute.make_layout((ROWS, BUFFERS))
        return SharedTensors(
            storage.sQ.get_tensor(p.q.layout.outer, swizzle=p.q.layout.inner),
            storage.sK.get_tensor(p.k.layout.outer, swizzle=p.k.layout.inner),
            storage.sV.get_tensor(p.v.layout.outer, swizzle=p.v.layout.inner),
            storage.tiles.get_tensor(cute.make_layout((self.tile_fields, TILE_STAGES))),
            storage.factors.get_tensor(rows),
            storage.sums.get_tensor(rows),
            storage.maxima.get_tensor(rows),
            storage.running.get_tensor(rows),
            storage.tmem.get_tensor(cute.make_layout(1)),
            storage.blocks.get_tensor(cute.make_layout(self.block_slots)),
        )

    def pipelines(self, storage) -> Pipes:
        """The pipelines and signals; arrive counts follow from the roles."""
        spec, config = self.spec, self.config
        signals = storage.signals.data_ptr()
        self.open_signals(signals)

        def threads(count):
            return pipeline.CooperativeGroup(pipeline.Agent.Thread, count)

        def tma(barriers, stages, rows, dim):
            return pipeline.PipelineTmaAsync.create(
                barrier_storage=barriers.data_ptr(),
                num_stages=stages,
                producer_group=threads(1),
                consumer_group=threads(1),  # a commit
                tx_count=rows * dim * self.dtype.width // 8,
                defer_sync=True,
            )

        def plain(barriers, stages, producers, consumers):
            return pipeline.PipelineAsync.create(
                barrier_storage=barriers.data_ptr(),
                num_stages=stages,
                producer_group=threads(producers),
                consumer_group=threads(consumers),
                defer_sync=True,
            )

        def keys(barriers, dim):
            if spec.gathers_keys:
                return plain(barriers, config.num_stages, 32 * config.num_load_warps(spec), 1)
            return tma(barriers, config.num_stages, config.tile_n, dim)

        return Pipes(
            tma(storage.q_barriers, 1, config.rows_used(spec), spec.tile_d),
            keys(storage.k_barriers, spec.tile_d),
            keys(storage.v_barriers, spec.tile_dv),
            plain(
                storage.tile_barriers,
                TILE_STAGES,
                1,
                TILE_READERS + config.num_load_warps(spec) - 1,
            ),
            signals,
        )

    @cute.jit
    def release_tile(self, pipes: Pipes, state):
        """Free the slot of an announcement that this warp has read."""
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            pipes.tile.consumer_release(state)

    @cute.jit
    def open_signals(self, signals: cute.Pointer):
        """Initialise the signals' barriers; one thread does."""
        if cute.arch.thread_idx()[0] == 0:
            for signal in cutlass.range_constexpr(len(Signal)):
                count = sum(ARRIVALS[Signal(signal)].values())
                for buffer in cutlass.range_constexpr(BUFFERS):
                    cute.arch.mbarrier_init(signals + (BUFFERS * signal + buffer), count)


class Signals:
    """Waits and arrivals at signals, noted while they are traced.

    Contract: after tracing `check_sites` says whether all that `arrivals` counts on is there.
    """

    def __init__(self, num_tiles_q: int):
        self.counts, self.sites = arrivals(num_tiles_q), set()

    def barrier(self, pipes: Pipes, signal: Signal, buffer) -> cute.Pointer:
        """The barrier of a signal of a buffer."""
        return pipes.signals + (BUFFERS * signal + buffer)

    def wait(self, pipes: Pipes, signal: Signal, buffer, phase):
        """Wait for a phase of a signal, and order what follows in tensor memory after it."""
        self.sites.add((signal, None))
        cute.arch.mbarrier_wait(self.barrier(pipes, signal, buffer), phase)
        tensor_memory.order_after()

    @cute.jit
    def arrive(self, pipes: Pipes, signal: cutlass.Constexpr, buffer, role: cutlass.Constexpr):
        """Arrive at a signal for this warp, after what all its threads have done."""
        assert role in self.counts[signal], f"{role} does not arrive at {signal}"
        self.sites.add((signal, role))
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(self.barrier(pipes, signal, buffer))

    def commit(self, pipes: Pipes, signal: Signal, buffer, is_issuer: Int32):
        """Arrive at a signal when all products that were issued are done."""
        assert Role.MMA in self.counts[signal], f"no product is counted by {signal}"
        self.sites.add((signal, Role.MMA))
        tensor_memory.commit(self.barrier(pipes, signal, buffer), is_issuer)

    def check_sites(self):
        """Every signal is waited for, and every role that it counts on arrives somewhere."""
        needed = {(signal, role) for signal, roles in self.counts.items() for role in roles}
        needed |= {(signal, None) for signal in self.counts}
        assert self.sites == needed, f"signals: {needed ^ self.sites}"
