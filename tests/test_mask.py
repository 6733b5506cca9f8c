"""Blocks of keys of a tile and of its warpgroups: the kernel's arithmetic on Python's integers."""

from __future__ import annotations

import types
from typing import Any

import pytest

pytest.importorskip("cutlass")

from flash_cute.device import mask as device_mask
from flash_cute.device.forward import Work
from flash_cute.device.mask import AttentionMask, BlockRange, MaskBounds
from flash_cute.device.seqlen import SeqlenInfo
from flash_cute.sm90 import fwd

SIZES = (1, 2, 63, 64, 65, 127, 128, 129, 130, 191, 192, 193, 200, 257, 320, 385, 501, 640)
TILES = ((128, 64), (192, 64), (128, 128))
MASKS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "window": {"window_left": 90, "window_right": 20},
    "left": {"window_left": 128},
    "own_token": {"window_left": 0, "window_right": 0},
    "causal_window": {"is_causal": True, "window_left": 127},
    "chunk": {"chunk": 96},
    "causal_chunk": {"is_causal": True, "chunk": 256},
    "future": {"window_left": -5, "window_right": 90},
}


def plain(function: Any) -> Any:
    """A copy of what was decorated: the DSL rewrites the function itself when it traces it."""
    inner = function.__wrapped__
    return types.FunctionType(
        inner.__code__, inner.__globals__, inner.__name__, inner.__defaults__, inner.__closure__
    )


# Made on import, before any test traces.
PLAIN = {
    name: plain(getattr(AttentionMask, name)) for name in ("block_range", "end_of", "begin_of")
}
FLOOR_TO = plain(device_mask.floor_to)
VISIBLE_BLOCKS = plain(fwd.FlashAttentionForwardSm90.visible_blocks)


@pytest.fixture
def on_integers(monkeypatch: pytest.MonkeyPatch):
    """Run what is traced in a kernel as plain Python."""
    fake = types.SimpleNamespace(min=min, max=max, select_=lambda c, a, b: a if c else b)
    for module in (device_mask, fwd):
        monkeypatch.setattr(module, "cutlass", fake)
        monkeypatch.setattr(module, "const_expr", lambda value: value)
    monkeypatch.setattr(device_mask, "Int32", int)
    monkeypatch.setattr(device_mask, "floor_to", FLOOR_TO)
    for name, function in PLAIN.items():
        monkeypatch.setattr(AttentionMask, name, function)


def mask_of(given: dict[str, Any], tile_n: int) -> tuple[AttentionMask, MaskBounds]:
    mask = AttentionMask(
        is_causal=given.get("is_causal", False),
        has_window_left="window_left" in given,
        has_window_right="window_right" in given,
        has_chunk="chunk" in given,
        tile_n=tile_n,
    )
    numbers = (given.get(name, 0) for name in ("window_left", "window_right", "chunk"))
    return mask, MaskBounds(*numbers)


def visited(mask: AttentionMask, blocks: BlockRange) -> dict[int, bool]:
    """The blocks that `AttentionKernel.visit_range` steps through, and whether each is masked."""
    n_block = blocks.end - 1
    found = {n_block: True}
    limits = [(blocks.full_end, True)] * mask.has_end + [(blocks.full_begin, False)]
    for limit, is_masked in limits + [(blocks.begin, True)] * mask.has_begin:
        for _ in range(n_block - limit):
            n_block -= 1
            found[n_block] = is_masked
    return found


def check_rows(mask, bounds, seqlen: SeqlenInfo, rows: range, found: dict[int, bool]):
    """All that the rows see is in visited blocks, and unmasked ones hold nothing else."""
    for row in rows:
        begin = mask.begin_of(row, seqlen, bounds)
        end = mask.end_of(row, seqlen, bounds)
        for block in range(begin // mask.tile_n, -(-end // mask.tile_n) if end > begin else 0):
            assert block in found, (row, block)
        for block, is_masked in found.items():
            first, past = block * mask.tile_n, (block + 1) * mask.tile_n
            assert is_masked or (begin <= first and past <= end), (row, block)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("tile_m, tile_n", TILES)
def test_blocks_of_tiles_and_warpgroups(on_integers: None, tile_m: int, tile_n: int, name: str):
    """Each warpgroup steps through, or passes over, exactly the blocks that are loaded."""
    mask, bounds = mask_of(MASKS[name], tile_n)
    kernel = types.SimpleNamespace(
        mask=mask,
        config=types.SimpleNamespace(tile_m=tile_m),
        spec=types.SimpleNamespace(is_split=False),
    )
    p = types.SimpleNamespace(bounds=bounds, packing=types.SimpleNamespace(heads=1))
    for seqlen_q in SIZES:
        for seqlen_k in {seqlen_q, seqlen_q + 37, seqlen_q + 500, max(1, seqlen_q - 60)}:
            seqlen = SeqlenInfo(seqlen_q, seqlen_k, 0, 0)
            for m_block in range(-(-seqlen_q // tile_m)):
                rows = range(m_block * tile_m, min((m_block + 1) * tile_m, seqlen_q))
                outer = mask.block_range(m_block * tile_m, tile_m, seqlen, bounds)
                found = visited(mask, outer)
                assert sorted(found) == list(range(outer.begin, outer.end))
                check_rows(mask, bounds, seqlen, rows, found)
                tile = types.SimpleNamespace(m_block=m_block)
                work = Work(tile, seqlen, outer, 0, 0, False)
                for warpgroup in range(tile_m // 64):
                    own = VISIBLE_BLOCKS(
                        kernel, p, types.SimpleNamespace(warpgroup=warpgroup), work
                    ).blocks
                    found = visited(mask, own)
                    assert outer.begin <= own.begin and own.end <= outer.end
                    assert sorted(found) == list(range(own.begin, own.end)), (seqlen, own)
                    first = m_block * tile_m + 64 * warpgroup
                    check_rows(mask, bounds, seqlen, range(first, min(first + 64, seqlen_q)), found)
