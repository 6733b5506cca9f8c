"""Fixtures of the SM100-on-Hopper harness."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sm100_on_hopper import build
from sm100_on_hopper.worker import Worker

GROUPS = 4  # of the GPU tests here, with `--dist loadgroup`: each starts a process of its own


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Spread the GPU tests here over few processes of pytest-xdist."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    here = [i for i in items if i.path.parent == Path(__file__).parent]
    for number, item in enumerate(i for i in here if i.get_closest_marker("gpu")):
        item.add_marker(pytest.mark.xdist_group(f"hopper-{number % GROUPS}"))


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
