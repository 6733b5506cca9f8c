"""From tensors on a GPU to a launched kernel.

The first call with some shapes, strides and options makes a `LaunchPlan`; later calls find it with
one dict probe on what can be read off the tensors in a microsecond, allocate the output and call
the compiled function with flat integers.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from flash_cute import cache, compile, selection
from flash_cute.cache import Executable
from flash_cute.errors import CaptureError, UnsupportedProblem
from flash_cute.problem import AttentionInputs, AttentionProblem
from flash_cute.target import Target

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

LOG2_E = math.log2(math.e)
SMALLEST_SCALE = 2.0**-126  # stands for 0, which times the -inf of a masked score would be NaN
ALIGNMENT = 16  # bytes: what TMA and the 16-byte stores ask of addresses and strides
TMA_STRIDE_LIMIT = 2**40  # bytes
L2_SECTION_BYTES = 16 * 2**20  # K and V of the heads in flight; a third of an H200's L2
MAX_PLANS = 4096


# torch's own short cuts, without checks and objects: 0.1 µs instead of 1. The names are private, so
# each has the public function behind it.
_torch_c: Any = getattr(torch, "_C")  # noqa: B009
_guards: Any = getattr(getattr(_torch_c, "_dynamo", None), "guards", None)


def _raw_stream(device_index: int) -> int:
    return torch.cuda.current_stream(device_index).cuda_stream


def _empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


current_device: Callable[[], int] = getattr(_torch_c, "_cuda_getDevice", torch.cuda.current_device)
raw_stream: Callable[[int], int] = getattr(_torch_c, "_cuda_getCurrentRawStream", _raw_stream)
is_capturing: Callable[[], bool] = getattr(
    _torch_c, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)
# An uninitialised tensor on the current device; Inductor's generated code allocates with this.
empty: Callable[..., torch.Tensor] = getattr(_guards, "_empty_strided_cuda", _empty)


class TileCounters:
    """Zeroed int32 counters in the memory of one device, for the kernels' tile schedulers.

    A kernel leaves its counter at zero, so launches that follow one another share one; launches
    that may overlap must not. Eager launches have one counter per stream; every captured launch has
    one of its own, since graphs may be replayed beside anything.
    """

    SLOTS = 4096

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: torch.Tensor | None = None
        self._used = 0
        self._by_stream: dict[int, int] = {}
        self._zeroed_by_launch: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def of_stream(self, stream: int) -> int:
        """Return the address of the counter of eager launches on a stream."""
        address = self._by_stream.get(stream)
        if address is None:
            with self._lock:
                if self._slots is None:
                    self._slots = torch.zeros(self.SLOTS, dtype=torch.int32, device=self._device)
                    # Zero before any other stream may read them.
                    torch.cuda.current_stream(self._device).synchronize()
                address = self._by_stream.setdefault(stream, self._take())
        return address

    def of_capture(self) -> int:
        """Return the address of a counter for one captured launch."""
        with self._lock:
            return self._take()

    def _take(self) -> int:
        if self._slots is None or self._used == self.SLOTS:
            # Zeroed on the stream itself, which inside a capture is one more node of the graph.
            self._zeroed_by_launch.append(torch.zeros(1, dtype=torch.int32, device=self._device))
            return self._zeroed_by_launch[-1].data_ptr()
        self._used += 1
        return self._slots.data_ptr() + 4 * (self._used - 1)

    def is_clean(self) -> bool:
        """Whether all shared counters are zero; waits for the device (for tests)."""
        return self._slots is None or not bool(self._slots.any())


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """What a call with these shapes, strides and options does; the addresses are all that varies.

    Shapes: arguments: all between the six addresses and the stream, in the order of ForwardArgs
            counters: None where every CTA has one tile and none is counted
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
    counters: TileCounters | None

    def run(
        self, q_address: int, k_address: int, v_address: int, out: torch.Tensor | None = None
    ) -> Result:
        """Launch on the current stream; returns out, or (out, lse)."""
        stream = raw_stream(self.device_index)
        counter, counters = 0, self.counters
        if counters is not None:
            counter = counters.of_capture() if is_capturing() else counters.of_stream(stream)
        if out is None:
            out = empty(self.out_shape, self.out_strides, self.dtype)
        lse, lse_address = None, 0
        if self.lse_shape is not None:
            lse = empty(self.lse_shape, self.lse_strides, torch.float32)
            lse_address = lse.data_ptr()
        addresses = (q_address, k_address, v_address, out.data_ptr(), lse_address, counter)
        self.executable(*addresses, *self.arguments, stream)
        return out if lse is None else (out, lse)


_plans: dict[Hashable, LaunchPlan] = {}


def recall(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: tuple[Hashable, ...]
) -> tuple[Result | None, Hashable]:
    """Repeat a call that was made before; else (None, key), for `attention` to remember it by.

    The key holds all that validation, selection and the launch arguments depend on. There is none
    for what no plan covers: addresses that TMA cannot read, another device than the current one,
    inputs that require grad.
    """
    try:
        dtype, index = q.dtype, q.get_device()
        if index < 0 or k.get_device() != index or v.get_device() != index:
            return None, None
        addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
    except AttributeError:  # no tensor: validation names it
        return None, None
    if (
        (addresses[0] | addresses[1] | addresses[2]) % ALIGNMENT
        or k.dtype is not dtype
        or v.dtype is not dtype
        or index != current_device()
        or ((q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled())
    ):
        return None, None
    layouts = (q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride())
    key = (layouts, dtype, index, options)
    try:
        plan = _plans.get(key)
    except TypeError:  # an option that is no plain value: validation names it
        return None, None
    if plan is None:
        return None, key
    return plan.run(*addresses), key


def attention(problem: AttentionProblem, inputs: AttentionInputs, key: Hashable = None) -> Result:
    """Run a validated problem on the GPU its tensors are on.

    Args:
        key: where `recall` will look for the plan of this call; None remembers nothing.
    Raises: UnsupportedProblem, CompileDisallowed, CaptureError; all before anything is enqueued.
    """
    target = selection.current_target(problem.device)
    kernel_key = selection.key_for(problem, target, inputs.kernel)
    if problem.batch == 0 or problem.seqlen_q == 0 or problem.seqlen_k == 0:
        return _without_keys(problem, inputs)
    with torch.cuda.device(problem.device):
        executable = _ready_executable(kernel_key)
        q, k, v = (t if is_readable(t) else packed_copy(t) for t in (inputs.q, inputs.k, inputs.v))
        out = inputs.out if inputs.out is not None and is_readable(inputs.out) else None
        plan = make_plan(problem, kernel_key, target, executable, (q, k, v, out))
        is_as_given = q is inputs.q and k is inputs.k and v is inputs.v
        if key is not None and is_as_given and inputs.out is None:
            if len(_plans) >= MAX_PLANS:
                _plans.clear()
            _plans[key] = plan
        result = plan.run(q.data_ptr(), k.data_ptr(), v.data_ptr(), out)
    if inputs.out is not None and out is None:
        return _into(inputs.out, result)
    return result


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


def packed_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor whose layout no kernel can read into a contiguous one."""
    return tensor.clone(memory_format=torch.contiguous_format)


def make_plan(
    problem: AttentionProblem,
    kernel_key: selection.KernelKey,
    target: Target,
    executable: Executable,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
) -> LaunchPlan:
    """Work out the launch arguments of a problem for tensors laid out like these."""
    q, k, v, out = tensors
    p = problem
    out_shape = (p.batch, p.seqlen_q, p.num_heads_q, p.head_dim_v)
    lse_shape = (p.batch, p.num_heads_q, p.seqlen_q) if p.return_lse else None
    num_m_blocks = -(-p.seqlen_q // kernel_key.config.tile_m)
    num_pairs = p.batch * p.num_heads_q
    if num_m_blocks * num_pairs >= 2**31 - target.num_sms:
        raise UnsupportedProblem(
            f"the problem has {num_m_blocks * num_pairs} query tiles, at most 2**31: split it"
        )
    num_ctas = min(target.num_sms, num_m_blocks * num_pairs)
    arguments = (
        *(p.batch, p.seqlen_q, p.seqlen_k, p.num_heads_q, p.num_heads_kv, p.head_dim, p.head_dim_v),
        *launch_strides(q),
        *launch_strides(k),
        *launch_strides(v),
        *(launch_strides(out) if out is not None else contiguous_strides(out_shape)[:3]),
        max(abs(p.softmax_scale) * LOG2_E, SMALLEST_SCALE),
        section_heads(p),
        num_ctas,
    )
    return LaunchPlan(
        executable=executable,
        arguments=arguments,
        out_shape=out_shape,
        out_strides=contiguous_strides(out_shape),
        lse_shape=lse_shape,
        lse_strides=() if lse_shape is None else contiguous_strides(lse_shape),
        dtype=p.dtype,
        device_index=q.get_device(),
        counters=tile_counters(q.get_device()) if num_ctas < num_m_blocks * num_pairs else None,
    )


def section_heads(problem: AttentionProblem) -> int:
    """(batch, query head) pairs that run together: their K and V share the L2 cache."""
    p = problem
    bytes_per_head = p.seqlen_k * (p.head_dim + p.head_dim_v) * p.dtype.itemsize
    kv_heads = max(1, L2_SECTION_BYTES // max(1, bytes_per_head))
    return min(p.batch * p.num_heads_q, kv_heads * p.group)


def launch_strides(tensor: torch.Tensor) -> tuple[int, int, int]:
    """(batch, seqlen, head) strides in elements.

    TMA checks every stride, also the one of an extent of 1, which is never walked and may be odd.
    """
    unused = ALIGNMENT // tensor.element_size()
    batch, seqlen, head = (
        stride if size > 1 else unused
        for stride, size in zip(tensor.stride()[:3], tensor.shape[:3], strict=True)
    )
    return batch, seqlen, head


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a contiguous tensor."""
    strides = [1]
    for size in shape[:0:-1]:
        strides.insert(0, strides[0] * size)
    return tuple(strides)


def _ready_executable(kernel_key: selection.KernelKey) -> Executable:
    """The compiled kernel; inside a graph capture only one that is already in memory."""
    if not is_capturing():
        return compile.executable(kernel_key)
    found = cache.lookup(kernel_key)
    if found is None:
        raise CaptureError(
            f"a CUDA graph is being captured and the kernel is not ready: call it once, or "
            f"flash_cute.warmup, before the capture ({kernel_key})"
        )
    return found


@functools.cache
def tile_counters(device_index: int) -> TileCounters:
    """Return the counters of a device."""
    return TileCounters(torch.device("cuda", device_index))


def _without_keys(problem: AttentionProblem, inputs: AttentionInputs) -> Result:
    """The result where there is nothing to compute: empty, or zeros and -inf."""
    p = problem
    out = inputs.out
    if out is None:
        shape = (p.batch, p.seqlen_q, p.num_heads_q, p.head_dim_v)
        out = torch.empty(shape, dtype=p.dtype, device=p.device)
    out.zero_()
    if not p.return_lse:
        return out
    lse_shape = (p.batch, p.num_heads_q, p.seqlen_q)
    return out, torch.full(lse_shape, -math.inf, dtype=torch.float32, device=p.device)


def _into(out: torch.Tensor, result: Result) -> Result:
    """Move a result into the caller's tensor, which the kernel could not write itself."""
    if isinstance(result, tuple):
        return out.copy_(result[0]), result[1]
    return out.copy_(result)
