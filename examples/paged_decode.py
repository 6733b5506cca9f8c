"""Paged decode: one step of a serving engine, every sequence with one new query and its own length.

Keys and values lie in pages of one pool, in any order; a page table says which pages a sequence
has. What no sequence uses is NaN here, and entries of the table past a sequence's end are -1: none
of it is ever read. The definition gathers the keys of each sequence first.

    python examples/paged_decode.py [--plot pages.png]
"""

import torch
from _common import Example, Tensors, Way, output, random_qkv, run, softmax

from flash_cute import flash_attn_with_kvcache
from flash_cute.viz import plot_mask

SHARES = (1.0, 0.37, 0.003, 0.81)  # lengths of the sequences, as parts of the longest
PAGE_SIZES = (16, 128)


def lengths_of(batch: int, seqlen: int, device: str) -> torch.Tensor:
    """Keys of each sequence, (batch,) int32."""
    lengths = [max(1, round(SHARES[b % len(SHARES)] * seqlen)) for b in range(batch)]
    return torch.tensor(lengths, dtype=torch.int32, device=device)


def page_table(lengths: torch.Tensor, seqlen: int, page_size: int) -> torch.Tensor:
    """Pages of each sequence, drawn from a shuffled pool; -1 where it needs none."""
    columns = -(-seqlen // page_size)
    source = torch.Generator().manual_seed(page_size)
    pages = torch.randperm(len(lengths) * columns, generator=source).view(-1, columns)
    is_used = torch.arange(columns) * page_size < lengths.cpu()[:, None]
    return torch.where(is_used, pages, -1).to(lengths.device, torch.int32)


def in_pages(
    cache: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Move keys (batch, seqlen, heads, dim) to where the table says; NaN everywhere else."""
    pool = cache.new_full((table.numel(), page_size, *cache.shape[2:]), float("nan"))
    position = torch.arange(cache.shape[1], device=cache.device)
    is_used = position < lengths[:, None]
    page = table[:, position // page_size].long()
    slot = (position % page_size).expand_as(page)
    pool[page[is_used], slot[is_used]] = cache[is_used]
    return pool


def paged_way(name: str, operands: Tensors, lengths: torch.Tensor, table: torch.Tensor) -> Way:
    """The step over one layout; the options are what flash_attn_varlen_func calls them."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return output(flash_attn_with_kvcache(*operands, cache_seqlens=lengths, page_table=table))

    return Way(name, {"seqused_k": lengths, "page_table": table}, call, operands)


def build(device: str, batch: int, seqlen: int) -> Example:
    q, k, v = random_qkv(device, batch, seqlen, (32, 8), head_dim=128)
    q, lengths = q[:, -1:], lengths_of(batch, seqlen, device)

    def weights(scores: torch.Tensor) -> torch.Tensor:
        return softmax(scores, torch.arange(seqlen) < lengths.cpu()[:, None, None, None])

    ways: list[Way] = []
    for size in PAGE_SIZES:
        table = page_table(lengths, seqlen, size)
        operands = (q, in_pages(k, lengths, table, size), in_pages(v, lengths, table, size))
        ways.append(paged_way(f"pages of {size}", operands, lengths, table))
    return Example(q, k, v, tuple(ways), weights, {"seqused_k": lengths})


def draw(path: str) -> None:
    batch, seqlen, size = 4, 24, 4
    lengths = lengths_of(batch, seqlen, "cpu")
    table = page_table(lengths, seqlen, size)
    owners = torch.arange(batch)[:, None, None, None].expand(batch, seqlen, 1, 1) + 1.0
    pool = in_pages(owners, lengths, table, size).flatten()
    seen = pool == torch.arange(1, batch + 1)[:, None]
    plot_mask(seen, title="which slots of the pool each sequence sees", path=path)


if __name__ == "__main__":
    run(build, draw)
