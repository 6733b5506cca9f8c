"""Sigmoid attention: another kind of attention, by overriding three steps of the Hopper kernel.

Ramapuram et al., "Theory, Analysis, and Best Practices for Sigmoid Self-Attention", 2024: each
weight is sigmoid(score - log(keys)), and nothing is normalised. A score_mod
cannot say that, as a softmax follows it; a class derived from the kernel's can. Masks, callbacks,
packed sequences and all else that the class does not touch work as before.

With a GPU the kernel is checked against plain PyTorch, and timed beside softmax attention. Without
one it is compiled for inspection, but not executed.

    python examples/sigmoid_attention.py
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import cutlass.cute as cute
import torch
from _common import (
    DTYPE,
    GPU,
    LARGE,
    SMALL,
    Example,
    Truth,
    Way,
    by_definition,
    compile_for_hopper,
    measure,
    random_qkv,
    run_on_gpu,
)
from cutlass import Float32

from flash_cute import Feature
from flash_cute.device.primitives import exp2, log2
from flash_cute.sm90.fwd import FlashAttentionForwardSm90

OPTIONS: Mapping[str, Any] = {"causal": True}


class SigmoidAttention(FlashAttentionForwardSm90):
    """Weights are sigmoid(score - log(keys)); a hidden score is -inf, so its weight is 0."""

    lacks = frozenset({Feature.LSE, Feature.SINK})  # both belong to a softmax

    def first_weights(self, p, c, work, acc_S):
        self.squash(p, work, acc_S)
        self.round_weights(acc_S, c.rP)

    def next_weights(self, p, c, pipes, work, v_state, acc_S, is_masked):
        self.squash(p, work, acc_S)
        self.finish_product(pipes, v_state)  # which still reads the weights before
        self.round_weights(acc_S, c.rP)

    def close_rows(self, p, c, work, rows, factor, lse):
        factor.fill(1.0)

    def squash(self, p, work, acc_S):
        scale = -self.scale_log2(p)  # sigmoid(x - log(n)) = 1 / (1 + exp2(log2(n) - x log2(e)))
        bias = log2(cute.arch.fmax(Float32(work.seqlen.seqlen_k), 1.0))
        for i in range(cute.size(acc_S)):
            acc_S[i] = cute.arch.rcp_approx(1.0 + exp2(acc_S[i] * scale + bias))


def weights(scores: torch.Tensor) -> torch.Tensor:
    """The same by definition: scores are scaled, (batch, heads, seqlen, seqlen)."""
    return torch.sigmoid(scores - math.log(scores.shape[-1])).tril()


def build(device: str, batch: int, seqlen: int) -> Example:
    q, k, v = random_qkv(device, batch, seqlen, (16, 16), head_dim=128)
    way = Way("sigmoid attention", {**OPTIONS, "kernel": SigmoidAttention})
    return Example(q, k, v, (way,), weights, OPTIONS)


def main() -> None:
    small = build("cpu", *SMALL)
    if not torch.cuda.is_available():
        compile_for_hopper(small.q, small.k, SigmoidAttention, **OPTIONS)
        return
    truth = Truth(by_definition(small, torch.float64), by_definition(small, DTYPE))
    if run_on_gpu(build, truth, [truth.exact]):
        print("softmax attention, for comparison")
        measure(replace(build(GPU, *LARGE), ways=(Way("softmax", OPTIONS),)), 0)


if __name__ == "__main__":
    main()
