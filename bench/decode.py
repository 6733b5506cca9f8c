"""`python -m bench decode`: a step of decoding over a cache, against copying and the peers.

The times are of a cold cache: input sets rotate so that nothing is left in the L2, and CUDA graphs
of many calls keep the host's time out. Speed is the bytes of K and V over the time, beside that of
a copy in the same rounds. Dense and paged caches, and guesses: several queries of each sequence.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from . import fwd, machine, peers, report, steps, timing, variants
from .peers import Inputs, Peer
from .report import Result, say
from .shapes import DECODE_PAGES, GUESSES, LARGE_BYTES, Shape, Step
from .variants import Entry, Group
from .verdicts import Line, Outcome, aim_lines, all_met, fields_of, outcome

OURS: Peer = steps.OurStep()
PEERS: tuple[Peer, ...] = (steps.Fa4Step(), steps.SdpaStep())
COPY = "copy"
GRAPH_BYTES = 4 * 10**9  # read by the calls of one graph, so that its launch does not count
GRAPH_CALLS = 64  # at most, but for a whole turn of the input sets
PLAN = timing.Plan(rounds=7, budget_s=1.0, sample_s=0.006)

# What the lines claim, and from where or up to where.
BANDWIDTH, GUESSED, ONE_KEY = "bandwidth of a copy", "one query", "pages of 128"
AIMS = {BANDWIDTH: 0.90, GUESSED: 1.15, ONE_KEY: 1.5}
AIMS_OF_ARCH = {"sm80": {BANDWIDTH: 0.85}}  # issue 5
AIM_OF_PEERS = 1.0


@dataclass(frozen=True)
class Options:
    """The command line of `bench decode`."""

    steps: Sequence[Step]
    peers: Sequence[Peer]
    plan: timing.Plan
    out: Path
    seed: int = 0
    arch: str | None = None

    @property
    def aims(self) -> dict[str, float]:
        """What is claimed; only that is measured."""
        return AIMS_OF_ARCH.get(self.arch or "", AIMS)


def choose(names: str | None) -> list[Peer]:
    """The peers named in a comma-separated list, all without one, none for ``none``.

    Raises: ValueError for a name that is no peer.
    """
    known = {peer.name: peer for peer in PEERS}
    if names is None:
        return list(PEERS)
    wanted = [n.strip().lower() for n in names.split(",") if n.strip() and n.strip() != "none"]
    for name in wanted:
        if name not in known:
            raise ValueError(f"--peers names {name!r}, expected some of {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(wanted)]


# ---- What is compared ----------------------------------------------------------------------------


def layouts(step: Step) -> dict[str, Step]:
    """The step over a dense cache and over pages, one query."""
    paged = {f"pages of {size}": replace(step, page_size=size) for size in DECODE_PAGES}
    return {"dense": step, **paged}


def group_of(step: Step, chosen: Sequence[Peer], aims: dict[str, float] = AIMS) -> Group:
    """All contestants over caches of one size, and what is claimed of ours."""
    ours = layouts(step)
    entries = [Entry(name, OURS, one) for name, one in ours.items()]
    lines: list[Line] = []

    def claim(name: str, base: str, kind: str, aim: float, work: float = 1.0) -> None:
        text = f"{step.title}: {name} over {kind}"
        lines.append(Line(text, name, base, aim, kind in (GUESSED, ONE_KEY), work))

    if step.cache_bytes >= LARGE_BYTES:
        for name in ours:
            work = step.cache_bytes / (2 * steps.COPY_BYTES)
            claim(name, COPY, BANDWIDTH, aims[BANDWIDTH], work)
    for peer in chosen:
        theirs = {f"{peer.label} {n}": one for n, one in ours.items() if peer.refuses(one) is None}
        entries += [Entry(name, peer, one) for name, one in theirs.items()]
        for name in ours if theirs else ():
            base = f"{peer.label} {name}"
            base = base if base in theirs else f"{peer.label} dense"
            claim(name, base, peer.label, AIM_OF_PEERS)
    if ONE_KEY in aims:
        entries.append(Entry("pages of 1", OURS, replace(step, page_size=1)))
        claim("pages of 1", "pages of 128", ONE_KEY, aims[ONE_KEY])
    for count in GUESSES if GUESSED in aims else ():
        name = f"{count} queries"
        entries.append(Entry(name, OURS, replace(step, seqlen_q=count, is_causal=True)))
        claim(name, "dense", GUESSED, aims[GUESSED])
    return Group(step.title, tuple(entries), tuple(lines))


# ---- Measuring -----------------------------------------------------------------------------------


def run(options: Options) -> int:
    """Measure, print and write everything; 0 when every line that counts passed, and one did."""
    if not torch.cuda.is_available():
        say("bench decode needs a GPU, torch sees none")
        return 2
    begin = time.perf_counter()
    peers.prefer(options.arch)
    compile_ours(options.steps, options.aims)
    facts, probe = machine.facts(), machine.ClockProbe()
    known = {peer.name: fwd.about(peer) for peer in options.peers}
    kernels = peers.kernels_of(steps.OurStep().problem(step) for step in options.steps)
    about = [*report.facts_lines(facts), *(f"ours: {kernel}" for kernel in kernels)]
    for line in [*about, *variants.missing_lines(known), *how_lines()]:
        say(line)
    outcomes: list[Outcome] = []
    results: dict[str, dict[str, Result]] = {}
    copy = copy_contestant()
    for number, step in enumerate(options.steps):
        rng = random.Random(f"{options.seed}-{number}")
        group = group_of(step, options.peers, options.aims)
        found = measure(step, group, options.plan, rng, known, copy)
        results[group.name] = found
        outcomes += [outcome(line, found) for line in group.lines]
        for line in [*report.aligned(rows(step, group, found)), *reasons(found)]:
            say(line)
        say()
    content = {
        "facts": facts,
        "kernels": kernels,
        "peers": known,
        "lines": [{**asdict(one.line), **fields_of(one)} for one in outcomes],
        "contestants": {
            title: {name: asdict(result) for name, result in found.items()}
            for title, found in results.items()
        },
        "gpu_before": probe.first,
        "gpu_after": probe.read(),
    }
    path = options.out / ("decode.json" if options.arch is None else f"decode_{options.arch}.json")
    report.write(path, json.dumps(content, indent=1, allow_nan=False))
    for line in aim_lines(outcomes):
        say(line)
    say(f"{time.perf_counter() - begin:.0f} s; wrote {path}")
    return 0 if all_met(outcomes) else 1


def compile_ours(grid: Sequence[Step], aims: dict[str, float] = AIMS) -> None:
    """Compile our kernels before any peer is imported (see fwd.compile_ours): first all that a
    step needs at once, then by a call of each, which finds what else it needs.

    A failure is left to the group that needs the kernel, where it is reported.
    """
    from flash_cute import cache, warmup

    begin = time.perf_counter()
    entries = [entry for step in grid for entry in group_of(step, (), aims).entries]
    ready = [entry for entry in entries if OURS.refuses(entry.work) is None]
    try:
        jobs = 1 if cache.disk_cache() is None else min(8, os.cpu_count() or 1)
        problems = [steps.OurStep().problem(steps.as_step(entry.work)) for entry in ready]
        warmup(problems, progress=False, jobs=jobs)
    except Exception as error:
        say(f"{OURS.name}: {peers.one_line(error)}")
    for entry in ready:
        try:
            OURS.call(entry.work, fwd.make_inputs(entry.work, 1, 0))(0)
            torch.cuda.synchronize()
        except Exception as error:
            say(f"{entry.name}: {peers.one_line(error)}")
    say(f"{OURS.name}: {len(ready)} calls ready in {time.perf_counter() - begin:.1f} s")


def copy_contestant() -> timing.Contestant:
    """A copy within the device's memory, far larger than the L2."""
    source, target = (
        torch.empty(steps.COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2)
    )
    source.zero_()
    return timing.Contestant(COPY, lambda i: target.copy_(source), timing.cuda_events)


def measure(
    step: Step,
    group: Group,
    plan: timing.Plan,
    rng: random.Random,
    known: dict[str, dict[str, str | None]],
    copy: timing.Contestant,
) -> dict[str, Result]:
    """Time all contestants of a group, after the gate; a reason for those that cannot be."""
    results = variants.unavailable(group, known)
    count = timing.num_input_sets(step.cache_bytes, machine.l2_bytes())
    widest = replace(step, seqlen_q=max(GUESSES))
    inputs = fwd.make_inputs(widest, count, rng.randrange(2**31))
    contestants, verdicts = [copy], {COPY: "not gated"}
    for entry in group.entries:
        if entry.name in results:
            continue
        entered = enter(entry, inputs, rng)
        if isinstance(entered, Result):
            results[entry.name] = entered
        else:
            contestant, verdicts[entry.name] = entered
            contestants.append(contestant)
    shapes: dict[str, Shape] = {entry.name: entry.work for entry in group.entries}
    try:
        timings = timing.interleave(contestants, plan, rng)
    except Exception as error:  # after a CUDA error nothing of this group can be trusted
        failure = Result(failed=f"while timing: {peers.one_line(error)}")
        return {**results, **{contestant.name: failure for contestant in contestants}}
    for name, found in timings.items():
        results[name] = report.result_of(found, shapes.get(name, step), verdicts[name])
    return results


def enter(
    entry: Entry, inputs: Inputs, rng: random.Random
) -> tuple[timing.Contestant, str] | Result:
    """A contestant that passed the gate on every input set, ready to be replayed; else the reason.

    One that cannot be captured is timed call by call, and marked where the host sets its time.
    """
    entered = fwd.enter(entry.peer, entry.work, inputs, rng, steps.judge)
    if isinstance(entered, Result):
        return entered
    contestant, verdict = replace(entered[0], name=entry.name), entered[1]
    try:
        calls = graph_calls(steps.as_step(entry.work), len(inputs))
        return replace(contestant, stopwatch=timing.GraphClock(contestant, calls)), verdict
    except Exception as error:
        torch.cuda.synchronize()
        return contestant, f"{verdict}; timed without a graph: {peers.one_line(error)}"


def graph_calls(step: Step, sets: int) -> int:
    """Calls of one graph: whole turns of the input sets, and enough that a replay takes a while."""
    wanted = min(GRAPH_CALLS, math.ceil(GRAPH_BYTES / step.cache_bytes))
    return sets * math.ceil(wanted / sets)


# ---- The report ----------------------------------------------------------------------------------


def how_lines() -> list[str]:
    """How the figures come about."""
    return [
        "us: CUDA graphs of calls that rotate over caches, median of interleaved rounds; "
        "TB/s: bytes of K and V over it",
        "FA4: flash_attn_varlen_func with seqused_k and page_table, num_splits=1 (more are refused "
        "on SM90); SDPA: enable_gqa, its own choice of backend, keys gathered from pages first",
        "of copy: TB/s over those of a copy of 1 GiB (read and written); over FA4, SDPA: how many "
        "times as fast; x: time over that of one query, of pages of 1 over pages of 128",
    ]


def bandwidth(step: Step, name: str, results: dict[str, Result]) -> float | None:
    """TB/s of a contestant; None where it was not timed."""
    found = results.get(name, Result()).median_us
    size = 2 * steps.COPY_BYTES if name == COPY else step.cache_bytes
    return None if found is None else size / found / 1e6


def rows(step: Step, group: Group, results: dict[str, Result]) -> list[list[str]]:
    """A group as a table: each contestant with its ratios to the others."""
    labels = list(dict.fromkeys(e.peer.label for e in group.entries if e.peer is not OURS))
    size = f"{step.title}, {step.cache_bytes / 1e9:.2f} GB"
    table = [[size, "us", "TB/s", "of copy", *(f"over {n}" for n in labels), "x", "+-%"]]
    copied = bandwidth(step, COPY, results)
    for name in [*(entry.name for entry in group.entries), COPY]:
        found, speed = results.get(name, Result()), bandwidth(step, name, results)
        if found.median_us is None or speed is None:
            table.append([name, "FAILED" if found.failed else "-"])
            continue
        compared = {
            line.base: found.median_us / base
            for line in group.lines
            if line.ours == name and (base := results.get(line.base, Result()).median_us)
        }
        times = [v for base, v in compared.items() if base in ("dense", "pages of 128")]
        mark = "h" if found.is_host_bound else ""
        table.append(
            [
                name,
                f"{found.median_us:.1f}{mark}",
                f"{speed:.2f}",
                _ratio(None if copied is None else speed / copied),
                *(
                    _ratio(next((1 / v for b, v in compared.items() if b.startswith(n)), None))
                    for n in labels
                ),
                _ratio(times[0] if times else None),
                "-" if found.spread is None else f"{100 * found.spread:.1f}",
            ]
        )
    return table


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def reasons(results: dict[str, Result]) -> list[str]:
    """Why contestants have no figure, or one that was not taken from a graph."""
    found: dict[str, list[str]] = {}
    for name, result in results.items():
        _, _, outside = result.gate.partition("; timed ")
        if text := result.reason or (f"timed {outside}" if outside else ""):
            found.setdefault(text, []).append(name)
    return [f"  {', '.join(names)}: {text}" for text, names in found.items()]
