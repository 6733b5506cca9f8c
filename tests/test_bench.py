"""The parts of the benchmarks that need no GPU: shapes, timing, gate, report, command line."""

from __future__ import annotations

import io
import json
import math
import random
import sys
from dataclasses import asdict, replace

import pytest
import torch
import toy_gpu

from bench import __main__ as command
from bench import compile as compile_bench
from bench import compile_child, fwd, gate, host, machine, peers, report, shapes, timing
from flash_cute import selection
from flash_cute.variant import as_callback

pytestmark = pytest.mark.cpu


# --- shapes ---------------------------------------------------------------------------------------


def test_shapes_grid_is_the_issues_grid():
    grid = shapes.fwd_grid()
    assert len(grid) == len(set(grid)) == 24
    assert {s.dims for s in grid} == {"64", "128", "192/128", "256"}
    assert {s.seqlen_q for s in grid} == {1024, 4096, 16384}
    for s in grid:
        assert s.batch * s.seqlen_q == 32 * 1024
        assert s.num_heads_q * s.head_dim_v == 2048
        assert s.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("dims", "is_causal", "expected"),
    [((64, 64), False, 4 * 2 * 3 * 16 * 16 * 64), ((192, 128), True, 4 * 2 * 3 * 16 * 16 * 80)],
)
def test_shapes_flops_by_hand(dims, is_causal, expected):
    assert shapes.square(16, 2, 3, dims, is_causal).flops == expected


def test_shapes_input_bytes_match_tensors():
    shape = shapes.Shape(2, 5, 7, 6, 3, 192, 128, False)
    sizes = [(2, 5, 6, 192), (2, 7, 3, 192), (2, 7, 3, 128)]
    assert shape.input_bytes == sum(2 * math.prod(size) for size in sizes)


@pytest.mark.parametrize(
    ("only", "count"),
    [(None, 24), ("d=128", 6), ("d=192,causal", 3), ("d=192/128,full,seqlen=4k", 1),
     ("d=64,d=256,seqlen=1024", 4), ("causal,full", 24)],
)  # fmt: skip
def test_shapes_select(only, count):
    assert len(shapes.select(shapes.fwd_grid(), only)) == count


@pytest.mark.parametrize("only", ["d=96", "masked", "seqlen=big", "d="])
def test_shapes_select_refuses(only):
    with pytest.raises(ValueError, match="--only"):
        shapes.select(shapes.fwd_grid(), only)


def test_shapes_specialisations_one_per_kernel():
    kinds = shapes.specialisations(shapes.fwd_grid())
    assert len(kinds) == 8
    assert len({(s.head_dim, s.head_dim_v, s.is_causal) for s in kinds}) == 8


def test_shapes_id():
    assert shapes.square(4096, 8, 16, (192, 128), True).id == (
        "b8-hq16-hkv16-sq4096-sk4096-d192v128-bf16-causal"
    )


# --- timing ---------------------------------------------------------------------------------------


class FakeMachine:
    """A clock and a stopwatch: each contestant has a true time, the clock moves as it is used."""

    def __init__(self, true_seconds):
        self.true_seconds, self.clock_s, self.log = true_seconds, 0.0, []

    def now(self):
        return self.clock_s

    def stopwatch(self, contestant, count):
        seconds = self.true_seconds[contestant.name]
        self.clock_s += seconds * count
        self.log.append((contestant.name, count))
        return timing.Sample(seconds, seconds / 10)

    def contestants(self):
        return [timing.Contestant(n, lambda i: None, self.stopwatch) for n in self.true_seconds]


def test_timing_interleave_samples_everyone_once_per_round():
    machine_ = FakeMachine({"ours": 0.001, "peer": 0.002, "slow": 0.5})
    plan = timing.Plan(rounds=6, budget_s=100.0, sample_s=0.03)
    found = timing.interleave(machine_.contestants(), plan, random.Random(1), machine_.now)
    assert {n: t.median_s for n, t in found.items()} == machine_.true_seconds
    assert {n: t.calls for n, t in found.items()} == {"ours": 30, "peer": 15, "slow": 1}
    timed = [name for name, _ in machine_.log[6:]]  # after warm-up and calibration of three
    rounds = [timed[i : i + 3] for i in range(0, len(timed), 3)]
    assert len(rounds) == 6
    assert all(sorted(r) == ["ours", "peer", "slow"] for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1, "the order is the same in every round"


def test_timing_interleave_keeps_to_its_budget():
    machine_ = FakeMachine({"a": 1.0, "b": 1.0})
    plan = timing.Plan(rounds=50, min_rounds=3, budget_s=9.0)
    found = timing.interleave(machine_.contestants(), plan, random.Random(0), machine_.now)
    assert len(found["a"].seconds) == len(found["b"].seconds) == 5  # rounds of 2 s: 0 2 4 6 8 | 10
    plan = replace(plan, budget_s=0.0)
    found = timing.interleave(machine_.contestants(), plan, random.Random(0), machine_.now)
    assert len(found["a"].seconds) == 3


def test_timing_statistics():
    samples = tuple(timing.Sample(s, 0.95 * s) for s in (1.0, 2.0, 3.0, 4.0, 100.0))
    found = timing.Timing(samples, 7)
    assert found.median_s == 3.0
    assert found.spread == pytest.approx((4.0 - 2.0) / 3.0)
    assert found.is_host_bound
    unknown = timing.Timing((timing.Sample(1.0, None),), 1)
    assert unknown.host_s is None and not unknown.is_host_bound and math.isnan(unknown.spread)


def test_timing_blocked_slope_removes_the_fixed_cost(monkeypatch):
    clock = {"now": 0.0}
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock["now"])
    pending = {"calls": 0}

    def call(i):
        pending["calls"] += 1
        return i

    def wait(result):
        clock["now"] += 0.010 + 0.002 * pending["calls"]  # 10 ms to wait at all, 2 ms a call
        pending["calls"] = 0

    contestant = timing.Contestant("jax", call, timing.blocked_slope, wait=wait)
    sample = contestant.stopwatch(contestant, 8)
    assert sample.seconds == pytest.approx(0.002)
    assert sample.host_seconds is None


def test_timing_num_input_sets_outgrow_the_l2():
    assert timing.num_input_sets(400_000_000, 60_000_000) == 2
    assert timing.num_input_sets(10_000_000, 60_000_000) * 10_000_000 >= 3 * 60_000_000


# --- gate -----------------------------------------------------------------------------------------


def gate_case(is_causal, seqlen_q=150, seqlen_k=150):
    shape = shapes.Shape(2, seqlen_q, seqlen_k, 4, 2, 64, 64, is_causal)
    torch.manual_seed(0)
    q = torch.randn(2, seqlen_q, 4, 64, dtype=torch.bfloat16)
    k, v = (torch.randn(2, seqlen_k, 2, 64, dtype=torch.bfloat16) for _ in range(2))
    groups = [t.repeat_interleave(2, dim=2).transpose(1, 2).float() for t in (k, v)]
    mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if is_causal:
        mask = mask.tril(seqlen_k - seqlen_q)
    attend = torch.nn.functional.scaled_dot_product_attention
    out = attend(q.transpose(1, 2).float(), *groups, attn_mask=mask)
    return shape, (q, k, v), out.transpose(1, 2).to(torch.bfloat16)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("seqlen_q", [150, 70])
def test_gate_passes_a_right_output(is_causal, seqlen_q):
    shape, inputs, out = gate_case(is_causal, seqlen_q)
    verdict = gate.check(out, inputs, shape, random.Random(0))
    assert verdict.is_right, str(verdict)


def test_gate_catches_wrong_outputs():
    shape, inputs, out = gate_case(True)
    full = gate_case(False)[2]
    unscaled = out.clone()
    unscaled[1, -1, 3] *= 1.05  # the last row of the last pair is always sampled
    holes = out.clone()
    holes[0, 77, 2, 5] = float("nan")
    heads = out.roll(1, dims=2)
    for wrong in (full, unscaled, holes, heads, torch.zeros_like(out), out[:, :-1]):
        verdict = gate.check(wrong, inputs, shape, random.Random(0))
        assert not verdict.is_right
        assert "WRONG" in str(verdict)


@pytest.mark.parametrize("is_causal", [False, True])
def test_gate_passes_our_own_call(is_causal):
    shape, inputs, _ = gate_case(is_causal)
    call = peers.OURS.call(shape, [inputs])
    assert gate.check(call(0), inputs, shape, random.Random(0)).is_right


# --- peers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peer", "module"), [("fa4", "flash_attn.cute.interface"), ("fa3", "dew_flash_attn")]
)
def test_peers_missing_says_what_cannot_be_imported(peer, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(peers, "load_cudart", lambda: None)
    for other in ("jax", "jax.dlpack"):
        monkeypatch.setitem(sys.modules, other, machine)  # any module: jax is there
    (found,) = peers.choose(peer)
    assert module in found.missing()


def test_peers_without_a_gpu_say_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for found in peers.choose("cudnn,fa2"):
        assert found.missing() == "torch sees no GPU"


def test_peers_refuse_with_a_reason():
    mla = shapes.square(1024, 32, 16, (192, 128), True)
    by_name = {p.name: p for p in peers.PEERS}
    assert "192/128" in by_name["fa3"].refuses(mla)
    assert "192/128" in by_name["fa2"].refuses(mla)
    assert by_name["cudnn"].refuses(mla) is None
    assert "top-left" in by_name["cudnn"].refuses(replace(mla, seqlen_k=2048))
    assert all(p.refuses(replace(mla, head_dim=128)) is None for p in peers.PEERS)


def test_peers_choose():
    assert [p.name for p in peers.choose("fa3,fa4,fa3")] == ["fa3", "fa4"]
    assert peers.choose("none") == []
    assert len(peers.choose(None)) == 4
    with pytest.raises(ValueError, match="'fa5'.*expected some of fa4"):
        peers.choose("fa5")


@pytest.mark.parametrize("name", ["cudnn", "fa2"])
def test_peers_sdpa_views_share_memory_and_come_back_in_bshd(name):
    shape = shapes.square(16, 1, 2, (64, 64), True)
    inputs = [tuple(torch.randn(1, 16, 2, 64) for _ in range(3)) for _ in range(2)]
    (peer,) = peers.choose(name)
    call = peer.call(shape, inputs)  # without the scope, which wants a GPU
    assert peer.output(call(0)).shape == (1, 16, 2, 64)
    assert torch.equal(call(0), call(2)) and not torch.equal(call(0), call(1))


# --- fwd ------------------------------------------------------------------------------------------


class FakePeer(peers.Peer):
    label, package = "fake", "torch"

    def __init__(self, name, out, seconds):
        self.name, self.out = name, out
        self.stopwatch = lambda contestant, count: timing.Sample(seconds, None)

    def missing(self):
        return None

    def call(self, shape, sets):
        if isinstance(self.out, Exception):
            raise self.out
        return lambda i: self.out


def fake_cell(monkeypatch, *present):
    shape, inputs, _ = gate_case(True)
    monkeypatch.setattr(fwd, "make_inputs", lambda shape, sets, seed: [inputs])
    monkeypatch.setattr(fwd, "poison_free_memory", lambda shape: None)
    monkeypatch.setattr(machine, "l2_bytes", lambda: 1)
    return fwd.measure(shape, present, timing.Plan(rounds=3), random.Random(0))


def test_fwd_refuses_to_time_a_wrong_output(monkeypatch):
    right = gate_case(True)[2]
    cell = fake_cell(
        monkeypatch,
        FakePeer("flash_cute", right * 1.1, 0.001),
        FakePeer("fa4", right, 0.002),
        FakePeer("fa3", RuntimeError("no kernel\nmore"), 0.002),
    )
    ours = cell.results["flash_cute"]
    assert ours.tflops is None and "WRONG" in ours.failed
    assert cell.results["fa4"].tflops == pytest.approx(cell.shape.flops / 0.002 / 1e12)
    assert cell.results["fa3"].failed == "RuntimeError: no kernel"
    assert report.ratio(cell, "fa4") is None


def test_fwd_ratio_is_ours_over_the_peer(monkeypatch):
    right = gate_case(True)[2]
    cell = fake_cell(
        monkeypatch, FakePeer("flash_cute", right, 0.001), FakePeer("fa4", right, 0.002)
    )
    assert report.ratio(cell, "fa4") == pytest.approx(2.0)
    assert cell.results["flash_cute"].gate.startswith("right")


def fake_gpu(monkeypatch, ours, inputs):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(fwd, "OURS", ours)
    monkeypatch.setattr(fwd, "make_inputs", lambda shape, sets, seed: [inputs])
    monkeypatch.setattr(fwd, "poison_free_memory", lambda shape: None)
    monkeypatch.setattr(machine, "facts", sample_facts)
    monkeypatch.setattr(machine, "l2_bytes", lambda: 1)
    monkeypatch.setattr(machine, "_query", lambda fields: "1980, 3201, 40, 500, 0x0")
    monkeypatch.setattr(selection, "KERNELS", selection.KERNELS)  # which a run may change
    monkeypatch.setenv("FLASH_CUTE_ARCH", "sm_90a")


@pytest.mark.parametrize("is_right", [True, False])
def test_fwd_run_writes_everything(is_right, monkeypatch, capsys, tmp_path):
    shape, inputs, right = gate_case(True)
    ours = FakePeer("flash_cute", right if is_right else right + 1, 0.001)
    absent = FakePeer("fa3", right, 0.002)
    absent.missing = lambda: "import jax: none"
    fake_gpu(monkeypatch, ours, inputs)
    options = fwd.Options(
        [shape], [FakePeer("fa4", right, 0.002), absent], timing.Plan(rounds=3), tmp_path
    )
    assert fwd.run(options) == (0 if is_right else 1)
    printed = capsys.readouterr().out
    found = report.from_json((tmp_path / "fwd.json").read_text())
    assert len(found.cells) == 1 and found.gpu_after["sm_mhz"] == "1980"
    assert "fa3" not in found.cells[0].results and "fake: missing: import jax: none" in printed
    assert ("geometric mean 2.000" in printed) == is_right
    assert ("WRONG" in printed) != is_right
    assert (tmp_path / "fwd.txt").exists()
    assert found.kernels == ["FlashAttentionForwardSm90"]
    assert "pass" not in printed and "FAIL:" not in printed


@pytest.mark.parametrize(("seconds", "code"), [(0.00106, 0), (0.00104, 1), (None, 1)])
def test_fwd_run_of_another_kernel_is_judged_by_its_aims(
    seconds, code, monkeypatch, capsys, tmp_path
):
    shape, inputs, right = gate_case(True)
    peer = FakePeer("fa2", right, seconds)
    peer.missing = lambda: None if seconds else "no such backend"
    fake_gpu(monkeypatch, FakePeer("flash_cute", right, 0.001), inputs)
    options = fwd.Options([shape], [peer], timing.Plan(rounds=3), tmp_path, arch="sm80")
    assert fwd.run(options) == code
    printed = capsys.readouterr().out
    found = report.from_json((tmp_path / "fwd_sm80.json").read_text())
    assert found.kernels == ["FlashAttentionForwardSm80"]
    assert "ours: FlashAttentionForwardSm80" in printed
    cell = f"d {shape.dims} causal {shape.seqlen_q}"
    verdict = {
        0: f"over fa2: aim at least 1.05: 1 of 1 pass, worst 1.060 ({cell})",
        1: f"FAIL: {cell} over fa2: 1.040, aim at least 1.050",
    }
    assert (verdict[code] if seconds else "1 not measured") in printed
    assert verdict[code] in (tmp_path / "fwd_sm80.txt").read_text() or not seconds


def test_fwd_run_stops_at_the_time_limit(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(fwd, "compile_ours", lambda cells: None)
    monkeypatch.setattr(machine, "facts", sample_facts)
    monkeypatch.setattr(machine, "_query", lambda fields: None)
    monkeypatch.setenv("FLASH_CUTE_ARCH", "sm_90a")
    options = fwd.Options(shapes.fwd_grid(), [], timing.Plan(), tmp_path, time_limit_s=0.0)
    assert fwd.run(options) == 1
    assert len(report.from_json((tmp_path / "fwd.json").read_text()).left_out) == 24


@pytest.mark.parametrize("name", ["fwd", "host"])
def test_fwd_and_host_without_a_gpu_say_so(name, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([name, "--out", str(tmp_path)]) == 2
    assert "needs a GPU" in capsys.readouterr().out


# --- report ---------------------------------------------------------------------------------------


def sample_facts():
    return {
        "date": "2026-11-30 12:00:00 +0000",
        "gpu": "NVIDIA H200",
        "driver": "580.1",
        "torch_cuda": "13.0",
        "python": "3.12.3",
        "versions": {"torch": "2.11.0", "jax": None},
        "commit": "0123456789ab",
        "source_fingerprint": "0123456789abcdef",
    }


def sample_report():
    names = {"fa4": "FA4", "fa3": "FA3"}
    known = {
        n: {"label": label, "version": "1", "timed_by": "a clock", "missing": None}
        for n, label in names.items()
    }
    known["fa3"]["missing"] = "import jax: none"
    cells = []
    for i, shape in enumerate(shapes.fwd_grid()[:3]):
        ours = timing.Timing((timing.Sample(0.001, 0.0001), timing.Sample(0.001, 0.0001)), 5)
        theirs = timing.Timing((timing.Sample(0.001 * (i + 1), None),), 5)
        cells.append(
            report.Cell(
                shape,
                {
                    "flash_cute": report.result_of(ours, shape, "right"),
                    "fa4": report.result_of(theirs, shape, "right"),
                },
                {"sm_mhz": "1980"},
                1.5,
            )
        )
    return report.Report(sample_facts(), known, cells)


def test_report_geometric_mean():
    assert report.geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert report.geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert math.isnan(report.geometric_mean([]))


def test_report_summary():
    found = report.summarise(sample_report().cells, "fa4")
    assert found.cells == 3
    assert found.geomean == pytest.approx(6 ** (1 / 3))
    assert found.lowest == pytest.approx(1.0)
    assert found.lowest_cell == shapes.fwd_grid()[0].id
    assert report.summarise(sample_report().cells, "fa3") is None


def test_report_json_round_trip():
    before = sample_report()
    text = report.to_json(before)
    assert report.from_json(text) == before
    assert json.loads(text)["summaries"][0]["peer"] == "fa4"


def test_report_aligned():
    lines = report.aligned([["d", "x"], ["128", "1234567"]], [5])
    assert lines == ["d            x", "128    1234567"]


def test_report_text_holds_the_table_and_what_is_missing():
    full = sample_report()
    full.cells[1].results["fa4"] = report.Result(refused="not this width")
    full.cells[2].results["flash_cute"] = report.Result(failed="WRONG at row 3")
    full.left_out = ["some-cell"]
    text = report.text(full)
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("d  "))
    table = lines[start : start + 4]
    assert len({len(line) for line in table}) == 1, "columns are not aligned"
    assert table[0].split() == "d mask seqlen heads ours +-% FA4 FA3 /FA4 /FA3".split()
    assert table[1].split()[-2:] == ["1.000", "-"]
    assert "FAILED" in table[3]
    assert "FA3: missing: import jax: none" in text
    assert "fa4: does not do it: not this width" in text
    assert "flash_cute: FAILED: WRONG at row 3" in text
    assert "not reached: some-cell" in text
    assert "geometric mean 1.000 over 1 cells" in text
    assert "NVIDIA H200" in text and "jax missing" in text and "0123456789abcdef" in text


def test_report_streamed_rows_line_up_with_the_header():
    full = sample_report()
    wide = report.widths(full)
    lines = [report.aligned([report.header(full)], wide)[0]]
    lines += [report.aligned([report.row(full, cell)], wide)[0] for cell in full.cells]
    assert len({len(line) for line in lines}) == 1


def test_report_plot_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    assert report.plot(sample_report(), tmp_path / "fwd.png") is None
    assert (tmp_path / "fwd.png").read_bytes().startswith(b"\x89PNG")


def test_report_plot_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "matplotlib is missing" in report.plot(sample_report(), tmp_path / "fwd.png")


def test_machine_facts_without_a_gpu():
    facts = machine.facts()
    assert facts["versions"]["torch"] and len(facts["source_fingerprint"]) == 16
    json.dumps(facts, allow_nan=False)


# --- host, command line ---------------------------------------------------------------------------


def test_host_table_and_verdict(capsys):
    fast = timing.Timing((timing.Sample(10e-6, 10e-6),) * 3, 100)
    slow = timing.Timing((timing.Sample(30e-6, 30e-6),) * 3, 100)
    rows = host.table({"flash_cute": fast, "FA4": slow})
    assert rows[1] == ["flash_cute", "10.00", "10.00", "0.0", "1.00"]
    assert rows[2][-1] == "3.00"
    all_fast = dict.fromkeys(("flash_cute", host.KVCACHE, *host.AIMS_BEYOND_US), fast)
    assert host.verdict(all_fast) == 0
    assert host.verdict(dict.fromkeys(all_fast, slow)) == 1
    assert "flash_cute: 30.00 us, ABOVE the aim of 12 us" in capsys.readouterr().out
    assert host.verdict(all_fast | {host.OUT: slow}) == 1
    said = capsys.readouterr().out
    assert "flash_cute out=: 20.00 us beyond flash_cute, ABOVE the aim of 3 us" in said
    assert said.count("ABOVE") == 1
    assert host.verdict(all_fast | {host.KVCACHE: slow}) == 1
    assert "flash_cute kvcache: 30.00 us, ABOVE the aim of 20 us" in capsys.readouterr().out
    assert host.verdict({}) == 1
    assert host.verdict({"flash_cute": fast}) == 1
    assert "flash_cute block_mask was not timed" in capsys.readouterr().out


def test_host_calls_repeat_on_a_toy_gpu(monkeypatch):
    launches = toy_gpu.install(monkeypatch)
    inputs = tuple(toy_gpu.on_gpu(torch.zeros(1, 128, 1, 128).half()) for _ in range(3))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(host, "score_mod", lambda t: lambda s, b, h, i, j: s + 1)
    monkeypatch.setattr(host, "block_mask", lambda t: None)
    step = host.cache_step(tuple(torch.zeros(1, 128, 1, 128).half() for _ in range(3)))
    step = {name: toy_gpu.on_gpu(tensor) for name, tensor in step.items()}
    monkeypatch.setattr(host, "cache_step", lambda t: step)
    contestants, refused = host.line_up(inputs)
    names = {contestant.name for contestant in contestants}
    assert {"flash_cute", host.KVCACHE, *host.AIMS_BEYOND_US} <= names, refused
    num_launches, num_long = len(launches.launched), len(launches.looked_up)
    for contestant in contestants:
        contestant.call(1)
    ours = [n for n in names if n.startswith(("flash_cute", "flex_attention"))]
    assert len(launches.launched) == num_launches + len(ours)
    assert len(launches.looked_up) == num_long, "a warm call goes the quick way"


def test_host_callbacks_are_what_they_say():
    inputs = (torch.zeros(1, 128, 2, 16),) * 3
    assert len(as_callback(host.score_mod(inputs), "score_mod").tensors) == 3
    mask = host.block_mask(inputs)
    assert len(as_callback(mask.mask_mod, "mask_mod").tensors) == 1


# --- compile --------------------------------------------------------------------------------------


def step(name, total_s, compiles=0):
    return compile_bench.Step(name, total_s, 0.25, {"compiles": compiles})


def test_compile_table_keeps_first_and_further_apart():
    cold = [step("a", 2.25, 1), step("b", 1.75, 2)]
    later = [[step("a", 0.35), step("b", 0.26)], [step("b", 0.375), step("a", 0.27)]]
    rows = compile_bench.table(cold, later)
    assert rows[1] == ["a", "2.00", "0.25", "100.0", "20.0", "0"]
    assert rows[2] == ["b", "1.50", "0.25", "125.0", "10.0", "0"]


@pytest.mark.parametrize(
    ("total_s", "compiles", "code"), [(0.35, 0, 0), (0.45, 0, 1), (0.35, 1, 1)]
)
def test_compile_verdict(total_s, compiles, code, capsys):
    assert compile_bench.verdict([[step("a", total_s, compiles), step("b", 9.0)]]) == code
    assert f"{compiles} compiles" in capsys.readouterr().out


def test_compile_child_that_fails_is_told_with_its_stderr():
    with pytest.raises(compile_bench.ChildError, match="code 1:\nImportError: no such"):
        compile_bench.steps_of(1, "", "ImportError: no such\n")
    line = json.dumps([{"shape_id": "a", "total_s": 1.0, "imports_s": 0.5, "counts": {}}])
    (found,) = compile_bench.steps_of(0, f"chatter\n{line}\n", "")
    assert found.beyond_imports_s == 0.5


def test_compile_rotated_starts_elsewhere():
    assert compile_bench.rotated([1, 2, 3], 1) == [2, 3, 1]
    assert compile_bench.rotated([1, 2, 3], 3) == [1, 2, 3]


def test_compile_import_clock_counts_outermost_imports_once():
    clock_s = iter([0.0, 1.0, 3.0, 10.0])  # outer begins, inner begins, outer ends, -
    clock = compile_child.ImportClock(lambda: next(clock_s))
    inner = clock.timed(lambda: "inner")
    outer = clock.timed(lambda: inner())
    assert outer() == "inner"
    assert clock.seconds == 3.0


def test_compile_import_clock_leaves_import_as_it_was():
    import builtins

    before = builtins.__import__
    clock = compile_child.ImportClock()
    with pytest.raises(ImportError), clock.running():
        import no_module_of_this_name  # noqa: F401  # pyright: ignore
    assert builtins.__import__ is before and clock.seconds > 0


def test_compile_child_answers_a_request(monkeypatch, capsys, tmp_path):
    from flash_cute import compile as package_compile

    asked = []
    monkeypatch.setenv("FLASH_CUTE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(package_compile, "warmup", lambda items, progress: asked.extend(items))
    kinds = shapes.specialisations(shapes.fwd_grid())
    request = json.dumps({"shapes": [asdict(s) for s in kinds], "arch": "sm_90a"})
    monkeypatch.setattr(sys, "stdin", io.StringIO(request))
    compile_child.main()
    steps = compile_bench.steps_of(0, capsys.readouterr().out, "")
    assert [s.shape_id for s in steps] == [s.id for s in kinds]
    assert {"compiles", "disk_hits"} <= set(steps[0].counts)
    sizes = [(p.head_dim, p.head_dim_v, p.causal) for p in asked]
    assert sizes == [(s.head_dim, s.head_dim_v, s.is_causal) for s in kinds]


def test_command_line_builds_the_options():
    arguments = command.parser().parse_args(
        ["fwd", "--only", "d=128,causal", "--peers", "fa4", "--rounds", "7", "--time-limit", "60"]
    )
    options = command.fwd_options(arguments)
    assert len(options.cells) == 3
    assert [p.name for p in options.peers] == ["fa4"]
    assert (options.plan.rounds, options.plan.min_rounds) == (7, 7)
    assert options.time_limit_s == 60
    quick = command.fwd_options(command.parser().parse_args(["fwd", "--quick"]))
    assert {c.seqlen_q for c in quick.cells} == {4096} and len(quick.cells) == 8
    sm80 = command.fwd_options(command.parser().parse_args(["fwd", "--arch", "sm80"]))
    assert {c.dims for c in sm80.cells} == {"64", "128", "256"} and len(sm80.cells) == 18
    assert (sm80.arch, [p.name for p in sm80.peers], sm80.aims) == ("sm80", ["fa2"], {"fa2": 1.05})
    assert quick.arch is None and quick.aims == {}


@pytest.mark.parametrize("bad", [["--only", "d=7"], ["--peers", "fa9"], ["--rounds", "0"]])
def test_command_line_refuses(bad, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(["fwd", *bad])
    assert stop.value.code == 2
    assert bad[0] in capsys.readouterr().err
