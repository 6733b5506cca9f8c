"""Prefix LM and dilated blocks, block sparse: most of the scores are never computed.

Code written for PyTorch's FlexAttention, with one import changed: `create_block_mask` is PyTorch's,
`flex_attention` is flash_cute's. A query sees the prefix, its own block of tokens, and every
third block before it. Blocks of 128 x 128 scores that nobody sees are skipped, and those that are
seen throughout need no mask.

    python examples/prefix_lm_dilated_block_sparse.py [--plot blocks.png]
"""

from typing import Any

import torch
from _common import Example, Way, random_qkv, run, softmax
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from flash_cute import and_masks, flex_attention, or_masks
from flash_cute.viz import plot_mask

BLOCK, DILATION, PREFIX = 128, 3, 200


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx <= q_idx


def prefix(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx < PREFIX


def dilated_blocks(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx // BLOCK - kv_idx // BLOCK) % DILATION == 0


MASK_MOD = or_masks(prefix, and_masks(causal, dilated_blocks))


def block_mask_of(device: str, seqlen: int) -> BlockMask:
    """The blocks of the mask, the same for every sequence and head."""
    return create_block_mask(MASK_MOD, None, None, seqlen, seqlen, device=device, BLOCK_SIZE=BLOCK)


def build(device: str, batch: int, seqlen: int) -> Example:
    def weights(scores: torch.Tensor) -> torch.Tensor:
        visible = torch.zeros(seqlen, seqlen, dtype=torch.bool)
        for row in range(0, seqlen, BLOCK):
            for col in range(row, -1, -BLOCK * DILATION):
                visible[row : row + BLOCK, col : col + BLOCK] = True
        visible = visible.tril()
        visible[:, :PREFIX] = True
        return softmax(scores, visible)

    block_mask = block_mask_of(device, seqlen)

    def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (batch, heads, seqlen, head_dim)
        return flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True).transpose(1, 2)

    q, k, v = random_qkv(device, batch, seqlen, (8, 2), head_dim=128)
    way = Way("flex_attention with a BlockMask", {"block_mask": block_mask}, flex)
    return Example(q, k, v, (way,), weights, {"mask_mod": MASK_MOD})


def draw(path: str) -> None:
    block_mask = block_mask_of("cpu", 12 * BLOCK)
    plot_mask(block_mask, title="prefix LM, every third block", path=path)


if __name__ == "__main__":
    run(build, draw)
