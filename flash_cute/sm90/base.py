"""What the SM90 attention kernels share: roles, the work of an announced tile, products by wgmma.

The parameters of a kernel are any with the fields of ForwardParams that the steps here read.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from flash_cute.device.forward import AttentionKernel, Work
from flash_cute.device.primitives import zero_rows
from flash_cute.sm90.config import THREADS_PER_WARPGROUP
from flash_cute.sm90.pipes import WARPS_PER_WARPGROUP, SharedTensors

ROWS_PER_WARP = 16
ROWS_PER_THREAD = 2  # of a 64-row wgmma accumulator


class AttentionKernelSm90(AttentionKernel):
    """The common part of the kernel classes; see the module docstring.

    Contract: a derived class sets `exchange`, `loader` and `num_load_warps`, the warps that it is
              run by, in its __init__, and has the methods `tma_operands`, `mma` and `place`.
    """

    rows_per_thread = ROWS_PER_THREAD
    waits_by_itself = True

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
        self.await_kernel_before()
        smem = self.exchange.tensors(p, storage)
        if warp < WARPS_PER_WARPGROUP:
            cute.arch.setmaxregister_decrease(self.config.regs_load)
            if warp < self.num_load_warps:
                self.loader.run(p, smem, pipes)
        else:
            cute.arch.setmaxregister_increase(self.config.regs_mma)
            self.mma(p, smem, pipes)

    @cute.jit
    def receive(self, p, smem: SharedTensors, slot: Int32) -> Work:
        """The announced tile."""
        said = self.exchange.receive(smem, slot)
        blocks, is_empty = self.blocks_of(p, said.tile, said.seqlen)
        return Work(said.tile, said.seqlen, blocks, said.num_partial, said.num_full, is_empty)

    @cute.jit
    def zero_rows(self, sX: cute.Tensor, first_row: Int32):
        """Zero the last rows of a (rows, dim) tile, from first_row on; by one warpgroup."""
        zero_rows(sX, first_row, THREADS_PER_WARPGROUP)

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
