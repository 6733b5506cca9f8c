"""Small device operations that several layers share: reductions, votes, exponentials, fragments."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass._mlir.dialects import llvm

ELEMENTS_PER_RUN = 8  # 16 bytes of shared memory


def fresh_thread_idx() -> Int32:
    """The thread's index in the CTA, read anew: what is derived from it is not kept in registers.

    Values that a loop needs only at its ends are otherwise computed before it and, where registers
    are short, spilled.
    """
    thread, _, _ = cute.arch.thread_idx()
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[thread]
    )


def load_constant(tensor: cute.Tensor, coord):
    """Read an element of global memory that nothing writes while the kernel runs.

    The compiler may move such a load out of a loop and merge it with others. It does not move an
    ordinary one over asynchronous instructions: a number of a head was read once per key block,
    hundreds of cycles on the way from one product to the next.
    """
    kind = tensor.element_type
    pointer = (tensor.iterator + cute.crd2idx(coord, tensor.layout)).llvm_ptr
    return kind(llvm.load(kind.mlir_type, pointer, alignment=kind.width // 8, invariant=True))


def prefetch(tensor: cute.Tensor, coord):
    """Start to bring an element of global memory, and what lies around it, into the L2 cache."""
    address = (tensor.iterator + cute.crd2idx(coord, tensor.layout)).toint()
    cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[address])


def exp2(x: Float32) -> Float32:
    """2**x by the exponential unit: relative error 2**-22, exp2(-inf) = 0.

    Inline PTX on purpose: the compiler takes the plain operation for cheap and repeats it in each
    branch that uses its result, 64 exponentials a block of keys where scores are modified.
    """
    return cute.arch.inline_ptx(
        "ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x]
    )


def log2(x: Float32) -> Float32:
    """Base-2 logarithm by the same unit; log2(0) = -inf."""
    return cute.math.log2(x, fastmath=True)


def pack_halves(low: Float32, high: Float32, dtype) -> Int32:
    """Round two values to bf16 or fp16 and pack them into one word, `low` in its low half.

    Inline PTX on purpose: conversions at the end of both branches of an `if` would otherwise be
    merged behind it, which keeps a whole tile of unrounded values alive (spills at 160 registers).
    """
    kind = "bf16x2" if dtype is cutlass.BFloat16 else "f16x2"
    return cute.arch.inline_ptx(
        f"cvt.rn.{kind}.f32 {{$w0}}, {{$r0}}, {{$r1}};",
        write_only_types=[Int32],
        read_only_args=[high, low],
    )


def round_to_half(x: Float32, dtype) -> Float32:
    """Round a value to bf16 or fp16 and keep it as float32.

    Inline PTX on purpose: a conversion there and back around an operation is otherwise replaced by
    the operation in half precision, and two of those by a fused one, which rounds once.
    """
    to_half = "cvt.rn.f16.f32 h, {$r0}; cvt.f32.f16 {$w0}, h;"
    if dtype is cutlass.BFloat16:
        to_half = "cvt.rn.bf16.f32 h, {$r0}; mov.b32 {$w0}, {zero, h};"
    return cute.arch.inline_ptx(
        "{ .reg .b16 h, zero; mov.b16 zero, 0; " + to_half + " }",
        write_only_types=[Float32],
        read_only_args=[x],
    )


def quad_reduce(x, op):
    """Reduce over the four neighbouring lanes that share the rows of an mma accumulator."""
    x = op(x, cute.arch.shuffle_sync_bfly(x, offset=1))
    return op(x, cute.arch.shuffle_sync_bfly(x, offset=2))


def quad_max(x: Float32) -> Float32:
    """Maximum over a quad."""
    return quad_reduce(x, cute.arch.fmax)


def quad_sum(x: Float32) -> Float32:
    """Sum over a quad."""
    return quad_reduce(x, lambda a, b: a + b)


def reduce_in_chains(values: list, op, num_chains: int = 4):
    """Fold `values` with `op` in independent chains, so that latency is hidden by parallelism."""
    chains = list(values[:num_chains])
    for i in range(num_chains, len(values)):
        chains[i % num_chains] = op(chains[i % num_chains], values[i])
    while len(chains) > 1:
        half = (len(chains) + 1) // 2
        chains = [
            op(chains[i], chains[i + half]) if i + half < len(chains) else chains[i]
            for i in range(half)
        ]
    return chains[0]


def as_rows_cols(acc: cute.Tensor) -> cute.Tensor:
    """View an mma accumulator fragment as (rows, cols) of this thread.

    Shapes: acc: ((2, 2, n), m, 1) -> ((2, m), (2, n)); the thread's column i lies
            ``column_offset(i)`` columns to the right of its first one.
    """
    (cols, rows, repeat_n), repeat_m = acc.layout.shape[0], acc.layout.shape[1]
    (col_stride, row_stride, n_stride), m_stride = acc.layout.stride[0], acc.layout.stride[1]
    layout = cute.make_layout(
        ((rows, repeat_m), (cols, repeat_n)),
        stride=((row_stride, m_stride), (col_stride, n_stride)),
    )
    return cute.make_tensor(acc.iterator, layout)


def column_offset(i: int) -> int:
    """Columns between a thread's first accumulator column and its i-th (16x8 mma tiles)."""
    return 8 * (i // 2) + i % 2


def quad_transpose(words: list, lane: Int32) -> list:
    """Transpose a 4x4 matrix of 32-bit words held by four neighbouring lanes.

    Lane t of the quad gives words[0..3] and gets word t of lanes 0..3: a lane's four pairs of
    columns become one run of eight. Two butterfly steps, four shuffles.
    """
    words = list(words)
    for bit, pairs in ((1, ((0, 1), (2, 3))), (2, ((0, 2), (1, 3)))):
        is_high = (lane & bit) != 0
        for low, high in pairs:
            sent = cutlass.select_(is_high, words[low], words[high])
            received = cute.arch.shuffle_sync_bfly(sent, offset=bit)
            words[low] = cutlass.select_(is_high, received, words[low])
            words[high] = cutlass.select_(is_high, words[high], received)
    return words


@cute.jit
def copy_or_zero(slot: Int32, source: Int64, is_wanted: Boolean):
    """Start a copy of 16 bytes into shared memory, or of zeros without an access to `source`.

    Args:
        slot, source: addresses, multiples of 16.
    """
    num_bytes = cutlass.select_(is_wanted, Int32(16), Int32(0))
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
        read_only_args=[slot, source, num_bytes],
    )


def swizzle_128(address: Int32) -> Int32:
    """Where the 128-byte swizzle puts what lies at an address of a tile that starts at 1024 bytes.

    Accesses through a swizzled pointer do this by themselves; its plain address does not say it.
    """
    return address ^ (address >> 3 & 0x70)


@cute.jit
def arrive_if(barrier: Int32):
    """Arrive at the barrier of that address in shared memory; 0 is none."""
    if barrier != 0:
        cute.arch.inline_ptx(
            "mbarrier.arrive.shared::cta.b64 _, [{$r0}];", read_only_args=[barrier]
        )


@cute.jit
def zero_rows(sX: cute.Tensor, first_row: Int32, num_threads: cutlass.Constexpr[int]):
    """Zero the last rows of a (rows, dim) tile of shared memory, from first_row on.

    Args:
        num_threads: aligned threads that do it together; products that are issued after a barrier
            of theirs see it.
    """
    num_rows, dim = cute.size(sX, mode=[0]), cute.size(sX, mode=[1])
    runs = dim // ELEMENTS_PER_RUN
    thread = cute.arch.thread_idx()[0] % num_threads
    zeros = cute.make_rmem_tensor(ELEMENTS_PER_RUN, sX.element_type)
    zeros.fill(0.0)
    for i in cutlass.range(first_row * runs + thread, num_rows * runs, num_threads):
        row = i // runs
        run = cute.local_tile(sX, (1, ELEMENTS_PER_RUN), (row, i - row * runs))
        cute.autovec_copy(zeros, run[0, None])
    cute.arch.fence_view_async_shared()
