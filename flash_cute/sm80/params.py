"""The host side of a launch: from flat launch arguments to what the SM80 forward kernel gets."""

from dataclasses import dataclass, replace

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp

from flash_cute.arguments import ForwardArguments
from flash_cute.device.block_sparsity import BlockLists
from flash_cute.device.mask import MaskBounds
from flash_cute.device.pack_gqa import HeadPacking
from flash_cute.device.paged_kv import PageTable
from flash_cute.device.params import Captured, LaunchDescription
from flash_cute.device.partials import PartialResults
from flash_cute.device.seqlen import SequenceTable
from flash_cute.device.tile_scheduler import TileScheduler


@dataclass(frozen=True)
class ForwardParams:
    """What the kernel gets: operands, outputs, lengths, tiles, numbers."""

    mQ: cute.Tensor  # (rows_q, head_dim, num_heads_q, batch)
    mK: cute.Tensor  # (rows_k, head_dim, num_heads_kv, batch), or (page_size, …, pages)
    mV: cute.Tensor  # likewise with head_dim_v
    mO: cute.Tensor  # (rows_q, head_dim_v, num_heads_q, batch)
    mLSE: cute.Tensor  # (rows_q, num_heads_q, batch)
    parts: PartialResults  # None where keys are not split
    mSink: cute.Tensor  # (num_heads_q,)
    mma: cute.TiledMma  # of one warp, for both products
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


class LaunchDescriptionSm80(LaunchDescription):
    """Operands are plain tensors, which threads copy; both products are those of a warp."""

    @cute.jit
    def params(self, args: ForwardArguments, more) -> ForwardParams:
        """Describe the operands, the product and the tiles of this launch.

        more: the launch arguments of what callbacks captured, then those of the block lists
        """
        captured, more = self.captured(more)
        packing = replace(self.head_packing(args), are_heads_neighbours=self.config.skips_warps)
        return ForwardParams(
            mQ=self.view(args, "q", args.rows_q, args.num_heads_q, args.head_dim),
            mK=self.view(args, "k", args.rows_k, args.num_heads_kv, args.head_dim),
            mV=self.view(args, "v", args.rows_k, args.num_heads_kv, args.head_dim_v),
            mma=cute.make_tiled_mma(warp.MmaF16BF16Op(self.dtype, Float32, (16, 8, 16))),
            packing=packing,
            **self.common(args, packing.packs, self.config.positions(self.spec)),
            captured=captured,
            blocks=self.block_lists(args, more),
        )
