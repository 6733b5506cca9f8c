"""`python -m bench host`: host time of a warm call, ours, torch SDPA and FA4."""

from __future__ import annotations

import cProfile
import importlib
import json
import pstats
import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from . import machine, peers, report, shapes, timing
from .fwd import make_inputs
from .report import say
from .timing import Contestant, Plan, host_enqueue

AIM_US = 12.0  # a warm flash_attn_func, seqlen 128, one head: issue 2, item 6
KVCACHE_US = 20.0  # a warm flash_attn_with_kvcache, one query, lengths and pages: issue 4
OUT, SCORE_MOD = f"{report.OURS} out=", f"{report.OURS} score_mod"
BLOCK_MASK = f"{report.OURS} block_mask"
KVCACHE = f"{report.OURS} kvcache"
FLEX_SCORE_MOD, FLEX_BLOCK_MASK = "flex_attention score_mod", "flex_attention block_mask"
# Of our other calls: what they may take beyond which of ours, in us.
AIMS_BEYOND_US = {
    OUT: (3.0, report.OURS),
    SCORE_MOD: (25.0, report.OURS),
    BLOCK_MASK: (40.0, report.OURS),
    FLEX_SCORE_MOD: (15.0, SCORE_MOD),
    FLEX_BLOCK_MASK: (15.0, BLOCK_MASK),
}
KVCACHE_PAGE = 16
PROFILED_CALLS = 2000
PROFILE_LINES = 14
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def run(rounds: int, out: Path) -> int:
    """Measure, print and write host.json; 0 when our calls were timed and are within the aims."""
    if not torch.cuda.is_available():
        say("bench host needs a GPU, torch sees none")
        return 2
    shape = shapes.host_shape()
    (inputs,) = make_inputs(shape, 1, 0)
    contestants, refused = line_up(inputs)
    plan = Plan(rounds=rounds, min_rounds=min(rounds, 7), budget_s=20.0, sample_s=0.003)
    timings = timing.interleave(contestants, plan, random.Random(0))
    facts = machine.facts()
    profile = profile_ours(inputs) if report.OURS in timings else []
    lines = table(timings)
    for line in [
        *report.facts_lines(facts),
        f"host time of a warm call, {shape.id}: enqueue without waiting, median of "
        f"{rounds} rounds, contestants in random order",
        *report.aligned(lines),
        *(f"{name}: {reason}" for name, reason in refused.items()),
        *profile,
    ]:
        say(line)
    content = {
        "facts": facts,
        "shape": shape.id,
        "host_us": {n: [s * 1e6 for s in t.seconds] for n, t in timings.items()},
        "median_us": {n: t.median_s * 1e6 for n, t in timings.items()},
        "refused": refused,
        "profile": profile,
    }
    report.write(out / "host.json", json.dumps(content, indent=1))
    say(f"wrote {out}/host.json")
    return verdict(timings)


def verdict(timings: dict[str, timing.Timing]) -> int:
    """Say how our calls stand against their aims; 0 when all are met."""
    aims = {report.OURS: (AIM_US, None), KVCACHE: (KVCACHE_US, None), **AIMS_BEYOND_US}
    are_met: list[bool] = []
    for name, (aim_us, base) in aims.items():
        missing = [n for n in (name, base) if n is not None and n not in timings]
        are_met.append(not missing)
        if missing:
            say(f"{missing[0]} was not timed")
            continue
        found_us = timings[name].median_s * 1e6
        if base is not None:
            found_us -= timings[base].median_s * 1e6
        are_met[-1] = found_us <= aim_us
        word = "within" if are_met[-1] else "ABOVE"
        beyond = "" if base is None else f" beyond {base}"
        say(f"{name}: {found_us:.2f} us{beyond}, {word} the aim of {aim_us:.0f} us")
    return 0 if all(are_met) else 1


def line_up(inputs: Inputs) -> tuple[list[Contestant], dict[str, str]]:
    """The contestants that work on `inputs`, and why the others do not.

    Ours come first, so that they compile before FA4 is imported (see fwd.compile_ours).
    """
    builders: dict[str, Callable[[Inputs], Callable[[int], Any]]] = {
        report.OURS: lambda t: ours(t, False),
        f"{report.OURS} return_lse": lambda t: ours(t, True),
        OUT: lambda t: with_options(t, out=t[0].new_empty(t[0].shape)),
        SCORE_MOD: lambda t: with_options(t, score_mod=score_mod(t)),
        BLOCK_MASK: lambda t: with_options(t, block_mask=block_mask(t)),
        KVCACHE: kvcache,
        FLEX_SCORE_MOD: lambda t: flex(t, score_mod=score_mod(t)),
        FLEX_BLOCK_MASK: lambda t: flex(t, block_mask=block_mask(t)),
        "torch SDPA": sdpa,
        "FA4": fa4,
        "torch.empty_like (floor)": lambda t: lambda i: torch.empty_like(t[0]),
    }
    contestants: list[Contestant] = []
    refused: dict[str, str] = {}
    for name, build in builders.items():
        try:
            call = build(inputs)
            call(0)
            torch.cuda.synchronize()
        except Exception as error:
            refused[name] = f"missing or failed: {peers.one_line(error)}"
        else:
            contestants.append(Contestant(name, call, host_enqueue, scope=nullcontext))
    return contestants, refused


def ours(inputs: Inputs, return_lse: bool) -> Callable[[int], Any]:
    from flash_cute import flash_attn_func

    q, k, v = inputs
    if return_lse:
        return lambda i: flash_attn_func(q, k, v, return_lse=True)
    return lambda i: flash_attn_func(q, k, v)


def with_options(inputs: Inputs, **options: Any) -> Callable[[int], Any]:
    from flash_cute import flash_attn_func

    q, k, v = inputs
    return lambda i: flash_attn_func(q, k, v, **options)


def kvcache(inputs: Inputs) -> Callable[[int], Any]:
    from flash_cute import flash_attn_with_kvcache

    arguments = cache_step(inputs)
    return lambda i: flash_attn_with_kvcache(**arguments, causal=True)


def cache_step(inputs: Inputs) -> dict[str, Any]:
    """A step of decoding: one query, the keys in pages, their number on the device."""
    q, k, v = inputs
    seqlen, device = k.shape[1], q.device
    k_cache, v_cache = (cache.view(-1, KVCACHE_PAGE, *cache.shape[2:]) for cache in (k, v))
    pages = torch.arange(seqlen // KVCACHE_PAGE, dtype=torch.int32, device=device)
    return {
        "q": q[:, :1],
        "k_cache": k_cache,
        "v_cache": v_cache,
        "cache_seqlens": torch.full((1,), seqlen, dtype=torch.int32, device=device),
        "page_table": pages[None],
    }


def flex(inputs: Inputs, **options: Any) -> Callable[[int], Any]:
    from flash_cute import flex_attention

    q, k, v = (t.transpose(1, 2) for t in inputs)
    return lambda i: flex_attention(q, k, v, **options)


def score_mod(inputs: Inputs) -> Callable[..., Any]:
    """A score_mod with three captured tensors."""
    _, seqlen, heads, _ = inputs[0].shape
    device = inputs[0].device
    slopes, scale = torch.ones(heads, device=device), torch.ones(seqlen, device=device)
    table = torch.zeros(heads, 2 * seqlen, device=device)
    return lambda score, b, h, q_idx, kv_idx: (
        score * scale[q_idx] + table[h, q_idx - kv_idx + seqlen] - slopes[h] * abs(q_idx - kv_idx)
    )


def block_mask(inputs: Inputs) -> Any:
    """A causal mask within documents, put together by and_masks, with its blocks."""
    from torch.nn.attention.flex_attention import and_masks, create_block_mask

    _, seqlen, _, _ = inputs[0].shape
    documents = torch.zeros(seqlen, dtype=torch.int32, device=inputs[0].device)
    same = lambda b, h, q_idx, kv_idx: documents[q_idx] == documents[kv_idx]
    mask_mod = and_masks(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, same)
    return create_block_mask(mask_mod, None, None, seqlen, seqlen, inputs[0].device)


def sdpa(inputs: Inputs) -> Callable[[int], Any]:
    """SDPA as torch dispatches it by default, on transposed views."""
    q, k, v = (t.transpose(1, 2) for t in inputs)
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda i: attend(q, k, v)


def fa4(inputs: Inputs) -> Callable[[int], Any]:
    attend = importlib.import_module("flash_attn.cute.interface").flash_attn_func
    q, k, v = inputs
    return lambda i: attend(q, k, v)


def table(timings: dict[str, timing.Timing]) -> list[list[str]]:
    """Rows: name, median, fastest and spread, and the ratio to our call."""
    base = timings.get(report.OURS)
    rows = [["call", "median us", "least us", "+-%", "x ours"]]
    for name, found in timings.items():
        rows.append(
            [
                name,
                f"{found.median_s * 1e6:.2f}",
                f"{min(found.seconds) * 1e6:.2f}",
                f"{100 * found.spread:.1f}",
                "-" if base is None else f"{found.median_s / base.median_s:.2f}",
            ]
        )
    return rows


def profile_ours(inputs: Inputs) -> list[str]:
    """Where our call spends its time, by Python's profiler.

    Units: us per call. The profiler slows every Python call, so read the shares, not the sum.
    """
    call = ours(inputs, False)
    torch.cuda.synchronize()
    profiler = cProfile.Profile()
    profiler.enable()
    for i in range(PROFILED_CALLS):
        call(i)
    profiler.disable()
    torch.cuda.synchronize()
    return profile_lines(pstats.Stats(profiler), PROFILED_CALLS)


def profile_lines(stats: pstats.Stats, calls: int) -> list[str]:
    """The functions with the most time of their own, as aligned lines."""
    rows = [["inside our call (profiled: inflated)", "own us", "with callees", "times"]]
    entries: dict[Any, Any] = getattr(stats, "stats")  # noqa: B009 (absent from typeshed's class)
    ranked = sorted(entries.items(), key=lambda item: -item[1][2])[:PROFILE_LINES]
    for (file, line, function), (_, times, own_s, total_s, _) in ranked:
        place = function if line == 0 else f"{Path(file).name}:{line} {function}"
        rows.append(
            [
                place[:60],
                f"{own_s / calls * 1e6:.2f}",
                f"{total_s / calls * 1e6:.2f}",
                f"{times / calls:g}",
            ]
        )
    return report.aligned(rows)
