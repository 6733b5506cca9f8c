"""Shared fixtures: the device of a test, and the record of GPU runs."""

from __future__ import annotations

import gpu_report
import pytest
import torch

CPU = pytest.param("cpu", marks=pytest.mark.cpu)
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)

# Compute capabilities (major) with a kernel in the package.
KERNEL_MAJORS = (9,)


def pytest_configure(config: pytest.Config) -> None:
    if torch.cuda.is_available():
        gpu_report.register(config)


@pytest.fixture(params=[CPU, CUDA])
def device(request: pytest.FixtureRequest) -> str:
    """The device a semantic test runs on: the reference on cpu, a kernel on cuda."""
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA GPU here")
        capability = torch.cuda.get_device_capability()
        if capability[0] not in KERNEL_MAJORS:
            pytest.skip(f"no kernel for compute capability {capability[0]}.{capability[1]}")
    return request.param
