"""Callbacks in a kernel: a toy that applies one to a grid, cross-compiled, and run on a GPU.

Without a GPU, the operations are also evaluated on constants: the DSL computes those in Python, so
the rules on dtypes, ranges and rounding are tested here and only the emitted code is left to a GPU.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import callbacks
import pytest
import torch
from callbacks import BATCH, HEADS, SEQLEN

from flash_cute import InvalidProblem, UnsupportedProblem, cache, compile, reference
from flash_cute.variant import Callback, as_callback

pytestmark = pytest.mark.compile
pytest.importorskip("cutlass")

ARCH = "sm_90a"
THIS_FILE = str(Path(__file__))
CUDA = pytest.mark.gpu


def toy(callback: Callback) -> Any:
    from tests.toy_callback_dsl import ToyCallback

    return ToyCallback(callback.key)


def ptx_of(function: Callable[..., Any], kind: str = "score_mod") -> str:
    return compile.inspect_kernel(toy(as_callback(function, kind)), ARCH).ptx


# ---- Operations, one by one ----------------------------------------------------------------------

INTS = torch.tensor([[-7, 3, 0, 40], [5, -2, 2**31 - 1, 8], [-1, 6, 100, -(2**31)]])
TABLES: dict[str, torch.Tensor] = {
    "int64": INTS * 3,
    "int32": INTS.to(torch.int32),
    "int16": (INTS % 30000).to(torch.int16),
    "int8": (INTS % 100 - 50).to(torch.int8),
    "uint8": (INTS % 256).to(torch.uint8),
    "bool": INTS % 2 == 0,
    "float16": torch.tensor([[0.1, -2.5, 3.7, 100.0]] * 3, dtype=torch.float16),
    "bfloat16": torch.tensor([[0.1, -2.5, 3.7, 100.0]] * 3, dtype=torch.bfloat16),
    "float32": torch.tensor([[0.1, -2.5, 3.7, 100.0]] * 3),
    "float64": torch.tensor([[0.1, -2.5, 3.7, 100.0]] * 3, dtype=torch.float64),
}


def five_if_true(value: Any) -> Any:
    return value.new_ones((), dtype=torch.bool) * 5


# Each over a float32 x and int64 h, i, j, with t[dtype](h, i) the element of a table.
OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": lambda x, h, i, j, t: x + 2 + i - j * 3,
    "reverse": lambda x, h, i, j, t: 2 - x + (1 - i) + 3 * j,
    "true-division": lambda x, h, i, j, t: x / 4 + x / 3 + i / (j + 1) + 1 / (i + 1),
    "floor-division": lambda x, h, i, j, t: (i - j) // 3 + (i - 9) // 4 + i // (j + 1),
    "floor-division-negative": lambda x, h, i, j, t: (i - j) // -3 + (j - i) // (-1 - i),
    "remainder": lambda x, h, i, j, t: (i - j) % 3 + 10 * ((i - 9) % 8) + 100 * (i % (j + 1)),
    "remainder-negative": lambda x, h, i, j, t: (i - j) % -3 + 10 * ((j - i) % (-1 - i)),
    "remainder-constant": lambda x, h, i, j, t: 100 % (i + 1) + 100 // (j + 1),
    "remainder-table": lambda x, h, i, j, t: (
        t["int32"](h, i) % 7 + (t["int64"](h, i) // 5) % 1000 + t["int32"](h, i) // (j + 1)
    ),
    "float-remainder": lambda x, h, i, j, t: x % 0.75 + (-x) % 0.75 + x % -0.75 + x // 0.75,
    "trunc-division": lambda x, h, i, j, t: torch.div(i - j, 3, rounding_mode="trunc"),
    "fmod": lambda x, h, i, j, t: torch.fmod(x, 0.75) + torch.fmod(i - j, 3),
    "shifts": lambda x, h, i, j, t: ((i - j) >> 1) + (i << 3) + (1 << h) + ((j - i) >> h),
    "bits": lambda x, h, i, j, t: (i & 5) + (i | j) * 100 + ((i ^ j) & ~h) * 10000,
    "bits-negative": lambda x, h, i, j, t: ((i - j) & 6) + ((i - j) | 4) + ((i - j) ^ j),
    "wide": lambda x, h, i, j, t: ((i + 1) * 2654435761 + j * 40503) % 1000003,
    "hash": lambda x, h, i, j, t: (
        (((i * 2654435 + j) ^ (i >> 2)) * 668265263 & 0xFFFFFFFF) >> 9
    ),
    "overflow": lambda x, h, i, j, t: (i + 1) * 4611686018427387905 % 1009,
    "negate": lambda x, h, i, j, t: -x + -i + abs(i - j) + abs(x) + (+j),
    "power": lambda x, h, i, j, t: x**2 + x**3 + (i - j) ** 2 + 2.0**h + abs(x) ** 0.5,
    "power-of-two": lambda x, h, i, j, t: 2**h + torch.pow(abs(x) + 1, -1.0),
    "power-general": lambda x, h, i, j, t: (abs(x) + 0.5) ** 1.7 + 1.5**x,
    "compare": lambda x, h, i, j, t: (
        (x > 0.5).int() + (i >= j).int() * 2 + (i == 3).int() * 4 + (j != i).int() * 8
        + (0 < i).int() * 16 + (x <= i).int() * 32 + (i < 2.5).int() * 64
    ),
    "compare-decided": lambda x, h, i, j, t: torch.where(
        (i >= 0) & ~(j < 0) & (i != -1) & (i - j > -(2**30)), x, -x
    ),
    "booleans": lambda x, h, i, j, t: (
        ((i > j) & (i > 2) | (j > 1) ^ (i > 1)).float() + (~(i > j)).int() * 2 + (i > j) * 4
    ),
    "logical": lambda x, h, i, j, t: torch.where(
        torch.logical_and(i, j > 1) | torch.logical_not(h) ^ torch.logical_xor(x, i), x, i
    ),
    "where": lambda x, h, i, j, t: torch.where(i > j, x, 0.0) + torch.where(i > j, i, j),
    "where-numbers": lambda x, h, i, j, t: (
        torch.where(i > j, 1, 2) / 4 + torch.where(j > 1, 0.5, 1.5) + x.where(i > 1, 7)
    ),
    "extremes": lambda x, h, i, j, t: (
        torch.minimum(i, j) + torch.maximum(x, i - j) + torch.clamp(x, -0.5, 0.5)
        + (i - j).clamp(min=-1) + torch.clip(i, max=2) + torch.relu(x)
    ),
    "rounding": lambda x, h, i, j, t: (
        torch.floor(x) + 10 * torch.ceil(x) + 100 * torch.round(x * 2) + 1000 * x.trunc()
        + torch.floor(i) + torch.round((i - j) / 2)
    ),
    "exponentials": lambda x, h, i, j, t: (
        torch.exp(x) + torch.exp2(x) + torch.log(abs(x) + 1) + torch.log2(abs(x) + 1)
        + torch.log1p(abs(x)) + torch.expm1(x) + torch.log10(abs(x) + 1)
    ),
    "roots": lambda x, h, i, j, t: (
        torch.sqrt(abs(x)) + torch.rsqrt(abs(x) + 1) + torch.reciprocal(abs(x) + 1)
        + torch.square(x) + (i + 1).rsqrt()
    ),
    "circles": lambda x, h, i, j, t: (
        torch.sin(x) + torch.cos(x) + torch.tanh(x) + torch.sigmoid(x) + torch.erf(x)
        + torch.atan(x) + torch.sin(i)
    ),
    "special": lambda x, h, i, j, t: (
        torch.isinf(x / (i - i)).int() + torch.isnan(x * math.inf - x * math.inf).int() * 2
        + torch.isfinite(x).int() * 4 + torch.isnan(i).int() * 8
    ),
    "nan-to-num": lambda x, h, i, j, t: torch.nan_to_num(
        torch.where(i > j, math.inf, torch.where(i < j, math.nan, x)), posinf=3.0
    ),
    "sign": lambda x, h, i, j, t: torch.sign(x) + torch.sign(i - j) * 3,
    "likes": lambda x, h, i, j, t: (
        torch.zeros_like(x) + torch.ones_like(i) / 2 + torch.full_like(x, 3.5)
        + five_if_true(i) + i.new_zeros((), dtype=torch.float32) + x.new_full((), 2)
    ),
    "constants": lambda x, h, i, j, t: (
        x * torch.tensor(0.5) + torch.tensor(3) * i + torch.tensor(True) * j
    ),
    "casts": lambda x, h, i, j, t: (
        (x * 9.9).int() + (x * 9.9).to(torch.int64) / 4 + i.float() / 3 + (i - j).bool().int()
        + x.half().float() + x.to(torch.bfloat16).float() + (i * 100).to(torch.uint8).int()
        + (i * 100).to(torch.int8) + x.double().float() + x.type_as(i) + i.to(x)
    ),
    "functions": lambda x, h, i, j, t: torch.add(x, i, alpha=2) + torch.sub(i, other=j),
    "names": lambda x, h, i, j, t: (
        torch.mul(i, j) + torch.eq(i, j).int() + torch.ge(i, j).int() + torch.abs(i - j)
        + torch.bitwise_and(i, 3) + torch.remainder(i, 3) + torch.floor_divide(i, 2)
        + torch.bitwise_left_shift(i, 2) + torch.true_divide(i, 8)
    ),
    "0-dim": lambda x, h, i, j, t: x * t["scalar"]() + t["count"]() - i,
}  # fmt: skip
for _dtype in ("float16", "bfloat16"):
    OPERATIONS[f"numbers-{_dtype}"] = lambda x, h, i, j, t, dtype=_dtype: (
        t[dtype](h, i) * 0.1 + t[dtype](h, j) * (1 / 3) - 0.7 + 0.3 / t[dtype](h, i)
    )
    OPERATIONS[f"choices-{_dtype}"] = lambda x, h, i, j, t, dtype=_dtype: (
        torch.where(t[dtype](h, i) >= 0.1, 0.3, t[dtype](h, j)) / 0.3
        + (t[dtype](h, i) == 3.7) * 2
        + torch.clamp(t[dtype](h, i), max=1.7)
        + torch.sigmoid(t[dtype](h, j))
    )
for _dtype in TABLES:
    OPERATIONS[f"table-{_dtype}"] = lambda x, h, i, j, t, dtype=_dtype: (
        t[dtype](h, i) * 1.5 + t[dtype](h, -1) + x
    )
    if _dtype != "bool":
        OPERATIONS[f"arithmetic-{_dtype}"] = lambda x, h, i, j, t, dtype=_dtype: (
            t[dtype](h, i) * t[dtype](h, j) + t[dtype](h, i - j - 1) * 2 + (i - j) * 0
        )
        OPERATIONS[f"mixed-{_dtype}"] = lambda x, h, i, j, t, dtype=_dtype: (
            t[dtype](h, i) * i + t["int32"](h, i) * 0 + t["float16"](h, i) * t[dtype](h, j)
        )


def as_score_mod(operation: Callable[..., Any], device: str) -> Callable[..., Any]:
    """An operation as a score_mod of four queries and keys and three heads."""
    tables = {name: table.to(device) for name, table in TABLES.items()}
    scalar, count = torch.tensor(0.25, device=device), torch.tensor(3, device=device)
    readers: dict[str, Callable[..., Any]] = {
        name: (lambda h, i, table=table: table[h, i]) for name, table in tables.items()
    }
    readers |= {"scalar": lambda: scalar, "count": lambda: count}

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return operation(score, h, q_idx, kv_idx, readers)

    return score_mod


class ConstantTensor:
    """A captured tensor whose elements are constants of the DSL."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.shape = tuple(tensor.shape)

    def __getitem__(self, index: Any) -> Any:
        from flash_cute.device.score import ELEMENT_TYPES
        from flash_cute.variant import tensor_facts

        index = index if isinstance(index, tuple) else (index,)
        values = tuple(item.value for item in index) if self.tensor.dim() else ()
        return ELEMENT_TYPES[tensor_facts(self.tensor).dtype](self.tensor[values].item())


@pytest.fixture
def constants(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Mathematical functions of the DSL, on constants."""
    from flash_cute.device import score, traced, traced_ops

    def of(function: Callable[..., Any]) -> Callable[..., Any]:
        def evaluate(*values: Any, **options: Any) -> Any:
            tensors = (torch.tensor(value.value, dtype=torch.float64) for value in values)
            return type(values[0])(function(*tensors).item())

        return evaluate

    names = "exp exp2 log log2 log10 log1p expm1 tanh sin cos atan erf sqrt rsqrt floor ceil trunc"
    fakes = {name: of(getattr(torch, name)) for name in (*names.split(), "abs", "pow")}
    fakes["roundeven"] = of(torch.round)
    fakes["fma"] = of(lambda a, b, c: a * b + c)
    for name in ("min", "max"):
        fakes[name] = lambda a, b, name=name, **options: type(a)(
            {"min": min, "max": max}[name](a.value, b.value)
        )
    fake = types.SimpleNamespace(math=types.SimpleNamespace(**fakes), Tensor=ConstantTensor)
    monkeypatch.setattr(traced, "cute", fake)
    monkeypatch.setattr(traced_ops, "cute", fake)
    monkeypatch.setattr(score, "cute", fake)
    monkeypatch.setattr(score, "load_constant", lambda tensor, coord: tensor[coord])
    yield


X = torch.tensor([[0.3, -1.7, 2.25, -0.5], [1.0, -3.2, 0.0, 5.5], [0.7, -0.1, 4.0, -2.0]])


def grid_of(batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> Any:
    count = torch.arange
    return reference._Grid(
        count(batch).view(-1, 1, 1, 1), count(heads).view(1, -1, 1, 1),
        count(seqlen_q).view(1, 1, -1, 1), count(seqlen_k), count(seqlen_q).view(1, 1, -1, 1),
    )  # fmt: skip


def small_scores() -> torch.Tensor:
    return (X[None, :, None, :] + torch.arange(4)[:, None] / 8).clone()


def expected_of(operation: str) -> torch.Tensor:
    function = as_score_mod(OPERATIONS[operation], "cpu")
    scores = small_scores()
    return reference._per_element("score_mod", function, grid_of(*scores.shape), scores)


# Where constants, which are Python's numbers, differ: they do not overflow or divide by zero.
GPU_ONLY = ("overflow", "special", "arithmetic-int64", "mixed-int64", "mixed-int32", "mixed-int16")


@pytest.mark.filterwarnings("ignore:(?s).*TYPE_INT_LITERAL_OUT_OF_RANGE")  # constants wrap around
@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("operation", sorted(set(OPERATIONS) - set(GPU_ONLY)))
def test_operation_on_constants(operation: str, is_scaled: bool, constants: None):
    from cutlass import Float32, Int32

    from flash_cute.device.score import PLAIN_UNITS, ScoreUnits, trace_score_mod

    scale, unit, shift = (0.25, 1.5, -0.75) if is_scaled else (1.0, 1.0, 0.0)
    units = ScoreUnits(Float32(scale), unit, Float32(shift)) if is_scaled else PLAIN_UNITS

    callback = as_callback(as_score_mod(OPERATIONS[operation], "cpu"), "score_mod")
    tensors = tuple(ConstantTensor(tensor) for tensor in callback.tensors)
    scores, expected = small_scores(), expected_of(operation)
    for _, h, i, j in torch.ones_like(scores).nonzero().tolist():
        indices = (Int32(0), Int32(h), Int32(i), [Int32(j)])
        product = Float32(scores[0, h, i, j].item() / scale)
        (got,) = trace_score_mod(callback, [product], indices, tensors=tensors, units=units)
        want = expected[0, h, i, j].item() * unit + shift
        assert isinstance(got, Float32)
        assert got.value == pytest.approx(want, rel=2e-5, abs=2e-5, nan_ok=True), (h, i, j)


# Expressions of score s, bias x and an index i that is known as a sum, and whether they are lines.
LINES: dict[str, tuple[Callable[..., Any], bool]] = {
    "score": (lambda s, x, i: s, True),
    "bias": (lambda s, x, i: s + x, True),
    "slope": (lambda s, x, i: s - x * (9 - i), True),
    "slope_first": (lambda s, x, i: (i - 9) * x + s, True),
    "shifted_slope": (lambda s, x, i: 2.0 + s + -(x * (i + 4) - 1.5) - x, True),
    "slope_of_float": (lambda s, x, i: s - (i.float() - 3) * x * 0.5, True),
    "no_score": (lambda s, x, i: x * i - 3.0, True),
    "gain": (lambda s, x, i: 1.5 * s - x * i, True),
    "twice": (lambda s, x, i: s + s, False),
    "negative": (lambda s, x, i: x - s, False),
    "two_slopes": (lambda s, x, i: s + x * i + 0.5 * i, False),
    "square": (lambda s, x, i: s - i.float() * i.float(), True),
    "absolute": (lambda s, x, i: s - x * torch.abs(3 - i), True),
    "rounded": (lambda s, x, i: s + (x.half() * i).float(), True),
    "chosen": (lambda s, x, i: torch.where(i > 3, s - x * i, s), False),
}


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("base, offset", [(5, 2), (0, 17), (-8, 3), (4, 0)])
def test_lines_come_to_the_same(name: str, base: int, offset: int, constants: None):
    from cutlass import Float32, Int32

    from flash_cute.device import traced

    function, is_line = LINES[name]
    product, scale, bias, unit, shift = 3.5, 0.25, -0.75, 1.4426950408889634, 2.5
    index = traced.TracedValue(
        "int64", Int32(base + offset), (-100, 100), traced.Sum(Int32(base), offset)
    )
    score = traced.score_value(Float32(product * scale))
    got = traced.convert(
        function(score, traced.TracedValue("float32", Float32(bias)), index), "float32"
    )
    want = function(*(torch.tensor(x) for x in (product * scale, bias, base + offset))).item()
    assert got.value.value == pytest.approx(want, rel=1e-5)
    assert (got.line is not None) == is_line
    if is_line:
        finished = got.line.finish(Float32(product), Float32(scale), unit, Float32(shift))
        assert finished.value == pytest.approx(want * unit + shift, rel=1e-5)
        finished = got.line.finish(Float32(product), Float32(scale), 1.0, None)
        assert finished.value == pytest.approx(want, rel=1e-5)


# ---- Compiling -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", callbacks.ALL)
def test_published_callback_compiles(name: str):
    kind, factory = callbacks.ALL[name]
    callback = as_callback(factory("cpu"), kind)
    report = compile.inspect_kernel(toy(callback), ARCH)
    assert f".entry {report.name}" in report.ptx
    assert report.stack_bytes in (0, None) and report.spill_store_bytes in (0, None)


def test_all_operations_compile_together():
    """One kernel with all of them; the GPU tests run them one by one."""
    function = as_score_mod(lambda *args: sum(f(*args) for f in OPERATIONS.values()), "cpu")
    assert ".entry" in ptx_of(function)


def test_captured_numbers_are_constants_of_the_code():
    scale = 2.5
    assert "0f40200000" in ptx_of(lambda s, b, h, i, j: s * scale)
    keys = {as_callback(lambda s, b, h, i, j: s * scale, "score_mod").key for scale in (1.0, 2.0)}
    assert len(keys) == 2


@pytest.mark.parametrize("name", ["causal", "sliding_window", "dilated", "natten_tiled"])
def test_index_arithmetic_stays_in_32_bits(name: str):
    ptx = ptx_of(callbacks.MASK_MODS[name]("cpu"), "mask_mod")
    assert not re.search(r"\b(mul\.lo|div|rem|setp\.\w+|shr|and)\.[subf]64\b", ptx)
    assert not re.search(r"\b(div|rem)\.s32\b.*\n.*\bselp", ptx)


def test_powers_of_two_need_no_division():
    ptx = ptx_of(lambda b, h, i, j: ((i - j) % 16 == 3) & ((i - j) // 8 == j % 4), "mask_mod")
    divisions = len(re.findall(r"\b(div|rem|mul\.hi)\.", ptx))
    assert divisions == len(
        re.findall(r"\b(div|rem|mul\.hi)\.", ptx_of(callbacks.causal, "mask_mod"))
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_after_each_operation(dtype: torch.dtype):
    """Half-precision instructions could be fused, which rounds once for two operations."""
    table = torch.ones(SEQLEN, dtype=dtype)
    ptx = ptx_of(lambda s, b, h, i, j: s + (table[i] * table[j] + table[-1]))
    kind = "f16" if dtype == torch.float16 else "bf16"
    assert ptx.count(f"cvt.rn.{kind}.f32") == 2
    assert not re.search(r"\b(add|mul|fma)(\.rn)?\.b?f16", ptx) and "fma.rn.f32" not in ptx


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "number",
    [0.1, -3.3, 1 / 3, 5e-8, 1e-45, 7e4, 1e30, 1e39, -1e300, math.inf, 0.3000488281251, 0.0, -1e-3],
)
def test_numbers_round_to_half_precision_as_in_torch(number: float, dtype: torch.dtype):
    from flash_cute.device.traced import half_number

    expected = torch.tensor(number, dtype=torch.float32).to(dtype).item()
    assert half_number(number, str(dtype).removeprefix("torch.")) == expected


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool])
def test_elements_without_a_sign_get_none(dtype: torch.dtype):
    table = torch.ones(SEQLEN, dtype=dtype)
    ptx = ptx_of(lambda s, b, h, i, j: s + table[j] * 1.5)
    assert "ld.global.nc.b8" in ptx and "cvt.rn.f32.s16" not in ptx


@pytest.mark.parametrize("dtype", TABLES)
def test_elements_of_any_type_are_loaded_as_constants(dtype: str):
    table = TABLES[dtype]
    ptx = ptx_of(lambda b, h, i, j: table[h, j] != table[h, j] * 2, "mask_mod")
    assert ptx.count("ld.global.nc.") == ptx.count("ld.global") == 1, "two equal loads are one"


def test_native_callbacks():
    import cutlass
    import cutlass.cute as cute

    table = torch.zeros(HEADS)

    @cute.jit
    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any,
                  aux_tensors: Any) -> Any:  # fmt: skip
        if cutlass.const_expr(seqlen_info is None):
            score = score * 2.5
        return score + aux_tensors[0][h]

    score_mod.aux_tensors = (table,)  # type: ignore[attr-defined]
    assert "0f40200000" in ptx_of(score_mod)
    mask_mod = lambda b, h, q_idx, kv_idx, seqlen_info, aux_tensors: q_idx >= kv_idx
    assert "setp" in ptx_of(mask_mod, "mask_mod")


NATIVE_NAMES = ("alibi", "bias", "documents", "window")


def native(name: str, width: int, device: str = "cpu", sizes: Any = (HEADS, 64, 64)) -> Any:
    """(the native form, the portable form, the kind) of a callback."""
    from tests import native_callbacks_dsl as dsl

    table = dsl.table_of(name, *sizes, device)
    return dsl.native(name, table, width), dsl.PORTABLE[name](table), dsl.KINDS[name]


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("name", NATIVE_NAMES)
def test_native_callbacks_of_any_width_compile(name: str, width: int):
    from flash_cute.sm90.config import default_config
    from flash_cute.sm90.fwd import FlashAttentionForwardSm90
    from flash_cute.specialization import ForwardSpecialization

    function, _, kind = native(name, width)
    key = as_callback(function, kind).key
    assert key.width == width
    spec = ForwardSpecialization("bf16", 128, 128, False, False, **{kind: key})
    kernel = FlashAttentionForwardSm90(spec, default_config(spec, 8192))
    report = compile.inspect_kernel(kernel, ARCH)
    assert report.spill_store_bytes in (0, None)


def test_arithmetic_on_indices_as_vectors():
    """Constants made like an index, comparisons and choices, as they are written for vectors."""
    import cutlass.cute as cute
    from cutlass import Float32

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any,
                  aux_tensors: Any) -> Any:  # fmt: skip
        if any(value.shape != (4,) for value in (score, b, h, q_idx, kv_idx)):
            raise ValueError("a vector of another shape")
        power = (h + cute.full_like(h, 1)).to(Float32) * cute.full_like(score, -2.5)
        distance = cute.where(q_idx < kv_idx, kv_idx - q_idx, q_idx - kv_idx)
        return score - cute.math.exp2(power, fastmath=True) * distance.to(Float32)

    score_mod.__vec_size__ = 4  # type: ignore[attr-defined]
    ptx = ptx_of(score_mod)
    assert "0fC0200000" in ptx and ptx.count("st.global.b32") == 4


def test_tile_that_does_not_divide_by_the_width_is_refused():
    from flash_cute.sm90.config import ForwardConfigSm90
    from flash_cute.specialization import ForwardSpecialization

    key = as_callback(native("alibi", 8)[0], "score_mod").key
    spec = ForwardSpecialization("bf16", 64, 64, False, False, score_mod=key)
    assert ForwardConfigSm90(128, 96).check(spec) == []
    assert ForwardConfigSm90(128, 80).check(spec) == [
        "tile_n is 80, expected a multiple of 32, since score_mod.__vec_size__ is 8 and a thread "
        "has tile_n / 4 columns"
    ]


def test_values_of_captured_tensors_never_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLASH_CUTE_CACHE_DIR", str(tmp_path))
    build = lambda table: as_callback(lambda s, b, h, i, j: s + table[h], "score_mod").key
    assert build(torch.zeros(3)) == build(torch.ones(99))
    assert cache.canonical_text(build(torch.zeros(3))) == cache.canonical_text(build(torch.ones(9)))


# ---- What has no code ----------------------------------------------------------------------------

TABLE = torch.zeros(4, 4)


def branches(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    if q_idx >= kv_idx:
        return score
    return -score


def helper(value: Any) -> Any:
    value = value + 1
    return math.exp(value)


UNTRACEABLE: dict[str, tuple[Callable[..., Any], str]] = {
    "if": (branches, "`if q_idx >= kv_idx:`: the truth of a tensor is not known .*torch.where"),
    "and": (lambda s, b, h, i, j: torch.where(i > j and j > 1, s, -s), "write torch.where.* & | ~"),
    "chained": (lambda s, b, h, i, j: torch.where(0 < i < j, s, -s), r"\(a < b\) & \(b < c\)"),
    "min": (lambda s, b, h, i, j: s * min(i, j), "torch.minimum"),
    "helper": (lambda s, b, h, i, j: helper(s), r"`return math.exp\(value\)`.*torch.exp for math"),
    "int": (lambda s, b, h, i, j: s * int(h), r"write .to\(torch.int32\) in place of int"),
    "item": (lambda s, b, h, i, j: s * h.item(), "go on with the tensor itself"),
    "range": (lambda s, b, h, i, j: sum(s for _ in range(h)), "loop over Python numbers"),
    "list": (lambda s, b, h, i, j, x=(1, 2): s * x[h], "index a captured torch.Tensor, not a list"),
    "unknown": (lambda s, b, h, i, j: torch.cumsum(s, 0), "torch's cumsum is not available"),
    "method": (lambda s, b, h, i, j: s.cumsum(0), "a tensor's .cumsum is not available"),
    "whole": (lambda s, b, h, i, j: s + TABLE, "whole captured tensor of 2 dimensions: index it"),
    "partly": (lambda s, b, h, i, j: s + TABLE[h], "whole captured tensor of 1 dimensions: index"),
    "sum": (lambda s, b, h, i, j: s + torch.sum(TABLE[h]), "torch.sum on a whole captured tensor"),
    "result": (lambda s, b, h, i, j: TABLE[h], "whole captured tensor of 1 dimensions"),
    "none": (lambda s, b, h, i, j: None, "it returned None, expected a value"),
    "slice": (lambda s, b, h, i, j: s + TABLE[h, 1:][j], "slices of a captured tensor: slice it"),
    "too-many": (lambda s, b, h, i, j: s + TABLE[h, i, j], "3 indices of a tensor with 2 dim"),
    "float-index": (lambda s, b, h, i, j: s + TABLE[h, i / 2], "an index of float32: expected an"),
    "bool-index": (lambda s, b, h, i, j: s + TABLE[h, i > j], "an index of bool: expected an"),
    "made-inside": (lambda s, b, h, i, j: s + torch.arange(4), r"shape \(4,\) made inside the"),
    "in-place": (lambda s, b, h, i, j: s.add_(1), "a tensor's .add_ is not available"),
    "zero": (lambda s, b, h, i, j: s + i // 0, "integer division by zero"),
    "attribute": (lambda s, b, h, i, j: s + TABLE.nope[h], ".nope of a captured tensor"),
    "error": (lambda s, b, h, i, j: s + [1][3], "IndexError: list index out of range"),
    "float-bits": (lambda s, b, h, i, j: s & 1, "& of floating-point values: use integers"),
    "condition": (lambda s, b, h, i, j: torch.where(i, s, -s), "condition .* is int64, expected"),
}


@pytest.mark.parametrize("name", UNTRACEABLE)
def test_what_has_no_code_names_the_line_and_what_to_write(name: str):
    function, message = UNTRACEABLE[name]
    with pytest.raises(UnsupportedProblem) as caught:
        ptx_of(function)
    text = str(caught.value)
    assert text.startswith("score_mod '") and re.search(message, text), text
    line = function.__code__.co_firstlineno
    where = re.search(re.escape(THIS_FILE) + r":(\d+)", text)
    assert where is not None, text
    assert name == "helper" or line <= int(where[1]) <= line + 1, text


def where_of(function: Callable[..., Any]) -> str:
    """The line where a function begins, as errors name it."""
    return f"{THIS_FILE}:{function.__code__.co_firstlineno}"


def test_mask_that_is_no_boolean():
    function = lambda b, h, i, j: i - j
    with pytest.raises(InvalidProblem) as caught:
        ptx_of(function, "mask_mod")
    expected = f"mask_mod returned torch.int64, expected torch.bool, {where_of(function)}"
    assert str(caught.value) == expected


WRONG_RESULTS: dict[str, tuple[str, int, Callable[..., Any], str, str]] = {
    "none": ("score_mod", 1, lambda s, k: None, "NoneType", "Float32"),
    "string": ("score_mod", 1, lambda s, k: "s", "str", "Float32"),
    "boolean": ("score_mod", 1, lambda s, k: k > 3, "Boolean", "Float32"),
    "mask-of-int": ("mask_mod", 1, lambda s, k: k, "Int32", "Boolean"),
    "scalar": ("score_mod", 2, lambda s, k: s[0], "Float32", "a vector of 2 Float32"),
    "short": (
        "score_mod", 4, lambda s, k: s.reshape((2, 2))[None, 0], "a vector of 2 Float32",
        "a vector of 4 Float32",
    ),
    "vector-of-booleans": (
        "score_mod", 2, lambda s, k: k > 3, "a vector of 2 Boolean", "a vector of 2 Float32"
    ),
    "mask-of-ints": (
        "mask_mod", 8, lambda s, k: k, "a vector of 8 Int32", "a vector of 8 Boolean"
    ),
    "mask-of-one": ("mask_mod", 2, lambda s, k: True, "Boolean", "a vector of 2 Boolean"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_RESULTS)
def test_native_callback_that_returns_something_else(name: str):
    kind, width, result, got, expected = WRONG_RESULTS[name]
    if kind == "score_mod":
        function: Any = lambda score, b, h, q_idx, kv_idx, seqlen_info, aux_tensors: result(
            score, kv_idx
        )
    else:
        function = lambda b, h, q_idx, kv_idx, seqlen_info, aux_tensors: result(None, kv_idx)
    function.__vec_size__ = width
    with pytest.raises(InvalidProblem) as caught:
        ptx_of(function, kind)
    expected += f" (__vec_size__ is {width})" if width > 1 else ""
    message = f"{kind} '<lambda>' returned {got}, expected {expected}, {where_of(function)}"
    assert str(caught.value) == message


def failing() -> dict[str, tuple[Callable[..., Any], str, str]]:
    """Native score_mods that fail: (function, the line it fails in, message)."""
    import cutlass.cute as cute

    def plain(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any,
              aux_tensors: Any) -> Any:  # fmt: skip
        return score + aux_tensors[3][h]

    def branches(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any,
                 aux_tensors: Any) -> Any:  # fmt: skip
        if q_idx > 3:
            return score
        return -score

    @cute.jit
    def jitted(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any,
               aux_tensors: Any) -> Any:  # fmt: skip
        if q_idx > 3:
            score = score.nope
        return score

    return {
        "plain": (plain, "return score + aux_tensors[3][h]", "IndexError: tuple index out of"),
        "branches": (branches, "if q_idx > 3:", "error[PHASE_DYNAMIC_TO_STATIC_BOOL]: Cannot use"),
        "jitted": (jitted, "score = score.nope", "AttributeError: 'Float32' object has no"),
    }


@pytest.mark.parametrize("name", ["plain", "branches", "jitted"])
def test_failing_native_callback_names_the_line(name: str):
    function, line, message = failing()[name]
    number = [text.strip() for text in Path(THIS_FILE).read_text().splitlines()].index(line) + 1
    with pytest.raises(UnsupportedProblem) as caught:
        ptx_of(function)
    expected = f"score_mod '{name}' cannot be compiled, {THIS_FILE}:{number} `{line}`: {message}"
    assert str(caught.value).startswith(expected), str(caught.value)


# ---- On a GPU ------------------------------------------------------------------------------------


def run_on_gpu(function: Callable[..., Any], kind: str, scores: torch.Tensor) -> torch.Tensor:
    callback = as_callback(function, kind)
    callback.check_device(torch.device("cuda", torch.cuda.current_device()))
    executable = compile.compile_kernel(toy(callback), ARCH).load()
    source = scores.cuda().contiguous()
    dtype = torch.float32 if kind == "score_mod" else torch.uint8
    result = torch.full(scores.shape, 77, dtype=dtype, device="cuda")
    numbers = (*scores.shape, *callback.launch_arguments())
    stream = torch.cuda.current_stream().cuda_stream
    executable(source.data_ptr(), result.data_ptr(), numbers, stream)
    torch.cuda.synchronize()
    return result.cpu()


@CUDA
@pytest.mark.parametrize("name", callbacks.ALL)
def test_published_callback_on_a_gpu(name: str, gpu: None):
    kind, factory = callbacks.ALL[name]
    generator = torch.Generator().manual_seed(5)
    scores = torch.randn(BATCH, HEADS, SEQLEN, SEQLEN, generator=generator)
    grid = grid_of(*scores.shape)
    first = scores if kind == "score_mod" else None
    expected = reference._per_element(kind, factory("cpu"), grid, first)
    got = run_on_gpu(factory("cuda"), kind, scores)
    if kind == "mask_mod":
        assert torch.equal(got.bool(), expected.expand(scores.shape)) and got.max() <= 1
    else:
        torch.testing.assert_close(got, expected.float(), atol=2e-6, rtol=1e-5)


@CUDA
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operation_on_a_gpu(operation: str, gpu: None):
    got = run_on_gpu(as_score_mod(OPERATIONS[operation], "cuda"), "score_mod", small_scores())
    expected = expected_of(operation).float()
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5, equal_nan=True)


@CUDA
@pytest.mark.parametrize("name", NATIVE_NAMES)
def test_native_callbacks_of_any_width_on_a_gpu(name: str, gpu: None):
    """Of 61 keys, which no width divides."""
    sizes = (3, 40, 61)
    generator = torch.Generator().manual_seed(7)
    scores = torch.randn(2, *sizes, generator=generator)
    _, portable, kind = native(name, 1, "cpu", sizes)
    first = scores if kind == "score_mod" else None
    expected = reference._per_element(kind, portable, grid_of(*scores.shape), first)
    results = [run_on_gpu(native(name, w, "cuda", sizes)[0], kind, scores) for w in (1, 2, 4, 8)]
    for got in results:
        assert torch.equal(got, results[0])
    expected = expected.expand(scores.shape).to(results[0].dtype)
    torch.testing.assert_close(results[0], expected, atol=2e-6, rtol=1e-5)


@CUDA
def test_layouts_of_captured_tensors_on_a_gpu(gpu: None):
    whole = torch.randn(6, 8, 10, generator=torch.Generator().manual_seed(6))
    views = {
        "sliced": lambda t: t[1:5, ::2, 1:9],
        "transposed": lambda t: t.permute(2, 0, 1)[:4, :4],
        "broadcast": lambda t: t[:1, :, :8].expand(4, 8, 8),
    }
    scores = torch.zeros(1, 3, 4, 8)
    for view in views.values():
        make = lambda table: lambda s, b, h, i, j: s + table[h, i // 2][j] + table[-1, -2, -1]
        expected = reference._per_element(
            "score_mod", make(view(whole)), grid_of(*scores.shape), scores
        )
        got = run_on_gpu(make(view(whole.cuda())), "score_mod", scores)
        torch.testing.assert_close(got, expected, atol=0, rtol=0)


@CUDA
def test_gathers_past_the_end_stay_inside_on_a_gpu(gpu: None):
    table = torch.arange(4.0, device="cuda")
    got = run_on_gpu(
        lambda s, b, h, i, j: table[j * 1000] + table[j - 9999],
        "score_mod",
        torch.zeros(1, 1, 1, 8),
    )
    assert ((got >= 0) & (got <= 6)).all()


def test_conversions_of_neighbouring_indices_are_shared():
    """Distances become floats by one conversion a row and an addition an element."""
    from flash_cute.sm90.config import default_config
    from flash_cute.sm90.fwd import FlashAttentionForwardSm90
    from flash_cute.specialization import ForwardSpecialization

    slopes = torch.zeros(HEADS)
    callback = as_callback(lambda s, b, h, i, j: s - slopes[h] * torch.abs(i - j), "score_mod")
    spec = ForwardSpecialization("bf16", 128, 128, False, False, score_mod=callback.key)
    kernel = FlashAttentionForwardSm90(spec, default_config(spec, 8192))
    ptx = compile.inspect_kernel(kernel, ARCH).ptx
    # 64 in the first block of a tile, whose columns are clamped one by one, and 2 in the others.
    assert 0 < ptx.count("cvt.rn.f32.s32") <= 64 + 4
    # The slope of a head is read once a tile, not in the loops over its blocks.
    assert ptx.count("ld.global.nc.b32") == ptx.count("ld.global") == 1
