"""Block sparsity: which blocks of scores are computed at all, and which of them need no mask.

The structure of a PyTorch ``BlockMask``, validated and frozen. A block of scores that neither list
names is hidden; one in the full list is visible throughout; one in the partial list is visible
where the mask_mod says so.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from flash_cute.errors import refuse
from flash_cute.variant import callback_form

# PyTorch's block size for "no block mask", one block that is larger than any problem.
_ENDLESS = 1 << 30


@dataclasses.dataclass(frozen=True, eq=False)
class BlockStructure:
    """The blocks of a mask, by row of blocks.

    Shapes: partial_count (b, h, rows) int32, partial_index (b, h, rows, cols) int32: the first
            partial_count entries of each row are column numbers, the rest means nothing; likewise
            full_count and full_index, or None. b is 1 or the batch, h is 1 or the query heads
    Units:  block_size (queries, keys) of one block
    """

    partial_count: torch.Tensor
    partial_index: torch.Tensor
    full_count: torch.Tensor | None
    full_index: torch.Tensor | None
    block_size: tuple[int, int]
    mask_mod: Callable[..., Any] | None  # None: partial blocks are visible throughout

    def launch_arguments(self, tile: tuple[int, int], seqlens: tuple[int, int]) -> tuple[int, ...]:
        """Return the lists as plain integers for a kernel with that tile.

        In the order of device/block_sparsity.py.
        Contract: the lists must outlive the launch; they are read as int32, densely packed.
        """
        sizes = [
            min(size, -(-length // step) * step)  # a block may be larger than the problem
            for size, length, step in zip(self.block_size, seqlens, tile, strict=True)
        ]
        arguments = [max(1, size // step) for size, step in zip(sizes, tile, strict=True)]
        for count, index in (
            (self.partial_count, self.partial_index),
            (self.full_count, self.full_index),
        ):
            if count is None or index is None:
                continue
            batch, heads, rows = count.shape
            distances = (heads * rows if batch > 1 else 0, rows if heads > 1 else 0)
            arguments += [count.data_ptr(), index.data_ptr(), *distances, index.shape[-1]]
        return tuple(arguments)

    def packed(self) -> BlockStructure:
        """Return it with lists as `launch_arguments` needs them; itself where they are."""
        names = ("partial_count", "partial_index", "full_count", "full_index")
        tensors = {name: getattr(self, name) for name in names}
        ready = {n: t if t is None else t.int().contiguous() for n, t in tensors.items()}
        if all(ready[name] is tensors[name] for name in names):
            return self
        return dataclasses.replace(self, **ready)

    @functools.cached_property
    def block_maps(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Which blocks are partial and which full, (b, h, rows, cols) bool each."""
        partial = _as_map(self.partial_count, self.partial_index)
        if self.full_count is None or self.full_index is None:
            return partial, torch.zeros_like(partial)
        return partial, _as_map(self.full_count, self.full_index)

    def mask_of(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        """Say whether a key is visible: a mask_mod, for the reference."""
        partial, full = self.block_maps
        block = (
            b if partial.shape[0] > 1 else 0,
            h if partial.shape[1] > 1 else 0,
            q_idx // self.block_size[0],
            kv_idx // self.block_size[1],
        )
        if self.mask_mod is None:
            return partial[block] | full[block]
        return full[block] | (partial[block] & self.mask_mod(b, h, q_idx, kv_idx))

    def check_indices(self) -> None:
        """Check the contents of the lists, which waits for the device; raises InvalidProblem."""
        for name, count, index in (
            ("kv", self.partial_count, self.partial_index),
            ("full_kv", self.full_count, self.full_index),
        ):
            if count is None or index is None or not count.numel():
                continue
            cols = index.shape[-1]
            if bool((count < 0).any()) or bool((count > cols).any()):
                got = f"{int(count.min())} to {int(count.max())}"
                refuse(f"block_mask.{name}_num_blocks", got, f"0 to {cols}")
            used = torch.arange(cols, device=index.device) < count[..., None]
            if bool((used & ((index < 0) | (index >= cols))).any()):
                bad = index[used & ((index < 0) | (index >= cols))][0]
                refuse(f"an entry of block_mask.{name}_indices", int(bad), f"0 to {cols - 1}")


def _as_map(count: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    cols = index.shape[-1]
    used = torch.arange(cols, device=index.device) < count[..., None]
    found = torch.zeros(*index.shape[:-1], cols + 1, dtype=torch.bool, device=index.device)
    found.scatter_(-1, torch.where(used, index, cols).long(), True)
    return found[..., :cols]


def block_structure(
    block_mask: Any,
    batch: int,
    num_heads: int,
    seqlens: tuple[int, int],
    device: torch.device,
) -> BlockStructure:
    """Take over a PyTorch ``BlockMask``, checked against the problem; reads no device memory.

    Raises: InvalidProblem naming the attribute, what came and what was expected.
    """
    names = ("kv_num_blocks", "kv_indices", "BLOCK_SIZE", "mask_mod", "seq_lengths")
    if not all(hasattr(block_mask, name) for name in names):
        got = f"of type {type(block_mask).__name__}"
        refuse("block_mask", got, "a torch.nn.attention.flex_attention.BlockMask")
    block_size = (int(block_mask.BLOCK_SIZE[0]), int(block_mask.BLOCK_SIZE[1]))
    given = (int(block_mask.seq_lengths[0]), int(block_mask.seq_lengths[1]))
    if given != seqlens and block_size != (_ENDLESS, _ENDLESS):
        why = "seqlen_q and seqlen_k of the call; make the BlockMask for these lengths"
        refuse("block_mask.seq_lengths", given, seqlens, why)
    blocks = tuple(-(-length // size) for length, size in zip(seqlens, block_size, strict=True))
    full = (block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    lists = {"kv": (block_mask.kv_num_blocks, block_mask.kv_indices)}
    if full[0] is not None:
        lists["full_kv"] = full
    for name, (count, index) in lists.items():
        for axis, sizes in enumerate(((1, batch), (1, num_heads), (blocks[0],))):
            if count.shape[axis] not in sizes:
                expected = " or ".join(str(size) for size in sorted(set(sizes)))
                refuse(f"block_mask.{name}_num_blocks.shape[{axis}]", count.shape[axis], expected)
        if tuple(index.shape[:-1]) != tuple(count.shape) or index.shape[-1] < blocks[1]:
            expected = (*count.shape, blocks[1])
            refuse(f"block_mask.{name}_indices.shape", tuple(index.shape), expected)
        if count.device != device:
            refuse(f"block_mask.{name}_num_blocks.device", count.device, device, "device of q")
    mask_mod = _mask_mod(block_mask.mask_mod)
    return BlockStructure(*lists["kv"], *lists.get("full_kv", (None, None)), block_size, mask_mod)


def _mask_mod(mask_mod: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """The mask of the partial blocks; None where it is PyTorch's that hides nothing."""
    name = getattr(mask_mod, "__name__", "")
    is_torch = (getattr(mask_mod, "__module__", "") or "").startswith("torch.nn.attention")
    if mask_mod is None or (is_torch and name == "noop_mask"):
        return None
    if is_torch and name == "_sliced_mask_mod_error":
        refuse("block_mask", "a slice of a BlockMask, which has no mask_mod", "a whole BlockMask")
    callback_form(mask_mod, "mask_mod")
    return mask_mod
