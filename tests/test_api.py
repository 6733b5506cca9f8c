"""The public functions: what they return, what they refuse, what they leave alone."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator
from typing import Any

import checks
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_cute
from flash_cute import (
    AttentionProblem,
    InvalidProblem,
    UnsupportedProblem,
    flash_attn_func,
    flash_attn_varlen_func,
    is_supported,
    reference_mask,
)

FUNCTIONS = (flash_attn_func, flash_attn_varlen_func)


def int32(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture
def qkv() -> checks.Operands:
    return checks.gaussian(checks.Case(2, 4, 2, 9, 11, 16))


# ---- Signatures and results ----------------------------------------------------------------------


@pytest.mark.parametrize("function", FUNCTIONS)
def test_all_but_q_k_v_are_keywords(function: Any):
    parameters = inspect.signature(function).parameters
    positional = [p.name for p in parameters.values() if p.kind is not p.KEYWORD_ONLY]
    assert positional == ["q", "k", "v"]
    assert all(p.default is not p.empty for n, p in parameters.items() if n not in positional)


def test_both_functions_share_their_options():
    dense, varlen = (list(inspect.signature(function).parameters) for function in FUNCTIONS)
    assert varlen[-len(dense) + 3 :] == dense[3:]
    defaults = [
        {name: p.default for name, p in inspect.signature(function).parameters.items()}
        for function in FUNCTIONS
    ]
    assert all(defaults[1][name] == default for name, default in defaults[0].items())


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_option_is_documented(function: Any):
    text = inspect.getdoc(function)
    for name in inspect.signature(function).parameters:
        if function is flash_attn_func or "seqlen" in name or "seqused" in name or "page" in name:
            assert re.search(rf"\b{name}\b", text or ""), name


@pytest.mark.parametrize("function", FUNCTIONS)
def test_lse_is_returned_only_when_asked_for(function: Any, qkv: checks.Operands):
    out = function(*qkv)
    assert isinstance(out, torch.Tensor) and out.shape == (2, 9, 4, 16)
    pair = function(*qkv, return_lse=True)
    assert isinstance(pair, tuple) and len(pair) == 2
    assert pair[1].shape == (2, 4, 9) and pair[1].dtype == torch.float32
    checks.assert_same_bits("out", pair[0], out)


def test_varlen_of_dense_tensors_is_the_dense_function(qkv: checks.Operands):
    checks.assert_same_bits("out", flash_attn_varlen_func(*qkv), flash_attn_func(*qkv))


def test_options_reach_the_reference(qkv: checks.Operands):
    """Each option changes the result as the definition says; none is dropped on the way."""
    sink, bias = torch.tensor([0.5, 1.0, -1.0, 0.0]), torch.randn(9, 11)
    options: dict[str, Any] = {
        "softmax_scale": 0.3,
        "causal": True,
        "window_size": (6, 1),
        "attention_chunk": 4,
        "softcap": 0.9,
        "sink": sink,
        "score_mod": lambda score, b, h, q_idx, kv_idx: score + bias[q_idx, kv_idx],
        "mask_mod": lambda b, h, q_idx, kv_idx: kv_idx != 7,
    }
    visible = checks.mask_by_definition(9, 11, causal=True, window=(6, 1), chunk=4)
    visible[:, 7] = False
    operands = tuple(tensor.double() for tensor in qkv)
    expected = checks.attention_by_definition(
        *operands, visible, scale=0.3, softcap=0.9, sink=sink, bias=bias
    )
    for function in FUNCTIONS:
        out, lse = function(*operands, **options, return_lse=True)
        torch.testing.assert_close(out, expected[0], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(lse.double(), expected[1], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("num_splits", [0, 1, 2, 64])
@pytest.mark.parametrize("pack_gqa", [None, True, False])
def test_ways_of_computing_do_not_change_the_result(
    num_splits: int, pack_gqa: bool | None, qkv: checks.Operands
):
    got = flash_attn_func(*qkv, num_splits=num_splits, pack_gqa=pack_gqa)
    checks.assert_same_bits("out", got, flash_attn_func(*qkv))


def test_gradients_flow_on_the_cpu(qkv: checks.Operands):
    q, k, v = (tensor.requires_grad_() for tensor in qkv)
    sink = torch.zeros(4, requires_grad=True)
    out, lse = flash_attn_func(q, k, v, causal=True, sink=sink, return_lse=True)
    (out.float().square().sum() + lse.sum()).backward()
    for tensor in (q, k, v, sink):
        assert tensor.grad is not None and tensor.grad.dtype == tensor.dtype
        assert (tensor.grad != 0).any() and torch.isfinite(tensor.grad).all()


def test_inputs_are_left_alone(qkv: checks.Operands):
    copies = [tensor.clone() for tensor in qkv]
    flash_attn_func(*qkv, causal=True)
    for tensor, copy in zip(qkv, copies, strict=True):
        checks.assert_same_bits("input", tensor, copy)


# ---- out= ----------------------------------------------------------------------------------------


def test_out_is_written_and_returned(qkv: checks.Operands):
    expected, expected_lse = flash_attn_func(*qkv, return_lse=True)
    buffer = torch.full((4, 12, 6, 20), math.nan, dtype=torch.bfloat16)
    out = buffer[1:3, 2:11, 1:5, 3:19]
    assert flash_attn_func(*qkv, out=out) is out
    checks.assert_same_bits("out", out, expected)
    pair = flash_attn_func(*qkv, out=out, return_lse=True)
    assert pair[0] is out and torch.equal(pair[1], expected_lse)
    out.fill_(math.nan)
    assert buffer.isnan().all(), "something outside out was written"


# ---- Refusals ------------------------------------------------------------------------------------


def test_refusals_are_value_error_and_not_implemented_error(qkv: checks.Operands):
    with pytest.raises(ValueError, match=r"^k.shape\[-1\] is 8, expected 16 \(head_dim of q\)$"):
        flash_attn_func(qkv[0], qkv[1][..., :8], qkv[2])
    with pytest.raises(NotImplementedError, match="float8_e4m3fn: no fp8 kernel exists yet"):
        flash_attn_func(*(tensor.to(torch.float8_e4m3fn) for tensor in qkv))
    with pytest.raises(UnsupportedProblem, match="kernel is Mine, expected None: the CPU has the"):
        flash_attn_func(*qkv, kernel=type("Mine", (), {}))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_is_no_tensor_is_refused_by_name(function: Any, name: str, qkv: checks.Operands):
    operands = dict(zip("qkv", qkv, strict=True), **{name: [1.0]})
    with pytest.raises(InvalidProblem, match=f"^{name} is of type list, expected a torch.Tensor$"):
        function(*operands.values())


def test_values_are_checked_on_the_cpu(qkv: checks.Operands):
    with pytest.raises(InvalidProblem, match=r"seqused_k\[1\] is 12, expected 0 to 11"):
        flash_attn_varlen_func(*qkv, seqused_k=int32(3, 12))


def test_nothing_is_written_by_a_refused_call(qkv: checks.Operands):
    out = torch.full((2, 9, 4, 16), math.nan, dtype=torch.bfloat16)
    with pytest.raises(InvalidProblem):
        flash_attn_varlen_func(*qkv, seqused_k=int32(3, 12), out=out)
    assert out.isnan().all()


# ---- is_supported --------------------------------------------------------------------------------


def test_is_supported_says_yes_on_the_cpu(qkv: checks.Operands):
    answer = is_supported(*qkv, causal=True, softcap=2.0, seqused_k=int32(3, 4))
    assert answer and answer.reason == "" and answer.backend == "reference"


def test_is_supported_says_why_not(qkv: checks.Operands):
    answer = is_supported(*qkv, softcap=-1.0)
    assert not answer and answer.reason == "softcap is -1.0, expected 0 (none) or a positive number"
    answer = is_supported(*qkv, block_mask=object())
    assert not answer and answer.reason.startswith("block_mask is of type object, expected a")
    answer = is_supported(*qkv, kernel=type("Mine", (), {}))
    assert not answer and answer.reason.startswith("kernel is Mine")
    assert not is_supported(qkv[0], qkv[1][..., :8], qkv[2])


def test_is_supported_takes_a_problem():
    facts: dict[str, Any] = {
        "dtype": torch.float32,
        "device": "cpu",
        "batch": 1,
        "seqlen_q": 4,
        "seqlen_k": 4,
        "num_heads_q": 2,
        "num_heads_kv": 1,
        "head_dim": 64,
        "head_dim_v": 64,
    }
    assert is_supported(AttentionProblem(**facts))
    assert is_supported(AttentionProblem(**facts, has_block_mask=True))


def test_is_supported_and_the_call_agree(qkv: checks.Operands):
    for options in ({}, {"causal": True}, {"softcap": -1.0}, {"num_splits": -1}, {"sink": 3}):
        answer = is_supported(*qkv, **options)
        try:
            flash_attn_func(*qkv, **options)
        except (InvalidProblem, UnsupportedProblem) as error:
            assert answer.reason == str(error)
        else:
            assert answer


def test_is_supported_refuses_wrong_calls(qkv: checks.Operands):
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'casual'"):
        is_supported(*qkv, casual=True)
    with pytest.raises(TypeError, match="takes q, k and v, or an AttentionProblem alone"):
        is_supported(qkv[0])
    problem = AttentionProblem(
        dtype=torch.float32,
        device=torch.device("cpu"),
        batch=1,
        seqlen_q=1,
        seqlen_k=1,
        num_heads_q=1,
        num_heads_kv=1,
        head_dim=8,
        head_dim_v=8,
    )
    with pytest.raises(TypeError, match="takes an AttentionProblem alone"):
        is_supported(problem, causal=True)


# ---- reference_mask ------------------------------------------------------------------------------


def test_reference_mask_can_be_printed():
    drawn = reference_mask(3, 5, causal=True)[0, 0].int().tolist()
    assert drawn == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    drawn = reference_mask(3, 5, window_size=(1, 0))[0, 0].int().tolist()
    assert drawn == [[0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    drawn = reference_mask(4, 4, attention_chunk=2)[0, 0].int().tolist()
    assert drawn == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]


def test_reference_mask_of_used_lengths_and_heads():
    mask = reference_mask(
        3,
        4,
        batch=2,
        num_heads=2,
        causal=True,
        mask_mod=lambda b, h, q_idx, kv_idx: kv_idx >= h,
        seqused_q=int32(3, 1),
        seqused_k=int32(2, 4),
    )
    assert mask.shape == (2, 2, 3, 4) and mask.dtype == torch.bool
    assert mask[0, 0].int().tolist() == [[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0]]
    assert mask[0, 1].int().tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0]]
    assert mask[1, 1].int().tolist() == [[0, 1, 1, 1], [0, 0, 0, 0], [0, 0, 0, 0]]


def test_reference_mask_refuses_what_the_functions_refuse():
    with pytest.raises(InvalidProblem, match="window_size is 3, expected a pair"):
        reference_mask(3, 4, window_size=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidProblem, match=r"seqused_k\[0\] is 5, expected 0 to 4"):
        reference_mask(3, 4, seqused_k=int32(5))


# ---- The package ---------------------------------------------------------------------------------


def test_public_names_exist():
    for name in flash_cute.__all__:
        assert getattr(flash_cute, name) is not None
    assert set(flash_cute.__all__) <= set(dir(flash_cute))
    with pytest.raises(AttributeError, match="no attribute 'flash_attn_nothing'"):
        flash_cute.flash_attn_nothing  # noqa: B018 # pyright: ignore[reportAttributeAccessIssue]


# ---- Tensors on a GPU ----------------------------------------------------------------------------


@pytest.fixture
def hopper_qkv(monkeypatch: pytest.MonkeyPatch) -> Iterator[checks.Operands]:
    """Operands on a Hopper GPU that need not exist: refusals come before anything touches it."""
    monkeypatch.setenv("FLASH_CUTE_ARCH", "sm_90a")
    with FakeTensorMode():
        q = torch.empty(2, 9, 4, 64, dtype=torch.bfloat16, device="cuda")
        k = torch.empty(2, 11, 2, 64, dtype=torch.bfloat16, device="cuda")
        yield q, k, torch.empty_like(k)


def test_inputs_that_require_grad_are_refused_on_a_gpu(hopper_qkv: checks.Operands):
    q, k, v = hopper_qkv
    q.requires_grad_()
    answer = is_supported(q, k, v)
    assert not answer and "gradient" in answer.reason and "torch.no_grad()" in answer.reason
    with torch.no_grad():
        assert is_supported(q, k, v)
    assert is_supported(q.detach(), k, v)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_is_no_tensor_is_refused_beside_tensors_on_a_gpu(
    name: str, hopper_qkv: checks.Operands
):
    operands = dict(zip("qkv", hopper_qkv, strict=True), **{name: [1.0]})
    with pytest.raises(InvalidProblem, match=f"^{name} is of type list, expected a torch.Tensor$"):
        flash_attn_func(*operands.values())


def test_what_a_kernel_does_is_supported(hopper_qkv: checks.Operands):
    for options in ({}, {"causal": True}, {"window_size": (-1, 0)}, {"num_splits": 2}):
        assert is_supported(*hopper_qkv, **options).backend == "FlashAttentionForwardSm90"


def test_is_supported_looks_at_the_kernel_asked_for(hopper_qkv: checks.Operands):
    answer = is_supported(*hopper_qkv, kernel=type("Mine", (), {}))
    assert not answer and "Mine" in answer.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_dtypes_are_invalid_on_a_gpu(dtype: torch.dtype, hopper_qkv: checks.Operands):
    answer = is_supported(*(tensor.to(dtype) for tensor in hopper_qkv))
    assert answer.reason.startswith(f"dtype is {dtype}, expected one of torch.float16, torch.bf")


def test_is_supported_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("FLASH_CUTE_ARCH", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    problem = AttentionProblem(
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
        batch=1,
        seqlen_q=1,
        seqlen_k=1,
        num_heads_q=1,
        num_heads_kv=1,
        head_dim=64,
        head_dim_v=64,
    )
    answer = is_supported(problem)
    assert not answer and answer.reason.startswith("there is no GPU to compile for")
    monkeypatch.setenv("FLASH_CUTE_ARCH", "sm_90a")
    assert is_supported(problem)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_a_result_on_a_gpu_never_loses_its_gradient():
    """Also when the same call was made before without gradients, and is remembered."""
    q, k, v = checks.gaussian(checks.Case(head_dim=64), "cuda")
    out = flash_attn_func(q, k, v)
    with pytest.raises(UnsupportedProblem, match=r"torch\.no_grad\(\)"):
        flash_attn_func(q.requires_grad_(), k, v)
    with torch.no_grad():
        checks.assert_same_bits("out", flash_attn_func(q, k, v), out)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here")
def test_a_call_on_a_gpu_is_refused_as_is_supported_says():
    q, k, v = checks.gaussian(checks.Case(head_dim=264), "cuda")
    answer = is_supported(q, k, v)
    assert "head_dim 264" in answer.reason
    with pytest.raises(UnsupportedProblem) as caught:
        flash_attn_func(q, k, v)
    assert str(caught.value) == answer.reason
