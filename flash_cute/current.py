"""The current device, stream and capture, and new tensors there, at the least host time.

torch's own short cuts, without checks and objects: 0.1 µs instead of 1. The names are private, so
each has the public function behind it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

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


def capture_id(stream: int) -> int:
    """Return the number of the graph capture that is under way on a stream."""
    runtime: Any = importlib.import_module("cuda.bindings.runtime")
    _, _, number, *_ = runtime.cudaStreamGetCaptureInfo(stream)
    return int(number)
