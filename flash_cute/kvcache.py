"""Attention over a key/value cache: what serving calls for every step of decoding.

Layer 5, beside ``api``, which runs the request: on a GPU a kernel or a refusal, on the CPU the
reference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from flash_cute import api, append_plan, launch, modifiers, selection
from flash_cute.cache_request import (
    CacheArguments,
    CacheRequest,
    cache_request,
    check_cache_values,
    fill_lengths,
)
from flash_cute.problem import Options
from flash_cute.reference_cache import append, lower
from flash_cute.split_plan import SchedulerMetadata

Recalled = tuple[api.Result | None, launch.Key | None]


def flash_attn_with_kvcache(
    q: torch.Tensor | None,
    k_cache: torch.Tensor | None,
    v_cache: torch.Tensor | None,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | torch.Tensor | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    attention_chunk: int | None = None,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: SchedulerMetadata | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    only_qv: bool = False,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    sinks: torch.Tensor | None = None,
    score_mod: Callable[..., Any] | None = None,
    aux_tensors: tuple[torch.Tensor, ...] | None = None,
    block_mask: object | None = None,
    ver: int = 3,
    out: torch.Tensor | None = None,
    max_seqlen_k: int | torch.Tensor | None = None,
) -> api.Result:
    """Append new keys and values to a cache, in place, and attend to what is in it.

    Sequence b has the keys in rows cache_leftpad[b] to cache_seqlens[b] - 1 of its row of the
    cache, and then those that are appended. Each is computed as if it were alone: masks are aligned
    at the bottom right with its own lengths, new keys included, and callbacks count its keys from
    0, the first after the padding. What lies elsewhere in the cache is never read.

    Args:
        k, v: new keys and values, written to rows cache_seqlens[b] and following, which must exist.
            Both or neither; with only_qv v alone. No row may belong to two sequences, and k and v
            must not overlap the cache. Not under autograd.
        qv: a second query, of the head dimension of v: scores are ``q·k + qv·v`` (absorbed MLA).
        rotary_cos, rotary_sin: cosines and sines by position. New keys are rotated before they are
            written, new key i of a sequence to position ``rotary_seqlens + i``; so is query i where
            causal, window_size or attention_chunk is given; else all queries are rotated to
            ``rotary_seqlens``. Needs k.
        cache_seqlens: keys of each sequence that are in the cache, counted from row 0, left padding
            included; one integer is that of all. None is the whole cache.
        cache_batch_idx: row of the cache of each sequence, or of page_table where there is one.
            None is row b for sequence b.
        cache_leftpad: first row of each sequence that holds a key.
        page_table: the cache is paged: row j of sequence b is in slot j % page_size of page
            ``page_table[b, j // page_size]``, for any page_size. Entries that no row in use needs
            may hold anything.
        cu_seqlens_q: the queries are packed, sequence b in rows cu_seqlens_q[b] to
            cu_seqlens_q[b+1].
        cu_seqlens_k_new: likewise for k and v.
        max_seqlen_q, max_seqlen_k: upper bounds of the numbers of queries and of keys, new ones
            included, which help to plan the launch and change no result.
        rotary_seqlens: first position of each sequence for rotary_cos; None is cache_seqlens.
        q_descale, k_descale, v_descale: for float8 inputs only, which no kernel takes yet.
        softmax_scale: factor of the scores; None is head_dim ** -0.5 of q and qv together.
        causal, window_size, softcap, score_mod, block_mask, pack_gqa, out: as in
            ``flash_attn_func``. block_mask is for the capacity of the cache as seqlen_k.
        attention_chunk: likewise; None is 0.
        rotary_interleaved: whether channels are rotated in pairs (0, 1), (2, 3), …; if not, the
            first half of the rotated channels goes with the second.
        scheduler_metadata: the plan of ``get_scheduler_metadata`` for such a call. None makes one
            on the device where it is of use, once for all calls that share their lengths.
        num_splits: number of parts the keys are split into; 0 lets the package choose, 1 is no
            split; the result is the same up to rounding.
        only_qv: scores are ``qv·v`` alone; q, k_cache and k are None.
        sm_margin: multiprocessors to leave free, for a kernel that runs beside.
        return_softmax_lse: also return lse.
        sinks: one more logit per query head, the sink of ``flash_attn_func``.
        aux_tensors: the tensors of a score_mod in the native form, instead of its attribute of that
            name. A portable one reads what it captures.
        ver: generation of the interface, 3 or 4: they mean the same.

    Shapes: q (batch, seqlen_q, num_heads_q, head_dim), with cu_seqlens_q (total_q, …); k_cache
            (batch_cache, seqlen_cache, num_heads_kv, head_dim), with page_table (num_pages,
            page_size, …); v_cache likewise with head_dim_v; batch_cache is batch but for
            cache_batch_idx. k (batch, seqlen_new, num_heads_kv, head_dim), with cu_seqlens_k_new
            (total_new, …); v likewise with head_dim_v; qv like q with head_dim_v. All of one dtype,
            last stride 1, any other strides; dtypes as in flash_attn_func.
            rotary_cos, rotary_sin (positions, rotary_dim / 2) in the dtype of q, rotary_dim a
            multiple of 16 up to head_dim. cache_seqlens, cache_batch_idx, cache_leftpad,
            rotary_seqlens (batch,), cu_seqlens (batch + 1,), page_table (batch, max_pages), all
            int32. sinks (num_heads_q,).
            out like q with head_dim_v; lse (batch, num_heads_q, seqlen_q), with cu_seqlens_q
            (num_heads_q, total_q), float32.
    Units:  lse in natural log; rotary_cos and rotary_sin of angles by position, not of lengths.
    Raises: InvalidProblem (a ValueError) naming the argument, what came and what was expected;
            UnsupportedProblem (a NotImplementedError) for what nothing here does: on a GPU, with qv
            score_mod, block_mask, pages of other sizes than multiples of 8 and left padding in
            pages. A refused call has written nothing. The contents of index tensors
            are checked on the CPU only, as in flash_attn_varlen_func: on a GPU a new row without
            a place in the cache (past its capacity, or in a page or row that is not there) is
            dropped, and what is rotated to a position outside the tables becomes NaN.
    """
    mask = (causal, window_size, attention_chunk)
    numbers = (softmax_scale, softcap, pack_gqa, num_splits, return_softmax_lse)
    settings = ("kvcache", ver, sm_margin, rotary_interleaved, only_qv)
    rare: tuple[object, ...] = (q_descale, k_descale, v_descale, aux_tensors)
    is_rare = any([argument is not None for argument in rare])
    is_alone = only_qv and q is None and k_cache is None
    first, keys = (qv, v_cache) if is_alone else (q, k_cache)

    def recall(query: Any, seqused: Any, prelude: launch.Prelude = launch.NO_PRELUDE) -> Recalled:
        if is_rare or keys is None or v_cache is None:
            return None, None
        operands = (query, keys, v_cache)
        extras = (cu_seqlens_q, None, None, seqused, sinks, page_table)
        extras += (cache_batch_idx, cache_leftpad, qv)
        given = modifiers.given(score_mod, None, block_mask)
        everything = (mask, numbers, settings)
        return launch.recall(operands, everything, extras, given, out, scheduler_metadata, prelude)

    result = key = None
    new = (k, v, rotary_cos, rotary_sin, rotary_seqlens, cu_seqlens_k_new)
    if any([argument is not None for argument in new]):
        tensors: Any = (q, k, v, k_cache, v_cache, rotary_cos, rotary_sin)
        tensors += (None if type(cache_seqlens) is int else cache_seqlens, rotary_seqlens)
        tensors += (cache_batch_idx, page_table, cu_seqlens_q, cu_seqlens_k_new)
        options = (mask, rotary_interleaved, only_qv)
        step = None
        if qv is None:
            step, key = append_plan.recall(tensors, options, cache_seqlens, out)
        if step is not None:
            result, _ = recall(step.q, step.lengths, step)
    elif first is not None and keys is not None:
        seqused = _seqused(cache_seqlens, first, keys, cu_seqlens_q, page_table)
        if seqused is not None or cache_seqlens is None:
            result, key = recall(first, seqused)
    if result is not None:
        return result
    arguments = CacheArguments(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        k=k,
        v=v,
        qv=qv,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        rotary_seqlens=rotary_seqlens,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        page_table=page_table,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        only_qv=only_qv,
        descales=(q_descale, k_descale, v_descale),
        aux_tensors=aux_tensors,
        ver=ver,
    )
    options = Options(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        attention_chunk=0 if attention_chunk is None else attention_chunk,
        softcap=softcap,
        sink=sinks,
        score_mod=score_mod,
        block_mask=block_mask,
        pack_gqa=pack_gqa,
        num_splits=num_splits,
        scheduler_metadata=scheduler_metadata,
        sm_margin=sm_margin,
        return_lse=return_softmax_lse,
        out=out,
    )
    request = cache_request(arguments, options)
    if request.problem.device.type == "cpu":
        return _on_cpu(request)
    if request.problem.has_new_keys:
        return _append_and_attend(request, key, recall)
    return api.attend(request.problem, request.inputs, key)


def _seqused(
    cache_seqlens: Any, q: Any, k_cache: Any, cu_seqlens_q: Any, page_table: Any
) -> torch.Tensor | None:
    """The used lengths as a kernel takes them; None where validation has to have a look."""
    if cache_seqlens is None or isinstance(cache_seqlens, torch.Tensor):
        return cache_seqlens
    ranks = ((q, 4 if cu_seqlens_q is None else 3), (k_cache, 4), (cu_seqlens_q, 1))
    for tensor, rank in (*ranks, (page_table, 2)):
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor) or not tensor.is_cuda or tensor.dim() != rank:
            return None
    capacity = k_cache.shape[1] * (1 if page_table is None else page_table.shape[1])
    if type(cache_seqlens) is not int or not 0 <= cache_seqlens <= capacity:
        return None
    return fill_lengths(cache_seqlens, q, cu_seqlens_q)


def _append_and_attend(
    request: CacheRequest, key: append_plan.Key | None, recall: Callable[..., Recalled]
) -> api.Result:
    """Append and attend the long way on a GPU; all is refused before anything is written.

    Args:
        key: of the append; recall: looks for the attention, given its queries and lengths.
    """
    problem, inputs = request.problem, request.inputs
    target = selection.current_target(problem.device).without(problem.sm_margin)
    selection.key_for(problem, target, variant=launch.variant_of(inputs))
    step = append_plan.first_step(request, key)
    result, attention_key = recall(step.q, step.lengths, step)
    if result is not None:
        return result
    rest = dataclasses.replace(problem, has_new_keys=False, has_rotary=False)
    inputs = dataclasses.replace(inputs, q=step.q, seqused_k=step.lengths)
    return launch.attention(rest, inputs, attention_key, step)


def _on_cpu(request: CacheRequest) -> api.Result:
    """Run the reference; the cache is written last, when nothing can be refused any more."""
    spans = check_cache_values(request)
    if request.is_plain:
        return api.attend(request.problem, request.inputs)
    lowered = lower(request, spans)
    result = api.attend(lowered.problem, lowered.inputs)
    if request.problem.has_new_keys:
        append(request, spans, lowered.new)
    return result
