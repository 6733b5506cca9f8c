"""Covering designs: few cases in which every value of a factor meets every value of every other.

They are drawn greedily from a fixed seed, so that the same cases run everywhere.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

Case = dict[str, Any]
Pair = tuple[tuple[str, str], tuple[str, str]]  # two (factor, text of its value)


def pairs_of(case: Mapping[str, Any]) -> set[Pair]:
    """The pairs of values that a case holds."""
    named = [(name, str(value)) for name, value in case.items()]
    return set(itertools.combinations(named, 2))


def all_pairs(
    factors: Mapping[str, Sequence[Any]], forbids: Callable[[Case], bool] | None = None
) -> set[Pair]:
    """The pairs of values that a design has to hold.

    Args:
        forbids: says whether some values, of two factors or of all, cannot be together.
    """
    found: set[Pair] = set()
    for (a, values_a), (b, values_b) in itertools.combinations(factors.items(), 2):
        for x, y in itertools.product(values_a, values_b):
            if forbids is None or not forbids({a: x, b: y}):
                found.add(((a, str(x)), (b, str(y))))
    return found


def covering_design(
    factors: Mapping[str, Sequence[Any]],
    forbids: Callable[[Case], bool] | None = None,
    seed: int = 0,
    tries: int = 60,
) -> list[Case]:
    """Cases that hold every pair of values of two factors, each chosen best of `tries`."""
    rng = random.Random(seed)
    missing = all_pairs(factors, forbids)
    cases: list[Case] = []
    while missing:
        drawn: list[Case] = []
        while len(drawn) < tries:
            case = {name: rng.choice(values) for name, values in factors.items()}
            for name, text in min(missing):
                case[name] = next(value for value in factors[name] if str(value) == text)
            if forbids is None or not forbids(case):
                drawn.append(case)
        best = max(drawn, key=lambda case: len(pairs_of(case) & missing))
        missing -= pairs_of(best)
        cases.append(best)
    return cases


def values_of(case: Mapping[str, Any]) -> set[tuple[str, str]]:
    """The values that a case holds, also within mappings and dataclasses: (factor, text)."""
    found: set[tuple[str, str]] = set()
    for name, value in case.items():
        fields = vars(value) if is_dataclass(value) else value
        if isinstance(fields, Mapping):
            found |= {(f"{name}.{field}", str(inner)) for field, inner in fields.items()}
        else:
            found.add((name, str(value)))
    return found


def each_value_once(cases: Iterable[Mapping[str, Any]]) -> list[int]:
    """Numbers of few cases that hold every value which any of them holds, in their order."""
    held = [values_of(case) for case in cases]
    numbers = range(len(held))
    missing = set[tuple[str, str]]().union(*held)
    chosen: set[int] = set() if missing else {0}
    while missing:
        best = max(numbers, key=lambda i: len(held[i] & missing))
        missing -= held[best]
        chosen.add(best)
    return sorted(chosen)
