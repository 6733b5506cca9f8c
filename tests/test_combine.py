"""flash_attn_combine: against the definition, against attention computed whole, and its kernel."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import time
from typing import Any

import checks
import pytest
import torch
import toy_gpu

from flash_cute import (
    CaptureError,
    InvalidProblem,
    UnsupportedProblem,
    cache,
    cache_info,
    combine,
    compile,
    current,
    flash_attn_combine,
    flash_attn_func,
    flash_attn_varlen_func,
    selection,
)
from flash_cute.arguments import CombineArguments
from flash_cute.combine_plan import MOST_TEAMS, CombineStrides, combine_key, make_combine_plan
from flash_cute.selection import COMBINE_TILE_DIMS, CombineKey

HALF = (torch.float16, torch.bfloat16)
DTYPES = (torch.float32, *HALF)
INF = math.inf


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Parts of attention; batch None is packed."""

    splits: int = 3
    batch: int | None = 2
    rows: int = 37
    heads: int = 3
    dim: int = 64
    dtype: torch.dtype = torch.float32

    def parts(self, device: str = "cpu", seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Random parts; lse spreads over a few units, with seqlen contiguous."""
        source = checks.generator(device, seed)
        batch = () if self.batch is None else (self.batch,)
        shape = (self.splits, *batch, self.rows, self.heads, self.dim)
        flat = (self.splits, *batch, self.heads, self.rows)
        out = torch.randn(shape, generator=source, device=device).to(self.dtype)
        lse = 3 * torch.randn(flat, generator=source, device=device) + 5
        return out, lse.transpose(-1, -2)


def by_definition(parts: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two formulas in float64; parts without a key are left out. lse has heads before rows."""
    lses = lses.double()
    lse = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - lse)
    weights = torch.where(lses == -INF, 0.0, weights)[..., None]
    out = (weights * torch.where(lses[..., None] == -INF, 0.0, parts.double())).sum(0)
    return out, lse.transpose(-1, -2)


def one_by_one(parts: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in float32, part after part, as far as the values are finite."""
    largest = lses.nan_to_num(0.0, 0.0, -1e9).amax(0).clamp(min=-1e8)
    out, total = torch.zeros_like(parts[0], dtype=torch.float32), torch.zeros_like(largest)
    for part, lse in zip(parts, lses, strict=True):
        weight = torch.exp(lse - largest).nan_to_num(0.0, 0.0)
        out += weight[..., None] * torch.where(lse[..., None] == -INF, 0.0, part.float())
        total += weight
    out = torch.where(total[..., None] > 0, out / total[..., None], 0.0)
    return out.nan_to_num(0.0, 0.0, 0.0), (largest + total.log()).transpose(-1, -2)


def assert_combined(got: Any, parts: torch.Tensor, lses: torch.Tensor) -> None:
    """As near to the definition as it is in float32, and NaN and infinities in the same places."""
    out, lse = got
    exact, lowprec = by_definition(parts, lses), one_by_one(parts, lses)
    assert out.shape == parts.shape[1:] and out.is_contiguous()
    assert lse.dtype == torch.float32 and lse.is_contiguous()
    checks.assert_close("out", out, exact[0], lowprec[0])
    checks.assert_close("lse", lse, exact[1], lowprec[1])


def with_empty_parts(parts: torch.Tensor, lses: torch.Tensor) -> None:
    """Parts without a key, with garbage for an output; some rows have no other."""
    generator = torch.Generator().manual_seed(1)
    is_empty = (torch.rand(lses.shape, generator=generator) < 0.4).to(lses.device)
    is_empty[..., 0, :] = True
    lses[is_empty] = -INF
    parts[is_empty] = math.nan
    parts[1:][is_empty[1:]] = INF


def special(parts: torch.Tensor, lses: torch.Tensor) -> None:
    """+inf and NaN among the log-sum-exps, alone and together, and far values."""
    lses[0, ..., 1, :] = INF
    lses[-1, ..., 2, :] = math.nan
    lses[0, ..., 3, :], lses[-1, ..., 3, :] = INF, math.nan
    lses[..., 4, :] = INF
    lses[:, ..., 5, :], lses[0, ..., 5, :] = -INF, math.nan
    lses[..., 6, :] += 1e4
    lses[..., 7, :] -= 1e4
    lses[0, ..., 8, :] += 1e4


CASES = {
    **{f"{n} splits": (Sizes(splits=n), None) for n in (1, 2, 3, 7, 8, 9, 64, 256)},
    **{f"d{d}": (Sizes(dim=d, splits=5), None) for d in (8, 24, 96, 192, 256, 264, 512)},
    **{f"{dtype}": (Sizes(dtype=dtype), None) for dtype in HALF},
    "half d8": (Sizes(dim=8, dtype=torch.float16, splits=19), None),
    "half d512": (Sizes(dim=512, dtype=torch.bfloat16, splits=19), None),
    "packed": (Sizes(batch=None, rows=101), None),
    "one row": (Sizes(batch=1, rows=1, heads=1), None),
    "decode": (Sizes(batch=3, rows=1, heads=8, dim=128, splits=33), None),
    "empty parts": (Sizes(splits=4), with_empty_parts),
    "empty parts, d16": (Sizes(splits=20, dim=16), with_empty_parts),
    "empty half parts": (Sizes(splits=70, dtype=torch.float16), with_empty_parts),
    "special": (Sizes(splits=4), special),
    "special, d8": (Sizes(splits=12, dim=8, dtype=torch.bfloat16), special),
}


@pytest.mark.parametrize("name", CASES)
def test_definition(name: str):
    sizes, change = CASES[name]
    check_definition("cpu", sizes, change)


def check_definition(device: str, sizes: Sizes, change: Any) -> None:
    parts, lses = sizes.parts(device)
    if change is not None:
        change(parts, lses)
    for out_dtype in (None, *DTYPES):
        got = flash_attn_combine(parts, lses, out_dtype=out_dtype)
        assert got[0].dtype == (out_dtype or parts.dtype)
        assert_combined(got, parts, lses)


def test_one_part_is_itself():
    check_one_part("cpu")


def check_one_part(device: str) -> None:
    parts, lses = Sizes(splits=1).parts(device)
    out, lse = flash_attn_combine(parts, lses)
    checks.assert_same_bits("out", out, parts[0])
    checks.assert_same_bits("lse", lse, lses[0].transpose(-1, -2).contiguous())


@pytest.mark.parametrize("causal", [False, True])
def test_attention_in_parts_is_attention(causal: bool):
    q, k, v = checks.gaussian(checks.Case(2, 4, 2, 50, 90, 32, dtype=torch.float32))
    whole = flash_attn_func(q, k, v, causal=causal, return_lse=True)
    results = []
    for begin, end in ((0, 40), (40, 41), (41, 90)):
        shown = lambda b, h, i, j, begin=begin: j + begin <= i + 40
        options = {"mask_mod": shown} if causal else {}
        keys = (k[:, begin:end], v[:, begin:end])
        results.append(flash_attn_func(q, *keys, return_lse=True, **options))
    parts, lses = (torch.stack(each) for each in zip(*results, strict=True))
    assert (lses == -INF).any() == causal
    got = flash_attn_combine(parts, lses.transpose(-1, -2))
    for one, other in zip(got, whole, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=2e-6)


def test_packed_attention_in_parts_is_attention():
    cu_seqlens = torch.tensor([0, 5, 5, 30], dtype=torch.int32)
    q, k, v = (torch.randn(30, 2, 16) for _ in range(3))
    lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    lengths |= {"max_seqlen_q": 25, "max_seqlen_k": 25, "return_lse": True}
    whole = flash_attn_varlen_func(q, k, v, **lengths)
    masks = (lambda b, h, i, j: j < 7, lambda b, h, i, j: j >= 7)
    results = [flash_attn_varlen_func(q, k, v, mask_mod=mask, **lengths) for mask in masks]
    parts, lses = (torch.stack(each) for each in zip(*results, strict=True))
    got = flash_attn_combine(parts, lses.transpose(-1, -2), cu_seqlens=cu_seqlens)
    for one, other in zip(got, whole, strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=2e-6)


def check_strides(device: str) -> None:
    sizes = Sizes(splits=4, dim=40)
    parts, lses = sizes.parts(device)
    expected = flash_attn_combine(parts, lses)
    wide = torch.full((*parts.shape[:-1], 96), math.nan, device=device)
    wide[..., 16:56] = parts
    moved = torch.full((parts.numel() + 1,), math.nan, device=device)[1:].view_as(parts)
    moved.copy_(parts)
    inputs = {
        "contiguous lse": (parts, lses.contiguous()),
        "slice": (wide[..., 16:56], lses),
        "heads first": (parts.transpose(2, 3).contiguous().transpose(2, 3), lses),
        "splits last": (parts, lses.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)),
        "splits inside": (parts.movedim(0, 2).contiguous().movedim(2, 0), lses),
        "misaligned": (moved, lses),
        "misaligned slice": (wide.clone()[..., 1:41].copy_(parts), lses),
    }
    for name, each in inputs.items():
        for _ in range(2):
            got = flash_attn_combine(*each)
            checks.assert_same_bits(name, got[0], expected[0])
            checks.assert_same_bits(name, got[1], expected[1])
    same = torch.zeros(1, 1, 1, 1, device=device).expand(lses.shape)
    mean, lse = flash_attn_combine(parts[:1].expand(parts.shape), same)
    torch.testing.assert_close(mean, parts[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(4)))


def test_strides():
    check_strides("cpu")


def check_out(device: str) -> None:
    parts, lses = Sizes(splits=2, dim=64).parts(device)
    expected, expected_lse = flash_attn_combine(parts, lses, out_dtype=torch.bfloat16)
    like = {"dtype": torch.bfloat16, "device": device}
    wide = torch.full((*expected.shape[:-1], 128), 7.0, **like)
    moved = torch.empty(expected.numel() + 1, **like)[1:].view_as(expected)
    for out in (torch.empty_like(expected), wide[..., 32:96], wide[..., 1:65], moved):
        for _ in range(2):
            out.fill_(math.nan)
            got, lse = flash_attn_combine(parts, lses, out)
            assert got is out
            checks.assert_same_bits("out", out, expected)
            checks.assert_same_bits("lse", lse, expected_lse)
            out.fill_(math.nan)
            assert flash_attn_combine(parts, lses, out=out, return_lse=False) is out
            checks.assert_same_bits("out", out, expected)
    assert (wide[..., 96:] == 7).all()


def test_out():
    check_out("cpu")


def lengths_of(is_packed: bool, has_seqused: bool, device: str):
    """(sizes, arguments, which rows are written)."""
    seqused = torch.tensor([0, 9, 30, 1, 0], dtype=torch.int32)
    if not is_packed:
        written = torch.arange(37) < seqused[:, None]
        return Sizes(batch=5), {"seqused": seqused.to(device)}, written.to(device)
    cu_seqlens = torch.tensor([0, 0, 12, 42, 43, 60], dtype=torch.int32)
    ends = cu_seqlens[:-1] + seqused if has_seqused else cu_seqlens[1:]
    rows = torch.arange(66)
    written = ((rows >= cu_seqlens[:-1, None]) & (rows < ends[:, None])).any(0)
    arguments = {"cu_seqlens": cu_seqlens.to(device)}
    if has_seqused:
        arguments["seqused"] = seqused.to(device)
    return Sizes(batch=None, rows=66), arguments, written.to(device)


LENGTHS = [(False, True), (True, False), (True, True)]


def check_lengths(device: str, is_packed: bool, has_seqused: bool, dim: int) -> None:
    sizes, arguments, written = lengths_of(is_packed, has_seqused, device)
    parts, lses = dataclasses.replace(sizes, dim=dim).parts(device)
    parts[:, ~written], lses[:, ~written] = math.nan, math.nan
    exact, exact_lse = by_definition(parts, lses)
    out = torch.full(parts.shape[1:], 7.0, device=device)
    got, lse = flash_attn_combine(parts, lses, out, **arguments)
    assert got is out and (out[~written] == 7).all()
    checks.assert_close("out", out[written], exact[written], exact[written])
    used = (each.transpose(-1, -2)[written] for each in (lse, exact_lse, exact_lse))
    checks.assert_close("lse", *used)
    fresh, lse = flash_attn_combine(parts, lses, **arguments)
    checks.assert_same_bits("out", fresh[written], out[written])
    if device == "cpu":
        assert (fresh[~written] == 0).all()
        assert (lse.transpose(-1, -2)[~written] == -INF).all()


@pytest.mark.parametrize(("is_packed", "has_seqused"), LENGTHS)
def test_lengths(is_packed: bool, has_seqused: bool):
    check_lengths("cpu", is_packed, has_seqused, 64)


def check_empty(device: str) -> None:
    for changes in ({"batch": 0}, {"rows": 0}, {"heads": 0}):
        parts, lses = dataclasses.replace(Sizes(), **changes).parts(device)
        out, lse = flash_attn_combine(parts, lses)
        assert out.shape == parts.shape[1:] and lse.shape == lses.transpose(-1, -2).shape[1:]
    parts, lses = Sizes(batch=None).parts(device)
    cu_seqlens = torch.zeros(1, dtype=torch.int32, device=device)
    out = torch.ones(parts.shape[1:], device=device)
    flash_attn_combine(parts, lses, out, cu_seqlens=cu_seqlens, seqused=cu_seqlens[:0])
    assert (out == 1).all()


def test_empty():
    check_empty("cpu")


def test_cpu_takes_any_dim_and_float64_and_differentiates():
    parts, lses = Sizes(dim=5, rows=3, dtype=torch.float64).parts()
    lses = lses.double().contiguous()
    assert_combined(flash_attn_combine(parts, lses), parts, lses)
    with_empty_parts(parts, lses)
    parts, lses = parts.requires_grad_(), lses.requires_grad_()
    out, lse = flash_attn_combine(parts, lses)
    (out.sum() + torch.where(lse == -INF, 0.0, lse).sum()).backward()
    for grad in (parts.grad, lses.grad):
        assert grad is not None and torch.isfinite(grad).all() and grad.any()
    smooth = Sizes(splits=2, batch=None, rows=2, heads=1, dim=3, dtype=torch.float64).parts()
    inputs = [tensor.double().contiguous().requires_grad_() for tensor in smooth]
    # Not through lse, which is float32.
    assert torch.autograd.gradcheck(lambda *x: flash_attn_combine(*x, return_lse=False), inputs)


def wrong_calls() -> dict[str, tuple[dict[str, Any], str]]:
    parts, lses = Sizes().parts()
    return {
        "no tensor": ({"out_partial": [1]}, "out_partial is of type list, expected a torch.Tensor"),
        "no lse": ({"lse_partial": None}, "lse_partial is of type NoneType, expected a"),
        "rank": ({"out_partial": parts[0, 0]}, "out_partial.dim() is 3, expected 4 or 5 ((num_s"),
        "splits": (
            {"out_partial": parts[:1].expand(257, -1, -1, -1, -1)},
            "out_partial.shape[0] is 257, expected 1 to 256 (num_splits)",
        ),
        "no split": ({"out_partial": parts[:0]}, "out_partial.shape[0] is 0, expected 1 to 256"),
        "dtype": ({"out_partial": parts.int()}, "out_partial.dtype is torch.int32, expected one"),
        "lse dtype": ({"lse_partial": lses.half()}, "lse_partial.dtype is torch.float16, expected"),
        "lse double": ({"lse_partial": lses.double()}, "lse_partial.dtype is torch.float64, exp"),
        "lse layout": (
            {"lse_partial": lses.transpose(-1, -2)},
            "lse_partial.shape is (3, 2, 3, 37), expected (3, 2, 37, 3)",
        ),
        "last stride": (
            {"out_partial": parts.transpose(-1, -2).contiguous().transpose(-1, -2)},
            "out_partial.stride(-1) is 3, expected 1",
        ),
        "device": ({"lse_partial": lses.to("meta")}, "lse_partial.device is meta, expected cpu"),
        "meta": (
            {"out_partial": parts.to("meta"), "lse_partial": lses.to("meta")},
            "out_partial.device is meta, expected cuda or cpu",
        ),
        "out shape": ({"out": parts[0, :1]}, "out.shape is (1, 37, 3, 64), expected (2, 37, 3, 6"),
        "out stride": (
            {"out": torch.zeros(64).expand(2, 37, 3, 64)},
            "out.stride(0) is 0, expected nonzero",
        ),
        "out dtype": ({"out": parts[0].int()}, "out_dtype is torch.int32, expected one of"),
        "two dtypes": (
            {"out": parts[1].half(), "out_dtype": torch.float32},
            "out_dtype is torch.float32, expected torch.float16 (dtype of out)",
        ),
        "out in place": (
            {"out_partial": parts, "out": parts[0]},
            "out is the memory of out_partial, expected memory",
        ),
        "no dtype": ({"out_dtype": "half"}, "out_dtype is half, expected one of torch.float32"),
        "grad": (
            {"out_partial": parts.clone().requires_grad_(), "out": torch.empty_like(parts[0])},
            "out is given while an argument requires grad",
        ),
    }


def wrong_lengths() -> dict[str, tuple[dict[str, Any], str]]:
    parts, lses = Sizes(batch=None).parts()
    used = torch.zeros(2, dtype=torch.int32)
    packed = {"out_partial": parts, "lse_partial": lses}
    starts = lambda *rows: packed | {"cu_seqlens": torch.tensor(rows, dtype=torch.int32)}
    return {
        "packed rank": ({"cu_seqlens": used}, "out_partial.dim() is 5, expected 4 ((num_splits, t"),
        "seqused dtype": ({"seqused": used.long()}, "seqused.dtype is torch.int64, expected"),
        "seqused rank": ({"seqused": used[None]}, "seqused.dim() is 2, expected 1"),
        "seqused batch": ({"seqused": used[:1]}, "seqused.shape[0] is 1, expected 2 (batch of"),
        "seqused value": ({"seqused": used + 38}, "seqused[0] is 38, expected 0 to 37 (length of"),
        "seqused alone": (
            packed | {"seqused": used},
            "seqused is given with packed parts and without cu_seqlens",
        ),
        "seqused packed": (
            starts(0, 9, 37) | {"seqused": used + 10},
            "seqused[0] is 10, expected 0 to 9 (length of the sequence)",
        ),
        "cu_seqlens": (starts(1, 2), "cu_seqlens[0] is 1, expected 0"),
        "cu_seqlens none": (starts(), "cu_seqlens.shape[0] is 0, expected at least 1"),
        "cu_seqlens end": (starts(0, 38), "cu_seqlens[-1] is 38, expected at most 37"),
        "cu_seqlens order": (
            starts(0, 9, 8),
            "cu_seqlens is [0, 9, 8], expected an ascending sequence",
        ),
    }


WRONG = wrong_calls() | wrong_lengths()


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_refused(changes: dict[str, Any], message: str):
    parts, lses = Sizes().parts()
    with pytest.raises(InvalidProblem) as caught:
        flash_attn_combine(**{"out_partial": parts, "lse_partial": lses} | changes)
    assert str(caught.value).startswith(message)


# ---- Kernels without a GPU -----------------------------------------------------------------------

DTYPE_NAMES = ("fp32", "bf16", "fp16")
COMPILED = [
    *((dtype, "bf16", tile, False, False) for dtype in DTYPE_NAMES for tile in COMBINE_TILE_DIMS),
    *((dtype, "fp32", tile, False, False) for dtype in DTYPE_NAMES for tile in (8, 128, 512)),
    *(("fp32", "fp16", 128, *lengths) for lengths in LENGTHS),
]


@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("shape", COMPILED, ids=str)
def test_kernels_compile_without_spills(shape: Any, arch: str):
    pytest.importorskip("cutlass")
    kernel = selection.kernel_for(CombineKey(arch, *shape))
    report = compile.inspect_kernel(kernel, arch)
    if report.missing:
        pytest.skip("; ".join(report.missing))
    checks.assert_no_spills(report)
    assert report.registers is not None and report.registers <= 64
    assert f".entry {kernel.name}" in report.ptx


@pytest.mark.compile
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_loads_are_asynchronous_and_16_bytes_wide(dtype: str):
    pytest.importorskip("cutlass")
    kernel = selection.kernel_for(CombineKey("sm_90a", dtype, "fp16", 64))
    ptx = compile.inspect_kernel(kernel, "sm_90a").ptx
    # Eight before the loop and eight in it; the only other loads are of single log-sum-exps.
    assert ptx.count("cp.async.cg.shared.global") == 16
    assert "ld.shared.v4" in ptx and "ld.global.v" not in ptx
    assert len(re.findall(r"bar\.sync|barrier", ptx)) == 1  # where teams meet


# ---- Without a kernel ----------------------------------------------------------------------------


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch):
    """The host side of a Hopper GPU; see toy_gpu."""
    launches = toy_gpu.install(monkeypatch)
    monkeypatch.setattr(combine, "_plans", {})
    monkeypatch.setattr(current, "current_device", lambda: 0)
    return launches


def on_gpu(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [toy_gpu.on_gpu(tensor) for tensor in tensors]


def test_launch_arguments(toy: toy_gpu.Launches):
    parts, lses = on_gpu(*Sizes(splits=4, dim=40).parts())
    for _ in range(2):
        out, lse = flash_attn_combine(parts, lses, out_dtype=torch.bfloat16)
        assert out.dtype == torch.bfloat16 and out.shape == parts.shape[1:]
        assert lse.shape == (2, 3, 37) and lse.dtype == torch.float32
        args = CombineArguments(*toy.arguments)
        tensors = (parts, lses, out, lse)
        assert args[:6] == (*(tensor.data_ptr() for tensor in tensors), 0, 0)
        assert args[7:14] == (4, 2, 37, 3, 40, 2, 1)
        assert args[14:18] == parts.stride()[:-1] and args[18:22] == lses.stride()
        assert args[22:25] == out.stride()[:-1]
        assert args[25:28] == (lse.stride(0), lse.stride(2), lse.stride(1)) and args.stream == 0
    assert toy.looked_up == [CombineKey("sm_90a", "fp32", "bf16", 64)]
    flash_attn_combine(parts, lses, return_lse=False)
    assert CombineArguments(*toy.arguments).lse == 0
    assert toy.looked_up[1:] == [CombineKey("sm_90a", "fp32", "fp32", 64)]


def test_packed_launch_arguments(toy: toy_gpu.Launches):
    sizes, lengths, _ = lengths_of(True, True, "cpu")
    parts, lses, cu_seqlens, seqused = on_gpu(*sizes.parts(), *lengths.values())
    out, lse = flash_attn_combine(parts, lses, cu_seqlens=cu_seqlens, seqused=seqused)
    args = CombineArguments(*toy.arguments)
    assert (args.cu_seqlens, args.seqused) == (cu_seqlens.data_ptr(), seqused.data_ptr())
    assert args[7:13] == (3, 1, 66, 3, 64, 5) and lse.shape == (3, 66)
    strides = args._asdict()
    assert strides["out_partial_stride_split"] == parts.stride(0)
    assert strides["lse_partial_stride_seqlen"] == lses.stride(1)
    assert (strides["lse_stride_seqlen"], strides["lse_stride_head"]) == (1, 66)
    assert strides["out_stride_seqlen"] == out.stride(0)
    (key,) = toy.looked_up
    assert key == CombineKey("sm_90a", "fp32", "fp32", 64, is_packed=True, has_seqused=True)


def test_repeated_calls_are_told_apart(toy: toy_gpu.Launches):
    parts, lses = on_gpu(*Sizes(splits=4).parts())
    seqused = toy_gpu.on_gpu(torch.zeros(2, dtype=torch.int32))
    out = toy_gpu.on_gpu(torch.empty(parts.shape[1:]))
    calls = [
        ((parts, lses), {}),
        ((parts, lses), {"out_dtype": torch.float16}),
        ((parts, lses), {"return_lse": False}),
        ((parts, lses), {"seqused": seqused}),
        ((parts, lses, out), {}),
        (on_gpu(parts[:3], lses[:3]), {}),
        (on_gpu(parts, lses.contiguous()), {}),
        (on_gpu(parts.half(), lses), {}),
    ]
    first = []
    for args, options in calls:
        flash_attn_combine(*args, **options)
        first.append(toy.arguments[6:])
    assert len(toy.looked_up) == len(calls)
    for (args, options), expected in zip(calls, first, strict=True):
        flash_attn_combine(*args, **options)
        assert toy.arguments[6:] == expected
    assert len(toy.looked_up) == len(calls), "repeated calls go the short way"


def test_what_the_kernel_cannot_read_is_copied(toy: toy_gpu.Launches):
    parts, lses = Sizes(splits=4).parts()
    moved = toy_gpu.on_gpu(torch.empty(parts.numel() + 1)[1:].view_as(parts).copy_(parts))
    out = toy_gpu.on_gpu(torch.zeros(parts[0].numel() + 1)[1:].view(parts.shape[1:]))
    for _ in range(2):
        got, _ = flash_attn_combine(moved, toy_gpu.on_gpu(lses), out)
        args = CombineArguments(*toy.arguments)
        assert got is out and args.out_partial % 16 == 0 == args.out % 16
        assert args.out_partial != moved.data_ptr() and args.out != out.data_ptr()
    assert combine._plans == {}


def test_gpu_refusals_come_before_a_compile(toy: toy_gpu.Launches):
    def refused(sizes: Sizes, match: str, error: Any = UnsupportedProblem, **options: Any):
        with pytest.raises(error, match=match):
            flash_attn_combine(*on_gpu(*sizes.parts()), **options)

    refused(Sizes(dim=20), r"shape\[-1\] is 20, expected a multiple of 8 up to 512.*the CPU takes")
    refused(Sizes(dim=520), "is 520, expected a multiple of 8 up to 512")
    refused(Sizes(dtype=torch.float64), "out_partial.dtype is torch.float64", InvalidProblem)
    refused(Sizes(), "out_dtype is torch.float64", InvalidProblem, out_dtype=torch.float64)
    parts, lses = on_gpu(*Sizes().parts())
    for needs, other in ((parts, lses), (lses, parts)):
        needs.requires_grad_()
        pair = (needs, other) if needs is parts else (other, needs)
        with pytest.raises(UnsupportedProblem, match="requires grad and the combine kernel"):
            flash_attn_combine(*pair)
        with torch.no_grad():
            flash_attn_combine(*pair)
        needs.requires_grad_(False)
    assert len(toy.launched) == 2
    with pytest.raises(UnsupportedProblem, match="rows .* at most 2147482624: split it"):
        strides = CombineStrides((0,) * 4, (0,) * 4, (0,) * 3, (0,) * 3)
        make_combine_plan(lambda *args: None, (2, 2**15, 2**10, 2**6, 8), strides)


def test_nothing_is_launched_where_there_is_nothing(toy: toy_gpu.Launches):
    parts, lses = on_gpu(*Sizes(rows=0).parts())
    out, lse = flash_attn_combine(parts, lses)
    assert out.shape == (2, 0, 3, 64) and lse.shape == (2, 3, 0) and toy.looked_up == []


def test_a_first_call_in_a_capture_is_refused(
    toy: toy_gpu.Launches, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(current, "is_capturing", lambda: True)
    monkeypatch.setattr(cache, "_memory", {})
    with pytest.raises(CaptureError, match="CombineKey"):
        flash_attn_combine(*on_gpu(*Sizes().parts()))


def test_plans_take_plain_integers():
    calls = []
    strides = CombineStrides((1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11), (12, 13, 14))
    made = make_combine_plan(lambda *args: calls.append(args), (7, 2, 1, 8, 128), strides)
    made.run((16, 32, 48, 64, 0, 0), 99)
    numbers = (7, 2, 1, 8, 128, 2, 1, *range(1, 15))
    assert calls == [(16, 32, 48, 64, 0, 0, *numbers, 99)]
    key = combine_key("sm_80", torch.bfloat16, torch.float16, 72, has_seqused=True)
    assert key == CombineKey("sm_80", "bf16", "fp16", 128, has_seqused=True)


def test_host_time_of_a_repeated_call(toy: toy_gpu.Launches):
    """The toy allocates and launches in Python: this bounds the rest, with room for a busy host."""
    parts, lses = on_gpu(*Sizes().parts())
    flash_attn_combine(parts, lses)
    best = INF
    for _ in range(50):
        begin = time.perf_counter()
        for _ in range(20):
            flash_attn_combine(parts, lses)
        best = min(best, (time.perf_counter() - begin) / 20)
    assert best < 30e-6, f"{best * 1e6:.1f} µs"


@pytest.mark.compile
def test_kernels_are_cached_and_take_what_the_host_passes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
):
    """The real kernel behind the toy's tensors: it is compiled once, and fails at the driver."""
    pytest.importorskip("cutlass")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: the tests below run on it")
    executable = compile.executable
    toy_gpu.install(monkeypatch)
    monkeypatch.setattr(compile, "executable", executable)
    monkeypatch.setattr(combine, "_plans", {})
    monkeypatch.setattr(cache, "_memory", {})
    monkeypatch.setattr(current, "current_device", lambda: 0)
    monkeypatch.setenv("FLASH_CUTE_CACHE_DIR", str(tmp_path / "kernels"))
    before = cache_info().compiles
    for sizes in (Sizes(), Sizes(), Sizes(splits=9, dim=40, batch=None, rows=5)):
        with pytest.raises(RuntimeError, match="cudaErrorInsufficientDriver|cudaErrorNoDevice"):
            flash_attn_combine(*on_gpu(*sizes.parts()))
    assert cache_info().compiles - before == 1


# ---- On a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_definition_on_a_gpu(any_gpu, name: str):
    sizes, change = CASES[name]
    check_definition("cuda", sizes, change)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [*range(8, 136, 8), 160, 256, 320, 504])
def test_dims_on_a_gpu(any_gpu, dtype: torch.dtype, dim: int):
    for splits in (2, 17):
        check_definition("cuda", Sizes(dim=dim, dtype=dtype, splits=splits), with_empty_parts)


@pytest.mark.gpu
def test_one_part_is_itself_on_a_gpu(any_gpu):
    check_one_part("cuda")


@pytest.mark.gpu
def test_strides_and_out_on_a_gpu(any_gpu):
    check_strides("cuda")
    check_out("cuda")
    check_empty("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(("is_packed", "has_seqused"), LENGTHS)
@pytest.mark.parametrize("dim", [8, 64, 512])
def test_lengths_on_a_gpu(any_gpu, is_packed: bool, has_seqused: bool, dim: int):
    check_lengths("cuda", is_packed, has_seqused, dim)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [8, 64, 128, 512])
def test_teams_of_a_row_come_to_the_same(any_gpu, monkeypatch: pytest.MonkeyPatch, dim: int):
    """As attention on split keys has it: fewer parts than teams, more, and many."""
    made = functools.partial(make_combine_plan, teams=MOST_TEAMS)
    monkeypatch.setattr(combine.combine_plan, "make_combine_plan", made)
    monkeypatch.setattr(combine, "_plans", {})
    for splits, rows, dtype in ((2, 1, DTYPES[0]), (17, 33, torch.bfloat16), (130, 5, DTYPES[0])):
        sizes = Sizes(dim=dim, dtype=dtype, splits=splits, rows=rows)
        check_definition("cuda", sizes, with_empty_parts)
    for is_packed, has_seqused in LENGTHS:
        check_lengths("cuda", is_packed, has_seqused, dim)


@pytest.mark.gpu
def test_rows_depend_on_their_own_parts_only(any_gpu):
    parts, lses = Sizes(splits=40, rows=300, dim=16).parts("cuda")
    out, lse = flash_attn_combine(parts, lses)
    alone = flash_attn_combine(parts[:, 1:, 77:78], lses[:, 1:, 77:78])
    checks.assert_same_bits("out", alone[0], out[1:, 77:78])
    checks.assert_same_bits("lse", alone[1], lse[1:, :, 77:78].contiguous())
    # Parts without a key behind the others change no bit.
    more = torch.full((9, *lses.shape[1:]), -INF, device="cuda")
    longer = torch.cat([parts, torch.full_like(parts[:9], math.nan)]), torch.cat([lses, more])
    checks.assert_same_bits("out", flash_attn_combine(*longer)[0], out)


@pytest.mark.gpu
def test_splits_and_lengths_never_recompile(any_gpu):
    flash_attn_combine(*Sizes(splits=3).parts("cuda"))
    before = cache_info().compiles
    for splits, rows in ((1, 5), (100, 33), (256, 1)):
        flash_attn_combine(*Sizes(splits=splits, rows=rows, dim=40).parts("cuda"))
    assert cache_info().compiles == before


@pytest.mark.gpu
def test_large_on_a_gpu(any_gpu):
    """More than 2**31 elements of parts: offsets are 64 bits wide."""
    sizes = Sizes(splits=5, batch=1, rows=2**16, heads=16, dim=512, dtype=torch.float16)
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("too little memory")
    parts, lses = sizes.parts("cuda")
    out, lse = flash_attn_combine(parts, lses)
    for rows in (slice(0, 50), slice(2**16 - 50, 2**16)):
        some = (parts[:, :, rows], lses[:, :, rows])
        assert_combined((out[:, rows], lse[..., rows].contiguous()), *some)


@pytest.mark.gpu
def test_graphs_replay_it(any_gpu):
    parts, lses = Sizes().parts("cuda")
    flash_attn_combine(parts, lses)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = flash_attn_combine(parts, lses)
    for seed in (1, 2):
        for tensor, fresh in zip((parts, lses), Sizes().parts("cuda", seed), strict=True):
            tensor.copy_(fresh)
        graph.replay()
        assert_combined(got, parts, lses)


@pytest.mark.gpu
def test_a_first_call_in_a_capture_is_refused_on_a_gpu(any_gpu, monkeypatch: pytest.MonkeyPatch):
    parts, lses = Sizes(dim=200, dtype=torch.float16).parts("cuda")
    monkeypatch.setattr(cache, "_memory", {})
    monkeypatch.setattr(combine, "_plans", {})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(CaptureError, match="call it once"):
            flash_attn_combine(parts, lses)
    graph.replay()
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_side_streams_on_a_gpu(any_gpu):
    parts, lses = Sizes(rows=1000).parts("cuda")
    expected = flash_attn_combine(parts, lses)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(1_000_000)
        late = parts.clone()  # wrong if the kernel does not wait for this stream
        got = flash_attn_combine(late, lses)
    torch.cuda.synchronize()
    checks.assert_same_bits("out", got[0], expected[0])
