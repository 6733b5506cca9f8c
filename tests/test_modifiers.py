"""Callbacks, block masks and `out` on calls that were made before: quick, and never stale.

All but the kernel itself runs here, on a toy GPU (toy_gpu.py).
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import callbacks
import pytest
import torch
import toy_gpu
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask
from toy_gpu import Launches, on_gpu

from flash_cute import (
    BlockSparseTensors,
    InvalidProblem,
    UnsupportedProblem,
    flash_attn_func,
    flash_attn_varlen_func,
    flex_attention,
)

BATCH, SEQLEN, HEADS, DIM = 2, 256, 4, 64
CALL_LIMIT_US = 300.0  # of a repeated call; about 15 to 45 here
FACTOR = 1.0
TABLE = on_gpu(torch.zeros(HEADS))
SETTINGS = types.SimpleNamespace(factor=1.0)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return toy_gpu.install(monkeypatch)


def operand(seqlen: int = SEQLEN, heads: int = HEADS, batch: int = BATCH) -> torch.Tensor:
    return on_gpu(torch.zeros(batch, seqlen, heads, DIM, dtype=torch.bfloat16))


Q, K, V = operand(), operand(), operand()
FLEX = [on_gpu(torch.zeros(BATCH, HEADS, SEQLEN, DIM, dtype=torch.bfloat16)) for _ in range(3)]


def attend(**options: Any) -> Any:
    return flash_attn_func(Q, K, V, **options)


def block_mask(mask_mod: Any = callbacks.causal, block: Any = 128, heads: int = HEADS) -> BlockMask:
    mask = create_block_mask(mask_mod, BATCH, heads, SEQLEN, SEQLEN, "cpu", block)
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        setattr(mask, name, on_gpu(getattr(mask, name)))
    return mask


@contextlib.contextmanager
def quick(launches: Launches, times: int = 1) -> Iterator[None]:
    """What happens inside launches so many kernels and never goes the long way."""
    before = len(launches.looked_up), len(launches.launched)
    yield
    assert (len(launches.looked_up), len(launches.launched)) == (before[0], before[1] + times)


@contextlib.contextmanager
def slow(launches: Launches) -> Iterator[None]:
    """What happens inside goes the long way once, and launches what it finds there."""
    before = len(launches.looked_up), len(launches.launched)
    yield
    assert (len(launches.looked_up), len(launches.launched)) == (before[0] + 1, before[1] + 1)
    assert launches.launched[-1] == launches.looked_up[-1]


@contextlib.contextmanager
def refused(launches: Launches, error: type[Exception], message: str) -> Iterator[None]:
    before = len(launches.launched)
    with pytest.raises(error, match=message):
        yield
    assert len(launches.launched) == before, "refused before anything is launched"


# ---- The same again ------------------------------------------------------------------------------

MASK = block_mask()
CU_SEQLENS = on_gpu(torch.tensor([0, 100, BATCH * SEQLEN], dtype=torch.int32))
ALIBI = lambda s, b, h, i, j: s - TABLE[h] * torch.abs(i - j)


PACKED = [on_gpu(torch.zeros(BATCH * SEQLEN, HEADS, DIM).half()) for _ in range(3)]


def packed(**options: Any) -> Any:
    return flash_attn_varlen_func(
        *PACKED, cu_seqlens_q=CU_SEQLENS, cu_seqlens_k=CU_SEQLENS, **options
    )


REPEATED: dict[str, Callable[[], Any]] = {
    "score_mod": lambda: attend(score_mod=ALIBI, causal=True),
    "mask_mod": lambda: attend(mask_mod=callbacks.causal, return_lse=True),
    "block-mask": lambda: attend(block_mask=MASK),
    "block-tensors": lambda: attend(
        block_mask=BlockSparseTensors(MASK.kv_num_blocks, MASK.kv_indices, mask_mod=MASK.mask_mod)
    ),
    "all": lambda: attend(block_mask=MASK, mask_mod=callbacks.window(9), score_mod=ALIBI),
    "out": lambda: attend(out=operand()),
    "packed": lambda: packed(score_mod=ALIBI, mask_mod=callbacks.window(4)),
    "flex": lambda: flex_attention(*FLEX),
    "flex-callbacks": lambda: flex_attention(*FLEX, score_mod=ALIBI, block_mask=MASK, scale=0.5),
    "partial": lambda: attend(
        score_mod=functools.partial(lambda table, s, b, h, i, j, by: s + by * table[h], TABLE, by=2)
    ),
    "fresh-functions": lambda: attend(
        score_mod=callbacks.alibi("cpu"), mask_mod=and_masks(callbacks.window(3), callbacks.causal)
    ),
}


@pytest.mark.parametrize("name", REPEATED)
def test_a_repeated_call_is_quick_and_launches_the_same(name: str, launches: Launches):
    call = REPEATED[name]
    with slow(launches):
        call()
    first, kernel = launches.arguments, launches.launched[-1]
    with quick(launches, 2):
        call()
        call()
    assert launches.launched[-1] == kernel and len(launches.arguments) == len(first)
    where = list(launches.named._fields)
    fresh = {where.index(x) for x in ("out", "lse", *("qkv" if name == "packed" else ""))}
    pairs = zip(first, launches.arguments, strict=True)
    different = [i for i, (one, two) in enumerate(pairs) if one != two]
    assert set(different) <= fresh


def test_captured_arguments_follow_the_callbacks_in_order(launches: Launches):
    one, two, three = (on_gpu(torch.zeros(n)) for n in (5, 6, 7))
    mask = block_mask()
    mask.mask_mod = lambda b, h, i, j: three[i] > 0
    options = {
        "score_mod": lambda s, b, h, i, j: s + one[i],
        "mask_mod": lambda b, h, i, j: two[i] > 0,
        "block_mask": mask,
    }
    found = []
    for _ in range(2):
        attend(**options)
        found.append(launches.captured)
    expected = (one.data_ptr(), 5, two.data_ptr(), 6, three.data_ptr(), 7)
    assert found[0] == found[1] and found[0][:6] == expected
    assert found[1][8:10] == (mask.kv_num_blocks.data_ptr(), mask.kv_indices.data_ptr())


# ---- What changed in between ---------------------------------------------------------------------


def by_global(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s * FACTOR


def by_attribute(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return s * SETTINGS.factor


class Scale:
    def __init__(self) -> None:
        self.by = 1.0

    def __call__(self, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * self.by


def changeable(how: str, patch: pytest.MonkeyPatch) -> tuple[Callable[..., Any], Any]:
    """A score_mod that multiplies by a number, and what sets the number."""
    cell, listed, table, scale = 1.0, [1.0, (2,)], {"by": 1.0}, Scale()

    def closure(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * cell

    def set_cell(by: float) -> None:
        nonlocal cell
        cell = by

    def default(s: Any, b: Any, h: Any, i: Any, j: Any, by: float = 1.0, *, too: float = 1) -> Any:
        return s * by * too

    def code(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * 1.0

    helper = lambda x: x * 1.0
    other = {1.0: lambda s, b, h, i, j: s * 1.0, 2.0: lambda s, b, h, i, j: s * 2.0}
    ways: dict[str, tuple[Callable[..., Any], Any]] = {
        "cell": (closure, set_cell),
        "nested-cell": (lambda s, b, h, i, j: closure(s, b, h, i, j) + 1, set_cell),
        "global": (by_global, lambda by: patch.setitem(globals(), "FACTOR", by)),
        "attribute": (by_attribute, lambda by: patch.setattr(SETTINGS, "factor", by)),
        "default": (default, lambda by: setattr(default, "__defaults__", (by,))),
        "keyword": (default, lambda by: default.__kwdefaults__.update(too=by)),
        "code": (code, lambda by: setattr(code, "__code__", other[by].__code__)),
        "helper": (
            lambda s, b, h, i, j: helper(s),
            lambda by: setattr(helper, "__defaults__", (by,)),
        ),
        "list": (lambda s, b, h, i, j: s * listed[0], lambda by: listed.__setitem__(0, by)),
        "dict": (lambda s, b, h, i, j: s * table["by"], lambda by: table.update(by=by)),
        "object": (scale, lambda by: setattr(scale, "by", by)),
    }
    return ways[how]


@pytest.mark.parametrize(
    "how",
    "cell nested-cell global attribute default keyword code helper list dict object".split(),
)
@pytest.mark.parametrize("is_mask", [False, True], ids=["score_mod", "block-mask"])
def test_a_changed_number_is_another_kernel(
    how: str, is_mask: bool, launches: Launches, monkeypatch: pytest.MonkeyPatch
):
    function, change = changeable(how, monkeypatch)
    options: dict[str, Any] = {"score_mod": function}
    if is_mask:
        mask = block_mask()
        mask.mask_mod = lambda b, h, i, j: function(i, b, h, i, j) > j
        options = {"block_mask": mask}
    change(1.0)
    with slow(launches):
        attend(**options)
    change(2.0)
    with slow(launches):
        attend(**options)
    first, second = launches.launched
    assert first != second
    for by, kernel in ((1.0, first), (2.0, second), (2.0, second)):
        change(by)
        with quick(launches):
            attend(**options)
        assert launches.launched[-1] == kernel


def test_functions_that_come_and_go_are_never_confused(launches: Launches):
    """A new function may get the address of one that is gone; what it captures counts."""

    def scaled(by: float) -> Callable[..., Any]:
        return lambda s, b, h, i, j: s * by

    for by in (1.0, 2.0):
        attend(score_mod=scaled(by))
    kernels = launches.launched[:]
    assert kernels[0] != kernels[1]
    with quick(launches, 40):
        for turn in range(40):
            attend(score_mod=scaled(1.0 + turn % 2))
    assert launches.launched[2:] == kernels * 20


def test_another_tensor_in_the_same_variable_is_another_argument(launches: Launches):
    table = on_gpu(torch.zeros(4, 8))
    score_mod = lambda s, b, h, i, j: s + table[h, i]
    attend(score_mod=score_mod)
    kernel = launches.launched[-1]
    others = [torch.zeros(4, 8), torch.zeros(9, 300), torch.zeros(4, 16)[:, :8]]
    for table in map(on_gpu, others):
        with quick(launches):
            attend(score_mod=score_mod)
        expected = (table.data_ptr(), *table.shape, table.stride(0))
        assert launches.captured == expected and launches.launched[-1] == kernel
    for other in (torch.zeros(4, 8).half(), torch.zeros(8, 4).t()):
        table = on_gpu(other)
        with slow(launches):
            attend(score_mod=score_mod)
        assert launches.launched[-1] != kernel


def test_one_tensor_in_two_variables_is_one_argument(launches: Launches):
    one, two = on_gpu(torch.zeros(4)), on_gpu(torch.zeros(4))
    score_mod = lambda s, b, h, i, j: s + one[h] * two[h]
    attend(score_mod=score_mod)
    both = (one.data_ptr(), 4, two.data_ptr(), 4)
    assert launches.captured == both
    kept, two = two, one
    attend(score_mod=score_mod)
    assert launches.captured == both[:2]
    two = kept
    with quick(launches):
        attend(score_mod=score_mod)
    assert launches.captured == both


def test_captured_tensors_are_refused_as_on_a_first_call(launches: Launches):
    table = on_gpu(torch.zeros(4))
    score_mod = lambda s, b, h, i, j: s + table[h]
    call = lambda: attend(score_mod=score_mod)
    call()
    table = torch.zeros(4)
    with refused(launches, InvalidProblem, "captures 'table' on cpu, expected cuda:0"):
        call()
    table = on_gpu(torch.zeros(4), 1)
    with refused(launches, InvalidProblem, "captures 'table' on cuda:1, expected cuda:0"):
        call()
    table = on_gpu(torch.zeros(0))
    with refused(launches, InvalidProblem, "captures 'table' without elements"):
        call()
    table = {1, 2}
    with refused(launches, UnsupportedProblem, "captures 'table' of type set"):
        call()
    table = on_gpu(torch.zeros(4))
    table.requires_grad_(True)
    with refused(launches, UnsupportedProblem, "no_grad"):
        call()
    with torch.no_grad(), quick(launches):
        call()


def test_tensors_are_refused_before_callbacks(launches: Launches):
    value = {1}
    score_mod = lambda s, b, h, i, j: s * value
    with refused(launches, InvalidProblem, r"k.shape\[-1\] is 32, expected 64"):
        flash_attn_func(Q, K[..., :32].as_subclass(toy_gpu.ToyTensor), V, score_mod=score_mod)
    with refused(launches, InvalidProblem, "mask_mod is a function of"):
        attend(mask_mod=lambda b: True, score_mod=score_mod)


def test_what_changes_within_a_call_is_not_remembered(launches: Launches):
    """The plan of a call belongs to what validation found, not to what the look-up found."""

    class Counting:
        reads = 0.0

        @property
        def by(self) -> float:
            Counting.reads += 1.0
            return Counting.reads

    counting = Counting()
    score_mod = lambda s, b, h, i, j: s * counting.by
    with slow(launches):
        attend(score_mod=score_mod)
    Counting.reads = 0.0
    with slow(launches):
        attend(score_mod=score_mod)


def test_native_callbacks_follow_their_attributes(launches: Launches):
    def native(score: Any, b: Any, h: Any, *, q_idx: Any, kv_idx: Any, seqlen_info: Any,
               aux_tensors: Any) -> Any:  # fmt: skip
        return score

    tables = [on_gpu(torch.zeros(n)) for n in (4, 5)]
    native.aux_tensors = tables[:1]  # type: ignore[attr-defined]
    attend(score_mod=native)
    native.aux_tensors = tables[1:]  # type: ignore[attr-defined]
    with quick(launches):
        attend(score_mod=native)
    assert launches.captured == (tables[1].data_ptr(), 5)
    for name, value in (("aux_tensors", tables), ("__vec_size__", 2)):
        setattr(native, name, value)
        with slow(launches):
            attend(score_mod=native)
        assert launches.launched[-1] != launches.launched[-2]
    native.__vec_size__ = 3  # type: ignore[attr-defined]
    with refused(launches, UnsupportedProblem, "__vec_size__ is 3"):
        attend(score_mod=native)


# ---- Block masks ---------------------------------------------------------------------------------


def test_replaced_lists_are_launched_with(launches: Launches):
    mask = block_mask()
    attend(block_mask=mask)
    fresh = mask.kv_num_blocks, mask.full_kv_indices = (
        on_gpu(mask.kv_num_blocks.clone()),
        on_gpu(mask.full_kv_indices.clone()),
    )
    with quick(launches):
        attend(block_mask=mask)
    assert {tensor.data_ptr() for tensor in fresh} <= set(launches.captured)
    shared = block_mask(heads=1)
    with slow(launches):
        attend(block_mask=shared)
    assert launches.captured[4:6] == (SEQLEN // 128, 0)  # rows to the next batch and head


def test_another_block_size_or_set_of_lists_is_another_plan(launches: Launches):
    mask = block_mask()
    attend(block_mask=mask)
    assert launches.captured[:2] == (1, 1)
    wide = block_mask(block=(256, 128))
    assert wide.kv_num_blocks.shape != mask.kv_num_blocks.shape
    for name in ("BLOCK_SIZE", "kv_num_blocks", "kv_indices"):
        setattr(mask, name, getattr(wide, name))
    mask.full_kv_num_blocks, mask.full_kv_indices = wide.full_kv_num_blocks, wide.full_kv_indices
    with slow(launches):
        attend(block_mask=mask)
    assert launches.captured[:2] == (2, 1)  # tiles of 128 x 128 in a block
    with quick(launches):
        attend(block_mask=mask)
    assert launches.captured[:2] == (2, 1)
    mask.full_kv_num_blocks = mask.full_kv_indices = None
    with slow(launches):
        attend(block_mask=mask)
    assert len(launches.captured) == 2 + 6


def test_another_block_size_with_lists_of_the_same_shape_is_another_plan(launches: Launches):
    mask = block_mask()
    attend(block_mask=mask)
    mask.BLOCK_SIZE = (192, 192)  # two by two blocks in 256, as before
    with slow(launches):
        attend(block_mask=mask)
    tile = launches.launched[-1].config.tile_m, launches.launched[-1].config.tile_n
    assert launches.captured[:2] == (192 // tile[0], 192 // tile[1])


def test_another_mask_mod_is_another_kernel(launches: Launches):
    mask = block_mask()
    attend(block_mask=mask)
    mask.mask_mod = callbacks.window(5)
    with slow(launches):
        attend(block_mask=mask)
    assert launches.launched[0] != launches.launched[1]


def test_block_masks_are_refused_as_on_a_first_call(launches: Launches):
    mask = block_mask()
    attend(block_mask=mask)
    kept = mask.seq_lengths, mask.kv_indices
    mask.seq_lengths = (SEQLEN, SEQLEN + 1)
    with refused(launches, InvalidProblem, r"block_mask.seq_lengths is \(256, 257\)"):
        attend(block_mask=mask)
    mask.seq_lengths, mask.kv_indices = kept[0], on_gpu(mask.kv_indices[..., :1])
    with refused(launches, InvalidProblem, "block_mask.kv_indices.shape is"):
        attend(block_mask=mask)
    mask.kv_indices = kept[1]
    mask.kv_num_blocks = torch.zeros(mask.kv_num_blocks.shape, dtype=torch.int32)
    with refused(launches, InvalidProblem, "block_mask.kv_num_blocks.device is cpu"):
        attend(block_mask=mask)


def test_block_masks_of_packed_sequences_are_repeated(launches: Launches):
    mask = block_mask()
    packed(block_mask=mask)
    found = launches.captured
    with quick(launches):
        packed(block_mask=mask)
    assert launches.captured == found


def test_lists_that_have_to_be_packed_are_packed_anew(launches: Launches):
    mask = block_mask()
    attend(block_mask=mask)
    mask.kv_num_blocks = on_gpu(mask.kv_num_blocks.long())
    for _ in range(2):
        with slow(launches):
            attend(block_mask=mask)
        assert mask.kv_num_blocks.data_ptr() not in launches.captured


# ---- out -----------------------------------------------------------------------------------------


def test_out_is_written_where_it_lies(launches: Launches):
    wide = on_gpu(torch.zeros(BATCH, SEQLEN, HEADS, 2 * DIM, dtype=torch.bfloat16))
    half = on_gpu(wide[..., :DIM])
    attend()
    for out in (operand(), half):
        with slow(launches):
            assert attend(out=out) is out
        with quick(launches):
            assert attend(out=out) is out
        named = launches.named
        assert (named.out, named.out_stride_head) == (out.data_ptr(), out.stride(2))
    with quick(launches):
        assert attend() is not half


def test_out_is_refused_as_on_a_first_call(launches: Launches):
    attend(out=operand())
    for out, message in (
        (Q, "out is the memory of q"),
        (V, "out is the memory of v"),
        (on_gpu(Q.half()), "out.dtype is torch.float16, expected torch.bfloat16"),
        (on_gpu(torch.zeros_like(Q), 1), "out.device is cuda:1, expected cuda:0"),
        (torch.zeros(Q.shape, dtype=Q.dtype), "out.device is cpu, expected cuda:0"),
        (operand(SEQLEN + 1), "out.shape is"),
        (operand().requires_grad_(True), "out is given while an argument requires grad"),
        (3, "out is of type int, expected a torch.Tensor"),
    ):
        with refused(launches, InvalidProblem, message):
            attend(out=out)


def test_an_out_that_no_kernel_can_write_is_filled_by_a_copy(launches: Launches):
    attend(out=operand())
    for _ in range(2):
        flat = torch.empty(Q.numel() + 1, dtype=Q.dtype)
        out = on_gpu(flat[1:].view(Q.shape))
        with slow(launches):
            assert attend(out=out) is out
        assert launches.named.out != out.data_ptr()


# ---- flex_attention ------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0)], ids=str)
def test_flex_writes_in_the_layout_of_its_query(order: tuple[int, ...], launches: Launches):
    sizes = [FLEX[0].shape[axis] for axis in order]
    back = [order.index(axis) for axis in range(3)]
    query = on_gpu(torch.zeros(*sizes, DIM, dtype=torch.bfloat16)).permute(*back, 3)
    assert query.shape == FLEX[0].shape
    for passes in (slow, quick):
        with passes(launches):
            out = flex_attention(query, *FLEX[1:])
        assert out.stride() == query.stride() and launches.named.out == out.data_ptr()
        found = launches.named
        strides = (found.out_stride_batch, found.out_stride_head, found.out_stride_seqlen)
        assert strides == query.stride()[:3]


def test_flex_repeats_keys_of_one_batch(launches: Launches):
    key, value = (on_gpu(tensor[:1]) for tensor in FLEX[1:])
    for passes in (slow, quick):
        with passes(launches):
            flex_attention(FLEX[0], key, value, block_mask=MASK)
        assert launches.named.k_stride_batch == 0 and launches.named.batch == BATCH
    with refused(launches, InvalidProblem, r"key.shape\[0\] is 1, expected 2"):
        flex_attention(FLEX[0], key, value)


def test_flex_refuses_as_on_a_first_call(launches: Launches):
    query, few = FLEX[0], [on_gpu(tensor[:, :2]) for tensor in FLEX[1:]]
    flex_attention(query, *few, enable_gqa=True)
    with refused(launches, InvalidProblem, r"key.shape\[1\] is 2, expected 4"):
        flex_attention(query, *few)
    flex_attention(*FLEX)
    with refused(launches, UnsupportedProblem, "kernel_options has BLOCK_M"):
        flex_attention(*FLEX, kernel_options={"BLOCK_M": 64})
    table = on_gpu(torch.zeros(4))
    score_mod = lambda s, b, h, i, j: s + table[h]
    flex_attention(*FLEX, score_mod=score_mod)
    table = on_gpu(torch.zeros(4)).requires_grad_(True)
    with refused(launches, UnsupportedProblem, "no_grad"):
        flex_attention(*FLEX, score_mod=score_mod)


# ---- Cost ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REPEATED)
def test_a_repeated_call_is_cheap(name: str, launches: Launches):
    call = attend if name == "out" else REPEATED[name]
    options = {"out": operand()} if name == "out" else {}
    call(**options)
    best = math.inf
    for _ in range(5):
        started = time.thread_time()
        for _ in range(50):
            call(**options)
        best = min(best, (time.thread_time() - started) / 50)
    print(f"{name}: {best * 1e6:.1f} us")
    assert best * 1e6 < CALL_LIMIT_US
