"""tests/gpu_report.json: the source that the GPU suite last passed on, and where.

Written at the end of a whole run in which GPU tests ran and all of them passed. A selection (-k,
-m, a file, --deselect, --lf) says nothing about the whole and leaves the file alone, as does a run
cut short. With pytest-xdist the controller sees the reports of all workers, and only it writes.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "tests" / "gpu_report.json"
GPU_MARKERS = frozenset({"gpu", "sm80", "sm90", "sm100"})
# Options (by destination) that leave tests out.
SELECTIONS = (
    "keyword",
    "deselect",
    "ignore",
    "ignore_glob",
    "lf",
    "stepwise",
    "collectonly",
)


def source_fingerprint(package: Path = ROOT / "flash_cute") -> str:
    """Hash the package's Python files: relative path and content of each, in order."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py"), key=lambda p: p.relative_to(package).as_posix()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def is_whole_run(config: pytest.Config) -> bool:
    """Whether the command line asks for every test, or every GPU test, extra ones or not."""
    if (getattr(config.option, "markexpr", "") or "gpu") not in ("gpu", "gpu and not extra"):
        return False
    if any(getattr(config.option, name, None) for name in SELECTIONS):
        return False
    whole = {ROOT, ROOT / "tests"}
    start = config.invocation_params.dir
    return any((start / argument).resolve() in whole for argument in config.args)


def register(config: pytest.Config) -> None:
    """Watch this run, unless it is an xdist worker."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config), "gpu_report")


class Recorder:
    """Counts the outcomes of GPU tests and writes the report."""

    def __init__(self, config: pytest.Config, path: Path = REPORT) -> None:
        self.config = config
        self.path = path
        self.passed = 0
        self.skipped = 0
        self.failed = 0
        self.is_complete = True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.is_complete = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not GPU_MARKERS & set(report.keywords):
            return
        self.failed += report.failed
        self.skipped += report.skipped
        self.passed += report.passed and report.when == "call"

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        # 1 is "some test failed": one that needs no GPU says nothing about the kernels.
        is_finished = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if not (is_finished and self.is_complete and is_whole_run(self.config)):
            return
        if session.shouldfail or session.shouldstop:
            return
        if self.passed and not self.failed:
            report = {"passed": self.passed, "skipped": self.skipped, **environment()}
            self.path.write_text(json.dumps(report, indent=2, sort_keys=True) + "\n")


def environment() -> dict[str, Any]:
    """What ran: source, GPU, versions, time."""
    import torch

    return {
        "source_fingerprint": source_fingerprint(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "nvidia-cutlass-dsl": _version("nvidia-cutlass-dsl"),
        "apache-tvm-ffi": _version("apache-tvm-ffi"),
        "driver": _driver_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return run.stdout.strip()
