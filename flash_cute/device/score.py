"""Run a user's score_mod or mask_mod while a kernel is traced.

A portable callback gets traced values (``traced.py``) and, in place of the tensors it captured,
stand-ins that load from launch arguments. A native one gets the CuTe values as they are, or vectors
of them. What the user's function does that has no code is refused with its file and line.

The launch arguments of a captured tensor are flat: address, sizes, and the strides that are not
known to be 1; ``tensor_args`` and ``tensors_from`` are the two ends of that convention in device
code, ``Callback.launch_arguments`` is the host's.
"""

import dataclasses
import linecache
import re
import types

import cutlass.cute as cute
import cutlass.cute.runtime as runtime
from cutlass import (
    BFloat16,
    Boolean,
    DSLUserCodeError,
    Float16,
    Float32,
    Float64,
    Int8,
    Int16,
    Int32,
    Int64,
    Uint8,
    Uint32,
    as_numeric,
)

import flash_cute.device.traced_ops  # noqa: F401  fills the table of operations
from flash_cute.device.primitives import load_constant
from flash_cute.device.traced import (
    INT_RANGES,
    TracedValue,
    Untraceable,
    convert,
    dtype_name_of,
    index_value,
    is_float,
    operand,
    promote,
    score_value,
    select,
)
from flash_cute.errors import FlashCuteError, InvalidProblem, UnsupportedProblem
from flash_cute.variant import HOST, NATIVE, torch_dtype

ELEMENT_TYPES = {
    "bool": Uint8,
    "uint8": Uint8,
    "int8": Int8,
    "int16": Int16,
    "int32": Int32,
    "int64": Int64,
    "float16": Float16,
    "bfloat16": BFloat16,
    "float32": Float32,
    "float64": Float64,
}


# ---- Launch arguments ----------------------------------------------------------------------------


def tensor_args(key):
    """Return placeholders for the captured tensors of a CallbackKey, for ``compile_args``."""
    args = []
    for facts in key.tensors:
        kind = ELEMENT_TYPES[facts.dtype]
        align = kind.width // 8
        args.append(runtime.make_ptr(kind, align, cute.AddressSpace.gmem, assumed_align=align))
        args += [Int32(1)] * facts.rank
        args += [Int64(1)] * sum(stride < 0 for stride in facts.strides)
    return tuple(args)


def tensors_from(key, args):
    """Make the tensors of a CallbackKey out of launch arguments, in the order of the key."""
    tensors, values = [], iter(args)
    for facts in key.tensors:
        pointer = next(values)
        sizes = tuple(next(values) for _ in range(facts.rank))
        strides = tuple(stride if stride > 0 else next(values) for stride in facts.strides)
        layout = cute.make_layout(sizes or (1,), stride=strides or (1,))
        tensors.append(cute.make_tensor(pointer, layout))
    return tuple(tensors)


# ---- Captured tensors ----------------------------------------------------------------------------


def loaded(dtype, value):
    """Wrap an element as it lies in memory."""
    if dtype == "bool":
        return TracedValue("bool", value != Uint8(0), (0, 1))
    if is_float(dtype):
        return TracedValue(dtype, value if dtype == "float64" else value.to(Float32))
    if dtype == "uint8":  # the DSL extends the sign of all that it loads
        return TracedValue(dtype, value.to(Int32) & 255, INT_RANGES[dtype])
    return TracedValue(dtype, value if dtype == "int64" else value.to(Int32), INT_RANGES[dtype])


class CapturedTensor:
    """Stands for a captured tensor: indexing it with one index per dimension loads an element.

    Indices may come in several steps, ``table[h][q_idx]``. Negative ones count from the end, as in
    torch. What lies outside is clamped into the tensor: torch would refuse it, a kernel cannot, and
    must not read elsewhere.
    """

    __hash__ = None  # pyright: ignore[reportAssignmentType]
    __array_ufunc__ = None
    device = HOST

    def __init__(self, tensor, facts, fixed=None, cast=None):
        self._tensor = tensor
        self._facts = facts
        self._fixed = (None,) * facts.rank if fixed is None else fixed  # an index, or open
        self._cast = cast

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", str(func))
        for value in args:
            if isinstance(value, CapturedTensor):
                value.traced_operand(f"torch.{name}")
        raise Untraceable(f"torch.{name} of a captured tensor: index it first")

    def traced_operand(self, what="an operation"):
        """Refuse to be an operand: this still has dimensions."""
        raise Untraceable(
            f"{what} on a whole captured tensor of {self.ndim} dimensions: index it down to one "
            "element, as in table[h, q_idx]"
        )

    @property
    def dtype(self):
        """The torch dtype."""
        return torch_dtype(self._cast or self._facts.dtype)

    @property
    def ndim(self):
        """The number of dimensions that are not indexed yet."""
        return sum(index is None for index in self._fixed)

    def dim(self):
        """Return the number of dimensions that are not indexed yet."""
        return self.ndim

    @property
    def shape(self):
        """The sizes of the open dimensions: launch arguments, so traced values."""
        sizes = self._tensor.shape
        return tuple(
            TracedValue("int64", Int32(size), (0, INT_RANGES["int32"][1]))
            for size, index in zip(sizes, self._fixed, strict=True)
            if index is None
        )

    def size(self, dim=None):
        """Return the sizes, or one of them."""
        return self.shape if dim is None else self.shape[dim]

    def to(self, *args, **kwargs):
        """Convert what will be loaded to another dtype; devices do not matter."""
        dtypes = [*args, *(kwargs[name] for name in ("dtype",) if name in kwargs)]
        names = [dtype_name_of(x) for x in dtypes if str(x).startswith("torch.")]
        return CapturedTensor(self._tensor, self._facts, self._fixed, (names or [self._cast])[0])

    def __getattr__(self, name):
        casts = {"float": "float32", "half": "float16", "bfloat16": "bfloat16", "double": "float64"}
        casts |= {"long": "int64", "int": "int32", "bool": "bool"}
        if name in casts:
            return lambda: CapturedTensor(self._tensor, self._facts, self._fixed, casts[name])
        if name in ("contiguous", "detach", "clone"):
            return lambda: self
        raise Untraceable(
            f".{name} of a captured tensor is not available in a kernel: do it outside the callback"
        )

    def __len__(self):
        raise Untraceable("len() of a captured tensor is not known: use table.shape[0]")

    def __iter__(self):
        raise Untraceable("iteration over a captured tensor: index it")

    def __bool__(self):
        raise Untraceable("the truth of a captured tensor is not known: index it and compare")

    def __getitem__(self, index):
        given = _expanded(index if isinstance(index, tuple) else (index,), self.ndim)
        fixed, given = list(self._fixed), iter(given)
        for dimension, known in enumerate(self._fixed):
            if known is None:
                found = next(given, None)
                if found is not None:
                    fixed[dimension] = _position(found, self._tensor.shape[dimension])
        if None in fixed:
            return CapturedTensor(self._tensor, self._facts, tuple(fixed), self._cast)
        coordinates = fixed[0] if len(fixed) == 1 else tuple(fixed)
        value = loaded(self._facts.dtype, load_constant(self._tensor, coordinates))
        return value if self._cast is None else convert(value, self._cast)

    def __setitem__(self, index, value):
        raise Untraceable("assignment into a captured tensor: a callback only computes its result")


for _name in "add sub mul truediv floordiv mod pow and or xor lt le gt ge eq ne".split():
    _refuse = lambda self, *other, _name=_name: self.traced_operand(f"the operator {_name}")
    setattr(CapturedTensor, f"__{_name}__", _refuse)
    setattr(CapturedTensor, f"__r{_name}__", _refuse)
for _name in "neg abs invert".split():
    setattr(CapturedTensor, f"__{_name}__", lambda self: self.traced_operand())


def _expanded(index, ndim):
    """Spell an index out: Ellipsis and ``:`` become None, dimensions that stay open."""
    if any(item is None for item in index):
        raise Untraceable("indexing with None: a callback works on one element")
    if any(item is Ellipsis for item in index):
        position = next(i for i, item in enumerate(index) if item is Ellipsis)
        fill = (slice(None),) * (ndim - len(index) + 1)
        index = (*index[:position], *fill, *index[position + 1 :])
    if len(index) > ndim:
        raise Untraceable(f"{len(index)} indices of a tensor with {ndim} dimensions")
    for item in index:
        if isinstance(item, slice) and item != slice(None):
            raise Untraceable("slices of a captured tensor: slice it outside, or add to the index")
    return [None if isinstance(item, slice) else item for item in index]


def _position(index, size):
    """Turn one index into an Int32 that lies within the dimension."""
    index = operand(index)
    kind = promote(index)
    if is_float(kind) or kind == "bool":
        raise Untraceable(f"an index of {kind}: expected an integer, convert it with .long()")
    index = convert(index, kind)
    value, last = index.value, size - 1
    if index.bounds[0] < 0:
        shifted = value + type(value)(size)
        value = shifted if index.bounds[1] < 0 else select(value < type(value)(0), shifted, value)
    if isinstance(value, Int64):
        value = cute.math.min(cute.math.max(value, Int64(0)), Int64(last))
        return value.to(Int32)
    # As unsigned numbers, negative ones are beyond the end too.
    return cute.math.min(Uint32(value), Uint32(last)).to(Int32)


# ---- Tracing -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ScoreUnits:
    """Scores are products times `scale`; a new score x is left as x * unit + shift.

    Shapes: scale: Float32, or None for 1; unit: float; shift: Float32, or None for 0
    """

    scale: object = None
    unit: float = 1.0
    shift: object = None

    def score(self, product):
        """The score of a product."""
        return product if self.scale is None else product * self.scale

    def leave(self, value):
        """A new score in the units it is left in."""
        if self.shift is None:
            return value if self.unit == 1.0 else value * Float32(self.unit)
        return cute.math.fma(value, Float32(self.unit), self.shift)


PLAIN_UNITS = ScoreUnits()


def trace_score_mod(callback, products, indices, tensors=(), seqlen_info=None, units=PLAIN_UNITS):
    """Return the new scores of ``callback.key.width`` elements of one row, as a list.

    Shapes:   products: as many Float32; indices: (b, h, q_idx, kv_idx), three Int32 and as many as
              products, or (Int32, int) whose sum it is, the first shared by the elements of a
              thread; tensors: those of callback.key, in order, 0-dim ones as tensors of one element
    Units:    ScoreUnits says what products and results are; indices are within the sequence, h is
              the query head, all below INDEX_LIMIT
    Raises:   UnsupportedProblem and, for a result of another kind, InvalidProblem, both naming the
              line of the user's function, while tracing
    """
    scores = [units.score(Float32(product)) for product in products]
    if callback.key.form == NATIVE:
        new = _called_natively(callback, (scores, *indices), tensors, seqlen_info)
        return [units.leave(score) for score in new]
    args = (score_value(scores[0]), *_index_values(indices))
    result = convert(_traced(callback, tensors, args), "float32")
    if result.line is None or units.scale is None:
        return [units.leave(result.value)]
    return [result.line.finish(Float32(products[0]), units.scale, units.unit, units.shift)]


def trace_mask_mod(callback, indices, tensors=(), seqlen_info=None):
    """Return whether each key is visible; otherwise as ``trace_score_mod``."""
    if callback.key.form == NATIVE:
        return _called_natively(callback, (None, *indices), tensors, seqlen_info)
    result = _traced(callback, tensors, _index_values(indices))
    if promote(result) != "bool":
        got = f"torch.{promote(result)}"
        raise InvalidProblem(f"mask_mod returned {got}, expected torch.bool, {_where(callback)}")
    return [convert(result, "bool").value]


def _index_values(indices):
    *others, kv_idx = indices
    return tuple(index_value(index) for index in (*others, *kv_idx))


def _called_natively(callback, args, tensors, seqlen_info):
    """Call a native callback on scalars or, if it takes more than one score, on vectors."""
    width = callback.key.width
    scores, b, h, q_idx, kv_idx = args
    kv_idx = [_plain(index) for index in kv_idx]
    b, h, q_idx = (_vector([index] * width, Int32) for index in (b, h, q_idx))
    kv_idx = _vector(kv_idx, Int32)
    function = callback.with_tensors(())
    try:
        if scores is None:
            result = function(b, h, q_idx, kv_idx, seqlen_info, tensors)
        else:
            named = {"kv_idx": kv_idx, "seqlen_info": seqlen_info, "aux_tensors": tensors}
            result = function(_vector(scores, Float32), b, h, q_idx=q_idx, **named)
    except FlashCuteError:
        raise
    except Exception as error:
        raise _refusal(callback, error) from error
    return _elements(callback, result)


def _plain(index):
    return index[0] + index[1] if isinstance(index, tuple) else index


def _vector(values, kind):
    """Pack values into a TensorSSA, or leave a single one as it is."""
    if len(values) == 1:
        return kind(values[0])
    fragment = cute.make_rmem_tensor((len(values),), kind)
    for i, value in enumerate(values):
        fragment[i] = kind(value)
    return fragment.load()


def _elements(callback, result):
    """Unpack what a native callback returned; raises InvalidProblem if it is something else."""
    width, is_mask = callback.key.width, callback.key.kind == "mask_mod"
    if isinstance(result, cute.TensorSSA):
        length, kind = cute.size(result.shape), result.dtype
    else:
        try:
            result = as_numeric(result)
            length, kind = 1, type(result)
        except Exception:
            length, kind = 0, type(result)
    is_vector = isinstance(result, cute.TensorSSA)
    is_right = length == width and is_vector == (width > 1) and (kind is Boolean) == is_mask
    if not is_right:
        of = "Boolean" if is_mask else "Float32"
        expected = f"a vector of {width} {of} (__vec_size__ is {width})" if width > 1 else of
        got = f"a vector of {length} {kind.__name__}" if is_vector else kind.__name__
        raise InvalidProblem(
            f"{callback.label} returned {got}, expected {expected}, {_where(callback)}"
        )
    values = [result[i] for i in range(width)] if is_vector else [result]
    return values if is_mask else [value.to(Float32) for value in values]


def _traced(callback, tensors, args):
    """Call a portable callback, and say where it went wrong if it did."""
    stand_ins = []
    for facts, tensor in zip(callback.key.tensors, tensors, strict=True):
        if facts.rank:
            stand_ins.append(CapturedTensor(tensor, facts))
        else:
            stand_ins.append(loaded(facts.dtype, load_constant(tensor, 0)))
    function = callback.with_tensors(tuple(stand_ins))
    try:
        result = function(*args)
        if result is None:
            raise Untraceable("it returned None, expected a value: is there a return?")
        return operand(result)
    except FlashCuteError:
        raise
    except Exception as error:
        raise _refusal(callback, error) from error


def _refusal(callback, error):
    """What to raise for an error in the user's function: the DSL's own come with colours."""
    what = "" if isinstance(error, (Untraceable, DSLUserCodeError)) else f"{type(error).__name__}: "
    text = re.sub("\x1b\\[[0-9;]*m", "", str(error)).strip()
    return UnsupportedProblem(
        f"{callback.label} cannot be compiled, {_where(callback, error)}: {what}{text}"
    )


def _where(callback, error=None):
    """Name the line of the user's function that an error came through, or where it begins.

    The DSL rewrites functions under ``@cute.jit``, and keeps their files and lines.
    """
    places = {(code.co_filename, *_lines(code)) for code in callback.codes}
    frame, found = error and error.__traceback__, None
    while frame is not None:
        name, line = frame.tb_frame.f_code.co_filename, frame.tb_lineno
        if any(name == file and first <= line <= last for file, first, last in places):
            found = (name, line)
        frame = frame.tb_next
    if found is None:
        code = callback.codes[0] if callback.codes else None
        return "in its result" if code is None else f"{code.co_filename}:{code.co_firstlineno}"
    line = linecache.getline(*found).strip()
    return f"{found[0]}:{found[1]}" + (f" `{line}`" if line else "")


def _lines(code):
    """The first and the last line of a function."""
    numbers = [line for _, _, line in code.co_lines() if line]
    inner = [_lines(const)[1] for const in code.co_consts if isinstance(const, types.CodeType)]
    return code.co_firstlineno, max([code.co_firstlineno, *numbers, *inner])
