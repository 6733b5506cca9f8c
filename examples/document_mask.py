"""Document mask: several documents in one row, none of which sees another.

The two usual ways to say it, with equal results: packed sequences with `cu_seqlens`, where every
document is a sequence of its own; or one long sequence with a mask_mod that compares labels. The
first is the faster one; the second composes with any other mask.

    python examples/document_mask.py [--plot documents.png]
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from _common import Example, Way, output, random_qkv, run, softmax

from flash_cute import flash_attn_varlen_func
from flash_cute.viz import plot_mask

SHARES = (0.31, 0.02, 0.17, 0.42, 0.08)  # lengths of the documents, as parts of the whole


def starts_of(seqlen: int) -> list[int]:
    """First token of each document, and the end of the last."""
    sums = [sum(SHARES[:i]) for i in range(1, len(SHARES))]
    return [0, *(round(part * seqlen) for part in sums), seqlen]


def labels_of(seqlen: int, device: str) -> torch.Tensor:
    """Number of the document that each token is of, (seqlen,) int32."""
    lengths = torch.tensor(starts_of(seqlen)).diff()
    labels = torch.repeat_interleave(torch.arange(len(SHARES)), lengths)
    return labels.to(device, torch.int32)


def same_document(labels: torch.Tensor) -> Callable[..., Any]:
    """Causal within a document; nothing between documents."""

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (labels[q_idx] == labels[kv_idx]) & (kv_idx <= q_idx)

    return mask_mod


def build(device: str, batch: int, seqlen: int) -> Example:
    def weights(scores: torch.Tensor) -> torch.Tensor:
        visible = torch.zeros(seqlen, seqlen, dtype=torch.bool)
        for start, end in pairwise(starts_of(seqlen)):
            visible[start:end, start:end] = torch.ones(end - start, end - start).tril().bool()
        return softmax(scores, visible)

    q, k, v = random_qkv(device, batch, seqlen, (8, 2), head_dim=128)
    # The rows of the batch follow one another, so all their documents are one list of sequences.
    edges = [row * seqlen + start for row in range(batch) for start in starts_of(seqlen)[:-1]]
    cu_seqlens = torch.tensor([*edges, batch * seqlen], dtype=torch.int32, device=device)
    packed = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "causal": True}
    operands = (q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1))

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return output(flash_attn_varlen_func(*operands, **packed)).view_as(q)

    masked = {"mask_mod": same_document(labels_of(seqlen, device))}
    ways = (Way("cu_seqlens", packed, call, operands), Way("mask_mod", masked))
    return Example(q, k, v, ways, weights, masked)


def draw(path: str) -> None:
    n = 128
    mask_mod = same_document(labels_of(n, "cpu"))
    plot_mask(mask_mod, seqlen_q=n, seqlen_k=n, title="five packed documents", path=path)


if __name__ == "__main__":
    run(build, draw)
