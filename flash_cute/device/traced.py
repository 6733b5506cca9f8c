"""Values of a portable callback while a kernel is traced: torch's rules on CuTe scalars.

A callback is written for torch tensors; here its arguments are `TracedValue`s, and operators and
torch functions on them emit code. Dtypes and promotion are torch's, integer results are exact:
indices are int64 as in torch, but an integer is kept in 32 bits for as long as the range of its
values, which is followed through the operations, shows that nothing is lost. Half-precision results
are rounded after each operation, as torch does.

torch is not imported: its functions come here by ``__torch_function__`` and count by their name.
"""

import functools
import math

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float16, Float32, Float64, Int8, Int16, Int32, Int64, Uint32

from flash_cute.variant import HOST, torch_dtype

INDEX_LIMIT = 2**24  # b, h, q_idx and kv_idx are below it

INT_RANGES = {
    "bool": (0, 1),
    "uint8": (0, 2**8 - 1),
    "int8": (-(2**7), 2**7 - 1),
    "int16": (-(2**15), 2**15 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
}
_INT_ORDER = ("bool", "uint8", "int8", "int16", "int32", "int64")
_FLOAT_ORDER = ("float16", "bfloat16", "float32", "float64")
_HALF_TYPES = {"float16": Float16, "bfloat16": BFloat16}
_WEAK_DTYPES = ("bool", "int64", "float32")  # of Python's bool, int and float among themselves


class Untraceable(Exception):  # noqa: N818
    """What a callback does has no code; the message says what to write instead."""


def _no_value(what: str, advice: str):
    def refuse(self, *args, **kwargs):
        raise Untraceable(f"{what} is not known while the kernel is compiled: {advice}")

    return refuse


class TracedValue:
    """One element of a torch tensor, as code: a dtype, a CuTe scalar and, of integers, a range.

    Shapes: value is Boolean for bool, Int32 or Int64 for integers, Float32 for float16, bfloat16
            and float32, Float64 for float64
    Units:  bounds are the least and the greatest value of an integer, both inclusive
    """

    __slots__ = ("bounds", "dtype_name", "value")
    __array_ufunc__ = None  # numpy's numbers leave operators to this class
    __hash__ = None

    def __init__(self, dtype_name, value, bounds=None):
        self.dtype_name = dtype_name
        self.value = value
        self.bounds = bounds

    def __repr__(self):
        return f"<traced {self.dtype_name}>"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return call(getattr(func, "__name__", str(func)), args, kwargs or {})

    def __getattr__(self, name):
        if name in OPERATIONS or name in ALIASES:
            return lambda *args, **kwargs: call(name, (self, *args), kwargs)
        raise Untraceable(f"a tensor's .{name} is not available in a kernel: {_WHAT_IS}")

    @property
    def dtype(self):
        """The torch dtype."""
        return torch_dtype(self.dtype_name)

    device = HOST  # for constants that a callback makes, which are read while tracing
    shape = ()
    ndim = 0

    def dim(self):
        """Return the number of dimensions: none."""
        return 0

    __bool__ = _no_value(
        "the truth of a tensor",
        "write torch.where(condition, a, b) in place of if, and & | ~ in place of and, or, not "
        "(min and max: torch.minimum, torch.maximum; a < b < c: (a < b) & (b < c))",
    )
    __int__ = _no_value("the number in a tensor", "write .to(torch.int32) in place of int()")
    __index__ = _no_value(
        "the number in a tensor",
        "index a captured torch.Tensor, not a list or numpy array, and loop over Python numbers",
    )
    __float__ = _no_value(
        "the number in a tensor", "write .float() in place of float(), torch.exp for math.exp"
    )
    __len__ = _no_value("the length of a tensor", "callbacks work on one element")
    __iter__ = _no_value("the elements of a tensor", "callbacks work on one element")
    __contains__ = _no_value("membership in a tensor", "compare with ==")
    __getitem__ = _no_value(
        "an element of this tensor", "it is one element; index captured tensors"
    )
    __setitem__ = _no_value("assignment into a tensor", "return torch.where(condition, a, b)")
    item = _no_value("the number in a tensor", "go on with the tensor itself")
    tolist = item
    numpy = item
    __array__ = item


# ---- Dtypes and conversions ----------------------------------------------------------------------


def is_float(dtype):
    """Say whether a dtype name is a floating-point one."""
    return dtype in _FLOAT_ORDER


def index_value(value):
    """Wrap one of the indices that a callback is called with."""
    return TracedValue("int64", Int32(value), (0, INDEX_LIMIT - 1))


def operand(value):
    """Return a traced value or a Python number for what a callback used as an operand."""
    if isinstance(value, (TracedValue, bool, int, float)):
        return value
    if hasattr(value, "traced_operand"):
        return value.traced_operand()
    if type(value).__module__ == "numpy" and hasattr(value, "item") and not value.shape:
        return value.item()
    if type(value).__module__.split(".")[0] == "torch" and hasattr(value, "item"):
        if value.dim() == 0:  # made by the callback out of constants
            return convert(value.item(), dtype_name_of(value.dtype))
        raise Untraceable(
            f"a tensor of shape {tuple(value.shape)} made inside the callback cannot be used: make "
            "it outside and index it"
        )
    raise Untraceable(f"{type(value).__name__} cannot be an operand: use tensors and numbers")


def dtype_name_of(dtype):
    """Return the name of a torch dtype, or of Python's float, int or bool."""
    name = {float: "float32", int: "int64", bool: "bool"}.get(dtype)
    name = str(dtype).removeprefix("torch.") if name is None else name
    if name not in INT_RANGES and name not in _FLOAT_ORDER:
        raise Untraceable(f"{dtype} is not available in a kernel")
    return name


def promote(*operands):
    """Return the dtype of the result of an operation: torch's rules, numbers giving way."""
    strong = [x.dtype_name for x in operands if isinstance(x, TracedValue)]
    weak = [_category(x) for x in operands if not isinstance(x, TracedValue)]
    if not strong:
        return _WEAK_DTYPES[max(weak)]
    dtype = functools.reduce(_promote_pair, strong)
    category = 2 if is_float(dtype) else 1 if dtype != "bool" else 0
    return _WEAK_DTYPES[max(weak)] if weak and max(weak) > category else dtype


def _category(number):
    return 0 if isinstance(number, bool) else 1 if isinstance(number, int) else 2


def _promote_pair(a, b):
    if a == b:
        return a
    if is_float(a) != is_float(b):
        return a if is_float(a) else b
    if is_float(a):
        if {a, b} == {"float16", "bfloat16"}:
            return "float32"
        return max(a, b, key=_FLOAT_ORDER.index)
    if {a, b} == {"uint8", "int8"}:
        return "int16"
    return max(a, b, key=_INT_ORDER.index)


def convert(x, dtype):
    """Convert an operand to a dtype, as torch's ``.to`` does."""
    if not isinstance(x, TracedValue):
        return _constant(x, dtype)
    if x.dtype_name == dtype:
        return x
    if dtype == "bool":
        return TracedValue("bool", x.value != type(x.value)(0), (0, 1))
    if is_float(dtype):
        kind = Float64 if dtype == "float64" else Float32
        value = Int32(x.value) if x.dtype_name == "bool" else x.value
        return rounded(dtype, kind(value))
    if is_float(x.dtype_name):
        value = Int64(x.value) if dtype == "int64" else Int32(x.value)
        return _wrapped(dtype, value, INT_RANGES["int32" if dtype != "int64" else "int64"])
    value = Int32(x.value) if x.dtype_name == "bool" else x.value
    return _wrapped(dtype, value, x.bounds)


def _constant(number, dtype):
    if is_float(dtype):
        kind = Float64 if dtype == "float64" else Float32
        return rounded(dtype, kind(float(number)))
    if dtype == "bool":
        return TracedValue("bool", Boolean(bool(number)), (int(bool(number)),) * 2)
    number = int(number)
    if not INT_RANGES[dtype][0] <= number <= INT_RANGES[dtype][1]:
        raise Untraceable(f"{number} does not fit into {dtype}")
    kind = Int32 if _fits_int32((number, number)) else Int64
    return TracedValue(dtype, kind(number), (number, number))


def rounded(dtype, value):
    """Wrap the float32 or float64 result of an operation on values of a dtype."""
    half = _HALF_TYPES.get(dtype)
    return TracedValue(dtype, value if half is None else value.to(half).to(Float32))


def _fits_int32(bounds):
    return bounds[0] >= -(2**31) and bounds[1] < 2**31


def _wrapped(dtype, value, bounds):
    """Wrap an integer result, exact within `bounds`, as a value of a dtype: modulo its range."""
    low, high = INT_RANGES[dtype]
    if bounds[0] < low or bounds[1] > high:
        bounds = (low, high)
        if dtype != "int64":
            value = value.to(Int32)
        if dtype == "uint8":
            value = value & 255
        elif dtype in ("int8", "int16"):
            value = value.to(Int8 if dtype == "int8" else Int16).to(Int32)
    if _fits_int32(bounds):
        value = value.to(Int32)
    return TracedValue(dtype, value, bounds)


def select(condition, a, b):
    """Choose between two scalars of one type; a constant condition chooses now."""
    if isinstance(condition.value, (bool, int)):
        return a if condition.value else b
    return type(a)(cutlass.select_(condition, a, b))


# ---- Arithmetic ----------------------------------------------------------------------------------


def _as_pair(a, b, dtype=None):
    a, b = operand(a), operand(b)
    dtype = promote(a, b) if dtype is None else dtype
    return convert(a, dtype), convert(b, dtype), dtype


def _integer(dtype, a, b, emit, bounds):
    """An integer operation in as many bits as its operands and its result need."""
    is_wide = isinstance(a.value, Int64) or isinstance(b.value, Int64)
    is_wide |= dtype == "int64" and not _fits_int32(bounds)
    kind = Int64 if is_wide else Int32
    return _wrapped(dtype, emit(kind(a.value), kind(b.value)), bounds)


def _corners(a, b, op):
    values = [op(x, y) for x in a.bounds for y in b.bounds]
    return min(values), max(values)


def _arithmetic(a, b, op):
    a, b, dtype = _as_pair(a, b)
    if is_float(dtype):
        return rounded(dtype, op(a.value, b.value))
    if dtype == "bool":
        raise Untraceable("arithmetic on booleans: use & | ^ ~, or .int() first")
    return _integer(dtype, a, b, op, _corners(a, b, op))


def add(a, b, *, alpha=1):
    """Return a + alpha * b."""
    b = b if alpha == 1 else mul(b, alpha)
    a, b = operand(a), operand(b)
    if promote(a, b) == "bool":
        return bitwise_or(a, b)
    return _arithmetic(a, b, lambda x, y: x + y)


def sub(a, b, *, alpha=1):
    """Return a - alpha * b."""
    return _arithmetic(a, b if alpha == 1 else mul(b, alpha), lambda x, y: x - y)


def mul(a, b):
    """Return a * b."""
    a, b = operand(a), operand(b)
    if promote(a, b) == "bool":
        return bitwise_and(a, b)
    return _arithmetic(a, b, lambda x, y: x * y)


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
    if dtype != "float64" and isinstance(b, (int, float)) and b and math.isfinite(1 / b):
        # By the reciprocal, as torch does on a GPU; exact where b is a power of two.
        return rounded(dtype, convert(a, dtype).value * Float32(1 / b))
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
        return rounded(dtype, a.value % b.value)
    return sub(a, mul(div(a, b, rounding_mode="trunc"), b))


def _float_remainder(a, b):
    kind = type(a)
    rest = a % b
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
    return _wrapped(dtype, quotient, (-most, most)), _wrapped(dtype, x - quotient * y, rest)


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
        _wrapped(dtype, quotient, bounds),
        _wrapped(dtype, rest, (0, b.bounds[1] - 1)),
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
    return _integer(a.dtype_name, a, a, negate, bounds)


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
    emit = getattr(cute.math, name)

    def function(a):
        a = operand(a)
        dtype = promote(a)
        a = convert(a, dtype if is_float(dtype) else "float32")
        return rounded(a.dtype_name, emit(a.value))

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
    return div(1.0, a)


def sigmoid(a):
    """Return 1 / (1 + exp(-a))."""
    return reciprocal(add(exp(neg(a)), 1.0))


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

OPERATIONS = {
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

ALIASES = {
    "true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub",
    "absolute": "abs", "negative": "neg", "clip": "clamp", "max": "maximum", "min": "minimum",
    "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne",
    "arctan": "atan", "expit": "sigmoid", "fix": "trunc", "sgn": "sign",
    "special_expit": "sigmoid", "special_exp2": "exp2", "special_erf": "erf", "special_erfc": "erfc",
    "__truediv__": "div", "__floordiv__": "floor_divide", "__mod__": "remainder",
    "__and__": "bitwise_and", "__or__": "bitwise_or", "__xor__": "bitwise_xor",
    "__lshift__": "bitwise_left_shift", "__rshift__": "bitwise_right_shift",
    "__invert__": "bitwise_not", "__add__": "add", "__sub__": "sub", "__mul__": "mul",
    "__pow__": "pow", "__neg__": "neg", "__abs__": "abs", "__eq__": "eq", "__ne__": "ne",
    "__lt__": "lt", "__le__": "le", "__gt__": "gt", "__ge__": "ge",
}  # fmt: skip

_BINARY = "add sub mul truediv floordiv mod pow and or xor lshift rshift".split()

_WHAT_IS = (
    "use operators, comparisons, indexing of captured tensors and elementwise functions such as "
    "torch.where, exp, log, tanh, abs, minimum, clamp, floor"
)


def call(name, args, kwargs):
    """Run the operation of a torch function or method by its name."""
    if name.startswith("__r") and f"__{name[3:]}" in ALIASES:
        name, args = f"__{name[3:]}", args[::-1]
    operation = OPERATIONS.get(ALIASES.get(name, name))
    if operation is None:
        raise Untraceable(f"torch's {name} is not available in a kernel: {_WHAT_IS}")
    if "out" in kwargs:
        raise Untraceable("the argument out is not available in a kernel")
    named = [kwargs[key] for key in _SECOND_OPERAND if key in kwargs]
    if name != "to" and named:
        args = (*args, *named)
        kwargs = {key: value for key, value in kwargs.items() if key not in _SECOND_OPERAND}
    return operation(*args, **kwargs)


_SECOND_OPERAND = ("other", "exponent")  # torch's names of it


def _operator(name, is_reverse):
    def method(self, other):
        if other is None or isinstance(other, str):
            return NotImplemented
        return call(name, (other, self) if is_reverse else (self, other), {})

    return method


for _name in _BINARY:
    setattr(TracedValue, f"__{_name}__", _operator(f"__{_name}__", False))
    setattr(TracedValue, f"__r{_name}__", _operator(f"__{_name}__", True))
for _name in "eq ne lt le gt ge".split():
    setattr(TracedValue, f"__{_name}__", _operator(_name, False))
for _name, _operation in {"neg": neg, "abs": abs_, "invert": bitwise_not}.items():
    setattr(TracedValue, f"__{_name}__", lambda self, _operation=_operation: _operation(self))
TracedValue.__pos__ = lambda self: self
