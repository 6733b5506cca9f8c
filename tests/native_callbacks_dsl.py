"""Callbacks in the native form that take any number of scores, apart so that the DSL stays lazy.

Each factory takes what is captured, as torch tensors, and a width; PORTABLE holds the same
callbacks in the portable form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
import torch
from cutlass import Float32


def gathered(table: Any, *indices: Any) -> Any:
    """Elements of a table: one for scalar indices, a vector for vectors."""
    if not isinstance(indices[-1], cute.TensorSSA):
        return table[indices]
    result = cute.make_rmem_tensor(indices[-1].shape, table.element_type)
    for i in range(cute.size(indices[-1].shape)):
        result[i] = table[tuple(index[i] for index in indices)]
    return result.load()


def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any,
          aux_tensors: Any) -> Any:  # fmt: skip
    slope = aux_tensors[0][h[0] if isinstance(h, cute.TensorSSA) else h]
    return score + slope * (kv_idx - q_idx).to(Float32)


def bias(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any,
         aux_tensors: Any) -> Any:  # fmt: skip
    return score + gathered(aux_tensors[0], h, q_idx, kv_idx).to(Float32)


def documents(b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
    return gathered(aux_tensors[0], q_idx) == gathered(aux_tensors[0], kv_idx)


def window(b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
    return (q_idx - kv_idx < 40) & (kv_idx - q_idx < 13 + h + b)


PORTABLE: dict[str, Callable[[torch.Tensor], Callable[..., Any]]] = {
    "alibi": lambda table: lambda score, b, h, q_idx, kv_idx: score + table[h] * (kv_idx - q_idx),
    "bias": lambda table: lambda score, b, h, q_idx, kv_idx: score + table[h, q_idx, kv_idx],
    "documents": lambda table: lambda b, h, q_idx, kv_idx: table[q_idx] == table[kv_idx],
    "window": lambda table: (
        lambda b, h, q_idx, kv_idx: (q_idx - kv_idx < 40) & (kv_idx - q_idx < 13 + h + b)
    ),
}
KINDS = {"alibi": "score_mod", "bias": "score_mod", "documents": "mask_mod", "window": "mask_mod"}
_NATIVE: dict[str, Callable[..., Any]] = {
    "alibi": alibi, "bias": bias, "documents": documents, "window": window
}  # fmt: skip


def native(name: str, table: torch.Tensor, width: int) -> Callable[..., Any]:
    """The native form of a callback, of its own: attributes belong to one function."""
    inner = _NATIVE[name]
    if KINDS[name] == "score_mod":

        def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any,
                      aux_tensors: Any) -> Any:  # fmt: skip
            return inner(score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors)

        function: Any = score_mod
    else:
        function = lambda b, h, q_idx, kv_idx, seqlen_info, aux_tensors: inner(
            b, h, q_idx, kv_idx, seqlen_info, aux_tensors
        )
    function.__vec_size__, function.aux_tensors = width, (table,)
    return function


def table_of(name: str, heads: int, rows: int, keys: int, device: str) -> torch.Tensor:
    """What a callback captures, for so many query heads, queries and keys."""
    generator = torch.Generator().manual_seed(8)
    length = max(rows, keys)
    tables = {
        "alibi": lambda: torch.rand(heads, generator=generator) / 4,
        "bias": lambda: torch.randn(heads, rows, keys, generator=generator).bfloat16(),
        "documents": lambda: torch.arange(length).div(23, rounding_mode="floor").int(),
        "window": lambda: torch.zeros(1),
    }
    return tables[name]().to(device)
