"""Command line: ``python -m bench fwd|host|compile|variants|tune|decode``; -h explains one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from . import compile, decode, fwd, host, peers, shapes, timing, tune, variants

DEFAULT_OUT = Path(".bench")
Built = TypeVar("Built")


def parser() -> argparse.ArgumentParser:
    """The command line of all benchmarks."""
    top = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    one = commands.add_parser("fwd", help="forward speed on the grid, against the peers")
    one.add_argument("--rounds", type=positive, help="samples of each contestant (11; quick: 5)")
    one.add_argument("--only", help="cells to measure, e.g. d=128,causal,seqlen=4k")
    one.add_argument("--peers", help="some of fa4,cudnn,fa3,fa2, or none (all; --arch sm80: fa2)")
    one.add_argument("--quick", action="store_true", help="seqlen 4k only, few and short rounds")
    one.add_argument("--seed", type=int, default=0, help="of the inputs and the order (0)")
    one.add_argument(
        "--time-limit", type=float, metavar="S", help="start no further cell after S seconds"
    )
    two = commands.add_parser("host", help="host time of a warm call (seqlen 128, one head)")
    two.add_argument("--rounds", type=positive, default=31, help="samples of each (31)")
    three = commands.add_parser("compile", help="cold compile and disk-hit times, fresh processes")
    three.add_argument("--rounds", type=positive, default=3, help="processes per figure (3)")
    three.add_argument("--only", help="kernels to compile, e.g. d=128,causal")
    three.add_argument("--arch", help="cross-compile for this target, e.g. sm_90a (the GPU's own)")
    three.add_argument("--quick", action="store_true", help="one process per figure, d=128 only")
    four = commands.add_parser("variants", help="masks, callbacks and packed sequences")
    four.add_argument("--rounds", type=positive, help=f"samples of each ({variants.PLAN.rounds})")
    four.add_argument("--only", help=f"some of {','.join(variants.GROUPS)} (all)")
    four.add_argument("--seed", type=int, default=0, help="of the inputs and the order (0)")
    five = commands.add_parser("tune", help="other configs and head orders than the chosen ones")
    five.add_argument("--rounds", type=positive, help="samples of each contestant (11)")
    five.add_argument("--only", help="cells to measure, e.g. d=128,causal,seqlen=4k")
    five.add_argument("--seed", type=int, default=0, help="of the inputs and the order (0)")
    six = commands.add_parser("decode", help="decoding over dense and paged caches")
    six.add_argument("--rounds", type=positive, help=f"samples of each ({decode.PLAN.rounds})")
    six.add_argument("--only", help="caches to measure, e.g. batch=8,keys=32k,hkv=4")
    six.add_argument("--peers", help="some of fa4,sdpa, or none (all; --arch sm80: none)")
    six.add_argument("--seed", type=int, default=0, help="of the inputs and the order (0)")
    for command in (one, six):
        what = "measure this kernel of ours, compiled for the GPU that is here, by its own aims"
        command.add_argument("--arch", choices=peers.ARCHS, help=what)
    for command in (one, two, three, four, five, six):
        command.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder (.bench)")
    return top


def positive(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def with_rounds(plan: timing.Plan, rounds: int | None) -> timing.Plan:
    """The plan with as many rounds as were asked for: all of them, whatever they take."""
    return plan if rounds is None else replace(plan, rounds=rounds, min_rounds=rounds)


def fwd_options(arguments: argparse.Namespace) -> fwd.Options:
    """The options of `bench fwd`. Raises: ValueError for a filter or peer that means nothing."""
    cells = shapes.select(shapes.fwd_grid_of(arguments.arch), arguments.only)
    plan = timing.Plan()
    if arguments.quick:
        cells = [c for c in cells if c.seqlen_q == 4096] or cells
        plan = timing.Plan(rounds=5, budget_s=1.0, sample_s=0.015)
    plan = with_rounds(plan, arguments.rounds)
    return fwd.Options(
        cells,
        peers.choose(arguments.peers or (None if arguments.arch is None else "fa2")),
        plan,
        arguments.out,
        arguments.seed,
        arguments.time_limit,
        arguments.arch,
    )


def compile_options(arguments: argparse.Namespace) -> compile.Options:
    """The options of `bench compile`. Raises: ValueError for a filter that means nothing."""
    cells = shapes.select(shapes.fwd_grid(), arguments.only)
    rounds = arguments.rounds
    if arguments.quick:
        cells, rounds = [c for c in cells if c.head_dim == 128] or cells, 1
    return compile.Options(shapes.specialisations(cells), rounds, arguments.out, arguments.arch)


def variants_options(arguments: argparse.Namespace) -> variants.Options:
    """The options of `bench variants`. Raises: ValueError for a group that means nothing."""
    plan = with_rounds(variants.PLAN, arguments.rounds)
    chosen = variants.choose(arguments.only)
    return variants.Options(plan, arguments.out, arguments.seed, chosen)


def tune_options(arguments: argparse.Namespace) -> tune.Options:
    """The options of `bench tune`. Raises: ValueError for a filter that means nothing."""
    plan = with_rounds(timing.Plan(), arguments.rounds)
    cells = shapes.select(shapes.fwd_grid(), arguments.only)
    return tune.Options(cells, plan, arguments.out, arguments.seed)


def decode_options(arguments: argparse.Namespace) -> decode.Options:
    """The options of `bench decode`. Raises: ValueError for a filter that means nothing."""
    grid = shapes.select_steps(shapes.decode_grid_of(arguments.arch), arguments.only)
    plan = with_rounds(decode.PLAN, arguments.rounds)
    chosen = decode.choose(arguments.peers or (None if arguments.arch is None else "none"))
    return decode.Options(grid, chosen, plan, arguments.out, arguments.seed, arguments.arch)


def main(argv: list[str] | None = None) -> int:
    top = parser()
    arguments = top.parse_args(argv)
    if arguments.command == "host":
        return host.run(arguments.rounds, arguments.out)
    if arguments.command == "fwd":
        return fwd.run(options_of(fwd_options, arguments, top))
    if arguments.command == "variants":
        return variants.run(options_of(variants_options, arguments, top))
    if arguments.command == "decode":
        return decode.run(options_of(decode_options, arguments, top))
    if arguments.command == "tune":
        return tune.run(options_of(tune_options, arguments, top))
    return compile.run(options_of(compile_options, arguments, top))


def options_of(
    build: Callable[[argparse.Namespace], Built],
    arguments: argparse.Namespace,
    top: argparse.ArgumentParser,
) -> Built:
    """Build options; a filter that means nothing ends the program with a usage message."""
    try:
        return build(arguments)
    except ValueError as error:
        top.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
