"""Softcap: Gemma 2 bends every score into (-50, 50) by a tanh, and lets half its layers look back
4096 tokens only.

The shapes are Gemma 2 9B's: 16 query heads over 8 key heads of 256. softcap is an option of the
call; the same as a score_mod is a second way to say it.

    python examples/softcap_gemma.py [--plot softcap.png]
"""

from typing import Any

import torch
from _common import Example, Way, positions, random_qkv, run, softmax

from flash_cute import reference_mask
from flash_cute.viz import plot_mask

CAP = 50.0
QUERY_GAIN = 16.0  # large scores, so that the cap matters


def capped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """The score_mod that says the same as softcap=CAP."""
    return CAP * torch.tanh(score / CAP)


def window_of(seqlen: int) -> int:
    """Tokens that a query of a local layer sees, itself included: shorter in a short demo."""
    return min(4096, seqlen // 2)


def build(device: str, batch: int, seqlen: int) -> Example:
    def weights(scores: torch.Tensor) -> torch.Tensor:
        q_idx, kv_idx = positions(scores)
        visible = (kv_idx <= q_idx) & (kv_idx > q_idx - window_of(seqlen))
        return softmax(CAP * torch.tanh(scores / CAP), visible)

    mask = {"causal": True, "window_size": (window_of(seqlen) - 1, 0)}
    common = {**mask, "softmax_scale": 256**-0.5}
    q, k, v = random_qkv(device, batch, seqlen, (16, 8), head_dim=256)
    ways = (
        Way("softcap=50", {**common, "softcap": CAP}),
        Way("tanh as a score_mod", {**common, "score_mod": capped}),
    )
    return Example(q * QUERY_GAIN, k, v, ways, weights, mask)


def draw(path: str) -> None:
    n = 64
    mask = reference_mask(n, n, causal=True, window_size=(window_of(n) - 1, 0))
    plot_mask(mask, title="a local layer, window of half the sequence", path=path)


if __name__ == "__main__":
    run(build, draw)
