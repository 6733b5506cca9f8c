"""A call with a cache in eager torch: the keys of each sequence gathered, new ones appended.

``lower`` makes an ordinary packed request of it, which the reference runs; ``append`` then writes
the new keys. Attention comes first, so a call that fails for whatever reason has written nothing.
Only rows in use are read: memory grows with the used part of the cache.
"""

from __future__ import annotations

import dataclasses
from typing import cast

import torch

from flash_cute.cache_request import CacheRequest, CacheSpan, slots
from flash_cute.problem import AttentionInputs, AttentionProblem, Lengths, attention_request

Pair = tuple["torch.Tensor | None", torch.Tensor]  # keys and values; no keys where qv is alone


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Lowered:
    """The packed request that a call comes to, and what it appends to each sequence."""

    problem: AttentionProblem
    inputs: AttentionInputs
    new: list[Pair]


def lower(request: CacheRequest, spans: list[CacheSpan]) -> Lowered:
    """Gather the keys and rotate what is new, for spans that `check_cache_values` returned.

    Key j of the request is key ``cache_leftpad + j`` of the sequence. With qv, q·k + qv·v is one
    product of [q, qv] with [k, v].
    """
    a = request.arguments
    new = [] if a.v is None else [_new_rows(request, b, span) for b, span in enumerate(spans)]
    v_cache = cast(torch.Tensor, a.v_cache)
    v = _gathered(request, spans, v_cache, [values for _, values in new])
    q, k = a.query, v
    if a.k_cache is not None and a.q is not None:
        k = _gathered(request, spans, a.k_cache, [keys for keys, _ in new if keys is not None])
        q = a.q if a.rotary_cos is None else _rotated_queries(request, spans)
        if a.qv is not None:
            q, k = torch.cat([q, a.qv], dim=-1), torch.cat([k, v], dim=-1)
    counts = [0, *(span.end - span.first + span.num_new for span in spans)]
    starts = torch.tensor(counts, device=q.device).cumsum(0).to(torch.int32)
    lengths = Lengths(cu_seqlens_q=a.cu_seqlens_q, max_seqlen_q=a.max_seqlen_q, cu_seqlens_k=starts)
    return Lowered(*attention_request(q, k, v, request.options, lengths), new)


def append(request: CacheRequest, spans: list[CacheSpan], new: list[Pair]) -> None:
    """Write new keys and values into the cache, after the used length of each sequence."""
    a = request.arguments
    with torch.no_grad():
        for span, (keys, values) in zip(spans, new, strict=True):
            index = slots(request, span, span.end, span.end + span.num_new)
            for cache, rows in ((a.k_cache, keys), (a.v_cache, values)):
                if cache is not None and rows is not None:
                    cache[index] = rows


def rotate(
    rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """Rotate pairs of channels of each row by its angle; rounded once, to the dtype of the rows.

    Shapes: rows (n, num_heads, head_dim); cos, sin (n, rotary_dim / 2), or (1, …) for one angle.
            Pair i is channels 2i and 2i + 1 if interleaved, else i and rotary_dim / 2 + i; the
            channels past rotary_dim stay as they are.
    """
    half = cos.shape[-1]
    dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
    cos, sin = cos.to(dtype)[:, None], sin.to(dtype)[:, None]
    turned = rows[..., : 2 * half].to(dtype)
    first, second = (
        (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.split(half, dim=-1)
    )
    pair = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat([turned.to(rows.dtype), rows[..., 2 * half :]], dim=-1)


def _angles(
    request: CacheRequest, span: CacheSpan, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the tables for `count` positions from that of the first query and new key."""
    a, rows = request.arguments, slice(span.angle, span.angle + count)
    return cast(torch.Tensor, a.rotary_cos)[rows], cast(torch.Tensor, a.rotary_sin)[rows]


def _new_rows(request: CacheRequest, b: int, span: CacheSpan) -> Pair:
    """New keys, rotated, and values of one sequence: (num_new, num_heads_kv, dim)."""
    a = request.arguments
    rows = slice(span.start_new, span.start_new + span.num_new)
    index = (b, rows) if a.cu_seqlens_k_new is None else rows
    values = cast(torch.Tensor, a.v)[index]
    if a.k is None:
        return None, values
    keys = a.k[index]
    if a.rotary_cos is not None:
        keys = rotate(keys, *_angles(request, span, span.num_new), a.rotary_interleaved)
    return keys, values


def _rotated_queries(request: CacheRequest, spans: list[CacheSpan]) -> torch.Tensor:
    """The queries, each rotated by its position; like q."""
    a = request.arguments
    q = cast(torch.Tensor, a.q).clone()
    for b, span in enumerate(spans):
        if not span.len_q:
            continue
        rows = slice(span.start_q, span.start_q + span.len_q)
        index = (b, rows) if a.cu_seqlens_q is None else rows
        cos, sin = _angles(request, span, span.len_q if request.rotation_advances else 1)
        q[index] = rotate(q[index], cos, sin, a.rotary_interleaved)
    return q


def _gathered(
    request: CacheRequest, spans: list[CacheSpan], cache: torch.Tensor, new: list[torch.Tensor]
) -> torch.Tensor:
    """The keys or values of all sequences one after the other, those in the cache and new ones."""
    parts = [cache[:0].flatten(0, 1)]
    for b, span in enumerate(spans):
        parts.append(cache[slots(request, span, span.first, span.end)])
        if new:
            parts.append(new[b])
    return torch.cat(parts)
