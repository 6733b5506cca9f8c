"""Softmax of a row that one thread holds: packed arithmetic, and exponentials on two units.

The exponential unit makes 16 values a cycle, which takes as long as the matrix products of a block
at head dim 128. A share of the weights is therefore computed by a polynomial on the FMA units.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from flash_cute.device.primitives import exp2, reduce_in_chains
from flash_cute.sm100.config import WEIGHTS_PER_GROUP

# 2**x on [0, 1) by minimax polynomials, lowest power first: relative errors of 8.6e-5 and 2.9e-6,
# below the rounding of bf16 (3.9e-3) and of fp16 (4.9e-4). The first one is 1: see LOWEST.
COEFFICIENTS = {
    cutlass.BFloat16: (1.0, 0.69511682, 0.22764482, 0.0770672),
    cutlass.Float16: (1.0, 0.69304484, 0.24128022, 0.05224245, 0.0134267),
}
LOWEST = -127.0  # here the exponent of the polynomial's 1 becomes 0, and its bits those of 0
ROUNDER = 1.5 * 2.0**23  # adding this rounds to a whole number, in the low bits


def fmax3(a: Float32, b: Float32, c: Float32) -> Float32:
    """Maximum of three; NaN where one is."""
    return cute.arch.inline_ptx(
        "max.NaN.f32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Float32],
        read_only_args=[a, b, c],
    )


def row_maximum(values: list) -> Float32:
    """Maximum of a row, two values an instruction, in four chains; NaN where one is."""
    chains = list(values[:4])
    for i in range(4, len(values), 2):
        chains[i // 2 % 4] = fmax3(chains[i // 2 % 4], values[i], values[i + 1])
    return reduce_in_chains(chains, at_least)


def packed_sum(pairs: list):
    """Sum of pairs, in two chains."""
    return reduce_in_chains(pairs, lambda a, b: cute.arch.add_packed_f32x2(a, b), num_chains=2)


def weights_of(values: list, shift: Float32, scale: Float32, num_polynomial: int, dtype) -> list:
    """Pairs of exp2(value * scale + shift).

    Args:
        num_polynomial: of every 32 weights as many are computed by the polynomial.
    """
    pairs, per_group = [], WEIGHTS_PER_GROUP // 2
    for i in range(0, len(values), 2):
        x = cute.arch.fma_packed_f32x2(values[i : i + 2], (scale, scale), (shift, shift))
        # They are spread evenly, so that both units work all the time.
        share = num_polynomial // 2
        index = i // 2 % per_group
        is_polynomial = (index + 1) * share // per_group > index * share // per_group
        pairs.append(
            exp2_polynomial(x, COEFFICIENTS[dtype]) if is_polynomial else (exp2(x[0]), exp2(x[1]))
        )
    return pairs


def exp2_polynomial(x, coefficients):
    """2**x of a pair on the FMA units: the whole part as an exponent, a polynomial of the rest.

    Units: x below 128; what is below LOWEST, and -inf, becomes 0. NaN becomes a number: the rows'
           maximum says where there was one.
    """
    x = tuple(at_least(value, LOWEST) for value in x)
    rounded = cute.arch.add_packed_f32x2(x, (ROUNDER, ROUNDER), rnd="rm")
    whole = cute.arch.add_packed_f32x2(rounded, (-ROUNDER, -ROUNDER))
    rest = cute.arch.fma_packed_f32x2(whole, (-1.0, -1.0), x)
    power = (coefficients[-1],) * 2
    for coefficient in coefficients[-2::-1]:
        power = cute.arch.fma_packed_f32x2(power, rest, (coefficient, coefficient))
    return tuple(raised(*pair) for pair in zip(power, rounded, strict=True))


def raised(power: Float32, rounded: Float32) -> Float32:
    """power * 2**n, where n is in the low bits of `rounded`: added to the exponent."""
    return cute.arch.inline_ptx(
        "mad.lo.s32 {$w0}, {$r0}, 8388608, {$r1};",
        write_only_types=[Int32],
        read_only_args=[rounded.bitcast(Int32), power.bitcast(Int32)],
    ).bitcast(Float32)


def at_least(x: Float32, lowest) -> Float32:
    """The larger of both; NaN where one is."""
    return cute.arch.inline_ptx(
        "max.NaN.f32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Float32],
        read_only_args=[x, Float32(lowest)],
    )
