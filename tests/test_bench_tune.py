"""`bench tune` without a GPU: what is tried, what a launch is given, the table."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_gpu

from bench import __main__ as command
from bench import shapes, tune
from bench.report import Cell, Result
from flash_cute import compile, current, plan, selection
from flash_cute.arguments import ForwardArguments
from flash_cute.target import Target

pytestmark = pytest.mark.cpu

ARCH = "sm_90a"
GRID = shapes.fwd_grid()


@pytest.mark.parametrize("shape", GRID, ids=lambda shape: shape.id)
def test_choices_differ_in_one_thing_and_obey_the_rules(shape: shapes.Shape):
    first, *others = tune.choices(shape, ARCH)
    assert (first.name, first.section_factor) == (tune.DEFAULT, 1.0)
    assert len(others) >= 6
    assert len({choice.name for choice in others}) == len(others)
    spec = selection.key_for(shapes.problem_of(shape, "cpu"), Target.from_arch(ARCH)).spec
    for choice in others:
        config_fields = [f.name for f in fields(first.config)]
        differing = [
            name
            for name in config_fields
            if getattr(choice.config, name) != getattr(first.config, name)
        ]
        assert len(differing) + (choice.section_factor != 1.0) == 1
        assert choice.config.check(spec) == []


def test_the_default_is_what_a_call_runs():
    shape = shapes.square(4096, 2, 4, (256, 256), True)
    key = selection.key_for(shapes.problem_of(shape, "cpu"), Target.from_arch(ARCH))
    assert tune.choices(shape, ARCH)[0].config == key.config


def test_a_choice_reaches_the_kernel_and_the_launch(monkeypatch: pytest.MonkeyPatch):
    shape = shapes.square(512, 2, 4, (64, 64), True)
    keys: list[selection.KernelKey] = []
    launches: list[tuple[Any, ...]] = []

    def executable(key: selection.KernelKey) -> Any:
        keys.append(key)
        return lambda *arguments: launches.append(arguments)

    monkeypatch.setattr(compile, "executable", executable)
    monkeypatch.setattr(selection, "current_target", lambda device: Target.from_arch(ARCH))
    monkeypatch.setattr(plan, "counters_of", lambda index: toy_gpu.ToyCounters())
    monkeypatch.setattr(current, "raw_stream", lambda index: 0)
    monkeypatch.setattr(current, "is_capturing", lambda: False)
    monkeypatch.setattr(
        current,
        "empty",
        lambda size, strides, dtype: torch.empty_strided(size, strides, dtype=dtype),
    )
    q, k, v = (torch.zeros(2, 512, 4, 64, dtype=torch.bfloat16) for _ in range(3))
    choices = {choice.name: choice for choice in tune.choices(shape, ARCH)}
    sections = {}
    for name in ("default", "section x 0.5", "no turns"):
        contestant = tune.Chosen(choices[name]).contestant(shape, [(q, k, v)] * 2)
        assert contestant.name == name
        contestant.call(1)
        sections[name] = ForwardArguments(*launches[-1]).section
        assert launches[-1][:3] == (q.data_ptr(), k.data_ptr(), v.data_ptr())
    assert sections == {"default": 8, "section x 0.5": 4, "no turns": 8}
    assert [key.config.use_ping_pong for key in keys] == [True, True, False]


def test_the_table_puts_the_fastest_first_and_says_why_there_is_no_figure():
    results = {
        "default": Result(tflops=600.0, spread=0.01),
        "no turns": Result(tflops=660.0),
        "tile_n 96": Result(failed="WRONG at row 3"),
    }
    assert tune.rows(Cell(GRID[0], results))[1:] == [
        ["no turns", "660", "", "1.100"],
        ["default", "600", "1.0", "1.000"],
        ["tile_n 96", "WRONG at row 3", "", ""],
    ]


def test_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    arguments = ["tune", "--only", "d=256,causal,seqlen=16k", "--rounds", "7"]
    parsed = command.parser().parse_args([*arguments, "--out", str(tmp_path)])
    options = command.tune_options(parsed)
    assert [cell.id for cell in options.cells] == ["b2-hq8-hkv8-sq16384-sk16384-d256-bf16-causal"]
    assert (options.plan.rounds, options.plan.min_rounds) == (7, 7)
    with pytest.raises(SystemExit):
        command.main(["tune", "--only", "d=7"])
    assert "leaves no shape" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert command.main(arguments) == 2
        assert "needs a GPU" in capsys.readouterr().out
