"""The host side of a launch of the SM90 kernel for qv: what it gets beside ForwardParams' kinds."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from flash_cute.arguments import ForwardArguments
from flash_cute.device.pack_gqa import HeadsFastest
from flash_cute.device.params import CommonParams
from flash_cute.device.tma import TmaOperand
from flash_cute.sm90.params import LaunchDescriptionSm90

HALVES = 2  # of the columns of V: of a load, and of the output of a warpgroup


@dataclass(frozen=True)
class MlaParams(CommonParams):
    """What the kernel gets: operands, outputs, lengths, tiles, numbers."""

    mQ: cute.Tensor  # (rows_q, head_dim, num_heads_q, batch); None with qv alone
    mQv: cute.Tensor  # (rows_q, head_dim_v, num_heads_q, batch)
    k: TmaOperand  # None with qv alone
    v: TmaOperand  # a copy loads half of the columns
    q_layout: cute.ComposedLayout  # shared memory: (tile_m, tile_d), (tile_m, tile_dv) and
    qv_layout: cute.ComposedLayout
    k_layout: cute.ComposedLayout  # (tile_n, tile_d, stages), where also
    p_layout: cute.ComposedLayout  # (tile_m, tile_n, stages) lies
    mma_qk: cute.TiledMma
    mma_pv: cute.TiledMma
    packing: HeadsFastest


class MlaDescription(LaunchDescriptionSm90):
    """Describes launches of one specialization with one config."""

    @cute.jit
    def params(self, args: ForwardArguments, more) -> MlaParams:
        """Describe the operands, products and tiles of this launch."""
        spec, config = self.spec, self.config
        tile_m, tile_n, stages = config.tile_m, config.tile_n, config.num_stages
        group = args.num_heads_q // args.num_heads_kv
        width = group if const_expr(spec.pack_heads > 1) else Int32(1)
        packing = HeadsFastest(group // width, width, tile_m)
        page_rows = spec.page_rows or tile_n
        mQ = k = None
        if const_expr(not spec.is_only_qv):
            mQ = self.view(args, "q", args.rows_q, args.num_heads_q, args.head_dim)
            mK = self.view(args, "k", args.rows_k, args.num_heads_kv, args.head_dim)
            k = self.tma_operand(mK, (tile_n, spec.tile_d, stages), page_rows)
        mV = self.view(args, "v", args.rows_k, args.num_heads_kv, args.head_dim_v)
        half = spec.tile_dv // HALVES
        keys = OperandMajorMode.K
        return MlaParams(
            mQ=mQ,
            mQv=self.view(args, "qv", args.rows_q, args.num_heads_q, args.head_dim_v),
            k=k,
            v=self.tma_operand(mV, (tile_n, spec.tile_dv, stages), page_rows, half),
            q_layout=self.smem_layout((tile_m, spec.tile_d, 1)),
            qv_layout=self.smem_layout((tile_m, spec.tile_dv, 1)),
            k_layout=self.smem_layout((tile_n, spec.tile_d, stages)),
            p_layout=self.smem_layout((tile_m, tile_n, stages)),
            mma_qk=self.tiled_mma(tile_n, warpgroup.OperandSource.SMEM, keys),
            mma_pv=self.tiled_mma(half, warpgroup.OperandSource.SMEM, OperandMajorMode.MN),
            packing=packing,
            **self.common(args, packing.packs, tile_m, width),
        )
