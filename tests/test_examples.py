"""The examples are documentation that runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


def run_example(name: str, cache: Path) -> str:
    """Run an example in its own process, as a reader would; returns what it printed."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "FLASH_CUTE_CACHE_DIR": str(cache), "PYTHONPATH": paths}
    command = [sys.executable, str(ROOT / "examples" / name)]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=cache.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_is_run():
    assert EXAMPLES == ["quickstart.py"], "a new example needs a test below that runs it"


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: it runs the kernel instead")
def test_quickstart_without_gpu_compiles_and_says_that_nothing_ran(tmp_path: Path):
    text = run_example("quickstart.py", tmp_path / "cache")
    assert re.search(r"largest error of the reference: \d\.\de-\d\d", text)
    assert re.search(r"flash_fwd_sm90_bf16_d128_\w*causal\w*, compiled in", text)
    registers, shared, spilled = (
        int(re.search(rf"{what} +(\d+)", text).group(1))  # type: ignore[union-attr]
        for what in ("registers per thread", "shared memory, bytes", "bytes spilled")
    )
    assert 0 < registers <= 255 and spilled == 0
    assert 65_536 < shared <= 232_448, "q, k and v tiles live there"
    assert "No kernel was executed" in text


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_quickstart_with_gpu_checks_and_measures(tmp_path: Path):
    text = run_example("quickstart.py", tmp_path / "cache")
    assert "kernel compiled" in text
    assert re.search(r"largest error of the kernel: \d\.\de-\d\d", text)
    assert re.search(r"\d+ µs a call, \d+ TFLOP/s", text)


def test_readme_example_is_the_public_api():
    """Run the Python block of the README, on the CPU and with a short sequence."""
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    small = block.replace("4096", "64").replace('device="cuda"', 'device="cpu"')
    assert small != block
    names: dict[str, torch.Tensor] = {}
    exec(small, names)
    assert names["out"].shape == (2, 64, 32, 128)
    assert names["lse"].shape == (2, 32, 64)
