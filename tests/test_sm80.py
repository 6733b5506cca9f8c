"""The SM80 kernel without a GPU: where chunks lie, configs, compiles, launches on a toy."""

import dataclasses
import itertools

import checks
import covering
import pytest
import torch
import toy_gpu
from test_kernels_compile import FEATURES, MIXED_DIMS, PLAIN

from flash_cute import (
    AttentionProblem,
    Feature,
    InvalidProblem,
    Target,
    UnsupportedProblem,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    scheduling,
    selection,
)
from flash_cute.sm80.config import TILE_HEAD_DIMS, ForwardConfigSm80, choose_config
from flash_cute.specialization import ForwardSpecialization, TileFacts

ARCHS = (*selection.SM80.archs, "sm_90a")
SMALL = ("sm_86", "sm_89", "sm_120a")  # 99 KiB
A100 = Target.from_arch("sm_80")
H200 = Target.from_arch("sm_90a")
DIMS = [(d, d) for d in TILE_HEAD_DIMS] + MIXED_DIMS


def facts(arch: str = "sm_80", few_rows: int | None = None, block_size=None) -> TileFacts:
    return TileFacts(8192, few_rows, block_size, Target.from_arch(arch).smem_bytes)


def spec_of(d: int = 128, dv: int | None = None, **features) -> ForwardSpecialization:
    features = {"is_causal": False, "has_lse": True} | features
    if features.get("page_rows"):
        features["page_rows"] = 1  # keys are always gathered
    return ForwardSpecialization("bf16", d, d if dv is None else dv, **features)


def choose(spec: ForwardSpecialization, chosen_by: TileFacts):
    """The config of a spec, and the spec with as many heads packed as fit its tile."""
    config = choose_config(dataclasses.replace(spec, pack_heads=1), chosen_by)
    heads = min(spec.pack_heads, config.tile_m // 8)
    return config, dataclasses.replace(spec, pack_heads=heads)


# ---- Where chunks lie ----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(64, 64), (48, 96), (16, 128), (128, 32), (32, 192), (64, 256)])
def test_chunks_fill_a_tile_and_eight_rows_lie_in_different_banks(shape: tuple[int, int]):
    from flash_cute.sm80.tiles import CHUNK, TileLayout

    layout = TileLayout(*shape)
    panels = layout.cols // layout.panel
    places = {}
    for row, col in itertools.product(range(layout.rows), range(0, layout.cols, CHUNK)):
        panel, chunk = divmod(col // CHUNK, layout.chunks)
        places[row, col] = layout.offset(row, chunk) + panel * layout.rows * layout.panel
    assert sorted(places.values()) == list(range(0, layout.size, CHUNK)) and panels >= 1
    for row, col in itertools.product(range(0, layout.rows, 8), range(0, layout.cols, CHUNK)):
        banks = {places[row + i, col] // CHUNK % 8 for i in range(8)}  # 16 bytes each
        assert len(banks) == 8


@pytest.mark.parametrize("shape", [(64, 64), (48, 96), (32, 128), (64, 256)])
def test_lanes_find_every_matrix_by_an_xor_and_a_constant(shape: tuple[int, int]):
    """`places` is inline PTX: its XOR is repeated here."""
    from flash_cute.sm80.tiles import CHUNK, TileLayout

    layout = TileLayout(*shape)
    of_rows = [(i % 2, i // 2) for i in range(4)]  # (eight rows, chunk) of each of four matrices
    of_columns = [(i // 2, i % 2) for i in range(4)]
    for lane_of, order in ((layout.lane_of_rows, of_rows), (layout.lane_of_columns, of_columns)):
        for lane, row, chunk in itertools.product(
            range(32), range(0, layout.rows, 16), range(0, layout.cols // CHUNK, 2)
        ):
            turned = [2 * lane_of(lane) ^ 2 * c * CHUNK for c in range(0, layout.chunks, 2)]
            address, constant = layout.matrices(turned, row, chunk)
            eight, further = order[lane // 8]
            panel, within = divmod(chunk + further, layout.chunks)
            expected = layout.offset(row + 8 * eight + lane % 8, within)
            expected += panel * layout.rows * layout.panel
            assert address + constant == 2 * expected


@pytest.mark.parametrize(("tile_n", "warps"), [(64, 8), (128, 8), (128, 4)])
def test_pairs_of_warps_read_what_they_posted_without_conflicts(tile_n: int, warps: int):
    """`post_weights` and `other_weights` are inline PTX: their XOR and constants are repeated."""
    pytest.importorskip("cutlass")
    from flash_cute.sm80.warp_pairs import WarpPairs

    config = ForwardConfigSm80(16 * warps, tile_n, num_warps=warps, shares_rows=True)
    pairs, places = WarpPairs(spec_of(256), config), {}
    layout = pairs.layout
    panels = range(0, layout.cols, layout.panel)
    for thread, panel, within, r in itertools.product(
        range(32 * warps), panels, range(layout.chunks), range(4)
    ):
        address = 2 * pairs.own_place(thread) ^ 16 * within
        address += 2 * (panel * layout.rows + 8 * r * layout.panel)
        row = thread // 32 * 32 + thread % 32 // 4 + 8 * r
        assert places.setdefault(address, (row, panel + 8 * within + 2 * (thread % 4)))[0] == row
    assert len(places) == layout.size // 2
    assert len({2 * pairs.own_place(thread) // 4 % 32 for thread in range(32)}) == 32  # banks
    for thread, m, k in itertools.product(range(32 * warps), range(2), range(layout.cols // 16)):
        turned = [2 * pairs.other_place(thread) ^ 16 * c for c in range(0, layout.chunks, 2)]
        address, constant = layout.matrices(turned, 16 * m, 2 * k)
        row = (thread // 32 ^ 1) * 32 + 16 * m + thread % 16
        assert places[address + constant] == (row, 16 * k + thread % 32 // 16 * 8)


# ---- Configs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_chosen_configs_obey_the_rules_of_every_arch(dims: tuple[int, int], arch: str):
    most = Target.from_arch(arch).smem_bytes
    for features, few_rows in itertools.product([{}, {"is_causal": True}, *FEATURES], (None, 8)):
        config, spec = choose(spec_of(*dims, **features), facts(arch, few_rows))
        assert config.check(spec) == [] and config.smem_limit == most
        assert config.smem_bytes(spec) * config.ctas_per_sm <= most


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("block", [(128, 128), (64, 64), (256, 96), (64, 16), (320, 48)], ids=str)
def test_tiles_divide_the_blocks_of_a_mask(block: tuple[int, int], dims: tuple[int, int], arch):
    spec = spec_of(*dims, has_block_mask=True)
    config = choose_config(spec, facts(arch, block_size=block))
    assert config.divides(block, spec) and not config.check(spec)


def test_small_shared_memory_gets_small_tiles():
    for d, large, small in ((128, (128, 64), (128, 32)), (256, (128, 64), (128, 32))):
        spec = spec_of(d)
        assert choose_config(spec, facts("sm_80")).tile == large
        assert {choose_config(spec, facts(arch)).tile for arch in SMALL} == {small}


@pytest.mark.parametrize(("num_splits", "tile"), [(1, (128, 128)), (0, (128, 64))])
def test_the_largest_tile_is_for_keys_that_stay_whole(
    monkeypatch: pytest.MonkeyPatch, num_splits: int, tile: tuple[int, int]
):
    """Also over a cache, where few queries would be a decode step."""
    monkeypatch.setattr(selection, "KERNELS", selection.preferring(selection.SM80))
    sizes = dict(batch=2, seqlen_q=1024, seqlen_k=8192, num_heads_q=8, num_heads_kv=8)
    dims = dict(head_dim=256, head_dim_v=256, dtype=torch.bfloat16, device="cuda")
    problem = AttentionProblem(**sizes, **dims, num_splits=num_splits, has_seqused_k=True)
    assert selection.key_for(problem, H200).config.tile == tile


def test_few_queries_leave_room_for_keys_under_way():
    config = choose_config(spec_of(128), facts("sm_90a", few_rows=8))
    assert (config.tile_m, config.num_stages, config.ctas_per_sm) == (64, 3, 2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ForwardConfigSm80(96, 64), "tile_m is 96 with 4 warps"),
        (ForwardConfigSm80(128, 64, num_warps=2), "tile_m is 128 with 2 warps"),
        (ForwardConfigSm80(128, 40), "tile_n is 40"),
        (ForwardConfigSm80(128, 64, num_stages=0), "num_stages is 0"),
        (ForwardConfigSm80(128, 64, num_stages=9), "shared memory is 328704 bytes, at most 166912"),
        (ForwardConfigSm80(128, 64, ctas_per_sm=3), "shared memory is 66560 bytes, at most"),
        (ForwardConfigSm80(128, 128), "registers of O, S and Q are 256, at most 204"),
    ],
)
def test_broken_configs_are_named(config: ForwardConfigSm80, message: str):
    assert any(message in rule for rule in config.check(spec_of()))


def test_warps_share_rows_where_values_are_widest():
    """K and V then pass from shared memory to registers half as often."""
    for is_causal in (False, True):
        config = choose_config(spec_of(256, is_causal=is_causal), facts("sm_80"))
        assert config.shares_rows and config.rows_per_warp == 32 and config.keys_per_warp == 32
        assert config.registers(spec_of(256)) == 160
        for plain in (spec_of(128, is_causal=is_causal), spec_of(256, 128, is_causal=is_causal)):
            assert not choose_config(plain, facts("sm_80")).shares_rows
    for arch in SMALL:  # no room for P
        assert not choose_config(spec_of(256), facts(arch)).shares_rows


@pytest.mark.parametrize(
    ("config", "dims"),
    [
        (ForwardConfigSm80(128, 32, num_warps=8, shares_rows=True), (256, 256)),
        (ForwardConfigSm80(128, 64, num_warps=4, shares_rows=True), (128, 128)),
        (ForwardConfigSm80(128, 64, num_warps=8, shares_rows=True), (192, 192)),
    ],
)
def test_pairs_of_warps_need_whole_panels(config: ForwardConfigSm80, dims: tuple[int, int]):
    rule = "two warps share rows: expected 32 rows each"
    assert any(rule in broken for broken in config.check(spec_of(*dims)))


def test_warps_are_skipped_in_steps_of_decoding():
    assert choose_config(spec_of(), facts(few_rows=8)).skips_warps
    assert not choose_config(spec_of(), facts()).skips_warps
    lists = spec_of(has_block_mask=True)
    assert not choose_config(lists, facts(few_rows=8)).skips_warps
    config = ForwardConfigSm80(64, 64, skips_warps=True)
    assert any("cannot follow lists of blocks" in broken for broken in config.check(lists))


def test_features_that_a_config_cannot_run_are_named():
    config = ForwardConfigSm80(128, 64)
    pages = ForwardSpecialization("bf16", 128, 128, False, True, page_rows=16)
    for spec, message in (
        (pages, "rows of a page's load are 16, expected 1 (gathered)"),
        (spec_of(pack_heads=17), "heads a tile are 17, at most 16"),
        (spec_of(is_split=True, has_lse=False), "lse is needed"),
    ):
        assert any(message in rule for rule in config.check(spec))


def test_a_broken_config_is_refused_before_tracing():
    fwd = pytest.importorskip("flash_cute.sm80.fwd")
    with pytest.raises(InvalidProblem, match="tile_n is 40"):
        fwd.FlashAttentionForwardSm80(spec_of(), ForwardConfigSm80(128, 40))


# ---- Compiles ------------------------------------------------------------------------------------


def cells():
    for d, dv in DIMS:
        for is_causal in (False, True):
            yield spec_of(d, dv, is_causal=is_causal)
    yield ForwardSpecialization("fp16", 128, 128, True, False)
    yield ForwardSpecialization("fp16", 64, 64, False, True, negate_scores=True)
    for (d, dv), features in itertools.product(((64, 64), (128, 128), (256, 256)), FEATURES):
        yield spec_of(d, dv, **PLAIN | features)


def compiled(spec: ForwardSpecialization, config: ForwardConfigSm80, arch: str):
    """The report of a compile without spills that fits the shared memory of an arch."""
    pytest.importorskip("cutlass")
    from flash_cute.compile import inspect_kernel
    from flash_cute.sm80.fwd import FlashAttentionForwardSm80

    report = inspect_kernel(FlashAttentionForwardSm80(spec, config), arch)
    if report.missing:
        pytest.skip("; ".join(report.missing))
    is_newest, on_hopper = Target.from_arch(arch).capability[0] == 12, arch == "sm_90a"
    # With the two stages that fit on Hopper, where the kernel is but tested and measured, a tile's
    # first block takes a word too many.
    words = 1 if on_hopper and spec.tile_d == 128 else 0
    checks.assert_no_spills(report, words, stack_bytes=64 if is_newest else 8 if on_hopper else 0)
    threads = config.num_threads * config.ctas_per_sm
    assert report.registers is not None and report.registers * threads <= 65_536
    assert report.smem_bytes is not None
    # From compute capability 9 on what the driver keeps for itself is counted as static.
    kept = 1024 if Target.from_arch(arch).capability[0] >= 9 else 0
    assert report.smem_bytes <= Target.from_arch(arch).smem_bytes + kept
    assert f".entry {report.name}" in report.ptx
    return report


@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("spec", list(cells()), ids=lambda spec: spec.label)
def test_cell_compiles_without_spills(spec: ForwardSpecialization, arch: str):
    block_size = (128, 128) if spec.has_block_mask else None
    config, spec = choose(spec, facts(arch, block_size=block_size))
    compiled(spec, config, arch)


@pytest.mark.compile
@pytest.mark.parametrize("arch", SMALL)
@pytest.mark.parametrize("dims", [*((d, d) for d in TILE_HEAD_DIMS), (192, 128)], ids=str)
def test_small_tiles_compile_without_spills(dims: tuple[int, int], arch: str):
    for features in ({}, {"is_causal": True}, {"has_seqused_k": True, "page_rows": 1}):
        spec = spec_of(*dims, **features)
        compiled(spec, choose_config(spec, facts(arch)), arch)


@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm_87", "sm_121a"])
def test_kin_of_other_archs_compile_without_spills(arch: str):
    for d in (64, 128, 256):
        spec = spec_of(d, is_causal=True)
        compiled(spec, choose_config(spec, facts(arch)), arch)


@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a"])
@pytest.mark.parametrize("dims", [*((d, d) for d in TILE_HEAD_DIMS), (192, 128)], ids=str)
def test_tiles_for_decoding_compile_without_spills(dims: tuple[int, int], arch: str):
    features = {"has_seqused_k": True, "page_rows": 1, "pack_heads": 8, "is_split": True}
    for spec in (spec_of(*dims, is_causal=True), spec_of(*dims, **features)):
        config, spec = choose(spec, facts(arch, few_rows=8))
        compiled(spec, config, arch)


@pytest.mark.compile
def test_other_stages_and_kept_queries_compile_without_spills():
    for config in (
        ForwardConfigSm80(128, 64, keeps_q=True, ctas_per_sm=2),
        ForwardConfigSm80(128, 64, num_stages=2, ctas_per_sm=2),
        ForwardConfigSm80(128, 32, num_stages=3, ctas_per_sm=2),
    ):
        compiled(spec_of(64, is_causal=True), config, "sm_80")


@pytest.mark.compile
def test_copies_are_asynchronous_and_products_are_of_a_warp():
    ptx = compiled(spec_of(64), ForwardConfigSm80(128, 64), "sm_80").ptx
    assert "ldmatrix.sync.aligned.m8n8.x4.trans" in ptx
    assert "mma.sync.aligned.m16n8k16" in ptx and "cp.async.cg.shared.global" in ptx
    assert ".shared .align 1024" in ptx  # an XOR finds the chunks


# ---- The tests on a GPU --------------------------------------------------------------------------


def test_few_cases_hold_every_value():
    sizes = [checks.Case(1, 2, 2, rows, 64, 64) for rows in (1, 70, 129)]
    pairs = list(itertools.product(sizes, ({"mask": 1}, {"mask": 2, "cap": 3}), (64, 128)))
    cases = [dict(zip(("case", "options", "dim"), values, strict=True)) for values in pairs]
    chosen = covering.each_value_once(cases)
    assert len(chosen) == 3 and chosen == sorted(set(chosen))
    held = [covering.values_of(cases[i]) for i in chosen]
    assert set().union(*held) == set().union(*map(covering.values_of, cases))
    assert {("case.seqlen_q", "70"), ("options.cap", "3")} <= set().union(*held)
    assert covering.each_value_once([{}]) == [0]


# ---- Launches ------------------------------------------------------------------------------------


def problem(**changes) -> AttentionProblem:
    sizes = dict(batch=2, seqlen_q=4096, seqlen_k=4096, num_heads_q=8, num_heads_kv=8)
    dims = dict(head_dim=128, head_dim_v=128)
    kind = dict(dtype=torch.bfloat16, device=torch.device("cuda", 0))
    return AttentionProblem(**{**kind, **sizes, **dims, **changes})


@pytest.mark.parametrize("arch", selection.SM80.archs)
def test_it_runs_where_it_is_declared(arch: str):
    key = selection.key_for(problem(causal=True), Target.from_arch(arch))
    assert key.kernel == "FlashAttentionForwardSm80" and key.arch == arch
    assert isinstance(key.config, ForwardConfigSm80)


def test_on_hopper_only_its_class_asks_for_it():
    fwd = pytest.importorskip("flash_cute.sm80.fwd")
    kernel = fwd.FlashAttentionForwardSm80
    assert selection.key_for(problem(), H200).kernel == "FlashAttentionForwardSm90"
    key = selection.key_for(problem(), H200, kernel)
    assert type(key) is selection.KernelKey and key.kernel == "FlashAttentionForwardSm80"
    assert key.config.smem_limit == H200.smem_bytes
    assert selection.kernel_for(key).name.startswith("flash_fwd_sm80_bf16_d128_m128n64")
    with pytest.raises(UnsupportedProblem, match="Sm80 lacks runs on .*sm_120a, sm_121a, not on"):
        selection.key_for(problem(), Target.from_arch("sm_100a"), kernel)


def test_a_subclass_is_keyed_and_built_by_its_own_base():
    fwd = pytest.importorskip("flash_cute.sm80.fwd")

    class Half(fwd.FlashAttentionForwardSm80):
        """Tiles of 64 queries."""

        @classmethod
        def config_for(cls, spec, config):
            return dataclasses.replace(config, tile_m=64)

    key = selection.key_for(problem(), A100, Half)
    assert isinstance(key, selection.SubclassKey) and key.config.tile_m == 64
    assert selection.kernel_for(key).name.startswith("flash_fwd_sm80_Half_bf16_d128_m64")


def test_a_subclass_with_weights_of_its_own_has_all_columns_of_a_row_in_a_warp():
    fwd = pytest.importorskip("flash_cute.sm80.fwd")

    class Weights(fwd.FlashAttentionForwardSm80):
        """Weights of its own."""

        def next_weights(self, *args):
            """Nothing."""

    class Scores(fwd.FlashAttentionForwardSm80):
        """Steps before the weights."""

        def modify_scores(self, *args):
            """Nothing."""

    wide = problem(head_dim=256, head_dim_v=256)
    assert not selection.key_for(wide, A100, Weights).config.shares_rows
    assert selection.key_for(wide, A100, Scores).config.shares_rows
    assert selection.key_for(wide, A100).config.shares_rows


@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 256])
def test_keys_in_pages_are_gathered_whatever_their_size(page_size: int):
    key = selection.key_for(problem(page_size=page_size, num_heads_kv=2, seqlen_q=1), A100)
    assert key.spec.page_rows == 1 and not key.config.check(key.spec)


def test_multiprocessors_cannot_be_left_to_others():
    with pytest.raises(UnsupportedProblem, match=r"Sm80 lacks sm_margin 8 \(has 0: a CTA for"):
        selection.key_for(problem(sm_margin=8), A100)
    assert selection.is_supported(problem(sm_margin=8), H200).backend.endswith("Sm90")


def test_every_feature_of_hopper_is_there():
    assert (
        selection.SM80.features == selection.SM90.features >= {Feature.SPLIT_KV, Feature.PAGED_KV}
    )


def zeros(*shape: int) -> torch.Tensor:
    return toy_gpu.on_gpu(torch.zeros(shape, dtype=torch.bfloat16))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> toy_gpu.Launches:
    made = toy_gpu.install(monkeypatch)
    monkeypatch.setattr(selection, "current_target", lambda device: A100)
    return made


def test_every_tile_has_a_cta_and_none_is_counted(launches: toy_gpu.Launches):
    q, k, v = zeros(3, 1000, 6, 128), zeros(3, 700, 2, 128), zeros(3, 700, 2, 128)
    out = flash_attn_func(q, k, v, causal=True)
    assert out.shape == q.shape
    key, args = launches.launched[-1], launches.named
    assert key.kernel == "FlashAttentionForwardSm80"
    tiles = 3 * 6 * -(-1000 // key.config.tile_m)
    assert (args.num_ctas, args.tile_counter) == (tiles, 0)
    flash_attn_func(q, k, v, causal=True)  # by the plan that was made
    assert launches.looked_up == [key] and launches.named == args._replace(out=launches.named.out)


def test_packed_sequences_have_ctas_for_the_most_tiles_they_can_have(launches: toy_gpu.Launches):
    starts = toy_gpu.on_gpu(torch.tensor([0, 130, 130, 400], dtype=torch.int32))
    q, k, v = zeros(400, 4, 128), zeros(400, 4, 128), zeros(400, 4, 128)
    flash_attn_varlen_func(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts)
    tile_m = launches.launched[-1].config.tile_m
    assert launches.named.num_ctas == (400 // tile_m + 3) * 4
    assert launches.named.tile_counter == 0


@pytest.mark.parametrize("arch", selection.SM80.archs)
def test_a_step_of_serving_is_four_kernels_of_the_same_arch(
    launches: toy_gpu.Launches, arch: str, monkeypatch: pytest.MonkeyPatch
):
    """New keys, rotary, pages and parts that are counted."""
    target = Target.from_arch(arch)
    monkeypatch.setattr(selection, "current_target", lambda device: target)
    scheduling._kept.clear()
    batch, pages, size, dim = 3, 4, 64, 128
    int32 = lambda *shape: toy_gpu.on_gpu(torch.zeros(shape, dtype=torch.int32))
    step = dict(k=zeros(batch, 1, 2, dim), v=zeros(batch, 1, 2, dim), causal=True)
    step |= dict(rotary_cos=zeros(300, dim // 2), rotary_sin=zeros(300, dim // 2))
    step |= dict(page_table=int32(batch, 64), cache_seqlens=int32(batch))
    caches = [zeros(pages, size, 2, dim) for _ in range(2)]
    flash_attn_with_kvcache(zeros(batch, 1, 8, dim), *caches, **step)
    kinds = [type(key).__name__ for key in launches.launched]
    assert kinds == ["AppendKey", "PlannerKey", "KernelKey", "CombineKey"]
    assert {key.arch for key in launches.launched} == {arch}
    attention = launches.launched[2]
    assert attention.kernel == "FlashAttentionForwardSm80"
    assert attention.spec.pack_heads == 4 and attention.config.smem_limit == target.smem_bytes


def test_split_keys_are_merged(launches: toy_gpu.Launches):
    q, k, v = zeros(2, 1, 8, 64), zeros(2, 4096, 2, 64), zeros(2, 4096, 2, 64)
    out = flash_attn_func(q, k, v, num_splits=3)
    attention, merge = launches.launched
    assert out.shape == q.shape and attention.spec.is_split and merge.arch == "sm_80"
    packs = 2 * -(-4 // attention.spec.pack_heads)
    assert launches.looked_up == [attention, merge] and packs == 2
