"""What operators and torch functions do on traced values, by torch's names of them.

Importing this fills ``traced.OPERATIONS``.
"""

import dataclasses
import functools
import math
import operator

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from flash_cute.device.traced import (
    HALF_TYPES,
    INT_RANGES,
    OPERATIONS,
    TracedValue,
    Untraceable,
    convert,
    dtype_name_of,
    fits_int32,
    half_number,
    is_float,
    line_of,
    operand,
    promote,
    rounded,
    select,
    sum_of,
    wrapped,
)

# ---- Arithmetic ----------------------------------------------------------------------------------


def _as_pair(a, b, dtype=None):
    a, b = operand(a), operand(b)
    dtype = promote(a, b) if dtype is None else dtype
    return convert(a, dtype), convert(b, dtype), dtype


def _integer(dtype, a, b, emit, bounds):
    """An integer operation in as many bits as its operands and its result need."""
    is_wide = isinstance(a.value, Int64) or isinstance(b.value, Int64)
    is_wide |= dtype == "int64" and not fits_int32(bounds)
    kind = Int64 if is_wide else Int32
    return wrapped(dtype, emit(kind(a.value), kind(b.value)), bounds)


def _corners(a, b, op):
    values = [op(x, y) for x in a.bounds for y in b.bounds]
    return min(values), max(values)


def _arithmetic(a, b, op):
    a, b, dtype = _as_pair(a, b)
    if is_float(dtype):
        result = rounded(dtype, op(a.value, b.value))
        if dtype == "float32":
            result.line = line_of(op, a, b)
        return result
    if dtype == "bool":
        raise Untraceable("arithmetic on booleans: use & | ^ ~, or .int() first")
    result = _integer(dtype, a, b, op, _corners(a, b, op))
    if op in (operator.add, operator.sub) and fits_int32(result.bounds):
        result.sum = sum_of(op, a, b)
    return result


def add(a, b, *, alpha=1):
    """Return a + alpha * b."""
    b = b if alpha == 1 else mul(b, alpha)
    a, b = operand(a), operand(b)
    if promote(a, b) == "bool":
        return bitwise_or(a, b)
    return _arithmetic(a, b, operator.add)


def sub(a, b, *, alpha=1):
    """Return a - alpha * b."""
    return _arithmetic(a, b if alpha == 1 else mul(b, alpha), operator.sub)


def mul(a, b):
    """Return a * b."""
    a, b = operand(a), operand(b)
    if promote(a, b) == "bool":
        return bitwise_and(a, b)
    return _arithmetic(a, b, operator.mul)


def div(a, b, *, rounding_mode=None):
    """Return a / b in floating point, or rounded as asked."""
    if rounding_mode == "floor":
        return floor_divide(a, b)
    if rounding_mode is not None:
        if rounding_mode != "trunc":
            raise Untraceable(f"rounding_mode is {rounding_mode!r}, expected 'floor' or 'trunc'")
        a, b, dtype = _as_pair(a, b)
        if is_float(dtype):
            return trunc(div(a, b))
        quotient = floor_divide(abs_(a), abs_(b))
        return where(ne(lt(a, 0), lt(b, 0)), neg(quotient), quotient)
    a, b = operand(a), operand(b)
    dtype = promote(a, b)
    dtype = dtype if is_float(dtype) else "float32"
    if dtype != "float64" and isinstance(b, (int, float)):
        number = half_number(b, dtype) if dtype in HALF_TYPES else float(b)
        if number and math.isfinite(1 / number):
            # By the reciprocal, as torch does on a GPU; exact where b is a power of two.
            return rounded(dtype, convert(a, dtype).value * Float32(1 / number))
    if dtype in HALF_TYPES and not isinstance(a, TracedValue):
        return mul(reciprocal(b), a)  # as torch does, rounding twice
    return rounded(dtype, convert(a, dtype).value / convert(b, dtype).value)


def floor_divide(a, b):
    """Return a // b, rounded towards minus infinity."""
    a, b, dtype = _as_pair(a, b)
    if is_float(dtype):
        exact = (a.value - _float_remainder(a.value, b.value)) / b.value
        return rounded(dtype, cute.math.roundeven(exact))
    return _divided(a, b, dtype)[0]


def remainder(a, b):
    """Return a % b, with the sign of b."""
    a, b, dtype = _as_pair(a, b)
    if is_float(dtype):
        return rounded(dtype, _float_remainder(a.value, b.value))
    return _divided(a, b, dtype)[1]


def fmod(a, b):
    """Return the remainder of a / b, with the sign of a."""
    a, b, dtype = _as_pair(a, b)
    if is_float(dtype):
        return rounded(dtype, _truncated_remainder(a.value, b.value))
    return sub(a, mul(div(a, b, rounding_mode="trunc"), b))


def _truncated_remainder(a, b):
    """The remainder with the sign of a: the DSL's, but for constants, which it folds as Python."""
    if isinstance(a.value, (int, float)) and isinstance(b.value, (int, float)):
        return type(a)(math.fmod(a.value, b.value))
    return a % b


def _float_remainder(a, b):
    kind = type(a)
    rest = _truncated_remainder(a, b)
    is_off = (rest != kind(0.0)) & ((rest < kind(0.0)) ^ (b < kind(0.0)))
    return select(is_off, rest + b, rest)


def _divided(a, b, dtype):
    """Quotient and remainder of integers: by an unsigned division wherever the ranges allow it."""
    if dtype == "bool":
        raise Untraceable("division of booleans: use .int() first")
    low, high = a.bounds
    divisor = b.bounds[0] if b.bounds[0] == b.bounds[1] else None
    if divisor == 0:
        raise Untraceable("integer division by zero")
    if divisor is not None and divisor > 0 and divisor & (divisor - 1) == 0:
        shift = divisor.bit_length() - 1
        bounds = (low >> shift, high >> shift)
        rest = (low, low) if low == high and 0 <= low < divisor else (0, divisor - 1)
        quotient = _integer(dtype, a, b, lambda x, _: x >> type(x)(shift), bounds)
        return quotient, _integer(dtype, a, b, lambda x, y: x & (y - type(y)(1)), rest)
    if b.bounds[0] > 0:
        # With a multiple of a constant divisor added, the dividend is not negative.
        multiple = 0 if low >= 0 else -(low // b.bounds[0])
        is_unsigned = low >= 0 or divisor is not None
        if is_unsigned and high + multiple * b.bounds[1] < 2**32 and b.bounds[1] < 2**32:
            return _divided_unsigned(a, b, dtype, multiple)
    kind = Int64 if isinstance(a.value, Int64) or isinstance(b.value, Int64) else Int32
    x, y = kind(a.value), kind(b.value)
    quotient = x // y  # the DSL's rounds down
    most = max(abs(low), abs(high))
    limit = max(abs(b.bounds[0]), abs(b.bounds[1])) - 1
    rest = (0 if b.bounds[0] > 0 else -limit, 0 if b.bounds[1] < 0 else limit)
    return wrapped(dtype, quotient, (-most, most)), wrapped(dtype, x - quotient * y, rest)


def _divided_unsigned(a, b, dtype, multiple):
    low, high = a.bounds
    dividend, divisor = Uint32(a.value), Uint32(b.value)
    if multiple:
        dividend = dividend + Uint32(multiple * b.bounds[0])
    quotient = dividend // divisor
    rest = (dividend - quotient * divisor).to(Int32)
    quotient = quotient.to(Int32) if not multiple else quotient.to(Int32) - Int32(multiple)
    bounds = (min(low // y for y in b.bounds), max(high // y for y in b.bounds))
    return (
        wrapped(dtype, quotient, bounds),
        wrapped(dtype, rest, (0, b.bounds[1] - 1)),
    )


def neg(a):
    """Return -a."""
    a = operand(a)
    if not isinstance(a, TracedValue):
        return -a
    if is_float(a.dtype_name):
        return TracedValue(a.dtype_name, -a.value)
    return sub(convert(0, a.dtype_name), a)


def abs_(a):
    """Return the absolute value."""
    a = operand(a)
    if not isinstance(a, TracedValue):
        return abs(a)
    if is_float(a.dtype_name):
        return TracedValue(a.dtype_name, cute.math.abs(a.value))
    if a.dtype_name == "bool" or a.bounds[0] >= 0:
        return a
    low, high = a.bounds
    bounds = (0 if high >= 0 else -high, max(-low, high))
    negate = lambda x, _: cute.math.max(x, -x)
    result = _integer(a.dtype_name, a, a, negate, bounds)
    if a.sum is not None and not a.sum.is_absolute:
        result.sum = dataclasses.replace(a.sum, is_absolute=True)
    return result


def pow_(a, b):
    """Return a ** b."""
    a, b = operand(a), operand(b)
    dtype = promote(a, b)
    if isinstance(b, (int, float)) and not isinstance(b, bool):
        if b == int(b) and 0 < b <= 8:
            return convert(functools.reduce(mul, [convert(a, dtype)] * int(b)), dtype)
        if is_float(dtype) and b in (0.5, -0.5, -1.0):
            kinds = {0.5: sqrt, -0.5: rsqrt, -1.0: reciprocal}
            return kinds[b](convert(a, dtype))
    if is_float(dtype):
        if not isinstance(a, TracedValue) and a == 2:
            return exp2(convert(b, dtype))
        a, b, dtype = _as_pair(a, b)
        return rounded(dtype, cute.math.pow(a.value, b.value))
    if not isinstance(a, TracedValue) and a == 2 and b.bounds[0] >= 0:
        return bitwise_left_shift(convert(1, dtype), b)
    raise Untraceable("an integer power with a traced exponent: use torch.exp2 or .float() first")


# ---- Comparisons, bits, booleans -----------------------------------------------------------------


def _comparison(op, is_always):
    def compare(a, b):
        a, b, dtype = _as_pair(a, b)
        if is_float(dtype):
            return TracedValue("bool", op(a.value, b.value), (0, 1))
        if dtype == "bool":
            a, b = convert(a, "int32"), convert(b, "int32")
        for known, result in ((is_always(a.bounds, b.bounds), True), (_never(op, a, b), False)):
            if known:
                return convert(result, "bool")
        is_wide = isinstance(a.value, Int64) or isinstance(b.value, Int64)
        kind = Int64 if is_wide else Int32
        return TracedValue("bool", op(kind(a.value), kind(b.value)), (0, 1))

    return compare


def _never(op, a, b):
    """Whether a comparison is false for all values: at the corners, and in no overlap."""
    (low, high), (least, most) = a.bounds, b.bounds
    if op(0, 0) and not op(0, 1) and not op(1, 0):  # equality
        return high < least or low > most
    if op(0, 1) and op(1, 0):  # inequality
        return low == high == least == most
    return not any(op(x, y) for x in a.bounds for y in b.bounds)


eq = _comparison(lambda x, y: x == y, lambda a, b: a[0] == a[1] == b[0] == b[1])
ne = _comparison(lambda x, y: x != y, lambda a, b: a[1] < b[0] or a[0] > b[1])
lt = _comparison(lambda x, y: x < y, lambda a, b: a[1] < b[0])
le = _comparison(lambda x, y: x <= y, lambda a, b: a[1] <= b[0])
gt = _comparison(lambda x, y: x > y, lambda a, b: a[0] > b[1])
ge = _comparison(lambda x, y: x >= y, lambda a, b: a[0] >= b[1])


def _bits(name, op, bounds_of):
    def combine(a, b):
        a, b, dtype = _as_pair(a, b)
        if is_float(dtype):
            raise Untraceable(f"{name} of floating-point values: use integers or booleans")
        if dtype == "bool":
            return _boolean(op, a, b)
        return _integer(dtype, a, b, op, bounds_of(a.bounds, b.bounds))

    return combine


def _boolean(op, a, b):
    for known, other in ((a, b), (b, a)):
        if known.bounds[0] == known.bounds[1]:  # decided now: with 0 and with 1 it says what to do
            with_false, with_true = op(known.bounds[0], 0), op(known.bounds[0], 1)
            if with_false == with_true:
                return convert(bool(with_true), "bool")
            return other if with_true else logical_not(other)
    return TracedValue("bool", Boolean(op(a.value, b.value)), (0, 1))


def _and_bounds(a, b):
    positive = [bounds[1] for bounds in (a, b) if bounds[0] >= 0]
    return (0, min(positive)) if positive else _or_bounds(a, b)


def _or_bounds(a, b):
    most = max(abs(value) for value in (*a, *b))
    limit = 1 << most.bit_length()
    return (-limit if min(a[0], b[0]) < 0 else 0, limit - 1)


bitwise_and = _bits("&", lambda x, y: x & y, _and_bounds)
bitwise_or = _bits("|", lambda x, y: x | y, _or_bounds)
bitwise_xor = _bits("^", lambda x, y: x ^ y, _or_bounds)


def bitwise_not(a):
    """Return ~a: all bits of an integer, the opposite of a boolean."""
    a = operand(a)
    if not isinstance(a, TracedValue):
        return not a if isinstance(a, bool) else ~a
    if a.dtype_name == "bool":
        return logical_not(a)
    return bitwise_xor(a, convert(-1 if a.dtype_name != "uint8" else 255, a.dtype_name))


def _shift(is_left):
    def shift(a, b):
        a, b, dtype = _as_pair(a, b)
        if is_float(dtype) or dtype == "bool":
            raise Untraceable("shifts take integers")
        low, high = b.bounds
        if low < 0 or high > 62:
            # Out of a register's width the instruction is undefined.
            a, b = TracedValue(dtype, Int64(a.value), INT_RANGES["int64"]), minimum(b, 63)
            b, low, high = TracedValue(b.dtype_name, b.value, (0, 63)), 0, 63
        if is_left:
            bounds = _corners(a, TracedValue(dtype, None, (low, high)), lambda x, y: x << y)
            return _integer(dtype, a, b, lambda x, y: x << y, bounds)
        if high > 31 and not isinstance(a.value, Int64):
            b = minimum(b, 31)
        bounds = _corners(a, TracedValue(dtype, None, (low, high)), lambda x, y: x >> y)
        return _integer(dtype, a, b, lambda x, y: x >> y, bounds)

    return shift


bitwise_left_shift = _shift(True)
bitwise_right_shift = _shift(False)


def logical_not(a):
    """Return whether a is zero."""
    a = convert(operand(a), "bool")
    if a.bounds[0] == a.bounds[1]:
        return convert(not a.bounds[0], "bool")
    return TracedValue("bool", Boolean(a.value ^ Boolean(True)), (0, 1))


def _logical(op):
    return lambda a, b: op(convert(operand(a), "bool"), convert(operand(b), "bool"))


# ---- Elementwise functions -----------------------------------------------------------------------


def _function(name):
    """A function of a floating-point value; integers become float32 first, as in torch."""

    def function(a):
        a = operand(a)
        dtype = promote(a)
        a = convert(a, dtype if is_float(dtype) else "float32")
        return rounded(a.dtype_name, getattr(cute.math, name)(a.value))

    return function


exp2, sqrt, rsqrt, exp = (_function(name) for name in ("exp2", "sqrt", "rsqrt", "exp"))


def _rounding(name):
    """Rounding to whole numbers; integers stay as they are."""
    round_float = _function(name)

    def function(a):
        a = operand(a)
        return a if not is_float(promote(a)) else round_float(a)

    return function


trunc = _rounding("trunc")


def reciprocal(a):
    """Return 1 / a."""
    a = operand(a)
    dtype = promote(a) if is_float(promote(a)) else "float32"
    a = convert(a, dtype).value
    return rounded(dtype, type(a)(1.0) / a)


def sigmoid(a):
    """Return 1 / (1 + exp(-a)), rounded once."""
    a = operand(a)
    dtype = promote(a) if is_float(promote(a)) else "float32"
    wide = convert(a, "float64" if dtype == "float64" else "float32")
    return convert(reciprocal(add(exp(neg(wide)), 1.0)), dtype)


def _extreme(name):
    def extreme(a, b):
        a, b, dtype = _as_pair(a, b)
        emit = getattr(cute.math, name)
        if is_float(dtype):
            return TracedValue(dtype, emit(a.value, b.value, propagate_nan=True))
        if dtype == "bool":
            return (bitwise_and if name == "min" else bitwise_or)(a, b)
        choose = min if name == "min" else max
        bounds = tuple(choose(x, y) for x, y in zip(a.bounds, b.bounds, strict=True))
        return _integer(dtype, a, b, emit, bounds)

    return extreme


minimum, maximum = _extreme("min"), _extreme("max")


def clamp(a, min=None, max=None):
    """Return a, not below min and not above max."""
    a = operand(a) if min is None else maximum(a, min)
    return a if max is None else minimum(a, max)


def where(condition, a, b):
    """Return a where the condition holds, else b."""
    condition = operand(condition)
    a, b, dtype = _as_pair(a, b)
    if promote(condition) != "bool":
        raise Untraceable(f"the condition of torch.where is {promote(condition)}, expected a bool")
    condition = convert(condition, "bool")
    if condition.bounds[0] == condition.bounds[1]:
        return a if condition.bounds[0] else b
    if is_float(dtype):
        return TracedValue(dtype, select(condition.value, a.value, b.value))
    if dtype == "bool":
        return bitwise_or(bitwise_and(condition, a), bitwise_and(logical_not(condition), b))
    bounds = (min(a.bounds[0], b.bounds[0]), max(a.bounds[1], b.bounds[1]))
    return _integer(dtype, a, b, lambda x, y: select(condition.value, x, y), bounds)


def isnan(a):
    """Return whether a is not a number."""
    a = operand(a)
    return ne(a, a) if is_float(promote(a)) else convert(False, "bool")


def isinf(a):
    """Return whether a is infinite, with either sign."""
    a = operand(a)
    return eq(abs_(a), math.inf) if is_float(promote(a)) else convert(False, "bool")


def isfinite(a):
    """Return whether a is a number and not infinite."""
    a = operand(a)
    return lt(abs_(a), math.inf) if is_float(promote(a)) else convert(True, "bool")


_LARGEST = {
    "float16": 65504.0,
    "bfloat16": 3.3895313892515355e38,
    "float32": 3.4028234663852886e38,
    "float64": 1.7976931348623157e308,
}


def nan_to_num(a, nan=None, posinf=None, neginf=None):
    """Return a with numbers in place of NaN (0) and the infinities (the largest numbers)."""
    a = operand(a)
    dtype = promote(a)
    if not is_float(dtype):
        return a
    positive = _LARGEST[dtype] if posinf is None else posinf
    negative = -_LARGEST[dtype] if neginf is None else neginf
    a = where(isnan(a), convert(0.0 if nan is None else nan, dtype), a)
    a = where(eq(a, math.inf), convert(positive, dtype), a)
    return where(eq(a, -math.inf), convert(negative, dtype), a)


def sign(a):
    """Return -1, 0 or 1."""
    a = operand(a)
    one, zero = convert(1, promote(a)), convert(0, promote(a))
    return where(gt(a, 0), one, where(lt(a, 0), neg(one), zero))


# ---- Constructors and casts ----------------------------------------------------------------------


def _filled(number):
    def fill(a, *, dtype=None, device=None, **layout):
        _check_layout(layout)
        return convert(number, promote(operand(a)) if dtype is None else dtype_name_of(dtype))

    return fill


def full_like(a, fill_value, *, dtype=None, device=None, **layout):
    """Return fill_value in the dtype of a."""
    _check_layout(layout)
    return convert(fill_value, promote(operand(a)) if dtype is None else dtype_name_of(dtype))


def _new(number):
    def new(a, size, *, dtype=None, device=None, **layout):
        _check_size(size)
        return _filled(number)(a, dtype=dtype, **layout)

    return new


def new_full(a, size, fill_value, *, dtype=None, device=None, **layout):
    """Return fill_value in the dtype of a."""
    _check_size(size)
    return full_like(a, fill_value, dtype=dtype, **layout)


def new_tensor(a, data, *, dtype=None, device=None, **layout):
    """Return data in its own dtype."""
    _check_layout(layout)
    data = operand(data)
    return convert(data, promote(data) if dtype is None else dtype_name_of(dtype))


def _check_size(size):
    if tuple(size) != ():
        raise Untraceable(f"a tensor of size {tuple(size)}: callbacks work on one element, size ()")


def _check_layout(options):
    """Layout options say nothing about one element; anything else would be dropped."""
    for name in set(options) - {"memory_format", "layout", "pin_memory", "requires_grad"}:
        raise Untraceable(f"the argument {name} is not available in a kernel")


def to(a, *args, **kwargs):
    """Convert to a dtype, or to the dtype of another tensor; devices do not matter."""
    for value in (*args, *(kwargs[name] for name in ("dtype", "other") if name in kwargs)):
        if isinstance(value, TracedValue):
            return convert(a, value.dtype_name)
        if str(value).startswith("torch.") or value in (float, int, bool):
            return convert(a, dtype_name_of(value))
    return a


def _cast(dtype):
    return lambda a, **layout: convert(operand(a), dtype)


def _same(a, **layout):
    return operand(a)


# ---- By name -------------------------------------------------------------------------------------

OPERATIONS |= {
    **{f.__name__: f for f in (add, sub, mul, div, floor_divide, remainder, fmod, neg)},
    "abs": abs_, "pow": pow_, "eq": eq, "ne": ne, "lt": lt, "le": le, "gt": gt, "ge": ge,
    "rsub": lambda a, b, *, alpha=1: sub(b, a, alpha=alpha),
    "bitwise_and": bitwise_and, "bitwise_or": bitwise_or, "bitwise_xor": bitwise_xor,
    "bitwise_not": bitwise_not, "bitwise_left_shift": bitwise_left_shift,
    "bitwise_right_shift": bitwise_right_shift, "logical_not": logical_not,
    "logical_and": _logical(bitwise_and), "logical_or": _logical(bitwise_or),
    "logical_xor": _logical(bitwise_xor),
    "exp": exp, "exp2": exp2, "sqrt": sqrt, "rsqrt": rsqrt,
    **{
        name: _function(name)
        for name in "expm1 log log2 log10 log1p tanh sin cos tan sinh cosh atan erf erfc".split()
    },
    "floor": _rounding("floor"), "ceil": _rounding("ceil"), "round": _rounding("roundeven"),
    "trunc": trunc, "reciprocal": reciprocal, "sigmoid": sigmoid,
    "square": lambda a: mul(a, a), "relu": lambda a, inplace=False: maximum(a, 0),
    "sign": sign, "minimum": minimum, "maximum": maximum, "clamp": clamp, "where": where,
    "isnan": isnan, "isinf": isinf, "isfinite": isfinite, "nan_to_num": nan_to_num,
    "zeros_like": _filled(0), "ones_like": _filled(1), "full_like": full_like,
    "new_zeros": _new(0), "new_ones": _new(1), "new_full": new_full, "new_tensor": new_tensor,
    "to": to, "type": to, "type_as": to, "clone": _same, "detach": _same, "contiguous": _same,
    "float": _cast("float32"), "double": _cast("float64"), "half": _cast("float16"),
    "bfloat16": _cast("bfloat16"), "long": _cast("int64"), "int": _cast("int32"),
    "short": _cast("int16"), "char": _cast("int8"), "byte": _cast("uint8"), "bool": _cast("bool"),
}  # fmt: skip
