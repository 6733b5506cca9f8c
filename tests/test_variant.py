"""What a callback is: its form, its identity, what it captures, what is refused."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import re
import time
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import callbacks
import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from flash_cute import InvalidProblem, UnsupportedProblem, and_masks, cache, or_masks
from flash_cute.variant import Callback, as_callback, callback_for, callback_form

CALL_LIMIT_US = 200.0  # per call of as_callback; about 5 to 15 here
FACTOR = 1.0
TABLE = torch.arange(4.0)
SETTINGS = types.ModuleType("settings")
SETTINGS.factor, SETTINGS.table, SETTINGS.unused = 1.0, TABLE, object()  # type: ignore[attr-defined]


def score(function: Callable[..., Any]) -> Callback:
    return as_callback(function, "score_mod")


# ---- Forms ---------------------------------------------------------------------------------------


def native_score(score: Any, b: Any, h: Any, *, q_idx: Any, kv_idx: Any, seqlen_info: Any,
                 aux_tensors: Any) -> Any:  # fmt: skip
    return score


class Slope:
    def __init__(self, by: float = 1.0) -> None:
        self.by = by

    def __call__(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * self.by

    def method(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * self.by


FORMS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "plain": (callbacks.noop, "score_mod", "portable"),
    "mask": (callbacks.causal, "mask_mod", "portable"),
    "default": (lambda s, b, h, i, j, by=2: s * by, "score_mod", "portable"),
    "keyword": (lambda s, b, h, i, j, *, by=2: s * by, "score_mod", "portable"),
    "variadic": (lambda *args: args[0], "score_mod", "portable"),
    "partial": (functools.partial(lambda s, b, h, i, j, by: s, by=2), "score_mod", "portable"),
    "object": (Slope(), "score_mod", "portable"),
    "method": (Slope().method, "score_mod", "portable"),
    "native-score": (native_score, "score_mod", "native"),
    "native-mask": (lambda b, h, i, j, seqlen_info, aux_tensors: True, "mask_mod", "native"),
    "native-names-by-default": (
        lambda s, b, h, i, j, seqlen_info=None, aux_tensors=(): s, "score_mod", "portable",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_form_is_told_by_the_signature(name: str):
    function, kind, form = FORMS[name]
    assert callback_form(function, kind) == form == as_callback(function, kind).key.form


async def coroutine(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score


WRONG: dict[str, tuple[Any, str, str]] = {
    "few": (lambda s, b: s, "score_mod", "score_mod is a function of (s, b), expected"),
    "swapped": (
        callbacks.noop,
        "mask_mod",
        "mask_mod is a function of (score, b, h, q_idx, kv_idx), expected mask_mod(b",
    ),
    "many": (lambda b, h, i, j, x: b, "mask_mod", "mask_mod is a function of (b, h, i, j, x)"),
    "type": (3, "score_mod", "score_mod is of type int, expected a function score_mod(score,"),
    "coroutine": (coroutine, "score_mod", "score_mod is a coroutine or generator, expected"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_signatures_are_refused_with_both_forms(name: str):
    function, kind, message = WRONG[name]
    with pytest.raises(InvalidProblem) as caught:
        as_callback(function, kind)
    assert str(caught.value).startswith(message)
    names = "b, h, q_idx, kv_idx" if kind == "mask_mod" else "score, b, h, q_idx, kv_idx"
    assert f"{kind}({names}), or the native form {kind}({names}, seqlen_info" in str(caught.value)


# ---- Identity: numbers ---------------------------------------------------------------------------


class Numbers(NamedTuple):
    by: float


class Kind(enum.Enum):
    ONE = 1.0
    TWO = 2.0


@dataclasses.dataclass(frozen=True)
class Settings:
    by: float

    def apply(self, value: Any) -> Any:
        return value * self.by


def by_global(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * FACTOR


def by_module(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * SETTINGS.factor


def carried(how: str, by: float) -> Callable[..., Any]:
    """A score_mod that multiplies by a number which it carries in one of many ways."""

    def with_default(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, by: float = by) -> Any:
        return score * by

    def with_keyword(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, *, by: float = by) -> Any:
        return score * by

    def helper(value: Any) -> Any:
        return value * by

    holder = types.SimpleNamespace(by=by, other=object())
    numbers, settings, kind = Numbers(by), Settings(by), Kind(by)
    table, listed = {"by": by}, [by, (by,)]
    by_partial = functools.partial(lambda s, b, h, i, j, by: s * by, by=by)
    ways: dict[str, Callable[..., Any]] = {
        "closure": lambda s, b, h, i, j: s * by,
        "default": with_default,
        "keyword": with_keyword,
        "partial": by_partial,
        "partial-in-order": functools.partial(lambda by, s, b, h, i, j: s * by, by),
        "nested": lambda s, b, h, i, j: helper(s),
        "nested-inside": lambda s, b, h, i, j: (lambda x: x * by)(s),
        "global": by_global,
        "module": by_module,
        "object": Slope(by),
        "method": Slope(by).method,
        "attribute": lambda s, b, h, i, j: s * holder.by,
        "named-tuple": lambda s, b, h, i, j: s * numbers.by,
        "dataclass": lambda s, b, h, i, j: settings.apply(s),
        "enum": lambda s, b, h, i, j: s * kind.value,
        "dict": lambda s, b, h, i, j: s * table["by"],
        "list": lambda s, b, h, i, j: s * listed[1][0],
        "wrapped": functools.wraps(by_global)(lambda s, b, h, i, j: s * by),
    }
    return ways[how]


WAYS = (
    "closure default keyword partial partial-in-order nested nested-inside global module object "
    "method attribute named-tuple dataclass enum dict list wrapped"
).split()


@pytest.mark.parametrize("how", WAYS)
def test_case_27_numbers_count_however_they_are_carried(how: str, monkeypatch: pytest.MonkeyPatch):
    keys, results = [], []
    for by in (1.0, 2.0, 1.0):
        monkeypatch.setitem(globals(), "FACTOR", by)
        monkeypatch.setattr(SETTINGS, "factor", by)
        callback = score(carried(how, by))
        keys.append(callback.key)
        monkeypatch.setitem(globals(), "FACTOR", 7.0)  # the snapshot is of the time of the call
        monkeypatch.setattr(SETTINGS, "factor", 7.0)
        results.append(callback.with_tensors(())(10.0, 0, 0, 0, 0))
    assert results == [10.0, 20.0, 10.0]
    assert keys[0] == keys[2] != keys[1]
    assert cache.canonical_text(keys[0]) == cache.canonical_text(keys[2])


def test_changed_variables_are_seen():
    by, table = 1.0, torch.zeros(3)

    def scaled(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * by + table[h]

    first = score(scaled)
    by, table = 2.0, torch.ones(3)
    second = score(scaled)
    assert first.key != second.key and second.tensors[0] is table
    by, table = 1.0, torch.zeros(5)
    assert score(scaled).key == first.key and score(scaled).tensors[0].shape == (5,)


@pytest.mark.parametrize("pair", [(1, 1.0), (1, True), (0.0, -0.0), ("a", b"a"), ((1,), (1.0,))])
def test_types_and_signs_of_constants_count(pair: tuple[Any, Any]):
    keys = [score(lambda s, b, h, i, j, value=value: s).key for value in pair]
    assert keys[0] != keys[1]
    nan = [score(lambda s, b, h, i, j: s * value).key for value in (math.nan, float("nan"))]
    assert nan[0] == nan[1]


def test_code_counts_and_names_do_not():
    def one(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + 1

    two = lambda s, b, h, i, j: s + 1
    assert score(one).key == score(two).key
    assert score(lambda s, b, h, i, j: s + 2).key != score(two).key
    assert score(lambda s, b, h, i, j: s - 1).key != score(two).key
    assert score(lambda s, b, h, i, j: torch.exp(s)).key != score(
        lambda s, b, h, i, j: torch.exp2(s)
    ).key  # fmt: skip
    assert as_callback(lambda *a: a[0], "mask_mod").key != score(lambda *a: a[0]).key


@pytest.mark.parametrize(
    "combine", [and_masks, or_masks, torch_flex.and_masks, torch_flex.or_masks]
)
def test_combined_masks_count_by_their_parts(combine: Callable[..., Any]):
    key = lambda *masks: as_callback(combine(*masks), "mask_mod").key
    causal, window = callbacks.causal, callbacks.window
    assert key(causal, window(3)) == key(causal, window(3)) != key(causal, window(4))
    assert key(causal) != key(causal, causal) != key(window(3), causal)


def test_and_masks_and_or_masks():
    index = [torch.tensor(x) for x in (0, 0, 5, 3)]
    assert bool(and_masks(callbacks.causal, callbacks.window(2))(*index))
    assert not bool(and_masks(callbacks.causal, callbacks.window(1))(*index))
    assert bool(or_masks(callbacks.causal, callbacks.window(1))(*index))
    assert bool(and_masks()(*index)) and not bool(or_masks()(*index))
    with pytest.raises(InvalidProblem, match=r"mask_mod is a function of \(score"):
        and_masks(callbacks.noop)


def test_recursion():
    def power(value: Any, times: int) -> Any:
        return value if times == 0 else power(value * by, times - 1)

    by = 2.0
    callback = score(lambda s, b, h, i, j: power(s, 3))
    by = 3.0
    assert callback.with_tensors(())(1.0, 0, 0, 0, 0) == 8.0
    assert score(lambda s, b, h, i, j: power(s, 3)).key != callback.key


# ---- Identity: tensors ---------------------------------------------------------------------------


def by_global_table(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + TABLE[h]


def by_module_table(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + SETTINGS.table[h]


class Bias(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(TABLE)

    def score_mod(self) -> Callable[..., Any]:
        return lambda score, b, h, q_idx, kv_idx: score + self.table[h]


def holding(how: str, table: torch.Tensor) -> Callable[..., Any]:
    helper = lambda h: table[h]
    holder = types.SimpleNamespace(inner=types.SimpleNamespace(table=table))
    slope = Slope()
    slope.by = table  # type: ignore[assignment]
    ways: dict[str, Callable[..., Any]] = {
        "closure": lambda s, b, h, i, j: s + table[h],
        "default": lambda s, b, h, i, j, t=table: s + t[h],
        "partial": functools.partial(lambda s, b, h, i, j, t: s + t[h], t=table),
        "helper": lambda s, b, h, i, j: s + helper(h),
        "attribute": lambda s, b, h, i, j: s + holder.inner.table[h],
        "list": lambda s, b, h, i, j, tables=[table, {"x": table}]: s + tables[1]["x"][h],
        "object": slope,
        "global": by_global_table,
        "module": by_module_table,
        "parameter": Bias().score_mod(),
    }
    return ways[how]


@pytest.mark.parametrize(
    "how", "closure default partial helper attribute list object global module parameter".split()
)
def test_tensors_become_arguments(how: str):
    function = holding(how, TABLE)
    callback = score(function)
    assert len(callback.tensors) == 1 and torch.equal(callback.tensors[0], TABLE)
    if how != "object":
        read = callback.with_tensors(([10, 20, 30, 40],))
        assert read(1.0, 0, 2, 0, 0) == 31.0, "the copy reads the stand-in"
        assert float(function(torch.tensor(1.0), 0, 2, 0, 0)) == 3.0, "the original does not"
    assert callback_for(callback.key).tensors == ()
    assert callback.requires_grad == (how == "parameter")


def test_tensors_count_by_dtype_rank_and_unit_stride():
    key = lambda table: score(lambda s, b, h, i, j: s + table[h]).key
    base = key(torch.zeros(4, 8))
    same = [torch.ones(4, 8), torch.zeros(9, 1), torch.zeros(4, 16)[:, :8], torch.zeros(1, 8)]
    assert all(key(table) == base for table in same)
    other = [torch.zeros(4, 8).half(), torch.zeros(4), torch.zeros(8, 4).t(), torch.zeros(4, 8, 1)]
    assert len({base, *map(key, other)}) == 5


def test_launch_arguments_are_addresses_sizes_and_open_strides():
    matrix, column, scalar = torch.zeros(4, 8), torch.zeros(8, 4)[:, 1], torch.tensor(1.0)
    callback = score(lambda s, b, h, i, j: s + matrix[h, i] + column[i] + scalar + matrix[0, 0])
    assert callback.names == ("column", "matrix", "scalar")  # as the closure orders them
    assert callback.launch_arguments() == (
        *(column.data_ptr(), 8, 4), *(matrix.data_ptr(), 4, 8, 8), scalar.data_ptr(),
    )  # fmt: skip
    with pytest.raises(InvalidProblem, match="captures 'column' on cpu, expected cuda:0"):
        callback.check_device(torch.device("cuda:0"))
    empty = torch.zeros(0)
    with pytest.raises(InvalidProblem, match="captures 'empty' without elements"):
        score(lambda s, b, h, i, j: empty[h]).check_device(torch.device("cpu"))


def test_native_tensors_come_from_the_attribute():
    table = torch.zeros(3)

    def native(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any,
               aux_tensors: Any) -> Any:  # fmt: skip
        return score + aux_tensors[0][h]

    assert score(native).tensors == ()
    plain = score(native).key
    native.aux_tensors = (table,)  # type: ignore[attr-defined]
    assert score(native).tensors[0] is table and score(native).key != plain
    native.aux_tensors = (3,)  # type: ignore[attr-defined]
    with pytest.raises(InvalidProblem, match=r"aux_tensors\[0\] is of type int, expected a torch"):
        score(native)
    captures = lambda s, b, h, q_idx, kv_idx, seqlen_info, aux_tensors: s + table[h]
    with pytest.raises(UnsupportedProblem, match=r"captures 'table', a tensor, in the native form"):
        score(captures)


def test_width_of_a_native_callback_is_part_of_its_key():
    def native(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any,
               aux_tensors: Any) -> Any:  # fmt: skip
        return score

    plain = score(native).key
    keys = {}
    for width in (1, 2, 4, 8):
        native.__vec_size__ = width  # type: ignore[attr-defined]
        keys[width] = score(native).key
        assert keys[width].width == width
    assert keys[1] == plain
    assert len(set(keys.values())) == len({key.digest for key in keys.values()}) == 4
    assert len({cache.canonical_text(key) for key in keys.values()}) == 4


@pytest.mark.parametrize("width", [0, 3, 16, -2, 2.0, "2", None])
def test_other_widths_are_refused(width: Any):
    def native(b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
        return True

    native.__vec_size__ = width  # type: ignore[attr-defined]
    expected = f"mask_mod 'native'.__vec_size__ is {width!r}, expected 1, 2, 4 or 8: how many "
    with pytest.raises(UnsupportedProblem, match=f"^{re.escape(expected)}"):
        as_callback(native, "mask_mod")


# ---- Refusals ------------------------------------------------------------------------------------


def assigns(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    global FACTOR
    FACTOR = 2.0
    return score


def imports(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    import checks

    return checks.floor(score, 1.0)


def counting() -> Callable[..., Any]:
    calls = 0

    def count(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        nonlocal calls
        calls += 1
        return score

    return count


def late() -> Callable[..., Any]:
    function = lambda s, b, h, i, j: s * later
    if FACTOR < 0:
        later = 1.0
    return function


def over(value: Any) -> Callable[..., Any]:
    return lambda score, b, h, q_idx, kv_idx: value(score)


UNKEYABLE: dict[str, tuple[Callable[..., Any], str]] = {
    "generator": (over(x for x in ()), "captures 'value' of type generator, which cannot be part"),
    "lock": (over(torch.Generator()), "captures 'value' of type torch._C.Generator"),
    "set": (over({1, 2}), "captures 'value' of type set"),
    "module": (over(callbacks), "captures 'value' of type module, .*: read the values off it"),
    "nn-module": (over(Bias()), "captures 'value' of type .*Bias, .*: capture its parameters"),
    "script": (over(functools.lru_cache(callbacks.noop)), "captures 'value' of type functools."),
    "bound": (over([].append), "captures 'value' of type builtin_function_or_method, .*: use the"),
    "sparse": (over(torch.zeros(3, 3).to_sparse()), "captures 'value', a tensor of torch.float32"),
    "complex": (over(torch.zeros(3, dtype=torch.complex64)), "a tensor of torch.complex64"),
    "in-a-list": (lambda s, b, h, i, j, x=[1, {2}]: s, r"captures 'x\[1\]' of type set"),
    "assigns": (assigns, "assigns assigns to 'FACTOR', a variable of an outer scope"),
    "counts": (counting(), "count assigns to 'calls'"),
    "imports": (imports, "imports imports 'checks'; import it outside"),
    "unset": (late(), "uses 'later': it has no value yet"),
    "undefined": (
        lambda s, b, h, i, j: s + nowhere,  # type: ignore[name-defined]  # noqa: F821
        "uses 'nowhere': no global has that name",
    ),
    "eval": (lambda s, b, h, i, j: eval("s"), "captures 'eval' of type builtin_function_or_method"),
    "attribute": (
        lambda s, b, h, i, j: s * Slope.by,
        "uses 'Slope.by': there is no such attribute",
    ),
}


@pytest.mark.parametrize("name", UNKEYABLE)
def test_what_cannot_be_keyed_is_refused_by_name(name: str):
    function, message = UNKEYABLE[name]
    with pytest.raises(UnsupportedProblem) as caught:
        score(function)
    assert re.search(message, str(caught.value)), str(caught.value)
    assert str(caught.value).startswith("score_mod '")


def test_key_that_this_process_has_not_seen():
    key = dataclasses.replace(score(callbacks.noop).key, digest="0" * 64)
    with pytest.raises(UnsupportedProblem, match="score_mod 000000000000 is not known"):
        callback_for(key)


# ---- Cost ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["alibi_table", "near_and_far", "buckets"])
def test_identity_is_cheap(name: str):
    function = callbacks.SCORE_MODS[name]("cpu")
    score(function)
    best = math.inf
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(100):
            score(function)
        best = min(best, (time.perf_counter() - started) / 100)
    print(f"{name}: {best * 1e6:.1f} us")
    assert best * 1e6 < CALL_LIMIT_US
