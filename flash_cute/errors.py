"""The errors of the package: what went wrong, by whose hand it can be put right.

``InvalidProblem`` and ``UnsupportedProblem`` are raised before anything is compiled or enqueued.
Each class derives from the built-in a caller would expect, so ``except ValueError`` keeps working.
The names are part of the public contract; a suffix "Error" would add nothing to them.
"""

from __future__ import annotations

from typing import NoReturn


class FlashCuteError(Exception):
    """Base of every error this package raises on purpose."""


class InvalidProblem(FlashCuteError, ValueError):  # noqa: N818
    """The request is wrong; the message names the argument, what came and what was expected."""


class UnsupportedProblem(FlashCuteError, NotImplementedError):  # noqa: N818
    """The request is fine and nothing here does it; the message says what is missing."""


class CompileDisallowed(FlashCuteError, RuntimeError):  # noqa: N818
    """A kernel had to be compiled after warm-up while FLASH_CUTE_COMPILE=error."""


class CompileError(FlashCuteError, RuntimeError):
    """The DSL refused a kernel; the message says which one, the cause has the DSL's own words."""


class CaptureError(FlashCuteError, RuntimeError):
    """The first call of a specialisation was made inside a CUDA graph capture."""


class DependencyError(FlashCuteError, ImportError):
    """A dependency is missing or outside the tested version range."""


def refuse(what: str, got: object, expected: object, why: str = "") -> NoReturn:
    """Raise InvalidProblem: `what` is `got`, expected `expected` (why)."""
    raise InvalidProblem(f"{what} is {got}, expected {expected}{f' ({why})' if why else ''}")
