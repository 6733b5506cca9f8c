"""The toy kernel itself, apart so that toy_kernel can be imported without the DSL."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.cute.runtime as runtime
from cutlass import Float32, Int32

from flash_cute.errors import UnsupportedProblem

THREADS = 128


class ToyScale:
    """dst = src * scale + bias, over n floats."""

    def __init__(self, scale):
        self.scale = scale
        self.name = f"toy_scale_{scale}"
        self.smem_bytes = 0

    def compile_args(self):
        pointer = lambda: runtime.make_ptr(Float32, 16, cute.AddressSpace.gmem, assumed_align=4)
        return pointer(), pointer(), Int32(1), Float32(1.0), runtime.make_fake_stream()

    @cute.jit
    def __call__(
        self, src: cute.Pointer, dst: cute.Pointer, n: Int32, bias: Float32, stream: cuda.CUstream
    ):
        if cutlass.const_expr(self.scale < 0):
            raise UnsupportedProblem(f"scale is {self.scale}, expected at least 0")
        src_tensor = cute.make_tensor(src, cute.make_layout((n,)))
        dst_tensor = cute.make_tensor(dst, cute.make_layout((n,)))
        blocks = (n + THREADS - 1) // THREADS
        self.kernel(src_tensor, dst_tensor, n, bias).launch(
            grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, src: cute.Tensor, dst: cute.Tensor, n: Int32, bias: Float32):
        i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        if i < n:
            dst[i] = src[i] * self.scale + bias
