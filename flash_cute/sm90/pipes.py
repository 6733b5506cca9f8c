"""What the warps of the SM90 forward kernel exchange: shared memory, pipelines, tile announcements.

Pipelines (full = bytes landed, empty = arrivals):
    q     1 stage      load -> mma   empty: one arrival per consumer warp, after the tile's last S
    k, v  num_stages   load -> mma   empty: one arrival per consumer warp, after S or O is done
    tile  2 stages     load -> mma   full: one arrival; empty: one arrival per consumer thread
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64, pipeline

from flash_cute.device.announce import TILE_STAGES, TileExchange
from flash_cute.sm90.config import THREADS_PER_WARPGROUP
from flash_cute.sm90.params import ForwardParams

WARPS_PER_WARPGROUP = 4
GATHER_FOLLOWERS = THREADS_PER_WARPGROUP - 32  # threads that gather keys beside the load warp


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


class Exchange(TileExchange):
    """Lays out shared memory and opens the pipelines of one specialization with one config."""

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

    def release_tile(self, pipes, state):
        """Free the slot of an announcement that this thread has read."""
        pipes.tile.consumer_release(state)

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
