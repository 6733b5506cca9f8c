"""Keys and values in pages on a GPU: any order of pages, against the reference."""

import checks
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from flash_cute import flash_attn_func, flash_attn_varlen_func, selection
from flash_cute.problem import AttentionProblem, Lengths
from flash_cute.target import Target

H200 = Target.from_arch("sm_90a")
LENGTHS_K = [300, 0, 513, 64]
ROWS_Q = 70


def key(page_size: int, **changes) -> selection.KernelKey:
    sizes = dict(batch=2, seqlen_q=8, seqlen_k=512, num_heads_q=8, num_heads_kv=2, device="cuda")
    dims = dict(head_dim=128, head_dim_v=128, dtype=torch.bfloat16, page_size=page_size)
    problem = AttentionProblem(**(sizes | dims | changes))
    return selection._key(selection.SM90, problem, H200, selection.PLAIN, None)


@pytest.mark.parametrize(
    ("page_size", "rows"),
    [(16, 16), (64, 64), (128, 128), (256, 128), (48, 16), (1024, 128), (8, 8)],
)
def test_keys_of_a_load_lie_in_one_page_and_one_tile(page_size, rows):
    found = key(page_size)
    assert found.spec.page_rows == rows
    assert found.config.tile_n % rows == 0 and page_size % rows == 0
    assert not found.config.check(found.spec)


@pytest.mark.parametrize("page_size", [1, 4, 100])
def test_keys_of_pages_that_no_load_fits_are_gathered(page_size):
    found = key(page_size)
    assert found.spec.gathers_keys and not found.config.check(found.spec)


def test_a_left_padding_shifts_pages_against_loads():
    assert key(128, has_leftpad=True).spec.gathers_keys


def test_room_in_the_table_shapes_no_code():
    dims = dict(head_dim=64, head_dim_v=64, causal=True, num_heads_kv=8)
    assert key(16, seqlen_k=128, **dims) == key(16, seqlen_k=8192, **dims)


def test_reference_looks_block_masks_of_pages_up_by_key():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 9, 2, 16, generator=generator) for _ in range(3))
    order = torch.randperm(6, generator=generator)
    pages = [torch.full((6, 4, 2, 16), torch.nan) for _ in range(2)]
    for tensor, page in zip((k, v), pages, strict=True):
        padded = torch.nn.functional.pad(tensor, (0, 0, 0, 0, 0, 3), value=torch.nan)
        page[order] = padded.view(6, 4, 2, 16)
    mask = create_block_mask(lambda b, h, i, j: (i + j + b) % 3 > 0, 2, None, 9, 9, "cpu", 2)
    used = torch.full((2,), 9, dtype=torch.int32)
    lengths = {"page_table": order.int().view(2, 3), "seqused_k": used}
    got = flash_attn_varlen_func(q, *pages, **lengths, block_mask=mask)
    torch.testing.assert_close(got, flash_attn_func(q, k, v, block_mask=mask))


# ---- On a GPU ------------------------------------------------------------------------------------


def paged(page_size: int, d: int, dv: int, heads=(6, 2)):
    """Queries, and keys in pages in a random order with NaN wherever no key is."""
    batch, most = len(LENGTHS_K), max(LENGTHS_K)
    q, k, v = checks.gaussian(checks.Case(batch, *heads, ROWS_Q, most, d, dv), "cuda")
    max_pages = -(-most // page_size) + 1
    generator = torch.Generator().manual_seed(page_size)
    order = torch.randperm(batch * max_pages, generator=generator).view(batch, max_pages)
    table = torch.full_like(order, 2**31 - 1)
    pages = [
        torch.full((batch * max_pages, page_size, heads[1], dim), torch.nan, dtype=q.dtype)
        for dim in (d, dv)
    ]
    for b, length in enumerate(LENGTHS_K):
        for n in range(-(-length // page_size)):
            table[b, n] = order[b, n]
            rows = slice(n * page_size, min(length, (n + 1) * page_size))
            for tensor, page in zip((k, v), pages, strict=True):
                page[order[b, n], : rows.stop - rows.start] = tensor[b, rows].cpu()
    used = torch.tensor(LENGTHS_K, dtype=torch.int32, device="cuda")
    lengths = {"page_table": table.int().cuda(), "seqused_k": used}
    return (q, *(page.cuda() for page in pages)), lengths


def check(operands, lengths, **options):
    got = flash_attn_varlen_func(*operands, **lengths, return_lse=True, **options)
    options.pop("pack_gqa", None)
    checks.assert_attention(got, *checks.oracle(*operands, Lengths(**lengths), **options))


# Sizes of one kind share their kernels, which take long to compile: tests take turns with options
# by kind, so that each kind and each head dim meets each option.
KINDS = {1: 0, 4: 0, 100: 0, 8: 1, 16: 2, 48: 2, 64: 3, 128: 4, 256: 4}
DIMS = [(64, 64), (96, 72), (128, 128), (192, 128), (256, 256)]


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 4, 8, 16, 48, 64, 100, 256])
@pytest.mark.parametrize("dims", DIMS)
def test_pages_of_any_order(gpu: None, dims, page_size: int):
    operands, lengths = paged(page_size, *dims)
    check(operands, lengths, causal=(KINDS[page_size] + DIMS.index(dims)) % 2 == 1)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [
    {"window_size": (100, 20)}, {"attention_chunk": 96}, {"softcap": 20.0}, {"pack_gqa": True},
    {"mask_mod": lambda b, h, q_idx, kv_idx: (kv_idx + h) % 3 != b % 3},
], ids=lambda options: next(iter(options)))  # fmt: skip
def test_everything_else_counts_too(gpu: None, options):
    for page_size in (16, 3):
        check(*paged(page_size, 128, 128), **options)


def of_blocks(b, h, q_idx, kv_idx):
    return (q_idx // 40 + kv_idx // 70 + b) % 3 != 0


def block_sparse(page_size: int, block_size, heads=(6, 2)):
    """Pages in a random order under a block mask whose lists end where the keys may."""
    operands, lengths = paged(page_size, 128, 128, heads)
    batch, most = len(LENGTHS_K), max(LENGTHS_K)
    mask = create_block_mask(of_blocks, batch, None, ROWS_Q, most, "cuda", block_size)
    return operands, lengths, {"block_mask": mask}


BLOCK_SIZES = [64, 128, (64, 256)]
MORE = [{}, {"causal": True}, {"pack_gqa": True, "softcap": 15.0}]


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 16, 64, 100, 128, 256])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_block_masks_of_pages(gpu: None, page_size: int, block_size):
    operands, lengths, options = block_sparse(page_size, block_size)
    more = MORE[(KINDS[page_size] + BLOCK_SIZES.index(block_size)) % 3]
    check(operands, lengths, **options, **more)


@pytest.mark.gpu
@pytest.mark.parametrize("rows, d", [(1, 128), (1, 256), (100, 64), (100, 128)])
def test_tiles_of_one_block_follow_one_another(gpu: None, rows: int, d: int):
    """A CTA gathers several, each with a tail to clear: none may wait for the one after it."""
    batch, heads, most = 150, 6, 60
    q, k, v = checks.gaussian(checks.Case(batch, heads, heads, rows, most, d), "cuda")
    order = torch.randperm(batch * most, device="cuda")
    pages = [x.reshape(batch * most, 1, heads, d)[torch.argsort(order)] for x in (k, v)]
    used = torch.randint(0, most + 1, (batch,), device="cuda", dtype=torch.int32)
    lengths = {"page_table": order.view(batch, most).int(), "seqused_k": used}
    check((q, *pages), lengths)


@pytest.mark.gpu
def test_new_tables_reach_a_repeated_call(gpu: None):
    (q, k, v), lengths = paged(16, 128, 128)
    first = flash_attn_varlen_func(q, k, v, **lengths)
    order = torch.randperm(k.shape[0], device="cuda")
    lengths["page_table"] = torch.where(
        lengths["page_table"] < k.shape[0],
        torch.argsort(order)[lengths["page_table"].long().clamp(max=k.shape[0] - 1)].int(),
        lengths["page_table"],
    )
    checks.assert_same_bits("out", flash_attn_varlen_func(q, k[order], v[order], **lengths), first)
