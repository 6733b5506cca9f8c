"""Dense attention forward: what a kernel is judged by, and the CPU backend with it.

On cpu the public function is compared with the definition in float64; on cuda a kernel is compared
with the float64 reference. Small sizes on cpu, the grid on cuda. lse is asked for throughout, so
that the cases share their compiled kernels; test_lse_is_optional covers the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import checks
import pytest
import torch
from checks import Case

from flash_cute import flash_attn_func

DIMS = [64, 96, 128, 192, 256, (192, 128), (128, 96)]
ODD_DIMS = [8, 40, 72, 80, 136, 200, 248, (72, 40), (136, 80)]
BOTH = (False, True)

FEW = {"batch": 2, "num_heads_q": 2, "num_heads_kv": 1}


def dims(pair: int | tuple[int, int]) -> dict[str, int]:
    """The head dimensions of a case: one for all, or (of q and k, of v)."""
    if isinstance(pair, int):
        return {"head_dim": pair}
    return {"head_dim": pair[0], "head_dim_v": pair[1]}


def on_devices(cpu: Iterable[Case], cuda: Iterable[Case]) -> Any:
    """Parametrise a test with the cases of each device."""
    cases = [
        *(pytest.param("cpu", case, id=f"cpu-{case.id}", marks=pytest.mark.cpu) for case in cpu),
        *(pytest.param("cuda", case, id=f"cuda-{case.id}", marks=pytest.mark.gpu) for case in cuda),
    ]
    return pytest.mark.parametrize(("device", "case"), cases, indirect=["device"])


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    """Call the function; on a GPU, results that are not written show as NaN."""
    if q.is_cuda:
        shape = (*q.shape[:-1], v.shape[-1])
        poison = torch.full(shape, float("nan"), dtype=q.dtype, device=q.device)
        poison_lse = torch.full(q.shape[:-1], float("nan"), device=q.device)
        del poison, poison_lse  # back to the allocator, which hands the same memory out again
    return flash_attn_func(q, k, v, **options)


def check(case: Case, operands: checks.Operands, **options: Any) -> None:
    """Run one case and apply the tolerance rule to out and lse."""
    q, k, v = operands
    got = attend(q, k, v, causal=case.causal, return_lse=True, **options)
    exact, lowprec = checks.oracle(q, k, v, causal=case.causal, **options)
    if not q.is_cuda:
        visible = checks.mask_by_definition(q.shape[1], k.shape[1], causal=case.causal)
        scale = options.get("softmax_scale")
        exact = checks.attention_by_definition(q, k, v, visible, scale=scale)
    checks.assert_attention(got, exact, lowprec)


# ---- Sizes ---------------------------------------------------------------------------------------

# (batch, num_heads_q, num_heads_kv, seqlen_q, seqlen_k); groups of one or two heads where queries
# are so few that heads share tiles: others have kernels of their own, which test_pack_gqa is for.
SIZES = [
    (1, 1, 1, 1, 1),
    (2, 4, 4, 64, 64),
    (1, 6, 3, 63, 65),
    (2, 2, 1, 65, 127),
    (1, 5, 1, 127, 128),
    (2, 7, 1, 128, 129),
    (1, 3, 1, 129, 511),
    (2, 4, 2, 511, 129),
    (2, 6, 3, 113, 203),
    (3, 2, 2, 300, 77),
    (1, 8, 4, 64, 1000),
    (1, 4, 4, 1000, 64),
    (2, 8, 4, 1000, 1000),
    (3, 2, 2, 1, 2049),
    (1, 2, 1, 2049, 1),
    (1, 2, 2, 2049, 2049),
]
FEW_SIZES = [(2, 4, 2, 64, 64), (1, 3, 1, 129, 203), (2, 2, 1, 203, 65), (1, 2, 2, 1000, 1000)]


def grid(
    sizes: Iterable[tuple[int, ...]], pairs: Iterable[Any], dtype: torch.dtype = torch.bfloat16
) -> list[Case]:
    return [
        Case(*size, **dims(pair), dtype=dtype, causal=causal)  # pyright: ignore[reportCallIssue]
        for pair, causal, size in itertools.product(pairs, BOTH, sizes)
    ]


@on_devices(
    cpu=[*grid(SIZES[:3], DIMS), *grid(SIZES[3:10], [64])],
    cuda=grid(SIZES, DIMS),
)
def test_sizes(device: str, case: Case):
    check(case, checks.gaussian(case, device))


@on_devices(
    cpu=grid(FEW_SIZES[:2], [64], torch.float16) + grid(FEW_SIZES[:2], [64], torch.float32),
    cuda=grid(FEW_SIZES, [64, 128, 256, (192, 128)], torch.float16),
)
def test_other_dtypes(device: str, case: Case):
    check(case, checks.gaussian(case, device))


@on_devices(
    cpu=grid([(1, 2, 1, 33, 70)], [*ODD_DIMS, (40, 72), 5]), cuda=grid(FEW_SIZES[1:3], ODD_DIMS)
)
def test_odd_head_dims(device: str, case: Case):
    check(case, checks.gaussian(case, device))


RATIOS = [(3, 3), (6, 2), (5, 1), (14, 2), (8, 1), (24, 2), (16, 1)]


@on_devices(
    cpu=[Case(1, hq, hkv, 33, 65, 16, causal=True) for hq, hkv in RATIOS],
    cuda=[
        Case(2, hq, hkv, 130, 200, dim, causal=causal)
        for (hq, hkv), dim, causal in itertools.product(RATIOS, (64, 128), BOTH)
    ],
)
def test_grouped_heads(device: str, case: Case):
    check(case, checks.gaussian(case, device))


# Lengths on both sides of every tile extent in use, and of their multiples.
EDGES = (1, 16, 63, 64, 65, 79, 80, 81, 127, 128, 129, 175, 176, 177, 191, 192, 193, 255, 256, 257)


@on_devices(
    cpu=[Case(**FEW, seqlen_q=n, head_dim=32, causal=c) for n in (1, 64, 65) for c in BOTH],
    cuda=[
        Case(**FEW, seqlen_q=seqlen_q, **dims(pair), causal=causal)
        for pair in (64, 128, 256, (192, 128))
        for causal in BOTH
        for seqlen_q in (1, 64, 65, 128, 129, 192, 193)
    ],
)
def test_lengths_around_tile_edges(device: str, case: Case):
    """Every seqlen_k, with inputs that put the weight on the keys at the edge of the mask."""
    for seqlen_k in EDGES if device == "cuda" else (1, 63, 64, 65):
        sized = checks.replace(case, seqlen_k=seqlen_k)
        check(sized, checks.HOSTILE["edges"](sized, device))


# ---- Values --------------------------------------------------------------------------------------


def hostile_cases(pairs: Iterable[Any], dtype: torch.dtype, seqlens: tuple[int, int]) -> list[Case]:
    return [
        Case(**FEW, seqlen_q=seqlens[0], seqlen_k=seqlens[1], **dims(p), dtype=dtype, causal=c)
        for p in pairs
        for c in BOTH
    ]


@on_devices(
    cpu=hostile_cases([64], torch.bfloat16, (70, 130)) + hostile_cases([40], torch.half, (70, 130)),
    cuda=[
        *hostile_cases([64, 128, 256, (192, 128)], torch.bfloat16, (300, 1000)),
        *hostile_cases([128], torch.float16, (300, 1000)),
    ],
)
@pytest.mark.parametrize("kind", checks.HOSTILE)
def test_hostile_values(device: str, case: Case, kind: str):
    check(case, checks.HOSTILE[kind](case, device))


@on_devices(
    cpu=[Case(**FEW, seqlen_q=33, seqlen_k=65, head_dim=32)],
    cuda=[Case(**FEW, seqlen_q=200, seqlen_k=300, head_dim=d) for d in (64, 128)],
)
@pytest.mark.parametrize("causal", BOTH)
@pytest.mark.parametrize("scale", [0.0, 1.0, -0.25, 1e-3])
def test_softmax_scale(device: str, case: Case, causal: bool, scale: float):
    case = checks.replace(case, causal=causal)
    check(case, checks.gaussian(case, device), softmax_scale=scale)


@on_devices(
    cpu=[Case(3, 4, 2, 33, 65, 32)],
    cuda=[Case(3, 4, 2, 130, 203, **dims(pair)) for pair in (64, 96, 128, (192, 128))],
)
@pytest.mark.parametrize("causal", BOTH)
def test_nan_stays_in_its_sequence_and_row(device: str, case: Case, causal: bool):
    """NaN in one batch entry, one key head and one query leaves all other results bit-equal."""
    q, k, v = checks.gaussian(case, device)
    clean, clean_lse = attend(q, k, v, causal=causal, return_lse=True)
    q[2, 5, 0] = float("nan")
    k[1, :, 1] = float("nan")
    v[1, :, 1] = float("inf")
    out, lse = attend(q, k, v, causal=causal, return_lse=True)
    touched = torch.zeros(out.shape[:3], dtype=torch.bool, device=device)
    touched[2, 5, 0] = True
    touched[1, :, 2:] = True
    assert out[2, 5, 0].isnan().all() and lse[2, 0, 5].isnan()
    keep = ~touched
    checks.assert_same_bits("out", out[keep], clean[keep])
    keep = keep.transpose(1, 2)
    checks.assert_same_bits("lse", lse[keep], clean_lse[keep])


# ---- Layouts -------------------------------------------------------------------------------------


@on_devices(
    cpu=[Case(3, 4, 2, 33, 65, 32, causal=causal) for causal in BOTH],
    cuda=[
        Case(3, 4, 2, 130, 203, **dims(pair), causal=causal)
        for pair in (64, 128, (192, 128))
        for causal in BOTH
    ],
)
@pytest.mark.parametrize("layout", checks.LAYOUTS)
def test_layout_does_not_matter(device: str, case: Case, layout: str):
    """Any strides give the bits that contiguous copies give, in whatever order they are called."""
    views = checks.LAYOUTS[layout](*checks.gaussian(case, device))
    copies = tuple(view.contiguous() for view in views)
    first, first_lse = attend(*views, causal=case.causal, return_lse=True)
    dense, dense_lse = attend(*copies, causal=case.causal, return_lse=True)
    again, again_lse = attend(*views, causal=case.causal, return_lse=True)
    for out, lse in ((first, first_lse), (again, again_lse)):
        checks.assert_same_bits("out", out, dense)
        checks.assert_same_bits("lse", lse, dense_lse)
    exact, lowprec = checks.oracle(*copies, causal=case.causal)
    checks.assert_attention((first, first_lse), exact, lowprec)


@on_devices(
    cpu=[Case(seqlen_q=33, seqlen_k=40, head_dim=32)], cuda=[Case(seqlen_q=130, seqlen_k=203)]
)
def test_batch_of_one_with_any_batch_stride(device: str, case: Case):
    """The stride of an axis of length 1 is anything, 0 included, and means nothing later."""
    q, k, v = checks.gaussian(case, device)
    expected = attend(q, k, v)
    for stride in (0, 1, 7, 1 << 40):
        odd = [torch.as_strided(t, t.shape, (stride, *t.stride()[1:])) for t in (q, k, v)]
        checks.assert_same_bits("out", attend(*odd), expected)
    four = checks.replace(case, batch=4)
    check(four, checks.gaussian(four, device))


# ---- out= and lse --------------------------------------------------------------------------------


@on_devices(
    cpu=[Case(2, 3, 1, 33, 40, 24, 16)],
    cuda=[Case(2, 3, 1, 130, 77, **dims(pair)) for pair in (64, 128, 40, (192, 128), 256)],
)
@pytest.mark.parametrize("causal", BOTH)
@pytest.mark.parametrize("align", [8, 1])
def test_nothing_outside_out_is_written(device: str, case: Case, causal: bool, align: int):
    """out is a view inside a buffer of sentinels, with gaps on every axis."""
    q, k, v = checks.gaussian(case, device)
    expected, expected_lse = attend(q, k, v, causal=causal, return_lse=True)
    batch, seqlen, heads, dim = expected.shape
    sentinel = -0.015625
    shape = (batch + 2, seqlen + 5, heads + 2, dim + 2 * align)
    buffer = torch.full(shape, sentinel, dtype=case.dtype, device=device)
    index = (slice(1, -1), slice(2, 2 + seqlen), slice(1, -1), slice(align, align + dim))
    view = buffer[index]
    out, lse = attend(q, k, v, causal=causal, return_lse=True, out=view)
    assert out is view
    checks.assert_same_bits("out", view, expected)
    checks.assert_same_bits("lse", lse, expected_lse)
    view.fill_(sentinel)
    assert (buffer == sentinel).all(), "something outside out was written"


@on_devices(cpu=[Case(2, 4, 2, 33, 65, 32)], cuda=[Case(2, 4, 2, 130, 203, 64)])
def test_out_of_any_layout(device: str, case: Case):
    q, k, v = checks.gaussian(case, device)
    expected = attend(q, k, v)
    for name in ("transposed", "seqlen_first", "every_other", "padded"):
        out = checks.LAYOUTS[name](expected, expected, expected)[0]
        out.fill_(float("nan"))
        assert attend(q, k, v, out=out) is out
        checks.assert_same_bits(name, out, expected)


@on_devices(
    cpu=[Case(**FEW, seqlen_q=33, seqlen_k=65, head_dim=32)],
    cuda=[Case(**FEW, seqlen_q=130, seqlen_k=203, **dims(p)) for p in (64, 128, 256, (192, 128))],
)
@pytest.mark.parametrize("causal", BOTH)
def test_lse_is_optional(device: str, case: Case, causal: bool):
    """out has the same bits with and without lse, and lse is the natural logarithm."""
    q, k, v = checks.gaussian(case, device)
    out, lse = attend(q, k, v, causal=causal, return_lse=True)
    checks.assert_same_bits("out", attend(q, k, v, causal=causal), out)
    heads = k.repeat_interleave(case.num_heads_q // case.num_heads_kv, 2).double()
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), heads) * case.head_dim**-0.5
    if causal:
        visible = checks.mask_by_definition(case.seqlen_q, case.seqlen_k, causal=True)
        scores = scores.masked_fill(~visible.to(device), float("-inf"))
    torch.testing.assert_close(lse.double(), torch.logsumexp(scores, -1), atol=1e-3, rtol=1e-5)
    assert lse.shape == (case.batch, case.num_heads_q, case.seqlen_q) and lse.is_contiguous()


# ---- Empty and masked ----------------------------------------------------------------------------


@on_devices(
    cpu=[Case(**FEW, head_dim=32)], cuda=[Case(**FEW, **dims(pair)) for pair in (64, (192, 128))]
)
@pytest.mark.parametrize("causal", BOTH)
@pytest.mark.parametrize(("batch", "sq", "sk"), [(0, 9, 9), (2, 0, 9), (2, 130, 0), (0, 0, 0)])
def test_empty_sizes(device: str, case: Case, causal: bool, batch: int, sq: int, sk: int):
    case = checks.replace(case, batch=batch, seqlen_q=sq, seqlen_k=sk, causal=causal)
    q, k, v = checks.gaussian(case, device)
    out, lse = attend(q, k, v, causal=causal, return_lse=True)
    assert out.shape == (batch, sq, 2, case.dim_v) and lse.shape == (batch, 2, sq)
    assert out.dtype == case.dtype and out.device == q.device
    assert (out == 0).all() and (lse == float("-inf")).all()
    assert attend(q, k, v, causal=causal).shape == out.shape


@on_devices(
    cpu=[Case(**FEW, seqlen_q=70, seqlen_k=9, head_dim=32)],
    cuda=[
        Case(**FEW, seqlen_q=sq, seqlen_k=sk, head_dim=dim)
        for dim in (64, 128)
        for sq, sk in ((300, 1), (300, 20), (1000, 129))
    ],
)
def test_causal_rows_above_the_first_key_see_nothing(device: str, case: Case):
    q, k, v = checks.gaussian(case, device)
    out, lse = attend(q, k, v, causal=True, return_lse=True)
    blind = case.seqlen_q - case.seqlen_k
    assert (out[:, :blind] == 0).all() and (lse[:, :, :blind] == float("-inf")).all()
    assert (out[:, blind:] != 0).any(-1).all() and torch.isfinite(lse[:, :, blind:]).all()
    exact, lowprec = checks.oracle(q, k, v, causal=True)
    checks.assert_attention((out, lse), exact, lowprec)


@on_devices(
    cpu=[Case(**FEW, seqlen_q=33, seqlen_k=65, head_dim=32)],
    cuda=[Case(**FEW, seqlen_q=130, seqlen_k=203, head_dim=dim) for dim in (64, 128)],
)
@pytest.mark.parametrize("window", [(None, 0), (-1, 0)])
def test_windows_that_spell_causal(device: str, case: Case, window: tuple[int | None, int]):
    q, k, v = checks.gaussian(case, device)
    expected = attend(q, k, v, causal=True)
    checks.assert_same_bits("out", attend(q, k, v, window_size=window), expected)
    checks.assert_same_bits("out", attend(q, k, v, causal=True, window_size=(-1, 5)), expected)


@on_devices(
    cpu=[Case(**FEW, seqlen_q=33, seqlen_k=65, head_dim=32)],
    cuda=[
        Case(**FEW, seqlen_q=rows, seqlen_k=rows + more, **dims(pair))
        for rows, more in ((129, 0), (193, 300), (640, 0), (1, 700))
        for pair in (64, 128, (192, 128))
    ],
)
@pytest.mark.parametrize(
    "mask",
    [{"window_size": (128, 0)}, {"window_size": (127, 30)}, {"attention_chunk": 96}],
    ids=str,
)
def test_windows_whose_last_tile_has_few_rows(device: str, case: Case, mask: dict[str, Any]):
    """Warpgroups without a row of their own pass over the blocks that the others see."""
    q, k, v = checks.gaussian(case, device)
    got = attend(q, k, v, return_lse=True, **mask)
    checks.assert_attention(got, *checks.oracle(q, k, v, **mask))


# ---- Repeats and scale ---------------------------------------------------------------------------


@on_devices(
    cpu=[Case(2, 4, 2, 70, 130, 32)],
    cuda=[Case(4, 8, 2, 700, 1000, **dims(pair)) for pair in (64, 128, 256, (192, 128))],
)
@pytest.mark.parametrize("causal", BOTH)
def test_repeats_give_the_same_bits(device: str, case: Case, causal: bool):
    q, k, v = checks.gaussian(case, device)
    first, first_lse = attend(q, k, v, causal=causal, return_lse=True)
    for _ in range(50 if device == "cuda" else 2):
        out, lse = attend(q, k, v, causal=causal, return_lse=True)
        checks.assert_same_bits("out", out, first)
        checks.assert_same_bits("lse", lse, first_lse)


@on_devices(
    cpu=[],
    cuda=[
        Case(16, 16, 4, 333, 1111, **dims(pair), causal=causal)
        for pair in (64, 128, 256, (192, 128))
        for causal in BOTH
    ],
)
def test_more_tiles_than_multiprocessors(device: str, case: Case):
    """Each thread block works on several tiles; a few batch entries are compared."""
    q, k, v = checks.gaussian(case, device)
    out, lse = attend(q, k, v, causal=case.causal, return_lse=True)
    for b in (0, 7, 15):
        part = slice(b, b + 1)
        exact, lowprec = checks.oracle(q[part], k[part], v[part], causal=case.causal)
        checks.assert_attention((out[part], lse[part]), exact, lowprec)


def normal(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_more_than_2_31_elements_in_the_batch(device: str):
    """Offsets of batch entries past 32 bits, in the inputs and in out."""
    q, k, v = (normal(16500, 64, 16, 128) for _ in range(3))
    assert q.numel() > 2**31
    out, lse = attend(q, k, v, causal=True, return_lse=True)
    for b in (0, 8191, 16383, 16384, 16499):
        part = slice(b, b + 1)
        exact, lowprec = checks.oracle(q[part], k[part], v[part], causal=True)
        checks.assert_attention((out[part], lse[part]), exact, lowprec)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_more_than_2_31_elements_between_rows(device: str):
    """Offsets of rows within one sequence past 32 bits: a few heads of a very wide buffer."""
    rows, width = 1100, 1 << 21
    buffer = torch.empty(1, rows, width, dtype=torch.bfloat16, device="cuda")
    k, v, out = (
        buffer[..., start : start + 256].unflatten(-1, (2, 128)) for start in (0, 4096, width - 256)
    )
    assert k.stride(1) * (rows - 1) > 2**31
    q, _ = normal(1, rows, 2, 128), (k.normal_(), v.normal_())
    got, lse = attend(q, k, v, causal=True, return_lse=True, out=out)
    exact, lowprec = checks.oracle(q, k, v, causal=True)
    checks.assert_attention((got, lse), exact, lowprec)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_more_than_2_31_elements_in_one_sequence(device: str):
    """A million keys, heads outermost: offsets of heads past 32 bits."""
    heads, seqlen = 17, (1 << 20) + 8
    k, v = (normal(1, heads, seqlen, 128).transpose(1, 2) for _ in range(2))
    assert k.numel() > 2**31
    q = normal(1, 3, heads, 128)
    out, lse = attend(q, k, v, causal=True, return_lse=True)
    for h in (0, heads - 1):
        part = slice(h, h + 1)
        exact, lowprec = checks.oracle(q[:, :, part], k[:, :, part], v[:, :, part], causal=True)
        checks.assert_attention((out[:, :, part], lse[:, part]), exact, lowprec)


# ---- Against torch -------------------------------------------------------------------------------


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("causal", BOTH)
def test_cpu_matches_sdpa(dtype: torch.dtype, causal: bool):
    case = Case(2, 6, 2, 90, 90, 64, dtype=dtype, causal=causal)
    q, k, v = checks.gaussian(case)
    operands = (tensor.double().transpose(1, 2) for tensor in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *operands, is_causal=causal, enable_gqa=True
    )
    out = flash_attn_func(q, k, v, causal=causal)
    bound = torch.finfo(dtype).eps * (1 if dtype.itemsize == 2 else 16)
    torch.testing.assert_close(out.double(), expected.transpose(1, 2), atol=bound, rtol=bound)
