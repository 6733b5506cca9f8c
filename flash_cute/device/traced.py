"""Values of a portable callback while a kernel is traced: torch's rules on CuTe scalars.

A callback is written for torch tensors; here its arguments are `TracedValue`s, and operators and
torch functions on them emit code. Dtypes and promotion are torch's, integer results are exact:
indices are int64 as in torch, but an integer is kept in 32 bits for as long as the range of its
values, which is followed through the operations, shows that nothing is lost. Half-precision results
are rounded after each operation, as torch does.

torch is not imported: its functions come here by ``__torch_function__`` and count by their name.
"""

import dataclasses
import functools
import math
import operator
import struct

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float16, Float32, Float64, Int8, Int16, Int32, Int64

from flash_cute.device.primitives import round_to_half
from flash_cute.variant import HOST, INDEX_LIMIT, torch_dtype

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
HALF_TYPES = {"float16": Float16, "bfloat16": BFloat16}
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

    An integer may also be known as base + offset, with the base shared by many elements and the
    offset a Python number, or as the absolute value of one (`Sum`). Its conversion to float32 then
    costs an addition: conversions run at a quarter of the rate, on the unit of the exponentials.
    A float32 that grew out of the score or of such an integer may be known as a `Line`, too.
    """

    __slots__ = ("bounds", "dtype_name", "line", "sum", "value")
    __array_ufunc__ = None  # numpy's numbers leave operators to this class
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __init__(self, dtype_name, value, bounds=(0, 0), sum=None, line=None):
        self.dtype_name = dtype_name
        self.value = value
        self.bounds = bounds
        self.sum = sum
        self.line = line

    def __repr__(self):
        return f"<traced {self.dtype_name}>"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return call(getattr(func, "__name__", str(func)), args, kwargs or {})

    def __getattr__(self, name):
        if name == "where":  # the method has its condition second
            return lambda condition, other: call(name, (condition, self, other), {})
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

    def __pos__(self):
        return self

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


@dataclasses.dataclass(frozen=True)
class Sum:
    """An integer as base + offset, or the absolute value of that: base Int32, offset int."""

    base: object
    offset: int
    is_absolute: bool = False

    def to_float(self):
        """The same number in float32, exact below 2**24."""
        value = Float32(self.base) + Float32(float(self.offset))
        return cute.math.abs(value) if self.is_absolute else value


@dataclasses.dataclass(frozen=True)
class Line:
    """A float32 as score + base + factor * offset, of which each part may be missing.

    What base and factor are made of is usually the same for a whole row, so that an element costs
    one multiply-add for its offset, a Python number, and one for its score. The value is emitted
    both ways; the compiler drops the one that is not used.
    """

    has_score: bool = False
    base: object = None  # Float32 or None
    factor: object = None  # Float32 or None, as offset
    offset: int = 0

    def scaled(self, number):
        """The line times a Float32; None where the score would be multiplied."""
        if self.has_score:
            return None
        return Line(False, self.base * number, self.factor * number, self.offset)

    def plus(self, op, other):
        """The sum or difference, `op`, with another line; None where it is no line."""
        is_difference = op is operator.sub
        if other.has_score and (self.has_score or is_difference):
            return None
        if self.factor is not None and other.factor is not None:
            return None
        factor, offset = self.factor, self.offset
        if other.factor is not None:
            factor, offset = other.factor, -other.offset if is_difference else other.offset
        return Line(
            self.has_score or other.has_score, _joined(op, self.base, other.base), factor, offset
        )

    def finish(self, product, scale, unit, shift):
        """value * unit + shift, where the score is product * scale.

        Shapes: product, scale: Float32; unit: float; shift: Float32, or None for 0
        """
        total = shift
        if self.base is not None:
            total = _fma(self.base, unit, shift)
        if self.has_score:
            total = _fma(product, scale * Float32(unit), total)
        if self.factor is not None and self.offset != 0:
            total = cute.math.fma(self.factor * Float32(unit), Float32(float(self.offset)), total)
        return total


def _joined(op, a, b):
    """op(a, b) of values of which None is 0."""
    if b is None:
        return a
    return op(Float32(0.0) if a is None else a, b)


def _fma(a, b, c):
    """a * b + c, where c may be None."""
    return a * Float32(b) if c is None else cute.math.fma(a, Float32(b), c)


def line_of(op, a, b):
    """The `Line` of a float32 operation on two float32 values, of which one may be one."""
    if a.line is None and b.line is None:
        return None
    if op is operator.mul:
        line, number = (b.line, a.value) if a.line is None else (a.line, b.value)
        return line.scaled(number) if a.line is None or b.line is None else None
    if op not in (operator.add, operator.sub):
        return None
    first, second = (x.line or Line(base=x.value) for x in (a, b))
    return first.plus(op, second)


def score_value(score):
    """Wrap the score that a callback is called with."""
    return TracedValue("float32", score, line=Line(has_score=True))


def index_value(index):
    """Wrap one of the indices that a callback is called with: an Int32, or (base, offset)."""
    base, offset = index if isinstance(index, tuple) else (index, 0)
    base = Int32(base)
    value = base if offset == 0 else base + Int32(offset)
    total = (
        None if isinstance(base.value, int) else Sum(base, offset)
    )  # constants fold by themselves
    return TracedValue("int64", value, (0, INDEX_LIMIT - 1), total)


def sum_of(op, a, b):
    """The `Sum` of a + b or a - b, `op`, where both are sums or constants; else None."""
    parts = []
    for x in (a, b):
        if x.sum is not None and not x.sum.is_absolute:
            parts.append((x.sum.base, x.sum.offset))
        elif x.bounds[0] == x.bounds[1]:
            parts.append((None, x.bounds[0]))
        else:
            return None
    (base_a, offset_a), (base_b, offset_b) = parts
    if base_a is None or (base_b is None and op is operator.sub):
        base = base_a if base_b is None else None if op is operator.sub else base_b
    else:
        base = base_a if base_b is None else op(base_a, base_b)
    return None if base is None else Sum(base, op(offset_a, offset_b))


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
        is_exact = -(2**24) <= x.bounds[0] and x.bounds[1] <= 2**24
        if x.sum is not None and kind is Float32 and is_exact:
            result = rounded(dtype, x.sum.to_float())
            if dtype == "float32" and not x.sum.is_absolute:
                result.line = Line(False, Float32(x.sum.base), Float32(1.0), x.sum.offset)
            return result
        value = Int32(x.value) if x.dtype_name == "bool" else x.value
        return rounded(dtype, kind(value))
    if is_float(x.dtype_name):
        value = Int64(x.value) if dtype == "int64" else Int32(x.value)
        return wrapped(dtype, value, INT_RANGES["int32" if dtype != "int64" else "int64"])
    value = Int32(x.value) if x.dtype_name == "bool" else x.value
    return wrapped(dtype, value, x.bounds)


def _constant(number, dtype):
    if is_float(dtype):
        kind = Float64 if dtype == "float64" else Float32
        return rounded(dtype, kind(float(number)))
    if dtype == "bool":
        return TracedValue("bool", Boolean(bool(number)), (int(bool(number)),) * 2)
    number = int(number)
    if not INT_RANGES[dtype][0] <= number <= INT_RANGES[dtype][1]:
        raise Untraceable(f"{number} does not fit into {dtype}")
    kind = Int32 if fits_int32((number, number)) else Int64
    return TracedValue(dtype, kind(number), (number, number))


def rounded(dtype, value):
    """Wrap the float32 or float64 result of an operation on values of a dtype.

    Numbers of a callback are rounded too, as torch.vmap has it, by which the reference runs.
    """
    half = HALF_TYPES.get(dtype)
    if half is None:
        return TracedValue(dtype, value)
    if isinstance(value.value, (int, float)):
        return TracedValue(dtype, Float32(half_number(value.value, dtype)))
    return TracedValue(dtype, round_to_half(Float32(value), half))


def half_number(number, dtype):
    """Round a Python number to float16 or bfloat16."""
    try:
        (word,) = struct.unpack("<I", struct.pack("<f", number))
        if dtype == "float16":
            (number,) = struct.unpack("<f", struct.pack("<I", word))
            return struct.unpack("<e", struct.pack("<e", number))[0]
    except OverflowError:
        return math.copysign(math.inf, number)
    if math.isfinite(number):  # to the nearest, ties to even
        word = (word + 0x7FFF + (word >> 16 & 1)) & 0xFFFF0000
    return struct.unpack("<f", struct.pack("<I", word))[0]


def fits_int32(bounds):
    """Say whether all integers of a range have 32 bits."""
    return bounds[0] >= -(2**31) and bounds[1] < 2**31


def wrapped(dtype, value, bounds):
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
    if fits_int32(bounds):
        value = value.to(Int32)
    return TracedValue(dtype, value, bounds)


def select(condition, a, b):
    """Choose between two scalars of one type; a constant condition chooses now."""
    if isinstance(condition.value, (bool, int)):
        return a if condition.value else b
    return type(a)(cutlass.select_(condition, a, b))


# ---- Operations by name --------------------------------------------------------------------------

OPERATIONS = {}  # torch's name -> function; filled by traced_ops

ALIASES = {
    "true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub",
    "absolute": "abs", "negative": "neg", "clip": "clamp", "max": "maximum", "min": "minimum",
    "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne",
    "arctan": "atan", "expit": "sigmoid", "fix": "trunc", "sgn": "sign",
    "special_expit": "sigmoid", "special_exp2": "exp2", "special_erf": "erf",
    "__truediv__": "div", "__floordiv__": "floor_divide", "__mod__": "remainder",
    "__and__": "bitwise_and", "__or__": "bitwise_or", "__xor__": "bitwise_xor",
    "__lshift__": "bitwise_left_shift", "__rshift__": "bitwise_right_shift",
    "__invert__": "bitwise_not", "__add__": "add", "__sub__": "sub", "__mul__": "mul",
    "__pow__": "pow", "__neg__": "neg", "__abs__": "abs", "__eq__": "eq", "__ne__": "ne",
    "__lt__": "lt", "__le__": "le", "__gt__": "gt", "__ge__": "ge",
}  # fmt: skip

_WHAT_IS = (
    "use operators, comparisons, indexing of captured tensors and elementwise functions such as "
    "torch.where, exp, log, tanh, abs, minimum, clamp, floor"
)


_SECOND_OPERAND = ("other", "exponent")  # torch's names of it


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


def _operator(name, is_reverse):
    def method(self, other):
        if other is None or isinstance(other, str):
            return NotImplemented
        return call(name, (other, self) if is_reverse else (self, other), {})

    return method


for _name in "add sub mul truediv floordiv mod pow and or xor lshift rshift".split():
    setattr(TracedValue, f"__{_name}__", _operator(f"__{_name}__", False))
    setattr(TracedValue, f"__r{_name}__", _operator(f"__{_name}__", True))
for _name in "eq ne lt le gt ge".split():
    setattr(TracedValue, f"__{_name}__", _operator(_name, False))
for _name in "neg abs invert".split():
    setattr(
        TracedValue, f"__{_name}__", lambda self, _name=_name: call(f"__{_name}__", (self,), {})
    )
