"""What the SM90 attention kernels share: the launch, a tile's work, its scores, rows and products.

A kernel class derives from `AttentionKernelSm90` and adds its roles. It says where its threads are
(`place`, `first_column`). A consumer is any object with `acc_O`, `row_max` and `row_sum`, and the
parameters are any with the fields of ForwardParams that the steps here read.
"""

from dataclasses import dataclass
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from flash_cute.arguments import ForwardArguments
from flash_cute.device import epilogue, softmax
from flash_cute.device.mask import AttentionMask, BlockRange
from flash_cute.device.pack_gqa import Rows
from flash_cute.device.primitives import as_rows_cols, column_offset, fresh_thread_idx
from flash_cute.device.score import trace_mask_mod, trace_score_mod
from flash_cute.device.seqlen import SeqlenInfo
from flash_cute.device.tile_scheduler import Tile
from flash_cute.errors import InvalidProblem
from flash_cute.features import Feature
from flash_cute.sm90.config import THREADS_PER_WARPGROUP
from flash_cute.sm90.pipes import WARPS_PER_WARPGROUP, SharedTensors
from flash_cute.specialization import ForwardSpecialization
from flash_cute.variant import callback_for

ROWS_PER_WARP = 16
ROWS_PER_THREAD = 2  # of a 64-row wgmma accumulator
ELEMENTS_PER_RUN = 8  # 16 bytes of shared memory


@dataclass(frozen=True)
class Work:
    """A tile with its sequence and its blocks of keys."""

    tile: Tile
    seqlen: SeqlenInfo
    blocks: BlockRange
    num_partial: Int32  # listed blocks of a block mask; 0 without one
    num_full: Int32
    is_empty: cutlass.Boolean  # a split without a block of its own


class AttentionKernelSm90:
    """The common part of the kernel classes; see the module docstring.

    Contract: a derived class sets `exchange`, `loader` and `num_load_warps`, the warps that it is
              run by, in its __init__, and has the methods `tma_operands`, `mma` and `place`.
    """

    label: ClassVar[str]  # of the kernel's name
    lacks: ClassVar[frozenset[Feature]] = frozenset()

    @classmethod
    def config_for(cls, spec: ForwardSpecialization, config):
        """The config to run `spec` with, given the package's choice; for subclasses to override.

        Query heads are packed for the config that this returns, so spec has none packed yet.
        """
        return config

    def __init__(self, spec: ForwardSpecialization, config, description):
        if broken := config.check(spec):
            raise InvalidProblem(f"{config} cannot run {spec.label}: {'; '.join(broken)}")
        self.spec, self.config, self.description = spec, config, description
        self.dtype = description.dtype
        owner = "" if "label" in vars(type(self)) else type(self).__name__ + "_"
        self.name = f"{self.label}_{owner}{spec.label}_m{config.tile_m}n{config.tile_n}"
        self.score_mod = callback_for(spec.score_mod) if spec.score_mod is not None else None
        self.mask_mod = callback_for(spec.mask_mod) if spec.mask_mod is not None else None
        self.block_mod = callback_for(spec.block_mod) if spec.block_mod is not None else None
        self.smem_bytes = config.smem_bytes(spec)
        self.mask = AttentionMask(
            is_causal=spec.is_causal,
            has_window_left=spec.has_window_left,
            has_window_right=spec.has_window_right,
            has_chunk=spec.has_chunk,
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
            min_blocks_per_mp=self.config.ctas_per_sm,
            preferred_smem_carveout=100,  # given, as the DSL else asks the driver for its size
        )

    # ---------------------------------------------------------------- device

    @cute.kernel
    def kernel(self, p):
        """Device side: shared memory and pipelines, then one branch per role."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for operand in self.tma_operands(p):
                cpasync.prefetch_descriptor(operand.atom)
        storage = SmemAllocator().allocate(self.exchange.storage(p))
        pipes = self.exchange.pipelines(storage)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        smem = self.exchange.tensors(p, storage)
        if warp < WARPS_PER_WARPGROUP:
            cute.arch.setmaxregister_decrease(self.config.regs_load)
            if warp < self.num_load_warps:
                self.loader.run(p, smem, pipes)
        else:
            cute.arch.setmaxregister_increase(self.config.regs_mma)
            self.mma(p, smem, pipes)

    def first_column(self, c) -> Int32 | int:
        """The first column of O in this thread's warpgroup."""
        return 0

    # -- a tile

    @cute.jit
    def receive(self, p, smem: SharedTensors, slot: Int32) -> Work:
        """The announced tile."""
        said = self.exchange.receive(smem, slot)
        first_query, num_queries = p.packing.queries(said.tile)
        blocks = self.mask.block_range(first_query, num_queries, said.seqlen, p.bounds)
        is_empty = cutlass.Boolean(False)
        if const_expr(self.spec.is_split):
            part = (said.tile.split, said.tile.num_splits, p.split_blocks)
            blocks, is_empty = self.mask.split_range(blocks, *part)
        return Work(said.tile, said.seqlen, blocks, said.num_partial, said.num_full, is_empty)

    @cute.jit
    def modify_scores(
        self,
        p,
        S: cute.Tensor,
        work: Work,
        n_block: Int32,
        place,
        is_masked: cutlass.Constexpr[bool],
        may_be_edge: cutlass.Constexpr[bool] = False,
    ):
        """Everything between Q K^T and the softmax: softcap, score_mod, then the masks."""
        row, col = place
        rows = p.packing.rows(work.tile, row, ROWS_PER_THREAD, work.seqlen.seqlen_q)
        first_col = n_block * self.config.tile_n + col
        if const_expr(self.spec.has_softcap):
            softmax.softcap(S, p.scale_log2, p.softcap)
        elif const_expr(self.spec.score_mod is not None):
            S.store(S.load() * p.scale_log2)
        elif const_expr(self.spec.negate_scores):
            S.store(-S.load())
        if const_expr(self.spec.score_mod is not None or self.spec.mask_mod is not None):
            self.apply_callbacks(p, S, work, rows, first_col, is_masked)
        if const_expr(self.spec.block_mod is not None and is_masked):
            if work.num_partial > 0:  # else the first block is a full one
                self.apply_block_mod(p, S, work, rows, first_col)
        if const_expr(is_masked):
            self.mask.apply(S, rows.q_idx, first_col, work.seqlen, p.bounds)
        elif const_expr(may_be_edge):
            blocks = work.blocks
            if n_block < blocks.full_begin or n_block >= blocks.full_end:
                self.mask.apply(S, rows.q_idx, first_col, work.seqlen, p.bounds)

    def apply_callbacks(self, p, S: cute.Tensor, work: Work, rows: Rows, first_col, is_edge: bool):
        """score_mod and mask_mod on every score of the thread."""
        place = (work, rows, first_col, is_edge)
        if self.score_mod is not None:
            for cells, indices in self.groups(self.score_mod, S, place):
                scores, tensors = [S[cell] for cell in cells], p.captured.score
                new = trace_score_mod(self.score_mod, scores, *indices, tensors, work.seqlen)
                for cell, score in zip(cells, new, strict=True):
                    S[cell] = score
        if self.mask_mod is not None:
            self.hide(self.mask_mod, p.captured.mask, S, place)

    def apply_block_mod(self, p, S: cute.Tensor, work: Work, rows, first_col):
        """The block mask's own mask_mod on every score of the thread."""
        self.hide(self.block_mod, p.captured.block, S, (work, rows, first_col, True))

    def hide(self, mask_mod, tensors, S: cute.Tensor, place):
        """Set the scores that a mask_mod does not show to -inf."""
        for cells, indices in self.groups(mask_mod, S, place):
            visible = trace_mask_mod(mask_mod, *indices, tensors, place[0].seqlen)
            for cell, is_visible in zip(cells, visible, strict=True):
                S[cell] = cutlass.select_(is_visible, S[cell], -Float32.inf)

    def groups(self, callback, S: cute.Tensor, place):
        """Yield the thread's scores by the groups that a callback takes, and their indices.

        Shapes: place (work, rows, column of the first score, whether the block is an edge); a group
                is its places in S and (b, h, q_idx, one kv_idx for each)

        Rows past the queries and, in edge blocks, columns past the keys get the index of the last
        one: their scores count for nothing, but a callback may look them up in a table.
        """
        work, rows, first_col, is_edge = place
        last_q, last_k = work.seqlen.seqlen_q - 1, cutlass.max(work.seqlen.seqlen_k - 1, 0)
        for r in range(cute.size(S, mode=[0])):
            h, q_idx = rows.heads[r], cutlass.min(rows.q_idx[r], last_q)
            for i in range(0, cute.size(S, mode=[1]), callback.key.width):
                columns = range(i, i + callback.key.width)
                kv_idx = [(first_col, column_offset(c)) for c in columns]
                if is_edge:
                    kv_idx = [cutlass.min(col + offset, last_k) for col, offset in kv_idx]
                yield [(r, c) for c in columns], (work.tile.batch, h, q_idx, kv_idx)

    def scale_log2(self, p) -> Float32:
        """Factor from the scores as `modify_scores` leaves them to powers of two."""
        return Float32(softmax.LOG2_E) if self.spec.modifies_scores else p.scale_log2

    @cute.jit
    def close_rows(self, p, c, work: Work, rows: Rows, factor, lse):
        """What a tile's rows of O must be multiplied by, and their log-sum-exp."""
        sinks_log2 = None
        if const_expr(self.spec.sink_dtype is not None):
            sinks_log2 = tuple(p.mSink[h].to(Float32) * softmax.LOG2_E for h in rows.heads)
            if const_expr(self.spec.is_split):  # it counts once
                is_first = work.tile.split == 0
                sinks_log2 = tuple(
                    cutlass.select_(is_first, sink, -Float32.inf) for sink in sinks_log2
                )
        softmax.finalize(c.row_max, c.row_sum, factor, lse, self.scale_log2(p), sinks_log2)

    @cute.jit
    def store(self, p, c, work: Work):
        """Close the rows, scale them and write this warpgroup's columns of the tile."""
        tile, seqlen = work.tile, work.seqlen
        thread = fresh_thread_idx()
        lane = thread % 32
        rows = p.packing.rows(tile, self.place(thread)[0], ROWS_PER_THREAD, seqlen.seqlen_q)
        factor = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
        lse = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
        self.close_rows(p, c, work, rows, factor, lse)
        batch = 0 if const_expr(self.spec.is_packed_q) else tile.batch
        if const_expr(self.spec.is_split):
            batch += tile.split * (1 if self.spec.is_packed_q else p.sequences.batch)
        if const_expr(self.spec.has_lse):
            mLSE = cute.domain_offset((seqlen.offset_q, 0), p.mLSE[None, None, batch])
            epilogue.store_lse(lse, mLSE, rows, lane, seqlen.seqlen_q)
        O = as_rows_cols(c.acc_O)
        softmax.scale_rows(O, factor)
        first_col = self.first_column(c)
        mO = cute.domain_offset((seqlen.offset_q, first_col, 0), p.mO[None, None, None, batch])
        num_cols = p.head_dim_v - first_col
        if const_expr(self.spec.is_split):
            epilogue.store_floats(O, mO, rows, lane, seqlen.seqlen_q, num_cols)
        else:
            epilogue.store_output(O, mO, rows, lane, seqlen.seqlen_q, num_cols)

    @cute.jit
    def zero_rows(self, sX: cute.Tensor, first_row: Int32):
        """Zero the last rows of a (rows, dim) tile, from first_row on; by one warpgroup."""
        num_rows, dim = cute.size(sX, mode=[0]), cute.size(sX, mode=[1])
        runs = dim // ELEMENTS_PER_RUN
        thread = cute.arch.thread_idx()[0] % THREADS_PER_WARPGROUP
        zeros = cute.make_rmem_tensor(ELEMENTS_PER_RUN, self.dtype)
        zeros.fill(0.0)
        for i in cutlass.range(first_row * runs + thread, num_rows * runs, THREADS_PER_WARPGROUP):
            row = i // runs
            run = cute.local_tile(sX, (1, ELEMENTS_PER_RUN), (row, i - row * runs))
            cute.autovec_copy(zeros, run[0, None])
        cute.arch.fence_view_async_shared()

    @cute.jit
    def issue_gemm(
        self,
        tiled_mma: cute.TiledMma,
        acc,
        A,
        B,
        zero_init: cutlass.Constexpr[bool],
        part: cutlass.Constexpr = (0, 1),
    ):
        """Start acc (+)= A B on the tensor cores and close the wgmma group.

        Args:
            part: (i, n) for the part number i of n equal ones of the inner extent.
        """
        # A fresh atom: setting the field of a shared one would leak out of the caller's loop.
        atom = cute.make_mma_atom(tiled_mma.op)
        warpgroup.fence()
        size = cute.size(A, mode=[2]) // part[1]
        for k in cutlass.range_constexpr(part[0] * size, (part[0] + 1) * size):
            atom.set(warpgroup.Field.ACCUMULATE, not zero_init or k > part[0] * size)
            cute.gemm(atom, acc, A[None, None, k], B[None, None, k], acc)
        warpgroup.commit_group()
