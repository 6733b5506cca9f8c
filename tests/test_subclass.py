"""Kernels by subclass: what is accepted, how it is keyed and kept, what mistakes say, and values.

The sigmoid attention of the examples stands for a class that changes the algorithm.
"""

from __future__ import annotations

import gc
import importlib
import math
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import checks
import pytest
import torch
import toy_gpu
from checks import Case

from flash_cute import (
    AttentionProblem,
    CaptureError,
    CompileError,
    Feature,
    InvalidProblem,
    Target,
    UnsupportedProblem,
    api,
    cache,
    compile,
    current,
    env,
    flash_attn_func,
    flash_attn_varlen_func,
    is_supported,
    launch,
    selection,
)
from flash_cute.selection import SM90, SubclassKey

fwd: Any = pytest.importorskip("flash_cute.sm90.fwd")
cute: Any = pytest.importorskip("cutlass.cute")

ROOT = Path(__file__).resolve().parent.parent
H200 = Target.from_arch("sm_90a")
Base = fwd.FlashAttentionForwardSm90


def problem(**changes: Any) -> AttentionProblem:
    sizes = dict(batch=2, seqlen_q=4096, seqlen_k=4096, num_heads_q=8, num_heads_kv=8)
    kind = dict(dtype=torch.bfloat16, device=torch.device("cuda", 0), head_dim=64, head_dim_v=64)
    return AttentionProblem(**{**kind, **sizes, **changes})


def key_of(kernel: type, variant: selection.Variant = selection.PLAIN, **changes: Any) -> Any:
    return selection.key_for(problem(**changes), H200, kernel, variant)


class Same(Base):
    """Overrides nothing."""


class Double(Base):
    """Twice the output: every weight counts double."""

    lacks = frozenset({Feature.LSE})

    @cute.jit
    def close_rows(self, p, c, work, rows, factor, lse):
        super().close_rows(p, c, work, rows, factor, lse)
        for r in range(cute.size(factor)):
            factor[r] = 2.0 * factor[r]


@pytest.fixture
def sigmoid(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example, as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("sigmoid_attention")


# ---- Acceptance and refusals ---------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [Same, Double, type("Deeper", (Double,), {})])
def test_a_subclass_is_accepted_and_named(kernel: type):
    key = key_of(kernel)
    assert key.kernel == kernel.__name__ and key.kernel_class is kernel
    own = key_of(Base)
    assert (key.arch, key.spec, key.config) == (own.arch, own.spec, own.config)


def test_the_own_class_is_no_subclass():
    assert type(key_of(Base)) is selection.KernelKey
    assert key_of(Base) == selection.key_for(problem(), H200)


def test_a_subclass_may_have_the_name_of_its_base():
    namesake = type(Base.__name__, (Base,), {})
    assert isinstance(key_of(namesake), SubclassKey)
    assert key_of(namesake) != key_of(Base)


@pytest.mark.parametrize("stranger", [dict, type(Base.__name__, (), {"__module__": SM90.module})])
def test_a_class_of_another_kind_is_refused(stranger: type):
    with pytest.raises(UnsupportedProblem) as caught:
        key_of(stranger)
    known = ", ".join(declaration.kernel for declaration in selection.KERNELS)
    expected = f"kernel is {stranger}, expected one of {known}, or a class derived from one"
    assert str(caught.value) == expected


@pytest.mark.parametrize("arch", ["sm_80", "sm_100a"])
def test_a_subclass_runs_on_the_arch_of_its_base(arch: str):
    with pytest.raises(UnsupportedProblem, match=f"Same lacks runs on sm_90a, not on {arch}"):
        selection.key_for(problem(), Target.from_arch(arch), Same)


def test_what_a_subclass_lacks_is_refused_by_name():
    one = type("One", (Base,), {"lacks": {Feature.LSE, Feature.SINK, Feature.CAUSAL}})
    with pytest.raises(UnsupportedProblem, match=r"One lacks causal; lse; sink \("):
        key_of(one, causal=True, return_lse=True, has_sink=True)
    assert key_of(one).spec == key_of(Base).spec
    assert key_of(Base, causal=True, return_lse=True, has_sink=True)


def test_what_the_base_lacks_the_subclass_lacks():
    more = type("More", (Base,), {"lacks": frozenset()})
    with pytest.raises(UnsupportedProblem, match="More lacks gradient; qv"):
        key_of(more, requires_grad=True, has_qv=True)


def test_lacks_is_inherited_and_can_be_said_anew():
    heir = type("Heir", (Double,), {})
    able = type("Able", (Double,), {"lacks": frozenset()})
    with pytest.raises(UnsupportedProblem, match="Heir lacks lse"):
        key_of(heir, return_lse=True)
    assert key_of(able, return_lse=True).spec.has_lse


@pytest.mark.parametrize(
    "lacks", ["sink", ["sink"], {"sink"}, {Feature.SINK: 1}, Feature.SINK, None]
)
def test_lacks_of_another_kind_is_refused(lacks: object):
    wrong = type("Wrong", (Base,), {"lacks": lacks})
    with pytest.raises(InvalidProblem, match=r"Wrong\.lacks is .*, expected a set of flash_cute"):
        key_of(wrong)


def test_is_supported_answers_for_a_subclass(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(selection, "target_of", lambda problem: H200)

    def answer(kernel: Any, **changes: Any) -> Any:
        inputs: Any = type("Inputs", (), {"kernel": kernel})()
        return api._support(problem(**changes), inputs)

    assert answer(Double) and answer(Double).backend == "Double"
    assert "Double lacks lse" in answer(Double, return_lse=True).reason
    assert "expected one of" in answer(dict).reason
    wrong = type("Wrong", (Base,), {"lacks": 3})
    assert "Wrong.lacks is 3" in answer(wrong).reason


def test_on_the_cpu_a_subclass_is_refused():
    q = torch.randn(1, 8, 1, 64)
    with pytest.raises(UnsupportedProblem, match="kernel is Same, expected None: the CPU has"):
        flash_attn_func(q, q, q, kernel=Same)
    answer = is_supported(q, q, q, kernel=Same)
    assert not answer and "kernel is Same" in answer.reason


# ---- Config --------------------------------------------------------------------------------------


def test_a_subclass_may_choose_its_config():
    class Small(Base):
        seen: list[Any] = []

        @classmethod
        def config_for(cls, spec, config):
            cls.seen.append(spec)
            return replace(config, tile_m=64, tile_n=32, use_ping_pong=False)

    key = key_of(Small, causal=True)
    assert key.config.tile == (64, 32) and Small.seen == [key.spec]
    kernel = compile.kernel_for(key)
    assert kernel.config is key.config and "m64n32" in kernel.name
    assert key_of(Same, causal=True).config == key_of(Base, causal=True).config


def test_a_config_that_cannot_be_is_refused():
    def choosing(config: object) -> type:
        return type("Odd", (Base,), {"config_for": classmethod(lambda cls, spec, given: config)})

    with pytest.raises(InvalidProblem, match=r"Odd\.config_for\(\.\.\.\) is 7, expected a Forward"):
        key_of(choosing(7))
    wide = replace(key_of(Base).config, tile_n=100)
    with pytest.raises(InvalidProblem, match=r"Odd\.config_for\(.*tile_n is 100, expected a mult"):
        key_of(choosing(wide))
    variant = selection.Variant(block_size=(128, 128))
    blocks = dict(has_block_mask=True, variant=variant)
    tile = replace(key_of(Base, **blocks).config, tile_n=96)
    with pytest.raises(UnsupportedProblem, match=r"BLOCK_SIZE is \(128, 128\).* tiles of Odd must"):
        key_of(choosing(tile), **blocks)


def test_heads_are_packed_for_the_config_and_not_where_a_class_lacks_it():
    class Small(Base):
        @classmethod
        def config_for(cls, spec, config):
            return replace(config, tile_m=64, use_ping_pong=False)

    short = dict(seqlen_q=1, num_heads_q=16, num_heads_kv=1)
    assert key_of(Base, **short).spec.pack_heads == key_of(Same, **short).spec.pack_heads == 16
    assert key_of(Small, **short).spec.pack_heads == 8, "eight rows a head, and 64 of them"
    alone = type("Alone", (Base,), {"lacks": {Feature.PACK_GQA}})
    assert key_of(alone, **short).spec.pack_heads == 1
    with pytest.raises(UnsupportedProblem, match="Alone lacks pack_gqa"):
        key_of(alone, **short, pack_gqa=True)


def test_a_config_changed_in_init_is_refused():
    class Late(Base):
        def __init__(self, spec, config):
            super().__init__(spec, replace(config, tile_n=64))

    with pytest.raises(InvalidProblem, match="Late.__init__ leaves self.config at .*config_for"):
        compile.kernel_for(key_of(Late))


# ---- Keys and caches -----------------------------------------------------------------------------


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of its own, and no settings of the user's."""
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    directory = tmp_path / "kernels"
    monkeypatch.setenv("FLASH_CUTE_CACHE_DIR", str(directory))
    monkeypatch.setattr(cache, "_counts", cache._Counts())
    monkeypatch.setattr(cache, "_memory", {})
    monkeypatch.setattr(cache, "_source_stamps", lambda: cache._STAMPS_AT_IMPORT)
    yield directory


def twin() -> type:
    """A class that is the same in all but being the same object."""

    class Twin(Base):
        pass

    return Twin


def test_the_class_object_is_the_key():
    one, other = twin(), twin()
    assert key_of(one) == key_of(one) and hash(key_of(one)) == hash(key_of(one))
    assert len({key_of(one), key_of(other), key_of(Base)}) == 3


def test_the_text_on_disk_is_that_of_the_own_classes_alone():
    text = cache.canonical_text(key_of(Base))
    fields = ",".join(
        f"{name}={cache.canonical_text(getattr(key_of(Base), name))}"
        for name in ("arch", "config", "kernel", "spec")
    )
    assert text == f"flash_cute.selection.KernelKey({fields})"
    with pytest.raises(TypeError, match="key holds a builtins.type"):
        cache.canonical_text(key_of(Same))


@pytest.mark.compile
def test_a_subclass_is_compiled_once_and_never_on_disk(own_cache: Path):
    one, other = twin(), twin()
    first = compile.executable(key_of(one))
    assert compile.executable(key_of(one)) is first
    info = cache.cache_info()
    assert (info.compiles, info.memory_hits, info.disk_hits) == (1, 1, 0)
    assert compile.executable(key_of(other)) is not first
    assert cache.cache_info().compiles == 2, "the same name is not the same class"
    cache.clear_cache(disk=False)
    compile.executable(key_of(one))
    info = cache.cache_info()
    assert (info.compiles, info.disk_hits, info.entries) == (3, 0, 0)
    assert not own_cache.exists()
    compile.executable(key_of(Base))
    assert cache.cache_info().entries == 1, "that of the package's own class"


@pytest.mark.compile
def test_processes_leave_a_subclass_to_their_parent(own_cache: Path):
    own_cache.mkdir(mode=0o700)
    compile.warmup([key_of(twin())], jobs=2, progress=False)  # a local class cannot be pickled
    info = cache.cache_info()
    assert (info.compiles, info.entries) == (1, 0)


@pytest.mark.compile
def test_a_first_call_inside_a_capture_is_refused(own_cache: Path, monkeypatch: Any):
    monkeypatch.setattr(current, "is_capturing", lambda: True)
    key = key_of(Double)
    with pytest.raises(CaptureError, match="call it once.*before the capture"):
        launch.ready_executable(key)
    ready = compile.executable(key)
    assert launch.ready_executable(key) is ready


def test_a_class_is_not_kept_once_the_cache_is_cleared(own_cache: Path):
    kernel = twin()
    cache._memory[key_of(kernel)] = lambda: None
    seen = weakref.ref(kernel)
    del kernel
    gc.collect()
    assert seen() is not None
    cache.clear_cache()
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize("way", ["plain", "used", "score_mod", "out"])
def test_repeated_calls_take_the_fast_path(way: str, monkeypatch: pytest.MonkeyPatch):
    launches = toy_gpu.install(monkeypatch)
    q = toy_gpu.on_gpu(torch.zeros(1, 128, 2, 64, dtype=torch.bfloat16))
    options: dict[str, Any] = {
        "plain": {},
        "used": {"seqused_k": toy_gpu.on_gpu(torch.tensor([8], dtype=torch.int32))},
        "score_mod": {"score_mod": lambda score, b, h, q_idx, kv_idx: score + q_idx},
        "out": {"out": toy_gpu.on_gpu(torch.zeros_like(q))},
    }[way]
    call = flash_attn_varlen_func if way == "used" else flash_attn_func
    k, v = (toy_gpu.on_gpu(torch.zeros_like(q)) for _ in range(2))
    kernels = (None, Base, Same, Double, twin(), twin())
    for _ in range(3):
        for kernel in kernels:
            call(q, k, v, kernel=kernel, **options)
    assert len(launches.looked_up) == len(kernels), "the first round alone goes the long way"
    assert launches.launched == 3 * launches.looked_up
    classes = [getattr(key, "kernel_class", None) for key in launches.looked_up]
    assert classes == [None, None, *kernels[2:]]


def test_what_is_refused_is_refused_again(monkeypatch: pytest.MonkeyPatch):
    launches = toy_gpu.install(monkeypatch)
    q, k, v = (toy_gpu.on_gpu(torch.zeros(1, 8, 1, 64, dtype=torch.bfloat16)) for _ in range(3))
    flash_attn_func(q, k, v, return_lse=True)
    flash_attn_func(q, k, v, kernel=Double)
    for _ in range(2):
        with pytest.raises(UnsupportedProblem, match="Double lacks lse"):
            flash_attn_func(q, k, v, return_lse=True, kernel=Double)
        with pytest.raises(InvalidProblem, match="kernel is of type str, expected a kernel class"):
            flash_attn_func(q, k, v, kernel="Double")
        with pytest.raises(InvalidProblem, match="kernel is of type list, expected a kernel class"):
            flash_attn_func(q, k, v, kernel=[Double])
    assert len(launches.launched) == 2


# ---- Mistakes ------------------------------------------------------------------------------------


def line_of(text: str) -> int:
    """The line of this file that begins with a text."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [n for n, line in enumerate(lines, 1) if line.strip().startswith(text)]
    return number


class Forgetful(Base):
    @cute.jit
    def close_rows(self, p, c, factor, lse):  # without rows
        factor.fill(1.0)


class Demanding(Base):
    def finish_product(self, pipes, v_state, *, how):
        raise AssertionError


class Static(Base):
    @staticmethod
    def finish_product(self, pipes, v_state):
        raise AssertionError


class Constant(Base):
    finish_product = 3


class Broken(Base):
    @cute.jit
    def close_rows(self, p, c, work, rows, factor, lse):
        if c.warpgroup == 0:  # a run-time condition: the DSL has rewritten what follows
            factor[0] = p.no_such_parameter


class BrokenPlain(Base):
    def first_weights(self, p, c, work, acc_S):
        self.fail(p)

    def fail(self, p):
        return 1 / 0


class BrokenName(Base):
    def close_rows(self, p, c, work, rows, factor, lse):
        factor.fill(no_such_name)  # noqa: F821


class BrokenInit(Base):
    def __init__(self, spec, config):
        super().__init__(spec, config)
        raise RuntimeError("no such table")


class Wide(Base):
    """Other names, defaults and *args are fine."""

    def finish_product(self, *arguments, extra=None):
        Base.finish_product(self, *arguments)

    def close_rows(self, params, consumer, work, rows, factor, lse, more=1):
        super().close_rows(params, consumer, work, rows, factor, lse)


@pytest.mark.parametrize(
    "kernel, method, took, expected",
    [
        (
            Forgetful,
            "close_rows",
            "(self, p, c, factor, lse)",
            "(self, p, c, work, rows, factor, lse)",
        ),
        (Demanding, "finish_product", "(self, pipes, v_state, *, how)", "(self, pipes, v_state)"),
        (Static, "finish_product", "(self, pipes, v_state)", "(self, pipes, v_state)"),
        (Constant, "finish_product", "3", "(self, pipes, v_state)"),
    ],
)
def test_a_wrong_signature_is_named_before_tracing(kernel, method, took, expected):
    with pytest.raises(CompileError) as caught:
        compile.kernel_for(key_of(kernel))
    text = str(caught.value)
    assert text.startswith(f"{kernel.__name__}.{method}")
    assert f" takes {took}, expected {expected}, as {Base.__name__}.{method} does" in text
    if kernel in (Forgetful, Demanding):
        first = "@cute.jit" if kernel is Forgetful else "def finish_product(self, pipes, v_state, *"
        line = (
            line_of("def close_rows(self, p, c, factor") - 1 if first[0] == "@" else line_of(first)
        )
        assert f" at {__file__}:{line} takes" in text


def test_a_wrong_signature_of_a_mixin_is_found():
    class Mixin:
        def close_rows(self, p):
            raise AssertionError

    mixed = type("Mixed", (Mixin, Base), {})
    with pytest.raises(CompileError, match=r"Mixin\.close_rows at .* takes \(self, p\), expected"):
        compile.kernel_for(key_of(mixed))


@pytest.mark.compile
@pytest.mark.parametrize(
    "kernel, source, message",
    [
        (Broken, "factor[0] = p.no_such_parameter", "no attribute 'no_such_parameter'"),
        (BrokenPlain, "return 1 / 0", "ZeroDivisionError: division by zero"),
        (BrokenName, "factor.fill(no_such_name)  # noqa: F821", "'no_such_name' is not defined"),
    ],
)
def test_a_step_that_raises_is_named(kernel: type, source: str, message: str):
    key = key_of(kernel)
    with pytest.raises(CompileError) as caught:
        compile.compile_kernel(compile.kernel_for(key), key.arch)
    text = str(caught.value)
    assert f"failed in {kernel.__name__}, {__file__}:{line_of(source)} `{source}`: " in text
    assert message in text


def test_a_name_that_is_no_symbol_is_refused():
    named = type("Größe", (Base,), {})
    with pytest.raises(InvalidProblem, match="name is 'Größe', expected letters of ASCII"):
        compile.kernel_for(key_of(named))


def test_an_init_that_raises_is_named():
    source = 'raise RuntimeError("no such table")'
    with pytest.raises(CompileError) as caught:
        compile.kernel_for(key_of(BrokenInit))
    where = f"making a BrokenInit failed in BrokenInit, {__file__}:{line_of(source)} `{source}`: "
    assert str(caught.value) == f"{where}RuntimeError: no such table"


# ---- Compiling -----------------------------------------------------------------------------------


def compiles_cleanly(kernel: type, stack_bytes: int = 0, **changes: Any) -> Any:
    report = compile.inspect_kernel(compile.kernel_for(key_of(kernel, **changes)), "sm_90a")
    if report.missing:
        pytest.skip("; ".join(report.missing))
    checks.assert_no_spills(report, stack_bytes=stack_bytes)
    assert f".entry {report.name}" in report.ptx
    return report


@pytest.mark.compile
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_sigmoid_compiles_without_spills(sigmoid: Any, dim: int, causal: bool):
    dims = dict(head_dim=dim, head_dim_v=dim)
    stack_bytes = 8 if dim == 256 else 0
    report = compiles_cleanly(sigmoid.SigmoidAttention, stack_bytes, causal=causal, **dims)
    assert report.name.startswith("flash_fwd_sm90_SigmoidAttention_bf16_d")
    ptx = report.ptx
    assert ptx.count("rcp.approx") >= ptx.count("ex2.approx") > 0, "a reciprocal a weight"
    assert "vote" not in ptx, "there is no running maximum"


@pytest.mark.compile
def test_sigmoid_compiles_with_what_it_leaves_alone(sigmoid: Any):
    changes = dict(is_packed_q=True, is_packed_k=True, softcap=5.0, num_heads_kv=2, window_left=9)
    compiles_cleanly(sigmoid.SigmoidAttention, head_dim=128, head_dim_v=128, **changes)


@pytest.mark.compile
@pytest.mark.parametrize("kernel", [Double, Wide])
def test_toy_subclass_compiles(kernel: type):
    compiles_cleanly(kernel, head_dim=128, head_dim_v=128, causal=True)


# ---- On a GPU ------------------------------------------------------------------------------------


def sigmoid_by_definition(
    operands: checks.Operands, case: dict[str, Any], dtype: torch.dtype
) -> torch.Tensor:
    """sigmoid(score - log(keys)) times the values, both products in `dtype`; keys at the end."""
    q, k, v = (x.to(dtype).transpose(-3, -2) for x in operands)
    k, v = (x.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3) for x in (k, v))
    scores = (q @ k.mT).to(torch.promote_types(dtype, torch.float32))
    scores = scores * case.get("softmax_scale", q.shape[-1] ** -0.5)
    if cap := case.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    weights = torch.sigmoid(scores - math.log(max(1, k.shape[-2])))
    if case.get("causal"):
        weights = weights.tril(k.shape[-2] - q.shape[-2])
    return (weights.to(dtype) @ v).transpose(-3, -2)


def check_sigmoid(sigmoid: Any, operands: checks.Operands, **options: Any) -> None:
    kernel = sigmoid.SigmoidAttention
    out = flash_attn_func(*operands, kernel=kernel, **options)
    exact = sigmoid_by_definition(operands, options, torch.float64)
    lowprec = sigmoid_by_definition(operands, options, operands[0].dtype)
    checks.assert_close("out", out, exact, lowprec)


CASES = [
    Case(batch=2, num_heads_q=4, num_heads_kv=4, seqlen_q=1000, seqlen_k=1000, head_dim=64),
    Case(batch=2, num_heads_q=6, num_heads_kv=2, seqlen_q=333, seqlen_k=777, head_dim=128),
    Case(batch=1, num_heads_q=4, num_heads_kv=1, seqlen_q=1, seqlen_k=513, head_dim=128),
    Case(num_heads_q=3, num_heads_kv=3, seqlen_q=700, seqlen_k=300, head_dim=256),
    Case(seqlen_q=200, seqlen_k=260, head_dim=96, head_dim_v=64, dtype=torch.float16),
]


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_sigmoid_is_right(hopper: None, sigmoid: Any, case: Case, causal: bool):
    check_sigmoid(sigmoid, checks.gaussian(case, "cuda"), causal=causal)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", checks.HOSTILE)
def test_sigmoid_is_right_on_hostile_inputs(hopper: None, sigmoid: Any, name: str, causal: bool):
    case = Case(batch=2, num_heads_q=4, num_heads_kv=2, seqlen_q=413, seqlen_k=461, head_dim=128)
    check_sigmoid(sigmoid, checks.HOSTILE[name](case, "cuda"), causal=causal)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"softmax_scale": -0.2}, {"softcap": 12.0}], ids=str)
def test_sigmoid_follows_the_options_of_scores(hopper: None, sigmoid: Any, options: dict):
    q, k, v = checks.gaussian(Case(seqlen_q=300, seqlen_k=300, head_dim=128), "cuda")
    check_sigmoid(sigmoid, (4 * q, k, v), causal=True, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_sigmoid_of_packed_sequences(hopper: None, sigmoid: Any, causal: bool):
    lengths_q, lengths_k = [130, 1, 0, 257, 64], [700, 64, 5, 1023, 0]
    sizes = dict(num_heads_q=4, num_heads_kv=2, head_dim=128)
    q, k, v = checks.gaussian(
        Case(seqlen_q=sum(lengths_q), seqlen_k=sum(lengths_k), **sizes), "cuda"
    )
    q, k, v = q[0], k[0], v[0]

    def starts(lengths: list[int]) -> torch.Tensor:
        return torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)

    kernel = sigmoid.SigmoidAttention
    packed = dict(cu_seqlens_q=starts(lengths_q), cu_seqlens_k=starts(lengths_k))
    out = flash_attn_varlen_func(q, k, v, causal=causal, kernel=kernel, **packed)
    rows = zip(out.split(lengths_q), q.split(lengths_q), strict=True)
    keys = zip(k.split(lengths_k), v.split(lengths_k), strict=True)
    for (got, one_q), (one_k, one_v) in zip(rows, keys, strict=True):
        if got.numel():
            operands = (one_q, one_k, one_v)
            case = {"causal": causal}
            exact = sigmoid_by_definition(operands, case, torch.float64)
            lowprec = sigmoid_by_definition(operands, case, q.dtype)
            checks.assert_close("out", got, exact, lowprec)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_subclass_that_overrides_nothing_has_the_same_bits(hopper: None, dim: int):
    case = Case(batch=2, num_heads_q=4, num_heads_kv=2, seqlen_q=700, seqlen_k=900, head_dim=dim)
    q, k, v = checks.gaussian(case, "cuda")
    options = dict(causal=True, return_lse=True)
    for got, expected in zip(
        flash_attn_func(q, k, v, kernel=Same, **options),
        flash_attn_func(q, k, v, **options),
        strict=True,
    ):
        checks.assert_same_bits("same", got, expected)


@pytest.mark.gpu
def test_doubled_weights_double_the_output(hopper: None):
    q, k, v = checks.gaussian(Case(seqlen_q=300, seqlen_k=500, head_dim=128), "cuda")
    out, plain = flash_attn_func(q, k, v, kernel=Double), flash_attn_func(q, k, v)
    checks.assert_same_bits("double", out, 2 * plain)
    with pytest.raises(UnsupportedProblem, match="Double lacks lse"):
        flash_attn_func(q, k, v, kernel=Double, return_lse=True)


@pytest.mark.gpu
def test_repeated_calls_are_quick_and_right(hopper: None, monkeypatch: pytest.MonkeyPatch):
    q, k, v = checks.gaussian(Case(seqlen_q=300, seqlen_k=500, head_dim=128), "cuda")
    kernels = (None, Same, Double)
    expected = [flash_attn_func(q, k, v, kernel=kernel) for kernel in kernels]
    before = cache.cache_info()
    monkeypatch.setattr(launch, "attention", None)  # the long way ends here
    for _ in range(2):
        for kernel, out in zip(kernels, expected, strict=True):
            checks.assert_same_bits("out", flash_attn_func(q, k, v, kernel=kernel), out)
    assert cache.cache_info() == before
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        flash_attn_func(q, k, v, kernel=twin())


@pytest.mark.gpu
def test_a_class_defined_anew_is_compiled_anew(hopper: None):
    q, k, v = checks.gaussian(Case(seqlen_q=300, seqlen_k=500, head_dim=128), "cuda")

    def scaled(by: float) -> type:
        class Scaled(Base):
            def close_rows(self, p, c, work, rows, factor, lse):
                super().close_rows(p, c, work, rows, factor, lse)
                for r in range(cute.size(factor)):
                    factor[r] = by * factor[r]

        return Scaled

    plain, before = flash_attn_func(q, k, v), cache.cache_info().compiles
    for by in (2.0, 4.0):
        checks.assert_same_bits("scaled", flash_attn_func(q, k, v, kernel=scaled(by)), by * plain)
    assert cache.cache_info().compiles == before + 2


@pytest.mark.gpu
def test_a_subclass_is_captured_once_it_is_ready(hopper: None):
    kernel = twin()
    q, k, v = checks.gaussian(Case(batch=2, seqlen_q=700, seqlen_k=700, head_dim=128), "cuda")
    cold = torch.cuda.CUDAGraph()
    with torch.cuda.graph(cold):
        with pytest.raises(CaptureError, match="call it once"):
            flash_attn_func(q, k, v, kernel=kernel)
    expected = flash_attn_func(q, k, v, kernel=kernel)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn_func(q, k, v, kernel=kernel)
    out.fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    checks.assert_same_bits("out", out, expected)
