"""The load warpgroup of the SM90 kernel for qv: one warp issues every TMA, three gather queries.

The load warp finds tiles and announces them, as in load.py. Rows of a tile are (query, head) pairs
at any ratio of heads, of which no box of TMA makes a tile; so the query warps copy them 16 bytes
at a time, behind the announcements, while the consumers still write the tile before.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, pipeline

from flash_cute.device.announce import TILE_STAGES
from flash_cute.device.load import Keys, LoadWarp
from flash_cute.device.mask import AttentionMask
from flash_cute.device.primitives import copy_or_zero, swizzle_128
from flash_cute.device.tile_scheduler import Tile
from flash_cute.sm90.mla_params import HALVES, MlaParams
from flash_cute.sm90.mla_pipes import MlaExchange, MlaPipes, MlaTensors

QUERY_WARPS = 3
LANES = 32
ELEMENTS = 8  # of a copy


class MlaLoadWarp(LoadWarp):
    """Loads K and V of a block into the low and the high part of a stage."""

    def start_states(self):
        """The state of the ring of stages."""
        return pipeline.make_pipeline_state(
            pipeline.PipelineUserType.Producer, self.config.num_stages
        )

    @cute.jit
    def load_tile(
        self, p: MlaParams, smem: MlaTensors, pipes: MlaPipes, state, tile: Tile, seqlen, lists
    ):
        """Load all K and V of a tile; returns the advanced state and the next tile."""
        keys = self.find_keys(p, smem, tile, seqlen)
        blocks = self.blocks_of(p, tile, seqlen)
        last = blocks.end - 1
        page = self.page_of(p, keys, last)
        for i in cutlass.range(last - blocks.begin, unroll=1):
            next_page = self.page_of(p, keys, last - i - 1)  # looked up a block ahead
            state = self.load_keys(p, pipes, state, keys, last - i, page)
            page = next_page
        following = self.fetch_tile(p)  # its latency passes while a stage gets free
        state = self.load_keys(p, pipes, state, keys, blocks.begin, page)
        return state, following

    def find_keys(self, p: MlaParams, smem: MlaTensors, tile: Tile, seqlen) -> Keys:
        """Where the keys and, for each half of the columns, the values of a tile are."""
        head, row = p.packing.kv_head(tile), p.sequences.row_k(tile.batch)
        half = self.spec.tile_dv // HALVES
        rings = [cute.domain_offset((0, half * i, 0), smem.sV) for i in range(HALVES)]
        if self.spec.page_rows:
            return Keys(
                (smem.sK, 0), [(ring, i) for i, ring in enumerate(rings)], head, row, seqlen
            )
        origin = (seqlen.offset_k, head, row)
        v = [
            self.partition_tma(p.v, self.part_of(ring, 0, p.v), origin, i)
            for i, ring in enumerate(rings)
        ]
        k = None if self.spec.is_only_qv else self.partition_tma(p.k, smem.sK, origin)
        return Keys(k, v, head, row, seqlen)

    @cute.jit
    def load_keys(self, p: MlaParams, pipes: MlaPipes, state, keys: Keys, block: Int32, page):
        """Wait for a free stage, start filling it with `block`; returns the advanced state."""
        pipes.low.producer_acquire(state)
        if const_expr(not self.spec.is_only_qv):
            self.fill(p, p.k, pipes.low, state, keys, keys.k, block, page)
        self.fill(p, p.v, pipes.low, state, keys, keys.v[0], block, page)
        pipes.high.producer_acquire(state)
        self.fill(p, p.v, pipes.high, state, keys, keys.v[1], block, page)
        state.advance()
        return state


class QueryWarps:
    """Warps 1 to 3 of the CTA: they follow the announcements and copy the rows of q and qv."""

    def __init__(self, exchange: MlaExchange):
        self.spec, self.config, self.exchange = exchange.spec, exchange.config, exchange

    @cute.jit
    def run(self, p: MlaParams, smem: MlaTensors, pipes: MlaPipes):
        """All tiles of the CTA."""
        q_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
        tile_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, TILE_STAGES)
        pipes.tile.consumer_wait(tile_state)
        m_block = smem.tiles[0, tile_state.index]
        while m_block >= 0:
            said = self.exchange.receive(smem, tile_state.index)
            pipes.tile.consumer_release(tile_state)
            pipes.q.producer_acquire(q_state)
            self.load_rows(p, smem, said.tile, said.seqlen)
            # Consumers read through the asynchronous proxy; no barrier knows when copies land.
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(0)
            cute.arch.fence_view_async_shared()
            pipes.q.producer_commit(q_state)
            q_state.advance()
            tile_state.advance()
            pipes.tile.consumer_wait(tile_state)
            m_block = smem.tiles[0, tile_state.index]

    @cute.jit
    def load_rows(self, p: MlaParams, smem: MlaTensors, tile: Tile, seqlen):
        """Start the copies of this warp's rows of a tile; rows without a query become zeros."""
        batch = 0 if const_expr(self.spec.is_packed_q) else tile.batch
        first = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - 1
        for row in cutlass.range(first, self.config.tile_m, QUERY_WARPS, unroll=1):
            query, head = p.packing.row(tile, row)
            place = (seqlen.offset_q + query, head, batch)
            is_there = query < seqlen.seqlen_q
            self.load_row(p.mQv, smem.sQv, row, place, is_there)
            if const_expr(not self.spec.is_only_qv):
                self.load_row(p.mQ, smem.sQ, row, place, is_there)

    @cute.jit
    def load_row(self, mX: cute.Tensor, sX: cute.Tensor, row: Int32, place, is_there):
        """Start the copy of one row, of zeros past its head dim.

        Shapes: mX: (rows, dim, heads, batch); sX: (tile_m, tile dim)
        """
        query, head, batch = place
        num_runs = cute.size(sX, mode=[1]) // ELEMENTS
        lane = cute.arch.lane_idx()
        for i in cutlass.range_constexpr((num_runs + LANES - 1) // LANES):
            run = i * LANES + lane
            if run < num_runs:
                slot = cute.local_tile(sX, (1, ELEMENTS), (row, run)).iterator.toint()
                source = cute.domain_offset((query, run * ELEMENTS, head, batch), mX).iterator
                is_wanted = is_there & (run * ELEMENTS < cute.size(mX, mode=[1]))
                copy_or_zero(swizzle_128(slot), source.toint(), is_wanted)


class MlaLoadWarps:
    """All warps of the load warpgroup."""

    def __init__(self, exchange: MlaExchange, mask: AttentionMask):
        self.load_warp, self.query_warps = MlaLoadWarp(exchange, mask), QueryWarps(exchange)

    @cute.jit
    def run(self, p: MlaParams, smem: MlaTensors, pipes: MlaPipes):
        """All tiles of the CTA."""
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            self.load_warp.run(p, smem, pipes)
        else:
            self.query_warps.run(p, smem, pipes)
