"""Copies of Q, K and V into shared memory, by cp.async of all threads of the CTA.

A pass of the threads covers `row_step` rows of one panel: neighbouring threads copy neighbouring
chunks of a row. Rows that hold no query or key, and columns past the end of the head dimension,
become zeros without being read.

Keys in pages are found one by one: before a block is copied each lane looks up one of the rows that
its warp copies, and the copying threads ask it.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, const_expr

from flash_cute.device.primitives import copy_or_zero, fresh_thread_idx
from flash_cute.device.seqlen import SeqlenInfo
from flash_cute.device.tile_scheduler import Tile
from flash_cute.sm80.config import ELEMENT_BYTES, ForwardConfigSm80
from flash_cute.sm80.params import ForwardParams
from flash_cute.sm80.tiles import CHUNK, TileLayout
from flash_cute.specialization import ForwardSpecialization

LANES = 32


@dataclass(frozen=True)
class Source:
    """Keys or values of one head, as one thread copies them.

    Shapes: gX: (rows, dim, pages) in device memory, from the thread's first column on; without
            pages also from its first row on
    """

    gX: cute.Tensor
    sX: cute.Pointer  # the ring in shared memory, from the thread's first chunk on
    row: Int32  # the thread's first one of a block
    has_last: Boolean  # whether its columns of the last panel are there


def moved(pointer: cute.Pointer, rows: Int32 | int, row_stride: Int64) -> cute.Pointer:
    """A pointer moved on by rows.

    Inline PTX on purpose: the compiler otherwise keeps a pointer for each pass over a block up to
    date in the loop over the blocks, which takes 32 registers.
    """
    address = cute.arch.inline_ptx(
        "mad.lo.s64 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Int64],
        read_only_args=[Int64(rows), Int64(row_stride) * ELEMENT_BYTES, pointer.toint()],
    )
    alignment = CHUNK * ELEMENT_BYTES
    return cute.make_ptr(pointer.dtype, address, pointer.memspace, assumed_align=alignment)


class Loader:
    """The copies of one specialization with one config."""

    def __init__(self, spec: ForwardSpecialization, config: ForwardConfigSm80):
        self.spec, self.config = spec, config
        self.q_layout = TileLayout(config.tile_m, spec.tile_d)
        self.k_layout = TileLayout(config.tile_n, spec.tile_d)
        self.v_layout = TileLayout(config.tile_n, spec.tile_dv)

    def row_step(self, layout: TileLayout) -> int:
        """Rows of a pass."""
        return self.config.num_threads // layout.chunks

    def num_passes(self, layout: TileLayout) -> int:
        """Passes over a tile; the last one may reach past it."""
        return -(-layout.rows // self.row_step(layout))

    def start(self, layout: TileLayout):
        """(row, chunk) that this thread copies first."""
        thread = cute.arch.thread_idx()[0]
        row = thread // layout.chunks
        return row, thread - row * layout.chunks

    def has_last(self, layout: TileLayout, chunk: Int32, mX: cute.Tensor) -> Boolean:
        """Whether a thread's columns of the last panel are in a tensor; those before always are."""
        return layout.cols - layout.panel + chunk * CHUNK < cute.size(mX, mode=[1])

    def source(self, layout: TileLayout, mX: cute.Tensor, sX: cute.Pointer, origin) -> Source:
        """The place of this thread in one head of keys or values.

        Shapes: mX: (rows, dim, heads, batch or pages); origin: (first row, head, batch)
        """
        first_row, head, batch = origin
        row, chunk = self.start(layout)
        gX = mX[None, None, head, None]
        place = (first_row + row, chunk * CHUNK, batch)
        if self.spec.gathers_keys:
            place = (0, chunk * CHUNK, 0)
        has_last = self.has_last(layout, chunk, mX)
        if not self.config.shares_rows:
            sX = sX + layout.offset(row, chunk)
        return Source(cute.domain_offset(place, gX), sX, row, has_last)

    @cute.jit
    def copy_row(self, layout: cutlass.Constexpr, slot, source, is_there, has_last):
        """Start copying a thread's chunks of one row, one in each panel."""
        last = layout.cols - layout.panel
        for col in cutlass.range_constexpr(0, layout.cols, layout.panel):
            is_wanted = is_there & has_last if const_expr(col == last) else is_there
            copy_or_zero((slot + col * layout.rows).toint(), (source + col).toint(), is_wanted)

    @cute.jit
    def load_queries(self, p: ForwardParams, sQ: cute.Pointer, tile: Tile, seqlen: SeqlenInfo):
        """Start copying the queries of every head of a tile."""
        layout = self.q_layout
        row, chunk = self.start(layout)
        slot = sQ + layout.offset(row, chunk)
        has_last = self.has_last(layout, chunk, p.mQ)
        batch = 0 if const_expr(self.spec.is_packed_q) else tile.batch
        for i in cutlass.range_constexpr(self.num_passes(layout)):
            first_row = i * self.row_step(layout)
            rows = p.packing.rows(tile, row + first_row, 1, seqlen.seqlen_q)
            query = rows.q_idx[0]
            place = (seqlen.offset_q + query, chunk * CHUNK)
            source = cute.domain_offset(place, p.mQ[None, None, rows.heads[0], batch]).iterator
            is_there = query < seqlen.seqlen_q
            self.copy_row(layout, slot + first_row * layout.panel, source, is_there, has_last)

    @cute.jit
    def load_block(
        self,
        layout: cutlass.Constexpr,
        source: Source,
        block: Int32,
        stage: Int32,
        end_key: Int32 | None,
        places: tuple,
    ):
        """Start copying one block of keys or values.

        Args:
            end_key: keys from it on are none; None where the block has none of them.
            places: (of the rows of the block, as `look_up`), empty without pages.
        """
        row_step = self.row_step(layout)
        first_key = block * layout.rows
        row_stride = source.gX.layout.stride[0]
        pointer = source.gX.iterator
        offset = Int64(0)
        if const_expr(self.spec.gathers_keys):
            offset = self.offset_of(source, places[0])
        else:
            pointer = moved(pointer, first_key, row_stride)
        place = source.sX
        if const_expr(self.config.shares_rows):
            thread = fresh_thread_idx()
            r = thread >> (3 if layout.chunks == 8 else 2)
            place = place + layout.offset(r, thread & layout.chunks - 1)
        slot = place + stage * layout.size
        for i in cutlass.range_constexpr(self.num_passes(layout)):
            is_there, row = Boolean(True), pointer
            if const_expr(self.spec.gathers_keys):
                of_row = self.ask(layout, offset, i)
                is_there = of_row >= 0
                row = cute.make_ptr(
                    pointer.dtype,
                    pointer.toint() + of_row,
                    pointer.memspace,
                    assumed_align=CHUNK * ELEMENT_BYTES,
                )
            elif const_expr(end_key is not None):
                is_there = first_key + source.row + i * row_step < end_key
            to = slot + i * row_step * layout.panel
            if const_expr((i + 1) * row_step <= layout.rows):
                self.copy_row(layout, to, row, is_there, source.has_last)
            elif source.row + i * row_step < layout.rows:
                self.copy_row(layout, to, row, is_there, source.has_last)
            if const_expr(not self.spec.gathers_keys):
                pointer = moved(pointer, row_step, row_stride)

    # -- pages

    def look_up(self, p: ForwardParams, layout: TileLayout, table_row, block: Int32, seqlen):
        """(page, slot) of the rows of a block that a warp copies, one in each lane."""
        per_pass = LANES // layout.chunks
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        index = lane // per_pass  # of the pass
        row = index * self.row_step(layout) + warp * per_pass + lane - index * per_pass
        key = cutlass.select_(row < layout.rows, block * layout.rows + row, Int32(-1))
        return p.pages.slot_of(table_row, key, seqlen)

    def offset_of(self, source: Source, place: tuple) -> Int64:
        """Bytes from the source to the row that a lane has looked up; -1 where none is."""
        (page, slot), strides = place, source.gX.layout.stride
        offset = Int64(page) * (Int64(strides[2]) * ELEMENT_BYTES)
        offset += Int64(slot) * (Int64(strides[0]) * ELEMENT_BYTES)
        return cutlass.select_(page >= 0, offset, Int64(-1))

    def ask(self, layout: TileLayout, offset: Int64, index: int) -> Int64:
        """`offset_of` the row that this thread copies in a pass, as another lane knows it."""
        lane = index * (LANES // layout.chunks) + cute.arch.lane_idx() // layout.chunks
        low, high = Int32(offset), Int32(offset >> 32)
        low, high = cute.arch.shuffle_sync(low, lane), cute.arch.shuffle_sync(high, lane)
        return Int64(high) << 32 | Int64(Uint32(low))
