"""The SM100 kernel without a GPU: descriptors, the polynomial, configs, signals, compiles."""

import dataclasses
import itertools

import checks
import numpy as np
import pytest
import torch
from test_kernels_compile import FEATURES, MIXED_DIMS
from test_sm100_order import check_order

from flash_cute import AttentionProblem, InvalidProblem, Target, UnsupportedProblem, selection
from flash_cute.sm100.config import (
    SMEM_BYTES,
    TILE_HEAD_DIMS,
    TMEM_COLUMNS,
    ForwardConfigSm100,
    choose_config,
)
from flash_cute.specialization import ForwardSpecialization, TileFacts

B200 = Target.from_arch("sm_100a")
DIMS = [(d, d) for d in TILE_HEAD_DIMS] + MIXED_DIMS


def facts(few_rows: int | None = None, block_size: tuple[int, int] | None = None) -> TileFacts:
    return TileFacts(8192, few_rows, block_size, SMEM_BYTES)


def spec_of(d: int = 128, dv: int | None = None, **features) -> ForwardSpecialization:
    features = {"dtype": "bf16", "is_causal": False, "has_lse": True} | features
    return ForwardSpecialization(tile_d=d, tile_dv=d if dv is None else dv, **features)


def choose(spec: ForwardSpecialization, few_rows: int | None = None):
    """The config of a spec, and the spec with as many heads packed as fit its tile."""
    config = choose_config(dataclasses.replace(spec, pack_heads=1), facts(few_rows))
    heads = min(spec.pack_heads, config.tile_m // 8)
    return config, dataclasses.replace(spec, pack_heads=heads)


# ---- Descriptors ---------------------------------------------------------------------------------


def swizzled(address: int, row_bytes: int) -> int:
    """Where TMA puts what an unswizzled tile has at an address (PTX ISA, swizzle modes)."""
    return address ^ (address >> 7 & row_bytes // 16 - 1) << 4


def fields(lower: int, upper: int) -> dict[str, int]:
    """A shared-memory descriptor, by the PTX ISA's table of its bits."""
    word = lower | upper << 32
    return {
        "start": (word & 0x3FFF) << 4,
        "leading": (word >> 16 & 0x3FFF) << 4,
        "stride": (word >> 32 & 0x3FFF) << 4,
        "version": word >> 46 & 0x7,
        "zeros": word >> 49 & 0xFFF,
        "swizzle": word >> 61,
    }


@pytest.mark.parametrize(("rows", "dim"), [(256, 128), (128, 64), (64, 96), (64, 256), (128, 192)])
@pytest.mark.parametrize("base", [0, 1024, 5 * 1024 + 128 * 1024])
def test_descriptors_find_every_element(rows: int, dim: int, base: int):
    pytest.importorskip("cutlass")
    from flash_cute.sm100.tensor_memory import MMA_DEPTH, SmemOperand

    operand = SmemOperand(rows, dim)
    row_bytes = operand.row_bytes
    mode = {2: 128, 4: 64, 6: 32}
    # As TMA fills the tile: panel by panel, a swizzled row each.
    place = {}
    for row, col in itertools.product(range(rows), range(dim)):
        panel, within = divmod(2 * col, row_bytes)
        unswizzled = base + panel * operand.panel_bytes + row * row_bytes + within
        place[row, col] = swizzled(unswizzled, row_bytes)
    sample = itertools.product(range(0, rows, 7), range(0, dim, 5))
    for row, col in sample:
        k, within = divmod(col, MMA_DEPTH)
        found = fields(operand.lower(base, False) + (operand.along_dim(k) >> 4), operand.upper)
        assert (found["version"], found["zeros"], mode[found["swizzle"]]) == (1, 0, row_bytes)
        groups, rest = divmod(row, 8)
        address = found["start"] + groups * found["stride"] + rest * row_bytes + 2 * within
        assert swizzled(address, row_bytes) == place[row, col]
        k, within = divmod(row, MMA_DEPTH)
        found = fields(operand.lower(base, True) + (operand.along_rows(k) >> 4), operand.upper)
        panel, byte = divmod(2 * col, row_bytes)
        groups, rest = divmod(within, 8)
        address = found["start"] + panel * found["leading"] + groups * found["stride"]
        assert swizzled(address + rest * row_bytes + byte, row_bytes) == place[row, col]


def test_instruction_descriptors_have_the_bits_of_the_isa():
    cutlass = pytest.importorskip("cutlass")
    from flash_cute.sm100.tensor_memory import instruction

    word = instruction(128, 256, cutlass.BFloat16, True)
    assert (word >> 4 & 3, word >> 7 & 7, word >> 10 & 7) == (1, 1, 1)
    assert (word >> 15 & 1, word >> 16 & 1) == (0, 1)
    assert (word >> 17 & 0x3F, word >> 24 & 0x1F) == (256 // 8, 128 // 16)
    assert instruction(128, 64, cutlass.Float16, False) >> 7 & 0x3F == 0


# ---- The polynomial ------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "most"), [("BFloat16", 1e-4), ("Float16", 5e-6)])
def test_the_polynomial_is_exact_enough(dtype: str, most: float):
    """`exp2_polynomial` is PTX: its steps are repeated here in float32."""
    cutlass = pytest.importorskip("cutlass")
    from flash_cute.sm100.softmax import COEFFICIENTS, LOWEST, ROUNDER

    x = np.concatenate([np.linspace(-126, 9, 300_001), [-127.0, -1e-9, 0.0, -1.0]])
    x = np.maximum(x.astype(np.float32), np.float32(LOWEST))
    # Rounding down: in this range float32 has whole numbers only.
    rounded = np.floor(x.astype(np.float64) + ROUNDER).astype(np.float32)
    rest = x - (rounded - np.float32(ROUNDER))
    assert rest.min() >= 0 and rest.max() <= 1
    power = np.zeros_like(rest)
    for coefficient in reversed(COEFFICIENTS[getattr(cutlass, dtype)]):
        power = power * rest + np.float32(coefficient)
    got = (power.view(np.int32) + (rounded.view(np.int32) << 23)).view(np.float32)
    expected = np.exp2(x.astype(np.float64))
    is_zero = x == LOWEST
    assert (got[is_zero] == 0).all()
    assert np.abs(got[~is_zero] / expected[~is_zero] - 1).max() < most


# ---- Configs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_chosen_configs_obey_the_rules(dims: tuple[int, int]):
    for features, few_rows in itertools.product([{}, {"is_causal": True}, *FEATURES], (None, 8)):
        config, spec = choose(spec_of(*dims, **features), few_rows)
        assert config.check(spec) == []
        assert config.smem_bytes(spec) <= B200.smem_bytes
        assert config.tmem_columns(spec) <= TMEM_COLUMNS
        assert config.tile_m == (128 if few_rows or dims[0] == 256 or dims[1] > 128 else 256)


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("block", [(128, 128), (64, 64), (256, 96), (512, 128), (64, 192)], ids=str)
def test_tiles_divide_the_blocks_of_a_mask(block: tuple[int, int], dims: tuple[int, int]):
    spec = spec_of(*dims, has_block_mask=True)
    config = choose_config(spec, facts(block_size=block))
    assert config.divides(block, spec) and not config.check(spec)
    assert config.rows_q in (128, 256) and config.rows_used(spec) <= block[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tile_m": 192}, "tile_m is 192"),
        ({"tile_n": 96}, "tile_n is 96"),
        ({"num_polynomial": 3}, "num_polynomial is 3"),
        ({"num_stages": 4}, "shared memory is"),
        ({"regs_softmax": 216}, "registers are 67584"),
    ],
)
def test_broken_configs_are_named(changes: dict[str, int], message: str):
    config = ForwardConfigSm100(**changes)
    assert any(message in rule for rule in config.check(spec_of()))


def test_what_is_not_there_is_named():
    config = ForwardConfigSm100()
    assert any(
        "qv is not supported on SM100" in rule for rule in config.check(spec_of(has_qv=True))
    )
    gathered = config.check(spec_of(page_rows=1))
    assert any("at most 64 where keys are gathered" in rule for rule in gathered)
    wide = dataclasses.replace(config, tile_n=64, num_stages=1)
    assert any("columns of tensor memory" in rule for rule in wide.check(spec_of(256)))


def test_a_broken_config_is_refused_before_tracing():
    fwd = pytest.importorskip("flash_cute.sm100.fwd")
    with pytest.raises(InvalidProblem, match="tile_n is 96"):
        fwd.FlashAttentionForwardSm100(spec_of(), ForwardConfigSm100(tile_n=96))


# ---- Selection -----------------------------------------------------------------------------------


def problem(**changes) -> AttentionProblem:
    shapes = {"batch": 2, "num_heads_q": 4, "num_heads_kv": 2, "seqlen_q": 512, "seqlen_k": 512}
    fields = (
        shapes
        | {
            "head_dim": 128,
            "head_dim_v": 128,
            "dtype": torch.bfloat16,
            "device": torch.device("cpu"),
        }
        | changes
    )
    return AttentionProblem(**fields)


def test_it_is_chosen_for_blackwell_alone():
    fwd = pytest.importorskip("flash_cute.sm100.fwd")
    hopper = Target.from_arch("sm_90a")
    with pytest.raises(UnsupportedProblem, match="not on sm_90a"):
        selection.key_for(problem(), hopper, kernel=fwd.FlashAttentionForwardSm100)
    for arch in ("sm_100a", "sm_103a"):
        key = selection.key_for(problem(), Target.from_arch(arch))
        assert key.kernel == "FlashAttentionForwardSm100"
        assert isinstance(key.config, ForwardConfigSm100)


# ---- Signals -------------------------------------------------------------------------------------


def test_a_signal_without_its_arrivals_is_found_while_tracing():
    pytest.importorskip("cutlass")
    from flash_cute.sm100.pipes import Role, Signal, Signals, arrivals

    assert Signal.MAX in arrivals(1) and Signal.MAX not in arrivals(2)
    signals = Signals(2)
    sites = {(signal, role) for signal, roles in signals.counts.items() for role in roles}
    signals.sites = sites | {(signal, None) for signal in signals.counts}
    signals.check_sites()
    signals.sites.discard((Signal.P, Role.CORRECTION))
    with pytest.raises(AssertionError, match="CORRECTION"):
        signals.check_sites()


# ---- Compiles ------------------------------------------------------------------------------------


def cells():
    for (d, dv), is_causal in itertools.product([(128, 128), (256, 256)], (False, True)):
        yield spec_of(d, dv, is_causal=is_causal), None
    for d, dv in ((64, 64), (96, 96), (192, 128), (192, 192), (256, 128)):
        yield spec_of(d, dv, is_causal=True), None
    yield spec_of(64, dtype="fp16", has_lse=False, negate_scores=True), None
    yield spec_of(128, dtype="fp16", is_causal=True), 8
    for features in FEATURES:
        yield spec_of(128, **features), None


@pytest.mark.compile
@pytest.mark.parametrize(("spec", "few_rows"), list(cells()), ids=lambda x: getattr(x, "label", x))
def test_cell_compiles_without_spills(spec: ForwardSpecialization, few_rows: int | None):
    check_compile(*choose(spec, few_rows), "sm_100a")


@pytest.mark.compile
@pytest.mark.parametrize("block", [(64, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (256, 256)], ids=str)
def test_blocks_of_masks_compile_without_spills(dims: tuple[int, int], block: tuple[int, int]):
    features = {"has_block_mask": True, "has_full_blocks": True, "is_packed_q": True}
    spec = spec_of(*dims, is_packed_k=True, **features)
    check_compile(choose_config(spec, facts(block_size=block)), spec, "sm_100a")


@pytest.mark.compile
@pytest.mark.parametrize("dims", [(128, 128), (256, 256)], ids=str)
def test_cell_compiles_for_b300(dims: tuple[int, int]):
    check_compile(*choose(spec_of(*dims, is_causal=True)), "sm_103a")


def check_compile(config: ForwardConfigSm100, spec: ForwardSpecialization, arch: str) -> None:
    """Compile and look at registers, spills, shared memory, and the waits of tensor memory."""
    pytest.importorskip("cutlass")
    from flash_cute.compile import inspect_kernel
    from flash_cute.sm100.fwd import FlashAttentionForwardSm100

    report = inspect_kernel(FlashAttentionForwardSm100(spec, config), arch)
    if report.missing:
        pytest.skip("; ".join(report.missing))
    checks.assert_no_spills(report)
    assert report.registers is not None and report.registers <= 128  # at entry
    assert report.smem_bytes is not None
    # What the driver keeps for itself is counted as static.
    assert report.smem_bytes <= Target.from_arch(arch).smem_bytes + 1024
    assert f".entry {report.name}" in report.ptx
    check_order(report.ptx)
