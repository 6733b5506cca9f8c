"""Attention kernels on a Hopper GPU through the harness.

The SM90 kernel runs as it is: that shows that launcher, records and tensor maps are right. Then the
SM100 kernel, lowered. Problems are small: two query tiles, a few blocks of keys, two heads meet
every role, ring and mask.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import test_variants
import torch
from checks import Case

from flash_cute import selection
from flash_cute.features import Feature
from sm100_on_hopper import cases, faults, forward, lowering
from sm100_on_hopper.lowering import Fault, Mode
from sm100_on_hopper.worker import Worker, WrongError

pytestmark = pytest.mark.gpu

DIMS = [(64, 64), (128, 128), (96, 96), (192, 128), (256, 256), (72, 40)]
ALONE = 131  # multiprocessors that take no part: on 132, one CTA walks through every tile


# -- the launcher, with kernels that need no lowering


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (192, 128)], ids=str)
def test_sm90_kernel_is_launched_right(hopper: Worker, dims: tuple[int, int], causal: bool):
    case = Case(2, 4, 2, 300, 500, *dims, causal=causal)
    names = hopper.call(cases.attend, "SM90", "sm_90a", case)
    assert names and names[0].startswith("flash_fwd_sm90")


# Tests of the package by the feature that they are about.
OTHERS = {
    "pages": ("test_paged", "test_pages_of_any_order", {"dims": (64, 64), "page_size": 16}),
    "gathered pages": ("test_paged", "test_pages_of_any_order", {"dims": (64, 64), "page_size": 4}),
    "blocks": (
        "test_block_sparsity",
        "test_block_masks_of_torch",
        {"dims": (64, 64), "block": 128},
    ),
    "parts": ("test_split", "test_parts_give_the_whole", {"dims": (64, 64), "rows": 17}),
    "packed heads": ("test_pack_gqa", "test_packed_sequences_with_packed_heads", {}),
}


def run_other(worker: Worker, declared: str, arch: str, name: str, mode: Mode) -> list[str]:
    """Run one of OTHERS with a kernel under it."""
    module, function, arguments = OTHERS[name]
    arguments = {"gpu": None, **arguments}
    return worker.call(forward.run_test, declared, arch, module, function, arguments, mode)


@pytest.mark.parametrize("name", OTHERS)
def test_sm90_features_are_launched_right(hopper: Worker, name: str):
    assert run_other(hopper, "SM90", "sm_90a", name, lowering.PLAIN)


# -- the SM100 kernel


@pytest.fixture
def sm100(hopper: Worker) -> Worker:
    """The worker, where there is a kernel for it."""
    if not hasattr(selection, "SM100"):
        pytest.skip("selection has no SM100 kernel")
    return hopper


def skip_unless_declared(feature: Feature) -> None:
    """Skip what the SM100 kernel does not say that it can do."""
    if feature not in selection.SM100.features:
        pytest.skip(f"the SM100 kernel does not declare {feature.value}")


@pytest.mark.parametrize("mode", [lowering.PLAIN, lowering.LAZY], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_sm100_dense(sm100: Worker, dims: tuple[int, int], causal: bool, mode: Mode):
    case = Case(1, 2, 2, 300, 450, *dims, causal=causal)
    assert sm100.call(cases.attend, "SM100", "sm_100a", case, mode=mode)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_sm100_delayed(sm100: Worker, dims: tuple[int, int], causal: bool):
    case = Case(1, 2, 1, 300, 450, *dims, dtype=torch.float16, causal=causal)
    assert sm100.call(cases.attend, "SM100", "sm_100a", case, mode=lowering.JITTER)


@pytest.mark.parametrize("mode", [lowering.PLAIN, lowering.LAZY], ids=str)
@pytest.mark.parametrize(
    ("dims", "causal"), [*itertools.product([(64, 64), (128, 128), (256, 256)], [False, True])]
)
def test_sm100_one_cta_walks_through_all_tiles(
    sm100: Worker, dims: tuple[int, int], causal: bool, mode: Mode
):
    case = Case(1, 4, 2, 520, 300, *dims, causal=causal)
    arguments = ("SM100", "sm_100a", case, "gaussian", ALONE, mode)
    assert sm100.call(cases.attend, *arguments)


SIZES = [(1, 1), (1, 300), (128, 128), (129, 1), (257, 127), (64, 257)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_sm100_odd_sizes(sm100: Worker, size: tuple[int, int], causal: bool):
    case = Case(2, 3, 3, *size, 64, causal=causal)
    assert sm100.call(cases.attend, "SM100", "sm_100a", case)


@pytest.mark.parametrize("kind", ["outliers", "edges", "huge", "very_negative", "staircase"])
def test_sm100_hostile_values(sm100: Worker, kind: str):
    case = Case(1, 2, 2, 300, 450, 128, causal=True)
    assert sm100.call(cases.attend, "SM100", "sm_100a", case, kind)


NEEDED = {
    "pages": Feature.PAGED_KV,
    "blocks": Feature.BLOCK_SPARSITY,
    "parts": Feature.SPLIT_KV,
    "packed heads": Feature.PACK_GQA,
}


@pytest.mark.parametrize("mode", [lowering.PLAIN, lowering.LAZY], ids=str)
@pytest.mark.parametrize("name", NEEDED)
def test_sm100_features(sm100: Worker, name: str, mode: Mode):
    skip_unless_declared(NEEDED[name])
    assert run_other(sm100, "SM100", "sm_100a", name, mode)


@pytest.mark.slow
@pytest.mark.parametrize("case", test_variants.CASES, ids=test_variants.label)
def test_sm100_pairs_of_features(sm100: Worker, case: dict[str, Any]):
    """The covering set of the package; plain and lazy by turns."""
    if case["blocks"] is not None:
        skip_unless_declared(Feature.BLOCK_SPARSITY)
    mode = lowering.MODES[test_variants.CASES.index(case) % 2]
    arguments = ("SM100", "sm_100a", "test_variants", "test_pairs_of_features", {"case": case})
    assert sm100.call(forward.run_test, *arguments, mode)


SM100_FAULTS = {
    "stride of an operand": (
        lowering.PLAIN,
        Fault(r"\b(mov\.b64 \w+, \{%r\d+, )1073758272\}", r"\g<1>1073758240}", 0),
    ),
    "arrival for the first commit": (
        lowering.LAZY,
        Fault(faults.COMMIT, faults.ARRIVAL, 0),
    ),
}


@pytest.mark.parametrize("name", SM100_FAULTS)
def test_sm100_fault_is_found(sm100: Worker, name: str):
    mode, fault = SM100_FAULTS[name]
    case = Case(1, 2, 2, 300, 450, 64)
    with pytest.raises(WrongError):
        sm100.call(cases.attend, "SM100", "sm_100a", case, mode=mode, fault=fault)
