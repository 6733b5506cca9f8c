"""The host side of a launch: from flat launch arguments to what the SM100 forward kernel gets."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32

from flash_cute.arguments import ForwardArguments
from flash_cute.device.block_sparsity import BlockLists
from flash_cute.device.mask import MaskBounds
from flash_cute.device.pack_gqa import HeadPacking
from flash_cute.device.paged_kv import PageTable
from flash_cute.device.params import Captured
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
    mSink: cute.Tensor  # (num_heads_q,)
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


class LaunchDescriptionSm100(TmaDescription):
    """Operands are rings that TMA fills."""

    @cute.jit
    def params(self, args: ForwardArguments, more) -> ForwardParams:
        """Describe the operands and tiles of this launch.

        more: the launch arguments of what callbacks captured, then those of the block lists
        """
        spec, config = self.spec, self.config
        tile_n, stages = config.tile_n, config.num_stages
        mQ = self.view(args, "q", args.rows_q, args.num_heads_q, args.head_dim)
        mK = self.view(args, "k", args.rows_k, args.num_heads_kv, args.head_dim)
        mV = self.view(args, "v", args.rows_k, args.num_heads_kv, args.head_dim_v)
        captured, more = self.captured(more)
        packing, positions = self.head_packing(args), config.positions(spec)
        box_rows = tile_n if spec.gathers_keys else spec.page_rows or tile_n
        return ForwardParams(
            q=self.tma_operand(mQ, (config.rows_q, spec.tile_d, 1), positions),
            k=self.tma_operand(mK, (tile_n, spec.tile_d, stages), box_rows),
            v=self.tma_operand(mV, (tile_n, spec.tile_dv, stages), box_rows),
            mK=mK if spec.gathers_keys else None,
            mV=mV if spec.gathers_keys else None,
            packing=packing,
            **self.common(args, packing.packs, positions),
            captured=captured,
            blocks=self.block_lists(args, more),
        )
