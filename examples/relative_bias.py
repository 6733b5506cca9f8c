"""Relative bias: a learned number for each head and each distance, added to the score.

As in T5 and Swin: `table[h, q_idx - kv_idx]`, here with every distance up to a largest one in a
column of its own, and one column for all that is farther. The table is a captured tensor, read in
the kernel; a training step that changes it compiles nothing.

    python examples/relative_bias.py [--plot relative_bias.png]
"""

from collections.abc import Callable
from typing import Any

import torch
from _common import Example, Way, random_qkv, run, softmax

from flash_cute.viz import plot_mask

HEADS, FARTHEST = 8, 128


def relative_bias(table: torch.Tensor) -> Callable[..., Any]:
    """The score_mod of a table (heads, 2 * FARTHEST + 1)."""

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = torch.clamp(q_idx - kv_idx, -FARTHEST, FARTHEST)
        return score + table[h, distance + FARTHEST]

    return score_mod


def make_table(device: str) -> torch.Tensor:
    """A table as training might leave it: waves of a length of their own for each head."""
    distance = torch.arange(-FARTHEST, FARTHEST + 1)
    lengths = torch.linspace(8, 64, HEADS)[:, None]
    table = 2 * torch.cos(2 * torch.pi * distance / lengths) - distance.abs() / 32
    return table.to(device, torch.float32)


def build(device: str, batch: int, seqlen: int) -> Example:
    def weights(scores: torch.Tensor) -> torch.Tensor:
        # Row i of the bias is the table, reversed, with its middle at column i.
        rows, table = scores.shape[-1], make_table("cpu").flip(1)
        left, right = table[:, :1].expand(-1, rows), table[:, -1:].expand(-1, rows)
        wide = torch.cat([left, table, right], dim=1)
        start = rows + FARTHEST
        bias = torch.stack([wide[:, start - i : start - i + rows] for i in range(rows)], dim=1)
        return softmax(scores + bias)

    options = {"score_mod": relative_bias(make_table(device))}
    q, k, v = random_qkv(device, batch, seqlen, (HEADS, HEADS), head_dim=64)
    return Example(q, k, v, (Way("bias from a table", options),), weights)


def draw(path: str) -> None:
    plot_mask(
        relative_bias(make_table("cpu")),
        head=1,
        seqlen_q=96,
        seqlen_k=96,
        title="relative bias, the second of 8 heads",
        path=path,
    )


if __name__ == "__main__":
    run(build, draw)
