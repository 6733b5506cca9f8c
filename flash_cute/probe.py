"""Whether a callback looks up tables by the key index, found by calling it once.

Such a look-up is a load for every score, and its registers are wanted for a smaller block of
scores. A look-up by head, batch or query is a load a row, which costs next to nothing. The answer
chooses tiles and never a result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flash_cute.capture import TensorFacts

KEY_INDEX = "kv_idx"


class Probe:
    """Stands for one element: knows only whether the key index had a part in it."""

    __array_ufunc__ = None
    __hash__ = None  # pyright: ignore[reportAssignmentType]
    dtype, device, shape = torch.float32, torch.device("cpu"), ()

    def __init__(self, by_key: bool) -> None:
        self.by_key = by_key

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Probe:
        return of_any(*args, *(kwargs or {}).values())

    def __getattr__(self, name: str) -> Callable[..., Probe]:
        return lambda *args, **kwargs: of_any(self, *args, *kwargs.values())

    def __bool__(self) -> bool:
        raise TypeError("not known")


class ProbedTensor:
    """Stands for a captured tensor; `found` collects the look-ups by key."""

    def __init__(self, rank: int, found: list[bool], by_key: bool = False) -> None:
        self._rank, self._found, self._by_key = rank, found, by_key

    def __getitem__(self, index: Any) -> Any:
        indices = index if isinstance(index, tuple) else (index,)
        by_key = self._by_key or of_any(*indices).by_key
        left = self._rank - sum(not isinstance(i, slice) for i in indices)
        if left > 0:
            return ProbedTensor(left, self._found, by_key)
        self._found.append(by_key)
        return Probe(by_key)

    def __getattr__(self, name: str) -> Any:
        if name == "shape":
            return (Probe(False),) * self._rank
        return lambda *args, **kwargs: Probe(False) if name == "size" else self


def of_any(*operands: Any) -> Probe:
    """Return what an operation on these results in."""
    return Probe(any(isinstance(x, Probe) and x.by_key for x in operands))


def looks_up_keys(
    with_tensors: Callable[[tuple[Any, ...]], Callable[..., Any]],
    tensors: tuple[TensorFacts, ...],
    parameters: tuple[str, ...],
) -> bool:
    """Say whether a portable callback indexes a captured tensor by the key.

    Args:
        with_tensors: the callback on stand-ins for the tensors it captured, of which `tensors` are
            the facts.
        parameters: the names of what it is called with.
    """
    if not any(facts.rank for facts in tensors):
        return False
    found: list[bool] = []
    stand_ins = [ProbedTensor(f.rank, found) if f.rank else Probe(False) for f in tensors]
    try:
        with_tensors(tuple(stand_ins))(*[Probe(name == KEY_INDEX) for name in parameters])
    except Exception:  # whatever it is, tracing says it better
        return True
    return any(found)


for _name in "add sub mul truediv floordiv mod pow and or xor lshift rshift".split():
    setattr(Probe, f"__{_name}__", of_any)
    setattr(Probe, f"__r{_name}__", of_any)
for _name in "eq ne lt le gt ge neg pos abs invert".split():
    setattr(Probe, f"__{_name}__", of_any)
