"""Sliding window and sink, as in gpt-oss: a query sees 128 tokens, or attends to nothing at all.

The shapes are gpt-oss's: 64 query heads over 8 key heads of 64. Every other layer has the window.
The sink is one learned logit per query head that takes part in the softmax and has no value: a
head with nothing to say gives it its weight.

    python examples/sliding_window_sink.py [--plot window.png]
"""

import torch
from _common import Example, Way, random_qkv, run

from flash_cute import reference_mask
from flash_cute.viz import plot_mask

HEADS_Q, HEADS_KV, HEAD_DIM = 64, 8, 64
WINDOW = 128  # tokens, the query's own among them: 127 to its left


def make_sink(device: str) -> torch.Tensor:
    """A logit for each query head, from one that takes nothing to one that takes nearly all."""
    return torch.linspace(-4.0, 8.0, HEADS_Q).to(device, torch.bfloat16)


def build(device: str, batch: int, seqlen: int) -> Example:
    def weights(scores: torch.Tensor) -> torch.Tensor:
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool)
        visible = ones.tril() & ones.triu(1 - WINDOW)
        logit = make_sink("cpu").to(scores.dtype).view(1, -1, 1, 1)
        column = logit.expand(*scores.shape[:-1], 1)
        joined = torch.cat([scores.masked_fill(~visible, float("-inf")), column], dim=-1)
        return torch.softmax(joined, dim=-1)[..., :-1]  # the sink has no value

    mask = {"causal": True, "window_size": (WINDOW - 1, 0)}
    options = {**mask, "sink": make_sink(device)}
    q, k, v = random_qkv(device, batch, seqlen, (HEADS_Q, HEADS_KV), HEAD_DIM)
    return Example(q, k, v, (Way("window and sink", options),), weights, mask)


def draw(path: str) -> None:
    n = 384
    mask = reference_mask(n, n, causal=True, window_size=(WINDOW - 1, 0))
    plot_mask(mask, title="sliding window of 128 tokens", path=path)


if __name__ == "__main__":
    run(build, draw)
