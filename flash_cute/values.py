"""The contents of index tensors, checked on the host: what no request knows without reading them.

On a GPU nobody looks: reading them would make every call wait for the device.
"""

from __future__ import annotations

from typing import cast

import torch

from flash_cute.errors import refuse
from flash_cute.problem import AttentionInputs, AttentionProblem


def check_values(problem: AttentionProblem, inputs: AttentionInputs) -> None:
    """Check the contents of the length tensors and of the used part of the page table.

    Reads the tensors on the host, so it waits for the device. Rows of a packed tensor that lie past
    the last entry of cu_seqlens are slack, and legal; unused page table entries may hold anything.

    Raises: InvalidProblem naming the entry.
    """
    q, k = inputs.q, inputs.k
    capacity_q = check_cu_seqlens("q", inputs.cu_seqlens_q, q, problem.seqlen_q)
    capacity_k = check_cu_seqlens("k", inputs.cu_seqlens_k, k, problem.seqlen_k)
    seqlen_k = problem.seqlen_k
    _check_seqused("seqused_q", inputs.seqused_q, capacity_q or [problem.seqlen_q] * problem.batch)
    _check_seqused("seqused_k", inputs.seqused_k, capacity_k or [seqlen_k] * problem.batch)
    if inputs.page_table is not None and problem.page_size is not None:
        used = [seqlen_k] * problem.batch
        if inputs.seqused_k is not None:
            used = to_list(inputs.seqused_k)
        _check_page_table(inputs.page_table, used, problem.page_size, num_pages=k.shape[0])
        capacity_k = used
    if inputs.block_mask is not None:
        inputs.block_mask.check_indices()
        lengths_q = capacity_q or [problem.seqlen_q]
        lengths_k = capacity_k or [problem.seqlen_k]
        inputs.block_mask.check_lengths(max(lengths_q, default=0), max(lengths_k, default=0))


def to_list(tensor: torch.Tensor) -> list[int]:
    """Return the values of an index tensor; waits for the device."""
    return cast("list[int]", tensor.tolist())  # pyright: ignore[reportUnknownMemberType]


def check_cu_seqlens(
    side: str, cu_seqlens: torch.Tensor | None, packed: torch.Tensor, longest: int
) -> list[int]:
    """Check cu_seqlens of side q, k or k_new; returns the lengths, nothing for a dense side."""
    if cu_seqlens is None:
        return []
    name, starts = f"cu_seqlens_{side}", to_list(cu_seqlens)
    if starts[0] != 0:
        refuse(f"{name}[0]", starts[0], 0)
    lengths: list[int] = []
    for index in range(1, len(starts)):
        if starts[index] < starts[index - 1]:
            at_least = f"at least {starts[index - 1]}"
            refuse(f"{name}[{index}]", starts[index], at_least, f"{name}[{index - 1}]")
        lengths.append(starts[index] - starts[index - 1])
    total = packed.shape[0]
    if starts[-1] > total:
        refuse(f"{name}[-1]", starts[-1], f"at most {total}", f"{side[0]}.shape[0]")
    if lengths and max(lengths) > longest:
        refuse(f"max_seqlen_{side}", longest, f"at least {max(lengths)}", f"longest of {name}")
    return lengths


def _check_seqused(name: str, seqused: torch.Tensor | None, capacity: list[int]) -> None:
    if seqused is None:
        return
    for index, (used, most) in enumerate(zip(to_list(seqused), capacity, strict=True)):
        if not 0 <= used <= most:
            refuse(f"{name}[{index}]", used, f"0 to {most}", "length of the sequence")


def _check_page_table(
    page_table: torch.Tensor, used: list[int], page_size: int, num_pages: int
) -> None:
    for row, length in enumerate(used):
        pages = to_list(page_table[row, : -(-length // page_size)])
        for column, page in enumerate(pages):
            if not 0 <= page < num_pages:
                refuse(f"page_table[{row}, {column}]", page, f"0 to {num_pages - 1}", "pages of k")
