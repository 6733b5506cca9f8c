"""Every pair of kernel features at least once, on a GPU against the float64 reference.

The cases are a covering design: each value of each factor meets each value of every other factor.
"""

import itertools
import random

import checks
import pytest
import torch
from covering import all_pairs, covering_design, pairs_of
from torch.nn.attention.flex_attention import create_block_mask

from flash_cute import flash_attn_func, flash_attn_varlen_func
from flash_cute.problem import Lengths

FACTORS = {
    "dims": [(64, 64), (128, 128), (192, 128), (256, 256), (96, 96), (72, 40)],
    "heads": [(4, 4), (10, 2), (3, 1)],
    "dtype": [torch.bfloat16, torch.float16],
    "mask": [
        {},
        {"causal": True},
        {"window_size": (100, None)},
        {"window_size": (None, 70)},
        {"window_size": (200, 33)},
        {"window_size": (-5, 90)},
        {"causal": True, "window_size": (129, None)},
        {"attention_chunk": 96},
        {"attention_chunk": 256, "causal": True},
        {"attention_chunk": 64, "window_size": (40, 200)},
    ],
    "lengths": ["dense", "packed", "packed_q", "packed_k", "used_k", "used_qk", "packed_used"],
    "softcap": [0.0, 12.0],
    "sink": [None, torch.bfloat16, torch.float16, torch.float32],
    "scale": [None, -0.2],
    "sizes": ["long_k", "long_q", "short"],
    "callbacks": [(), ("score_mod",), ("mask_mod",), ("score_mod", "mask_mod")],
    "blocks": [None, 128, (64, 192)],
    "pack_gqa": [None, True, False],
}
SIZES = {  # lengths of three sequences: queries, keys
    "long_k": ([130, 0, 257], [700, 64, 1023]),
    "long_q": ([300, 65, 190], [129, 0, 200]),
    "short": ([1, 64, 17], [5, 128, 333]),
}


CASES = covering_design(FACTORS)


def label(case: dict) -> str:
    mask = "_".join(f"{k[:6]}{v}" for k, v in case["mask"].items()).replace(" ", "") or "full"
    d, dv = case["dims"]
    sink = "" if case["sink"] is None else f"-sink_{str(case['sink'])[6:]}"
    cap = f"-cap{case['softcap']:g}" if case["softcap"] else ""
    hq, hkv = case["heads"]
    kind = f"{str(case['dtype'])[6:]}-d{d}v{dv}-h{hq}k{hkv}"
    more = [name for name in case["callbacks"]]
    more += [f"blocks{case['blocks']}"] if case["blocks"] else []
    more += ["pack"] if case["pack_gqa"] else ["nopack"] if case["pack_gqa"] is False else []
    rest = "-".join([f"{case['sizes']}{cap}{sink}", f"scale{case['scale']}", *more])
    return f"{kind}-{mask}-{case['lengths']}-{rest}".replace(" ", "")


def test_design_covers_every_pair_and_is_the_same_everywhere():
    covered = set().union(*map(pairs_of, CASES))
    assert covered == all_pairs(FACTORS)
    assert len(CASES) < 120
    assert [label(case) for case in covering_design(FACTORS)] == [label(case) for case in CASES]


def operand(rows: int, heads: int, dim: int, case: dict, *, seed: int, padded: int = 0):
    shape = (padded, rows, heads, dim) if padded else (rows, heads, dim)
    generator = checks.generator("cuda", seed)
    x = torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32)
    return x.to(case["dtype"])


def starts(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")


def build(case: dict):
    """Operands and length arguments; what lies outside the sequences is NaN where it may be."""
    lengths_q, lengths_k = SIZES[case["sizes"]]
    (d, dv), (hq, hkv), kind = case["dims"], case["heads"], case["lengths"]
    batch = len(lengths_q)
    lengths = {}
    if kind in ("packed", "packed_q", "packed_used"):
        q = operand(sum(lengths_q), hq, d, case, seed=1)
        lengths["cu_seqlens_q"] = starts(lengths_q)
    else:
        q = operand(max(lengths_q), hq, d, case, seed=1, padded=batch)
    if kind in ("packed", "packed_k", "packed_used"):
        k, v = (operand(sum(lengths_k), hkv, dim, case, seed=2 + dim) for dim in (d, dv))
        lengths["cu_seqlens_k"] = starts(lengths_k)
    else:
        rows = max(lengths_k)
        k, v = (operand(rows, hkv, dim, case, seed=2 + dim, padded=batch) for dim in (d, dv))
    as_used = {"device": "cuda", "dtype": torch.int32}
    if kind in ("used_k", "used_qk"):
        lengths["seqused_k"] = torch.tensor(lengths_k, **as_used)
        for b, length in enumerate(lengths_k):
            k[b, length:], v[b, length:] = float("nan"), float("nan")
    if kind == "used_qk":
        lengths["seqused_q"] = torch.tensor(lengths_q, **as_used)
    if kind == "packed_used":
        used = [max(0, length - 7) for length in lengths_k]
        lengths["seqused_k"] = torch.tensor(used, **as_used)
        lengths["seqused_q"] = torch.tensor([max(0, n - 3) for n in lengths_q], **as_used)
    return (q, k, v), lengths


def modifiers(case: dict) -> dict:
    """The callbacks and the block mask of a case."""
    lengths_q, lengths_k = SIZES[case["sizes"]]
    slopes = torch.linspace(0.01, 0.3, case["heads"][0], device="cuda")
    hidden = torch.arange(2000, device="cuda") % 7 == 2

    def score_mod(score, b, h, q_idx, kv_idx):
        return score - slopes[h] * (q_idx - kv_idx).abs() / (b + 1)

    def mask_mod(b, h, q_idx, kv_idx):
        return ~hidden[kv_idx + 3 * h] | (q_idx % 11 == b)

    def of_blocks(b, h, q_idx, kv_idx):
        return (q_idx // 150 + kv_idx // 130 + b) % 3 != 0

    found = {
        name: {"score_mod": score_mod, "mask_mod": mask_mod}[name] for name in case["callbacks"]
    }
    if case["blocks"]:
        sizes = (len(lengths_q), None, max(lengths_q), max(lengths_k))
        found["block_mask"] = create_block_mask(of_blocks, *sizes, "cuda", case["blocks"])
    return found


def rows_in_use(case: dict) -> torch.Tensor | slice:
    """Which rows of a packed or padded result belong to a sequence."""
    lengths_q, _ = SIZES[case["sizes"]]
    if case["lengths"] == "used_qk":
        row = torch.arange(max(lengths_q), device="cuda")
        return row[None] < torch.tensor(lengths_q, device="cuda")[:, None]
    if case["lengths"] == "packed_used":
        flags = [[i < n - 3 for i in range(n)] for n in lengths_q]
        return torch.tensor(list(itertools.chain(*flags)), device="cuda")
    return slice(None)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=label)
def test_pairs_of_features(gpu: None, case: dict):
    operands, lengths = build(case)
    options = {"softmax_scale": case["scale"], "softcap": case["softcap"], **case["mask"]}
    if case["sink"] is not None:
        options["sink"] = torch.linspace(-2, 3, case["heads"][0], device="cuda").to(case["sink"])
    options |= modifiers(case)
    function = flash_attn_varlen_func if lengths else flash_attn_func
    pack = {"pack_gqa": case["pack_gqa"]}
    out, lse = function(*operands, **lengths, **options, **pack, return_lse=True)
    exact, lowprec = checks.oracle(*operands, Lengths(**lengths), **options)
    keep = rows_in_use(case)
    by_row = [(o[keep], s.movedim(-2, -1)[keep]) for o, s in ((out, lse), exact, lowprec)]
    checks.assert_attention(*by_row)


@pytest.mark.gpu
def test_hundred_packed_sequences_equal_each_alone(gpu: None):
    rng = random.Random(1)
    lengths = [rng.choice((0, 1, 5, 64, 127, 128, 129, 400)) for _ in range(100)]
    cu = starts(lengths)
    case = {"dtype": torch.bfloat16}
    q, k, v = (operand(sum(lengths), 2, 128, case, seed=seed) for seed in range(3))
    arguments = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "causal": True}
    out = flash_attn_varlen_func(q, k, v, **arguments)
    for begin, end in itertools.pairwise(cu.tolist()):
        rows = slice(begin, end)
        alone = flash_attn_func(q[None, rows], k[None, rows], v[None, rows], causal=True)
        checks.assert_same_bits("out", out[rows], alone[0])


@pytest.mark.gpu
def test_hints_never_recompile_and_change_nothing(gpu: None):
    from flash_cute import cache_info

    lengths = [300, 20, 700]
    q, k, v = (operand(sum(lengths), 2, 64, {"dtype": torch.bfloat16}, seed=s) for s in range(3))
    arguments = {"cu_seqlens_q": starts(lengths), "cu_seqlens_k": starts(lengths)}
    first = flash_attn_varlen_func(q, k, v, **arguments)
    compiles = cache_info().compiles
    hints = [700, 1020, torch.tensor(700, device="cuda"), torch.tensor(800), None]
    for hint in hints * 4:
        out = flash_attn_varlen_func(q, k, v, **arguments, max_seqlen_q=hint, max_seqlen_k=hint)
        checks.assert_same_bits("out", out, first)
    assert cache_info().compiles == compiles
