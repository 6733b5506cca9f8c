"""Attention kernels on a Hopper GPU through the harness.

The SM90 kernel runs as it is: that shows that launcher, records and tensor maps are right. Then the
SM100 kernel, lowered. Problems are small: two query tiles, a few blocks of keys, two heads meet
every role, ring and mask. A test has its kernels to itself, which take longer to make than to run;
factors that share no kernel take turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import test_variants
import torch
from checks import Case
from covering import each_value_once

from flash_cute import selection
from flash_cute.features import Feature
from sm100_on_hopper import cases, faults, forward, lowering
from sm100_on_hopper.lowering import Fault
from sm100_on_hopper.worker import Worker, WrongError

pytestmark = pytest.mark.gpu

DIMS = [(64, 64), (128, 128), (96, 96), (192, 128), (256, 256), (72, 40)]
ALONE = 131  # multiprocessors that take no part: on 132, one CTA walks through every tile
BOTH = (lowering.PLAIN, lowering.LAZY)


def attend(worker: Worker, *arguments: Any, **options: Any) -> None:
    """Run a problem with the SM100 kernel; `cases.attend` judges it."""
    assert worker.call(cases.attend, "SM100", "sm_100a", *arguments, **options)


# -- the launcher, with kernels that need no lowering


@pytest.mark.parametrize(("dims", "causal"), [((96, 96), True), ((192, 128), False)], ids=str)
def test_sm90_kernel_is_launched_right(hopper: Worker, dims: tuple[int, int], causal: bool):
    case = Case(2, 4, 2, 300, 500, *dims, causal=causal)
    names = hopper.call(cases.attend, "SM90", "sm_90a", case)
    assert names and names[0].startswith("flash_fwd_sm90")


SERVING: dict[str, Any] = {
    "append": "none",
    "rotary": None,
    "page_size": None,
    "leftpad": False,
    "batch_idx": False,
    "packed_q": False,
    "splits": 0,
    "metadata": False,
    "mask": {"causal": True},
    "softcap": 0.0,
    "sinks": True,
    "heads": (6, 1),
    "dim": 64,
    "dtype": torch.float16,
    "lengths": "few_short",
}
PADDED = {"leftpad": True, "batch_idx": True, "packed_q": True, "splits": 3}
COUNTED = {"page_size": 64, "metadata": True, "batch_idx": True}

# Tests of the package by the feature that they are about.
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "pages": ("test_paged", "test_pages_of_any_order", {"dims": (64, 64), "page_size": 16}),
    "gathered pages": ("test_paged", "test_pages_of_any_order", {"dims": (64, 64), "page_size": 4}),
    "blocks": (
        "test_block_sparsity",
        "test_block_masks_of_torch",
        {"dims": (64, 64), "block": 128},
    ),
    "small blocks": (
        "test_block_sparsity",
        "test_packed_sequences",
        {"d": 128, "block": 64, "heads_kv": 1},
    ),
    "parts": ("test_split", "test_parts_give_the_whole", {"dims": (64, 64), "rows": 17}),
    "packed heads": ("test_pack_gqa", "test_packed_sequences_with_packed_heads", {}),
    "left padding": ("test_kvcache_gpu", "test_sweep", {"case": SERVING | PADDED}),
    "counted parts": ("test_kvcache_gpu", "test_sweep", {"case": SERVING | COUNTED}),
    "gathered and padded": (
        "test_kvcache_gpu",
        "test_sweep",
        {"case": SERVING | PADDED | {"page_size": 4, "dim": 128, "packed_q": False}},
    ),
    "blocks of gathered pages": (
        "test_paged",
        "test_block_masks_of_pages",
        {"page_size": 100, "block_size": 128},
    ),
}


@pytest.mark.parametrize("name", ["pages", "packed heads"])
def test_sm90_features_are_launched_right(hopper: Worker, name: str):
    hopper.call(forward.run_test, "SM90", "sm_90a", *OTHERS[name])


# -- the SM100 kernel


def skip_unless_declared(feature: Feature) -> None:
    """Skip what the SM100 kernel does not say that it can do."""
    if feature not in selection.SM100.features:
        pytest.skip(f"the SM100 kernel does not declare {feature.value}")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_sm100_dense(hopper: Worker, dims: tuple[int, int], causal: bool):
    mode = BOTH[(DIMS.index(dims) + causal) % 2]
    attend(hopper, Case(1, 2, 2, 300, 450, *dims, causal=causal), mode=mode)


@pytest.mark.parametrize(
    ("dims", "causal"), [((64, 64), False), ((128, 128), True), ((256, 256), True)]
)
def test_sm100_delayed(hopper: Worker, dims: tuple[int, int], causal: bool):
    case = Case(1, 2, 1, 300, 450, *dims, dtype=torch.float16, causal=causal)
    attend(hopper, case, mode=lowering.JITTER)


@pytest.mark.parametrize(
    ("dims", "causal"), [((64, 64), True), ((128, 128), False), ((256, 256), False)]
)
def test_sm100_one_cta_walks_through_all_tiles(hopper: Worker, dims: tuple[int, int], causal: bool):
    case = Case(1, 4, 2, 520, 300, *dims, causal=causal)
    for mode in BOTH:
        attend(hopper, case, "gaussian", ALONE, mode)


SIZES = [(1, 1), (1, 300), (128, 128), (129, 1), (257, 127), (64, 257)]


@pytest.mark.parametrize("causal", [False, True])
def test_sm100_odd_sizes(hopper: Worker, causal: bool):
    for size in SIZES:
        attend(hopper, Case(2, 3, 3, *size, 64, causal=causal))


def test_sm100_hostile_values(hopper: Worker):
    for kind in ("outliers", "edges", "huge", "very_negative", "staircase"):
        attend(hopper, Case(1, 2, 2, 300, 450, 128, causal=True), kind)


def test_sm100_nan_is_seen(hopper: Worker):
    assert hopper.call(cases.see_nan, "SM100", "sm_100a")


NEEDED = {
    "pages": Feature.PAGED_KV,
    "gathered pages": Feature.PAGED_KV,
    "blocks": Feature.BLOCK_SPARSITY,
    "small blocks": Feature.BLOCK_SPARSITY,
    "parts": Feature.SPLIT_KV,
    "packed heads": Feature.PACK_GQA,
    "left padding": Feature.LEFTPAD,
    "counted parts": Feature.BATCH_IDX,
    "gathered and padded": Feature.LEFTPAD,
    "blocks of gathered pages": Feature.BLOCK_SPARSITY,
}


@pytest.mark.parametrize("name", NEEDED)
def test_sm100_features(hopper: Worker, name: str):
    skip_unless_declared(NEEDED[name])
    for mode in BOTH:
        hopper.call(forward.run_test, "SM100", "sm_100a", *OTHERS[name], mode)


def pairs_cases() -> Iterator[Any]:
    """The covering set of the package: few cases hold every value, the others are extra."""
    few = each_value_once(test_variants.CASES)
    for number, case in enumerate(test_variants.CASES):
        marks = () if number in few else pytest.mark.extra
        yield pytest.param(case, id=test_variants.label(case), marks=marks)


@pytest.mark.parametrize("case", list(pairs_cases()))
def test_sm100_pairs_of_features(hopper: Worker, case: dict[str, Any]):
    """Plain and lazy by turns."""
    mode = BOTH[test_variants.CASES.index(case) % 2]
    test = ("test_variants", "test_pairs_of_features", {"case": case})
    hopper.call(forward.run_test, "SM100", "sm_100a", *test, mode)


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
def test_sm100_fault_is_found(hopper: Worker, name: str):
    mode, fault = SM100_FAULTS[name]
    with pytest.raises(WrongError):
        attend(hopper, Case(1, 2, 2, 300, 450, 64), mode=mode, fault=fault)
