"""FlashAttention kernels in the CuTe DSL, called from PyTorch.

``flash_attn_func(q, k, v, causal=True)`` is the place to start. Importing the package loads torch
and nothing else: the DSL, the driver and the kernels come with the first call on a GPU.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from flash_cute.api import (
    flash_attn_func,
    flash_attn_varlen_func,
    is_supported,
    reference_mask,
)
from flash_cute.block_mask import BlockSparseTensors
from flash_cute.builder import block_mask_from
from flash_cute.combine import flash_attn_combine
from flash_cute.errors import (
    CaptureError,
    CompileDisallowed,
    CompileError,
    DependencyError,
    FlashCuteError,
    InvalidProblem,
    UnsupportedProblem,
)
from flash_cute.features import Feature
from flash_cute.flex import flex_attention
from flash_cute.kvcache import flash_attn_with_kvcache
from flash_cute.metadata import get_scheduler_metadata
from flash_cute.problem import AttentionProblem, Support
from flash_cute.split_plan import SchedulerMetadata
from flash_cute.target import Target
from flash_cute.variant import and_masks, or_masks

if TYPE_CHECKING:
    from flash_cute.cache import CacheInfo, cache_info, clear_cache
    from flash_cute.compile import warmup

__version__ = "0.1.0"

__all__ = [
    "AttentionProblem",
    "BlockSparseTensors",
    "CacheInfo",
    "CaptureError",
    "CompileDisallowed",
    "CompileError",
    "DependencyError",
    "Feature",
    "FlashCuteError",
    "InvalidProblem",
    "SchedulerMetadata",
    "Support",
    "Target",
    "UnsupportedProblem",
    "__version__",
    "and_masks",
    "block_mask_from",
    "cache_info",
    "clear_cache",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "flex_attention",
    "get_scheduler_metadata",
    "is_supported",
    "or_masks",
    "reference_mask",
    "warmup",
]

# Names that are imported when they are first used.
_LAZY = {
    "CacheInfo": "flash_cute.cache",
    "cache_info": "flash_cute.cache",
    "clear_cache": "flash_cute.cache",
    "warmup": "flash_cute.compile",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
