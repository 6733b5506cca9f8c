"""``get_scheduler_metadata``: the plan of a call with a cache, made before the call."""

from __future__ import annotations

from typing import cast

import torch

from flash_cute import current, launch, selection, splits, splitting
from flash_cute.errors import refuse
from flash_cute.problem import (
    AttentionProblem,
    check_bool,
    check_hint,
    check_index_tensor,
    check_int,
    check_tensor,
)
from flash_cute.split_plan import SchedulerMetadata, SplitPlan


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    split_size: int = 0,
) -> SchedulerMetadata:
    """Plan how the keys of ``flash_attn_with_kvcache`` are split, on the device and without a wait.

    A call makes such a plan itself, and shares it with later calls on the same unchanged lengths.
    Make one by hand to do so outside a CUDA graph, under ``torch.inference_mode`` (where nobody can
    tell whether a tensor has changed), or for parts of a fixed size. A plan is for one kind of
    call; one that does not fit is refused. With other lengths than those it was made for, results
    stay right and become slower.

    Args:
        max_seqlen_q: queries of a sequence; of packed ones, what most have.
        max_seqlen_k: keys that a sequence has room for.
        cache_seqlens, cu_seqlens_q, cu_seqlens_k_new, cache_leftpad, and all options: as given to
            ``flash_attn_with_kvcache``. cache_seqlens does not count new keys.
        page_size: of a paged cache.
        max_seqlen_k_new: new keys of each sequence, without cu_seqlens_k_new.
        headdim, headdim_v: of q and v; with a headdim_v above headdim for calls with qv.
        has_softcap: whether softcap is above 0.
        num_splits: parts of the keys of every sequence; 0 counts them.
        split_size: as in ``flash_attn_func``.
    Shapes: cache_seqlens, cache_leftpad (batch,), cu_seqlens (batch + 1,), int32.
    Raises: InvalidProblem, UnsupportedProblem, CompileDisallowed, CaptureError, as the call does.
    """
    tables = (cache_seqlens, cache_leftpad, cu_seqlens_q, cu_seqlens_k_new)
    device = _check_tables(batch_size, *tables)
    check_hint("max_seqlen_k_new", max_seqlen_k_new)
    check_bool("has_softcap", has_softcap)
    problem = AttentionProblem(
        dtype=qkv_dtype,
        device=device,
        batch=batch_size,
        seqlen_q=max_seqlen_q,
        seqlen_k=max_seqlen_k,
        num_heads_q=num_heads_q,
        num_heads_kv=num_heads_kv,
        head_dim=headdim,
        head_dim_v=headdim if headdim_v is None else headdim_v,
        causal=causal,
        window_left=window_size[0],
        window_right=window_size[1],
        attention_chunk=attention_chunk,
        softcap=1.0 if has_softcap else 0.0,
        is_packed_q=cu_seqlens_q is not None,
        mean_q=max_seqlen_q,
        has_seqused_k=True,
        has_leftpad=cache_leftpad is not None,
        has_qv=headdim_v is not None and headdim_v > headdim,
        page_size=page_size,
        pack_gqa=pack_gqa,
        num_splits=num_splits,
        split_size=split_size,
        sm_margin=sm_margin,
        has_scheduler_metadata=True,
    )
    lengths = _with_new(cache_seqlens, cu_seqlens_k_new, max_seqlen_k_new)
    if device.type == "cpu":  # the reference splits nothing
        plan = SplitPlan(batch_size, max_seqlen_q, 0, 0, 0, 0, 0, 0, 1)
        return SchedulerMetadata(torch.ones(batch_size, dtype=torch.int32), plan)
    return _on_gpu(problem, (cu_seqlens_q, None, None, lengths, cache_leftpad))


def _with_new(
    cache_seqlens: torch.Tensor, cu_seqlens_k_new: torch.Tensor | None, max_seqlen_k_new: int
) -> torch.Tensor:
    """The lengths after the new keys have been appended."""
    if cu_seqlens_k_new is not None:
        return cache_seqlens + cu_seqlens_k_new.diff()
    return cache_seqlens + max_seqlen_k_new if max_seqlen_k_new else cache_seqlens


def _check_tables(
    batch_size: int,
    cache_seqlens: torch.Tensor,
    cache_leftpad: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k_new: torch.Tensor | None,
) -> torch.device:
    """Check the index tensors and return their device."""
    check_int("batch_size", batch_size, 0)
    check_tensor("cache_seqlens", cache_seqlens)
    tables = {
        "cache_seqlens": (cache_seqlens, batch_size),
        "cache_leftpad": (cache_leftpad, batch_size),
        "cu_seqlens_q": (cu_seqlens_q, batch_size + 1),
        "cu_seqlens_k_new": (cu_seqlens_k_new, batch_size + 1),
    }
    for name, (tensor, size) in tables.items():
        if tensor is not None:
            check_index_tensor(name, tensor, 1, cache_seqlens.device)
            if tensor.shape[0] != size:
                refuse(f"{name}.shape[0]", tensor.shape[0], size, f"batch_size is {batch_size}")
    return cache_seqlens.device


def _on_gpu(
    problem: AttentionProblem, lengths: tuple[torch.Tensor | None, ...]
) -> SchedulerMetadata:
    target = selection.current_target(problem.device).without(problem.sm_margin)
    key = selection.key_for(problem, target)
    chosen = splits.choose(problem, key.spec, key.config, target)
    planner_key = cast(selection.PlannerKey, splitting.planner_key(problem, key))
    with torch.cuda.device(problem.device):
        executable = launch.ready_executable(planner_key)
        planner = splitting.make_planner(problem, key, target, chosen, executable)
        stream = current.raw_stream(problem.device.index or 0)
        counts = planner.make(lengths, stream)
        if problem.num_splits > 0:
            counts.fill_(problem.num_splits)
    return SchedulerMetadata(counts, planner.plan)
