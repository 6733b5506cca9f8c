"""The process that `bench compile` times: a request on stdin, the steps as the last line of stdout.

It is started afresh with FLASH_CUTE_CACHE_DIR set, makes the calls asked for in their order, and
splits the time of each into import statements and the rest.
"""

from __future__ import annotations

import builtins
import dataclasses
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .shapes import Shape, problem_of


class ImportClock:
    """Adds up the time of outermost imports, by statement or by importlib.import_module."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = 0.0
        self._now, self._depth = now, 0

    def timed(self, load: Callable[..., Any]) -> Callable[..., Any]:
        """`load` with its time added, unless it runs within another import."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            begin = self._now()
            try:
                return load(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.seconds += self._now() - begin

        return wrapped

    @contextmanager
    def running(self) -> Iterator[ImportClock]:
        """Count the imports made within the block."""
        statement, function = builtins.__import__, importlib.import_module
        builtins.__import__ = self.timed(statement)
        importlib.import_module = self.timed(function)
        try:
            yield self
        finally:
            builtins.__import__ = statement
            importlib.import_module = function


def timed_step(shape: Shape, work: Callable[[], object]) -> dict[str, Any]:
    """The time of `work` in all and in imports, and the cache's counts after it."""
    from flash_cute.cache import cache_info

    with ImportClock().running() as clock:
        begin = time.perf_counter()
        work()
        total_s = time.perf_counter() - begin
    found = dataclasses.asdict(cache_info())
    counts = {name: found[name] for name in ("compiles", "memory_hits", "disk_hits", "disk_errors")}
    return {
        "shape_id": shape.id,
        "total_s": total_s,
        "imports_s": clock.seconds,
        "counts": counts,
    }


def first_call(shape: Shape) -> Callable[[], object]:
    """A whole call on the GPU, inputs made and the context up beforehand."""
    from .fwd import make_inputs
    from .peers import OURS

    call = OURS.call(shape, make_inputs(shape, 1, 0))
    torch.cuda.synchronize()

    def work() -> None:
        call(0)
        torch.cuda.synchronize()

    return work


def warm_up(shape: Shape) -> Callable[[], object]:
    """What a first call does up to the launch, for the target in FLASH_CUTE_ARCH; needs no GPU."""
    from flash_cute.compile import warmup

    problem = problem_of(shape, "cuda")
    return lambda: warmup([problem], progress=False)


def main() -> None:
    """Read the request, make its calls, print the steps."""
    request = json.load(sys.stdin)
    if request["arch"] is None:
        torch.empty(1, device="cuda")  # the context is up before anything is timed
    route = first_call if request["arch"] is None else warm_up
    steps: list[dict[str, Any]] = []
    for content in request["shapes"]:
        shape = Shape(**content)
        steps.append(timed_step(shape, route(shape)))
    sys.stdout.write("\n" + json.dumps(steps) + "\n")


if __name__ == "__main__":
    main()
