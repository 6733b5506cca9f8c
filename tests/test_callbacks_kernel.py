"""Callbacks in the attention kernel, on a GPU against the reference that runs the same function."""

import checks
import pytest
import torch

from flash_cute import cache_info, flash_attn_func, flash_attn_varlen_func
from flash_cute.problem import Lengths

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

HEADS, ROWS, KEYS = 6, 300, 421


def tables():
    generator = torch.Generator().manual_seed(3)
    on_gpu = {"generator": generator, "dtype": torch.float32}
    return {
        "slopes": (0.02 + torch.rand(HEADS, **on_gpu) / 4).cuda(),
        "bias": torch.randn(HEADS, ROWS, KEYS, **on_gpu).bfloat16().cuda(),
        "document": torch.arange(KEYS).div(60, rounding_mode="floor").int().cuda(),
        "prefix": torch.tensor([100, 3], dtype=torch.int64).cuda(),
        "is_open": (torch.arange(KEYS) % 3 != 1).cuda(),
        "gain": torch.tensor(1.7).cuda(),
    }


def score_mods():
    t = tables()

    def alibi(score, b, h, q_idx, kv_idx):
        return score - t_slopes[h] * torch.abs(q_idx - kv_idx)

    def bias(score, b, h, q_idx, kv_idx):
        return score + t_bias[h, q_idx, kv_idx]

    def softcap(score, b, h, q_idx, kv_idx):
        return 5.0 * torch.tanh(score / 5.0)

    def gain(score, b, h, q_idx, kv_idx):
        return torch.where(kv_idx % 2 == 0, score * t_gain, score / (1 + b))

    def hidden(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx >= kv_idx, score, -float("inf"))

    t_slopes, t_bias, t_gain = t["slopes"], t["bias"], t["gain"]
    return [alibi, bias, softcap, gain, hidden]


def mask_mods():
    t = tables()
    document, prefix, is_open = t["document"], t["prefix"], t["is_open"]

    def causal(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    def window(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx < 40) & (kv_idx - q_idx < 130)

    def documents(b, h, q_idx, kv_idx):
        return document[q_idx] == document[kv_idx]

    def prefix_lm(b, h, q_idx, kv_idx):
        return (kv_idx < prefix[b]) | (q_idx >= kv_idx)

    def holes(b, h, q_idx, kv_idx):
        return is_open[kv_idx] & (h % 2 == 0)

    def dilated(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx) % 4 == 0

    return [causal, window, documents, prefix_lm, holes, dilated]


def operands(d: int, dv: int, heads_kv: int, dtype=torch.bfloat16):
    case = checks.Case(2, HEADS, heads_kv, ROWS, KEYS, d, dv, dtype)
    return checks.gaussian(case, "cuda")


def check(d: int, dv: int, heads_kv: int, **options):
    q, k, v = operands(d, dv, heads_kv)
    got = flash_attn_func(q, k, v, return_lse=True, **options)
    checks.assert_attention(got, *checks.oracle(q, k, v, **options))


SHAPES = [(64, 64, 6), (128, 128, 2), (192, 128, 3), (256, 256, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("number", range(5), ids=["alibi", "bias", "softcap", "gain", "hidden"])
def test_score_mod(shape, number):
    check(*shape, score_mod=score_mods()[number], causal=number % 2 == 0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "number", range(6), ids=["causal", "window", "documents", "prefix_lm", "holes", "dilated"]
)
def test_mask_mod(shape, number):
    """Alone, and by turns with a window: both count."""
    is_narrow = (SHAPES.index(shape) + number) % 2 == 1
    window = {"window_size": (150, 90)} if is_narrow else {}
    check(*shape, mask_mod=mask_mods()[number], **window)


@pytest.mark.parametrize(
    ("name", "d", "widths"),
    [
        ("alibi", 128, (1, 2, 4, 8)),
        ("bias", 128, (1, 2, 4, 8)),
        ("documents", 128, (1, 2, 4, 8)),
        ("window", 128, (1, 2, 4, 8)),
        ("window", 64, (2, 8)),
        ("bias", 256, (1, 4)),
    ],
)
def test_native_callbacks_of_any_width(name, d, widths):
    """All widths have the same bits where there is nothing to fuse, and the same result."""
    from tests import native_callbacks_dsl as dsl

    q, k, v = operands(d, d, 2)
    kind, table = dsl.KINDS[name], dsl.table_of(name, HEADS, ROWS, KEYS, "cuda")
    portable = {kind: dsl.PORTABLE[name](table), "causal": kind == "score_mod"}
    expected = checks.oracle(q, k, v, **portable)
    checks.assert_attention(flash_attn_func(q, k, v, return_lse=True, **portable), *expected)
    results = []
    for width in widths:
        options = {**portable, kind: dsl.native(name, table, width)}
        results.append(flash_attn_func(q, k, v, return_lse=True, **options))
        checks.assert_attention(results[-1], *expected)
    for out, lse in results[1:] if name != "alibi" else ():  # multiplied and added at once, or not
        checks.assert_same_bits("out", out, results[0][0])
        checks.assert_same_bits("lse", lse, results[0][1])


def test_native_callbacks_of_two_widths_together():
    from tests import native_callbacks_dsl as dsl

    q, k, v = operands(128, 128, 2)
    tables = {name: dsl.table_of(name, HEADS, ROWS, KEYS, "cuda") for name in ("bias", "documents")}
    expected = checks.oracle(
        q, k, v,
        score_mod=dsl.PORTABLE["bias"](tables["bias"]),
        mask_mod=dsl.PORTABLE["documents"](tables["documents"]),
    )  # fmt: skip
    options = {
        "score_mod": dsl.native("bias", tables["bias"], 2),
        "mask_mod": dsl.native("documents", tables["documents"], 8),
    }
    checks.assert_attention(flash_attn_func(q, k, v, return_lse=True, **options), *expected)


def test_score_mod_after_softcap_and_scale():
    alibi = score_mods()[0]
    check(128, 128, 2, score_mod=alibi, softcap=3.0, softmax_scale=-0.3, causal=True)


def shapes_of_rows():
    """Score changes that move the maxima of rows about, from the last keys to the first."""
    slopes, inf = torch.linspace(0.01, 0.9, HEADS).cuda(), float("inf")
    table = torch.linspace(-4, 4, HEADS * KEYS).view(HEADS, KEYS).cuda()
    return {
        "falling": lambda s, b, h, i, j: s - slopes[h] * (i - j),
        "rising": lambda s, b, h, i, j: s + 8.0 * slopes[h] * (i - j),
        "steep": lambda s, b, h, i, j: s - 30.0 * (i - j),
        "steps": lambda s, b, h, i, j: s + 40.0 * ((j // 100) % 3),
        "unseen": lambda s, b, h, i, j: torch.where(j + 70 < i, s - slopes[h] * (i - j), -inf),
        "none": lambda s, b, h, i, j: torch.where(i % 3 == h, -inf, s + table[h, j]),
        "bias": lambda s, b, h, i, j: s + table[h, i - j] - 1.0,
        "outlier": lambda s, b, h, i, j: s + torch.where(j == 7, 500.0, 0.0),
        "no_score": lambda s, b, h, i, j: slopes[h] * (i - j),
        "gain": lambda s, b, h, i, j: 3.0 * s - slopes[h] * (i - j),
    }


@pytest.mark.parametrize("number", range(10))
@pytest.mark.parametrize("d", [64, 128, 256])
def test_maxima_that_move(number, d):
    """Full blocks are weighed relative to the maximum so far: it may be low, or none at all."""
    mods = list(shapes_of_rows().values())
    check(d, d, 2, score_mod=mods[number], causal=(number + d // 64) % 2 == 0)
    assert len(mods) == 10


def test_maxima_that_move_with_softcap_and_pages_of_lists():
    mod = shapes_of_rows()["rising"]
    check(128, 128, 2, score_mod=mod, softcap=20.0)
    check(64, 64, 3, score_mod=mod, window_size=(200, 200), softmax_scale=-0.5)


def test_both_callbacks_with_a_sink():
    sink = torch.linspace(-1, 1, HEADS, device="cuda")
    check(64, 64, 3, score_mod=score_mods()[0], mask_mod=mask_mods()[2], sink=sink)


@pytest.mark.parametrize("d", [64, 128])
def test_indices_are_those_of_the_sequence_when_packed(d):
    lengths_q, lengths_k = [130, 0, 64, 200], [200, 10, 64, 140]
    starts = [
        torch.tensor([0, *lengths]).cumsum(0).int().cuda() for lengths in (lengths_q, lengths_k)
    ]
    case = checks.Case(1, HEADS, 2, sum(lengths_q), sum(lengths_k), d)
    q, k, v = (tensor[0] for tensor in checks.gaussian(case, "cuda"))
    options = {"score_mod": score_mods()[0], "mask_mod": mask_mods()[2]}
    lengths = {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]}
    got = flash_attn_varlen_func(q, k, v, **lengths, **options, return_lse=True)
    checks.assert_attention(got, *checks.oracle(q, k, v, Lengths(**lengths), **options))


def test_constants_recompile_and_values_do_not():
    q, k, v = operands(128, 128, 2)

    def scaled(factor):
        return lambda score, b, h, q_idx, kv_idx: score * factor

    def shifted(table):
        return lambda score, b, h, q_idx, kv_idx: score + table[h]

    table = torch.zeros(HEADS, device="cuda")
    plain = flash_attn_func(q, k, v, score_mod=scaled(1.0))
    double = flash_attn_func(q, k, v, score_mod=scaled(2.0))
    assert not torch.equal(plain, double)
    flash_attn_func(q, k, v, score_mod=shifted(table), return_lse=True)
    compiles = cache_info().compiles
    checks.assert_same_bits("out", flash_attn_func(q, k, v, score_mod=scaled(1.0)), plain)
    for _ in range(3):
        table = torch.randn(HEADS, device="cuda")
        got = flash_attn_func(q, k, v, score_mod=shifted(table), return_lse=True)
        checks.assert_attention(got, *checks.oracle(q, k, v, score_mod=shifted(table)))
    assert cache_info().compiles == compiles
