"""Online softmax over the rows that a thread holds of the score accumulator."""

import typing

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from flash_cute.device.primitives import exp2, log2, quad_max, quad_sum, reduce_in_chains

LN2 = 0.6931471805599453
LOG2_E = 1.4426950408889634


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
        values = row_values(scores, r)
        new_max = quad_max(reduce_in_chains(values, cute.arch.fmax))
        if const_expr(not is_first):
            old_max = row_max[r]
            new_max = cute.arch.fmax(old_max, new_max)
            rise = (finite_or_zero(new_max) - old_max) * scale_log2
            # Not `rise > threshold`: a row that has seen no key has old_max -inf, or rise NaN.
            is_kept = rise <= rescale_threshold
            new_max = cutlass.select_(is_kept, old_max, new_max)
        advance_row(scores, r, values, new_max, (row_max, row_sum, o_scale), scale_log2, is_first)


@cute.jit
def raise_maximum(
    scores: cute.Tensor,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    o_scale: cute.Tensor,
    scale_log2: Float32,
    rescale_threshold: cutlass.Constexpr[float],
):
    """The first half of `softmax_step`: maxima, and sums rescaled by o_scale; scores stay."""
    for r in cutlass.range_constexpr(cute.size(row_max)):
        block_max = row_maximum(scores, r)
        row_max[r], o_scale[r] = raise_row(row_max[r], block_max, scale_log2, rescale_threshold)
        row_sum[r] = row_sum[r] * o_scale[r]


def row_maximum(scores: cute.Tensor, r: int) -> Float32:
    """The largest score of a quad's row."""
    return quad_max(reduce_in_chains(row_values(scores, r), cute.arch.fmax))


def raise_row(old_max: Float32, block_max: Float32, scale_log2: Float32, threshold: float):
    """(new running maximum, what O must be multiplied by) of a row; kept where it rises little."""
    new_max = cute.arch.fmax(old_max, block_max)
    safe_max = finite_or_zero(new_max)
    rise = (safe_max - old_max) * scale_log2
    # Not `rise > threshold`: a row that has seen no key has old_max -inf, or rise NaN.
    is_kept = rise <= threshold
    o_scale = cutlass.select_(is_kept, Float32(1.0), exp2(-rise))
    return cutlass.select_(is_kept, old_max, new_max), o_scale


@cute.jit
def weigh(scores: cute.Tensor, row_max: cute.Tensor, row_sum: cute.Tensor, scale_log2: Float32):
    """The second half of `softmax_step`: weights in place of the scores, added to the sums."""
    for r in cutlass.range_constexpr(cute.size(row_max)):
        shift = -(finite_or_zero(row_max[r]) * scale_log2)
        values = row_values(scores, r)
        weights = [exp2(cute.math.fma(value, scale_log2, shift)) for value in values]
        for i in cutlass.range_constexpr(len(weights)):
            scores[r, i] = weights[i]
        row_sum[r] = row_sum[r] + reduce_in_chains(weights, lambda a, b: a + b, num_chains=2)


@cute.jit
def advance_row(
    scores: cute.Tensor,
    r: cutlass.Constexpr[int],
    values,
    new_max: Float32,
    state,
    scale_log2: Float32,
    is_first: cutlass.Constexpr[bool],
):
    """Weights of row r against `new_max`, in place of its scores; state follows the new maximum."""
    row_max, row_sum, o_scale = state
    safe_max = finite_or_zero(new_max)
    shift = -(safe_max * scale_log2)
    weights = [exp2(cute.math.fma(value, scale_log2, shift)) for value in values]
    for i in cutlass.range_constexpr(len(weights)):
        scores[r, i] = weights[i]
    block_sum = reduce_in_chains(weights, lambda a, b: a + b, num_chains=2)
    if const_expr(is_first):
        row_sum[r] = block_sum
    else:
        o_scale[r] = rise_factor(row_max[r], new_max, scale_log2)
        row_sum[r] = cute.math.fma(row_sum[r], o_scale[r], block_sum)
    row_max[r] = new_max


@cute.jit
def follow_max(
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    o_scale: cute.Tensor,
    new_max: list,
    scale_log2: Float32,
):
    """Advance the running state to the maximum of a block that another thread has weighed."""
    for r in cutlass.range_constexpr(cute.size(row_max)):
        o_scale[r] = rise_factor(row_max[r], new_max[r], scale_log2)
        row_sum[r] = row_sum[r] * o_scale[r]
        row_max[r] = new_max[r]


def rise_factor(old_max: Float32, new_max: Float32, scale_log2: Float32) -> Float32:
    """What weights against old_max must be multiplied by to be against new_max."""
    is_kept = new_max == old_max
    factor = exp2((old_max - finite_or_zero(new_max)) * scale_log2)
    return cutlass.select_(is_kept, Float32(1.0), factor)


def row_values(scores: cute.Tensor, r: int) -> list:
    """The scores of row r as a list."""
    return [scores[r, i] for i in range(cute.size(scores, mode=[1]))]


def finite_or_zero(row_max: Float32) -> Float32:
    """Zero for the -inf of a row without a visible key: -inf - -inf would be NaN."""
    return cutlass.select_(row_max == -Float32.inf, Float32(0.0), row_max)


@cute.jit
def speculative_step(
    scores: cute.Tensor,
    weights: cute.Tensor,
    row_max: cute.Tensor,
    block_sum: cute.Tensor,
    scale_log2: Float32,
):
    """Weights of one block against the last known maximum, which is not looked for in the block.

    That saves an instruction an element and starts the exponentials as soon as the scores arrive.
    A maximum that is too low is harmless until the weights grow large: it cancels in the final
    division. `any_outgrown` says whether that has happened, and `catch_up` repeats those rows from
    the scores, which stay intact.

    Shapes: scores, weights: (rows, cols) f32 rmem; row_max, block_sum: (rows,) f32 rmem
    """
    for r in cutlass.range_constexpr(cute.size(row_max)):
        shift = -(row_max[r] * scale_log2)
        values = [exp2(cute.math.fma(x, scale_log2, shift)) for x in row_values(scores, r)]
        for i in cutlass.range_constexpr(len(values)):
            weights[r, i] = values[i]
        # Two chains: the exponentials set the pace, and registers are short here.
        block_sum[r] = reduce_in_chains(values, lambda a, b: a + b, num_chains=2)


@cute.jit
def any_outgrown(block_sum: cute.Tensor, headroom: cutlass.Constexpr[float]):
    """Whether any row of the warp has a sum above 2**headroom, inf or NaN (no key seen before)."""
    is_outgrown = cutlass.Boolean(False)
    for r in cutlass.range_constexpr(cute.size(block_sum)):
        is_outgrown = is_outgrown | ~(block_sum[r] <= 2.0**headroom)
    return cute.arch.vote_any_sync(is_outgrown)


@cute.jit
def catch_up(
    scores: cute.Tensor,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    o_scale: cute.Tensor,
    block_sum: cute.Tensor,
    scale_log2: Float32,
    headroom: cutlass.Constexpr[float],
):
    """Repeat a speculative step: rows that outgrew their maximum take the true one.

    The other rows of the warp come out with the same bits as without the repetition, so that a row
    does not depend on its neighbours.
    """
    for r in cutlass.range_constexpr(cute.size(row_max)):
        sum_of_row = quad_sum(block_sum[r])
        values = row_values(scores, r)
        true_max = cute.arch.fmax(row_max[r], quad_max(reduce_in_chains(values, cute.arch.fmax)))
        is_kept = quad_max(block_sum[r]) <= 2.0**headroom
        is_kept = is_kept & (sum_of_row == sum_of_row)  # the maximum of NaN and x is x
        new_max = cutlass.select_(is_kept, row_max[r], true_max)
        advance_row(scores, r, values, new_max, (row_max, row_sum, o_scale), scale_log2, False)


# -- scores that are relative: ``(score - row_max) * log2(e)``, with 0 for a row_max of -inf


def relative_max(row_max: cute.Tensor) -> cute.Tensor:
    """The maxima of rows whose scores are relative to them: 0, told to the compiler."""
    zeros = cute.make_rmem_tensor(cute.size(row_max), Float32)
    zeros.fill(0.0)
    return zeros


def mark_unseen(row_max: cute.Tensor, block_sum: cute.Tensor):
    """Rows that have seen no key have nothing to be relative to: they count as outgrown."""
    for r in range(cute.size(row_max)):
        is_unseen = row_max[r] == -Float32.inf
        block_sum[r] = cutlass.select_(is_unseen, Float32.inf, block_sum[r])


@cute.jit
def catch_up_relative(
    scores: cute.Tensor,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    o_scale: cute.Tensor,
    block_sum: cute.Tensor,
    headroom: cutlass.Constexpr[float],
):
    """`catch_up` for relative scores."""
    rise = cute.make_rmem_tensor(cute.size(row_max), Float32)
    for r in cutlass.range_constexpr(cute.size(row_max)):
        rise[r] = cutlass.select_(row_max[r] == -Float32.inf, -Float32.inf, Float32(0.0))
    catch_up(scores, rise, row_sum, o_scale, block_sum, Float32(1.0), headroom)
    for r in cutlass.range_constexpr(cute.size(row_max)):
        row_max[r] = cute.math.fma(rise[r], Float32(LN2), finite_or_zero(row_max[r]))


@cute.jit
def any_rescaled(o_scale: cute.Tensor, row_sum: cute.Tensor):
    """Whether any row of the warp has an o_scale other than 1.

    A NaN sum counts too, not for its own sake: the answer then needs the weights, so that what
    follows it in program order, the wait for a product, cannot be moved before them.
    """
    is_rescaled = cutlass.Boolean(False)
    for r in cutlass.range_constexpr(cute.size(o_scale)):
        is_rescaled = is_rescaled | (o_scale[r] != 1.0) | ~(row_sum[r] == row_sum[r])
    return cute.arch.vote_any_sync(is_rescaled)


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
    sinks_log2: typing.Any,
    lanes: cutlass.Constexpr[int] = 4,
):
    """Close the running softmax: what the output must be multiplied by, and the log-sum-exp.

    Units:    sinks_log2: a tuple, one more logit a row, times log2(e), or None; lse in natural log
              of the scaled scores
            lanes: threads that share a row, 4 or 1
    Contract: call once per tile, after the last step; a row without a visible key gets factor 0
              and lse -inf (the sink, where there is one). The maximum is scaled exactly as in
              `softmax_step`, so its rounding cancels.
    """
    for r in cutlass.range_constexpr(cute.size(row_max)):
        total = quad_sum(row_sum[r]) if const_expr(lanes == 4) else row_sum[r]
        top = row_max[r] * scale_log2
        weight = Float32(1.0)
        if const_expr(sinks_log2 is not None):
            sink_log2 = sinks_log2[r]
            top_of_keys = top
            top = cute.arch.fmax(top_of_keys, sink_log2)
            weight = exp2(top_of_keys - finite_or_zero(top))
            total = cute.math.fma(total, weight, exp2(sink_log2 - finite_or_zero(top)))
        is_empty = total == 0.0
        factor[r] = cutlass.select_(is_empty, Float32(0.0), weight * cute.arch.rcp_approx(total))
        lse[r] = (top + log2(total)) * LN2
        lse[r] = cutlass.select_(is_empty, -Float32.inf, lse[r])


def softcap(scores: cute.Tensor, scale_over_cap: Float32, cap: Float32):
    """Replace each raw score s by cap * tanh(s * scale_over_cap).

    tanh(x) = 1 - 2 / (exp(2 x) + 1): its absolute error of 1e-7 is what counts here, and the
    hardware's own tanh has 5e-4.
    """
    twice = scale_over_cap * (2.0 * LOG2_E)
    for i in range(cute.size(scores)):
        inverse = cute.arch.rcp_approx(exp2(scores[i] * twice) + 1.0)
        scores[i] = cute.math.fma(inverse, -2.0 * cap, cap)
