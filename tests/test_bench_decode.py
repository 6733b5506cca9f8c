"""`bench decode` without a GPU: what is asked of whom, the gate, graphs, the lines, the report."""

from __future__ import annotations

import contextlib
import json
import random
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_bench import sample_facts

from bench import __main__ as command
from bench import decode, fwd, machine, peers, shapes, steps, timing, verdicts
from bench.report import Result
from bench.shapes import Step
from flash_cute import selection
from flash_cute.target import Target

pytestmark = pytest.mark.cpu

SMALL = Step(3, 1, 256, 8, 2, 64, 64, False)


def inputs_of(step: Step, sets: int = 1, seed: int = 0) -> list[tuple[torch.Tensor, ...]]:
    """As fwd.make_inputs makes them, on the CPU: the cache is dense, whatever the step."""
    source = torch.Generator().manual_seed(seed)

    def make(rows: int, heads: int, dim: int) -> torch.Tensor:
        return torch.randn((step.batch, rows, heads, dim), generator=source).bfloat16()

    return [
        (
            make(step.seqlen_q, step.num_heads_q, step.head_dim),
            make(step.seqlen_k, step.num_heads_kv, step.head_dim),
            make(step.seqlen_k, step.num_heads_kv, step.head_dim_v),
        )
        for _ in range(sets)
    ]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps.OurStep, "device", "cpu")


# --- shapes ---------------------------------------------------------------------------------------


def test_shapes_decode_grid_is_the_issues():
    grid = shapes.decode_grid()
    assert len(grid) == len(set(grid)) == 12
    sizes = {(s.batch, s.seqlen_k // 1024) for s in grid}
    assert sizes == {(1, 8), (1, 128), (8, 8), (8, 32), (64, 4), (128, 8)}
    assert {s.num_heads_q // s.num_heads_kv for s in grid} == {4, 8}
    assert {(s.seqlen_q, s.head_dim, s.dtype, s.is_causal) for s in grid} == {
        (1, 128, "bfloat16", False)
    }
    assert max(s.cache_bytes for s in grid) == 128 * 8192 * 8 * 256 * 2
    assert grid[6].title == "8 x 32k, 32/8 heads"


@pytest.mark.parametrize(
    ("only", "count"),
    [(None, 12), ("batch=8", 4), ("batch=8,keys=32k", 2), ("hkv=4,batch=1,batch=64", 3)],
)
def test_shapes_select_steps(only: str | None, count: int):
    assert len(shapes.select_steps(shapes.decode_grid(), only)) == count


@pytest.mark.parametrize("only", ["d=128", "batch=big", "keys=7k", "page=16"])
def test_shapes_select_steps_refuses(only: str):
    with pytest.raises(ValueError, match="--only"):
        shapes.select_steps(shapes.decode_grid(), only)


# --- steps ----------------------------------------------------------------------------------------

WAYS = {
    "dense": SMALL,
    "pages of 16": replace(SMALL, page_size=16),
    "pages of 1": replace(SMALL, page_size=1),
    "4 queries": replace(SMALL, seqlen_q=4, is_causal=True),
}


@pytest.mark.parametrize("name", WAYS)
def test_steps_our_call_is_what_the_gate_checks(on_cpu: None, name: str):
    step = WAYS[name]
    assert decode.OURS.refuses(step) is None
    sets = inputs_of(replace(step, seqlen_q=16), 2)
    call = decode.OURS.call(step, sets)
    for number in range(3):
        out = decode.OURS.output(call(number))
        assert out.shape == (3, step.seqlen_q, 8, 64)
        verdict = steps.judge(out, sets[number % 2], step, random.Random(0))
        assert verdict.is_right, str(verdict)
        for wrong in (out.roll(1, dims=-1), out * 1.1):
            assert not steps.judge(wrong, sets[number % 2], step, random.Random(0)).is_right


def test_steps_gate_sees_the_order_of_pages_and_what_is_not_finite(on_cpu: None):
    paged, (one,) = WAYS["pages of 16"], inputs_of(SMALL)
    out = decode.OURS.call(SMALL, [one])(0)
    assert not steps.judge(out, one, paged, random.Random(0)).is_right
    table = steps.page_table(paged, "cpu")
    assert table is not None and table.shape == (3, 16)
    assert sorted(table.flatten().tolist()) == list(range(48))
    right = decode.OURS.call(paged, [one])(0)
    right[2, 0, 3, 5] = float("nan")  # of a sequence that may not be sampled
    assert "not finite" in steps.judge(right, one, paged, random.Random(0)).where
    assert steps.sampled_sequences(1, random.Random(0)) == [0]


def test_steps_fa4_is_asked_for_the_same(monkeypatch: pytest.MonkeyPatch):
    asked: list[dict[str, Any]] = []

    def attend(q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, None]:
        asked.append({"q": q.shape, "k": k.shape, **options})
        return q, None

    fake = types.SimpleNamespace(flash_attn_varlen_func=attend)
    monkeypatch.setattr(steps.importlib, "import_module", lambda name: fake)
    (fa4, _) = decode.PEERS
    sets = inputs_of(replace(SMALL, seqlen_q=16))
    for step in (SMALL, replace(SMALL, page_size=64)):
        assert fa4.output(fa4.call(step, sets)(0)).shape == (3, 1, 8, 64)
    dense, paged = asked
    assert (dense["k"], dense["page_table"]) == ((3, 256, 2, 64), None)
    assert (paged["k"], paged["page_table"].shape) == ((12, 64, 2, 64), (3, 4))
    for one in asked:
        assert one["seqused_k"].tolist() == [256] * 3
        assert (one["max_seqlen_k"], one["num_splits"], one["causal"]) == (256, 1, False)


@pytest.mark.parametrize("way", ["dense", "pages of 16"])
def test_steps_sdpa_computes_the_same_from_keys_gathered_from_pages(way: str):
    (_, sdpa) = decode.PEERS
    step = WAYS[way]
    sets = inputs_of(replace(SMALL, seqlen_q=max(decode.GUESSES)))  # as all contestants get them
    assert sdpa.refuses(step) is None
    with sdpa.scope():
        out = sdpa.output(sdpa.call(step, sets)(0))
    assert steps.judge(out, sets[0], step, random.Random(0)).is_right


def test_steps_sdpa_has_another_causal_mask():
    (_, sdpa) = decode.PEERS
    assert "top-left" in str(sdpa.refuses(WAYS["4 queries"]))


def test_steps_problem_is_that_of_the_call(on_cpu: None, monkeypatch: pytest.MonkeyPatch):
    from flash_cute import kvcache

    found = []
    attend = kvcache.api.attend

    def spy(problem: Any, *rest: Any) -> Any:
        found.append(problem)
        return attend(problem, *rest)

    monkeypatch.setattr(kvcache.api, "attend", spy)
    for step in WAYS.values():
        decode.OURS.call(step, inputs_of(replace(step, seqlen_q=16)))(0)
        assert found[-1] == steps.OurStep().problem(step)


def test_steps_work_on_a_hopper_gpu(monkeypatch: pytest.MonkeyPatch):
    """All but pages of less than 8 keys are there; a kernel of each is known ahead."""
    monkeypatch.setattr(selection, "target_of", lambda problem: Target.from_arch("sm_90a"))
    for step in shapes.decode_grid():
        for name, one in decode.layouts(step).items():
            assert decode.OURS.refuses(one) is None, name


# --- graphs ---------------------------------------------------------------------------------------


class FakeCuda:
    """Graphs that note what is captured, and a clock that moves when they are replayed."""

    def __init__(self, patch: pytest.MonkeyPatch, seconds: float) -> None:
        self.captured: list[int] = []
        self.replays, self.clock_s, fake = 0, 0.0, self

        class Graph:
            def replay(self) -> None:
                fake.replays += 1
                fake.clock_s += seconds * len(fake.captured)

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at_s = 0.0

            def record(self) -> None:
                self.at_s = fake.clock_s

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, other: Event) -> float:
                return (other.at_s - self.at_s) * 1e3

        patch.setattr(torch.cuda, "CUDAGraph", Graph)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
        patch.setattr(torch.cuda, "synchronize", lambda: None)


def test_timing_graph_clock_times_whole_replays(monkeypatch: pytest.MonkeyPatch):
    cuda = FakeCuda(monkeypatch, 1e-3)
    contestant = timing.Contestant("ours", cuda.captured.append, timing.cuda_events)
    clock = timing.GraphClock(contestant, 6)
    assert cuda.captured == [0, 1, 2, 3, 4, 5]
    sample = clock(contestant, 13)
    assert cuda.replays == 1 + 3, "one ahead of the first event"
    assert sample.seconds == pytest.approx(1e-3) and sample.host_seconds is None
    assert clock(contestant, 1).seconds == pytest.approx(1e-3)


@pytest.mark.parametrize(("sets", "calls"), [(2, 4), (3, 6), (5, 5)])
def test_graph_holds_whole_turns_of_the_input_sets(sets: int, calls: int):
    (step,) = shapes.select_steps(shapes.decode_grid(), "batch=8,keys=32k,hkv=8")
    assert decode.graph_calls(step, sets) == calls  # 1.07 GB each
    assert decode.graph_calls(SMALL, 7) == 70


# --- lines ----------------------------------------------------------------------------------------


def step_of(only: str) -> Step:
    (step,) = shapes.select_steps(shapes.decode_grid(), only)
    return step


def test_lines_have_the_issues_aims():
    group = decode.group_of(step_of("batch=8,keys=32k,hkv=8"), decode.PEERS)
    names = {entry.name for entry in group.entries} | {decode.COPY}
    assert len(names) == len(group.entries) + 1
    claims = {(line.ours, line.base): line for line in group.lines}
    assert len(claims) == len(group.lines) == 4 + 4 + 4 + 1 + 3
    for line in group.lines:
        assert {line.ours, line.base} <= names
    for name in ("dense", "pages of 16", "pages of 64", "pages of 128"):
        assert (claims[name, "copy"].aim, claims[name, "copy"].is_share) == (0.9, False)
        assert claims[name, f"FA4 {name}"].aim == claims[name, f"SDPA {name}"].aim == 1.0
    for count in (4, 8, 16):
        line = claims[f"{count} queries", "dense"]
        assert (line.aim, line.is_share) == (1.15, True)
    line = claims["pages of 1", "pages of 128"]
    assert (line.aim, line.is_share) == (1.5, True)
    guess = next(entry.work for entry in group.entries if entry.name == "8 queries")
    assert guess.seqlen_q == 8 and guess.is_causal


def test_lines_of_small_caches_claim_no_bandwidth_and_peers_are_chosen():
    group = decode.group_of(step_of("batch=8,keys=8k,hkv=8"), decode.choose("sdpa"))
    assert not [line for line in group.lines if line.base == decode.COPY]
    assert {entry.peer.name for entry in group.entries} == {"flash_cute", "sdpa"}
    assert len(group.lines) == 4 + 1 + 3
    assert decode.choose("none") == [] and len(decode.choose(None)) == 2
    with pytest.raises(ValueError, match="'fa3', expected some of fa4, sdpa"):
        decode.choose("fa3")


def test_lines_compare_bytes_with_those_of_a_copy():
    step = step_of("batch=128,hkv=8")  # 4.29 GB
    line = next(one for one in decode.group_of(step, ()).lines if one.base == decode.COPY)
    copied_us = 2 * steps.COPY_BYTES / 4e12 * 1e6  # 4 TB/s
    ours_us = step.cache_bytes / 3.8e12 * 1e6
    results = {"dense": Result(median_us=ours_us), "copy": Result(median_us=copied_us)}
    found = verdicts.outcome(line, results)
    assert found.value == pytest.approx(0.95) and found.word == "pass"
    assert decode.bandwidth(step, "dense", results) == pytest.approx(3.8)
    assert decode.bandwidth(step, "copy", results) == pytest.approx(4.0)
    assert decode.bandwidth(step, "pages of 16", results) is None


def test_lines_are_told_by_aim_and_one_by_one_where_they_fail():
    step = replace(SMALL, batch=8, seqlen_k=32768)
    group = decode.group_of(step, decode.choose("fa4"))
    results = {entry.name: Result(median_us=100.0) for entry in group.entries}
    results |= {"pages of 64": Result(median_us=200.0), "pages of 1": Result(refused="none yet")}
    outcomes = [verdicts.outcome(line, results) for line in group.lines]
    lines = verdicts.aim_lines(outcomes)
    title = "8 x 32k, 8/2 heads"
    assert lines == [
        f"over FA4: aim at least 1.00: 3 of 4 pass, worst 0.500 ({title}: pages of 64)",
        "over pages of 128: aim at most 1.50: 0 of 0 pass",
        f"over one query: aim at most 1.15: 3 of 3 pass, worst 1.000 ({title}: 4 queries)",
        f"FAIL: {title}: pages of 64 over FA4: 0.500, aim at least 1.000",
        "8 lines: 6 passed, 1 failed; not counted: 1 refused, 0 not measured",
    ]
    table = decode.rows(step, group, results)
    by_name = {row[0]: row for row in table}
    assert by_name["pages of 64"][1:6] == ["200.0", "0.67", "-", "0.500", "-"]
    assert by_name["4 queries"][4:6] == ["-", "1.000"]
    assert by_name["pages of 1"] == ["pages of 1", "-"]


# --- run ------------------------------------------------------------------------------------------


class FakeStep(steps.OurStep):
    """Computes with our reference, in a time that is given by the kind of step."""

    device = "cpu"

    def __init__(self, name: str, factor: float) -> None:
        self.name = self.label = name
        self.factor, self.is_wrong = factor, False

    def call(self, shape: Any, sets: Any) -> Any:
        call = super().call(shape, sets)
        return lambda i: call(i) * (1.5 if self.is_wrong else 1.0)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Ours and a peer on the CPU, with made-up times: 1 µs for a key, more with pages."""
    ours, theirs = FakeStep("flash_cute", 1.0), FakeStep("FA4", 2.0)

    def seconds(contestant: timing.Contestant) -> float:
        if contestant.name == decode.COPY:
            return 2 * steps.COPY_BYTES / 1e12
        return 1e-6 * (2.0 if contestant.name.startswith("FA4") else 1.0)

    class Clock:
        def __init__(self, contestant: timing.Contestant, calls: int) -> None:
            if contestant.name == "8 queries":
                raise RuntimeError("no capture")

        def __call__(self, contestant: timing.Contestant, count: int) -> timing.Sample:
            return timing.Sample(seconds(contestant), None)

    events = lambda contestant, count: timing.Sample(seconds(contestant), None)
    copy = timing.Contestant(decode.COPY, lambda i: None, events)
    monkeypatch.setattr(FakeStep, "stopwatch", staticmethod(events))
    monkeypatch.setattr(decode, "OURS", ours)
    monkeypatch.setattr(decode, "copy_contestant", lambda: copy)
    monkeypatch.setattr(decode, "compile_ours", lambda grid, aims: None)
    monkeypatch.setattr(selection, "KERNELS", selection.KERNELS)  # which a run may change
    monkeypatch.setenv("FLASH_CUTE_ARCH", "sm_90a")
    monkeypatch.setattr(timing, "GraphClock", Clock)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(fwd, "make_inputs", lambda step, sets, seed: inputs_of(step, sets, seed))
    monkeypatch.setattr(fwd, "poison_free_memory", lambda shape: None)
    monkeypatch.setattr(machine, "facts", sample_facts)
    monkeypatch.setattr(machine, "l2_bytes", lambda: 1)
    monkeypatch.setattr(machine, "_query", lambda fields: "1980, 3201, 40, 500, 0x0")
    return types.SimpleNamespace(ours=ours, theirs=theirs)


def run(fake: Any, tmp_path: Any) -> tuple[int, dict[str, Any]]:
    options = decode.Options([SMALL], [fake.theirs], timing.Plan(rounds=3), tmp_path)
    return decode.run(options), json.loads((tmp_path / "decode.json").read_text())


def test_run_of_another_kernel_has_its_own_aims_and_file(
    fake: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(Step, "cache_bytes", 2 * 10**9)
    plan = timing.Plan(rounds=3)
    code = decode.run(decode.Options([SMALL], [], plan, tmp_path, arch="sm80"))
    content = json.loads((tmp_path / "decode_sm80.json").read_text())
    assert content["kernels"] == ["FlashAttentionForwardSm80"]
    assert {(line["base"], line["aim"]) for line in content["lines"]} == {("copy", 0.85)}
    (cell,) = content["contestants"].values()
    assert set(cell) == {"dense", "pages of 16", "pages of 64", "pages of 128", "copy"}
    assert code == 0 and "ours: FlashAttentionForwardSm80" in capsys.readouterr().out


def test_run_measures_and_writes(fake: Any, tmp_path: Any, capsys: pytest.CaptureFixture[str]):
    code, content = run(fake, tmp_path)
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert {line["verdict"] for line in content["lines"]} == {"pass"}
    (cell,) = content["contestants"].values()
    assert cell["dense"]["gate"].startswith("right") and cell["copy"]["gate"] == "not gated"
    assert "8 queries: timed without a graph: RuntimeError: no capture" in printed
    assert "over FA4: aim at least 1.00: 4 of 4 pass, worst 2.000" in printed
    assert printed.splitlines()[-2] == (
        "8 lines: 8 passed, 0 failed; not counted: 0 refused, 0 not measured"
    )


@pytest.mark.parametrize("side", ["ours", "theirs"])
def test_run_times_nothing_that_is_wrong(fake: Any, side: str, tmp_path: Any):
    getattr(fake, side).is_wrong = True
    code, content = run(fake, tmp_path)
    words = {line["base"]: line["verdict"] for line in content["lines"]}
    assert code == (1 if side == "ours" else 0)
    assert words["FA4 dense"] == ("FAIL" if side == "ours" else "not measured")
    assert words["dense"] == ("FAIL" if side == "ours" else "pass")


def test_run_makes_our_calls_before_a_peer_is_imported(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    made, warmed = [], []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(fwd, "make_inputs", lambda step, sets, seed: inputs_of(step))
    monkeypatch.setattr("flash_cute.warmup", lambda problems, **how: warmed.extend(problems))
    monkeypatch.setattr(decode.OURS, "call", lambda step, sets: lambda i: made.append(step))
    decode.compile_ours([SMALL])
    assert len(made) == len(warmed) == 8
    assert "8 calls ready" in capsys.readouterr().out


def test_run_without_a_gpu_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["decode", "--out", str(tmp_path)]) == 2
    assert "needs a GPU" in capsys.readouterr().out


def test_command_line_of_decode(capsys: pytest.CaptureFixture[str]):
    arguments = command.parser().parse_args(
        ["decode", "--only", "batch=8,hkv=4", "--rounds", "3", "--peers", "sdpa"]
    )
    options = command.decode_options(arguments)
    assert len(options.steps) == 2 and [p.name for p in options.peers] == ["sdpa"]
    assert (options.plan.rounds, options.plan.min_rounds) == (3, 3)
    assert options.plan.sample_s == decode.PLAN.sample_s
    sm80 = command.decode_options(command.parser().parse_args(["decode", "--arch", "sm80"]))
    assert (sm80.arch, list(sm80.peers), len(sm80.steps)) == ("sm80", [], 4)
    assert min(step.cache_bytes for step in sm80.steps) >= 10**9
    for bad in (["--only", "keys=7k"], ["--peers", "fa9"], ["--arch", "sm70"]):
        with pytest.raises(SystemExit):
            command.main(["decode", *bad])
        assert bad[0] in capsys.readouterr().err
    assert peers.OURS.name == decode.OURS.name
