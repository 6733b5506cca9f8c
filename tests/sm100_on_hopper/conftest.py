"""Fixtures of the SM100-on-Hopper harness."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sm100_on_hopper import build
from sm100_on_hopper.worker import Worker


@pytest.fixture(scope="session")
def tools() -> None:
    """nvcc and ptxas."""
    if missing := build.missing_tools():
        pytest.skip(f"{' and '.join(missing)} not on PATH: the CUDA toolkit is needed")


@pytest.fixture(scope="session")
def hopper(tools: None) -> Iterator[Worker]:
    """A process that launches kernels on the Hopper GPU of this machine."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU here")
    worker = Worker()
    yield worker
    worker.close()
