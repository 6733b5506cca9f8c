"""The host side of a launch: from flat launch arguments to what the SM90 forward kernel gets."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from flash_cute.arguments import ForwardArguments
from flash_cute.device.block_sparsity import BlockLists
from flash_cute.device.mask import MaskBounds
from flash_cute.device.pack_gqa import HeadPacking
from flash_cute.device.paged_kv import PageTable
from flash_cute.device.params import Captured
from flash_cute.device.partials import PartialResults
from flash_cute.device.seqlen import SequenceTable
from flash_cute.device.tile_scheduler import TileScheduler
from flash_cute.device.tma import TmaDescription, TmaOperand


@dataclass(frozen=True)
class ForwardParams:
    """What the kernel gets: operands, outputs, lengths, tiles, numbers."""

    q: TmaOperand
    k: TmaOperand
    v: TmaOperand
    mK: cute.Tensor  # (page_size, head_dim, num_heads_kv, pages) where keys are gathered, else None
    mV: cute.Tensor
    mO: cute.Tensor  # (rows_q, head_dim_v, num_heads_q, batch)
    mLSE: cute.Tensor  # (rows_q, num_heads_q, batch)
    parts: PartialResults  # None where keys are not split
    mSink: cute.Tensor  # (num_heads_q,)
    mma_qk: cute.TiledMma
    mma_pv: cute.TiledMma
    scheduler: TileScheduler
    split_blocks: Int32
    sequences: SequenceTable
    bounds: MaskBounds
    head_dim_v: Int32
    packing: HeadPacking
    pages: PageTable  # None where keys are not paged
    scale_log2: Float32
    softcap: Float32
    captured: Captured
    blocks: BlockLists  # None without a block mask


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
