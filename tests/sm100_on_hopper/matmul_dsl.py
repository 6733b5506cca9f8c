"""A plain matrix product for SM100, C = A B: what the harness has to run right besides attention.

Algorithm, per CTA, which has 128 rows of C and walks along its tiles of 128 columns:
    for each 64 of k: A and B to shared memory by TMA, acc (+)= A B by tcgen05.mma
    acc from tensor memory to registers to C

Roles (192 threads):
    warps 0..3   store: 32 rows of C each; warp 0 also allocates tensor memory and frees it
    warp 4       mma: issues every product
    warp 5       load: issues every TMA

Barriers (full, empty):
    operands  num_stages   load -> mma    bytes landed; one commit, after the products of the stage
    acc       1 stage      mma -> store   one commit, after the tile's last; one arrival per warp
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.memory import SmemAllocator
from cutlass.utils import blackwell_helpers

TILE = (128, 128, 64)  # m, n, k
STORE_WARPS, MMA_WARP, LOAD_WARP = 4, 4, 5
THREADS = 192
ACC_COLUMNS = 128
BYTES_PER_STAGE = (TILE[0] + TILE[1]) * TILE[2] * 2
STORE_COLUMNS = 32  # of one load from tensor memory


class Operand(NamedTuple):
    """A matrix in device memory that TMA reads tile by tile into a ring of shared memory."""

    atom: cute.CopyAtom
    tensor: cute.Tensor
    layout: cute.ComposedLayout  # (MMA, rows, k, stages)


@dataclass(frozen=True)
class MatmulParams:
    """What the kernel gets; tests/sm100_on_hopper/matmul.py lays out the same for the driver."""

    a: Operand  # (m, k), k contiguous
    b: Operand  # (n, k), n contiguous
    mC: cute.Tensor  # (m, n) f32
    mma: cute.TiledMma
    num_k_tiles: Int32


class Shared(NamedTuple):
    """Views of shared memory; barriers are arrays of mbarriers, one for each stage."""

    sA: cute.Tensor
    sB: cute.Tensor
    full: cute.Pointer
    empty: cute.Pointer
    acc_full: cute.Pointer
    acc_empty: cute.Pointer


class Matmul:
    """C (m, n) f32 = A (m, k) B (k, n), both bf16; m and n multiples of 128, k of 64."""

    def __init__(self, num_stages: int = 3):
        self.num_stages = num_stages
        self.name = f"sm100_matmul_s{num_stages}"
        self.num_threads = THREADS
        self.smem_bytes = 1024 + num_stages * BYTES_PER_STAGE

    def compile_args(self) -> tuple:
        """a, b, c, m, n, k, stream."""
        addresses = [
            cute.runtime.nullptr(kind, cute.AddressSpace.gmem, 16)
            for kind in (BFloat16, BFloat16, Float32)
        ]
        return (*addresses, Int32(1), Int32(1), Int32(1), cute.runtime.make_fake_stream())

    # ---------------------------------------------------------------- host

    @cute.jit
    def __call__(self, a, b, c, m, n, k, stream):
        """Describe the operands and launch a CTA for each 128 rows of C."""
        op = tcgen05.MmaF16BF16Op(
            BFloat16,
            Float32,
            (TILE[0], TILE[1], 16),
            tcgen05.CtaGroup.ONE,
            tcgen05.OperandSource.SMEM,
            OperandMajorMode.K,
            OperandMajorMode.MN,
        )
        mma = cute.make_tiled_mma(op)
        k, n = cute.assume(k, divby=64), cute.assume(n, divby=128)
        mA = cute.make_tensor(a, cute.make_layout((m, k), stride=(Int64(k), 1)))
        mB = cute.make_tensor(b, cute.make_layout((n, k), stride=(1, Int64(n))))
        mC = cute.make_tensor(c, cute.make_layout((m, n), stride=(Int64(n), 1)))
        layout_a = blackwell_helpers.make_smem_layout_a(mma, TILE, BFloat16, self.num_stages)
        layout_b = blackwell_helpers.make_smem_layout_b(mma, TILE, BFloat16, self.num_stages)
        tma = cpasync.CopyBulkTensorTileG2SOp()
        one_a = cute.slice_(layout_a, (None, None, None, 0))
        one_b = cute.slice_(layout_b, (None, None, None, 0))
        atom_a, tma_a = cute.nvgpu.make_tiled_tma_atom_A(tma, mA, one_a, TILE, mma)
        atom_b, tma_b = cute.nvgpu.make_tiled_tma_atom_B(tma, mB, one_b, TILE, mma)
        params = MatmulParams(
            a=Operand(atom_a, tma_a, layout_a),
            b=Operand(atom_b, tma_b, layout_b),
            mC=mC,
            mma=mma,
            num_k_tiles=k // TILE[2],
        )
        self.kernel(params).launch(
            grid=[m // TILE[0], 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,
        )

    # ---------------------------------------------------------------- device

    @cute.kernel
    def kernel(self, p: MatmulParams):
        """Shared memory, tensor memory and pipelines, then one branch per role."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = SmemAllocator().allocate(self.storage(p))
        smem = self.open(p, storage)
        if warp == 0:
            self.init_barriers(smem)
            cute.arch.alloc_tmem(ACC_COLUMNS, storage.tmem_address.data_ptr())
            cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.mbarrier_init_fence()
        order_before_sync()
        cute.arch.sync_threads()
        order_after_sync()
        address = cute.arch.retrieve_tmem_ptr(Float32, 16, storage.tmem_address.data_ptr())
        shape = p.mma.partition_shape_C(TILE[:2])
        acc = cute.make_tensor(address, p.mma.make_fragment_C(shape).layout)
        if warp == LOAD_WARP:
            self.load(p, smem)
        if warp == MMA_WARP:
            self.multiply(p, smem, acc)
        if warp < STORE_WARPS:
            self.store(p, smem, acc)
        order_before_sync()
        cute.arch.sync_threads()
        order_after_sync()
        if warp == 0:
            cute.arch.dealloc_tmem(address, ACC_COLUMNS)

    def storage(self, p: MatmulParams):
        """The struct of shared memory."""

        @cute.struct
        class SharedStorage:
            operand_barriers: cute.struct.MemRange[Int64, 2 * self.num_stages]
            acc_barriers: cute.struct.MemRange[Int64, 2]
            tmem_address: cute.struct.MemRange[Int32, 1]
            sA: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(p.a.layout)], 1024]
            sB: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(p.b.layout)], 1024]

        return SharedStorage

    def open(self, p: MatmulParams, storage) -> Shared:
        """Views of the tiles and of the barriers."""
        operands, acc = storage.operand_barriers.data_ptr(), storage.acc_barriers.data_ptr()
        return Shared(
            storage.sA.get_tensor(p.a.layout.outer, swizzle=p.a.layout.inner),
            storage.sB.get_tensor(p.b.layout.outer, swizzle=p.b.layout.inner),
            operands,
            operands + self.num_stages,
            acc,
            acc + 1,
        )

    @cute.jit
    def init_barriers(self, smem: Shared):
        """By one thread: how many arrivals each barrier counts."""
        with cute.arch.elect_one():
            for stage in cutlass.range_constexpr(self.num_stages):
                cute.arch.mbarrier_init(smem.full + stage, 1)
                cute.arch.mbarrier_init(smem.empty + stage, 1)
            cute.arch.mbarrier_init(smem.acc_full, 1)
            cute.arch.mbarrier_init(smem.acc_empty, STORE_WARPS)

    def place(self, i: Int32):
        """The stage of the i-th step along a ring, and the phase that its filling completes."""
        return i % self.num_stages, i // self.num_stages & 1

    @cute.jit
    def load(self, p: MatmulParams, smem: Shared):
        """All tiles of A and B, in the order in which `multiply` takes them."""
        thr = p.mma.get_slice(0)
        gA = cute.local_tile(p.a.tensor, (TILE[0], TILE[2]), (cute.arch.block_idx()[0], None))
        gB = cute.local_tile(p.b.tensor, (TILE[1], TILE[2]), (None, None))
        to_a, from_a = self.partition(p.a, smem.sA, thr.partition_A(gA))
        to_b, from_b = self.partition(p.b, smem.sB, thr.partition_B(gB))
        num_n_tiles = cute.size(p.mC, mode=[1]) // TILE[1]
        for i in cutlass.range(num_n_tiles * p.num_k_tiles, unroll=1):
            n, k = i // p.num_k_tiles, i % p.num_k_tiles
            stage, phase = self.place(i)
            cute.arch.mbarrier_wait(smem.empty + stage, phase ^ 1)
            full = smem.full + stage
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, BYTES_PER_STAGE)
            cute.copy(p.a.atom, from_a[None, k], to_a[None, stage], tma_bar_ptr=full)
            cute.copy(p.b.atom, from_b[None, n, k], to_b[None, stage], tma_bar_ptr=full)

    def partition(self, operand: Operand, ring, tiles):
        """(TMA, stage) of shared memory and (TMA, tile, ...) of device memory."""
        return cpasync.tma_partition(
            operand.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(ring, 0, 3),
            cute.group_modes(tiles, 0, 3),
        )

    @cute.jit
    def multiply(self, p: MatmulParams, smem: Shared, acc):
        """Every product; a commit frees each stage, one more hands over each tile."""
        rA, rB = p.mma.make_fragment_A(smem.sA), p.mma.make_fragment_B(smem.sB)
        for n in cutlass.range(cute.size(p.mC, mode=[1]) // TILE[1], unroll=1):
            cute.arch.mbarrier_wait(smem.acc_empty, n & 1 ^ 1)
            order_after_sync()
            for k in cutlass.range(p.num_k_tiles, unroll=1):
                stage, phase = self.place(n * p.num_k_tiles + k)
                cute.arch.mbarrier_wait(smem.full + stage, phase)
                atom = cute.make_mma_atom(p.mma.op)
                for i in cutlass.range_constexpr(cute.size(rA, mode=[2])):
                    atom.set(tcgen05.Field.ACCUMULATE, (k > 0) if i == 0 else True)
                    a, b = rA[None, None, i, stage], rB[None, None, i, stage]
                    cute.gemm(atom, acc, a, b, acc)
                with cute.arch.elect_one():
                    tcgen05.commit(smem.empty + stage)
            with cute.arch.elect_one():
                tcgen05.commit(smem.acc_full)

    @cute.jit
    def store(self, p: MatmulParams, smem: Shared, acc):
        """Each warp its 32 rows, a row for each thread, 32 columns at a time."""
        thread = cute.arch.thread_idx()[0]
        op = tcgen05.Ld32x32bOp(tcgen05.Repetition(STORE_COLUMNS), tcgen05.Pack.NONE)
        tile = cute.logical_divide(acc[(None, None), 0, 0], (TILE[0], STORE_COLUMNS))[
            (None, 0), (None, None)
        ]
        copy = tcgen05.make_tmem_copy(cute.make_copy_atom(op, Float32), tile[None, None, 0])
        thr = copy.get_slice(thread)
        block = (cute.arch.block_idx()[0], None)
        gC = cute.local_tile(p.mC, (TILE[0], STORE_COLUMNS), block)
        for n in cutlass.range(cute.size(p.mC, mode=[1]) // TILE[1], unroll=1):
            cute.arch.mbarrier_wait(smem.acc_full, n & 1)
            order_after_sync()
            for i in cutlass.range_constexpr(TILE[1] // STORE_COLUMNS):
                from_tmem = thr.partition_S(tile[None, None, i])
                to_gmem = thr.partition_D(gC[None, None, n * (TILE[1] // STORE_COLUMNS) + i])
                values = cute.make_rmem_tensor(to_gmem.shape, Float32)
                cute.copy(copy, from_tmem, values)
                cute.arch.fence_view_async_tmem_load()
                cute.autovec_copy(values, to_gmem)
            order_before_sync()
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(smem.acc_empty)


def order_before_sync():
    """Order this thread's accesses to tensor memory before the barrier that follows."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC)


def order_after_sync():
    """Order those that follow after the barrier that this thread has passed."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)
