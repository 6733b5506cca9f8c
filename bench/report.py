"""Results: the records, their JSON, the table and the plot."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .shapes import Shape
from .timing import Timing

OURS = "flash_cute"
EVENTS = "CUDA events"


def say(text: str = "") -> None:
    """Write a line to stdout at once: what was measured survives a run that is cut off."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@dataclass(frozen=True)
class Result:
    """One contestant in one cell: figures, or the reason why there are none."""

    tflops: float | None = None
    median_us: float | None = None
    spread: float | None = None
    calls: int = 0
    host_us: float | None = None
    is_host_bound: bool = False
    samples_us: tuple[float, ...] = ()
    gate: str = ""
    refused: str | None = None
    failed: str | None = None

    @property
    def reason(self) -> str | None:
        return self.refused or self.failed


@dataclass
class Cell:
    """All contestants on one shape, and the GPU's state after it."""

    shape: Shape
    results: dict[str, Result]
    gpu_after: dict[str, str] | None = None
    seconds: float = 0.0


@dataclass
class Report:
    """A whole run of `bench fwd`."""

    facts: dict[str, Any]
    peers: dict[str, dict[str, Any]]  # name -> label, version, timed_by, missing
    cells: list[Cell] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # ids of cells that were not reached
    gpu_before: dict[str, str] | None = None
    gpu_after: dict[str, str] | None = None
    kernels: list[str] = field(default_factory=list)  # that ours ran on


def result_of(timing: Timing, shape: Shape, gate: str) -> Result:
    """The figures of a timed contestant."""
    median_s = timing.median_s
    return Result(
        tflops=shape.flops / median_s / 1e12,
        median_us=median_s * 1e6,
        spread=None if math.isnan(timing.spread) else timing.spread,
        calls=timing.calls,
        host_us=None if timing.host_s is None else timing.host_s * 1e6,
        is_host_bound=timing.is_host_bound,
        samples_us=tuple(s * 1e6 for s in timing.seconds),
        gate=gate,
    )


def geometric_mean(values: Iterable[float]) -> float:
    """The geometric mean; nan for no values."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def ratio(cell: Cell, peer: str) -> float | None:
    """Our speed over a peer's on a cell (above 1: we are faster); None unless both were timed."""
    ours, theirs = cell.results.get(OURS), cell.results.get(peer)
    if ours is None or theirs is None or ours.tflops is None or theirs.tflops is None:
        return None
    return ours.tflops / theirs.tflops


@dataclass(frozen=True)
class Summary:
    """Ours against one peer over all cells that both ran."""

    peer: str
    cells: int
    geomean: float
    lowest: float
    lowest_cell: str


def summarise(cells: Sequence[Cell], peer: str) -> Summary | None:
    """Geometric mean and lowest cell against a peer; None when no cell has both."""
    ratios = [(r, c.shape.id) for c in cells if (r := ratio(c, peer)) is not None]
    if not ratios:
        return None
    lowest, where = min(ratios)
    return Summary(peer, len(ratios), geometric_mean(r for r, _ in ratios), lowest, where)


# --- JSON -----------------------------------------------------------------------------------------


def to_json(report: Report) -> str:
    """The report as JSON, summaries included; `from_json` reads it back."""
    content = asdict(report)
    content["summaries"] = [
        asdict(s) for name in report.peers if (s := summarise(report.cells, name)) is not None
    ]
    return json.dumps(content, indent=1, allow_nan=False)


def from_json(text: str) -> Report:
    """A report read back from its JSON."""
    content = json.loads(text)
    content.pop("summaries", None)
    cells = [
        Cell(
            Shape(**c["shape"]),
            {n: _result(r) for n, r in c["results"].items()},
            c["gpu_after"],
            c["seconds"],
        )
        for c in content.pop("cells")
    ]
    return Report(cells=cells, **content)


def _result(content: dict[str, Any]) -> Result:
    return Result(**{**content, "samples_us": tuple(content["samples_us"])})


def write(path: Path, text: str) -> None:
    """Replace a file in one step, so that a run cut off leaves the last whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(path.suffix + ".part")
    partial.write_text(text)
    os.replace(partial, path)


# --- text -----------------------------------------------------------------------------------------


def aligned(rows: Sequence[Sequence[str]], widths: Sequence[int] = ()) -> list[str]:
    """Rows as lines: the first column left, the others right aligned, at least `widths` wide."""
    columns = max(len(row) for row in rows)
    wide = [0] * columns
    for i in range(columns):
        least = widths[i] if i < len(widths) else 0
        wide[i] = max([least] + [len(row[i]) for row in rows if i < len(row)])
    return [
        "  ".join(
            cell.ljust(wide[i]) if i == 0 else cell.rjust(wide[i]) for i, cell in enumerate(row)
        ).rstrip()
        for row in rows
    ]


def header(report: Report) -> list[str]:
    labels = [p["label"] for p in report.peers.values()]
    return ["d", "mask", "seqlen", "heads", "ours", "+-%", *labels, *(f"/{n}" for n in labels)]


def row(report: Report, cell: Cell) -> list[str]:
    """One cell of the table: TFLOP/s of everyone, then ours over each peer."""
    ours = cell.results.get(OURS, Result())
    spread = "" if ours.spread is None else f"{100 * ours.spread:.1f}"
    shape = cell.shape
    length = (
        str(shape.seqlen_q)
        if shape.seqlen_q == shape.seqlen_k
        else f"{shape.seqlen_q}x{shape.seqlen_k}"
    )
    figures = [_tflops(cell.results.get(name)) for name in report.peers]
    ratios = [ratio(cell, name) for name in report.peers]
    return [
        shape.dims,
        shape.mask,
        length,
        str(shape.num_heads_q),
        _tflops(ours),
        spread,
        *figures,
        *("-" if r is None else f"{r:.3f}" for r in ratios),
    ]


def _tflops(result: Result | None) -> str:
    if result is None or result.tflops is None:
        return "FAILED" if result is not None and result.failed else "-"
    return f"{result.tflops:.0f}" + ("h" if result.is_host_bound else "")


def widths(report: Report) -> list[int]:
    """Column widths known before anything is measured, so that rows can be printed one by one."""
    return [max(6, len(name)) for name in header(report)]


def notes(report: Report) -> list[str]:
    """Who is missing, refused, failed or was limited by the host, each reason once."""
    lines = [
        f"{p['label']}: missing: {p['missing']}" for p in report.peers.values() if p["missing"]
    ]
    seen: dict[str, list[str]] = {}
    for cell in report.cells:
        for name, result in cell.results.items():
            missing = report.peers.get(name, {}).get("missing")
            if result.reason and not missing:
                word = "does not do it" if result.refused else "FAILED"
                seen.setdefault(f"{name}: {word}: {result.reason}", []).append(cell.shape.id)
            if result.is_host_bound:
                text = f"{name}: h: enqueueing took about as long as the device"
                seen.setdefault(text, []).append(cell.shape.id)
    for text, ids in seen.items():
        more = f" and {len(ids) - 2} more" if len(ids) > 2 else ""
        lines.append(f"{text} [{', '.join(ids[:2])}{more}]")
    if report.left_out:
        lines.append(f"not reached: {', '.join(report.left_out)}")
    return lines


def summary_lines(report: Report) -> list[str]:
    """Geometric mean and lowest cell per peer."""
    lines = []
    for name, peer in report.peers.items():
        found = summarise(report.cells, name)
        if found is None:
            lines.append(f"ours/{peer['label']}: no cell with both")
        else:
            lines.append(
                f"ours/{peer['label']}: geometric mean {found.geomean:.3f} over {found.cells} "
                f"cells, lowest {found.lowest:.3f} ({found.lowest_cell})"
            )
    return lines


def timed_by_lines(report: Report) -> list[str]:
    """How device time was taken; the few that differ from the rest are named."""
    others = [p for p in report.peers.values() if p["timed_by"] != EVENTS and not p["missing"]]
    return [
        f"timed by {EVENTS}, median of interleaved rounds in random order",
        *(f"{p['label']} timed by {p['timed_by']}" for p in others),
    ]


def facts_lines(facts: dict[str, Any]) -> list[str]:
    """GPU, driver, versions, commit and source, a few to a line."""
    versions = ", ".join(f"{n} {v or 'missing'}" for n, v in facts["versions"].items())
    gpu = facts["gpu"] or "no GPU"
    return [
        f"{facts['date']}  {gpu}, driver {facts['driver']}, CUDA {facts['torch_cuda']}, "
        f"cuDNN {facts.get('cudnn')}, python {facts['python']}",
        versions,
        f"commit {facts['commit']}, source {facts['source_fingerprint']}",
    ]


def text(report: Report) -> str:
    """The whole report as printed at the end of a run."""
    rows = [header(report), *(row(report, cell) for cell in report.cells)]
    return "\n".join(
        [
            *facts_lines(report.facts),
            "TFLOP/s (4 b h sq sk (d + d_v) / 2, causal half), then ours over each peer; "
            "+-%: spread of ours between quartiles",
            *aligned(rows, widths(report)),
            *summary_lines(report),
            *timed_by_lines(report),
            *(f"ours: {kernel}" for kernel in report.kernels),
            f"GPU before: {report.gpu_before}",
            f"GPU after:  {report.gpu_after}",
            *notes(report),
        ]
    )


# --- plot -----------------------------------------------------------------------------------------


def plot(report: Report, path: Path) -> str | None:
    """Bars of TFLOP/s, one panel for each head dim and mask; why there is no plot, else None."""
    if not report.cells:
        return "nothing was measured"
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        return f"matplotlib is missing: {error}"
    dims = list(dict.fromkeys(c.shape.dims for c in report.cells))
    masks = list(dict.fromkeys(c.shape.mask for c in report.cells))
    figure, axes = pyplot.subplots(
        len(masks),
        len(dims),
        figsize=(3.6 * len(dims) + 1, 2.9 * len(masks) + 1),
        squeeze=False,
        sharey=True,
    )
    names = [OURS, *report.peers]
    labels = [OURS, *(p["label"] for p in report.peers.values())]
    for i, mask in enumerate(masks):
        for j, dim in enumerate(dims):
            cells = [c for c in report.cells if (c.shape.mask, c.shape.dims) == (mask, dim)]
            _panel(axes[i][j], cells, names, labels)
            axes[i][j].set_title(f"d {dim}, {mask}", fontsize=9)
        axes[i][0].set_ylabel("TFLOP/s")
    handles, shown = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, shown, loc="upper center", ncols=len(names), fontsize=8, frameon=False)
    facts = report.facts
    about = f"{facts['gpu']}, forward, {report.cells[0].shape.dtype}, source "
    figure.text(0.01, 0.005, about + facts["source_fingerprint"], fontsize=7, color="grey")
    figure.tight_layout(rect=(0, 0.02, 1, 0.95))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return None


def _panel(axis: Any, cells: Sequence[Cell], names: Sequence[str], labels: Sequence[str]) -> None:
    """One group of bars for each length, one bar for each contestant."""
    width = 0.8 / len(names)
    for n, (name, label) in enumerate(zip(names, labels, strict=True)):
        found = [c.results.get(name) for c in cells]
        heights = [0.0 if r is None or r.tflops is None else r.tflops for r in found]
        places = [x + (n - (len(names) - 1) / 2) * width for x in range(len(cells))]
        # Ours in a strong colour, peers in greys: the eye should land on what is under test.
        colour = "tab:red" if name == OURS else str(0.25 + 0.5 * (n - 1) / max(1, len(names) - 2))
        axis.bar(places, heights, width, label=label, color=colour)
    axis.set_xticks(range(len(cells)), [str(c.shape.seqlen_q) for c in cells], fontsize=8)
    axis.tick_params(axis="y", labelsize=8)
    axis.grid(axis="y", linewidth=0.3)
    axis.set_axisbelow(True)
