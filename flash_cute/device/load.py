"""The load warp: it finds tiles, announces them to the other warps and issues every TMA.

The parameters, pipelines and shared memory are any with the fields that the steps here use: `q`,
`k`, `v` and, of pipelines, `tile`.
"""

import typing

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, pipeline
from cutlass.cute.nvgpu import cpasync

from flash_cute.device.announce import TILE_STAGES, TileExchange
from flash_cute.device.mask import AttentionMask
from flash_cute.device.seqlen import SeqlenInfo
from flash_cute.device.tile_scheduler import Cursor, Tile
from flash_cute.device.tma import TmaOperand


class Keys(typing.NamedTuple):
    """Where the keys and values of a tile are.

    Shapes: k, v: shared and device memory, as ``LoadWarp.partition_tma``; the ring of shared memory
            and the column of its boxes where keys are paged
    """

    k: typing.Any
    v: typing.Any
    head: Int32
    row: Int32  # of the padded keys, or of the page table
    seqlen: SeqlenInfo


class LoadWarp:
    """One warp; all lanes run the code, one of them issues."""

    def __init__(self, exchange: TileExchange, mask: AttentionMask):
        self.spec, self.config = exchange.spec, exchange.config
        self.exchange, self.mask = exchange, mask

    @cute.jit
    def run(self, p, smem, pipes):
        """All tiles of the CTA, their blocks in the order in which `mma` consumes them."""
        p.scheduler.prefetch()
        states = self.start_states()
        tile_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, TILE_STAGES)
        announce = self.exchange.announce
        tile_idx = cute.arch.block_idx()[0]
        tile, cursor = p.scheduler.locate(tile_idx, Cursor(Int32(0), Int32(0)))
        while tile.m_block >= 0:
            following = Int32(0)
            seqlen = p.sequences.of(tile.batch)
            first_query, _ = p.packing.queries(tile)
            if first_query < seqlen.seqlen_q:
                lists = self.open_lists(p, tile)
                tile_state = announce(smem, pipes, tile_state, tile, seqlen, lists[0])
                states, following = self.load_tile(p, smem, pipes, states, tile, seqlen, lists)
            else:
                following = self.fetch_tile(p)
            tile_idx = cute.arch.shuffle_sync(following, 0)
            tile, cursor = p.scheduler.locate(tile_idx, cursor)
        announce(smem, pipes, tile_state, tile, SeqlenInfo(*[Int32(0)] * 4), ())
        p.scheduler.close(tile_idx, cursor)

    def start_states(self):
        """The states of the rings that the warp fills."""
        producer, num_stages = pipeline.PipelineUserType.Producer, self.config.num_stages
        return tuple(pipeline.make_pipeline_state(producer, n) for n in (1, num_stages, num_stages))

    @cute.jit
    def fetch_tile(self, p) -> Int32:
        """Take the next tile; lane 0 gets its index.

        As late as the loads allow: a tile taken earlier is taken away from the CTAs that are done
        sooner, and runs when the keys that it shares with its neighbours have left the L2 cache.
        """
        following = Int32(0)
        if cute.arch.lane_idx() == 0:
            following = p.scheduler.fetch()
        return following

    @cute.jit
    def open_lists(self, p, tile: Tile):
        """The lists of the block mask for a tile, as ``BlockLists.open``; empty without one."""
        lists = ((),)
        if const_expr(self.spec.has_block_mask):
            head, _ = p.packing.head(tile, Int32(0))  # lists of packed heads are the same
            lists = p.blocks.open(tile.m_block, head, tile.batch)
        return lists

    @cute.jit
    def load_tile(
        self,
        p,
        smem,
        pipes,
        states,
        tile: Tile,
        seqlen,
        lists,
    ):
        """Load Q and all K and V of a tile; returns the advanced states and the next tile."""
        q_state, k_state, v_state = states
        keys = self.find_keys(p, smem, tile, seqlen)
        # V of a block follows K of the next: the consumers ask for them in this order. Pages are
        # looked up a block ahead.
        if const_expr(self.spec.has_block_mask):
            (num_partial, num_full), rows, place = lists
            n_block = place.n_block
            page = self.page_of(p, keys, n_block)
            k_state = self.load_listed(p, smem, pipes, k_state, keys, n_block, page)
            q_state = self.load_queries(p, smem, pipes, q_state, tile, seqlen)
            for i in cutlass.range(1, num_partial + num_full, unroll=1):
                place = p.blocks.advance(place, i, num_partial, rows)
                next_page = self.page_of(p, keys, place.n_block)
                listed = (keys, place.n_block, next_page)
                k_state = self.load_listed(p, smem, pipes, k_state, *listed)
                v_state = self.load_block(p, p.v, pipes.v, v_state, keys, keys.v, n_block, page)
                n_block, page = place.n_block, next_page
        else:
            blocks = self.blocks_of(p, tile, seqlen)
            last, n_block = blocks.end - 1, blocks.begin
            page, next_page = self.page_of(p, keys, last), self.page_of(p, keys, last - 1)
            k_state = self.load_block(p, p.k, pipes.k, k_state, keys, keys.k, last, page)
            q_state = self.load_queries(p, smem, pipes, q_state, tile, seqlen)
            for i in cutlass.range(last - n_block, unroll=1):
                block = last - i
                below = (keys, keys.k, block - 1, next_page)
                k_state = self.load_block(p, p.k, pipes.k, k_state, *below)
                after_next = self.page_of(p, keys, block - 2)
                v_state = self.load_block(p, p.v, pipes.v, v_state, keys, keys.v, block, page)
                page, next_page = next_page, after_next
        next_tile = self.fetch_tile(p)  # its latency passes while a stage gets free
        v_state = self.load_block(p, p.v, pipes.v, v_state, keys, keys.v, n_block, page)
        return (q_state, k_state, v_state), next_tile

    @cute.jit
    def blocks_of(self, p, tile: Tile, seqlen):
        """The blocks of keys of a tile."""
        blocks = self.mask.block_range(*p.packing.queries(tile), seqlen, p.bounds)
        if const_expr(self.spec.is_split):
            part = (tile.split, tile.num_splits, p.split_blocks)
            blocks, _ = self.mask.split_range(blocks, *part)
        return blocks

    @cute.jit
    def load_queries(self, p, smem, pipes, state, tile: Tile, seqlen):
        """Load the queries of every head of a tile; returns the advanced state."""
        batch = 0 if const_expr(self.spec.is_packed_q) else tile.batch
        positions = p.packing.positions
        pipes.q.producer_acquire(state)
        for i in cutlass.range_constexpr(p.packing.heads):
            # Heads that do not exist repeat the last one, so that every tile loads as many bytes.
            head, _ = p.packing.head(tile, Int32(i))
            sQ = self.part_of(smem.sQ, i * positions, p.q)
            to_smem, from_gmem = self.partition_tma(p.q, sQ, (seqlen.offset_q, head, batch))
            self.copy(p.q, pipes.q, state, from_gmem[None, tile.m_block], to_smem)
        state.advance()
        return state

    def find_keys(self, p, smem, tile: Tile, seqlen) -> Keys:
        """Where the keys and values of a tile are; those of pages are found block by block."""
        head = p.packing.kv_head(tile)
        row = 0 if self.spec.is_packed_k else p.sequences.row_k(tile.batch)
        if self.spec.page_rows:
            return Keys((smem.sK, 0), (smem.sV, 0), head, row, seqlen)
        origin = (seqlen.offset_k, head, row)
        k = self.partition_tma(p.k, smem.sK, origin)
        v = self.partition_tma(p.v, smem.sV, origin)
        return Keys(k, v, head, row, seqlen)

    def page_of(self, p, keys: Keys, block: Int32):
        """The page of each piece of a block, a piece for each lane; 0 where keys are not paged."""
        if not self.spec.page_rows:
            return Int32(0)
        first_key = block * self.config.tile_n
        lane = cute.arch.lane_idx()
        return p.pages.page_of(keys.row, first_key, keys.seqlen.seqlen_k, lane)

    def part_of(self, smem, first_row: int, operand: TmaOperand):
        """The part of a tile that one copy fills, from first_row on."""
        return cute.make_tensor(cute.domain_offset((first_row, 0, 0), smem).iterator, operand.box)

    def partition_tma(self, operand: TmaOperand, smem, origin, column: int = 0):
        """(TMA, stage) of shared memory and (TMA, block) of one head, for `copy`.

        column: of boxes, where one does not have the whole head dim
        """
        box = (cute.size(smem, mode=[0]), cute.size(smem, mode=[1]))
        first_row, head, batch = origin
        gX = cute.domain_offset((first_row, 0), operand.tensor[None, None, head, batch])
        return cpasync.tma_partition(
            operand.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(smem, 0, 2),
            cute.group_modes(cute.local_tile(gX, box, (None, column)), 0, 2),
        )

    def copy(self, operand: TmaOperand, pipe, state, from_gmem, to_smem):
        """Start one TMA into the stage of a state."""
        barrier = pipe.producer_get_barrier(state)
        cute.copy(operand.atom, from_gmem, to_smem[None, state.index], tma_bar_ptr=barrier)

    @cute.jit
    def load_block(
        self,
        p,
        operand: TmaOperand,
        pipe,
        state,
        keys: Keys,
        place,
        block: Int32,
        page: Int32,
    ):
        """Wait for a free stage, start filling it with `block`; returns the advanced state.

        Args:
            page: of the block, as `page_of`.
        """
        pipe.producer_acquire(state)
        self.fill(p, operand, pipe, state, keys, place, block, page)
        state.advance()
        return state

    @cute.jit
    def fill(self, p, operand: TmaOperand, pipe, state, keys: Keys, place, block, page):
        """Start the copies of one operand of a block into the stage of a state."""
        if const_expr(self.spec.page_rows > 0):
            ring, column = place
            first_key = block * self.config.tile_n
            for i in cutlass.range_constexpr(self.config.tile_n // self.spec.page_rows):
                origin = (0, keys.head, cute.arch.shuffle_sync(page, i))
                smem = self.part_of(ring, i * self.spec.page_rows, operand)
                to_smem, from_gmem = self.partition_tma(operand, smem, origin, column)
                piece = p.pages.piece(first_key, i)
                self.copy(operand, pipe, state, from_gmem[None, piece], to_smem)
        else:
            to_smem, from_gmem = place
            self.copy(operand, pipe, state, from_gmem[None, block], to_smem)

    def slot_of(self, state) -> Int32:
        """Where the consumers find the number of the block in a stage of K."""
        return state.index

    @cute.jit
    def load_listed(self, p, smem, pipes, state, keys: Keys, block: Int32, page: Int32):
        """`load_block` of K that also tells the consumers which block it is."""
        pipes.k.sync_object_empty.wait(state.index, state.phase)
        if cute.arch.lane_idx() == 0:
            smem.blocks[self.slot_of(state)] = block
        cute.arch.sync_warp()  # before the arrival that lets the consumers read it
        return self.load_block(p, p.k, pipes.k, state, keys, keys.k, block, page)
