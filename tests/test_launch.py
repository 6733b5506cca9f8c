"""Launching: plans, streams, CUDA graphs, and what must not recompile, with a GPU."""

import concurrent.futures
import itertools
import math

import checks
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from flash_cute import (
    AttentionProblem,
    CaptureError,
    cache_info,
    flash_attn_func,
    flex_attention,
    launch,
    warmup,
)
from flash_cute.plan import Counters, contiguous_strides, counters_of, is_readable

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]


def operands(batch=2, seqlen=700, heads=4, dim=128, dtype=torch.bfloat16, seed=0):
    case = checks.Case(
        batch=batch,
        num_heads_q=heads,
        num_heads_kv=heads,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        head_dim=dim,
        dtype=dtype,
    )
    return checks.gaussian(case, "cuda", seed)


def test_lengths_scale_and_strides_never_recompile():
    q, k, v = operands()
    flash_attn_func(q, k, v, causal=True)
    before = cache_info().compiles
    for batch, seqlen, heads in ((1, 1, 1), (3, 129, 2), (2, 2000, 4)):
        flash_attn_func(*operands(batch, seqlen, heads), causal=True, softmax_scale=0.3)
    flash_attn_func(
        *(t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)), causal=True
    )
    assert cache_info().compiles == before


def test_new_values_reach_a_repeated_call():
    q, k, v = operands()
    first = flash_attn_func(q, k, v)
    assert torch.equal(flash_attn_func(q, k, v), first)
    v2 = torch.randn_like(v)
    assert not torch.equal(flash_attn_func(q, k, v2), first)
    k.copy_(torch.randn_like(k))
    assert not torch.equal(flash_attn_func(q, k, v), first)
    assert torch.equal(first, first)


@pytest.mark.parametrize("entry", ["flash_attn_func", "flex_attention"])
def test_what_callbacks_and_block_masks_hold_reaches_a_repeated_call(entry):
    """Each call against the same one made the long way; tests/test_modifiers.py covers the rest."""
    tensors = operands()
    batch, seqlen, heads, _ = tensors[0].shape
    causal = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
    mask = create_block_mask(causal, None, None, seqlen, seqlen, "cuda", 128)
    later = lambda b, h, q_idx, kv_idx: q_idx < kv_idx
    other = create_block_mask(later, None, None, seqlen, seqlen, "cuda", 128)
    factor, slopes = 1.0, torch.ones(heads, device="cuda")

    def score_mod(score, b, h, q_idx, kv_idx):
        return score * factor - slopes[h] * (q_idx - kv_idx).abs()

    def call():
        if entry == "flash_attn_func":
            return flash_attn_func(*tensors, score_mod=score_mod, block_mask=mask)
        return flex_attention(*(t.transpose(1, 2) for t in tensors), score_mod, mask)

    results = []
    changes = (None, "factor", "slopes", "lists", "mask_mod", "batch")
    for change in changes:
        if change == "factor":
            factor = 0.5
        elif change == "slopes":
            slopes = torch.linspace(0.1, 1.0, 2 * heads, device="cuda")[::2]
        elif change == "lists":
            for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
                setattr(mask, name, getattr(other, name))
        elif change == "mask_mod":
            mask.mask_mod = other.mask_mod
        elif change == "batch":
            tensors = operands(batch + 1)
        repeated = call(), call()
        launch._plans.clear()
        results.append(call())
        for got in repeated:
            checks.assert_same_bits("out", got, results[-1])
    for one, two in itertools.pairwise(results[:-1]):
        assert not torch.equal(one, two)


def test_out_of_a_repeated_call_is_the_one_given():
    q, k, v = operands()
    expected = flash_attn_func(q, k, v)
    wide = torch.full((*q.shape[:3], 2 * q.shape[3]), math.nan, dtype=q.dtype, device="cuda")
    fresh = [torch.full_like(q, math.nan) for _ in range(2)]
    for out in (*fresh, wide[..., : q.shape[3]]):
        assert flash_attn_func(q, k, v, out=out) is out
        checks.assert_same_bits("out", out, expected)


def test_a_misaligned_view_follows_an_aligned_call():
    q, k, v = operands(seqlen=200)
    expected = flash_attn_func(q, k, v)
    moved = torch.empty(k.numel() + 1, dtype=k.dtype, device="cuda")[1:].view_as(k).copy_(k)
    assert not is_readable(moved)
    assert torch.equal(flash_attn_func(q, moved, v), expected)
    assert torch.equal(flash_attn_func(q, k, v), expected)


@pytest.mark.parametrize("seqlen", [64, 3000], ids=["one wave", "many tiles"])
def test_graph_replays_follow_their_inputs(seqlen):
    q, k, v = operands(batch=4, seqlen=seqlen)
    flash_attn_func(q, k, v, causal=True, return_lse=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
    for seed in (1, 2):
        for tensor, fresh in zip((q, k, v), operands(4, seqlen, seed=seed), strict=True):
            tensor.copy_(fresh)
        graph.replay()
        torch.cuda.synchronize()
        expected, expected_lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
        checks.assert_same_bits("out", out, expected)
        checks.assert_same_bits("lse", lse, expected_lse)


def test_a_graph_runs_beside_eager_launches():
    q, k, v = operands(batch=4, seqlen=3000)
    expected = flash_attn_func(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [flash_attn_func(q, k, v) for _ in range(3)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(5):
        with torch.cuda.stream(side):
            graph.replay()
        eager = [flash_attn_func(q, k, v) for _ in range(3)]
        torch.cuda.synchronize()
        for out in captured + eager:
            checks.assert_same_bits("out", out, expected)


def test_a_cold_kernel_inside_a_capture_is_refused_before_anything_is_enqueued():
    q, k, v = operands(dim=200, dtype=torch.float16)
    from flash_cute import cache

    cache.clear_cache(disk=False)
    launch._plans.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(CaptureError, match="call it once, or flash_cute.warmup"):
            flash_attn_func(q, k, v)
    graph.replay()
    torch.cuda.synchronize()


def test_after_warmup_the_first_call_may_be_captured():
    q, k, v = operands(dim=96, dtype=torch.float16)
    batch, seqlen, heads, dim = q.shape
    sizes = dict(batch=batch, seqlen_q=seqlen, seqlen_k=seqlen, num_heads_q=heads)
    problem = AttentionProblem(
        dtype=q.dtype, device=q.device, num_heads_kv=heads, head_dim=dim, head_dim_v=dim, **sizes
    )
    warmup([problem], progress=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn_func(q, k, v)
    graph.replay()
    torch.cuda.synchronize()
    checks.assert_same_bits("out", out, flash_attn_func(q, k, v))


def test_side_streams_are_ordered_and_independent():
    expected, inputs = [], []
    for seed in range(4):
        inputs.append(operands(batch=3, seqlen=2500, seed=seed))
        expected.append(flash_attn_func(*inputs[-1]))
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    for _ in range(3):
        results = []
        for stream, (q, k, v) in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(200_000)
                late = q.clone()  # wrong if the kernel does not wait for this stream
                results.append(flash_attn_func(late, k, v))
        torch.cuda.synchronize()
        for got, wanted in zip(results, expected, strict=True):
            checks.assert_same_bits("out", got, wanted)


def test_threads_share_kernels_and_agree():
    inputs = [operands(batch=1, seqlen=500 + 100 * i, seed=i) for i in range(8)]
    expected = [flash_attn_func(*one, causal=True) for one in inputs]
    torch.cuda.synchronize()

    def work(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            out = flash_attn_func(*inputs[i % 8], causal=True)
            torch.cuda.current_stream().synchronize()
        return i % 8, out

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for i, out in pool.map(work, range(64)):
            checks.assert_same_bits("out", out, expected[i])


def test_counters_are_zero_again_and_never_shared_by_captures(hopper: None):
    counters = Counters(torch.device("cuda", torch.cuda.current_device()))
    stream = torch.cuda.current_stream().cuda_stream
    assert counters.of(stream, 1) == counters.of(stream, 1)
    larger = counters.of(stream, 100)
    assert larger == counters.of(stream, 7) == counters.of(stream, 100)
    taken = set()
    for _ in range(3):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            capturing = torch.cuda.current_stream().cuda_stream
            taken.add(counters.of(capturing, 100))
            assert counters.of(capturing, 100) in taken
    assert len({*taken, larger}) == 4
    q, k, v = operands(batch=4, seqlen=3000)
    flash_attn_func(q, k, v, causal=True)
    torch.cuda.synchronize()
    assert counters_of(q.get_device()).is_clean()


def test_contiguous_strides():
    for shape in ((2, 3, 4, 5), (7,), (1, 1, 3)):
        assert contiguous_strides(shape) == torch.empty(shape).stride()


def test_odd_strides_of_single_extents_are_never_walked():
    odd = torch.empty(1000, dtype=torch.bfloat16, device="cuda").as_strided(
        (1, 3, 1, 64), (7, 64, 13, 1)
    )
    odd.copy_(torch.randn(1, 3, 1, 64))
    assert is_readable(odd)
    checks.assert_same_bits(
        "out", flash_attn_func(odd, odd, odd), flash_attn_func(*[odd.contiguous()] * 3)
    )
