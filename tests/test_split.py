"""Keys split over tiles: how many parts, what is launched, and the result on a GPU."""

import checks
import pytest
import torch
import toy_gpu

from flash_cute import (
    InvalidProblem,
    UnsupportedProblem,
    compile,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    launch,
    plan,
    selection,
    splits,
    splitting,
)
from flash_cute.problem import AttentionProblem, Lengths
from flash_cute.target import Target

H200 = Target.from_arch("sm_90a")


def problem_of(num_splits: int = 0, **changes) -> AttentionProblem:
    sizes = dict(batch=1, seqlen_q=1, seqlen_k=65536, num_heads_q=8, num_heads_kv=8, device="cuda")
    dims = dict(head_dim=128, head_dim_v=128, dtype=torch.bfloat16, num_splits=num_splits)
    return AttentionProblem(**(sizes | dims | changes))


def splits_of(num_splits: int = 0, **changes) -> splits.Splits:
    problem = problem_of(num_splits, **changes)
    key = selection.key_for(problem, H200)
    found = splits.choose(problem, key.spec, key.config, H200)
    assert key.spec.is_split == found.is_split and key.spec.has_split_counts == found.is_counted
    assert key.spec.has_lse or not found.is_split
    assert not key.config.check(key.spec)
    return found


def test_parts_fill_the_multiprocessors():
    assert splits_of() == splits.Splits(132 // 8)
    assert splits_of(batch=4).most == 132 // 32
    assert splits_of(batch=20, has_seqused_k=True).is_counted
    assert splits_of(batch=64) == splits.Splits()
    assert splits_of(seqlen_k=256) == splits.Splits()
    assert splits_of(seqlen_k=2048).most == 2048 // splits.LEAST_KEYS
    assert splits_of(num_heads_kv=1).most == 132
    assert splits_of(seqlen_q=4096, batch=8) == splits.Splits()


@pytest.mark.parametrize(
    ("batch", "slots", "ctas"),
    [
        (1, 132, 132),  # 16 parts of 8 tiles
        (8, 132, 132),  # 2 of 64
        (13, 528, 264),  # 5 of 104, two waves: 28 of 132 would have nothing
        (16, 132, 132),  # all of 128 whole
        (17, 528, 264),
        (32, 264, 264),
        (34, 528, 264),
        (200, 264, 264),
    ],
)
def test_parts_are_few_where_that_fills_the_gpu(batch: int, slots: int, ctas: int):
    problem = problem_of(batch=batch, has_seqused_k=True)
    key = selection.key_for(problem, H200)
    assert splits.filling(problem, key.spec, key.config, H200) == splits.Filling(slots, ctas)


def test_gathered_keys_keep_two_ctas_a_multiprocessor_busy():
    facts = dict(batch=8, has_seqused_k=True)
    for page_size, slots in ((64, 132), (1, 264)):
        problem = problem_of(page_size=page_size, **facts)
        key = selection.key_for(problem, H200)
        assert splits.filling(problem, key.spec, key.config, H200).slots == slots


def test_prefill_is_not_split_to_fill_a_second_wave():
    problem = problem_of(batch=1, seqlen_q=128 * 10, has_seqused_k=True)
    key = selection.key_for(problem, H200)
    assert splits.filling(problem, key.spec, key.config, H200) == splits.Filling(132, 132)


@pytest.mark.parametrize(("batch", "ctas"), [(16, 132), (32, 264)])
def test_few_tiles_get_one_cta_a_multiprocessor(monkeypatch, batch: int, ctas: int):
    """With two, the GPU fills some multiprocessors before the last ones have any."""
    launches = toy_gpu.install(monkeypatch)
    q = toy_gpu.on_gpu(torch.zeros(batch, 1, 8, 128, dtype=torch.bfloat16))
    k, v = (toy_gpu.on_gpu(torch.zeros(batch, 4096, 8, 128, dtype=torch.bfloat16)) for _ in "kv")
    lengths = toy_gpu.on_gpu(torch.full((batch,), 4096, dtype=torch.int32))
    flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths)
    assert launches.launched[-1].spec.has_split_counts
    assert launches.named.num_ctas == ctas


def test_a_step_over_a_cache_takes_the_decode_tile_also_without_splits():
    def tile_m(**facts) -> int:
        return selection.key_for(problem_of(1, **facts), H200).config.tile_m

    assert tile_m(has_seqused_k=True) == 64
    assert tile_m(has_seqused_k=True, seqlen_q=500) == 128
    # Lengths of packed queries shape no code.
    assert tile_m(has_seqused_k=True, is_packed_q=True, mean_q=1) == 128


def test_a_number_decides():
    assert splits_of(3, is_packed_q=True, is_packed_k=True) == splits.Splits(3)
    assert splits_of(1) == splits.Splits()
    assert splits_of(200).most == 200


def test_lengths_on_the_device_are_counted_there():
    used = dict(has_seqused_k=True, num_heads_kv=2)
    assert splits_of(batch=2, **used).is_counted
    alone = splits_of(**used)  # equal parts of one sequence need no counting
    assert alone.is_split and not alone.is_counted
    assert splits_of(batch=500, **used).is_counted  # one may be longer than the others
    assert not splits_of(batch=500, seqlen_q=500, **used).is_split
    assert not splits_of(seqlen_k=200, **used).is_split
    assert splits_of(seqlen_k=200, batch=2, has_scheduler_metadata=True, **used).is_counted


def test_hints_decide_nothing():
    facts = dict(is_packed_q=True, has_seqused_k=True, mean_q=1, room_k=65536, page_size=16)
    assert splits_of(seqlen_q=1, seqlen_k=100, **facts) == splits_of(seqlen_q=77, **facts)


def test_memory_bounds_what_the_package_chooses():
    few = dict(has_seqused_k=True, num_heads_kv=1, num_heads_q=64, seqlen_q=8)
    assert splits_of(**few).most > splits_of(**few, batch=16).most > 1


def test_parts_of_a_fixed_size():
    assert splits_of(split_size=4096) == splits.Splits(16, 64)
    ragged = splits_of(split_size=4100, has_seqused_k=True)
    assert ragged == splits.Splits(16, 64, is_counted=True)
    assert splits_of(split_size=1, seqlen_k=100) == splits.Splits(2, 1)
    with pytest.raises(InvalidProblem, match="split_size is 128, expected at least 256 "):
        splits_of(split_size=128)
    with pytest.raises(InvalidProblem, match="num_splits is 3, expected 0 or 1"):
        splits_of(3, split_size=4096)


def test_workspace_can_be_asked_for():
    sizes = dict(batch=1, seqlen_q=1, seqlen_k=65536, num_heads_q=8, num_heads_kv=8, device="cuda")
    dims = dict(head_dim=128, head_dim_v=128, dtype=torch.bfloat16)
    answer = selection.is_supported(AttentionProblem(**sizes, **dims, num_splits=5), H200)
    assert answer.workspace_bytes == 5 * 8 * (128 + 1) * 4
    assert selection.is_supported(AttentionProblem(**sizes, **dims), H200).workspace_bytes == 0


def arrivals_of(num_splits: int = 0, **changes) -> int:
    problem = problem_of(num_splits, **(dict(num_heads_kv=2) | changes))
    key = selection.key_for(problem, H200)
    chosen = splits.choose(problem, key.spec, key.config, H200)
    return splitting.num_arrivals(problem, key, H200, chosen, problem.seqlen_q)


def test_few_rows_are_merged_by_the_last_tile():
    assert arrivals_of(8) == 2 * 8  # a counter for each warp of each tile
    assert arrivals_of(batch=20, has_seqused_k=True) == 20 * 2 * 8
    packed = dict(is_packed_q=True, seqlen_q=20, mean_q=1, batch=20, has_seqused_k=True)
    assert arrivals_of(**packed) == 20 * 2 * 8
    assert arrivals_of(8, seqlen_q=16) == 0  # many rows
    assert arrivals_of(9) == arrivals_of() == 0  # many parts
    assert arrivals_of(split_size=4096) == 0  # bits would depend on the batch
    assert arrivals_of(1) == 0
    assert arrivals_of(num_heads_q=2, seqlen_q=2000, num_splits=3) == 0


def test_lists_of_blocks_are_not_split():
    assert splits_of(has_block_mask=True) == splits.Splits()
    with pytest.raises(UnsupportedProblem, match="num_splits is 2 with a block mask"):
        splits_of(2, has_block_mask=True)


@pytest.mark.parametrize("is_packed", [False, True])
def test_parts_are_launched_and_merged(monkeypatch: pytest.MonkeyPatch, is_packed: bool):
    launches = toy_gpu.install(monkeypatch)
    batch, rows, heads, d = 2, 40, 4, 64
    shape = (batch * rows, heads, d) if is_packed else (batch, rows, heads, d)
    q, k, v = (toy_gpu.on_gpu(torch.zeros(shape, dtype=torch.bfloat16)) for _ in range(3))
    if is_packed:
        starts = toy_gpu.on_gpu(torch.tensor([0, rows, 2 * rows], dtype=torch.int32))
        lengths = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
        out = flash_attn_varlen_func(q, k, v, **lengths, num_splits=3)
    else:
        out = flash_attn_func(q, k, v, num_splits=3)
    assert out.shape == q.shape
    attention, merge = launches.launched
    assert attention.spec.is_split and merge.is_packed == is_packed
    assert merge.out_dtype == "bf16"


def test_warmup_makes_the_merge_ready_too(monkeypatch: pytest.MonkeyPatch):
    made = []
    monkeypatch.setattr(compile, "prepare", lambda keys, *args, **kwargs: made.extend(keys))
    sizes = dict(batch=1, seqlen_q=1, seqlen_k=4096, num_heads_q=8, num_heads_kv=8)
    dims = dict(head_dim=128, head_dim_v=128, dtype=torch.bfloat16, device="cuda", num_splits=3)
    monkeypatch.setenv("FLASH_CUTE_ARCH", "sm_90a")
    compile.warmup([AttentionProblem(**sizes, **dims)])
    assert [type(key) for key in made] == [selection.KernelKey, selection.CombineKey]


# ---- On a GPU ------------------------------------------------------------------------------------


def check(operands, lengths=None, **options):
    lengths = lengths or {}
    function = flash_attn_varlen_func if lengths else flash_attn_func
    exact = checks.oracle(*operands, Lengths(**lengths), **options)
    for num_splits in (0, 1, 2, 3, 64):
        got = function(*operands, **lengths, **options, num_splits=num_splits, return_lse=True)
        checks.assert_attention(got, *exact)


DIMS = [(64, 64), (128, 128), (192, 128), (256, 256), (72, 40)]
ROWS = [1, 17, 200]


@pytest.mark.gpu
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("rows", ROWS)
def test_parts_give_the_whole(gpu: None, rows: int, dims):
    """Causal or not by turns: each head dim and each number of rows is both, at fewer compiles."""
    operands = checks.gaussian(checks.Case(2, 4, 2, rows, 1000, *dims), "cuda")
    check(operands, causal=(DIMS.index(dims) + ROWS.index(rows)) % 2 == 1)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [
    {"window_size": (200, 10)}, {"attention_chunk": 96}, {"softcap": 20.0}, {"pack_gqa": True},
    {"sink": True}, {"score_mod": lambda score, b, h, q_idx, kv_idx: score - 0.01 * kv_idx},
], ids=lambda options: next(iter(options)))  # fmt: skip
def test_everything_else_counts_too(gpu: None, options):
    if "sink" in options:
        options = {"sink": torch.linspace(-2, 3, 4, device="cuda")}
    operands = checks.gaussian(checks.Case(2, 4, 2, 30, 1000, 128, 128), "cuda")
    pack = {"pack_gqa": options.pop("pack_gqa")} if "pack_gqa" in options else {}
    exact = checks.oracle(*operands, **options)
    for num_splits in (2, 5):
        both = {**options, **pack, "num_splits": num_splits, "return_lse": True}
        checks.assert_attention(flash_attn_func(*operands, **both), *exact)


@pytest.mark.gpu
def test_used_and_packed_lengths(gpu: None):
    q, k, v = checks.gaussian(checks.Case(3, 4, 2, 20, 900, 128, 128), "cuda")
    used = torch.tensor([0, 5, 900], dtype=torch.int32, device="cuda")
    for b, length in enumerate(used.tolist()):
        k[b, length:], v[b, length:] = float("nan"), float("nan")
    check((q, k, v), {"seqused_k": used}, causal=True)
    starts = torch.tensor([0, 20, 20, 60], dtype=torch.int32, device="cuda")
    q = q.flatten(0, 1)
    check((q, k, v), {"cu_seqlens_q": starts, "seqused_k": used}, causal=True)


@pytest.mark.gpu
def test_graphs_replay_split_keys(gpu: None):
    q, k, v = checks.gaussian(checks.Case(1, 4, 4, 1, 8000, 128, 128), "cuda")
    expected = flash_attn_func(q, k, v, num_splits=7)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn_func(q, k, v, num_splits=7)
    graph.replay()
    checks.assert_same_bits("out", out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256), (72, 40)])
@pytest.mark.parametrize("num_splits", [0, 3, 8])
def test_the_last_tile_merges_as_the_kernel_does(
    hopper: None, dims, num_splits: int, monkeypatch: pytest.MonkeyPatch
):
    """The same bits, again and again, and counters at zero; also where some parts are empty."""
    batch, heads, kv_heads = 3, 8, 2
    d, dv = dims
    q, k, v = checks.gaussian(checks.Case(batch, heads, kv_heads, 1, 3000, d, dv), "cuda")
    used = torch.tensor([3000, 0, 70], dtype=torch.int32, device="cuda")
    call = dict(cache_seqlens=used, num_splits=num_splits, return_softmax_lse=True)
    alone = {**call, "return_softmax_lse": False}
    launch._plans.clear()
    monkeypatch.setattr(splitting, "PARTS_OF_LAST_TILE", 100)
    merged = [flash_attn_with_kvcache(q, k, v, **call) for _ in range(20)]
    (made,) = launch._plans.values()
    assert made.merge is not None and made.merge.num_arrivals
    checks.assert_attention(merged[0], *checks.oracle(q, k, v, Lengths(seqused_k=used)))
    checks.assert_same_bits("out", flash_attn_with_kvcache(q, k, v, **alone), merged[0][0])
    for one in merged[1:]:
        for name, got, expected in zip(("out", "lse"), one, merged[0], strict=True):
            checks.assert_same_bits(name, got, expected)
    monkeypatch.setattr(splitting, "ROWS_OF_LAST_TILE", 0)
    monkeypatch.setattr(splitting, "FEW_ROWS", 0)  # teams add in another order
    launch._plans.clear()
    by_kernel = flash_attn_with_kvcache(q, k, v, **call)
    for name, got, expected in zip(("out", "lse"), merged[0], by_kernel, strict=True):
        checks.assert_same_bits(name, got, expected)
    torch.cuda.synchronize()
    assert plan.counters_of(q.get_device()).is_clean()
    launch._plans.clear()


@pytest.mark.gpu
def test_graphs_replay_tiles_that_merge(hopper: None, monkeypatch: pytest.MonkeyPatch):
    """New lengths at each replay, so that sequences change between one part and several."""
    monkeypatch.setattr(splitting, "PARTS_OF_LAST_TILE", 100)
    q, k, v = checks.gaussian(checks.Case(4, 8, 2, 2, 5000, 128, 128), "cuda")
    used = torch.full((4,), 5000, dtype=torch.int32, device="cuda")
    call = dict(cache_seqlens=used, causal=True, return_softmax_lse=True)
    flash_attn_with_kvcache(q, k, v, **call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [flash_attn_with_kvcache(q, k, v, **call) for _ in range(3)]
    for lengths in ([5000, 1, 2, 300], [40, 5000, 4999, 3], [5000] * 4, [2, 2, 2, 2]):
        used.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        exact = checks.oracle(q, k, v, Lengths(seqused_k=used), causal=True)
        for result in results:
            checks.assert_attention(result, *exact)
