"""Every declared cell cross-compiles without a GPU: no spills, no stack, within shared memory."""

import itertools

import checks
import pytest

from flash_cute import Target
from flash_cute.selection import SM90
from flash_cute.sm90.config import TILE_HEAD_DIMS, default_config
from flash_cute.specialization import ForwardSpecialization

pytestmark = pytest.mark.compile

MIXED_DIMS = [(96, 64), (128, 64), (128, 96), (192, 64), (192, 96), (192, 128)] + [
    (256, dv) for dv in (64, 96, 128, 192)
]
PLAIN = {"is_causal": False, "has_lse": True}
PACKED = {"is_packed_q": True, "is_packed_k": True}
USED = {"has_seqused_q": True, "has_seqused_k": True}
WINDOW = {"has_window_left": True, "has_window_right": True}
FEATURES = [
    PACKED,
    USED,
    WINDOW,
    {"is_causal": True, "has_window_left": True},
    {"is_causal": True, "has_chunk": True},
    {"has_softcap": True},
    {"sink_dtype": "bf16"},
    {"has_block_mask": True, "has_full_blocks": True},
    {"has_block_mask": True, "is_causal": True, "has_window_left": True},
    {"is_causal": True, "pack_heads": 5},
    {**WINDOW, "pack_heads": 16, "sink_dtype": "bf16"},
    {**PACKED, "has_block_mask": True, "has_full_blocks": True, "pack_heads": 3},
    {"has_seqused_k": True, "page_rows": 16},
    {"has_seqused_k": True, "is_packed_q": True, "page_rows": 16, "pack_heads": 8},
    {**WINDOW, "has_seqused_k": True, "page_rows": 8},
    {"has_seqused_k": True, "is_causal": True, "is_split": True},
    {"has_seqused_k": True, "page_rows": 1},
    {
        "has_seqused_k": True,
        "is_causal": True,
        "is_packed_q": True,
        "page_rows": 1,
        "pack_heads": 8,
        "is_split": True,
        "has_split_counts": True,
        "has_batch_idx": True,
        "has_leftpad": True,
    },
    {
        "has_seqused_k": True,
        "is_packed_q": True,
        "page_rows": 16,
        "pack_heads": 8,
        "is_split": True,
    },
    {**PACKED, **USED, **WINDOW, "has_chunk": True, "has_softcap": True, "sink_dtype": "fp32"},
]
REGISTERS_AT_ENTRY = {256: 255, 384: 168, 512: 128}  # by threads of a CTA: 64k registers shared


def cells():
    for d, is_causal, has_lse in itertools.product(TILE_HEAD_DIMS, (False, True), (False, True)):
        yield ForwardSpecialization("bf16", d, d, is_causal, has_lse), 8192
    for d, dv in MIXED_DIMS:
        yield ForwardSpecialization("bf16", d, dv, True, True), 8192
    yield ForwardSpecialization("bf16", 64, 64, True, True), 1024
    yield ForwardSpecialization("fp16", 128, 128, True, True), 8192
    yield ForwardSpecialization("fp16", 64, 64, False, True, negate_scores=True), 8192
    for d, dv in ((64, 64), (128, 128), (192, 128), (256, 256)):
        for features in FEATURES:
            yield ForwardSpecialization("bf16", d, dv, **{**PLAIN, **features}), 8192


@pytest.mark.parametrize(
    "spec, seqlen_k", list(cells()), ids=lambda value: getattr(value, "label", value)
)
def test_cell_compiles_without_spills(spec, seqlen_k):
    pytest.importorskip("cutlass")
    from flash_cute.compile import inspect_kernel
    from flash_cute.sm90.fwd import FlashAttentionForwardSm90

    config = default_config(spec, seqlen_k)
    report = inspect_kernel(FlashAttentionForwardSm90(spec, config), SM90.archs[0])
    if report.missing:
        pytest.skip("; ".join(report.missing))
    checks.assert_no_spills(report)
    assert report.registers is not None
    assert report.registers <= REGISTERS_AT_ENTRY[config.num_threads]
    assert report.smem_bytes is not None
    assert report.smem_bytes <= Target.from_arch(SM90.archs[0]).smem_bytes
    assert f".entry {report.name}" in report.ptx


@pytest.mark.parametrize("tile_d", TILE_HEAD_DIMS)
def test_blocks_of_64_compile_without_spills(tile_d):
    pytest.importorskip("cutlass")
    from flash_cute.compile import inspect_kernel
    from flash_cute.sm90.fwd import FlashAttentionForwardSm90

    features = {"has_block_mask": True, "has_full_blocks": True}
    spec = ForwardSpecialization("bf16", tile_d, tile_d, False, True, **features)
    config = default_config(spec, 8192, (64, 64))
    assert config.divides((64, 64), spec)
    report = inspect_kernel(FlashAttentionForwardSm90(spec, config), SM90.archs[0])
    if report.missing:
        pytest.skip("; ".join(report.missing))
    checks.assert_no_spills(report)
