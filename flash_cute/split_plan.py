"""What the numbers of parts of each sequence's keys are worked out from, and those numbers.

A kernel on the device counts the parts (``device/split_planner.py``), since lengths lie there. Any
counts give right results: an attention kernel divides the keys that it finds by the count that it
reads. Counts made for other lengths balance the work less well, and that is all.
"""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class SplitPlan:
    """How parts are counted.

    Units: mean_q: queries of a sequence, on average where they are packed; positions, tile_n:
           queries and keys of a tile; heads: tiles of each block of queries; visible_blocks: blocks
           of keys that a tile sees at most; slots: tiles that run at the same time; most: parts of
           a sequence; split_blocks: blocks of a part, 0 where the tiles are to fill the slots
    """

    batch: int
    mean_q: int
    positions: int
    tile_n: int
    heads: int
    visible_blocks: int
    slots: int
    split_blocks: int
    most: int

    def differences(self, other: SplitPlan) -> list[str]:
        """Say what makes the counts of one useless for the other.

        How many parts there are, and how long, is the owner's business.
        """
        own = ("most", "split_blocks")
        names = [field.name for field in dataclasses.fields(self) if field.name not in own]
        return [
            f"{name} {getattr(self, name)} instead of {getattr(other, name)}"
            for name in names
            if getattr(self, name) != getattr(other, name)
        ]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SchedulerMetadata:
    """What ``get_scheduler_metadata`` returns: the plan of a call, for calls with such lengths.

    Shapes: split_counts: (batch,) int32 on the device, the number of parts of each sequence's keys.
            ``metadata.split_counts.copy_(other.split_counts)`` renews it in place, for CUDA graphs.
    """

    split_counts: torch.Tensor
    plan: SplitPlan
