"""Persistent tile scheduling: longest tile first, heads grouped so that their K and V stay in L2.

CTA c starts with tile c; its load warp takes each further tile from a counter in device memory and
tells the consumers through shared memory. The counter returns to zero by itself: of the fetches
that a launch makes, one for each tile, the one that returns the last value resets it. A launch
with a CTA for every tile needs no counter.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from flash_cute.device.primitives import prefetch
from flash_cute.device.seqlen import SequenceTable

LANES = 32


@dataclass(frozen=True)
class Tile:
    """One unit of work: queries of one head, or pack of heads, of one sequence.

    m_block -1: no work is left.
    """

    m_block: Int32
    head: Int32
    batch: Int32
    split: Int32  # part of its keys; 0 where they are not split
    num_splits: Int32  # of its sequence


@dataclass(frozen=True)
class Cursor:
    """How far a load warp has walked through uneven sequences: tiles before sequence `batch`."""

    batch: Int32
    tiles_before: Int32


@dataclass(frozen=True)
class TileScheduler:
    """Maps a linear tile index to (m_block, head, batch).

    Even sequences, which all have as many tiles: tiles run section by section; a section is
    `section` consecutive (batch, head) pairs, inside it the last query block (the longest under a
    causal mask) of every head comes first. Uneven ones (packed queries, or keys split into numbers
    of parts that differ): sequence by sequence, inside it as in a section; the load warp finds the
    sequence by a scan over them, so that nothing of them has to be known at launch.
    """

    num_m_blocks: Int32  # of a padded sequence
    num_heads: Int32  # of a sequence: packs of heads where they are packed
    num_splits: Int32  # at most, where split_counts says how many each sequence has
    split_counts: cute.Tensor  # (batch,) int32 or None
    section: Int32
    num_ctas: Int32
    counter: cute.Pointer
    sequences: SequenceTable
    rows_per_query: Int32 | None  # one where it is None
    tile_m: cutlass.Constexpr[int]  # rows of a tile
    is_even: cutlass.Constexpr[bool]
    is_split: cutlass.Constexpr[bool]

    def prefetch(self):
        """Start to bring near what the first tile is found from."""
        if not self.is_even:
            lane = cute.arch.lane_idx()
            self.sequences.prefetch(lane)
            if self.split_counts is not None:
                prefetch(self.split_counts, cutlass.min(lane, self.sequences.batch - 1))

    @cute.jit
    def locate(self, tile_idx: Int32, cursor: Cursor):
        """The tile of a linear index, and the cursor to start the next search from."""
        if const_expr(self.is_even):
            tile = self.locate_even(tile_idx)
        else:
            tile, cursor = self.locate_uneven(tile_idx, cursor)
        return tile, cursor

    @cute.jit
    def locate_even(self, tile_idx: Int32) -> Tile:
        """Arithmetic alone: every sequence has num_m_blocks blocks."""
        num_heads = self.heads_of_even()
        num_pairs = self.sequences.batch * num_heads
        section_tiles = self.section * self.num_m_blocks
        section_idx = tile_idx // section_tiles
        first_pair = section_idx * self.section
        heads_here = cutlass.min(self.section, num_pairs - first_pair)
        within = tile_idx - section_idx * section_tiles
        m_reversed = within // heads_here
        pair = first_pair + within - m_reversed * heads_here
        batch = pair // num_heads
        is_valid = tile_idx < self.num_m_blocks * num_pairs
        m_block = cutlass.select_(is_valid, self.num_m_blocks - 1 - m_reversed, Int32(-1))
        return self.tile(m_block, pair - batch * num_heads, batch, self.num_splits)

    @cute.jit
    def heads_of_even(self) -> Int32:
        """Tiles of each query block of a sequence, where all have as many."""
        num_heads = self.num_heads
        if const_expr(self.is_split):
            num_heads *= self.num_splits
        return num_heads

    @cute.jit
    def locate_uneven(self, tile_idx: Int32, cursor: Cursor):
        """Warp-wide scan: each lane takes one sequence, 32 at a time, from the cursor on."""
        lane = cute.arch.lane_idx()
        first, before = cursor.batch, cursor.tiles_before
        inclusive = self.tiles_up_to(first, lane)
        here = cute.arch.shuffle_sync(inclusive, LANES - 1)
        while first < self.sequences.batch and tile_idx >= before + here:
            first += LANES
            before += here
            inclusive = self.tiles_up_to(first, lane)
            here = cute.arch.shuffle_sync(inclusive, LANES - 1)
        is_past = cute.arch.vote_ballot_sync(tile_idx >= before + inclusive)
        index = cute.arch.popc(is_past)  # lanes whose sequences end before the tile
        batch = first + index
        preceding = cute.arch.shuffle_sync(inclusive, cutlass.max(index - 1, 0))
        preceding = cutlass.select_(index == 0, Int32(0), preceding)
        within = tile_idx - before - preceding
        num_m_blocks = self.m_blocks_of(batch)
        num_splits = self.splits_of(batch)
        num_heads = self.num_heads
        if const_expr(self.is_split):
            num_heads *= num_splits
        m_reversed = within // num_heads
        is_valid = index < LANES and batch < self.sequences.batch
        m_block = cutlass.select_(is_valid, num_m_blocks - 1 - m_reversed, Int32(-1))
        tile = self.tile(m_block, within - m_reversed * num_heads, batch, num_splits)
        return tile, Cursor(first, before)

    @cute.jit
    def tile(self, m_block: Int32, head: Int32, batch: Int32, num_splits: Int32) -> Tile:
        """A tile; the splits of a head are neighbours among the heads."""
        split = Int32(0)
        if const_expr(self.is_split):
            pair = head
            head = pair // num_splits
            split = pair - head * num_splits
        return Tile(m_block, head, batch, split, num_splits)

    @cute.jit
    def splits_of(self, batch: Int32) -> Int32:
        """Parts of the keys of a sequence: what the table says, as far as there is room for."""
        count = Int32(1)
        if const_expr(self.is_split):
            count = self.num_splits
        if const_expr(self.split_counts is not None):
            if batch < self.sequences.batch:
                count = cutlass.max(cutlass.min(self.split_counts[batch], count), 1)
        return count

    @cute.jit
    def tiles_up_to(self, first: Int32, lane: Int32) -> Int32:
        """Tiles of the sequences from `first` to `first` + lane."""
        total = self.m_blocks_of(first + lane) * self.num_heads
        if const_expr(self.is_split):
            total *= self.splits_of(first + lane)
        for step in (1, 2, 4, 8, 16):
            other = cute.arch.shuffle_sync_up(total, step)
            total = cutlass.select_(lane >= step, total + other, total)
        return total

    @cute.jit
    def m_blocks_of(self, batch: Int32) -> Int32:
        """Query blocks of a sequence; 0 past the last one."""
        rows = self.sequences.length_q(batch)
        if const_expr(self.rows_per_query is not None):
            rows *= self.rows_per_query
        return (rows + self.tile_m - 1) // self.tile_m

    @cute.jit
    def fetch(self) -> Int32:
        """Take the index of the next tile; one thread of the CTA calls this once for every tile."""
        following = Int32(0)
        if const_expr(not self.is_even):
            following = self.take()
        else:
            num_tiles = self.num_m_blocks * self.sequences.batch * self.heads_of_even()
            following = num_tiles
            if self.num_ctas < num_tiles:
                following = self.take()
                self.reset_after(following, num_tiles)
        return following

    @cute.jit
    def take(self) -> Int32:
        """Advance the counter."""
        taken = cute.arch.atomic_add(self.counter, Int32(1), sem="relaxed", scope="gpu")
        return taken + self.num_ctas

    @cute.jit
    def reset_after(self, taken: Int32, num_tiles: Int32):
        """Put the counter back to zero if `taken` was the last fetch of the launch."""
        if taken - self.num_ctas == num_tiles - 1:
            cute.arch.atomic_exch(self.counter, Int32(0), sem="relaxed", scope="gpu")

    @cute.jit
    def close(self, tile_idx: Int32, cursor: Cursor):
        """End of a load warp's work: the search for `tile_idx` has found the end of all tiles.

        With uneven sequences only now is the number of tiles known, and whether this CTA's last
        fetch was the launch's.
        """
        if const_expr(not self.is_even):
            if cute.arch.lane_idx() == 0 and tile_idx >= self.num_ctas:
                self.reset_after(tile_idx, cursor.tiles_before)
