"""Which keys a query sees: block ranges for the loops, and the mask inside an edge block.

Bottom-right aligned: with offset = seqlen_k - seqlen_q, causal lets row i see keys 0 .. i + offset.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from flash_cute.device.primitives import column_offset


@dataclass(frozen=True)
class AttentionMask:
    """The mask of one problem; the methods take the tile they speak of."""

    is_causal: cutlass.Constexpr[bool]
    tile_m: cutlass.Constexpr[int]
    tile_n: cutlass.Constexpr[int]

    @property
    def has_long_edge(self) -> bool:
        """Whether blocks after a tile's first may be masked; else only the end of the keys is."""
        return self.is_causal

    @cute.jit
    def block_range(self, m_block: Int32, seqlen_q: Int32, seqlen_k: Int32):
        """Key blocks of a query tile: ``(num_blocks, num_full)``, visited from the last to 0.

        Blocks [num_full, num_blocks) hold a masked pair, blocks [0, num_full) hold none. There is
        always one block to visit, so that a tile without visible keys still writes zeros.
        """
        end = seqlen_k
        full_end = seqlen_k
        if const_expr(self.is_causal):
            offset = seqlen_k - seqlen_q
            end = cutlass.min(end, (m_block + 1) * self.tile_m + offset)
            full_end = cutlass.min(full_end, m_block * self.tile_m + offset + 1)
        num_blocks = cutlass.max((end + self.tile_n - 1) // self.tile_n, 1)
        num_full = cutlass.max(full_end, 0) // self.tile_n
        return num_blocks, num_full

    @cute.jit
    def apply(
        self,
        scores: cute.Tensor,
        first_row: Int32,
        first_col: Int32,
        seqlen_q: Int32,
        seqlen_k: Int32,
    ):
        """Set the scores of invisible keys to -inf.

        Shapes: scores: (rows, cols) of this thread, as ``as_rows_cols``; its first element is
                score (first_row, first_col) of the problem, rows are 8 apart
        """
        for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            end = seqlen_k
            if const_expr(self.is_causal):
                row = first_row + 8 * r
                end = cutlass.min(end, row + 1 + seqlen_k - seqlen_q)
            num_visible = end - first_col
            for i in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                is_visible = num_visible > column_offset(i)
                scores[r, i] = cutlass.select_(is_visible, scores[r, i], -Float32.inf)
