"""The calls of `bench decode`: a step over a key/value cache, and how each peer is asked.

Each contestant gets what a serving engine has: lengths and page tables on the device, the longest
length as an integer. Pages are views of the memory of the dense cache in a random order, so that a
sequence has other keys in pages than without.
"""

from __future__ import annotations

import importlib
import math
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from . import gate
from .peers import FlashAttention4, FlashCute, Inputs, Sdpa
from .shapes import Shape, Step

SAMPLED_SEQUENCES = 2  # by the gate: the first and a random one
COPY_BYTES = 2**30  # of the copy that shows the memory's bandwidth, read and as many written


def as_step(shape: Shape) -> Step:
    """The Step that a contestant was given. Raises: TypeError for another Shape."""
    if not isinstance(shape, Step):
        raise TypeError(f"shape is of type {type(shape).__name__}, expected Step")
    return shape


def page_table(step: Step, device: torch.device | str) -> torch.Tensor | None:
    """All pages of the cache in a random order, (batch, pages of a sequence) int32."""
    if step.page_size is None:
        return None
    pages = step.seqlen_k // step.page_size
    generator = torch.Generator(device).manual_seed(step.page_size)
    order = torch.randperm(step.batch * pages, generator=generator, device=device)
    return order.to(torch.int32).view(step.batch, pages)


def caches(step: Step, sets: Inputs) -> Inputs:
    """The input sets as the step has them: its queries, and its cache in pages if it is paged."""

    def laid_out(cache: torch.Tensor) -> torch.Tensor:
        return cache if step.page_size is None else cache.view(-1, step.page_size, *cache.shape[2:])

    return [(q[:, : step.seqlen_q].contiguous(), laid_out(k), laid_out(v)) for q, k, v in sets]


def judge(
    out: torch.Tensor, inputs: tuple[torch.Tensor, ...], shape: Shape, rng: random.Random
) -> gate.Verdict:
    """Judge the output of a step: the worst of some sequences, with their keys gathered.

    `inputs` are (q, k, v) with a dense cache and at least as many queries as the step has.
    """
    step = as_step(shape)
    if not bool(torch.isfinite(out).all()):
        return gate.Verdict(False, math.inf, 0.0, "a value that is not finite")
    ((q, k, v),) = caches(step, [(inputs[0], inputs[1], inputs[2])])
    table = page_table(step, out.device)
    one = replace(step, batch=1, page_size=None)
    verdicts: list[gate.Verdict] = []
    for number in sampled_sequences(step.batch, rng):
        rows = slice(number, number + 1)
        if table is None:
            keys, values = k[rows], v[rows]
        else:
            pages = table[number].long()
            keys, values = k[pages].flatten(0, 1)[None], v[pages].flatten(0, 1)[None]
        found = gate.check(out[rows], (q[rows], keys, values), one, rng)
        verdicts.append(replace(found, where=f"sequence {number}, {found.where}"))
    return max(verdicts, key=lambda v: v.error / v.limit if v.limit else math.inf)


def sampled_sequences(batch: int, rng: random.Random) -> list[int]:
    """Numbers of the sequences that the gate looks at."""
    return sorted({0, *(rng.randrange(batch) for _ in range(SAMPLED_SEQUENCES - 1))})


# ---- Contestants ---------------------------------------------------------------------------------


class OurStep(FlashCute):
    """flash_cute, through flash_attn_with_kvcache; the package chooses the splits."""

    device = "cuda"

    def problem(self, step: Step) -> Any:
        """The AttentionProblem of a step: what has to be compiled for it."""
        from flash_cute import AttentionProblem

        return AttentionProblem(
            dtype=getattr(torch, step.dtype),
            device=torch.device(self.device),
            batch=step.batch,
            seqlen_q=step.seqlen_q,
            seqlen_k=step.seqlen_k,
            num_heads_q=step.num_heads_q,
            num_heads_kv=step.num_heads_kv,
            head_dim=step.head_dim,
            head_dim_v=step.head_dim_v,
            causal=step.is_causal,
            has_seqused_k=True,
            page_size=step.page_size,
            num_splits=0,
        )

    def refuses(self, shape: Shape) -> str | None:
        from flash_cute import is_supported

        answer = is_supported(self.problem(as_step(shape)))
        return None if answer else answer.reason

    def call(self, shape: Shape, sets: Inputs) -> Callable[[int], Any]:
        from flash_cute import flash_attn_with_kvcache

        step, device = as_step(shape), sets[0][0].device
        arguments = {
            "cache_seqlens": lengths(step, device),
            "page_table": page_table(step, device),
            "max_seqlen_k": step.seqlen_k,
            "causal": step.is_causal,
        }
        ready = caches(step, sets)
        return lambda i: flash_attn_with_kvcache(*ready[i % len(ready)], **arguments)


class Fa4Step(FlashAttention4):
    """FA4, with num_splits=1: on SM90 it refuses to split keys, by itself too."""

    def call(self, shape: Shape, sets: Inputs) -> Callable[[int], Any]:
        attend = importlib.import_module("flash_attn.cute.interface").flash_attn_varlen_func
        step, device = as_step(shape), sets[0][0].device
        arguments = {
            "seqused_k": lengths(step, device),
            "page_table": page_table(step, device),
            "max_seqlen_k": step.seqlen_k,
            "causal": step.is_causal,
            "num_splits": 1,
        }
        ready = caches(step, sets)
        return lambda i: attend(*ready[i % len(ready)], **arguments)


class SdpaStep(Sdpa):
    """torch SDPA as it dispatches by itself, with enable_gqa, on transposed views.

    It has no pages: keys and values are gathered from them first, as its users have to.
    """

    name, label = "sdpa", "SDPA"

    def missing(self) -> str | None:
        return None if torch.cuda.is_available() else "torch sees no GPU"

    def refuses(self, shape: Shape) -> str | None:
        return super().refuses(replace(as_step(shape), page_size=None))

    def call(self, shape: Shape, sets: Inputs) -> Callable[[int], Any]:
        step = as_step(shape)
        ready, table = caches(step, sets), page_table(step, sets[0][0].device)
        if table is None:
            return super().call(shape, ready)
        one = super().call

        def attend(i: int) -> Any:
            q, *pages = ready[i % len(ready)]
            k, v = (cache[table].flatten(1, 2) for cache in pages)
            return one(shape, [(q, k, v)])(0)

        return attend

    def scope(self) -> AbstractContextManager[object]:
        return nullcontext()


def lengths(step: Step, device: torch.device) -> torch.Tensor:
    """The keys of each sequence, all of them the whole cache."""
    return torch.full((step.batch,), step.seqlen_k, dtype=torch.int32, device=device)
