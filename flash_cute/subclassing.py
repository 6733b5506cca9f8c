"""Kernel classes that users derive from the package's own: what they lack, and their mistakes.

A derived class overrides steps that compiled code is traced from, so that a mistake in one shows
deep inside the DSL. Here it gets the class, the file and the line. Nothing here imports the DSL.
"""

from __future__ import annotations

import inspect
import linecache
import re
import types
from pathlib import Path
from typing import Any, cast

from flash_cute.errors import CompileError, FlashCuteError, InvalidProblem, refuse
from flash_cute.features import Feature

_PACKAGE = Path(__file__).resolve().parent


def lacked_features(kernel: type[Any]) -> frozenset[Feature]:
    """Return what a kernel class says it cannot do, of what its base can.

    Raises: InvalidProblem when `lacks` is no set of features.
    """
    lacks = cast(object, kernel.lacks)
    if isinstance(lacks, (set, frozenset)):
        features = cast("frozenset[object]", frozenset(lacks))
        if all(isinstance(feature, Feature) for feature in features):
            return cast("frozenset[Feature]", features)
    refuse(f"{kernel.__name__}.lacks", repr(lacks), "a set of flash_cute.Feature")


def build(kernel: type[Any], base: type[Any], spec: Any, config: Any) -> Any:
    """Make the kernel object of a class derived from `base`.

    Raises: CompileError for a step that the base cannot call, and for what its __init__ raises;
            InvalidProblem when its __init__ changes spec or config, which launches go by, and for
            a name that cannot be the symbol's.
    """
    if re.fullmatch(r"[A-Za-z_]\w*", kernel.__name__, re.ASCII) is None:
        refuse("the kernel class's name", repr(kernel.__name__), "letters of ASCII, digits and _")
    check_overrides(kernel, base)
    try:
        made = kernel(spec, config)
    except FlashCuteError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise CompileError(
            f"making a {kernel.__name__} failed{place_of(error, kernel)}: {what}"
        ) from error
    for name, given in (("spec", spec), ("config", config)):
        if getattr(made, name, None) != given:
            raise InvalidProblem(
                f"{kernel.__name__}.__init__ leaves self.{name} at {getattr(made, name, None)}, "
                f"expected {given}: a class chooses its config in config_for"
            )
    return made


def check_overrides(kernel: type[Any], base: type[Any]) -> None:
    """Check that every method that overrides one of `base` can be called as that one is.

    Raises: CompileError naming the class, the place and both signatures.
    """
    for owner in kernel.__mro__:
        if owner is base:
            return
        for name, override in vars(owner).items():
            original = inspect.getattr_static(base, name, None)
            is_step = isinstance(original, types.FunctionType) and not name.startswith("__")
            if is_step and not _accepts(override, original):
                raise CompileError(
                    f"{owner.__name__}.{name}{_defined_at(override)} takes "
                    f"{_parameters(override)}, expected {_parameters(original)}, as "
                    f"{base.__name__}.{name} does"
                )


def _accepts(override: object, original: types.FunctionType) -> bool:
    """Whether a method takes what the steps pass to the one that it overrides, by position."""
    if not callable(override):
        return False
    given = inspect.signature(original).parameters
    try:
        # A staticmethod would be called without `self`.
        inspect.signature(override).bind(*given)
    except (TypeError, ValueError):
        return False
    return isinstance(override, types.FunctionType)


def _parameters(function: object) -> str:
    try:
        signature = inspect.signature(cast(Any, function))
    except (TypeError, ValueError):
        return repr(function)
    empty = inspect.Parameter.empty
    bare = [parameter.replace(annotation=empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=empty))


def _defined_at(function: object) -> str:
    code = getattr(inspect.unwrap(cast(Any, function)), "__code__", None)
    return "" if code is None else f" at {code.co_filename}:{code.co_firstlineno}"


def place_of(error: BaseException, kernel: type[Any]) -> str:
    """Say where in a user's class an error came from: " in Mine, file:line `source`", or nothing.

    The innermost line of the files that hold the class and those it derives from, the package's
    own aside. The DSL rewrites functions under ``@cute.jit``, and keeps their files and lines.
    """
    files = {
        code.co_filename
        for owner in kernel.__mro__
        for value in vars(owner).values()
        if (code := getattr(inspect.unwrap(value), "__code__", None)) is not None
    }
    files = {name for name in files if not Path(name).is_relative_to(_PACKAGE)}
    found, raised = "", cast("BaseException | None", error)
    while raised is not None and not found:
        frame = raised.__traceback__
        while frame is not None:
            name, line = frame.tb_frame.f_code.co_filename, frame.tb_lineno
            if name in files:
                source = linecache.getline(name, line).strip()
                found = f" in {kernel.__name__}, {name}:{line} `{source}`"
            frame = frame.tb_next
        # Some errors the DSL raises anew, from outside; what it was given hangs behind.
        raised = raised.__cause__ or raised.__context__
    return found
