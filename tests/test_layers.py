"""The layer rule of the package, checked on the imports of every file.

- A file imports from earlier layers, inside functions and under `if TYPE_CHECKING` as well.
- Within one layer it may import a neighbour as long as no cycle results (`problem` before
  `reference`, say); imports inside functions count, those for types do not, as they never run.
  Two architectures (sm80, sm90, sm100) never import one another.
- An import of a later layer is allowed inside a function only, and only where LAZY_UPWARD lists it
  with a reason.
- FORBIDDEN says which outside packages a part of the tree never imports; LAZY_OUTSIDE which ones it
  imports inside functions only, so that `import flash_cute` stays cheap.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "flash_cute"

LAYERS = {
    "errors": 0, "env": 0, "target": 0, "features": 0,
    "arguments": 1, "specialization": 1, "capture": 1, "probe": 1, "variant": 1, "block_mask": 1,
    "modifiers": 1, "split_plan": 1, "problem": 1, "reference": 1, "values": 1,
    "cache_request": 1,     "reference_cache": 1,
    "device": 2,
    "sm80": 3, "sm90": 3, "sm100": 3,
    "subclassing": 4, "selection": 4, "cache": 4, "compile": 4, "plan": 4, "launch": 4,
    "splitting": 4, "combine_plan": 4, "splits": 4, "scheduling": 4, "current": 4,
    "append_plan": 4,
    "ops": 5, "api": 5, "builder": 5, "combine": 5, "flex": 5, "kvcache": 5, "metadata": 5,
    "viz": 5, "__init__": 5, "__main__": 5,
}  # fmt: skip
ARCHITECTURES = {"sm80", "sm90", "sm100"}

# (importing module, imported module) -> why this one import may point upwards.
LAZY_UPWARD: dict[tuple[str, str], str] = {}

DSL = {"cutlass", "cuda", "tvm_ffi"}
# What a layer never imports, in no way. Pure-Python configurations are held to layer 0's rule.
FORBIDDEN = {0: {"torch"} | DSL, 1: DSL, 2: {"torch"}, 3: {"torch"}, "config": {"torch"} | DSL}
# What a layer imports inside functions only.
LAZY_OUTSIDE = {4: DSL, 5: DSL}


@dataclass(frozen=True)
class Import:
    """One import statement of a file, resolved to absolute module names."""

    module: str  # "torch.nn", "flash_cute.problem"
    line: int
    is_lazy: bool  # inside a function
    is_typing: bool  # under `if TYPE_CHECKING`


def module_name(path: Path, root: Path) -> str:
    """Return the dotted name of a file: "flash_cute.sm90.fwd"; a package is its __init__."""
    return ".".join(path.relative_to(root).with_suffix("").parts)


def imports_of(source: str, name: str, known: set[str]) -> list[Import]:
    """List the imports in `source`, the text of module `name`; `known`: the package's modules."""
    found: list[Import] = []

    def add(node: ast.stmt, module: str, lazy: bool, typing: bool) -> None:
        found.append(Import(module, node.lineno, lazy, typing))

    def visit(node: ast.AST, lazy: bool, typing: bool) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                add(node, alias.name, lazy, typing)
        elif isinstance(node, ast.ImportFrom):
            parents = name.split(".")[: -node.level] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                add(node, inner if inner in known else base, lazy, typing)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            if node.args and isinstance(node.args[0], ast.Constant):
                found.append(Import(str(node.args[0].value), node.lineno, lazy, typing))
        inside = lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for child in node.body:
                visit(child, inside, True)
            for child in node.orelse:
                visit(child, inside, typing)
            return
        for child in ast.iter_child_nodes(node):
            visit(child, inside, typing)

    visit(ast.parse(source), False, False)
    return found


def part(module: str) -> str:
    """Return the part of the package a module belongs to: "sm90" for flash_cute.sm90.fwd."""
    pieces = module.split(".")
    return pieces[1] if len(pieces) > 1 else "__init__"


def outside_violations(name: str, entry: Import) -> list[str]:
    """Check one import of another distribution."""
    top = entry.module.split(".")[0]
    layer = LAYERS[part(name)]
    where = f"{name}:{entry.line} imports {entry.module}"
    if entry.is_typing:
        return []
    kind = "config" if name.split(".")[-1] == "config" and layer == 3 else layer
    if top in FORBIDDEN.get(kind, ()):
        return [f"{where}: layer {layer} does without {top}"]
    if top in LAZY_OUTSIDE.get(layer, ()) and not entry.is_lazy:
        return [f"{where} at the top: only inside a function, to keep imports cheap"]
    return []


def inside_violations(name: str, entry: Import) -> list[str]:
    """Check one import of another module of the package."""
    source, target = part(name), part(entry.module)
    where = f"{name}:{entry.line} imports {entry.module}"
    if target not in LAYERS:
        return [f"{where}, which has no layer: add it to LAYERS"]
    if {source, target} <= ARCHITECTURES and source != target:
        return [f"{where}: architectures never import one another"]
    if LAYERS[target] > LAYERS[source]:
        if (source, target) not in LAZY_UPWARD:
            return [f"{where}: layer {LAYERS[source]} must not see {LAYERS[target]}"]
        if not entry.is_lazy:
            return [f"{where} at the top: allowed inside a function only"]
    return []


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return one import cycle as a list of modules, or an empty list."""
    done: set[str] = set()

    def walk(node: str, trail: list[str]) -> list[str]:
        if node in trail:
            return [*trail[trail.index(node) :], node]
        if node in done:
            return []
        for following in sorted(graph.get(node, ())):
            cycle = walk(following, [*trail, node])
            if cycle:
                return cycle
        done.add(node)
        return []

    for start in sorted(graph):
        cycle = walk(start, [])
        if cycle:
            return cycle
    return []


def violations(files: dict[str, str]) -> list[str]:
    """Return every breach of the rule in `files`, a map from module name to source text."""
    found: list[str] = []
    # A package is imported by its own name, its file is called __init__.
    known = set(files) | {name.removesuffix(".__init__") for name in files}
    graph: dict[str, set[str]] = {name: set() for name in files}
    for name, source in files.items():
        if part(name) not in LAYERS:
            found.append(f"{name} has no layer: add it to LAYERS and to the design")
            continue
        for entry in imports_of(source, name, known):
            if entry.module.split(".")[0] != PACKAGE:
                found += outside_violations(name, entry)
                continue
            found += inside_violations(name, entry)
            target = entry.module if entry.module in files else f"{entry.module}.__init__"
            is_listed = (part(name), part(entry.module)) in LAZY_UPWARD
            if not is_listed and not entry.is_typing and target != name:
                graph[name].add(target)
    cycle = find_cycle(graph)
    if cycle:
        found.append("import cycle: " + " -> ".join(cycle))
    return found


def package_files() -> dict[str, str]:
    """Read the package: module name -> source text."""
    paths = sorted((ROOT / PACKAGE).rglob("*.py"))
    return {module_name(path, ROOT): path.read_text() for path in paths}


def test_package_keeps_its_layers():
    assert violations(package_files()) == []


def test_lazy_upward_entries_are_used():
    files = package_files()
    known = set(files) | {name.removesuffix(".__init__") for name in files}
    used = {
        (part(name), part(entry.module))
        for name, source in files.items()
        for entry in imports_of(source, name, known)
        if entry.module.split(".")[0] == PACKAGE
    }
    assert set(LAZY_UPWARD) <= used, "an exception that nothing needs any more: take it out"
    assert all(LAZY_UPWARD.values()), "every exception states its reason"


BAD = {
    "upward": (
        {"flash_cute.problem": "from flash_cute.launch import attention", "flash_cute.launch": ""},
        "layer 1 must not see 4",
    ),
    "upward inside a function": (
        {"flash_cute.errors": "def f():\n    from . import api\n", "flash_cute.api": ""},
        "layer 0 must not see 5",
    ),
    "upward for a type": (
        {
            "flash_cute.target": "if TYPE_CHECKING:\n    from .problem import AttentionProblem",
            "flash_cute.problem": "",
        },
        "layer 0 must not see 1",
    ),
    "upward through the package": (
        {"flash_cute.problem": "import flash_cute", "flash_cute.__init__": ""},
        "layer 1 must not see 5",
    ),
    "between architectures": (
        {"flash_cute.sm100.fwd": "from ..sm90.config import x", "flash_cute.sm90.config": ""},
        "never import one another",
    ),
    "cycle in a layer": (
        {
            "flash_cute.cache": "from flash_cute import compile",
            "flash_cute.compile": "def f():\n    import flash_cute.cache",
        },
        "import cycle: flash_cute.cache -> flash_cute.compile -> flash_cute.cache",
    ),
    "torch in layer 0": ({"flash_cute.target": "def f():\n    import torch"}, "without torch"),
    "DSL in the reference": (
        {"flash_cute.reference": "def f():\n    import cutlass.cute as cute"},
        "without cutlass",
    ),
    "torch in device code": ({"flash_cute.device.mask": "from torch import nn"}, "without torch"),
    "DSL in a configuration": ({"flash_cute.sm90.config": "import cutlass"}, "without cutlass"),
    "torch in a kernel": ({"flash_cute.sm90.fwd": "import torch"}, "without torch"),
    "DSL at the top of selection": (
        {"flash_cute.selection": "import cutlass.cute"},
        "only inside a function",
    ),
    "DSL by import_module": (
        {"flash_cute.problem": "import importlib\nimportlib.import_module('cuda.bindings')"},
        "without cuda",
    ),
    "file without a layer": ({"flash_cute.utils": ""}, "has no layer"),
    "import without a layer": ({"flash_cute.api": "import flash_cute.helpers"}, "has no layer"),
}  # fmt: skip


@pytest.mark.parametrize(("files", "message"), BAD.values(), ids=BAD)
def test_checker_finds(files: dict[str, str], message: str):
    assert any(message in line for line in violations(files)), violations(files)


def test_checker_accepts_what_the_rule_allows():
    files = {
        "flash_cute.errors": "import enum",
        "flash_cute.problem": "import torch\nfrom flash_cute.errors import InvalidProblem",
        "flash_cute.reference": "import torch\nfrom .problem import AttentionProblem",
        "flash_cute.sm90.__init__": "",
        "flash_cute.sm90.config": "from flash_cute.errors import InvalidProblem",
        "flash_cute.sm90.fwd": "import cutlass\nfrom .config import FwdConfig",
        "flash_cute.selection": "if TYPE_CHECKING:\n    import cutlass\ndef f():\n    import cuda",
        "flash_cute.__init__": "from flash_cute.problem import AttentionProblem",
    }  # fmt: skip
    assert violations(files) == []


def test_listed_exception_must_be_lazy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(LAZY_UPWARD, ("errors", "env"), "not upward: never consulted")
    monkeypatch.setitem(LAZY_UPWARD, ("problem", "launch"), "an example")
    lazy = "def f():\n    from flash_cute import launch"
    eager = "from flash_cute import launch"
    assert violations({"flash_cute.problem": lazy, "flash_cute.launch": ""}) == []
    found = violations({"flash_cute.problem": eager, "flash_cute.launch": ""})
    assert found == [
        "flash_cute.problem:1 imports flash_cute.launch at the top: allowed inside a function only"
    ]
