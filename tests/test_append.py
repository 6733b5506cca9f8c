"""What precedes attention on a GPU, from the host's side: keys, launches, refusals, machine code.

New keys and values are written, queries rotated, new lengths counted; `test_append_gpu` runs it.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import checks
import pytest
import torch
import toy_gpu
from test_kvcache import Setup, call_of, int32

from flash_cute import (
    AttentionProblem,
    CaptureError,
    Feature,
    InvalidProblem,
    SchedulerMetadata,
    Target,
    UnsupportedProblem,
    append_plan,
    cache,
    cache_info,
    compile,
    current,
    flash_attn_with_kvcache,
    launch,
    selection,
)
from flash_cute.arguments import MAX_PIECES, AppendArguments, CombineArguments, ForwardArguments
from flash_cute.cache_request import (
    CacheArguments,
    CacheRequest,
    cache_request,
)
from flash_cute.problem import Options
from flash_cute.selection import AppendKey, CombineKey, KernelKey, PlannerKey
from flash_cute.split_plan import SplitPlan

FEATURES = frozenset({Feature.APPEND_KV, Feature.ROTARY})
BF16, FP16 = torch.bfloat16, torch.float16
ROTARY = (None, "interleaved", "halves")
INT_MAX = 2**31 - 1


def setup(**changes: Any) -> Setup:
    """A call that the Hopper kernel takes."""
    sizes: dict[str, Any] = {"head_dim": 64, "head_dim_v": 64, "num_heads_q": 4, "num_heads_kv": 2}
    return Setup(**({**sizes, "dtype": BF16, "new": (3, 3), "page_size": 8} | changes))


def request_of(a: dict[str, Any]) -> CacheRequest:
    """The validated request of a call."""

    def some(kind: type[Any]) -> dict[str, Any]:
        return {f.name: a[f.name] for f in dataclasses.fields(kind) if f.name in a}

    return cache_request(CacheArguments(**some(CacheArguments)), Options(**some(Options)))


# ---- Without a GPU -------------------------------------------------------------------------------


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel as if it were declared."""
    changed = dataclasses.replace(selection.APPEND, features=FEATURES)
    monkeypatch.setattr(selection, "APPEND", changed)


@pytest.fixture
def toy(declared: None, monkeypatch: pytest.MonkeyPatch) -> toy_gpu.Launches:
    """The host side of a Hopper GPU; see toy_gpu."""
    return toy_gpu.install(monkeypatch)


def on_toy(a: dict[str, Any]) -> dict[str, Any]:
    return {
        name: toy_gpu.on_gpu(value) if isinstance(value, torch.Tensor) else value
        for name, value in a.items()
    }


def cut(tensor: torch.Tensor, *index: Any) -> torch.Tensor:
    """Part of a tensor on the toy GPU."""
    return toy_gpu.on_gpu(tensor[index])


def named(toy: toy_gpu.Launches) -> list[Any]:
    """The arguments of all launches by name."""
    names: dict[type, Any] = {AppendKey: AppendArguments, CombineKey: CombineArguments}
    return [
        names.get(type(key), ForwardArguments)(*arguments)
        for key, arguments in zip(toy.launched, toy.all_arguments, strict=True)
    ]


def test_launch_arguments_of_pages(toy: toy_gpu.Launches):
    a = on_toy(call_of(setup(rotary="interleaved", rotary_dim=32, has_rotary_seqlens=True)))
    for _ in range(3):
        out = flash_attn_with_kvcache(**a, causal=True)
        assert isinstance(out, torch.Tensor) and out.shape == a["q"].shape
        first, then = named(toy)[-2:]
        for name in append_plan.TENSORS:
            assert getattr(first, name) == (a[name].data_ptr() if name in a else 0), name
        assert first.rotated not in (0, a["q"].data_ptr()) and first.lengths != 0
        assert (then.q, then.seqused_k) == (first.rotated, first.lengths)
        assert (then.k, then.v) == (a["k_cache"].data_ptr(), a["v_cache"].data_ptr())
        assert then.page_table == a["page_table"].data_ptr()
        assert first.batch == 2 and (first.rows_q, first.rows_new) == (3, 3)
        assert (first.num_heads_q, first.num_heads_kv) == (4, 2)
        assert (first.head_dim, first.head_dim_v, first.rotary_dim) == (64, 64, 32)
        assert (first.advance, first.num_positions, first.cache_length) == (1, 200, 0)
        assert first.page_size == 8 and first.capacity == 8 * a["page_table"].shape[1]
        assert (first.num_pages, first.num_cache_rows) == (len(a["k_cache"]), 2)
        assert (first.pieces_q, first.pieces_k, first.pieces_v) == (2 * 3 * 4 * 8, 96, 96)
        assert first.page_table_stride == a["page_table"].stride(0)
        for name in ("q", "k", "v", "k_cache", "v_cache"):
            strides = [getattr(first, f) for f in first._fields if f.startswith(f"{name}_stride_")]
            assert tuple(strides) == a[name].stride()[:3]
    assert [type(key) for key in toy.looked_up] == [AppendKey, KernelKey], "repeated calls go short"
    assert toy.looked_up[0] == AppendKey("sm_90a", "bf16", "interleaved")
    assert [type(key) for key in toy.launched] == [AppendKey, KernelKey] * 3


def test_launch_arguments_of_packed_rows_without_rotary(toy: toy_gpu.Launches):
    packed = setup(lens_q=(2, 5), new=(0, 4), is_packed_q=True, is_packed_new=True, page_size=None)
    a = on_toy(call_of(packed))
    for _ in range(2):
        flash_attn_with_kvcache(**a, num_splits=2)
        first, then = named(toy)[-2:]
        assert first.cu_seqlens_q == a["cu_seqlens_q"].data_ptr()
        assert first.cu_seqlens_k_new == a["cu_seqlens_k_new"].data_ptr()
        assert (first.rows_q, first.rows_new, first.batch) == (9, 6, 2)
        assert (first.pieces_q, first.pieces_k) == (0, 6 * 2 * 8)
        assert (first.k_stride_batch, first.k_stride_row) == (0, a["k"].stride(0))
        assert first.capacity == first.page_size == a["k_cache"].shape[1]
        assert first.num_pages == first.num_cache_rows == 2 and first.page_table == 0
        assert then.q == a["q"].data_ptr() and then.seqused_k == first.lengths
    assert [type(key) for key in toy.launched] == [AppendKey, KernelKey] * 2
    # Few rows are merged by attention itself; the kernel for more of them is ready all the same.
    names = sorted(type(key).__name__ for key in toy.looked_up)
    assert names == ["AppendKey", "CombineKey", "KernelKey"]


def test_one_integer_is_a_launch_argument(toy: toy_gpu.Launches, monkeypatch: pytest.MonkeyPatch):
    from flash_cute import cache_request as module

    fill = lambda length, *_: toy_gpu.on_gpu(int32(length, length))
    monkeypatch.setattr(module, "fill_lengths", fill)
    a = on_toy(call_of(setup(page_size=None, rotary="halves")))
    capacity = a["k_cache"].shape[1]
    for length in (5, 9, 0, capacity - 3):
        flash_attn_with_kvcache(**a | {"cache_seqlens": length})
        first, then = named(toy)[-2:]
        assert (first.cache_seqlens, first.cache_length) == (0, length)
        assert first.advance == 0 and then.seqused_k == first.lengths
    assert len(toy.looked_up) == 2
    for wrong in (capacity - 2, -1, True):
        with pytest.raises(InvalidProblem, match=f"cache_seqlens is {wrong}, expected"):
            flash_attn_with_kvcache(**a | {"cache_seqlens": wrong})
    short = {name: cut(a[name], slice(10)) for name in ("rotary_cos", "rotary_sin")}
    for _ in range(2):
        flash_attn_with_kvcache(**a | short | {"cache_seqlens": 7})
        with pytest.raises(InvalidProblem, match=r"is 10, expected at least 11 \(3 positions from"):
            flash_attn_with_kvcache(**a | short | {"cache_seqlens": 8})
    flash_attn_with_kvcache(**a | short)  # a tensor of lengths, which nobody reads


def test_chosen_rows_and_left_padding_reach_both_kernels(toy: toy_gpu.Launches):
    a = on_toy(call_of(setup(has_batch_idx=True, firsts=(1, 4), rotary="interleaved")))
    for _ in range(3):
        flash_attn_with_kvcache(**a)
        first, then = named(toy)[-2:]
        address = a["cache_batch_idx"].data_ptr()
        assert first.cache_batch_idx == then.batch_idx == address
        assert then.leftpad == a["cache_leftpad"].data_ptr()
        assert first.num_cache_rows == len(a["page_table"]) == 4
    assert len(toy.looked_up) == 2


def test_layers_share_the_counts_of_parts(toy: toy_gpu.Launches):
    """They are made from the lengths that layers share: those before the append."""
    zeros = lambda *shape: toy_gpu.on_gpu(torch.zeros(shape, dtype=BF16))
    caches = {name: zeros(2, 8192, 2, 64) for name in ("k_cache", "v_cache")}
    a = {"q": zeros(2, 1, 8, 64), "k": zeros(2, 1, 2, 64), "v": zeros(2, 1, 2, 64), **caches}
    lengths = toy_gpu.on_gpu(int32(5, 8000))
    kinds = []
    for _ in range(3):
        flash_attn_with_kvcache(**a, cache_seqlens=lengths)
        kinds.append([type(key) for key in toy.launched])
        toy.launched.clear()
    others = [AppendKey, KernelKey, CombineKey]
    assert kinds == [[AppendKey, PlannerKey, KernelKey, CombineKey], others, others]
    lengths += 1
    flash_attn_with_kvcache(**a, cache_seqlens=lengths)
    assert PlannerKey in [type(key) for key in toy.launched]


def test_values_alone_need_no_keys(declared: None):
    """The attention to go with it is not there yet, so this is as far as it gets."""
    a = on_toy(call_of(setup(qv="only")))
    arguments = append_plan._arguments(request_of(a))
    assert arguments.pieces_k == 0 == arguments.pieces_q and arguments.pieces_v == 2 * 3 * 2 * 8
    assert arguments.k_cache_stride_page == 0 and arguments.num_pages == len(a["v_cache"])


SAME_KERNEL = (
    {},
    {"ends": (1, 2)},
    {"new": (1, 1)},
    {"lens_q": (7, 7)},
    {"num_heads_q": 6},
    {"num_heads_kv": 4},
    {"head_dim": 128},
    {"head_dim_v": 32},
    {"page_size": None},
    {"page_size": 16},
    {"is_packed_q": True},
    {"is_packed_new": True},
    {"rotary_dim": 32},
    {"has_rotary_seqlens": True},
)


@pytest.mark.parametrize("kind", ROTARY)
def test_sizes_and_lengths_are_no_part_of_the_key(toy: toy_gpu.Launches, kind: str | None):
    for changes in SAME_KERNEL if kind else SAME_KERNEL[:-2]:
        a = on_toy(call_of(setup(rotary=kind, **changes)))
        flash_attn_with_kvcache(**a, causal=len(changes) == 0)
    keys = {key for key in toy.launched if isinstance(key, AppendKey)}
    assert keys == {AppendKey("sm_90a", "bf16", kind)}


def test_dtype_rotary_and_alignment_are_the_key(toy: toy_gpu.Launches):
    calls = [call_of(setup(dtype=dtype, rotary=kind)) for dtype in (BF16, FP16) for kind in ROTARY]
    for a in calls:
        flash_attn_with_kvcache(**on_toy(a))
    a = on_toy(call_of(setup(rotary="halves")))
    moved = torch.empty(a["k"].numel() + 1, dtype=BF16)[1:].view(a["k"].shape)
    for _ in range(2):
        flash_attn_with_kvcache(**a | {"k": toy_gpu.on_gpu(moved)})
    keys = [key for key in toy.launched if isinstance(key, AppendKey)]
    assert keys == [
        *(AppendKey("sm_90a", dtype, kind) for dtype in ("bf16", "fp16") for kind in ROTARY),
        *[AppendKey("sm_90a", "bf16", "halves", is_wide=False)] * 2,
    ]
    flash_attn_with_kvcache(**a)
    assert toy.launched[-2] == AppendKey("sm_90a", "bf16", "halves")
    assert cache.canonical_text(keys[0]) != cache.canonical_text(keys[1])


def test_repeated_calls_are_told_apart(toy: toy_gpu.Launches):
    a = on_toy(call_of(setup(rotary="halves")))
    pairs = {name: a[name] for name in ("rotary_cos", "rotary_sin")}
    wide = {name: toy_gpu.on_gpu(torch.cat([t, t], 1)) for name, t in pairs.items()}
    changes: list[dict[str, Any]] = [
        {},
        {"causal": True},
        {"rotary_interleaved": True},
        {"rotary_seqlens": a["cache_seqlens"]},
        wide,
        {name: cut(t, slice(100)) for name, t in wide.items()},
        {name: cut(a[name], slice(None), slice(1)) for name in ("k", "v")},
        {"page_table": cut(a["page_table"], slice(None), slice(1))},
        {"q": cut(a["q"], slice(None), slice(2))},
        dict.fromkeys((*pairs, "rotary_interleaved"), None) | {"rotary_interleaved": True},
    ]
    seen = []
    for _ in range(2):
        for change in changes:
            flash_attn_with_kvcache(**a | change)
            first = named(toy)[-2]
            seen.append((toy.launched[-2], first[15:-1], first.rotary_cos, first.rotary_seqlens))
    count = len(changes)
    assert seen[:count] == seen[count:] and len({repr(s) for s in seen}) == count
    assert len(toy.launched) == 4 * count
    assert sum(isinstance(key, AppendKey) for key in toy.looked_up) == count


def test_cache_that_attention_cannot_read_is_copied_after_the_append(
    toy: toy_gpu.Launches, monkeypatch: pytest.MonkeyPatch
):
    """Attention reads a copy, so that has to hold the new keys; they go into the cache itself."""
    a = on_toy(call_of(setup(page_size=None)))
    shape = a["k_cache"].shape
    odd = toy_gpu.on_gpu(torch.zeros((*shape[:3], 65), dtype=BF16)[..., :64])
    copied = []

    def copy(given: Any, inputs: Any) -> None:
        copied.append((given.k, inputs.k, list(toy.launched)))

    monkeypatch.setattr(launch, "_copy_into_room", copy)
    for _ in range(2):
        flash_attn_with_kvcache(**a | {"k_cache": odd})
        first, then = named(toy)[-2:]
        source, room, before = copied[-1]
        assert isinstance(before[-1], AppendKey) and not before[-1].is_wide
        assert first.k_cache == source.data_ptr() == odd.data_ptr()
        assert then.k == room.data_ptr() != odd.data_ptr()
        assert then.v == a["v_cache"].data_ptr()


def test_no_queries_still_append_and_no_sequences_launch_nothing(
    toy: toy_gpu.Launches, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(launch, "_without_keys", lambda problem, inputs: inputs.q)
    a = on_toy(call_of(setup(page_size=None)))
    names = ("q", "k", "v", "k_cache", "v_cache", "cache_seqlens")
    none = {name: cut(a[name], slice(0)) for name in names}
    for _ in range(2):
        assert flash_attn_with_kvcache(**none).shape == (0, 3, 4, 64)
    assert toy.launched == [] == toy.looked_up
    a = on_toy(call_of(setup(lens_q=(0, 0), rotary="halves")))
    for count in (1, 2):
        assert flash_attn_with_kvcache(**a).shape == (2, 0, 4, 64)
        assert len(toy.launched) == count
        assert (named(toy)[-1].pieces_q, named(toy)[-1].pieces_k) == (0, 96)


def test_refusals_come_before_anything_is_written(
    toy: toy_gpu.Launches, monkeypatch: pytest.MonkeyPatch
):
    a = on_toy(call_of(setup(rotary="halves")))
    plan = SplitPlan(2, 3, 1, 1, 1, 1, 1, 0, 1)
    other = SchedulerMetadata(toy_gpu.on_gpu(int32(1, 1)), plan)

    def refused(error: type[Exception], match: str, **changes: Any) -> None:
        with pytest.raises(error, match=match):
            flash_attn_with_kvcache(**a | changes)

    def refused_all() -> None:
        for name in ("q", "k", "v"):
            refused(InvalidProblem, f"out is the memory of {name}", out=a[name])
        short = {name: cut(a[name], slice(2)) for name in ("rotary_cos", "rotary_sin")}
        refused(InvalidProblem, r"is 2, expected at least 3 \(3 positions\)", **short)
        refused(InvalidProblem, "cache_seqlens is None, expected lengths", cache_seqlens=None)
        refused(InvalidProblem, "ver is 5", ver=5)
        refused(InvalidProblem, "rotary_interleaved is 1", rotary_interleaved=1)
        needy = toy_gpu.on_gpu(a["k"].clone()).requires_grad_()
        refused(UnsupportedProblem, "new keys are appended while an argument requires", k=needy)

    refused_all()
    assert toy.looked_up == []
    refused(InvalidProblem, "scheduler_metadata is a plan with", scheduler_metadata=other)
    assert toy.launched == []
    flash_attn_with_kvcache(**a)  # and with plans that are remembered
    refused_all()
    assert len(toy.launched) == 2
    monkeypatch.setattr(
        selection, "APPEND", dataclasses.replace(selection.APPEND, features=frozenset())
    )
    refused(UnsupportedProblem, "lacks append_kv; rotary ", softcap=1.0)
    assert len(toy.launched) == 2


@pytest.mark.parametrize("missing", [AppendKey, KernelKey, CombineKey])
def test_a_kernel_that_fails_to_compile_leaves_the_cache_alone(
    toy: toy_gpu.Launches, monkeypatch: pytest.MonkeyPatch, missing: type
):
    def executable(key: Any) -> Any:
        if isinstance(key, missing):
            raise RuntimeError("no compiler")
        return toy.executable(key)

    monkeypatch.setattr(compile, "executable", executable)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no compiler"):
            flash_attn_with_kvcache(**on_toy(call_of(setup())), num_splits=2)
    assert toy.launched == []


@pytest.mark.parametrize("missing", [AppendKey, KernelKey, CombineKey])
def test_a_first_call_in_a_capture_is_refused(
    toy: toy_gpu.Launches, monkeypatch: pytest.MonkeyPatch, missing: type
):
    def look_up(key: Any) -> Any:
        return None if isinstance(key, missing) else toy.executable(key)

    monkeypatch.setattr(current, "is_capturing", lambda: True)
    monkeypatch.setattr(cache, "lookup", look_up)
    a = on_toy(call_of(setup(rotary="halves")))
    for _ in range(2):
        with pytest.raises(CaptureError, match=missing.__name__):
            flash_attn_with_kvcache(**a, num_splits=2)
    assert toy.launched == []


def problem(**changes: Any) -> AttentionProblem:
    sizes: dict[str, Any] = dict(batch=1, seqlen_q=1, seqlen_k=4096, num_heads_q=8, num_heads_kv=8)
    dims = dict(head_dim=128, head_dim_v=128, dtype=BF16, device="cuda", has_seqused_k=True)
    return AttentionProblem(**(sizes | dims | {"has_new_keys": True} | changes))


def test_warmup_makes_the_append_ready_too(declared: None, monkeypatch: pytest.MonkeyPatch):
    made: list[Any] = []
    monkeypatch.setattr(compile, "prepare", lambda keys, *args, **kwargs: made.extend(keys))
    monkeypatch.setenv("FLASH_CUTE_ARCH", "sm_90a")
    halves = problem(has_rotary=True, is_rotary_interleaved=False, num_splits=3)
    compile.warmup([problem(), problem(has_rotary=True), halves, problem(has_new_keys=False)])
    found = [key for key in made if isinstance(key, AppendKey)]
    assert found == [AppendKey("sm_90a", "bf16", kind) for kind in ROTARY]
    assert [type(key) for key in made].count(CombineKey) == 1


def test_support_is_that_of_both_kernels(declared: None):
    h200 = Target.from_arch("sm_90a")
    for change in ({}, {"has_rotary": True}, {"page_size": 16}):
        assert selection.is_supported(problem(**change), h200)
    answer = selection.is_supported(problem(has_qv=True), h200)
    assert "FlashAttentionMlaSm90 lacks head_dim " in answer.reason
    b200 = Target.from_arch("sm_100a")
    assert selection.is_supported(problem(), b200)
    assert not selection.is_supported(problem(has_qv=True), b200)


def test_support_page_names_the_second_kernel(declared: None, monkeypatch: pytest.MonkeyPatch):
    from test_docs import support_table

    monkeypatch.setattr(support_table, "APPEND", selection.APPEND)
    page = support_table.page()
    assert f"| `rotary` | {Feature.ROTARY.doc} | yes, with `CacheAppender` |" in page
    assert "\n\n`CacheAppender` runs before attention" in page and page.endswith(".\n")


def test_what_cannot_be_counted_or_moved_is_refused():
    with pytest.raises(UnsupportedProblem, match="head_dim_v is 36, expected a multiple of 8"):
        selection.append_key(problem(head_dim_v=36), "sm_90a")
    assert selection.append_key(problem(has_new_keys=False), "sm_90a") is None
    big = torch.empty(1, dtype=BF16).expand(MAX_PIECES + 1, 8)
    with pytest.raises(UnsupportedProblem, match=f"v has {MAX_PIECES + 1} pieces .*: split it"):
        append_plan._pieces("pieces_v", big)


def test_host_time_of_a_repeated_call(toy: toy_gpu.Launches):
    """The toy allocates and launches in Python: this bounds the rest, with room for a busy host."""
    a = on_toy(call_of(setup(rotary="halves")))
    flash_attn_with_kvcache(**a)
    best = math.inf
    for _ in range(50):
        begin = time.perf_counter()
        for _ in range(20):
            flash_attn_with_kvcache(**a)
        best = min(best, (time.perf_counter() - begin) / 20)
    assert best < 90e-6, f"{best * 1e6:.1f} µs"


# ---- Machine code --------------------------------------------------------------------------------


@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("is_wide", [True, False])
@pytest.mark.parametrize("kind", ROTARY)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_kernels_compile_without_spills(arch: str, is_wide: bool, kind: str | None, dtype: str):
    pytest.importorskip("cutlass")
    kernel = selection.kernel_for(AppendKey(arch, dtype, kind, is_wide))
    assert type(kernel).__name__ == selection.APPEND.kernel
    report = compile.inspect_kernel(kernel, arch)
    if report.missing:
        pytest.skip("; ".join(report.missing))
    checks.assert_no_spills(report)
    assert report.registers is not None and report.registers <= 64
    assert f".entry {kernel.name}" in report.ptx and "bar.sync" not in report.ptx
    # Rows of q (where rotated), k and v, each stored in one place.
    rows = 3 if kind else 2
    singles = report.ptx.count("st.global.b16") + report.ptx.count("st.global.u16")
    assert report.ptx.count("st.global.v4.b32") == (rows if is_wide else 0)
    assert singles == (0 if is_wide else 8 * rows)


@pytest.mark.compile
def test_the_kernel_takes_what_the_host_passes(declared: None, monkeypatch: Any, tmp_path: Any):
    """The real kernels behind the toy's tensors: they are compiled once, and fail at the driver."""
    pytest.importorskip("cutlass")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: the tests below run on it")
    executable = compile.executable
    toy_gpu.install(monkeypatch)
    monkeypatch.setattr(compile, "executable", executable)
    monkeypatch.setattr(cache, "_memory", {})
    monkeypatch.setenv("FLASH_CUTE_CACHE_DIR", str(tmp_path / "kernels"))
    before = cache_info().compiles
    for length in (5, 7):
        a = call_of(setup(ends=(length, 2), rotary="interleaved"))
        with pytest.raises(RuntimeError, match="cudaErrorInsufficientDriver|cudaErrorNoDevice"):
            flash_attn_with_kvcache(**on_toy(a))
    assert cache_info().compiles - before == 2
