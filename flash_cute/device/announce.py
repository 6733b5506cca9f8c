"""How a load warp tells the other warps of its CTA which tile comes next.

A ring of `TILE_STAGES` slots in shared memory; the kernel says who reads it, by the arrive counts
of its `tile` pipeline. It is `tiles` of what a kernel calls its shared memory.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from flash_cute.device.seqlen import SeqlenInfo
from flash_cute.device.tile_scheduler import Tile
from flash_cute.specialization import ForwardSpecialization

TILE_STAGES = 2
TILE_FIELDS = 8  # 32-bit words of a tile announcement: coordinates, lengths, a split
SPLIT_BITS = 16  # of a part's number; the number of parts is above
SPARSE_TILE_FIELDS = 12  # and the counts of a block mask


class Announcement(NamedTuple):
    """A tile as the load warp announces it."""

    tile: Tile
    seqlen: SeqlenInfo
    num_partial: Int32  # tiles of keys that a block mask lists; 0 without one
    num_full: Int32


class TileExchange:
    """Writes and reads announcements; the kernels add their own shared memory and pipelines."""

    def __init__(self, spec: ForwardSpecialization, config: Any, dtype: Any):
        self.spec, self.config, self.dtype = spec, config, dtype
        self.tile_fields = SPARSE_TILE_FIELDS if spec.has_block_mask else TILE_FIELDS

    @cute.jit
    def announce(self, smem, pipes, state, tile: Tile, seqlen, counts):
        """Tell the consumers the next tile; returns the advanced state."""
        pipes.tile.producer_acquire(state)
        if cute.arch.lane_idx() == 0:
            slot = smem.tiles[None, state.index]
            fields = (tile.m_block, tile.head, tile.batch)
            fields += (seqlen.seqlen_q, seqlen.seqlen_k, seqlen.offset_q, seqlen.offset_k)
            fields += tuple(counts)
            if const_expr(self.spec.is_split):
                fields += (tile.split | tile.num_splits << SPLIT_BITS,)
            for i in cutlass.range_constexpr(len(fields)):
                slot[i] = fields[i]
            pipes.tile.producer_commit(state)
        state.advance()
        return state

    @cute.jit
    def receive(self, smem, slot: Int32) -> Announcement:
        """What `announce` wrote into a slot of the ring."""
        split, num_splits = Int32(0), Int32(1)
        if const_expr(self.spec.is_split):
            both = smem.tiles[7, slot]
            split, num_splits = both & (1 << SPLIT_BITS) - 1, both >> SPLIT_BITS
        coordinates = [smem.tiles[i, slot] for i in range(3)]
        tile = Tile(*coordinates, split, num_splits)
        seqlen = SeqlenInfo(*[smem.tiles[i, slot] for i in range(3, 7)])
        num_partial, num_full = Int32(0), Int32(0)
        if const_expr(self.spec.has_block_mask):
            num_partial, num_full = smem.tiles[7, slot], smem.tiles[8, slot]
        return Announcement(tile, seqlen, num_partial, num_full)
