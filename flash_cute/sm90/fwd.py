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
from cutlass import Float32, Int32, Int64, const_expr, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from flash_cute.device import epilogue, softmax
from flash_cute.device.mask import AttentionMask
from flash_cute.device.primitives import as_rows_cols, pack_halves
from flash_cute.device.tile_scheduler import TileScheduler
from flash_cute.errors import InvalidProblem
from flash_cute.sm90.config import THREADS_PER_WARPGROUP, ForwardConfigSm90
from flash_cute.specialization import ForwardSpecialization

WARPS_PER_WARPGROUP = 4
ROWS_PER_WARP = 16
ROWS_PER_THREAD = 2  # of a 64-row wgmma accumulator
TILE_STAGES = 2

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


class Pipes(NamedTuple):
    """The four pipelines between the load warp and the consumers."""

    q: pipeline.PipelineTmaAsync
    k: pipeline.PipelineTmaAsync
    v: pipeline.PipelineTmaAsync
    tile: pipeline.PipelineAsync


class SharedTensors(NamedTuple):
    """Shared memory: (tile, dim, stage) rings, and the mailbox of the tile pipeline."""

    sQ: cute.Tensor
    sK: cute.Tensor
    sV: cute.Tensor
    next_tile: cute.Tensor  # (2,) int32


@dataclass(frozen=True)
class Tile:
    """One unit of work: tile_m queries of one head of one sequence."""

    m_block: Int32
    head: Int32
    batch: Int32


@dataclass(frozen=True)
class Consumer:
    """What a consumer thread holds across tiles: its place, operand descriptors and registers."""

    warpgroup: Int32
    lane: Int32
    row: Int32  # first row of the thread within the query tile; its rows are 8 apart
    col: Int32  # first column within a key block
    tSrQ: cute.Tensor
    tSrK: cute.Tensor
    tOrV: cute.Tensor
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
        self.dtype = DTYPES[spec.dtype]
        self.name = f"flash_fwd_sm90_{spec.label}_m{config.tile_m}n{config.tile_n}"
        self.smem_bytes = config.smem_bytes(spec)
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
        """Host side: describe the launch from a flat ForwardArgs, then launch."""
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
        """Describe the operands, products and tiles of this launch."""
        spec, config = self.spec, self.config
        tile_m, tile_n, stages = config.tile_m, config.tile_n, config.num_stages
        mQ = self.view(args, "q", args.seqlen_q, args.num_heads_q, args.head_dim)
        mK = self.view(args, "k", args.seqlen_k, args.num_heads_kv, args.head_dim)
        mV = self.view(args, "v", args.seqlen_k, args.num_heads_kv, args.head_dim_v)
        mO = self.view(args, "out", args.seqlen_q, args.num_heads_q, args.head_dim_v)
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

    def view(self, args: ForwardArgs, name: str, seqlen, heads, dim) -> cute.Tensor:
        """(seqlen, dim, heads, batch) view of a (batch, seqlen, heads, dim) argument."""
        stride_batch, stride_seqlen, stride_head = (
            cute.assume(getattr(args, f"{name}_stride_{mode}"), divby=8)
            for mode in ("batch", "seqlen", "head")
        )
        layout = cute.make_layout(
            (seqlen, dim, heads, args.batch), stride=(stride_seqlen, 1, stride_head, stride_batch)
        )
        return cute.make_tensor(getattr(args, name), layout)

    def tma_operand(self, tensor, tile, tile_dim, stages) -> TmaOperand:
        """Swizzled shared-memory layout of an operand's ring, and the TMA that fills a stage."""
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
        """The struct of shared memory."""
        config = self.config

        @cute.struct
        class SharedStorage:
            """Barriers first, then the tiles, each aligned for the 128-byte swizzle."""

            q_barriers: cute.struct.MemRange[Int64, 2]
            k_barriers: cute.struct.MemRange[Int64, 2 * config.num_stages]
            v_barriers: cute.struct.MemRange[Int64, 2 * config.num_stages]
            tile_barriers: cute.struct.MemRange[Int64, 2 * TILE_STAGES]
            next_tile: cute.struct.MemRange[Int32, TILE_STAGES]
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
            storage.next_tile.get_tensor(cute.make_layout(TILE_STAGES)),
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
        """Load warp: fetches tiles, visits their blocks in the order that `mma` does."""
        producer = pipeline.PipelineUserType.Producer
        q_state = pipeline.make_pipeline_state(producer, 1)
        k_state = pipeline.make_pipeline_state(producer, self.config.num_stages)
        v_state = pipeline.make_pipeline_state(producer, self.config.num_stages)
        tile_state = pipeline.make_pipeline_state(producer, TILE_STAGES)
        tile_d, tile_dv = self.spec.tile_d, self.spec.tile_dv
        lane = cute.arch.lane_idx()
        tile_idx = cute.arch.block_idx()[0]
        while tile_idx < p.scheduler.num_tiles:
            tile = self.tile_at(p, tile_idx)
            following = Int32(0)
            if lane == 0:
                following = p.scheduler.fetch(p.num_ctas)
            head_kv = tile.head // p.group
            q_copy = self.partition_tma(p.q, smem.sQ, tile_d, (tile.head, tile.batch))
            k_copy = self.partition_tma(p.k, smem.sK, tile_d, (head_kv, tile.batch))
            v_copy = self.partition_tma(p.v, smem.sV, tile_dv, (head_kv, tile.batch))
            num_blocks, _ = self.mask.block_range(tile.m_block, p.seqlen_q, p.seqlen_k)

            # V of a block follows K of the next: the consumers ask for them in this order.
            k_state = self.load_block(p.k, pipes.k, k_state, k_copy, num_blocks - 1)
            q_state = self.load_block(p.q, pipes.q, q_state, q_copy, tile.m_block)
            for i in cutlass.range(num_blocks - 1, unroll=1):
                n_block = num_blocks - 1 - i
                k_state = self.load_block(p.k, pipes.k, k_state, k_copy, n_block - 1)
                v_state = self.load_block(p.v, pipes.v, v_state, v_copy, n_block)
            v_state = self.load_block(p.v, pipes.v, v_state, v_copy, 0)

            tile_idx = cute.arch.shuffle_sync(following, 0)
            pipes.tile.producer_acquire(tile_state)
            if lane == 0:
                smem.next_tile[tile_state.index] = tile_idx
                pipes.tile.producer_commit(tile_state)
            tile_state.advance()

    @cute.jit
    def tile_at(self, p: ForwardParams, tile_idx: Int32) -> Tile:
        """The tile of a linear index."""
        m_block, head, batch = p.scheduler.coordinates(tile_idx)
        return Tile(m_block, head, batch)

    def partition_tma(self, operand: TmaOperand, smem, tile_dim: int, head_and_batch):
        """(TMA, stage) of shared memory and (TMA, block) of one head, for `load_block`."""
        tile_rows = cute.size(smem, mode=[0])
        head, batch = head_and_batch
        gX = operand.tensor[None, None, head, batch]
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
        tile_idx = cute.arch.block_idx()[0]
        while tile_idx < p.scheduler.num_tiles:
            tile = self.tile_at(p, tile_idx)
            num_blocks, num_full = self.mask.block_range(tile.m_block, p.seqlen_q, p.seqlen_k)
            c.acc_O.fill(0.0)
            pipes.q.consumer_wait(q_state)
            k_state = self.first_block(p, c, pipes, k_state, tile, num_blocks - 1)
            if const_expr(self.mask.has_long_edge):
                for i in cutlass.range(num_blocks - 1 - num_full, unroll=1):
                    n_block = num_blocks - 2 - i
                    kv_state = (k_state, v_state)
                    k_state, v_state = self.step(p, c, pipes, kv_state, tile, n_block, True)
            num_left = cutlass.min(num_full, num_blocks - 1)
            for i in cutlass.range(num_left, unroll=1):
                n_block = num_left - 1 - i
                k_state, v_state = self.step(p, c, pipes, (k_state, v_state), tile, n_block, False)
            pipes.q.consumer_release(q_state)
            q_state.advance()
            v_state = self.last_product(p, c, pipes, v_state)
            pipes.tile.consumer_wait(tile_state)
            tile_idx = smem.next_tile[tile_state.index]
            pipes.tile.consumer_release(tile_state)
            tile_state.advance()
            self.store(p, c, tile)

    def start_consumer(self, p: ForwardParams, smem: SharedTensors) -> Consumer:
        """Partition the operands for this thread and allocate its registers."""
        tile_m, tile_n, tile_dv = self.config.tile_m, self.config.tile_n, self.spec.tile_dv
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - WARPS_PER_WARPGROUP
        index = warp // WARPS_PER_WARPGROUP
        lane = cute.arch.lane_idx()
        # Descriptors are the same for a whole warpgroup: slice by its first thread.
        wg_qk = p.mma_qk.get_slice(index * THREADS_PER_WARPGROUP)
        wg_pv = p.mma_pv.get_slice(index * THREADS_PER_WARPGROUP)
        sVt = cute.make_tensor(smem.sV.iterator, cute.select(smem.sV.layout, mode=[1, 0, 2]))
        return Consumer(
            warpgroup=index,
            lane=lane,
            row=warp * ROWS_PER_WARP + lane // 4,
            col=2 * (lane % 4),
            tSrQ=wg_qk.make_fragment_A(wg_qk.partition_A(smem.sQ))[None, None, None, 0],
            tSrK=wg_qk.make_fragment_B(wg_qk.partition_B(smem.sK)),
            tOrV=wg_pv.make_fragment_B(wg_pv.partition_B(sVt)),
            acc_O=cute.make_rmem_tensor(wg_pv.partition_shape_C((tile_m, tile_dv)), Float32),
            rP=cute.make_rmem_tensor(wg_pv.partition_shape_A((tile_m, tile_n)), self.dtype),
            row_max=cute.make_rmem_tensor(ROWS_PER_THREAD, Float32),
            row_sum=cute.make_rmem_tensor(ROWS_PER_THREAD, Float32),
            o_scale=cute.make_rmem_tensor(ROWS_PER_THREAD, Float32),
        )

    @cute.jit
    def first_block(self, p: ForwardParams, c: Consumer, pipes: Pipes, k_state, tile, n_block):
        """Scores and weights of a tile's first block; there is no product with V to overlap yet."""
        acc_S = self.new_scores(p)
        pipes.k.consumer_wait(k_state)
        self.issue_gemm(p.mma_qk, acc_S, c.tSrQ, c.tSrK[None, None, None, k_state.index], True)
        warpgroup.wait_group(0)
        pipes.k.consumer_release(k_state)
        S = as_rows_cols(acc_S)
        self.modify_scores(p, c, S, tile, n_block, True)
        softmax.softmax_step(S, c.row_max, c.row_sum, c.o_scale, p.scale_log2, 0.0, True)
        self.round_weights(acc_S, c.rP)
        k_state.advance()
        return k_state

    @cute.jit
    def step(
        self,
        p: ForwardParams,
        c: Consumer,
        pipes: Pipes,
        kv_state,
        tile: Tile,
        n_block: Int32,
        is_masked: cutlass.Constexpr[bool],
    ):
        """One block: S of this one and O of the one before share the tensor cores, then softmax.

        Contract: returns the advanced (k_state, v_state), which the caller rebinds.
        """
        k_state, v_state = kv_state
        acc_S = self.new_scores(p)
        pipes.k.consumer_wait(k_state)
        self.take_turn(c)
        self.issue_gemm(p.mma_qk, acc_S, c.tSrQ, c.tSrK[None, None, None, k_state.index], True)
        pipes.v.consumer_wait(v_state)
        self.issue_gemm(p.mma_pv, c.acc_O, c.rP, c.tOrV[None, None, None, v_state.index], False)
        self.pass_turn(c)
        warpgroup.wait_group(1)
        pipes.k.consumer_release(k_state)
        self.modify_scores(p, c, as_rows_cols(acc_S), tile, n_block, is_masked)
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
        tile: Tile,
        n_block: Int32,
        is_masked: cutlass.Constexpr[bool],
    ):
        """Everything between Q K^T and the softmax."""
        if const_expr(self.spec.negate_scores):
            S.store(-S.load())
        if const_expr(is_masked):
            first_row = tile.m_block * self.config.tile_m + c.row
            first_col = n_block * self.config.tile_n + c.col
            self.mask.apply(S, first_row, first_col, p.seqlen_q, p.seqlen_k)

    @cute.jit
    def weigh_exactly(self, p: ForwardParams, c: Consumer, pipes: Pipes, v_state, acc_S):
        """Weights against the true running maximum; rescales O where it rose enough."""
        threshold = self.config.rescale_threshold
        S = as_rows_cols(acc_S)
        softmax.softmax_step(S, c.row_max, c.row_sum, c.o_scale, p.scale_log2, threshold, False)
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
        softmax.speculative_step(S, as_rows_cols(weights), c.row_max, block_sum, p.scale_log2)
        is_outgrown = softmax.any_outgrown(block_sum, headroom)
        warpgroup.wait_group(0)
        pipes.v.consumer_release(v_state)
        self.round_weights(weights, c.rP)
        if is_outgrown:
            softmax.catch_up(S, c.row_max, c.row_sum, c.o_scale, block_sum, p.scale_log2, headroom)
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
    def store(self, p: ForwardParams, c: Consumer, tile: Tile):
        """Close the softmax, divide by the row sums and write the tile."""
        first_row = tile.m_block * self.config.tile_m + c.row
        factor = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
        lse = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
        softmax.finalize(c.row_max, c.row_sum, factor, lse, p.scale_log2)
        if const_expr(self.spec.has_lse):
            gLSE = p.mLSE[None, tile.head, tile.batch]
            epilogue.store_lse(lse, gLSE, first_row, c.lane, p.seqlen_q)
        O = as_rows_cols(c.acc_O)
        softmax.scale_rows(O, factor)
        gO = p.mO[None, None, tile.head, tile.batch]
        epilogue.store_output(O, gO, first_row, c.lane, p.seqlen_q, p.head_dim_v)

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
