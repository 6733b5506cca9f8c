"""The eager reference against definitions, SDPA and FlexAttention, on the CPU.

The kernels are judged by it, so it is judged by things that share no code with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import checks
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from flash_cute import reference
from flash_cute.errors import InvalidProblem
from flash_cute.problem import DENSE, Lengths, Options, attention_request

pytestmark = pytest.mark.cpu

DOUBLE = torch.float64


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Lengths = DENSE,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference, unrounded, in the dtype that the inputs ask for."""
    problem, inputs = attention_request(q, k, v, Options(**options), lengths)
    return reference.attention(problem, inputs, round_result=False)


def operands(
    batch: int, sq: int, sk: int, hq: int = 2, hkv: int = 1, dim: int = 8, dim_v: int = 8
) -> checks.Operands:
    case = checks.Case(batch, hq, hkv, sq, sk, dim, dim_v, dtype=DOUBLE)
    return checks.gaussian(case, seed=sq * 1000 + sk)


def int32(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture(params=["one block", "many blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with blocks larger than the inputs, and with blocks far smaller."""
    if request.param == "many blocks":
        monkeypatch.setattr(reference, "_BLOCK_Q", 3)
        monkeypatch.setattr(reference, "_BLOCK_K", 4)


def assert_equal(got: torch.Tensor, expected: torch.Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(got, expected, atol=atol, rtol=1e-12)


MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "left": {"window": (3, None)},
    "right": {"window": (None, 2)},
    "both": {"window": (2, 1)},
    "self": {"window": (0, 0)},
    "legacy": {"window": (-1, 2)},
    "empty": {"window": (7, -8)},
    "ahead": {"window": (-2, 4)},
    "behind": {"window": (None, -3)},
    "causal-left": {"causal": True, "window": (4, None)},
    "causal-right": {"causal": True, "window": (None, -2)},
    "causal-wide": {"causal": True, "window": (3, 9)},
    "chunk": {"chunk": 4},
    "chunk-1": {"chunk": 1},
    "chunk-causal": {"chunk": 3, "causal": True},
    "chunk-window": {"chunk": 5, "window": (2, 2)},
}


def options_of(mask: dict[str, Any]) -> dict[str, Any]:
    """The call's spelling of a mask of checks.mask_by_definition."""
    names = {"causal": "causal", "window": "window_size", "chunk": "attention_chunk"}
    return {names[name]: value for name, value in mask.items()}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(("sq", "sk"), [(10, 10), (5, 13), (13, 5), (1, 9), (9, 1), (0, 4), (4, 0)])
def test_mask_matches_definition(mask: dict[str, Any], sq: int, sk: int, blocks: None):
    q, k, v = operands(2, sq, sk)
    visible = checks.mask_by_definition(sq, sk, **mask)
    out, lse = checks.attention_by_definition(q, k, v, visible)
    got_out, got_lse = attention(q, k, v, **options_of(mask))
    assert_equal(got_out, out)
    assert_equal(got_lse, lse)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_visibility_matches_definition(mask: dict[str, Any]):
    for sq, sk in [(10, 10), (5, 13), (13, 5)]:
        q, k, v = operands(2, sq, sk)
        request = attention_request(q, k, v, Options(**options_of(mask)))
        visible = checks.mask_by_definition(sq, sk, **mask)
        assert torch.equal(reference.visibility(*request), visible.expand(2, 2, sq, sk))


@pytest.mark.parametrize(("hq", "hkv"), [(1, 1), (6, 6), (6, 3), (6, 2), (5, 1), (12, 4)])
@pytest.mark.parametrize(("dim", "dim_v"), [(8, 8), (16, 4), (4, 16), (1, 1)])
def test_heads_and_dims_match_definition(hq: int, hkv: int, dim: int, dim_v: int):
    q, k, v = operands(2, 7, 9, hq, hkv, dim, dim_v)
    expected = checks.attention_by_definition(q, k, v, torch.ones(7, 9, dtype=torch.bool))
    for got, want in zip(attention(q, k, v), expected, strict=True):
        assert_equal(got, want)


@pytest.mark.parametrize("scale", [None, 1.0, 0.0, -0.7, 100.0])
@pytest.mark.parametrize("softcap", [0.0, 0.5, 30.0])
@pytest.mark.parametrize("has_sink", [False, True])
def test_scores_match_definition(scale: float | None, softcap: float, has_sink: bool, blocks: None):
    q, k, v = operands(2, 9, 11)
    sink = torch.tensor([0.7, -2.0], dtype=DOUBLE) if has_sink else None
    visible = checks.mask_by_definition(9, 11, window=(5, -4))  # its first rows see nothing
    assert not visible[0].any() and visible[-1].any()
    expected = checks.attention_by_definition(
        q, k, v, visible, scale=scale, softcap=softcap, sink=sink
    )
    options: dict[str, Any] = {"softmax_scale": scale, "softcap": softcap, "sink": sink}
    got = attention(q, k, v, window_size=(5, -4), **options)
    for tensor, want in zip(got, expected, strict=True):
        assert_equal(tensor, want)
    if sink is not None:
        assert torch.equal(got[1][:, :, 0], sink.expand(2, 2))


def test_softmax_matches_sdpa():
    q, k, v = checks.gaussian(checks.Case(2, 6, 2, 300, 700, 64, dtype=torch.float32))
    visible = checks.mask_by_definition(300, 700, causal=True)
    q_, k_, v_ = (tensor.transpose(1, 2) for tensor in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q_, k_, v_, attn_mask=visible, enable_gqa=True
    )
    out, _ = attention(q, k, v, causal=True)
    torch.testing.assert_close(out, expected.transpose(1, 2), atol=2e-6, rtol=1e-5)


TABLE = torch.randn(2, 2, 9, 11, dtype=DOUBLE, generator=checks.generator("cpu", 3))
LABELS = torch.tensor([0, 0, 1, 1, 1, 2, 2, 0, 1, 1, 2])

SCORE_MODS: dict[str, Callable[..., Any]] = {
    "identity": lambda score, b, h, q_idx, kv_idx: score,
    "alibi": lambda score, b, h, q_idx, kv_idx: score - 0.1 * (h + 1) * (q_idx - kv_idx).abs(),
    "bias": lambda score, b, h, q_idx, kv_idx: score + TABLE[b, h, q_idx, kv_idx],
    "per-head": lambda score, b, h, q_idx, kv_idx: score * TABLE[b, h, 0, 0],
    "tanh": lambda score, b, h, q_idx, kv_idx: 2 * torch.tanh(score / 2),
    "hide": lambda score, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, score, -math.inf),
    "no-score": lambda score, b, h, q_idx, kv_idx: (q_idx - kv_idx).double() * 0.1,
}

MASK_MODS: dict[str, Callable[..., Any]] = {
    "causal": lambda b, h, q_idx, kv_idx: q_idx >= kv_idx,
    "documents": lambda b, h, q_idx, kv_idx: LABELS[q_idx] == LABELS[kv_idx],
    "by-head": lambda b, h, q_idx, kv_idx: (kv_idx + h) % 2 == 0,
    "by-batch": lambda b, h, q_idx, kv_idx: kv_idx < 3 + 4 * b,
    "row-5-sees-none": lambda b, h, q_idx, kv_idx: (q_idx != 5) & (kv_idx >= 0),
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", SCORE_MODS)
def test_score_mod_matches_flex_attention(name: str, blocks: None):
    q, k, v = operands(2, 9, 11)
    q_, k_, v_ = (tensor.transpose(1, 2) for tensor in (q, k, v))
    expected = flex_attention(q_, k_, v_, score_mod=SCORE_MODS[name], enable_gqa=True)
    out, _ = attention(q, k, v, score_mod=SCORE_MODS[name])
    assert isinstance(expected, torch.Tensor)
    assert_equal(out, expected.transpose(1, 2))


@pytest.mark.parametrize("name", MASK_MODS)
@pytest.mark.parametrize("causal", [False, True])
def test_mask_mod_is_anded_with_causal(name: str, causal: bool, blocks: None):
    q, k, v = operands(2, 9, 11)
    visible = checks.mask_by_definition(9, 11, causal=causal).expand(2, 2, 9, 11).clone()
    for b, h, i, j in visible.nonzero().tolist():
        visible[b, h, i, j] = bool(MASK_MODS[name](*map(torch.tensor, (b, h, i, j))))
    expected = checks.attention_by_definition(q, k, v, visible)
    got = attention(q, k, v, causal=causal, mask_mod=MASK_MODS[name])
    for tensor, want in zip(got, expected, strict=True):
        assert_equal(tensor, want)
    request = attention_request(q, k, v, Options(causal=causal, mask_mod=MASK_MODS[name]))
    assert torch.equal(reference.visibility(*request), visible)


def test_order_is_softcap_then_score_mod_then_mask():
    q, k, v = operands(1, 6, 6)
    bias = TABLE[:1, :, :6, :6]
    visible = checks.mask_by_definition(6, 6, causal=True)
    expected = checks.attention_by_definition(q, k, v, visible, softcap=0.5, bias=bias)
    # A score_mod that makes hidden scores visible would show if it came after the mask.
    got = attention(
        q,
        k,
        v,
        causal=True,
        softcap=0.5,
        score_mod=lambda score, b, h, q_idx, kv_idx: torch.nan_to_num(
            score + bias[b, h, q_idx, kv_idx]
        ),
    )
    assert_equal(got[0], expected[0])


def test_callbacks_that_return_nonsense_are_refused():
    q, k, v = operands(2, 9, 11)
    with pytest.raises(InvalidProblem, match=r"mask_mod returned torch.int64, expected torch.bool"):
        attention(q, k, v, mask_mod=lambda b, h, i, j: i - j)
    with pytest.raises(InvalidProblem, match=r"score_mod returned shape \(5,\), expected one that"):
        attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.zeros(5))
    assert torch.isfinite(attention(q, k, v, mask_mod=lambda b, h, i, j: True)[0]).all()


# ---- Packed, padded, paged -----------------------------------------------------------------------

LENGTHS_Q, LENGTHS_K = [3, 0, 7, 1, 5], [4, 6, 0, 9, 5]


def alone(**options: Any) -> tuple[list[checks.Operands], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Sequences of those lengths, and the result of each computed by itself."""
    sequences = [operands(1, sq, sk) for sq, sk in zip(LENGTHS_Q, LENGTHS_K, strict=True)]
    return sequences, [attention(q, k, v, **options) for q, k, v in sequences]


def pack(tensors: list[torch.Tensor], slack: int = 0) -> torch.Tensor:
    """Sequences one after the other, then NaN."""
    packed = torch.cat([tensor[0] for tensor in tensors])
    return torch.cat([packed, packed.new_full((slack, *packed.shape[1:]), math.nan)])


def pad(tensors: list[torch.Tensor], seqlen: int) -> torch.Tensor:
    """Sequences as a batch, NaN past each."""
    shape = (len(tensors), seqlen, *tensors[0].shape[2:])
    batch = torch.full(shape, math.nan, dtype=DOUBLE)
    for b, tensor in enumerate(tensors):
        batch[b, : tensor.shape[1]] = tensor[0]
    return batch


def starts(lengths: list[int]) -> torch.Tensor:
    return int32(0, *torch.tensor(lengths).cumsum(0).tolist())


RAGGED_OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (2, 1)},
    "chunk": {"attention_chunk": 3},
    "sink": {"sink": torch.tensor([0.3, -1.0], dtype=DOUBLE), "causal": True},
    "softcap": {"softcap": 0.8},
    "mods": {
        "score_mod": lambda score, b, h, q_idx, kv_idx: score + 0.2 * (q_idx - kv_idx) + h,
        "mask_mod": lambda b, h, q_idx, kv_idx: (q_idx + kv_idx) % 3 != 0,
    },
}


@pytest.mark.parametrize("options", RAGGED_OPTIONS.values(), ids=RAGGED_OPTIONS)
@pytest.mark.parametrize("slack", [0, 4])
def test_packed_equals_each_sequence_alone(options: dict[str, Any], slack: int, blocks: None):
    sequences, results = alone(**options)
    q, k, v = (pack([s[i] for s in sequences], slack) for i in range(3))
    lengths = Lengths(cu_seqlens_q=starts(LENGTHS_Q), cu_seqlens_k=starts(LENGTHS_K))
    out, lse = attention(q, k, v, lengths, **options)
    total = sum(LENGTHS_Q)
    assert out.shape == (total + slack, 2, 8) and lse.shape == (2, total + slack)
    assert_equal(out[:total], pack([result[0] for result in results]))
    assert_equal(lse[:, :total], torch.cat([result[1][0] for result in results], 1))
    assert (out[total:] == 0).all() and (lse[:, total:] == -math.inf).all()


@pytest.mark.parametrize("options", RAGGED_OPTIONS.values(), ids=RAGGED_OPTIONS)
@pytest.mark.parametrize("sides", ["both", "q", "k"])
def test_padded_equals_each_sequence_alone(options: dict[str, Any], sides: str, blocks: None):
    """seqused on a padded batch; the other side packed where only one is padded."""
    sequences, results = alone(**options)
    q, k, v = (pad([s[i] for s in sequences], 12) for i in range(3))
    lengths = {"seqused_q": int32(*LENGTHS_Q), "seqused_k": int32(*LENGTHS_K)}
    if sides == "q":
        k, v = (pack([s[i] for s in sequences]) for i in (1, 2))
        lengths = {"seqused_q": int32(*LENGTHS_Q), "cu_seqlens_k": starts(LENGTHS_K)}
    if sides == "k":
        q = pack([s[0] for s in sequences])
        lengths = {"cu_seqlens_q": starts(LENGTHS_Q), "seqused_k": int32(*LENGTHS_K)}
    out, lse = attention(q, k, v, Lengths(**lengths), **options)
    if sides == "k":
        assert_equal(out, pack([result[0] for result in results]))
        return
    for b, (result_out, result_lse) in enumerate(results):
        used = LENGTHS_Q[b]
        assert_equal(out[b, :used], result_out[0])
        assert_equal(lse[b, :, :used], result_lse[0])
        assert (out[b, used:] == 0).all() and (lse[b, :, used:] == -math.inf).all()


def test_seqused_within_packed_sequences():
    sequences, results = alone(causal=True)
    wide = [pad([tensor], tensor.shape[1] + 2) for s in sequences for tensor in s]
    q, k, v = (pack(wide[i::3]) for i in range(3))
    lengths = Lengths(
        cu_seqlens_q=starts([length + 2 for length in LENGTHS_Q]),
        cu_seqlens_k=starts([length + 2 for length in LENGTHS_K]),
        seqused_q=int32(*LENGTHS_Q),
        seqused_k=int32(*LENGTHS_K),
    )
    out, lse = attention(q, k, v, lengths, causal=True)
    for b, (result_out, result_lse) in enumerate(results):
        start, used = sum(LENGTHS_Q[:b]) + 2 * b, LENGTHS_Q[b]
        assert_equal(out[start : start + used], result_out[0])
        assert_equal(lse[:, start : start + used], result_lse[0])
        assert (out[start + used : start + used + 2] == 0).all()


def page(tensors: list[torch.Tensor], size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences cut into pages that lie in a shuffled order; NaN and bad ids where nothing is."""
    most = max(-(-tensor.shape[1] // size) for tensor in tensors) + 1
    table = torch.full((len(tensors), most), 2**31 - 1, dtype=torch.int32)
    table[1::2] = -1
    num_pages = sum(-(-tensor.shape[1] // size) for tensor in tensors) + 3
    free = torch.randperm(num_pages, generator=checks.generator("cpu", size)).tolist()
    pool = torch.full((num_pages, size, *tensors[0].shape[2:]), math.nan, dtype=DOUBLE)
    for b, tensor in enumerate(tensors):
        for column, rows in enumerate(tensor[0].split(size) if tensor.shape[1] else ()):
            table[b, column] = free.pop()
            pool[table[b, column], : rows.shape[0]] = rows
    return pool, table


@pytest.mark.parametrize("options", RAGGED_OPTIONS.values(), ids=RAGGED_OPTIONS)
@pytest.mark.parametrize("size", [1, 2, 3, 16])
@pytest.mark.parametrize("is_packed", [False, True])
def test_paged_equals_each_sequence_alone(options: dict[str, Any], size: int, is_packed: bool):
    sequences, results = alone(**options)
    k, table = page([s[1] for s in sequences], size)
    v, same = page([s[2] for s in sequences], size)
    assert torch.equal(table, same)
    lengths: dict[str, Any] = {"seqused_k": int32(*LENGTHS_K), "page_table": table}
    if is_packed:
        q = pack([s[0] for s in sequences])
        lengths["cu_seqlens_q"] = starts(LENGTHS_Q)
        out, lse = attention(q, k, v, Lengths(**lengths), **options)
        assert_equal(out, pack([result[0] for result in results]))
        assert_equal(lse, torch.cat([result[1][0] for result in results], 1))
        return
    q = pad([s[0] for s in sequences], 7)
    out, lse = attention(q, k, v, Lengths(seqused_q=int32(*LENGTHS_Q), **lengths), **options)
    for b, (result_out, result_lse) in enumerate(results):
        assert_equal(out[b, : LENGTHS_Q[b]], result_out[0])
        assert_equal(lse[b, :, : LENGTHS_Q[b]], result_lse[0])


def test_paged_without_seqused_uses_every_slot():
    q, k, v = operands(2, 3, 8)
    table = int32([2, 0], [3, 1])
    pool_k, pool_v = torch.zeros(4, 4, 1, 8, dtype=DOUBLE), torch.zeros(4, 4, 1, 8, dtype=DOUBLE)
    pool_k[table.long()], pool_v[table.long()] = k.unflatten(1, (2, 4)), v.unflatten(1, (2, 4))
    got = attention(q, pool_k, pool_v, Lengths(page_table=table), causal=True)
    for tensor, want in zip(got, attention(q, k, v, causal=True), strict=True):
        assert torch.equal(tensor, want)


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The results of every callback on every block, in the order of the computation."""
    results: list[torch.Tensor] = []
    original = reference._per_element

    def per_element(*arguments: Any) -> torch.Tensor:
        results.append(original(*arguments))
        return results[-1]

    monkeypatch.setattr(reference, "_per_element", per_element)
    return results


def test_callbacks_see_positions_within_the_sequence(monkeypatch: pytest.MonkeyPatch):
    results = recorded(monkeypatch)
    sequences, _ = alone()
    q, k, v = (pack([s[i] for s in sequences]) for i in range(3))
    lengths = Lengths(cu_seqlens_q=starts(LENGTHS_Q), cu_seqlens_k=starts(LENGTHS_K))
    score_mod = lambda s, b, h, i, j: 0 * s + ((b * 100 + h) * 100 + i) * 100 + j
    with torch.no_grad():
        attention(q, k, v, lengths, score_mod=score_mod)
    seen = [int(code) for result in results for code in result.flatten().tolist()]
    sizes = zip(LENGTHS_Q, LENGTHS_K, strict=True)
    expected = [
        ((b * 100 + h) * 100 + i) * 100 + j
        for b, (sq, sk) in enumerate(sizes)
        for h in range(2)
        for i in range(sq)
        for j in range(sk)
    ]
    assert sorted(seen) == sorted(expected)


def test_callbacks_are_written_for_one_element():
    """As under FlexAttention: 0-dim arguments, indexing in steps, plain integers as indices."""
    q, k, v = operands(2, 9, 11)
    seen: set[int] = set()

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        seen.update(x.dim() for x in (score, b, h, q_idx, kv_idx))
        return score + TABLE[b][h][q_idx, kv_idx] + TABLE[0, :, q_idx, -1][h]

    out, lse = attention(q, k, v, score_mod=score_mod)
    bias = TABLE[:2, :2, :9, :11] + TABLE[0, :2, :9, -1:]
    expected = checks.attention_by_definition(q, k, v, torch.ones(9, 11).bool(), bias=bias)
    assert_equal(out, expected[0])
    assert_equal(lse, expected[1])
    assert seen == {0}


# ---- Empty ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_sink", [False, True])
@pytest.mark.parametrize(("batch", "sq", "sk"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)])
def test_empty_sizes(batch: int, sq: int, sk: int, has_sink: bool):
    q, k, v = operands(batch, sq, sk)
    sink = torch.tensor([0.3, -1.0], dtype=DOUBLE) if has_sink else None
    for lengths in (DENSE, Lengths(seqused_k=torch.full((batch,), sk, dtype=torch.int32))):
        out, lse = attention(q, k, v, lengths, causal=True, sink=sink)
        assert out.shape == (batch, sq, 2, 8) and lse.shape == (batch, 2, sq)
        if sk == 0:
            assert (out == 0).all()
            assert torch.equal(lse, lse.new_full((), -math.inf).expand_as(lse)) or has_sink
            if sink is not None:
                assert torch.equal(lse, sink.view(1, 2, 1).expand_as(lse))


def test_empty_packed():
    q, k, v = (tensor[0] for tensor in operands(1, 0, 4))
    out, lse = attention(q, k, v, Lengths(cu_seqlens_q=int32(0, 0), cu_seqlens_k=int32(0, 4)))
    assert out.shape == (0, 2, 8) and lse.shape == (2, 0)
    out, lse = attention(q, k, v, Lengths(cu_seqlens_q=int32(0), cu_seqlens_k=int32(0)))
    assert out.shape == (0, 2, 8) and lse.shape == (2, 0)


# ---- Dtypes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_result_dtypes(dtype: torch.dtype):
    q, k, v = checks.gaussian(checks.Case(2, 2, 1, 9, 11, 16, dtype=dtype))
    request = attention_request(q, k, v, Options())
    out, lse = reference.attention(*request)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert out.is_contiguous() and lse.is_contiguous()
    expected = checks.attention_by_definition(q, k, v, torch.ones(9, 11, dtype=torch.bool))
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected[0], atol=2 * eps, rtol=2 * eps)
    torch.testing.assert_close(lse.double(), expected[1], atol=1e-6, rtol=1e-6)
    exact, _ = reference.attention(*request, compute_dtype=DOUBLE, round_result=False)
    assert_equal(exact, expected[0])


def test_lowprec_rounds_what_a_half_precision_implementation_rounds():
    q, k, v = checks.gaussian(checks.Case(1, 1, 1, 64, 200, 64))
    request = attention_request(q, k, v, Options())
    scores = (q[0, :, 0].float() / 8).bfloat16() @ k[0, :, 0].T
    probs = torch.exp(scores.float() - scores.float().amax(-1, keepdim=True))
    expected = (probs.bfloat16() @ v[0, :, 0]).float() / probs.sum(-1, keepdim=True)
    out, _ = reference.attention(*request, lowprec=True, round_result=False)
    torch.testing.assert_close(out[0, :, 0], expected, atol=1e-6, rtol=1e-6)
    exact, _ = reference.attention(*request, compute_dtype=DOUBLE, round_result=False)
    error = (out - exact).abs().max().item()
    assert 1e-4 < error < 2e-2


def test_autocast_does_not_lower_the_precision():
    q, k, v = checks.gaussian(checks.Case(1, 2, 2, 33, 65, 32, dtype=torch.float32))
    plain, _ = attention(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under, _ = attention(q, k, v)
    assert torch.equal(plain, under)


def test_huge_logits_and_a_far_maximum():
    """The running maximum changes by far more than float32's exponent range, both ways."""
    q = torch.ones(1, 2, 1, 1)
    q[0, 1] = -1
    k = torch.linspace(-3e4, 3e4, 3001).view(1, -1, 1, 1)
    v = torch.arange(3001.0).view(1, -1, 1, 1)
    out, lse = attention(q, k, v)
    assert out.flatten().tolist() == pytest.approx([3000.0, 0.0], abs=1e-6)
    assert lse.flatten().tolist() == [3e4, 3e4]


# ---- Gradients -----------------------------------------------------------------------------------


def with_grad(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.detach().clone().requires_grad_() for tensor in tensors)


SINK = torch.tensor([0.4, -0.5], dtype=DOUBLE)

GRADIENT_CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "full": (3, 5, {}),
    "causal": (4, 4, {"causal": True}),
    "rows-see-nothing": (5, 2, {"causal": True}),
    "nothing-sees": (3, 3, {"window_size": (7, -8)}),
    "no-keys": (3, 0, {}),
    "softcap": (3, 4, {"softcap": 0.7, "window_size": (1, 1)}),
    "score_mod": (3, 4, {"score_mod": SCORE_MODS["bias"]}),
    "score_mod-hides": (4, 4, {"score_mod": SCORE_MODS["hide"]}),
    "mask_mod": (4, 4, {"mask_mod": MASK_MODS["by-head"], "causal": True}),
    "chunk": (4, 5, {"attention_chunk": 2}),
}


@pytest.mark.parametrize(("sq", "sk", "options"), GRADIENT_CASES.values(), ids=GRADIENT_CASES)
@pytest.mark.parametrize("has_sink", [False, True])
def test_gradcheck(
    sq: int, sk: int, options: dict[str, Any], has_sink: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reference, "_BLOCK_Q", 2)
    monkeypatch.setattr(reference, "_BLOCK_K", 2)
    inputs = with_grad(*operands(1, sq, sk, dim=3, dim_v=2), *([SINK] if has_sink else []))

    def function(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sink = tensors[3] if has_sink else None
        out, lse = attention(*tensors[:3], sink=sink, **options)
        return out, torch.where(torch.isfinite(lse), lse, 0.0)

    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("kind", ["packed", "padded", "paged"])
def test_gradcheck_of_ragged_sequences(kind: str):
    table = int32([2, 0, -1], [1, 7, 7], [-1, -1, -1])
    arguments = {
        "packed": (
            Lengths(cu_seqlens_q=int32(0, 2, 2, 3), cu_seqlens_k=int32(0, 3, 4, 4)),
            [(4, 2, 3), (5, 1, 3), (5, 1, 2)],
        ),
        "padded": (
            Lengths(seqused_q=int32(2, 0, 1), seqused_k=int32(3, 1, 0)),
            [(3, 2, 2, 3), (3, 3, 1, 3), (3, 3, 1, 2)],
        ),
        "paged": (
            Lengths(seqused_k=int32(3, 1, 0), page_table=table),
            [(3, 2, 2, 3), (3, 2, 1, 3), (3, 2, 1, 2)],
        ),
    }
    lengths, shapes = arguments[kind]
    source = checks.generator("cpu", 5)
    inputs = with_grad(*(torch.randn(shape, dtype=DOUBLE, generator=source) for shape in shapes))

    def function(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = attention(*tensors, lengths, causal=True)
        return out, torch.where(torch.isfinite(lse), lse, 0.0)

    assert torch.autograd.gradcheck(function, inputs)


def test_second_derivative():
    inputs = with_grad(*operands(1, 3, 4, dim=2, dim_v=2))
    assert torch.autograd.gradgradcheck(lambda *t: attention(*t, causal=True)[0], inputs)


def test_gradients_of_rows_that_see_nothing_are_zero():
    inputs = with_grad(*operands(1, 5, 2))
    out, lse = attention(*inputs, causal=True)
    (out.sum() + lse[torch.isfinite(lse)].sum()).backward()
    for tensor in inputs:
        assert tensor.grad is not None and torch.isfinite(tensor.grad).all()
    assert inputs[0].grad is not None and (inputs[0].grad[:, :3] == 0).all()


@pytest.mark.parametrize(("batch", "sq", "sk"), [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
@pytest.mark.parametrize("is_ragged", [False, True])
def test_gradients_of_empty_sizes_exist(batch: int, sq: int, sk: int, is_ragged: bool):
    inputs = with_grad(*operands(batch, sq, sk), SINK)
    lengths = Lengths(seqused_k=torch.full((batch,), sk, dtype=torch.int32))
    out, lse = attention(*inputs[:3], lengths if is_ragged else DENSE, sink=inputs[3])
    (out.sum() + lse.sum()).backward()
    for tensor in inputs[:3]:
        assert tensor.grad is not None and (tensor.grad == 0).all()


def test_slack_that_holds_nan_has_gradient_zero():
    sequences, _ = alone()
    q, k, v = with_grad(*(pad([s[i] for s in sequences], 12) for i in range(3)))
    lengths = Lengths(seqused_q=int32(*LENGTHS_Q), seqused_k=int32(*LENGTHS_K))
    attention(q, k, v, lengths)[0].sum().backward()
    for tensor, used in ((q, LENGTHS_Q), (k, LENGTHS_K), (v, LENGTHS_K)):
        assert tensor.grad is not None and torch.isfinite(tensor.grad).all()
        for b, length in enumerate(used):
            assert (tensor.grad[b, length:] == 0).all()


def test_captured_tensors_get_gradients():
    q, k, v = operands(1, 5, 6)
    bias = torch.zeros(2, dtype=DOUBLE, requires_grad=True)
    out, _ = attention(q, k, v, score_mod=lambda s, b, h, i, j: s * (1 + bias[h]))
    out.square().sum().backward()
    assert bias.grad is not None and (bias.grad != 0).all()


# ---- Memory --------------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor any operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(item, torch.Tensor):
                self.numel = max(self.numel, item.untyped_storage().nbytes() // item.element_size())
        return result


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (40, 0)}])
def test_no_tensor_grows_with_the_square_of_the_length(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reference, "_BLOCK_Q", 64)
    monkeypatch.setattr(reference, "_BLOCK_K", 64)
    seqlen, dim = 700, 4
    inputs = with_grad(*operands(1, seqlen, seqlen, 1, 1, dim, dim))
    with LargestTensor() as largest:
        out, lse = attention(*inputs, **options)
        (out.sum() + lse.sum()).backward()
    assert largest.numel <= 64 * 64
    assert seqlen * dim < 64 * 64 < seqlen * seqlen // 100


def test_saved_for_backward_grows_linearly():
    """What autograd keeps between forward and backward: not one score matrix per block."""

    def saved(seqlen: int) -> int:
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        inputs = with_grad(*operands(1, seqlen, seqlen, 1, 1, 4, 4))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            attention(*inputs)
        return sum(kept.values())

    small, large = saved(400), saved(1600)
    assert large <= 5 * small


def test_blocks_outside_a_window_are_not_computed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reference, "_BLOCK_Q", 16)
    monkeypatch.setattr(reference, "_BLOCK_K", 16)
    results = recorded(monkeypatch)
    q, k, v = operands(1, 512, 512)
    with torch.no_grad():
        attention(q, k, v, window_size=(8, 8), score_mod=lambda s, b, h, i, j: s)
    num_heads = results[0].shape[1]
    assert sum(result.numel() for result in results) <= num_heads * 512 * (16 + 16 + 16)
