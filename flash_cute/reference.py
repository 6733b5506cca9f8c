"""The eager reference: what every kernel is judged by, and the backend of tensors on the CPU.

One sequence (or a batch of equal ones) at a time, blockwise over queries and over keys with an
online softmax, so memory grows with the sequence length and not with its square. Scores follow one
order: ``scale * q·k`` → softcap → score_mod → mask → sink → softmax. Only the keys that belong to a
sequence are ever read, so nothing past seqused, cu_seqlens or the used pages can matter. A query
with no visible key gives output 0 and log-sum-exp -inf (the sink, where there is one), gradient 0.

Autograd differentiates it. Each block of queries is recomputed in the backward pass, so training
does not hold the score matrix either. The running maximum is a constant of the differentiation: the
result does not depend on it.

Runs on tensors of any device; the package itself calls it for CPU tensors only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from flash_cute.errors import InvalidProblem
from flash_cute.problem import AttentionInputs, AttentionProblem

_BLOCK_Q = 256
_BLOCK_K = 512
_NEG_INF = float("-inf")


@dataclasses.dataclass(frozen=True, slots=True)
class Precision:
    """Dtypes of the computation: operands of both matrix products, and everything else."""

    multiply: torch.dtype
    accumulate: torch.dtype


def attention(
    problem: AttentionProblem,
    inputs: AttentionInputs,
    *,
    compute_dtype: torch.dtype | None = None,
    lowprec: bool = False,
    round_result: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of a validated request and return (out, lse).

    compute_dtype defaults to float32, and to float64 for float64 inputs. With lowprec, both matrix
    products take operands and give results in the dtype of the inputs, and the rest is float32:
    what an eager half-precision implementation computes, and the yardstick of the tolerance rule.
    With round_result=False both results stay in the dtype of the computation.

    Shapes: out like q with head_dim_v, contiguous, in the dtype of the inputs; lse float32,
            (batch, num_heads_q, seqlen_q), or (num_heads_q, total_q) for packed queries. Rows of
            neither sequence (past seqused_q or cu_seqlens_q) hold 0 and -inf.
    Units:  lse in natural log, the sink included.
    """
    accumulate = compute_dtype or _compute_dtype(problem.dtype)
    precision = Precision(problem.dtype if lowprec else accumulate, accumulate)
    # Under autocast the matrix products would silently run in half precision.
    with torch.autocast(inputs.q.device.type, enabled=False):
        out, lse = _attention(problem, inputs, precision)
    if round_result:
        return out.to(problem.dtype).contiguous(), lse.to(torch.float32).contiguous()
    return out, lse


def visibility(problem: AttentionProblem, inputs: AttentionInputs) -> torch.Tensor:
    """Return which keys each query sees, as a boolean matrix; memory grows with its size.

    Shapes: (batch, num_heads_q, seqlen_q, seqlen_k) of the problem; positions are those within a
            sequence, and False past its end.
    """
    shape = (problem.batch, problem.num_heads_q, problem.seqlen_q, problem.seqlen_k)
    visible = torch.zeros(shape, dtype=torch.bool, device=inputs.q.device)
    for span in _spans(problem, inputs):
        index = torch.tensor([span.b], device=visible.device)
        grid = _Grid.of(problem, index, (0, span.len_q), (0, span.len_k), span.len_k - span.len_q)
        mask = _visible(problem, inputs, grid)
        visible[span.b, :, : span.len_q, : span.len_k] = True if mask is None else mask[0]
    return visible


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---- Sequences -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Span:
    """Where one sequence lies: its batch index, and start and length on each side."""

    b: int
    start_q: int
    len_q: int
    start_k: int
    len_k: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Sequences:
    """Sequences of equal lengths, computed together.

    Shapes: b (batch,) their batch indices; q (batch, num_heads_kv, group, seqlen_q, head_dim),
            already scaled; k (batch, num_heads_kv, seqlen_k, head_dim); v likewise with head_dim_v
    """

    problem: AttentionProblem
    inputs: AttentionInputs
    precision: Precision
    b: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def _spans(problem: AttentionProblem, inputs: AttentionInputs) -> Iterator[_Span]:
    starts_q, lengths_q = _side(inputs.cu_seqlens_q, inputs.seqused_q, problem, problem.seqlen_q)
    starts_k, lengths_k = _side(inputs.cu_seqlens_k, inputs.seqused_k, problem, problem.seqlen_k)
    for b in range(problem.batch):
        yield _Span(b, starts_q[b], lengths_q[b], starts_k[b], lengths_k[b])


def _side(
    cu_seqlens: torch.Tensor | None,
    seqused: torch.Tensor | None,
    problem: AttentionProblem,
    seqlen: int,
) -> tuple[list[int], list[int]]:
    """Start and length of every sequence on one side, on the host."""
    if cu_seqlens is None:
        starts, lengths = [0] * problem.batch, [seqlen] * problem.batch
    else:
        starts, lengths = cu_seqlens.tolist(), cu_seqlens.diff().tolist()
    return starts, lengths if seqused is None else seqused.tolist()


def _attention(
    problem: AttentionProblem, inputs: AttentionInputs, precision: Precision
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out (like q) and lse of all sequences in the dtype of the computation."""
    ragged = (inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.seqused_q, inputs.seqused_k)
    if inputs.page_table is None and all(lengths is None for lengths in ragged):
        b = torch.arange(problem.batch, device=inputs.q.device)
        operands = (inputs.q, inputs.k, inputs.v)
        out, lse = _attend(_sequences(problem, inputs, precision, b, operands))
        return out.transpose(1, 2), lse
    spans = list(_spans(problem, inputs))
    results = [
        _attend(_sequences(problem, inputs, precision, *_one_sequence(problem, inputs, span)))
        for span in spans
    ]
    if problem.is_packed_q:
        return _pack(problem, inputs, spans, results, precision)
    return _pad(problem, inputs, spans, results, precision)


def _one_sequence(
    problem: AttentionProblem, inputs: AttentionInputs, span: _Span
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Batch index and q, k, v of one sequence as a batch of one; reads its own rows only."""
    b = torch.tensor([span.b], device=inputs.q.device)
    q = _rows(inputs.q, problem.is_packed_q, span.b, span.start_q, span.len_q)
    if problem.page_size is None or inputs.page_table is None:
        k = _rows(inputs.k, problem.is_packed_k, span.b, span.start_k, span.len_k)
        v = _rows(inputs.v, problem.is_packed_k, span.b, span.start_k, span.len_k)
    else:
        num_pages = -(-span.len_k // problem.page_size)
        pages = inputs.page_table[span.b, :num_pages].long()
        k = inputs.k[pages].flatten(0, 1)[: span.len_k]
        v = inputs.v[pages].flatten(0, 1)[: span.len_k]
    return b, (q[None], k[None], v[None])


def _rows(tensor: torch.Tensor, is_packed: bool, b: int, start: int, length: int) -> torch.Tensor:
    return tensor[start : start + length] if is_packed else tensor[b, :length]


def _sequences(
    problem: AttentionProblem,
    inputs: AttentionInputs,
    precision: Precision,
    b: torch.Tensor,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> _Sequences:
    q, k, v = (operand.transpose(1, 2) for operand in operands)
    q = q.unflatten(1, (problem.num_heads_kv, problem.group))
    q = (q.to(precision.accumulate) * problem.softmax_scale).to(precision.multiply)
    k, v = k.to(precision.multiply), v.to(precision.multiply)
    return _Sequences(problem, inputs, precision, b, q, k, v)


def _pack(
    problem: AttentionProblem,
    inputs: AttentionInputs,
    spans: list[_Span],
    results: list[tuple[torch.Tensor, torch.Tensor]],
    precision: Precision,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lay the results of the sequences out as the packed queries lie."""
    outs: list[torch.Tensor] = []
    lses: list[torch.Tensor] = []
    position = 0
    for span, (out, lse) in zip(spans, results, strict=True):
        out_gap, lse_gap = _padding(problem, inputs, span.start_q - position, precision)
        outs += [out_gap, out[0]]
        lses += [lse_gap, lse[0]]
        position = span.start_q + span.len_q
    out_gap, lse_gap = _padding(problem, inputs, inputs.q.shape[0] - position, precision)
    out, lse = torch.cat([*outs, out_gap], dim=1), torch.cat([*lses, lse_gap], dim=1)
    return out.transpose(0, 1), lse


def _pad(
    problem: AttentionProblem,
    inputs: AttentionInputs,
    spans: list[_Span],
    results: list[tuple[torch.Tensor, torch.Tensor]],
    precision: Precision,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lay the results of the sequences out as a batch, each padded to the longest."""
    shape = (0, problem.num_heads_q, problem.seqlen_q)
    out_empty, lse_empty = _padding(problem, inputs, problem.seqlen_q, precision)
    outs = [out_empty.expand(*shape, problem.head_dim_v)]
    lses = [lse_empty.expand(shape)]
    for span, (out, lse) in zip(spans, results, strict=True):
        out_gap, lse_gap = _padding(problem, inputs, problem.seqlen_q - span.len_q, precision)
        outs.append(torch.cat([out[0], out_gap], dim=1)[None])
        lses.append(torch.cat([lse[0], lse_gap], dim=1)[None])
    return torch.cat(outs).transpose(1, 2), torch.cat(lses)


def _padding(
    problem: AttentionProblem, inputs: AttentionInputs, length: int, precision: Precision
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of no sequence: output 0 and lse -inf, connected to the inputs with gradient 0."""
    operands = [inputs.q, inputs.k, inputs.v]
    if inputs.sink is not None:
        operands.append(inputs.sink)
    zero = sum(operand[:0].sum().to(precision.accumulate) for operand in operands)
    out = torch.zeros(
        (problem.num_heads_q, length, problem.head_dim_v),
        dtype=precision.accumulate,
        device=inputs.q.device,
    )
    lse = out.new_full((problem.num_heads_q, length), _NEG_INF)
    return out + zero, lse + zero


# ---- Scores and mask -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Grid:
    """Indices of one block of scores, each broadcasting to (batch, num_heads_q, queries, keys).

    ``diagonal`` is, for every query, the position among the keys that it is aligned with.
    """

    b: torch.Tensor  # (batch, 1, 1, 1)
    h: torch.Tensor  # (1, num_heads_q, 1, 1)
    q_idx: torch.Tensor  # (1, 1, queries, 1)
    kv_idx: torch.Tensor  # (1, 1, 1, keys)
    diagonal: torch.Tensor  # (1, 1, queries, 1)

    @staticmethod
    def of(
        problem: AttentionProblem,
        b: torch.Tensor,
        queries: tuple[int, int],
        keys: tuple[int, int],
        shift: int,
    ) -> _Grid:
        h = torch.arange(problem.num_heads_q, device=b.device)
        q_idx = torch.arange(*queries, device=b.device).view(1, 1, -1, 1)
        kv_idx = torch.arange(*keys, device=b.device).view(1, 1, 1, -1)
        return _Grid(b.view(-1, 1, 1, 1), h.view(1, -1, 1, 1), q_idx, kv_idx, q_idx + shift)

    @property
    def shape(self) -> torch.Size:
        indices = (self.b, self.h, self.q_idx, self.kv_idx)
        return torch.broadcast_shapes(*(index.shape for index in indices))


def _visible(
    problem: AttentionProblem, inputs: AttentionInputs, grid: _Grid
) -> torch.Tensor | None:
    """Which scores of a block are visible, all masks ANDed; None for all of them."""
    masks: list[torch.Tensor] = []
    left, right, chunk = problem.visible_left, problem.visible_right, problem.attention_chunk
    if left is not None:
        masks.append(grid.kv_idx >= grid.diagonal - left)
    if right is not None:
        masks.append(grid.kv_idx <= grid.diagonal + right)
    if chunk:
        masks.append(grid.kv_idx // chunk == grid.diagonal // chunk)  # floors, as Python does
    if inputs.mask_mod is not None:
        masks.append(_mask(inputs.mask_mod, grid))
    if inputs.block_mask is not None:
        masks.append(_mask(inputs.block_mask.mask_of, grid))
    if not masks:
        return None
    visible = masks[0]
    for mask in masks[1:]:
        visible = visible & mask
    return visible


def visible_rows(
    mask_mod: Callable[..., Any], b: int, h: int, queries: tuple[int, int], num_keys: int
) -> torch.Tensor:
    """What a mask_mod shows of queries[0] to queries[1] - 1 of one head: (queries, keys) bool."""
    q_idx = torch.arange(*queries).view(1, 1, -1, 1)
    grid = _Grid(
        b=torch.tensor(b).view(1, 1, 1, 1),
        h=torch.tensor(h).view(1, 1, 1, 1),
        q_idx=q_idx,
        kv_idx=torch.arange(num_keys).view(1, 1, 1, -1),
        diagonal=q_idx,
    )
    return _mask(mask_mod, grid)[0, 0]


def _mask(mask_mod: Callable[..., Any], grid: _Grid) -> torch.Tensor:
    mask = _per_element("mask_mod", mask_mod, grid)
    if mask.dtype != torch.bool:
        raise InvalidProblem(f"mask_mod returned {mask.dtype}, expected torch.bool")
    return mask


class _IndexByTensors(TorchFunctionMode):
    """Makes ``table[h, q_idx]`` gather under vmap, where torch would read indices as numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            table, given = args
            index = given if isinstance(given, tuple) else (given,)
            if any(isinstance(item, torch.Tensor) for item in index):
                plain = [item for item in index if not isinstance(item, torch.Tensor)]
                if all(isinstance(item, int) or item == slice(None) for item in plain):
                    made = [None if isinstance(i, slice) else torch.as_tensor(i) for i in index]
                    return torch.ops.aten.index(table, made)
        return func(*args, **(kwargs or {}))


def _per_element(
    name: str, function: Callable[..., Any], grid: _Grid, scores: torch.Tensor | None = None
) -> torch.Tensor:
    """Apply a callback, which is written for one element, to all elements of a block.

    Shapes: (batch, num_heads_q, queries, keys), like scores
    """
    if not grid.shape.numel():  # the callback would index with nothing
        empty = torch.empty(grid.shape, dtype=torch.bool, device=grid.b.device)
        return empty if scores is None else scores

    def one(*element: torch.Tensor) -> torch.Tensor:
        result = torch.as_tensor(function(*element), device=grid.b.device)
        if result.dim():
            raise InvalidProblem(
                f"{name} returned shape {tuple(result.shape)}, expected one that is (): a callback "
                "computes one element"
            )
        return result

    first = () if scores is None else (0,)
    mapped: Callable[..., Any] = one
    for axis in (3, 2, 1, 0):
        dims = tuple(0 if index == axis else None for index in range(4))
        mapped = torch.vmap(mapped, in_dims=first + dims)
    indices = (index.flatten() for index in (grid.b, grid.h, grid.q_idx, grid.kv_idx))
    with _IndexByTensors():
        return mapped(*(() if scores is None else (scores,)), *indices)


def _scores(sequences: _Sequences, scores: torch.Tensor, grid: _Grid) -> torch.Tensor:
    """Apply softcap, score_mod and the masks to scaled products."""
    problem, inputs = sequences.problem, sequences.inputs
    if problem.softcap:
        scores = torch.tanh(scores / problem.softcap) * problem.softcap
    if inputs.score_mod is not None:
        scores = _per_element("score_mod", inputs.score_mod, grid, scores).to(scores.dtype)
    visible = _visible(problem, inputs, grid)
    return scores if visible is None else scores.masked_fill(~visible, _NEG_INF)


# ---- Online softmax ------------------------------------------------------------------------------


def _attend(sequences: _Sequences) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of equal sequences: out (batch, heads, seqlen_q, head_dim_v), lse without dim."""
    seqlen_q = sequences.q.shape[-2]
    outs: list[torch.Tensor] = []
    lses: list[torch.Tensor] = []
    for start in range(0, max(seqlen_q, 1), _BLOCK_Q):
        rows = (start, min(start + _BLOCK_Q, seqlen_q))
        if torch.is_grad_enabled():
            result: Any = checkpoint(
                _attend_rows, sequences, rows, use_reentrant=False, preserve_rng_state=False
            )
        else:
            result = _attend_rows(sequences, rows)
        outs.append(result[0])
        lses.append(result[1])
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def _attend_rows(sequences: _Sequences, rows: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one block of queries over all the keys it may see, block by block."""
    problem, precision = sequences.problem, sequences.precision
    seqlen_q, seqlen_k = sequences.q.shape[-2], sequences.k.shape[-2]
    q = sequences.q[..., rows[0] : rows[1], :]
    shape = (q.shape[0], problem.num_heads_q, q.shape[-2])
    q = q.flatten(2, 3)  # (batch, num_heads_kv, group * queries, head_dim)
    row_max, row_sum = _start(sequences, shape)
    acc = row_sum.new_zeros((*shape, problem.head_dim_v))
    for keys in _key_blocks(problem, rows, seqlen_q, seqlen_k):
        k = sequences.k[..., keys[0] : keys[1], :]
        v = sequences.v[..., keys[0] : keys[1], :]
        grid = _Grid.of(problem, sequences.b, rows, keys, seqlen_k - seqlen_q)
        product = (q @ k.transpose(-1, -2)).to(precision.accumulate)
        scores = _scores(sequences, product.reshape(*shape, k.shape[-2]), grid)
        if scores.shape[-1]:
            new_max = torch.maximum(row_max, scores.detach().amax(-1))
        else:
            new_max = row_max
        base = _finite(new_max)
        probs = torch.exp(scores - base[..., None])
        rescale = torch.exp(row_max - base)
        row_sum = row_sum * rescale + probs.sum(-1)
        weights = probs.to(precision.multiply).reshape(*q.shape[:-1], k.shape[-2])
        update = (weights @ v).to(precision.accumulate).reshape(acc.shape)
        acc = acc * rescale[..., None] + update
        row_max = new_max
    is_empty = row_sum == 0
    row_sum = torch.where(is_empty, 1.0, row_sum)
    lse = torch.where(is_empty, _NEG_INF, _finite(row_max) + torch.log(row_sum))
    return acc / row_sum[..., None], lse


def _start(sequences: _Sequences, shape: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Row maximum and row sum before the first key: the sink's own, or none."""
    sink, dtype = sequences.inputs.sink, sequences.precision.accumulate
    if sink is None:
        row_max = torch.full(shape, _NEG_INF, dtype=dtype, device=sequences.q.device)
        return row_max, torch.zeros_like(row_max)
    logit = sink.to(dtype).view(1, -1, 1).expand(shape)
    row_max = logit.detach()
    return row_max, torch.exp(logit - _finite(row_max))


def _finite(row_max: torch.Tensor) -> torch.Tensor:
    """The maximum to subtract: 0 for rows that have seen nothing, to avoid -inf minus -inf."""
    return row_max.masked_fill(row_max == _NEG_INF, 0.0)


def _key_blocks(
    problem: AttentionProblem, rows: tuple[int, int], seqlen_q: int, seqlen_k: int
) -> list[tuple[int, int]]:
    """Blocks of keys that some row of the block may see; one empty block if there is none."""
    left, right, chunk = problem.visible_left, problem.visible_right, problem.attention_chunk
    diagonal_first = rows[0] + seqlen_k - seqlen_q
    diagonal_last = rows[1] - 1 + seqlen_k - seqlen_q
    begin, end = 0, seqlen_k
    if left is not None:
        begin = max(begin, diagonal_first - left)
    if right is not None:
        end = min(end, diagonal_last + right + 1)
    if chunk:
        begin = max(begin, diagonal_first // chunk * chunk)
        end = min(end, diagonal_last // chunk * chunk + chunk)
    blocks = [(start, min(start + _BLOCK_K, end)) for start in range(begin, end, _BLOCK_K)]
    # The empty block keeps the result connected to q, k and v when gradients are asked for.
    return blocks or [(0, 0)]


# ---- Parts of the keys ---------------------------------------------------------------------------


def combine(
    out_partial: torch.Tensor, lse_partial: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over parts of the keys: (sum of exp(lse_i - lse) out_i, lse), not rounded.

    Parts with lse -inf add nothing whatever their output holds, and get gradients 0.

    Shapes: out_partial (num_splits, ..., dim), lse_partial (num_splits, ...); the results are
            (..., dim) and (...), in float32, or float64 for float64 parts
    Units:  lse in natural log.
    """
    dtype = _compute_dtype(out_partial.dtype)
    lses = lse_partial.to(dtype)
    # A constant of the differentiation. Against 0 an infinite lse gives what the formula says.
    largest = lses.detach().amax(0)
    largest = torch.where(largest.isinf(), 0.0, largest)
    total = torch.zeros_like(largest)
    out = torch.zeros(out_partial.shape[1:], dtype=dtype, device=out_partial.device)
    for part, lse in zip(out_partial.unbind(), lses.unbind(), strict=True):
        weight = torch.exp(lse - largest)
        total = total + weight
        used = torch.where((lse == _NEG_INF)[..., None], 0.0, part.to(dtype))
        out = out + weight[..., None] * used
    is_empty = total == 0
    total = torch.where(is_empty, 1.0, total)
    lse = torch.where(is_empty, _NEG_INF, largest + torch.log(total))
    return out / total[..., None], lse
