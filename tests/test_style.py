"""Limits on size and form that no linter here checks; the reasons are in DECISIONS.md.

- A file has at most 800 lines.
- A function has at most 60 lines, or 120 where it is traced by the DSL. Its docstring does not
  count: the contract asks for long ones.
- A function has at most 8 parameters, `self` aside, unless it is public API.
- No bare assert outside traced code: `python -O` removes it, and it explains nothing to a user.
- Every module, public class, public function and public method has a docstring; a property, which
  reads as a value, may do without.

An exception is an entry in EXCEPTIONS with the number of its DECISIONS entry.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CHECKED = ("flash_cute", "bench", "examples", "tools", "tests")

MAX_FILE_LINES = 800
MAX_HOST_LINES = 60
MAX_DEVICE_LINES = 120
MAX_PARAMETERS = 8

# Files whose functions are traced by the DSL; a configuration beside a kernel is ordinary Python.
DEVICE = re.compile(r"flash_cute/(device|sm80|sm90|sm100)/(?!config\.py)")
# Files whose public functions take every option of the contract as a keyword.
PUBLIC_API = {
    "flash_cute/api.py",
    "flash_cute/flex.py",
    "flash_cute/kvcache.py",
    "flash_cute/ops.py",
}

# "file" or "file:function" -> number of the entry in DECISIONS.md that allows it
EXCEPTIONS: dict[str, int] = {
    "flash_cute/api.py:flash_attn_varlen_func": 20,
    "flash_cute/kvcache.py:flash_attn_with_kvcache": 34,
    "flash_cute/metadata.py:get_scheduler_metadata": 36,
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST, owner: str = "") -> Iterator[tuple[str, Function, bool]]:
    """Yield (dotted name, function, whether it is nested in another function)."""
    for node in ast.iter_child_nodes(tree):
        name = (
            f"{owner}.{node.name}" if hasattr(node, "name") and owner else getattr(node, "name", "")
        )
        if isinstance(node, Function):
            yield name, node, "()" in owner
            yield from functions(node, f"{name}()")
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, name)
        else:
            yield from functions(node, owner)


def code_lines(function: Function) -> int:
    """Count the lines of a function without its docstring."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def parameter_count(function: Function) -> int:
    """Count the parameters of a function, `self` and `cls` aside."""
    arguments = function.args
    named = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    extra = [a for a in (arguments.vararg, arguments.kwarg) if a]
    return len(named) + len(extra) - (named[:1] in (["self"], ["cls"]))


def is_property(node: ast.AST) -> bool:
    """Say whether a function is decorated as a property."""
    names = [ast.unparse(item).split(".")[-1] for item in getattr(node, "decorator_list", [])]
    return bool({"property", "cached_property"} & set(names))


def is_public(name: str) -> bool:
    """Say whether every part of a dotted name is public."""
    return not any(piece.startswith("_") for piece in name.split("."))


def size_breaches(path: str, source: str) -> list[tuple[str, str]]:
    """Check lengths and parameter counts; returns (exception key, message) pairs."""
    found: list[tuple[str, str]] = []
    lines = len(source.splitlines())
    if lines > MAX_FILE_LINES:
        found.append((path, f"{path} has {lines} lines, at most {MAX_FILE_LINES}"))
    limit = MAX_DEVICE_LINES if DEVICE.match(path) else MAX_HOST_LINES
    for name, function, _ in functions(ast.parse(source)):
        key = f"{path}:{name}"
        length, parameters = code_lines(function), parameter_count(function)
        if length > limit:
            found.append((key, f"{key} has {length} lines of code, at most {limit}"))
        if parameters > MAX_PARAMETERS and not (path in PUBLIC_API and is_public(name)):
            found.append((key, f"{key} has {parameters} parameters, at most {MAX_PARAMETERS}"))
    return found


def assert_breaches(path: str, source: str) -> list[tuple[str, str]]:
    """Check that host code of the package has no bare assert."""
    if not path.startswith("flash_cute/") or DEVICE.match(path):
        return []
    return [
        (path, f"{path}:{node.lineno} asserts: raise an error that names got and expected")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assert)
    ]


def docstring_breaches(path: str, source: str) -> list[tuple[str, str]]:
    """Check that what a reader may call is documented."""
    if not path.startswith("flash_cute/"):
        return []
    tree = ast.parse(source)
    found: list[tuple[str, str]] = []
    if tree.body and ast.get_docstring(tree) is None:
        found.append((path, f"{path} has no module docstring"))
    classes = [(n.name, n) for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    named = [(name, node) for name, node, is_nested in functions(tree) if not is_nested]
    for name, node in [*classes, *named]:
        if is_public(name) and not is_property(node) and ast.get_docstring(node) is None:
            key = f"{path}:{name}"
            found.append((key, f"{key} has no docstring"))
    return found


def breaches(path: str, source: str) -> list[tuple[str, str]]:
    """Return every breach in one file as (exception key, message)."""
    return [
        *size_breaches(path, source),
        *assert_breaches(path, source),
        *docstring_breaches(path, source),
    ]


def checked_files() -> list[str]:
    """List the project's Python files, relative to the root."""
    paths = (path for folder in CHECKED for path in (ROOT / folder).rglob("*.py"))
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)


@pytest.mark.parametrize("path", checked_files())
def test_file_keeps_the_limits(path: str):
    found = breaches(path, (ROOT / path).read_text())
    assert [message for key, message in found if key not in EXCEPTIONS] == []


def test_exceptions_are_needed_and_decided():
    keys = {key for path in checked_files() for key, _ in breaches(path, (ROOT / path).read_text())}
    assert set(EXCEPTIONS) <= keys, "an exception that nothing needs any more: take it out"
    numbers = {
        int(n) for n in re.findall(r"^## (\d+)\.", (ROOT / "DECISIONS.md").read_text(), re.M)
    }
    assert set(EXCEPTIONS.values()) <= numbers, "an exception without its DECISIONS entry"


def test_decisions_are_numbered_in_order():
    numbers = re.findall(r"^## (\d+)\.", (ROOT / "DECISIONS.md").read_text(), re.M)
    assert numbers == [str(n + 1) for n in range(len(numbers))] and numbers


def function_of(lines: int, head: str = "def f():", doc: str = "") -> str:
    """Write a function of so many lines; `doc` adds a docstring on top of them."""
    body = "    x = 1\n" * (lines - 1)
    return f'"""Module."""\n{head}\n{doc}{body}'


MANY = "def f(a, b, c, d, e, f, g, h, i):"
LONG_DOC = '    """What.\n' + "    More.\n" * 40 + '    """\n'
SHORT_DOC = '    """What."""\n'

BAD = {
    "long file": ("tests/x.py", "x = 1\n" * 801, "has 801 lines"),
    "long host function": ("flash_cute/cache.py", function_of(61), "has 61 lines of code"),
    "long device function": ("flash_cute/sm90/fwd.py", function_of(121), "has 121 lines of code"),
    "long configuration": ("flash_cute/sm90/config.py", function_of(61), "at most 60"),
    "long nested function": (
        "tools/x.py",
        "def f():\n    def g():\n" + "        x = 1\n" * 60,
        "f().g has 61 lines",
    ),
    "many parameters": ("flash_cute/cache.py", function_of(2, MANY), "has 9 parameters"),
    "many parameters, variadic": (
        "tools/x.py",
        "def f(a, b, c, d, e, f, g, *h, **i): pass",
        "9 param",
    ),
    "many parameters, private in the API": (
        "flash_cute/api.py",
        function_of(2, MANY.replace("f(", "_f(", 1)),
        "has 9 parameters",
    ),
    "assert": ("flash_cute/problem.py", "def _f(x):\n    assert x", "problem.py:2 asserts"),
    "assert in a configuration": ("flash_cute/sm90/config.py", "assert True", "asserts"),
    "no module docstring": ("flash_cute/cache.py", "x = 1", "no module docstring"),
    "no function docstring": ("flash_cute/cache.py", function_of(2), "f has no docstring"),
    "no method docstring": (
        "flash_cute/cache.py",
        '"""M."""\nclass A:\n    """A."""\n    def f(self): pass',
        "A.f has no docstring",
    ),
    "no class docstring": ("flash_cute/cache.py", '"""M."""\nclass A: pass', "A has no docstring"),
}


@pytest.mark.parametrize(("path", "source", "message"), BAD.values(), ids=BAD)
def test_checker_finds(path: str, source: str, message: str):
    found = [text for _, text in breaches(path, source)]
    assert any(message in text for text in found), found


GOOD = {
    "file at the limit": ("tests/x.py", "x = 1\n" * 800),
    "host function at the limit": ("flash_cute/cache.py", function_of(60, doc=SHORT_DOC)),
    "docstring does not count": ("flash_cute/cache.py", function_of(60, doc=LONG_DOC)),
    "device function at the limit": ("flash_cute/sm90/fwd.py", function_of(120, doc=SHORT_DOC)),
    "self does not count": (
        "flash_cute/cache.py",
        '"""M."""\nclass _A:\n    def f(self, a, b, c, d, e, f, g, h): pass',
    ),
    "public API": ("flash_cute/api.py", function_of(2, MANY, SHORT_DOC)),
    "trace-time assert": ("flash_cute/device/mask.py", '"""M."""\ndef _f(x):\n    assert x'),
    "assert in a test": ("tests/x.py", "assert True"),
    "private and nested need no docstring": (
        "flash_cute/cache.py",
        '"""M."""\ndef _f():\n    def g(): pass\nclass _A:\n    def __init__(self): pass',
    ),
    "property": (
        "flash_cute/cache.py",
        '"""M."""\nclass A:\n    """A."""\n    @property\n    def size(self): return 1',
    ),
    "empty __init__": ("flash_cute/sm90/__init__.py", ""),
}


@pytest.mark.parametrize(("path", "source"), GOOD.values(), ids=GOOD)
def test_checker_accepts(path: str, source: str):
    assert breaches(path, source) == []
