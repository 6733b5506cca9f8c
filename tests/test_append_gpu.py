"""What precedes attention, on a GPU: the kernel alone, and with attention behind it.

The CPU reference says what is right; `test_kvcache` holds that to a definition.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import checks
import pytest
import torch
from test_append import BF16, FP16, INT_MAX, ROTARY, request_of, setup
from test_kvcache import WILD, Setup, call_of, int32

from flash_cute import (
    append_plan,
    cache_info,
    flash_attn_with_kvcache,
    launch,
    plan,
    reference,
    selection,
)
from flash_cute.cache_request import check_cache_values, slots
from flash_cute.problem import AttentionInputs
from flash_cute.reference_cache import append, lower
from flash_cute.selection import AppendKey


def on_cuda(a: dict[str, Any]) -> dict[str, Any]:
    """A copy of a call on the GPU."""
    return {
        name: value.cuda() if isinstance(value, torch.Tensor) else value
        for name, value in a.items()
    }


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu()


def assert_turned(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Fail unless rows are rotated and rounded once: float32 sums of two products leave a bit."""
    checks.assert_same_special(name, got, want)
    if not got.numel():
        return
    want64, got64 = want.double().nan_to_num(), got.double().nan_to_num()
    allowed = torch.finfo(want.dtype).eps * want64.abs() + 1e-6 * want64.abs().max()
    wrong = (got64 - want64).abs() > allowed
    assert not wrong.any(), f"{name}: {int(wrong.sum())} wrong, first at {wrong.nonzero()[0]}"
    count = int((checks.bits(got) != checks.bits(want)).sum())
    assert count <= 2 + 0.002 * got.numel(), f"{name}: {count} of {got.numel()} bits are rounded up"


@dataclasses.dataclass
class Expected:
    """What a call comes to on the CPU."""

    lowered: Any
    cache: dict[str, torch.Tensor | None]
    written: tuple[torch.Tensor, torch.Tensor]  # indices of the first two axes of the cache
    lengths: torch.Tensor
    num_queries: int | None  # of packed ones: rows after them belong to no sequence


def expected(a: dict[str, Any]) -> Expected:
    """Append on the CPU to copies of the caches."""
    a = {name: t.clone() if isinstance(t, torch.Tensor) else t for name, t in a.items()}
    request = request_of(a)
    spans = check_cache_values(request)
    lowered = lower(request, spans)
    append(request, spans, lowered.new)
    index = [slots(request, s, s.end, s.end + s.num_new) for s in spans]
    return Expected(
        lowered=lowered,
        cache={name: a[name] for name in ("k_cache", "v_cache")},
        written=tuple(torch.cat(part) for part in zip(*index, strict=True)),  # type: ignore[arg-type]
        lengths=int32(*(s.end + s.num_new for s in spans)),
        num_queries=int(a["cu_seqlens_q"][-1]) if "cu_seqlens_q" in a else None,
    )


def assert_cache(got: dict[str, Any], want: Expected, is_rotated: bool) -> None:
    """Compare the caches bit by bit; rotated keys as `assert_turned` does."""
    for name, rows in want.cache.items():
        if rows is None:
            continue
        mine = on_cpu(got[name])
        if name == "k_cache" and is_rotated:
            assert_turned(name, mine[want.written], rows[want.written])
            rows = rows.clone()
            rows[want.written] = mine[want.written]
        checks.assert_same_bits(name, mine, rows)


def check_step(a: dict[str, Any], on_gpu: dict[str, Any] | None = None) -> AppendKey:
    """Run the kernel alone on a call and compare all that it writes; returns its key."""
    want, is_rotated = expected(a), "rotary_cos" in a
    b = on_cuda(a) if on_gpu is None else on_gpu
    request = request_of(b)
    step = append_plan.first_step(request, None)
    step.run()
    assert_cache(b, want, is_rotated)
    checks.assert_same_bits("lengths", on_cpu(step.lengths), want.lengths)
    if is_rotated:
        rows = slice(want.num_queries) if want.num_queries is not None else slice(None)
        assert step.q.is_contiguous()
        assert_turned("q", on_cpu(step.q)[rows], want.lowered.inputs.q[rows])
    else:
        assert step.q is request.arguments.query
    moved = append_plan._tensors(request)[: append_plan._NUM_WIDE]
    is_wide = all(plan.is_readable(tensor) for tensor in moved if tensor is not None)
    key = selection.append_key(request.problem, selection.current_target().arch, is_wide)
    assert key is not None
    return key


PAGE_SIZES = (None, 1, 3, 16, 64)
MASKS: tuple[dict[str, Any], ...] = ({}, {"causal": True}, {"window_size": (5, 2)})


def cases(**changes: Any) -> list[Setup]:
    """Calls of every kind: padded and packed, with pages or without, ragged and empty."""
    found = []
    for n, page_size in enumerate((*PAGE_SIZES, *PAGE_SIZES, *PAGE_SIZES)):
        is_packed_new, is_packed_q = n % 2 == 0, n % 3 == 0
        lengths: dict[str, Any] = {
            "ends": ((17, 0, 40), (5, 63, 1), (0, 0, 9))[n % 3],
            "new": ((1, 4, 0), (0, 70, 3))[n % 4 // 2] if is_packed_new else (1 + 4 * (n % 3),) * 3,
            "lens_q": (3, 0, 5) if is_packed_q else (1 + n % 4,) * 3,
        }
        found.append(
            setup(
                **{
                    **lengths,
                    "page_size": page_size,
                    "is_packed_q": is_packed_q,
                    "is_packed_new": is_packed_new,
                    "has_batch_idx": n % 4 in (1, 2),
                    "firsts": (0, 0, 1) if n % 5 == 0 else None,
                    "has_rotary_seqlens": n % 3 == 1 and bool(changes.get("rotary")),
                    "seed": n,
                }
                | changes
            )
        )
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("kind", ROTARY)
def test_the_kernel_alone_matches_the_reference(any_gpu: Any, kind: str | None, dtype: torch.dtype):
    for n, s in enumerate(cases(rotary=kind, dtype=dtype)):
        check_step(call_of(s) | MASKS[n % 3])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["interleaved", "halves"])
@pytest.mark.parametrize("dim", [16, 24, 64, 72, 96, 128, 192, 256])
def test_fractions_of_any_head_dim(any_gpu: Any, kind: str, dim: int):
    for rotary_dim in {16, dim // 32 * 16, dim // 16 * 16} - {0}:
        for dim_v, heads in ((dim, (4, 2)), (8, (5, 1)), (dim, (6, 6))):
            sizes = {"head_dim": dim, "head_dim_v": dim_v, "num_heads_q": heads[0]}
            sizes |= {"rotary": kind, "rotary_dim": rotary_dim, "num_heads_kv": heads[1]}
            check_step(call_of(setup(**sizes, lens_q=(7, 7), new=(9, 9))) | {"causal": True})


@pytest.mark.gpu
def test_values_alone(any_gpu: Any):
    for page_size in (None, 4):
        check_step(call_of(setup(qv="only", page_size=page_size, head_dim_v=512)))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ROTARY)
@pytest.mark.parametrize("order", [name for name in checks.LAYOUTS if "shared" not in name])
def test_any_strides_and_alignment(any_gpu: Any, order: str, kind: str | None):
    """Of all tensors, and of one at a time."""
    a = call_of(setup(rotary=kind, has_batch_idx=True, num_heads_kv=4))
    relaid = lambda tensor: checks.LAYOUTS[order](tensor, tensor, tensor)[0]
    names = ("q", "k", "v", "k_cache", "v_cache")
    for some in (names, *((name,) for name in names)):
        b = on_cuda(a)
        b.update({name: relaid(b[name]) for name in some})
        if kind and len(some) > 1:  # a fused table, and one that 16-byte loads cannot read
            for name in ("rotary_cos", "rotary_sin"):
                at = 1 if "unaligned" in order else 8
                wide = b[name].new_full((len(b[name]), 24), math.nan)
                b[name] = wide[:, at : at + 8].copy_(b[name])
        key = check_step(a, b)
        assert key.is_wide == ("unaligned" not in order)


def dropped(a: dict[str, Any], capacity: int) -> tuple[dict[tuple[int, int], tuple[int, int]], Any]:
    """What a hostile call may write: slot -> (sequence, new row), and the lengths afterwards."""
    slots_written: dict[tuple[int, int], tuple[int, int]] = {}
    lengths = []
    table, num_rows = a.get("page_table"), len(a["v_cache"])
    for b, length in enumerate(a["cache_seqlens"].tolist()):
        num_new = a["v"].shape[1]
        lengths.append(0 if length < 0 else min(capacity, length + num_new))
        row = int(a["cache_batch_idx"][b]) if "cache_batch_idx" in a else b
        if length < 0 or not 0 <= row < (num_rows if table is None else len(table)):
            continue
        for i in range(num_new):
            page, slot = row, length + i
            if slot >= capacity:
                continue
            if table is not None:
                size = a["v_cache"].shape[1]
                page, slot = int(table[row, slot // size]), slot % size
            if 0 <= page < num_rows:
                slots_written[page, slot] = (b, i)
    return slots_written, int32(*lengths)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [None, 1, 8])
@pytest.mark.parametrize("has_batch_idx", [False, True])
def test_what_does_not_fit_is_dropped(any_gpu: Any, page_size: int | None, has_batch_idx: bool):
    """Lengths, pages and rows that nobody has checked: nothing outside the cache is touched."""
    capacity, heads, dim, batch = 16, 2, 64, 9
    lengths = int32(16, 15, 14, -1, INT_MAX, -INT_MAX - 1, 0, 3, 13)
    pages_per_row = 1 if page_size is None else capacity // page_size
    num_rows = 12 if page_size is None else 14 * pages_per_row
    source = checks.generator("cpu", 3)
    shape = (num_rows + 2, page_size or capacity, heads, dim)
    around = {n: torch.randn(shape, generator=source).to(BF16) for n in ("k_cache", "v_cache")}
    a: dict[str, Any] = {name: tensor[1:-1] for name, tensor in around.items()}
    for name in ("k", "v"):
        a[name] = torch.randn((batch, 3, heads, dim), generator=source).to(BF16)
    a |= {"q": torch.zeros(batch, 1, heads, dim, dtype=BF16), "cache_seqlens": lengths}
    if page_size is not None:
        tables = torch.randperm(num_rows, generator=source).to(torch.int32).view(14, -1)
        table = tables[1:-1]  # beside it are pages that nobody names
        table[6], table[7] = -1, num_rows
        table[8, -1] = INT_MAX
        a["page_table"] = table if has_batch_idx else table[:batch]
    elif not has_batch_idx:
        around = {name: tensor[: batch + 2].clone() for name, tensor in around.items()}
        a.update({name: tensor[1:-1] for name, tensor in around.items()})
    if has_batch_idx:
        a["cache_batch_idx"] = int32(9, 10, 11, 0, 1, 2, -1, 12, INT_MAX)
    b = on_cuda(a)
    surroundings = {name: tensor.cuda() for name, tensor in around.items()}
    b.update({name: tensor[1:-1] for name, tensor in surroundings.items()})
    if page_size is not None:
        b["page_table"] = tables.cuda()[1 : 1 + len(a["page_table"])]
    step = append_plan.first_step(request_of(b), None)
    step.run()
    written, after = dropped(a, capacity)
    checks.assert_same_bits("lengths", on_cpu(step.lengths), after)
    for name in ("k", "v"):
        for where, source_row in written.items():
            a[f"{name}_cache"][where] = a[name][source_row]
        got = on_cpu(surroundings[f"{name}_cache"])
        checks.assert_same_bits(name, got, around[f"{name}_cache"])
    assert len(written) >= 3


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["interleaved", "halves"])
def test_positions_outside_the_tables_are_nan(any_gpu: Any, kind: str):
    a = call_of(setup(lens_q=(3,) * 5, ends=(4,) * 5, new=(3,) * 5, rotary=kind, page_size=None))
    a["rotary_seqlens"] = int32(-1, 198, 200, INT_MAX, 7)
    b = on_cuda(a)
    for name in ("rotary_cos", "rotary_sin"):  # angles beside the tables, which are not theirs
        b[name] = torch.nn.functional.pad(a[name], (0, 0, 1, 1), value=0.5).cuda()[1:-1]
    step = append_plan.first_step(request_of(b | {"causal": True}), None)
    step.run()
    positions = a["rotary_seqlens"].long()[:, None] + torch.arange(3)
    is_outside = (positions < 0) | (positions >= 200)
    for name, rows in (("q", on_cpu(step.q)), ("k", on_cpu(b["k_cache"])[:, 4:7])):
        assert (rows[..., :16].isnan().all(-1) == is_outside[..., None]).all(), name
        checks.assert_same_bits(name, rows[..., 16:], a[name][..., 16:])


@pytest.mark.gpu
def test_packed_rows_of_no_sequence_are_dropped(any_gpu: Any):
    """The tensors are larger than cu_seqlens says, and it may start late."""
    s = setup(new=(2, 3), is_packed_new=True, page_size=None, rotary="halves")
    b = on_cuda(call_of(s))
    b["cu_seqlens_k_new"] = int32(1, 1, 4).cuda()
    before = {name: b[name].clone() for name in ("k_cache", "v_cache")}
    append_plan.first_step(request_of(b), None).run()
    before["v_cache"][1, 9:12] = b["v"][1:4]
    checks.assert_same_bits("v_cache", b["v_cache"], before["v_cache"])
    before["k_cache"][1, 9:12] = b["k_cache"][1, 9:12]
    checks.assert_same_bits("k_cache", b["k_cache"], before["k_cache"])


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements(any_gpu: Any):
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("too little memory")
    pages, size, heads, dim = 300_000, 16, 8, 64
    make = lambda *shape: torch.randn(shape, device="cuda").to(BF16)
    k_cache, v_cache = (
        torch.zeros(pages, size, heads, dim, dtype=BF16, device="cuda") for _ in range(2)
    )
    a = {"q": make(2, 1, heads, dim), "k": make(2, 3, heads, dim), "v": make(2, 3, heads, dim)}
    table = int32([0, pages - 1], [pages - 2, 150_000]).cuda()
    lengths = int32(14, 29).cuda()
    caches = {"k_cache": k_cache, "v_cache": v_cache}
    append_plan.first_step(
        request_of(a | caches | {"page_table": table, "cache_seqlens": lengths}), None
    ).run()
    for rows, new in ((k_cache, a["k"]), (v_cache, a["v"])):
        first = torch.cat([rows[0, 14:], rows[pages - 1, :1]])
        checks.assert_same_bits("cache", torch.stack([first, rows[150_000, 13:]]), new)
        assert int(rows.count_nonzero()) == int(new.count_nonzero())


# ---- With attention behind it --------------------------------------------------------------------


def is_declared(s: Setup) -> bool:
    """Whether there is a kernel for the attention of a call."""
    return bool(selection.is_supported(request_of(on_cuda(call_of(s))).problem))


def check(a: dict[str, Any], **same: Any) -> None:
    """Make a call and compare results and cache with the reference; `same` has no effect on it."""
    want, b = expected(a), on_cuda(a)
    pair = flash_attn_with_kvcache(**b, **same, return_softmax_lse=True)
    assert_cache(b, want, "rotary_cos" in a)
    fields = {
        f.name: getattr(want.lowered.inputs, f.name) for f in dataclasses.fields(AttentionInputs)
    }
    inputs = AttentionInputs(**on_cuda(fields))
    problem = dataclasses.replace(want.lowered.problem, device="cuda")
    exact = reference.attention(problem, inputs, compute_dtype=torch.float64, round_result=False)
    lowprec = reference.attention(problem, inputs, lowprec=True)
    results = [pair, exact, lowprec]
    if want.num_queries is not None:
        rows = slice(want.num_queries)
        results = [(out[rows], lse[:, rows]) for out, lse in results]
    checks.assert_attention(*results)


OPTIONS: list[dict[str, Any]] = [{}, {"causal": True}, {"window_size": (12, 1)}]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ROTARY)
@pytest.mark.parametrize("page_size", [None, 1, 4, 16, 64])
def test_calls_match_the_reference(gpu: None, page_size: int | None, kind: str | None):
    """Half of the cases for each size of pages: attention has a kernel for each."""
    found = []
    half = slice(8) if page_size in (1, 4, 64) else slice(7, None)
    sizes = {"head_dim": 128, "head_dim_v": 128, "num_heads_q": 8}
    for s in cases(**sizes, rotary=kind, page_size=page_size)[half]:
        plain = dataclasses.replace(s, has_batch_idx=False, firsts=None)
        found += [one for one in (s, plain) if is_declared(one)][:1]
    if not found:
        pytest.skip("no kernel declares such pages")
    for n, s in enumerate(dict.fromkeys(found)):
        check(call_of(s) | OPTIONS[n // 3 % 3], num_splits=(1, 3)[n // 2 % 2])


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(64, 64), (96, 72), (192, 128), (256, 256)], ids=str)
def test_head_dims(gpu: None, dims: tuple[int, int]):
    """Dtypes, and what is done to scores, by turns: attention has a kernel for each."""
    turns = ((BF16, {"softcap": 3.0}), (FP16, {"causal": True}), (BF16, {"attention_chunk": 16}))
    for (dtype, options), kind in itertools.product(turns, ("interleaved", "halves")):
        sizes = {"head_dim": dims[0], "head_dim_v": dims[1], "rotary": kind, "dtype": dtype}
        s = setup(**sizes, rotary_dim=dims[0] // 16 * 16, ends=(70, 33), new=(5, 5), lens_q=(5, 5))
        check(call_of(s) | options)


@pytest.mark.gpu
def test_long_caches_and_many_heads(gpu: None):
    for kind, new, page_size in (("halves", 1, 64), ("interleaved", 130, 16), ("halves", 7, None)):
        sizes: dict[str, Any] = {"ends": (1900, 3, 700), "new": (new,) * 3, "lens_q": (new,) * 3}
        s = setup(**sizes, num_heads_q=16, head_dim=128, head_dim_v=128, page_size=page_size,
                  rotary=kind, rotary_dim=128)  # fmt: skip
        tables = torch.rand(2100, 64, generator=checks.generator("cpu", 1)) * 6
        angles = {"rotary_cos": tables.cos().to(BF16), "rotary_sin": tables.sin().to(BF16)}
        check(call_of(s) | angles | {"causal": kind == "halves"})


@pytest.mark.gpu
def test_one_length_for_all(gpu: None):
    for length in (0, 5, 9):
        for kind in ROTARY:
            a = call_of(setup(ends=(length, length), rotary=kind, page_size=16))
            want, b = expected(a), on_cuda(a)
            out = flash_attn_with_kvcache(**b | {"cache_seqlens": length}, causal=True)
            assert_cache(b, want, kind is not None)
            again = on_cuda(a)
            checks.assert_same_bits("out", out, flash_attn_with_kvcache(**again, causal=True))


@pytest.mark.gpu
def test_nothing_but_the_append_where_there_is_no_query(gpu: None):
    a = call_of(setup(lens_q=(0, 0), rotary="halves"))
    want, b = expected(a), on_cuda(a)
    assert flash_attn_with_kvcache(**b).shape == (2, 0, 4, 64)
    assert_cache(b, want, True)


@pytest.mark.gpu
def test_a_cache_that_attention_cannot_read(gpu: None):
    """It is copied for attention, after the append."""
    for order in ("unaligned_rows", "unaligned_start", "every_other"):
        a = call_of(setup(rotary="halves", page_size=None))
        want, b = expected(a), on_cuda(a)
        for name in ("k_cache", "v_cache", "q"):
            (b[name],) = checks.LAYOUTS[order](b[name], b[name], b[name])[:1]
        out = flash_attn_with_kvcache(**b, causal=True)
        assert_cache(b, want, True)
        checks.assert_same_bits("out", out, flash_attn_with_kvcache(**on_cuda(a), causal=True))


@pytest.mark.gpu
def test_one_at_a_time_is_all_at_once(gpu: None):
    """Token by token the cache gets the same bits, by repeated calls that plan nothing anew."""
    s = setup(ends=(5, 40), new=(20, 20), lens_q=(20, 20), rotary="halves", page_size=16)
    a = call_of(s)
    whole, steps = on_cuda(a), on_cuda(a)
    together = flash_attn_with_kvcache(**whole, causal=True)
    single = []
    for i in range(20):
        one = {name: steps[name][:, i : i + 1] for name in ("q", "k", "v")}
        lengths = {"cache_seqlens": steps["cache_seqlens"] + i}
        single.append(flash_attn_with_kvcache(**steps | one | lengths, causal=True))
        if i == 1:
            plans = len(append_plan._plans), len(launch._plans), cache_info().compiles
    assert plans == (len(append_plan._plans), len(launch._plans), cache_info().compiles)
    for name in ("k_cache", "v_cache"):
        checks.assert_same_bits(name, steps[name], whole[name])
    torch.testing.assert_close(torch.cat(single, 1), together, atol=0.02, rtol=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ROTARY)
def test_graphs_replay_with_new_lengths_pages_and_rows(gpu: None, kind: str | None):
    made = [
        call_of(setup(ends=ends, new=(1, 1, 1), lens_q=(1, 1, 1), rotary=kind, seed=seed))
        for seed, ends in enumerate([(5, 60, 33), (0, 60, 8), (62, 15, 7)])
    ]
    width = max(a["page_table"].shape[1] for a in made)
    num_pages = max(len(a["k_cache"]) for a in made)
    for a in made:  # of one shape
        wild = int32(*WILD).repeat(3, width)[:, :width].clone()
        wild[:, : a["page_table"].shape[1]] = a["page_table"]
        a["page_table"] = wild
        for name in ("k_cache", "v_cache"):
            more = torch.full((num_pages, *a[name].shape[1:]), math.nan, dtype=BF16)
            more[: len(a[name])] = a[name]
            a[name] = more
    static = on_cuda(made[0])
    flash_attn_with_kvcache(**static, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn_with_kvcache(**static, causal=True)
    for a in (*made, made[0]):
        for name, value in a.items():
            if isinstance(value, torch.Tensor):
                static[name].copy_(value)
        graph.replay()
        b = on_cuda(a)
        checks.assert_same_bits("out", out, flash_attn_with_kvcache(**b, causal=True))
        assert_cache(static, expected(a), kind is not None)
        for name in ("k_cache", "v_cache"):
            checks.assert_same_bits(name, static[name], b[name])


@pytest.mark.gpu
def test_side_streams(gpu: None):
    a = call_of(setup(rotary="halves", ends=(500, 800), page_size=64))
    tables = torch.rand(900, 8, generator=checks.generator("cpu", 1)) * 6
    a |= {"rotary_cos": tables.cos().to(BF16), "rotary_sin": tables.sin().to(BF16)}
    first, second = on_cuda(a), on_cuda(a)
    expected_out = flash_attn_with_kvcache(**first, causal=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(1_000_000)
        late = {name: second[name].clone() for name in ("q", "k", "v")}
        got = flash_attn_with_kvcache(**second | late, causal=True)
    torch.cuda.synchronize()
    checks.assert_same_bits("out", got, expected_out)
    checks.assert_same_bits("k_cache", second["k_cache"], first["k_cache"])
