"""Write the output and the log-sum-exp of a tile straight from the accumulator registers.

No shared memory and no barrier: a warpgroup that is done goes on with the next tile while the other
one still computes. Four lanes exchange their column pairs first, so that every lane stores 16 bytes
and a quad one full 64-byte run of a row.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from flash_cute.device.pack_gqa import Rows
from flash_cute.device.primitives import column_offset, pack_halves, quad_transpose

ELEMENTS_PER_STORE = 8


@cute.jit
def store_output(
    acc_O: cute.Tensor,
    mO: cute.Tensor,
    rows: Rows,
    lane: Int32,
    num_rows: Int32,
    num_cols: Int32,
):
    """Store the rows of a warp; rows and columns outside the problem are dropped.

    Shapes: acc_O: (rows, cols) f32, as ``as_rows_cols``; mO: (seqlen_q, head_dim_v, num_heads_q)
    """
    dtype = mO.element_type
    for r in cutlass.range_constexpr(cute.size(acc_O, mode=[0])):
        row, gO = rows.q_idx[r], mO[None, None, rows.heads[r]]
        num_cols_thread = cute.size(acc_O, mode=[1])
        for g in cutlass.range_constexpr(num_cols_thread // ELEMENTS_PER_STORE):
            pairs = [ELEMENTS_PER_STORE * g + 2 * w for w in range(4)]
            words = [pack_halves(acc_O[r, i], acc_O[r, i + 1], dtype) for i in pairs]
            words = quad_transpose(words, lane)
            col = ELEMENTS_PER_STORE * (4 * g + lane % 4)
            if row < num_rows and col < num_cols:
                run = cute.make_rmem_tensor(4, Int32)
                for w in cutlass.range_constexpr(4):
                    run[w] = words[w]
                target = cute.domain_offset((row, col), gO).iterator
                target = cute.recast_ptr(target.align(16), dtype=Int32)
                cute.autovec_copy(run, cute.make_tensor(target, cute.make_layout(4)))


@cute.jit
def store_floats(
    acc_O: cute.Tensor,
    mO: cute.Tensor,
    rows: Rows,
    lane: Int32,
    num_rows: Int32,
    num_cols: Int32,
):
    """`store_output` of float32: a lane stores its pairs of columns, a quad 32 bytes of a row."""
    for r in cutlass.range_constexpr(cute.size(acc_O, mode=[0])):
        row, gO = rows.q_idx[r], mO[None, None, rows.heads[r]]
        for i in cutlass.range_constexpr(0, cute.size(acc_O, mode=[1]), 2):
            col = column_offset(i) + 2 * (lane % 4)
            if row < num_rows and col < num_cols:
                pair = cute.make_rmem_tensor(2, Float32)
                pair[0], pair[1] = acc_O[r, i], acc_O[r, i + 1]
                target = cute.domain_offset((row, col), gO).iterator.align(8)
                cute.autovec_copy(pair, cute.make_tensor(target, cute.make_layout(2)))


@cute.jit
def store_row(O: cute.Tensor, mO: cute.Tensor, rows: Rows, num_rows: Int32, num_cols: Int32):
    """`store_output` where a thread has a row of its own: it stores 16 bytes at a time.

    Shapes: O: (1, cols) f32; mO: (seqlen_q, head_dim_v, num_heads_q) of the input dtype, or f32
    """
    dtype, row = mO.element_type, rows.q_idx[0]
    gO = mO[None, None, rows.heads[0]]
    step = 4 if dtype is Float32 else ELEMENTS_PER_STORE
    for col in cutlass.range_constexpr(0, cute.size(O, mode=[1]), step):
        if row < num_rows and col < num_cols:
            run = cute.make_rmem_tensor(4, Int32)
            for w in cutlass.range_constexpr(4):
                if const_expr(dtype is Float32):
                    run[w] = O[0, col + w].bitcast(Int32)
                else:
                    run[w] = pack_halves(O[0, col + 2 * w], O[0, col + 2 * w + 1], dtype)
            target = cute.domain_offset((row, col), gO).iterator
            target = cute.recast_ptr(target.align(16), dtype=Int32)
            cute.autovec_copy(run, cute.make_tensor(target, cute.make_layout(4)))


@cute.jit
def store_lse(
    lse: cute.Tensor,
    mLSE: cute.Tensor,
    rows: Rows,
    lane: Int32,
    num_rows: Int32,
    lanes_per_row: cutlass.Constexpr[int],
):
    """Store the log-sum-exp of a warp's rows; the first lane of those that share a row writes.

    Shapes: lse: (rows,) f32; mLSE: (seqlen_q, num_heads_q)
    """
    if lane % lanes_per_row == 0:
        for r in cutlass.range_constexpr(cute.size(lse)):
            if rows.q_idx[r] < num_rows:
                mLSE[rows.q_idx[r], rows.heads[r]] = lse[r]
