"""`python -m bench variants`: what masks, callbacks and packed sequences cost, line by line.

Each line compares one of our calls with another call in the same rounds: with our own plain one, or
with a peer's. It has an aim and passes or fails. What is refused is said with its reason and does
not count; nor does a line whose peer is missing.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from . import builders, fwd, machine, peers, report, timing, works
from .peers import Peer
from .report import Result, say
from .shapes import DENSITIES, VARIANT_SEQLEN, VARLEN_LENGTHS, Shape
from .verdicts import Line, Outcome, all_met, fields_of, outcome, sentence, summary

# Long samples: each contestant then runs at the clock that its own power allows, whatever came
# before it. Over 30 ms the same call varies by up to 9 %, over these by 1 to 4 %.
PLAN = timing.Plan(rounds=7, budget_s=15.0, sample_s=0.2)

OURS, FA4, FLEX = works.OurVariant(), works.Fa4Variant(), works.FlexVariant()


@dataclass(frozen=True)
class Entry:
    """A contestant: who makes which call."""

    name: str
    peer: Peer
    work: Shape


@dataclass(frozen=True)
class Group:
    """Contestants that are timed in the same rounds, on the same inputs, and their lines.

    own: measures contestants that make no attention, in place of `entries`
    """

    name: str
    entries: tuple[Entry, ...]
    lines: tuple[Line, ...]
    own: Callable[[timing.Plan, random.Random], dict[str, Result]] | None = None


@dataclass(frozen=True)
class Options:
    """The command line of `bench variants`."""

    plan: timing.Plan
    out: Path
    seed: int = 0
    only: tuple[str, ...] = ()


# ---- What is compared ----------------------------------------------------------------------------


def callbacks_group(device: str, seqlen: int) -> Group:
    """score_mod and mask_mod at head dim 128, against plain causal and FlexAttention."""
    plain = works.work(128, seqlen, is_causal=True, share=0.5)
    alibi = replace(plain, score_mod=works.alibi(plain.num_heads_q, device))
    masked = replace(
        plain,
        is_causal=False,
        mask_mod=works.causal,
        block_mask=works.block_mask(works.causal, seqlen, device),
    )
    return Group(
        "callbacks",
        (
            Entry("causal", OURS, plain),
            Entry("causal + ALiBi", OURS, alibi),
            Entry("causal as a mask_mod", OURS, masked),
            Entry("FlexAttention causal + ALiBi", FLEX, alibi),
        ),
        (
            Line("causal + ALiBi over plain causal", "causal + ALiBi", "causal", 0.90),
            Line(
                "causal + ALiBi over FlexAttention",
                "causal + ALiBi",
                "FlexAttention causal + ALiBi",
                1.5,
            ),
            Line(
                "causal as mask_mod + block mask over built-in",
                "causal as a mask_mod",
                "causal",
                0.95,
            ),
        ),
    )


def density_group(device: str, seqlen: int) -> Group:
    """Random block masks at head dim 128, against dense."""
    dense = works.work(128, seqlen)
    entries, lines = [Entry("dense", OURS, dense)], []
    for density in DENSITIES:
        mask_mod, actual = works.random_blocks(seqlen, density, device)
        mask = works.block_mask(mask_mod, seqlen, device)
        name = f"density {density:g}"
        entry = replace(dense, share=actual, mask_mod=mask_mod, block_mask=mask)
        entries.append(Entry(name, OURS, entry))
        claim = f"block mask of {name} ({actual:.3f}), time over dense"
        lines.append(Line(claim, name, "dense", density_aim(actual), is_share=True))
    return Group("density", tuple(entries), tuple(lines))


def density_aim(density: float) -> float:
    """The part of the dense time that a block mask may take."""
    return 1.1 * density + 0.05


def window_group(device: str, seqlen: int) -> Group:
    """A window of 128 at head dim 64, against FA4."""
    window = 128
    share = (window + 1) / seqlen - window * (window + 1) / 2 / seqlen**2
    asked = works.work(64, seqlen, window=window, share=share)
    return Group(
        "window",
        (Entry("window 128", OURS, asked), Entry("FA4 window 128", FA4, asked)),
        (Line("window 128 over FA4", "window 128", "FA4 window 128", 1.3),),
    )


def varlen_group(device: str, lengths: Sequence[int]) -> Group:
    """Packed sequences of mixed lengths at head dim 128, full and causal, against FA4."""
    entries: list[Entry] = []
    lines: list[Line] = []
    share = sum(length**2 for length in lengths) / sum(lengths) ** 2
    for mask, is_causal in (("full", False), ("causal", True)):
        asked = works.work(
            128,
            0,
            is_causal=is_causal,
            lengths=tuple(lengths),
            share=share / 2 if is_causal else share,
        )
        name = f"varlen {mask}"
        entries += [Entry(name, OURS, asked), Entry(f"FA4 {name}", FA4, asked)]
        lines.append(Line(f"{name} over FA4", name, f"FA4 {name}", 1.0))
    return Group("varlen", tuple(entries), tuple(lines))


def builder_group(device: str, seqlen: int) -> Group:
    """Our builder of block masks, for documents, against PyTorch's compiled one."""
    right, contestants = builders.calls(seqlen, device)
    lines = tuple(
        Line(f"{builders.OURS} over {base}", builders.OURS, base, 1.0)
        for base in (builders.FLAG, builders.COMPILED)
    )
    return Group(
        "builder", (), lines, lambda plan, rng: builders.results(right, contestants, plan, rng)
    )


GROUPS = {
    "callbacks": lambda device: callbacks_group(device, VARIANT_SEQLEN),
    "density": lambda device: density_group(device, VARIANT_SEQLEN),
    "window": lambda device: window_group(device, VARIANT_SEQLEN),
    "varlen": lambda device: varlen_group(device, VARLEN_LENGTHS),
    "builder": lambda device: builder_group(device, VARIANT_SEQLEN),
}


def choose(only: str | None) -> tuple[str, ...]:
    """The groups named in a comma-separated list, all without one. Raises: ValueError."""
    if not only:
        return tuple(GROUPS)
    names = [name.strip() for name in only.split(",") if name.strip()]
    for name in names:
        if name not in GROUPS:
            raise ValueError(f"--only names {name!r}, expected some of {', '.join(GROUPS)}")
    return tuple(dict.fromkeys(names))


# ---- Measuring -----------------------------------------------------------------------------------


def run(options: Options) -> int:
    """Measure, print and write everything; 0 when every line that counts passed, and one did."""
    if not torch.cuda.is_available():
        say("bench variants needs a GPU, torch sees none")
        return 2
    begin = time.perf_counter()
    groups = [GROUPS[name]("cuda") for name in options.only or GROUPS]
    compile_ours(groups)
    facts, probe = machine.facts(), machine.ClockProbe()
    known = {peer.name: fwd.about(peer) for peer in (FA4, FLEX)}
    for line in [*report.facts_lines(facts), *missing_lines(known)]:
        say(line)
    outcomes: list[Outcome] = []
    results: dict[str, Result] = {}
    for number, group in enumerate(groups):
        rng = random.Random(f"{options.seed}-{number}")
        found = measure(group, options.plan, rng, known)
        results.update(found)
        outcomes += [outcome(line, found) for line in group.lines]
        for line in report.aligned(contestant_rows(group, found)):
            say(line)
        for one in outcomes[-len(group.lines) :]:
            say(sentence(one))
        say()
    content = {
        "facts": facts,
        "peers": known,
        "lines": [{**asdict(one.line), **fields_of(one)} for one in outcomes],
        "contestants": {name: asdict(result) for name, result in results.items()},
        "gpu_before": probe.first,
        "gpu_after": probe.read(),
    }
    report.write(options.out / "variants.json", json.dumps(content, indent=1, allow_nan=False))
    say(summary(outcomes))
    say(f"{time.perf_counter() - begin:.0f} s; wrote {options.out}/variants.json")
    return 0 if all_met(outcomes) else 1


def compile_ours(groups: Sequence[Group]) -> None:
    """Compile our kernels before any peer is imported (see fwd.compile_ours).

    A failure is left to the group that needs the kernel, where it is reported.
    """
    for entry in (entry for group in groups for entry in group.entries if entry.peer is OURS):
        try:
            if OURS.refuses(entry.work) is None:
                OURS.call(entry.work, fwd.make_inputs(entry.work, 1, 0))(0)
                torch.cuda.synchronize()
        except Exception as error:
            say(f"{entry.name}: {peers.one_line(error)}")


def measure(
    group: Group, plan: timing.Plan, rng: random.Random, known: dict[str, dict[str, str | None]]
) -> dict[str, Result]:
    """Time what the lines of a group need, after the gate; a reason for everything else.

    Ours is timed without the other side too; the other side is not without ours.
    """
    if group.own is not None:
        return group.own(plan, rng)
    results = unavailable(group, known)
    needed = {
        name
        for line in group.lines
        for name in (line.ours, line.base)
        if line.ours not in results and name not in results
    }
    entries = [entry for entry in group.entries if entry.name in needed]
    if not entries:
        return results
    first = entries[0].work
    sets = timing.num_input_sets(first.input_bytes, machine.l2_bytes())
    inputs = fwd.make_inputs(first, sets, rng.randrange(2**31))
    contestants: list[timing.Contestant] = []
    verdicts: dict[str, str] = {}
    for entry in entries:
        entered = fwd.enter(entry.peer, entry.work, inputs, rng, works.judge)
        if isinstance(entered, Result):
            results[entry.name] = entered
        else:
            contestant, verdicts[entry.name] = entered
            contestants.append(replace(contestant, name=entry.name))
    by_name = {entry.name: entry.work for entry in entries}
    try:
        timings = timing.interleave(contestants, plan, rng) if contestants else {}
    except Exception as error:  # after a CUDA error nothing of this group can be trusted
        failure = Result(failed=f"while timing: {peers.one_line(error)}")
        return {**results, **{contestant.name: failure for contestant in contestants}}
    for name, found in timings.items():
        results[name] = report.result_of(found, by_name[name], verdicts[name])
    return results


def unavailable(group: Group, known: dict[str, dict[str, str | None]]) -> dict[str, Result]:
    """Who cannot take part, and why: our calls that are refused, peers that are missing."""
    found: dict[str, Result] = {}
    for entry in group.entries:
        missing = known.get(entry.peer.name, {}).get("missing")
        reason = f"missing: {missing}" if missing else entry.peer.refuses(entry.work)
        if reason is not None:
            found[entry.name] = Result(refused=reason)
    return found


# ---- The report ----------------------------------------------------------------------------------


def contestant_rows(group: Group, results: dict[str, Result]) -> list[list[str]]:
    """A group as a table: time and speed of each contestant."""
    rows = [[group.name, "ms", "TFLOP/s", "+-%"]]
    for name in [entry.name for entry in group.entries] or list(results):
        found = results.get(name, Result())
        if found.median_us is None:
            rows.append([name, "FAILED" if found.failed else "-", "-", "-"])
            continue
        spread = "-" if found.spread is None else f"{100 * found.spread:.1f}"
        mark = "h" if found.is_host_bound else ""
        speed = "-" if found.tflops is None else f"{found.tflops:.0f}"
        rows.append([name, f"{found.median_us / 1e3:.3f}{mark}", speed, spread])
    return rows


def missing_lines(known: dict[str, dict[str, str | None]]) -> list[str]:
    """Who is missing, and why."""
    return [f"{p['label']}: missing: {p['missing']}" for p in known.values() if p["missing"]]
