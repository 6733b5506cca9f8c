"""The record of GPU runs: when it is written, and what it says."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import gpu_report
import pytest


def config(*args: str, directory: Path = gpu_report.ROOT, **options: Any) -> Any:
    """As much of pytest's configuration as the report looks at."""
    return types.SimpleNamespace(
        args=list(args) or ["tests"],
        option=types.SimpleNamespace(**options),
        invocation_params=types.SimpleNamespace(dir=directory),
    )


def outcome(outcome: str, *markers: str, when: str = "call") -> Any:
    flags = {name: outcome == name for name in ("passed", "failed", "skipped")}
    return types.SimpleNamespace(keywords={name: 1 for name in markers}, when=when, **flags)


def run(tmp_path: Path, *reports: Any, status: int = 0, settings: Any = None, stop: Any = False):
    """End a session with these reports; return what was written, or None."""
    path = tmp_path / "report.json"
    path.unlink(missing_ok=True)
    recorder = gpu_report.Recorder(settings or config(), path)
    for report in reports:
        recorder.pytest_runtest_logreport(report)
    session: Any = types.SimpleNamespace(shouldfail=stop, shouldstop=False)
    recorder.pytest_sessionfinish(session, status)
    return json.loads(path.read_text()) if path.exists() else None


PASSED = outcome("passed", "gpu")
SKIPPED = outcome("skipped", "gpu", when="setup")
SETUP = outcome("passed", "gpu", when="setup")


def test_report_says_what_passed_and_where(tmp_path: Path):
    report = run(tmp_path, SETUP, PASSED, outcome("passed", "sm90"), SKIPPED, outcome("passed"))
    assert (report["passed"], report["skipped"]) == (2, 1)
    assert report["source_fingerprint"] == gpu_report.source_fingerprint()
    assert {"gpu", "torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "driver", "date"} <= set(report)


def test_report_ignores_a_failure_that_needs_no_gpu(tmp_path: Path):
    assert run(tmp_path, PASSED, outcome("failed", "cpu"), status=1)


@pytest.mark.parametrize(
    "reports",
    [
        [],
        [outcome("passed", "cpu")],
        [SKIPPED],
        [PASSED, outcome("failed", "gpu")],
        [PASSED, outcome("failed", "sm90", when="setup")],
        [PASSED, outcome("failed", "gpu", when="teardown")],
    ],
)
def test_report_is_not_written_unless_gpu_tests_passed(tmp_path: Path, reports: list[Any]):
    assert run(tmp_path, *reports, status=1) is None
    assert run(tmp_path, *reports, status=0) is None


def test_report_is_not_written_for_a_run_cut_short(tmp_path: Path):
    assert run(tmp_path, PASSED, status=2) is None
    assert run(tmp_path, PASSED, status=1, stop="stopping after 1 failures") is None
    recorder = gpu_report.Recorder(config(), tmp_path / "report.json")
    collect: Any = types.SimpleNamespace(failed=True)
    recorder.pytest_collectreport(collect)
    recorder.pytest_runtest_logreport(PASSED)
    session: Any = types.SimpleNamespace(shouldfail=False, shouldstop=False)
    recorder.pytest_sessionfinish(session, 1)
    assert not (tmp_path / "report.json").exists()


@pytest.mark.parametrize(
    "settings",
    [
        config(keyword="causal"),
        config(markexpr="not slow"),
        config(deselect=["tests/test_dense.py::test_x"]),
        config(ignore=["tests/test_bench.py"]),
        config(lf=True),
        config("tests/test_dense.py"),
        config("test_dense.py", directory=gpu_report.ROOT / "tests"),
        config("tests/test_dense.py::test_x"),
        config(".", directory=gpu_report.ROOT / "bench"),
    ],
)
def test_report_is_not_written_for_a_selection(tmp_path: Path, settings: Any):
    assert run(tmp_path, PASSED, settings=settings) is None


@pytest.mark.parametrize(
    "settings",
    [
        config(),
        config("tests/"),
        config("."),
        config(".", directory=gpu_report.ROOT / "tests"),
        config(str(gpu_report.ROOT)),
        config(keyword="", markexpr="", deselect=None, lf=False),
        config(markexpr="gpu"),
        config(markexpr="gpu and not extra"),
    ],
)
def test_report_is_written_for_a_whole_run(tmp_path: Path, settings: Any):
    assert run(tmp_path, PASSED, settings=settings)


def test_workers_do_not_write(monkeypatch: pytest.MonkeyPatch):
    registered: list[str] = []
    manager = types.SimpleNamespace(register=lambda plugin, name: registered.append(name))
    worker: Any = types.SimpleNamespace(pluginmanager=manager, workerinput={})
    gpu_report.register(worker)
    assert registered == []
    controller: Any = types.SimpleNamespace(pluginmanager=manager)
    gpu_report.register(controller)
    assert registered == ["gpu_report"]


def test_fingerprint_follows_paths_and_contents(tmp_path: Path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.py").write_text("one")
    (tmp_path / "sub" / "b.py").write_text("two")
    first = gpu_report.source_fingerprint(tmp_path)
    (tmp_path / "note.txt").write_text("not source")
    assert gpu_report.source_fingerprint(tmp_path) == first
    (tmp_path / "a.py").write_text("onE")
    changed = gpu_report.source_fingerprint(tmp_path)
    (tmp_path / "a.py").rename(tmp_path / "c.py")
    assert len({first, changed, gpu_report.source_fingerprint(tmp_path)}) == 3
