"""The launch before attention over a cache: new keys and values are written, queries rotated.

The first call with some shapes, strides and options makes an `AppendPlan`; later ones find it with
one dict probe. A call gets an `AppendStep`: the tensors that attention reads instead of its own,
uninitialised until the step is run, on the same stream and right before attention::

    step, key = recall(tensors, options, cache_length, out)
    if step is None:                                   # after validation and selection
        step = first_step(request, key)
    attention over step.q, the caches and step.lengths, after step.run()
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, cast

import torch

from flash_cute import current, launch, plan, selection
from flash_cute.arguments import MAX_PIECES, NUM_APPEND_ADDRESSES, AppendArguments
from flash_cute.cache import Executable
from flash_cute.cache_request import CacheRequest
from flash_cute.errors import UnsupportedProblem
from flash_cute.selection import APPEND_PIECE, AppendKey

MAX_PLANS = 4096
LARGEST_LENGTH = 2**31 - 1

# The tensors of a call in the order of AppendArguments; the last two addresses are results.
Tensors = tuple[torch.Tensor | None, ...]
TENSORS = AppendArguments._fields[: NUM_APPEND_ADDRESSES - 2]
_NUM_WIDE = TENSORS.index("cache_seqlens")  # those that are loaded or stored in pieces
Key = tuple[Hashable, ...]

_plans: dict[Key, AppendPlan] = {}


@dataclass(frozen=True, slots=True)
class AppendPlan:
    """What a call with these shapes, strides and options appends; addresses and lengths vary.

    Shapes: arguments: those of AppendArguments between cache_length and the stream
            rotated_shape: of the rotated queries, None where they stay as they are
    Units:  most_keys: the largest cache_length with which what is new surely fits
    """

    executable: Executable
    arguments: tuple[int, ...]
    rotated_shape: tuple[int, ...] | None
    rotated_strides: tuple[int, ...]
    dtype: torch.dtype
    batch: int
    device_index: int
    most_keys: int


class AppendStep(launch.Prelude):
    """What one call appends, prepared with the device of its tensors the current one.

    Shapes: q: the queries that attention reads: rotated, or the given ones
            lengths: (batch,) int32, keys of each sequence in the cache, new ones included
            counted: the lengths before: layers share them, and not `lengths`
    """

    def __init__(
        self,
        plan: AppendPlan,
        q: torch.Tensor,
        counted: torch.Tensor | None,
        addresses: list[int],
        cache_length: int,
    ) -> None:
        self._plan, self._addresses, self._cache_length = plan, addresses, cache_length
        self.q, self.counted = q, counted
        if plan.rotated_shape is not None:
            self.q = current.empty(plan.rotated_shape, plan.rotated_strides, plan.dtype)
        self.lengths = current.empty((plan.batch,), (1,), torch.int32)

    def run(self) -> None:
        """Enqueue it on the current stream of the current device, that of the tensors."""
        made = self._plan
        results = (self.q.data_ptr(), self.lengths.data_ptr(), self._cache_length)
        stream = current.raw_stream(made.device_index)
        made.executable(*self._addresses, *results, *made.arguments, stream)


def recall(
    tensors: Tensors,
    options: tuple[Hashable, ...],
    cache_length: object,
    out: torch.Tensor | None,
) -> tuple[AppendStep | None, Key | None]:
    """Prepare a call that was made before; else (None, key), for `first_step` to remember it by.

    The key holds all that validation and the launch arguments depend on. There is none for what no
    plan covers: another device than the current one, inputs that require grad, no tensors.

    Args:
        tensors: in the order of TENSORS.
        options: what beside them says whether and how queries are rotated.
        cache_length: keys of every sequence, where there is no tensor of lengths; unchecked.
        out: where attention writes, which may be none of the tensors.
    """
    q = tensors[0]
    try:
        index = q.get_device()  # pyright: ignore[reportOptionalMemberAccess]
        if index < 0 or index != current.current_device():
            return None, None
        addresses = [0 if t is None else t.data_ptr() for t in tensors]
        layouts = [
            None if t is None else (t.shape, t.stride(), t.dtype, t.get_device()) for t in tensors
        ]
        if torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in tensors]):
            return None, None
        if out is not None and out.data_ptr() in addresses:
            return None, None
    except AttributeError:  # no tensor: validation names it
        return None, None
    key = (options, tuple(layouts), _is_aligned(addresses))
    try:
        found = _plans.get(key)
    except TypeError:  # an option that is no plain value: validation names it
        return None, None
    if found is None:
        return None, key
    if addresses[_NUM_WIDE]:
        cache_length = 0
    elif type(cache_length) is not int or not 0 <= cache_length <= found.most_keys:
        return None, None
    lengths = tensors[_NUM_WIDE]
    return AppendStep(found, cast(torch.Tensor, q), lengths, addresses, cache_length), key


def _is_aligned(addresses: list[int]) -> bool:
    """Whether 16-byte accesses can work on all tensors that are moved in pieces."""
    joined = 0
    for address in addresses[:_NUM_WIDE]:
        joined |= address
    return joined % plan.ALIGNMENT == 0


def first_step(request: CacheRequest, key: Key | None) -> AppendStep:
    """Prepare a validated call on a GPU the long way, and remember its plan under `key`.

    Nothing is enqueued. Raises: UnsupportedProblem for more than can be counted; CompileDisallowed,
    CaptureError.
    """
    a, problem = request.arguments, request.problem
    tensors = _tensors(request)
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    moved = [tensor for tensor in tensors[:_NUM_WIDE] if tensor is not None]
    is_wide = all(plan.is_readable(tensor) for tensor in moved)
    arguments = _arguments(request)
    arch = selection.current_target(problem.device).arch
    with torch.cuda.device(problem.device):
        kernel_key = cast(AppendKey, selection.append_key(problem, arch, is_wide))
        # Kernels take it for granted that there is a sequence.
        executable = launch.ready_executable(kernel_key) if problem.batch else _nothing
        shape = tuple(a.query.shape)
        made = AppendPlan(
            executable=executable,
            arguments=tuple(arguments[NUM_APPEND_ADDRESSES + 1 : -1]),
            rotated_shape=shape if problem.has_rotary else None,
            rotated_strides=plan.contiguous_strides(shape),
            dtype=problem.dtype,
            batch=problem.batch,
            device_index=a.query.get_device(),
            most_keys=request.most_keys,
        )
        if key is not None:
            if len(_plans) >= MAX_PLANS:
                _plans.clear()
            _plans[key] = made
        lengths = tensors[_NUM_WIDE]
        return AppendStep(made, a.query, lengths, addresses, arguments.cache_length)


def _nothing(*arguments: int) -> None:
    """The kernel of a call without sequences."""


def _tensors(request: CacheRequest) -> Tensors:
    a = request.arguments
    tensors = tuple(getattr(a, name) for name in TENSORS)
    return tuple(tensor if isinstance(tensor, torch.Tensor) else None for tensor in tensors)


def _arguments(request: CacheRequest) -> AppendArguments:
    """The launch arguments; addresses and the stream are 0."""
    a, p = request.arguments, request.problem
    query, keys, values = a.query, a.keys, cast(torch.Tensor, a.v)
    cos, table = a.rotary_cos, a.page_table
    num_pages, page_size = keys.shape[:2]
    moved = {"pieces_q": a.q if p.has_rotary else None, "pieces_k": a.k, "pieces_v": values}
    return AppendArguments(
        **dict.fromkeys(AppendArguments._fields[:NUM_APPEND_ADDRESSES], 0),
        cache_length=0 if isinstance(a.cache_seqlens, torch.Tensor) else int(a.cache_seqlens or 0),
        batch=p.batch,
        rows_q=query.shape[-3],
        rows_new=values.shape[-3],
        num_heads_q=p.num_heads_q,
        num_heads_kv=p.num_heads_kv,
        head_dim=p.head_dim,
        head_dim_v=p.head_dim_v,
        rotary_dim=0 if cos is None else 2 * cos.shape[1],
        advance=int(request.rotation_advances),
        num_positions=0 if cos is None else cos.shape[0],
        capacity=min(a.capacity, LARGEST_LENGTH),
        page_size=page_size,
        num_pages=num_pages,
        num_cache_rows=num_pages if table is None else table.shape[0],
        **{name: _pieces(name, tensor) for name, tensor in moved.items()},
        page_table_stride=0 if table is None else table.stride(0),
        rotary_cos_stride=0 if cos is None else cos.stride(0),
        rotary_sin_stride=0 if a.rotary_sin is None else a.rotary_sin.stride(0),
        **_strides("q", a.q, ("batch", "row", "head")),
        **_strides("k", a.k, ("batch", "row", "head")),
        **_strides("v", values, ("batch", "row", "head")),
        **_strides("k_cache", a.k_cache, ("page", "slot", "head")),
        **_strides("v_cache", a.v_cache, ("page", "slot", "head")),
        stream=0,
    )


def _pieces(name: str, tensor: torch.Tensor | None) -> int:
    pieces = 0 if tensor is None else tensor.numel() // APPEND_PIECE
    if pieces > MAX_PIECES:
        raise UnsupportedProblem(
            f"{name[-1]} has {pieces} pieces of {APPEND_PIECE} elements, at most {MAX_PIECES}: "
            "split it"
        )
    return pieces


def _strides(name: str, tensor: torch.Tensor | None, modes: tuple[str, ...]) -> dict[str, Any]:
    """Strides of one operand in elements; a packed one has no batch, an absent one nothing."""
    strides = () if tensor is None else tensor.stride()[:-1]
    padded = (0,) * (len(modes) - len(strides)) + strides
    return {f"{name}_stride_{mode}": s for mode, s in zip(modes, padded, strict=True)}
