"""Tiles of 16-bit elements in shared memory: where cp.async writes and what ldmatrix reads.

A tile of (rows, cols) lies in panels of 64 columns (32 where 64 does not divide cols), one after
the other, row by row. The chunks of 16 bytes in a row of a panel are permuted by an XOR with bits
of the row, so that the eight rows of an 8 x 8 matrix lie in different banks.

The XOR touches only bits that a multiple of 16 rows leaves alone, and the two chunks of an mma's
depth differ in the lowest of them: every matrix of a tile is an XOR and an addition of constants
away from one address of the lane. Tiles begin at multiples of TILE_ALIGNMENT bytes.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

CHUNK = 8  # elements, 16 bytes
TILE_ALIGNMENT = 1024


@dataclass(frozen=True)
class TileLayout:
    """Where the chunks of a tile are: compile-time numbers only."""

    rows: int
    cols: int

    @property
    def panel(self) -> int:
        """Columns of a panel."""
        return 64 if self.cols % 64 == 0 else 32

    @property
    def chunks(self) -> int:
        """Chunks in a row of a panel."""
        return self.panel // CHUNK

    @property
    def size(self) -> int:
        """Elements of the tile."""
        return self.rows * self.cols

    def offset(self, row: Int32, chunk: Int32) -> Int32:
        """Where a chunk of the first panel begins."""
        swizzle = row & 7 if self.panel == 64 else row >> 1 & 3
        return row * self.panel + (chunk ^ swizzle) * CHUNK

    def places(self, lane: Int32) -> list:
        """Addresses of the matrices of a panel's first 16 rows: one for each two chunks."""
        return [moved_chunks(lane, chunk) for chunk in range(0, self.chunks, 2)]

    def matrices(self, places: list, rows: int, chunks: int):
        """(address, constant to add to it) of matrices: multiples of 16 rows, two chunks on."""
        panel, within = chunks // self.chunks, chunks % self.chunks
        return places[within // 2], 2 * (panel * self.rows + rows) * self.panel

    def lane_of_rows(self, lane: Int32) -> Int32:
        """A lane's offset for four matrices that are A of an mma, or by transposition B of two.

        Rows 0 to 7 and 8 to 15 of the first chunk, then both of the second one.
        """
        return self.offset(lane & 15, lane >> 4)

    def lane_of_columns(self, lane: Int32) -> Int32:
        """A lane's offset for four matrices that are B of two mma, whose columns are rows here.

        Both chunks of rows 0 to 7, then both of rows 8 to 15.
        """
        return self.offset(lane & 7 | (lane & 16) >> 1, lane >> 3 & 1)


def moved_chunks(address: Int32, chunks: int) -> Int32:
    """The address of a chunk of a panel's row, from that of the row's first one.

    Inline PTX on purpose: as long as nobody asks, only `address` occupies a register.
    """
    return cute.arch.inline_ptx(
        f"xor.b32 {{$w0}}, {{$r0}}, {2 * chunks * CHUNK};",
        write_only_types=[Int32],
        read_only_args=[address],
    )


def store_word(address: Int32, offset: int, word: Int32):
    """Write 4 bytes of shared memory; inline PTX as in `load_matrices`."""
    cute.arch.inline_ptx(
        f"st.shared.b32 [{{$r0}}+{offset}], {{$r1}};", read_only_args=[address, word]
    )


def load_matrices(address: Int32, offset: int, target: cute.Tensor, is_transposed: bool):
    """Load four 8 x 8 matrices, one row from each lane's address: eight elements for each lane.

    Inline PTX on purpose: the constant is in the instruction. The compiler otherwise computes the
    sums before the loop and keeps them, dozens of registers.
    """
    kind = ".trans" if is_transposed else ""
    loaded = cute.arch.inline_ptx(
        f"ldmatrix.sync.aligned.m8n8.x4{kind}.shared.b16 "
        f"{{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}+{offset}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )
    words = cute.recast_tensor(target, Int32)
    for i in range(4):
        words[i] = loaded[i]
