"""User callbacks, score_mod and mask_mod: which form they have, and what they are told apart by.

The portable form is FlexAttention's: ``score_mod(score, b, h, q_idx, kv_idx)`` returns the new
score, ``mask_mod(b, h, q_idx, kv_idx)`` whether the key is visible. It is written for one element,
with Python operators and elementwise torch functions, and runs unchanged in a kernel and in the
reference. The native form takes CuTe values and two more parameters, ``seqlen_info`` and
``aux_tensors``; it runs in kernels only, and its tensors are those in the attribute ``aux_tensors``
of the function, as CuTe tensors (of ``Uint8`` for ``torch.bool``).

A native callback gets scalars: a ``Float32`` score and ``Int32`` indices. With the attribute
``__vec_size__`` set to 2, 4 or 8 it gets that many scores of one row of a thread at once. score, b,
h, q_idx and kv_idx are then ``cute.TensorSSA`` vectors of that shape, and so must its result be:
numbers of a score_mod, ``Boolean`` of a mask_mod. The keys of a vector come in pairs of neighbours,
pair by pair 8 further on (j, j+1, j+8, j+9, ...), except at the end of a sequence, where what lies
past it repeats the last key: take them from kv_idx. b, h and q_idx are one number, repeated::

    def alibi(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):  # arithmetic on vectors
        slope = aux_tensors[0][h[0]]
        return score + slope * (kv_idx - q_idx).to(cutlass.Float32)

    alibi.__vec_size__, alibi.aux_tensors = 4, (slopes,)

    def bias_by_key(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors):  # a gather
        bias = cute.make_rmem_tensor(score.shape, cutlass.Float32)
        for i in range(cute.size(score.shape)):
            bias[i] = aux_tensors[0][b[i], kv_idx[i]]
        return score + bias.load()

    bias_by_key.__vec_size__, bias_by_key.aux_tensors = 2, (table,)

Indexing aux_tensors loads where it is written, for every block of keys. ``load_constant(table, h)``
of ``flash_cute.device.primitives`` may be moved out of the loop over them, as the loads of portable
callbacks are. Nothing in the native form is clamped: an index past a table reads what lies there.

Identity: bytecode, constants, defaults, captured numbers, helper functions. Captured tensors count
by dtype, rank and the strides known to be 1, and become launch arguments. It is worked out on every
call, so a captured variable that changed is seen.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import threading
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from flash_cute.capture import TENSOR_DTYPES, Leaf, Node, TensorFacts, Walk, tensor_facts
from flash_cute.errors import InvalidProblem, UnsupportedProblem
from flash_cute.probe import looks_up_keys

PORTABLE, NATIVE = "portable", "native"
PARAMETERS = {
    "score_mod": ("score", "b", "h", "q_idx", "kv_idx"),
    "mask_mod": ("b", "h", "q_idx", "kv_idx"),
}
NATIVE_PARAMETERS = ("seqlen_info", "aux_tensors")
WIDTHS = (1, 2, 4, 8)  # scores that a native callback may take at once
MAX_REMEMBERED = 4096
INDEX_LIMIT = 2**24  # in kernels b, h, q_idx and kv_idx are below it


@dataclasses.dataclass(frozen=True, slots=True)
class CallbackKey:
    """What a kernel is compiled for: equal keys trace to the same code.

    Shapes: tensors: one entry per captured tensor, in the order of the launch arguments
    """

    kind: str  # "score_mod" or "mask_mod"
    form: str  # "portable" or "native"
    digest: str
    tensors: tuple[TensorFacts, ...] = ()
    width: int = 1  # scores of a call: __vec_size__ of a native callback
    looks_up_keys: bool = False  # tables are indexed by kv_idx, which chooses tiles


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Callback:
    """A callback of one call: its key, the tensors to launch with, and a snapshot to trace.

    Contract: `tensors` is empty in what `callback_for` returns; the snapshot never holds any.
    """

    key: CallbackKey
    label: str
    node: Node = dataclasses.field(repr=False)
    codes: tuple[types.CodeType, ...] = dataclasses.field(repr=False)
    names: tuple[str, ...]  # of the variables that hold the tensors
    tensors: tuple[torch.Tensor, ...] = dataclasses.field(repr=False, default=())

    @property
    def requires_grad(self) -> bool:
        """Whether a captured tensor takes part in autograd."""
        return any([tensor.requires_grad for tensor in self.tensors])

    def with_tensors(self, stand_ins: tuple[Any, ...]) -> Callable[..., Any]:
        """Return a copy of the user's function that reads `stand_ins` in place of its tensors."""
        return self.node.build(stand_ins, {})

    def launch_arguments(self) -> tuple[int, ...]:
        """Return the tensors as plain integers: per tensor the address, sizes and open strides."""
        arguments: list[int] = []
        for tensor, facts in zip(self.tensors, self.key.tensors, strict=True):
            is_last_known = facts.strides[-1:] == (1,)
            arguments.append(tensor.data_ptr())
            arguments += tensor.shape
            arguments += tensor.stride()[:-1] if is_last_known else tensor.stride()
        return tuple(arguments)

    def check_device(self, device: torch.device, why: str = "device of q") -> None:
        """Refuse tensors that a kernel on `device` cannot read; raises InvalidProblem."""
        for name, tensor in zip(self.names, self.tensors, strict=True):
            if tensor.device != device:
                raise InvalidProblem(
                    f"{self.label} captures {name!r} on {tensor.device}, expected {device} "
                    f'({why}): capture {name}.to("{device}")'
                )
            if not tensor.numel():
                raise InvalidProblem(
                    f"{self.label} captures {name!r} without elements, {tuple(tensor.shape)}: "
                    "there is nothing to index"
                )


# ---- Forms ---------------------------------------------------------------------------------------


def callback_form(function: object, kind: str) -> str:
    """Say whether a callback is "portable" or "native", by its signature.

    Raises: InvalidProblem with the expected forms when it is neither.
    """
    if not callable(function):
        _refuse_form(kind, f"of type {type(function).__name__}", "a function ")
    inner, bound, bound_names = function, 0, ()
    if type(function) is functools.partial:
        inner, bound, bound_names = function.func, len(function.args), tuple(function.keywords)
    if isinstance(inner, types.FunctionType) and not hasattr(function, "__wrapped__"):
        defaults, kwdefaults = inner.__defaults__ or (), inner.__kwdefaults__ or {}
        code = (inner.__code__, len(defaults), tuple(kwdefaults))
        if inner is function:
            return _form_of_code(*code, kind)
        with contextlib.suppress(InvalidProblem):  # the message shows what the partial holds
            if not hasattr(inner, "__wrapped__"):
                return _form_of_code(*code, kind, bound, bound_names)
    return _form(function, kind)


@functools.lru_cache(maxsize=4096)
def _form_of_code(
    code: types.CodeType,
    num_defaults: int,
    keywords: tuple[str, ...],
    kind: str,
    num_bound: int = 0,
    bound_names: tuple[str, ...] = (),
) -> str:
    """The form of functions of some code, as they are or as a partial with so much bound."""
    cells = tuple(types.CellType() for _ in code.co_freevars)
    function = types.FunctionType(code, {}, code.co_name, (None,) * num_defaults, cells)
    function.__kwdefaults__ = dict.fromkeys(keywords)
    if not num_bound and not bound_names:
        return _form(function, kind)
    bound = (None,) * num_bound
    return _form(functools.partial(function, *bound, **dict.fromkeys(bound_names)), kind)


def _form(function: Callable[..., Any], kind: str) -> str:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return PORTABLE  # a built-in without a signature: the call itself will tell
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        _refuse_form(kind, "a coroutine or generator", "a function ")
    names = PARAMETERS[kind]
    extra = [signature.parameters.get(name) for name in NATIVE_PARAMETERS]
    if all(p is not None and p.default is p.empty for p in extra):
        # As in FlashAttention-4, score_mod takes the last four by name, mask_mod six in order.
        by_name = (*names[3:], *NATIVE_PARAMETERS) if kind == "score_mod" else ()
        in_order = names[:3] if kind == "score_mod" else (*names, *NATIVE_PARAMETERS)
        if _takes(signature, in_order, by_name):
            return NATIVE
    if _takes(signature, names, ()):
        return PORTABLE
    _refuse_form(kind, f"a function of {signature}", "")


def _takes(
    signature: inspect.Signature, in_order: tuple[str, ...], by_name: tuple[str, ...]
) -> bool:
    try:
        signature.bind(*in_order, **dict.fromkeys(by_name))
    except TypeError:
        return False
    return True


def _refuse_form(kind: str, got: str, prefix: str) -> NoReturn:
    names = PARAMETERS[kind]
    native = ", ".join((*names, *NATIVE_PARAMETERS))
    raise InvalidProblem(
        f"{kind} is {got}, expected {prefix}{kind}({', '.join(names)}), or the native form "
        f"{kind}({native}) of CuTe values"
    )


# ---- Identity ------------------------------------------------------------------------------------

_lock = threading.Lock()
_keys: OrderedDict[Any, CallbackKey] = OrderedDict()  # by the raw key of the walk
_callbacks: OrderedDict[str, Callback] = OrderedDict()  # by the digest of their keys


def as_callback(function: Callable[..., Any], kind: str) -> Callback:
    """Work out what a callback is; `kind` is "score_mod" or "mask_mod".

    Raises: InvalidProblem for a wrong signature; UnsupportedProblem naming the variable for what
            cannot be keyed.
    """
    form, width = callback_form(function, kind), 1
    name = _name_of(function)
    walk = Walk(f"{kind} {name!r}")
    if form == PORTABLE:
        raw, node = walk.value(function, name)
    else:
        width = _width_of(function, walk.label)
        raw, node = _walk_native(walk, function)
    facts = tuple([tensor_facts(tensor) for tensor in walk.tensors])
    key = _key_of((kind, form, width, raw, facts), node)
    names = tuple(walk.names)
    callback = Callback(key, walk.label, node, tuple(walk.codes), names, tuple(walk.tensors))
    if key.digest not in _callbacks:
        with _lock:
            _callbacks[key.digest] = dataclasses.replace(callback, tensors=())
            _forget_oldest(_callbacks)
    return callback


def callback_on(
    device: torch.device, function: Callable[..., Any] | None, kind: str
) -> Callback | None:
    """Work out a callback for a kernel on `device`; None is none. Raises as its two steps do."""
    if function is None:
        return None
    callback = as_callback(function, kind)
    callback.check_device(device)
    return callback


def callback_for(key: CallbackKey) -> Callback:
    """Return the callback of a key, without its tensors, to trace it in a kernel.

    Raises: UnsupportedProblem when this process has not seen it: a function cannot be made from a
            key.
    """
    try:
        return _callbacks[key.digest]
    except KeyError:
        raise UnsupportedProblem(
            f"the {key.kind} {key.digest[:12]} is not known in this process: call the attention "
            "function with it, a key alone is no function to compile"
        ) from None


def _width_of(function: Callable[..., Any], label: str) -> int:
    width = getattr(function, "__vec_size__", 1)
    if not isinstance(width, int) or width not in WIDTHS:
        raise UnsupportedProblem(
            f"{label}.__vec_size__ is {width!r}, expected {', '.join(map(str, WIDTHS[:-1]))} or "
            f"{WIDTHS[-1]}: how many scores of a row a call takes"
        )
    return int(width)


def _walk_native(walk: Walk, function: Callable[..., Any]) -> tuple[Any, Node]:
    """A native callback is called as it is; its tensors come from its attribute."""
    inner = inspect.unwrap(function)
    raw, _ = walk.value(inner, _name_of(function))
    if walk.tensors:
        raise UnsupportedProblem(
            f"{walk.label} captures {walk.names[0]!r}, a tensor, in the native form: set "
            f"{_name_of(function)}.aux_tensors = ({walk.names[0]}, ...) and read aux_tensors"
        )
    aux_tensors = tuple(getattr(function, "aux_tensors", None) or ())
    for index, tensor in enumerate(aux_tensors):
        if not isinstance(tensor, torch.Tensor):
            got = type(tensor).__name__
            raise InvalidProblem(
                f"{walk.label}.aux_tensors[{index}] is of type {got}, expected a torch.Tensor"
            )
    slots = walk.value(aux_tensors, "aux_tensors")[0]
    return (raw, slots), Leaf(function)


def _key_of(raw: tuple[Any, ...], node: Node) -> CallbackKey:
    key = _keys.get(raw)
    if key is None:
        # repr tells apart all that a raw key is made of: strings, numbers, None, tuples, facts.
        digest = hashlib.sha256(repr(raw).encode()).hexdigest()
        kind, form, width, _, facts = raw
        key = CallbackKey(kind, form, digest, facts, width)
        if form == PORTABLE:
            by_key = looks_up_keys(lambda found: node.build(found, {}), facts, PARAMETERS[kind])
        else:  # it cannot be called here; a table of one dimension is mostly one of heads
            by_key = any(fact.rank > 1 for fact in facts)
        key = dataclasses.replace(key, looks_up_keys=by_key)
        with _lock:
            _keys[raw] = key
            _forget_oldest(_keys)
    return key


def _forget_oldest(entries: OrderedDict[Any, Any]) -> None:
    while len(entries) > MAX_REMEMBERED:
        entries.popitem(last=False)


def _name_of(function: Callable[..., Any]) -> str:
    inner = function.func if isinstance(function, functools.partial) else function
    return getattr(inner, "__name__", None) or type(inner).__name__


# ---- Masks put together --------------------------------------------------------------------------


def and_masks(*mask_mods: Callable[..., Any]) -> Callable[..., Any]:
    """Return the mask_mod that shows what all of `mask_mods` show; of none, everything."""
    _check_masks(mask_mods)

    def and_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        visible = q_idx >= 0
        for mask_mod in mask_mods:
            visible = visible & mask_mod(b, h, q_idx, kv_idx)
        return visible

    return and_mask


def or_masks(*mask_mods: Callable[..., Any]) -> Callable[..., Any]:
    """Return the mask_mod that shows what any of `mask_mods` shows; of none, nothing."""
    _check_masks(mask_mods)

    def or_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        visible = q_idx < 0
        for mask_mod in mask_mods:
            visible = visible | mask_mod(b, h, q_idx, kv_idx)
        return visible

    return or_mask


def _check_masks(mask_mods: tuple[Callable[..., Any], ...]) -> None:
    for mask_mod in mask_mods:
        if callback_form(mask_mod, "mask_mod") == NATIVE:
            raise InvalidProblem("mask_mod is in the native form, expected the portable one")


# ---- What device code needs to know of torch -----------------------------------------------------

HOST = torch.device("cpu")
_DTYPES = {name: dtype for dtype, name in TENSOR_DTYPES.items()}


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a name in a key."""
    return _DTYPES[name]
