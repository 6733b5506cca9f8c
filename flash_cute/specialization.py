"""What shapes the code of a forward kernel: the facts of a problem that are compiled in.

Everything else (lengths, strides, scale, head counts) is a launch argument and never recompiles.
Plain values only, so that a specialization can be a cache key and be read without torch or the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ForwardSpecialization:
    """Compile-time facts of one forward kernel.

    Shapes: tile_d, tile_dv: head dimensions as tiled, at least the problem's own (loads past the
            end read zeros, stores past it are dropped).
    Units:  dtype is "bf16" or "fp16", of q, k, v and out.
    """

    dtype: str
    tile_d: int
    tile_dv: int
    is_causal: bool
    has_lse: bool
    negate_scores: bool = False  # softmax_scale < 0: the kernel sees -scale and flips q·k

    @property
    def label(self) -> str:
        """Readable part of the kernel's name, e.g. ``bf16_d192_v128_causal_lse``."""
        head_dim = (
            f"d{self.tile_d}" if self.tile_d == self.tile_dv else f"d{self.tile_d}v{self.tile_dv}"
        )
        parts = [self.dtype, head_dim]
        parts += ["causal"] if self.is_causal else []
        parts += ["lse"] if self.has_lse else []
        parts += ["negated"] if self.negate_scores else []
        return "_".join(parts)
