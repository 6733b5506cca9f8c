"""What the examples share: inputs, the check against the definition, timing, the command line.

An example gives `run` a function that builds its `Way`s of making one call, and the definition of
what they compute. The CPU reference is checked against the definition, whatever the machine. Where
there is a GPU and `is_supported` says yes, the kernel is checked against the reference and timed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import flash_cute
from flash_cute import AttentionProblem, Target, flash_attn_func, is_supported, reference_mask

DTYPE = torch.bfloat16
GPU = "cuda"
SMALL, LARGE = (2, 640), (4, 8192)  # (batch, seqlen) of the checks, and of the timing

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Way:
    """One way to make the call of an example.

    options: arguments of flash_attn_func or flash_attn_varlen_func beside q, k and v
    call:    makes the call, where it is not flash_attn_func(q, k, v, **options)
    operands: q, k and v as that function takes them, where they are not as `Example` has them
    """

    name: str
    options: Mapping[str, Any]
    call: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    operands: Tensors | None = None


@dataclass(frozen=True)
class Example:
    """A call at one size, in one or more ways, and its definition.

    weights: turns scaled scores (batch, heads, seqlen_q, seqlen_k) into the weights of the values
    mask:    arguments of reference_mask that say which scores count as work

    Shapes: q, k, v (batch, seqlen, heads, head_dim)
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    ways: tuple[Way, ...]
    weights: Callable[[torch.Tensor], torch.Tensor]
    mask: Mapping[str, Any] = field(default_factory=dict)

    def run(self, way: Way) -> torch.Tensor:
        """Make the call; the result is (batch, seqlen, heads, head_dim)."""
        if way.call is not None:
            return way.call(self.q, self.k, self.v)
        return output(flash_attn_func(self.q, self.k, self.v, **way.options))


def output(result: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The output of a call, with or without lse."""
    return result if isinstance(result, torch.Tensor) else result[0]


Build = Callable[[str, int, int], Example]  # (device, batch, seqlen)


def random_qkv(
    device: str, batch: int, seqlen: int, heads: tuple[int, int], head_dim: int
) -> Tensors:
    """q with heads[0] query heads, k and v with heads[1]: the same values on every device."""
    source = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(batch, seqlen, count, head_dim, generator=source, dtype=torch.float32)
        for count in (heads[0], heads[1], heads[1])
    )
    return q.to(device, DTYPE), k.to(device, DTYPE), v.to(device, DTYPE)


def positions(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q_idx (seqlen_q, 1) and kv_idx (seqlen_k,) of a matrix of scores."""
    rows, cols = scores.shape[-2:]
    return torch.arange(rows)[:, None], torch.arange(cols)


def softmax(scores: torch.Tensor, visible: torch.Tensor | None = None) -> torch.Tensor:
    """Weights of scores that are visible; a row without any gets 0."""
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    return torch.softmax(scores, dim=-1).nan_to_num(0.0)


def by_definition(example: Example, dtype: torch.dtype) -> torch.Tensor:
    """Attention with the whole matrix of scores, both products in `dtype`."""
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (example.q, example.k, example.v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scale = example.ways[0].options.get("softmax_scale") or q.shape[-1] ** -0.5
    scores = q @ k.transpose(-1, -2)
    weights = example.weights(scale * scores.to(torch.promote_types(dtype, torch.float32)))
    return (weights.to(dtype) @ v).transpose(1, 2)


@dataclass(frozen=True)
class Truth:
    """The result by definition in float64, and what plain PyTorch makes of it in bfloat16."""

    exact: torch.Tensor
    lowprec: torch.Tensor

    def check(self, name: str, out: torch.Tensor) -> None:
        """Allow each row twice the error of plain PyTorch, and one rounding."""
        error = (out.cpu().double() - self.exact).abs().amax(-1)
        yardstick = (self.lowprec.double() - self.exact).abs().amax(-1)
        allowed = 2 * yardstick + torch.finfo(DTYPE).eps * self.exact.abs().amax(-1) + 1e-30
        worst = int((error / allowed).argmax())
        figures = f"error {error.flatten()[worst]:.1e}, {allowed.flatten()[worst]:.1e} allowed"
        print(f"  {name}: worst row: {figures}")
        if not bool((error <= allowed).all()):
            sys.exit(f"{name} is wrong")


def time_on_gpu(call: Callable[[], Any], rounds: int = 10, calls: int = 10) -> float:
    """Return the median time of a call in seconds; `python -m bench` measures with more care."""
    for _ in range(calls):
        call()
    times: list[float] = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / calls)
    return sorted(times)[rounds // 2]


def run(build: Build, draw: Callable[[str], Any]) -> None:
    """Run an example from its command line: check it, time it, draw it if asked to."""
    module = sys.modules["__main__"]
    parser = argparse.ArgumentParser(description=(module.__doc__ or "").strip().split("\n")[0])
    parser.add_argument("--plot", metavar="PATH", help="also draw who sees whom, e.g. to mask.png")
    arguments = parser.parse_args()
    small = build("cpu", *SMALL)
    truth = Truth(by_definition(small, torch.float64), by_definition(small, DTYPE))
    results = check_on_cpu(small, truth)
    has_gpu = torch.cuda.is_available()
    if not (has_gpu and run_on_gpu(build, truth, results)):
        why = "" if has_gpu else ": that needs a GPU of compute capability 8.x, 9.0 or 12.x"
        print(f"The CPU reference ran. No kernel was executed{why}.")
    if arguments.plot:
        draw(arguments.plot)
        print(f"wrote {arguments.plot}")


def check_on_cpu(example: Example, truth: Truth) -> list[torch.Tensor]:
    """Check the reference in every way against the definition, and the ways against the first."""
    print(f"flash_cute {flash_cute.__version__}, CPU: q {tuple(example.q.shape)}, bfloat16")
    results = [example.run(way) for way in example.ways]
    for way, out in zip(example.ways, results, strict=True):
        truth.check(f"reference, {way.name}", out)
        if out is not results[0]:
            print(f"  differs from {example.ways[0].name} by {distance(out, results[0]):.1e}")
    return results


def run_on_gpu(build: Build, truth: Truth, expected: list[torch.Tensor]) -> bool:
    """Check and time the kernel, in every way that there is one for; say why, where there is none.

    The check has the inputs that the reference had. Returns whether a kernel was executed.
    """
    print(f"GPU: {torch.cuda.get_device_name()}")
    small = build(GPU, *SMALL)
    has_run = False
    for number, way in enumerate(small.ways):
        operands = way.operands or (small.q, small.k, small.v)
        answer = is_supported(*operands, **way.options)
        if not answer:
            print(f"  {way.name}: refused: {answer.reason}")
            continue
        out = small.run(way)
        truth.check(f"kernel, {way.name}", out)
        print(f"  differs from the reference by {distance(out, expected[number]):.1e}")
        measure(build(GPU, *LARGE), number)
        has_run = True
    return has_run


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference between two results."""
    return (one.cpu().double() - other.cpu().double()).abs().max().item()


def measure(example: Example, number: int) -> None:
    """Time one way on the GPU; the operations are those of the visible scores."""
    q = example.q
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k = example.k.shape[1]
    visible = reference_mask(seqlen_q, seqlen_k, batch=batch, device=q.device, **example.mask)
    operations = 2 * heads * int(visible.sum()) * (head_dim + example.v.shape[-1])
    del visible
    seconds = time_on_gpu(lambda: example.run(example.ways[number]))
    rate = operations / seconds / 1e12
    sizes = f"q {tuple(q.shape)}, k {tuple(example.k.shape)}"
    print(f"  {sizes}: {seconds * 1e3:.3f} ms, {rate:.0f} TFLOP/s")


def compile_for_hopper(
    q: torch.Tensor, k: torch.Tensor, kernel: type[Any] | None = None, **options: Any
) -> None:
    """Cross-compile the kernel of a call with q and k like these, and print what came out."""
    from flash_cute import compile, selection

    problem = AttentionProblem(
        dtype=q.dtype,
        device=torch.device("cuda", 0),
        batch=q.shape[0],
        seqlen_q=q.shape[1],
        seqlen_k=k.shape[1],
        num_heads_q=q.shape[2],
        num_heads_kv=k.shape[2],
        head_dim=q.shape[3],
        head_dim_v=q.shape[3],
        **options,
    )
    target = Target.from_arch("sm_90a")
    print(f"compiling for {target.arch} (H100, H200)")
    started = time.perf_counter()
    key = selection.key_for(problem, target, kernel)
    report = compile.inspect_kernel(compile.kernel_for(key), target.arch)
    print(f"  {report.name}, compiled in {time.perf_counter() - started:.1f} s")
    stores, loads = report.spill_store_bytes, report.spill_load_bytes
    for what, value in (
        ("registers per thread", report.registers),
        ("shared memory, bytes", report.smem_bytes),
        ("bytes spilled", None if stores is None or loads is None else stores + loads),
        ("machine code, bytes", len(report.cubin)),
    ):
        print(f"  {what:<22} {'unknown' if value is None else value}")
    for tool in report.missing:
        print(f"  not found: {tool}")
    print("No kernel was executed: that needs a Hopper GPU.")
