"""Which callbacks load something for every score: those that index a captured tensor by the key."""

from __future__ import annotations

from typing import Any

import callbacks
import pytest
import torch

from flash_cute.variant import as_callback

BY_KEY = {
    "document", "document_causal", "blocks_by_table", "relative_bias_table", "wrapped_bias_table",
    "buckets", "lookup_by_key",
}  # fmt: skip
TABLE, NUMBER = torch.zeros(4, 8), torch.tensor(3)


@pytest.mark.parametrize("name", callbacks.ALL)
def test_published_callbacks(name: str):
    kind, factory = callbacks.ALL[name]
    assert as_callback(factory("cpu"), kind).key.looks_up_keys == (name in BY_KEY)


def score_mod_of(function: Any) -> bool:
    return as_callback(function, "score_mod").key.looks_up_keys


def test_steps_of_indexing_are_followed():
    assert score_mod_of(lambda s, b, h, q, k: s) is False
    assert score_mod_of(lambda score, b, h, q_idx, kv_idx: score + TABLE[h][q_idx % 8]) is False
    assert score_mod_of(lambda score, b, h, q_idx, kv_idx: score + TABLE[h][kv_idx]) is True
    assert score_mod_of(lambda score, b, h, q_idx, kv_idx: score + TABLE[:, kv_idx][h]) is True
    assert score_mod_of(lambda score, b, h, q_idx, kv_idx: score + TABLE.float()[h, kv_idx]) is True
    assert score_mod_of(lambda score, b, h, q_idx, kv_idx: score * NUMBER + kv_idx) is False


def test_the_index_may_come_through_anything():
    def clamped(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        near = torch.where(q_idx > kv_idx, q_idx - kv_idx, 0).clamp(max=TABLE.shape[1] - 1)
        return score + TABLE[0, near.to(torch.int64)]

    assert score_mod_of(clamped) is True


def test_what_fails_here_is_taken_to_look_up():
    def failing(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        if kv_idx > 3:
            return score
        return score + TABLE[h, q_idx]

    assert score_mod_of(failing) is True
