"""The one timing function: contestants interleaved in rounds, medians of many samples.

`interleave` decides how often and in which order; a contestant's *stopwatch* decides how one sample
is taken. Device work is timed by CUDA events (`cuda_events`), or, for a library on a stream of its
own such as JAX, by the host clock over a slope (`blocked_slope`); work that the host cannot enqueue
in time by CUDA graphs (`GraphClock`); host work by `host_enqueue`.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

HOST_BOUND = 0.9  # share of the device's time from which the host's enqueueing may have set it


class Sample(NamedTuple):
    """Time of one call within one sample, and the host's share where it was measured."""

    seconds: float
    host_seconds: float | None


@dataclass(frozen=True)
class Contestant:
    """Something to time.

    call:      enqueues one call on input set `i` (any int; sets repeat) and returns its result
    scope:     a context to hold while calls are made (a backend choice, say)
    stopwatch: takes one sample of `count` calls
    wait:      blocks until a result is ready; used by stopwatches that have no event
    """

    name: str
    call: Callable[[int], object]
    stopwatch: Callable[[Contestant, int], Sample]
    scope: Callable[[], AbstractContextManager[object]] = nullcontext
    wait: Callable[[object], object] = lambda result: None


@dataclass(frozen=True)
class Plan:
    """How long to measure: rounds are dropped, down to min_rounds, when the budget is used up."""

    rounds: int = 11
    min_rounds: int = 3
    budget_s: float = 3.0
    sample_s: float = 0.03
    warmup_calls: int = 3
    max_calls: int = 400


@dataclass(frozen=True)
class Timing:
    """All samples of one contestant."""

    samples: tuple[Sample, ...]
    calls: int
    seconds: tuple[float, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "seconds", tuple(s.seconds for s in self.samples))

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Distance between the quartiles over the median: what a difference must exceed."""
        if len(self.seconds) < 2:
            return math.nan
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / self.median_s

    @property
    def host_s(self) -> float | None:
        known = [s.host_seconds for s in self.samples if s.host_seconds is not None]
        return statistics.median(known) if known else None

    @property
    def is_host_bound(self) -> bool:
        """Whether enqueueing took about as long as the device, so that it may have set the time."""
        return self.host_s is not None and self.host_s >= HOST_BOUND * self.median_s


def interleave(
    contestants: Sequence[Contestant],
    plan: Plan,
    rng: random.Random,
    now: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time all contestants: warm up, then rounds in which each is sampled once, in random order."""
    counts = {c.name: _warm_up(c, plan) for c in contestants}
    samples: dict[str, list[Sample]] = {c.name: [] for c in contestants}
    deadline = now() + plan.budget_s
    for done in range(plan.rounds):
        if done >= plan.min_rounds and now() >= deadline:
            break
        for contestant in rng.sample(list(contestants), len(contestants)):
            samples[contestant.name].append(
                contestant.stopwatch(contestant, counts[contestant.name])
            )
    return {name: Timing(tuple(taken), counts[name]) for name, taken in samples.items()}


def _warm_up(contestant: Contestant, plan: Plan) -> int:
    """Run a contestant hot and choose its calls per sample."""
    contestant.stopwatch(contestant, plan.warmup_calls)
    per_call = contestant.stopwatch(contestant, 2).seconds
    return max(1, min(plan.max_calls, round(plan.sample_s / max(per_call, 1e-9))))


def num_input_sets(bytes_per_set: int, l2_bytes: int) -> int:
    """How many input sets to rotate among, so that a call finds none of its inputs in the L2."""
    return max(2, math.ceil(3 * l2_bytes / bytes_per_set))


def cuda_events(contestant: Contestant, count: int) -> Sample:
    """Device time between two events on torch's current stream, per call.

    One call ahead of the first event keeps the device busy while the host enqueues the others.
    """
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with contestant.scope():
        torch.cuda.synchronize()
        contestant.call(0)
        start.record()
        begin = time.perf_counter()
        for i in range(1, count + 1):
            contestant.call(i)
        host_s = time.perf_counter() - begin
        end.record()
        end.synchronize()
    return Sample(start.elapsed_time(end) * 1e-3 / count, host_s / count)


class GraphClock:
    """A stopwatch of device time alone: it replays a CUDA graph of one contestant's calls.

    Calls that the device makes faster than the host can enqueue them would show the host's time.
    The replay ahead of the first event is also the last one to leave anything in the L2.
    """

    def __init__(self, contestant: Contestant, calls: int) -> None:
        """Capture calls 0 to calls - 1; each has been made before, so that nothing compiles."""
        import torch

        self.calls = calls
        self.graph = torch.cuda.CUDAGraph()
        with contestant.scope(), torch.cuda.graph(self.graph):
            for i in range(calls):
                contestant.call(i)

    def __call__(self, contestant: Contestant, count: int) -> Sample:
        """Time at least `count` calls of the contestant that was captured."""
        import torch

        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        replays = math.ceil(count / self.calls)
        torch.cuda.synchronize()
        self.graph.replay()
        start.record()
        for _ in range(replays):
            self.graph.replay()
        end.record()
        end.synchronize()
        return Sample(start.elapsed_time(end) * 1e-3 / (replays * self.calls), None)


def blocked_slope(contestant: Contestant, count: int) -> Sample:
    """Device time by the host clock: (time of count + 1 calls - time of 1 call) / count.

    Each timed stretch ends when its last result is ready. The difference takes out what starting
    and waiting cost, so the figure is comparable with the events' one.
    """
    with contestant.scope():
        contestant.wait(contestant.call(0))
        short = _blocked(contestant, 1)
        long = _blocked(contestant, count + 1)
    slope = (long - short) / count
    return Sample(slope if slope > 0 else long / (count + 1), None)


def _blocked(contestant: Contestant, count: int) -> float:
    begin = time.perf_counter()
    result: object = None
    for i in range(count):
        result = contestant.call(i)
    contestant.wait(result)
    return time.perf_counter() - begin


def host_enqueue(contestant: Contestant, count: int) -> Sample:
    """Host time to enqueue one call, without waiting for the device within the sample."""
    import torch

    with contestant.scope():
        torch.cuda.synchronize()
        contestant.call(0)
        begin = time.perf_counter()
        for i in range(count):
            contestant.call(i)
        host_s = (time.perf_counter() - begin) / count
        torch.cuda.synchronize()
    return Sample(host_s, host_s)
