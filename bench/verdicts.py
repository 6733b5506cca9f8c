"""What the benchmarks claim: lines with an aim, and what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .report import Result

PASS, FAIL, REFUSED, UNMEASURED = "pass", "FAIL", "refused", "not measured"


@dataclass(frozen=True)
class Line:
    """A claim: our speed over that of `base` is at least the aim.

    is_share: the claim is instead that our time over that of `base` is at most the aim
    work:     how much one of our calls does for each that one of `base` does
    """

    name: str
    ours: str
    base: str
    aim: float
    is_share: bool = False
    work: float = 1.0


@dataclass(frozen=True)
class Outcome:
    """What became of a line."""

    line: Line
    word: str
    value: float | None = None
    reason: str = ""

    @property
    def is_counted(self) -> bool:
        return self.word in (PASS, FAIL)


def outcome(line: Line, results: dict[str, Result]) -> Outcome:
    """Judge a line by what was measured.

    Ours wrong or broken is a failure; ours refused, or the other side without a figure, is none.
    """
    ours, base = results.get(line.ours, Result()), results.get(line.base, Result())
    if ours.refused:
        return Outcome(line, REFUSED, reason=ours.refused)
    if ours.failed:
        return Outcome(line, FAIL, reason=ours.failed)
    if ours.median_us is None or base.median_us is None:
        return Outcome(line, UNMEASURED, reason=f"{line.base}: {base.reason or 'no figure'}")
    if line.is_share:
        value = ours.median_us / base.median_us
        is_met = value <= line.aim
    else:
        value = line.work * base.median_us / ours.median_us
        is_met = value >= line.aim
    return Outcome(line, PASS if is_met else FAIL, value)


def fields_of(one: Outcome) -> dict[str, Any]:
    """What the JSON has of an outcome, beside its line."""
    return {"verdict": one.word, "value": one.value, "reason": one.reason}


def sentence(one: Outcome) -> str:
    """An outcome as it is printed."""
    line = one.line
    aim = f"aim {'at most' if line.is_share else 'at least'} {line.aim:.3f}"
    value = "" if one.value is None else f" {one.value:.3f},"
    reason = f" ({one.reason})" if one.reason else ""
    return f"{one.word}: {line.name}:{value} {aim}{reason}"


def summary(outcomes: Sequence[Outcome]) -> str:
    """How many lines there are of each kind."""
    counts = {word: sum(one.word == word for one in outcomes) for word in (PASS, FAIL)}
    others = {word: sum(one.word == word for one in outcomes) for word in (REFUSED, UNMEASURED)}
    return (
        f"{len(outcomes)} lines: {counts[PASS]} passed, {counts[FAIL]} failed; not counted: "
        f"{others[REFUSED]} refused, {others[UNMEASURED]} not measured"
    )


def aim_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """For each aim how many lines meet it and the worst one; then every line that does not."""
    kinds: dict[str, list[Outcome]] = {}
    for one in outcomes:
        kinds.setdefault(one.line.name.rpartition(" over ")[2], []).append(one)
    lines: list[str] = []
    for kind, ones in kinds.items():
        passed = sum(one.word == PASS for one in ones)
        counted = [one for one in ones if one.is_counted]
        timed = [one for one in counted if one.value is not None]
        line = ones[0].line
        aim = f"aim {'at most' if line.is_share else 'at least'} {line.aim:.2f}"
        text = f"over {kind}: {aim}: {passed} of {len(counted)} pass"
        if timed:
            worst = (max if line.is_share else min)(timed, key=lambda one: one.value or 0.0)
            text += f", worst {worst.value:.3f} ({worst.line.name.rpartition(' over ')[0]})"
        lines.append(text)
    lines += [sentence(one) for one in outcomes if one.word == FAIL]
    return [*lines, summary(outcomes)]


def all_met(outcomes: Sequence[Outcome]) -> bool:
    """Whether every line that counts passed, and one did."""
    counted = [one for one in outcomes if one.is_counted]
    return bool(counted) and all(one.word == PASS for one in counted)
