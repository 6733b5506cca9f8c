"""flash_attn_with_kvcache against a definition of its own: loops over sequences, rows and pages.

Everything in the cache that belongs to no sequence is NaN, and so is what surrounds packed tensors;
entries of page tables that no row needs are wild. After each call the cache is compared bit by bit.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import checks
import pytest
import torch
import toy_gpu

from flash_cute import (
    block_mask_from,
    cache_request,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    kvcache,
)

DOUBLE = torch.float64
WILD = (-1, 2**31 - 1, 12345)  # page ids that must never be looked up


def int32(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def starts(lengths: list[int]) -> torch.Tensor:
    return int32(*itertools.accumulate(lengths, initial=0))


# ---- Calls ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a call is made of; lengths per sequence."""

    lens_q: tuple[int, ...] = (3, 3)
    ends: tuple[int, ...] = (5, 9)  # keys in the cache, left padding included
    new: tuple[int, ...] | None = None  # keys to append
    firsts: tuple[int, ...] | None = None  # left padding
    page_size: int | None = None
    has_batch_idx: bool = False
    is_packed_q: bool = False
    is_packed_new: bool = False
    rotary: str | None = None  # "interleaved", "halves"
    rotary_dim: int = 16
    has_rotary_seqlens: bool = False
    num_heads_q: int = 2
    num_heads_kv: int = 1
    head_dim: int = 32
    head_dim_v: int = 8
    qv: str | None = None  # "both", "only"
    dtype: torch.dtype = DOUBLE
    seed: int = 0


def rows_of(lengths: tuple[int, ...], shape: tuple[int, ...], is_packed: bool, make: Any) -> Any:
    """Rows per sequence: packed with NaN after the last, or a batch (lengths are equal then)."""
    if is_packed:
        packed = make(sum(lengths) + 2, *shape)
        packed[sum(lengths) :] = math.nan
        return packed
    assert len(set(lengths)) == 1
    return make(len(lengths), lengths[0], *shape)


def lay_out(s: Setup, source: torch.Generator, arguments: dict[str, Any]) -> int:
    """Choose rows or pages for the sequences; returns the size of the cache's first axis."""
    batch, capacity = len(s.ends), max(map(sum, zip(s.ends, s.new or s.ends, strict=True))) + 3
    order = torch.randperm(batch + 2, generator=source)[:batch].to(torch.int32)
    if s.has_batch_idx:
        arguments["cache_batch_idx"] = order
    if s.page_size is None:
        arguments["capacity"] = capacity
        return batch + 2 if s.has_batch_idx else batch
    width = -(-capacity // s.page_size)
    table = int32(*WILD).repeat(batch + 2, width)[:, :width].contiguous()
    num_pages = width * batch + 3
    free = torch.randperm(num_pages, generator=source).tolist()
    for b in range(batch):
        row = int(order[b]) if s.has_batch_idx else b
        first = s.firsts[b] if s.firsts else 0
        end = s.ends[b] + (s.new[b] if s.new else 0)
        for column in range(first // s.page_size, -(-end // s.page_size)):
            table[row, column] = free.pop()
    arguments["page_table"] = table if s.has_batch_idx else table[:batch]
    arguments["capacity"] = s.page_size
    return num_pages


def call_of(s: Setup) -> dict[str, Any]:
    """The arguments of a call, all lengths as tensors."""
    source = checks.generator("cpu", s.seed)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=source, dtype=DOUBLE).to(s.dtype)

    a: dict[str, Any] = {"cache_seqlens": int32(*s.ends)}
    num_rows = lay_out(s, source, a)
    shape = (num_rows, a.pop("capacity"), s.num_heads_kv)
    for name, dim in (("k_cache", s.head_dim), ("v_cache", s.head_dim_v)):
        a[name] = torch.full((*shape, dim), math.nan, dtype=s.dtype)
    for b, j in keys_in_cache(s):
        for name, dim in (("k_cache", s.head_dim), ("v_cache", s.head_dim_v)):
            a[name][slot(a, b, j)] = make(s.num_heads_kv, dim)
    a["q"] = rows_of(s.lens_q, (s.num_heads_q, s.head_dim), s.is_packed_q, make)
    if s.is_packed_q:
        a["cu_seqlens_q"] = starts(list(s.lens_q))
    if s.firsts:
        a["cache_leftpad"] = int32(*s.firsts)
    if s.qv:
        a["qv"] = rows_of(s.lens_q, (s.num_heads_q, s.head_dim_v), s.is_packed_q, make)
    if s.new is not None:
        a["k"] = rows_of(s.new, (s.num_heads_kv, s.head_dim), s.is_packed_new, make)
        a["v"] = rows_of(s.new, (s.num_heads_kv, s.head_dim_v), s.is_packed_new, make)
        if s.is_packed_new:
            a["cu_seqlens_k_new"] = starts(list(s.new))
    if s.qv == "only":
        a.update(q=None, k_cache=None, only_qv=True)
        a.pop("k", None)
    if s.rotary:
        angles = torch.rand(200, s.rotary_dim // 2, generator=source, dtype=DOUBLE) * 6
        a.update(rotary_cos=angles.cos().to(s.dtype), rotary_sin=angles.sin().to(s.dtype))
        a["rotary_interleaved"] = s.rotary == "interleaved"
    if s.has_rotary_seqlens:
        a["rotary_seqlens"] = int32(*(7 * b + 2 for b in range(len(s.ends))))
    return a


def keys_in_cache(s: Setup) -> list[tuple[int, int]]:
    firsts = s.firsts or (0,) * len(s.ends)
    return [(b, j) for b, end in enumerate(s.ends) for j in range(firsts[b], end)]


# ---- The definition ------------------------------------------------------------------------------


def slot(a: dict[str, Any], b: int, j: int) -> tuple[int, int]:
    """Where row j of sequence b lies in the cache."""
    row = int(a["cache_batch_idx"][b]) if "cache_batch_idx" in a else b
    if "page_table" not in a:
        return row, j
    size = a["v_cache"].shape[1]
    return int(a["page_table"][row, j // size]), j % size


def turned(row: torch.Tensor, a: dict[str, Any], position: int) -> torch.Tensor:
    """A row (heads, dim) rotated to a position: each pair is a complex number times another."""
    row = row.to(DOUBLE, copy=True)
    half = a["rotary_cos"].shape[1]
    for i in range(half):
        pair = [2 * i, 2 * i + 1] if a.get("rotary_interleaved", True) else [i, half + i]
        z = torch.complex(row[:, pair[0]].clone(), row[:, pair[1]].clone())
        factor = complex(a["rotary_cos"][position, i], a["rotary_sin"][position, i])
        row[:, pair[0]], row[:, pair[1]] = (z * factor).real, (z * factor).imag
    return row


def take(a: dict[str, Any], name: str, cu: str, b: int) -> list[torch.Tensor]:
    """The rows of sequence b of a packed or batched tensor."""
    if a.get(name) is None:
        return []
    if cu in a:
        return list(a[name][int(a[cu][b]) : int(a[cu][b + 1])])
    return list(a[name][b])


@dataclasses.dataclass
class Sequence:
    """One sequence, gathered: rows of (heads, dim)."""

    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    appended: list[tuple[tuple[int, int], torch.Tensor | None, torch.Tensor]]


def sequence(a: dict[str, Any], b: int) -> Sequence:
    """Gather one sequence as the call will see it, in float64; a qv extends q, and v then k."""
    lengths = a.get("cache_seqlens")
    if lengths is None:
        end = a["v_cache"].shape[1] * (a["page_table"].shape[1] if "page_table" in a else 1)
    else:
        end = lengths if isinstance(lengths, int) else int(lengths[b])
    first = int(a["cache_leftpad"][b]) if "cache_leftpad" in a else 0
    angle = int(a["rotary_seqlens"][b]) if "rotary_seqlens" in a else end
    has_rotary, is_only = "rotary_cos" in a, a.get("only_qv", False)
    q, qv = (take(a, name, "cu_seqlens_q", b) for name in ("q", "qv"))
    window = a.get("window_size", (-1, -1))
    advances = (
        a.get("causal") or a.get("attention_chunk") or any(x not in (None, -1) for x in window)
    )
    if has_rotary:
        q = [turned(row, a, angle + (i if advances else 0)) for i, row in enumerate(q)]
    k = [] if is_only else [a["k_cache"][slot(a, b, j)].double() for j in range(first, end)]
    v = [a["v_cache"][slot(a, b, j)].double() for j in range(first, end)]
    appended: list[Any] = []
    new_k = take(a, "k", "cu_seqlens_k_new", b)
    for i, new_v in enumerate(take(a, "v", "cu_seqlens_k_new", b)):
        row = None if is_only else new_k[i].double()
        if has_rotary:
            row = turned(new_k[i], a, angle + i)
        appended.append((slot(a, b, end + i), row, new_v))
        k += [] if row is None else [row]
        v.append(new_v.double())
    if qv:
        q = [torch.cat([*pair], -1) for pair in zip(q, qv, strict=True)] if q else qv
        k = [torch.cat([x, y], -1) for x, y in zip(k, v, strict=True)] if k else v
    return Sequence([row.double() for row in q], k, v, appended)


def defined(a: dict[str, Any], b: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """out and lse of each query of one sequence, (heads, dim_v) and (heads,)."""
    s = sequence(a, b)
    seen = checks.mask_by_definition(
        len(s.q),
        len(s.k),
        causal=a.get("causal", False),
        window=a.get("window_size", (-1, -1)),
        chunk=a.get("attention_chunk") or 0,
    )
    outs, lses = [], []
    for i, row in enumerate(s.q):
        heads, group = row.shape[0], row.shape[0] // a["v_cache"].shape[2]
        out = torch.zeros(heads, a["v_cache"].shape[3], dtype=DOUBLE)
        lse = torch.full((heads,), -math.inf, dtype=DOUBLE)
        for h in range(heads):
            logits, values = [], []
            for j in range(len(s.k)):
                score = float(row[h] @ s.k[j][h // group])
                score *= a.get("softmax_scale") or row.shape[-1] ** -0.5
                if a.get("softcap"):
                    score = a["softcap"] * math.tanh(score / a["softcap"])
                if "score_mod" in a:
                    score = float(a["score_mod"](torch.tensor(score, dtype=DOUBLE), b, h, i, j))
                if seen[i, j] and ("hides" not in a or not a["hides"](b, h, i, j)):
                    logits.append(score)
                    values.append(s.v[j][h // group])
            if "sinks" in a:
                logits.append(float(a["sinks"][h]))
                values.append(torch.zeros_like(out[h]))
            if logits:
                weights = torch.softmax(torch.tensor(logits, dtype=DOUBLE), 0)
                out[h] = sum(w * x for w, x in zip(weights, values, strict=True))
                lse[h] = torch.logsumexp(torch.tensor(logits, dtype=DOUBLE), 0)
        outs.append(out)
        lses.append(lse)
    return outs, lses


def check(a: dict[str, Any], **same: Any) -> None:
    """Make a call and compare results and cache with the definition; `same` has no effect on it."""
    batch = (len(a["cu_seqlens_q"]) if "cu_seqlens_q" in a else len(a.get("qv", a["q"])) + 1) - 1
    results = [defined(a, b) for b in range(batch)]
    expected = {
        name: None if a[name] is None else a[name].clone() for name in ("k_cache", "v_cache")
    }
    is_row: list[tuple[int, int]] = []
    for b in range(batch):
        for where, key, value in sequence(a, b).appended:
            is_row.append(where)
            expected["v_cache"][where] = value
            if key is not None:
                expected["k_cache"][where] = key
    arguments = {name: value for name, value in {**a, **same}.items() if name != "hides"}
    out, lse = flash_attn_with_kvcache(**arguments, return_softmax_lse=True)
    assert lse.dtype == torch.float32 and out.dtype == a["v_cache"].dtype
    for b, (outs, lses) in enumerate(results):
        first = int(a["cu_seqlens_q"][b]) if "cu_seqlens_q" in a else 0
        rows = out[first:] if "cu_seqlens_q" in a else out[b]
        row_lse = lse[:, first:] if "cu_seqlens_q" in a else lse[b]
        for i in range(len(outs)):
            torch.testing.assert_close(rows[i], outs[i], atol=1e-10, rtol=1e-10)
            torch.testing.assert_close(row_lse[:, i].double(), lses[i], atol=1e-5, rtol=1e-5)
    for name, want in expected.items():
        if want is not None and is_row:
            index = tuple(torch.tensor(is_row).T)
            torch.testing.assert_close(a[name][index], want[index], atol=1e-12, rtol=1e-12)
            want[index] = a[name][index]
        if want is not None:
            checks.assert_same_bits(name, a[name], want)


# ---- The sweep -----------------------------------------------------------------------------------

PAIRS = [
    (1, 0),
    (0, 5),
    (1, 1),
    (1, 16),
    (3, 17),
    (4, 4),
    (5, 30),
    (16, 33),
    (2, 65),
    (7, 3),
    (0, 0),
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window_size": (3, 1)},
    {"causal": True, "softcap": 1.5, "sinks": torch.tensor([0.3, -0.5])},
    {"attention_chunk": 4},
    {"score_mod": lambda score, b, h, q_idx, kv_idx: score + 0.125 * (q_idx - kv_idx) * (h + 1)},
    {"window_size": (None, 0), "softmax_scale": 0.3},
]


def ragged(length: int, count: int, step: int) -> tuple[int, ...]:
    """Lengths around one: itself, a shorter one, none."""
    return (length, max(length - step, 0), 0)[:count]


@pytest.mark.parametrize("page_size", [None, 1, 4, 16, 64])
@pytest.mark.parametrize("is_packed_q", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("new", [None, "batch", "packed"])
def test_sweep_matches_the_definition(page_size: int | None, is_packed_q: bool, new: str | None):
    for n, (len_q, end) in enumerate(PAIRS):
        ends = ragged(end, 3, 2)
        count = {None: None, "batch": (len_q,) * 3, "packed": ragged(len_q + 1, 3, 1)}[new]
        rotary = (None, "interleaved", "halves")[n % 3] if new else None
        setup = Setup(
            lens_q=ragged(len_q, 3, 1) if is_packed_q else (len_q,) * 3,
            ends=ends,
            new=count,
            firsts=tuple(min(length, 2 * b + 1) for b, length in enumerate(ends))
            if n % 2
            else None,
            page_size=page_size,
            has_batch_idx=n % 4 in (1, 2),
            is_packed_q=is_packed_q,
            is_packed_new=new == "packed",
            rotary=rotary,
            rotary_dim=(16, 32)[n % 2],
            has_rotary_seqlens=rotary is not None and n % 5 == 2,
            seed=n,
        )
        check(call_of(setup) | OPTIONS[n % len(OPTIONS)], num_splits=(0, 1, 3, 64)[n % 4])


@pytest.mark.parametrize("kind", ["interleaved", "halves"])
@pytest.mark.parametrize("rotary_dim", [16, 32, 48])
@pytest.mark.parametrize("options", OPTIONS[:5], ids=["full", "causal", "window", "sinks", "chunk"])
@pytest.mark.parametrize("has_rotary_seqlens", [False, True])
def test_rotary(kind: str, rotary_dim: int, options: dict[str, Any], has_rotary_seqlens: bool):
    """All kinds, and every mask, which decides where the queries are rotated to."""
    setup = Setup(
        ends=(6, 2),
        new=(4, 4),
        rotary=kind,
        rotary_dim=rotary_dim,
        has_rotary_seqlens=has_rotary_seqlens,
        head_dim=48,
    )
    check(call_of(setup) | options)


def test_rotary_leaves_the_rest_of_a_head_and_the_values_alone():
    setup = Setup(new=(2, 2), rotary="halves", rotary_dim=16)
    a = call_of(setup)
    flash_attn_with_kvcache(**a)
    checks.assert_same_bits("k_cache", a["k_cache"][1, 9:11, :, 16:], a["k"][1, :, :, 16:])
    checks.assert_same_bits("v_cache", a["v_cache"][0, 5:7], a["v"][0])
    assert (a["k_cache"][1, 9:11, :, :16] != a["k"][1, :, :, :16]).any(-1).all()


@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (5, 1), (4, 4)])
@pytest.mark.parametrize("dims", [(32, 8), (16, 16), (16, 40)])
def test_heads_and_dims(heads: tuple[int, int], dims: tuple[int, int]):
    setup = Setup(
        new=(3, 3),
        num_heads_q=heads[0],
        num_heads_kv=heads[1],
        head_dim=dims[0],
        head_dim_v=dims[1],
        rotary="halves",
        page_size=4,
    )
    check(call_of(setup) | {"causal": True})


@pytest.mark.parametrize("kind", ["both", "only"])
@pytest.mark.parametrize("new", [None, (2, 2)])
@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize("is_packed_q", [False, True])
def test_qv(kind: str, new: tuple[int, ...] | None, page_size: int | None, is_packed_q: bool):
    setup = Setup(
        new=new,
        qv=kind,
        page_size=page_size,
        is_packed_q=is_packed_q,
        head_dim=16,
        head_dim_v=24,
        num_heads_q=4,
        has_batch_idx=True,
        firsts=(1, 0),
        rotary="interleaved" if new and kind == "both" else None,
    )
    for options in ({}, {"causal": True, "softcap": 2.0}, {"softmax_scale": 0.4}):
        check(call_of(setup) | options)


def test_keys_inside_the_values_of_one_cache():
    """Absorbed MLA keeps both in one tensor; new keys go to their part of it."""
    setup = Setup(new=(1, 1), lens_q=(1, 1), qv="both", head_dim=16, head_dim_v=24, page_size=4)
    a = call_of(setup)
    both = torch.cat([a["v_cache"], a["k_cache"]], -1)
    a["v_cache"], a["k_cache"] = both[..., :24], both[..., 24:]
    check(a)


def test_a_page_of_padding_alone_is_never_looked_up():
    setup = Setup(ends=(6, 9), firsts=(6, 2), page_size=4)
    a = call_of(setup)
    a["page_table"][0, 1] = 2**31 - 1
    check(a)
    a = call_of(dataclasses.replace(setup, new=(2, 2)))
    a["page_table"][0, 0] = -1
    check(a)


# ---- Lengths, hints, ways of computing -----------------------------------------------------------


@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize("length", [0, 5, 8])
def test_one_integer_is_the_length_of_all(page_size: int | None, length: int):
    for new in (None, (2, 2)):
        check(
            call_of(Setup(ends=(length, length), new=new, page_size=page_size)),
            cache_seqlens=length,
        )


@pytest.mark.parametrize("page_size", [None, 1, 4])
def test_no_lengths_are_the_whole_cache(page_size: int | None):
    a = call_of(Setup(ends=(8, 8), page_size=page_size))
    del a["cache_seqlens"]
    if page_size is None:
        a["k_cache"], a["v_cache"] = a["k_cache"][:, :8], a["v_cache"][:, :8]
    else:
        a["page_table"] = a["page_table"][:, : 8 // page_size]
    check(a | {"causal": True})


def test_plain_lengths_are_the_varlen_function():
    for setup in (Setup(), Setup(page_size=4), Setup(is_packed_q=True, lens_q=(2, 5))):
        a = call_of(setup)
        lengths = {name: a[name] for name in ("page_table", "cu_seqlens_q") if name in a}
        got = flash_attn_with_kvcache(**a, causal=True)
        operands = (a["q"], a["k_cache"], a["v_cache"])
        want = flash_attn_varlen_func(
            *operands, seqused_k=a["cache_seqlens"], **lengths, causal=True
        )
        checks.assert_same_bits("out", got, want)


@pytest.mark.parametrize(
    "same",
    [
        *({"num_splits": n} for n in (1, 3, 64)),
        *({"pack_gqa": value} for value in (True, False)),
        {"sm_margin": 4},
        {"ver": 4},
        {"attention_chunk": 0},
        {"window_size": (None, None)},
        {"max_seqlen_q": 3, "max_seqlen_k": 11},
        {"max_seqlen_k": torch.tensor(40)},
        {"rotary_interleaved": False},
    ],
    ids=str,
)
def test_ways_of_computing_do_not_change_the_result(same: dict[str, Any]):
    results = []
    for change in ({}, same):
        a = call_of(Setup(new=(2, 2), page_size=4)) | {"causal": True} | change
        results.append((flash_attn_with_kvcache(**a), a["k_cache"]))
    checks.assert_same_bits("out", *(result[0] for result in results))
    checks.assert_same_bits("k_cache", *(result[1] for result in results))


def test_arguments_come_in_the_order_of_the_interface():
    a = call_of(Setup(new=(2, 2), rotary="interleaved"))
    b = {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in a.items()
    }
    names = ("q", "k_cache", "v_cache", "k", "v", "qv", "rotary_cos", "rotary_sin", "cache_seqlens")
    got = flash_attn_with_kvcache(*(a.get(name) for name in names))
    checks.assert_same_bits("out", got, flash_attn_with_kvcache(**b))


def test_result_out_and_lse():
    a = call_of(Setup(new=(2, 2)))
    buffer = torch.full((2, 3, 2, 8), math.nan, dtype=DOUBLE)
    fresh = {name: value.clone() for name, value in a.items()}
    pair = flash_attn_with_kvcache(**a, out=buffer, return_softmax_lse=True)
    assert isinstance(pair, tuple) and pair[0] is buffer and pair[1].shape == (2, 2, 3)
    out = flash_attn_with_kvcache(**fresh)
    assert isinstance(out, torch.Tensor)
    checks.assert_same_bits("out", buffer, out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_is_attention_of_the_gathered_sequence(dtype: torch.dtype):
    a = call_of(Setup(dtype=dtype, new=(3, 3), page_size=4, firsts=(1, 4), num_heads_q=4))
    gathered = [sequence(a, b) for b in range(2)]
    out, lse = flash_attn_with_kvcache(**a, causal=True, return_softmax_lse=True)
    for b, s in enumerate(gathered):
        q, k, v = (torch.stack(rows)[None].to(dtype) for rows in (s.q, s.k, s.v))
        want = flash_attn_func(q, k, v, causal=True, return_lse=True)
        checks.assert_same_bits("out", out[b], want[0][0])
        checks.assert_same_bits("lse", lse[b], want[1][0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rotary_is_rounded_once(dtype: torch.dtype):
    a = call_of(Setup(dtype=dtype, new=(3, 3), rotary="halves", rotary_dim=32))
    exact = [sequence(a, b).appended for b in range(2)]
    flash_attn_with_kvcache(**a)
    for where, key, value in itertools.chain(*exact):
        assert key is not None
        error = (a["k_cache"][where].double() - key).abs().max().item()
        assert error <= checks.floor(dtype, key.abs().max().item())
        checks.assert_same_bits("v_cache", a["v_cache"][where], value)


# ---- Odd inputs ----------------------------------------------------------------------------------


def test_empty_calls():
    for setup in (Setup(ends=(0, 0)), Setup(ends=(0, 0), lens_q=(0, 0)), Setup(new=(0, 0))):
        for page_size in (None, 4):
            check(call_of(dataclasses.replace(setup, page_size=page_size)))
            sinks = {"sinks": torch.tensor([0.5, -1.0])}
            check(call_of(dataclasses.replace(setup, page_size=page_size)) | sinks)


@pytest.mark.parametrize("has_new", [False, True])
def test_no_sequences(has_new: bool):
    q, cache = torch.zeros(0, 3, 2, 16), torch.ones(0, 8, 1, 16)
    new = {"k": torch.zeros(0, 2, 1, 16), "v": torch.zeros(0, 2, 1, 16)} if has_new else {}
    lengths = torch.zeros(0, dtype=torch.int32)
    for rows, index in ((cache, {}), (torch.ones(3, 8, 1, 16), {"cache_batch_idx": lengths})):
        a = {"cache_seqlens": lengths, **new, **index}
        out, lse = flash_attn_with_kvcache(q, rows, rows.clone(), **a, return_softmax_lse=True)
        assert out.shape == (0, 3, 2, 16) and lse.shape == (0, 2, 3)
        assert (rows == 1).all()


def test_appending_without_queries_still_appends():
    check(call_of(Setup(lens_q=(0, 0), new=(2, 2), rotary="halves")))


@pytest.mark.parametrize("size", [1, 9, 64, 300])
@pytest.mark.parametrize("page_size", [1, 128])
def test_zero_queries_give_the_mean_of_the_values(size: int, page_size: int):
    a = call_of(Setup(ends=(size, size), page_size=page_size))
    a["q"] = torch.zeros_like(a["q"])
    means = [torch.stack(sequence(a, b).v).mean(0) for b in range(2)]
    out = flash_attn_with_kvcache(**a)
    for b, mean in enumerate(means):
        torch.testing.assert_close(out[b], mean.expand(3, 2, 8), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("page_size", [None, 16])
def test_infinities_past_the_end_do_not_matter(page_size: int | None):
    results = []
    for fill in (math.nan, math.inf, -math.inf, 0.0):
        a = call_of(Setup(ends=(6, 3), page_size=page_size, firsts=(2, 1)))
        for name in ("k_cache", "v_cache"):
            a[name].masked_fill_(a[name].isnan(), fill)
        results.append(flash_attn_with_kvcache(**a, causal=True))
    for result in results[1:]:
        checks.assert_same_bits("out", result, results[0])


def test_a_table_exactly_as_wide_as_needed_at_the_end_of_an_allocation():
    a = call_of(Setup(ends=(8, 6), page_size=4, new=(0, 0)))
    a["page_table"] = a["page_table"][:, :2].clone()
    check(a)


def test_sequences_may_share_pages_that_nobody_writes():
    """A common prefix: appending goes into pages of each sequence's own."""
    a = call_of(Setup(ends=(8, 8), new=(3, 3), page_size=4))
    a["page_table"][1, :2] = a["page_table"][0, :2]
    check(a | {"causal": True})


def test_rows_of_a_shared_cache_may_be_read_twice():
    a = call_of(Setup(ends=(6, 6), has_batch_idx=True))
    row = int(a["cache_batch_idx"][0])
    check(a | {"cache_batch_idx": int32(row, row)})


@pytest.mark.parametrize("order", ["transposed", "every_other"])
def test_any_strides_of_the_cache(order: str):
    a = call_of(Setup(new=(2, 2), rotary="halves", has_batch_idx=True))
    for name in ("k_cache", "v_cache", "q", "k", "v"):
        (a[name],) = checks.LAYOUTS[order](a[name], a[name], a[name])[:1]
    check(a)


def block_mask_with(hides: Callable[..., Any], seqlen_q: int, capacity: int) -> Any:
    def keeps(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return ~hides(b, h, q_idx, kv_idx)

    return block_mask_from(keeps, None, None, seqlen_q, capacity, "cpu", block_size=4)


@pytest.mark.parametrize("setup", [Setup(), Setup(new=(2, 2), firsts=(2, 3), has_batch_idx=True)])
def test_block_mask_counts_keys_from_the_padding(setup: Setup):
    a = call_of(setup)
    hides = lambda b, h, q_idx, kv_idx: (torch.as_tensor(kv_idx) + q_idx) % 3 == 0
    mask = block_mask_with(hides, 3, a["k_cache"].shape[1])
    check(a | {"hides": hides}, block_mask=mask)


def test_gradients_flow_where_nothing_is_written():
    for setup in (Setup(), Setup(firsts=(1, 2), has_batch_idx=True), Setup(qv="both")):
        a = call_of(setup)
        leaves = [
            a[name].requires_grad_() for name in ("q", "k_cache", "v_cache", "qv") if name in a
        ]
        flash_attn_with_kvcache(**a).square().sum().backward()
        for leaf in leaves:
            assert leaf.grad is not None and leaf.grad.isfinite().all() and leaf.grad.any()


# ---- On a GPU ------------------------------------------------------------------------------------


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> toy_gpu.Launches:
    return toy_gpu.install(monkeypatch)


def on_gpu(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [toy_gpu.on_gpu(tensor) for tensor in tensors]


def operands() -> list[torch.Tensor]:
    shapes = ((2, 3, 4, 64), (2, 20, 2, 64), (2, 20, 2, 64))
    return on_gpu(*(torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes))


def test_lengths_alone_launch_the_kernel_with_seqused(launches: toy_gpu.Launches):
    (lengths,) = on_gpu(int32(5, 7))
    for _ in range(3):
        flash_attn_with_kvcache(*operands(), cache_seqlens=lengths, causal=True)
        assert launches.named.seqused_k == lengths.data_ptr()
    assert len(launches.launched) == 3 and len(launches.looked_up) == 1
    assert launches.launched[0].spec.has_seqused_k and launches.launched[0].spec.is_causal


def test_one_integer_is_filled_in_for_each_sequence(
    launches: toy_gpu.Launches, monkeypatch: pytest.MonkeyPatch
):
    """On every call, and the plan is that of a tensor: another number plans nothing anew."""
    filled: list[torch.Tensor] = []

    def fill(length: int, query: torch.Tensor, cu_seqlens_q: torch.Tensor | None) -> torch.Tensor:
        batch = len(query) if cu_seqlens_q is None else len(cu_seqlens_q) - 1
        filled.append(toy_gpu.on_gpu(torch.full((batch,), length, dtype=torch.int32)))
        return filled[-1]

    for module in (kvcache, cache_request):
        monkeypatch.setattr(module, "fill_lengths", fill)
    for length in (5, 20, 0):
        flash_attn_with_kvcache(*operands(), cache_seqlens=length)
        assert launches.named.seqused_k == filled[-1].data_ptr()
        assert filled[-1].tolist() == [length] * 2
    assert len(launches.launched) == 3 and len(launches.looked_up) == 1
    for wrong, text in (
        (21, "is 21, expected 0 to 20"),
        (-1, "is -1, expected"),
        (True, "is True"),
    ):
        with pytest.raises(ValueError, match=f"cache_seqlens {text}"):
            flash_attn_with_kvcache(*operands(), cache_seqlens=wrong)
    q, k_cache, v_cache = operands()
    packed = toy_gpu.on_gpu(q.flatten(0, 1).as_subclass(torch.Tensor))
    (cu_seqlens_q,) = on_gpu(int32(0, 2, 6))
    flash_attn_with_kvcache(packed, k_cache, v_cache, cache_seqlens=7, cu_seqlens_q=cu_seqlens_q)
    assert filled[-1].tolist() == [7, 7] and len(launches.launched) == 4


def test_what_is_refused_is_refused_beside_a_call_that_was_made(launches: toy_gpu.Launches):
    (lengths,) = on_gpu(int32(5, 7))
    call = (*operands(), None, None)
    flash_attn_with_kvcache(*call, cache_seqlens=lengths)
    with pytest.raises(ValueError, match="ver is 5"):
        flash_attn_with_kvcache(*call, cache_seqlens=lengths, ver=5)
    with pytest.raises(ValueError, match="sm_margin is -1"):
        flash_attn_with_kvcache(*call, cache_seqlens=lengths, sm_margin=-1)
    with pytest.raises(ValueError, match="scheduler_metadata is of type ToyTensor, expected what "):
        flash_attn_with_kvcache(*call, cache_seqlens=lengths, scheduler_metadata=lengths)
    assert len(launches.launched) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("lengths", [700, (0, 1, 700)], ids=str)
@pytest.mark.parametrize("seqlen_q", [1, 5])
def test_lengths_on_a_gpu(gpu: None, is_packed: bool, lengths: Any, seqlen_q: int):
    case = checks.Case(3, 8, 2, seqlen_q, 900, 128)
    q, k, v = checks.gaussian(case, "cuda")
    ends = [lengths] * 3 if isinstance(lengths, int) else list(lengths)
    for b, end in enumerate(ends):
        k[b, end:], v[b, end:] = math.nan, math.nan
    given = lengths if isinstance(lengths, int) else int32(*lengths).cuda()
    extra: dict[str, Any] = {}
    if is_packed:
        q = q.flatten(0, 1)
        extra["cu_seqlens_q"] = starts([seqlen_q] * 3).cuda()
    sides = checks.Lengths(seqused_k=int32(*ends).cuda(), **extra)
    for options in ({}, {"causal": True}, {"window_size": (30, 0), "softcap": 3.0}):
        exact, lowprec = checks.oracle(q, k, v, sides, **options)
        for _ in range(2):
            got = flash_attn_with_kvcache(
                q, k, v, cache_seqlens=given, **extra, **options, return_softmax_lse=True
            )
            assert isinstance(got, tuple)
            checks.assert_attention(got, exact, lowprec)
