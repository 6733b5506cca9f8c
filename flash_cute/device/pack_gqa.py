"""Which query and which head each row of a tile holds.

`HeadPacking`: a tile of tile_m rows holds `heads` query heads that share their keys, `positions`
queries of each, one head after the other: few queries then fill a tile together, and their keys are
loaded once. The heads of one key/value head make up `packs`, of `heads` heads, the last one of what
is left. With one head a tile nothing is packed, and a pack is a query head.

Positions are a multiple of 8, so that the row groups of an mma thread have one head each. Rows
behind the last head of a pack get the query one past the end: nothing is stored for them.

`HeadsFastest`: the rows of a sequence are its (query, head) pairs, heads as the fast index, and a
tile is tile_m of them. No row is wasted but at the end, and a box of TMA fits only some ratios.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from flash_cute.device.tile_scheduler import Tile

ROW_STEP = 8  # rows between the two of an mma thread


class Rows(NamedTuple):
    """The rows of one thread, `ROW_STEP` apart in its tile."""

    q_idx: tuple[Int32, ...]  # within the sequence; past its end where a row holds nothing
    heads: tuple[Int32, ...]  # query heads, valid ones in any case


@dataclass(frozen=True)
class HeadPacking:
    """How the query heads of a problem are packed; see the module docstring."""

    group: Int32  # query heads of a key/value head
    packs: Int32  # tiles that they are spread over
    heads: cutlass.Constexpr[int]
    positions: cutlass.Constexpr[int]
    are_heads_neighbours: cutlass.Constexpr[bool] = False  # else the queries of a head are

    def queries(self, tile: Tile):
        """(first query, number of queries) of a tile, of which the last may not exist."""
        return tile.m_block * self.positions, self.positions

    def kv_head(self, tile: Tile) -> Int32:
        """The key/value head of a tile."""
        return tile.head // self.packs

    @cute.jit
    def head(self, tile: Tile, index: Int32):
        """(query head, whether it exists) of the tile's head number `index`."""
        head, exists = tile.head, True
        if const_expr(self.heads > 1):
            kv_head = self.kv_head(tile)
            within = (tile.head - kv_head * self.packs) * self.heads + index
            exists = (index < self.heads) & (within < self.group)
            head = kv_head * self.group + cutlass.min(within, self.group - 1)
        return head, exists

    def place(self, row: Int32):
        """(number of the head, number of the query) of a row among those of its tile."""
        if self.are_heads_neighbours:
            position = row // self.heads
            return row - position * self.heads, position
        index = row // self.positions
        return index, row - index * self.positions

    @cute.jit
    def rows(self, tile: Tile, first_row: Int32, num_rows: cutlass.Constexpr[int], end: Int32):
        """The rows of a thread, from `first_row` of the tile on; `end` is one past the queries."""
        q_idx, heads = [], []
        for r in cutlass.range_constexpr(num_rows):
            row = first_row + ROW_STEP * r
            position, head = row, tile.head
            if const_expr(self.heads > 1):
                index, position = self.place(row)
                head, exists = self.head(tile, index)
                if const_expr(self.are_heads_neighbours):
                    exists = exists & (position < self.positions)
            query = tile.m_block * self.positions + position
            if const_expr(self.heads > 1):
                query = cutlass.select_(exists, query, end)
            q_idx.append(query)
            heads.append(head)
        return Rows(tuple(q_idx), tuple(heads))


@dataclass(frozen=True)
class HeadsFastest:
    """Row r of a sequence is query r // width and head r % width of its pack."""

    packs: Int32  # of the query heads of a key/value head
    width: Int32  # heads of a pack
    tile_m: cutlass.Constexpr[int]

    @cute.jit
    def queries(self, tile: Tile):
        """(first query, number of queries) of a tile, of which the last may not exist."""
        first_row = tile.m_block * self.tile_m
        first = first_row // self.width
        return first, (first_row + self.tile_m - 1) // self.width - first + 1

    def kv_head(self, tile: Tile) -> Int32:
        """The key/value head of a tile."""
        return tile.head // self.packs

    @cute.jit
    def row(self, tile: Tile, index: Int32):
        """(query, query head) of a row of a tile; the query is past the end where none is."""
        row = tile.m_block * self.tile_m + index
        query = row // self.width
        return query, tile.head * self.width + row - query * self.width

    @cute.jit
    def rows(self, tile: Tile, first_row: Int32, num_rows: cutlass.Constexpr[int], end: Int32):
        """The rows of a thread, from `first_row` of the tile on."""
        q_idx, heads = [], []
        for r in cutlass.range_constexpr(num_rows):
            query, head = self.row(tile, first_row + ROW_STEP * r)
            q_idx.append(query)
            heads.append(head)
        return Rows(tuple(q_idx), tuple(heads))
