"""Into how many parts the keys of a call are split, as far as the host can tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flash_cute.errors import UnsupportedProblem, refuse
from flash_cute.problem import AttentionProblem
from flash_cute.specialization import ForwardSpecialization
from flash_cute.split_plan import SplitPlan
from flash_cute.target import Target

LEAST_KEYS = 256  # that are worth a part of their own
WELL_FILLED = 0.8  # of the slots: then nothing is gained by splitting
# Shares of the time of a step of decoding, as an H200 takes it (DECISIONS.md 47): of what stays
# idle, with one CTA on a multiprocessor, with several, and after a first wave; of any merge, and of
# each further part.
IDLE, IDLE_PAIRED, IDLE_LATER = 0.5, 0.75, 0.35
MERGE, PART = 0.03, 0.013
MAX_SPLITS = 256
WORKSPACE_BYTES = 2**26  # for partial results, where the package chooses the number of parts
UNBOUNDED = 2**30  # blocks


@dataclass(frozen=True)
class Splits:
    """The parts of the keys.

    Units: most: parts of a sequence at most, for each of which there is a workspace; blocks: blocks
           of keys of a part, 0 for parts of equal numbers of blocks
    """

    most: int = 1
    blocks: int = 0
    is_counted: bool = False  # each sequence has a number of its own, counted on the device

    @property
    def is_split(self) -> bool:
        """Whether a kernel leaves partial results; one part may be all there is of a sequence."""
        return self.most > 1 or self.blocks > 0 or self.is_counted


def choose(p: AttentionProblem, spec: ForwardSpecialization, config: Any, target: Target) -> Splits:
    """Choose the parts of a problem for a kernel that splits keys.

    Where lengths are known to the device alone, it counts the parts. Hints decide nothing.
    Raises: UnsupportedProblem when a block mask's lists would have to be split; InvalidProblem for
            parts so small that there are too many.
    """
    if p.has_block_mask:
        _check_unsplit(p)
        return Splits()
    if p.split_size:
        return _of_fixed_size(p, config.tile_n)
    if p.num_splits > 0:
        if p.has_scheduler_metadata:
            return Splits(p.num_splits, is_counted=True)
        return Splits(p.num_splits)
    least, blocks = -(-LEAST_KEYS // config.tile_n), -(-p.capacity // config.tile_n)
    packs, tiles = heads_of(p, spec), tiles_of(p, spec, config)
    slots = filling(p, spec, config, target).slots
    is_full = tiles >= WELL_FILLED * slots
    if not p.has_scheduler_metadata and blocks <= least:
        return Splits()
    # One sequence alone is divided evenly whatever its length: nothing has to be counted.
    is_counted = p.has_ragged_lengths and p.batch > 1
    if not (is_counted or p.has_scheduler_metadata):
        count = min(slots // max(tiles, 1), blocks // least, MAX_SPLITS)
        return Splits() if is_full or count <= 1 else Splits(count)
    # A sequence longer than the others is split also where the tiles fill everything.
    if is_full and not is_decode(p, spec, config) and not p.has_scheduler_metadata:
        return Splits()
    affordable = WORKSPACE_BYTES // max(1, _part_bytes(p))
    most = min(-(-blocks // least), -(-2 * slots // packs), affordable, MAX_SPLITS)
    if most <= 1 and not p.has_scheduler_metadata:
        return Splits()
    return Splits(max(most, 1), is_counted=True)


def _of_fixed_size(p: AttentionProblem, tile_n: int) -> Splits:
    """Parts of so many keys, whatever else there is in the batch."""
    size = max(1, p.split_size // tile_n)
    most = max(1, -(-p.capacity // (size * tile_n)))
    if most > MAX_SPLITS:
        least = -(-p.capacity // (MAX_SPLITS * tile_n)) * tile_n
        why = f"{p.capacity} keys may come to {MAX_SPLITS} parts"
        refuse("split_size", p.split_size, f"at least {least}", why)
    return Splits(most, size, is_counted=p.has_ragged_lengths)


def _check_unsplit(p: AttentionProblem) -> None:
    given = {
        f"num_splits is {p.num_splits}": p.num_splits > 1,
        f"split_size is {p.split_size}": p.split_size > 0,
        "scheduler_metadata is given": p.has_scheduler_metadata,
    }
    for what, is_given in given.items():
        if is_given:
            raise UnsupportedProblem(
                f"{what} with a block mask, expected no split: lists of blocks are not split"
            )


def _part_bytes(p: AttentionProblem) -> int:
    """Float32 results and their log-sum-exp of one part of all keys."""
    return 4 * p.batch * p.queries * p.num_heads_q * (p.head_dim_v + 1)


def workspace_bytes(
    p: AttentionProblem, spec: ForwardSpecialization, config: Any, target: Target
) -> int:
    """Memory for the partial results of a problem whose keys are split, and for their counts."""
    splits = choose(p, spec, config, target)
    return splits.most * _part_bytes(p) + 4 * p.batch * splits.is_counted


def heads_of(p: AttentionProblem, spec: ForwardSpecialization) -> int:
    """Tiles of each block of queries."""
    return p.num_heads_kv * -(-p.group // spec.pack_heads)


def tiles_of(p: AttentionProblem, spec: ForwardSpecialization, config: Any) -> int:
    """Tiles of a problem whose keys are not split."""
    return heads_of(p, spec) * p.batch * -(-p.queries // config.positions(spec))


@dataclass(frozen=True)
class Filling:
    """How parts of the keys are to fill the GPU.

    Units: slots: tiles that the parts come to together, at most; ctas: those that run at a time
    """

    slots: int
    ctas: int

    def cost(self, tiles: int, num_sms: int) -> float:
        """The time, over that of perfect balance and no merge, if all sequences are as long.

        Args:
            tiles: without splits.
        """
        parts = max(1, self.slots // tiles)
        waves = -(-parts * tiles // self.ctas)
        idle = 1 - parts * tiles / (waves * self.ctas)
        weight = IDLE_LATER if waves > 1 else IDLE_PAIRED if self.ctas > num_sms else IDLE
        return 1 + weight * idle + (MERGE + PART * (parts - 1) if parts > 1 else 0)


def filling(
    p: AttentionProblem, spec: ForwardSpecialization, config: Any, target: Target
) -> Filling:
    """Choose how many tiles the parts of the keys are to come to.

    As few as keep memory busy, since the merge takes longer the more there are; where that would
    leave much of the GPU idle so many that they follow one another. The room for keys decides
    nothing: a plan may be made with another.
    """
    tiles, num_sms = max(1, tiles_of(p, spec, config)), target.num_sms
    few, all_ctas = num_sms * config.ctas_to_saturate(spec), num_sms * config.ctas_per_sm
    choices = [Filling(few, few), Filling(all_ctas, all_ctas)]
    if is_decode(p, spec, config):
        choices.append(Filling(2 * all_ctas, all_ctas))
    choices = [choice for choice in choices if choice.slots >= tiles]
    if not choices:
        return Filling(all_ctas, all_ctas)
    return min(choices, key=lambda choice: choice.cost(tiles, num_sms))


def is_decode(p: AttentionProblem, spec: ForwardSpecialization, config: Any) -> bool:
    """Whether all queries of a sequence are in one tile."""
    return p.queries <= config.positions(spec)


def split_plan(
    p: AttentionProblem,
    spec: ForwardSpecialization,
    config: Any,
    target: Target,
    splits: Splits,
) -> SplitPlan:
    """What the device counts the parts of a problem from."""
    positions = config.positions(spec)
    return SplitPlan(
        batch=p.batch,
        mean_q=p.queries,
        positions=positions,
        tile_n=config.tile_n,
        heads=heads_of(p, spec),
        visible_blocks=_visible_blocks(p, positions, config.tile_n),
        slots=filling(p, spec, config, target).slots,
        split_blocks=splits.blocks,
        most=splits.most,
    )


def _visible_blocks(p: AttentionProblem, positions: int, tile_n: int) -> int:
    """Blocks of keys that the queries of a tile see at most."""
    blocks, left, right = UNBOUNDED, p.visible_left, p.visible_right
    if left is not None and right is not None:
        blocks = -(-max(left + right + positions, 0) // tile_n) + 1
    if p.attention_chunk:
        blocks = min(blocks, -(-(positions + 2 * p.attention_chunk) // tile_n) + 1)
    return min(max(blocks, 1), UNBOUNDED)
