"""Operands that TMA loads: swizzled rings of tiles in shared memory, and boxes that fill them."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers

from flash_cute.device.params import LaunchDescription


@dataclass(frozen=True)
class TmaOperand:
    """A tensor in device memory that TMA reads tile by tile into shared memory."""

    atom: cute.CopyAtom
    tensor: cute.Tensor  # (seqlen, dim, heads, batch) coordinates
    layout: cute.ComposedLayout  # shared memory: (tile, dim, stage)
    box: cute.Layout  # the part of it that one copy fills: (rows, dim, stage)


class TmaDescription(LaunchDescription):
    """A LaunchDescription whose operands come by TMA."""

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
