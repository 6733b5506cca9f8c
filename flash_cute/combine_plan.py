"""The launch of the kernel that merges partial results, for `flash_attn_combine` and split keys.

An attention launch over parts of the keys makes a plan once, beside its own, and enqueues it after
itself with plain integers::

    key = combine_key(arch, torch.float32, torch.bfloat16, head_dim)
    plan = make_combine_plan(ready_executable(key), shape, strides)
    plan.run((out_partial, lse_partial, out, lse, 0, 0, 0), stream)  # addresses
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flash_cute import selection, splits
from flash_cute.arguments import MAX_COMBINED_ROWS, NUM_COMBINE_ADDRESSES, CombineArguments
from flash_cute.cache import Executable
from flash_cute.errors import UnsupportedProblem

MAX_SPLITS = splits.MAX_SPLITS
MOST_TEAMS = 4  # of a row: every kernel has as many groups of threads in a CTA
HEAD_DIM_STEP = 8
MAX_HEAD_DIM = selection.COMBINE_TILE_DIMS[-1]

Addresses = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CombinePlan:
    """One merge of partial results; the addresses are all that varies.

    Shapes: arguments: those of CombineArguments between the addresses and the stream
    """

    executable: Executable
    arguments: tuple[int, ...]

    def run(self, addresses: Addresses, stream: int) -> None:
        """Enqueue the merge on a stream of the current device.

        Args:
            addresses: of out_partial, lse_partial, out, lse, cu_seqlens, seqused, split_counts; 0
                for an lse that is not wanted and for what the key says there is none of.
                out_partial and out are multiples of 16.
        """
        self.executable(*addresses, *self.arguments, stream)


@dataclass(frozen=True)
class CombineStrides:
    """Strides in elements; the last ones, of head_dim, are 1. A packed tensor has any for batch.

    Shapes: out_partial, lse_partial: (split, batch, seqlen, head); out, lse: (batch, seqlen, head)
    Contract: those of out_partial and out are multiples of 16 bytes where the extent is above 1.
    """

    out_partial: tuple[int, ...]
    lse_partial: tuple[int, ...]
    out: tuple[int, ...]
    lse: tuple[int, ...]


def combine_key(
    arch: str,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    head_dim: int,
    is_packed: bool = False,
    has_seqused: bool = False,
    has_split_counts: bool = False,
) -> selection.CombineKey:
    """Return the key of the kernel that merges parts of `dtype` into an output of `out_dtype`.

    Raises: UnsupportedProblem for a head dim or a dtype that the kernel does not have.
    """
    if head_dim % HEAD_DIM_STEP or not HEAD_DIM_STEP <= head_dim <= MAX_HEAD_DIM:
        raise UnsupportedProblem(
            f"out_partial.shape[-1] is {head_dim}, expected a multiple of {HEAD_DIM_STEP} up to "
            f"{MAX_HEAD_DIM}: the combine kernel has no other head dims (the CPU takes any)"
        )
    names = selection.SINK_DTYPE_NAMES
    for name, given in (("out_partial.dtype", dtype), ("out_dtype", out_dtype)):
        if given not in names:
            raise UnsupportedProblem(
                f"{name} is {given}: the combine kernel has {', '.join(map(str, names))} "
                "(the CPU takes float64 too)"
            )
    tile_d = next(tile for tile in selection.COMBINE_TILE_DIMS if tile >= head_dim)
    lengths = (is_packed, has_seqused, has_split_counts)
    return selection.CombineKey(arch, names[dtype], names[out_dtype], tile_d, *lengths)


def make_combine_plan(
    executable: Executable,
    shape: tuple[int, ...],
    strides: CombineStrides,
    num_sequences: int | None = None,
    teams: int = 1,
) -> CombinePlan:
    """Work out the merge of parts of one shape.

    Args:
        shape: (num_splits, batch, seqlen, num_heads, head_dim); packed (num_splits, 1, total,
            num_heads, head_dim). No extent is 0.
        num_sequences: entries of cu_seqlens less one, at least 1; None for padded sequences.
        teams: groups of threads that share the parts of a row, 1 or MOST_TEAMS. The order in which
            parts are added depends on it.
    Raises: UnsupportedProblem for more rows than can be counted.
    """
    num_splits, batch, seqlen, num_heads, head_dim = shape
    num_rows = batch * seqlen * num_heads
    if num_rows > MAX_COMBINED_ROWS:
        raise UnsupportedProblem(
            f"out_partial has {num_rows} rows (batch * seqlen * heads), at most "
            f"{MAX_COMBINED_ROWS}: split it"
        )
    walked = {
        f"{name}_stride_{mode}": stride
        for name, modes in (("out_partial", 4), ("lse_partial", 4), ("out", 3), ("lse", 3))
        for mode, stride in zip(
            ("split", "batch", "seqlen", "head")[-modes:], getattr(strides, name), strict=True
        )
    }
    arguments = CombineArguments(
        **dict.fromkeys(CombineArguments._fields[:NUM_COMBINE_ADDRESSES], 0),
        num_splits=num_splits,
        batch=batch,
        seqlen=seqlen,
        num_heads=num_heads,
        head_dim=head_dim,
        num_sequences=batch if num_sequences is None else num_sequences,
        teams=teams,
        **walked,
        stream=0,
    )
    return CombinePlan(executable, tuple(arguments[NUM_COMBINE_ADDRESSES:-1]))
