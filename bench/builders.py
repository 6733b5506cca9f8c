"""The contestants of `bench variants --only builder`: block masks out of a mask_mod.

They make no attention, so that they are judged by their lists: all of them must be those of
PyTorch's eager create_block_mask, entry by entry.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable
from typing import Any

import torch

from . import peers, timing
from .report import Result

OURS, FLAG, COMPILED = "block_mask_from", "create_block_mask(_compile=True)", "compiled, once"
LISTS = tuple(
    f"{kind}_{what}"
    for kind in ("kv", "full_kv", "q", "full_q")
    for what in ("num_blocks", "indices")
)
Call = Callable[[], Any]
Stopwatch = Callable[[timing.Contestant, int], timing.Sample]


def documents(seqlen: int, device: str) -> Callable[..., Any]:
    """A mask_mod that shows the keys of a query's own document; 100 to 1500 tokens in each."""
    rng = random.Random(0)
    labels: list[int] = []
    while len(labels) < seqlen:
        labels += [labels[-1] + 1 if labels else 0] * rng.randint(100, 1500)
    label = torch.tensor(labels[:seqlen], dtype=torch.int32, device=device)
    return lambda b, h, q_idx, kv_idx: label[q_idx] == label[kv_idx]


def calls(seqlen: int, device: str) -> tuple[Call, dict[str, Call]]:
    """What is right, and the contestants; ours has been called, and so compiled, once.

    A failure of that call is left to `results`, where it is reported.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    from flash_cute import block_mask_from

    sizes = (documents(seqlen, device), None, None, seqlen, seqlen, device)
    with contextlib.suppress(Exception):
        block_mask_from(*sizes)
    compiled = torch.compile(create_block_mask)

    def with_flag() -> Any:
        with warnings.catch_warnings():  # PyTorch's, about the flag
            warnings.simplefilter("ignore")
            return create_block_mask(*sizes, _compile=True)

    contestants = {
        OURS: lambda: block_mask_from(*sizes),
        FLAG: with_flag,
        COMPILED: lambda: compiled(*sizes),
    }
    return lambda: create_block_mask(*sizes), contestants


def results(
    right: Call,
    contestants: dict[str, Call],
    plan: timing.Plan,
    rng: random.Random,
    stopwatch: Stopwatch = timing.cuda_events,
) -> dict[str, Result]:
    """Time those that are right, in the same rounds; a reason for the others."""
    expected, found = right(), dict[str, Result]()
    timed: list[timing.Contestant] = []
    for name, call in contestants.items():
        try:
            wrong = differences(call(), expected)
        except Exception as error:
            wrong = peers.one_line(error)
        if wrong:
            found[name] = Result(failed=wrong)
        else:
            timed.append(timing.Contestant(name, lambda i, call=call: call(), stopwatch))
    for name, taken in timing.interleave(timed, plan, rng).items():
        found[name] = Result(
            median_us=taken.median_s * 1e6,
            spread=taken.spread,
            calls=taken.calls,
            host_us=None if taken.host_s is None else taken.host_s * 1e6,
            is_host_bound=taken.is_host_bound,
            samples_us=tuple(s * 1e6 for s in taken.seconds),
            gate="right: every list",
        )
    return found


def differences(got: Any, expected: Any) -> str:
    """The lists that differ, in words; empty where none does."""
    wrong = [n for n in LISTS if not torch.equal(getattr(got, n), getattr(expected, n))]
    return f"WRONG: {', '.join(wrong)} differ" if wrong else ""
