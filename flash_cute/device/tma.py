"""Operands that TMA loads: swizzled rings of tiles in shared memory, and boxes that fill them."""

import typing
from dataclasses import dataclass

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from flash_cute.arguments import ForwardArguments
from flash_cute.device.block_sparsity import BlockLists
from flash_cute.device.pack_gqa import HeadPacking
from flash_cute.device.params import Captured, CommonParams, LaunchDescription


@dataclass(frozen=True)
class TmaOperand:
    """A tensor in device memory that TMA reads tile by tile into shared memory."""

    atom: cute.CopyAtom
    tensor: cute.Tensor  # (seqlen, dim, heads, batch) coordinates
    layout: cute.ComposedLayout  # shared memory: (tile, dim, stage)
    box: cute.Layout  # the part of it that one copy fills: (rows, dim, stage)


@dataclass(frozen=True)
class TmaParams(CommonParams):
    """What a forward kernel gets whose operands come by TMA."""

    q: TmaOperand
    k: TmaOperand
    v: TmaOperand
    mK: cute.Tensor  # (page_size, head_dim, num_heads_kv, pages) where keys are gathered, else None
    mV: cute.Tensor
    packing: HeadPacking
    captured: Captured
    blocks: BlockLists  # None without a block mask


class TmaDescription(LaunchDescription):
    """A LaunchDescription whose operands come by TMA."""

    def loaded(self, args: ForwardArguments, rows_q: int) -> dict[str, typing.Any]:
        """The operands and what is `common`, by their names in the parameters of a kernel.

        rows_q: of the tile of queries in shared memory
        """
        spec, config = self.spec, self.config
        tile_n, stages = config.tile_n, config.num_stages
        mQ = self.view(args, "q", args.rows_q, args.num_heads_q, args.head_dim)
        mK = self.view(args, "k", args.rows_k, args.num_heads_kv, args.head_dim)
        mV = self.view(args, "v", args.rows_k, args.num_heads_kv, args.head_dim_v)
        packing, positions = self.head_packing(args), config.positions(spec)
        box_rows = tile_n if spec.gathers_keys else spec.page_rows or tile_n
        return {
            "q": self.tma_operand(mQ, (rows_q, spec.tile_d, 1), positions),
            "k": self.tma_operand(mK, (tile_n, spec.tile_d, stages), box_rows),
            "v": self.tma_operand(mV, (tile_n, spec.tile_dv, stages), box_rows),
            "mK": mK if spec.gathers_keys else None,
            "mV": mV if spec.gathers_keys else None,
            "packing": packing,
            **self.common(args, packing.packs, positions),
        }

    def smem_layout(self, ring) -> cute.ComposedLayout:
        """The swizzled layout of a ring of (rows, dim, stages) tiles."""
        kind = hopper_helpers.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, self.dtype, ring[1])
        atom_layout = warpgroup.make_smem_layout_atom(kind, self.dtype)
        return cute.tile_to_shape(atom_layout, ring, order=(0, 1, 2))

    def tma_operand(self, tensor, ring, box_rows, box_dim=None) -> TmaOperand:
        """An operand's ring of (rows, dim, stages) tiles; a TMA fills box_rows x box_dim of one."""
        layout = self.smem_layout(ring)
        box_dim = ring[1] if box_dim is None else box_dim
        box = cute.composition(layout.outer, (box_rows, box_dim, ring[2]))
        atom, coordinates = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            tensor,
            cute.make_composed_layout(layout.inner, 0, cute.select(box, mode=[0, 1])),
            (box_rows, box_dim),
        )
        return TmaOperand(atom, coordinates, layout, box)
