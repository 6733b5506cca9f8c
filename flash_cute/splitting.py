"""Attention over parts of the keys, and the merge of what they give: how many, where, and how.

With few queries the keys of a head are split over several tiles. Each writes a float32 result and
its log-sum-exp into a workspace, unless its sequence has no other. Few rows are merged by the
attention kernel itself, by whichever tile is the last; many by the kernel of `combine_plan`, which
runs on the same stream.
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
from flash_cute.splits import Splits, filling, heads_of, split_plan, tiles_of
from flash_cute.target import Target

FEW_ROWS = 2048  # (query, head) pairs, each of which a CTA may have for itself
FEW_PARTS = 8  # that a group of threads has under way together
# What the last tile of a row may merge, since no other one helps it: with more it takes longer.
ROWS_OF_LAST_TILE = 16
PARTS_OF_LAST_TILE = 8  # of each row, as a rule
WORST_OF_LAST_TILE = 2**20  # bytes, where one sequence has all parts that there may be
MOST_ARRIVALS = 2**15


@dataclass(frozen=True, slots=True)
class Merge:
    """The workspace of a launch on split keys, and what follows it.

    Shapes: workspace_shape: (elements,) float32: the partial results, (parts, batch, rows, heads,
            dim) or packed without batch, and their log-sum-exp, `lse_offset` bytes behind
            num_arrivals: counters of a kernel that merges by itself; 0 for one that does not
    """

    plan: CombinePlan
    workspace_shape: tuple[int]
    lse_offset: int
    num_arrivals: int

    def run(
        self,
        workspace: int,
        results: tuple[int, int],
        lengths: tuple[int, int, int],
        stream: int,
    ) -> None:
        """Enqueue the merge, unless the kernel has done it.

        Args:
            workspace: its address.
            results: addresses of out and lse.
            lengths: addresses of cu_seqlens, seqused and the numbers of parts.
        """
        if not self.num_arrivals:
            self.plan.run((workspace, workspace + self.lse_offset, *results, *lengths), stream)


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


def usual_parts(problem: AttentionProblem, key: KernelKey, target: Target, splits: Splits) -> int:
    """Parts of a sequence as a rule: as many as fill the GPU, or as there are at most."""
    if not splits.is_counted or splits.blocks:
        return splits.most
    tiles = max(1, tiles_of(problem, key.spec, key.config))
    slots = filling(problem, key.spec, key.config, target).slots
    return min(splits.most, max(1, slots // tiles))


def num_arrivals(
    problem: AttentionProblem, key: KernelKey, target: Target, splits: Splits, rows_q: int
) -> int:
    """Counters by which an attention kernel finds the last part of a tile; 0 if it is not to merge.

    It is not where parts have a fixed size: the bits of a row would depend on the batch.

    Args:
        rows_q: of a padded sequence, or of all packed ones.
    """
    p, config = problem, key.config
    if not config.merges_parts or splits.most <= 1 or splits.blocks:
        return 0
    rows = min(p.queries, config.positions(key.spec)) * min(p.group, key.spec.pack_heads)
    if (
        rows > ROWS_OF_LAST_TILE
        or usual_parts(p, key, target, splits) > PARTS_OF_LAST_TILE
        or 4 * rows * p.head_dim_v * splits.most > WORST_OF_LAST_TILE
    ):
        return 0
    all_rows = rows_q if p.is_packed_q else p.batch * rows_q
    number = all_rows * heads_of(p, key.spec) * (config.num_threads // 32)
    return number if number <= MOST_ARRIVALS else 0


def make_merge(
    problem: AttentionProblem,
    inputs: AttentionInputs,
    key: KernelKey,
    target: Target,
    splits: Splits,
    out_strides: tuple[int, ...],
    executable: Executable,
) -> Merge | None:
    """Work out the workspace and the merge of a launch; None where every sequence is one part.

    Args:
        out_strides: of out, (batch, seqlen, heads, dim) or packed (total, heads, dim).
    """
    p, is_packed, num_splits = problem, problem.is_packed_q, splits.most
    if num_splits <= 1:
        return None
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
    # With a fixed size of the parts the bits of a row may not depend on how many rows there are.
    has_few = num_batch * rows * heads <= FEW_ROWS and not p.split_size
    has_few = has_few and usual_parts(p, key, target, splits) > FEW_PARTS
    teams = MOST_TEAMS if has_few else 1
    plan = make_combine_plan(executable, shape, strides, p.batch if is_packed else None, teams)
    elements = math.prod(partial)
    lse_elements = num_splits * num_batch * lse_sequence
    arrivals = num_arrivals(p, key, target, splits, rows)
    return Merge(plan, (elements + lse_elements,), 4 * elements, arrivals)
