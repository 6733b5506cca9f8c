"""Online softmax over the rows that a thread holds of the score accumulator."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from flash_cute.device.primitives import exp2, quad_max, quad_sum, reduce_in_chains

LN2 = 0.6931471805599453


@cute.jit
def reset(row_max: cute.Tensor, row_sum: cute.Tensor):
    """Start a tile: no key seen."""
    row_max.fill(-Float32.inf)
    row_sum.fill(0.0)


@cute.jit
def softmax_step(
    scores: cute.Tensor,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    o_scale: cute.Tensor,
    scale_log2: Float32,
    rescale_threshold: cutlass.Constexpr[float],
    is_first: cutlass.Constexpr[bool],
):
    """Turn one block of scores into unnormalised weights, in place, and advance the running state.

    Shapes:   scores: (rows, cols) f32 rmem, as ``as_rows_cols``; row_max, row_sum, o_scale: (rows,)
              f32 rmem. row_sum is this thread's share; `finalize` adds the quad's.
    Units:    row_max in raw score units (before scale_log2); weights are
              ``exp2((score - row_max) * scale_log2)``
    Contract: afterwards the output accumulated so far must be multiplied by o_scale, which is 1
              as long as the true maximum is no more than 2**rescale_threshold above row_max: a
              stale maximum cancels in the final division.
    """
    for r in cutlass.range_constexpr(cute.size(row_max)):
        values = [scores[r, i] for i in range(cute.size(scores, mode=[1]))]
        block_max = quad_max(reduce_in_chains(values, cute.arch.fmax))
        old_max = row_max[r]
        new_max = block_max
        factor = Float32(1.0)
        if const_expr(not is_first):
            new_max = cute.arch.fmax(old_max, block_max)
            safe_max = cutlass.select_(new_max == -Float32.inf, Float32(0.0), new_max)
            rise = (old_max - safe_max) * scale_log2
            if const_expr(rescale_threshold > 0):
                is_stale_enough = rise < -rescale_threshold
                new_max = cutlass.select_(is_stale_enough, new_max, old_max)
                factor = cutlass.select_(is_stale_enough, exp2(rise), Float32(1.0))
            else:
                factor = exp2(rise)
        row_max[r] = new_max
        o_scale[r] = factor
        # A row without a visible key has maximum -inf; -inf - -inf would be NaN.
        safe_max = cutlass.select_(new_max == -Float32.inf, Float32(0.0), new_max)
        shift = -(safe_max * scale_log2)
        weights = [exp2(cute.math.fma(value, scale_log2, shift)) for value in values]
        for i in cutlass.range_constexpr(len(weights)):
            scores[r, i] = weights[i]
        block_sum = reduce_in_chains(weights, lambda a, b: a + b)
        if const_expr(is_first):
            row_sum[r] = block_sum
        else:
            row_sum[r] = cute.math.fma(row_sum[r], factor, block_sum)


@cute.jit
def speculative_step(
    scores: cute.Tensor,
    weights: cute.Tensor,
    row_max: cute.Tensor,
    block_sum: cute.Tensor,
    scale_log2: Float32,
    headroom: cutlass.Constexpr[float],
):
    """Weights of one block against the last known maximum; True if a row of the warp outgrew it.

    No maximum is taken, which saves one instruction an element and starts the exponentials as soon
    as the scores arrive. A maximum that is too low is harmless until the weights grow large: it
    cancels in the final division. When a row's sum passes 2**headroom, or the row has seen no key
    yet, the caller repeats the block with `softmax_step`, from the scores, which stay intact.

    Shapes: scores, weights: (rows, cols) f32 rmem; row_max, block_sum: (rows,) f32 rmem
    """
    outgrown = cutlass.Boolean(False)
    for r in cutlass.range_constexpr(cute.size(row_max)):
        shift = -(row_max[r] * scale_log2)
        values = [
            exp2(cute.math.fma(scores[r, i], scale_log2, shift))
            for i in range(cute.size(scores, mode=[1]))
        ]
        for i in cutlass.range_constexpr(len(values)):
            weights[r, i] = values[i]
        block_sum[r] = reduce_in_chains(values, lambda a, b: a + b)
        # A row without a key so far has shift +inf and sum inf or NaN: the comparison fails.
        outgrown = outgrown | ~(block_sum[r] <= 2.0**headroom)
    return cute.arch.vote_any_sync(outgrown)


@cute.jit
def rescale_output(acc_O: cute.Tensor, o_scale: cute.Tensor):
    """Multiply the rows of the output accumulator by o_scale, if any row of the warp needs it."""
    needs = o_scale[0] != 1.0
    for r in cutlass.range_constexpr(1, cute.size(o_scale)):
        needs = needs | (o_scale[r] != 1.0)
    if cute.arch.vote_any_sync(needs):
        scale_rows(acc_O, o_scale)


@cute.jit
def scale_rows(acc: cute.Tensor, factors: cute.Tensor):
    """acc[r, :] *= factors[r], with acc as ``as_rows_cols`` views it."""
    for r in cutlass.range_constexpr(cute.size(factors)):
        row = acc[r, None]
        row.store(row.load() * factors[r])


@cute.jit
def finalize(
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    factor: cute.Tensor,
    lse: cute.Tensor,
    scale_log2: Float32,
):
    """Close the running softmax: what the output must be multiplied by, and the log-sum-exp.

    Units:    lse in natural log of the scaled scores
    Contract: call once per tile, after the last step; a row without a visible key gets factor 0
              and lse -inf. The maximum is scaled exactly as in `softmax_step`, so its rounding
              cancels.
    """
    for r in cutlass.range_constexpr(cute.size(row_max)):
        total = quad_sum(row_sum[r])
        is_empty = total == 0.0
        factor[r] = cutlass.select_(is_empty, Float32(0.0), cute.arch.rcp_approx(total))
        log2_sum = row_max[r] * scale_log2 + cute.math.log2(total, fastmath=True)
        lse[r] = cutlass.select_(is_empty, -Float32.inf, log2_sum * LN2)
