"""Launch a Program with the public CUDA driver API, wait for it, and check what it left behind.

Contract: torch's context of the device is current; one launch at a time.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from cuda.bindings import driver

from sm100_on_hopper.build import Program
from sm100_on_hopper.record import TENSOR_MAP_BYTES, Field, TmaTile, check_ranks, pack

COLUMNS, LANES = 512, 128  # of tensor memory
WARPS, QUEUE_LENGTH, PRODUCT_WORDS = 32, 128, 8  # as tensor_memory.cu has them
LAUNCH_SECONDS = 20.0  # a launch that takes longer hangs
MOST_MEMORY = 2**35  # bytes, of all tensor memory of a launch

DTYPES = {
    "bf16": driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    "fp16": driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
}
SWIZZLES = {
    0: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
    32: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_32B,
    64: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_64B,
    128: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
}


class LaunchError(RuntimeError):
    """The driver refused a launch, the kernel stopped, or it left something undone."""


class HangError(LaunchError):
    """A launch did not end in time; only the end of the process gets rid of it."""


def check(result: tuple[Any, ...]) -> Any:
    """The value of a driver call.

    Raises: LaunchError with the name of the error.
    """
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        raise LaunchError(f"the driver says {error.name}")
    return values[0] if len(values) == 1 else tuple(values)


def encode(tile: TmaTile) -> bytes:
    """The tensor map of a tile, as the driver makes it."""
    wide, narrow = driver.cuuint64_t, driver.cuuint32_t
    rank = len(tile.sizes)
    tensor_map = check(
        driver.cuTensorMapEncodeTiled(
            DTYPES[tile.dtype],
            rank,
            tile.address,
            [wide(size) for size in tile.sizes],
            [wide(stride) for stride in tile.strides],
            [narrow(extent) for extent in tile.box],
            [narrow(1)] * rank,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            SWIZZLES[tile.swizzle_bytes],
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return ctypes.string_at(tensor_map.getPtr(), TENSOR_MAP_BYTES)


@dataclass
class State:
    """The tensor memory of a launch, by the names that tensor_memory.cu has for it."""

    sm100_memory: torch.Tensor
    sm100_columns: torch.Tensor
    sm100_queue: torch.Tensor
    sm100_queue_sizes: torch.Tensor

    def verify(self) -> None:
        """Check what a finished launch left behind.

        Raises: LaunchError for columns not freed and products not covered by a commit.
        """
        if bool(self.sm100_columns.any()):
            raise LaunchError(f"{int(self.sm100_columns.sum())} columns were not deallocated")
        if bool(self.sm100_queue_sizes.any()):
            raise LaunchError(f"{int(self.sm100_queue_sizes.sum())} products without a commit")


def new_state(num_ctas: int, is_lazy: bool) -> State:
    """Allocate tensor memory for every CTA of a grid, however many run at once.

    Raises: LaunchError for a grid that is too large.
    """
    cells = num_ctas * COLUMNS * LANES
    if 4 * cells > MOST_MEMORY:
        raise LaunchError(f"a grid of {num_ctas} CTAs needs {4 * cells} bytes of tensor memory")
    words = num_ctas * WARPS * QUEUE_LENGTH * PRODUCT_WORDS if is_lazy else 1
    options = {"dtype": torch.int32, "device": "cuda"}
    return State(
        torch.empty(cells, **options),
        torch.zeros(num_ctas, **options),
        torch.empty(words, **options),
        torch.zeros(2 * num_ctas * WARPS if is_lazy else 1, **options),
    )


class Loaded:
    """A Program in the memory of the current context."""

    def __init__(self, program: Program):
        torch.cuda.init()
        torch.empty(1, device="cuda")  # makes torch's context the current one
        self.program = program
        self._library = check(driver.cuLibraryLoadData(program.cubin, None, None, 0, None, None, 0))
        name = program.entry.encode()
        self._kernel = check(driver.cuLibraryGetKernel(self._library, name))
        self._function = check(driver.cuKernelGetFunction(self._kernel))

    def launch(
        self, record: Sequence[Field], grid: int, smem_bytes: int, seconds: float = LAUNCH_SECONDS
    ) -> None:
        """Launch, wait and check.

        Raises: RefusalError where the record does not fit the kernel, HangError, LaunchError.
        """
        values = pack(record, self.program.parameters, encode)
        check_ranks(record, self.program.tma_ranks)
        state = None
        if self.program.uses_tensor_memory:
            state = new_state(grid, self.program.mode.lazy)
            self._point_to(state)
        stream = torch.cuda.current_stream()
        stream.synchronize()
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(self._function, attribute, smem_bytes))
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.program.threads, 1, 1
        config.sharedMemBytes = smem_bytes
        config.hStream = driver.CUstream(stream.cuda_stream)
        config.numAttrs = 0
        buffers = [ctypes.create_string_buffer(value, len(value)) for value in values]
        pointers = (ctypes.c_void_p * len(buffers))(*map(ctypes.addressof, buffers))
        check(driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(pointers), 0))
        wait(stream.cuda_stream, seconds)
        if state is not None:
            state.verify()

    def _point_to(self, state: State) -> None:
        """Tell the device functions where tensor memory is."""
        for name, tensor in vars(state).items():
            where, _ = check(driver.cuLibraryGetGlobal(self._library, name.encode()))
            pointer = ctypes.c_uint64(tensor.data_ptr())
            check(driver.cuMemcpyHtoD(where, ctypes.addressof(pointer), 8))


def wait(stream: int, seconds: float) -> None:
    """Wait for a stream.

    Raises: HangError when it takes too long, LaunchError when a kernel stopped.
    """
    deadline = time.monotonic() + seconds
    while True:
        (status,) = driver.cuStreamQuery(driver.CUstream(stream))
        if status == driver.CUresult.CUDA_SUCCESS:
            return
        if status != driver.CUresult.CUDA_ERROR_NOT_READY:
            driver.cuCtxSynchronize()  # brings out what an assertion of the kernel says
            raise LaunchError(f"the kernel stopped: {status.name}")
        if time.monotonic() > deadline:
            raise HangError(f"a launch did not end in {seconds} s")
        time.sleep(0.001)


@functools.lru_cache(maxsize=64)
def loaded(program: Program) -> Loaded:
    """Load a program once."""
    return Loaded(program)
