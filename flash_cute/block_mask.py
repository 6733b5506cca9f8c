"""Block sparsity: which blocks of scores are computed at all, and which of them need no mask.

The structure of a PyTorch ``BlockMask`` or of ``BlockSparseTensors``, validated and frozen. A block
of scores that neither list names is hidden; one in the full list is visible throughout; one in the
partial list is visible where the mask_mod says so.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch

from flash_cute.errors import refuse
from flash_cute.variant import callback_form

# PyTorch's block size for "no block mask", one block that is larger than any problem.
_ENDLESS = 1 << 30

# Counts and indices of partial and of full blocks, by their names in a BlockMask.
_TORCH_NAMES = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
_OUR_NAMES = ("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx")


@dataclasses.dataclass(frozen=True, eq=False)
class BlockSparseTensors:
    """Lists of blocks as plain tensors, for `block_mask=` in place of a PyTorch ``BlockMask``.

    ``mask_block_idx[b, h, m, :mask_block_cnt[b, h, m]]`` are the blocks of keys that row m of
    blocks applies the mask_mod in; those of the full list are visible throughout. Every other
    block is hidden, and no block may be in both lists. What lies behind the counts means nothing.

    Shapes: mask_block_cnt, full_block_cnt (batch, num_heads, M), mask_block_idx, full_block_idx
            (batch, num_heads, M, N), all int32 on the device of q; batch and num_heads (of queries)
            may be 1, for all. M is seqlen_q / block_size[0], rounded up, of packed sequences at
            least that of the longest; N is at least that of the keys. Without full_block_cnt and
            full_block_idx no block is full
    Units:  block_size in (queries, keys), or one number for both
    Raises: InvalidProblem for a wrong block_size; the call that uses it raises the rest, as for a
            BlockMask: it names the attribute, what came and what was expected.
    """

    mask_block_cnt: torch.Tensor
    mask_block_idx: torch.Tensor
    full_block_cnt: torch.Tensor | None = None
    full_block_idx: torch.Tensor | None = None
    block_size: tuple[int, int] = (128, 128)
    mask_mod: Callable[..., Any] | None = None  # None: partial blocks are visible throughout

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_size", block_size_pair(self.block_size))


def block_size_pair(block_size: Any) -> tuple[int, int]:
    """Return a block size as (queries, keys); one number is both. Raises: InvalidProblem."""
    pair = block_size if isinstance(block_size, (tuple, list)) else (block_size, block_size)
    sizes = [size for size in pair if isinstance(size, int) and not isinstance(size, bool)]
    if len(pair) != 2 or len(sizes) != 2 or min(sizes) < 1:
        refuse("block_size", repr(block_size), "a positive integer, or a pair of them")
    return sizes[0], sizes[1]


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
    names: tuple[str, ...] = _TORCH_NAMES  # of the four lists, for errors

    @property
    def layout(self) -> Hashable:
        """What of packed lists a kernel and its launch depend on, beside their addresses."""
        full = None
        if self.full_count is not None and self.full_index is not None:
            full = (self.full_count.shape, self.full_index.shape)
        return (self.block_size, self.partial_count.shape, self.partial_index.shape, full)

    def launch_arguments(self, tile: tuple[int, int], rows: tuple[int, int]) -> tuple[int, ...]:
        """Return the lists as plain integers for a kernel with that tile.

        Args:
            rows: of q and k: seqlen_q and seqlen_k, or more.

        In the order of device/block_sparsity.py.
        Contract: the lists must outlive the launch; they are read as int32, densely packed.
        """
        arguments = [*_tiles_per_block(self.block_size, tile, rows)]
        for count, index in (
            (self.partial_count, self.partial_index),
            (self.full_count, self.full_index),
        ):
            if count is None or index is None:
                continue
            batch, heads, num_rows = count.shape
            distances = (heads * num_rows if batch > 1 else 0, num_rows if heads > 1 else 0)
            sizes = (num_rows, index.shape[-1])
            arguments += [count.data_ptr(), index.data_ptr(), *distances, *sizes]
        return tuple(arguments)

    @property
    def is_packed(self) -> bool:
        """Whether the lists are as `launch_arguments` needs them."""
        lists = (self.partial_count, self.partial_index, self.full_count, self.full_index)
        for tensor in lists:
            if tensor is not None and not (tensor.dtype is torch.int32 and tensor.is_contiguous()):
                return False
        return True

    def packed(self) -> BlockStructure:
        """Return it with lists as `launch_arguments` needs them; itself where they are."""
        if self.is_packed:
            return self
        names = ("partial_count", "partial_index", "full_count", "full_index")
        tensors = {name: getattr(self, name) for name in names}
        ready = {n: t if t is None else t.int().contiguous() for n, t in tensors.items()}
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
        lists = (self.partial_count, self.partial_index, self.full_count, self.full_index)
        for part in (0, 2):
            count, index = lists[part : part + 2]
            if count is None or index is None or not count.numel():
                continue
            cols = index.shape[-1]
            if bool((count < 0).any()) or bool((count > cols).any()):
                got = f"{int(count.min())} to {int(count.max())}"
                refuse(f"block_mask.{self.names[part]}", got, f"0 to {cols}")
            used = torch.arange(cols, device=index.device) < count[..., None]
            is_bad = used & ((index < 0) | (index >= cols))
            if bool(is_bad.any()):
                what = f"an entry of block_mask.{self.names[part + 1]}"
                refuse(what, int(index[is_bad][0]), f"0 to {cols - 1}")

    def check_lengths(self, longest_q: int, longest_k: int) -> None:
        """Check that the lists reach the longest packed sequences; raises InvalidProblem."""
        rows, cols = self.partial_index.shape[2:]
        for axis, longest, blocks in ((0, longest_q, rows), (1, longest_k, cols)):
            needed = -(-longest // self.block_size[axis])
            if needed > blocks:
                why = f"blocks of {self.block_size[axis]}, for the longest sequence of {longest}"
                refuse(
                    f"block_mask.{self.names[axis]}.shape[-1]", blocks, f"at least {needed}", why
                )


@functools.lru_cache(maxsize=1024)
def _tiles_per_block(
    block_size: tuple[int, int], tile: tuple[int, int], lengths: tuple[int, int]
) -> tuple[int, int]:
    rows, cols = (
        max(1, min(size, -(-length // step) * step) // step)  # a block may outgrow the problem
        for size, length, step in zip(block_size, lengths, tile, strict=True)
    )
    return rows, cols


def _as_map(count: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    cols = index.shape[-1]
    used = torch.arange(cols, device=index.device) < count[..., None]
    found = torch.zeros(*index.shape[:-1], cols + 1, dtype=torch.bool, device=index.device)
    found.scatter_(-1, torch.where(used, index, cols).long(), True)
    return found[..., :cols]


# Batch, heads, and lengths or numbers of blocks; None where sequences are packed: on the device.
Sizes = tuple[int, int, int | None, int | None]


def sizes_of(
    q: torch.Tensor,
    k: torch.Tensor,
    packed_q: torch.Tensor | None,
    packed_k: torch.Tensor | None,
    page_table: torch.Tensor | None,
) -> Sizes:
    """Return the sizes of a problem, from its tensors and what says how they lie."""
    starts = packed_q if packed_q is not None else packed_k
    batch = q.shape[0] if starts is None else starts.shape[0] - 1
    seqlen_q = q.shape[1] if packed_q is None else None
    seqlen_k = k.shape[1] if packed_k is None and page_table is None else None
    return batch, q.shape[-2], seqlen_q, seqlen_k


def block_structure(block_mask: Any, sizes: Sizes, device: torch.device) -> BlockStructure:
    """Take over a block mask, checked against the problem; reads no device memory.

    Args:
        block_mask: a PyTorch ``BlockMask``, or ``BlockSparseTensors``.
        sizes: batch, num_heads, seqlen_q and seqlen_k of the problem; None for a length of packed
            or paged sequences, which the lists must reach: `check_lengths` sees to it on the CPU, a
            kernel hides what lies beyond.
    Raises: InvalidProblem naming the attribute, what came and what was expected.
    """
    batch, num_heads, seqlen_q, seqlen_k = sizes
    if isinstance(block_mask, BlockSparseTensors):
        names, block_size = _OUR_NAMES, block_mask.block_size
    else:
        names, block_size = _TORCH_NAMES, _torch_block_size(block_mask, seqlen_q, seqlen_k)
    rows = None if seqlen_q is None else -(-seqlen_q // block_size[0])
    cols = None if seqlen_k is None else -(-seqlen_k // block_size[1])
    lists = [getattr(block_mask, name) for name in names]
    partial, full = (lists[0], lists[1]), (lists[2], lists[3])
    _check_list(names[:2], partial, (batch, num_heads, rows, cols), device)
    if full[0] is not None or full[1] is not None:
        _check_list(names[2:], full, (batch, num_heads, partial[0].shape[2], cols), device)
    mask_mod = _mask_mod(block_mask.mask_mod)
    return BlockStructure(*partial, *full, block_size, mask_mod, names)


def _torch_block_size(
    block_mask: Any, seqlen_q: int | None, seqlen_k: int | None
) -> tuple[int, int]:
    """Check that this is a BlockMask for those lengths; returns the size of its blocks."""
    names = ("kv_num_blocks", "kv_indices", "BLOCK_SIZE", "mask_mod", "seq_lengths")
    if not all([hasattr(block_mask, name) for name in names]):
        got = f"of type {type(block_mask).__name__}"
        expected = "a torch.nn.attention.flex_attention.BlockMask, or BlockSparseTensors"
        refuse("block_mask", got, expected)
    block_size = (int(block_mask.BLOCK_SIZE[0]), int(block_mask.BLOCK_SIZE[1]))
    given = (int(block_mask.seq_lengths[0]), int(block_mask.seq_lengths[1]))
    expected = (
        given[0] if seqlen_q is None else seqlen_q,
        given[1] if seqlen_k is None else seqlen_k,
    )
    if given != expected and block_size != (_ENDLESS, _ENDLESS):
        why = "seqlen_q and seqlen_k of the call; make the BlockMask for these lengths"
        refuse("block_mask.seq_lengths", given, expected, why)
    return block_size


def _check_list(
    names: tuple[str, ...],
    pair: tuple[Any, Any],
    sizes: Sizes,
    device: torch.device,
) -> None:
    """Check one kind of blocks; `sizes` are (batch, num_heads, rows of blocks, columns)."""
    (count, index), (batch, num_heads, num_rows, num_cols) = pair, sizes
    for name, tensor, rank in zip(names, pair, (3, 4), strict=True):
        if not isinstance(tensor, torch.Tensor):
            refuse(f"block_mask.{name}", f"of type {type(tensor).__name__}", "a torch.Tensor")
        if tensor.dim() != rank:
            refuse(f"block_mask.{name}.dim()", tensor.dim(), rank)
        if tensor.dtype not in (torch.int32, torch.int64):
            refuse(f"block_mask.{name}.dtype", tensor.dtype, torch.int32)
        if tensor.device != device:
            refuse(f"block_mask.{name}.device", tensor.device, device, "device of q")
    shape, index_shape = count.shape, index.shape
    rows = max(1, shape[2]) if num_rows is None else num_rows
    cols = 1 if num_cols is None else num_cols
    for axis, allowed in enumerate(((1, batch), (1, num_heads), (rows,))):
        if shape[axis] not in allowed:
            expected = " or ".join(str(size) for size in sorted(set(allowed)))
            refuse(f"block_mask.{names[0]}.shape[{axis}]", shape[axis], expected)
    if index_shape[:-1] != shape or index_shape[-1] < cols:
        refuse(f"block_mask.{names[1]}.shape", tuple(index_shape), (*shape, cols))


def batch_of(block_mask: Any) -> int | None:
    """Return the batch that a block mask has lists for; None for what is no block mask."""
    is_ours = isinstance(block_mask, BlockSparseTensors)
    count = getattr(block_mask, (_OUR_NAMES if is_ours else _TORCH_NAMES)[0], None)
    return count.shape[0] if isinstance(count, torch.Tensor) and count.dim() else None


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
