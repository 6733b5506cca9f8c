"""Validation of a call: what is accepted, what is refused, and in which words."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from flash_cute.errors import FlashCuteError, InvalidProblem, UnsupportedProblem
from flash_cute.features import Feature
from flash_cute.problem import (
    AttentionInputs,
    AttentionProblem,
    Lengths,
    Options,
    attention_request,
)
from flash_cute.values import check_values

OPTIONS = {field.name for field in dataclasses.fields(Options)}
LENGTHS = {field.name for field in dataclasses.fields(Lengths)}


def int32(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def request(**changes: Any) -> tuple[AttentionProblem, AttentionInputs]:
    """A small valid dense request with some arguments changed."""
    operands = {
        "q": torch.zeros(2, 5, 6, 128, dtype=torch.bfloat16),
        "k": torch.zeros(2, 7, 3, 128, dtype=torch.bfloat16),
        "v": torch.zeros(2, 7, 3, 64, dtype=torch.bfloat16),
    }
    operands.update((name, changes.pop(name)) for name in ("q", "k", "v") if name in changes)
    options = Options(**{name: changes[name] for name in changes if name in OPTIONS})
    lengths = Lengths(**{name: changes[name] for name in changes if name in LENGTHS})
    assert set(changes) <= OPTIONS | LENGTHS
    return attention_request(*operands.values(), options, lengths)


def packed(**changes: Any) -> dict[str, Any]:
    """Arguments of a packed call of two sequences: queries 2 and 3, keys 4 and 0."""
    arguments = {
        "q": torch.zeros(5, 6, 128, dtype=torch.bfloat16),
        "k": torch.zeros(4, 3, 128, dtype=torch.bfloat16),
        "v": torch.zeros(4, 3, 64, dtype=torch.bfloat16),
        "cu_seqlens_q": int32(0, 2, 5),
        "cu_seqlens_k": int32(0, 4, 4),
    }
    return {**arguments, **changes}


def paged(**changes: Any) -> dict[str, Any]:
    """Arguments of a paged call of two sequences of up to 4 keys in pages of 2."""
    arguments = {
        "q": torch.zeros(2, 5, 6, 128, dtype=torch.bfloat16),
        "k": torch.zeros(8, 2, 3, 128, dtype=torch.bfloat16),
        "v": torch.zeros(8, 2, 3, 64, dtype=torch.bfloat16),
        "page_table": int32([0, 1], [7, 2]),
    }
    return {**arguments, **changes}


def problem(**changes: Any) -> AttentionProblem:
    """A problem written by hand."""
    facts: dict[str, Any] = {
        "dtype": torch.bfloat16,
        "device": torch.device("cuda"),
        "batch": 2,
        "seqlen_q": 5,
        "seqlen_k": 7,
        "num_heads_q": 6,
        "num_heads_kv": 3,
        "head_dim": 128,
        "head_dim_v": 128,
    }
    return AttentionProblem(**{**facts, **changes})


# ---- Accepted ------------------------------------------------------------------------------------


def test_request_records_the_call():
    facts, inputs = request(causal=True, return_lse=True, softcap=3)
    assert (facts.batch, facts.seqlen_q, facts.seqlen_k) == (2, 5, 7)
    assert (facts.num_heads_q, facts.num_heads_kv, facts.group) == (6, 3, 2)
    assert (facts.head_dim, facts.head_dim_v) == (128, 64)
    assert facts.softmax_scale == 128**-0.5
    assert facts.softcap == 3.0 and facts.causal and facts.return_lse
    assert facts.dtype == torch.bfloat16 and facts.device == torch.device("cpu")
    assert inputs.q.shape == (2, 5, 6, 128) and inputs.out is None


def test_problem_is_hashable_frozen_and_equal_by_value():
    assert problem() == problem() and hash(problem()) == hash(problem())
    assert problem() != problem(causal=True)
    assert len({problem(), problem(), problem(softcap=1.0)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        problem().batch = 3  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises((AttributeError, TypeError)):
        object.__setattr__(problem(), "extra", 1)


def test_problem_resolves_defaults_and_spellings():
    assert problem(softmax_scale=None).softmax_scale == 128**-0.5
    assert problem(softmax_scale=2).softmax_scale == 2.0
    assert problem(device="cuda:1").device == torch.device("cuda", 1)
    assert problem(window_left=-1, window_right=-1) == problem()


def test_every_dtype_of_the_cpu_is_accepted():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        tensor = torch.zeros(1, 1, 1, 8, dtype=dtype)
        assert request(q=tensor, k=tensor, v=tensor)[0].dtype == dtype


def test_any_strides_with_unit_last_stride_are_accepted():
    wide = torch.zeros(2, 9, 4, 131, dtype=torch.bfloat16)
    views = wide[:, 1:8:2, 1:, 3:], wide.transpose(0, 1)[..., :128], wide[:1].expand(3, 9, 4, 131)
    for view in views:
        assert request(q=view, k=view, v=view)[0].batch == view.shape[0]
    column = torch.zeros(2, 9, 4, 2)[..., :1]
    request(q=column, k=column, v=column)


def test_packed_sides_take_batch_from_cu_seqlens():
    facts, _ = request(**packed())
    assert (facts.batch, facts.seqlen_q, facts.seqlen_k) == (2, 5, 4)
    assert facts.is_packed_q and facts.is_packed_k
    facts, _ = request(**packed(cu_seqlens_k=None, k=zeros(2, 9, 3, 128), v=zeros(2, 9, 3, 64)))
    assert (facts.batch, facts.seqlen_k, facts.is_packed_k) == (2, 9, False)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("hint", "seqlen"),
    [
        (None, 5),
        (3, 3),
        (100, 5),
        (0, 0),
        (torch.tensor(3), 3),
        (torch.tensor(4, dtype=torch.int32), 4),
    ],
)
def test_hint_bounds_the_packed_length(hint: Any, seqlen: int):
    assert request(**packed(max_seqlen_q=hint))[0].seqlen_q == seqlen


def test_hint_on_a_gpu_is_not_read():
    class Unreadable(torch.Tensor):
        """Stands for a tensor on a GPU: reading its value is a failure."""

        device = torch.device("cuda")  # pyright: ignore[reportAssignmentType]

        def item(self) -> Any:
            raise RuntimeError("the hint was read")

        __int__ = __index__ = __float__ = __bool__ = item

    hint = torch.tensor(3).as_subclass(Unreadable)
    assert request(**packed(max_seqlen_q=hint, max_seqlen_k=hint))[0].seqlen_q == 5


def test_paged_capacity_and_hint():
    facts, _ = request(**paged())
    assert (facts.page_size, facts.seqlen_k) == (2, 4)
    # Without seqused_k all slots are keys, and a hint must not take any away.
    assert request(**paged(max_seqlen_k=3))[0].seqlen_k == 4
    assert request(**paged(max_seqlen_k=3, seqused_k=int32(1, 3)))[0].seqlen_k == 3


def test_empty_sizes_are_accepted():
    assert request(q=zeros(0, 5, 6, 128), k=zeros(0, 7, 3, 128), v=zeros(0, 7, 3, 64))[0].batch == 0
    assert request(q=zeros(2, 0, 6, 128))[0].seqlen_q == 0
    assert request(k=zeros(2, 0, 3, 128), v=zeros(2, 0, 3, 64))[0].seqlen_k == 0
    empty = packed(q=zeros(0, 6, 128), cu_seqlens_q=int32(0), cu_seqlens_k=int32(0))
    assert request(**empty)[0].batch == 0


# ---- Masks and features --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("causal", "window", "left", "right", "features"),
    [
        (False, (None, None), None, None, set()),
        (False, (-1, -1), None, None, set()),
        (True, (None, None), None, 0, {Feature.CAUSAL}),
        (False, (None, 0), None, 0, {Feature.CAUSAL}),
        (False, (-1, 0), None, 0, {Feature.CAUSAL}),
        (True, (-1, 5), None, 0, {Feature.CAUSAL}),
        (True, (None, -3), None, -3, {Feature.WINDOW}),
        (True, (4, None), 4, 0, {Feature.WINDOW}),
        (False, (4, 0), 4, 0, {Feature.WINDOW}),
        (False, (0, 0), 0, 0, {Feature.WINDOW}),
        (False, (7, -8), 7, -8, {Feature.WINDOW}),
        (False, (-3, 5), -3, 5, {Feature.WINDOW}),
        (False, (None, 3), None, 3, {Feature.WINDOW}),
    ],
)
def test_bounds_fold_causal_into_the_window(
    causal: bool,
    window: tuple[int | None, int | None],
    left: int | None,
    right: int | None,
    features: set[Feature],
):
    facts, _ = request(causal=causal, window_size=window, v=zeros(2, 7, 3, 128))
    assert (facts.visible_left, facts.visible_right) == (left, right)
    assert facts.causal == causal, "the user's own word is kept"
    assert facts.required_features() == features | {Feature.GQA}


def test_required_features_name_everything_asked():
    def features(**changes: Any) -> set[str]:
        return {feature.value for feature in request(**changes)[0].required_features()}

    base = {"gqa", "head_dim_v"}
    assert features() == base
    sink = torch.zeros(6)
    assert features(sink=sink) == base | {"sink"}
    assert features(attention_chunk=3, softcap=1.0) == base | {"attention_chunk", "softcap"}
    assert features(score_mod=lambda s, b, h, i, j: s) == base | {"score_mod"}
    assert features(mask_mod=lambda b, h, i, j: True) == base | {"mask_mod"}
    assert features(num_splits=2, pack_gqa=True) == base | {"split_kv", "pack_gqa"}
    assert features(num_splits=0, pack_gqa=False) == base
    assert features(return_lse=True) == base | {"lse"}
    assert features(**packed()) == base | {"varlen"}
    assert features(**paged(seqused_k=int32(1, 2))) == base | {"paged_kv", "seqused"}
    assert features(sink=sink.requires_grad_()) == base | {"sink", "gradient"}
    with torch.no_grad():
        assert features(sink=sink) == base | {"sink"}
    assert problem(num_heads_q=3, pack_gqa=True).required_features() == frozenset()
    assert problem(has_block_mask=True).required_features() >= {Feature.BLOCK_SPARSITY}


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_gradient_is_required_by_any_operand(name: str):
    tensor = {"q": zeros(2, 5, 6, 128), "k": zeros(2, 7, 3, 128), "v": zeros(2, 7, 3, 64)}[name]
    assert request(**{name: tensor.requires_grad_()})[0].requires_grad
    with torch.no_grad():
        assert not request(**{name: tensor})[0].requires_grad


def test_every_feature_has_a_line_of_documentation():
    for feature in Feature:
        assert feature.doc and "\n" not in feature.doc
    assert len({feature.value for feature in Feature}) == len(Feature)


# ---- Refused -------------------------------------------------------------------------------------

AS_NUMPY = torch.zeros(1).numpy()

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "q-type": ({"q": AS_NUMPY}, "q is of type ndarray, expected a torch.Tensor"),
    "q-rank": (
        {"q": zeros(5, 6, 128)},
        "q.dim() is 3, expected 4 ((batch, seqlen_q, num_heads_q, head_dim))",
    ),
    "k-rank-packed": (
        packed(k=zeros(2, 7, 3, 128)),
        "k.dim() is 4, expected 3 ((total_k, num_heads_kv, head_dim), packed as cu_seqlens_k is",
    ),
    "v-rank-paged": (
        paged(v=zeros(7, 3, 64)),
        "v.dim() is 3, expected 4 ((num_pages, page_size, num_heads_kv, head_dim), paged as page",
    ),
    "k-dtype": (
        {"k": zeros(2, 7, 3, 128).half()},
        "k.dtype is torch.float16, expected torch.bfloat16 (dtype of q)",
    ),
    "k-device": (
        {"k": zeros(2, 7, 3, 128).to("meta")},
        "k.device is meta, expected cpu (device of q)",
    ),
    "v-last-stride": (
        {"v": zeros(2, 7, 64, 3).transpose(-1, -2)},
        "v.stride(-1) is 3, expected 1 (pass v.contiguous(); all other strides are free)",
    ),
    "k-head_dim": (
        {"k": zeros(2, 7, 3, 96)},
        "k.shape[-1] is 96, expected 128 (head_dim of q)",
    ),
    "v-heads": ({"v": zeros(2, 7, 2, 64)}, "v.shape[2] is 2, expected 3 (k.shape[2])"),
    "v-seqlen": ({"v": zeros(2, 8, 3, 64)}, "v.shape[1] is 8, expected 7 (k.shape[1])"),
    "k-batch": (
        {"k": zeros(3, 7, 3, 128), "v": zeros(3, 7, 3, 64)},
        "k.shape[0] is 3, expected 2 (batch of q)",
    ),
    "k-batch-packed-q": (
        packed(cu_seqlens_k=None, k=zeros(3, 7, 3, 128), v=zeros(3, 7, 3, 64)),
        "k.shape[0] is 3, expected 2 (cu_seqlens_q.shape[0] - 1)",
    ),
    "heads-ratio": (
        {"k": zeros(2, 7, 4, 128), "v": zeros(2, 7, 4, 64)},
        "num_heads_q is 6, expected a multiple of 4 (num_heads_kv)",
    ),
    "no-heads": ({"q": zeros(2, 5, 0, 128)}, "num_heads_q is 0, expected an integer of at least 1"),
    "no-head_dim": (
        {"q": zeros(2, 5, 6, 0), "k": zeros(2, 7, 3, 0)},
        "head_dim is 0, expected an integer of at least 1",
    ),
    "no-head_dim_v": (
        {"v": zeros(2, 7, 3, 0)},
        "head_dim_v is 0, expected an integer of at least 1",
    ),
    "dtype": (
        {n: torch.zeros(1, 1, 1, 8, dtype=torch.int32) for n in "qkv"},
        "dtype is torch.int32, expected one of torch.float16, torch.bfloat16, torch.float32, "
        "torch.float64 (tensors on cpu)",
    ),
    "device": (
        {n: torch.zeros(1, 1, 1, 8, device="meta") for n in "qkv"},
        "device is meta, expected cuda or cpu",
    ),
    "causal": ({"causal": 1}, "causal is 1, expected True or False"),
    "return_lse": ({"return_lse": None}, "return_lse is None, expected True or False"),
    "pack_gqa": ({"pack_gqa": "yes"}, "pack_gqa is 'yes', expected True or False"),
    "scale-nan": ({"softmax_scale": math.nan}, "softmax_scale is nan, expected a finite number"),
    "scale-type": ({"softmax_scale": True}, "softmax_scale is True, expected a finite number"),
    "scale-tensor": (
        {"softmax_scale": torch.tensor(1.0)},
        "softmax_scale is tensor(1.), expected a finite number",
    ),
    "softcap-negative": (
        {"softcap": -1.0},
        "softcap is -1.0, expected 0 (none) or a positive number",
    ),
    "softcap-inf": ({"softcap": math.inf}, "softcap is inf, expected a finite number"),
    "window-length": (
        {"window_size": (1, 2, 3)},
        "window_size is (1, 2, 3), expected a pair (left, right) of integers or None",
    ),
    "window-int": ({"window_size": 5}, "window_size is 5, expected a pair (left, right) of"),
    "window-left": (
        {"window_size": (1.5, 0)},
        "window_size[0] is 1.5, expected an integer or None",
    ),
    "window-right": (
        {"window_size": (0, True)},
        "window_size[1] is True, expected an integer or None",
    ),
    "chunk": ({"attention_chunk": -1}, "attention_chunk is -1, expected an integer of at least 0"),
    "splits": ({"num_splits": -1}, "num_splits is -1, expected an integer of at least 0"),
    "splits-type": ({"num_splits": 2.0}, "num_splits is 2.0, expected an integer of at least 0"),
    "sink-type": ({"sink": [0.0] * 6}, "sink is of type list, expected a torch.Tensor"),
    "sink-shape": (
        {"sink": torch.zeros(3)},
        "sink.shape is (3,), expected (6,) (num_heads of q)",
    ),
    "sink-dtype": (
        {"sink": torch.zeros(6, dtype=torch.int64)},
        "sink.dtype is torch.int64, expected one of torch.float16, torch.bfloat16",
    ),
    "sink-device": (
        {"sink": torch.zeros(6, device="meta")},
        "sink.device is meta, expected cpu (device of q)",
    ),
    "sink-stride": (
        {"sink": torch.zeros(12)[::2]},
        "sink.stride(-1) is 2, expected 1 (pass sink.contiguous()",
    ),
    "score_mod-type": (
        {"score_mod": 3},
        "score_mod is of type int, expected a function score_mod(score, b, h, q_idx, kv_idx)",
    ),
    "score_mod-signature": (
        {"score_mod": lambda score, b: score},
        "score_mod is a function of (score, b), expected score_mod(score, b, h, q_idx, kv_idx)",
    ),
    "mask_mod-signature": (
        {"mask_mod": lambda score, b, h, q, kv: score},
        "mask_mod is a function of (score, b, h, q, kv), expected mask_mod(b, h, q_idx, kv_idx)",
    ),
    "kernel": ({"kernel": "sm90"}, "kernel is of type str, expected a kernel class"),
    "paged-and-packed": (
        paged(cu_seqlens_k=int32(0, 1, 2)),
        "page_table and cu_seqlens_k are both given, expected at most one",
    ),
    "cu_seqlens-type": (
        packed(cu_seqlens_q=[0, 2, 5]),
        "cu_seqlens_q is of type list, expected a torch.Tensor",
    ),
    "cu_seqlens-dtype": (
        packed(cu_seqlens_q=torch.tensor([0, 2, 5])),
        "cu_seqlens_q.dtype is torch.int64, expected torch.int32",
    ),
    "cu_seqlens-rank": (
        packed(cu_seqlens_k=int32([0, 4, 4])),
        "cu_seqlens_k.dim() is 2, expected 1",
    ),
    "cu_seqlens-stride": (
        packed(cu_seqlens_q=int32(0, 0, 2, 2, 5)[::2]),
        "cu_seqlens_q.stride(-1) is 2, expected 1 (pass cu_seqlens_q.contiguous()",
    ),
    "cu_seqlens-length": (
        packed(cu_seqlens_k=int32(0, 4)),
        "cu_seqlens_k.shape[0] is 2, expected 3 (batch + 1, batch is cu_seqlens_q.shape[0] - 1)",
    ),
    "cu_seqlens-empty": (
        packed(cu_seqlens_q=int32()),
        "cu_seqlens_q.shape[0] is 0, expected at least 1 (batch + 1)",
    ),
    "cu_seqlens-device": (
        packed(cu_seqlens_q=int32(0, 2, 5).to("meta")),
        "cu_seqlens_q.device is meta, expected cpu (device of q)",
    ),
    "seqused-length": (
        {"seqused_k": int32(1, 2, 3)},
        "seqused_k.shape[0] is 3, expected 2 (batch of q)",
    ),
    "seqused-dtype": (
        {"seqused_q": torch.tensor([1.0, 2.0])},
        "seqused_q.dtype is torch.float32, expected torch.int32",
    ),
    "page_table-rank": (paged(page_table=int32(0, 1)), "page_table.dim() is 1, expected 2"),
    "page_table-batch": (
        paged(page_table=int32([0, 1])),
        "page_table.shape[0] is 1, expected 2 (batch of q)",
    ),
    "page_size": (
        paged(k=zeros(8, 0, 3, 128), v=zeros(8, 0, 3, 64)),
        "k.shape[1] is 0, expected at least 1 (page size)",
    ),
    "hint-negative": (
        packed(max_seqlen_q=-1),
        "max_seqlen_q is -1, expected an integer of at least 0",
    ),
    "hint-type": (
        packed(max_seqlen_k=3.0),
        "max_seqlen_k is 3.0, expected an integer of at least 0",
    ),
    "hint-tensor": (
        packed(max_seqlen_k=torch.tensor([3])),
        "max_seqlen_k is a tensor of shape (1,) and dtype torch.int64, expected an integer or",
    ),
    "hint-float-tensor": (
        packed(max_seqlen_k=torch.tensor(3.0)),
        "max_seqlen_k is a tensor of shape () and dtype torch.float32, expected an integer or a",
    ),
    "out-type": ({"out": AS_NUMPY}, "out is of type ndarray, expected a torch.Tensor"),
    "out-shape": (
        {"out": zeros(2, 5, 6, 128)},
        "out.shape is (2, 5, 6, 128), expected (2, 5, 6, 64) (shape of q with head_dim of v)",
    ),
    "out-dtype": (
        {"out": zeros(2, 5, 6, 64).float()},
        "out.dtype is torch.float32, expected torch.bfloat16 (dtype of q)",
    ),
    "out-device": (
        {"out": zeros(2, 5, 6, 64).to("meta")},
        "out.device is meta, expected cpu (device of q)",
    ),
    "out-last-stride": (
        {"out": zeros(2, 5, 64, 6).transpose(-1, -2)},
        "out.stride(-1) is 6, expected 1",
    ),
    "out-overlap": (
        {"out": zeros(1, 5, 6, 64).expand(2, 5, 6, 64)},
        "out.stride(0) is 0, expected nonzero (rows of out would overlap)",
    ),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_refusal_names_argument_got_and_expected(changes: dict[str, Any], message: str):
    with pytest.raises(InvalidProblem) as caught:
        request(**changes)
    assert str(caught.value).startswith(message)
    assert isinstance(caught.value, (ValueError, FlashCuteError))


def test_refusal_comes_before_the_values_are_looked_at():
    # Nothing of the request reads the contents of the length tensors: that is check_values' part.
    request(**packed(cu_seqlens_q=int32(3, 1, 99)))
    request(**paged(page_table=int32([-1, 99], [2**31 - 1, 0])))


def test_block_mask_of_pages_reaches_the_used_lengths():
    """The room in the page table may be more; the lists say nothing of it."""
    mask = create_block_mask(lambda b, h, q_idx, kv_idx: kv_idx >= 0, None, None, 5, 2, "cpu", 2)
    used = int32(2, 1)
    assert request(**paged(), seqused_k=used, block_mask=mask)[0].has_block_mask
    check_values(*request(**paged(), seqused_k=used, block_mask=mask))
    with pytest.raises(InvalidProblem, match="for the longest sequence of 3"):
        check_values(*request(**paged(), seqused_k=int32(2, 3), block_mask=mask))


def test_native_callbacks_are_refused_on_the_cpu():
    def native(
        score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any
    ):
        return score

    with pytest.raises(UnsupportedProblem, match="score_mod is in the native form, of CuTe values"):
        request(score_mod=native)


def test_fp8_is_unsupported_rather_than_wrong():
    tensor = torch.zeros(1, 1, 1, 16).to(torch.float8_e4m3fn)
    with pytest.raises(UnsupportedProblem, match="float8_e4m3fn: no fp8 kernel exists yet"):
        request(q=tensor, k=tensor, v=tensor)
    with pytest.raises(NotImplementedError):
        problem(dtype=torch.float8_e5m2)


def test_out_with_gradients_is_refused():
    q, out = zeros(2, 5, 6, 128).requires_grad_(), zeros(2, 5, 6, 64)
    with pytest.raises(InvalidProblem, match=r"out is given while .* torch.no_grad\(\)"):
        request(q=q, out=out)
    with torch.no_grad():
        request(q=q, out=out)
    with pytest.raises(InvalidProblem, match="out is given while"):
        request(out=out.requires_grad_())


def test_out_must_not_be_an_input():
    tensor = zeros(2, 5, 6, 64)
    other = zeros(2, 5, 6, 64)
    for name in "qkv":
        operands = {n: tensor if n == name else other for n in "qkv"}
        with pytest.raises(InvalidProblem, match=f"out is the memory of {name}, expected memory"):
            request(**operands, out=tensor)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": torch.float32}, "dtype is torch.float32, expected one of torch.float16, torch."),
        ({"batch": -1}, "batch is -1, expected an integer of at least 0"),
        ({"seqlen_q": 1.5}, "seqlen_q is 1.5, expected an integer of at least 0"),
        ({"num_heads_kv": 0}, "num_heads_kv is 0, expected an integer of at least 1"),
        ({"num_heads_kv": 4}, "num_heads_q is 6, expected a multiple of 4 (num_heads_kv)"),
        ({"head_dim": "128"}, "head_dim is '128', expected an integer of at least 1"),
        ({"page_size": 0}, "page_size is 0, expected an integer of at least 1"),
        ({"page_size": 8, "is_packed_k": True}, "is_packed_k is True, expected False (paged keys"),
        ({"has_sink": 1}, "has_sink is 1, expected True or False"),
        ({"requires_grad": "no"}, "requires_grad is 'no', expected True or False"),
    ],
)
def test_problem_written_by_hand_is_checked(changes: dict[str, Any], message: str):
    with pytest.raises(InvalidProblem) as caught:
        problem(**changes)
    assert str(caught.value).startswith(message)


# ---- Values --------------------------------------------------------------------------------------

BAD_VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "start": (packed(cu_seqlens_q=int32(3, 4, 5)), "cu_seqlens_q[0] is 3, expected 0"),
    "decreasing": (
        packed(cu_seqlens_k=int32(0, 4, 2)),
        "cu_seqlens_k[2] is 2, expected at least 4 (cu_seqlens_k[1])",
    ),
    "past-the-end": (
        packed(cu_seqlens_k=int32(0, 4, 9)),
        "cu_seqlens_k[-1] is 9, expected at most 4 (k.shape[0])",
    ),
    "longer-than-hint": (
        packed(max_seqlen_q=2),
        "max_seqlen_q is 2, expected at least 3 (longest of cu_seqlens_q)",
    ),
    "seqused-negative": (
        {"seqused_k": int32(3, -1)},
        "seqused_k[1] is -1, expected 0 to 7 (length of the sequence)",
    ),
    "seqused-long": ({"seqused_q": int32(6, 0)}, "seqused_q[0] is 6, expected 0 to 5"),
    "seqused-long-packed": (
        packed(seqused_k=int32(4, 1)),
        "seqused_k[1] is 1, expected 0 to 0 (length of the sequence)",
    ),
    "seqused-long-paged": (
        paged(seqused_k=int32(5, 0)),
        "seqused_k[0] is 5, expected 0 to 4 (length of the sequence)",
    ),
    "page": (
        paged(page_table=int32([0, 1], [8, 2])),
        "page_table[1, 0] is 8, expected 0 to 7 (pages of k)",
    ),
    "page-negative": (
        paged(page_table=int32([0, -1], [7, 2]), seqused_k=int32(3, 0)),
        "page_table[0, 1] is -1, expected 0 to 7 (pages of k)",
    ),
}


@pytest.mark.parametrize(("changes", "message"), BAD_VALUES.values(), ids=BAD_VALUES)
def test_values_are_checked_entry_by_entry(changes: dict[str, Any], message: str):
    facts, inputs = request(**changes)
    with pytest.raises(InvalidProblem) as caught:
        check_values(facts, inputs)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "changes",
    [
        packed(),
        packed(cu_seqlens_q=int32(0, 1, 2)),  # slack past the last sequence
        packed(cu_seqlens_q=int32(0, 0, 0), cu_seqlens_k=int32(0, 0, 0)),
        packed(seqused_q=int32(0, 3), seqused_k=int32(4, 0)),
        packed(max_seqlen_q=3, max_seqlen_k=100),
        {"seqused_k": int32(0, 7)},
        paged(),
        paged(page_table=int32([3, 2**31 - 1], [-1, -1]), seqused_k=int32(2, 0)),
    ],
)
def test_good_values_pass(changes: dict[str, Any]):
    check_values(*request(**changes))


def test_callbacks_of_every_kind_pass():
    class Slope:
        def __call__(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score

        def method(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score

    def with_default(
        score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, slope: float = 1.0
    ) -> Any:
        return score * slope

    def variadic(*indices: Any) -> Any:
        return indices[0]

    functions: list[Callable[..., Any]] = [Slope(), Slope().method, with_default, variadic]
    for function in functions:
        assert request(score_mod=function)[0].has_score_mod
