"""The public functions: attention on tensors, and questions about it.

Tensors on a GPU run a kernel or are refused; tensors on the CPU run the eager reference, which
covers every option and is differentiable. There is no fallback from one to the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from flash_cute import launch, modifiers, reference, selection
from flash_cute.errors import InvalidProblem, UnsupportedProblem
from flash_cute.problem import (
    DENSE,
    AttentionInputs,
    AttentionProblem,
    Lengths,
    Options,
    Support,
    attention_request,
)
from flash_cute.split_plan import SchedulerMetadata
from flash_cute.values import check_values

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    sink: torch.Tensor | None = None,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_mask: object | None = None,
    pack_gqa: bool | None = None,
    num_splits: int = 1,
    split_size: int = 0,
    scheduler_metadata: SchedulerMetadata | None = None,
    sm_margin: int = 0,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    kernel: type[Any] | None = None,
) -> Result:
    """Compute attention of a batch of sequences of equal lengths.

    Scores are computed as ``softmax_scale * q·k`` → softcap → score_mod → mask → sink → softmax.
    causal, window_size, attention_chunk and mask_mod are ANDed. Masks are aligned at the bottom
    right: query i lies on the diagonal ``d = i + seqlen_k - seqlen_q``, so the last query meets the
    last key. A query with no visible key gives out 0 and lse -inf (the sink, where there is one).

    Args:
        softmax_scale: factor of q·k; None is head_dim ** -0.5.
        causal: keys past d are hidden.
        window_size: (left, right), both inclusive: keys d - left to d + right are visible. None and
            the legacy -1 are unbounded; smaller numbers are ordinary bounds, so (7, -8) is empty.
        attention_chunk: c > 0 confines d to the keys of its own chunk, ``key // c == d // c``.
        softcap: c > 0 replaces each score by c * tanh(score / c).
        sink: one more logit per query head, natural units, neither scaled nor masked. It has no
            value; it counts in the denominator and in lse.
        score_mod: ``score_mod(score, b, h, q_idx, kv_idx)`` returns the new score of one element.
            Indices are those within the sequence, h is the query head; all are 0-dim tensors. On a
            GPU also in the native form, with two more parameters, ``seqlen_info, aux_tensors``, of
            CuTe values: scalars, or with ``score_mod.__vec_size__ = 2``, 4 or 8 vectors of so many
            scores of a row, whose keys are not all neighbours (see ``flash_cute.variant``).
        mask_mod: ``mask_mod(b, h, q_idx, kv_idx)`` returns True where the key is visible; native
            form as of score_mod.
        block_mask: a BlockMask of torch.nn.attention.flex_attention (`block_mask_from` makes one)
            for these lengths, or BlockSparseTensors. Blocks it does not name are hidden, its
            mask_mod applies in its partial blocks.
        pack_gqa: whether query heads that share a key head share a tile. None lets the package
            choose; the result is the same.
        num_splits: number of parts the keys are split into. 1 is no split, 0 lets the package
            choose; the result is the same up to rounding.
        split_size: keys of a part, rounded down to whole blocks of the kernel's, instead of a
            number of parts: then a sequence gives the same bits in whatever batch, alone or not.
        scheduler_metadata: the plan of ``get_scheduler_metadata`` for such a call, with num_splits
            1 or 0. Without, num_splits=0 makes one where it is of use, for all calls that share
            their lengths.
        sm_margin: multiprocessors to leave free, for a kernel that runs beside.
        return_lse: also return lse.
        out: tensor to write the result into, which is then returned. It must overlap no input.
        kernel: kernel class to use instead of the package's choice, on a GPU: one of the package's,
            or your own, which derives from it and overrides steps; it does what its base does but
            for the Features in its `lacks` (see examples/sigmoid_attention.py). Such a class is
            compiled once for each kind of problem, as it is at the first call, and kept in memory
            only. What is set on it later, or in globals that it reads, changes nothing; the class
            defined anew is another kernel, also under the same name.

    Shapes: q (batch, seqlen_q, num_heads_q, head_dim); k (batch, seqlen_k, num_heads_kv, head_dim);
            v (batch, seqlen_k, num_heads_kv, head_dim_v); num_heads_q a multiple of num_heads_kv.
            Last stride 1, any other strides. float16 or bfloat16, on the CPU also float32 and
            float64. sink (num_heads_q,) of any of these dtypes.
            out (batch, seqlen_q, num_heads_q, head_dim_v); lse (batch, num_heads_q, seqlen_q)
            float32.
    Units:  lse in natural log.
    Raises: InvalidProblem (a ValueError) naming the argument, what came and what was expected;
            UnsupportedProblem (a NotImplementedError) when no kernel does what is asked, on a GPU
            also for inputs that require grad outside torch.no_grad(). Both before anything is
            launched.
    """
    mask = (causal, window_size, attention_chunk)
    numbers = (softmax_scale, softcap, pack_gqa, num_splits, split_size, sm_margin, return_lse)
    extras = launch.NO_EXTRAS if sink is None else (*[None] * 4, sink, *[None] * 4)
    mods = modifiers.given(score_mod, mask_mod, block_mask)
    others = (mask, numbers, kernel)
    result, key = launch.recall((q, k, v), others, extras, mods, out, scheduler_metadata)
    if result is not None:
        return result
    options = Options(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        sink=sink,
        score_mod=score_mod,
        mask_mod=mask_mod,
        block_mask=block_mask,
        pack_gqa=pack_gqa,
        num_splits=num_splits,
        split_size=split_size,
        scheduler_metadata=scheduler_metadata,
        sm_margin=sm_margin,
        return_lse=return_lse,
        out=out,
        kernel=kernel,
    )
    return attend(*attention_request(q, k, v, options, DENSE), key)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | torch.Tensor | None = None,
    max_seqlen_k: int | torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    sink: torch.Tensor | None = None,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_mask: object | None = None,
    pack_gqa: bool | None = None,
    num_splits: int = 1,
    split_size: int = 0,
    scheduler_metadata: SchedulerMetadata | None = None,
    sm_margin: int = 0,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    kernel: type[Any] | None = None,
) -> Result:
    """Compute attention of sequences of different lengths: packed, padded or paged.

    Each side says for itself how its sequences lie, and each sequence is computed as if it were
    alone: masks are aligned with its own lengths, and callbacks see positions within it. What lies
    outside a sequence (past seqused, past the last entry of cu_seqlens, in unused pages) is never
    read; rows of out and lse that belong to no sequence hold nothing of meaning.

    Args:
        cu_seqlens_q: the queries are packed, sequence b in rows cu_seqlens_q[b] to
            cu_seqlens_q[b+1].
        cu_seqlens_k: likewise for k and v.
        max_seqlen_q: an upper bound of the lengths of the queries, which helps to plan the launch
            and changes no result; an integer, or a 0-dim tensor, which is not read if it is on a
            GPU.
        max_seqlen_k: likewise for the keys.
        seqused_q: number of queries used of each sequence, from its start.
        seqused_k: number of keys used of each sequence, from its start.
        page_table: k and v are paged: key j of sequence b is in slot j % page_size of page
            ``page_table[b, j // page_size]``. Entries past the used length may hold anything.
        softmax_scale, and all that follow: as in ``flash_attn_func``.

    Shapes: q (total_q, num_heads_q, head_dim) with cu_seqlens_q, as in flash_attn_func without;
            k, v (total_k, num_heads_kv, …) with cu_seqlens_k, (num_pages, page_size, num_heads_kv,
            …) with page_table, as in flash_attn_func without either.
            cu_seqlens (batch + 1,), seqused (batch,), page_table (batch, max_pages), all int32.
            out like q with head_dim_v; lse (num_heads_q, total_q) with cu_seqlens_q,
            (batch, num_heads_q, seqlen_q) without, float32.
    Units:  lse in natural log.
    Raises: as flash_attn_func. The contents of cu_seqlens, seqused and page_table are checked on
            the CPU only: reading them on a GPU would make every call wait.
    """
    # Without the hints: they change from call to call, and nothing depends on them.
    mask = (causal, window_size, attention_chunk)
    numbers = (softmax_scale, softcap, pack_gqa, num_splits, split_size, sm_margin, return_lse)
    extras = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, sink, page_table, *[None] * 3)
    mods = modifiers.given(score_mod, mask_mod, block_mask)
    others = (mask, numbers, kernel)
    result, key = launch.recall((q, k, v), others, extras, mods, out, scheduler_metadata)
    if result is not None:
        return result
    options = Options(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        sink=sink,
        score_mod=score_mod,
        mask_mod=mask_mod,
        block_mask=block_mask,
        pack_gqa=pack_gqa,
        num_splits=num_splits,
        split_size=split_size,
        scheduler_metadata=scheduler_metadata,
        sm_margin=sm_margin,
        return_lse=return_lse,
        out=out,
        kernel=kernel,
    )
    lengths = Lengths(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        page_table=page_table,
    )
    return attend(*attention_request(q, k, v, options, lengths), key)


def is_supported(
    q: torch.Tensor | AttentionProblem,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    **arguments: Any,
) -> Support:
    """Say whether a call would run, and if not, why; nothing is compiled, launched or read.

    Takes what ``flash_attn_func`` or ``flash_attn_varlen_func`` takes, or an AttentionProblem
    alone. The answer is true or false, with the ``reason`` and, where it is true, the ``backend``::

        answer = is_supported(q, k, v, causal=True)
        if not answer:
            print(answer.reason)

    Raises: TypeError for an argument that neither function has, or that is missing.
    """
    if isinstance(q, AttentionProblem):
        if k is not None or v is not None or arguments:
            raise TypeError(
                "is_supported() takes an AttentionProblem alone, or q, k, v and options"
            )
        return _support(q, None)
    if k is None or v is None:
        raise TypeError("is_supported() takes q, k and v, or an AttentionProblem alone")
    names = {field.name for field in dataclasses.fields(Lengths)}
    lengths = {name: value for name, value in arguments.items() if name in names}
    options = {name: value for name, value in arguments.items() if name not in names}
    unknown = sorted(set(options) - {field.name for field in dataclasses.fields(Options)})
    if unknown:
        raise TypeError(f"is_supported() got an unexpected keyword argument {unknown[0]!r}")
    try:
        problem, inputs = attention_request(q, k, v, Options(**options), Lengths(**lengths))
    except (InvalidProblem, UnsupportedProblem) as error:
        return Support(reason=str(error))
    return _support(problem, inputs)


def reference_mask(
    seqlen_q: int,
    seqlen_k: int,
    *,
    batch: int = 1,
    num_heads: int = 1,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    attention_chunk: int = 0,
    mask_mod: Callable[..., Any] | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Return which keys each query sees under these options: a boolean matrix to print and compare.

    ``print(reference_mask(4, 6, causal=True)[0, 0].int())`` draws the causal mask, aligned at the
    bottom right. The arguments mean what they mean to the attention functions.

    Shapes: (batch, num_heads, seqlen_q, seqlen_k) bool; seqused_q, seqused_k (batch,) int32. Rows
            past seqused_q and columns past seqused_k are False.
    Raises: InvalidProblem as the attention functions do.
    """
    q = torch.empty(batch, seqlen_q, num_heads, 1, device=device, dtype=torch.float16)
    k = torch.empty(batch, seqlen_k, 1, 1, device=device, dtype=torch.float16)
    options = Options(
        causal=causal,
        window_size=window_size,
        attention_chunk=attention_chunk,
        mask_mod=mask_mod,
    )
    lengths = Lengths(seqused_q=seqused_q, seqused_k=seqused_k)
    problem, inputs = attention_request(q, k, k, options, lengths)
    check_values(problem, inputs)
    return reference.visibility(problem, inputs)


def attend(
    problem: AttentionProblem, inputs: AttentionInputs, key: launch.Key | None = None
) -> Result:
    """Run a validated request: a kernel on a GPU, the reference on the CPU.

    Args:
        key: where ``launch.recall`` will look for this call; None remembers nothing.
    """
    if problem.device.type == "cpu":
        return _attention_cpu(problem, inputs)
    return launch.attention(problem, inputs, key)


def _attention_cpu(problem: AttentionProblem, inputs: AttentionInputs) -> Result:
    """Run the eager reference, after the checks that cost nothing where the host can read."""
    support = _support_cpu(problem, inputs)
    if not support:
        raise UnsupportedProblem(support.reason)
    check_values(problem, inputs)
    out, lse = reference.attention(problem, inputs)
    if inputs.out is not None:
        out = inputs.out.copy_(out)
    return (out, lse) if problem.return_lse else out


def _support(problem: AttentionProblem, inputs: AttentionInputs | None) -> Support:
    if problem.device.type == "cpu":
        return _support_cpu(problem, inputs)
    kernel = None if inputs is None else inputs.kernel
    if kernel is None:
        return selection.is_supported(problem)
    try:
        key = selection.key_for(problem, selection.target_of(problem), kernel)
    except (InvalidProblem, UnsupportedProblem) as error:
        return Support(reason=str(error))
    return Support(backend=key.kernel)


def _support_cpu(problem: AttentionProblem, inputs: AttentionInputs | None) -> Support:
    """The reference covers the whole contract."""
    if inputs is not None and inputs.kernel is not None:
        name = inputs.kernel.__name__
        return Support(reason=f"kernel is {name}, expected None: the CPU has the reference only")
    return Support(backend="reference")
