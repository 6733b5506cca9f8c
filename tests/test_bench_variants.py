"""`bench variants` without a GPU: what is asked of whom, the gate, the verdicts, the report."""

from __future__ import annotations

import json
import random
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_bench import sample_facts

from bench import __main__ as command
from bench import (
    builders,
    fwd,
    gate,
    machine,
    peers,
    report,
    shapes,
    timing,
    variants,
    verdicts,
    works,
)
from bench.report import Result

pytestmark = pytest.mark.cpu

SEQLEN = 512
LENGTHS = (130, 7, 64, 250)


def groups() -> list[variants.Group]:
    """All groups, small and on the CPU."""
    return [
        variants.callbacks_group("cpu", SEQLEN),
        variants.density_group("cpu", SEQLEN),
        variants.window_group("cpu", SEQLEN),
        variants.varlen_group("cpu", LENGTHS),
        variants.builder_group("cpu", SEQLEN),
    ]


def small(work: works.Work) -> works.Work:
    """The same with one sequence and two heads, so that a CPU can do it."""
    return replace(work, batch=1, num_heads_q=2, num_heads_kv=2)


def inputs_of(work: works.Work) -> tuple[torch.Tensor, ...]:
    source = torch.Generator().manual_seed(0)
    size = (work.batch, work.seqlen_q, work.num_heads_q, work.head_dim)
    q, k, v = (torch.randn(size, generator=source).bfloat16() for _ in range(3))
    return q, k, v


OURS = [
    pytest.param(small(entry.work), id=entry.name)
    for group in groups()
    for entry in group.entries
    if entry.peer is variants.OURS
]


# --- works ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("work", OURS)
def test_works_our_call_is_what_the_gate_checks(work: works.Work, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(works.OurVariant, "device", "cpu")
    assert variants.OURS.refuses(work) is None
    inputs = inputs_of(work)
    out = variants.OURS.output(variants.OURS.call(work, [inputs])(0))
    verdict = works.judge(out, inputs, work, random.Random(0))
    assert verdict.is_right, str(verdict)
    for wrong in (out.roll(1, dims=1), out * 1.1):
        assert not works.judge(wrong, inputs, work, random.Random(0)).is_right


@pytest.mark.parametrize("work", OURS)
def test_works_share_is_the_visible_part(work: works.Work):
    parts = work.lengths or (work.seqlen_q,)
    visible = 0
    for length in parts:
        index = torch.arange(length)
        scores = torch.zeros(length, length)
        zero = torch.tensor(0)
        seen = replace(work, score_mod=None).change(scores, zero, zero, index[:, None], index)
        visible += int((seen == 0).sum())
    share = visible / work.seqlen_q**2
    assert work.share == pytest.approx(share, rel=0.02)  # causal is counted as a half
    full = 4 * work.batch * work.num_heads_q * work.seqlen_q**2 * work.head_dim
    assert work.flops == pytest.approx(full * work.share)


def test_works_shapes_are_those_of_the_issue():
    assert sum(shapes.VARLEN_LENGTHS) == shapes.TOKENS
    assert (min(shapes.VARLEN_LENGTHS), max(shapes.VARLEN_LENGTHS)) == (128, 8192)
    assert min(shapes.DENSITIES) == 0.05 and max(shapes.DENSITIES) == 0.9
    work = works.work(128, 8192, is_causal=True)
    assert (work.batch, work.seqlen_q, work.num_heads_q) == (4, 8192, 16)


@pytest.mark.parametrize("density", shapes.DENSITIES)
def test_works_random_blocks_have_the_density_that_they_say(density: float):
    mask_mod, actual = works.random_blocks(8192, density, "cpu")
    index = torch.arange(0, 8192, 128)
    blocks = mask_mod(0, 0, index[:, None], index)
    assert blocks.float().mean().item() == pytest.approx(actual)
    assert abs(actual - density) < 1 / 64
    assert (blocks.sum(1) == blocks[0].sum()).all(), "as many in every row"
    block_mask = works.block_mask(mask_mod, 8192, "cpu")
    assert int(block_mask.kv_num_blocks.sum()) == 0, "all of them are full"
    assert int(block_mask.full_kv_num_blocks.sum()) == int(blocks.sum())


def test_works_sampled_sequences_have_the_ends_and_the_extremes():
    chosen = works.sampled_sequences(shapes.VARLEN_LENGTHS, random.Random(0))
    assert {0, 2, len(shapes.VARLEN_LENGTHS) - 1} <= set(chosen) and len(chosen) == 5
    assert works.sampled_sequences((3, 3), random.Random(0)) == [0, 1]


def test_works_judge_finds_a_wrong_sequence():
    (group,) = [g for g in groups() if g.name == "varlen"]
    work = small(group.entries[0].work)
    inputs = inputs_of(work)
    out = variants.OURS.output(variants.OURS.call(work, [inputs])(0)).clone()
    out[:, 130:137] *= 1.5
    verdict = works.judge(out, inputs, work, random.Random(0))
    assert not verdict.is_right and verdict.where.startswith("sequence 1, ")


def test_works_fa4_is_asked_in_the_same_words(monkeypatch: pytest.MonkeyPatch):
    asked: list[dict[str, Any]] = []

    def attend(q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, None]:
        asked.append({"dim": q.dim(), **options})
        return q, None

    fake = types.SimpleNamespace(flash_attn_func=attend, flash_attn_varlen_func=attend)
    monkeypatch.setattr(works.importlib, "import_module", lambda name: fake)
    for group in groups():
        for entry in group.entries:
            if entry.peer is variants.FA4:
                work = small(entry.work)
                result = entry.peer.call(work, [inputs_of(work)])(0)
                assert entry.peer.output(result).shape[0] == 1
    window, full, causal = asked
    assert window == {"dim": 4, "window_size": (128, 0)}
    assert full["cu_seqlens_q"].tolist() == [0, 130, 137, 201, 451]
    assert (full["dim"], full["max_seqlen_k"], "causal" in full) == (3, 250, False)
    assert causal["causal"] is True
    alibi = groups()[0].entries[1].work
    assert "another form" in variants.FA4.refuses(alibi)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_works_flex_computes_the_same(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    entry = groups()[0].entries[3]
    assert entry.peer is variants.FLEX
    work = replace(small(entry.work), seqlen_q=128, seqlen_k=128)
    inputs = inputs_of(work)
    out = variants.FLEX.output(variants.FLEX.call(work, [inputs])(0))
    assert works.judge(out, inputs, work, random.Random(0)).is_right


def test_peers_flex_is_there_on_request_only(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (flex,) = peers.choose("flex")
    assert flex.missing() == "torch sees no GPU"
    assert flex not in peers.choose(None)


# --- lines ----------------------------------------------------------------------------------------


def test_lines_name_contestants_and_have_the_issues_aims():
    aims: dict[str, float] = {}
    for group in groups():
        by_name = {entry.name: entry for entry in group.entries}
        assert len(by_name) == len(group.entries)
        for line in group.lines:
            if group.own is None:
                assert by_name[line.ours].peer is variants.OURS and line.base in by_name
            aims[line.name] = line.aim
    assert aims["causal + ALiBi over plain causal"] == 0.90
    assert aims["causal + ALiBi over FlexAttention"] == 1.5
    assert aims["causal as mask_mod + block mask over built-in"] == 0.95
    assert aims["window 128 over FA4"] == 1.3
    assert aims["varlen full over FA4"] == aims["varlen causal over FA4"] == 1.0
    assert [aim for name, aim in aims.items() if name.startswith("block_mask_from")] == [1.0] * 2
    assert len([name for name in aims if "density" in name]) == len(shapes.DENSITIES)
    assert variants.density_aim(0.5) == pytest.approx(0.6)


SPEED = verdicts.Line("line", "ours", "base", 1.5)
SHARE = verdicts.Line("line", "ours", "base", 0.6, is_share=True)


def figures(ours: float, base: float) -> dict[str, Result]:
    return {"ours": Result(tflops=1.0, median_us=ours), "base": Result(1.0, median_us=base)}


@pytest.mark.parametrize(
    ("line", "results", "word", "value"),
    [
        (SPEED, figures(10.0, 15.0), "pass", 1.5),
        (SPEED, figures(10.0, 14.0), "FAIL", 1.4),
        (SHARE, figures(6.0, 10.0), "pass", 0.6),
        (SHARE, figures(7.0, 10.0), "FAIL", 0.7),
        (SPEED, {**figures(1.0, 1.0), "ours": Result(refused="no masks")}, "refused", None),
        (SPEED, {**figures(1.0, 1.0), "ours": Result(failed="WRONG")}, "FAIL", None),
        (SPEED, {**figures(1.0, 1.0), "base": Result(refused="gone")}, "not measured", None),
        (SPEED, {**figures(1.0, 1.0), "base": Result(failed="WRONG")}, "not measured", None),
        (SPEED, {}, "not measured", None),
    ],
)
def test_lines_outcome(line: Any, results: dict[str, Result], word: str, value: float | None):
    found = verdicts.outcome(line, results)
    assert found.word == word and found.value == (None if value is None else pytest.approx(value))
    assert bool(found.reason) == (value is None)
    text = verdicts.sentence(found)
    assert text.startswith(f"{word}: line:") and "aim at" in text and found.reason in text


def test_lines_summary_counts_only_what_was_measured():
    words = ("pass", "pass", "FAIL", "refused", "not measured")
    found = [verdicts.Outcome(SPEED, word) for word in words]
    assert [one.is_counted for one in found] == [True, True, True, False, False]
    assert verdicts.summary(found) == (
        "5 lines: 2 passed, 1 failed; not counted: 1 refused, 1 not measured"
    )


# --- builders -------------------------------------------------------------------------------------


def test_builders_are_judged_by_their_lists_and_timed():
    right, contestants = builders.calls(SEQLEN, "cpu")
    assert set(contestants) == {builders.OURS, builders.FLAG, builders.COMPILED}
    shifted = contestants[builders.OURS]()
    shifted.kv_num_blocks += 1

    def broken() -> Any:
        raise RuntimeError("no block mask")

    calls = {builders.OURS: contestants[builders.OURS], "off": lambda: shifted, "broken": broken}
    watch = lambda contestant, count: timing.Sample(2e-3, 1e-3)
    found = builders.results(right, calls, timing.Plan(rounds=3), random.Random(0), watch)
    assert found[builders.OURS].median_us == pytest.approx(2000)
    assert found["off"].failed == "WRONG: kv_num_blocks differ"
    assert "no block mask" in str(found["broken"].failed)
    group = variants.builder_group("cpu", SEQLEN)
    rows = variants.contestant_rows(group, found)
    assert rows[1:] == [["off", "FAILED", "-", "-"], ["broken", "FAILED", "-", "-"]] + [
        [builders.OURS, "2.000", "-", "0.0"]
    ]


def test_builders_documents_are_blocks_on_the_diagonal():
    mask_mod = builders.documents(4096, "cpu")
    index = torch.arange(4096)
    shown = mask_mod(0, 0, index[:, None], index)
    assert torch.equal(shown, shown.T) and shown.diagonal().all()
    assert 100 / 4096 < shown.float().mean().item() < 1500 / 4096


# --- run ------------------------------------------------------------------------------------------


class FakePeer(peers.Peer):
    """Computes with our reference, and takes a time that is given by the contestant's name."""

    package = "torch"

    def __init__(self, name: str, seconds: float, refusal: str | None = None) -> None:
        self.name = self.label = name
        self.refusal = refusal
        self.stopwatch = lambda contestant, count: timing.Sample(seconds, None)
        self.is_missing: str | None = None
        self.is_wrong = False

    def missing(self) -> str | None:
        return self.is_missing

    def refuses(self, shape: shapes.Shape) -> str | None:
        return self.refusal

    def call(self, shape: shapes.Shape, sets: Any) -> Any:
        call = works.OurVariant().call(shape, sets)
        return lambda i: call(i) * (1.5 if self.is_wrong else 1.0)

    def output(self, result: Any) -> torch.Tensor:
        return result if result.dim() == 4 else result[None]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Two peers with made-up times, one small group, and a machine without a GPU that has one."""
    ours, fa4, flex = FakePeer("flash_cute", 1e-3), FakePeer("fa4", 2e-3), FakePeer("flex", 3e-3)
    for name, peer in (("OURS", ours), ("FA4", fa4), ("FLEX", flex)):
        monkeypatch.setattr(variants, name, peer)
    work = small(works.work(64, 128, window=32))
    entries = (variants.Entry("w", ours, work), variants.Entry("FA4 w", fa4, work))
    group = variants.Group("window", entries, (verdicts.Line("w over FA4", "w", "FA4 w", 1.3),))
    monkeypatch.setattr(variants, "GROUPS", {"window": lambda device: group})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(fwd, "make_inputs", lambda shape, sets, seed: [inputs_of(shape)] * sets)
    monkeypatch.setattr(fwd, "poison_free_memory", lambda shape: None)
    monkeypatch.setattr(machine, "facts", sample_facts)
    monkeypatch.setattr(machine, "l2_bytes", lambda: 1)
    monkeypatch.setattr(machine, "_query", lambda fields: "1980, 3201, 40, 500, 0x0")
    return types.SimpleNamespace(ours=ours, fa4=fa4)


def run(tmp_path: Any) -> tuple[int, dict[str, Any]]:
    code = variants.run(variants.Options(timing.Plan(rounds=3), tmp_path))
    return code, json.loads((tmp_path / "variants.json").read_text())


def test_run_measures_and_writes(fake: Any, tmp_path: Any, capsys: pytest.CaptureFixture[str]):
    code, content = run(tmp_path)
    printed = capsys.readouterr().out
    assert code == 0, printed
    (line,) = content["lines"]
    assert (line["verdict"], line["value"]) == ("pass", pytest.approx(2.0))
    assert content["contestants"]["w"]["gate"].startswith("right")
    assert content["facts"]["gpu"] == "NVIDIA H200"
    assert "pass: w over FA4: 2.000, aim at least 1.300" in printed
    assert "1 lines: 1 passed, 0 failed" in printed


def test_run_does_not_count_what_is_refused_or_missing(
    fake: Any, tmp_path: Any, capsys: pytest.CaptureFixture[str]
):
    fake.ours.refusal = "it lacks windows"
    code, content = run(tmp_path)
    assert code == 1, "nothing was measured"
    assert content["lines"][0]["verdict"] == "refused"
    assert content["contestants"].keys() == {"w"}, "the other side is not timed for nothing"
    fake.ours.refusal, fake.fa4.is_missing = None, "import: none"
    code, content = run(tmp_path)
    assert (code, content["lines"][0]["verdict"]) == (1, "not measured")
    assert content["contestants"]["w"]["median_us"] == pytest.approx(1000)
    printed = capsys.readouterr().out
    assert "refused: w over FA4: aim at least 1.300 (it lacks windows)" in printed
    assert "fa4: missing: import: none" in printed


@pytest.mark.parametrize("side", ["ours", "fa4"])
def test_run_times_nothing_that_is_wrong(fake: Any, side: str, tmp_path: Any):
    getattr(fake, side).is_wrong = True
    code, content = run(tmp_path)
    assert code == 1
    assert content["lines"][0]["verdict"] == ("FAIL" if side == "ours" else "not measured")
    assert "WRONG" in content["lines"][0]["reason"]


def test_run_without_a_gpu_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["variants", "--out", str(tmp_path)]) == 2
    assert "needs a GPU" in capsys.readouterr().out


def test_command_line_of_variants(capsys: pytest.CaptureFixture[str]):
    arguments = command.parser().parse_args(
        ["variants", "--only", "window,varlen", "--rounds", "5"]
    )
    options = command.variants_options(arguments)
    assert options.only == ("window", "varlen")
    assert (options.plan.rounds, options.plan.min_rounds) == (5, 5)
    assert variants.choose(None) == ("callbacks", "density", "window", "varlen", "builder")
    with pytest.raises(SystemExit):
        command.main(["variants", "--only", "windows"])
    assert "'windows', expected some of callbacks" in capsys.readouterr().err


def test_gate_change_is_the_same_rule_as_causal():
    work = small(works.work(64, 96, is_causal=True))
    inputs = inputs_of(work)
    out = peers.OURS.call(work, [inputs])(0)
    plain = gate.check(out, inputs, work, random.Random(3))
    assert plain == gate.check(out, inputs, work, random.Random(3), work.change)
    assert report.OURS == variants.OURS.name
