"""Problems for forward kernels that run through the harness; functions here run in the worker."""

from __future__ import annotations

import checks
from checks import Case

from flash_cute import flash_attn_func, selection
from sm100_on_hopper.forward import substitute
from sm100_on_hopper.lowering import PLAIN, Fault, Mode


def attend(
    declared: str,
    arch: str,
    case: Case,
    kind: str = "gaussian",
    sm_margin: int = 0,
    mode: Mode = PLAIN,
    fault: Fault | None = None,
) -> list[str]:
    """Run a dense problem with one kernel and judge it; returns the kernels that ran.

    Args:
        declared: the kernel's name in `selection`.
        kind: of the values, one of `checks.HOSTILE` or "gaussian".
        sm_margin: so many multiprocessors take no part: fewer CTAs than tiles make each walk on.
    Raises: AssertionError where the result is wrong or no such kernel ran.
    """
    make = checks.gaussian if kind == "gaussian" else checks.HOSTILE[kind]
    q, k, v = make(case, "cuda")
    faults = () if fault is None else (fault,)
    with substitute(getattr(selection, declared), arch, mode, faults) as names:
        got = flash_attn_func(q, k, v, causal=case.causal, return_lse=True, sm_margin=sm_margin)
    if not names:
        raise AssertionError(f"{case.id} ran no kernel of {declared}")
    checks.assert_attention(got, *checks.oracle(q, k, v, causal=case.causal))
    return names


def see_nan(declared: str, arch: str, mode: Mode = PLAIN) -> list[str]:
    """One NaN key in each sequence, in every place of a group of weights: who sees it is NaN.

    Raises: AssertionError where another row changed, or one is a number.
    """
    case = Case(32, 1, 1, 300, 450, 64, causal=True)
    q, k, v = checks.gaussian(case, "cuda")
    with substitute(getattr(selection, declared), arch, mode) as names:
        before, lse_before = flash_attn_func(q, k, v, causal=True, return_lse=True)
        for b in range(case.batch):
            k[b, 288 + b] = float("nan")
        out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
    for b in range(case.batch):
        first = 288 + b - (450 - 300)  # row that sees the key
        assert out[b, first:].isnan().all() and lse[b, :, first:].isnan().all()
        checks.assert_same_bits("out", out[b, :first], before[b, :first])
        checks.assert_same_bits("lse", lse[b, :, :first], lse_before[b, :, :first])
    return names
