"""The load warps of the SM100 forward kernel: one, or two where keys are gathered."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from flash_cute.device.gather import FollowingWarp, GatherWarps, LeadingWarp
from flash_cute.device.load import Keys, LoadWarp


class LoadWarpSm100(LoadWarp):
    """LoadWarp with the pieces of a block in a loop.

    All of them at once would take more uniform registers than the warp of the products leaves.
    """

    def slot_of(self, state) -> Int32:
        """The softmax looks when the stage of K may be filled anew."""
        return state.count % self.exchange.block_slots

    @cute.jit
    def fill(self, p, operand, pipe, state, keys: Keys, place, block, page):
        """Start the copies of one operand of a block into the stage of a state."""
        if const_expr(self.spec.page_rows > 0):
            ring, column = place
            rows = self.spec.page_rows
            for i in cutlass.range(self.config.tile_n // rows, unroll=1):
                origin = (0, keys.head, cute.arch.shuffle_sync(page, i))
                smem = self.part_of(ring, i * rows, operand)
                to_smem, from_gmem = self.partition_tma(operand, smem, origin, column)
                piece = p.pages.piece(block * self.config.tile_n + i * rows, 0)
                self.copy(operand, pipe, state, from_gmem[None, piece], to_smem)
        else:
            LoadWarp.fill(self, p, operand, pipe, state, keys, place, block, page)


class LeadingWarpSm100(LeadingWarp, LoadWarpSm100):
    """The first of the warps that gather."""


class FollowingWarpSm100(FollowingWarp, LoadWarpSm100):
    """The second one."""


class GatherWarpsSm100(GatherWarps):
    """Both."""

    leading, following = LeadingWarpSm100, FollowingWarpSm100
