"""Launch records against the parameters that PTX declares, for every kind of field."""

from __future__ import annotations

import functools
import importlib
import struct
import types
from typing import Any

import checks
import pytest
import torch
import toy_gpu
from checks import Case

from flash_cute import Target, flash_attn_func, selection
from flash_cute.arguments import ForwardArguments
from flash_cute.features import Feature
from flash_cute.specialization import ForwardSpecialization, TileFacts
from sm100_on_hopper import build, forward, launch, lowering, matmul, record, test_forward
from sm100_on_hopper.build import Parameter
from sm100_on_hopper.lowering import Mode, RefusalError
from sm100_on_hopper.record import TENSOR_MAP_BYTES, TmaTile

pytestmark = pytest.mark.compile

PACKED = {"is_packed_q": True, "is_packed_k": True}
USED = {"has_seqused_q": True, "has_seqused_k": True}
FEATURES: dict[str, dict[str, Any]] = {
    "dense": {},
    "packed": PACKED,
    "used": USED,
    "window": {"has_window_left": True, "has_window_right": True},
    "softcap": {"has_softcap": True, "sink_dtype": "bf16"},
    "pack_gqa": {"is_causal": True, "pack_heads": 4},
    "blocks": {"has_block_mask": True, "has_full_blocks": True},
    "partial blocks": {"has_block_mask": True},
    "pages": {"has_seqused_k": True, "page_rows": 16},
    "pieces": {**USED, "page_rows": 1},
    "split": {"has_seqused_k": True, "is_split": True},
    "counted split": {
        "has_seqused_k": True,
        "is_packed_q": True,
        "page_rows": 16,
        "pack_heads": 8,
        "is_split": True,
        "has_split_counts": True,
        "has_batch_idx": True,
        "has_leftpad": True,
    },
}


def encoded(tile: TmaTile) -> bytes:
    """In the place of the driver's tensor map: what it is made from, checked."""
    assert len(tile.sizes) == len(tile.box) == len(tile.strides) + 1
    assert tile.box[0] * 2 <= (tile.swizzle_bytes or 256) and max(tile.box) <= 256
    assert all(stride % 16 == 0 for stride in tile.strides)
    return bytes(TENSOR_MAP_BYTES)


def values(spec: ForwardSpecialization) -> list[Any]:
    """Launch arguments, every one another number."""
    count = len(ForwardArguments._fields)
    args = ForwardArguments(*(16 * (i + 1) for i in range(count)))
    args = args._replace(num_heads_q=16, num_heads_kv=2, scale_log2=0.5, softcap=2.5)
    blocks = []
    if spec.has_block_mask:
        blocks = [2, 1, *range(3, 9), *(range(9, 15) if spec.has_full_blocks else ())]
    return [*args, *blocks]


def kernel_of(declared: str, features: dict[str, Any]) -> Any:
    """A kernel object; skips what there is no kernel for."""
    declaration = getattr(selection, declared, None)
    if declaration is None:
        pytest.skip(f"selection has no {declared} kernel")
    base = {"is_causal": False, "has_lse": True}
    spec = ForwardSpecialization("bf16", 64, 64, **{**base, **features})
    if spec.gathers_keys and not declaration.gathers_keys:
        pytest.skip(f"{declared} gathers no keys")
    if spec.has_block_mask and Feature.BLOCK_SPARSITY not in declaration.features:
        pytest.skip(f"{declared} has no block masks")
    facts = TileFacts(512, None, None, Target.from_arch("sm_90a").smem_bytes)
    kernel_class = getattr(importlib.import_module(declaration.module), declaration.kernel)
    return kernel_class(spec, declaration.choose_config(spec, facts))


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize(("declared", "arch"), [("SM90", "sm_90a"), ("SM100", "sm_100a")])
def test_record_fits_the_ptx_of_a_kernel(declared: str, arch: str, features: dict[str, Any]):
    kernel = kernel_of(declared, features)
    ptx = build.kernel_ptx(kernel, arch)
    parameters = build.declared_parameters(ptx)
    fields = forward.ForwardRecord(kernel, values(kernel.spec)).fields()
    record.check_ranks(fields, build.tma_ranks(ptx))
    packed = record.pack(fields, parameters, encoded)
    assert [len(value) for value in packed] == [parameter.size for parameter in parameters]
    names = [field.name for field in fields]
    assert struct.unpack("<f", packed[names.index("scale_log2")]) == (0.5,)


@pytest.mark.parametrize("mode", lowering.MODES, ids=str)
@pytest.mark.parametrize("features", [{}, {"is_causal": True, "has_seqused_k": True}], ids=str)
def test_sm100_kernel_lowers_and_assembles(tools: None, features: dict[str, Any], mode: Mode):
    kernel = kernel_of("SM100", features)
    program = build.build(build.kernel_ptx(kernel, "sm_100a"), mode)
    assert program.uses_tensor_memory and program.threads == kernel.config.num_threads


def test_sm90_kernel_assembles_as_it_is(tools: None):
    kernel = kernel_of("SM90", {})
    program = build.build(build.kernel_ptx(kernel, "sm_90a"))
    assert not program.uses_tensor_memory and program.threads == kernel.config.num_threads


def test_record_of_the_matrix_product_fits_its_ptx():
    a, b = torch.empty(256, 320).bfloat16(), torch.empty(320, 128).bfloat16()
    fields = matmul.launch_record(a, b, torch.empty(256, 128))
    packed = record.pack(fields, build.declared_parameters(matmul.ptx()), encoded)
    assert struct.unpack("<ii", packed[1]) == (320, 256)
    assert struct.unpack("<Qiiq", packed[4])[1:] == (256, 128, 128)


def test_layout_of_tensors():
    assert record.tensor("t", 5, (1, 2, 3), (7,)).value == struct.pack("<Qiii4xq", 5, 1, 2, 3, 7)
    assert record.tensor("t", 5, (1, 2), (7,)).value == struct.pack("<Qiiq", 5, 1, 2, 7)
    assert record.tensor("t", 5, (1,)).value == struct.pack("<Qi4x", 5, 1)


def test_parameters_are_read_from_ptx():
    ptx = """.visible .entry k(
        .param .align 64 .b8 k_param_0[128],
        .param .u64 .ptr .global .align 4 k_param_1,
        .param .align 1 .b8 k_param_2[1],
        .param .f32 k_param_10
    ) .reqntid 128 { mov.b64 %rd1, k_param_0; ld.param.f32 %f1, [k_param_10]; }"""
    assert build.declared_parameters(ptx) == (
        Parameter(128, 64, True),
        Parameter(8, 8, False),
        Parameter(1, 1, False),
        Parameter(4, 4, True),
    )
    assert build.thread_count(ptx) == 128


def test_record_that_does_not_fit_is_refused_by_name():
    four = (Parameter(4, 4, True),)
    with pytest.raises(RefusalError, match="1 parameters, the record a, b"):
        record.pack([record.int32("a", 1), record.int32("b", 1)], four, encoded)
    with pytest.raises(RefusalError, match="a has 8 bytes, the kernel's 4"):
        record.pack([record.address("a", 1)], four, encoded)
    with pytest.raises(RefusalError, match="reads mma"):
        record.pack([record.unread("mma")], four, encoded)
    assert record.pack([record.unread("mma")], (Parameter(3, 1, False),), encoded) == [bytes(3)]
    tile = TmaTile(0, "bf16", (64, 128), (128,), (64, 128), 128)
    record.check_ranks([record.tma("a", tile)[0]], frozenset({2}))
    with pytest.raises(RefusalError, match=r"maps of \[3\] dimensions"):
        record.check_ranks([record.tma("a", tile)[0]], frozenset({2, 3}))


def test_functions_taken_over_get_what_they_take():
    for module, function, arguments in test_forward.OTHERS.values():
        assert forward.bound(module, function, arguments)
    for case in test_forward.test_variants.CASES:
        assert forward.bound("test_variants", "test_pairs_of_features", {"case": case})
    with pytest.raises(TypeError, match="rows"):
        forward.bound("test_split", "test_parts_give_the_whole", {"dims": (64, 64)})


class Launches:
    """In the place of loaded programs: packs every launch, and keeps the last."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.grid = 0

    def loaded(self, program: build.Program) -> Any:
        """As launch.loaded."""
        return types.SimpleNamespace(launch=functools.partial(self._launch, program))

    def _launch(self, program: build.Program, fields: Any, grid: int, smem_bytes: int) -> None:
        packed = record.pack(fields, program.parameters, encoded)
        self.values = {field.name: value for field, value in zip(fields, packed, strict=True)}
        self.grid = grid


def test_public_calls_reach_the_launcher(tools: None, monkeypatch: pytest.MonkeyPatch):
    toy_gpu.install(monkeypatch)
    launches = Launches()
    monkeypatch.setattr(launch, "loaded", launches.loaded)
    q, k, v = (toy_gpu.on_gpu(tensor) for tensor in checks.gaussian(Case(2, 4, 2, 300, 500)))
    with forward.substitute(selection.SM90, "sm_90a") as names:
        for _ in range(2):
            flash_attn_func(q, k, v, softmax_scale=0.25)
    values = launches.values
    assert len(names) == 1 and names[0].startswith("flash_fwd_sm90")
    assert struct.unpack("<iiii", values["q.sizes"]) == (300, 64, 4, 2)
    assert struct.unpack("<iiii", values["k.sizes"]) == (500, 64, 2, 2)
    assert struct.unpack("<f", values["scale_log2"])[0] == pytest.approx(0.25 * 1.442695)
    assert launches.grid >= 2 * 4
    assert selection.SM90 in selection.KERNELS  # all is as before


def test_unknown_field_is_refused_by_name():
    with pytest.raises(RefusalError, match="Parameter with the fields alignment"):
        forward.ordered(Parameter, {"size": [], "is_read": []})
