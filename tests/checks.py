"""What every numerical test shares: cases, inputs, an independent definition, the tolerance rule.

The rule, for outputs, log-sum-exps and gradients alike::

    max|got - ref| <= 2 * max|lowprec - ref| + floor

``ref`` is float64, ``lowprec`` is the same math with products in the dtype of the inputs, and
``floor`` is one rounding of the result's dtype at the largest reference value. NaN and infinities
must be in the same places.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from flash_cute import reference
from flash_cute.problem import DENSE, Lengths, Options, attention_request

DTYPE_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}


# ---- Cases ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """One dense problem size; its id reads like b2-hq8-hkv2-sq113-sk203-d128-bf16-causal."""

    batch: int = 1
    num_heads_q: int = 2
    num_heads_kv: int = 2
    seqlen_q: int = 128
    seqlen_k: int = 128
    head_dim: int = 64
    head_dim_v: int | None = None  # None: the same as head_dim
    dtype: torch.dtype = torch.bfloat16
    causal: bool = False

    @property
    def dim_v(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def id(self) -> str:
        dims = (
            f"d{self.head_dim}" if self.dim_v == self.head_dim else f"d{self.head_dim}v{self.dim_v}"
        )
        parts = [
            f"b{self.batch}",
            f"hq{self.num_heads_q}",
            f"hkv{self.num_heads_kv}",
            f"sq{self.seqlen_q}",
            f"sk{self.seqlen_k}",
            dims,
            DTYPE_NAMES[self.dtype],
        ]
        return "-".join(parts + ["causal"] * self.causal)

    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Shapes of q, k and v."""
        return (
            (self.batch, self.seqlen_q, self.num_heads_q, self.head_dim),
            (self.batch, self.seqlen_k, self.num_heads_kv, self.head_dim),
            (self.batch, self.seqlen_k, self.num_heads_kv, self.dim_v),
        )


def replace(case: Case, **changes: Any) -> Case:
    """A case with some fields changed."""
    return dataclasses.replace(case, **changes)


Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


# ---- Inputs --------------------------------------------------------------------------------------


def generator(device: str, seed: int) -> torch.Generator:
    """A seeded generator of the device."""
    return torch.Generator(device=device).manual_seed(seed)


def gaussian(case: Case, device: str = "cpu", seed: int = 0) -> Operands:
    """q, k and v from a normal distribution."""
    source = generator(device, seed)
    q, k, v = (
        torch.randn(shape, generator=source, device=device, dtype=torch.float32).to(case.dtype)
        for shape in case.shapes()
    )
    return q, k, v


def _outliers(case: Case, device: str) -> Operands:
    """A few channels and a few tokens carry values far above the rest, as in trained models."""
    q, k, v = gaussian(case, device)
    q[..., 3::61] *= 8
    k[..., 3::61] *= 16
    k[:, ::97] *= 4
    v[:, 5::113] *= 64
    return q, k, v


def _one_hot(case: Case, device: str) -> Operands:
    """Each token is one unit vector: every logit is one of two values, many of them tied."""
    q, k, v = gaussian(case, device)
    eye = 8 * torch.eye(case.head_dim, device=device, dtype=case.dtype)
    q[:] = eye[torch.arange(case.seqlen_q, device=device) % case.head_dim][None, :, None]
    k[:] = eye[torch.arange(case.seqlen_k, device=device) % case.head_dim][None, :, None]
    return q, k, v


def _constant(case: Case, device: str) -> Operands:
    """All values equal: the output is v, whatever the weights."""
    q, k, v = gaussian(case, device)
    q.fill_(0.5)
    k.fill_(0.5)
    v.fill_(1.5)
    return q, k, v


def _zero_query(case: Case, device: str) -> Operands:
    """All logits 0: the output is the mean of the visible v, so one key too many or few shows."""
    q, k, v = gaussian(case, device)
    q.zero_()
    return q, k, v


def _edges(case: Case, device: str) -> Operands:
    """Each query attends to one key: the last causally visible one, or the first hidden one.

    Keys are random sign vectors and a query is a multiple of the key it aims at, so a mask that is
    off by one moves nearly the whole weight to another value.
    """
    q, k, v = gaussian(case, device)
    signs = torch.sign(k.float())
    k[:] = torch.where(signs == 0, 1.0, signs).to(case.dtype)
    if case.seqlen_k:
        rows = torch.arange(case.seqlen_q, device=device)
        aim = rows + case.seqlen_k - case.seqlen_q + rows % 2
        aim = aim.clamp(0, case.seqlen_k - 1)
        heads = torch.arange(case.num_heads_q, device=device)
        heads = heads // (case.num_heads_q // case.num_heads_kv)
        q[:] = (k[:, aim][:, :, heads].float() * (40 / math.sqrt(case.head_dim))).to(case.dtype)
    return q, k, v


def _logits(case: Case, device: str, query: torch.Tensor, key: torch.Tensor) -> Operands:
    """Inputs whose scaled logits are query[i] * key[j], with everything in the first channel."""
    q, k, v = gaussian(case, device)
    q.zero_()
    k.zero_()
    q[..., 0] = (query * math.sqrt(case.head_dim)).to(case.dtype)[None, :, None]
    k[..., 0] = key.to(case.dtype)[None, :, None]
    return q, k, v


def _huge(case: Case, device: str) -> Operands:
    """Logits of +1e4 and -1e4 mixed in every row."""
    source = generator(device, 1)
    query = torch.randint(2, (case.seqlen_q,), generator=source, device=device) * 2 - 1
    key = torch.randint(2, (case.seqlen_k,), generator=source, device=device) * 2 - 1
    return _logits(case, device, 100.0 * query, 100.0 * key)


def _very_negative(case: Case, device: str) -> Operands:
    """All logits near -2.4e5 (float16: -3e4): a finite value that stands for -inf would win."""
    size = 240_000.0 if case.dtype == torch.bfloat16 else 30_000.0
    query = torch.full((case.seqlen_q,), 100.0, device=device)
    return _logits(case, device, query, query.new_full((case.seqlen_k,), -size / 100.0))


def _staircase(case: Case, device: str) -> Operands:
    """Logits rise by 5 every 32 keys for even queries and fall for odd ones.

    The running maximum rises by less than a factor 2^8 at a time, and in the end by far more.
    """
    query = 1.0 - 2.0 * (torch.arange(case.seqlen_q, device=device) % 2)
    steps = torch.arange(case.seqlen_k, device=device) // 32
    return _logits(case, device, query, 5.0 * steps)


HOSTILE: dict[str, Callable[[Case, str], Operands]] = {
    "outliers": _outliers,
    "one_hot": _one_hot,
    "constant": _constant,
    "zero_query": _zero_query,
    "edges": _edges,
    "huge": _huge,
    "very_negative": _very_negative,
    "staircase": _staircase,
}


# ---- Layouts -------------------------------------------------------------------------------------


def _inside(tensor: torch.Tensor, shape: Sequence[int], index: tuple[slice, ...]) -> torch.Tensor:
    """The same values as a view into a NaN-filled buffer."""
    buffer = torch.full(tuple(shape), float("nan"), dtype=tensor.dtype, device=tensor.device)
    view = buffer[index]
    view.copy_(tensor)
    return view


def _padded(tensor: torch.Tensor, by: int) -> torch.Tensor:
    """Rows longer than head_dim, with NaN between them."""
    *lead, dim = tensor.shape
    return _inside(tensor, (*lead, dim + by), (..., slice(0, dim)))


def _fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Operands:
    """Slices of one buffer (batch, seqlen, heads of q, k and v, dim); NaN where none reaches."""
    seqlen = max(q.shape[1], k.shape[1])
    heads = q.shape[2] + k.shape[2] + v.shape[2]
    dim = max(q.shape[3], v.shape[3])
    buffer = torch.full(
        (q.shape[0], seqlen, heads, dim), float("nan"), dtype=q.dtype, device=q.device
    )
    views, start = [], 0
    for tensor in (q, k, v):
        view = buffer[:, : tensor.shape[1], start : start + tensor.shape[2], : tensor.shape[3]]
        views.append(view.copy_(tensor))
        start += tensor.shape[2]
    return views[0], views[1], views[2]


def _each(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Operands]:
    def apply(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Operands:
        return change(q), change(k), change(v)

    return apply


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _seqlen_first(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def _every_other(tensor: torch.Tensor) -> torch.Tensor:
    batch, seqlen, heads, dim = tensor.shape
    index = (slice(None), slice(None, None, 2))
    return _inside(tensor, (batch, 2 * seqlen, heads, dim), index)


def _shared_batch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Operands:
    return q, k[:1].expand_as(k), v[:1].expand_as(v)


def _shared_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Operands:
    return q, k[:, :, :1].expand_as(k), v[:, :, :1].expand_as(v)


def _mixed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Operands:
    return _transposed(q), _padded(k, 8), _every_other(v)


# Each gives tensors of the same shapes; all but the shared ones hold the same values too.
LAYOUTS: dict[str, Callable[..., Operands]] = {
    "transposed": _each(_transposed),
    "seqlen_first": _each(_seqlen_first),
    "padded": _each(lambda tensor: _padded(tensor, 8)),
    "every_other": _each(_every_other),
    "fused": _fused,
    "mixed": _mixed,
    "shared_batch": _shared_batch,
    "shared_heads": _shared_heads,
    "unaligned_rows": _each(lambda tensor: _padded(tensor, 1)),
    "unaligned_start": _each(
        lambda tensor: _inside(
            tensor,
            (*tensor.shape[:-1], tensor.shape[-1] + 8),
            (..., slice(1, tensor.shape[-1] + 1)),
        )
    ),
}


# ---- Definitions ---------------------------------------------------------------------------------


def mask_by_definition(
    seqlen_q: int,
    seqlen_k: int,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    chunk: int = 0,
) -> torch.Tensor:
    """Which keys each query sees, written out one pair at a time: (seqlen_q, seqlen_k) bool."""
    left, right = (None if bound == -1 else bound for bound in window)
    shift = seqlen_k - seqlen_q

    def sees(i: int, j: int) -> bool:
        if causal and not j <= i + shift:
            return False
        if left is not None and not i + shift - left <= j:
            return False
        if right is not None and not j <= i + shift + right:
            return False
        return not chunk or math.floor(j / chunk) == math.floor((i + shift) / chunk)

    rows = [[sees(i, j) for j in range(seqlen_k)] for i in range(seqlen_q)]
    return torch.tensor(rows, dtype=torch.bool).reshape(seqlen_q, seqlen_k)


def attention_by_definition(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sink: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of dense tensors in float64, straight from the formula; (out, lse).

    visible broadcasts to (batch, num_heads_q, seqlen_q, seqlen_k); bias is added to the scores.
    """
    group = q.shape[2] // k.shape[2]
    q, k, v = (tensor.double().transpose(1, 2) for tensor in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("bhid,bhjd->bhij", q, k)
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    scores = torch.where(visible.to(scores.device), scores, -math.inf)
    if sink is not None:
        column = sink.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
        v = torch.cat([v, v.new_zeros(*v.shape[:2], 1, v.shape[3])], 2)
    lse = scores.new_full(scores.shape[:3], -math.inf)
    if scores.shape[-1]:
        lse = torch.logsumexp(scores, -1)
    probs = torch.exp(scores - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    return torch.einsum("bhij,bhjd->bihd", probs, v), lse


# ---- The tolerance rule --------------------------------------------------------------------------


def _describe(name: str, problem: str, count: int, where: torch.Tensor, *values: Any) -> str:
    first = tuple(where.nonzero()[0].tolist())
    got, expected = (value[first].item() for value in values)
    share = f"{count} of {where.numel()} elements"
    return f"{name}: {problem} in {share}, first at {first}: got {got}, expected {expected}"


def assert_same_special(name: str, got: torch.Tensor, ref: torch.Tensor) -> None:
    """Fail where NaN and infinities of got are not those of ref."""
    checks = {
        "NaN": torch.isnan,
        "+inf": torch.isposinf,
        "-inf": torch.isneginf,
    }
    for label, has in checks.items():
        wrong = has(got) != has(ref)
        count = int(wrong.sum())
        assert not count, _describe(name, f"{label} in the wrong place", count, wrong, got, ref)


def assert_close(
    name: str, got: torch.Tensor, ref: torch.Tensor, lowprec: torch.Tensor, margin: float = 2.0
) -> None:
    """Apply the tolerance rule and say where and by how much it is broken."""
    assert got.shape == ref.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(ref.shape)}"
    assert_same_special(name, got, ref)
    if not got.numel():
        return
    finite = torch.isfinite(ref)
    assert torch.isfinite(lowprec[finite]).all(), (
        f"{name}: lowprec is not finite, nothing to judge by"
    )
    zero = torch.zeros((), dtype=torch.float64, device=ref.device)
    error = torch.where(finite, (got.double() - ref.double()).abs(), zero)
    allowed_error = torch.where(finite, (lowprec.double() - ref.double()).abs(), zero).max().item()
    largest = torch.where(finite, ref.double().abs(), zero).max().item()
    allowed = margin * allowed_error + floor(got.dtype, largest)
    worst = error.max().item()
    if worst <= allowed:
        return
    at = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    raise AssertionError(
        f"{name}: error {worst:.4g} at {at}, allowed {allowed:.4g} "
        f"(lowprec errs by {allowed_error:.4g}); got {got[at].item():.6g}, "
        f"expected {ref[at].item():.6g}, lowprec {lowprec[at].item():.6g}; "
        f"{int((error > allowed).sum())} of {error.numel()} elements are outside"
    )


def floor(dtype: torch.dtype, largest: float) -> float:
    """One rounding of the result's dtype at its largest value, and float32 arithmetic up to it."""
    return torch.finfo(dtype).eps / 2 * largest + 1e-6 * max(1.0, largest)


def oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Lengths = DENSE,
    **options: Any,
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """The float64 reference and the lowprec yardstick of one call: ((out, lse), (out, lse))."""
    with torch.no_grad():
        problem, inputs = attention_request(q, k, v, Options(**options), lengths)
        exact = reference.attention(
            problem, inputs, compute_dtype=torch.float64, round_result=False
        )
        lowprec = reference.attention(problem, inputs, lowprec=True)
    return exact, lowprec


def assert_attention(
    got: tuple[torch.Tensor, torch.Tensor],
    exact: tuple[torch.Tensor, torch.Tensor],
    lowprec: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Apply the tolerance rule to (out, lse)."""
    out, lse = got
    assert lse.dtype == torch.float32, f"lse.dtype is {lse.dtype}, expected torch.float32"
    assert out.dtype == lowprec[0].dtype, f"out.dtype is {out.dtype}"
    assert_close("out", out, exact[0], lowprec[0])
    assert_close("lse", lse, exact[1], lowprec[1])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bit patterns of a tensor, so that NaN compares equal to itself."""
    sizes = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(sizes[tensor.element_size()])


def assert_same_bits(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Fail unless both tensors are equal bit for bit."""
    assert got.shape == expected.shape and got.dtype == expected.dtype, f"{name}: shape or dtype"
    wrong = bits(got) != bits(expected)
    count = int(wrong.sum())
    assert not count, _describe(name, "different bits", count, wrong, got, expected)


WORD_BYTES = 4


def assert_no_spills(report: Any, words: int = 0, stack_bytes: int = 0) -> None:
    """Fail if a compile moved registers to memory.

    Args:
        words: that may be spilled all the same.
        stack_bytes: that the assembler of CUDA 12, the one of installs without a GPU, may take
            without a spill.
    """
    stack = 2 * words * WORD_BYTES
    if not _has_cuda_13():
        stack = max(stack, stack_bytes)
    found = (report.spill_store_bytes, report.spill_load_bytes, report.stack_bytes)
    assert max(found[:2]) <= words * WORD_BYTES and found[2] <= stack, found


def _has_cuda_13() -> bool:
    try:
        importlib.metadata.distribution("nvidia-cutlass-dsl-libs-cu13")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def load_tool(name: str) -> ModuleType:
    """Import a script of tools/, which is no package."""
    path = Path(__file__).resolve().parent.parent / "tools" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
