"""The plain matrix product of matmul_dsl.py: its launch record, its run and its check."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from sm100_on_hopper import record
from sm100_on_hopper.build import Program, build, kernel_ptx
from sm100_on_hopper.lowering import PLAIN, Fault, Mode
from sm100_on_hopper.record import Field, TmaTile

TILE_M, TILE_N, TILE_K = 128, 128, 64
# Two tiles of columns in each of two CTAs; five steps along k go around a ring of three stages.
SHAPE = (256, 256, 320)
TOLERANCE = 1e-3  # of the largest |C|; sums of 320 exact products in f32 differ by about 1e-6


@functools.cache
def ptx() -> str:
    """The kernel's PTX for sm_100a."""
    from sm100_on_hopper.matmul_dsl import Matmul

    return kernel_ptx(Matmul(), "sm_100a")


@functools.cache
def program(mode: Mode = PLAIN, faults: Sequence[Fault] = ()) -> Program:
    """The kernel for Hopper."""
    return build(ptx(), mode, faults)


@functools.cache
def smem_bytes() -> int:
    """Dynamic shared memory of a CTA."""
    from sm100_on_hopper.matmul_dsl import Matmul

    return Matmul().smem_bytes


def launch_record(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> list[Field]:
    """The parameters, in the order of MatmulParams.

    Shapes: a (m, k), b (k, n) bf16; c (m, n) f32; contiguous
    """
    (m, k), n = a.shape, b.shape[1]
    tile_a = TmaTile(a.data_ptr(), "bf16", (k, m), (2 * k,), (64, TILE_M), 128)
    tile_b = TmaTile(b.data_ptr(), "bf16", (n, k), (2 * n,), (64, TILE_K), 128)
    return [
        *record.tma("a", tile_a),
        *record.tma("b", tile_b),
        record.tensor("mC", c.data_ptr(), (m, n), (n,)),
        record.unread("mma"),
        record.int32("num_k_tiles", k // TILE_K),
    ]


def relative_error(built: Program, smem: int, shape: tuple[int, int, int], seconds: float) -> float:
    """Run on random bf16 matrices; returns the largest error over the largest |C|, inf for NaN.

    Args:
        seconds: that the launch may take.
    """
    from sm100_on_hopper.launch import loaded

    m, n, k = shape
    generator = torch.Generator().manual_seed(m + n + k)
    a = torch.randn(m, k, generator=generator).bfloat16()
    b = torch.randn(k, n, generator=generator).bfloat16()
    expected = a.double() @ b.double()
    on_gpu = a.cuda(), b.cuda(), torch.full((m, n), float("nan"), device="cuda")
    loaded(built).launch(launch_record(*on_gpu), m // TILE_M, smem, seconds)
    error = float((on_gpu[2].cpu().double() - expected).abs().max() / expected.abs().max())
    return float("inf") if math.isnan(error) else error
