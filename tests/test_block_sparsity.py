"""Block masks: the lists as a kernel gets them, and the kernel on a GPU against the reference."""

import itertools

import checks
import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from flash_cute import (
    BlockSparseTensors,
    InvalidProblem,
    UnsupportedProblem,
    flash_attn_func,
    flash_attn_varlen_func,
)
from flash_cute.block_mask import BlockStructure
from flash_cute.problem import Lengths

BATCH, HEADS = 2, 3


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx).abs() < 100 + 50 * h


def structure(counts, indices, **full) -> BlockStructure:
    as_int = lambda values: torch.tensor(values, dtype=torch.int32)
    lists = {f"full_{name}": as_int(values) for name, values in full.items()}
    fields = {"full_count": None, "full_index": None, **lists}
    lists = {"partial_count": as_int(counts), "partial_index": as_int(indices), **fields}
    return BlockStructure(**lists, block_size=(256, 256), mask_mod=None)


def visits(blocks: BlockStructure, tile, seqlens, m_block: int, b: int = 0, h: int = 0):
    """Walk the launch arguments as device/block_sparsity.py does."""
    sub_m, sub_n, *lists = blocks.launch_arguments(tile, seqlens)
    found = []
    pairs = [(blocks.partial_count, blocks.partial_index), (blocks.full_count, blocks.full_index)]
    for number, (count, index) in enumerate(pairs):
        if count is None:
            continue
        address, index_address, batch_rows, head_rows, rows, cols = lists[6 * number :][:6]
        assert rows == count.shape[2]
        assert (address, index_address) == (count.data_ptr(), index.data_ptr())
        row = b * batch_rows + h * head_rows + m_block // sub_m
        for i in range(int(count.reshape(-1)[row]) * sub_n):
            found.append(int(index.reshape(-1, cols)[row, i // sub_n]) * sub_n + i % sub_n)
    return found


def test_blocks_are_walked_in_tiles():
    blocks = structure([[[2, 1]]], [[[0, 3], [1, 0]]], count=[[[1, 0]]], index=[[[2, 0], [0, 0]]])
    assert visits(blocks, (128, 128), (512, 1024), 0) == [0, 1, 6, 7, 4, 5]
    assert visits(blocks, (128, 128), (512, 1024), 1) == [0, 1, 6, 7, 4, 5]
    assert visits(blocks, (128, 64), (512, 1024), 2) == [4, 5, 6, 7]


def test_lists_of_one_batch_or_head_serve_all():
    one = structure([[[1]]], [[[0]]])
    assert one.launch_arguments((128, 128), (256, 256))[4:6] == (0, 0)
    count = torch.ones(BATCH, HEADS, 2, dtype=torch.int32)
    index = torch.zeros(BATCH, HEADS, 2, 4, dtype=torch.int32)
    each = BlockStructure(count, index, None, None, (256, 256), None)
    assert each.launch_arguments((128, 128), (512, 1024))[4:8] == (HEADS * 2, 2, 2, 4)


def test_blocks_larger_than_the_problem_are_cut_to_it():
    blocks = structure([[[1]]], [[[0]]])
    endless = BlockStructure(
        blocks.partial_count, blocks.partial_index, None, None, (2**30, 2**30), None
    )
    assert endless.launch_arguments((128, 128), (300, 500))[:2] == (3, 4)


def test_lists_are_packed_once():
    blocks = structure([[[1]]], [[[0]]])
    assert blocks.packed() is blocks
    wide = BlockStructure(
        blocks.partial_count.long(), blocks.partial_index, None, None, (256, 256), None
    )
    assert wide.packed().partial_count.dtype == torch.int32


# ---- On a GPU ------------------------------------------------------------------------------------


def operands(rows: int, keys: int, d: int, dv: int, heads_kv: int = HEADS):
    case = checks.Case(BATCH, HEADS, heads_kv, rows, keys, d, dv)
    return checks.gaussian(case, "cuda")


def check(tensors, **options):
    got = flash_attn_func(*tensors, return_lse=True, **options)
    checks.assert_attention(got, *checks.oracle(*tensors, **options))


SHAPES = [(64, 64), (128, 128), (192, 128), (192, 192), (256, 256)]


@pytest.mark.gpu
@pytest.mark.parametrize("dims", SHAPES, ids=str)
@pytest.mark.parametrize(
    "block", [128, (256, 128), (128, 384), 512, 64, (64, 128), (128, 64), (320, 48)], ids=str
)
def test_block_masks_of_torch(gpu: None, block, dims):
    rows, keys = 700, 1000
    mask = create_block_mask(window, BATCH, HEADS, rows, keys, "cuda", block)
    check(operands(rows, keys, *dims), block_mask=mask)


@pytest.mark.gpu
@pytest.mark.parametrize("dims", SHAPES, ids=str)
@pytest.mark.parametrize("keys", [1000, 1024])
def test_causal_as_a_block_mask(gpu: None, keys: int, dims):
    mask = create_block_mask(causal, None, None, 700, keys, "cuda", 128)
    check(operands(700, keys, *dims), block_mask=mask)


@pytest.mark.gpu
@pytest.mark.parametrize("density", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["partial", "full", "both"])
def test_random_lists(gpu: None, kind: str, density: float):
    generator = torch.Generator().manual_seed(int(density * 10))
    is_listed = torch.rand(BATCH, HEADS, 6, 8, generator=generator) < density
    is_full = torch.rand(is_listed.shape, generator=generator) < {"partial": 0, "full": 2}.get(
        kind, 0.5
    )
    lists = []
    for chosen in (is_listed & ~is_full, is_listed & is_full):
        order = chosen.int().sort(dim=-1, descending=True, stable=True)
        lists += [chosen.sum(-1).int().cuda(), order.indices.int().cuda()]
    mask = BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=128, mask_mod=window, seq_lengths=(700, 1000)
    )
    check(operands(700, 1000, 128, 128), block_mask=mask)


@pytest.mark.gpu
def test_everything_else_counts_too(gpu: None):
    mask = create_block_mask(window, BATCH, HEADS, 700, 1000, "cuda", 128)
    slopes = torch.tensor([0.1, 0.2, 0.3], device="cuda")
    options = {
        "block_mask": mask,
        "mask_mod": lambda b, h, q_idx, kv_idx: kv_idx % 5 != b,
        "score_mod": lambda score, b, h, q_idx, kv_idx: score - slopes[h] * (q_idx - kv_idx).abs(),
        "window_size": (300, 20),
        "sink": torch.zeros(HEADS, device="cuda"),
    }
    check(operands(700, 1000, 128, 128, heads_kv=1), **options)


def starts(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


LENGTHS_Q, LENGTHS_K = [130, 0, 257], [300, 64, 500]


def packed(device: str, heads_kv: int = HEADS, d: int = 128):
    """Packed sequences, with NaN behind the last one, and their block mask."""
    slack = 40
    shape = checks.Case(1, HEADS, heads_kv, sum(LENGTHS_Q) + slack, sum(LENGTHS_K) + slack, d)
    q, k, v = (tensor[0] for tensor in checks.gaussian(shape, device))
    for tensor in (q, k, v):
        tensor[-slack:] = float("nan")
    names = ("cu_seqlens_q", "cu_seqlens_k")
    both = zip(names, (LENGTHS_Q, LENGTHS_K), strict=True)
    return (q, k, v), {name: starts(lengths).to(device) for name, lengths in both}


def test_packed_sequences_have_lists_of_their_own():
    operands, lengths = packed("cpu")
    mask = create_block_mask(window, 3, HEADS, max(LENGTHS_Q), max(LENGTHS_K), "cpu", 64)
    got, lse = flash_attn_varlen_func(*operands, **lengths, block_mask=mask, return_lse=True)
    same, same_lse = flash_attn_varlen_func(*operands, **lengths, mask_mod=window, return_lse=True)
    assert torch.equal(lse[:, : sum(LENGTHS_Q)], same_lse[:, : sum(LENGTHS_Q)])
    assert torch.equal(got[: sum(LENGTHS_Q)], same[: sum(LENGTHS_Q)])


def test_lists_shorter_than_the_longest_sequence_are_refused():
    operands, lengths = packed("cpu")
    for sizes, name, needed in (
        ((200, max(LENGTHS_K)), "kv_num_blocks", "4, expected at least 5"),
        ((max(LENGTHS_Q), 200), "kv_indices", "4, expected at least 8"),
    ):
        mask = create_block_mask(window, 3, HEADS, *sizes, "cpu", 64)
        message = f"^block_mask.{name}.shape\\[-1\\] is {needed}"
        with pytest.raises(InvalidProblem, match=message):
            flash_attn_varlen_func(*operands, **lengths, block_mask=mask)


def test_lists_without_a_row_are_refused_for_packed_sequences_too():
    operands, lengths = packed("cpu")
    count = torch.zeros(3, HEADS, 0, dtype=torch.int32)
    mask = BlockSparseTensors(count, count[..., None].expand(-1, -1, -1, 8))
    message = r"^block_mask.mask_block_cnt.shape\[2\] is 0, expected 1"
    with pytest.raises(InvalidProblem, match=message):
        flash_attn_varlen_func(*operands, **lengths, block_mask=mask)


PACKED_BLOCKS = [64, 128, (128, 64)]


@pytest.mark.gpu
@pytest.mark.parametrize("heads_kv", [1, HEADS])
@pytest.mark.parametrize("block", PACKED_BLOCKS, ids=str)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_packed_sequences(gpu: None, d: int, block, heads_kv: int):
    """Lists of each head, or of all heads, which then share tiles where they share keys."""
    operands, lengths = packed("cuda", heads_kv, d)
    size = (max(LENGTHS_Q), max(LENGTHS_K))
    is_shared = (d // 64 + PACKED_BLOCKS.index(block) + (heads_kv == 1)) % 2 == 0  # by turns
    heads, mod, pack_gqa = (None, causal, heads_kv == 1) if is_shared else (HEADS, window, None)
    mask = create_block_mask(mod, 3, heads, *size, "cuda", block)
    options = {**lengths, "block_mask": mask, "return_lse": True}
    out, lse = flash_attn_varlen_func(*operands, **options, pack_gqa=pack_gqa)
    exact = checks.oracle(*operands, Lengths(**lengths), block_mask=mask)
    rows = slice(sum(LENGTHS_Q))
    by_row = [(o[rows], s.movedim(-2, -1)[rows]) for o, s in ((out, lse), *exact)]
    checks.assert_attention(*by_row)


@pytest.mark.gpu
def test_full_blocks_past_a_sequence_are_hidden(gpu: None):
    lengths_q, lengths_k = [128, 200], [256, 512]  # whole blocks, with the next sequence behind
    case = checks.Case(1, HEADS, HEADS, sum(lengths_q), sum(lengths_k), 128)
    q, k, v = (tensor[0] for tensor in checks.gaussian(case, "cuda"))
    lengths = {"cu_seqlens_q": starts(lengths_q).cuda(), "cu_seqlens_k": starts(lengths_k).cuda()}
    everything = lambda b, h, q_idx, kv_idx: kv_idx >= 0
    mask = create_block_mask(everything, None, None, 256, 512, "cuda", 128)
    assert mask.full_kv_num_blocks.eq(4).all()
    got = flash_attn_varlen_func(q, k, v, **lengths, block_mask=mask, return_lse=True)
    checks.assert_attention(got, *checks.oracle(q, k, v, Lengths(**lengths), block_mask=mask))


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
def test_used_keys_end_inside_any_listed_block(gpu: None, d: int):
    q, k, v = operands(200, 700, d, d)
    used = torch.tensor([333, 640], dtype=torch.int32, device="cuda")
    for b, length in enumerate(used.tolist()):
        k[b, length:], v[b, length:] = float("nan"), float("nan")
    mask = create_block_mask(window, BATCH, HEADS, 200, 700, "cuda", 128)
    got = flash_attn_varlen_func(q, k, v, seqused_k=used, block_mask=mask, return_lse=True)
    lengths = Lengths(seqused_k=used)
    checks.assert_attention(got, *checks.oracle(q, k, v, lengths, block_mask=mask))


@pytest.mark.gpu
def test_rows_past_the_lists_see_nothing_on_a_gpu(gpu: None):
    operands, lengths = packed("cuda")
    mask = create_block_mask(causal, 3, HEADS, 128, max(LENGTHS_K), "cuda", 128)
    out, lse = flash_attn_varlen_func(*operands, **lengths, block_mask=mask, return_lse=True)
    rows = slice(LENGTHS_Q[0], sum(LENGTHS_Q))  # the last sequence, of 257 queries
    assert out[rows][128:].eq(0).all() and lse[:, rows][:, 128:].eq(-torch.inf).all()
    assert out[rows][:128].ne(0).any()


@pytest.mark.gpu
def test_packed_heads_share_their_lists(gpu: None):
    tensors = operands(300, 500, 128, 128, heads_kv=1)
    shared = create_block_mask(causal, BATCH, None, 300, 500, "cuda", 128)
    check(tensors, block_mask=shared, pack_gqa=True)
    each = create_block_mask(causal, BATCH, HEADS, 300, 500, "cuda", 128)
    with pytest.raises(UnsupportedProblem, match="pack_gqa is True with a block mask that has"):
        flash_attn_func(*tensors, block_mask=each, pack_gqa=True)


@pytest.mark.gpu
def test_blocks_that_tiles_do_not_divide_are_refused(gpu: None):
    mask = create_block_mask(causal, None, None, 200, 200, "cuda", 96)
    with pytest.raises(UnsupportedProblem, match=r"BLOCK_SIZE is \(96, 96\), expected multiples"):
        flash_attn_func(*operands(200, 200, 128, 128), block_mask=mask)
