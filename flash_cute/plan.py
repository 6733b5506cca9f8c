"""What a call does on the GPU, worked out once: launch arguments, outputs, workspace.

A `LaunchPlan` belongs to one set of shapes, strides and options. Only addresses vary afterwards, so
that running it costs a few microseconds of host time.
"""

from __future__ import annotations

import functools
import math
import threading
from dataclasses import dataclass, replace
from typing import Any

import torch

from flash_cute import current, selection
from flash_cute.arguments import NUM_ADDRESSES, ForwardArguments
from flash_cute.cache import Executable
from flash_cute.errors import UnsupportedProblem, refuse
from flash_cute.problem import AttentionInputs, AttentionProblem
from flash_cute.scheduling import LengthTensors, Planner
from flash_cute.splits import Splits, choose, filling, heads_of
from flash_cute.splitting import Merge, make_merge, make_planner
from flash_cute.target import Target

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Addresses = tuple[int, ...]

LOG2_E = math.log2(math.e)
SMALLEST_SCALE = 2.0**-126  # stands for 0, which times the -inf of a masked score would be NaN
ALIGNMENT = 16  # bytes: what TMA and the 16-byte stores ask of addresses and strides
TMA_STRIDE_LIMIT = 2**40  # bytes
L2_SECTION_BYTES = 32 * 2**20  # K and V of the heads in flight; two thirds of an H200's L2
MOST_CTAS = 2**16  # of a launch
LARGEST_BOUND = 2**30  # window bounds and chunks beyond it are cut: no sequence is as long


class Counters:
    """Zeroed int32 counters in the memory of one device, for kernels to take tiles and to meet.

    A kernel leaves its counters at zero, so launches that follow one another share them; launches
    that may overlap must not. Launches on one stream follow one another, and so do those captured
    on one stream into one graph, which has its own, as graphs may be replayed beside anything.
    """

    SLOTS = 2**18

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: torch.Tensor | None = None
        self._used = 0
        self._by_stream: dict[tuple[int, int], tuple[int, int]] = {}
        self._zeroed_by_launch: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def of(self, stream: int, count: int) -> int:
        """Return the address of at least `count` counters for the next launch on a stream."""
        capture = current.capture_id(stream) if current.is_capturing() else 0
        address, size = self._by_stream.get((stream, capture), (0, 0))
        if size < count:
            with self._lock:
                if self._slots is None and not capture:
                    self._slots = torch.zeros(self.SLOTS, dtype=torch.int32, device=self._device)
                    # Zero before any other stream may read them.
                    torch.cuda.current_stream(self._device).synchronize()
                address = self._take(count)
                self._by_stream[stream, capture] = (address, count)
        return address

    def _take(self, count: int) -> int:
        if self._slots is None or self._used + count > self.SLOTS:
            # Zeroed on the stream itself, which inside a capture is one more node of the graph.
            zeros = torch.zeros(count, dtype=torch.int32, device=self._device)
            self._zeroed_by_launch.append(zeros)
            return zeros.data_ptr()
        self._used += count
        return self._slots.data_ptr() + 4 * (self._used - count)

    def is_clean(self) -> bool:
        """Whether all shared counters are zero; waits for the device (for tests)."""
        return self._slots is None or not bool(self._slots.any())


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """What a call with these shapes, strides and options does; the addresses are all that varies.

    Shapes: arguments: those of ForwardArguments between the addresses and the stream
            counters: None where every CTA has one tile and none merges
    Contract: run on tensors of exactly the layout it was made for, with aligned addresses, while
              their device is the current one.
    """

    executable: Executable
    arguments: tuple[int | float, ...]
    out_shape: tuple[int, ...]
    out_strides: tuple[int, ...]
    lse_shape: tuple[int, ...] | None
    lse_strides: tuple[int, ...]
    dtype: torch.dtype
    device_index: int
    counters: Counters | None
    tile: tuple[int, int]
    merge: Merge | None = None
    planner: Planner | None = None

    def run(
        self,
        qkv: Addresses,
        extras: Addresses,
        out: torch.Tensor | None = None,
        captured: tuple[int, ...] = (),
        lengths: LengthTensors = (),
        split_counts: torch.Tensor | None = None,
    ) -> Result:
        """Launch on the current stream; returns out, or (out, lse).

        Args:
            qkv: addresses of q, k, v.
            extras: addresses from cu_seqlens_q on, 0 for what is absent.
            captured: launch arguments of the callbacks and the block mask.
            lengths: the tensors of scheduling.LENGTHS, for a plan that has a planner.
            split_counts: those of a plan that the caller made, instead of the planner's.
        """
        stream = current.raw_stream(self.device_index)
        merge = self.merge
        num_arrivals = 0 if merge is None else merge.num_arrivals
        counter = 0
        if self.counters is not None:
            counter = self.counters.of(stream, 1 + num_arrivals)
        if out is None:
            out = current.empty(self.out_shape, self.out_strides, self.dtype)
        lse, lse_address = None, 0
        if self.lse_shape is not None:
            lse = current.empty(self.lse_shape, self.lse_strides, torch.float32)
            lse_address = lse.data_ptr()
        results = (out.data_ptr(), lse_address)
        counts = 0
        if self.planner is not None:
            if split_counts is None:
                split_counts = self.planner.counts(lengths, self.device_index, stream)
            counts = split_counts.data_ptr()
        workspace, held = 0, None
        if merge is not None:
            held = current.empty(merge.workspace_shape, (1,), torch.float32)
            workspace = held.data_ptr()
        arrivals = counter + 4 if num_arrivals else 0
        addresses = (*qkv, *results, counter, workspace, arrivals, *extras, counts)
        self.executable(*addresses, *self.arguments, stream, *captured)
        if merge is not None:
            cu_seqlens_q, _, seqused_q = extras[:3]
            merge.run(workspace, results, (cu_seqlens_q, seqused_q, counts), stream)
        return out if lse is None else (out, lse)


def make_plan(
    problem: AttentionProblem,
    inputs: AttentionInputs,
    kernel_key: selection.KernelKey,
    target: Target,
    executable: Executable,
    merger: Executable | None = None,
    counter: Executable | None = None,
) -> LaunchPlan:
    """Work out the launch of a problem on readable tensors laid out like `inputs`.

    Args:
        merger: the kernel that merges the parts, where the keys are split.
        counter: the kernel that counts them, where the device has to.
    Raises: UnsupportedProblem when there are more query tiles than can be counted.
    """
    p, q, k, out = problem, inputs.q, inputs.k, inputs.out
    out_shape = (*q.shape[:-1], p.head_dim_v)
    lse_shape = result_lse_shape(problem, inputs) if p.return_lse else None
    qv = q if inputs.qv is None else inputs.qv
    rows_q = q.shape[-3]
    packs = heads_of(p, kernel_key.spec)
    positions, tile_n = kernel_key.config.positions(kernel_key.spec), kernel_key.config.tile_n
    blocks = rows_q // positions + p.batch if p.is_packed_q else p.batch * -(-rows_q // positions)
    splits, planner = _splits(p, inputs, kernel_key, target, counter)
    num_tiles = blocks * packs * splits.most
    if num_tiles >= 2**31 - MOST_CTAS:
        raise UnsupportedProblem(
            f"the problem has {num_tiles} query tiles, at most 2**31: split it"
        )
    is_uneven = p.is_packed_q or planner is not None
    num_ctas, is_counted = _grid(p, kernel_key, target, num_tiles, is_uneven)
    out_strides = contiguous_strides(out_shape)
    given_strides = out_strides if out is None else out.stride()
    merge = None
    if merger is not None:
        merge = make_merge(p, inputs, kernel_key, target, splits, given_strides, merger)
    has_counters = is_counted or (merge is not None and merge.num_arrivals > 0)
    arguments = ForwardArguments(
        **dict.fromkeys(ForwardArguments._fields[:NUM_ADDRESSES], 0),
        **_sizes(problem, inputs),
        **_strides("q", q.shape, q.stride()),
        **_strides("qv", qv.shape, qv.stride()),
        **_strides("k", k.shape, k.stride()),
        **_strides("v", inputs.v.shape, inputs.v.stride()),
        **_strides("out", out_shape, given_strides),
        **_numbers(problem),
        num_splits=splits.most,
        split_blocks=splits.blocks,
        section=section_heads(problem, packs) * splits.most,
        num_ctas=num_ctas,
        stream=0,
    )
    return LaunchPlan(
        executable=executable,
        arguments=tuple(arguments[NUM_ADDRESSES:-1]),
        out_shape=out_shape,
        out_strides=out_strides,
        lse_shape=lse_shape,
        lse_strides=() if lse_shape is None else contiguous_strides(lse_shape),
        dtype=p.dtype,
        device_index=q.get_device(),
        counters=counters_of(q.get_device()) if has_counters else None,
        tile=(positions, tile_n),
        merge=merge,
        planner=planner,
    )


def _grid(
    problem: AttentionProblem,
    key: selection.KernelKey,
    target: Target,
    num_tiles: int,
    is_uneven: bool,
) -> tuple[int, bool]:
    """CTAs of a launch, and whether they count the tiles that they take.

    With parts for one CTA on each multiprocessor no more are launched: the GPU gives some
    multiprocessors two before the last ones have any, and those would take twice the time.

    Args:
        is_uneven: the number of tiles is known to the device alone, num_tiles the most.
    """
    if not key.config.is_persistent:
        return num_tiles, False
    slots = target.num_sms * key.config.ctas_per_sm
    if key.spec.has_split_counts:
        slots = filling(problem, key.spec, key.config, target).ctas
    num_ctas = min(slots, num_tiles)
    return num_ctas, num_ctas < num_tiles or is_uneven


def _splits(
    problem: AttentionProblem,
    inputs: AttentionInputs,
    key: selection.KernelKey,
    target: Target,
    counter: Executable | None,
) -> tuple[Splits, Planner | None]:
    """The parts of the keys, and what counts them where the device has to.

    Raises: InvalidProblem for a plan of the caller's that was made for another kind of call.
    """
    if not key.spec.is_split:
        return Splits(), None
    splits = choose(problem, key.spec, key.config, target)
    if counter is None:
        return splits, None
    planner, given = make_planner(problem, key, target, splits, counter), inputs.scheduler_metadata
    if given is None:
        return splits, planner
    if different := given.plan.differences(planner.plan):
        why = "get_scheduler_metadata was given other arguments"
        refuse("scheduler_metadata", f"a plan with {', '.join(different)}", "the call's", why)
    return replace(splits, most=given.plan.most, blocks=given.plan.split_blocks), planner


def _numbers(p: AttentionProblem) -> dict[str, Any]:
    """The run-time numbers of scores and mask."""
    scale = max(abs(p.softmax_scale) * LOG2_E, SMALLEST_SCALE)
    if p.softcap or p.has_score_mod:
        scale = p.softmax_scale / (p.softcap or 1.0)
    bounds = {"window_left": p.visible_left, "window_right": p.visible_right}
    return {
        "scale_log2": scale,
        "softcap": p.softcap,
        **{name: _clamp(0 if bound is None else bound) for name, bound in bounds.items()},
        "chunk": _clamp(p.attention_chunk),
    }


def _sizes(p: AttentionProblem, inputs: AttentionInputs) -> dict[str, int]:
    """Extents of the operands; those of pages are 0 where there are none."""
    table = inputs.page_table
    return {
        "batch": p.batch,
        "rows_q": inputs.q.shape[-3],
        "rows_k": inputs.k.shape[-3],
        "num_heads_q": p.num_heads_q,
        "num_heads_kv": p.num_heads_kv,
        "head_dim": p.head_dim,
        "head_dim_v": p.head_dim_v,
        "batch_k": 1 if p.is_packed_k else inputs.k.shape[0],
        "max_pages": 0 if table is None else table.shape[1],
        "page_table_stride": 0 if table is None else table.stride(0),
    }


def _clamp(bound: int) -> int:
    return max(-LARGEST_BOUND, min(LARGEST_BOUND, bound))


def _strides(name: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> dict[str, Any]:
    """Strides of one operand in elements; a packed one has no batch.

    TMA checks every stride, also the one of an extent of 1, which is never walked and may be odd.
    """
    unused = ALIGNMENT // 2
    walked = [s if n > 1 else unused for s, n in zip(strides[:-1], shape[:-1], strict=True)]
    batch, seqlen, head = [unused] * (3 - len(walked)) + walked
    return {
        f"{name}_stride_batch": batch,
        f"{name}_stride_seqlen": seqlen,
        f"{name}_stride_head": head,
    }


def section_heads(problem: AttentionProblem, packs: int) -> int:
    """(batch, pack of query heads) pairs that run together: their K and V share the L2 cache."""
    p = problem
    bytes_per_head = p.seqlen_k * (p.head_dim + p.head_dim_v) * p.dtype.itemsize
    kv_heads = max(1, L2_SECTION_BYTES // max(1, bytes_per_head))
    return min(p.batch * packs, kv_heads * (packs // p.num_heads_kv))


def result_lse_shape(problem: AttentionProblem, inputs: AttentionInputs) -> tuple[int, ...]:
    """Shape of the log-sum-exp: (batch, num_heads_q, seqlen_q), packed (num_heads_q, total_q)."""
    *batch, rows, heads, _ = inputs.q.shape
    return (*batch, heads, rows)


@functools.lru_cache(maxsize=4096)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a contiguous tensor."""
    strides = [1]
    for size in shape[:0:-1]:
        strides.insert(0, strides[0] * size)
    return tuple(strides)


def is_readable(tensor: torch.Tensor) -> bool:
    """Whether TMA and 16-byte stores can work on a tensor as it lies in memory."""
    size = tensor.element_size()
    strides = [
        s * size for s, n in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if n > 1
    ]
    return (
        tensor.data_ptr() % ALIGNMENT == 0
        and (tensor.stride(-1) == 1 or tensor.shape[-1] == 1)
        and all(0 <= s < TMA_STRIDE_LIMIT and s % ALIGNMENT == 0 for s in strides)
    )


@functools.cache
def counters_of(device_index: int) -> Counters:
    """Return the counters of a device."""
    return Counters(torch.device("cuda", device_index))
