"""The host side of a launch: from flat launch arguments to what the SM100 forward kernel gets."""

from dataclasses import dataclass

import cutlass.cute as cute

from flash_cute.arguments import ForwardArguments
from flash_cute.device.tma import TmaDescription, TmaParams


@dataclass(frozen=True)
class ForwardParams(TmaParams):
    """What the kernel gets: its products need no description."""


class LaunchDescriptionSm100(TmaDescription):
    """Operands are rings that TMA fills."""

    @cute.jit
    def params(self, args: ForwardArguments, more) -> ForwardParams:
        """Describe the operands and tiles of this launch.

        more: the launch arguments of what callbacks captured, then those of the block lists
        """
        captured, more = self.captured(more)
        return ForwardParams(
            **self.loaded(args, self.config.rows_q),
            captured=captured,
            blocks=self.block_lists(args, more),
        )
