"""flex_attention against PyTorch's own: the same callbacks, the same block masks, unchanged."""

from __future__ import annotations

from typing import Any

import callbacks
import pytest
import torch
from callbacks import BATCH, HEADS, SEQLEN
from torch.nn.attention import flex_attention as torch_flex

from flash_cute import InvalidProblem, UnsupportedProblem, flash_attn_func, flex_attention
from flash_cute.block_mask import block_structure

CPU = torch.device("cpu")
BLOCK = 16


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's function as it is, without the compiler that its eager call goes through."""
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def operands(
    seqlen_q: int = SEQLEN, seqlen_k: int = SEQLEN, kv_heads: int = HEADS, dim_v: int = 16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(shape, generator=generator)
    return (
        draw(BATCH, HEADS, seqlen_q, 16),
        draw(BATCH, kv_heads, seqlen_k, 16),
        draw(BATCH, kv_heads, seqlen_k, dim_v),
    )


def block_mask(
    mask_mod: Any, seqlen_q: int = SEQLEN, seqlen_k: int = SEQLEN, **options: Any
) -> Any:
    sizes = {"BLOCK_SIZE": BLOCK} | options
    return torch_flex.create_block_mask(
        mask_mod, BATCH, HEADS, seqlen_q, seqlen_k, device="cpu", **sizes
    )


def compare(*inputs: torch.Tensor, **options: Any) -> None:
    """Ours and PyTorch's, output and lse."""
    out, lse = flex_attention(*inputs, **options, return_lse=True)
    expected = torch_flex.flex_attention(
        *inputs, **options, return_aux=torch_flex.AuxRequest(lse=True)
    )
    torch.testing.assert_close(out, expected[0], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse, expected[1].lse, atol=2e-5, rtol=2e-5)


# ---- Published callbacks -------------------------------------------------------------------------


@pytest.mark.parametrize("name", callbacks.SCORE_MODS)
def test_score_mods_run_unchanged(name: str):
    compare(*operands(), score_mod=callbacks.SCORE_MODS[name]("cpu"))


@pytest.mark.parametrize("name", callbacks.MASK_MODS)
def test_mask_mods_run_unchanged(name: str):
    mask = block_mask(callbacks.MASK_MODS[name]("cpu"))
    compare(*operands(), block_mask=mask)


@pytest.mark.parametrize("name", ["causal", "document", "natten"])
def test_score_and_mask_with_grouped_heads(name: str):
    mask = block_mask(callbacks.MASK_MODS[name]("cpu"))
    score_mod = callbacks.SCORE_MODS["alibi"]("cpu")
    inputs = operands(kv_heads=2, dim_v=8)
    compare(*inputs, score_mod=score_mod, block_mask=mask, enable_gqa=True, scale=0.3)


def test_lists_of_published_callbacks_are_long_enough():
    assert len(callbacks.ALL) >= 20


# ---- Semantics -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(37, 64), (64, 37), (5, 90)])
def test_indices_start_at_the_top_left(sizes: tuple[int, int]):
    mask = block_mask(callbacks.causal, *sizes)
    compare(*operands(*sizes), block_mask=mask)
    compare(*operands(*sizes), score_mod=callbacks.SCORE_MODS["causal_by_score"]("cpu"))


@pytest.mark.parametrize("size", [(16, 32), (64, 8), (128, 128)])
@pytest.mark.parametrize("separate", [True, False])
def test_block_sizes(size: tuple[int, int], separate: bool):
    mask = block_mask(callbacks.causal, 50, 70, BLOCK_SIZE=size, separate_full_blocks=separate)
    compare(*operands(50, 70), block_mask=mask)


def test_blocks_shared_by_batch_and_heads():
    mask = torch_flex.create_block_mask(
        callbacks.causal, None, None, SEQLEN, SEQLEN, device="cpu", BLOCK_SIZE=BLOCK
    )
    compare(*operands(), block_mask=mask)


def test_blocks_that_are_not_named_are_hidden_and_full_ones_skip_the_mask():
    """What only kernels show in PyTorch: its eager version ignores the blocks."""
    count = torch.tensor([1, 0, 1, 1], dtype=torch.int32).view(1, 1, 4)
    index = torch.tensor([[0, 9, 9, 9], [9] * 4, [2, 9, 9, 9], [1, 9, 9, 9]], dtype=torch.int32)
    full_count = torch.tensor([0, 1, 2, 0], dtype=torch.int32).view(1, 1, 4)
    full_index = torch.tensor([[9] * 4, [3, 9, 9, 9], [0, 1, 9, 9], [9] * 4], dtype=torch.int32)
    mask = torch_flex.BlockMask(
        seq_lengths=(SEQLEN, SEQLEN),
        kv_num_blocks=count,
        kv_indices=index.clamp(max=3)[None, None],
        full_kv_num_blocks=full_count,
        full_kv_indices=full_index.clamp(max=3)[None, None],
        q_num_blocks=None, q_indices=None, full_q_num_blocks=None, full_q_indices=None,
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=callbacks.causal,
    )  # fmt: skip
    visible = torch.zeros(SEQLEN, SEQLEN, dtype=torch.bool)
    causal = torch.ones(SEQLEN, SEQLEN).tril().bool()
    for row, column, is_full in ((0, 0, 0), (2, 2, 0), (3, 1, 0), (1, 3, 1), (2, 0, 1), (2, 1, 1)):
        part = (slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK))
        visible[part] = True if is_full else causal[part]
    q, k, v = operands()
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask), expected)
    by_blocks = flash_attn_func(
        *(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask, window_size=(20, 0)
    )
    near = causal & (torch.arange(SEQLEN)[:, None] - torch.arange(SEQLEN) <= 20)
    both = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible & near)
    assert isinstance(by_blocks, torch.Tensor)
    torch.testing.assert_close(by_blocks.transpose(1, 2), torch.nan_to_num(both))


def test_row_without_keys():
    inputs = operands()
    mask = block_mask(lambda b, h, q_idx, kv_idx: (q_idx != 5) & (q_idx < 48))
    out, lse = flex_attention(*inputs, block_mask=mask, return_lse=True)
    assert (out[:, :, [5, 50]] == 0).all() and (lse[:, :, [5, 50]] == -torch.inf).all()
    compare(*inputs, block_mask=mask)


def test_batch_of_one_for_keys():
    q, k, v = operands()
    compare(q, k[:1], v[:1], block_mask=block_mask(callbacks.causal))


def test_captured_tensors_and_inputs_get_gradients():
    """PyTorch's function has no backward on the CPU: compared with attention written out."""

    def by_definition(q: Any, k: Any, v: Any, table: Any) -> Any:
        scores = q @ k.transpose(-1, -2) / 4 * table[:, None, None]
        hidden = torch.ones(SEQLEN, SEQLEN, dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v

    def by_callbacks(q: Any, k: Any, v: Any, table: Any) -> Any:
        score_mod = lambda score, b, h, q_idx, kv_idx: score * table[h]
        mask = block_mask(callbacks.causal)
        return flex_attention(q, k, v, score_mod=score_mod, block_mask=mask)

    results: list[list[torch.Tensor]] = []
    for function in (by_callbacks, by_definition):
        table = torch.linspace(-1, 1, HEADS, dtype=torch.float64)
        inputs = [tensor.double().requires_grad_() for tensor in (*operands(), table)]
        function(*inputs).square().sum().backward()
        results.append([tensor.grad for tensor in inputs if tensor.grad is not None])
    assert len(results[0]) == 4
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 2, 0, 3)])
def test_result_lies_as_the_query_does(order: tuple[int, ...]):
    q, k, v = operands(dim_v=8)
    back = [order.index(axis) for axis in range(4)]
    out = flex_attention(q.permute(order).contiguous().permute(back), k, v)
    assert out.permute(order).is_contiguous() and out.shape == (BATCH, HEADS, SEQLEN, 8)
    assert torch.equal(out, flex_attention(q, k, v))


def test_return_values():
    q, k, v = operands()
    out, lse = flex_attention(q, k, v, return_lse=True)
    assert isinstance(flex_attention(q, k, v, kernel_options={}), torch.Tensor)
    got, aux = flex_attention(q, k, v, return_aux=torch_flex.AuxRequest(lse=True))
    assert torch.equal(got, out) and torch.equal(aux.lse, lse) and aux.max_scores is None
    got, aux = flex_attention(q, k, v, return_aux=torch_flex.AuxRequest())
    assert torch.equal(got, out) and aux.lse is None


# ---- Refusals ------------------------------------------------------------------------------------

Q, K, V = operands()
REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "type": ((3, K, V), {}, InvalidProblem, "query is of type int, expected a torch.Tensor"),
    "rank": ((Q[0], K, V), {}, InvalidProblem, "query.dim() is 3, expected 4"),
    "dtype": ((Q, K.half(), V), {}, InvalidProblem, "key.dtype is torch.float16, expected"),
    "heads": ((Q, K[:, :2], V[:, :2]), {}, InvalidProblem, "key.shape[1] is 2, expected 4"),
    "ratio": (
        (Q, K[:, :3], V[:, :3]), {"enable_gqa": True}, InvalidProblem, "num_heads_q is 4, expected",
    ),
    "batch": ((Q, K[:1], V[:1]), {}, InvalidProblem, "key.shape[0] is 1, expected 2"),
    "head_dim": ((Q, K[..., :8], V), {}, InvalidProblem, "key.shape[-1] is 8, expected 16"),
    "value": ((Q, K, V[:, :, 1:]), {}, InvalidProblem, "value.shape[2] is 63, expected 64"),
    "stride": (
        (Q, K, V.transpose(2, 3).contiguous().transpose(2, 3)), {}, InvalidProblem,
        "value.stride(-1) is 64, expected 1",
    ),
    "kernel_options": (
        (Q, K, V), {"kernel_options": {"BLOCK_M": 64}}, UnsupportedProblem,
        "kernel_options has BLOCK_M, expected None",
    ),
    "max_scores": (
        (Q, K, V), {"return_aux": torch_flex.AuxRequest(max_scores=True)}, UnsupportedProblem,
        "return_aux.max_scores is True",
    ),
    "aux-and-lse": (
        (Q, K, V), {"return_aux": torch_flex.AuxRequest(), "return_lse": True}, InvalidProblem,
        "return_lse and return_aux are both given",
    ),
    "aux": ((Q, K, V), {"return_aux": 1}, InvalidProblem, "return_aux is of type int, expected an"),
    "gqa": ((Q, K, V), {"enable_gqa": 1}, InvalidProblem, "enable_gqa is 1, expected True or"),
    "block_mask": (
        (Q, K, V), {"block_mask": 1}, InvalidProblem, "block_mask is of type int, expected a torch",
    ),
    "lengths": (
        (Q, K, V), {"block_mask": block_mask(callbacks.causal, 32, 64)}, InvalidProblem,
        "block_mask.seq_lengths is (32, 64), expected (64, 64)",
    ),
    "score_mod": (
        (Q, K, V), {"score_mod": callbacks.causal}, InvalidProblem, "score_mod is a function of",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_named(name: str):
    arguments, options, error, message = REFUSED[name]
    with pytest.raises(error) as caught:
        flex_attention(*arguments, **options)
    assert str(caught.value).startswith(message)


def test_broken_block_masks_are_refused():
    mask = block_mask(callbacks.causal)
    with pytest.raises(InvalidProblem, match=r"block_mask.kv_num_blocks.shape\[1\] is 4, expected"):
        block_structure(mask, (BATCH, 3, SEQLEN, SEQLEN), CPU)
    mask.kv_indices[0, 0, 0, 0] = 7
    with pytest.raises(InvalidProblem, match="block_mask.kv_indices is 7, expected 0 to 3"):
        flex_attention(*operands(), block_mask=mask)
    sliced = block_mask(callbacks.causal)[:, :, :1]
    with pytest.raises(InvalidProblem, match="block_mask"):
        flex_attention(*operands(16, 64), block_mask=sliced)
