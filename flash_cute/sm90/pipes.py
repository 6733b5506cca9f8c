"""What the warps of the SM90 forward kernel exchange: shared memory, pipelines, tile announcements.

Pipelines (full = bytes landed, empty = arrivals):
    q     1 stage      load -> mma   empty: one arrival per consumer warp, after the tile's last S
    k, v  num_stages   load -> mma   empty: one arrival per consumer warp, after S or O is done
    tile  2 stages     load -> mma   full: one arrival; empty: one arrival per consumer thread
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, pipeline

from flash_cute.device.seqlen import SeqlenInfo
from flash_cute.device.tile_scheduler import Tile
from flash_cute.sm90.config import THREADS_PER_WARPGROUP, ConfigSm90
from flash_cute.sm90.params import ForwardParams
from flash_cute.specialization import ForwardSpecialization

WARPS_PER_WARPGROUP = 4
GATHER_FOLLOWERS = THREADS_PER_WARPGROUP - 32  # threads that gather keys beside the load warp
TILE_STAGES = 2
TILE_FIELDS = 8  # 32-bit words of a tile announcement: coordinates, lengths, a split
SPLIT_BITS = 16  # of a part's number; the number of parts is above
SPARSE_TILE_FIELDS = 12  # and the counts of a block mask


class Pipes(NamedTuple):
    """The four pipelines between the load warp and the consumers."""

    q: pipeline.PipelineTmaAsync
    k: pipeline.PipelineTmaAsync | pipeline.PipelineAsync
    v: pipeline.PipelineTmaAsync | pipeline.PipelineAsync
    tile: pipeline.PipelineAsync


class SharedTensors(NamedTuple):
    """Shared memory: (tile, dim, stage) rings, and the ring of tile announcements."""

    sQ: cute.Tensor
    sK: cute.Tensor
    sV: cute.Tensor
    tiles: cute.Tensor  # (fields, TILE_STAGES) int32
    blocks: cute.Tensor  # (num_stages,) int32: the block in each stage of K, with a block mask


class Announcement(NamedTuple):
    """A tile as the load warp announces it."""

    tile: Tile
    seqlen: SeqlenInfo
    num_partial: Int32  # tiles of keys that a block mask lists; 0 without one
    num_full: Int32


class Exchange:
    """Lays out shared memory and opens the pipelines of one specialization with one config."""

    def __init__(self, spec: ForwardSpecialization, config: ConfigSm90, dtype):
        self.spec, self.config, self.dtype = spec, config, dtype
        self.tile_fields = SPARSE_TILE_FIELDS if spec.has_block_mask else TILE_FIELDS

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
            tiles: cute.struct.MemRange[Int32, self.tile_fields * TILE_STAGES]
            blocks: cute.struct.MemRange[Int32, num_stages]
            sQ: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(p.q.layout)], 1024]
            sK: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(p.k.layout)], 1024]
            sV: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(p.v.layout)], 1024]

        return SharedStorage

    def tensors(self, p: ForwardParams, storage) -> SharedTensors:
        """Views of the allocated struct."""
        return SharedTensors(
            storage.sQ.get_tensor(p.q.layout.outer, swizzle=p.q.layout.inner),
            storage.sK.get_tensor(p.k.layout.outer, swizzle=p.k.layout.inner),
            storage.sV.get_tensor(p.v.layout.outer, swizzle=p.v.layout.inner),
            storage.tiles.get_tensor(cute.make_layout((self.tile_fields, TILE_STAGES))),
            storage.blocks.get_tensor(cute.make_layout(self.config.num_stages)),
        )

    def pipelines(self, storage) -> Pipes:
        """The q, k, v and tile pipelines; arrive counts follow from the roles."""
        spec, config = self.spec, self.config
        thread = pipeline.Agent.Thread
        num_mma_warps = WARPS_PER_WARPGROUP * config.num_mma_warpgroups
        one = pipeline.CooperativeGroup(thread, 1)
        mma_warps = pipeline.CooperativeGroup(thread, num_mma_warps)
        mma_threads = pipeline.CooperativeGroup(thread, 32 * num_mma_warps)
        readers = mma_threads  # of tile announcements
        if spec.gathers_keys:
            readers = pipeline.CooperativeGroup(thread, 32 * num_mma_warps + GATHER_FOLLOWERS)
        element_bytes = self.dtype.width // 8

        def tma(barriers, stages, rows, dim):
            return pipeline.PipelineTmaAsync.create(
                barrier_storage=barriers.data_ptr(),
                num_stages=stages,
                producer_group=one,
                consumer_group=mma_warps,
                tx_count=rows * dim * element_bytes,
                defer_sync=True,
            )

        def keys(barriers, dim):
            if not spec.gathers_keys:
                return tma(barriers, config.num_stages, config.tile_n, dim)
            return pipeline.PipelineAsync.create(
                barrier_storage=barriers.data_ptr(),
                num_stages=config.num_stages,
                producer_group=pipeline.CooperativeGroup(thread, THREADS_PER_WARPGROUP),
                consumer_group=mma_threads,
                defer_sync=True,
            )

        return Pipes(
            tma(storage.q_barriers, 1, config.rows_used(spec), spec.tile_d),
            keys(storage.k_barriers, spec.tile_d),
            keys(storage.v_barriers, spec.tile_dv),
            pipeline.PipelineAsync.create(
                barrier_storage=storage.tile_barriers.data_ptr(),
                num_stages=TILE_STAGES,
                producer_group=one,
                consumer_group=readers,
                defer_sync=True,
            ),
        )

    @cute.jit
    def announce(self, smem: SharedTensors, pipes: Pipes, state, tile: Tile, seqlen, counts):
        """Tell the consumers the next tile; returns the advanced state."""
        pipes.tile.producer_acquire(state)
        if cute.arch.lane_idx() == 0:
            slot = smem.tiles[None, state.index]
            fields = (tile.m_block, tile.head, tile.batch)
            fields += (seqlen.seqlen_q, seqlen.seqlen_k, seqlen.offset_q, seqlen.offset_k)
            fields += tuple(counts)
            if const_expr(self.spec.is_split):
                fields += (tile.split | tile.num_splits << SPLIT_BITS,)
            for i in cutlass.range_constexpr(len(fields)):
                slot[i] = fields[i]
            pipes.tile.producer_commit(state)
        state.advance()
        return state

    @cute.jit
    def receive(self, smem: SharedTensors, slot: Int32) -> Announcement:
        """What `announce` wrote into a slot of the ring."""
        split, num_splits = Int32(0), Int32(1)
        if const_expr(self.spec.is_split):
            both = smem.tiles[7, slot]
            split, num_splits = both & (1 << SPLIT_BITS) - 1, both >> SPLIT_BITS
        coordinates = [smem.tiles[i, slot] for i in range(3)]
        tile = Tile(*coordinates, split, num_splits)
        seqlen = SeqlenInfo(*[smem.tiles[i, slot] for i in range(3, 7)])
        num_partial, num_full = Int32(0), Int32(0)
        if const_expr(self.spec.has_block_mask):
            num_partial, num_full = smem.tiles[7, slot], smem.tiles[8, slot]
        return Announcement(tile, seqlen, num_partial, num_full)
