"""ALiBi: each head lowers a score with the distance of its key, at a slope of its own.

Press, Smith and Lewis, "Train Short, Test Long", 2022: the slopes are 2^(-8/n), 2^(-16/n), … for
n heads, and there are no position embeddings. A score_mod says it in one line; the slopes are a
captured tensor, so other slopes need no other kernel.

    python examples/alibi.py [--plot alibi.png]
"""

from collections.abc import Callable
from typing import Any

import torch
from _common import Example, Way, positions, random_qkv, run, softmax

from flash_cute import reference_mask
from flash_cute.viz import plot_mask

HEADS = 8


def alibi(slopes: torch.Tensor) -> Callable[..., Any]:
    """The score_mod of these slopes, one a head."""

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score - slopes[h] * (q_idx - kv_idx)

    return score_mod


def head_slopes(device: str) -> torch.Tensor:
    """The geometric sequence of the paper."""
    return torch.exp2(-8.0 / HEADS * torch.arange(1, HEADS + 1, device=device))


def build(device: str, batch: int, seqlen: int) -> Example:
    def weights(scores: torch.Tensor) -> torch.Tensor:
        q_idx, kv_idx = positions(scores)
        slopes = torch.tensor([1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256])
        bias = slopes[:, None, None] * (kv_idx - q_idx)
        return softmax(scores + bias, kv_idx <= q_idx)

    options = {"causal": True, "score_mod": alibi(head_slopes(device))}
    q, k, v = random_qkv(device, batch, seqlen, (HEADS, HEADS), head_dim=128)
    return Example(q, k, v, (Way("causal and ALiBi", options),), weights, {"causal": True})


def draw(path: str) -> None:
    n = 64
    causal = reference_mask(n, n, causal=True)
    plot_mask(
        alibi(head_slopes("cpu")),
        head=2,
        seqlen_q=n,
        seqlen_k=n,
        mask=causal,
        title="ALiBi, the third of 8 heads",
        path=path,
    )


if __name__ == "__main__":
    run(build, draw)
