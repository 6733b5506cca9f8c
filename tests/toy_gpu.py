"""A GPU that is not there: tensors that say they lie on one, and a kernel that notes its arguments.

Everything between the public functions and the compiled kernel runs as on a Hopper GPU.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch

from flash_cute import append_plan, capture, compile, current, launch, plan, selection
from flash_cute.arguments import ForwardArguments
from flash_cute.target import Target

DEVICE = torch.device("cuda:0")


class ToyTensor(torch.Tensor):
    """A CPU tensor that says it is on a GPU, a device of its own if it has one in `toy_device`."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # as quick as a plain tensor
    toy_device = DEVICE

    @property
    def device(self) -> torch.device:
        return self.toy_device

    @property
    def is_cuda(self) -> bool:
        return True

    def get_device(self) -> int:
        return self.toy_device.index

    def transpose(self, *axes: int) -> Any:
        return on_gpu(super().transpose(*axes))

    def new_empty(self, *sizes: Any) -> Any:
        return on_gpu(super().new_empty(*sizes))

    def clone(self, **options: Any) -> Any:
        return on_gpu(super().clone(**options))

    def expand(self, *sizes: Any) -> Any:
        return on_gpu(super().expand(*sizes))

    def permute(self, *axes: Any) -> Any:
        return on_gpu(super().permute(*axes))

    def narrow(self, *slice_: Any) -> Any:
        return on_gpu(super().narrow(*slice_))


def on_gpu(tensor: torch.Tensor, index: int = 0) -> torch.Tensor:
    """Return a view of a tensor that lies on the toy GPU of that number."""
    view = tensor.as_subclass(ToyTensor)
    if index:
        view.toy_device = torch.device("cuda", index)
    return view


class ToyCounters:
    """Stands for counters in the memory of a device."""

    def of(self, stream: int, count: int) -> int:
        return 64


class Launches:
    """A stand-in for a compiled kernel and the driver: keeps what it is called with."""

    def __init__(self) -> None:
        self.looked_up: list[selection.KernelKey] = []  # by the calls that go the long way
        self.launched: list[selection.KernelKey] = []
        self.arguments: tuple[Any, ...] = ()  # of the last launch
        self.all_arguments: list[tuple[Any, ...]] = []

    def executable(self, key: selection.KernelKey) -> Any:
        """Look up a kernel, as compile.executable does."""
        self.looked_up.append(key)
        return functools.partial(self._launch, key)

    def _launch(self, key: selection.KernelKey, *arguments: Any) -> None:
        self.launched.append(key)
        self.arguments = arguments
        self.all_arguments.append(arguments)

    @property
    def named(self) -> ForwardArguments:
        """The arguments of the last launch by name."""
        return ForwardArguments(*self.arguments[: len(ForwardArguments._fields)])

    @property
    def captured(self) -> tuple[int, ...]:
        """The arguments that follow, of callbacks and block lists."""
        return self.arguments[len(ForwardArguments._fields) :]


def _empty(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
    return on_gpu(torch.empty_strided(shape, strides, dtype=dtype))


def install(patch: pytest.MonkeyPatch) -> Launches:
    """Put the toy in place of the device until `patch` is undone; returns what will be launched."""
    launches = Launches()
    patch.setattr(selection, "current_target", lambda device: Target.from_arch("sm_90a"))
    patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    patch.setattr(compile, "executable", launches.executable)
    patch.setattr(capture, "_TENSOR_CLASSES", (*capture._TENSOR_CLASSES, ToyTensor))
    for module in (launch, append_plan):
        patch.setattr(module, "_plans", {})
    patch.setattr(current, "is_capturing", lambda: False)
    patch.setattr(current, "current_device", lambda: 0)
    patch.setattr(current, "raw_stream", lambda index: 0)
    patch.setattr(current, "empty", _empty)
    patch.setattr(plan, "counters_of", lambda index: ToyCounters())
    return launches
