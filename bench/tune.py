"""`python -m bench tune`: other tiles, stages, turns and head orders than the chosen ones.

Of a cell's default config one number at a time is changed; what the rules of the config allow is
gated and timed in the same rounds as the default. DECISIONS.md 17 says what was chosen.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from . import fwd, machine, peers, report, shapes, timing
from .report import Cell, say
from .shapes import Shape

DEFAULT = "default"
TILE_N_STEPS = (-48, -32, -16, 16, 32, 48)
SWITCHES = {  # what it is called without and with each of them
    "use_ping_pong": ("no turns", "turns"),
    "waits_late": ("early wait", "late wait"),
    "keeps_q": ("q not kept", "q kept"),
}
SECTION_FACTORS = (0.5, 2.0, 3.0, 4.0)


@dataclass(frozen=True)
class Choice:
    """One way to run the kernel.

    Units: section_factor multiplies the (batch, head) pairs whose keys and values share the L2.
    """

    name: str
    config: Any
    section_factor: float = 1.0


@dataclass(frozen=True)
class Options:
    """The command line of `bench tune`."""

    cells: Sequence[Shape]
    plan: timing.Plan
    out: Path
    seed: int = 0


class Chosen(peers.FlashCute):
    """Our kernel with a config and a head order of the caller's choice."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self.name = self.label = choice.name

    def call(self, shape: Shape, sets: peers.Inputs) -> Callable[[int], Any]:
        plan = plan_of(shape, sets[0], self.choice)

        def enqueue(i: int) -> Any:
            q, k, v = sets[i % len(sets)]
            return plan.run((q.data_ptr(), k.data_ptr(), v.data_ptr()), no_extras())

        return enqueue


def no_extras() -> tuple[int, ...]:
    """Addresses of the tensors that a dense call has not."""
    from flash_cute import launch

    return (0,) * len(launch.EXTRAS)


def plan_of(shape: Shape, qkv: Sequence[torch.Tensor], choice: Choice) -> Any:
    """The LaunchPlan of a shape under a choice; compiles its kernel if need be."""
    from flash_cute import compile, plan, selection
    from flash_cute.problem import AttentionInputs

    problem = shapes.problem_of(shape, qkv[0].device)
    target = selection.current_target(problem.device)
    key = replace(selection.key_for(problem, target), config=choice.config)
    q, k, v = qkv
    inputs = AttentionInputs(q=q, k=k, v=v)
    made = plan.make_plan(problem, inputs, key, target, compile.executable(key))
    return with_section(made, shape, choice.section_factor)


def with_section(plan: Any, shape: Shape, factor: float) -> Any:
    """The same launch with another number of heads in flight."""
    from flash_cute.arguments import NUM_ADDRESSES, ForwardArguments

    at = ForwardArguments._fields.index("section") - NUM_ADDRESSES
    arguments = list(plan.arguments)
    pairs = shape.batch * shape.num_heads_q
    arguments[at] = min(pairs, max(1, round(arguments[at] * factor)))
    return replace(plan, arguments=tuple(arguments))


def choices(shape: Shape, arch: str) -> list[Choice]:
    """The default of a shape on a target, then all that differs from it in one number."""
    from flash_cute import selection
    from flash_cute.target import Target

    key = selection.key_for(shapes.problem_of(shape, "cpu"), Target.from_arch(arch))
    config: Any = key.config
    changed = [(f"tile_n {config.tile_n + s}", {"tile_n": config.tile_n + s}) for s in TILE_N_STEPS]
    changed += [
        (f"{config.num_stages + s} stages", {"num_stages": config.num_stages + s}) for s in (-1, 1)
    ]
    for field, (without, with_it) in SWITCHES.items():
        if hasattr(config, field):
            is_on = not getattr(config, field)
            changed.append((with_it if is_on else without, {field: is_on}))
    found = [Choice(DEFAULT, config)]
    for name, fields in changed:
        other = replace(config, **fields)
        if other.num_stages > 1 and not other.check(key.spec):
            found.append(Choice(name, other))
    return found + [Choice(f"section x {f:g}", config, f) for f in SECTION_FACTORS]


def run(options: Options) -> int:
    """Measure, print and write tune.json; 0 when every default was right and timed."""
    if not torch.cuda.is_available():
        say("bench tune needs a GPU, torch sees none")
        return 2
    from flash_cute import selection

    facts, arch = machine.facts(), selection.current_target().arch
    for line in report.facts_lines(facts):
        say(line)
    cells: list[Cell] = []
    for number, shape in enumerate(options.cells):
        present = [Chosen(choice) for choice in choices(shape, arch)]
        rng = random.Random(f"{options.seed}-{number}")
        cell = fwd.measure(shape, present, options.plan, rng)
        if cell is None:
            return 1
        cells.append(cell)
        say(f"\n{shape.id}")
        for line in report.aligned(rows(cell)):
            say(line)
        content = {"facts": facts, "cells": [asdict(cell) for cell in cells]}
        report.write(options.out / "tune.json", json.dumps(content, indent=1, allow_nan=False))
    return 0 if all(cell.results[DEFAULT].tflops is not None for cell in cells) else 1


def rows(cell: Cell) -> list[list[str]]:
    """A cell's table: every choice, its speed, spread and ratio to the default, fastest first."""
    default = cell.results[DEFAULT].tflops
    table = [["choice", "TFLOP/s", "+-%", "/default"]]
    ordered = sorted(cell.results.items(), key=lambda item: -(item[1].tflops or 0.0))
    for name, result in ordered:
        if result.tflops is None:
            table.append([name, result.reason or "not measured", "", ""])
            continue
        spread = "" if result.spread is None else f"{100 * result.spread:.1f}"
        over = "" if default is None else f"{result.tflops / default:.3f}"
        table.append([name, f"{result.tflops:.0f}", spread, over])
    return table
