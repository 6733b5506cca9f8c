"""The kernel for qv: which calls it takes, what is launched, and its results on a GPU.

Scores q·k + qv·v are one product of [q, qv] with [k, v], which is what the oracle computes. Rows of
the cache that hold no key are NaN, and so are the pages and the slots that nothing uses.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import checks
import pytest
import torch
import toy_gpu

from flash_cute import (
    InvalidProblem,
    UnsupportedProblem,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
    selection,
)
from flash_cute.problem import AttentionProblem, Lengths
from flash_cute.sm90.config import MlaConfigSm90
from flash_cute.specialization import ForwardSpecialization
from flash_cute.target import Target

H200 = Target.from_arch("sm_90a")
LENGTHS_K = (0, 1, 63, 64, 65, 1000)
# Groups of 1, 3, 16 and 128 heads in all of this file: each group has kernels of its own, and they
# take long to compile. For the same reason options take turns where they are many.
HEADS = ((1, 1), (16, 1), (128, 1), (6, 2), (3, 1))
IN_ONE_CHANNEL = ("huge", "very_negative", "staircase")
WILD = 2**31 - 1  # a page that is nowhere


def int32(*values: int, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def starts(lengths: tuple[int, ...], device: str = "cpu") -> torch.Tensor:
    return int32(*itertools.accumulate(lengths, initial=0), device=device)


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch):
    """The kernel as if it were declared."""
    if selection.SM90_MLA not in selection.KERNELS:
        monkeypatch.setattr(selection, "KERNELS", (*selection.KERNELS, selection.SM90_MLA))


# ---- Selection -----------------------------------------------------------------------------------


def problem(**changes: Any) -> AttentionProblem:
    sizes = dict(batch=2, seqlen_q=1, seqlen_k=4096, num_heads_q=128, num_heads_kv=1)
    dims = dict(head_dim=64, head_dim_v=512, dtype=torch.bfloat16, device="cuda", has_qv=True)
    return AttentionProblem(**{**sizes, **dims, **changes})


def test_calls_with_qv_take_their_kernel_and_no_other_does(declared: None):
    key = selection.key_for(problem(), H200)
    assert key.kernel == "FlashAttentionMlaSm90" and isinstance(key.config, MlaConfigSm90)
    assert (key.spec.tile_d, key.spec.tile_dv) == (64, 512) and not key.config.check(key.spec)
    plain = problem(head_dim=128, head_dim_v=128, has_qv=False)
    assert selection.key_for(plain, H200).kernel == "FlashAttentionForwardSm90"
    with pytest.raises(UnsupportedProblem) as caught:
        selection.key_for(problem(has_qv=False), H200)
    assert "head_dim_v 512" in str(caught.value) and "Mla" not in str(caught.value)


def test_qv_is_refused_while_no_kernel_declares_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(selection, "KERNELS", (selection.SM90,))
    with pytest.raises(UnsupportedProblem, match="FlashAttentionForwardSm90 lacks qv"):
        selection.key_for(problem(head_dim=64, head_dim_v=64), H200)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"head_dim": 72}, r"head_dim 72 \(has multiples of 8 up to 64; nearest 64\)"),
        ({"head_dim": 20}, r"head_dim 20 .*nearest 24"),
        ({"head_dim_v": 520}, r"head_dim_v 520 \(has multiples of 8 up to 512; nearest 512\)"),
        ({"head_dim_v": 260}, r"head_dim_v 260 .*nearest 264"),
        ({"has_score_mod": True}, "score_mod"),
        ({"has_mask_mod": True}, "mask_mod"),
        ({"has_block_mask": True}, "block_sparsity"),
        ({"requires_grad": True}, "gradient"),
        ({"page_size": 64, "has_leftpad": True}, "leftpad in pages"),
        ({"page_size": 12}, r"page_size 12 \(has multiples of 8; nearest 16\)"),
    ],
)
def test_what_the_kernel_lacks_is_named(declared: None, changes: dict[str, Any], what: str):
    with pytest.raises(UnsupportedProblem, match=what):
        selection.key_for(problem(**changes), H200)


@pytest.mark.parametrize("dims", [(64, 512), (8, 8), (64, 256), (32, 264), (24, 504)])
def test_head_dims_are_rounded_up(declared: None, dims: tuple[int, int]):
    key = selection.key_for(problem(head_dim=dims[0], head_dim_v=dims[1]), H200)
    assert (key.spec.tile_d, key.spec.tile_dv) == (64, 512)


def test_only_qv_does_not_ask_for_a_head_dim_of_q(declared: None):
    key = selection.key_for(problem(head_dim=512, is_only_qv=True), H200)
    assert key.spec.is_only_qv and key.spec.has_qv
    assert key != selection.key_for(problem(), H200)


def test_only_qv_is_a_kind_of_qv():
    with pytest.raises(InvalidProblem, match="is_only_qv is True, expected False"):
        problem(has_qv=False, is_only_qv=True)


@pytest.mark.parametrize(
    ("heads", "pack_gqa", "packed"),
    [((128, 1), None, 64), ((16, 1), True, 16), ((8, 2), None, 4), ((4, 4), None, 1),
     ((128, 1), False, 1)],
)  # fmt: skip
def test_heads_share_tiles(declared: None, heads, pack_gqa, packed: int):
    found = problem(num_heads_q=heads[0], num_heads_kv=heads[1], pack_gqa=pack_gqa)
    assert selection.key_for(found, H200).spec.pack_heads == packed


def test_a_config_that_cannot_be_says_why():
    spec = ForwardSpecialization("bf16", 64, 512, False, True, has_qv=True)
    assert not MlaConfigSm90().check(spec)
    assert "tile_n is 48" in MlaConfigSm90(48).check(spec)[0]
    assert "shared memory is" in MlaConfigSm90(num_stages=3).check(spec)[0]
    assert "registers of" in MlaConfigSm90(regs_mma=240).check(spec)[0]
    assert "at least 2" in MlaConfigSm90(num_stages=1).check(spec)[0]
    wide = dataclasses.replace(spec, tile_d=128)
    assert "tiled head dims are (128, 512)" in MlaConfigSm90().check(wide)[0]
    without = dataclasses.replace(spec, has_qv=False)
    assert "it is for qv" in MlaConfigSm90().check(without)[0]
    pages = dataclasses.replace(spec, page_rows=4)
    assert "rows of a page's load are 4" in MlaConfigSm90().check(pages)[0]


# ---- Launches on a GPU that is not there ---------------------------------------------------------


@pytest.fixture
def launches(declared: None, monkeypatch: pytest.MonkeyPatch) -> toy_gpu.Launches:
    return toy_gpu.install(monkeypatch)


def toy_call(**changes: Any) -> dict[str, Any]:
    shapes = {
        "q": (2, 3, 16, 64), "k_cache": (2, 100, 1, 64),
        "v_cache": (2, 100, 1, 512), "qv": (2, 3, 16, 512),
    }  # fmt: skip
    call = {
        name: toy_gpu.on_gpu(torch.zeros(shape, dtype=torch.bfloat16))
        for name, shape in shapes.items()
    }
    return {**call, "cache_seqlens": toy_gpu.on_gpu(int32(5, 7)), **changes}


def test_launch_gets_all_operands(launches: toy_gpu.Launches):
    call = toy_call()
    out = flash_attn_with_kvcache(**call, causal=True)
    assert out.shape == (2, 3, 16, 512)
    (key,) = launches.launched
    assert key.spec.has_qv and key.spec.is_causal and key.spec.has_seqused_k
    found = launches.named
    addresses = [found.q, found.k, found.v, found.qv, found.seqused_k]
    names = ("q", "k_cache", "v_cache", "qv", "cache_seqlens")
    assert addresses == [call[name].data_ptr() for name in names]
    assert (found.head_dim, found.head_dim_v, found.num_heads_q) == (64, 512, 16)
    strides = (found.qv_stride_batch, found.qv_stride_seqlen, found.qv_stride_head)
    assert strides == (3 * 16 * 512, 16 * 512, 512)
    assert math.isclose(found.scale_log2, 576**-0.5 * math.log2(math.e))


def test_launch_of_qv_alone(launches: toy_gpu.Launches):
    call = toy_call(q=None, k_cache=None, only_qv=True)
    assert flash_attn_with_kvcache(**call).shape == (2, 3, 16, 512)
    (key,) = launches.launched
    assert key.spec.is_only_qv
    assert (launches.named.qv, launches.named.v) == tuple(
        call[name].data_ptr() for name in ("qv", "v_cache")
    )
    assert math.isclose(launches.named.scale_log2, 512**-0.5 * math.log2(math.e))


@pytest.mark.parametrize("only", [False, True])
def test_repeated_calls_plan_nothing_anew(launches: toy_gpu.Launches, only: bool):
    changes = {"q": None, "k_cache": None, "only_qv": True} if only else {}
    for _ in range(3):
        call = toy_call(**changes)
        flash_attn_with_kvcache(**call)
        assert launches.named.qv == call["qv"].data_ptr()
        assert launches.named.v == call["v_cache"].data_ptr()
    assert len(launches.looked_up) == 1 and len(launches.launched) == 3


def test_another_layout_of_qv_is_another_plan(launches: toy_gpu.Launches):
    flash_attn_with_kvcache(**toy_call())
    wide = torch.zeros(2, 3, 16, 576, dtype=torch.bfloat16)
    call = toy_call(qv=toy_gpu.on_gpu(wide[..., :512]))
    flash_attn_with_kvcache(**call)
    assert launches.named.qv_stride_head == 576 and len(launches.looked_up) == 2
    flash_attn_with_kvcache(**toy_call())
    assert launches.named.qv_stride_head == 512 and len(launches.looked_up) == 2


def test_a_qv_that_cannot_be_read_is_copied(launches: toy_gpu.Launches):
    flash_attn_with_kvcache(**toy_call())
    wide = torch.zeros(2, 3, 16, 520, dtype=torch.bfloat16)
    call = toy_call(qv=toy_gpu.on_gpu(wide[..., 1:513]))
    flash_attn_with_kvcache(**call)
    assert launches.named.qv % 16 == 0 and launches.named.qv != call["qv"].data_ptr()
    assert launches.named.qv_stride_head == 512


def test_a_call_without_qv_does_not_find_one_with(launches: toy_gpu.Launches):
    call = toy_call()
    flash_attn_with_kvcache(**call)
    call.pop("qv")
    with pytest.raises(UnsupportedProblem, match="head_dim_v 512"):
        flash_attn_with_kvcache(**call)


def test_split_keys_are_merged(launches: toy_gpu.Launches):
    flash_attn_with_kvcache(**toy_call(), num_splits=3)
    attention, merge = launches.launched
    assert attention.spec.is_split and merge.tile_d == 512


def test_a_plan_by_hand_fits(launches: toy_gpu.Launches):
    call = toy_call()
    lengths = call["cache_seqlens"]
    metadata = get_scheduler_metadata(2, 3, 100, 16, 1, 64, lengths, headdim_v=512)
    flash_attn_with_kvcache(**call, scheduler_metadata=metadata)
    only = toy_call(q=None, k_cache=None, only_qv=True, cache_seqlens=lengths)
    flash_attn_with_kvcache(**only, scheduler_metadata=metadata)
    kernels = [key for key in launches.launched if isinstance(key, selection.KernelKey)]
    assert [key.spec.is_only_qv for key in kernels] == [False, True]
    assert all(key.spec.has_split_counts for key in kernels)


def test_heads_and_rows_make_tiles(launches: toy_gpu.Launches):
    """48 rows a sequence: a tile each, and no counter is needed."""
    flash_attn_with_kvcache(**toy_call(), num_splits=1)
    assert launches.named.num_ctas == 2


# ---- Compiling -----------------------------------------------------------------------------------

CELLS = [
    {},
    {"is_causal": True},
    {"is_only_qv": True},
    {"has_lse": False, "has_seqused_k": False, "pack_heads": 1},
    {"is_only_qv": True, "page_rows": 64, "is_split": True},
    {"is_packed_q": True, "page_rows": 8, "is_split": True, "is_causal": True},
    {"is_packed_q": True, "sink_dtype": "bf16", "is_split": True},
    {"has_window_left": True, "has_window_right": True, "has_softcap": True},
    {"is_causal": True, "has_window_left": True, "has_chunk": True, "sink_dtype": "fp32"},
    {"dtype": "fp16", "negate_scores": True},
]


@pytest.mark.compile
@pytest.mark.parametrize("changes", CELLS, ids=lambda changes: "-".join(changes) or "plain")
def test_cell_compiles_without_spills(changes: dict[str, Any]):
    pytest.importorskip("cutlass")
    from flash_cute.compile import inspect_kernel
    from flash_cute.sm90.mla import FlashAttentionMlaSm90

    fields = dict(dtype="bf16", tile_d=64, tile_dv=512, is_causal=False, has_lse=True)
    fields |= dict(has_qv=True, has_seqused_k=True, pack_heads=16)
    spec = ForwardSpecialization(**{**fields, **changes})
    report = inspect_kernel(FlashAttentionMlaSm90(spec, MlaConfigSm90()), "sm_90a")
    if report.missing:
        pytest.skip("; ".join(report.missing))
    checks.assert_no_spills(report)
    assert report.registers is not None and report.registers <= 168
    assert report.smem_bytes is not None and report.smem_bytes <= H200.smem_bytes
    assert f".entry {report.name}" in report.ptx


# ---- On a GPU ------------------------------------------------------------------------------------


@pytest.fixture
def gpu(hopper: None):
    if selection.SM90_MLA not in selection.KERNELS:
        pytest.skip("the kernel for qv is not declared yet")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A call of one sequence for each length; all of them have as many queries."""

    lengths: tuple[int, ...] = LENGTHS_K
    seqlen_q: int = 2
    heads: tuple[int, int] = (16, 1)
    d: int = 64
    dv: int = 512
    dtype: torch.dtype = torch.bfloat16
    slack: int = 7  # rows of the cache past the longest sequence

    @property
    def case(self) -> checks.Case:
        """The case of [q, qv] and [k, v]."""
        size = max(self.lengths) + self.slack
        dims = (self.d + self.dv, self.dv)
        return checks.Case(
            len(self.lengths), *self.heads, self.seqlen_q, size, *dims, dtype=self.dtype
        )


def call_of(sizes: Sizes, kind: str = "gaussian", is_fused: bool = False) -> dict[str, Any]:
    """A call on the GPU; is_fused: k and v are parts of one tensor, as caches of MLA often are."""
    make = checks.gaussian if kind == "gaussian" else checks.HOSTILE[kind]
    queries, keys, _ = make(sizes.case, "cuda")
    if kind in IN_ONE_CHANNEL:  # of q: qv is zero, and values may be anything
        keys[..., sizes.d :] = checks.gaussian(sizes.case, "cuda")[1][..., sizes.d :]
    for b, length in enumerate(sizes.lengths):
        keys[b, length:] = math.nan
    q, qv = queries.split((sizes.d, sizes.dv), dim=-1)
    k, v = keys.split((sizes.d, sizes.dv), dim=-1)
    if not is_fused:
        q, qv, k, v = (tensor.contiguous() for tensor in (q, qv, k, v))
    lengths = int32(*sizes.lengths, device="cuda")
    return {"q": q, "qv": qv, "k_cache": k, "v_cache": v, "cache_seqlens": lengths}


def exact_of(call: dict[str, Any], lengths: Lengths | None = None, **options: Any):
    """The oracle's answer to a call with a dense cache."""
    q, k = call["qv"], call["v_cache"]
    if call.get("q") is not None:
        q = torch.cat([call["q"], q], dim=-1)
        k = torch.cat([call["k_cache"], k], dim=-1)
    packed = {"cu_seqlens_q": call["cu_seqlens_q"]} if "cu_seqlens_q" in call else {}
    lengths = lengths or Lengths(seqused_k=call["cache_seqlens"], **packed)
    return checks.oracle(q, k, call["v_cache"], lengths, **options)


def check(call: dict[str, Any], given: dict[str, Any] | None = None, **options: Any):
    """Compare a call with the oracle; `given`: arguments that do not change the result."""
    exact = exact_of(call, **options)
    named = {"sinks" if name == "sink" else name: value for name, value in options.items()}
    got = flash_attn_with_kvcache(**call, **named, **(given or {}), return_softmax_lse=True)
    assert isinstance(got, tuple)
    checks.assert_attention(got, *exact)
    return got


def alone(call: dict[str, Any]) -> dict[str, Any]:
    """The same call with qv alone."""
    return {**call, "q": None, "k_cache": None, "only_qv": True}


@pytest.mark.gpu
@pytest.mark.parametrize("seqlen_q", [1, 2, 5, 100])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_lengths_and_heads(gpu: None, heads: tuple[int, int], seqlen_q: int):
    call = call_of(Sizes(heads=heads, seqlen_q=seqlen_q))
    for causal in (False, True):
        check(call, causal=causal)
        check(call, {"pack_gqa": False}, causal=causal)


@pytest.mark.gpu
@pytest.mark.parametrize("seqlen_q", [1, 5])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_qv_alone(gpu: None, heads: tuple[int, int], seqlen_q: int):
    call = alone(call_of(Sizes(heads=heads, seqlen_q=seqlen_q)))
    for causal in (False, True):
        exact = exact_of(call, causal=causal)
        got = flash_attn_with_kvcache(**call, causal=causal, return_softmax_lse=True)
        checks.assert_attention(got, *exact)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", list(checks.HOSTILE))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_hostile_inputs(gpu: None, kind: str, dtype: torch.dtype):
    for sizes in (Sizes((300,), 70, (3, 1)), Sizes((512, 512), 3, (16, 1)), Sizes()):
        slack = 7 if len(set(sizes.lengths)) > 1 else 0
        call = call_of(dataclasses.replace(sizes, dtype=dtype, slack=slack), kind)
        check(call)
        check(call, causal=True)


OPTIONS = {
    "window": {"window_size": (200, 10)},
    "left": {"window_size": (64, None)},
    "narrow": {"window_size": (3, 0)},
    "right": {"window_size": (None, 5)},
    "none": {"window_size": (7, -8)},
    "chunk": {"attention_chunk": 96, "causal": True},
    "softcap": {"softcap": 20.0},
    "negative": {"softmax_scale": -0.05},
    "zero": {"softmax_scale": 0.0},
    "sink": {"sink": True},
    "sink causal": {"sink": True, "causal": True},
    "all": {"sink": True, "softcap": 5.0, "window_size": (130, 0), "attention_chunk": 200},
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(OPTIONS))
@pytest.mark.parametrize("num_splits", [1, 3])
def test_options(gpu: None, name: str, num_splits: int):
    options = dict(OPTIONS[name])
    turn = list(OPTIONS).index(name) + (num_splits == 3)
    heads, seqlen_q = (((16, 1), 5), ((6, 2), 90))[turn % 2]
    if "sink" in options:
        options["sink"] = torch.linspace(-2, 3, heads[0], device="cuda")
    call = call_of(Sizes(heads=heads, seqlen_q=seqlen_q))
    check(call, {"num_splits": num_splits}, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("seqlen_q", [1, 7])
@pytest.mark.parametrize("heads", [(128, 1), (16, 1), (6, 2)], ids=str)
def test_parts_give_the_whole(gpu: None, heads: tuple[int, int], seqlen_q: int):
    call = call_of(Sizes((0, 1, 64, 700, 1500), seqlen_q, heads))
    for num_splits in (0, 1, 2, 7, 64):
        check(call, {"num_splits": num_splits}, causal=True)
    got = flash_attn_with_kvcache(**alone(call), num_splits=4, return_softmax_lse=True)
    checks.assert_attention(got, *exact_of(alone(call)))


def paged(call: dict[str, Any], lengths: tuple[int, ...], page_size: int) -> dict[str, Any]:
    """The same call with its keys in pages of a random order; NaN wherever no key is."""
    batch, width = len(lengths), -(-max(lengths) // page_size) + 1
    source = torch.Generator().manual_seed(page_size)
    order = torch.randperm(batch * width, generator=source).view(batch, width)
    table = torch.full_like(order, WILD)
    pages = {}
    for name in ("k_cache", "v_cache"):
        cache = call[name]
        if cache is None:
            continue
        shape = (batch * width, page_size, *cache.shape[2:])
        pages[name] = torch.full(shape, math.nan, dtype=cache.dtype, device="cuda")
        for b, length in enumerate(lengths):
            for n in range(-(-length // page_size)):
                table[b, n] = order[b, n]
                rows = cache[b, n * page_size : min(length, (n + 1) * page_size)]
                pages[name][order[b, n], : len(rows)] = rows
    return {**call, **pages, "page_table": table.int().cuda()}


MASKS = ({}, {"causal": True}, {"window_size": (100, 20)})


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [8, 16, 48, 64, 128, 256])
def test_pages_of_any_order(gpu: None, page_size: int):
    lengths = (300, 0, 513, 64, 1)
    turn = {8: 0, 16: 1, 48: 1}.get(page_size, 2)  # sizes that are loaded alike: one set of kernels
    for heads, seqlen_q in (((16, 1), 1), ((6, 2), 20)):
        call = call_of(Sizes(lengths, seqlen_q, heads))
        for dense in (call, alone(call)):
            for n, num_splits in enumerate((1, 3)):
                options = MASKS[(turn + n) % 3]
                exact = exact_of(dense, **options)
                got = flash_attn_with_kvcache(
                    **paged(dense, lengths, page_size),
                    **options,
                    num_splits=num_splits,
                    return_softmax_lse=True,
                )
                checks.assert_attention(got, *exact)
            turn += 1


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(128, 1), (16, 1), (3, 1)], ids=str)
def test_packed_queries(gpu: None, heads: tuple[int, int]):
    lens_q = (1, 0, 70, 2, 33, 1)
    call = call_of(Sizes(heads=heads, seqlen_q=max(lens_q)))
    for name in ("q", "qv"):
        rows = [call[name][b, :count] for b, count in enumerate(lens_q)]
        call[name] = torch.cat(rows)
    call["cu_seqlens_q"] = starts(lens_q, "cuda")
    for n, given in enumerate(({"num_splits": 1}, {"num_splits": 3}, {"max_seqlen_q": 70})):
        check(call, given, causal=(n + (heads[0] == 16)) % 2 == 1)


@pytest.mark.gpu
def test_caches_that_are_parts_of_one(gpu: None):
    for kind in ("gaussian", "outliers"):
        check(call_of(Sizes(seqlen_q=3), kind, is_fused=True), causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["transposed", "every_other", "unaligned_rows"])
def test_any_strides(gpu: None, layout: str):
    call = call_of(Sizes((65, 200), 3))
    for name in ("q", "qv", "k_cache", "v_cache"):
        (call[name],) = checks.LAYOUTS[layout](call[name], call[name], call[name])[:1]
    check(call, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("is_only", [False, True])
def test_rows_and_padding_of_a_cache(gpu: None, is_only: bool):
    lengths, rows, pads = (200, 0, 64, 333), (5, 0, 3, 2), (1, 64, 100, 0)
    call = call_of(Sizes(lengths, 3))
    call = alone(call) if is_only else call
    moved = {"cache_batch_idx": int32(*rows, device="cuda")}
    for name in ("k_cache", "v_cache"):
        if call[name] is None:
            continue
        moved[name] = torch.full((7, 450, *call[name].shape[2:]), math.nan, device="cuda")
        moved[name] = moved[name].to(call[name].dtype)
        for b, length in enumerate(lengths):
            moved[name][rows[b], pads[b] : pads[b] + length] = call[name][b, :length]
    moved["cache_leftpad"] = int32(*pads, device="cuda")
    moved["cache_seqlens"] = call["cache_seqlens"] + moved["cache_leftpad"]
    for n, options in enumerate(({}, {"causal": True}, {"window_size": (40, 0)})):
        exact = exact_of(call, **options)
        num_splits = (1, 3)[(n + is_only) % 2]
        got = flash_attn_with_kvcache(
            **{**call, **moved}, **options, num_splits=num_splits, return_softmax_lse=True
        )
        checks.assert_attention(got, *exact)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [None, 64])
def test_plans_by_hand(gpu: None, page_size: int | None):
    lengths = (3000, 5, 0, 900)
    call = call_of(Sizes(lengths, 2, (128, 1)))
    exact = exact_of(call, causal=True)
    capacity = call["v_cache"].shape[1]
    if page_size is not None:
        call = paged(call, lengths, page_size)
        capacity = page_size * call["page_table"].shape[1]
    for split_size in (0, 256):
        metadata = get_scheduler_metadata(
            4, 2, capacity, 128, 1, 64, call["cache_seqlens"],
            headdim_v=512, page_size=page_size, causal=True, split_size=split_size,
        )  # fmt: skip
        got = flash_attn_with_kvcache(
            **call, causal=True, scheduler_metadata=metadata, return_softmax_lse=True
        )
        checks.assert_attention(got, *exact)


@pytest.mark.gpu
def test_a_whole_cache_without_lengths(gpu: None):
    """Keys end with the tensor, and not with a block."""
    for size in (1, 63, 64, 100, 128):
        call = call_of(Sizes((size,) * 2, 3))
        for name in ("k_cache", "v_cache"):
            call[name] = call[name][:, :size].contiguous()
        call.pop("cache_seqlens")
        exact = exact_of(call, Lengths(), causal=True)
        got = flash_attn_with_kvcache(**call, causal=True, return_softmax_lse=True)
        checks.assert_attention(got, *exact)


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(8, 8), (32, 256), (64, 264), (40, 480), (56, 504)], ids=str)
def test_other_head_dims(gpu: None, dims: tuple[int, int]):
    for heads in ((16, 1), (4, 4)):
        call = call_of(Sizes((65, 0, 300), 5, heads, *dims))
        check(call, causal=True)
        check(call, {"num_splits": 3})


@pytest.mark.gpu
def test_more_tiles_than_multiprocessors(gpu: None):
    """CTAs compute many tiles, whose numbers of blocks are even and odd."""
    source = torch.Generator().manual_seed(3)
    lengths = tuple(torch.randint(0, 400, (150,), generator=source).tolist())
    call = call_of(Sizes(lengths, 2, (128, 1)))
    first = check(call, {"num_splits": 1}, causal=True)
    check(alone(call), {"num_splits": 1})
    for _ in range(20):
        again = flash_attn_with_kvcache(**call, causal=True, num_splits=1, return_softmax_lse=True)
        for name, got, expected in zip(("out", "lse"), again, first, strict=True):
            checks.assert_same_bits(name, got, expected)


@pytest.mark.gpu
def test_results_repeat_bit_by_bit(gpu: None):
    call = call_of(Sizes((4000, 3999, 64, 1), 1, (128, 1)))
    for num_splits in (1, 5):
        first = flash_attn_with_kvcache(**call, num_splits=num_splits)
        for _ in range(50):
            again = flash_attn_with_kvcache(**call, num_splits=num_splits)
            checks.assert_same_bits("out", again, first)


@pytest.mark.gpu
def test_out_is_written_in_place(gpu: None):
    call = call_of(Sizes(seqlen_q=3))
    expected = flash_attn_with_kvcache(**call)
    for shape in (expected.shape, (*expected.shape[:-1], 520)):
        buffer = torch.full(shape, math.nan, dtype=expected.dtype, device="cuda")
        out = buffer[..., :512]
        assert flash_attn_with_kvcache(**call, out=out) is out
        checks.assert_same_bits("out", out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [1, 4])
def test_graphs_replay_new_lengths(gpu: None, num_splits: int):
    call = call_of(Sizes((1000, 1000, 1000), 1, (128, 1)))
    flash_attn_with_kvcache(**call, num_splits=num_splits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn_with_kvcache(**call, num_splits=num_splits)
    for lengths in ((1000, 1, 0), (64, 65, 999)):
        call["cache_seqlens"].copy_(int32(*lengths, device="cuda"))
        graph.replay()
        exact, lowprec = exact_of(call)
        checks.assert_close("out", out, exact[0], lowprec[0])
