"""The SM80 kernel on a GPU: tests of other files once more on it, and its own tiles.

Of every test of those files a few cases run here, in which each value of each factor occurs, so
that no test needs twice the time. All cases of all files run on it with `pytest -m gpu --kernel
sm80`, which makes it the first choice on Hopper too; those here would then be copies.
"""

from __future__ import annotations

import importlib
import itertools
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import checks
import pytest
import test_append_gpu
import test_block_sparsity
import test_callbacks_kernel
import test_dense
import test_kvcache
import test_kvcache_gpu
import test_launch
import test_metadata
import test_pack_gqa
import test_paged
import test_split
import test_variants
import torch

from flash_cute import (
    Feature,
    append_plan,
    flash_attn_func,
    flash_attn_varlen_func,
    launch,
    selection,
)
from flash_cute.problem import Lengths
from flash_cute.sm80.config import ForwardConfigSm80, choose_config
from flash_cute.specialization import LONG_SEQLEN, TileFacts

fwd: Any = pytest.importorskip("flash_cute.sm80.fwd")
Base = fwd.FlashAttentionForwardSm80

ROOT = Path(__file__).resolve().parent.parent
MODULES = (
    test_dense,
    test_variants,
    test_block_sparsity,
    test_callbacks_kernel,
    test_pack_gqa,
    test_paged,
    test_split,
    test_metadata,
    test_kvcache,
    test_kvcache_gpu,
    test_append_gpu,
    test_launch,
)
NO_BUSINESS = {"any_gpu", "hopper"}  # fixtures of tests of other kernels, or of one of them


@pytest.fixture
def device(request: pytest.FixtureRequest, gpu: None) -> str:
    return request.param


@pytest.fixture(autouse=True)
def on_this_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call runs on the SM80 kernel or is refused, and repeats no call of another kernel."""
    monkeypatch.setattr(selection, "KERNELS", selection.preferring(selection.SM80)[:1])
    for module in (launch, append_plan):
        monkeypatch.setattr(module, "_plans", {})


def gpu_cases_of(test: Any, marks: list[pytest.Mark]) -> Callable[..., None] | None:
    """A copy of a test with its GPU cases alone; None where it has none for this kernel.

    Args:
        marks: those of its file.
    """
    if not isinstance(test, types.FunctionType):
        return None
    arguments = test.__code__.co_varnames[: test.__code__.co_argcount]
    marks = [*marks, *getattr(test, "pytestmark", [])]
    is_gpu = any(mark.name == "gpu" for mark in marks)
    for i, mark in enumerate(marks):
        if mark.name == "parametrize" and "device" in mark.args[0]:
            cases = [case for case in mark.args[1] if getattr(case, "values", case)[0] == "cuda"]
            marks[i] = pytest.mark.parametrize(mark.args[0], cases, **mark.kwargs).mark
            is_gpu = bool(cases)
    if not is_gpu or NO_BUSINESS & set(arguments):
        return None
    parts = (test.__code__, test.__globals__, test.__name__, test.__defaults__, test.__closure__)
    copy: Any = types.FunctionType(*parts)
    copy.__annotations__ = test.__annotations__
    copy.pytestmark = [*marks, pytest.mark.taken_over.mark]
    return copy


for _module in MODULES:
    _marks = getattr(_module, "pytestmark", [])
    _marks = [mark.mark for mark in (_marks if isinstance(_marks, list) else [_marks])]
    for _name, _test in list(vars(_module).items()):
        if _name.startswith("test_") and (_copy := gpu_cases_of(_test, _marks)) is not None:
            globals()[f"{_module.__name__}_{_name.removeprefix('test_')}"] = _copy


# ---- Tiles of other GPUs, and others than the chosen ones ----------------------------------------


def with_config(choose: Callable[[Any, ForwardConfigSm80], ForwardConfigSm80]) -> type[Any]:
    """The kernel with a config of the caller's."""

    class Configured(Base):
        """The same steps."""

        @classmethod
        def config_for(cls, spec, config):
            return choose(spec, config)

    return Configured


def check(kernel: type[Any], dims: tuple[int, int], rows: int, keys: int, **options: Any) -> None:
    case = checks.Case(2, 4, 2, rows, keys, *dims)
    for kind in ("edges", "staircase", "outliers"):
        operands = checks.HOSTILE[kind](case, "cuda")
        got = flash_attn_func(*operands, kernel=kernel, return_lse=True, **options)
        checks.assert_attention(got, *checks.oracle(*operands, **options))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kib", [99, 163])
@pytest.mark.parametrize(
    "dims", [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
)
def test_tiles_of_smaller_shared_memory(gpu: None, dims: tuple[int, int], kib: int, causal: bool):
    facts = TileFacts(LONG_SEQLEN, None, None, kib * 1024)
    check(
        with_config(lambda spec, config: choose_config(spec, facts)), dims, 300, 517, causal=causal
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dims", "config"),
    [
        ((64, 64), ForwardConfigSm80(128, 64, ctas_per_sm=2, keeps_q=True)),
        ((64, 64), ForwardConfigSm80(128, 48, num_stages=2, ctas_per_sm=2)),
        ((64, 64), ForwardConfigSm80(64, 16, num_stages=4)),
        ((64, 64), ForwardConfigSm80(128, 128, num_warps=8, num_stages=2)),
        ((96, 96), ForwardConfigSm80(128, 48, num_stages=3)),
        ((96, 64), ForwardConfigSm80(64, 48, num_stages=2)),
        ((128, 96), ForwardConfigSm80(128, 16, num_stages=5)),
        ((128, 128), ForwardConfigSm80(128, 48, num_stages=2)),
        ((128, 128), ForwardConfigSm80(128, 128, num_warps=8)),
        ((128, 128), ForwardConfigSm80(256, 32, num_warps=8)),
        ((256, 256), ForwardConfigSm80(128, 16, num_warps=8, num_stages=2)),
        ((256, 256), ForwardConfigSm80(128, 64, num_warps=8, num_stages=2, shares_rows=True)),
        ((200, 200), ForwardConfigSm80(64, 64, ctas_per_sm=2, shares_rows=True)),
        ((256, 256), ForwardConfigSm80(128, 64, num_warps=8, shares_rows=True)),
        ((192, 128), ForwardConfigSm80(64, 128, shares_rows=True)),
        ((128, 128), ForwardConfigSm80(128, 64, num_warps=8, num_stages=3, shares_rows=True)),
    ],
    ids=str,
)
def test_any_stages_warps_and_tiles(gpu: None, dims, config: ForwardConfigSm80):
    limit = min(227, torch.cuda.get_device_properties(0).shared_memory_per_block_optin // 1024)
    config = replace(config, smem_limit=limit * 1024)
    kernel = with_config(lambda spec, _: config)
    for keys, causal in itertools.product((1, 47, 128, 700), (False, True)):
        check(kernel, dims, 290, keys, causal=causal)


OPTIONS = [
    {"window_size": (100, 20)},
    {"causal": True, "attention_chunk": 96},
    {"softcap": 20.0},
    {"sink": True},
    {"causal": True, "score_mod": lambda score, b, h, q, kv: score + 0.02 * (kv - q) * (h + 1)},
    {"mask_mod": lambda b, h, q_idx, kv_idx: (kv_idx + h) % 3 != b % 3},
]


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: list(options)[-1])
def test_warps_that_share_rows_do_all_the_rest(gpu: None, options: dict[str, Any]):
    """Maxima that lie in the half of one warp, sums of both, an output in two halves."""
    limit = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    config = ForwardConfigSm80(128, 64, num_warps=8, shares_rows=True, smem_limit=limit)
    if "sink" in options:
        options = {"sink": torch.tensor([3.0, -2.0, 0.5, 40.0], device="cuda")}
    kernel = with_config(lambda spec, _: config)
    for dims in ((256, 256), (208, 200)):
        check(kernel, dims, 290, 333, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(2, 2), (8, 2), (10, 2), (6, 1), (40, 2)], ids=str)
def test_warps_without_queries_only_copy(gpu: None, heads: tuple[int, int]):
    """Rows of a query's heads lie side by side, and whole warps may have none."""
    configs = (
        ForwardConfigSm80(64, 64, num_stages=2, skips_warps=True),
        ForwardConfigSm80(128, 32, num_stages=3, skips_warps=True),
    )
    kernels = [
        with_config(lambda spec, _, config=config: replace(config, smem_limit=99 * 1024))
        for config in configs
    ]
    sizes = itertools.product((1, 4, 17, 33, 100), (31, 300), (False, True))
    for kernel, (rows, keys, causal) in itertools.product(kernels, sizes):
        operands = checks.HOSTILE["edges"](checks.Case(2, *heads, rows, keys, 64, 64), "cuda")
        got = flash_attn_func(
            *operands, kernel=kernel, return_lse=True, causal=causal, pack_gqa=heads[0] > heads[1]
        )
        checks.assert_attention(got, *checks.oracle(*operands, causal=causal))


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 128])
@pytest.mark.parametrize("num_splits", [1, 3, 0])
def test_steps_of_decoding_over_pages(gpu: None, page_size: int, num_splits: int):
    """Few rows, sequences of few blocks and of many, pages that are looked up ahead of the end."""
    lengths = (1, 63, 64, 65, 130, 700, 1500, 0)
    batch, most = len(lengths), max(lengths)
    q, k, v = checks.gaussian(checks.Case(batch, 8, 2, 2, most, 128, 128), "cuda")
    pages = -(-most // page_size)
    table = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(page_size))
    table = table.view(batch, pages).int().cuda()
    slots = [torch.full((batch * pages, page_size, 2, 128), torch.nan, dtype=q.dtype) for _ in "kv"]
    slots = [cache.cuda() for cache in slots]
    for b, length in enumerate(lengths):
        row = torch.arange(length, device="cuda")
        for cache, dense in zip(slots, (k, v), strict=True):
            cache[table[b, row // page_size].long(), row % page_size] = dense[b, :length]
        table[b, -(-length // page_size) :] = 2**31 - 1
    used = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    more = {"page_table": table, "seqused_k": used, "causal": True}
    got = flash_attn_varlen_func(q, *slots, **more, num_splits=num_splits, return_lse=True)
    limits = Lengths(page_table=table, seqused_k=used)
    checks.assert_attention(got, *checks.oracle(q, *slots, limits, causal=True))


@pytest.mark.gpu
def test_pages_with_two_kinds_of_panels(gpu: None):
    """Head dims of 128 and 96 lie in panels of 64 and 32 columns: two look-ups for each block."""
    for dims in ((128, 96), (96, 64), (256, 96)):
        operands, lengths = test_paged.paged(5, *dims)
        for causal in (False, True):
            test_paged.check(operands, lengths, causal=causal)


# ---- Subclasses ----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_steps_of_a_hopper_subclass_run_here_too(
    gpu: None, dim: int, monkeypatch: pytest.MonkeyPatch
):
    """The sigmoid attention of the examples, its steps as they are."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = importlib.import_module("sigmoid_attention")
    names = ("first_weights", "next_weights", "close_rows", "squash")
    steps = {name: vars(example.SigmoidAttention)[name] for name in names}
    lacks = frozenset({Feature.LSE, Feature.SINK})
    kernel = type("SigmoidSm80", (Base,), {**steps, "lacks": lacks, "__module__": __name__})
    q, k, v = checks.gaussian(checks.Case(2, 4, 4, 300, 300, dim, dim), "cuda")
    out = flash_attn_func(q, k, v, causal=True, kernel=kernel)

    def by_definition(dtype: torch.dtype) -> torch.Tensor:
        scores = torch.einsum("bihd,bjhd->bhij", q.to(dtype), k.to(dtype)) * dim**-0.5
        weights = example.weights(scores).to(dtype)
        return torch.einsum("bhij,bjhd->bihd", weights, v.to(dtype))

    checks.assert_close("out", out, by_definition(torch.float64), by_definition(q.dtype))
