"""The features that a kernel declares and a call requires.

Selection compares the two sets. This enumeration is the one list behind ``is_supported``, the
refusals, the support table of the documentation and the test matrix, so they cannot disagree.
Limits that are numbers (dtypes, head dimensions) are fields of a kernel's declaration instead.
"""

from __future__ import annotations

import enum


class Feature(enum.Enum):
    """One thing that a call may ask of a kernel; ``doc`` says it in one line."""

    doc: str

    CAUSAL = ("causal", "causal mask, aligned at the bottom right")
    WINDOW = ("window", "sliding window with inclusive left and right bounds")
    ATTENTION_CHUNK = ("attention_chunk", "keys confined to the aligned chunk of the query")
    SOFTCAP = ("softcap", "scores capped by softcap * tanh(score / softcap)")
    SINK = ("sink", "one extra logit per query head in the softmax denominator")
    GQA = ("gqa", "fewer key/value heads than query heads, at any whole ratio")
    LSE = ("lse", "log-sum-exp of each row returned beside the output")
    VARLEN = ("varlen", "packed sequences delimited by cu_seqlens")
    SEQUSED = ("seqused", "used length of each sequence read on the device")
    PAGED_KV = ("paged_kv", "keys and values in pages reached through a page table")
    SPLIT_KV = ("split_kv", "keys split over several blocks and combined afterwards")
    PACK_GQA = ("pack_gqa", "query heads of one key/value head packed into one tile")
    SCORE_MOD = ("score_mod", "user function applied to every score")
    MASK_MOD = ("mask_mod", "user function that decides which keys a query sees")
    BLOCK_SPARSITY = ("block_sparsity", "block mask that skips whole blocks of keys")
    HEAD_DIM_V = ("head_dim_v", "head dimension of v different from that of q and k")
    QV = ("qv", "second query multiplied with v (absorbed MLA)")
    APPEND_KV = ("append_kv", "new keys and values written into the cache")
    ROTARY = ("rotary", "rotary embedding of queries and new keys")
    BATCH_IDX = ("batch_idx", "row of the cache chosen per sequence")
    LEFTPAD = ("leftpad", "first valid cache position given per sequence")
    FP8 = ("fp8", "8-bit floating-point inputs with descale factors")
    GRADIENT = ("gradient", "backward pass through autograd")

    def __new__(cls, label: str, doc: str) -> Feature:
        member = object.__new__(cls)
        member._value_ = label
        member.doc = doc
        return member
