"""``flex_attention`` with PyTorch's signature: code written for FlexAttention changes one import.

Same layout, callbacks and ``BlockMask`` as ``torch.nn.attention.flex_attention``; the indices that
callbacks see start at the top left, and causal is whatever the callback says. What PyTorch's
function takes and this one cannot do is refused.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from flash_cute import api, launch, modifiers
from flash_cute.block_mask import batch_of
from flash_cute.errors import InvalidProblem, UnsupportedProblem, refuse
from flash_cute.problem import Options, attention_request


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: Any = None,
) -> Any:
    """Compute attention with a score_mod and a BlockMask, as PyTorch's flex_attention does.

    Args:
        score_mod: ``score_mod(score, b, h, q_idx, kv_idx)`` returns the new score of one element.
        block_mask: a ``BlockMask``, made for these lengths, or ``BlockSparseTensors``. A block that
            it does not name is hidden; its mask_mod is applied in its partial blocks and not in its
            full ones.
        scale: factor of q·k; None is head_dim ** -0.5.
        enable_gqa: allows fewer key heads than query heads, at a whole ratio.
        return_lse: also return the log-sum-exp.
        kernel_options: None, or empty: the options of PyTorch's kernels mean nothing here.
        return_aux: an ``AuxRequest``; its lse is available, its max_scores is not.

    Shapes: query (batch, num_heads_q, seqlen_q, head_dim); key (batch, num_heads_kv, seqlen_k,
            head_dim), or a batch of 1 with a block mask of the whole batch; value like key with
            head_dim_v. The result is (batch, num_heads_q, seqlen_q, head_dim_v), its dimensions in
            memory in the order of query's; lse (batch, num_heads_q, seqlen_q) float32
    Units:  lse in natural log.
    Raises: InvalidProblem (a ValueError) for a wrong request, UnsupportedProblem (a
            NotImplementedError) for one that nothing here does, on a GPU also for inputs that
            require grad outside torch.no_grad().
    """
    _check_options(enable_gqa, return_lse, kernel_options, return_aux)
    has_lse = return_lse or (return_aux is not None and return_aux.lse)
    result = space = plan_key = None
    if _is_on_gpu(query, key, value):
        # The kernel writes into a tensor of query's layout, so that nothing is moved afterwards.
        space = _empty_like(query, value.shape[-1])
        q, k, v, out = (tensor.transpose(1, 2) for tensor in (query, key, value, space))
        given = modifiers.given(score_mod, None, block_mask)
        settings = ("flex_attention", scale, enable_gqa, has_lse)
        result, plan_key = launch.recall((q, k, v), settings, launch.NO_EXTRAS, given, out)
    if result is None:
        key, value = _check_tensors(query, key, value, block_mask, enable_gqa)
        options = Options(
            softmax_scale=scale, score_mod=score_mod, block_mask=block_mask, return_lse=has_lse
        )
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
        problem, inputs = attention_request(q, k, v, options)
        if space is not None and not problem.requires_grad:
            inputs = dataclasses.replace(inputs, out=space.transpose(1, 2))
        result = api.attend(problem, inputs, plan_key)
    out, lse = result if isinstance(result, tuple) else (result, None)
    out = _like(query, out.transpose(1, 2)) if space is None else space
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse=lse, max_scores=None)
    return (out, lse) if return_lse else out


def _is_on_gpu(*tensors: Any) -> bool:
    """Whether these are four-dimensional tensors, the first on a GPU; checks of a call follow."""
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or tensor.dim() != 4:
            return False
    return tensors[0].is_cuda


def _check_options(
    enable_gqa: bool, return_lse: bool, kernel_options: dict[str, Any] | None, return_aux: Any
) -> None:
    for name, option in (("enable_gqa", enable_gqa), ("return_lse", return_lse)):
        if not isinstance(option, bool):
            refuse(name, repr(option), "True or False")
    if kernel_options:
        names = ", ".join(map(str, kernel_options))
        raise UnsupportedProblem(
            f"kernel_options has {names}, expected None: they tune PyTorch's own kernels"
        )
    if return_aux is None:
        return
    if return_lse:
        raise InvalidProblem("return_lse and return_aux are both given, expected at most one")
    if not (hasattr(return_aux, "lse") and hasattr(return_aux, "max_scores")):
        got = f"of type {type(return_aux).__name__}"
        refuse("return_aux", got, "an AuxRequest of torch.nn.attention.flex_attention")
    if return_aux.max_scores:
        raise UnsupportedProblem("return_aux.max_scores is True, expected False: not available")


def _check_tensors(
    query: Any, key: Any, value: Any, block_mask: Any, enable_gqa: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check what PyTorch's names and layout decide; returns key and value with the batch of query.

    The rest is checked with the problem, which calls them q, k and v.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, torch.Tensor):
            refuse(name, f"of type {type(tensor).__name__}", "a torch.Tensor")
        if tensor.dim() != 4:
            refuse(f"{name}.dim()", tensor.dim(), 4, "(batch, heads, seqlen, head_dim)")
        if tensor.dtype != query.dtype:
            refuse(f"{name}.dtype", tensor.dtype, query.dtype, "dtype of query")
        if tensor.device != query.device:
            refuse(f"{name}.device", tensor.device, query.device, "device of query")
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            refuse(f"{name}.stride(-1)", tensor.stride(-1), 1, f"pass {name}.contiguous()")
    if key.shape[-1] != query.shape[-1]:
        refuse("key.shape[-1]", key.shape[-1], query.shape[-1], "head_dim of query")
    for axis in range(3):
        if value.shape[axis] != key.shape[axis]:
            refuse(f"value.shape[{axis}]", value.shape[axis], key.shape[axis], "shape of key")
    if key.shape[1] != query.shape[1] and not enable_gqa:
        why = "heads of query; enable_gqa=True allows fewer"
        refuse("key.shape[1]", key.shape[1], query.shape[1], why)
    batch = query.shape[0]
    if key.shape[0] != batch:
        if key.shape[0] != 1 or batch_of(block_mask) != batch:
            why = "batch of query, or 1 with a block_mask of that batch"
            refuse("key.shape[0]", key.shape[0], batch, why)
        key, value = (tensor.expand(batch, -1, -1, -1) for tensor in (key, value))
    return key, value


def _like(query: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Lay out a result in memory in the order of query's dimensions, without gaps."""
    order, back = _memory_order(query.stride())
    return out.permute(order).contiguous().permute(back)


def _empty_like(query: torch.Tensor, head_dim_v: int) -> torch.Tensor:
    """A tensor for the result, laid out as `_like` does."""
    order, back = _memory_order(query.stride())
    sizes = (*query.shape[:3], head_dim_v)
    return query.new_empty([sizes[axis] for axis in order]).permute(back)


@functools.lru_cache(maxsize=1024)
def _memory_order(strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The dimensions from the slowest in memory to the last, the head dimension; the inverse."""
    order = (*sorted(range(3), key=lambda axis: strides[axis], reverse=True), 3)
    return order, tuple(order.index(axis) for axis in range(4))
