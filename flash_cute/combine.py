"""`flash_attn_combine`: attention over all keys out of attention over parts of them.

On a GPU one kernel (device/combine.py) reads every part once; on the CPU the eager reference does
it. The first call with some shapes, strides and options makes a `CombinePlan`; later ones find it
with one dict probe.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

import torch

from flash_cute import combine_plan, current, launch, plan, reference, selection
from flash_cute.cache import Executable
from flash_cute.combine_plan import MAX_SPLITS, CombinePlan, CombineStrides
from flash_cute.errors import InvalidProblem, UnsupportedProblem, refuse

MAX_PLANS = 4096

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Key = tuple[Hashable, ...]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_plans: dict[Key, _Call] = {}


def flash_attn_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens: torch.Tensor | None = None,
    seqused: torch.Tensor | None = None,
    return_lse: bool = True,
) -> Result:
    """Merge the results of attention over parts of the keys into that over all of them.

    ``lse = logsumexp_i lse_i`` and ``out = sum_i exp(lse_i - lse) out_i``: what attention with the
    keys split gives (ring and context parallelism, a shared prefix computed once). A part with lse
    -inf, which saw no key, adds nothing and is not read, whatever its output holds; where all parts
    are such, out is 0 and lse -inf. NaN and +inf in lse_partial give what the formulas say. Sums
    are float32. A row depends on its own parts only.

    Args:
        lse_partial: the parts' log-sum-exps. The attention functions return theirs with heads
            before rows: ``torch.stack([lse_a, lse_b]).transpose(-1, -2)``, without a copy, fits.
        out: tensor to write the result into, which is then returned. It must overlap no input.
        out_dtype: dtype of the result; None is that of ``out``, else that of out_partial, so that
            nothing is rounded unasked.
        cu_seqlens: first row of each packed sequence, and the end. Rows past the end are not
            written.
        seqused: rows in use of each sequence, at most all of them; later ones are not written: an
            ``out`` keeps what it held there, and results made here hold anything on a GPU, 0 and
            lse -inf on the CPU.
        return_lse: return (out, lse), not out alone.

    Shapes: out_partial (num_splits, batch, seqlen, num_heads, dim), or packed (num_splits, total,
            num_heads, dim); 1 to 256 splits; float32, float16 or bfloat16, on the CPU also float64;
            last stride 1, any other strides. dim on a GPU: multiples of 8 up to 512; on the CPU
            any. lse_partial without dim, float32 (float64 with float64 parts), any strides.
            cu_seqlens (batch + 1,) only with packed ones, seqused (batch,): int32.
            out like out_partial without num_splits; lse (batch, num_heads, seqlen) or (num_heads,
            total) float32
    Units:  lse in natural log.
    Raises: InvalidProblem naming the argument, what came and what was expected; UnsupportedProblem
            on a GPU for a dim or dtype that the kernel does not have and for inputs that require
            grad outside torch.no_grad(); CaptureError and CompileDisallowed as the attention
            functions do. All before anything is launched.
    """
    tensors = (out_partial, lse_partial, out, cu_seqlens, seqused)
    result, key = _recall(tensors, (out_dtype, return_lse))
    if result is not None:
        return result
    _check(*tensors)
    if out is not None and out_dtype is not None and out_dtype != out.dtype:
        refuse("out_dtype", out_dtype, out.dtype, "dtype of out")
    dtype = out_dtype or (out_partial if out is None else out).dtype
    allowed = (*_DTYPES, torch.float64) if out_partial.device.type == "cpu" else _DTYPES
    if dtype not in allowed:
        refuse("out_dtype", dtype, f"one of {', '.join(map(str, allowed))}")
    _check_grad(out_partial, lse_partial, out)
    request = _Request(*tensors, dtype, return_lse)
    if out_partial.device.type == "cpu":
        return _on_cpu(request)
    return _on_gpu(request, key)


@dataclass(frozen=True, slots=True)
class _Request:
    """A validated call."""

    out_partial: torch.Tensor
    lse_partial: torch.Tensor
    out: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    seqused: torch.Tensor | None
    out_dtype: torch.dtype
    return_lse: bool

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Shape of the returned lse."""
        *batch, rows, heads = self.lse_partial.shape[1:]
        return (*batch, heads, rows)


# ---- Validation ----------------------------------------------------------------------------------


def _check(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    seqused: torch.Tensor | None,
) -> None:
    """Check tensors against one another; nothing is read off the device."""
    given = {"out_partial": out_partial, "lse_partial": lse_partial, "out": out}
    given |= {"cu_seqlens": cu_seqlens, "seqused": seqused}
    for name, tensor in given.items():
        if tensor is None and name not in ("out_partial", "lse_partial"):
            continue
        if not isinstance(tensor, torch.Tensor):
            refuse(name, f"of type {type(tensor).__name__}", "a torch.Tensor")
        if tensor.device != out_partial.device:
            refuse(f"{name}.device", tensor.device, out_partial.device, "device of out_partial")
    on_cpu = out_partial.device.type == "cpu"
    if not on_cpu and out_partial.device.type != "cuda":
        refuse("out_partial.device", out_partial.device, "cuda or cpu")
    ranks = (4,) if cu_seqlens is not None else (4, 5)
    if out_partial.dim() not in ranks:
        layout = "(num_splits, total, num_heads, dim), packed"
        layout += " as cu_seqlens is given" if cu_seqlens is not None else ", or with batch, seqlen"
        refuse("out_partial.dim()", out_partial.dim(), " or ".join(map(str, ranks)), layout)
    if not 1 <= out_partial.shape[0] <= MAX_SPLITS:
        refuse("out_partial.shape[0]", out_partial.shape[0], f"1 to {MAX_SPLITS}", "num_splits")
    dtypes = (*_DTYPES, torch.float64) if on_cpu else _DTYPES
    if out_partial.dtype not in dtypes:
        refuse("out_partial.dtype", out_partial.dtype, f"one of {', '.join(map(str, dtypes))}")
    lse_dtypes = {torch.float32} | ({torch.float64} & {out_partial.dtype})
    if lse_partial.dtype not in lse_dtypes:
        refuse("lse_partial.dtype", lse_partial.dtype, torch.float32)
    _check_shape("lse_partial", lse_partial, tuple(out_partial.shape[:-1]), "out_partial's")
    _check_last_stride("out_partial", out_partial)
    if out is not None:
        _check_out(out, out_partial)
    _check_lengths(out_partial, cu_seqlens, seqused)


def _check_shape(name: str, tensor: torch.Tensor, expected: tuple[int, ...], why: str) -> None:
    if tuple(tensor.shape) != expected:
        refuse(f"{name}.shape", tuple(tensor.shape), expected, why)


def _check_last_stride(name: str, tensor: torch.Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        refuse(f"{name}.stride(-1)", tensor.stride(-1), 1, "all other strides are free")


def _check_out(out: torch.Tensor, out_partial: torch.Tensor) -> None:
    _check_shape("out", out, tuple(out_partial.shape[1:]), "out_partial's without num_splits")
    _check_last_stride("out", out)
    for axis in range(out.dim() - 1):
        if out.shape[axis] > 1 and out.stride(axis) == 0:
            refuse(f"out.stride({axis})", 0, "nonzero", "rows of out would overlap")
    if out.numel() and out.data_ptr() == out_partial.data_ptr():
        refuse("out", "the memory of out_partial", "memory of its own")


def _check_lengths(
    out_partial: torch.Tensor, cu_seqlens: torch.Tensor | None, seqused: torch.Tensor | None
) -> None:
    for name, tensor in (("cu_seqlens", cu_seqlens), ("seqused", seqused)):
        if tensor is None:
            continue
        if tensor.dtype != torch.int32:
            refuse(f"{name}.dtype", tensor.dtype, torch.int32)
        if tensor.dim() != 1:
            refuse(f"{name}.dim()", tensor.dim(), 1)
        _check_last_stride(name, tensor)
    if cu_seqlens is not None and cu_seqlens.shape[0] < 1:
        refuse("cu_seqlens.shape[0]", 0, "at least 1", "batch + 1")
    if seqused is None:
        return
    if cu_seqlens is None and out_partial.dim() == 4:
        raise InvalidProblem(
            "seqused is given with packed parts and without cu_seqlens, expected both: rows belong "
            "to no sequence"
        )
    batch, of = (out_partial.shape[1], "batch of out_partial")
    if cu_seqlens is not None:
        batch, of = cu_seqlens.shape[0] - 1, "cu_seqlens.shape[0] - 1"
    if seqused.shape[0] != batch:
        refuse("seqused.shape[0]", seqused.shape[0], batch, of)


def _check_grad(
    out_partial: torch.Tensor, lse_partial: torch.Tensor, out: torch.Tensor | None
) -> None:
    if not torch.is_grad_enabled():
        return
    requires_grad = out_partial.requires_grad or lse_partial.requires_grad
    if out is not None and (requires_grad or out.requires_grad):
        raise InvalidProblem(
            "out is given while an argument requires grad, expected no out, or torch.no_grad()"
        )
    if requires_grad and out_partial.device.type != "cpu":
        raise UnsupportedProblem(
            "out_partial or lse_partial requires grad and the combine kernel has no backward: call "
            "under torch.no_grad(), or pass detached tensors (the CPU is differentiable)"
        )


# ---- CPU -----------------------------------------------------------------------------------------


def _on_cpu(request: _Request) -> Result:
    out, lse = reference.combine(request.out_partial, request.lse_partial)
    out = out.to(request.out_dtype).contiguous()
    is_used = _used_rows(request)
    if request.out is not None:
        kept = request.out if is_used is None else torch.where(is_used[..., None], out, request.out)
        out = request.out.copy_(out if is_used is None else kept)
    elif is_used is not None:
        out = torch.where(is_used[..., None], out, 0.0)
    if not request.return_lse:
        return out
    if is_used is not None:
        lse = torch.where(is_used, lse, -math.inf)
    return out, lse.transpose(-1, -2).to(torch.float32).contiguous()


def _used_rows(request: _Request) -> torch.Tensor | None:
    """Which rows are written, (batch, seqlen, 1) or (total, 1) bool; None: all of them.

    Raises: InvalidProblem for lengths that cannot be, which nothing but the CPU can look at.
    """
    rows = request.out_partial.shape[-3]
    starts, cu_seqlens = torch.zeros(1, dtype=torch.int32), request.cu_seqlens
    room = torch.tensor([rows])
    if cu_seqlens is not None:
        starts, room = cu_seqlens[:-1], cu_seqlens.diff()
        if cu_seqlens[0] != 0:
            refuse("cu_seqlens[0]", int(cu_seqlens[0]), 0)
        if (room < 0).any():
            refuse("cu_seqlens", cu_seqlens.tolist(), "an ascending sequence")  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
        if cu_seqlens[-1] > rows:
            refuse("cu_seqlens[-1]", int(cu_seqlens[-1]), f"at most {rows}", "rows of out_partial")
    elif request.seqused is None:
        return None
    used = room if request.seqused is None else request.seqused
    wrong = (used < 0) | (used > room)
    if wrong.any():
        first = int(wrong.nonzero()[0])
        most = int(room.expand(used.shape)[first])
        refuse(f"seqused[{first}]", int(used[first]), f"0 to {most}", "length of the sequence")
    places = torch.arange(rows)
    is_used = (places >= starts[:, None]) & (places < (starts + used)[:, None])
    return (is_used.any(0) if cu_seqlens is not None else is_used)[..., None]


# ---- GPU -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Call:
    """A plan, and the results that it writes into."""

    plan: CombinePlan
    device_index: int
    out_shape: tuple[int, ...]
    out_strides: tuple[int, ...]
    out_dtype: torch.dtype
    lse_shape: tuple[int, ...] | None
    lse_strides: tuple[int, ...]

    def run(
        self, addresses: tuple[int, ...], lengths: tuple[int, ...], out: torch.Tensor | None
    ) -> Result:
        """Launch on the current stream; addresses of the parts, and of cu_seqlens and seqused."""
        if out is None:
            out = current.empty(self.out_shape, self.out_strides, self.out_dtype)
        lse, lse_address = None, 0
        if self.lse_shape is not None:
            lse = current.empty(self.lse_shape, self.lse_strides, torch.float32)
            lse_address = lse.data_ptr()
        results = (out.data_ptr(), lse_address)
        self.plan.run((*addresses, *results, *lengths, 0), current.raw_stream(self.device_index))
        return out if lse is None else (out, lse)


def _recall(
    tensors: tuple[torch.Tensor | None, ...], options: Key
) -> tuple[Result | None, Key | None]:
    """Repeat a call that was made before; else (None, key), for `_on_gpu` to remember it by.

    There is no key for what no plan covers: tensors on the CPU or on another device than the
    current one, inputs that require grad, addresses that 16-byte loads cannot take.
    """
    try:
        index = tensors[0].get_device()  # pyright: ignore[reportOptionalMemberAccess]
        if index < 0 or index != current.current_device():
            return None, None
        addresses: list[int] = []
        key: list[Hashable] = [options]
        for tensor in tensors:
            if tensor is None:
                addresses.append(0)
                key.append(None)
                continue
            if tensor.get_device() != index or (tensor.requires_grad and torch.is_grad_enabled()):
                return None, None
            addresses.append(tensor.data_ptr())
            key.append((tensor.shape, tensor.stride(), tensor.dtype))
    except AttributeError:  # no tensor: validation names it
        return None, None
    partial, lse_partial, out, cu_seqlens, seqused = addresses
    if (partial | out) % plan.ALIGNMENT or partial == out:
        return None, None
    found_by = (*key, index)
    try:
        call = _plans.get(found_by)
    except TypeError:  # an option that is no plain value: validation names it
        return None, None
    if call is None:
        return None, found_by
    return call.run((partial, lse_partial), (cu_seqlens, seqused), tensors[2]), found_by


def _on_gpu(request: _Request, key: Key | None) -> Result:
    """Run a validated call the long way, and remember it under `key`."""
    parts, out, device = request.out_partial, request.out, request.out_partial.device
    cu_seqlens, seqused = request.cu_seqlens, request.seqused
    kernel_key = combine_plan.combine_key(
        selection.current_target(device).arch,
        parts.dtype,
        request.out_dtype,
        parts.shape[-1],
        is_packed=cu_seqlens is not None,
        has_seqused=seqused is not None,
    )
    with torch.cuda.device(device):
        if not parts.numel() or (cu_seqlens is not None and cu_seqlens.shape[0] == 1):
            return _nothing(request)
        executable = launch.ready_executable(kernel_key)
        if not plan.is_readable(parts):
            parts = parts.clone(memory_format=torch.contiguous_format)
        if out is not None and not plan.is_readable(out):
            # A copy, not a new tensor: rows that are not written keep what they hold.
            out = out.clone(memory_format=torch.contiguous_format)
        call = _call(request, parts, out, executable)
        if key is not None and parts is request.out_partial and out is request.out:
            if len(_plans) >= MAX_PLANS:
                _plans.clear()
            _plans[key] = call
        lengths = tuple(0 if t is None else t.data_ptr() for t in (cu_seqlens, seqused))
        result = call.run((parts.data_ptr(), request.lse_partial.data_ptr()), lengths, out)
    if request.out is None or out is request.out:
        return result
    written = result[0] if isinstance(result, tuple) else result
    request.out.copy_(written)
    return (request.out, result[1]) if isinstance(result, tuple) else request.out


def _nothing(request: _Request) -> Result:
    """Results without a row to write."""
    out, shape = request.out, tuple(request.out_partial.shape[1:])
    if out is None:
        out = current.empty(shape, plan.contiguous_strides(shape), request.out_dtype)
    if not request.return_lse:
        return out
    strides = plan.contiguous_strides(request.lse_shape)
    return out, current.empty(request.lse_shape, strides, torch.float32)


def _call(
    request: _Request, parts: torch.Tensor, out: torch.Tensor | None, executable: Executable
) -> _Call:
    """Plan the merge of readable parts into a writable `out`, or into a new contiguous tensor."""
    is_packed = parts.dim() == 4
    out_shape = tuple(parts.shape[1:])
    out_strides = plan.contiguous_strides(out_shape) if out is None else out.stride()
    lse_strides = plan.contiguous_strides(request.lse_shape)
    *lse_batch, head, seqlen = lse_strides

    def with_batch(numbers: tuple[int, ...], at: int, batch: int) -> tuple[int, ...]:
        return (*numbers[:at], batch, *numbers[at:]) if is_packed else numbers

    made = combine_plan.make_combine_plan(
        executable,
        with_batch(tuple(parts.shape), 1, 1),
        CombineStrides(
            out_partial=with_batch(parts.stride()[:-1], 1, 0),
            lse_partial=with_batch(request.lse_partial.stride(), 1, 0),
            out=with_batch(out_strides[:-1], 0, 0),
            lse=with_batch((*lse_batch, seqlen, head), 0, 0),
        ),
        None if request.cu_seqlens is None else request.cu_seqlens.shape[0] - 1,
    )
    return _Call(
        plan=made,
        device_index=parts.get_device(),
        out_shape=out_shape,
        out_strides=out_strides,
        out_dtype=request.out_dtype,
        lse_shape=request.lse_shape if request.return_lse else None,
        lse_strides=lse_strides,
    )
