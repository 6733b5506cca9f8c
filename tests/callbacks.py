"""Callbacks as published with FlexAttention, re-expressed: one factory each, by name.

A factory takes the device of what it captures and returns the callback. They are meant for BATCH
sequences of SEQLEN queries and keys, and HEADS query heads; SEQLEN is also an image of SIDE x SIDE.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import and_masks, or_masks

import flash_cute

BATCH, HEADS, SIDE = 2, 4, 8
SEQLEN = SIDE * SIDE
Factory = Callable[[str], Callable[..., Any]]


def _random(shape: tuple[int, ...], device: str, dtype: torch.dtype = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


def _documents(device: str, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    lengths = torch.tensor([10, 23, 1, 30])
    labels = torch.repeat_interleave(torch.arange(4), lengths)
    return torch.stack([labels, labels.flip(0)]).to(device, dtype)


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def window(size: int) -> Callable[..., Any]:
    def sliding_window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx - kv_idx).abs() <= size

    return sliding_window


def prefix_lm(device: str) -> Callable[..., Any]:
    lengths = torch.tensor([5, 40], dtype=torch.int32, device=device)

    def visible(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx < lengths[b]) | (q_idx >= kv_idx)

    return visible


def document(device: str) -> Callable[..., Any]:
    labels = _documents(device)
    return lambda b, h, q_idx, kv_idx: labels[b, q_idx] == labels[b, kv_idx]


def document_causal(device: str) -> Callable[..., Any]:
    """Causal by the position within the document, as generate_doc_mask_mod has it."""
    labels = _documents(device, torch.int32)[0]
    starts = torch.tensor([0, 10, 33, 34], device=device)

    def local(mask_mod: Callable[..., Any]) -> Callable[..., Any]:
        def visible(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            is_same = labels[q_idx] == labels[kv_idx]
            q_local = q_idx - starts[labels[q_idx]]
            return is_same & mask_mod(b, h, q_local, kv_idx - starts[labels[kv_idx]])

        return visible

    return local(causal)


def _pixel(index: Any, side: int) -> tuple[Any, Any]:
    return index // side, index % side


def natten(device: str) -> Callable[..., Any]:
    """Neighbourhood of 5 x 5 pixels, moved inside at the borders."""
    half = 2

    def visible(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        (q_x, q_y), (k_x, k_y) = _pixel(q_idx, SIDE), _pixel(kv_idx, SIDE)
        x = q_x.clamp(half, SIDE - 1 - half)
        y = torch.clamp(q_y, min=half, max=SIDE - 1 - half)
        return ((x - k_x).abs() <= half) & ((y - k_y).abs() <= half)

    return visible


def natten_tiled(device: str) -> Callable[..., Any]:
    """The same with pixels numbered tile by tile."""
    tile = 4

    def pixel(index: Any) -> tuple[Any, Any]:
        tile_id, inside = index // (tile * tile), index % (tile * tile)
        tiles_per_row = SIDE // tile
        x = tile_id // tiles_per_row * tile + inside // tile
        y = tile_id % tiles_per_row * tile + inside % tile
        return x, y

    def visible(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        (q_x, q_y), (k_x, k_y) = pixel(q_idx), pixel(kv_idx)
        return ((q_x - k_x).abs() <= 2) & ((q_y - k_y).abs() <= 2)

    return visible


def dilated(device: str) -> Callable[..., Any]:
    def visible(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = torch.abs(q_idx - kv_idx)
        return (distance <= 24) & (distance % 3 == 0)

    return visible


def hashed(device: str) -> Callable[..., Any]:
    """Drops a quarter of the pairs, by a hash and not by a random number."""

    def visible(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        state = q_idx * 40503 + kv_idx * 2654435 + h * 97 + b
        state = (state ^ (state >> 7)) * 668265263 & 0xFFFFFFFF
        return (state >> 9) % 4 != 0

    return visible


def lengths_by_batch(device: str) -> Callable[..., Any]:
    lengths = torch.tensor([17, 64], dtype=torch.int32, device=device)
    return lambda b, h, q_idx, kv_idx: (kv_idx < lengths[b]) & (q_idx < lengths[b])


def lower_triangle_of_blocks(device: str) -> Callable[..., Any]:
    allowed = torch.ones(4, 4, device=device).tril().bool()
    return lambda b, h, q_idx, kv_idx: allowed[q_idx // 16][kv_idx // 16]


MASK_MODS: dict[str, Factory] = {
    "causal": lambda device: causal,
    "sliding_window": lambda device: window(9),
    "causal_window": lambda device: and_masks(causal, window(9)),
    "causal_window_ours": lambda device: flash_cute.and_masks(causal, window(9)),
    "prefix_lm": prefix_lm,
    "document": document,
    "document_causal": document_causal,
    "natten": natten,
    "natten_tiled": natten_tiled,
    "dilated": dilated,
    "block_diagonal": lambda device: lambda b, h, q_idx, kv_idx: q_idx // 16 == kv_idx // 16,
    "blocks_by_table": lower_triangle_of_blocks,
    "hashed": hashed,
    "lengths_by_batch": lengths_by_batch,
    "some_heads_local": lambda device: (
        lambda b, h, q_idx, kv_idx: torch.where(
            h % 2 == 0, (q_idx - kv_idx).abs() < 8, q_idx >= kv_idx
        )
    ),
    "window_or_sink": lambda device: and_masks(
        causal, or_masks(window(5), lambda b, h, q_idx, kv_idx: kv_idx < 4)
    ),
    "window_or_sink_ours": lambda device: flash_cute.and_masks(
        causal, flash_cute.or_masks(window(5), lambda b, h, q_idx, kv_idx: kv_idx < 4)
    ),
}


def noop(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score


def alibi(device: str) -> Callable[..., Any]:
    def bias(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        scale = torch.exp2(-((h + 1) * 8.0 / HEADS))
        return score + (kv_idx - q_idx) * scale

    return bias


def alibi_table(device: str) -> Callable[..., Any]:
    slopes = torch.tensor([2.0 ** -(8 * (i + 1) / HEADS) for i in range(HEADS)], device=device)
    return lambda score, b, h, q_idx, kv_idx: score - slopes[h] * torch.abs(q_idx - kv_idx)


def softcap(device: str, cap: float = 5.0) -> Callable[..., Any]:
    return lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap)


def relative_bias_table(device: str) -> Callable[..., Any]:
    table = _random((HEADS, 2 * SEQLEN), device, torch.float16)
    return lambda score, b, h, q_idx, kv_idx: score + table[h, q_idx - kv_idx + SEQLEN]


def wrapped_bias_table(device: str) -> Callable[..., Any]:
    """Negative differences count from the end of the table."""
    table = _random((HEADS, 2 * SEQLEN), device)
    return lambda score, b, h, q_idx, kv_idx: score + table[h, q_idx - kv_idx] * table[0, -1]


def buckets(device: str) -> Callable[..., Any]:
    """T5's logarithmic buckets of the distance."""
    table = _random((16, HEADS), device, torch.bfloat16)

    def bias(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = (q_idx - kv_idx).clamp(min=0)
        far = 8 + (torch.log(distance.float().clamp(min=1) / 8) / math.log(16) * 8).to(torch.int64)
        bucket = torch.where(distance < 8, distance, torch.minimum(far, torch.full_like(far, 15)))
        return score + table[bucket, h]

    return bias


def temperature(device: str) -> Callable[..., Any]:
    """Scores grow with the logarithm of the query's position, by a 0-dim tensor of its own."""
    floor, strength = torch.tensor(8.0, device=device), torch.tensor(0.25, device=device)

    def scaled(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * (torch.log(torch.floor((q_idx + 1) / floor) + 1.0) * strength + 1.0)

    return scaled


def _attended(score: Any, is_near: Any, far: float) -> Any:
    return torch.where(is_near, score, score * far)


def near_and_far(device: str) -> Callable[..., Any]:
    """By way of a helper function, a default and a dictionary."""
    options = {"far": 0.5}

    def scaled(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, near: int = 6) -> Any:
        return _attended(score, abs(q_idx - kv_idx) < near, options["far"])

    return scaled


SCORE_MODS: dict[str, Factory] = {
    "noop": lambda device: noop,
    "alibi": alibi,
    "alibi_table": alibi_table,
    "softcap": softcap,
    "relative_position": lambda device: lambda score, b, h, q_idx, kv_idx: score + (q_idx - kv_idx),
    "absolute_distance": lambda device: (
        lambda score, b, h, q_idx, kv_idx: score - 0.1 * (q_idx - kv_idx).abs().float()
    ),
    "relative_bias_table": relative_bias_table,
    "wrapped_bias_table": wrapped_bias_table,
    "buckets": buckets,
    "temperature": temperature,
    "scale_by_head": lambda device: lambda score, b, h, q_idx, kv_idx: score * (1.0 + h / HEADS),
    "lookup_by_key": lambda device: functools.partial(
        lambda score, b, h, q_idx, kv_idx, table: score + table[b, kv_idx],
        table=_random((BATCH, SEQLEN), device),
    ),
    "near_and_far": near_and_far,
    "causal_by_score": lambda device: (
        lambda score, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, score, -float("inf"))
    ),
    "checkerboard": lambda device: (
        lambda score, b, h, q_idx, kv_idx: torch.where(
            kv_idx % 2 == 0, torch.where(q_idx % 2 == 1, score * 0.5, score), score * 2
        )
    ),
}

ALL: dict[str, tuple[str, Factory]] = {
    **{name: ("mask_mod", factory) for name, factory in MASK_MODS.items()},
    **{name: ("score_mod", factory) for name, factory in SCORE_MODS.items()},
}
