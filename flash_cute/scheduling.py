"""Numbers of parts of each sequence's keys, made on the device and shared by calls.

The layers of a model call with the same lengths one after the other, so counts are kept and found
again by the tensors that they were made from: the same memory, unchanged since as far as PyTorch
knows. Counts that are out of date are slow, never wrong (see ``split_plan``). Inside a CUDA graph
capture the first call that needs counts captures their making, so that a replay counts anew.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch

from flash_cute import current, splits
from flash_cute.arguments import SplitPlannerArguments
from flash_cute.cache import Executable
from flash_cute.split_plan import SplitPlan

LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "leftpad")
MAX_KEPT = 16  # counts of so many kinds of calls are kept

LengthTensors = tuple["torch.Tensor | None", ...]

_kept: OrderedDict[tuple[Any, ...], tuple[torch.Tensor, LengthTensors]] = OrderedDict()


@dataclass(frozen=True, slots=True)
class Planner:
    """Makes the counts of one kind of call.

    Units: rows_q, rows_k: lengths of the sequences that are not packed
    """

    executable: Executable
    plan: SplitPlan
    rows_q: int
    rows_k: int

    def counts(self, lengths: LengthTensors, device_index: int, stream: int) -> torch.Tensor:
        """Return the counts for these lengths, in the order of LENGTHS, for use on a stream."""
        key = self._key(lengths, device_index, stream)
        if key is not None:
            found = _kept.get(key)
            if found is not None:
                return found[0]
        made = self.make(lengths, stream)
        if key is not None:
            _kept[key] = (made, lengths)  # keeps the memory, so that no other tensor gets it
            while len(_kept) > MAX_KEPT:
                _kept.popitem(last=False)
        return made

    def make(self, lengths: LengthTensors, stream: int) -> torch.Tensor:
        """Enqueue the kernel; returns what it will write."""
        plan = self.plan
        made = current.empty((plan.batch,), (1,), torch.int32)
        least = -(-splits.LEAST_KEYS // plan.tile_n)
        arguments = SplitPlannerArguments(
            *[0 if tensor is None else tensor.data_ptr() for tensor in lengths],
            counts=made.data_ptr(),
            batch=plan.batch,
            rows_q=self.rows_q,
            rows_k=self.rows_k,
            positions=plan.positions,
            tile_n=plan.tile_n,
            heads=plan.heads,
            visible_blocks=plan.visible_blocks,
            slots=plan.slots,
            least_blocks=least,
            split_blocks=plan.split_blocks,
            most=plan.most,
            stream=stream,
        )
        self.executable(*arguments)
        return made

    def _key(
        self, lengths: LengthTensors, device_index: int, stream: int
    ) -> tuple[Any, ...] | None:
        """Where counts are kept; None where nothing tells whether lengths have changed."""
        states: list[tuple[int, int] | None] = []
        for tensor in lengths:
            if tensor is None:
                states.append(None)
            elif tensor.is_inference():  # it has no version
                return None
            else:
                states.append((tensor.data_ptr(), tensor._version))
        capture = current.capture_id(stream) if current.is_capturing() else 0
        where = (device_index, stream, capture)
        return (self.plan, self.rows_q, self.rows_k, where, *states)
