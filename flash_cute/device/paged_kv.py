"""Keys and values in pages: key j of a sequence is in slot j % page_size of page j // page_size.

A tile of keys is loaded in pieces of `rows` keys that lie within one page each. The lanes of the
load warp read the table together, one piece each. Entries behind the last key are never read: their
pieces get a page past the last one, which TMA fills with zeros.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32


@dataclass(frozen=True)
class PageTable:
    """Where the pages of each sequence are.

    Shapes: table: (batch, max_pages) int32
    """

    table: cute.Tensor
    page_size: Int32
    num_pages: Int32
    rows: cutlass.Constexpr[int]  # of a piece; divides the page size and the tile

    @cute.jit
    def page_of(self, batch: Int32, first_key: Int32, end_key: Int32, lane: Int32) -> Int32:
        """The page of the piece number `lane` of a tile of keys that starts at first_key."""
        key = first_key + lane * self.rows
        page = self.num_pages
        if key < end_key:
            page = self.table[batch, key // self.page_size]
        return page

    @cute.jit
    def piece(self, first_key: Int32, index: cutlass.Constexpr[int]) -> Int32:
        """Which piece of its page the piece number `index` of a tile is."""
        key = first_key + index * self.rows
        return key % self.page_size // self.rows
