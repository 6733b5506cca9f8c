"""What a Python function depends on: a key, the tensors it uses, and a copy that uses others.

`capture` walks a function: bytecode, constants, defaults, closure, the globals it reads, helper
functions, partials, bound methods, captured objects. The walk yields

    raw       nested tuples of strings and numbers, equal when the function would trace the same
    tensors   the tensors it reaches, in the order of the walk, each once
    node      a snapshot without tensors, from which `Node.build` makes a function that reads
              stand-ins in their place; the user's own function is never changed

Numbers, strings and the like count by value, tensors by what a kernel is compiled for, modules of
the libraries below by name. A module, class or object of which only attributes are read counts by
those. What has no key is refused by the name of the variable that holds it.
"""

from __future__ import annotations

import builtins
import dataclasses
import dis
import enum
import functools
import hashlib
import types
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from flash_cute.errors import UnsupportedProblem

# Taken as fixed: their functions count by name, and reading their attributes is not followed.
LIBRARIES = frozenset(
    "builtins cmath collections cutlass dataclasses enum functools itertools math numpy operator "
    "torch types typing".split()
)
_FORBIDDEN_BUILTINS = frozenset(
    "__import__ breakpoint compile delattr eval exec globals input locals open setattr vars".split()
)

# torch dtype -> the name that keys and kernels use.
TENSOR_DTYPES: dict[torch.dtype, str] = {
    torch.bool: "bool",
    torch.uint8: "uint8",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}

Chain = tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class TensorFacts:
    """What is compiled in of a captured tensor; sizes, other strides and values are arguments.

    Units: strides[i] is 1 where the stride is known to be 1 (the last dimension only), else -1.
    """

    dtype: str
    rank: int
    strides: tuple[int, ...]


def tensor_facts(tensor: torch.Tensor) -> TensorFacts:
    """Return what a kernel that reads `tensor` is compiled for."""
    return _tensor_facts(tensor.dtype, *_rank_and_unit(tensor))


def _rank_and_unit(tensor: torch.Tensor) -> tuple[int, bool]:
    """The rank, and whether the last stride is known to be 1."""
    shape = tensor.shape
    return len(shape), bool(shape) and (shape[-1] <= 1 or tensor.stride(-1) == 1)


@functools.lru_cache(maxsize=256)
def _tensor_facts(dtype: torch.dtype, rank: int, has_unit: bool) -> TensorFacts:
    strides = (-1,) * (rank - 1) + (1,) if has_unit else (-1,) * rank
    return TensorFacts(TENSOR_DTYPES[dtype], rank, strides)


# ---- Snapshots -----------------------------------------------------------------------------------


class Node:
    """A captured value without tensors; `build` makes the value, with stand-ins for tensors."""

    def build(self, stand_ins: tuple[Any, ...], made: dict[int, Any]) -> Any:
        """Return the value; `made` holds the functions and objects built so far, by node."""
        raise NotImplementedError


# Not frozen, as every call makes some, and a frozen dataclass takes three times as long to make.
@dataclasses.dataclass(slots=True, eq=False)
class Leaf(Node):
    """A value that is used as it is."""

    value: Any

    def build(self, stand_ins: tuple[Any, ...], made: dict[int, Any]) -> Any:
        """Return the value."""
        return self.value


@dataclasses.dataclass(slots=True, eq=False)
class _Slot(Node):
    index: int

    def build(self, stand_ins: tuple[Any, ...], made: dict[int, Any]) -> Any:
        return stand_ins[self.index]


@dataclasses.dataclass(slots=True, eq=False)
class _Group(Node):
    """Parts put together by a function of their values."""

    make: Callable[..., Any]
    parts: tuple[Node, ...]

    def build(self, stand_ins: tuple[Any, ...], made: dict[int, Any]) -> Any:
        return self.make(*(part.build(stand_ins, made) for part in self.parts))


@dataclasses.dataclass(slots=True, eq=False)
class _Object(Node):
    """An instance, rebuilt attribute by attribute; filled in after it exists, for cycles."""

    kind: type[Any]
    attributes: dict[str, Node]

    def build(self, stand_ins: tuple[Any, ...], made: dict[int, Any]) -> Any:
        if id(self) not in made:
            instance = made[id(self)] = object.__new__(self.kind)
            for name, node in self.attributes.items():
                object.__setattr__(instance, name, node.build(stand_ins, made))
        return made[id(self)]


@dataclasses.dataclass(slots=True, eq=False)
class _Function(Node):
    """A Python function; its parts are filled in after it exists, for recursion."""

    code: types.CodeType
    name: str
    module: str
    closure: tuple[Node, ...] = ()
    defaults: tuple[Node, ...] | None = None
    kwdefaults: dict[str, Node] | None = None
    variables: dict[str, Node] = dataclasses.field(default_factory=dict)

    def build(self, stand_ins: tuple[Any, ...], made: dict[int, Any]) -> Any:
        if id(self) in made:
            return made[id(self)]
        cells = tuple(types.CellType() for _ in self.closure)
        scope: dict[str, Any] = {"__builtins__": builtins, "__name__": self.module}
        function = types.FunctionType(self.code, scope, self.name, None, cells)
        made[id(self)] = function
        for cell, node in zip(cells, self.closure, strict=True):
            cell.cell_contents = node.build(stand_ins, made)
        scope.update({name: n.build(stand_ins, made) for name, n in self.variables.items()})
        if self.defaults is not None:
            function.__defaults__ = tuple(node.build(stand_ins, made) for node in self.defaults)
        if self.kwdefaults is not None:
            kwdefaults = {name: n.build(stand_ins, made) for name, n in self.kwdefaults.items()}
            function.__kwdefaults__ = kwdefaults
        return function


# ---- What the bytecode says ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _CodeFacts:
    """What is read off a code object, its nested ones included.

    ``reads`` maps each global and closure variable to the attribute chains it is used by; the empty
    chain stands for the value itself.
    """

    digest: str
    reads_global: Mapping[str, frozenset[Chain]]
    reads_closure: Mapping[str, frozenset[Chain]]
    writes: tuple[str, ...]
    imports: tuple[str, ...]


_LOADS_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")
_LOADS_CLOSURE = ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
_LOADS_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_WRITES_GLOBAL = ("STORE_GLOBAL", "DELETE_GLOBAL")
_WRITES_CLOSURE = ("STORE_DEREF", "DELETE_DEREF")


@functools.lru_cache(maxsize=4096)
def _code_facts(code: types.CodeType) -> _CodeFacts:
    instructions = [i for i in dis.get_instructions(code) if i.opname not in _NO_OPERATION]
    free = set(code.co_freevars)
    reads: tuple[dict[str, set[Chain]], dict[str, set[Chain]]] = ({}, {})
    writes: list[str] = []
    imports: list[str] = []
    for position, instruction in enumerate(instructions):
        operation, name = instruction.opname, instruction.argval
        is_closure = operation in _LOADS_CLOSURE and name in free
        if is_closure or operation in _LOADS_GLOBAL:
            chain = _chain(instructions, position)
            reads[is_closure].setdefault(name, set()).add(chain)
        elif operation in _WRITES_GLOBAL or (operation in _WRITES_CLOSURE and name in free):
            writes.append(name)
        elif operation == "IMPORT_NAME":
            imports.append(name)
    for nested in (c for c in code.co_consts if isinstance(c, types.CodeType)):
        facts = _code_facts(nested)
        for target, found in zip(reads, (facts.reads_global, facts.reads_closure), strict=True):
            for name, chains in found.items():
                if target is reads[0] or name in free:
                    target.setdefault(name, set()).update(chains)
        writes += [name for name in facts.writes if name not in code.co_cellvars]
        imports += facts.imports
    return _CodeFacts(
        hashlib.sha256(repr(_code_key(code)).encode()).hexdigest(),
        {name: frozenset(chains) for name, chains in sorted(reads[0].items())},
        {name: frozenset(chains) for name, chains in sorted(reads[1].items())},
        tuple(sorted(set(writes))),
        tuple(sorted(set(imports))),
    )


_NO_OPERATION = ("CACHE", "EXTENDED_ARG", "PUSH_NULL", "PRECALL", "NOP")


def _chain(instructions: list[dis.Instruction], position: int) -> Chain:
    """The attributes that are read one after the other off the value just loaded."""
    names: list[str] = []
    for instruction in instructions[position + 1 :]:
        if instruction.opname not in _LOADS_ATTRIBUTE:
            break
        names.append(instruction.argval)
    return tuple(names)


def _code_key(code: types.CodeType) -> tuple[Any, ...]:
    """All of a code object that decides what it does: no names of files, lines or the function."""
    consts = tuple(_const_key(const) for const in code.co_consts)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    handlers = getattr(code, "co_exceptiontable", b"")
    return (code.co_code.hex(), consts, counts, names, handlers.hex())


def _const_key(const: Any) -> Any:
    if isinstance(const, types.CodeType):
        return ("code", _code_key(const))
    if isinstance(const, tuple):
        return ("tuple", tuple(_const_key(item) for item in const))
    if isinstance(const, frozenset):
        return ("frozenset", tuple(sorted(repr(_const_key(item)) for item in const)))
    return _LEAF_KEYS[type(const)](const)


# ---- The walk ------------------------------------------------------------------------------------

_LEAF_KEYS: dict[type[Any], Callable[[Any], tuple[Any, ...]]] = {
    int: lambda value: ("int", value),
    float: lambda value: ("float", value.hex()),
    bool: lambda value: ("bool", value),
    str: lambda value: ("str", value),
    type(None): lambda value: ("None",),
    bytes: lambda value: ("bytes", value.hex()),
    complex: lambda value: ("complex", value.real.hex(), value.imag.hex()),
    type(...): lambda value: ("Ellipsis",),
    range: lambda value: ("range", value.start, value.stop, value.step),
    torch.dtype: lambda value: ("dtype", str(value)),
    torch.device: lambda value: ("device", str(value)),
    torch.finfo: lambda value: ("finfo", str(value.dtype)),
    torch.iinfo: lambda value: ("iinfo", str(value.dtype)),
}

_TENSOR_CLASSES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_BUILTINS = (
    types.BuiltinFunctionType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.MethodWrapperType,
    types.GetSetDescriptorType,
)
_NAMED = {("torch._ops", "OpOverload"), ("torch._ops", "OpOverloadPacket"), ("numpy", "ufunc")}
_UNFOLLOWED = (*_LEAF_KEYS, torch.Tensor, types.FunctionType, tuple, list, dict, functools.partial)
_UNFOLLOWED_EXACTLY = frozenset(_UNFOLLOWED)

Found = tuple[tuple[Any, ...], Node]  # the raw key of a value, and its snapshot


@functools.lru_cache(maxsize=4096)
def _is_library(module: str | None) -> bool:
    return (module or "builtins").split(".")[0].lstrip("_") in LIBRARIES


class Walk:
    """One walk over a function; `label` names it in refusals ("score_mod alibi")."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.tensors: list[torch.Tensor] = []
        self.names: list[str] = []
        self.codes: list[types.CodeType] = []
        self._slots: dict[int, int] = {}
        self._seen: dict[int, tuple[int, Node]] = {}
        self._alive: list[Any] = []  # an id stands for a value only while that value lives

    def value(self, value: Any, name: str) -> Found:
        """Key and snapshot a value that is held by the variable `name`."""
        kind = type(value)
        leaf = _LEAF_KEYS.get(kind)
        if leaf is not None:
            return leaf(value), Leaf(value)
        if isinstance(value, types.FunctionType):
            return self._function(value, name)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, name)
        if isinstance(value, (tuple, list)):
            return self._sequence(value, name)
        if kind is dict:
            return self._mapping(value, name)
        if kind is functools.partial:
            parts = (value.func, value.args, value.keywords)
            make = lambda function, args, kwargs: functools.partial(function, *args, **kwargs)
            return self._group("partial", make, parts, name)
        if kind is types.MethodType:
            return self._group("method", types.MethodType, (value.__func__, value.__self__), name)
        return self._other(value, name)

    def _other(self, value: Any, name: str) -> Found:
        """Modules, classes, enumerations, built-ins, numpy's numbers, objects."""
        kind = type(value)
        if isinstance(value, types.ModuleType):
            if _is_library(value.__name__):
                return ("module", value.__name__), Leaf(value)
            self.refuse(name, value, "read the values off it by name, as in module.value")
        if isinstance(value, type):
            return self._class(value, name), Leaf(value)
        if isinstance(value, enum.Enum):
            raw, _ = self.value(value.value, name)
            return ("enum", kind.__module__, kind.__qualname__, value.name, raw), Leaf(value)
        if isinstance(value, _BUILTINS) or (kind.__module__, kind.__name__) in _NAMED:
            owner = getattr(value, "__self__", None)
            if owner is not None and not isinstance(owner, (type, types.ModuleType)):
                self.refuse(name, value, "use the function and not the method of a captured value")
            title = getattr(value, "__qualname__", value.__name__)
            return ("builtin", kind.__qualname__, str(value.__module__), title), Leaf(value)
        if kind.__module__ == "numpy" and hasattr(value, "item") and not value.shape:
            raw, _ = self.value(value.item(), name)
            return ("numpy", kind.__name__, raw), Leaf(value)
        return self._object(value, name)

    def _variable(self, value: Any, chains: frozenset[Chain], name: str) -> Found:
        """A variable of a function: by the attributes that are read off it, where that is all."""
        kind = type(value)  # the usual cases first: isinstance takes a microsecond here
        if kind in _UNFOLLOWED_EXACTLY:
            return self.value(value, name)
        if kind is types.ModuleType and _is_library(value.__name__):
            return self._other(value, name)
        is_whole = () in chains or isinstance(value, _UNFOLLOWED)
        if is_whole or (isinstance(value, types.ModuleType) and _is_library(value.__name__)):
            return self.value(value, name)
        if isinstance(value, type) and _is_library(value.__module__):
            return self.value(value, name)
        rests: dict[str, set[Chain]] = {}
        for chain in chains:
            rests.setdefault(chain[0], set()).add(chain[1:])
        keys: list[Any] = []
        nodes: dict[str, Node] = {}
        for attribute, rest in sorted(rests.items()):
            inner = f"{name}.{attribute}"
            if not hasattr(value, attribute):
                self.refuse(inner, None, "there is no such attribute", is_missing=True)
            found = getattr(value, attribute)
            self._alive.append(found)
            key, nodes[attribute] = self._variable(found, frozenset(rest), inner)
            keys.append((attribute, key))
        names = tuple(nodes)
        make = lambda *parts: types.SimpleNamespace(**dict(zip(names, parts, strict=True)))
        return ("attributes", *keys), _Group(make, tuple(nodes.values()))

    def _tensor(self, tensor: torch.Tensor, name: str) -> Found:
        index = self._slots.get(id(tensor))
        if index is None:
            if type(tensor) not in _TENSOR_CLASSES:
                self.refuse(name, tensor, "capture a plain torch.Tensor")
            if tensor.layout != torch.strided or tensor.dtype not in TENSOR_DTYPES:
                what = f"a tensor of {tensor.dtype} and {tensor.layout}"
                dtypes = ", ".join(TENSOR_DTYPES.values())
                raise UnsupportedProblem(
                    f"{self.label} captures {name!r}, {what}, expected a strided tensor of one of "
                    f"{dtypes}"
                )
            index = self._slots[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
            self.names.append(name)
        return ("tensor", index), _Slot(index)

    def _sequence(self, value: Any, name: str) -> Found:
        kind = type(value)
        found = [self.value(item, f"{name}[{i}]") for i, item in enumerate(value)]
        keys, nodes = [key for key, _ in found], tuple([node for _, node in found])
        if kind in (tuple, list, torch.Size):
            return (kind.__qualname__, *keys), _Group(lambda *parts: kind(parts), nodes)
        fields = getattr(kind, "_fields", None)
        if fields is None or not issubclass(kind, tuple):
            self.refuse(name, value, "use a plain tuple or list")
        return (kind.__qualname__, *fields, *keys), _Group(kind, nodes)

    def _mapping(self, value: dict[Any, Any], name: str) -> Found:
        keys = [self.value(key, f"a key of {name}")[0] for key in value]
        found = [self.value(item, f"{name}[{key!r}]") for key, item in value.items()]
        names = tuple(value)
        make = lambda *parts: dict(zip(names, parts, strict=True))
        raw = ("dict", *zip(keys, (key for key, _ in found), strict=True))
        return raw, _Group(make, tuple(node for _, node in found))

    def _group(self, title: str, make: Callable[..., Any], parts: Any, name: str) -> Found:
        found = [self.value(part, name) for part in parts]
        return (title, *(key for key, _ in found)), _Group(make, tuple(node for _, node in found))

    def _function(self, function: types.FunctionType, name: str) -> Found:
        if id(function) in self._seen:
            index, node = self._seen[id(function)]
            return ("again", index), node
        where = str(function.__globals__.get("__name__"))
        inner = getattr(function, "__wrapped__", None)
        if _is_library(where) and inner is not None:  # such as a function under @cute.jit
            return ("wrapped", where, self.value(inner, name)[0]), Leaf(function)
        if _is_library(where) and function.__closure__ is None:
            return ("function", where, function.__qualname__), Leaf(function)
        node = _Function(function.__code__, function.__name__, where)
        self._remember(function, node)
        self.codes.append(function.__code__)
        facts = _code_facts(function.__code__)
        self._check_code(facts, function)
        variables = self._globals(function, facts, node) if facts.reads_global else ()
        closure = self._closure(function, facts, node) if function.__closure__ else ()
        has_defaults = function.__defaults__ is not None or function.__kwdefaults__ is not None
        defaults = self._defaults(function, node) if has_defaults else (None,)
        return ("function", facts.digest, variables, closure, defaults), node

    def _remember(self, value: Any, node: Node) -> None:
        self._seen[id(value)] = (len(self._seen), node)
        self._alive.append(value)

    def _check_code(self, facts: _CodeFacts, function: types.FunctionType) -> None:
        for name in facts.writes:
            raise UnsupportedProblem(
                f"{self.label}: {function.__name__} assigns to {name!r}, a variable of an outer "
                "scope; a callback is traced once, so it must compute its result and nothing else"
            )
        for name in facts.imports:
            if not _is_library(name):
                raise UnsupportedProblem(
                    f"{self.label}: {function.__name__} imports {name!r}; import it outside the "
                    "callback, so that what is used of it can be keyed"
                )

    def _globals(self, function: types.FunctionType, facts: _CodeFacts, node: _Function) -> Any:
        keys: list[Any] = []
        for name, chains in facts.reads_global.items():
            if name in function.__globals__:
                value = function.__globals__[name]
                key, node.variables[name] = self._variable(value, chains, name)
            elif hasattr(builtins, name):
                if name in _FORBIDDEN_BUILTINS:
                    self.refuse(name, getattr(builtins, name), "write it without")
                key = ("builtin",)
            else:
                self.refuse(name, None, "no global has that name", is_missing=True)
            keys.append((name, key))
        return tuple(keys)

    def _closure(self, function: types.FunctionType, facts: _CodeFacts, node: _Function) -> Any:
        keys: list[Any] = []
        nodes: list[Node] = []
        cells = function.__closure__ or ()
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
            chains = facts.reads_closure.get(name)
            if chains is None:  # held for a nested class or super(), never read
                keys.append(())
                nodes.append(Leaf(None))
                continue
            try:
                value = cell.cell_contents
            except ValueError:
                self.refuse(name, None, "it has no value yet", is_missing=True)
            key, found = self._variable(value, chains, name)
            keys.append(key)
            nodes.append(found)
        node.closure = tuple(nodes)
        return tuple(keys)

    def _defaults(self, function: types.FunctionType, node: _Function) -> Any:
        keys: list[Any] = []
        if function.__defaults__ is not None:
            names = function.__code__.co_varnames[: function.__code__.co_argcount]
            names = names[len(names) - len(function.__defaults__) :]
            found = [
                self.value(value, name)
                for name, value in zip(names, function.__defaults__, strict=True)
            ]
            node.defaults = tuple(item for _, item in found)
            keys += [key for key, _ in found]
        keys.append(None)
        if function.__kwdefaults__ is not None:
            pairs = sorted(function.__kwdefaults__.items())
            named = {name: self.value(value, name) for name, value in pairs}
            node.kwdefaults = {name: item for name, (_, item) in named.items()}
            keys += [(name, key) for name, (key, _) in named.items()]
        return tuple(keys)

    def _class(self, kind: type[Any], name: str) -> tuple[Any, ...]:
        """Key a class by its name, or one of the user's by its functions and constants too."""
        title = ("class", kind.__module__, kind.__qualname__)
        if _is_library(kind.__module__):
            return title
        if id(kind) in self._seen:
            return ("again", self._seen[id(kind)][0])
        self._remember(kind, Leaf(kind))
        keys: list[Any] = []
        for base in kind.__mro__:
            if _is_library(base.__module__):
                keys.append((base.__module__, base.__qualname__))
                continue
            for attribute, value in sorted(vars(base).items()):
                value = getattr(value, "__func__", getattr(value, "fget", value))
                is_made = isinstance(value, types.FunctionType) and (
                    value.__code__.co_filename.startswith("<")  # by dataclasses and the like
                )
                is_dunder = attribute.startswith("__") and not callable(value)
                if is_made or is_dunder or attribute.startswith("_abc_") or _is_slot(value):
                    continue
                if isinstance(value, (types.FunctionType, *_LEAF_KEYS, tuple, list, dict)):
                    num_tensors = len(self.tensors)
                    keys.append((attribute, self.value(value, f"{name}.{attribute}")[0]))
                    if len(self.tensors) > num_tensors:
                        self.refuse(
                            f"{name}.{attribute}", value, "keep tensors in the attributes of self"
                        )
        return (*title, *keys)

    def _object(self, value: Any, name: str) -> Found:
        kind = type(value)
        if id(value) in self._seen:
            index, node = self._seen[id(value)]
            return ("again", index), node
        if isinstance(value, torch.nn.Module):
            self.refuse(name, value, "capture its parameters, as in table = module.table")
        is_plain = kind.__new__ is object.__new__ and not _is_library(kind.__module__)
        if not is_plain or kind.__flags__ & _IS_EXTENSION == 0:
            self.refuse(name, value, "capture the numbers and tensors that it holds")
        node = _Object(kind, {})
        self._remember(value, node)
        keys: list[Any] = [self._class(kind, name)]
        slots = [s for base in kind.__mro__ for s in _slot_names(base) if hasattr(value, s)]
        attributes = {s: getattr(value, s) for s in slots} | getattr(value, "__dict__", {})
        for attribute, item in sorted(attributes.items()):
            key, node.attributes[attribute] = self.value(item, f"{name}.{attribute}")
            keys.append((attribute, key))
        return ("object", *keys), node

    def refuse(self, name: str, value: Any, advice: str, *, is_missing: bool = False) -> NoReturn:
        """Refuse a variable, saying what it is and what to write instead."""
        if is_missing:
            raise UnsupportedProblem(f"{self.label} uses {name!r}: {advice}")
        kind = type(value)
        what = kind.__qualname__ if kind.__module__ == "builtins" else _full_name(kind)
        raise UnsupportedProblem(
            f"{self.label} captures {name!r} of type {what}, which cannot be part of a kernel's "
            f"identity: {advice}"
        )


_IS_EXTENSION = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class written in Python


def _full_name(kind: type[Any]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_slot(value: Any) -> bool:
    return isinstance(value, (types.MemberDescriptorType, types.GetSetDescriptorType))


def _slot_names(kind: type[Any]) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))
