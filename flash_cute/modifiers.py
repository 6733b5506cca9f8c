"""What a call gives beside tensors and numbers: callbacks and a block mask.

They are worked out anew on every call, also on one that was made before, so that whatever changed
in between is seen: a captured variable, a default, a list of blocks. Only what follows from them
(the choice of a kernel, the plan of the launch) is remembered, by what was found and never by the
identity of a function or a mask.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import torch

from flash_cute.block_mask import BlockStructure, block_structure, sizes_of
from flash_cute.variant import Callback, callback_on

# score_mod, mask_mod and block_mask as the caller gave them, at least one of them.
Given = tuple[Callable[..., Any] | None, Callable[..., Any] | None, object | None]


def given(
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any] | None,
    block_mask: object | None,
) -> Given | None:
    """Return what a caller gave of them, None where it is nothing."""
    if score_mod is None and mask_mod is None and block_mask is None:
        return None
    return score_mod, mask_mod, block_mask


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Modifiers:
    """The callbacks and block lists of one call; `block_mod` is the mask of partial blocks."""

    score_mod: Callback | None = None
    mask_mod: Callback | None = None
    block_mod: Callback | None = None
    blocks: BlockStructure | None = None

    @property
    def callbacks(self) -> tuple[Callback, ...]:
        """Those there are, in the order of their launch arguments."""
        found = (self.score_mod, self.mask_mod, self.block_mod)
        return tuple([callback for callback in found if callback is not None])

    @property
    def key(self) -> Hashable:
        """What of them a plan depends on: all but addresses, sizes and strides of tensors."""
        found = (self.score_mod, self.mask_mod, self.block_mod)
        digests = [None if callback is None else callback.key.digest for callback in found]
        return (*digests, None if self.blocks is None else self.blocks.layout)

    @property
    def requires_grad(self) -> bool:
        """Whether a captured tensor takes part in autograd."""
        return any([callback.requires_grad for callback in self.callbacks])

    def launch_arguments(self, tile: tuple[int, int], rows: tuple[int, int]) -> tuple[int, ...]:
        """Return their tensors as plain integers, for a kernel with that tile.

        Args:
            rows: of q and k, in the sequence or in all packed ones.
        """
        arguments: tuple[int, ...] = ()
        for callback in self.callbacks:
            arguments += callback.launch_arguments()
        if self.blocks is not None:
            arguments += self.blocks.launch_arguments(tile, rows)
        return arguments


def work_out(
    given: Given,
    q: torch.Tensor,
    k: torch.Tensor,
    ragged: tuple[torch.Tensor | None, ...] = (None, None, None),
) -> Modifiers | None:
    """Work out the modifiers of a dense or packed call on a GPU; None where anything is wrong.

    Args:
        ragged: cu_seqlens_q, cu_seqlens_k and page_table.

    What is wrong is left to validation, which names it, and in the order of its own.
    """
    score_mod, mask_mod, block_mask = given
    device = q.device
    blocks = None
    try:
        if block_mask is not None:
            sizes = sizes_of(q, k, ragged[0], ragged[1], ragged[2])
            blocks = block_structure(block_mask, sizes, device)
        return Modifiers(
            callback_on(device, score_mod, "score_mod"),
            callback_on(device, mask_mod, "mask_mod"),
            callback_on(device, None if blocks is None else blocks.mask_mod, "mask_mod"),
            blocks,
        )
    except Exception:
        return None
