"""A kernel that applies a callback to every element of a grid, apart so that the DSL stays lazy.

One thread per (q, kv) pair, or per as many of a row as the callback takes at once: kv, kv + 1 and
so on, the last one repeated at the end. score_mod reads and writes float32, mask_mod writes 0 or 1
as uint8.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.cute.runtime as runtime
from cutlass import Float32, Int32, Uint8

from flash_cute.device import score as device_score
from flash_cute.variant import callback_for

THREADS = 128


class ToyCallback:
    """dst[b, h, q, kv] = score_mod(src[b, h, q, kv], b, h, q, kv), or mask_mod(b, h, q, kv)."""

    smem_bytes = 0

    def __init__(self, key):
        self.key = key
        self.callback = callback_for(key)
        self.is_score = key.kind == "score_mod"
        self.name = f"toy_{key.kind}_{key.digest[:12]}"

    def compile_args(self):
        pointer = lambda kind: runtime.make_ptr(kind, 16, cute.AddressSpace.gmem, assumed_align=4)
        result = pointer(Float32) if self.is_score else pointer(Uint8)
        sizes = (Int32(1), Int32(1), Int32(1), Int32(1))
        numbers = (*sizes, *device_score.tensor_args(self.key))
        return pointer(Float32), result, numbers, runtime.make_fake_stream()

    @cute.jit
    def __call__(self, src: cute.Pointer, dst: cute.Pointer, numbers, stream: cuda.CUstream):
        batch, heads, seqlen_q, seqlen_k = numbers[:4]
        shape = (batch, heads, seqlen_q, seqlen_k)
        layout = cute.make_ordered_layout(shape, order=(3, 2, 1, 0))
        captured = device_score.tensors_from(self.key, numbers[4:])
        self.kernel(cute.make_tensor(src, layout), cute.make_tensor(dst, layout), captured).launch(
            grid=[cute.ceil_div(seqlen_k, THREADS * self.key.width), seqlen_q, batch * heads],
            block=[THREADS, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(self, src: cute.Tensor, dst: cute.Tensor, captured):
        block, q_idx, pair = cute.arch.block_idx()
        width = self.key.width
        first = (block * THREADS + cute.arch.thread_idx()[0]) * width
        b, h = pair // src.shape[1], pair % src.shape[1]
        if first < src.shape[3]:
            kv_idx = [cutlass.min(first + i, src.shape[3] - 1) for i in range(width)]
            if cutlass.const_expr(self.is_score):
                values = device_score.trace_score_mod(
                    self.callback,
                    [src[b, h, q_idx, index] for index in kv_idx],
                    (b, h, q_idx, kv_idx),
                    captured,
                )
            else:
                indices = (b, h, q_idx, kv_idx)
                visible = device_score.trace_mask_mod(self.callback, indices, captured)
                values = [is_visible.to(Uint8) for is_visible in visible]
            for i in cutlass.range_constexpr(width):
                dst[b, h, q_idx, kv_idx[i]] = values[i]
