"""Selection: declared against required features, and what does and does not make another kernel."""

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch

from flash_cute import (
    AttentionProblem,
    Feature,
    InvalidProblem,
    Target,
    UnsupportedProblem,
    selection,
)
from flash_cute.sm90 import config as sm90
from flash_cute.sm90.config import ForwardConfigSm90
from flash_cute.specialization import ForwardSpecialization
from flash_cute.target import KNOWN_ARCHS

H200 = Target.from_arch("sm_90a")


def problem(**changes) -> AttentionProblem:
    sizes = dict(batch=2, seqlen_q=4096, seqlen_k=4096, num_heads_q=8, num_heads_kv=8)
    dims = dict(head_dim=128, head_dim_v=128)
    kind = dict(dtype=torch.bfloat16, device=torch.device("cuda", 0))
    return AttentionProblem(**{**kind, **sizes, **dims, **changes})


def key(**changes):
    return selection.key_for(problem(**changes), H200)


@pytest.mark.parametrize(
    "change",
    [
        dict(batch=7),
        dict(seqlen_q=5),
        dict(seqlen_k=5000),
        dict(num_heads_q=16),
        dict(num_heads_kv=2),
        dict(softmax_scale=0.5),
        dict(softmax_scale=0.0),
        dict(head_dim=120, head_dim_v=120),  # the same tile
        dict(pack_gqa=False),
        dict(num_splits=0),
        dict(window_left=None, window_right=None),
    ],
    ids=str,
)
def test_runtime_numbers_share_a_kernel(change):
    assert key(**change) == key()


@pytest.mark.parametrize(
    "change",
    [
        dict(dtype=torch.float16),
        dict(causal=True),
        dict(return_lse=True),
        dict(head_dim=192),
        dict(head_dim=64, head_dim_v=64),
        dict(softmax_scale=-0.5),
        dict(window_left=5),
        dict(window_right=5),
        dict(attention_chunk=64),
        dict(softcap=3.0),
        dict(has_sink=True),
        dict(is_packed_q=True),
        dict(is_packed_k=True),
        dict(has_seqused_q=True),
        dict(has_seqused_k=True),
    ],
    ids=str,
)
def test_what_shapes_code_makes_another_kernel(change):
    assert key(**change) != key()


def test_causal_has_one_spelling_in_the_key():
    causal = key(causal=True)
    assert key(window_left=None, window_right=0) == causal
    assert key(causal=True, window_left=-1, window_right=5) == causal


@pytest.mark.parametrize(
    "one, other",
    [
        (dict(window_left=5), dict(window_left=500)),
        (dict(window_left=5, window_right=7), dict(window_left=-3, window_right=1)),
        (dict(attention_chunk=64), dict(attention_chunk=100)),
        (dict(softcap=3.0), dict(softcap=50.0, softmax_scale=-1.0)),
        (dict(is_packed_k=True, seqlen_k=100), dict(is_packed_k=True, seqlen_k=100_000)),
    ],
    ids=str,
)
def test_numbers_of_a_feature_share_a_kernel(one, other):
    base = dict(head_dim=64, head_dim_v=64, causal=True)
    assert key(**base, **one) == key(**base, **other)


def test_sink_dtypes_shape_code_and_others_become_fp32():
    of = lambda dtype: key(has_sink=True, sink_dtype=dtype).spec.sink_dtype
    assert [of(torch.bfloat16), of(torch.float16), of(torch.float32)] == ["bf16", "fp16", "fp32"]
    assert of(torch.float64) == "fp32"


def test_short_keys_under_a_causal_mask_take_another_tile():
    dims = dict(head_dim=64, head_dim_v=64, causal=True)
    assert key(**dims, seqlen_k=1024).config.tile_m == 128
    assert key(**dims, seqlen_k=4096).config.tile_m == 192


def test_refusal_lists_what_each_kernel_lacks():
    with pytest.raises(UnsupportedProblem) as caught:
        key(requires_grad=True, has_qv=True, pack_gqa=True, num_heads_kv=2)
    assert "FlashAttentionForwardSm90 lacks gradient; qv" in str(caught.value)
    assert "sm_90a" in str(caught.value)


def test_refusal_of_gradients_says_no_grad():
    with pytest.raises(UnsupportedProblem, match=r"torch\.no_grad\(\)"):
        key(requires_grad=True)


@pytest.mark.parametrize("dim, nearest", [(46, 48), (4, 8), (264, 256), (300, 256)])
def test_refusal_of_a_head_dim_names_the_nearest(dim, nearest):
    with pytest.raises(UnsupportedProblem, match=f"head_dim {dim} .*nearest {nearest}"):
        key(head_dim=dim, head_dim_v=dim)


def test_refusal_of_a_wider_v():
    with pytest.raises(UnsupportedProblem, match="head_dim_v 128 above head_dim 64"):
        key(head_dim=64, head_dim_v=128)


@pytest.mark.parametrize("arch", KNOWN_ARCHS)
def test_each_arch_has_its_kernel(arch):
    target = Target.from_arch(arch)
    sm80, sm90 = "FlashAttentionForwardSm80", "FlashAttentionForwardSm90"
    sm100 = "FlashAttentionForwardSm100"
    expected = {8: sm80, 9: sm90, 10: sm100, 12: sm80}[target.capability[0]]
    for changes in ({}, dict(causal=True, page_size=16, num_splits=3), dict(has_block_mask=True)):
        answer = selection.is_supported(problem(**changes), target)
        assert answer and answer.backend == expected


@pytest.mark.parametrize("arch", ["sm_80", "sm_120a"])
def test_refusal_of_qv_off_hopper_says_what_does_it(arch):
    """The kernel that has it and where that runs; what would do without it."""
    large = dict(head_dim=64, head_dim_v=512, has_qv=True)
    small = dict(head_dim=64, head_dim_v=128, has_qv=True)
    reasons = [
        selection.is_supported(problem(**dims), Target.from_arch(arch)).reason
        for dims in (large, small, {**small, "is_only_qv": True})
    ]
    for reason in reasons:
        assert f"FlashAttentionMlaSm90 lacks runs on sm_90a, not on {arch}" in reason
        assert "FlashAttentionForwardSm80 lacks qv" in reason and ".cpu()" in reason
        assert "FlashAttentionForwardSm90" not in reason
    joined = "FlashAttentionForwardSm80 does q with qv, and k with v, concatenated to 192 channels"
    assert [joined in reason for reason in reasons] == [False, True, False]


def test_a_kernel_that_is_preferred_comes_first_where_it_runs(monkeypatch):
    monkeypatch.setattr(selection, "KERNELS", selection.preferring(selection.SM80))
    assert key().kernel == "FlashAttentionForwardSm80"
    qv = dict(head_dim=64, head_dim_v=512, has_qv=True)
    assert key(**qv).kernel == "FlashAttentionMlaSm90"
    reason = selection.is_supported(problem(head_dim=264, head_dim_v=264), H200).reason
    assert reason.count("FlashAttentionForwardSm80") == 1


def test_every_feature_not_declared_is_refused():
    asking = {
        Feature.WINDOW: dict(window_left=3),
        Feature.ATTENTION_CHUNK: dict(attention_chunk=64),
        Feature.SOFTCAP: dict(softcap=1.0),
        Feature.SINK: dict(has_sink=True),
        Feature.VARLEN: dict(is_packed_q=True, is_packed_k=True),
        Feature.SEQUSED: dict(has_seqused_k=True),
        Feature.PAGED_KV: dict(page_size=16),
        Feature.SPLIT_KV: dict(num_splits=3),
        Feature.PACK_GQA: dict(pack_gqa=True, num_heads_kv=2),
        Feature.SCORE_MOD: dict(has_score_mod=True),
        Feature.MASK_MOD: dict(has_mask_mod=True),
        Feature.BLOCK_SPARSITY: dict(has_block_mask=True),
        Feature.GRADIENT: dict(requires_grad=True),
        Feature.APPEND_KV: dict(has_new_keys=True),
        Feature.ROTARY: dict(has_rotary=True),
        Feature.BATCH_IDX: dict(has_batch_idx=True),
        Feature.LEFTPAD: dict(has_leftpad=True),
        Feature.QV: dict(has_qv=True),
    }
    for feature, change in asking.items():
        answer = selection.is_supported(problem(**change), H200)
        declared = selection.SM90.features | selection.APPEND.features
        assert bool(answer) == (feature in declared), feature
        assert answer or feature.value in answer.reason


def test_a_kernel_class_can_be_asked_for_and_strangers_are_refused():
    pytest.importorskip("cutlass")
    from flash_cute.sm90.fwd import FlashAttentionForwardSm90

    assert selection.key_for(problem(), H200, FlashAttentionForwardSm90) == key()
    with pytest.raises(UnsupportedProblem, match="expected one of FlashAttentionForwardSm90"):
        selection.key_for(problem(), H200, dict)


def specializations() -> Iterator[ForwardSpecialization]:
    dims = [(d, dv) for d, dv in itertools.product(sm90.TILE_HEAD_DIMS, repeat=2) if dv <= d]
    for (d, dv), is_causal in itertools.product(dims, (False, True)):
        yield ForwardSpecialization("bf16", d, dv, is_causal, has_lse=True)


@pytest.mark.parametrize("seqlen_k", [1024, 8192])
@pytest.mark.parametrize("spec", list(specializations()), ids=lambda spec: spec.label)
def test_default_configs_obey_the_rules(spec, seqlen_k):
    assert sm90.default_config(spec, seqlen_k).check(spec) == []


@pytest.mark.parametrize(
    "config, message",
    [
        (ForwardConfigSm90(100, 128), "tile_m is 100"),
        (ForwardConfigSm90(128, 100), "tile_n is 100"),
        (ForwardConfigSm90(128, 256), "shared memory is"),
        (ForwardConfigSm90(192, 128), "registers of"),
        # 64k registers, but more than a CTA of 384 threads is launched with: its consumers hang.
        (ForwardConfigSm90(128, 128, regs_load=32), "512 together, at most 504"),
    ],
)
def test_broken_configs_are_named(config, message):
    spec = ForwardSpecialization("bf16", 128, 128, is_causal=False, has_lse=False)
    assert any(message in rule for rule in config.check(spec))


def test_a_broken_config_is_refused_before_tracing():
    pytest.importorskip("cutlass")
    from flash_cute.sm90.fwd import FlashAttentionForwardSm90

    spec = ForwardSpecialization("bf16", 128, 128, is_causal=False, has_lse=False)
    with pytest.raises(InvalidProblem, match="tile_n is 100"):
        FlashAttentionForwardSm90(spec, ForwardConfigSm90(128, 100))


def test_keys_are_plain_and_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        key().arch = "sm_80"
    assert hash(key()) == hash(key())
