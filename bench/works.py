"""The calls of `bench variants`: masks, callbacks and packed sequences, and how each peer is asked.

A `Work` says what is computed, and gives the gate its definition. Callbacks capture tensors of the
device that they are made for.
"""

from __future__ import annotations

import importlib
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from . import gate
from .peers import FlashAttention4, FlashCute, FlexAttention, Inputs
from .shapes import HIDDEN, MASK_BLOCK, TOKENS, Shape

SAMPLED_SEQUENCES = 5  # of packed ones, by the gate: the shortest, the longest and others


@dataclass(frozen=True)
class Work(Shape):
    """One attention call that is more than a shape.

    share:   visible scores over all scores, for the count of operations
    window:  keys visible to the left of the diagonal; none to its right
    lengths: packed sequences that make up the one row of the batch
    """

    share: float = 1.0
    window: int | None = None
    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    block_mask: Any = field(default=None, compare=False)
    lengths: tuple[int, ...] = ()

    @property
    def flops(self) -> float:
        pairs = self.batch * self.num_heads_q * self.seqlen_q * self.seqlen_k
        return 4.0 * pairs * (self.head_dim + self.head_dim_v) / 2 * self.share

    def options(self) -> dict[str, Any]:
        """The arguments of our function; those of packed sequences aside."""
        found: dict[str, Any] = {}
        if self.is_causal:
            found["causal"] = True
        if self.window is not None:
            found["window_size"] = (self.window, 0)
        if self.score_mod is not None:
            found["score_mod"] = self.score_mod
        if self.block_mask is not None:
            found["block_mask"] = self.block_mask
        return found

    def packed(self, device: torch.device | str) -> dict[str, Any]:
        """The arguments that describe packed sequences, as both ours and FA4's function name them.

        The longest length is an integer on the host, as in the training loops that have it.
        """
        if not self.lengths:
            return {}
        edges = [0, *itertools.accumulate(self.lengths)]
        cu_seqlens = torch.tensor(edges, dtype=torch.int32, device=device)
        longest = max(self.lengths)
        return {
            "cu_seqlens_q": cu_seqlens,
            "cu_seqlens_k": cu_seqlens,
            "max_seqlen_q": longest,
            "max_seqlen_k": longest,
        }

    def change(self, scores: torch.Tensor, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> torch.Tensor:
        """What the call does to scaled scores, for the gate."""
        if self.score_mod is not None:
            scores = self.score_mod(scores, b, h, q_idx, kv_idx)
        visible = kv_idx >= 0
        if self.is_causal or self.window is not None:
            visible = visible & (kv_idx <= q_idx)
        if self.window is not None:
            visible = visible & (kv_idx >= q_idx - self.window)
        if self.mask_mod is not None:
            visible = visible & self.mask_mod(b, h, q_idx, kv_idx)
        return scores.masked_fill(~visible, float("-inf"))


def judge(
    out: torch.Tensor, inputs: tuple[torch.Tensor, ...], work: Work, rng: random.Random
) -> gate.Verdict:
    """Judge an output of a Work: the worst of some sequences where they are packed."""
    if not work.lengths:
        return gate.check(out, inputs, work, rng, work.change)
    verdicts: list[gate.Verdict] = []
    for number in sampled_sequences(work.lengths, rng):
        start = sum(work.lengths[:number])
        part = slice(start, start + work.lengths[number])
        rows = tuple(tensor[:, part] for tensor in inputs)
        one = square_of(work, work.lengths[number])
        found = gate.check(out[:, part], rows, one, rng, work.change)
        verdicts.append(replace(found, where=f"sequence {number}, {found.where}"))
    return max(verdicts, key=lambda v: v.error / v.limit if v.limit else math.inf)


def square_of(work: Work, length: int) -> Shape:
    """The shape of one packed sequence."""
    return Shape(
        1,
        length,
        length,
        work.num_heads_q,
        work.num_heads_kv,
        work.head_dim,
        work.head_dim_v,
        work.is_causal,
        work.dtype,
    )


def sampled_sequences(lengths: tuple[int, ...], rng: random.Random) -> list[int]:
    """Numbers of the sequences that the gate looks at."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    chosen = {0, len(lengths) - 1, order[0], order[-1]}
    while len(chosen) < min(SAMPLED_SEQUENCES, len(lengths)):
        chosen.add(rng.randrange(len(lengths)))
    return sorted(chosen)


# ---- Callbacks and masks -------------------------------------------------------------------------


def alibi(num_heads: int, device: str) -> Callable[..., Any]:
    """ALiBi as a score_mod, its slopes in a captured tensor."""
    slopes = torch.exp2(-8.0 / num_heads * torch.arange(1, num_heads + 1, device=device))

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score - slopes[h] * (q_idx - kv_idx)

    return score_mod


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """The causal mask as a mask_mod."""
    return q_idx >= kv_idx


def random_blocks(seqlen: int, density: float, device: str) -> tuple[Callable[..., Any], float]:
    """A mask_mod of random blocks, as many in every row of blocks, and the density that it has."""
    rows = -(-seqlen // MASK_BLOCK)
    count = max(1, round(density * rows))
    generator = torch.Generator().manual_seed(round(1000 * density))
    order = torch.rand(rows, rows, generator=generator).argsort(dim=1)
    allowed = (order < count).to(device)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return allowed[q_idx // MASK_BLOCK, kv_idx // MASK_BLOCK]

    return mask_mod, count / rows


def block_mask(mask_mod: Callable[..., Any], seqlen: int, device: str) -> Any:
    """PyTorch's BlockMask of a mask_mod, the same for every sequence and head."""
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(mask_mod, None, None, seqlen, seqlen, device=device)


def work(head_dim: int, seqlen: int, **variant: Any) -> Work:
    """A self-attention Work of the usual number of tokens and hidden size, causal if asked."""
    heads = HIDDEN // head_dim
    is_causal = variant.pop("is_causal", False)
    if "lengths" in variant:
        batch, seqlen = 1, sum(variant["lengths"])
    else:
        batch = TOKENS // seqlen
    return Work(batch, seqlen, seqlen, heads, heads, head_dim, head_dim, is_causal, **variant)


# ---- Contestants ---------------------------------------------------------------------------------


class OurVariant(FlashCute):
    """flash_cute, through flash_attn_func or flash_attn_varlen_func."""

    device = "cuda"

    def refuses(self, shape: Shape) -> str | None:
        from flash_cute import is_supported

        asked = as_work(shape)
        q, k, v = (
            torch.empty(1, 1, 1, dim, dtype=getattr(torch, shape.dtype), device=self.device).expand(
                shape.batch, seqlen, heads, dim
            )
            for seqlen, heads, dim in (
                (shape.seqlen_q, shape.num_heads_q, shape.head_dim),
                (shape.seqlen_k, shape.num_heads_kv, shape.head_dim),
                (shape.seqlen_k, shape.num_heads_kv, shape.head_dim_v),
            )
        )
        packed = asked.packed(self.device)
        if packed:
            q, k, v = q[0], k[0], v[0]
        answer = is_supported(q, k, v, **asked.options(), **packed)
        return None if answer else answer.reason

    def call(self, shape: Shape, sets: Inputs) -> Callable[[int], Any]:
        from flash_cute import flash_attn_func, flash_attn_varlen_func

        return _calls(as_work(shape), sets, flash_attn_func, flash_attn_varlen_func)

    def output(self, result: Any) -> torch.Tensor:
        return _with_batch(result)


class Fa4Variant(FlashAttention4):
    """FA4, for what it takes in the same words: causal, windows, packed sequences."""

    def refuses(self, shape: Shape) -> str | None:
        asked = as_work(shape)
        if asked.score_mod is not None or asked.block_mask is not None:
            return "its callbacks and block masks are of another form"
        return None

    def call(self, shape: Shape, sets: Inputs) -> Callable[[int], Any]:
        fa4 = importlib.import_module("flash_attn.cute.interface")
        return _calls(as_work(shape), sets, fa4.flash_attn_func, fa4.flash_attn_varlen_func)

    def output(self, result: Any) -> torch.Tensor:
        return _with_batch(super().output(result))


class FlexVariant(FlexAttention):
    """Compiled flex_attention, with the same score_mod and a causal block mask."""

    def call(self, shape: Shape, sets: Inputs) -> Callable[[int], Any]:
        return self.compiled(shape, sets, as_work(shape).score_mod)


def as_work(shape: Shape) -> Work:
    """The Work that a contestant was given. Raises: TypeError for a plain Shape."""
    if not isinstance(shape, Work):
        raise TypeError(f"shape is of type {type(shape).__name__}, expected Work")
    return shape


def _with_batch(out: torch.Tensor) -> torch.Tensor:
    """Packed sequences are the one row of a batch."""
    return out if out.dim() == 4 else out[None]


def _calls(
    asked: Work,
    sets: Inputs,
    dense: Callable[..., Any],
    varlen: Callable[..., Any],
) -> Callable[[int], Any]:
    """Calls of a pair of functions that have the same names for their arguments."""
    packed, options = asked.packed(sets[0][0].device), asked.options()
    if not packed:
        return lambda i: dense(*sets[i % len(sets)], **options)
    flat = [tuple(tensor[0] for tensor in one) for one in sets]
    return lambda i: varlen(*flat[i % len(flat)], **packed, **options)
