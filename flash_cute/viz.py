"""Pictures of masks and score changes: who sees whom, drawn by matplotlib.

``plot_mask(what, seqlen_q=..., seqlen_k=..., path="mask.png")`` draws a mask_mod, a block mask, a
score_mod or a tensor of either kind; one batch entry and one head at a time. matplotlib is imported
by the first picture (``pip install matplotlib``).
"""

from __future__ import annotations

import enum
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flash_cute import reference
from flash_cute.api import reference_mask
from flash_cute.block_mask import BlockStructure, block_structure
from flash_cute.errors import DependencyError, InvalidProblem, UnsupportedProblem, refuse
from flash_cute.problem import Options, attention_request
from flash_cute.variant import NATIVE, as_callback, callback_form

_NEG_INF = float("-inf")
_INCHES = 5.2  # of the longer side of the matrix
_GRID_LIMIT = 40  # up to so many rows and columns, lines part the elements or blocks


class Level(enum.IntEnum):
    """What an element of a drawn mask is; the names become the legend."""

    SKIPPED = 0
    HIDDEN = 1
    VISIBLE = 2
    FULL = 3


_LEVELS = {  # level -> (colour, words)
    Level.SKIPPED: ("#ffffff", "block skipped"),
    Level.HIDDEN: ("#dce1e8", "hidden"),
    Level.VISIBLE: ("#3b7dd8", "visible"),
    Level.FULL: ("#16407a", "visible, full block"),
}


# ---- What is drawn -------------------------------------------------------------------------------


def mask_matrix(
    what: Any,
    *,
    batch: int = 0,
    head: int = 0,
    seqlen_q: int | None = None,
    seqlen_k: int | None = None,
    mask: Any = None,
) -> torch.Tensor:
    """Compute the matrix that ``plot_mask`` draws; the arguments are the same.

    Shapes: (seqlen_q, seqlen_k) on the CPU: the bias in float32, -inf where it is hidden, or a
            Level as uint8
    Raises: InvalidProblem as plot_mask does.
    """
    sizes = _sizes(what, seqlen_q, seqlen_k)
    matrix = _matrix(what, batch, head, sizes)
    if mask is not None:
        shown = _matrix(mask, batch, head, sizes)
        if shown.is_floating_point():
            refuse("mask", "a bias or a score_mod", "what says which keys are visible")
        is_hidden = shown < Level.VISIBLE
        if matrix.is_floating_point():
            matrix = matrix.masked_fill(is_hidden, _NEG_INF)
        else:
            matrix = torch.where(is_hidden, matrix.clamp(max=Level.HIDDEN), matrix)
    return matrix


def _sizes(what: Any, seqlen_q: int | None, seqlen_k: int | None) -> tuple[int, int]:
    """The lengths: as given, or as a tensor or a BlockMask has them."""
    if isinstance(what, torch.Tensor):
        if what.dim() not in (2, 4):
            why = "(seqlen_q, seqlen_k) or (batch, heads, seqlen_q, seqlen_k)"
            refuse("mask_or_bias.dim()", what.dim(), "2 or 4", why)
        known: tuple[int | None, int | None] = (what.shape[-2], what.shape[-1])
    elif hasattr(what, "seq_lengths"):
        known = (int(what.seq_lengths[0]), int(what.seq_lengths[1]))
    else:
        known = (None, None)
    found: list[int] = []
    for name, given, own in zip(("seqlen_q", "seqlen_k"), (seqlen_q, seqlen_k), known, strict=True):
        if own is not None and given not in (None, own):
            refuse(name, given, own, "length of mask_or_bias; None takes it from there")
        length = own if given is None else given
        if length is None:
            refuse(name, None, "a length", "a callback or a BlockStructure has none of its own")
        if length < 1:
            refuse(name, length, "at least 1")
        found.append(length)
    return found[0], found[1]


def _matrix(what: Any, batch: int, head: int, sizes: tuple[int, int]) -> torch.Tensor:
    if isinstance(what, torch.Tensor):
        return _of_tensor(what, batch, head, sizes)
    if isinstance(what, BlockStructure):
        return _of_blocks(what, batch, head, sizes)
    count = getattr(what, "kv_num_blocks", getattr(what, "mask_block_cnt", None))
    if count is not None:
        have = (count.shape[0], count.shape[1])
        return _of_blocks(block_structure(what, (*have, *sizes), count.device), batch, head, sizes)
    kind = _kind_of(what)
    if callback_form(what, kind) == NATIVE:
        raise UnsupportedProblem(
            f"{kind} is in the native form, of CuTe values: it runs in kernels, draw the portable "
            "form"
        )
    if kind == "mask_mod":
        visible = _evaluate_mask(what, batch, head, sizes, _device_of(what, kind))
        return torch.where(visible.cpu(), Level.VISIBLE, Level.HIDDEN).to(torch.uint8)
    return _evaluate_score(what, batch, head, sizes, _device_of(what, kind)).cpu()


def _of_tensor(tensor: torch.Tensor, batch: int, head: int, sizes: tuple[int, int]) -> torch.Tensor:
    one = tensor.detach().cpu()
    if one.dim() == 4:
        one = one[_entry("batch", batch, one.shape[0]), _entry("head", head, one.shape[1])]
    if tuple(one.shape) != sizes:
        refuse("the shape of a matrix", tuple(one.shape), sizes, "(seqlen_q, seqlen_k)")
    if one.dtype == torch.bool:
        return torch.where(one, Level.VISIBLE, Level.HIDDEN).to(torch.uint8)
    if not one.is_floating_point():
        refuse("mask_or_bias.dtype", one.dtype, "torch.bool or a floating-point dtype")
    return one.float()


def _of_blocks(
    structure: BlockStructure, batch: int, head: int, sizes: tuple[int, int]
) -> torch.Tensor:
    """Elements of skipped blocks, of full blocks, and of partial ones as their mask_mod has it."""
    structure.check_indices()
    rows, cols = (
        torch.arange(n).div(block, rounding_mode="floor")
        for n, block in zip(sizes, structure.block_size, strict=True)
    )
    partial, full = (
        blocks[_entry("batch", batch, blocks.shape[0]), _entry("head", head, blocks.shape[1])]
        .cpu()[rows][:, cols]
        for blocks in structure.block_maps
    )  # fmt: skip
    visible = torch.ones(sizes, dtype=torch.bool)
    if structure.mask_mod is not None:
        device = structure.partial_count.device
        visible = _evaluate_mask(structure.mask_mod, batch, head, sizes, device).cpu()
    level = torch.where(visible, Level.VISIBLE, Level.HIDDEN)
    level = torch.where(full, Level.FULL, level)
    return torch.where(partial | full, level, Level.SKIPPED).to(torch.uint8)


def _entry(name: str, index: int, count: int) -> int:
    """The index to read at: a size of 1 stands for every entry, as in attention."""
    if count == 1:
        return 0
    if not 0 <= index < count:
        refuse(name, index, f"0 to {count - 1}")
    return index


def _kind_of(function: object) -> str:
    """Tell a mask_mod and a score_mod apart, by their signature."""
    try:
        callback_form(function, "mask_mod")
    except InvalidProblem:
        try:
            callback_form(function, "score_mod")
        except InvalidProblem as error:
            got = f"of type {type(function).__name__}"
            expected = "a mask_mod, a score_mod, a block mask, or a bool or floating-point tensor"
            raise InvalidProblem(f"mask_or_bias is {got}, expected {expected}") from error
        return "score_mod"
    return "mask_mod"


def _device_of(function: Callable[..., Any], kind: str) -> torch.device:
    """Where the tensors are that a callback captures."""
    try:
        tensors = as_callback(function, kind).tensors
    except UnsupportedProblem:  # no kernel can take it; it can be drawn all the same
        tensors = ()
    return tensors[0].device if tensors else torch.device("cpu")


def _evaluate_mask(
    mask_mod: Callable[..., Any],
    batch: int,
    head: int,
    sizes: tuple[int, int],
    device: torch.device,
) -> torch.Tensor:
    def of_entry(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mask_mod(b + batch, h + head, q_idx, kv_idx)

    return reference_mask(*sizes, mask_mod=of_entry, device=device)[0, 0]


def _evaluate_score(
    score_mod: Callable[..., Any],
    batch: int,
    head: int,
    sizes: tuple[int, int],
    device: torch.device,
) -> torch.Tensor:
    """What a score_mod makes of scores that are 0, by the reference.

    Every element is a query of its own that sees one key: its log-sum-exp is its score.
    """
    seqlen_q, seqlen_k = sizes

    def of_element(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score_mod(score, b + batch, h + head, q_idx // seqlen_k, q_idx % seqlen_k)

    q = torch.zeros(1, seqlen_q * seqlen_k, 1, 1, dtype=torch.float16, device=device)
    options = Options(score_mod=of_element, return_lse=True)
    with torch.no_grad():
        problem, inputs = attention_request(q, q[:, :1], q[:, :1], options)
        return reference.attention(problem, inputs)[1].view(sizes)


# ---- The picture ---------------------------------------------------------------------------------


def plot_mask(
    mask_or_bias: Any,
    *,
    batch: int = 0,
    head: int = 0,
    seqlen_q: int | None = None,
    seqlen_k: int | None = None,
    mask: Any = None,
    title: str = "",
    path: str | Path | None = None,
) -> Any:
    """Draw a mask or a score bias: queries downwards, keys to the right.

    Args:
        mask_or_bias: a mask_mod; a BlockMask of torch.nn.attention.flex_attention, our own
            BlockSparseTensors or a BlockStructure, whose skipped, partial and full blocks are told
            apart; a score_mod, drawn as what it adds to a score of 0; or a tensor, bool for a mask
            and floating-point for a bias. ``reference_mask(n, n, causal=True)`` gives the tensor of
            built-in masks.
        batch: entry to draw, as the callback sees it.
        head: query head to draw.
        seqlen_q: number of queries; needed where mask_or_bias has no length of its own.
        seqlen_k: number of keys; likewise.
        mask: a second mask, ANDed, of any kind but a bias: a score_mod is often used under one.
        path: file to write, of the type its name says (png, svg, pdf).

    Shapes: a tensor is (seqlen_q, seqlen_k) or (batch, heads, seqlen_q, seqlen_k), where a size of
            1 stands for all. Memory and time grow with seqlen_q * seqlen_k: draw short sequences.
    Returns the matplotlib Figure, which notebooks show.
    Raises: InvalidProblem naming the argument, what came and what was expected; DependencyError
            without matplotlib.
    """
    matrix = mask_matrix(
        mask_or_bias, batch=batch, head=head, seqlen_q=seqlen_q, seqlen_k=seqlen_k, mask=mask
    )
    rows, cols = matrix.shape
    scale = _INCHES / max(rows, cols)
    size = (max(cols * scale, 2.4) + 1.5, max(rows * scale, 1.2) + 1.3)
    figure = _matplotlib("figure").Figure(figsize=size, dpi=120, layout="constrained")
    axes = figure.add_subplot()
    if matrix.is_floating_point():
        _draw_bias(figure, axes, matrix)
    else:
        _draw_mask(figure, axes, matrix)
    block_size = getattr(mask_or_bias, "BLOCK_SIZE", getattr(mask_or_bias, "block_size", (1, 1)))
    steps = (int(block_size[0]), int(block_size[1]))
    _label(axes, (rows, cols), steps, title)
    if max(-(-rows // steps[0]), -(-cols // steps[1])) <= _GRID_LIMIT:
        _lines(axes, (rows, cols), steps)
    if path is not None:
        figure.savefig(path)
    return figure


def _draw_mask(figure: Any, axes: Any, matrix: torch.Tensor) -> None:
    colors = _matplotlib("colors")
    palette = colors.ListedColormap([colour for colour, _ in _LEVELS.values()])
    # Limits half-way between the levels: each has its own colour, whichever of them occur.
    axes.imshow(
        matrix.numpy(), cmap=palette, vmin=-0.5, vmax=len(_LEVELS) - 0.5, interpolation="nearest"
    )
    _legend(figure, [_LEVELS[Level(level)] for level in matrix.unique().tolist()])


def _draw_bias(figure: Any, axes: Any, matrix: torch.Tensor) -> None:
    """White is 0, hidden elements are grey, and both signs have one scale."""
    finite = matrix[matrix.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    shown = matrix.masked_fill(~matrix.isfinite(), float("nan")).numpy()
    colour, words = _LEVELS[Level.HIDDEN]
    palette = _matplotlib().colormaps["RdBu_r"].with_extremes(bad=colour)
    limit = largest or 1.0
    image = axes.imshow(shown, cmap=palette, vmin=-limit, vmax=limit, interpolation="nearest")
    figure.colorbar(image, ax=axes, shrink=0.8, label="added to the score")
    if finite.numel() < matrix.numel():
        _legend(figure, [(colour, words)])


def _legend(figure: Any, entries: list[tuple[str, str]]) -> None:
    patch = _matplotlib("patches").Patch
    handles = [patch(facecolor=c, edgecolor="#808080", label=words) for c, words in entries]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=8, frameon=False)


def _label(axes: Any, sizes: tuple[int, int], steps: tuple[int, int], title: str) -> None:
    """Name the axes; ticks are at whole elements, or at the first ones of blocks."""
    ticker = _matplotlib("ticker")
    axes.set_xlabel("key, kv_idx")
    axes.set_ylabel("query, q_idx")
    for axis, size, step in zip((axes.yaxis, axes.xaxis), sizes, steps, strict=True):
        if step == 1:
            axis.set_major_locator(ticker.MaxNLocator(nbins=min(size, 8), integer=True))
        else:
            axis.set_major_locator(ticker.MultipleLocator(step * -(-size // (8 * step))))
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.tick_params(labelsize=8)
    if title:
        axes.set_title(title, fontsize=10)


def _lines(axes: Any, sizes: tuple[int, int], steps: tuple[int, int]) -> None:
    """Part the matrix every `steps` elements by thin lines."""
    rows, cols = (
        [edge - 0.5 for edge in range(step, size, step)]
        for size, step in zip(sizes, steps, strict=True)
    )
    style = {"colors": "#808080", "linewidth": 0.4}
    axes.hlines(rows, -0.5, sizes[1] - 0.5, **style)
    axes.vlines(cols, -0.5, sizes[0] - 0.5, **style)


def _matplotlib(part: str = "") -> Any:
    """matplotlib or one of its modules; never pyplot, which has windows and state."""
    try:
        return importlib.import_module(f"matplotlib.{part}" if part else "matplotlib")
    except ImportError as error:
        raise DependencyError("plot_mask needs matplotlib: pip install matplotlib") from error
