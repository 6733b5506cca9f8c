"""Prefix LM: the prompt sees itself in both directions, what follows is causal.

A prefix length per sequence, in a captured tensor that the mask_mod indexes by `b`: other lengths
need no other kernel.

    python examples/prefix_lm.py [--plot prefix_lm.png]
"""

from collections.abc import Callable
from typing import Any

import torch
from _common import Example, Way, random_qkv, run, softmax

from flash_cute.viz import plot_mask


def prefix_lm(lengths: torch.Tensor) -> Callable[..., Any]:
    """The mask_mod of these prefix lengths, (batch,) int32."""

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx < lengths[b]) | (kv_idx <= q_idx)

    return mask_mod


def prefix_lengths(device: str, batch: int, seqlen: int) -> torch.Tensor:
    """Prefixes of a quarter of the sequence, a half, and so on."""
    return torch.tensor([(b % 3 + 1) * seqlen // 4 for b in range(batch)], dtype=torch.int32).to(
        device
    )


def build(device: str, batch: int, seqlen: int) -> Example:
    lengths = prefix_lengths(device, batch, seqlen)

    def weights(scores: torch.Tensor) -> torch.Tensor:
        visible = torch.ones(batch, 1, seqlen, seqlen, dtype=torch.bool).tril()
        for b, prefix in enumerate(lengths.tolist()):
            visible[b, :, :, :prefix] = True
        return softmax(scores, visible)

    mask = {"mask_mod": prefix_lm(lengths)}
    q, k, v = random_qkv(device, batch, seqlen, (8, 2), head_dim=128)
    return Example(q, k, v, (Way("prefix as a mask_mod", mask),), weights, mask)


def draw(path: str) -> None:
    n = 64
    mask_mod = prefix_lm(prefix_lengths("cpu", 1, n))
    plot_mask(mask_mod, seqlen_q=n, seqlen_k=n, title="prefix LM, prefix of 16", path=path)


if __name__ == "__main__":
    run(build, draw)
