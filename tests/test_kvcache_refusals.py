"""What flash_attn_with_kvcache refuses: by name, and before anything is written."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Iterator
from typing import Any

import checks
import pytest
import torch
import toy_gpu
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_cute import (
    Feature,
    InvalidProblem,
    UnsupportedProblem,
    current,
    flash_attn_with_kvcache,
    launch,
    selection,
    splitting,
)
from flash_cute.selection import APPEND, SM90

# Name and default of every argument, in order; "required" has none.
SIGNATURE = {
    **dict.fromkeys(("q", "k_cache", "v_cache"), "required"),
    **dict.fromkeys(("k", "v", "qv", "rotary_cos", "rotary_sin", "cache_seqlens")),
    **dict.fromkeys(("cache_batch_idx", "cache_leftpad", "page_table", "cu_seqlens_q")),
    **dict.fromkeys(("cu_seqlens_k_new", "max_seqlen_q", "rotary_seqlens")),
    **dict.fromkeys(("q_descale", "k_descale", "v_descale", "softmax_scale")),
    "causal": False,
    "window_size": (-1, -1),
    "attention_chunk": None,
    "softcap": 0.0,
    "rotary_interleaved": True,
    "scheduler_metadata": None,
    "num_splits": 0,
    "pack_gqa": None,
    "only_qv": False,
    "sm_margin": 0,
    "return_softmax_lse": False,
    **dict.fromkeys(("sinks", "score_mod", "aux_tensors", "block_mask")),
    "ver": 3,
    **dict.fromkeys(("out", "max_seqlen_k")),
}


def int32(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def portable(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score


def native(
    score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any
) -> Any:
    return score + aux_tensors[0][h]


def call_of(kind: str, device: str = "cpu") -> dict[str, Any]:
    """A small valid call; its kind says what beside lengths is in it."""
    empty = functools.partial(torch.zeros, dtype=torch.bfloat16, device=device)
    index = functools.partial(torch.tensor, dtype=torch.int32, device=device)
    a: dict[str, Any] = {
        "q": empty(2, 3, 4, 64),
        "k_cache": empty(2, 12, 2, 64),
        "v_cache": empty(2, 12, 2, 32),
        "cache_seqlens": index([5, 7]),
    }
    if "paged" in kind:
        a.update(k_cache=empty(8, 4, 2, 64), v_cache=empty(8, 4, 2, 32))
        a["page_table"] = index([[0, 5, 3], [1, 7, 2]])
    if "chosen" in kind:
        a.update(k_cache=empty(4, 12, 2, 64), v_cache=empty(4, 12, 2, 32))
        a["cache_batch_idx"] = index([3, 0])
    if "padded" in kind:
        a["cache_leftpad"] = index([1, 7])
    if "new" in kind:
        a.update(k=empty(2, 3, 2, 64), v=empty(2, 3, 2, 32))
    if "packed" in kind:
        a.update(q=empty(6, 4, 64), cu_seqlens_q=index([0, 2, 6]))
    if "ragged" in kind:
        a.update(k=empty(5, 2, 64), v=empty(5, 2, 32), cu_seqlens_k_new=index([0, 1, 5]))
    if "rotary" in kind:
        a.update(rotary_cos=empty(12, 16), rotary_sin=empty(12, 16))
    if "qv" in kind:
        a["qv"] = empty(2, 3, 4, 32)
    if "only" in kind:
        a.update(q=None, k_cache=None, only_qv=True)
        a.pop("k", None)
    return a


KINDS = (
    "plain", "paged", "chosen", "padded", "new", "packed", "ragged", "new rotary", "qv", "qv only",
    "paged chosen padded ragged packed rotary", "qv only new paged", "qv new",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_the_calls_are_right_but_for_what_is_changed(kind: str):
    flash_attn_with_kvcache(**_without_conflict(call_of(kind)))


def _without_conflict(a: dict[str, Any]) -> dict[str, Any]:
    """A page table of as many rows as cache_batch_idx chooses among."""
    if "page_table" in a and "cache_batch_idx" in a:
        a["k_cache"], a["v_cache"] = (
            torch.zeros(20, 4, 2, d, dtype=torch.bfloat16) for d in (64, 32)
        )
        a["page_table"] = torch.arange(12, dtype=torch.int32).view(4, 3)
    return a


def test_signature_is_the_interface():
    parameters = inspect.signature(flash_attn_with_kvcache).parameters
    assert list(parameters) == list(SIGNATURE)
    for name, parameter in parameters.items():
        default = "required" if parameter.default is parameter.empty else parameter.default
        assert default == SIGNATURE[name], name


def test_every_argument_is_documented():
    text = inspect.getdoc(flash_attn_with_kvcache) or ""
    assert [name for name in SIGNATURE if not re.search(rf"\b{name}\b", text)] == []


FLOAT = torch.zeros(2, 3, 2, 64)
HALF = functools.partial(torch.zeros, dtype=torch.bfloat16)

INVALID: dict[str, tuple[str, dict[str, Any], str]] = {
    # What is given together.
    "v_cache": ("plain", {"v_cache": None}, "v_cache must be provided"),
    "k_cache": ("plain", {"k_cache": None}, "k_cache can only be None when only_qv=True"),
    "q": ("plain", {"q": None}, "q can only be None when only_qv=True"),
    "only_qv": (
        "qv only",
        {"qv": None},
        "q must be provided unless qv is provided with only_qv=True",
    ),
    "only_qv-q": ("plain", {"only_qv": True}, "only_qv=True requires qv to be provided"),
    "only_qv-both": ("qv", {"only_qv": True}, "q is given, expected None (only_qv=True: "),
    "only_qv-k_cache": ("qv", {"only_qv": True, "q": None}, "k_cache is given, expected None"),
    "only_qv-k": ("qv only new", {"k": HALF(2, 3, 2, 64)}, "k is given, expected None (only_qv"),
    "only_qv-rotary": (
        "qv only",
        {"rotary_cos": HALF(12, 16), "rotary_sin": HALF(12, 16)},
        "rotary_cos is given, expected None (only_qv=True",
    ),
    "only_qv-kind": ("plain", {"only_qv": 1}, "only_qv is 1, expected True or False"),
    "k-alone": ("plain", {"k": HALF(2, 3, 2, 64)}, "v is None, expected a tensor (k is given: "),
    "v-alone": ("plain", {"v": HALF(2, 3, 2, 32)}, "k is None, expected a tensor (v is given: "),
    "k-lengths": ("new", {"cache_seqlens": None}, "cache_seqlens is None, expected lengths (v is"),
    "cos-alone": ("new rotary", {"rotary_sin": None}, "rotary_sin is None, expected a tensor"),
    "sin-alone": ("new rotary", {"rotary_cos": None}, "rotary_cos is None, expected a tensor"),
    "rotary-k": ("rotary", {}, "k is None, expected a tensor (rotary_cos is given"),
    "rotary_seqlens-alone": (
        "new",
        {"rotary_seqlens": int32(1, 2)},
        "rotary_cos is None, expected a tensor (rotary_seqlens is given",
    ),
    "cu_seqlens_k_new-alone": (
        "plain",
        {"cu_seqlens_k_new": int32(0, 1, 2)},
        "v is None, expected a tensor (cu_seqlens_k_new is given",
    ),
    # Tensors.
    "q-type": ("plain", {"q": [1.0]}, "q is of type list, expected a torch.Tensor"),
    "k_cache-type": ("plain", {"k_cache": 1}, "k_cache is of type int, expected a torch.Tensor"),
    "q-rank": ("plain", {"q": HALF(6, 4, 64)}, "q.dim() is 3, expected 4 ((batch"),
    "q-packed": ("plain", {"cu_seqlens_q": int32(0, 1, 2)}, "q.dim() is 4, expected 3 ((total_q"),
    "k_cache-rank": ("plain", {"k_cache": HALF(24, 2, 64)}, "k_cache.dim() is 3, expected 4"),
    "k-rank": ("ragged", {"k": HALF(2, 3, 2, 64)}, "k.dim() is 4, expected 3 ((total_new"),
    "k-dtype": ("new", {"k": FLOAT}, "k.dtype is torch.float32, expected torch.bfloat16 (dtype of"),
    "k_cache-dtype": ("plain", {"k_cache": HALF(2, 12, 2, 64).half()}, "k_cache.dtype is torch.fl"),
    "v_cache-device": (
        "plain",
        {"v_cache": HALF(2, 12, 2, 32, device="meta")},
        "v_cache.device is meta, expected cpu (device of q)",
    ),
    "k-stride": (
        "new",
        {"k": HALF(2, 3, 64, 2).transpose(2, 3)},
        "k.stride(-1) is 2, expected 1 (pass k.contiguous()",
    ),
    "k_cache-dim": (
        "plain",
        {"k_cache": HALF(2, 12, 2, 32)},
        "k_cache.shape[-1] is 32, expected 64 (q.shape[-1])",
    ),
    "v_cache-heads": (
        "plain",
        {"v_cache": HALF(2, 12, 4, 32)},
        "v_cache.shape[2] is 4, expected 2 (k_cache.shape[2])",
    ),
    "v_cache-rows": (
        "plain",
        {"v_cache": HALF(2, 11, 2, 32)},
        "v_cache.shape[1] is 11, expected 12 (k_cache.shape[1])",
    ),
    "k-dim": ("new", {"k": HALF(2, 3, 2, 32)}, "k.shape[-1] is 32, expected 64 (k_cache.shape"),
    "k-heads": ("new", {"k": HALF(2, 3, 1, 64)}, "k.shape[-2] is 1, expected 2 (k_cache.shape"),
    "v-dim": ("new", {"v": HALF(2, 3, 2, 64)}, "v.shape[-1] is 64, expected 32 (v_cache.shape"),
    "v-rows": ("new", {"v": HALF(2, 2, 2, 32)}, "v.shape[1] is 2, expected 3 (k.shape[1])"),
    "v-rows-packed": ("ragged", {"v": HALF(4, 2, 32)}, "v.shape[0] is 4, expected 5 (k.shape[0])"),
    "k-batch": (
        "new",
        {"k": HALF(3, 3, 2, 64), "v": HALF(3, 3, 2, 32)},
        "k.shape[0] is 3, expected 2 (batch of q)",
    ),
    "qv-dim": ("qv", {"qv": HALF(2, 3, 4, 64)}, "qv.shape[-1] is 64, expected 32 (v_cache.shape"),
    "qv-heads": ("qv", {"qv": HALF(2, 3, 2, 32)}, "qv.shape[2] is 2, expected 4 (q.shape[2])"),
    "qv-dim-only": ("qv only", {"qv": HALF(2, 3, 4, 64)}, "qv.shape[-1] is 64, expected 32"),
    "heads": ("plain", {"q": HALF(2, 3, 3, 64)}, "num_heads_q is 3, expected a multiple of 2"),
    "batch": (
        "plain",
        {"q": HALF(1, 3, 4, 64), "cache_seqlens": 3},
        "k_cache.shape[0] is 2, expected 1 (batch of q; cache_batch_idx chooses rows",
    ),
    "cache-written": (
        "new",
        {"k_cache": HALF(1, 12, 2, 64).expand(2, -1, -1, -1)},
        "k_cache.stride(0) is 0, expected nonzero (it is written, its rows overlap)",
    ),
    "page_size": (
        "paged",
        {"k_cache": HALF(8, 0, 2, 64), "v_cache": HALF(8, 0, 2, 32)},
        "v_cache.shape[1] is 0, expected at least 1 (page size)",
    ),
    "cos-rank": ("new rotary", {"rotary_cos": HALF(12)}, "rotary_cos.dim() is 1, expected 2"),
    "cos-dtype": (
        "new rotary",
        {"rotary_cos": torch.zeros(12, 16)},
        "rotary_cos.dtype is torch.float32, expected torch.bfloat16 (dtype of q)",
    ),
    "sin-shape": (
        "new rotary",
        {"rotary_sin": HALF(12, 8)},
        "rotary_sin.shape is (12, 8), expected (12, 16) (rotary_cos.shape)",
    ),
    "rotary-wide": (
        "new rotary",
        {"rotary_cos": HALF(12, 40), "rotary_sin": HALF(12, 40)},
        "2 * rotary_cos.shape[1] is 80, expected a multiple of 16 up to 64",
    ),
    "rotary-odd": (
        "new rotary",
        {"rotary_cos": HALF(12, 4), "rotary_sin": HALF(12, 4)},
        "2 * rotary_cos.shape[1] is 8, expected a multiple of 16 up to 64",
    ),
    "sinks": ("plain", {"sinks": HALF(2)}, "sinks.shape is (2,), expected (4,) (num_heads of q)"),
    "sinks-type": ("plain", {"sinks": 0.5}, "sinks is of type float, expected a torch.Tensor"),
    "out-shape": ("plain", {"out": HALF(2, 3, 4, 64)}, "out.shape is (2, 3, 4, 64), expected (2,"),
    # Index tensors.
    "cache_seqlens-kind": ("plain", {"cache_seqlens": 2.0}, "cache_seqlens is 2.0, expected an in"),
    "cache_seqlens-bool": ("plain", {"cache_seqlens": True}, "cache_seqlens is True, expected an"),
    "cache_seqlens-int": ("plain", {"cache_seqlens": 13}, "cache_seqlens is 13, expected 0 to 12"),
    "cache_seqlens-new": (
        "new",
        {"cache_seqlens": 10},
        "cache_seqlens is 10, expected 0 to 9 (capacity of the cache 12, 3 new keys)",
    ),
    "cache_seqlens-dtype": (
        "plain",
        {"cache_seqlens": torch.tensor([5, 7])},
        "cache_seqlens.dtype is torch.int64, expected torch.int32",
    ),
    "cache_seqlens-shape": (
        "plain",
        {"cache_seqlens": int32(5, 7, 1)},
        "cache_seqlens.shape[0] is 3, expected 2 (batch of q)",
    ),
    "cache_seqlens-value": (
        "plain",
        {"cache_seqlens": int32(5, 13)},
        "cache_seqlens[1] is 13, expected 0 to 12 (capacity of the cache 12)",
    ),
    "cache_seqlens-room": (
        "new",
        {"cache_seqlens": int32(5, 10)},
        "cache_seqlens[1] is 10, expected 0 to 9 (capacity of the cache 12, 3 new keys)",
    ),
    "cache_seqlens-room-paged": (
        "paged ragged",
        {"cache_seqlens": int32(5, 9)},
        "cache_seqlens[1] is 9, expected 0 to 8 (capacity of the cache 12, 4 new keys)",
    ),
    "cache_seqlens-negative": ("padded", {"cache_seqlens": int32(-1, 7)}, "cache_seqlens[0] is -1"),
    "new-long": (
        "new",
        {"k": HALF(2, 13, 2, 64), "v": HALF(2, 13, 2, 32)},
        "number of new keys is 13, expected at most 12 (capacity of the cache)",
    ),
    "batch_idx-rank": (
        "chosen",
        {"cache_batch_idx": int32([3, 0])},
        "cache_batch_idx.dim() is 2, expected 1",
    ),
    "batch_idx-value": (
        "chosen",
        {"cache_batch_idx": int32(3, 4)},
        "cache_batch_idx[1] is 4, expected 0 to 3 (rows of the cache)",
    ),
    "batch_idx-negative": ("chosen", {"cache_batch_idx": int32(-1, 0)}, "cache_batch_idx[0] is -1"),
    "batch_idx-twice": (
        "chosen new",
        {"cache_batch_idx": int32(3, 3)},
        "cache_batch_idx[1] is 3, expected a row of its own (new keys are appended, and cache_batc",
    ),
    "batch_idx-empty": (
        "chosen",
        {"k_cache": HALF(0, 12, 2, 64), "v_cache": HALF(0, 12, 2, 32)},
        "v_cache.shape[0] is 0, expected at least 1 (cache_batch_idx chooses among its rows)",
    ),
    "leftpad-shape": ("padded", {"cache_leftpad": int32(1)}, "cache_leftpad.shape[0] is 1, exp"),
    "leftpad-value": (
        "padded",
        {"cache_leftpad": int32(1, 8)},
        "cache_leftpad[1] is 8, expected 0 to 7 (cache_seqlens)",
    ),
    "leftpad-negative": ("padded", {"cache_leftpad": int32(-1, 0)}, "cache_leftpad[0] is -1, expe"),
    "page_table-rank": ("paged", {"page_table": int32(0, 1)}, "page_table.dim() is 1, expected 2"),
    "page_table-batch": ("paged", {"page_table": int32([0, 1, 2])}, "page_table.shape[0] is 1, ex"),
    "page_table-value": (
        "paged",
        {"page_table": int32([0, 5, 99], [1, 8, 2])},
        "page_table[1, 1] is 8, expected 0 to 7 (pages of the cache)",
    ),
    "page_table-new": (
        "paged new",
        {"page_table": int32([0, 5, 99], [1, 7, -1])},
        "page_table[1, 2] is -1, expected 0 to 7 (pages of the cache)",
    ),
    "page_table-shared": (
        "paged new",
        {"page_table": int32([0, 5, 3], [1, 5, 2])},
        "page_table[0, 1] is 5, expected a page of its own (a new key is appended in its slot 1",
    ),
    "page_table-both": (
        "paged new",
        {"cache_seqlens": int32(5, 5), "page_table": int32([0, 5, 3], [1, 5, 2])},
        "page_table[0, 1] is 5, expected a page of its own",
    ),
    "cu_seqlens_q-start": (
        "packed",
        {"cu_seqlens_q": int32(1, 2, 6)},
        "cu_seqlens_q[0] is 1, expected 0",
    ),
    "cu_seqlens_q-end": ("packed", {"cu_seqlens_q": int32(0, 2, 7)}, "cu_seqlens_q[-1] is 7, exp"),
    "cu_seqlens_q-empty": (
        "packed",
        {"cu_seqlens_q": int32()},
        "cu_seqlens_q.shape[0] is 0, expected at least 1",
    ),
    "cu_seqlens_k_new-shape": (
        "ragged",
        {"cu_seqlens_k_new": int32(0, 5)},
        "cu_seqlens_k_new.shape[0] is 2, expected 3",
    ),
    "cu_seqlens_k_new-order": (
        "ragged",
        {"cu_seqlens_k_new": int32(0, 5, 4)},
        "cu_seqlens_k_new[2] is 4, expected at least 5",
    ),
    "cu_seqlens_k_new-end": (
        "ragged",
        {"cu_seqlens_k_new": int32(0, 1, 6)},
        "cu_seqlens_k_new[-1] is 6, expected at most 5 (k.shape[0])",
    ),
    "rotary_seqlens-short": (
        "new rotary",
        {"rotary_seqlens": int32(9, 10)},
        "rotary_cos.shape[0] is 12, expected at least 13 (3 positions from rotary_seqlens[1] = 10)",
    ),
    "rotary_seqlens-negative": (
        "new rotary",
        {"rotary_seqlens": int32(0, -1)},
        "rotary_seqlens[1] is -1, expected at least 0",
    ),
    "rotary-short-queries": (
        "new rotary",
        {"q": HALF(2, 6, 4, 64), "causal": True, "out": None},
        "rotary_cos.shape[0] is 12, expected at least 13 (6 positions from cache_seqlens[1] = 7)",
    ),
    # Numbers and flags.
    "ver": ("plain", {"ver": 5}, "ver is 5, expected 3 or 4"),
    "ver-kind": ("plain", {"ver": "3"}, "ver is '3', expected 3 or 4"),
    "sm_margin": ("plain", {"sm_margin": -1}, "sm_margin is -1, expected an integer of at least 0"),
    "sm_margin-kind": ("plain", {"sm_margin": 1.5}, "sm_margin is 1.5, expected an integer"),
    "rotary_interleaved": ("plain", {"rotary_interleaved": 1}, "rotary_interleaved is 1, expected"),
    "causal": ("plain", {"causal": 1}, "causal is 1, expected True or False"),
    "return_softmax_lse": ("plain", {"return_softmax_lse": 1}, "return_softmax_lse is 1, expected"),
    "num_splits": ("plain", {"num_splits": -1}, "num_splits is -1, expected an integer of at leas"),
    "pack_gqa": ("plain", {"pack_gqa": 1}, "pack_gqa is 1, expected True or False"),
    "softcap": ("plain", {"softcap": -1.0}, "softcap is -1.0, expected 0 (none) or a positive"),
    "softmax_scale": ("plain", {"softmax_scale": "1"}, "softmax_scale is '1', expected a finite"),
    "window_size": ("plain", {"window_size": 3}, "window_size is 3, expected a pair"),
    "attention_chunk": ("plain", {"attention_chunk": -1}, "attention_chunk is -1, expected an int"),
    "max_seqlen_q": ("packed", {"max_seqlen_q": 3}, "max_seqlen_q is 3, expected at least 4"),
    "max_seqlen_q-kind": ("plain", {"max_seqlen_q": 2.0}, "max_seqlen_q is 2.0, expected an integ"),
    "max_seqlen_k": ("new", {"max_seqlen_k": 9}, "max_seqlen_k is 9, expected at least 10 (longes"),
    "max_seqlen_k-paged": ("paged", {"max_seqlen_k": 6}, "max_seqlen_k is 6, expected at least 7"),
    "max_seqlen_k-kind": ("plain", {"max_seqlen_k": "7"}, "max_seqlen_k is '7', expected an integ"),
    "q_descale": ("plain", {"q_descale": torch.ones(2, 2)}, "q_descale is given, expected None (f"),
    "k_descale": ("plain", {"k_descale": torch.ones(2, 2)}, "k_descale is given, expected None (f"),
    "v_descale": ("new", {"v_descale": torch.ones(2, 2)}, "v_descale is given, expected None (for"),
    "block_mask": ("plain", {"block_mask": 3}, "block_mask is of type int, expected a"),
    "score_mod": ("plain", {"score_mod": 3}, "score_mod is of type int, expected a function"),
    "aux_tensors-alone": (
        "plain",
        {"aux_tensors": (FLOAT,)},
        "aux_tensors is given without score_mod, expected None",
    ),
    "aux_tensors-portable": (
        "plain",
        {"aux_tensors": (FLOAT,), "score_mod": portable},
        "aux_tensors is given with a portable score_mod, expected None (a score_mod of five param",
    ),
    "aux_tensors-kind": ("plain", {"aux_tensors": 1, "score_mod": native}, "aux_tensors is of typ"),
    "aux_tensors-element": (
        "plain",
        {"aux_tensors": [1], "score_mod": native},
        "aux_tensors[0] is of type int, expected a torch.Tensor",
    ),
    "aux_tensors-partial": (
        "plain",
        {"aux_tensors": (FLOAT,), "score_mod": functools.partial(native)},
        "aux_tensors is given beside a score_mod that has its own, expected None (set the attribut",
    ),
}  # fmt: skip

UNSUPPORTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "native": (
        "new",
        {"score_mod": native, "aux_tensors": (FLOAT,)},
        "score_mod is in the native form",
    ),
    "gradient": (
        "new",
        {"k": HALF(2, 3, 2, 64).requires_grad_(), "out": None},
        "new keys are appended while an argument requires grad: the cache is written in place",
    ),
    "gradient-q": (
        "new",
        {"q": HALF(2, 3, 4, 64).requires_grad_(), "out": None},
        "call under torch.no_grad()",
    ),
}


def assert_refused(error: type[Exception], kind: str, change: dict[str, Any], text: str) -> None:
    """The call is refused in these words, and every tensor of it is as it was."""
    a = call_of(kind) | {"out": HALF(2, 3, 4, 32)} | change
    if "cu_seqlens_q" in a:
        a["out"] = HALF(6, 4, 32)
    tensors = {name: value for name, value in a.items() if isinstance(value, torch.Tensor)}
    copies = {name: value.detach().clone() for name, value in tensors.items()}
    with pytest.raises(error, match=re.escape(text)):
        flash_attn_with_kvcache(**a)
    for name, copy in copies.items():
        assert copy.is_meta or torch.equal(tensors[name], copy), name


@pytest.mark.parametrize("name", INVALID)
def test_wrong_requests_are_value_errors_by_name(name: str):
    assert_refused(InvalidProblem, *INVALID[name])


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_nothing_here_does_is_not_implemented(name: str):
    assert_refused(UnsupportedProblem, *UNSUPPORTED[name])


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "k", "v", "qv"])
def test_out_is_memory_of_its_own(name: str):
    a = call_of("new qv")
    memory = torch.zeros(2 * 12 * 2 * 64, dtype=torch.bfloat16)
    a[name] = memory[: a[name].numel()].view(a[name].shape)
    out = memory[: 2 * 3 * 4 * 32].view(2, 3, 4, 32)
    with pytest.raises(InvalidProblem, match=f"out is the memory of {name}, expected memory of"):
        flash_attn_with_kvcache(**a, out=out)


def test_out_and_gradients_do_not_go_together():
    a = call_of("qv")
    a["qv"].requires_grad_()
    with pytest.raises(InvalidProblem, match="out is given while an argument requires grad"):
        flash_attn_with_kvcache(**a, out=HALF(2, 3, 4, 32))


def test_float8_is_unsupported_by_name_with_and_without_scales():
    a = call_of("plain")
    for name in ("q", "k_cache", "v_cache"):
        a[name] = a[name].to(torch.float8_e4m3fn)
    for scales in ({}, {"q_descale": torch.ones(2, 2)}):
        with pytest.raises(UnsupportedProblem, match="float8_e4m3fn: no fp8 kernel exists yet"):
            flash_attn_with_kvcache(**a, **scales)


def test_a_callback_that_fails_leaves_the_cache_alone():
    def broken(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        raise ZeroDivisionError("in a callback")

    a = call_of("new")
    a["k"] += 1
    with pytest.raises(ZeroDivisionError):
        flash_attn_with_kvcache(**a, score_mod=broken)
    assert (a["k_cache"] == 0).all() and (a["v_cache"] == 0).all()


# ---- On a GPU ------------------------------------------------------------------------------------

CACHES = {"k_cache": 64, "v_cache": 32}  # head dimensions


def on_toy(a: dict[str, Any]) -> dict[str, Any]:
    """The same call with its tensors on a GPU that is not there."""
    return {name: toy_gpu.on_gpu(value) for name, value in a.items()}


# Kinds of calls with the features that they require beyond those of the first kernel.
FEATURES: dict[str, tuple[str, dict[str, Any], set[Feature]]] = {
    "append_kv": ("new", {}, {Feature.APPEND_KV}),
    "append_kv-packed": ("ragged", {}, {Feature.APPEND_KV}),
    "rotary": ("new rotary", {}, {Feature.APPEND_KV, Feature.ROTARY}),
    "qv": ("qv", {}, {Feature.QV}),
    "only_qv": ("qv only", {}, {Feature.QV}),
    "all": (
        "paged chosen padded ragged packed rotary",
        {},
        {
            Feature.APPEND_KV,
            Feature.BATCH_IDX,
            Feature.LEFTPAD,
            Feature.PAGED_KV,
            Feature.ROTARY,
        },
    ),
    "int": ("new", {"cache_seqlens": 5}, {Feature.APPEND_KV}),
}


DECLARED = SM90.features | APPEND.features
UNDECLARED = [name for name, (_, _, features) in FEATURES.items() if features - DECLARED]


def lacked(features: set[Feature]) -> str:
    """What the refusal says of them: those that are not declared."""
    missing = sorted(feature.value for feature in features - DECLARED)
    return f"FlashAttentionForwardSm90 lacks {'; '.join(missing)} \\("


@pytest.fixture
def fake_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors on a Hopper GPU that need not exist: refusals come before anything touches it."""
    monkeypatch.setenv("FLASH_CUTE_ARCH", "sm_90a")
    monkeypatch.setattr(selection, "KERNELS", (SM90,))
    monkeypatch.setattr(current, "current_device", lambda: -1)  # no call is a repeated one
    with FakeTensorMode():
        yield


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("feature", UNDECLARED)
def test_features_without_a_kernel_are_refused_by_name(feature: str, fake_hopper: None):
    kind, change, features = FEATURES[feature]
    with pytest.raises(UnsupportedProblem, match=lacked(features)):
        flash_attn_with_kvcache(**call_of(kind, "cuda") | change)


def test_one_length_is_checked_on_a_gpu_too(fake_hopper: None):
    a = call_of("new", "cuda") | {"cache_seqlens": 10}
    with pytest.raises(InvalidProblem, match=r"cache_seqlens is 10, expected 0 to 9"):
        flash_attn_with_kvcache(**a)


def test_splits_are_launched_and_merged(monkeypatch: pytest.MonkeyPatch):
    """Few rows by the last tile of each, many by a kernel of their own."""
    launches = toy_gpu.install(monkeypatch)
    for _ in range(2):
        flash_attn_with_kvcache(**on_toy(call_of("plain")), num_splits=2)
    assert [key.spec.is_split for key in launches.launched] == [True, True]
    assert launches.named.arrivals > 0 and launches.named.partials > 0
    monkeypatch.setattr(splitting, "ROWS_OF_LAST_TILE", 0)
    monkeypatch.setattr(launch, "_plans", {})
    flash_attn_with_kvcache(**on_toy(call_of("plain")), num_splits=2)
    first, merge = launches.launched[2:]
    assert first.spec.is_split and merge.out_dtype == first.spec.dtype


def test_pages_reach_a_kernel_that_declares_them(monkeypatch: pytest.MonkeyPatch):
    """One that does not refuses them by name."""
    launches = toy_gpu.install(monkeypatch)
    a = on_toy(call_of("paged"))  # with pages of 8 keys, which the kernel asks for
    a |= {name: toy_gpu.on_gpu(HALF(8, 8, 2, dim)) for name, dim in CACHES.items()}
    for features in (SM90.features - {Feature.PAGED_KV}, SM90.features | {Feature.PAGED_KV}):
        declared = dataclasses.replace(SM90, features=features)
        monkeypatch.setattr(selection, "KERNELS", (declared,))
        if Feature.PAGED_KV not in features:
            with pytest.raises(UnsupportedProblem, match="lacks paged_kv "):
                flash_attn_with_kvcache(**a)
            assert not launches.launched
            continue
        for _ in range(2):
            flash_attn_with_kvcache(**a)
            assert launches.named.page_table == a["page_table"].data_ptr()
            assert launches.named.seqused_k == a["cache_seqlens"].data_ptr()
        assert len(launches.launched) == 2 and len(launches.looked_up) == 1


@pytest.mark.parametrize("num_splits", [0, 1])
def test_no_splits_need_no_feature(num_splits: int, monkeypatch: pytest.MonkeyPatch):
    launches = toy_gpu.install(monkeypatch)
    flash_attn_with_kvcache(**on_toy(call_of("plain")), num_splits=num_splits)
    assert len(launches.launched) == 1


def test_aux_tensors_reach_a_native_callback(monkeypatch: pytest.MonkeyPatch):
    """They become launch arguments of a copy of the function, which itself stays as it is."""
    launches = toy_gpu.install(monkeypatch)
    a = on_toy(call_of("plain"))
    tables = [toy_gpu.on_gpu(torch.zeros(4)) for _ in range(2)]
    for table in tables:
        flash_attn_with_kvcache(**a, score_mod=native, aux_tensors=(table,))
        assert launches.captured[0] == table.data_ptr()
    assert not hasattr(native, "aux_tensors")
    monkeypatch.setattr(native, "aux_tensors", tuple(tables), raising=False)
    with pytest.raises(InvalidProblem, match="aux_tensors is given beside a score_mod that has"):
        flash_attn_with_kvcache(**a, score_mod=native, aux_tensors=(tables[0],))


@pytest.mark.gpu
@pytest.mark.parametrize("feature", UNDECLARED)
def test_features_are_refused_on_a_gpu_that_is_there(
    hopper: None, feature: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(selection, "KERNELS", (SM90,))
    kind, change, features = FEATURES[feature]
    a = call_of(kind, "cuda") | change
    copies = {name: a[name].clone() for name in ("k_cache", "v_cache") if a[name] is not None}
    with pytest.raises(UnsupportedProblem, match=lacked(features)):
        flash_attn_with_kvcache(**a)
    for name, copy in copies.items():
        checks.assert_same_bits(name, a[name], copy)
