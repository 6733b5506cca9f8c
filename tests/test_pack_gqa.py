"""Query heads packed into tiles: when that is done, and the kernel on a GPU by the reference."""

import itertools

import checks
import pytest
import torch

from flash_cute import flash_attn_func, flash_attn_varlen_func, selection
from flash_cute.problem import AttentionProblem, Lengths
from flash_cute.target import Target

H200 = Target.from_arch("sm_90a")


def key(**changes) -> selection.KernelKey:
    sizes = dict(batch=2, seqlen_q=8, seqlen_k=512, num_heads_q=8, num_heads_kv=2)
    sizes |= dict(head_dim=128, head_dim_v=128, dtype=torch.bfloat16, device="cuda")
    return selection.key_for(AttentionProblem(**(sizes | changes)), H200)


@pytest.mark.parametrize(
    ("group", "tile", "expected"),
    [(2, 128, (2, 64)), (3, 128, (3, 40)), (5, 128, (5, 24)), (8, 128, (8, 16)), (16, 128, (16, 8)),
     (20, 128, (10, 8)), (71, 128, (15, 8))],
)  # fmt: skip
def test_heads_and_positions_of_a_tile(group, tile, expected):
    found = key(num_heads_q=2 * group)
    assert found.config.tile_m == tile
    assert (found.spec.pack_heads, found.config.positions(found.spec)) == expected
    assert found.config.rows_used(found.spec) <= tile


def test_few_queries_are_packed_and_a_switch_decides():
    assert key().spec.pack_heads == 4
    assert key(seqlen_q=64).spec.pack_heads == 4
    assert key(seqlen_q=65).spec.pack_heads == 1
    assert key(seqlen_q=8192, pack_gqa=True).spec.pack_heads == 4
    assert key(pack_gqa=False).spec.pack_heads == 1
    assert key(num_heads_kv=8).spec.pack_heads == 1
    assert key(num_heads_kv=8, pack_gqa=True).spec.pack_heads == 1


def test_a_packed_length_is_only_a_hint():
    packed = dict(is_packed_q=True, is_packed_k=True)
    for hint in (1, 5000):
        many, few = (key(**packed, seqlen_q=hint, mean_q=mean) for mean in (500, 8))
        assert many.spec.pack_heads == 1 and few.spec.pack_heads == 4
    assert key(**packed, pack_gqa=True, mean_q=500).spec.pack_heads == 4


# ---- On a GPU ------------------------------------------------------------------------------------


def check(tensors, **options):
    exact = checks.oracle(*tensors, **options)
    for pack_gqa in (True, False, None):
        got = flash_attn_func(*tensors, return_lse=True, pack_gqa=pack_gqa, **options)
        checks.assert_attention(got, *exact)


RATIOS = [(2, 1), (6, 2), (5, 1), (14, 2), (16, 1), (20, 1), (71, 1)]
DIMS = [(64, 64), (96, 96), (192, 128), (256, 256), (72, 40)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dims", "heads"),
    [*itertools.product([(128, 128)], RATIOS), *zip(DIMS, itertools.cycle([(5, 1), (16, 2)]))],
)
def test_any_ratio(gpu: None, dims, heads):
    for rows in (1, 20, 200):
        check(checks.gaussian(checks.Case(2, *heads, rows, 150, *dims), "cuda"), causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["outliers", "huge", "one_hot", "staircase"])
def test_hostile_inputs(gpu: None, kind: str):
    case = checks.Case(2, 5, 1, 70, 300, 128, 128)
    check(checks.HOSTILE[kind](case, "cuda"), causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", [{}, {"window_size": (30, 10)}, {"attention_chunk": 48}], ids=str)
def test_each_head_keeps_its_own(gpu: None, mask):
    slopes = torch.linspace(0.1, 2.0, 10, device="cuda")
    options = {
        "score_mod": lambda score, b, h, q_idx, kv_idx: score - slopes[h] * (q_idx - kv_idx).abs(),
        "mask_mod": lambda b, h, q_idx, kv_idx: (kv_idx + h) % 4 != b,
        "sink": torch.linspace(-2, 3, 10, device="cuda"),
        "softcap": 20.0,
    }
    check(checks.gaussian(checks.Case(2, 10, 2, 33, 140, 128, 128), "cuda"), **mask, **options)


@pytest.mark.gpu
def test_packed_sequences_with_packed_heads(gpu: None):
    lengths_q, lengths_k = [3, 0, 130, 1], [100, 7, 129, 0]
    case = checks.Case(1, 12, 2, sum(lengths_q), sum(lengths_k), 64, 64)
    q, k, v = (tensor[0] for tensor in checks.gaussian(case, "cuda"))
    starts = [torch.tensor([0, *n], device="cuda").cumsum(0).int() for n in (lengths_q, lengths_k)]
    lengths = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), starts, strict=True))
    exact = checks.oracle(q, k, v, Lengths(**lengths), causal=True)
    for pack_gqa in (True, False, None):
        options = {"causal": True, "return_lse": True, "pack_gqa": pack_gqa}
        checks.assert_attention(flash_attn_varlen_func(q, k, v, **lengths, **options), *exact)


@pytest.mark.gpu
def test_packed_heads_do_not_reach_into_each_other(gpu: None):
    q, k, v = checks.gaussian(checks.Case(1, 5, 1, 10, 90, 128, 128), "cuda")
    first = flash_attn_func(q, k, v, pack_gqa=True)
    q[:, 4, 3] = float("nan")  # one row of one head
    got = flash_attn_func(q, k, v, pack_gqa=True)
    assert got[0, 4, 3].isnan().all()
    got[0, 4, 3] = first[0, 4, 3]
    checks.assert_same_bits("out", got, first)
