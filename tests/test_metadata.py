"""get_scheduler_metadata, and the counts of parts that calls share."""

import checks
import pytest
import torch
import toy_gpu

from flash_cute import (
    InvalidProblem,
    SchedulerMetadata,
    cache,
    cache_info,
    compile,
    current,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
    scheduling,
    selection,
)
from flash_cute.problem import Lengths
from flash_cute.selection import PlannerKey

CALL = dict(
    batch_size=3, max_seqlen_q=1, max_seqlen_k=4096, num_heads_q=8, num_heads_kv=2, headdim=64
)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> toy_gpu.Launches:
    monkeypatch.setattr(scheduling, "_kept", type(scheduling._kept)())
    return toy_gpu.install(monkeypatch)


def cache_call(**changes):
    q = torch.zeros(3, 1, 8, 64, dtype=torch.bfloat16)
    cache = torch.zeros(3, 4096, 2, 64, dtype=torch.bfloat16)
    lengths = torch.tensor([4096, 7, 0], dtype=torch.int32)
    tensors = dict(q=q, k_cache=cache, v_cache=cache.clone(), cache_seqlens=lengths)
    return {name: toy_gpu.on_gpu(tensor) for name, tensor in tensors.items()} | changes


def planned(launches: toy_gpu.Launches) -> int:
    return sum(isinstance(key, PlannerKey) for key in launches.launched)


def test_layers_with_the_same_lengths_share_their_counts(launches: toy_gpu.Launches):
    call = cache_call()
    for _ in range(5):
        flash_attn_with_kvcache(**call)
    assert planned(launches) == 1
    other = {**call, "k_cache": call["k_cache"].clone(), "causal": True}
    flash_attn_with_kvcache(**other)  # one query: the same parts whatever the mask
    assert planned(launches) == 1
    call["cache_seqlens"].add_(1)
    for _ in range(3):
        flash_attn_with_kvcache(**call)
    assert planned(launches) == 2
    flash_attn_with_kvcache(**{**call, "cache_seqlens": call["cache_seqlens"].clone()})
    assert planned(launches) == 3


def test_lengths_without_a_version_are_counted_for_every_call(launches: toy_gpu.Launches):
    call = cache_call()
    with torch.inference_mode():
        lengths = torch.tensor([4096, 7, 0], dtype=torch.int32)
    assert lengths.is_inference()
    for _ in range(3):
        flash_attn_with_kvcache(**{**call, "cache_seqlens": toy_gpu.on_gpu(lengths)})
    assert planned(launches) == 3


def test_each_capture_counts_for_itself(
    launches: toy_gpu.Launches, monkeypatch: pytest.MonkeyPatch
):
    call = cache_call()
    flash_attn_with_kvcache(**call)
    monkeypatch.setattr(current, "is_capturing", lambda: True)
    for number in (5, 6):
        monkeypatch.setattr(current, "capture_id", lambda stream, number=number: number)
        monkeypatch.setattr("flash_cute.cache.lookup", launches.executable)
        for _ in range(2):
            flash_attn_with_kvcache(**call)
    assert planned(launches) == 3


@pytest.mark.parametrize("room", [4096, 3000, 1 << 20])
def test_a_plan_of_the_callers_is_taken(launches: toy_gpu.Launches, room: int):
    """Also one that was made with the longest length in the place of the cache's."""
    call = cache_call()
    made_with = CALL | {"max_seqlen_k": room}
    plan = get_scheduler_metadata(**made_with, cache_seqlens=call["cache_seqlens"])
    assert planned(launches) == 1 and plan.split_counts.shape == (3,)
    for _ in range(2):
        flash_attn_with_kvcache(**call, scheduler_metadata=plan)
        attention, merge = launches.launched[-2:]
        assert attention.spec.has_split_counts and merge.has_split_counts
    assert planned(launches) == 1


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"num_heads_kv": 8}, "heads 8 instead of 2"),
        ({"max_seqlen_q": 9}, "mean_q 9 instead of 1"),
        ({"sm_margin": 32}, "slots 100 instead of 132"),
        ({"headdim": 256}, "tile_n 64 instead of 128"),
    ],
)
def test_a_plan_for_another_call_is_refused(launches: toy_gpu.Launches, change, what: str):
    call = cache_call()
    plan = get_scheduler_metadata(**CALL | change, cache_seqlens=call["cache_seqlens"])
    for _ in range(2):
        with pytest.raises(InvalidProblem, match=f"a plan with .*{what}"):
            flash_attn_with_kvcache(**call, scheduler_metadata=plan)


def test_what_is_no_plan_for_the_batch_is_refused(launches: toy_gpu.Launches):
    call = cache_call()
    lengths = toy_gpu.on_gpu(torch.zeros(2, dtype=torch.int32))
    plan = get_scheduler_metadata(**CALL | {"batch_size": 2}, cache_seqlens=lengths)
    with pytest.raises(InvalidProblem, match="a plan for 2 sequences, expected 3"):
        flash_attn_with_kvcache(**call, scheduler_metadata=plan)
    with pytest.raises(InvalidProblem, match="what flash_cute.get_scheduler_metadata returns"):
        flash_attn_with_kvcache(**call, scheduler_metadata=lengths)
    plan = get_scheduler_metadata(**CALL, cache_seqlens=call["cache_seqlens"])
    with pytest.raises(InvalidProblem, match="num_splits is 7, expected 0"):
        flash_attn_with_kvcache(**call, scheduler_metadata=plan, num_splits=7)


def test_a_plan_with_other_counts_than_the_one_before_is_checked_again(launches: toy_gpu.Launches):
    call = cache_call()
    plan = get_scheduler_metadata(**CALL, cache_seqlens=call["cache_seqlens"])
    flash_attn_with_kvcache(**call, scheduler_metadata=plan)
    for counts in (plan.split_counts.long(), plan.split_counts[None]):
        wrong = SchedulerMetadata(toy_gpu.on_gpu(counts), plan.plan)
        with pytest.raises(InvalidProblem, match="scheduler_metadata.split_counts"):
            flash_attn_with_kvcache(**call, scheduler_metadata=wrong)


def test_arguments_are_checked():
    lengths = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(InvalidProblem, match=r"cache_seqlens.shape\[0\] is 2, expected 3"):
        get_scheduler_metadata(**CALL, cache_seqlens=lengths[:2])
    with pytest.raises(InvalidProblem, match="cache_leftpad.dtype is torch.int64"):
        get_scheduler_metadata(**CALL, cache_seqlens=lengths, cache_leftpad=lengths.long())
    with pytest.raises(InvalidProblem, match="num_splits is -1"):
        get_scheduler_metadata(**CALL, cache_seqlens=lengths, num_splits=-1)


def test_the_cpu_takes_plans_too():
    call = {name: tensor.as_subclass(torch.Tensor) for name, tensor in cache_call().items()}
    plan = get_scheduler_metadata(**CALL, cache_seqlens=call["cache_seqlens"])
    assert isinstance(plan, SchedulerMetadata)
    out = flash_attn_with_kvcache(**call, scheduler_metadata=plan)
    assert torch.equal(out, flash_attn_with_kvcache(**call))


@pytest.mark.compile
@pytest.mark.parametrize("lengths", [(), ("seqused_k",), scheduling.LENGTHS])
def test_planner_compiles_and_is_kept_on_disk(lengths, monkeypatch, tmp_path):
    pytest.importorskip("cutlass")
    monkeypatch.setenv("FLASH_CUTE_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(cache, "_memory", {})
    key = PlannerKey("sm_90a", lengths)
    report = compile.inspect_kernel(selection.kernel_for(key), key.arch)
    if not report.missing:
        assert (report.spill_store_bytes, report.stack_bytes) == (0, 0)
    before = cache_info().compiles
    compile.warmup([key], progress=False)
    cache.clear_cache(disk=False)
    compile.warmup([key], progress=False)
    assert cache_info().compiles == before + 1


# ---- On a GPU ------------------------------------------------------------------------------------


def counts_of(lengths: list[int], **options) -> list[int]:
    used = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    sizes = CALL | {"batch_size": len(lengths), "max_seqlen_k": 200_000} | options
    return get_scheduler_metadata(**sizes, cache_seqlens=used).split_counts.tolist()


@pytest.mark.gpu
def test_counts(hopper: None):
    tiles = selection.current_target(0).num_sms // 2  # of each of two heads: one a multiprocessor
    alone = counts_of([100_000])[0]
    assert 0.9 * tiles <= alone <= tiles
    assert counts_of([0, 1, 100]) == [1, 1, 1]
    mixed = counts_of([100_000, 500, 500, 500])
    assert mixed[0] > 0.8 * tiles and max(mixed[1:]) <= 2
    assert sum(mixed) <= tiles
    even = counts_of([8192] * 1000)
    assert even == [1] * 1000
    outlier = counts_of([1024] * 1000 + [200_000])
    assert set(outlier[:-1]) == {1} and outlier[-1] > 2
    assert counts_of([1000, 5000], num_splits=7) == [7, 7]
    assert counts_of([0, 4096, 4097], split_size=4096) == [1, 1, 2]
    windowed = counts_of([100_000], causal=True, window_size=(1000, 0))[0]
    assert windowed < 10


@pytest.mark.gpu
@pytest.mark.parametrize("is_packed", [False, True])
def test_counts_of_other_lengths_change_no_result(gpu: None, is_packed: bool):
    """Whatever a plan says, also of lengths long gone, or garbage."""
    q, k, v = checks.gaussian(checks.Case(4, 4, 2, 2, 3000, 64, 64), "cuda")
    used = torch.tensor([3000, 0, 70, 1500], dtype=torch.int32, device="cuda")
    for b, length in enumerate(used.tolist()):
        k[b, length:], v[b, length:] = float("nan"), float("nan")
    lengths = {"seqused_k": used}
    if is_packed:
        lengths["cu_seqlens_q"] = torch.tensor([0, 1, 4, 4, 8], dtype=torch.int32, device="cuda")
        q = q.flatten(0, 1)
    exact = checks.oracle(q, k, v, Lengths(**lengths), causal=True)
    sizes = dict(batch_size=4, max_seqlen_q=2, max_seqlen_k=3000, num_heads_q=4, num_heads_kv=2)
    cu_seqlens_q = lengths.get("cu_seqlens_q")
    plan = get_scheduler_metadata(
        **sizes, headdim=64, cache_seqlens=used, cu_seqlens_q=cu_seqlens_q, causal=True
    )
    for counts in (plan.split_counts.tolist(), [1] * 4, [9, 9, 9, 1], [-5, 2**30, 0, 3]):
        plan.split_counts.copy_(torch.tensor(counts, dtype=torch.int32))
        options = {"causal": True, "scheduler_metadata": plan, "return_lse": True}
        got = flash_attn_varlen_func(q, k, v, **lengths, **options)
        checks.assert_attention(got, *exact)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [None, 16, 1])
def test_parts_of_a_fixed_size_give_the_same_bits_in_any_batch(gpu: None, page_size):
    rng = torch.Generator().manual_seed(3)
    heads, d, most = (8, 2), 128, 3000
    pool = [torch.randn(20, most, heads[1], d, generator=rng).bfloat16().cuda() for _ in range(2)]
    queries = torch.randn(20, 1, heads[0], d, generator=rng).bfloat16().cuda()
    sizes = torch.randint(0, most, (20,), generator=rng, dtype=torch.int32)

    def run(rows: list[int]):
        q, used = queries[rows].flatten(0, 1), sizes[rows].cuda()
        starts = torch.arange(len(rows) + 1, dtype=torch.int32, device="cuda")
        lengths = {"cu_seqlens_q": starts, "seqused_k": used}
        k, v = (x[rows] for x in pool)
        if page_size is not None:
            pages = -(-most // page_size)
            padded = (
                torch.nn.functional.pad(x, (0, 0, 0, 0, 0, pages * page_size - most))
                for x in (k, v)
            )
            k, v = (x.reshape(-1, page_size, heads[1], d) for x in padded)
            table = torch.arange(len(rows) * pages, dtype=torch.int32, device="cuda")
            lengths["page_table"] = table.view(len(rows), pages)
        return flash_attn_varlen_func(q, k, v, **lengths, split_size=512)

    alone = [run([row])[0] for row in range(20)]
    for _ in range(33):
        rows = torch.randperm(20, generator=rng)[: int(torch.randint(1, 20, (), generator=rng))]
        out = run(rows.tolist())
        for index, row in enumerate(rows.tolist()):
            checks.assert_same_bits("out", out[index], alone[row])


@pytest.mark.gpu
def test_rows_and_paddings_of_the_cache(gpu: None):
    q, k, v = checks.gaussian(checks.Case(3, 4, 2, 5, 700, 128, 128), "cuda")
    caches = [
        torch.full((7, 700, 2, 128), float("nan"), dtype=k.dtype, device="cuda") for _ in "kv"
    ]
    rows = torch.tensor([6, 0, 3], dtype=torch.int32, device="cuda")
    first = torch.tensor([0, 130, 77], dtype=torch.int32, device="cuda")
    end = torch.tensor([700, 131, 500], dtype=torch.int32, device="cuda")
    kept = []
    for b in range(3):
        span = slice(int(first[b]), int(end[b]))
        for target, x in zip(caches, (k, v), strict=True):
            target[rows[b], span] = x[b, span]
        kept.append([x[b : b + 1, span] for x in (k, v)])
    turns = (({}, (0, 1)), ({"causal": True}, (1, 4)), ({"window_size": (100, 3)}, (4, 0)))
    for options, numbers in turns:
        for num_splits in numbers:
            arguments = {"cache_seqlens": end, "cache_batch_idx": rows, "cache_leftpad": first}
            arguments |= options | {"num_splits": num_splits, "return_softmax_lse": True}
            out, lse = flash_attn_with_kvcache(q, *caches, **arguments)
            for b in range(3):
                exact = checks.oracle(q[b : b + 1], *kept[b], **options)
                checks.assert_attention((out[b : b + 1], lse[b : b + 1]), *exact)


@pytest.mark.gpu
def test_a_graph_counts_anew_at_every_replay(gpu: None):
    q, k, v = checks.gaussian(checks.Case(2, 4, 2, 1, 8192, 128, 128), "cuda")
    used = torch.tensor([8192, 8192], dtype=torch.int32, device="cuda")
    flash_attn_with_kvcache(q, k, v, cache_seqlens=used)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [flash_attn_with_kvcache(q, k, v, cache_seqlens=used) for _ in range(3)]
    for lengths in ([8192, 10], [0, 8000], [33, 4000]):
        used.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        exact = checks.oracle(q, k, v, Lengths(seqused_k=used))
        expected = flash_attn_with_kvcache(q, k, v, cache_seqlens=used, return_softmax_lse=True)
        checks.assert_attention(expected, *exact)
        for out in outs:
            checks.assert_same_bits("out", out, expected[0])
