"""The matrix product on a Hopper GPU: right as it is, wrong or stuck with each planted fault.

The faults are the harness's own test: one that cannot fail proves nothing.
"""

from __future__ import annotations

import pytest

from sm100_on_hopper import faults, lowering, matmul
from sm100_on_hopper.lowering import Fault, Mode
from sm100_on_hopper.worker import HungError, Worker, WorkerError

pytestmark = pytest.mark.gpu

SECONDS = 2.0  # for a launch that takes some 0.1 s


def error(worker: Worker, mode: Mode, fault: Fault | None = None, shape=matmul.SHAPE) -> float:
    """The relative error of the product."""
    program = matmul.program(mode, () if fault is None else (fault,))
    return worker.call(matmul.relative_error, program, matmul.smem_bytes(), shape, SECONDS)


@pytest.mark.parametrize("mode", lowering.MODES, ids=str)
def test_product_is_right(hopper: Worker, mode: Mode):
    assert error(hopper, mode) < matmul.TOLERANCE


@pytest.mark.parametrize("mode", [lowering.PLAIN, lowering.LAZY], ids=str)
def test_grid_may_be_larger_than_the_gpu(hopper: Worker, mode: Mode):
    shape = (matmul.TILE_M * 300, matmul.TILE_N, matmul.TILE_K)
    assert error(hopper, mode, shape=shape) < matmul.TOLERANCE


@pytest.mark.parametrize("name", faults.NAMES)
def test_fault_is_found(hopper: Worker, name: str):
    try:
        assert error(hopper, *faults.named(name)) > matmul.TOLERANCE
    except WorkerError as failure:
        words = str(failure)
        if "the kernel stopped" not in words and "a launch did not end" not in words:
            raise  # the harness itself failed


@pytest.mark.parametrize("fault", faults.MISSING_COMMITS, ids=["stage", "tile"])
def test_missing_commit_hangs_and_the_worker_serves_again(hopper: Worker, fault: Fault):
    with pytest.raises(HungError, match="a launch did not end"):
        error(hopper, lowering.PLAIN, fault)
    assert error(hopper, lowering.PLAIN) < matmul.TOLERANCE


def test_products_without_a_commit_are_found(hopper: Worker):
    with pytest.raises(WorkerError, match="products without a commit"):
        error(hopper, lowering.LAZY, faults.NO_COMMITS)


def test_columns_that_stay_allocated_are_found(hopper: Worker):
    with pytest.raises(WorkerError, match="256 columns were not deallocated"):
        error(hopper, lowering.PLAIN, faults.NO_DEALLOC)


def test_lanes_of_another_warp_are_found(hopper: Worker):
    with pytest.raises(WorkerError, match="not the warp's own"):
        error(hopper, lowering.PLAIN, faults.OTHER_LANES)
