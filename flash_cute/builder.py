"""`block_mask_from`: PyTorch's BlockMask of a mask_mod, without a mask of the size of the scores.

PyTorch's ``create_block_mask`` evaluates the mask for every pair of a query and a key and keeps it
all. Here a kernel (device/block_builder.py) keeps one byte per block; on the CPU one row of blocks
is evaluated at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from flash_cute import current, launch, plan, selection
from flash_cute.arguments import BlockBuilderArguments
from flash_cute.block_mask import block_size_pair
from flash_cute.errors import UnsupportedProblem, refuse
from flash_cute.reference import visible_rows
from flash_cute.variant import INDEX_LIMIT, NATIVE, as_callback, callback_form

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MAX_BLOCKS = 2**30  # the kernels number blocks, and rows and columns of them, in 32 bits
MAX_KEYS_PER_LANE = 4
_WARP = 32

# Partial and full lists by rows of blocks, then by columns, as BlockBuilderArguments has them.
_Lists = tuple[torch.Tensor, ...]


def block_mask_from(
    mask_mod: Callable[..., Any],
    batch: int | None,
    num_heads: int | None,
    seqlen_q: int,
    seqlen_k: int,
    device: torch.device | str | int | None = None,
    block_size: int | tuple[int, int] = 128,
) -> BlockMask:
    """Build a BlockMask, as PyTorch's create_block_mask does, in memory that grows with the blocks.

    The arguments are those of ``create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, device,
    BLOCK_SIZE)``, and so are all lists of the result, entry by entry. It fits flex_attention of
    both. Every element counts; a block that reaches past the last query or key is never full.

    Args:
        mask_mod: ``mask_mod(b, h, q_idx, kv_idx)`` returns True where the key is visible. The
            values of tensors that it captures may change between calls without a compile.
        batch: number of sequences; None is one that stands for all.
        num_heads: number of query heads; None is one that stands for all.
        device: where to build it, and where captured tensors are; None is the current accelerator,
            or the CPU.
        block_size: (queries, keys) of a block, or one number for both.

    Shapes: with M and N blocks of queries and of keys, kv_num_blocks and full_kv_num_blocks
            (batch, num_heads, M), kv_indices and full_kv_indices (batch, num_heads, M, N), and the
            q_* lists with M and N exchanged; int32
    Raises: InvalidProblem for a wrong argument or a result that is not bool, UnsupportedProblem for
            a mask_mod that cannot be compiled or keyed, a native one on the CPU, and sizes past the
            kernels' indices; on a GPU CaptureError and CompileDisallowed as the attention functions
            do.
    """
    device = _device(device)
    size = block_size_pair(block_size)
    sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    sizes |= {n: v for n, v in (("batch", batch), ("num_heads", num_heads)) if v is not None}
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            refuse(name, repr(value), "an integer of at least 0")
    form = callback_form(mask_mod, "mask_mod")
    if form == NATIVE and device.type == "cpu":
        raise UnsupportedProblem(
            "mask_mod is in the native form, of CuTe values, which runs in GPU kernels only; "
            "on the CPU the portable form runs"
        )
    extents = (1 if batch is None else batch, 1 if num_heads is None else num_heads)
    build = _on_cpu if device.type == "cpu" else _on_gpu
    rows, cols = build(mask_mod, extents, (seqlen_q, seqlen_k), size, device)

    from torch.nn.attention.flex_attention import BlockMask

    return BlockMask(
        seq_lengths=(seqlen_q, seqlen_k),
        kv_num_blocks=rows[0],
        kv_indices=rows[1],
        full_kv_num_blocks=rows[2],
        full_kv_indices=rows[3],
        q_num_blocks=cols[0],
        q_indices=cols[1],
        full_q_num_blocks=cols[2],
        full_q_indices=cols[3],
        BLOCK_SIZE=size,
        mask_mod=mask_mod,
    )


def _device(device: torch.device | str | int | None) -> torch.device:
    """The device with its number, of a kind that something here runs on."""
    if device is None:
        device = torch.accelerator.current_accelerator() or "cpu"
    found = torch.device(device)
    if found.type not in ("cpu", "cuda"):
        refuse("device", found, "cuda or cpu")
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", current.current_device())
    return found


def _blocks(seqlens: tuple[int, int], size: tuple[int, int]) -> tuple[int, int]:
    return -(-seqlens[0] // size[0]), -(-seqlens[1] // size[1])


# ---- CPU -----------------------------------------------------------------------------------------


def _on_cpu(
    mask_mod: Callable[..., Any],
    extents: tuple[int, int],
    seqlens: tuple[int, int],
    size: tuple[int, int],
    device: torch.device,
) -> tuple[_Lists, _Lists]:
    """Lists by rows and by columns; only one row of blocks is evaluated at a time."""
    num_rows, num_cols = _blocks(seqlens, size)
    visible = torch.zeros(*extents, num_rows, num_cols, dtype=torch.int64)
    block_of_key = torch.arange(seqlens[1]).div(size[1], rounding_mode="floor")
    if seqlens[1]:
        for b, h, row in itertools.product(*map(range, (*extents, num_rows))):
            queries = (row * size[0], min((row + 1) * size[0], seqlens[0]))
            shown = visible_rows(mask_mod, b, h, queries, seqlens[1]).sum(0)
            visible[b, h, row].index_add_(0, block_of_key, shown)
    full = visible == size[0] * size[1]
    partial = (visible > 0) & ~full
    by_rows = (*_listed(partial), *_listed(full))
    return by_rows, (*_listed(partial.mT), *_listed(full.mT))


def _listed(is_listed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts, and indices with the listed ones first: both in ascending order."""
    order = is_listed.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return is_listed.sum(-1).int(), order.int().contiguous()


# ---- GPU -----------------------------------------------------------------------------------------


def _on_gpu(
    mask_mod: Callable[..., Any],
    extents: tuple[int, int],
    seqlens: tuple[int, int],
    size: tuple[int, int],
    device: torch.device,
) -> tuple[_Lists, _Lists]:
    """Lists by rows and by columns, written by the kernels on the current stream."""
    longest = max(*extents, *seqlens)
    if longest > INDEX_LIMIT:
        raise UnsupportedProblem(
            f"a mask_mod with an extent of {longest}: kernels give callbacks indices up to "
            f"{INDEX_LIMIT} only"
        )
    num_rows, num_cols = _blocks(seqlens, size)
    num_blocks = extents[0] * extents[1] * num_rows * num_cols
    if num_blocks > MAX_BLOCKS:
        raise UnsupportedProblem(
            f"a block mask of {num_blocks} blocks, at most {MAX_BLOCKS}: use larger blocks, or "
            "None for batch and num_heads where all are alike"
        )
    callback = as_callback(mask_mod, "mask_mod")
    callback.check_device(device, "device of the block mask")
    with torch.cuda.device(device):
        rows = _empty_lists(extents, num_rows, num_cols)
        cols = _empty_lists(extents, num_cols, num_rows)
        if not num_blocks:
            for counts in (*rows[::2], *cols[::2]):
                counts.zero_()
            return rows, cols
        key = selection.BuilderKey(
            selection.current_target(device).arch,
            callback.key,
            min(MAX_KEYS_PER_LANE, -(-size[1] // _WARP)),
        )
        executable = launch.ready_executable(key)
        classes = _empty((num_blocks,), torch.int8)
        tensors = dict(zip(BlockBuilderArguments._fields, (classes, *rows, *cols), strict=False))
        # A block may be larger than anything: cut, it still reaches past the end.
        block_q, block_k = (min(step, 2 * INDEX_LIMIT) for step in size)
        arguments = BlockBuilderArguments(
            **{name: tensor.data_ptr() for name, tensor in tensors.items()},
            batch=extents[0],
            num_heads=extents[1],
            num_rows=num_rows,
            num_cols=num_cols,
            block_q=block_q,
            block_k=block_k,
            seqlen_q=seqlens[0],
            seqlen_k=seqlens[1],
            stream=current.raw_stream(device.index),
        )
        executable(*arguments, *callback.launch_arguments())
    return rows, cols


def _empty_lists(extents: tuple[int, int], lines: int, length: int) -> _Lists:
    """Uninitialised lists of partial and of full blocks: counts, indices, counts, indices."""
    shape = (*extents, lines)
    return tuple(_empty(size, torch.int32) for size in (shape, (*shape, length)) * 2)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return current.empty(shape, plan.contiguous_strides(shape), dtype)
