"""The correctness gate: sampled rows of an output against the definition, before anything is timed.

The rule is the tests' one, applied per row so that the large values of short causal rows do not
excuse errors in long ones: max|out - ref| <= 2 max|lowprec - ref| + floor, where ref is float64 and
lowprec is the same mathematics in the input's dtype.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .shapes import Shape

# (scores, batch, head, q_idx, kv_idx) -> scores, -inf where hidden; the indices broadcast to scores
Change = Callable[..., torch.Tensor]

PAIRS = 6  # sampled (batch, head) pairs, the first and the last among them
ROWS = 24  # sampled rows of each pair


@dataclass(frozen=True)
class Verdict:
    """What the gate found; `where` and the figures are of the worst row (error over limit)."""

    is_right: bool
    error: float
    limit: float
    where: str

    def __str__(self) -> str:
        if self.is_right:
            return f"right (worst row: error {self.error:.2e}, limit {self.limit:.2e})"
        return f"WRONG at {self.where}: error {self.error:.2e}, limit {self.limit:.2e}"


def check(
    out: torch.Tensor,
    inputs: tuple[torch.Tensor, ...],
    shape: Shape,
    rng: random.Random,
    change: Change | None = None,
) -> Verdict:
    """Judge `out` (batch, seqlen_q, heads, head_dim_v) computed from inputs = (q, k, v).

    `change` is what the call does to its scaled scores; without it, the causal mask of the shape.
    """
    expected = (shape.batch, shape.seqlen_q, shape.num_heads_q, shape.head_dim_v)
    if tuple(out.shape) != expected:
        return Verdict(False, float("inf"), 0.0, f"shape {tuple(out.shape)}, expected {expected}")
    if not bool(torch.isfinite(out).all()):
        return Verdict(False, float("inf"), 0.0, "a value that is not finite")
    worst = Verdict(True, 0.0, 0.0, "no row")
    worst_ratio = -1.0
    for batch, head in sampled_pairs(shape, rng):
        rows = sampled_rows(shape.seqlen_q, rng)
        errors, limits = _judge(out, inputs, shape, (batch, head), rows, change)
        ratios = errors / limits
        at = int(ratios.argmax())
        if float(ratios[at]) > worst_ratio:
            worst_ratio = float(ratios[at])
            where = f"batch {batch}, head {head}, row {rows[at]}"
            worst = Verdict(worst_ratio <= 1.0, float(errors[at]), float(limits[at]), where)
    return worst


def sampled_pairs(shape: Shape, rng: random.Random) -> list[tuple[int, int]]:
    """(batch, query head) pairs: the first, the last and random ones."""
    pairs = {(0, 0), (shape.batch - 1, shape.num_heads_q - 1)}
    total = shape.batch * shape.num_heads_q
    while len(pairs) < min(PAIRS, total):
        pairs.add((rng.randrange(shape.batch), rng.randrange(shape.num_heads_q)))
    return sorted(pairs)


def sampled_rows(seqlen_q: int, rng: random.Random) -> list[int]:
    """Rows of a sequence: the ends, the edges of usual tiles and random ones."""
    edges = {0, 63, 64, 127, 128, 191, 192, seqlen_q - 1}
    rows = {row for row in edges if row < seqlen_q}
    while len(rows) < min(ROWS, seqlen_q):
        rows.add(rng.randrange(seqlen_q))
    return sorted(rows)


def _judge(
    out: torch.Tensor,
    inputs: tuple[torch.Tensor, ...],
    shape: Shape,
    pair: tuple[int, int],
    rows: list[int],
    change: Change | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Error and limit of each row, (rows,) float64 each."""
    batch, head = pair
    head_kv = head // (shape.num_heads_q // shape.num_heads_kv)
    index = torch.tensor(rows, device=out.device)
    q = inputs[0][batch, index, head]
    k, v = inputs[1][batch, :, head_kv], inputs[2][batch, :, head_kv]
    q_idx, kv_idx = index[:, None], torch.arange(shape.seqlen_k, device=out.device)[None, :]

    def changed(scores: torch.Tensor) -> torch.Tensor:
        if change is not None:
            b, h = (torch.tensor(i, device=out.device) for i in pair)
            return change(scores, b, h, q_idx, kv_idx)
        if shape.is_causal:
            last = q_idx + (shape.seqlen_k - shape.seqlen_q)
            return scores.masked_fill(kv_idx > last, float("-inf"))
        return scores

    ref = _attend(q.double(), k.double(), v.double(), changed)
    lowprec = _attend(q, k, v, changed).double()
    got = out[batch, index, head].double()
    floor = torch.finfo(out.dtype).eps / 2 * ref.abs().amax(dim=-1)
    limits = 2 * (lowprec - ref).abs().amax(dim=-1) + floor + 1e-30
    return (got - ref).abs().amax(dim=-1), limits


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    changed: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Attention of a few rows by definition, in the dtype given; no visible key gives 0."""
    scores = changed((q @ k.T) * q.shape[-1] ** -0.5)
    return torch.softmax(scores, dim=-1).nan_to_num(0.0).to(v.dtype) @ v
