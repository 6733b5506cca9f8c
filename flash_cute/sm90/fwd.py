"""FlashAttention forward for Hopper: TMA loads, wgmma, warp-specialised, persistent.

Algorithm, per tile of tile_m queries of one head, keys visited from the last block to the first:
    S = Q K_j^T                          wgmma, issued while the softmax of block j+1 is finished
    mask S in edge blocks; P = exp2(S * scale - max); rescale O when the maximum rose enough
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

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers
from cutlass import pipeline

from flash_cute.device import epilogue, softmax
from flash_cute.device.mask import AttentionMask
from flash_cute.device.primitives import as_rows_cols, pack_halves
from flash_cute.device.tile_scheduler import TileScheduler
from flash_cute.sm90.config import THREADS_PER_WARPGROUP, ForwardConfigSm90
from flash_cute.specialization import ForwardSpecialization

DTYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}


class Barrier(enum.IntEnum):
    """Named barriers; 0 is the CTA's own."""

    TURN = 1  # + consumer warpgroup: its turn at the tensor cores


class ForwardArgs(NamedTuple):
    """Launch arguments, in order: the one list that compile, launch and kernel share.

    Shapes: q, k, v, out: device addresses of (batch, seqlen, heads, dim), last stride 1, addresses
            and the other strides multiples of 16 bytes; lse: (batch, num_heads_q, seqlen_q) f32
            or null; tile_counter: one int32, zero between launches
    Units:  strides in elements; scale_log2 = |softmax_scale| * log2(e)
    """

    q: cute.Pointer
    k: cute.Pointer
    v: cute.Pointer
    out: cute.Pointer
    lse: cute.Pointer
    tile_counter: cute.Pointer
    batch: Int32
    seqlen_q: Int32
    seqlen_k: Int32
    num_heads_q: Int32
    num_heads_kv: Int32
    head_dim: Int32
    head_dim_v: Int32
    q_stride_batch: Int64
    q_stride_seqlen: Int64
    q_stride_head: Int64
    k_stride_batch: Int64
    k_stride_seqlen: Int64
    k_stride_head: Int64
    v_stride_batch: Int64
    v_stride_seqlen: Int64
    v_stride_head: Int64
    out_stride_batch: Int64
    out_stride_seqlen: Int64
    out_stride_head: Int64
    scale_log2: Float32
    section: Int32
    num_ctas: Int32
    stream: cuda.CUstream


@dataclass(frozen=True)
class TmaOperand:
    """A tensor in device memory that TMA reads tile by tile into shared memory."""

    atom: cute.CopyAtom
    tensor: cute.Tensor  # (seqlen, dim, heads, batch) coordinates
    layout: cute.ComposedLayout  # shared memory: (tile, dim, stage)


@dataclass(frozen=True)
class ForwardParams:
    """What the kernel gets: operands, outputs, scheduler, lengths."""

    q: TmaOperand
    k: TmaOperand
    v: TmaOperand
    mO: cute.Tensor  # (seqlen_q, head_dim_v, num_heads_q, batch)
    mLSE: cute.Tensor  # (seqlen_q, num_heads_q, batch)
    mma_qk: cute.TiledMma
    mma_pv: cute.TiledMma
    scheduler: TileScheduler
    num_ctas: Int32
    seqlen_q: Int32
    seqlen_k: Int32
    head_dim_v: Int32
    group: Int32
    scale_log2: Float32


class FlashAttentionForwardSm90:
    """One CTA = a stream of (m_block, head, batch) tiles; see the module docstring."""

    def __init__(self, spec: ForwardSpecialization, config: ForwardConfigSm90):
        self.spec, self.config = spec, config
        self.dtype = DTYPES[spec.dtype]
        self.name = f"flash_fwd_sm90_{spec.label}_m{config.tile_m}n{config.tile_n}"
        self.mask = AttentionMask(spec.is_causal, config.tile_m, config.tile_n)

    # ---------------------------------------------------------------- host

    def compile_args(self) -> tuple:
        """Arguments that stand for the real ones while compiling."""
        stand_in = {
            Int32: Int32(1),
            Int64: Int64(8),
            Float32: Float32(1.0),
            cuda.CUstream: cute.runtime.make_fake_stream(),
        }
        pointers = {"lse": cutlass.Float32, "tile_counter": Int32}
        return tuple(
            cute.runtime.nullptr(pointers.get(name, self.dtype), cute.AddressSpace.gmem, 16)
            if kind is cute.Pointer
            else stand_in[kind]
            for name, kind in ForwardArgs.__annotations__.items()
        )

    @cute.jit
    def __call__(self, *launch_args):
        args = ForwardArgs(*launch_args)
        params = self.build_params(args)
        self.kernel(params).launch(
            grid=[args.num_ctas, 1, 1],
            block=[self.config.num_threads, 1, 1],
            stream=args.stream,
            min_blocks_per_mp=1,
        )

    @cute.jit
    def build_params(self, args: ForwardArgs) -> ForwardParams:
        spec, config = self.spec, self.config
        tile_m, tile_n, stages = config.tile_m, config.tile_n, config.num_stages
        mQ = self.view(args.q, args.batch, args.seqlen_q, args.num_heads_q, args.head_dim,
                       (args.q_stride_batch, args.q_stride_seqlen, args.q_stride_head))  # fmt: skip
        mK = self.view(args.k, args.batch, args.seqlen_k, args.num_heads_kv, args.head_dim,
                       (args.k_stride_batch, args.k_stride_seqlen, args.k_stride_head))  # fmt: skip
        mV = self.view(args.v, args.batch, args.seqlen_k, args.num_heads_kv, args.head_dim_v,
                       (args.v_stride_batch, args.v_stride_seqlen, args.v_stride_head))  # fmt: skip
        mO = self.view(args.out, args.batch, args.seqlen_q, args.num_heads_q, args.head_dim_v,
                       (args.out_stride_batch, args.out_stride_seqlen, args.out_stride_head))  # fmt: skip
        lse_rows = Int64(args.seqlen_q)
        mLSE = cute.make_tensor(
            args.lse,
            cute.make_layout(
                (args.seqlen_q, args.num_heads_q, args.batch),
                stride=(1, lse_rows, lse_rows * args.num_heads_q),
            ),
        )
        num_m_blocks = (args.seqlen_q + tile_m - 1) // tile_m
        scheduler = TileScheduler(
            num_m_blocks,
            args.num_heads_q,
            args.batch * args.num_heads_q,
            args.section,
            args.tile_counter,
        )
        return ForwardParams(
            q=self.tma_operand(mQ, tile_m, spec.tile_d, 1),
            k=self.tma_operand(mK, tile_n, spec.tile_d, stages),
            v=self.tma_operand(mV, tile_n, spec.tile_dv, stages),
            mO=mO,
            mLSE=mLSE,
            mma_qk=self.tiled_mma(config.tile_n, warpgroup.OperandSource.SMEM, OperandMajorMode.K),
            mma_pv=self.tiled_mma(spec.tile_dv, warpgroup.OperandSource.RMEM, OperandMajorMode.MN),
            scheduler=scheduler,
            num_ctas=args.num_ctas,
            seqlen_q=args.seqlen_q,
            seqlen_k=args.seqlen_k,
            head_dim_v=args.head_dim_v,
            group=args.num_heads_q // args.num_heads_kv,
            scale_log2=args.scale_log2,
        )

    def view(self, address, batch, seqlen, heads, dim, strides) -> cute.Tensor:
        """(seqlen, dim, heads, batch) view of a (batch, seqlen, heads, dim) tensor in device memory."""
        stride_batch, stride_seqlen, stride_head = (cute.assume(s, divby=8) for s in strides)
        return cute.make_tensor(
            address,
            cute.make_layout(
                (seqlen, dim, heads, batch), stride=(stride_seqlen, 1, stride_head, stride_batch)
            ),
        )

    def tma_operand(self, tensor, tile, tile_dim, stages) -> TmaOperand:
        kind = hopper_helpers.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, self.dtype, tile_dim)
        atom_layout = warpgroup.make_smem_layout_atom(kind, self.dtype)
        layout = cute.tile_to_shape(atom_layout, (tile, tile_dim, stages), order=(0, 1, 2))
        atom, coordinates = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            tensor,
            cute.select(layout, mode=[0, 1]),
            (tile, tile_dim),
        )
        return TmaOperand(atom, coordinates, layout)

    def tiled_mma(self, tile_n, a_source, b_major) -> cute.TiledMma:
        """64 rows per consumer warpgroup; f32 accumulators."""
        op = warpgroup.MmaF16BF16Op(
            self.dtype, Float32, (64, tile_n, 16), a_source, OperandMajorMode.K, b_major
        )
        return cute.make_tiled_mma(op, (self.config.num_mma_warpgroups, 1, 1))

    def shared_storage(self, p: ForwardParams):
        config = self.config

        @cute.struct
        class SharedStorage:
            q_barriers: cute.struct.MemRange[Int64, 2]
            k_barriers: cute.struct.MemRange[Int64, 2 * config.num_stages]
            v_barriers: cute.struct.MemRange[Int64, 2 * config.num_stages]
            tile_barriers: cute.struct.MemRange[Int64, 4]
            next_tile: cute.struct.MemRange[Int32, 2]
            sQ: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(p.q.layout)], 1024]
            sK: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(p.k.layout)], 1024]
            sV: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(p.v.layout)], 1024]

        return SharedStorage

    # ---------------------------------------------------------------- device

    @cute.kernel
    def kernel(self, p: ForwardParams):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for operand in (p.q, p.k, p.v):
                cpasync.prefetch_descriptor(operand.atom)
        storage = cutlass.utils.SmemAllocator().allocate(self.shared_storage(p))
        pipes = self.open_pipelines(storage)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        smem = (
            storage.sQ.get_tensor(p.q.layout.outer, swizzle=p.q.layout.inner),
            storage.sK.get_tensor(p.k.layout.outer, swizzle=p.k.layout.inner),
            storage.sV.get_tensor(p.v.layout.outer, swizzle=p.v.layout.inner),
            storage.next_tile.get_tensor(cute.make_layout(2)),
        )
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.config.regs_load)
            if warp == 0:
                self.load(p, smem, pipes)
        else:
            cute.arch.setmaxregister_increase(self.config.regs_mma)
            self.mma(p, smem, pipes)

    def open_pipelines(self, storage):
        """The q, k, v and tile pipelines; arrive counts follow from the roles."""
        spec, config = self.spec, self.config
        thread = pipeline.Agent.Thread
        num_mma_warps = 4 * config.num_mma_warpgroups
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

        return (
            tma(storage.q_barriers, 1, config.tile_m, spec.tile_d),
            tma(storage.k_barriers, config.num_stages, config.tile_n, spec.tile_d),
            tma(storage.v_barriers, config.num_stages, config.tile_n, spec.tile_dv),
            pipeline.PipelineAsync.create(
                barrier_storage=storage.tile_barriers.data_ptr(),
                num_stages=2,
                producer_group=one,
                consumer_group=mma_threads,
                defer_sync=True,
            ),
        )

    # -- producer

    @cute.jit
    def load(self, p: ForwardParams, smem, pipes):
        """Producer warp: visits tiles and blocks in the order that `mma` does."""
        sQ, sK, sV, next_tile = smem
        pipe_q, pipe_k, pipe_v, pipe_tile = pipes
        producer = pipeline.PipelineUserType.Producer
        q_state = pipeline.make_pipeline_state(producer, 1)
        k_state = pipeline.make_pipeline_state(producer, self.config.num_stages)
        v_state = pipeline.make_pipeline_state(producer, self.config.num_stages)
        tile_state = pipeline.make_pipeline_state(producer, 2)
        lane = cute.arch.lane_idx()
        tile = cute.arch.block_idx()[0]
        num_tiles = p.scheduler.num_tiles
        while tile < num_tiles:
            m_block, head, batch = p.scheduler.coordinates(tile)
            following = Int32(0)
            if lane == 0:
                following = p.scheduler.fetch(p.num_ctas)
            head_kv = head // p.group
            tQsQ, tQgQ = self.partition_tma(p.q, sQ, self.config.tile_m, self.spec.tile_d, head, batch)
            tKsK, tKgK = self.partition_tma(p.k, sK, self.config.tile_n, self.spec.tile_d, head_kv, batch)
            tVsV, tVgV = self.partition_tma(p.v, sV, self.config.tile_n, self.spec.tile_dv, head_kv, batch)
            num_blocks, _ = self.mask.block_range(m_block, p.seqlen_q, p.seqlen_k)

            k_state = self.load_block(p.k, pipe_k, k_state, tKsK, tKgK, num_blocks - 1)
            q_state = self.load_block(p.q, pipe_q, q_state, tQsQ, tQgQ, m_block)
            for i in cutlass.range(num_blocks - 1, unroll=1):
                n_block = num_blocks - 1 - i
                k_state = self.load_block(p.k, pipe_k, k_state, tKsK, tKgK, n_block - 1)
                v_state = self.load_block(p.v, pipe_v, v_state, tVsV, tVgV, n_block)
            v_state = self.load_block(p.v, pipe_v, v_state, tVsV, tVgV, 0)

            tile = cute.arch.shuffle_sync(following, 0)
            pipe_tile.producer_acquire(tile_state)
            if lane == 0:
                next_tile[tile_state.index] = tile
                pipe_tile.producer_commit(tile_state)
            tile_state.advance()

    def partition_tma(self, operand, smem, tile, dim, head, batch):
        """(TMA, stage) and (TMA, block) partitions of one head."""
        tiles = cute.local_tile(operand.tensor[None, None, head, batch], (tile, dim), (None, 0))
        return cpasync.tma_partition(
            operand.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(smem, 0, 2),
            cute.group_modes(tiles, 0, 2),
        )

    @cute.jit
    def load_block(self, operand: TmaOperand, pipe, state, to_smem, from_gmem, block: Int32):
        """Wait for a free stage, fill it with `block`, return the advanced state."""
        pipe.producer_acquire(state)
        cute.copy(
            operand.atom,
            from_gmem[None, block],
            to_smem[None, state.index],
            tma_bar_ptr=pipe.producer_get_barrier(state),
        )
        state.advance()
        return state

    # -- consumers

    @cute.jit
    def mma(self, p: ForwardParams, smem, pipes):
        """Consumer warpgroup: both products, the softmax and the output of its 64 rows."""
        sQ, sK, sV, next_tile = smem
        pipe_q, pipe_k, pipe_v, pipe_tile = pipes
        thread = cute.arch.thread_idx()[0] - THREADS_PER_WARPGROUP
        consumer_wg = cute.arch.make_warp_uniform(thread // THREADS_PER_WARPGROUP)
        lane = cute.arch.lane_idx()

        # Descriptors are warpgroup-uniform: slice by the warpgroup's first thread.
        wg_qk = p.mma_qk.get_slice(consumer_wg * THREADS_PER_WARPGROUP)
        wg_pv = p.mma_pv.get_slice(consumer_wg * THREADS_PER_WARPGROUP)
        tSrQ = wg_qk.make_fragment_A(wg_qk.partition_A(sQ))
        tSrK = wg_qk.make_fragment_B(wg_qk.partition_B(sK))
        sVt = cute.make_tensor(sV.iterator, cute.select(sV.layout, mode=[1, 0, 2]))
        tOrV = wg_pv.make_fragment_B(wg_pv.partition_B(sVt))
        tile_m, tile_n, tile_dv = self.config.tile_m, self.config.tile_n, self.spec.tile_dv
        acc_O = cute.make_rmem_tensor(wg_pv.partition_shape_C((tile_m, tile_dv)), Float32)
        rP = cute.make_rmem_tensor(wg_pv.partition_shape_A((tile_m, tile_n)), self.dtype)
        row_max = cute.make_rmem_tensor(2, Float32)
        row_sum = cute.make_rmem_tensor(2, Float32)
        o_scale = cute.make_rmem_tensor(2, Float32)
        lse = cute.make_rmem_tensor(2, Float32)

        thread_row = consumer_wg * 64 + thread % THREADS_PER_WARPGROUP // 32 * 16 + lane // 4
        thread_col = 2 * (lane % 4)

        consumer = pipeline.PipelineUserType.Consumer
        q_state = pipeline.make_pipeline_state(consumer, 1)
        k_state = pipeline.make_pipeline_state(consumer, self.config.num_stages)
        v_state = pipeline.make_pipeline_state(consumer, self.config.num_stages)
        tile_state = pipeline.make_pipeline_state(consumer, 2)
        self.grant_first_turn(consumer_wg)
        tile = cute.arch.block_idx()[0]
        num_tiles = p.scheduler.num_tiles
        while tile < num_tiles:
            m_block, head, batch = p.scheduler.coordinates(tile)
            num_blocks, num_full = self.mask.block_range(m_block, p.seqlen_q, p.seqlen_k)
            first_row = m_block * tile_m + thread_row
            acc_O.fill(0.0)
            pipe_q.consumer_wait(q_state)

            # first block: no output to accumulate yet
            acc_S = self.new_scores(p)
            pipe_k.consumer_wait(k_state)
            self.issue_gemm(p.mma_qk, acc_S, tSrQ[None, None, None, 0], tSrK[None, None, None, k_state.index], True)
            warpgroup.wait_group(0)
            pipe_k.consumer_release(k_state)
            k_state.advance()
            S = as_rows_cols(acc_S)
            self.mask.apply(S, first_row, (num_blocks - 1) * tile_n + thread_col, p.seqlen_q, p.seqlen_k)
            softmax.softmax_step(S, row_max, row_sum, o_scale, p.scale_log2, self.config.rescale_threshold, True)
            self.round_weights(acc_S, rP)

            for i in cutlass.range(num_blocks - 1 - num_full, unroll=1):
                k_state, v_state = self.step(
                    p, pipe_k, pipe_v, k_state, v_state, consumer_wg,
                    tSrQ, tSrK, tOrV, acc_O, rP, row_max, row_sum, o_scale,
                    first_row, (num_blocks - 2 - i) * tile_n + thread_col, True)
            for i in cutlass.range(cutlass.min(num_full, num_blocks - 1), unroll=1):
                k_state, v_state = self.step(
                    p, pipe_k, pipe_v, k_state, v_state, consumer_wg,
                    tSrQ, tSrK, tOrV, acc_O, rP, row_max, row_sum, o_scale,
                    first_row, Int32(0), False)
            pipe_q.consumer_release(q_state)
            q_state.advance()

            pipe_v.consumer_wait(v_state)
            self.issue_gemm(p.mma_pv, acc_O, rP, tOrV[None, None, None, v_state.index], False)
            pipe_tile.consumer_wait(tile_state)
            tile = next_tile[tile_state.index]
            pipe_tile.consumer_release(tile_state)
            tile_state.advance()
            softmax.finalize(row_max, row_sum, lse, p.scale_log2)
            warpgroup.wait_group(0)
            pipe_v.consumer_release(v_state)
            v_state.advance()
            O = as_rows_cols(acc_O)
            softmax.scale_rows(O, row_sum)
            epilogue.store_output(O, p.mO[None, None, head, batch], first_row, lane, p.seqlen_q, p.head_dim_v)
            if const_expr(self.spec.has_lse):
                epilogue.store_lse(lse, p.mLSE[None, head, batch], first_row, lane, p.seqlen_q)

    @cute.jit
    def step(
        self, p: ForwardParams, pipe_k, pipe_v, k_state, v_state, consumer_wg: Int32,
        tSrQ, tSrK, tOrV, acc_O, rP, row_max, row_sum, o_scale,
        first_row: Int32, first_col: Int32, is_masked: cutlass.Constexpr[bool],
    ):
        acc_S = self.new_scores(p)
        pipe_k.consumer_wait(k_state)
        self.take_turn(consumer_wg)
        self.issue_gemm(p.mma_qk, acc_S, tSrQ[None, None, None, 0], tSrK[None, None, None, k_state.index], True)
        pipe_v.consumer_wait(v_state)
        self.issue_gemm(p.mma_pv, acc_O, rP, tOrV[None, None, None, v_state.index], False)
        self.pass_turn(consumer_wg)
        warpgroup.wait_group(1)
        pipe_k.consumer_release(k_state)
        S = as_rows_cols(acc_S)
        if const_expr(is_masked or not self.config.use_speculation):
            if const_expr(is_masked):
                self.mask.apply(S, first_row, first_col, p.seqlen_q, p.seqlen_k)
            softmax.softmax_step(S, row_max, row_sum, o_scale, p.scale_log2, self.config.rescale_threshold, False, 0 if is_masked else self.config.fma_exp_period)
            warpgroup.wait_group(0)
            pipe_v.consumer_release(v_state)
            self.round_weights(acc_S, rP)
            softmax.rescale_output(as_rows_cols(acc_O), o_scale)
        else:
            weights = self.new_scores(p)
            block_sum = cute.make_rmem_tensor(2, Float32)
            is_outgrown = softmax.speculative_step(S, as_rows_cols(weights), row_max, block_sum, p.scale_log2, self.config.rescale_threshold, self.config.fma_exp_period)
            warpgroup.wait_group(0)
            pipe_v.consumer_release(v_state)
            self.round_weights(weights, rP)
            if is_outgrown:
                softmax.softmax_step(S, row_max, row_sum, o_scale, p.scale_log2, 0.0, False)
                self.round_weights(acc_S, rP)
                softmax.scale_rows(as_rows_cols(acc_O), o_scale)
            else:
                for r in cutlass.range_constexpr(2):
                    row_sum[r] = row_sum[r] + block_sum[r]
        k_state.advance()
        v_state.advance()
        return k_state, v_state

    @cute.jit
    def round_weights(self, weights, rP):
        """P = weights in the input dtype; accumulator and A fragment hold them in the same order."""
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
    def grant_first_turn(self, consumer_wg: Int32):
        if const_expr(self.config.use_ping_pong):
            if consumer_wg == self.config.num_mma_warpgroups - 1:
                self.pass_turn(consumer_wg)

    @cute.jit
    def take_turn(self, consumer_wg: Int32):
        if const_expr(self.config.use_ping_pong):
            cute.arch.barrier(
                barrier_id=Barrier.TURN + consumer_wg, number_of_threads=2 * THREADS_PER_WARPGROUP
            )

    @cute.jit
    def pass_turn(self, consumer_wg: Int32):
        if const_expr(self.config.use_ping_pong):
            last = self.config.num_mma_warpgroups - 1
            successor = cutlass.select_(consumer_wg == last, Int32(0), consumer_wg + 1)
            cute.arch.barrier_arrive(
                barrier_id=Barrier.TURN + successor, number_of_threads=2 * THREADS_PER_WARPGROUP
            )
