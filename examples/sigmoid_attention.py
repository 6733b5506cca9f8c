"""Sigmoid attention: another kind of attention, by overriding three steps of the Hopper kernel.

Ramapuram et al., "Theory, Analysis, and Best Practices for Sigmoid Self-Attention", 2024: each
weight is sigmoid(score + bias), with bias about -log(keys), and nothing is normalised. A score_mod
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

from flash_cute import Feature
from flash_cute.device.primitives import exp2
from flash_cute.device.softmax import LOG2_E
from flash_cute.sm90.fwd import FlashAttentionForwardSm90

OPTIONS: Mapping[str, Any] = {"causal": True}


class SigmoidAttention(FlashAttentionForwardSm90):
    """Weights are sigmoid(score + bias); a hidden score is -inf, so its weight is 0."""

    bias = -math.log(4096)
    lacks = frozenset({Feature.LSE, Feature.SINK})  # both belong to a softmax

    def first_weights(self, p, c, acc_S):
        self.squash(p, acc_S)
        self.round_weights(acc_S, c.rP)

    def next_weights(self, p, c, pipes, v_state, acc_S, is_masked):
        self.squash(p, acc_S)
        self.finish_product(pipes, v_state)  # which still reads the weights before
        self.round_weights(acc_S, c.rP)

    def close_rows(self, p, c, rows, factor, lse):
        factor.fill(1.0)

    def squash(self, p, acc_S):
        scale = -self.scale_log2(p)  # sigmoid(x) = 1 / (1 + exp2(-x log2(e)))
        for i in range(cute.size(acc_S)):
            power = exp2(acc_S[i] * scale - self.bias * LOG2_E)
            acc_S[i] = cute.arch.rcp_approx(1.0 + power)


def weights(scores: torch.Tensor) -> torch.Tensor:
    """The same by definition: scores are scaled, (batch, heads, seqlen, seqlen)."""
    return torch.sigmoid(scores + SigmoidAttention.bias).tril()


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
