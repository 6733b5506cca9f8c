"""Persistent tile scheduling: longest tile first, heads grouped so that their K and V stay in L2.

CTA c starts with tile c; the load warp takes each further tile from a counter in device memory and
hands it to the consumers through shared memory. The counter returns to zero by itself: of the
``num_tiles`` fetches that a launch makes, the one that returns the last value resets it. A launch
with a CTA for every tile needs no counter.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@dataclass(frozen=True)
class TileScheduler:
    """Maps a linear tile index to (m_block, head, batch).

    Tiles run section by section; a section is `section` consecutive (batch, head) pairs, inside it
    the last query block (the longest under a causal mask) of every head comes first.
    """

    num_m_blocks: Int32
    num_heads: Int32
    num_pairs: Int32  # batch * num_heads
    section: Int32
    counter: cute.Pointer

    @property
    def num_tiles(self):
        return self.num_m_blocks * self.num_pairs

    @cute.jit
    def coordinates(self, tile: Int32):
        """(m_block, head, batch) of a valid tile."""
        section_tiles = self.section * self.num_m_blocks
        section_idx = tile // section_tiles
        first_pair = section_idx * self.section
        heads_here = cutlass.min(self.section, self.num_pairs - first_pair)
        within = tile - section_idx * section_tiles
        m_reversed = within // heads_here
        pair = first_pair + within - m_reversed * heads_here
        batch = pair // self.num_heads
        return self.num_m_blocks - 1 - m_reversed, pair - batch * self.num_heads, batch

    @cute.jit
    def fetch(self, num_ctas: Int32) -> Int32:
        """Take the next tile; one thread of the CTA calls this once per tile it processed.

        Where every CTA has one tile there is nothing to take, and the counter is not touched.
        """
        following = self.num_tiles
        if num_ctas < self.num_tiles:
            taken = cute.arch.atomic_add(self.counter, Int32(1), sem="relaxed", scope="gpu")
            if taken == self.num_tiles - 1:
                cute.arch.atomic_exch(self.counter, Int32(0), sem="relaxed", scope="gpu")
            following = taken + num_ctas
        return following
