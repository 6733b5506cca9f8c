"""The host side of a launch: from flat launch arguments to what the SM80 forward kernel gets."""

from dataclasses import dataclass, replace

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import warp

from flash_cute.arguments import ForwardArguments
from flash_cute.device.block_sparsity import BlockLists
from flash_cute.device.pack_gqa import HeadPacking
from flash_cute.device.params import Captured, CommonParams, LaunchDescription


@dataclass(frozen=True)
class ForwardParams(CommonParams):
    """What the kernel gets: operands, outputs, lengths, tiles, numbers."""

    mQ: cute.Tensor  # (rows_q, head_dim, num_heads_q, batch)
    mK: cute.Tensor  # (rows_k, head_dim, num_heads_kv, batch), or (page_size, …, pages)
    mV: cute.Tensor  # likewise with head_dim_v
    mma: cute.TiledMma  # of one warp, for both products
    packing: HeadPacking
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
