"""Shared fixtures: the device of a test, and the record of GPU runs."""

from __future__ import annotations

from typing import Any

import gpu_report
import pytest
import torch
from covering import each_value_once

from flash_cute import selection
from flash_cute.target import Target

CPU = pytest.param("cpu", marks=pytest.mark.cpu)
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)

# Compute capabilities (major) with a kernel in the package.
KERNEL_MAJORS = (8, 9, 10, 12)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kernel",
        choices=["sm80"],
        help="prefer this kernel where it runs, on Hopper too: for GPU tests (-m gpu)",
    )


def pytest_configure(config: pytest.Config) -> None:
    if torch.cuda.is_available():
        gpu_report.register(config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of tests that another file takes over a few cases run, none beside all by `--kernel`."""
    taken: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("taken_over"):
            name = item.nodeid.partition("[")[0]
            taken.setdefault(name, []).append(item)
    left_out = {item for cases in taken.values() for item in cases}
    if config.getoption("--kernel") is None:
        for cases in taken.values():
            left_out -= {cases[i] for i in each_value_once(map(values, cases))}
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


def values(item: pytest.Item) -> dict[str, Any]:
    """The parameters of a test."""
    return item.callspec.params if hasattr(item, "callspec") else {}


@pytest.fixture(autouse=True)
def preferred_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `--kernel` asks for becomes the first choice; others do what it lacks."""
    if request.config.getoption("--kernel") != "sm80":
        return
    monkeypatch.setattr(selection, "KERNELS", selection.preferring(selection.SM80))


@pytest.fixture
def any_gpu() -> tuple[int, int]:
    """A GPU that kernels of no architecture run on, and its compute capability."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU here")
    capability = torch.cuda.get_device_capability()
    Target.from_capability(*capability)
    return capability


@pytest.fixture
def gpu(any_gpu: tuple[int, int]) -> None:
    """A GPU that attention runs on."""
    if any_gpu[0] not in KERNEL_MAJORS:
        pytest.skip(f"no kernel for compute capability {any_gpu[0]}.{any_gpu[1]}")


@pytest.fixture
def hopper(request: pytest.FixtureRequest, any_gpu: tuple[int, int]) -> None:
    """A GPU that the kernels of SM90 run on, for tests of what those alone do."""
    if request.config.getoption("--kernel") is not None:
        pytest.skip("a test of the SM90 kernels")
    if any_gpu[0] != 9:
        pytest.skip("no Hopper GPU here")


@pytest.fixture(params=[CPU, CUDA])
def device(request: pytest.FixtureRequest) -> str:
    """The device a semantic test runs on: the reference on cpu, a kernel on cuda."""
    if request.param == "cuda":
        request.getfixturevalue("gpu")
    return request.param
