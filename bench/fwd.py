"""`python -m bench fwd`: forward speed on the grid, ours and every peer in the same rounds."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from . import gate, machine, peers, report, shapes, timing
from .peers import OURS, Peer
from .report import Cell, Report, Result, say
from .shapes import Shape
from .verdicts import Line, Outcome, aim_lines, all_met, outcome


@dataclass(frozen=True)
class Options:
    """The command line of `bench fwd`."""

    cells: Sequence[Shape]
    peers: Sequence[Peer]
    plan: timing.Plan
    out: Path
    seed: int = 0
    time_limit_s: float | None = None
    arch: str | None = None

    @property
    def name(self) -> str:
        """Of the files that are written."""
        return "fwd" if self.arch is None else f"fwd_{self.arch}"

    @property
    def aims(self) -> dict[str, float]:
        """What is claimed of our speed over that of peers, in every cell."""
        return AIMS.get(self.arch or "", {})


AIMS = {"sm80": {"fa2": 1.05}}  # issue 5


def run(options: Options) -> int:
    """Measure, print and write everything.

    Returns 0 when every cell of ours was right and timed, and what is claimed of it holds.
    """
    begin = time.perf_counter()
    if not torch.cuda.is_available():
        say("bench fwd needs a GPU, torch sees none; `bench compile` works without one")
        return 2
    peers.prefer(options.arch)
    compile_ours(options.cells)
    probe = machine.ClockProbe()
    known = {p.name: about(p) for p in options.peers}
    full = Report(machine.facts(), known, gpu_before=probe.first)
    full.kernels = peers.kernels_of(shapes.problem_of(s, "cuda") for s in options.cells)
    present = [OURS, *(p for p in options.peers if known[p.name]["missing"] is None)]
    for line in [*report.facts_lines(full.facts), *report.notes(full)]:
        say(line)
    widths = report.widths(full)
    say(report.aligned([report.header(full)], widths)[0])
    for number, shape in enumerate(options.cells):
        elapsed = time.perf_counter() - begin
        rng = random.Random(f"{options.seed}-{number}")
        cell = None
        if options.time_limit_s is None or elapsed < options.time_limit_s:
            cell = measure(shape, present, options.plan, rng)
        if cell is None:
            full.left_out = [s.id for s in options.cells[number:]]
            break
        cell.gpu_after = probe.between_cells()
        full.cells.append(cell)
        say(report.aligned([report.row(full, cell)], widths)[0])
        report.write(options.out / f"{options.name}.json", report.to_json(full))
    full.gpu_after = probe.read()
    return finish(full, options, time.perf_counter() - begin)


def finish(full: Report, options: Options, seconds: float) -> int:
    """Write the JSON and the plot, print the report; the exit code."""
    out, name = options.out, options.name
    outcomes = claims(full, options.aims)
    text = "\n".join([report.text(full), *(aim_lines(outcomes) if outcomes else ())])
    report.write(out / f"{name}.json", report.to_json(full))
    report.write(out / f"{name}.txt", text + "\n")
    no_plot = report.plot(full, out / f"{name}.png")
    say("")
    say(text)
    say(
        f"{seconds:.0f} s; wrote {out}/{name}.json, {name}.txt"
        + ("" if no_plot else f", {name}.png")
    )
    if no_plot:
        say(f"no plot: {no_plot}")
    ours = [cell.results.get(OURS.name) for cell in full.cells]
    is_complete = bool(ours) and all(r is not None and r.tflops is not None for r in ours)
    is_right = is_complete and not full.left_out
    return 0 if is_right and (not options.aims or all_met(outcomes)) else 1


def claims(full: Report, aims: dict[str, float]) -> list[Outcome]:
    """What became of the aims over peers, cell by cell."""
    return [
        outcome(Line(f"{of_cell(cell.shape)} over {peer}", OURS.name, peer, aim), cell.results)
        for peer, aim in aims.items()
        for cell in full.cells
    ]


def of_cell(shape: Shape) -> str:
    """A cell in a line: ``d 128 causal 4096``."""
    return f"d {shape.dims} {shape.mask} {shape.seqlen_q}"


def about(peer: Peer) -> dict[str, str | None]:
    """What the report says of a peer. Asking whether it is missing imports it."""
    missing = peer.missing()
    return {
        "label": peer.label,
        "version": None if missing else peer.version(),
        "timed_by": peer.timed_by,
        "missing": missing,
    }


def compile_ours(cells: Sequence[Shape]) -> None:
    """Compile our kernels before any peer is imported.

    FA4 imports quack, which changes CuTe's tensor classes process-wide; ours are traced without it.
    A failure is left to the cell that needs the kernel, where it is reported.
    """
    begin = time.perf_counter()
    kinds = shapes.specialisations(cells)
    for shape in kinds:
        try:
            (inputs,) = make_inputs(shape, 1, 0)
            OURS.call(shape, [inputs])(0)
            torch.cuda.synchronize()
        except Exception as error:
            say(f"{OURS.name}: {shape.dims} {shape.mask}: {peers.one_line(error)}")
    say(f"{OURS.name}: {len(kinds)} kernels ready in {time.perf_counter() - begin:.1f} s")


def make_inputs(shape: Shape, sets: int, seed: int) -> peers.Inputs:
    """`sets` triples (q, k, v) of Gaussian values on the GPU, in bshd layout."""
    generator = torch.Generator("cuda").manual_seed(seed)
    dtype = getattr(torch, shape.dtype)

    def tensor(seqlen: int, heads: int, dim: int) -> torch.Tensor:
        size = (shape.batch, seqlen, heads, dim)
        return torch.randn(size, generator=generator, device="cuda", dtype=dtype)

    return [
        (
            tensor(shape.seqlen_q, shape.num_heads_q, shape.head_dim),
            tensor(shape.seqlen_k, shape.num_heads_kv, shape.head_dim),
            tensor(shape.seqlen_k, shape.num_heads_kv, shape.head_dim_v),
        )
        for _ in range(sets)
    ]


def measure(
    shape: Shape, present: Sequence[Peer], plan: timing.Plan, rng: random.Random
) -> Cell | None:
    """Gate every contestant on this cell's inputs, then time those that are right.

    None when the GPU takes no work any more, as after an illegal access in an earlier cell.
    """
    begin = time.perf_counter()
    sets = timing.num_input_sets(shape.input_bytes, machine.l2_bytes())
    try:
        inputs = make_inputs(shape, sets, rng.randrange(2**31))
    except RuntimeError as error:
        say(f"{shape.id}: no inputs, stopping: {peers.one_line(error)}")
        return None
    results: dict[str, Result] = {}
    verdicts: dict[str, str] = {}
    contestants: list[timing.Contestant] = []
    for peer in present:
        entered = enter(peer, shape, inputs, rng)
        if isinstance(entered, Result):
            results[peer.name] = entered
        else:
            contestant, verdicts[peer.name] = entered
            contestants.append(contestant)
    try:
        timings = timing.interleave(contestants, plan, rng) if contestants else {}
    except Exception as error:  # after a CUDA error nothing of this cell can be trusted
        failure = Result(failed=f"while timing: {peers.one_line(error)}")
        results.update({c.name: failure for c in contestants})
    else:
        for name, found in timings.items():
            results[name] = report.result_of(found, shape, verdicts[name])
    return Cell(shape, results, seconds=time.perf_counter() - begin)


def enter(
    peer: Peer,
    shape: Shape,
    inputs: peers.Inputs,
    rng: random.Random,
    judge: Callable[..., gate.Verdict] = gate.check,
) -> tuple[timing.Contestant, str] | Result:
    """A contestant that passed the gate on every input set, with the verdict; else the reason."""
    reason = peer.refuses(shape)
    if reason is not None:
        return Result(refused=reason)
    try:
        contestant = peer.contestant(shape, inputs)
        verdict = ""
        for number, one in enumerate(inputs):
            poison_free_memory(shape)
            with contestant.scope():
                out = peer.output(contestant.call(number))
            judged = judge(out, one, shape, rng)
            del out
            verdict = str(judged)
            if not judged.is_right:
                return Result(failed=verdict, gate=verdict)
    except Exception as error:
        return Result(failed=peers.one_line(error))
    return contestant, verdict


def poison_free_memory(shape: Shape) -> None:
    """Fill with NaN the block that the allocator will probably hand out for the next output.

    Without this an output that a kernel leaves partly unwritten could hold another contestant's.
    """
    size = (shape.batch, shape.seqlen_q, shape.num_heads_q, shape.head_dim_v)
    torch.full(size, float("nan"), device="cuda", dtype=getattr(torch, shape.dtype))
