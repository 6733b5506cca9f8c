"""flash_attn_with_kvcache on a GPU: pairs of what serving asks for, graphs, and fixed split sizes.

The sweep is a covering design. Rows of a cache that belong to no sequence are NaN, and entries of a
page table that no row needs are wild, before the call; after it every row that was not appended has
the bits it had. Results are judged by `reference_cache.lower` in float64, and that, on the CPU, by
a definition written here. A case skips with the name of what no kernel declares.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from typing import Any

import checks
import pytest
import torch
import toy_gpu
from covering import all_pairs, covering_design, pairs_of

from flash_cute import (
    AttentionProblem,
    Feature,
    SchedulerMetadata,
    UnsupportedProblem,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
    reference,
    selection,
)
from flash_cute.cache_request import CacheArguments, CacheRequest, cache_request, check_cache_values
from flash_cute.problem import Lengths, Options
from flash_cute.reference_cache import lower
from flash_cute.target import Target

WILD = (-1, 2**31 - 1, 987_654_321)  # page ids that must never be looked up
# (queries, capacity); the four sequences of a case use different parts of it. A case takes all of
# one kind in turn, which share most of their kernels: those take longer to compile than to run.
LENGTHS = {
    "few_short": [(1, 1), (1, 128), (1, 339), (5, 5)],
    "few_long": [(3, 1024), (2, 4100)],
    "many_short": [(33, 20), (64, 256)],
    "many_long": [(16, 20000), (64, 800), (130, 2048)],
}
FACTORS = {
    "append": ["none", "padded", "packed"],
    "rotary": [None, ("interleaved", 0.5), ("interleaved", 1.0), ("halves", 0.5), ("halves", 1.0)],
    "page_size": [None, 1, 4, 16, 64, 128, 256],
    "leftpad": [False, True],
    "batch_idx": [False, True],
    "packed_q": [False, True],
    "splits": [0, 1, 3, 64],
    "metadata": [False, True],
    "mask": [
        {},
        {"causal": True},
        {"window_size": (90, 20)},
        {"causal": True, "window_size": (200, -1)},
    ],
    "softcap": [0.0, 15.0],
    "sinks": [False, True],
    "heads": [(4, 4), (8, 2), (6, 1)],
    "dim": [64, 128, 256],
    "dtype": [torch.bfloat16, torch.float16],
    "lengths": list(LENGTHS),
}


def forbids(case: dict[str, Any]) -> bool:
    """Queries are rotated with new keys or not at all."""
    return case.get("append") == "none" and case.get("rotary") is not None


CASES = covering_design(FACTORS, forbids)


def each_length(case: dict[str, Any]) -> list[dict[str, Any]]:
    """The calls of a case: one for each of its (queries, capacity)."""
    return [case | {"lengths": lengths} for lengths in LENGTHS[case["lengths"]]]


def label(case: dict[str, Any]) -> str:
    lengths, (hq, hkv) = case["lengths"], case["heads"]
    size = lengths if isinstance(lengths, str) else "sq{}-c{}".format(*lengths)
    kind = f"{size}-h{hq}k{hkv}-d{case['dim']}-{str(case['dtype'])[6:]}"
    mask = "_".join(f"{k[:6]}{v}" for k, v in case["mask"].items()) or "full"
    rotary = "" if case["rotary"] is None else "-{}{}".format(*case["rotary"])
    flags = "".join(
        f"-{name}" for name in ("leftpad", "batch_idx", "packed_q", "metadata", "sinks")
        if case[name]
    )  # fmt: skip
    cap = f"-cap{case['softcap']:g}" if case["softcap"] else ""
    text = f"{kind}-p{case['page_size']}-{case['append']}{rotary}-s{case['splits']}-{mask}"
    return f"{text}{cap}{flags}".replace(" ", "")


def test_design_covers_every_pair_that_can_be():
    covered = set().union(*map(pairs_of, CASES))
    assert covered == all_pairs(FACTORS, forbids)
    assert not any(map(forbids, CASES))
    assert 40 <= len(CASES) <= 60
    assert len(set(map(label, CASES))) == len(CASES)


# ---- Calls ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of each of the four sequences of a case.

    Units: keys lie in rows [first, end) of the cache before the call, `new` more after it.
    """

    lens_q: list[int]
    firsts: list[int]
    ends: list[int]
    new: list[int]


def sizes_of(case: dict[str, Any]) -> Sizes:
    """A full cache, an empty one, one half full, and a short one that left padding may use up."""
    sq, capacity = case["lengths"]
    n = 0 if case["append"] == "none" else min(sq, capacity)
    new = [n, 0, max(n - 1, 0), (n + 1) // 2] if case["append"] == "packed" else [n] * 4
    room = [capacity - count for count in new]
    ends = [room[0], 0, room[2] // 2, min(room[3], 70)]
    lens_q = [sq, sq - 1, 0, (sq + 1) // 2] if case["packed_q"] else [sq] * 4
    padding = [5, 65, 125, 185] if case["leftpad"] else [0] * 4
    return Sizes(lens_q, [min(pair) for pair in zip(padding, ends, strict=True)], ends, new)


def int32(values: list[int], device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def starts(lengths: list[int], device: str) -> torch.Tensor:
    return int32([0, *itertools.accumulate(lengths)], device)


def rows_of(lengths: list[int], is_packed: bool, make: Any, *shape: int) -> torch.Tensor:
    """Rows per sequence: packed, with NaN after the last, or a batch (lengths are equal then)."""
    if not is_packed:
        return make(len(lengths), lengths[0], *shape)
    packed = make(sum(lengths) + 2, *shape)
    packed[sum(lengths) :] = math.nan
    return packed


def pages_of(
    case: dict[str, Any], sizes: Sizes, rows: list[int], seed: int, device: str
) -> tuple[torch.Tensor, int]:
    """A page table that is wild where no row is in use, and the number of pages."""
    page_size, num_rows = case["page_size"], max(rows) + 1
    width = -(-case["lengths"][1] // page_size)
    count = torch.arange(num_rows * width, device=device)
    table = int32(list(WILD), device)[count % len(WILD)].view(num_rows, width)
    spans = []
    for first, end, new in zip(sizes.firsts, sizes.ends, sizes.new, strict=True):
        last = -(-(end + new) // page_size)
        spans.append((first // page_size if end + new > first else last, last))
    num_pages = case.get("num_pages") or sum(last - first for first, last in spans) + 3
    source = torch.Generator().manual_seed(seed)
    free = torch.randperm(num_pages, generator=source).to(device, torch.int32)
    for row, (first, last) in zip(rows, spans, strict=True):
        table[row, first:last], free = free[: last - first], free[last - first :]
    return table, num_pages


def call_of(case: dict[str, Any], sizes: Sizes, device: str, seed: int = 0) -> dict[str, Any]:
    """The arguments of a case with sequences of such sizes."""
    source = checks.generator(device, seed)
    (hq, hkv), d, (sq, capacity) = case["heads"], case["dim"], case["lengths"]

    def make(*shape: int) -> torch.Tensor:
        made = torch.randn(shape, generator=source, device=device, dtype=torch.float32)
        return made.to(case["dtype"])

    rows = [3, 0, 5, 2] if case["batch_idx"] else [0, 1, 2, 3]
    a: dict[str, Any] = {"cache_seqlens": int32(sizes.ends, device)}
    shape = (max(rows) + 1, capacity, hkv, d)
    if case["page_size"] is not None:
        a["page_table"], num_pages = pages_of(case, sizes, rows, seed, device)
        shape = (num_pages, case["page_size"], hkv, d)
    if case["batch_idx"]:
        a["cache_batch_idx"] = int32(rows, device)
    for name in ("k_cache", "v_cache"):
        a[name] = torch.full(shape, math.nan, dtype=case["dtype"], device=device)
        for b, (first, end) in enumerate(zip(sizes.firsts, sizes.ends, strict=True)):
            a[name][slots(a, b, first, end)] = make(end - first, hkv, d)
    a["q"] = rows_of(sizes.lens_q, case["packed_q"], make, hq, d)
    if case["packed_q"]:
        a |= {"cu_seqlens_q": starts(sizes.lens_q, device), "max_seqlen_q": sq}
    if case["append"] != "none":
        is_packed = case["append"] == "packed"
        a["k"], a["v"] = (rows_of(sizes.new, is_packed, make, hkv, d) for _ in range(2))
        if is_packed:
            a["cu_seqlens_k_new"] = starts(sizes.new, device)
    if case["leftpad"]:
        a["cache_leftpad"] = int32(sizes.firsts, device)
    if case["rotary"] is not None:
        kind, part = case["rotary"]
        a["rotary_interleaved"] = kind == "interleaved"
        angles = 3.0 * make(capacity + sq, int(part * d) // 2).float()
        a |= {"rotary_cos": angles.cos().to(case["dtype"])}
        a |= {"rotary_sin": angles.sin().to(case["dtype"])}
        if case["leftpad"]:
            a["rotary_seqlens"] = a["cache_seqlens"] - a["cache_leftpad"]
    if case["sinks"]:
        a["sinks"] = torch.linspace(-2, 3, hq, device=device)
    a |= {**case["mask"], "softcap": case["softcap"], "num_splits": case["splits"]}
    if case["metadata"]:
        a |= {"scheduler_metadata": metadata_of(a), "num_splits": 0}
    return a


def metadata_of(a: dict[str, Any]) -> SchedulerMetadata:
    """The plan of a call, made ahead of it; the call leaves the number of parts to it."""
    is_packed, is_paged = "cu_seqlens_q" in a, "page_table" in a
    page_size = a["k_cache"].shape[1]
    new = a["k"].shape[1] if "k" in a and "cu_seqlens_k_new" not in a else 0
    given = ("cu_seqlens_q", "cu_seqlens_k_new", "causal", "window_size", "attention_chunk")
    return get_scheduler_metadata(
        batch_size=a["cache_seqlens"].shape[0],
        max_seqlen_q=a["max_seqlen_q"] if is_packed else a["q"].shape[1],
        max_seqlen_k=page_size * (a["page_table"].shape[1] if is_paged else 1),
        num_heads_q=a["q"].shape[-2],
        num_heads_kv=a["k_cache"].shape[-2],
        headdim=a["q"].shape[-1],
        cache_seqlens=a["cache_seqlens"],
        qkv_dtype=a["q"].dtype,
        cache_leftpad=a.get("cache_leftpad"),
        page_size=page_size if is_paged else None,
        max_seqlen_k_new=new,
        has_softcap=a["softcap"] > 0,
        num_splits=a["num_splits"],
        **{name: a[name] for name in given if name in a},
    )


def slots(a: dict[str, Any], b: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where rows begin to end - 1 of a sequence lie: indices of two axes of the cache."""
    row = int(a["cache_batch_idx"][b]) if "cache_batch_idx" in a else b
    j = torch.arange(begin, end, device=a["cache_seqlens"].device)
    if "page_table" not in a:
        return torch.full_like(j, row), j
    page_size = a["k_cache"].shape[1]
    return a["page_table"][row][j // page_size].long(), j % page_size


def rows_in_use(a: dict[str, Any], name: str, cu: str, lengths: list[int], b: int) -> torch.Tensor:
    """The rows of sequence b of a packed or batched tensor."""
    if cu in a:
        first = sum(lengths[:b])
        return a[name][first : first + lengths[b]]
    return a[name][b]


# ---- What is expected ----------------------------------------------------------------------------


def turned(
    rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_interleaved: bool
) -> torch.Tensor:
    """Rows (n, heads, dim) in float64, each pair of channels times a complex number of its row."""
    half = cos.shape[-1]
    turned = rows.double()
    first, second = slice(0, half), slice(half, 2 * half)
    if is_interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    z = torch.complex(turned[..., first], turned[..., second])
    z = z * torch.complex(cos.double(), sin.double())[:, None]
    turned[..., first], turned[..., second] = z.real, z.imag
    return turned


def angles_of(a: dict[str, Any], b: int, positions: torch.Tensor) -> tuple[Any, ...]:
    """The tables at some positions after that of a sequence, and which pairs they turn."""
    start = a.get("rotary_seqlens", a["cache_seqlens"])[b]
    at = start + positions
    return a["rotary_cos"][at], a["rotary_sin"][at], a["rotary_interleaved"]


def exact_new_keys(a: dict[str, Any], sizes: Sizes, b: int) -> torch.Tensor:
    """The keys that a call appends to a sequence, in float64, not rounded."""
    rows = rows_in_use(a, "k", "cu_seqlens_k_new", sizes.new, b)
    if "rotary_cos" not in a:
        return rows.double()
    return turned(rows, *angles_of(a, b, torch.arange(sizes.new[b], device=rows.device)))


def sees(a: dict[str, Any], len_q: int, len_k: int) -> torch.Tensor:
    """Which keys the queries of one sequence see, (len_q, len_k)."""
    device = a["q"].device
    diagonal = torch.arange(len_q, device=device)[:, None] + len_k - len_q
    key = torch.arange(len_k, device=device)
    left, right = a.get("window_size", (-1, -1))
    seen = torch.ones(len_q, len_k, dtype=torch.bool, device=device)
    if left >= 0:
        seen &= key >= diagonal - left
    if a.get("causal"):
        seen &= key <= diagonal
    if right >= 0:
        seen &= key <= diagonal + right
    return seen


def defined(a: dict[str, Any], sizes: Sizes, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """out (len_q, heads, dim) and lse (heads, len_q) of one sequence by definition, in float64."""
    dtype, device = a["q"].dtype, a["q"].device
    q = rows_in_use(a, "q", "cu_seqlens_q", sizes.lens_q, b).double()
    if "rotary_cos" in a:
        advances = a.get("causal") or "window_size" in a
        positions = torch.arange(len(q), device=device) * bool(advances)
        q = turned(q, *angles_of(a, b, positions)).to(dtype).double()
    where = slots(a, b, sizes.firsts[b], sizes.ends[b])
    k, v = a["k_cache"][where].double(), a["v_cache"][where].double()
    if "k" in a:
        k = torch.cat([k, exact_new_keys(a, sizes, b).to(dtype).double()])
        v = torch.cat([v, rows_in_use(a, "v", "cu_seqlens_k_new", sizes.new, b).double()])
    out, lse = checks.attention_by_definition(
        q[None],
        k[None],
        v[None],
        sees(a, len(q), len(k)),
        softcap=a["softcap"],
        sink=a.get("sinks"),
    )
    return out[0], lse[0]


def request_of(a: dict[str, Any]) -> CacheRequest:
    """The validated request of a call that plans for itself."""
    names = {field.name for field in dataclasses.fields(CacheArguments)} - {"scheduler_metadata"}
    options = Options(
        causal=a.get("causal", False),
        window_size=a.get("window_size", (-1, -1)),
        softcap=a["softcap"],
        sink=a.get("sinks"),
        num_splits=a["num_splits"],
        return_lse=True,
    )
    return cache_request(CacheArguments(**{n: v for n, v in a.items() if n in names}), options)


def yardsticks(a: dict[str, Any]) -> tuple[Any, Any]:
    """(out, lse) of the reference in float64, and in low precision; the cache stays as it is."""
    request = request_of(a)
    lowered = lower(request, check_cache_values(request))
    call = (lowered.problem, lowered.inputs)
    exact = reference.attention(*call, compute_dtype=torch.float64, round_result=False)
    return exact, reference.attention(*call, lowprec=True)


def of_sequence(a: dict[str, Any], sizes: Sizes, b: int, result: Any) -> Any:
    """The rows of one sequence of (out, lse)."""
    out, lse = result
    if "cu_seqlens_q" not in a:
        return out[b], lse[b]
    rows = slice(sum(sizes.lens_q[:b]), sum(sizes.lens_q[: b + 1]))
    return out[rows], lse[:, rows]


def check_attention(a: dict[str, Any], sizes: Sizes, got: Any, exact: Any, lowprec: Any) -> None:
    """Apply the tolerance rule to each sequence alone: long ones have small results and errors."""
    for b in range(len(sizes.ends)):
        mine, want, low = (of_sequence(a, sizes, b, result) for result in (got, exact, lowprec))
        try:
            checks.assert_attention(mine, want, low)
        except AssertionError as error:
            raise AssertionError(f"sequence {b} of {sizes}: {error}") from None


def check_cache(a: dict[str, Any], sizes: Sizes, before: dict[str, torch.Tensor]) -> None:
    """New rows are right, all others are untouched."""
    for name in ("k_cache", "v_cache"):
        expected = before[name].clone()
        for b, (end, new) in enumerate(zip(sizes.ends, sizes.new, strict=True)):
            where = slots(a, b, end, end + new)
            got = a[name][where]
            expected[where] = got
            if not new:
                continue
            if name == "v_cache":
                given = rows_in_use(a, "v", "cu_seqlens_k_new", sizes.new, b)
                checks.assert_same_bits(f"new values of sequence {b}", got, given)
                continue
            given = rows_in_use(a, "k", "cu_seqlens_k_new", sizes.new, b)
            turned_dim = 2 * a["rotary_cos"].shape[1] if "rotary_cos" in a else 0
            what = f"new keys of sequence {b}"
            checks.assert_same_bits(what, got[..., turned_dim:], given[..., turned_dim:])
            exact = exact_new_keys(a, sizes, b)
            allowed = torch.finfo(got.dtype).eps / 2 * exact.abs() + 4e-6
            wrong = ~((got.double() - exact).abs() <= allowed)
            assert not wrong.any(), f"{what}: {int(wrong.sum())} rotated elements are wrong"
        checks.assert_same_bits(name, a[name], expected)


# ---- The sweep -----------------------------------------------------------------------------------


def undeclared(problem: AttentionProblem, target: Target) -> list[str]:
    """What of a problem no kernel of a GPU declares: features, and the size of its pages."""
    declared = [d.features for d in selection.KERNELS if target.arch in d.archs]
    missing = problem.required_features() - selection.APPEND.features
    missing -= frozenset[Feature]().union(*declared)
    names = sorted(feature.value for feature in missing)
    plain = AttentionProblem(
        dtype=problem.dtype,
        device=problem.device,
        batch=1,
        seqlen_q=1,
        seqlen_k=1024,
        num_heads_q=1,
        num_heads_kv=1,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        page_size=problem.page_size,
    )
    if Feature.PAGED_KV not in missing and not selection.is_supported(plain, target):
        names.append(f"pages of {problem.page_size} keys")
    return names


def attend(a: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a call; skip, with the name, where it asks for what no kernel declares."""
    before = {name: a[name].clone() for name in ("k_cache", "v_cache")}
    try:
        out, lse = flash_attn_with_kvcache(**a, return_softmax_lse=True)
    except UnsupportedProblem:
        names = undeclared(request_of(a).problem, selection.current_target(a["q"].device))
        if not names:
            raise
        for name, cache in before.items():
            checks.assert_same_bits(f"{name} after a refusal", a[name], cache)
        pytest.skip(f"no kernel declares: {', '.join(names)}")
    return out, lse


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=label)
def test_sweep(gpu: None, case: dict[str, Any]):
    for one in each_length(case):
        sizes = sizes_of(one)
        a = call_of(one, sizes, "cuda")
        before = {name: a[name].clone() for name in ("k_cache", "v_cache")}
        exact, lowprec = yardsticks(a)
        check_attention(a, sizes, attend(a), exact, lowprec)
        check_cache(a, sizes, before)


SMALL = [one for case in CASES for one in each_length(case) if one["lengths"][1] <= 1024]


@pytest.mark.cpu
@pytest.mark.parametrize("case", SMALL, ids=label)
def test_reference_of_the_sweep_is_the_definition(case: dict[str, Any]):
    sizes = sizes_of(case)
    a = call_of(case, sizes, "cpu")
    before = {name: a[name].clone() for name in ("k_cache", "v_cache")}
    exact, lowprec = yardsticks(a)
    expected = [defined(a, sizes, b) for b in range(4)]
    got = flash_attn_with_kvcache(**a, return_softmax_lse=True)
    for b, want in enumerate(expected):
        mine, low, high = (of_sequence(a, sizes, b, r) for r in (got, lowprec, exact))
        checks.assert_attention(mine, want, low)
        for one, other in zip(high, want, strict=True):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)
    check_cache(a, sizes, before)


@pytest.mark.cpu
def test_sweep_skips_what_is_not_declared_and_nothing_else(monkeypatch: pytest.MonkeyPatch):
    toy_gpu.install(monkeypatch)
    is_one = lambda c: c["append"] == "padded" and c["rotary"] and c["page_size"] == 4
    case = each_length(next(filter(is_one, CASES)))[0]
    plain = {"batch_idx": False, "leftpad": False, "metadata": False}
    a = call_of(case | plain, sizes_of(case), "cpu")
    a = {n: toy_gpu.on_gpu(v) if isinstance(v, torch.Tensor) else v for n, v in a.items()}
    lacking = {Feature.APPEND_KV, Feature.ROTARY}
    nothing = dataclasses.replace(selection.APPEND, features=frozenset())
    monkeypatch.setattr(selection, "APPEND", nothing)
    for features, names in (
        (frozenset(Feature) - lacking, "append_kv, rotary"),
        (frozenset(Feature) - lacking - {Feature.PAGED_KV}, "append_kv, paged_kv, rotary"),
    ):
        changed = dataclasses.replace(selection.SM90, features=features)
        monkeypatch.setattr(selection, "KERNELS", (changed,))
        with pytest.raises(pytest.skip.Exception, match=f"no kernel declares: {names}"):
            attend(a)
    complete = dataclasses.replace(selection.SM90, features=frozenset(Feature))
    monkeypatch.setattr(selection, "KERNELS", (complete,))
    monkeypatch.setattr(selection, "is_supported", lambda problem, target: True)

    def refuses(**arguments: Any) -> None:
        raise UnsupportedProblem("something else")

    monkeypatch.setitem(globals(), "flash_attn_with_kvcache", refuses)
    with pytest.raises(UnsupportedProblem, match="something else"):
        attend(a)


# ---- CUDA graphs ---------------------------------------------------------------------------------

GRAPH = {
    "rotary": None,
    "leftpad": False,
    "batch_idx": False,
    "packed_q": False,
    "splits": 0,
    "metadata": False,
    "mask": {"causal": True},
    "softcap": 0.0,
    "sinks": False,
    "heads": (8, 2),
    "dim": 128,
    "dtype": torch.bfloat16,
}
DECODE = {"append": "none", "lengths": (1, 3000)}
STEPS = {
    "decode": GRAPH | DECODE,
    "decode_append": GRAPH | DECODE | {"append": "padded", "rotary": ("halves", 1.0)},
    "decode_splits": GRAPH | DECODE | {"splits": 7},
    "prefill": GRAPH | DECODE | {"lengths": (64, 3000), "packed_q": True},
    "prefill_append": GRAPH
    | {"append": "packed", "rotary": ("interleaved", 0.5), "lengths": (64, 3000), "packed_q": True},
}
ENDS = [[5, 40, 7, 1], [2900, 1, 128, 900], [0, 0, 0, 0], [2936] * 4, [127, 2001, 0, 513]]


def rounds_of(case: dict[str, Any]) -> list[Sizes]:
    """Lengths of each replay; packed rows are as many in each."""
    first = sizes_of(case)
    turns = [[*range(n % 4, 4), *range(n % 4)] for n in range(len(ENDS))]
    return [
        Sizes(
            [first.lens_q[i] for i in turn],
            [0] * 4,
            ends,
            [first.new[i] for i in turn],
        )
        for turn, ends in zip(turns, ENDS, strict=True)
    ]


def second_layer(a: dict[str, Any]) -> dict[str, Any]:
    """A call with the same lengths on another cache: keys and values have changed places."""
    swaps = {"k": "v", "v": "k", "k_cache": "v_cache", "v_cache": "k_cache"}
    return a | {name: a[other].clone() for name, other in swaps.items() if other in a}


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [None, 1, 16])
@pytest.mark.parametrize("step", STEPS)
def test_graph_replays_with_new_lengths_tables_and_contents(
    gpu: None, step: str, page_size: int | None
):
    """Captured with the shortest lengths, and two calls that share them, as layers do."""
    case = STEPS[step] | {"page_size": page_size}
    width = 0 if page_size is None else -(-case["lengths"][1] // page_size)
    case["num_pages"] = 4 * width + 3
    rounds = rounds_of(case)
    layers = [call_of(case, rounds[0], "cuda")]
    layers.append(second_layer(layers[0]))
    for a in layers:
        attend(a)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [flash_attn_with_kvcache(**a, return_softmax_lse=True) for a in layers]
    for number, sizes in enumerate([*rounds, rounds[0]]):
        fresh = call_of(case, sizes, "cuda", seed=number + 1)
        yards = []
        for a, new in zip(layers, (fresh, second_layer(fresh)), strict=True):
            for name, value in new.items():
                if isinstance(value, torch.Tensor):
                    a[name].copy_(value)
            yards.append(yardsticks(a))
        before = [{n: a[n].clone() for n in ("k_cache", "v_cache")} for a in layers]
        graph.replay()
        for a, got, yard, cache in zip(layers, results, yards, before, strict=True):
            check_attention(a, sizes, got, *yard)
            check_cache(a, sizes, cache)


@pytest.mark.cpu
@pytest.mark.parametrize("step", STEPS)
def test_rounds_of_a_graph_fit_what_was_captured(step: str):
    case = STEPS[step] | {"page_size": 16, "num_pages": 4 * 188 + 3}
    shapes = None
    for number, sizes in enumerate(rounds_of(case)):
        a = call_of(case, sizes, "cpu", seed=number)
        check_cache_values(request_of(a))
        found = {n: v.shape for n, v in a.items() if isinstance(v, torch.Tensor)}
        assert shapes is None or found == shapes
        shapes = found


# ---- Fixed split sizes ---------------------------------------------------------------------------

FIXED = {"split_size": 256}
POOL = [(1, 0), (1, 1), (1, 255), (1, 256), (1, 257), (1, 1500), (1, 6000), (3, 700), (4, 4)]
POOL += [(17, 1000), (64, 64), (64, 2000), (130, 300), (0, 500), (1, 4096)]  # queries, keys


@dataclasses.dataclass(frozen=True)
class Pool:
    """Sequences that batches are drawn from, their keys in pages of one cache.

    Shapes: q: one (queries, heads, dim) each; pages: one (pages of the sequence,) each
    """

    q: list[torch.Tensor]
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    pages: list[torch.Tensor]

    def batch(self, members: list[int], width: int, **hints: int | None) -> dict[str, Any]:
        """Arguments of flash_attn_varlen_func for some of the sequences, in that order."""
        table = torch.full((len(members), width), -1, dtype=torch.int32, device="cuda")
        for row, member in enumerate(members):
            table[row, : len(self.pages[member])] = self.pages[member]
        return {
            "q": torch.cat([self.q[member] for member in members]),
            "k": self.k_pages,
            "v": self.v_pages,
            "cu_seqlens_q": starts([POOL[member][0] for member in members], "cuda"),
            "seqused_k": int32([POOL[member][1] for member in members], "cuda"),
            "page_table": table,
            "causal": True,
            "return_lse": True,
            **hints,
        }


def pool_of(page_size: int) -> Pool:
    source = checks.generator("cuda", 0)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=source, device="cuda").bfloat16()

    counts = [-(-keys // page_size) for _, keys in POOL]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0))
    pages = list(order.to("cuda", torch.int32).split(counts))
    cache = (sum(counts), page_size, 2, 128)
    return Pool([make(count, 8, 128) for count, _ in POOL], make(*cache), make(*cache), pages)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 128])
def test_split_size_gives_a_sequence_the_same_bits_in_any_batch(gpu: None, page_size: int):
    pool, rng = pool_of(page_size), random.Random(page_size)
    width = max(map(len, pool.pages))
    alone = [
        flash_attn_varlen_func(**pool.batch([n], max(1, len(pool.pages[n]))), **FIXED)
        for n in range(len(POOL))
    ]
    for number in range(100):
        members = [rng.randrange(len(POOL)) for _ in range(rng.randint(1, 24))]
        longest = max(POOL[member][1] for member in members)
        hints = {
            "max_seqlen_q": rng.choice([None, 130, 1024]),
            "max_seqlen_k": rng.choice([None, longest, 2 * longest + 1]),
        }
        arguments = pool.batch(members, width + rng.randrange(3), **hints)
        out, lse = flash_attn_varlen_func(**arguments, **FIXED)
        first = 0
        for member in members:
            rows = slice(first, first + POOL[member][0])
            first = rows.stop
            where = f"batch {number}, {members}: sequence {member}"
            checks.assert_same_bits(f"out, {where}", out[rows], alone[member][0])
            checks.assert_same_bits(f"lse, {where}", lse[:, rows], alone[member][1])


@pytest.mark.gpu
def test_split_size_is_right_and_dense_calls_keep_their_bits(gpu: None):
    q, k, v = checks.gaussian(checks.Case(6, 8, 2, 1, 3000, 128, 128), "cuda")
    used = int32([0, 1, 256, 257, 1999, 3000], "cuda")
    out, lse = flash_attn_varlen_func(q, k, v, seqused_k=used, return_lse=True, **FIXED)
    exact, lowprec = checks.oracle(q, k, v, Lengths(seqused_k=used))
    for b in range(6):
        mine, want, low = ((o[b], s[b]) for o, s in ((out, lse), exact, lowprec))
        checks.assert_attention(mine, want, low)
    whole = flash_attn_func(q, k, v, **FIXED)
    for b in range(6):
        one = slice(b, b + 1)
        alone = flash_attn_varlen_func(q[one], k[one], v[one], seqused_k=used[one], **FIXED)
        checks.assert_same_bits(f"sequence {b}", out[one], alone)
        dense = flash_attn_func(q[one], k[one], v[one], **FIXED)
        checks.assert_same_bits(f"dense sequence {b}", whole[one], dense)
