"""Small inputs that broke attention kernels elsewhere, each with the behaviour we promise.

The numbers are those of the project's list of cases. On cuda a case is skipped where no kernel has
the feature; the skip says what is missing. Cases of the same list that have their own place:
layouts and strides (18, 20), extreme logits (8, 10), lse (36) and dense sizes in test_dense.py;
CUDA graphs (31, 32) with the launch; cache, threads and processes (34, 35, 40) with the cache.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import checks
import pytest
import torch
from checks import Case

from flash_cute import (
    InvalidProblem,
    UnsupportedProblem,
    flash_attn_func,
    flash_attn_varlen_func,
    is_supported,
)
from flash_cute.problem import Lengths

NAN, INF = float("nan"), float("inf")
INT_MAX = 2**31 - 1
LENGTHS = {
    "cu_seqlens_q",
    "cu_seqlens_k",
    "max_seqlen_q",
    "max_seqlen_k",
    "seqused_q",
    "seqused_k",
    "page_table",
}

Pair = tuple[torch.Tensor, torch.Tensor]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> Pair:
    """Call the public function that takes these arguments, for (out, lse)."""
    if q.is_cuda:
        answer = is_supported(q, k, v, return_lse=True, **arguments)
        if not answer:
            pytest.skip(answer.reason)
    function = flash_attn_varlen_func if LENGTHS & set(arguments) else flash_attn_func
    return function(q, k, v, return_lse=True, **arguments)  # pyright: ignore[reportReturnType]


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> Pair:
    """Call, and compare with the float64 reference under the tolerance rule."""
    got = attend(q, k, v, **arguments)
    lengths = Lengths(**{name: arguments.pop(name) for name in LENGTHS & set(arguments)})
    checks.assert_attention(got, *checks.oracle(q, k, v, lengths, **arguments))
    return got


def int32(values: Any, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def starts(lengths: list[int], device: str) -> torch.Tensor:
    return int32([0, *torch.tensor(lengths).cumsum(0).tolist()], device)


def packed(
    lengths_q: list[int], lengths_k: list[int], device: str, **facts: Any
) -> tuple[checks.Operands, dict[str, Any]]:
    """Operands of packed sequences, and their cu_seqlens."""
    case = Case(seqlen_q=sum(lengths_q), seqlen_k=sum(lengths_k), **{"num_heads_kv": 1, **facts})
    q, k, v = (tensor[0] for tensor in checks.gaussian(case, device))
    cu_seqlens = {
        "cu_seqlens_q": starts(lengths_q, device),
        "cu_seqlens_k": starts(lengths_k, device),
    }
    return (q, k, v), cu_seqlens


def assert_each_alone(
    got: Pair, operands: checks.Operands, cu_seqlens: dict[str, Any], **options: Any
) -> None:
    """Every packed sequence equals the dense reference of that sequence by itself."""
    q, k, v = operands
    starts_q, starts_k = (cu_seqlens[f"cu_seqlens_{side}"].tolist() for side in "qk")
    for b in range(len(starts_q) - 1):
        rows, keys = slice(*starts_q[b : b + 2]), slice(*starts_k[b : b + 2])
        exact, lowprec = checks.oracle(q[None, rows], k[None, keys], v[None, keys], **options)
        part = got[0][None, rows], got[1][None, :, rows]
        checks.assert_attention(part, exact, lowprec)


def assert_nothing_seen(out: torch.Tensor, lse: torch.Tensor) -> None:
    assert (out == 0).all() and (lse == -INF).all()


# ---- Empty ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_case_01_packed_sequence_without_keys(device: str, causal: bool):
    operands, cu_seqlens = packed([16, 16, 16], [64, 0, 128], device)
    out, lse = check(*operands, **cu_seqlens, causal=causal)
    assert_nothing_seen(out[16:32], lse[:, 16:32])
    assert_each_alone((out, lse), operands, cu_seqlens, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
def test_case_02_no_keys(device: str, causal: bool):
    q, k, v = checks.gaussian(Case(2, 2, 2, 64, 0, 64), device)
    assert_nothing_seen(*attend(q, k, v, causal=causal))


@pytest.mark.parametrize("causal", [False, True])
def test_case_03_no_sequences_and_no_queries(device: str, causal: bool):
    for batch, seqlen_q in ((0, 64), (2, 0)):
        q, k, v = checks.gaussian(Case(batch, 2, 2, seqlen_q, 64, 64), device)
        out, lse = attend(q, k, v, causal=causal)
        assert out.shape == q.shape and out.dtype == q.dtype and out.device == q.device
        assert lse.shape == (batch, 2, seqlen_q)


@pytest.mark.parametrize("causal", [False, True])
def test_case_03_packed_sequences_without_queries(device: str, causal: bool):
    (q, k, v), cu_seqlens = packed([0, 0], [4000, 96], device)
    out, lse = attend(q, k, v, **cu_seqlens, max_seqlen_q=0, causal=causal)
    assert out.shape == (0, 2, 64) and lse.shape == (2, 0)


@pytest.mark.parametrize("causal", [False, True])
def test_case_05_segments_of_length_one_and_zero(device: str, causal: bool):
    operands, cu_seqlens = packed([0, 1, 0, 1], [0, 3, 0, 5], device)
    got = check(*operands, **cu_seqlens, max_seqlen_q=1, max_seqlen_k=5, causal=causal)
    assert_each_alone(got, operands, cu_seqlens, causal=causal)


def test_case_07_mask_mod_hides_a_whole_row(device: str):
    q, k, v = checks.gaussian(Case(2, 2, 1, 70, 90, 64), device)
    out, lse = check(q, k, v, mask_mod=lambda b, h, q_idx, kv_idx: (q_idx != 5) & (kv_idx >= 0))
    assert_nothing_seen(out[:, 5], lse[:, :, 5])
    plain, plain_lse = attend(q, k, v, mask_mod=lambda b, h, q_idx, kv_idx: kv_idx >= 0)
    others = torch.arange(70, device=device) != 5
    checks.assert_same_bits("out", out[:, others], plain[:, others])
    checks.assert_same_bits("lse", lse[:, :, others], plain_lse[:, :, others])


# ---- Outside the valid range ---------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_case_11_nan_past_seqused(device: str, causal: bool):
    q, k, v = checks.gaussian(Case(3, 2, 1, 70, 200, 64), device)
    lengths = {"seqused_k": int32([130, 0, 200], device)}
    for b, used in enumerate((130, 0, 200)):
        k[b, used:], v[b, used:] = 0, 0
    clean = check(q, k, v, **lengths, causal=causal)
    for b, used in enumerate((130, 0, 200)):
        k[b, used:], v[b, used:] = NAN, INF
    for got, expected in zip(attend(q, k, v, **lengths, causal=causal), clean, strict=True):
        checks.assert_same_bits("result", got, expected)


def paged(
    seqlens: list[int], page_size: int, device: str, fill: float = 0.0, spare: int = 0
) -> tuple[checks.Operands, dict[str, torch.Tensor]]:
    """One query row each, keys in shuffled pages; `fill` in unused slots, `spare` columns more."""
    case = Case(len(seqlens), 2, 1, 1, max(seqlens), 64)
    q, k, v = checks.gaussian(case, device)
    columns = -(-max(seqlens) // page_size)
    num_pages = len(seqlens) * columns
    order = torch.randperm(num_pages, generator=checks.generator("cpu", 0)).view(-1, columns)
    pools = []
    for tensor in (k, v):
        pool = torch.full((num_pages, page_size, 1, 64), fill, dtype=case.dtype, device=device)
        for b, used in enumerate(seqlens):
            for column, rows in enumerate(tensor[b, :used].split(page_size) if used else ()):
                pool[order[b, column], : rows.shape[0]] = rows
        pools.append(pool)
    table = torch.cat([order, torch.zeros(len(seqlens), spare, dtype=order.dtype)], 1)
    lengths = {"page_table": table.int().to(device), "seqused_k": int32(seqlens, device)}
    return (q, pools[0], pools[1]), lengths


@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_case_11_nan_past_seqused_in_pages(device: str, page_size: int):
    seqlens = [130, 1, 200]
    operands, lengths = paged(seqlens, page_size, device)
    clean = check(*operands, **lengths)
    operands, lengths = paged(seqlens, page_size, device, fill=NAN)
    for got, expected in zip(attend(*operands, **lengths), clean, strict=True):
        checks.assert_same_bits("result", got, expected)


@pytest.mark.parametrize("unused", [-1, INT_MAX, 0])
@pytest.mark.parametrize("page_size", [1, 16])
def test_case_13_unused_page_table_entries(device: str, unused: int, page_size: int):
    seqlens = [40, 1, 0, 96]
    operands, lengths = paged(seqlens, page_size, device)
    clean = check(*operands, **lengths)
    for b, used in enumerate(seqlens):
        lengths["page_table"][b, -(-used // page_size) :] = unused
    # Exactly as wide as needed: the last row ends where the allocation ends.
    assert lengths["page_table"].shape[1] == -(-96 // page_size)
    for got, expected in zip(attend(*operands, **lengths), clean, strict=True):
        checks.assert_same_bits("result", got, expected)


def test_case_13_row_stride_of_the_page_table_is_free(device: str):
    operands, lengths = paged([40, 96], 16, device)
    clean = check(*operands, **lengths)
    wide, narrow = paged([40, 96], 16, device, spare=5)
    narrow["page_table"] = narrow["page_table"][:, :6]
    for got, expected in zip(attend(*wide, **narrow), clean, strict=True):
        checks.assert_same_bits("result", got, expected)


@pytest.mark.parametrize("seqlen_k", [300, 1, 9, 64])
@pytest.mark.parametrize("page_size", [128, 1])
def test_case_14_padding_lanes_do_not_count(device: str, seqlen_k: int, page_size: int):
    (q, k, v), lengths = paged([seqlen_k], page_size, device, fill=5.0)
    out, lse = check(q.zero_(), k, v, **lengths)
    _, _, values = checks.gaussian(Case(1, 2, 1, 1, seqlen_k, 64), device)
    mean = values[0, :, 0].double().mean(0)
    torch.testing.assert_close(out[0, 0].double(), mean.expand(2, 64), atol=2e-3, rtol=1e-2)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(seqlen_k)))


# ---- Windows -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "same"),
    [
        ((None, 0), {"causal": True}),
        ((-1, 0), {"causal": True}),
        ((99, 0), {"causal": True}),
        ((-1, -1), {}),
        ((None, None), {}),
        ((99, 99), {}),
    ],
)
def test_case_16_windows_equal_to_other_masks(device: str, window: Any, same: dict[str, Any]):
    q, k, v = checks.gaussian(Case(2, 2, 1, 100, 100, 64), device)
    got, expected = attend(q, k, v, window_size=window), check(q, k, v, **same)
    torch.testing.assert_close(got, expected, atol=1e-2, rtol=1e-2)
    checks.assert_attention(got, *checks.oracle(q, k, v, **same))


def test_case_16_window_of_the_query_itself(device: str):
    q, k, v = checks.gaussian(Case(2, 2, 1, 100, 100, 64), device)
    out, _ = check(q, k, v, window_size=(0, 0))
    torch.testing.assert_close(out, v.expand_as(out))


def test_case_16_empty_window(device: str):
    q, k, v = checks.gaussian(Case(2, 2, 1, 100, 100, 64), device)
    assert_nothing_seen(*attend(q, k, v, window_size=(7, -8)))


@pytest.mark.parametrize(
    "window", [(3, 5), (64, 0), (0, 64), (-3, 5), (None, -2), (5, None), (130, 7), (0, -1)]
)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(100, 100), (40, 150), (150, 40)])
def test_case_16_windows_match_the_definition(
    device: str, window: Any, seqlen_q: int, seqlen_k: int
):
    q, k, v = checks.gaussian(Case(2, 2, 1, seqlen_q, seqlen_k, 64), device)
    got = attend(q, k, v, window_size=window)
    visible = checks.mask_by_definition(seqlen_q, seqlen_k, window=window)
    exact = checks.attention_by_definition(q, k, v, visible)
    _, lowprec = checks.oracle(q, k, v, window_size=window)
    checks.assert_attention(got, exact, lowprec)


# ---- Hints, head dimensions, heads ---------------------------------------------------------------


def test_case_17_hints_of_any_kind(device: str):
    operands, cu_seqlens = packed([5, 40], [70, 30], device)
    expected = check(*operands, **cu_seqlens, max_seqlen_q=40, max_seqlen_k=70)
    for number in range(20):
        hint = {
            "max_seqlen_q": torch.tensor(40 + number, device=device),
            "max_seqlen_k": torch.tensor(70 + number, dtype=torch.int32, device=device),
        }
        for got, want in zip(attend(*operands, **cu_seqlens, **hint), expected, strict=True):
            checks.assert_same_bits("result", got, want)


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_case_22_every_multiple_of_8(device: str, head_dim: int):
    """Right, on both devices: a multiple of 8 up to 256 is never refused."""
    case = Case(1, 2, 1, 70, 130, head_dim, causal=True)
    q, k, v = checks.gaussian(case, device)
    assert is_supported(q, k, v, causal=True, return_lse=True)
    check(q, k, v, causal=True)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(192, 128), (128, 96), (46, 46), (264, 264)])
def test_case_22_right_or_refused(device: str, head_dim: int, head_dim_v: int):
    q, k, v = checks.gaussian(Case(1, 2, 1, 70, 130, head_dim, head_dim_v), device)
    if is_supported(q, k, v, return_lse=True):
        check(q, k, v)
    else:
        assert device == "cuda" and head_dim in (46, 264)
        with pytest.raises(UnsupportedProblem, match="head_dim"):
            flash_attn_func(q, k, v)


@pytest.mark.parametrize(
    ("heads_q", "heads_kv", "causal"),
    [(5, 1, False), (9, 3, True), (14, 2, True), (96, 8, False)],
)
def test_case_23_pack_gqa_does_not_change_the_result(
    device: str, heads_q: int, heads_kv: int, causal: bool
):
    q, k, v = checks.gaussian(Case(1, heads_q, heads_kv, 20, 60, 96), device)
    check(q, k, v, causal=causal)
    for pack_gqa in (False, True):
        check(q, k, v, causal=causal, pack_gqa=pack_gqa)


def test_case_23_heads_that_do_not_divide(device: str):
    q = torch.zeros(1, 4, 6, 64, dtype=torch.bfloat16, device=device)
    k = torch.zeros(1, 4, 4, 64, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="num_heads_q is 6, expected a multiple of 4"):
        flash_attn_func(q, k, k)


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("cu_seqlens", "hint", "message"),
    [
        ([3, 10, 20], None, r"cu_seqlens_q\[0\] is 3, expected 0"),
        ([0, 12, 10], None, r"cu_seqlens_q\[2\] is 10, expected at least 12"),
        ([0, 10, 21], None, r"cu_seqlens_q\[-1\] is 21, expected at most 20"),
        ([0, 12, 20], 10, r"max_seqlen_q is 10, expected at least 12"),
    ],
)
def test_case_25_bad_cu_seqlens(cu_seqlens: list[int], hint: int | None, message: str):
    q, k, v = (tensor[0] for tensor in checks.gaussian(Case(seqlen_q=20, seqlen_k=20)))
    lengths: dict[str, Any] = {
        "cu_seqlens_q": int32(cu_seqlens, "cpu"),
        "cu_seqlens_k": int32([0, 10, 20], "cpu"),
    }
    with pytest.raises(InvalidProblem, match=message):
        flash_attn_varlen_func(q, k, v, **lengths, max_seqlen_q=hint)


def test_case_25_cu_seqlens_that_end_early(device: str):
    """Rows past the last sequence are slack: NaN there changes nothing."""
    (q, k, v), _ = packed([20], [30], device)
    lengths = {"cu_seqlens_q": starts([4, 9], device), "cu_seqlens_k": starts([10, 7], device)}
    out, lse = attend(q, k, v, **lengths)
    references = [(o[:13], s[:, :13]) for o, s in checks.oracle(q, k, v, Lengths(**lengths))]
    checks.assert_attention((out[:13], lse[:, :13]), *references)
    q[13:], k[17:], v[17:] = NAN, NAN, INF
    again, again_lse = attend(q, k, v, **lengths)
    checks.assert_same_bits("out", again[:13], out[:13])
    checks.assert_same_bits("lse", again_lse[:, :13], lse[:, :13])


# ---- Devices and streams -------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_case_26_side_stream(device: str):
    """The kernel runs on the current stream: after what was queued there, before what follows."""
    case = Case(4, 8, 8, 1000, 1000, 128)
    q, k, v = checks.gaussian(case, device)
    expected = attend(q, k, v)[0]
    copies = [torch.zeros_like(tensor) for tensor in (q, k, v)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # some 25 ms: the copies below are not done when we call
        for copy, tensor in zip(copies, (q, k, v), strict=True):
            copy.copy_(tensor)
        out = attend(*copies)[0]
        for copy in copies:
            copy.zero_()
    stream.synchronize()
    checks.assert_same_bits("out", out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_case_26_tensors_on_another_device(device: str):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU here, this needs two")
    q, k, v = checks.gaussian(Case(2, 2, 1, 130, 200, 64))
    assert torch.cuda.current_device() == 0
    expected = attend(*(tensor.to("cuda:0") for tensor in (q, k, v)))[0]
    out = attend(*(tensor.to("cuda:1") for tensor in (q, k, v)))[0]
    assert out.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
    checks.assert_same_bits("out", out.to("cuda:0"), expected)


# ---- Callbacks -----------------------------------------------------------------------------------

FACTOR = 1.0


def by_global(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * FACTOR


def carried(how: str, factor: float) -> Callable[..., Any]:
    """A score_mod that multiplies by a factor which it carries in one of several ways."""

    def with_default(
        score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, by: float = factor
    ) -> Any:
        return score * by

    def with_keyword(
        score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, *, by: float = factor
    ) -> Any:
        return score * by

    def partial(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, by: float) -> Any:
        return score * by

    def helper(score: Any) -> Any:
        return score * factor

    ways: dict[str, Callable[..., Any]] = {
        "closure": lambda score, b, h, q_idx, kv_idx: score * factor,
        "default": with_default,
        "keyword": with_keyword,
        "partial": functools.partial(partial, by=factor),
        "nested": lambda score, b, h, q_idx, kv_idx: helper(score),
        "global": by_global,
    }
    return ways[how]


@pytest.mark.parametrize("how", ["closure", "default", "keyword", "partial", "nested", "global"])
def test_case_27_constants_of_callbacks(device: str, how: str, monkeypatch: pytest.MonkeyPatch):
    q, k, v = checks.gaussian(Case(1, 2, 1, 20, 30, 64), device)
    for factor in (1.0, 2.0, 1.0):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        got = attend(q, k, v, score_mod=carried(how, factor))
        expected = checks.oracle(q, k, v, softmax_scale=factor / 8)
        checks.assert_attention(got, *expected)


# ---- Splits, neighbours, lse, sink ---------------------------------------------------------------


@pytest.mark.parametrize("num_splits", [0, 2, 64])
def test_case_29_splits_that_are_empty(device: str, num_splits: int):
    operands, cu_seqlens = packed([1, 3], [1, 640], device)
    got = check(*operands, **cu_seqlens, num_splits=num_splits)
    one = attend(*operands, **cu_seqlens, num_splits=1)
    torch.testing.assert_close(got, one, atol=1e-2, rtol=1e-2)


def test_case_30_neighbours_and_hints_do_not_change_the_bits(device: str):
    (q, k, v), cu_seqlens = packed([5, 700], [90, 700], device)
    beside = attend(q, k, v, **cu_seqlens, causal=True)
    doubled = attend(q, k, v, **cu_seqlens, causal=True, max_seqlen_q=1400, max_seqlen_k=1400)
    lengths = {"cu_seqlens_q": starts([5], device), "cu_seqlens_k": starts([90], device)}
    alone = attend(q[:5], k[:90], v[:90], **lengths, causal=True)
    for got in (beside, doubled):
        checks.assert_same_bits("out", got[0][:5], alone[0])
        checks.assert_same_bits("lse", got[1][:, :5], alone[1])
    checks.assert_same_bits("out", doubled[0], beside[0])


def test_case_36_lse_of_packed_grouped_heads(device: str):
    (q, k, v), cu_seqlens = packed([9, 30], [50, 20], device, num_heads_q=6, num_heads_kv=2)
    _, lse = attend(q, k, v, **cu_seqlens)
    assert lse.shape == (6, 39) and lse.dtype == torch.float32
    heads = k.double().repeat_interleave(3, 1)
    for rows, keys in ((slice(0, 9), slice(0, 50)), (slice(9, 39), slice(50, 70))):
        scores = torch.einsum("ihd,jhd->hij", q[rows].double(), heads[keys]) / 8
        expected = torch.logsumexp(scores, -1)
        torch.testing.assert_close(lse[:, rows].double(), expected, atol=1e-3, rtol=1e-5)


def test_case_38_sink_of_rows_without_keys(device: str):
    q, k, v = checks.gaussian(Case(2, 2, 1, 70, 0, 64), device)
    sink = torch.tensor([0.75, -2.0], device=device)
    out, lse = attend(q, k, v, sink=sink)
    assert (out == 0).all() and torch.equal(lse, sink.view(1, 2, 1).expand_as(lse))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seqlen_k", [1, 64, 200])
def test_case_38_sink_takes_its_share(device: str, dtype: torch.dtype, seqlen_k: int):
    """Logits 0 and v = 1: what is left of 1 is the share of the keys, 0.30 for the second head."""
    q, k, v = checks.gaussian(Case(1, 2, 1, 70, seqlen_k, 64), device)
    sink = torch.tensor([-INF, math.log(seqlen_k * 7 / 3)], device=device).to(dtype)
    out, lse = attend(q.zero_(), k, v.fill_(1.0), sink=sink)
    share = seqlen_k / (seqlen_k + sink.double().exp())
    torch.testing.assert_close(out[0, 0, :, 0].double(), share, atol=4e-3, rtol=0)
    torch.testing.assert_close(
        lse[0, :, 0].double(), (seqlen_k + sink.double().exp()).log(), atol=1e-5, rtol=0
    )
    assert share[0] == 1 and abs(share[1].item() - 0.30) < 0.01
