"""What the warps of the SM90 kernel for qv exchange: shared memory and pipelines.

Pipelines (full = bytes landed or arrivals, empty = arrivals):
    q          1 stage     query warps -> mma   full, empty: one arrival per thread
    low, high  num_stages  load warp -> mma     empty: one arrival per consumer warp, after O is
               low: k and the first half of the columns of v; high: the second half
    tile       2 stages    load warp -> mma, query warps   full: one arrival; empty: one per thread
"""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, pipeline

from flash_cute.device.announce import TILE_STAGES
from flash_cute.sm90.base import ROWS_PER_THREAD
from flash_cute.sm90.config import THREADS_PER_WARPGROUP
from flash_cute.sm90.mla_params import HALVES, MlaParams
from flash_cute.sm90.pipes import WARPS_PER_WARPGROUP, Exchange

QUERY_THREADS = THREADS_PER_WARPGROUP - 32  # of the load warpgroup, those beside the load warp


class MlaPipes(NamedTuple):
    """The four pipelines."""

    q: pipeline.PipelineAsync
    low: pipeline.PipelineTmaAsync
    high: pipeline.PipelineTmaAsync
    tile: pipeline.PipelineAsync


class MlaTensors(NamedTuple):
    """Shared memory; sK, sV and sP are rings, and sP lies where sK does."""

    sQ: cute.Tensor  # (tile_m, tile_d)
    sQv: cute.Tensor  # (tile_m, tile_dv)
    sK: cute.Tensor  # (tile_n, tile_d, stage)
    sV: cute.Tensor  # (tile_n, tile_dv, stage)
    sP: cute.Tensor  # (tile_m, tile_n, stage)
    maxima: cute.Tensor  # (tile_m, stage) f32: of each row, with the weights in the stage
    sums: cute.Tensor  # (rows, threads, warpgroup) f32
    tiles: cute.Tensor  # (fields, TILE_STAGES) int32


class MlaExchange(Exchange):
    """Lays out shared memory and opens the pipelines; announcements are those of Exchange."""

    def storage(self, p: MlaParams):
        """The struct of shared memory."""
        config, dtype = self.config, self.dtype
        stages = config.num_stages

        @cute.struct
        class SharedStorage:
            """Barriers first, then the tiles, each aligned for the 128-byte swizzle."""

            q_barriers: cute.struct.MemRange[Int64, 2]
            low_barriers: cute.struct.MemRange[Int64, 2 * stages]
            high_barriers: cute.struct.MemRange[Int64, 2 * stages]
            tile_barriers: cute.struct.MemRange[Int64, 2 * TILE_STAGES]
            tiles: cute.struct.MemRange[Int32, self.tile_fields * TILE_STAGES]
            maxima: cute.struct.MemRange[Float32, config.tile_m * stages]
            sums: cute.struct.MemRange[Float32, ROWS_PER_THREAD * THREADS_PER_WARPGROUP * HALVES]
            sQ: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(p.q_layout)], 1024]
            sQv: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(p.qv_layout)], 1024]
            sK: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(p.k_layout)], 1024]
            sV: cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(p.v.layout)], 1024]

        return SharedStorage

    def tensors(self, p: MlaParams, storage) -> MlaTensors:
        """Views of the allocated struct."""

        def swizzled(field, layout):
            return field.get_tensor(layout.outer, swizzle=layout.inner)

        stages = self.config.num_stages
        sums = (ROWS_PER_THREAD, THREADS_PER_WARPGROUP, HALVES)
        return MlaTensors(
            sQ=swizzled(storage.sQ, p.q_layout)[None, None, 0],
            sQv=swizzled(storage.sQv, p.qv_layout)[None, None, 0],
            sK=swizzled(storage.sK, p.k_layout),
            sV=swizzled(storage.sV, p.v.layout),
            sP=swizzled(storage.sK, p.p_layout),
            maxima=storage.maxima.get_tensor(cute.make_layout((self.config.tile_m, stages))),
            sums=storage.sums.get_tensor(cute.make_layout(sums)),
            tiles=storage.tiles.get_tensor(cute.make_layout((self.tile_fields, TILE_STAGES))),
        )

    def pipelines(self, storage) -> MlaPipes:
        """The q, low, high and tile pipelines; arrive counts follow from the roles."""
        spec, config = self.spec, self.config
        num_mma_warps = WARPS_PER_WARPGROUP * config.num_mma_warpgroups

        def threads(count):
            return pipeline.CooperativeGroup(pipeline.Agent.Thread, count)

        def tma(barriers, dim):
            return pipeline.PipelineTmaAsync.create(
                barrier_storage=barriers.data_ptr(),
                num_stages=config.num_stages,
                producer_group=threads(1),
                consumer_group=threads(num_mma_warps),
                tx_count=config.tile_n * dim * self.dtype.width // 8,
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

        half, keys = spec.tile_dv // HALVES, 0 if spec.is_only_qv else spec.tile_d
        mma_threads = 32 * num_mma_warps
        return MlaPipes(
            plain(storage.q_barriers, 1, QUERY_THREADS, mma_threads),
            tma(storage.low_barriers, keys + half),
            tma(storage.high_barriers, half),
            plain(storage.tile_barriers, TILE_STAGES, 1, mma_threads + QUERY_THREADS),
        )
