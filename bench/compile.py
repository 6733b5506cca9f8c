"""`python -m bench compile`: time to compile each kernel, and to load it in a later process.

One process with an empty cache compiles all kernels; `rounds` later processes on the same cache
make the same calls, each starting with another kernel, so that every kernel in turn may be the
first one of a fresh process. What import statements take within a call is counted apart.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from . import machine, report
from .report import say
from .shapes import Shape

AIM_S = 0.150  # first call of a process with a filled cache, beyond imports: issue 2
CHILD_LIMIT_S = 300
DEFAULT_ARCH = "sm_90a"


@dataclass(frozen=True)
class Options:
    """The command line of `bench compile`; arch None is the GPU's own, calls included."""

    shapes: Sequence[Shape]
    rounds: int
    out: Path
    arch: str | None = None


@dataclass(frozen=True)
class Step:
    """One kernel in one process: seconds in all and in imports, and the cache's counts after it."""

    shape_id: str
    total_s: float
    imports_s: float
    counts: dict[str, int]

    @property
    def beyond_imports_s(self) -> float:
        return self.total_s - self.imports_s


class ChildError(RuntimeError):
    """A process that was started to be timed ended without figures."""


def run(options: Options) -> int:
    """Measure, print and write compile.json; 0 when later processes compile nothing, in time."""
    arch = options.arch
    if arch is None and not torch.cuda.is_available():
        arch = DEFAULT_ARCH
    facts = machine.facts()
    for line in report.facts_lines(facts):
        say(line)
    say(
        "whole first calls of flash_attn_func on this GPU"
        if arch is None
        else f"cross-compiling for {arch}: nothing is loaded onto a GPU, no kernel is executed"
    )
    try:
        with tempfile.TemporaryDirectory(prefix="flash_cute_bench_") as cache:
            cold = child(options.shapes, arch, Path(cache))
            stored = sum(f.stat().st_size for f in Path(cache).rglob("*") if f.is_file())
            later = [
                child(rotated(options.shapes, i), arch, Path(cache)) for i in range(options.rounds)
            ]
    except ChildError as error:
        say(f"FAILED: {error}")
        return 1
    for line in report.aligned(table(cold, later)):
        say(line)
    say(f"on disk: {stored / 2**20:.2f} MiB for {len(cold)} kernels")
    content = {
        "facts": facts,
        "arch": arch,
        "cold": [asdict(s) for s in cold],
        "later": [[asdict(s) for s in steps] for steps in later],
        "stored_bytes": stored,
    }
    report.write(options.out / "compile.json", json.dumps(content, indent=1))
    say(f"wrote {options.out}/compile.json")
    return verdict(later)


def rotated(shapes: Sequence[Shape], by: int) -> list[Shape]:
    """The shapes, starting with another one."""
    start = by % len(shapes)
    return [*shapes[start:], *shapes[:start]]


def child(shapes: Sequence[Shape], arch: str | None, cache: Path) -> list[Step]:
    """Run compile_child on these shapes in a fresh process with this cache directory.

    Raises: ChildError with the end of its stderr.
    """
    request = json.dumps({"shapes": [asdict(s) for s in shapes], "arch": arch})
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("FLASH_CUTE_")
    }
    environment["FLASH_CUTE_CACHE_DIR"] = str(cache)
    if arch is not None:
        environment["FLASH_CUTE_ARCH"] = arch
    command = [sys.executable, "-m", "bench.compile_child"]
    try:
        done = subprocess.run(
            command,
            input=request,
            capture_output=True,
            text=True,
            timeout=CHILD_LIMIT_S,
            cwd=machine.ROOT,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise ChildError(f"{' '.join(command)} took over {CHILD_LIMIT_S} s") from None
    return steps_of(done.returncode, done.stdout, done.stderr)


def steps_of(code: int, stdout: str, stderr: str) -> list[Step]:
    """The steps that a child printed as its last line. Raises: ChildError."""
    lines = stdout.strip().splitlines()
    if code != 0 or not lines:
        end = "\n".join(stderr.strip().splitlines()[-8:])
        raise ChildError(f"a timed process ended with code {code}:\n{end}")
    content: list[dict[str, Any]] = json.loads(lines[-1])
    return [Step(**step) for step in content]


def table(cold: Sequence[Step], later: Sequence[Sequence[Step]]) -> list[list[str]]:
    """Rows: kernel, cold seconds, then its times in later processes as their first and as a further
    kernel (medians, beyond imports)."""
    rows = [["kernel", "cold s", "imports s", "later: first ms", "further ms", "compiles"]]
    for step in cold:
        first = [s[0] for s in later if s[0].shape_id == step.shape_id]
        further = [t for s in later for t in s[1:] if t.shape_id == step.shape_id]
        seen = [t for s in later for t in s if t.shape_id == step.shape_id]
        rows.append(
            [
                step.shape_id,
                f"{step.beyond_imports_s:.2f}",
                f"{step.imports_s:.2f}",
                _milliseconds(first),
                _milliseconds(further),
                str(max((t.counts.get("compiles", 0) for t in seen), default=0)),
            ]
        )
    return rows


def _milliseconds(steps: Sequence[Step]) -> str:
    if not steps:
        return "-"
    return f"{statistics.median(s.beyond_imports_s for s in steps) * 1e3:.1f}"


def verdict(later: Sequence[Sequence[Step]]) -> int:
    """Say whether later processes compiled nothing and were ready in time; 0 when both hold."""
    compiles = max(step.counts.get("compiles", 0) for steps in later for step in steps)
    slowest = max((steps[0] for steps in later), key=lambda s: s.beyond_imports_s)
    in_time = slowest.beyond_imports_s <= AIM_S
    say(
        f"later processes: {compiles} compiles; slowest first call "
        f"{slowest.beyond_imports_s * 1e3:.0f} ms beyond {slowest.imports_s:.2f} s of imports, "
        f"{'within' if in_time else 'ABOVE'} the aim of {AIM_S * 1e3:.0f} ms"
    )
    return 0 if compiles == 0 and in_time else 1
