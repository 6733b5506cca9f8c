"""First steps: one call of `flash_attn_func`, checked against something independent.

With a GPU the call runs a kernel, which is then timed. Without one the same call runs the eager
reference on the CPU, and the Hopper kernel is compiled for inspection, but not executed.

    python examples/quickstart.py
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _common import compile_for_hopper, time_on_gpu
from torch.nn.functional import scaled_dot_product_attention

import flash_cute
from flash_cute import flash_attn_func

DTYPE = torch.bfloat16
HEADS_Q, HEADS_KV, HEAD_DIM = 16, 4, 128

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make_inputs(batch: int, seqlen: int, device: str) -> Inputs:
    """Make q, k and v: (batch, seqlen, heads, head_dim), four query heads to a key/value head."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(batch, seqlen, heads, HEAD_DIM, dtype=DTYPE, device=device)
        for heads in (HEADS_Q, HEADS_KV, HEADS_KV)
    )
    return q, k, v


def pytorch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Compute the same with PyTorch, in the dtype of the inputs."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def check(name: str, out: Any, inputs: Inputs, exact_attention: Callable[..., Any]) -> None:
    """Compare `out` with float64 on the CPU, and its error with that of PyTorch in bfloat16.

    One batch entry and one group of heads are enough to see a wrong kernel, and fast on a CPU.
    """
    group = HEADS_Q // HEADS_KV
    q, k, v = (x[:1, :, :heads].cpu() for x, heads in zip(inputs, (group, 1, 1), strict=True))
    exact = exact_attention(q.double(), k.double(), v.double())
    error = (out[:1, :, :group].cpu().double() - exact).abs().max().item()
    yardstick = (pytorch_attention(q, k, v).double() - exact).abs().max().item()
    allowed = 2 * yardstick + torch.finfo(DTYPE).eps * exact.abs().max().item()
    print(f"  largest error of {name}: {error:.1e}, of PyTorch in bfloat16: {yardstick:.1e}")
    if not error <= allowed:
        sys.exit(f"{name} is wrong: error {error:.1e}, at most {allowed:.1e} expected")


def run_on_gpu() -> None:
    """Run the kernel, check it and time it."""
    batch, seqlen = 8, 4096
    print(f"GPU: {torch.cuda.get_device_name()}")
    q, k, v = make_inputs(batch, seqlen, "cuda")
    print(
        f"flash_attn_func(q, k, v, causal=True), q {tuple(q.shape)}, k {tuple(k.shape)}, bfloat16"
    )

    started = time.perf_counter()
    out = flash_attn_func(q, k, v, causal=True)
    torch.cuda.synchronize()
    info = flash_cute.cache_info()
    came = "compiled" if info.compiles else "loaded from the disk cache"
    print(f"  first call {time.perf_counter() - started:.2f} s, kernel {came}")
    # On CPU tensors the same function runs the reference.
    check("the kernel", out, (q, k, v), partial(flash_attn_func, causal=True))

    seconds = time_on_gpu(lambda: flash_attn_func(q, k, v, causal=True))
    # Two matrix products of 2 * seqlen^2 * head_dim operations per head; causal needs half.
    operations = 4 * batch * HEADS_Q * seqlen**2 * HEAD_DIM / 2
    print(f"  {seconds * 1e6:.0f} µs a call, {operations / seconds / 1e12:.0f} TFLOP/s")


def run_on_cpu() -> None:
    """Run the reference, check it, then compile the kernel that a Hopper GPU would run."""
    batch, seqlen = 1, 1024
    print("no GPU here: CPU tensors run the eager reference")
    q, k, v = make_inputs(batch, seqlen, "cpu")
    print(
        f"flash_attn_func(q, k, v, causal=True), q {tuple(q.shape)}, k {tuple(k.shape)}, bfloat16"
    )
    started = time.perf_counter()
    out = flash_attn_func(q, k, v, causal=True)
    print(f"  {time.perf_counter() - started:.2f} s on the CPU")
    check("the reference", out, (q, k, v), pytorch_attention)
    print("the kernel of the same call:")
    compile_for_hopper(q, k, causal=True)


if __name__ == "__main__":
    print(f"flash_cute {flash_cute.__version__}, torch {torch.__version__}")
    if torch.cuda.is_available():
        run_on_gpu()
    else:
        run_on_cpu()
