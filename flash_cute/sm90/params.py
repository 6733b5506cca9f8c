"""The host side of a launch: from flat launch arguments to what the SM90 forward kernel gets."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from flash_cute.arguments import ForwardArguments
from flash_cute.device.tma import TmaDescription, TmaParams


@dataclass(frozen=True)
class ForwardParams(TmaParams):
    """What the kernel gets: operands, outputs, lengths, tiles, numbers, products."""

    mma_qk: cute.TiledMma
    mma_pv: cute.TiledMma


class LaunchDescriptionSm90(TmaDescription):
    """Operands are rings that TMA fills; products are wgmma's."""

    @cute.jit
    def params(self, args: ForwardArguments, more) -> ForwardParams:
        """Describe the operands, products and tiles of this launch.

        more: the launch arguments of what callbacks captured, then those of the block lists
        """
        captured, more = self.captured(more)
        return ForwardParams(
            **self.loaded(args, self.config.tile_m),
            mma_qk=self.tiled_mma(
                self.config.tile_n, warpgroup.OperandSource.SMEM, OperandMajorMode.K
            ),
            mma_pv=self.tiled_mma(
                self.spec.tile_dv, warpgroup.OperandSource.RMEM, OperandMajorMode.MN
            ),
            captured=captured,
            blocks=self.block_lists(args, more),
        )

    def tiled_mma(self, tile_n, a_source, b_major) -> cute.TiledMma:
        """64 rows of each warpgroup that takes part; f32 accumulators."""
        op = warpgroup.MmaF16BF16Op(
            self.dtype, Float32, (64, tile_n, 16), a_source, OperandMajorMode.K, b_major
        )
        return cute.make_tiled_mma(op, (self.config.tile_m // 64, 1, 1))
