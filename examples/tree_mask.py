"""Tree mask: speculative decoding checks a tree of guessed tokens in one pass.

Each guess sees the whole context and its own ancestors, never a sibling. The tree is a table of
who descends from whom, captured by the mask_mod: another tree needs no other kernel.

    python examples/tree_mask.py [--plot tree.png]
"""

from collections.abc import Callable
from typing import Any

import torch
from _common import Example, Way, random_qkv, run, softmax

from flash_cute.viz import plot_mask

CHILDREN = (4, 3, 2, 1, 1)  # of every node, level by level: 4 first guesses, 12 second ones, ...


def parents() -> list[int]:
    """The parent of each guess; -1 for those that follow the context directly."""
    found, level = [], [-1]
    for count in CHILDREN:
        following = []
        for parent in level:
            following += range(len(found), len(found) + count)
            found += [parent] * count
        level = following
    return found


def ancestors(device: str) -> torch.Tensor:
    """Whether guess i is, or descends from, guess j: (guesses, guesses) bool."""
    tree = parents()
    seen = torch.eye(len(tree), dtype=torch.bool)
    for node, parent in enumerate(tree):  # parents come before their children
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen.to(device)


def tree_mask(seen: torch.Tensor, context: int) -> Callable[..., Any]:
    """The mask_mod of a tree behind `context` tokens: queries are the guesses alone."""

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        is_context = kv_idx < context
        return is_context | seen[q_idx, torch.where(is_context, 0, kv_idx - context)]

    return mask_mod


def build(device: str, batch: int, seqlen: int) -> Example:
    tree = parents()
    context = seqlen - len(tree)

    def weights(scores: torch.Tensor) -> torch.Tensor:
        visible = torch.zeros(len(tree), seqlen, dtype=torch.bool)
        visible[:, :context] = True
        for guess in range(len(tree)):  # walk up to the root
            node = guess
            while node >= 0:
                visible[guess, context + node] = True
                node = tree[node]
        return softmax(scores, visible)

    mask = {"mask_mod": tree_mask(ancestors(device), context)}
    q, k, v = random_qkv(device, batch, seqlen, (32, 8), head_dim=128)
    way = Way("tree as a mask_mod", mask)
    return Example(q[:, context:], k, v, (way,), weights, mask)


def draw(path: str) -> None:
    context, guesses = 16, len(parents())
    plot_mask(
        tree_mask(ancestors("cpu"), context),
        seqlen_q=guesses,
        seqlen_k=context + guesses,
        title=f"{guesses} guesses behind {context} tokens of context",
        path=path,
    )


if __name__ == "__main__":
    run(build, draw)
