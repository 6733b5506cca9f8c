"""Keys and values in pages: row j of a sequence is in slot j % page_size of page j // page_size.

A tile of keys is loaded in pieces of `rows` keys that lie within one page each. The lanes of the
load warp read the table together, one piece each. Entries behind the last key are never read: their
pieces get a page past the last one, which TMA fills with zeros.

Where pages do not consist of such pieces, or a left padding shifts them, keys are gathered one by
one: a lane finds the place of one key, (page, slot) in 64 bits, or -1 where there is none.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from flash_cute.device.seqlen import SeqlenInfo


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
        """The page of the piece number `lane` of a tile of keys that starts at first_key.

        Where no keys of the sequence are it is one that does not exist.
        """
        key = first_key + lane * self.rows
        page = self.num_pages
        if key >= 0 and key < end_key:
            page = self.table[batch, key // self.page_size]
        return page

    @cute.jit
    def piece(self, first_key: Int32, index: cutlass.Constexpr[int]) -> Int32:
        """Which piece of its page the piece number `index` of a tile is."""
        key = first_key + index * self.rows
        return key % self.page_size // self.rows

    @cute.jit
    def place_of(self, row: Int32, key: Int32, seqlen: SeqlenInfo) -> Int64:
        """Where a key of the sequence in a row of the table lies; -1 for one that is not there."""
        place = Int64(-1)
        if key >= 0 and key < seqlen.seqlen_k:
            position = seqlen.offset_k + key
            column = position // self.page_size
            page = self.table[row, column]
            place = Int64(page) << 32 | Int64(position - column * self.page_size)
        return place

    @cute.jit
    def slot_of(self, row: Int32, key: Int32, seqlen: SeqlenInfo):
        """`place_of` as (page, slot), page -1 for a key that is not there.

        Contract: nothing here waits for the page: what uses it should come much later.
        """
        is_there = (key >= 0) & (key < seqlen.seqlen_k)
        position = Uint32(cutlass.select_(is_there, seqlen.offset_k + key, Int32(0)))
        column = position // Uint32(self.page_size)
        slot = position - column * Uint32(self.page_size)
        page = Int32(-1)
        if is_there:
            page = self.table[row, Int32(column)]
        return page, Int32(slot)


def unpack_place(place: Int64):
    """(page, slot) of a place; the page is -1 where the place is."""
    return Int32(place >> 32), Int32(place)
