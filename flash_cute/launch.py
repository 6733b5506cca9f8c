"""From tensors on a GPU to a launched kernel.

The first call with some shapes, strides and options makes a `LaunchPlan`; later calls find it with
one dict probe on what can be read off the tensors in two microseconds. Callbacks and block masks
are worked out on every call, and are part of what is looked up.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable
from typing import Any

import torch

from flash_cute import cache, compile, current, selection, splitting
from flash_cute.cache import Executable
from flash_cute.errors import CaptureError, UnsupportedProblem
from flash_cute.modifiers import Given, work_out
from flash_cute.plan import (
    ALIGNMENT,
    Addresses,
    LaunchPlan,
    Result,
    is_readable,
    make_plan,
    result_lse_shape,
)
from flash_cute.problem import AttentionInputs, AttentionProblem
from flash_cute.scheduling import LengthTensors
from flash_cute.split_plan import SchedulerMetadata
from flash_cute.variant import INDEX_LIMIT

MAX_PLANS = 4096

# The tensors beside q, k, v and the results, in the order of ForwardArguments.
Extras = tuple[torch.Tensor | None, ...]
EXTRAS = (
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seqused_q",
    "seqused_k",
    "sink",
    "page_table",
    "batch_idx",
    "leftpad",
    "qv",
)
NO_EXTRAS: Extras = (None,) * len(EXTRAS)
_NO_ADDRESSES: Addresses = (0,) * len(EXTRAS)
_QV = EXTRAS.index("qv")  # an operand: aligned like q, k and v
_OPERANDS = ("q", "k", "v", "qv")

Key = tuple[Hashable, ...]  # the key of the modifiers comes first


class Prelude:
    """What has to be enqueued right before attention: nothing, unless a derived class says so.

    Shapes: counted: (batch,) int32, lengths that the parts of the keys are counted from in the
            place of seqused_k, which the prelude writes for one call alone
    """

    counted: torch.Tensor | None = None

    def run(self) -> None:
        """Enqueue it; called when nothing can be refused any more."""


NO_PRELUDE = Prelude()

_plans: dict[Key, LaunchPlan] = {}


def recall(
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    options: tuple[Hashable, ...],
    extras: Extras = NO_EXTRAS,
    given: Given | None = None,
    out: torch.Tensor | None = None,
    metadata: SchedulerMetadata | None = None,
    prelude: Prelude = NO_PRELUDE,
) -> tuple[Result | None, Key | None]:
    """Repeat a call that was made before; else (None, key), for `attention` to remember it by.

    The key holds all that validation, selection and the launch arguments depend on. There is none
    for what no plan covers: addresses that TMA cannot read, another device than the current one,
    inputs that require grad, block lists that have to be packed, and all that validation refuses.

    Args:
        operands: q, k and v.
        given: the callbacks and the block mask, None where there is none of them.
        metadata: a plan of the caller's.
        prelude: run just before a call that was made before.
    """
    q, k, v = operands
    try:
        dtype, index = q.dtype, q.get_device()
        if index < 0 or k.get_device() != index or v.get_device() != index:
            return None, None
        qkv = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (
            (qkv[0] | qkv[1] | qkv[2]) % ALIGNMENT
            or k.dtype is not dtype
            or v.dtype is not dtype
            or index != current.current_device()
            or ((q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled())
        ):
            return None, None
        layouts = (q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride())
        addresses, extra_layouts = _NO_ADDRESSES, None
        if extras is not NO_EXTRAS:
            addresses, extra_layouts = _describe(extras)
            if addresses[_QV] % ALIGNMENT:
                return None, None
        if out is not None:
            if not _is_writable(out, (*qkv, addresses[_QV]), dtype, index):
                return None, None
            layouts += (out.shape, out.stride())
    except AttributeError:  # no tensor: validation names it
        return None, None
    modifiers = modifiers_key = None
    if given is not None:
        modifiers = work_out(given, q, k, (*extras[:2], extras[5]))
        if modifiers is None or (torch.is_grad_enabled() and modifiers.requires_grad):
            return None, None
        if modifiers.blocks is not None and not modifiers.blocks.is_packed:
            return None, None
        modifiers_key = modifiers.key
    try:
        made_for = None
        if metadata is not None:
            counts = metadata.split_counts
            made_for = (metadata.plan, counts.shape, counts.stride(), counts.dtype, counts.device)
        key = (modifiers_key, layouts, dtype, index, options, extra_layouts, made_for)
        plan = _plans.get(key)
    except (AttributeError, TypeError):  # an option that is no plain value: validation names it
        return None, None
    if plan is None:
        return None, key
    captured: tuple[int, ...] = ()
    if modifiers is not None:
        captured = modifiers.launch_arguments(plan.tile, _rows(q, k, extras[5]))
    counts = None if metadata is None else metadata.split_counts
    prelude.run()
    return plan.run(qkv, addresses, out, captured, _lengths(extras, prelude), counts), key


def _lengths(extras: Extras, prelude: Prelude) -> LengthTensors:
    """The tensors that parts of the keys are counted from, in the order of scheduling.LENGTHS."""
    seqused_k = extras[3] if prelude.counted is None else prelude.counted
    return (*extras[:3], seqused_k, extras[7])


def _rows(q: torch.Tensor, k: torch.Tensor, page_table: torch.Tensor | None) -> tuple[int, int]:
    """Rows of q and k in a sequence, or in all packed ones; of pages as many as there is room."""
    pages = 1 if page_table is None else page_table.shape[1]
    return q.shape[-3], k.shape[-3] * pages


def _is_writable(
    out: torch.Tensor, operands: Addresses, dtype: torch.dtype, device_index: int
) -> bool:
    """Whether a kernel can write into a given tensor, and validation has nothing against it."""
    address = out.data_ptr()
    return not (
        address % ALIGNMENT
        or address in operands
        or out.dtype is not dtype
        or out.get_device() != device_index
        or (out.requires_grad and torch.is_grad_enabled())
    )


def _describe(extras: Extras) -> tuple[Addresses, Hashable]:
    """Addresses of the extra tensors, and what of them a plan depends on."""
    grad = torch.is_grad_enabled()
    layouts = [
        t if t is None else (t.shape, t.stride(), t.dtype, t.get_device(), t.requires_grad and grad)
        for t in extras
    ]
    return tuple(0 if t is None else t.data_ptr() for t in extras), tuple(layouts)


def attention(
    problem: AttentionProblem,
    inputs: AttentionInputs,
    key: Key | None = None,
    prelude: Prelude = NO_PRELUDE,
) -> Result:
    """Run a validated problem on the GPU its tensors are on.

    Args:
        key: where `recall` will look for the plan of this call; None remembers nothing.
        prelude: run before anything else is enqueued: what it writes, attention reads.
    Raises: UnsupportedProblem, CompileDisallowed, CaptureError; all before anything is enqueued.
    """
    target = selection.current_target(problem.device).without(problem.sm_margin)
    kernel_key = selection.key_for(problem, target, inputs.kernel, variant_of(inputs))
    _check_indices(problem, inputs)
    with torch.cuda.device(problem.device):
        if inputs.q.numel() == 0 or inputs.k.numel() == 0:
            prelude.run()
            return _without_keys(problem, inputs)
        executable = ready_executable(kernel_key)
        others = (
            splitting.merge_key(problem, kernel_key),
            splitting.planner_key(problem, kernel_key),
        )
        merger, counter = (None if other is None else ready_executable(other) for other in others)
        given, inputs = inputs, _with_room(inputs)
        plan = make_plan(problem, inputs, kernel_key, target, executable, merger, counter)
        if key is not None and _is_remembered(key, given, inputs):
            if len(_plans) >= MAX_PLANS:
                _plans.clear()
            _plans[key] = plan
        extras = tuple(getattr(inputs, name) for name in EXTRAS)
        addresses, _ = _describe(extras)
        qkv = (inputs.q.data_ptr(), inputs.k.data_ptr(), inputs.v.data_ptr())
        rows = _rows(inputs.q, inputs.k, inputs.page_table)
        captured = inputs.modifiers.launch_arguments(plan.tile, rows)
        metadata = inputs.scheduler_metadata
        counts = None if metadata is None else metadata.split_counts
        prelude.run()
        _copy_into_room(given, inputs)
        lengths = _lengths(extras, prelude)
        result = plan.run(qkv, addresses, inputs.out, captured, lengths, counts)
    if given.out is not None and inputs.out is None:
        return _into(given.out, result)
    return result


def _is_remembered(key: Key, given: AttentionInputs, inputs: AttentionInputs) -> bool:
    """Whether a plan for `inputs` is right for all calls of a key: the inputs are the given ones,
    and their callbacks and blocks still those of the key, which another thread may have changed.
    """
    names = ("q", "k", "v", "qv", "sink", "out", "block_mask")
    if any(getattr(given, name) is not getattr(inputs, name) for name in names):
        return False
    modifiers = inputs.modifiers
    has_any = bool(modifiers.callbacks) or modifiers.blocks is not None
    return key[0] == (modifiers.key if has_any else None)


def variant_of(inputs: AttentionInputs) -> selection.Variant:
    """Return what of the callbacks and the block mask shapes code."""
    score_mod, mask_mod = inputs.score_callback, inputs.mask_callback
    block_mod, blocks = inputs.block_callback, inputs.block_mask
    return selection.Variant(
        score_mod=None if score_mod is None else score_mod.key,
        mask_mod=None if mask_mod is None else mask_mod.key,
        block_mod=None if block_mod is None else block_mod.key,
        has_full_blocks=blocks is not None and blocks.full_count is not None,
        block_size=None if blocks is None else blocks.block_size,
        is_mask_per_head=blocks is not None and blocks.partial_count.shape[1] > 1,
    )


def _check_indices(problem: AttentionProblem, inputs: AttentionInputs) -> None:
    """Callbacks compute with indices below INDEX_LIMIT; raises UnsupportedProblem past it."""
    rows = _rows(inputs.q, inputs.k, inputs.page_table)
    longest = max(problem.batch, problem.num_heads_q, *rows)
    if inputs.modifiers.callbacks and longest > INDEX_LIMIT:
        raise UnsupportedProblem(
            f"a callback with an extent of {longest}: kernels give callbacks indices up to "
            f"{INDEX_LIMIT} only"
        )


def _with_room(inputs: AttentionInputs) -> AttentionInputs:
    """Put room for a copy in the place of what no kernel can read as it lies.

    An out that none can write is dropped. Operands are copied later, by `_copy_into_room`.
    """
    changed: dict[str, Any] = {
        name: tensor.new_empty(tensor.shape)
        for name in _OPERANDS
        if (tensor := getattr(inputs, name)) is not None and not is_readable(tensor)
    }
    if inputs.out is not None and not is_readable(inputs.out):
        changed["out"] = None
    if inputs.sink is not None and inputs.sink.dtype not in selection.SINK_DTYPE_NAMES:
        changed["sink"] = inputs.sink.float()
    if inputs.block_mask is not None:
        changed["block_mask"] = inputs.block_mask.packed()
    return dataclasses.replace(inputs, **changed) if changed else inputs


def _copy_into_room(given: AttentionInputs, inputs: AttentionInputs) -> None:
    for name in _OPERANDS:
        source, room = getattr(given, name), getattr(inputs, name)
        if room is not source:
            room.copy_(source)


def ready_executable(kernel_key: compile.Key) -> Executable:
    """Return the compiled kernel; inside a graph capture only one that is already in memory.

    Raises: CaptureError inside a capture; what `compile.executable` raises.
    """
    if not current.is_capturing():
        return compile.executable(kernel_key)
    found = cache.lookup(kernel_key)
    if found is None:
        raise CaptureError(
            f"a CUDA graph is being captured and the kernel is not ready: call it once, or "
            f"flash_cute.warmup, before the capture ({kernel_key})"
        )
    return found


def _without_keys(problem: AttentionProblem, inputs: AttentionInputs) -> Result:
    """The result where there is nothing to compute: empty, or zeros and the log-sum-exp of none."""
    out = inputs.out
    if out is None:
        shape = (*inputs.q.shape[:-1], problem.head_dim_v)
        out = torch.empty(shape, dtype=problem.dtype, device=problem.device)
    out.zero_()
    if not problem.return_lse:
        return out
    shape = result_lse_shape(problem, inputs)
    lse = torch.full(shape, -math.inf, dtype=torch.float32, device=problem.device)
    if inputs.sink is not None:
        lse.copy_(inputs.sink[:, None].expand(shape))
    return out, lse


def _into(out: torch.Tensor, result: Result) -> Result:
    """Move a result into the caller's tensor, which the kernel could not write itself."""
    if isinstance(result, tuple):
        return out.copy_(result[0]), result[1]
    return out.copy_(result)
