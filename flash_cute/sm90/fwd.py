"""FlashAttention forward for Hopper: TMA loads, wgmma, warp-specialised, persistent.

Algorithm, per tile of tile_m queries of one head, keys visited from the last block to the first:
    S = Q K_j^T                          wgmma, issued while the softmax of block j+1 is finished
    mask S in edge blocks; P = exp2(S * scale - max), with the maximum of earlier blocks where it
    still serves (device/softmax.py); rescale O when it had to rise
    O = O + P V_j                        wgmma with P from registers
    out = O / row_sum, lse = log(row_sum) + max

Roles (128 threads each):
    warpgroup 0        load: one warp issues every TMA and fetches tiles; the others idle
    warpgroups 1..n    mma: 64 query rows each; softmax and both products; write their own output

Pipelines (full = bytes landed, empty = arrivals):
    q     1 stage      load -> mma   empty: one arrival per consumer warp, after the tile's last S
    k, v  num_stages   load -> mma   empty: one arrival per consumer warp, after S or O is done
    tile  2 stages     load -> mma   full: one arrival; empty: one arrival per consumer thread

Timeline of one consumer warpgroup (ping-pong: the turn at the tensor cores passes at ``|``):
    issue S_j, issue O += P V_{j+1} | wait S_j, softmax, wait O, rescale O, P = bf16(S_j), ...

Budget: shared memory in ForwardConfigSm90.smem_bytes; registers per consumer thread hold S
(tile_n / 2), P (tile_n / 4) and O (tile_dv / 2).
"""

import enum
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, pipeline
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from flash_cute.arguments import ForwardArguments
from flash_cute.device import epilogue, softmax
from flash_cute.device.mask import AttentionMask, BlockRange
from flash_cute.device.primitives import (
    as_rows_cols,
    column_offset,
    fresh_thread_idx,
    pack_halves,
)
from flash_cute.device.score import trace_mask_mod, trace_score_mod
from flash_cute.device.seqlen import SeqlenInfo
from flash_cute.device.tile_scheduler import Cursor, Tile
from flash_cute.errors import InvalidProblem
from flash_cute.sm90.config import THREADS_PER_WARPGROUP, ForwardConfigSm90
from flash_cute.sm90.params import ForwardParams, LaunchDescription, TmaOperand
from flash_cute.specialization import ForwardSpecialization
from flash_cute.variant import callback_for

WARPS_PER_WARPGROUP = 4
ROWS_PER_WARP = 16
ELEMENTS_PER_RUN = 8  # 16 bytes of shared memory
ROWS_PER_THREAD = 2  # of a 64-row wgmma accumulator
TILE_STAGES = 2
TILE_FIELDS = 8  # 32-bit words of a tile announcement: coordinates, lengths
SPARSE_TILE_FIELDS = 12  # and the counts of a block mask


class Barrier(enum.IntEnum):
    """Named barriers; 0 is the CTA's own."""

    TURN = 1  # + consumer warpgroup: its turn at the tensor cores
    CLEARED = 4  # + consumer warpgroup: its threads have cleared the tail of V


class Pipes(NamedTuple):
    """The four pipelines between the load warp and the consumers."""

    q: pipeline.PipelineTmaAsync
    k: pipeline.PipelineTmaAsync
    v: pipeline.PipelineTmaAsync
    tile: pipeline.PipelineAsync


class SharedTensors(NamedTuple):
    """Shared memory: (tile, dim, stage) rings, and the ring of tile announcements."""

    sQ: cute.Tensor
    sK: cute.Tensor
    sV: cute.Tensor
    tiles: cute.Tensor  # (fields, TILE_STAGES) int32
    blocks: cute.Tensor  # (num_stages,) int32: the block in each stage of K, with a block mask


@dataclass(frozen=True)
class Work:
    """A tile with its sequence and its blocks of keys."""

    tile: Tile
    seqlen: SeqlenInfo
    blocks: BlockRange
    num_partial: Int32  # listed blocks of a block mask; 0 without one
    num_full: Int32


@dataclass(frozen=True)
class Consumer:
    """What a consumer thread holds across tiles: its place, operand descriptors and registers."""

    warpgroup: Int32
    tSrQ: cute.Tensor
    tSrK: cute.Tensor
    tOrV: cute.Tensor
    sV: cute.Tensor
    blocks: cute.Tensor
    acc_O: cute.Tensor
    rP: cute.Tensor
    row_max: cute.Tensor  # (rows,) f32, as row_sum and o_scale
    row_sum: cute.Tensor
    o_scale: cute.Tensor


class FlashAttentionForwardSm90:
    """One CTA = a stream of (m_block, head, batch) tiles; see the module docstring."""

    def __init__(self, spec: ForwardSpecialization, config: ForwardConfigSm90):
        if broken := config.check(spec):
            raise InvalidProblem(f"{config} cannot run {spec.label}: {'; '.join(broken)}")
        self.spec, self.config = spec, config
        self.description = LaunchDescription(spec, config)
        self.dtype = self.description.dtype
        self.name = f"flash_fwd_sm90_{spec.label}_m{config.tile_m}n{config.tile_n}"
        self.score_mod = callback_for(spec.score_mod) if spec.score_mod is not None else None
        self.mask_mod = callback_for(spec.mask_mod) if spec.mask_mod is not None else None
        self.block_mod = callback_for(spec.block_mod) if spec.block_mod is not None else None
        self.tile_fields = SPARSE_TILE_FIELDS if spec.has_block_mask else TILE_FIELDS
        self.smem_bytes = config.smem_bytes(spec)
        self.mask = AttentionMask(
            is_causal=spec.is_causal,
            has_window_left=spec.has_window_left,
            has_window_right=spec.has_window_right,
            has_chunk=spec.has_chunk,
            tile_m=config.tile_m,
            tile_n=config.tile_n,
        )

    # ---------------------------------------------------------------- host

    def compile_args(self) -> tuple:
        """Arguments that stand for the real ones while compiling."""
        return self.description.compile_args()

    @cute.jit
    def __call__(self, *launch_args):
        """Host side: describe the launch from flat ForwardArguments, then launch."""
        num_arguments = len(ForwardArguments._fields)
        args = ForwardArguments(*launch_args[:num_arguments])
        params = self.description.params(args, launch_args[num_arguments:])
        self.kernel(params).launch(
            grid=[args.num_ctas, 1, 1],
            block=[self.config.num_threads, 1, 1],
            stream=args.stream,
            min_blocks_per_mp=1,
        )

    def shared_storage(self, p: ForwardParams):
        """The struct of shared memory."""
        config = self.config

        @cute.struct
        class SharedStorage:
            """Barriers first, then the tiles, each aligned for the 128-byte swizzle."""

            q_barriers: cute.struct.MemRange[Int64, 2]
            k_barriers: cute.struct.MemRange[Int64, 2 * config.num_stages]
            v_barriers: cute.struct.MemRange[Int64, 2 * config.num_stages]
            tile_barriers: cute.struct.MemRange[Int64, 2 * TILE_STAGES]
            tiles: cute.struct.MemRange[Int32, self.tile_fields * TILE_STAGES]
            blocks: cute.struct.MemRange[Int32, config.num_stages]
            sQ: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(p.q.layout)], 1024]
            sK: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(p.k.layout)], 1024]
            sV: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(p.v.layout)], 1024]

        return SharedStorage

    # ---------------------------------------------------------------- device

    @cute.kernel
    def kernel(self, p: ForwardParams):
        """Device side: shared memory and pipelines, then one branch per role."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for operand in (p.q, p.k, p.v):
                cpasync.prefetch_descriptor(operand.atom)
        storage = SmemAllocator().allocate(self.shared_storage(p))
        pipes = self.open_pipelines(storage)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        smem = SharedTensors(
            storage.sQ.get_tensor(p.q.layout.outer, swizzle=p.q.layout.inner),
            storage.sK.get_tensor(p.k.layout.outer, swizzle=p.k.layout.inner),
            storage.sV.get_tensor(p.v.layout.outer, swizzle=p.v.layout.inner),
            storage.tiles.get_tensor(cute.make_layout((self.tile_fields, TILE_STAGES))),
            storage.blocks.get_tensor(cute.make_layout(self.config.num_stages)),
        )
        if warp < WARPS_PER_WARPGROUP:
            cute.arch.setmaxregister_decrease(self.config.regs_load)
            if warp == 0:
                self.load(p, smem, pipes)
        else:
            cute.arch.setmaxregister_increase(self.config.regs_mma)
            self.mma(p, smem, pipes)

    def open_pipelines(self, storage) -> Pipes:
        """The q, k, v and tile pipelines; arrive counts follow from the roles."""
        spec, config = self.spec, self.config
        thread = pipeline.Agent.Thread
        num_mma_warps = WARPS_PER_WARPGROUP * config.num_mma_warpgroups
        one = pipeline.CooperativeGroup(thread, 1)
        mma_warps = pipeline.CooperativeGroup(thread, num_mma_warps)
        mma_threads = pipeline.CooperativeGroup(thread, 32 * num_mma_warps)
        element_bytes = self.dtype.width // 8

        def tma(barriers, stages, tile, dim):
            return pipeline.PipelineTmaAsync.create(
                barrier_storage=barriers.data_ptr(),
                num_stages=stages,
                producer_group=one,
                consumer_group=mma_warps,
                tx_count=tile * dim * element_bytes,
                defer_sync=True,
            )

        return Pipes(
            tma(storage.q_barriers, 1, config.tile_m, spec.tile_d),
            tma(storage.k_barriers, config.num_stages, config.tile_n, spec.tile_d),
            tma(storage.v_barriers, config.num_stages, config.tile_n, spec.tile_dv),
            pipeline.PipelineAsync.create(
                barrier_storage=storage.tile_barriers.data_ptr(),
                num_stages=TILE_STAGES,
                producer_group=one,
                consumer_group=mma_threads,
                defer_sync=True,
            ),
        )

    # -- producer

    @cute.jit
    def load(self, p: ForwardParams, smem: SharedTensors, pipes: Pipes):
        """Load warp: finds tiles, announces them, loads their blocks in the order of `mma`."""
        producer = pipeline.PipelineUserType.Producer
        q_state = pipeline.make_pipeline_state(producer, 1)
        k_state = pipeline.make_pipeline_state(producer, self.config.num_stages)
        v_state = pipeline.make_pipeline_state(producer, self.config.num_stages)
        tile_state = pipeline.make_pipeline_state(producer, TILE_STAGES)
        tile_idx = cute.arch.block_idx()[0]
        tile, cursor = p.scheduler.locate(tile_idx, Cursor(Int32(0), Int32(0)))
        while tile.m_block >= 0:
            following = Int32(0)
            if cute.arch.lane_idx() == 0:
                following = p.scheduler.fetch()
            seqlen = p.sequences.of(tile.batch)
            if tile.m_block * self.config.tile_m < seqlen.seqlen_q:
                counts = self.count_blocks(p, tile)
                tile_state = self.announce(smem, pipes, tile_state, tile, seqlen, counts)
                q_state, k_state, v_state = self.load_tile(
                    p, smem, pipes, (q_state, k_state, v_state), tile, seqlen, counts
                )
            tile_idx = cute.arch.shuffle_sync(following, 0)
            tile, cursor = p.scheduler.locate(tile_idx, cursor)
        self.announce(smem, pipes, tile_state, tile, SeqlenInfo(*[Int32(0)] * 4), ())
        p.scheduler.close(tile_idx, cursor)

    @cute.jit
    def count_blocks(self, p: ForwardParams, tile: Tile):
        """(partial, full) blocks that the block mask lists for a tile; empty without one."""
        counts = ()
        if const_expr(self.spec.has_block_mask):
            counts = p.blocks.counts(tile.m_block, tile.head, tile.batch)
        return counts

    @cute.jit
    def announce(self, smem, pipes: Pipes, state, tile: Tile, seqlen: SeqlenInfo, counts):
        """Tell the consumers the next tile; returns the advanced state."""
        pipes.tile.producer_acquire(state)
        if cute.arch.lane_idx() == 0:
            slot = smem.tiles[None, state.index]
            fields = (tile.m_block, tile.head, tile.batch)
            fields += (seqlen.seqlen_q, seqlen.seqlen_k, seqlen.offset_q, seqlen.offset_k)
            fields += tuple(counts)
            for i in cutlass.range_constexpr(len(fields)):
                slot[i] = fields[i]
            pipes.tile.producer_commit(state)
        state.advance()
        return state

    @cute.jit
    def load_tile(
        self,
        p: ForwardParams,
        smem: SharedTensors,
        pipes: Pipes,
        states,
        tile: Tile,
        seqlen,
        counts,
    ):
        """Load Q and all blocks of K and V of a tile; returns the advanced states."""
        q_state, k_state, v_state = states
        tile_d, tile_dv = self.spec.tile_d, self.spec.tile_dv
        batch_q = 0 if const_expr(self.spec.is_packed_q) else tile.batch
        batch_k = 0 if const_expr(self.spec.is_packed_k) else tile.batch
        kv = (seqlen.offset_k, tile.head // p.group, batch_k)
        q_copy = self.partition_tma(p.q, smem.sQ, tile_d, (seqlen.offset_q, tile.head, batch_q))
        k_copy = self.partition_tma(p.k, smem.sK, tile_d, kv)
        v_copy = self.partition_tma(p.v, smem.sV, tile_dv, kv)
        # V of a block follows K of the next: the consumers ask for them in this order.
        if const_expr(self.spec.has_block_mask):
            num_partial, num_full = counts
            n_block = p.blocks.visit(Int32(0), num_partial, tile.m_block, tile.head, tile.batch)
            k_state = self.load_listed(p, smem, pipes, k_state, k_copy, n_block)
            q_state = self.load_block(p.q, pipes.q, q_state, q_copy, tile.m_block)
            for i in cutlass.range(1, num_partial + num_full, unroll=1):
                following = p.blocks.visit(i, num_partial, tile.m_block, tile.head, tile.batch)
                k_state = self.load_listed(p, smem, pipes, k_state, k_copy, following)
                v_state = self.load_block(p.v, pipes.v, v_state, v_copy, n_block)
                n_block = following
            v_state = self.load_block(p.v, pipes.v, v_state, v_copy, n_block)
        else:
            blocks = self.mask.block_range(tile.m_block, seqlen, p.bounds)
            last = blocks.end - 1
            k_state = self.load_block(p.k, pipes.k, k_state, k_copy, last)
            q_state = self.load_block(p.q, pipes.q, q_state, q_copy, tile.m_block)
            for i in cutlass.range(last - blocks.begin, unroll=1):
                k_state = self.load_block(p.k, pipes.k, k_state, k_copy, last - i - 1)
                v_state = self.load_block(p.v, pipes.v, v_state, v_copy, last - i)
            v_state = self.load_block(p.v, pipes.v, v_state, v_copy, blocks.begin)
        return q_state, k_state, v_state

    def partition_tma(self, operand: TmaOperand, smem, tile_dim: int, origin):
        """(TMA, stage) of shared memory and (TMA, block) of one head, for `load_block`."""
        tile_rows = cute.size(smem, mode=[0])
        first_row, head, batch = origin
        gX = cute.domain_offset((first_row, 0), operand.tensor[None, None, head, batch])
        return cpasync.tma_partition(
            operand.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(smem, 0, 2),
            cute.group_modes(cute.local_tile(gX, (tile_rows, tile_dim), (None, 0)), 0, 2),
        )

    @cute.jit
    def load_block(self, operand: TmaOperand, pipe, state, partition, block: Int32):
        """Wait for a free stage, start filling it with `block`; returns the advanced state."""
        to_smem, from_gmem = partition
        pipe.producer_acquire(state)
        cute.copy(
            operand.atom,
            from_gmem[None, block],
            to_smem[None, state.index],
            tma_bar_ptr=pipe.producer_get_barrier(state),
        )
        state.advance()
        return state

    @cute.jit
    def load_listed(self, p: ForwardParams, smem, pipes: Pipes, state, partition, block: Int32):
        """`load_block` of K that also tells the consumers, through the stage, which block it is."""
        pipes.k.sync_object_empty.wait(state.index, state.phase)
        if cute.arch.lane_idx() == 0:
            smem.blocks[state.index] = block
        cute.arch.sync_warp()  # before the arrival that lets the consumers read it
        return self.load_block(p.k, pipes.k, state, partition, block)

    # -- consumers

    @cute.jit
    def mma(self, p: ForwardParams, smem: SharedTensors, pipes: Pipes):
        """Consumer warpgroup: both products, the softmax and the output of its 64 rows."""
        consumer = pipeline.PipelineUserType.Consumer
        q_state = pipeline.make_pipeline_state(consumer, 1)
        k_state = pipeline.make_pipeline_state(consumer, self.config.num_stages)
        v_state = pipeline.make_pipeline_state(consumer, self.config.num_stages)
        tile_state = pipeline.make_pipeline_state(consumer, TILE_STAGES)
        c = self.start_consumer(p, smem)
        self.grant_first_turn(c)
        pipes.tile.consumer_wait(tile_state)
        m_block = smem.tiles[0, tile_state.index]
        while m_block >= 0:
            work = self.receive(p, smem, tile_state.index)
            c.acc_O.fill(0.0)
            pipes.q.consumer_wait(q_state)
            kv_state = (k_state, v_state)
            if const_expr(self.spec.has_block_mask):
                k_state, v_state = self.visit_lists(p, c, pipes, kv_state, work)
            else:
                k_state, v_state = self.visit_range(p, c, pipes, kv_state, work)
            pipes.q.consumer_release(q_state)
            q_state.advance()
            v_state = self.last_product(p, c, pipes, v_state)
            # Read anew: the tile's place then occupies no registers during the loops.
            self.store(p, c, self.receive(p, smem, tile_state.index))
            pipes.tile.consumer_release(tile_state)
            tile_state.advance()
            pipes.tile.consumer_wait(tile_state)
            m_block = smem.tiles[0, tile_state.index]

    @cute.jit
    def visit_range(self, p: ForwardParams, c: Consumer, pipes: Pipes, kv_state, work: Work):
        """All blocks of a tile: upper edge, full blocks, lower edge; returns the states."""
        k_state, v_state = kv_state
        blocks = work.blocks
        n_block = blocks.end - 1
        k_state = self.first_block(p, c, pipes, (k_state, v_state), work, n_block)
        if const_expr(self.mask.has_end):
            for _ in cutlass.range(n_block - blocks.full_end, unroll=1):
                n_block -= 1
                kv_state = (k_state, v_state)
                k_state, v_state = self.step(p, c, pipes, kv_state, work, n_block, True)
        for _ in cutlass.range(n_block - blocks.full_begin, unroll=1):
            n_block -= 1
            k_state, v_state = self.step(p, c, pipes, (k_state, v_state), work, n_block, False)
        if const_expr(self.mask.has_begin):
            for _ in cutlass.range(n_block - blocks.begin, unroll=1):
                n_block -= 1
                kv_state = (k_state, v_state)
                k_state, v_state = self.step(p, c, pipes, kv_state, work, n_block, True)
        return k_state, v_state

    @cute.jit
    def visit_lists(self, p: ForwardParams, c: Consumer, pipes: Pipes, kv_state, work: Work):
        """All listed blocks of a tile: partial ones, full ones; returns the states.

        The numbers of the blocks come with K. A tile without any visits block 0 and sees nothing.
        """
        k_state, v_state = kv_state
        k_state = self.first_block(p, c, pipes, (k_state, v_state), work, None)
        num_left = cutlass.max(work.num_partial - 1, 0)
        for _ in cutlass.range(num_left, unroll=1):
            k_state, v_state = self.step(p, c, pipes, (k_state, v_state), work, None, True)
        for _ in cutlass.range(work.num_partial + work.num_full - 1 - num_left, unroll=1):
            k_state, v_state = self.step(p, c, pipes, (k_state, v_state), work, None, False)
        return k_state, v_state

    @cute.jit
    def receive(self, p: ForwardParams, smem: SharedTensors, slot: Int32) -> Work:
        """The announced tile."""
        tile = Tile(smem.tiles[0, slot], smem.tiles[1, slot], smem.tiles[2, slot])
        seqlen = SeqlenInfo(*[smem.tiles[i, slot] for i in range(3, 7)])
        num_partial, num_full = Int32(0), Int32(0)
        if const_expr(self.spec.has_block_mask):
            num_partial, num_full = smem.tiles[7, slot], smem.tiles[8, slot]
        blocks = self.mask.block_range(tile.m_block, seqlen, p.bounds)
        return Work(tile, seqlen, blocks, num_partial, num_full)

    def start_consumer(self, p: ForwardParams, smem: SharedTensors) -> Consumer:
        """Partition the operands for this thread and allocate its registers."""
        tile_m, tile_n, tile_dv = self.config.tile_m, self.config.tile_n, self.spec.tile_dv
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        index = warp // WARPS_PER_WARPGROUP - 1
        # Descriptors are the same for a whole warpgroup: slice by its first thread.
        wg_qk = p.mma_qk.get_slice(index * THREADS_PER_WARPGROUP)
        wg_pv = p.mma_pv.get_slice(index * THREADS_PER_WARPGROUP)
        sVt = cute.make_tensor(smem.sV.iterator, cute.select(smem.sV.layout, mode=[1, 0, 2]))
        return Consumer(
            warpgroup=index,
            tSrQ=wg_qk.make_fragment_A(wg_qk.partition_A(smem.sQ))[None, None, None, 0],
            tSrK=wg_qk.make_fragment_B(wg_qk.partition_B(smem.sK)),
            tOrV=wg_pv.make_fragment_B(wg_pv.partition_B(sVt)),
            sV=smem.sV,
            blocks=smem.blocks,
            acc_O=cute.make_rmem_tensor(wg_pv.partition_shape_C((tile_m, tile_dv)), Float32),
            rP=cute.make_rmem_tensor(wg_pv.partition_shape_A((tile_m, tile_n)), self.dtype),
            row_max=cute.make_rmem_tensor(ROWS_PER_THREAD, Float32),
            row_sum=cute.make_rmem_tensor(ROWS_PER_THREAD, Float32),
            o_scale=cute.make_rmem_tensor(ROWS_PER_THREAD, Float32),
        )

    @cute.jit
    def first_block(self, p: ForwardParams, c: Consumer, pipes: Pipes, kv_state, work, n_block):
        """Scores and weights of a tile's first block; there is no product with V to overlap yet."""
        k_state, v_state = kv_state
        acc_S = self.new_scores(p)
        pipes.k.consumer_wait(k_state)
        n_block = self.block_in(c, k_state, n_block)
        self.issue_gemm(p.mma_qk, acc_S, c.tSrQ, c.tSrK[None, None, None, k_state.index], True)
        warpgroup.wait_group(0)
        pipes.k.consumer_release(k_state)
        S = as_rows_cols(acc_S)
        self.modify_scores(p, c, S, work, n_block, True)
        if const_expr(self.spec.has_block_mask):
            if work.num_partial + work.num_full == 0:
                S.fill(-Float32.inf)
        scale_log2 = self.scale_log2(p)
        softmax.softmax_step(S, c.row_max, c.row_sum, c.o_scale, scale_log2, 0.0, True)
        self.round_weights(acc_S, c.rP)
        if const_expr(self.spec.is_ragged_k):
            pipes.v.consumer_wait(v_state)
            num_valid = work.seqlen.seqlen_k - n_block * self.config.tile_n
            self.clear_tail(c, c.sV[None, None, v_state.index], num_valid)
        k_state.advance()
        return k_state

    @cute.jit
    def block_in(self, c: Consumer, k_state, n_block):
        """Number of the block in a stage of K: known, or told by the load warp."""
        if const_expr(self.spec.has_block_mask):
            n_block = c.blocks[k_state.index]
        return n_block

    @cute.jit
    def clear_tail(self, c: Consumer, sV: cute.Tensor, num_valid: Int32):
        """Zero the rows of a V block that belong to no key: 0 times their NaN would be NaN.

        Every warpgroup clears all of them for itself, so that none waits for another's turn.
        """
        if num_valid < self.config.tile_n:
            runs = self.spec.tile_dv // ELEMENTS_PER_RUN
            thread = cute.arch.thread_idx()[0] % THREADS_PER_WARPGROUP
            zeros = cute.make_rmem_tensor(ELEMENTS_PER_RUN, self.dtype)
            zeros.fill(0.0)
            first = cutlass.max(num_valid, 0) * runs + thread
            for i in cutlass.range(first, self.config.tile_n * runs, THREADS_PER_WARPGROUP):
                row = i // runs
                run = cute.local_tile(sV, (1, ELEMENTS_PER_RUN), (row, i - row * runs))
                cute.autovec_copy(zeros, run[0, None])
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(
                barrier_id=Barrier.CLEARED + c.warpgroup, number_of_threads=THREADS_PER_WARPGROUP
            )

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
    ):
        """One block: S of this one and O of the one before share the tensor cores, then softmax.

        Contract: returns the advanced (k_state, v_state), which the caller rebinds.
        """
        k_state, v_state = kv_state
        acc_S = self.new_scores(p)
        pipes.k.consumer_wait(k_state)
        n_block = self.block_in(c, k_state, n_block)
        self.take_turn(c)
        self.issue_gemm(p.mma_qk, acc_S, c.tSrQ, c.tSrK[None, None, None, k_state.index], True)
        pipes.v.consumer_wait(v_state)
        self.issue_gemm(p.mma_pv, c.acc_O, c.rP, c.tOrV[None, None, None, v_state.index], False)
        self.pass_turn(c)
        warpgroup.wait_group(1)
        pipes.k.consumer_release(k_state)
        self.modify_scores(p, c, as_rows_cols(acc_S), work, n_block, is_masked)
        if const_expr(is_masked):
            self.weigh_exactly(p, c, pipes, v_state, acc_S)
        else:
            self.weigh_speculatively(p, c, pipes, v_state, acc_S)
        k_state.advance()
        v_state.advance()
        return k_state, v_state

    @cute.jit
    def modify_scores(
        self,
        p: ForwardParams,
        c: Consumer,
        S: cute.Tensor,
        work: Work,
        n_block: Int32,
        is_masked: cutlass.Constexpr[bool],
    ):
        """Everything between Q K^T and the softmax: softcap, score_mod, then the masks."""
        row, col = self.place(fresh_thread_idx())
        first_row = work.tile.m_block * self.config.tile_m + row
        first_col = n_block * self.config.tile_n + col
        if const_expr(self.spec.has_softcap):
            softmax.softcap(S, p.scale_log2, p.softcap)
        elif const_expr(self.spec.score_mod is not None):
            S.store(S.load() * p.scale_log2)
        elif const_expr(self.spec.negate_scores):
            S.store(-S.load())
        if const_expr(self.spec.score_mod is not None or self.spec.mask_mod is not None):
            self.apply_callbacks(p, S, work, first_row, first_col, is_masked)
        if const_expr(self.spec.block_mod is not None and is_masked):
            if work.num_partial > 0:  # else the first block is a full one
                self.apply_block_mod(p, S, work, first_row, first_col)
        if const_expr(is_masked):
            self.mask.apply(S, first_row, first_col, work.seqlen, p.bounds)
        elif const_expr(self.spec.has_block_mask):
            blocks = work.blocks
            if n_block < blocks.full_begin or n_block >= blocks.full_end:
                self.mask.apply(S, first_row, first_col, work.seqlen, p.bounds)

    def apply_callbacks(
        self, p: ForwardParams, S: cute.Tensor, work: Work, first_row, first_col, is_edge: bool
    ):
        """score_mod and mask_mod on every score of the thread."""
        place = (work, first_row, first_col, is_edge)
        if self.score_mod is not None:
            for cells, indices in self.groups(self.score_mod, S, place):
                scores, tensors = [S[cell] for cell in cells], p.captured.score
                new = trace_score_mod(self.score_mod, scores, *indices, tensors, work.seqlen)
                for cell, score in zip(cells, new, strict=True):
                    S[cell] = score
        if self.mask_mod is not None:
            self.hide(self.mask_mod, p.captured.mask, S, place)

    def apply_block_mod(self, p: ForwardParams, S: cute.Tensor, work: Work, first_row, first_col):
        """The block mask's own mask_mod on every score of the thread."""
        self.hide(self.block_mod, p.captured.block, S, (work, first_row, first_col, True))

    def hide(self, mask_mod, tensors, S: cute.Tensor, place):
        """Set the scores that a mask_mod does not show to -inf."""
        for cells, indices in self.groups(mask_mod, S, place):
            visible = trace_mask_mod(mask_mod, *indices, tensors, place[0].seqlen)
            for cell, is_visible in zip(cells, visible, strict=True):
                S[cell] = cutlass.select_(is_visible, S[cell], -Float32.inf)

    def groups(self, callback, S: cute.Tensor, place):
        """Yield the thread's scores by the groups that a callback takes, and their indices.

        Shapes: place (work, row and column of the first score, whether the block is an edge); a
                group is its places in S and (b, h, q_idx, one kv_idx for each)

        Rows past the queries and, in edge blocks, columns past the keys get the index of the last
        one: their scores count for nothing, but a callback may look them up in a table.
        """
        work, first_row, first_col, is_edge = place
        last_q, last_k = work.seqlen.seqlen_q - 1, cutlass.max(work.seqlen.seqlen_k - 1, 0)
        for r in range(cute.size(S, mode=[0])):
            q_idx = cutlass.min(first_row + 8 * r, last_q)
            for i in range(0, cute.size(S, mode=[1]), callback.key.width):
                columns = range(i, i + callback.key.width)
                kv_idx = [(first_col, column_offset(c)) for c in columns]
                if is_edge:
                    kv_idx = [cutlass.min(col + offset, last_k) for col, offset in kv_idx]
                yield [(r, c) for c in columns], (work.tile.batch, work.tile.head, q_idx, kv_idx)

    def place(self, thread: Int32):
        """First row within the query tile and column within a key block of a consumer thread.

        Its rows are 8 apart; its columns as `column_offset` says.
        """
        row = (thread // 32 - WARPS_PER_WARPGROUP) * ROWS_PER_WARP + thread % 32 // 4
        return row, 2 * (thread % 4)

    def scale_log2(self, p: ForwardParams) -> Float32:
        """Factor from the scores as `modify_scores` leaves them to powers of two."""
        return Float32(softmax.LOG2_E) if self.spec.modifies_scores else p.scale_log2

    @cute.jit
    def weigh_exactly(self, p: ForwardParams, c: Consumer, pipes: Pipes, v_state, acc_S):
        """Weights against the true running maximum; rescales O where it rose enough."""
        threshold = self.config.rescale_threshold
        S = as_rows_cols(acc_S)
        scale_log2 = self.scale_log2(p)
        softmax.softmax_step(S, c.row_max, c.row_sum, c.o_scale, scale_log2, threshold, False)
        warpgroup.wait_group(0)
        pipes.v.consumer_release(v_state)
        self.round_weights(acc_S, c.rP)
        softmax.rescale_output(as_rows_cols(c.acc_O), c.o_scale)

    @cute.jit
    def weigh_speculatively(self, p: ForwardParams, c: Consumer, pipes: Pipes, v_state, acc_S):
        """Weights against the last known maximum; falls back where they outgrow it.

        The scores stay in registers until the check, so the fall-back needs no second product.
        """
        S = as_rows_cols(acc_S)
        weights = self.new_scores(p)
        headroom = self.config.rescale_threshold
        block_sum = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
        scale_log2 = self.scale_log2(p)
        softmax.speculative_step(S, as_rows_cols(weights), c.row_max, block_sum, scale_log2)
        is_outgrown = softmax.any_outgrown(block_sum, headroom)
        warpgroup.wait_group(0)
        pipes.v.consumer_release(v_state)
        self.round_weights(weights, c.rP)
        if is_outgrown:
            softmax.catch_up(S, c.row_max, c.row_sum, c.o_scale, block_sum, scale_log2, headroom)
            self.round_weights(acc_S, c.rP)
            softmax.scale_rows(as_rows_cols(c.acc_O), c.o_scale)
        else:
            for r in cutlass.range_constexpr(ROWS_PER_THREAD):
                c.row_sum[r] = c.row_sum[r] + block_sum[r]

    @cute.jit
    def last_product(self, p: ForwardParams, c: Consumer, pipes: Pipes, v_state):
        """O of the tile's last block."""
        pipes.v.consumer_wait(v_state)
        self.issue_gemm(p.mma_pv, c.acc_O, c.rP, c.tOrV[None, None, None, v_state.index], False)
        warpgroup.wait_group(0)
        pipes.v.consumer_release(v_state)
        v_state.advance()
        return v_state

    @cute.jit
    def store(self, p: ForwardParams, c: Consumer, work: Work):
        """Close the softmax, divide by the row sums and write the tile."""
        tile, seqlen = work.tile, work.seqlen
        thread = fresh_thread_idx()
        lane = thread % 32
        first_row = tile.m_block * self.config.tile_m + self.place(thread)[0]
        factor = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
        lse = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
        sink_log2 = None
        if const_expr(self.spec.sink_dtype is not None):
            sink_log2 = p.mSink[tile.head].to(Float32) * softmax.LOG2_E
        softmax.finalize(c.row_max, c.row_sum, factor, lse, self.scale_log2(p), sink_log2)
        batch = 0 if const_expr(self.spec.is_packed_q) else tile.batch
        if const_expr(self.spec.has_lse):
            gLSE = cute.domain_offset((seqlen.offset_q,), p.mLSE[None, tile.head, batch])
            epilogue.store_lse(lse, gLSE, first_row, lane, seqlen.seqlen_q)
        O = as_rows_cols(c.acc_O)
        softmax.scale_rows(O, factor)
        gO = cute.domain_offset((seqlen.offset_q, 0), p.mO[None, None, tile.head, batch])
        epilogue.store_output(O, gO, first_row, lane, seqlen.seqlen_q, p.head_dim_v)

    @cute.jit
    def round_weights(self, weights, rP):
        """P = weights in the input dtype; accumulator and A fragment share one element order."""
        words = cute.recast_tensor(rP, Int32)
        for i in cutlass.range_constexpr(cute.size(words)):
            words[i] = pack_halves(weights[2 * i], weights[2 * i + 1], self.dtype)

    def new_scores(self, p: ForwardParams):
        """A fresh accumulator per block: its registers are free between blocks."""
        shape = p.mma_qk.partition_shape_C((self.config.tile_m, self.config.tile_n))
        return cute.make_rmem_tensor(shape, Float32)

    @cute.jit
    def issue_gemm(self, tiled_mma: cute.TiledMma, acc, A, B, zero_init: cutlass.Constexpr[bool]):
        """Start acc (+)= A B on the tensor cores and close the wgmma group."""
        # A fresh atom: setting the field of a shared one would leak out of the caller's loop.
        atom = cute.make_mma_atom(tiled_mma.op)
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(A, mode=[2])):
            atom.set(warpgroup.Field.ACCUMULATE, not zero_init or k > 0)
            cute.gemm(atom, acc, A[None, None, k], B[None, None, k], acc)
        warpgroup.commit_group()

    # -- ping-pong

    @cute.jit
    def grant_first_turn(self, c: Consumer):
        """The last warpgroup passes the turn to the first before anyone took it."""
        if const_expr(self.config.use_ping_pong):
            if c.warpgroup == self.config.num_mma_warpgroups - 1:
                self.pass_turn(c)

    @cute.jit
    def take_turn(self, c: Consumer):
        """Wait for this warpgroup's turn at the tensor cores."""
        if const_expr(self.config.use_ping_pong):
            cute.arch.barrier(
                barrier_id=Barrier.TURN + c.warpgroup, number_of_threads=2 * THREADS_PER_WARPGROUP
            )

    @cute.jit
    def pass_turn(self, c: Consumer):
        """Let the next warpgroup issue; its softmax then overlaps with our products."""
        if const_expr(self.config.use_ping_pong):
            is_last = c.warpgroup == self.config.num_mma_warpgroups - 1
            successor = cutlass.select_(is_last, Int32(0), c.warpgroup + 1)
            cute.arch.barrier_arrive(
                barrier_id=Barrier.TURN + successor, number_of_threads=2 * THREADS_PER_WARPGROUP
            )
