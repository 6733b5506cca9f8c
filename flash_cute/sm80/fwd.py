"""FlashAttention forward for Ampere and Ada: cp.async loads, ldmatrix, warp-level mma.

Algorithm, per tile of tile_m queries of one head, keys visited from the last block to the first:
    S = Q K_j^T                       mma.sync, Q from shared memory or kept in registers
    mask S in edge blocks; rescale O where the running maximum rose by more than 2^8
    P = exp2(S * scale - max)         between the instructions of the next product
    O = O + P V_j                     mma.sync, P from registers
    out = O / row_sum, lse = log(row_sum) + max

All warps do all of it, each for 16 or 32 rows of its own, or two for the same (warp_pairs.py);
where queries are few, a warp without any only copies. A CTA has one tile. While a block is worked
on, later ones are copied: K into the stage that S_j has freed, V into the one that O of the block
before has. With s stages, per block j:

    wait K_j, barrier | start V_{j+s-1} | S_j, maximum | wait V_j, barrier | start K_{j+s} | P, O

Copies are committed in the order (Q, K_0), V_0, K_1, V_1, ..., a group for each, empty where there
is no block: 2 s - 2 groups follow the one that is waited for, and one more the first, as V_{s-1} is
started with the first copies. The barrier makes the copies of all threads visible to all, and says
that all have read what the copies after it overwrite. Several CTAs of a multiprocessor fill each
other's waits.

Budget: shared memory in ForwardConfigSm80.smem_bytes, registers of O, S and Q in `registers`.
"""

import typing
from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from flash_cute.device import softmax
from flash_cute.device.block_sparsity import Place
from flash_cute.device.forward import AttentionKernel, Work
from flash_cute.device.primitives import as_rows_cols, fresh_thread_idx
from flash_cute.device.seqlen import SeqlenInfo
from flash_cute.device.tile_scheduler import Cursor, Tile
from flash_cute.sm80.config import ELEMENT_BYTES, PLACE_FIELDS, ForwardConfigSm80
from flash_cute.sm80.load import LANES, Loader, Source
from flash_cute.sm80.params import ForwardParams, LaunchDescriptionSm80
from flash_cute.sm80.tiles import CHUNK, TILE_ALIGNMENT, load_matrices
from flash_cute.sm80.warp_pairs import Exchange, WarpPairs
from flash_cute.specialization import ForwardSpecialization

MMA_ROWS = 16
MMA_DEPTH = 16


class SharedTiles(typing.NamedTuple):
    """Where the tiles are in shared memory."""

    q: cute.Pointer
    k: cute.Pointer
    v: cute.Pointer
    place: cute.Tensor  # (PLACE_FIELDS,) int32: the tile and its sequence
    exchange: Exchange | None  # of warps that share rows


@dataclass(frozen=True)
class Fragments:
    """What a thread holds across blocks: registers, and its places in shared memory."""

    acc_O: cute.Tensor  # f32, in the form that wgmma has: ((2, 2, cols / 8), rows / 16, 1)
    rP: cute.Tensor  # likewise
    rQ: cute.Tensor  # (8, rows / 16, head_dim / 16); None where Q is not kept
    row_max: cute.Tensor  # (rows,) f32, as row_sum and o_scale
    row_sum: cute.Tensor
    o_scale: cute.Tensor
    q_lane: Int32  # addresses for ldmatrix, that of Q in the warp's rows
    k_lane: Int32
    v_lane: Int32
    place: cute.Tensor  # the tile's, as SharedTiles has it
    exchange: Exchange | None
    smem: SharedTiles


@dataclass(frozen=True)
class Feed:
    """Where the keys of a tile come from."""

    k: Source
    v: Source
    row: Int32  # of the page table
    lists: tuple  # rows of the block mask's lists; empty without one


@dataclass(frozen=True)
class Ahead:
    """What is known of the blocks to come; only what a specialization needs is used."""

    numbers: tuple  # with lists: of this block and the num_stages next ones, -1 past the last
    place: Place  # in the lists, of the last of them
    index: Int32  # of that one among the listed
    places: tuple  # with pages: of the rows of the last block whose K was asked for
    next_places: tuple  # of the block after that, where that is known; else empty


class FlashAttentionForwardSm80(AttentionKernel):
    """One CTA = one (m_block, head, batch) tile; see the module docstring.

    Contract: as FlashAttentionForwardSm90's: a derived class overrides steps, usually of those
              under "from scores to weights" here and in device/forward.py, and is passed as
              `kernel=`.
    """

    label = "flash_fwd_sm80"

    @classmethod
    def config_for(cls, spec, config):
        """The package's choice; warps that share rows only with the steps that know of it."""
        base = FlashAttentionForwardSm80
        if cls.first_weights is base.first_weights and cls.next_weights is base.next_weights:
            return config
        return replace(config, shares_rows=False)

    def __init__(self, spec: ForwardSpecialization, config: ForwardConfigSm80):
        super().__init__(spec, config, LaunchDescriptionSm80(spec, config))
        self.loader = Loader(spec, config)
        self.pairs = WarpPairs(spec, config)
        self.num_m = config.rows_per_warp // MMA_ROWS
        self.num_keys = config.keys_per_warp
        self.rows_per_thread = 2 * self.num_m

    # ---------------------------------------------------------------- device

    @cute.kernel
    def kernel(self, p: ForwardParams):
        """Device side: find the tile of this CTA; where sequences differ there may be none."""
        smem = self.shared_memory()
        tile, _ = p.scheduler.locate(cute.arch.block_idx()[0], Cursor(Int32(0), Int32(0)))
        if tile.m_block >= 0:
            seqlen = p.sequences.of(tile.batch)
            if tile.m_block * p.packing.positions < seqlen.seqlen_q:
                self.attend(p, smem, tile, seqlen)

    def shared_memory(self) -> SharedTiles:
        """Room for the tiles: Q, then the rings of K and V, and P where warps exchange it."""
        loader, dtype, num_stages = self.loader, self.dtype, self.config.num_stages
        weights, num_rows = (size // 4 for size in self.config.exchange_bytes())
        values = num_stages * loader.v_layout.size

        def ring(size):
            return cute.struct.Align[cute.struct.MemRange[dtype, size], TILE_ALIGNMENT]

        @cute.struct
        class SharedStorage:
            """Tiles that begin with the first bank, and the tile's place."""

            sQ: ring(loader.q_layout.size)
            sK: ring(num_stages * loader.k_layout.size)
            sV: ring(values + 2 * weights)
            place: cute.struct.MemRange[Int32, PLACE_FIELDS]
            rows: cute.struct.MemRange[Float32, max(num_rows, 1)]

        storage, exchange = SmemAllocator().allocate(SharedStorage), None
        if self.config.shares_rows:
            exchange = Exchange(
                storage.sV.data_ptr() + values,
                storage.rows.get_tensor(cute.make_layout(num_rows)),
            )
        return SharedTiles(
            storage.sQ.data_ptr(),
            storage.sK.data_ptr(),
            storage.sV.data_ptr(),
            storage.place.get_tensor(cute.make_layout(PLACE_FIELDS)),
            exchange,
        )

    @cute.jit
    def attend(self, p: ForwardParams, smem: SharedTiles, tile: Tile, seqlen: SeqlenInfo):
        """All of one tile."""
        self.note(smem.place, tile, seqlen)
        self.loader.load_queries(p, smem.q, tile, seqlen)
        work, lists, place = self.open(p, tile, seqlen)
        pipes = self.feed(p, smem, work, lists)
        kv_state = self.start(p, pipes, work, place)
        if const_expr(self.config.skips_warps):
            if self.has_queries(p, tile, seqlen):
                self.compute(p, smem, pipes, kv_state, work)
            else:
                self.only_copy(p, smem, pipes, kv_state, work)
        else:
            self.compute(p, smem, pipes, kv_state, work)

    def has_queries(self, p: ForwardParams, tile: Tile, seqlen: SeqlenInfo):
        """Whether this thread's warp has a row with a query; later warps have later queries."""
        row = self.pairs.first_row(cute.arch.thread_idx()[0])
        _, position = p.packing.place(row) if self.spec.pack_heads > 1 else (0, row)
        return tile.m_block * p.packing.positions + position < seqlen.seqlen_q

    @cute.jit
    def compute(self, p: ForwardParams, smem: SharedTiles, pipes: Feed, kv_state, work: Work):
        """Visit all blocks and write the output."""
        c = self.fragments(smem)
        c.acc_O.fill(0.0)
        if const_expr(self.spec.has_block_mask):
            self.visit_lists(p, c, pipes, kv_state, work)
        else:
            self.visit_range(p, c, pipes, kv_state, work)
        if const_expr(self.config.shares_rows):
            self.pairs.add_sums(c.exchange, c.row_sum)
        self.store(p, c, self.recall(smem.place, work))

    @cute.jit
    def note(self, place: cute.Tensor, tile: Tile, seqlen: SeqlenInfo):
        """Write down the tile's place, which then occupies no registers during the loops.

        The barriers of the first block make it visible.
        """
        if cute.arch.thread_idx()[0] == 0:
            fields = (tile.m_block, tile.head, tile.batch, tile.split, tile.num_splits)
            fields += (seqlen.seqlen_q, seqlen.seqlen_k, seqlen.offset_q, seqlen.offset_k)
            for i in cutlass.range_constexpr(PLACE_FIELDS):
                place[i] = fields[i]

    def recall(self, place: cute.Tensor, work: Work) -> Work:
        """The work with the tile's place as `note` wrote it."""
        fields = [place[i] for i in range(PLACE_FIELDS)]
        return replace(work, tile=Tile(*fields[:5]), seqlen=SeqlenInfo(*fields[5:]))

    @cute.jit
    def open(self, p: ForwardParams, tile: Tile, seqlen: SeqlenInfo):
        """(the work of a tile, the rows of its lists, the place of the first listed block)."""
        blocks, is_empty = self.blocks_of(p, tile, seqlen)
        counts, lists, place = (Int32(0), Int32(0)), (), Place(*[Int32(0)] * 3)
        if const_expr(self.spec.has_block_mask):
            head, _ = p.packing.head(tile, Int32(0))  # lists of packed heads are the same
            counts, lists, place = p.blocks.open(tile.m_block, head, tile.batch)
        return Work(tile, seqlen, blocks, *counts, is_empty), lists, place

    def feed(self, p: ForwardParams, smem: SharedTiles, work: Work, lists) -> Feed:
        """Where the keys of a tile come from."""
        loader, seqlen = self.loader, work.seqlen
        row = 0 if self.spec.is_packed_k else p.sequences.row_k(work.tile.batch)
        origin = (seqlen.offset_k, p.packing.kv_head(work.tile), row)
        k = loader.source(loader.k_layout, p.mK, smem.k, origin)
        v = loader.source(loader.v_layout, p.mV, smem.v, origin)
        return Feed(k, v, Int32(row), lists)

    def fragments(self, smem: SharedTiles) -> Fragments:
        """Registers of this thread and its places in shared memory."""
        num_m = self.num_m
        rQ = None
        if self.config.keeps_q:
            rQ = cute.make_rmem_tensor((CHUNK, num_m, self.spec.tile_d // MMA_DEPTH), self.dtype)
        rows = [cute.make_rmem_tensor(self.rows_per_thread, Float32) for _ in range(3)]
        lanes = self.lanes(smem, cute.arch.thread_idx()[0])
        return Fragments(
            acc_O=cute.make_rmem_tensor(((2, 2, self.pairs.columns // 8), num_m, 1), Float32),
            rP=cute.make_rmem_tensor(((2, 2, self.num_keys // 8), num_m, 1), self.dtype),
            rQ=rQ,
            row_max=rows[0],
            row_sum=rows[1],
            o_scale=rows[2],
            q_lane=lanes[0],
            k_lane=lanes[1],
            v_lane=lanes[2],
            place=smem.place,
            exchange=smem.exchange,
            smem=smem,
        )

    def lanes(self, smem: SharedTiles, thread: Int32):
        """A thread's addresses for ldmatrix: of Q in the warp's rows, of its keys of K and V."""
        loader, lane = self.loader, thread & LANES - 1
        q_row, half = self.pairs.first_row(thread), self.pairs.half(thread)

        def address(tile: cute.Pointer, offset: Int32):
            return Int32(tile.toint()) + offset * ELEMENT_BYTES

        q_lane = loader.q_layout.lane_of_rows(lane) + q_row * loader.q_layout.panel
        k_lane = loader.k_layout.lane_of_columns(lane)
        v_lane = loader.v_layout.lane_of_rows(lane)
        if self.config.shares_rows:
            first_key = half * self.num_keys
            k_lane += first_key * loader.k_layout.panel
            v_lane += first_key * loader.v_layout.panel
            v_lane += half * self.pairs.columns * self.config.tile_n  # whole panels
        return address(smem.q, q_lane), address(smem.k, k_lane), address(smem.v, v_lane)

    # -- copies of keys and values

    @cute.jit
    def start(self, p: ForwardParams, pipes: Feed, work: Work, place: Place):
        """Start the copies that come before the first block; returns its states."""
        num_stages, numbers = self.config.num_stages, ()
        n_block = work.blocks.end - 1
        if const_expr(self.spec.has_block_mask):
            numbers = (place.n_block,) * (num_stages + 1)
        ahead = Ahead(numbers, place, Int32(0), (), ())
        if const_expr(self.spec.gathers_keys and not self.spec.has_block_mask):
            ahead = replace(ahead, next_places=self.look_up(p, pipes, ahead, work, n_block, 0))
        for _ in cutlass.range_constexpr(num_stages):
            ahead = self.follow(p, pipes, work, ahead)
        for i in cutlass.range_constexpr(num_stages):
            ahead = self.ask_for(p, pipes, ahead, work, n_block, i)
            self.load(pipes, (Int32(0), ahead), work, n_block, i, i == 0, is_v=False)
            self.load(pipes, (Int32(0), ahead), work, n_block, i, i == 0, is_v=True)
        return Int32(0), ahead

    @cute.jit
    def follow(self, p: ForwardParams, pipes: Feed, work: Work, ahead: Ahead) -> Ahead:
        """Go on to the next listed block."""
        if const_expr(self.spec.has_block_mask):
            index, place, number = ahead.index + 1, ahead.place, Int32(-1)
            if index < work.num_partial + work.num_full:
                place = p.blocks.advance(place, index, work.num_partial, pipes.lists)
                number = place.n_block
            ahead = Ahead((*ahead.numbers[1:], number), place, index, ahead.places, ())
        return ahead

    def upcoming(self, ahead: Ahead, work: Work, n_block, distance: int):
        """(number, whether it is there) of the block so many visits after this one."""
        number = ahead.numbers[distance] if self.spec.has_block_mask else n_block - distance
        first = 0 if self.spec.has_block_mask else work.blocks.begin
        return number, number >= first

    @cute.jit
    def ask_for(self, p: ForwardParams, pipes: Feed, ahead: Ahead, work: Work, n_block, distance):
        """Have the pages of a later block, which were looked up a block before if it was known.

        Its entries of the table may come from device memory, and nothing waits for them until then.
        """
        if const_expr(self.spec.gathers_keys and self.spec.has_block_mask):
            places = self.look_up(p, pipes, ahead, work, n_block, distance)
            ahead = Ahead(ahead.numbers, ahead.place, ahead.index, places, ())
        elif const_expr(self.spec.gathers_keys):
            places = self.look_up(p, pipes, ahead, work, n_block, distance + 1)
            ahead = Ahead((), ahead.place, ahead.index, ahead.next_places, places)
        return ahead

    def look_up(self, p: ForwardParams, pipes: Feed, ahead: Ahead, work: Work, n_block, distance):
        """The places of the rows of a later block: for V and, where it lies differently, for K."""
        number, is_there = self.upcoming(ahead, work, n_block, distance)
        number = cutlass.select_(is_there, number, Int32(-1))
        layouts = {layout.panel: layout for layout in (self.loader.v_layout, self.loader.k_layout)}
        return tuple(
            self.loader.look_up(p, layout, pipes.row, number, work.seqlen)
            for layout in layouts.values()
        )

    @cute.jit
    def load(
        self,
        pipes: Feed,
        kv_state,
        work: Work,
        n_block: Int32 | None,
        distance: cutlass.Constexpr[int],
        is_first: cutlass.Constexpr[bool],
        is_v: cutlass.Constexpr[bool],
    ):
        """Start copying V, or else K, of the block so many visits later.

        That is a group, empty where there is no such block.
        """
        stage, ahead = kv_state
        loader = self.loader
        layout, source, places = loader.k_layout, pipes.k, ahead.places[-1:]
        if const_expr(is_v):
            layout, source, places = loader.v_layout, pipes.v, ahead.places[:1]
        number, is_there = self.upcoming(ahead, work, n_block, distance)
        end_key = self.end_key(work, is_first)
        if is_there:
            stage = self.stage_after(stage, distance)
            self.loader.load_block(layout, source, number, stage, end_key, places)
        cute.arch.cp_async_commit_group()

    def end_key(self, work: Work, is_first: bool):
        """Where a block's keys may end: lists have blocks in any order, else it is the first."""
        return work.seqlen.seqlen_k if is_first or self.spec.has_block_mask else None

    def stage_after(self, stage: Int32, distance: int) -> Int32:
        """The stage of the block so many visits later."""
        num_stages = self.config.num_stages
        if distance % num_stages == 0:
            return stage
        later = stage + distance % num_stages
        return cutlass.select_(later >= num_stages, later - num_stages, later)

    def await_copies(self, is_first: bool = False):
        """Wait for the oldest copies, which are needed now, of all threads."""
        cute.arch.cp_async_wait_group(2 * self.config.num_stages - (1 if is_first else 2))
        cute.arch.sync_threads()

    @cute.jit
    def only_copy(self, p: ForwardParams, smem: SharedTiles, pipes: Feed, kv_state, work: Work):
        """What a warp without queries does: its part of the copies, the barriers of all."""
        n_block, stage, ahead = work.blocks.end - 1, *kv_state
        ahead = self.await_keys(p, smem.place, pipes, (stage, ahead), work, n_block, True)
        self.await_values(smem.place, pipes, (stage, ahead), work, n_block)
        stage = self.stage_after(stage, 1)
        for _ in cutlass.range(n_block - work.blocks.begin, unroll=1):
            n_block -= 1
            ahead = self.await_keys(p, smem.place, pipes, (stage, ahead), work, n_block, False)
            self.await_values(smem.place, pipes, (stage, ahead), work, n_block)
            stage = self.stage_after(stage, 1)

    @cute.jit
    def await_keys(
        self,
        p: ForwardParams,
        place: cute.Tensor,
        pipes: Feed,
        kv_state,
        work: Work,
        n_block: Int32 | None,
        is_first: cutlass.Constexpr[bool],
    ) -> Ahead:
        """Wait for K of a block, start the next copy of V; returns what is known then."""
        _, ahead = kv_state
        self.await_copies(is_first)
        now, num_stages = self.recall(place, work), self.config.num_stages
        if const_expr(not is_first):  # else it is under way
            self.load(pipes, kv_state, now, n_block, num_stages - 1, False, is_v=True)
        return self.ask_for(p, pipes, ahead, now, n_block, num_stages)

    @cute.jit
    def await_values(self, place: cute.Tensor, pipes: Feed, kv_state, work: Work, n_block):
        """Wait for V of a block, start the next copy of K."""
        self.await_copies()
        now = self.recall(place, work)
        self.load(pipes, kv_state, now, n_block, self.config.num_stages, False, is_v=False)

    # -- blocks

    @cute.jit
    def first_block(
        self, p: ForwardParams, c: Fragments, pipes: Feed, kv_state, work: Work, n_block
    ):
        """A tile's first block of keys; returns the states of the next one."""
        acc_S, kv_state = self.scores(p, c, pipes, kv_state, work, n_block, True)
        work = self.recall(c.place, work)
        S, (number, _) = as_rows_cols(acc_S), self.upcoming(kv_state[1], work, n_block, 0)
        self.modify_scores(p, S, work, number, self.place(fresh_thread_idx()), True)
        self.hide_if_empty(S, work)
        self.first_weights(p, c, work, acc_S)
        return self.product(p, c, pipes, kv_state, work, n_block)

    @cute.jit
    def step(
        self,
        p: ForwardParams,
        c: Fragments,
        pipes: Feed,
        kv_state,
        work: Work,
        n_block: Int32 | None,
        is_masked: cutlass.Constexpr[bool],
        may_be_edge: cutlass.Constexpr[bool] = False,
    ):
        """A later block of keys; returns the states of the next one."""
        acc_S, kv_state = self.scores(p, c, pipes, kv_state, work, n_block, False)
        work = self.recall(c.place, work)
        S, (number, _) = as_rows_cols(acc_S), self.upcoming(kv_state[1], work, n_block, 0)
        place = self.place(fresh_thread_idx())
        self.modify_scores(p, S, work, number, place, is_masked, may_be_edge)
        self.next_weights(p, c, pipes, work, kv_state[1], acc_S, is_masked)
        return self.product(p, c, pipes, kv_state, work, n_block)

    @cute.jit
    def scores(
        self,
        p: ForwardParams,
        c: Fragments,
        pipes: Feed,
        kv_state,
        work: Work,
        n_block: Int32 | None,
        is_first: cutlass.Constexpr[bool],
    ):
        """S of a block once its K is there, with the next copy of V under way; and the states."""
        stage, layout = kv_state[0], self.loader.k_layout
        ahead = self.await_keys(p, c.place, pipes, kv_state, work, n_block, is_first)
        q_lane, k_lane = c.q_lane, c.k_lane
        if const_expr(self.config.shares_rows):
            q_lane, k_lane, _ = self.lanes(c.smem, fresh_thread_idx())
        q_lanes = self.loader.q_layout.places(q_lane)
        k_lanes = layout.places(k_lane + stage * (layout.size * ELEMENT_BYTES))
        acc_S = self.new_scores(p)
        acc_S.fill(0.0)
        for k in cutlass.range_constexpr(self.spec.tile_d // MMA_DEPTH):
            rA = self.queries(c, q_lanes, k, is_first)
            for n in cutlass.range_constexpr(self.num_keys // 16):
                rB = cute.make_rmem_tensor(CHUNK, self.dtype)
                load_matrices(*layout.matrices(k_lanes, 16 * n, 2 * k), rB, False)
                self.multiply(p.mma, acc_S, rA, rB, n)
        return acc_S, (stage, ahead)

    @cute.jit
    def product(self, p: ForwardParams, c: Fragments, pipes: Feed, kv_state, work: Work, n_block):
        """O of a block once its V is there, with the next copy of K under way; the next states."""
        stage, ahead = kv_state
        layout = self.loader.v_layout
        self.await_values(c.place, pipes, kv_state, work, n_block)
        v_lane = c.v_lane
        if const_expr(self.config.shares_rows):
            _, _, v_lane = self.lanes(c.smem, fresh_thread_idx())
        v_lane += stage * (layout.size * ELEMENT_BYTES)
        v_lanes, rP = layout.places(v_lane), self.as_operand(c.rP)
        for k in cutlass.range_constexpr(self.num_keys // MMA_DEPTH):
            if const_expr(self.config.shares_rows):
                self.pairs.post_weights(c.exchange, c.rP, k)
            self.add_values(p, c, rP[None, None, k], v_lanes, k)
        if const_expr(self.config.shares_rows):
            self.pairs.meet()
            v_lanes = layout.places(v_lane + self.pairs.to_other_keys(layout))
            for k in cutlass.range_constexpr(self.num_keys // MMA_DEPTH):
                rA = self.pairs.other_weights(c.exchange, k, self.dtype)
                self.add_values(p, c, rA, v_lanes, k)
        return self.stage_after(stage, 1), self.follow(p, pipes, work, ahead)

    def add_values(self, p: ForwardParams, c: Fragments, rA: cute.Tensor, v_lanes: list, k: int):
        """O += P V for 16 keys."""
        layout = self.loader.v_layout
        for n in range(self.pairs.columns // 16):
            rB = cute.make_rmem_tensor(CHUNK, self.dtype)
            load_matrices(*layout.matrices(v_lanes, 16 * k, 2 * n), rB, True)
            self.multiply(p.mma, c.acc_O, rA, rB, n)

    def queries(self, c: Fragments, q_lanes: list, k: int, is_first: bool) -> cute.Tensor:
        """A of Q K^T: 16 columns of the warp's rows, (8, rows / 16)."""
        rA = cute.make_rmem_tensor((CHUNK, self.num_m), self.dtype)
        if self.config.keeps_q:
            rA = c.rQ[None, None, k]
        if is_first or not self.config.keeps_q:
            for m in range(self.num_m):
                place = self.loader.q_layout.matrices(q_lanes, MMA_ROWS * m, 2 * k)
                load_matrices(*place, rA[None, m], False)
        return rA

    def multiply(self, mma: cute.TiledMma, acc: cute.Tensor, rA, rB, n: int):
        """Columns from 16 n on of an accumulator += A B.

        Shapes: acc: ((2, 2, cols / 8), rows / 16, 1); rA: (8, rows / 16), of one depth; rB: (8,),
                four elements for each 8 columns
        """
        num_m, num_n = self.num_m, cute.size(acc, mode=[0]) // 4
        columns = cute.make_layout(((2, 2), num_m, 2), stride=((1, 2), 4 * num_n, 4))
        rC = cute.make_tensor(acc.iterator + 8 * n, columns)
        shape = ((2, 2, 2), num_m)
        rA = cute.make_tensor(
            rA.iterator, cute.make_layout(shape, stride=((1, 2, 4), rA.layout.stride[1]))
        )
        rB = cute.make_tensor(rB.iterator, cute.make_layout(((2, 2), 2), stride=((1, 2), 4)))
        cute.gemm(mma, rC, rA, rB, rC)

    def as_operand(self, rP: cute.Tensor) -> cute.Tensor:
        """P as A of its product with V: (8, rows / 16, keys / 16)."""
        num_k = self.num_keys // MMA_DEPTH
        layout = cute.make_layout((CHUNK, self.num_m, num_k), stride=(1, CHUNK * num_k, CHUNK))
        return cute.make_tensor(rP.iterator, layout)

    # -- from scores to weights

    @cute.jit
    def first_weights(self, p: ForwardParams, c: Fragments, work: Work, acc_S):
        """P of a tile's first block of scores; starts the running maximum and sum."""
        c.row_max.fill(-Float32.inf)
        c.row_sum.fill(0.0)
        state, scale_log2 = (c.row_max, c.row_sum, c.o_scale), self.scale_log2(p)
        self.raise_maximum(c, as_rows_cols(acc_S), state, scale_log2, 0.0)
        self.weigh(c, acc_S, scale_log2)

    @cute.jit
    def next_weights(
        self,
        p: ForwardParams,
        c: Fragments,
        pipes: Feed,
        work: Work,
        v_state,
        acc_S,
        is_masked: cutlass.Constexpr[bool],
    ):
        """P of a later block against the true running maximum; rescales O where it rose enough.

        The maximum of all rows comes first, and no branch after it: the weights are then computed
        where the product with V wants them, between its instructions.
        """
        state, scale_log2 = (c.row_max, c.row_sum, c.o_scale), self.scale_log2(p)
        threshold = self.config.rescale_threshold
        self.raise_maximum(c, as_rows_cols(acc_S), state, scale_log2, threshold)
        if softmax.any_rescaled(c.o_scale, c.row_sum):
            softmax.scale_rows(as_rows_cols(c.acc_O), c.o_scale)
        self.finish_product(pipes, v_state)
        self.weigh(c, acc_S, scale_log2)

    @cute.jit
    def raise_maximum(
        self,
        c: Fragments,
        S: cute.Tensor,
        state: tuple,
        scale_log2: Float32,
        threshold: cutlass.Constexpr[float],
    ):
        """The running maximum after a block, what O must be scaled by, and the sums so scaled."""
        if const_expr(self.config.shares_rows):
            self.pairs.raise_maximum(c.exchange, S, state, scale_log2, threshold)
        else:
            softmax.raise_maximum(S, *state, scale_log2, threshold)

    def weigh(self, c: Fragments, acc_S, scale_log2: Float32):
        """P against the running maximum, and its sums, in the order that the product wants."""
        num_n = self.num_keys // 8
        part = cute.make_layout(((2, 2, 2), self.num_m, 1), stride=((1, 2, 4), 4 * num_n, 0))
        for k in range(self.num_keys // MMA_DEPTH):
            weights = cute.make_tensor(acc_S.iterator + CHUNK * k, part)
            softmax.weigh(as_rows_cols(weights), c.row_max, c.row_sum, scale_log2)
            self.round_weights(weights, cute.make_tensor(c.rP.iterator + CHUNK * k, part))

    def finish_product(self, pipes: Feed, v_state):
        """Nothing to wait for: a product has read its P when later instructions write it."""

    # -- accumulators

    def new_scores(self, p: ForwardParams):
        """A fresh accumulator, in the form that wgmma has: ((2, 2, cols / 8), rows / 16, 1)."""
        shape = ((2, 2, self.num_keys // 8), self.num_m, 1)
        return cute.make_rmem_tensor(shape, Float32)

    def place(self, thread: Int32):
        """First row within the query tile and column within a key block of a thread."""
        row = self.pairs.first_row(thread) + ((thread & LANES - 1) >> 2)
        return row, 2 * (thread & 3) + self.pairs.half(thread) * self.num_keys

    def first_column(self, c: Fragments) -> Int32 | int:
        """The first column of O that this thread's warp has."""
        return self.pairs.half(fresh_thread_idx()) * self.pairs.columns
