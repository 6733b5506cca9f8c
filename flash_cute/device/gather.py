"""Keys and values gathered one by one: several load warps where no TMA fits the pages.

The first one leads: it also finds and announces tiles and loads the queries, as LoadWarp does; the
others follow its announcements. Each warp owns as many rows of a block, 32 at most; a lane looks up
the place of one of them, and all copy 16 bytes at a time with cp.async.

The parameters are any with `mK` and `mV` beside what LoadWarp uses.

No barrier knows when such copies land. A thread therefore arrives at a stage's barrier when its own
copies have landed and are visible to the tensor cores (fence), which it looks after `LAG` blocks
later; until then it goes on issuing. No deadlock: K and V alternate and their rings have two stages
at least, so that a stage gets free without any of the `LAG` newest blocks. The stage of Q does not:
consumers that clear the tail of V, or free Q after the last product with V, hold Q until V has
arrived, and that may be one of the newest. So the leader, before it waits for that stage, looks
after all but K.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, pipeline

from flash_cute.device.announce import TILE_STAGES, TileExchange
from flash_cute.device.load import Keys, LoadWarp
from flash_cute.device.mask import AttentionMask
from flash_cute.device.paged_kv import unpack_place
from flash_cute.device.primitives import arrive_if, copy_or_zero
from flash_cute.device.tile_scheduler import Tile

LAG = 2
ELEMENTS = 8  # of a copy
BYTES = 2  # of an element
RING_BYTES = 2**18  # at most
LANES = 32


class GatheringWarp(LoadWarp):
    """What the leader and the followers share.

    A thread keeps the barriers of its `LAG` newest blocks in `pending`, the oldest first.

    place: the first warp of those that gather, and their number
    """

    def __init__(self, exchange: TileExchange, mask: AttentionMask, place: tuple[int, int]):
        super().__init__(exchange, mask)
        self.first_warp, self.num_warps = place

    def start(self):
        """Nothing is under way yet."""
        self.pending = cute.make_rmem_tensor(LAG, Int32)
        self.pending.fill(0)

    def warp(self) -> Int32:
        """This warp's number among those that gather."""
        warp = cute.arch.warp_idx()
        return warp - self.first_warp if self.first_warp else warp

    @cute.jit
    def finish(self):
        """Wait for all that is under way."""
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_view_async_shared()
        for i in cutlass.range_constexpr(LAG):
            arrive_if(self.pending[i])

    def find_keys(self, p, smem, tile: Tile, seqlen) -> Keys:
        """Where the pages of a tile are."""
        k, v = (smem.sK, p.k.layout, p.mK), (smem.sV, p.v.layout, p.mV)
        head, row = p.packing.kv_head(tile), p.sequences.row_k(tile.batch)
        return Keys(k, v, head, row, seqlen)

    def page_of(self, p, keys: Keys, block: Int32) -> Int64:
        """The place of one row of a block: each lane has one of those of its warp."""
        rows = self.config.tile_n // self.num_warps
        warp, lane = self.warp(), cute.arch.lane_idx()
        key = block * self.config.tile_n + warp * rows + cutlass.min(lane, rows - 1)
        return p.pages.place_of(keys.row, key, keys.seqlen)

    @cute.jit
    def load_block(self, p, operand, pipe, state, keys, place, block, page: Int64):
        """Wait for a free stage, start filling it; returns the advanced state."""
        ring, layout, mX = place
        pipe.producer_acquire(state)
        rows = self.config.tile_n // self.num_warps
        runs = cute.size(ring, mode=[1]) // ELEMENTS
        warp, lane = self.warp(), cute.arch.lane_idx()
        base = ring.iterator.toint()
        swizzled = cute.make_composed_layout(layout.inner, 0, cute.make_layout(RING_BYTES))
        page_of_lane, position_of_lane = unpack_place(page)
        for i in cutlass.range((rows * runs + LANES - 1) // LANES, unroll=4):
            index = i * LANES + lane
            row = cutlass.min(index // runs, rows - 1)
            col = (index - index // runs * runs) * ELEMENTS
            page_idx = cute.arch.shuffle_sync(page_of_lane, row)
            position = cute.arch.shuffle_sync(position_of_lane, row)
            place_in_ring = cute.crd2idx((warp * rows + row, col, state.index), layout.outer)
            slot = base + cute.crd2idx(place_in_ring * BYTES, swizzled)
            is_there = page_idx >= 0 and col < cute.size(mX, mode=[1])
            source = cute.domain_offset((position, col, keys.head, page_idx), mX).iterator
            if index < rows * runs:
                copy_or_zero(slot, source.toint(), is_there)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(LAG)
        cute.arch.fence_view_async_shared()
        arrive_if(self.pending[0])
        for i in cutlass.range_constexpr(LAG - 1):
            self.pending[i] = self.pending[i + 1]
        self.pending[LAG - 1] = pipe.producer_get_barrier(state).toint()
        state.advance()
        return state


class LeadingWarp(GatheringWarp):
    """The first warp."""

    @cute.jit
    def run(self, p, smem, pipes):
        """As LoadWarp."""
        self.start()
        LoadWarp.run(self, p, smem, pipes)
        self.finish()

    @cute.jit
    def load_queries(self, p, smem, pipes, state, tile: Tile, seqlen):
        """As LoadWarp; the newest block is K of this tile."""
        cute.arch.cp_async_wait_group(1)
        cute.arch.fence_view_async_shared()
        for i in cutlass.range_constexpr(LAG - 1):
            arrive_if(self.pending[i])
            self.pending[i] = 0
        return LoadWarp.load_queries(self, p, smem, pipes, state, tile, seqlen)


class FollowingWarp(GatheringWarp):
    """The other warps."""

    @cute.jit
    def run(self, p, smem, pipes):
        """All tiles that the leader announces."""
        self.start()
        states = self.start_states()
        tile_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, TILE_STAGES)
        pipes.tile.consumer_wait(tile_state)
        m_block = smem.tiles[0, tile_state.index]
        while m_block >= 0:
            said = self.exchange.receive(smem, tile_state.index)
            self.exchange.release_tile(pipes, tile_state)
            lists = self.open_lists(p, said.tile)
            states, _ = self.load_tile(p, smem, pipes, states, said.tile, said.seqlen, lists)
            tile_state.advance()
            pipes.tile.consumer_wait(tile_state)
            m_block = smem.tiles[0, tile_state.index]
        self.finish()

    def load_queries(self, p, smem, pipes, state, tile: Tile, seqlen):
        """The leader does."""
        return state

    def fetch_tile(self, p) -> Int32:
        """The leader does."""
        return Int32(0)


class GatherWarps:
    """All warps that gather.

    place: as GatheringWarp
    """

    leading, following = LeadingWarp, FollowingWarp

    def __init__(self, exchange: TileExchange, mask: AttentionMask, place: tuple[int, int]):
        self.first_warp = place[0]
        self.leader = self.leading(exchange, mask, place)
        self.follower = self.following(exchange, mask, place)

    @cute.jit
    def run(self, p, smem, pipes):
        """All tiles of the CTA."""
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == self.first_warp:
            self.leader.run(p, smem, pipes)
        else:
            self.follower.run(p, smem, pipes)
