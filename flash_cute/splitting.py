"""Attention over parts of the keys, and the merge of what they give: how many, where, and how.

With few queries the keys of a head are split over several tiles. Each writes a float32 result and
its log-sum-exp into a workspace; the kernel of `combine_plan` merges them on the same stream.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from flash_cute.cache import Executable
from flash_cute.combine_plan import (
    MOST_TEAMS,
    CombinePlan,
    CombineStrides,
    combine_key,
    make_combine_plan,
)
from flash_cute.problem import AttentionInputs, AttentionProblem
from flash_cute.scheduling import LENGTHS, Planner
from flash_cute.selection import CombineKey, KernelKey, PlannerKey
from flash_cute.splits import Splits, split_plan
from flash_cute.target import Target

FEW_ROWS = 2048  # (query, head) pairs, each of which a CTA may have for itself


@dataclass(frozen=True, slots=True)
class Merge:
    """What follows a launch on split keys.

    Shapes: workspace_shape: (elements,) float32: the partial results, (parts, batch, rows, heads,
            dim) or packed without batch, and their log-sum-exp, `lse_offset` bytes behind
    """

    plan: CombinePlan
    partial_shape: tuple[int, ...]
    workspace_shape: tuple[int]
    lse_offset: int

    @property
    def parts_as_batches(self) -> tuple[int, ...]:
        """partial_shape with the parts as one more batch; packed sequences have no other."""
        parts, *rest = self.partial_shape
        return (parts * rest[0], *rest[1:]) if len(rest) == 4 else self.partial_shape

    def run(
        self,
        partials: tuple[int, int],
        results: tuple[int, int],
        lengths: tuple[int, int, int],
        stream: int,
    ) -> None:
        """Enqueue the merge.

        Args:
            partials: addresses of the two halves of the workspace.
            results: addresses of out and lse.
            lengths: addresses of cu_seqlens, seqused and the numbers of parts.
        """
        self.plan.run((*partials, *results, *lengths), stream)


def merge_key(problem: AttentionProblem, key: KernelKey) -> CombineKey | None:
    """Return the key of the kernel that merges; None where keys are not split."""
    p = problem
    if not key.spec.is_split:
        return None
    ragged = (p.is_packed_q, p.has_seqused_q, key.spec.has_split_counts)
    return combine_key(key.arch, torch.float32, p.dtype, p.head_dim_v, *ragged)


def planner_key(problem: AttentionProblem, key: KernelKey) -> PlannerKey | None:
    """Return the key of the kernel that counts parts; None where nothing is counted."""
    if not key.spec.has_split_counts:
        return None
    p = problem
    given = {
        "cu_seqlens_q": p.is_packed_q,
        "cu_seqlens_k": p.is_packed_k,
        "seqused_q": p.has_seqused_q,
        "seqused_k": p.has_seqused_k,
        "leftpad": p.has_leftpad,
    }
    return PlannerKey(key.arch, tuple(name for name in LENGTHS if given[name]))


def make_planner(
    problem: AttentionProblem,
    key: KernelKey,
    target: Target,
    splits: Splits,
    executable: Executable,
) -> Planner:
    """Work out the counting of the parts of a problem."""
    plan = split_plan(problem, key.spec, key.config, target, splits)
    return Planner(executable, plan, rows_q=problem.seqlen_q, rows_k=problem.capacity)


def make_merge(
    problem: AttentionProblem,
    inputs: AttentionInputs,
    num_splits: int,
    out_strides: tuple[int, ...],
    executable: Executable,
) -> Merge:
    """Work out the workspace and the merge of a launch.

    Args:
        out_strides: of out, (batch, seqlen, heads, dim) or packed (total, heads, dim).
    """
    p, is_packed = problem, problem.is_packed_q
    *batch, rows, heads, _ = inputs.q.shape
    partial = (num_splits, *batch, rows, heads, p.head_dim_v)
    num_batch = 1 if is_packed else batch[0]
    row, sequence = heads * p.head_dim_v, rows * heads * p.head_dim_v
    lse_sequence = rows * heads
    strides = CombineStrides(
        out_partial=(num_batch * sequence, sequence, row, p.head_dim_v),
        lse_partial=(num_batch * lse_sequence, lse_sequence, 1, rows),
        out=(0 if is_packed else out_strides[0], *out_strides[-3:-1]),
        lse=(lse_sequence, 1, rows),
    )
    shape = (num_splits, num_batch, rows, heads, p.head_dim_v)
    # One group of threads has eight parts of a row under way. With a fixed size of the parts the
    # bits of a row may not depend on how many rows there are.
    has_few = num_batch * rows * heads <= FEW_ROWS and num_splits > 8 and not p.split_size
    teams = MOST_TEAMS if has_few else 1
    plan = make_combine_plan(executable, shape, strides, p.batch if is_packed else None, teams)
    elements = math.prod(partial)
    lse_elements = num_splits * num_batch * lse_sequence
    return Merge(plan, partial, (elements + lse_elements,), 4 * elements)
