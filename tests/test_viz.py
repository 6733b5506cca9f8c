"""Pictures of masks: what is drawn is the mask, element by element."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import callbacks
import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from flash_cute import DependencyError, InvalidProblem, UnsupportedProblem, reference_mask, viz
from flash_cute.block_mask import block_structure
from flash_cute.viz import Level, mask_matrix, plot_mask

pytestmark = pytest.mark.cpu
SEQLEN = callbacks.SEQLEN


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def by_entry(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx <= q_idx + 2 * b + h


def drawn(figure: Any) -> Any:
    """The array that the picture shows."""
    (image,) = figure.axes[0].images
    return image.get_array()


# ---- The matrix ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", callbacks.MASK_MODS)
def test_matrix_of_a_mask_mod_is_pytorchs_mask(name: str):
    mask_mod = callbacks.MASK_MODS[name]("cpu")
    b, h = callbacks.BATCH - 1, callbacks.HEADS - 1
    found = mask_matrix(mask_mod, batch=b, head=h, seqlen_q=SEQLEN, seqlen_k=SEQLEN)
    expected = create_mask(mask_mod, b + 1, h + 1, SEQLEN, SEQLEN, device="cpu")[b, h]
    assert torch.equal(found == Level.VISIBLE, expected)
    assert torch.equal(found == Level.HIDDEN, ~expected)


def test_matrix_of_a_score_mod_is_what_it_adds_to_zero():
    slopes = torch.tensor([0.5, 0.25])

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return 3 * score + slopes[h] * (kv_idx - q_idx) + 100 * b

    found = mask_matrix(score_mod, batch=2, head=1, seqlen_q=5, seqlen_k=9)
    expected = 200 + 0.25 * (torch.arange(9) - torch.arange(5)[:, None])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["relative_bias_table", "buckets", "causal_by_score"])
def test_matrix_of_a_published_score_mod(name: str):
    score_mod = callbacks.SCORE_MODS[name]("cpu")
    found = mask_matrix(score_mod, head=2, seqlen_q=SEQLEN, seqlen_k=SEQLEN)
    for i, j in ((0, 0), (5, 60), (63, 1), (40, 40)):
        element = (torch.tensor(0.0), torch.tensor(0), torch.tensor(2), torch.tensor(i))
        assert found[i, j] == score_mod(*element, torch.tensor(j))


def test_matrix_of_a_block_mask_tells_its_blocks_apart():
    block_mask = create_block_mask(causal, None, None, 70, 90, device="cpu", BLOCK_SIZE=32)
    found = mask_matrix(block_mask)
    assert found.shape == (70, 90)
    visible = torch.ones(70, 90).tril().bool()
    assert torch.equal(found >= Level.VISIBLE, visible)
    assert (found[:32, :32] == torch.where(visible[:32, :32], Level.VISIBLE, Level.HIDDEN)).all()
    assert (found[32:64, :32] == Level.FULL).all()
    assert (found[:32, 32:] == Level.SKIPPED).all()
    structure = block_structure(block_mask, (1, 1, 70, 90), torch.device("cpu"))
    assert torch.equal(mask_matrix(structure, seqlen_q=70, seqlen_k=90), found)


def test_matrix_of_a_block_mask_by_entry():
    block_mask = create_block_mask(by_entry, 2, 3, 40, 40, device="cpu", BLOCK_SIZE=16)
    for b, h in ((0, 0), (1, 2)):
        expected = torch.ones(40, 40).tril(2 * b + h).bool()
        assert torch.equal(mask_matrix(block_mask, batch=b, head=h) >= Level.VISIBLE, expected)
    with pytest.raises(InvalidProblem, match="head is 3, expected 0 to 2"):
        mask_matrix(block_mask, head=3)


def test_matrix_of_a_block_mask_without_a_mask_mod_shows_its_blocks():
    count, index = torch.tensor([[[1, 2]]], dtype=torch.int32), torch.zeros(1, 1, 2, 2).int()
    index[0, 0, 1] = torch.tensor([0, 1])
    block_mask = BlockMask.from_kv_blocks(count, index, BLOCK_SIZE=16, seq_lengths=(32, 32))
    found = mask_matrix(block_mask)
    expected = torch.ones(2, 2).tril().repeat_interleave(16, 0).repeat_interleave(16, 1).bool()
    assert torch.equal(found == Level.VISIBLE, expected)
    assert torch.equal(found == Level.SKIPPED, ~expected)


def test_matrix_of_tensors():
    masks = reference_mask(4, 6, batch=2, causal=True)
    assert torch.equal(mask_matrix(masks, batch=1, head=7) == Level.VISIBLE, masks[1, 0])
    bias = torch.randn(4, 6, dtype=torch.bfloat16)
    assert torch.equal(mask_matrix(bias), bias.float())


@pytest.mark.parametrize("mask", [causal, torch.ones(6, 6).tril().bool()], ids=["mod", "tensor"])
def test_matrix_under_a_second_mask(mask: Any):
    visible = torch.ones(6, 6).tril().bool()
    bias = torch.randn(6, 6)
    found = mask_matrix(bias, mask=mask)
    assert torch.equal(found, bias.masked_fill(~visible, float("-inf")))
    window = reference_mask(6, 6, window_size=(1, 1))
    found = mask_matrix(window, mask=mask)
    assert torch.equal(found == Level.VISIBLE, window[0, 0] & visible)


REFUSED = {
    "no length": (dict(mask_or_bias=causal, seqlen_q=4), "seqlen_k is None"),
    "other length": (dict(mask_or_bias=torch.ones(4, 4), seqlen_q=5), "seqlen_q is 5, expected 4"),
    "zero": (dict(mask_or_bias=causal, seqlen_q=0, seqlen_k=4), "seqlen_q is 0"),
    "a number": (dict(mask_or_bias=3, seqlen_q=4, seqlen_k=4), "of type int, expected a mask_mod"),
    "a signature": (dict(mask_or_bias=lambda a: a, seqlen_q=4, seqlen_k=4), "expected a mask_mod"),
    "rank": (dict(mask_or_bias=torch.ones(3, 4, 4)), r"dim\(\) is 3, expected 2 or 4"),
    "integers": (dict(mask_or_bias=torch.ones(4, 4).int()), "dtype is torch.int32"),
    "bias as a mask": (
        dict(mask_or_bias=torch.ones(4, 4), mask=torch.ones(4, 4)),
        "mask is a bias",
    ),
    "mask of another size": (
        dict(mask_or_bias=torch.ones(4, 4), mask=torch.ones(4, 5).bool()),
        r"is \(4, 5\), expected \(4, 4\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_plot_mask_refuses(arguments: dict[str, Any], message: str):
    with pytest.raises(InvalidProblem, match=message):
        plot_mask(**arguments)


def test_plot_mask_refuses_the_native_form():
    def native(b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
        return q_idx >= kv_idx

    with pytest.raises(UnsupportedProblem, match="native form"):
        plot_mask(native, seqlen_q=4, seqlen_k=4)


# ---- The picture ---------------------------------------------------------------------------------


def pixels(figure: Any) -> Any:
    """Draw, and return the colour in the middle of every element: (rows, cols, 3) in 0 to 255."""
    agg = pytest.importorskip("matplotlib.backends.backend_agg")
    canvas = agg.FigureCanvasAgg(figure)
    canvas.draw()
    width, height = canvas.get_width_height()
    flat = torch.frombuffer(bytearray(canvas.buffer_rgba()), dtype=torch.uint8)
    image = flat.view(height, width, 4)
    axes = figure.axes[0]
    rows, cols = drawn(figure).shape
    centres = [(j, i) for i in range(rows) for j in range(cols)]
    at = torch.tensor(axes.transData.transform(centres)).long()
    return image[image.shape[0] - 1 - at[:, 1], at[:, 0], :3].view(rows, cols, 3)


def rgb(level: Level) -> torch.Tensor:
    text = viz._LEVELS[level][0]
    return torch.tensor([int(text[i : i + 2], 16) for i in (1, 3, 5)])


def test_plot_mask_pixels_are_the_mask():
    pytest.importorskip("matplotlib")
    mask = torch.rand(7, 12, generator=torch.Generator().manual_seed(0)) < 0.5
    shown = pixels(plot_mask(mask))
    assert (shown[mask] == rgb(Level.VISIBLE)).all()
    assert (shown[~mask] == rgb(Level.HIDDEN)).all()


def test_plot_mask_pixels_of_blocks():
    pytest.importorskip("matplotlib")
    block_mask = create_block_mask(causal, None, None, 48, 48, device="cpu", BLOCK_SIZE=16)
    shown, levels = pixels(plot_mask(block_mask, title="blocks")), mask_matrix(block_mask)
    assert set(levels.unique().tolist()) == set(Level)
    for level in Level:
        assert (shown[levels == level] == rgb(level)).all()


def test_plot_mask_pixels_of_a_bias_show_its_sign():
    pytest.importorskip("matplotlib")
    bias = torch.tensor([[-2.0, 0.0, 2.0, float("-inf")], [1.0, -1.0, 0.0, float("-inf")]])
    figure = plot_mask(bias)
    shown = pixels(figure).int()
    assert (shown[..., 3, :] == rgb(Level.HIDDEN)).all()
    redness = (shown[..., 0] - shown[..., 2])[:, :3]
    signs = torch.where(redness.abs() < 5, 0, redness.sign())
    assert torch.equal(signs, bias[:, :3].sign().int())
    values = torch.from_numpy(drawn(figure).filled(float("nan")))
    assert torch.equal(values[:, :3], bias[:, :3])


@pytest.mark.parametrize("value", [0.0, float("-inf")])
def test_plot_mask_of_a_bias_that_is_flat(value: float):
    pytest.importorskip("matplotlib")
    pixels(plot_mask(torch.full((3, 3), value)))


def test_plot_mask_array_is_the_matrix_and_the_title_is_set():
    pytest.importorskip("matplotlib")
    figure = plot_mask(by_entry, batch=1, head=1, seqlen_q=8, seqlen_k=10, title="a title")
    expected = mask_matrix(by_entry, batch=1, head=1, seqlen_q=8, seqlen_k=10)
    assert torch.equal(torch.from_numpy(drawn(figure).filled()), expected)
    assert figure.axes[0].get_title() == "a title"


def test_plot_mask_writes_a_file_and_touches_no_pyplot(tmp_path: Path):
    pytest.importorskip("matplotlib")
    had_pyplot = "matplotlib.pyplot" in sys.modules
    plot_mask(causal, seqlen_q=16, seqlen_k=16, path=tmp_path / "mask.png")
    assert (tmp_path / "mask.png").read_bytes().startswith(b"\x89PNG")
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot


def test_plot_mask_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in [name for name in sys.modules if name.startswith("matplotlib.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(DependencyError, match="pip install matplotlib"):
        plot_mask(causal, seqlen_q=4, seqlen_k=4)
