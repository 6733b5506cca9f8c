"""block_mask_from against PyTorch's create_block_mask, list by list; BlockSparseTensors."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import callbacks
import checks
import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from flash_cute import (
    BlockSparseTensors,
    CaptureError,
    InvalidProblem,
    UnsupportedProblem,
    block_mask_from,
    builder,
    cache,
    cache_info,
    clear_cache,
    compile,
    current,
    flash_attn_func,
    flex_attention,
    launch,
    selection,
)
from flash_cute.arguments import BlockBuilderArguments
from flash_cute.selection import BuilderKey
from flash_cute.variant import as_callback
from flash_cute.viz import mask_matrix

LISTS = ("num_blocks", "indices")
NAMES = tuple(f"{kind}_{what}" for kind in ("kv", "full_kv", "q", "full_q") for what in LISTS)


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx - kv_idx).abs() < 90 + 70 * h + 300 * b


def nothing(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx < 0


def everything(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx >= 0


def one_corner(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Visible in the last element of every full block of 128 x 128, and nowhere else."""
    return (q_idx % 128 == 127) & (kv_idx % 128 == 127)


def all_but_one(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx % 128 != 127) | (kv_idx % 128 != 0)


MASKS = [causal, window, nothing, everything, one_corner, all_but_one]


def assert_same_lists(got: BlockMask, expected: BlockMask) -> None:
    """Every list, entry by entry, also behind the counts; sizes and dtypes too."""
    for name in NAMES:
        ours, theirs = getattr(got, name), getattr(expected, name)
        assert ours.dtype == torch.int32 and ours.is_contiguous() and ours.device == theirs.device
        assert ours.shape == theirs.shape, name
        assert torch.equal(ours, theirs), name
    assert got.BLOCK_SIZE == tuple(expected.BLOCK_SIZE)
    assert tuple(got.seq_lengths) == tuple(expected.seq_lengths)
    assert got.mask_mod is expected.mask_mod


def compare(mask_mod: Callable[..., Any], *sizes: Any, device: str = "cpu", block: Any = 128):
    got = block_mask_from(mask_mod, *sizes, device, block)
    expected = create_block_mask(mask_mod, *sizes, device, block)
    assert_same_lists(got, expected)
    return got


# ---- CPU -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", callbacks.MASK_MODS)
@pytest.mark.parametrize("block", [16, (8, 24)], ids=str)
def test_published_masks(name: str, block: Any):
    mask_mod = callbacks.MASK_MODS[name]("cpu")
    compare(mask_mod, callbacks.BATCH, callbacks.HEADS, *[callbacks.SEQLEN] * 2, block=block)


@pytest.mark.parametrize("block", [64, 128, 256, (128, 64), (64, 256), (1, 100)], ids=str)
@pytest.mark.parametrize("mask_mod", MASKS)
def test_ragged_lengths(mask_mod: Any, block: Any):
    compare(mask_mod, None, None, 300, 421, block=block)


@pytest.mark.parametrize("sizes", [(1, 1), (127, 129), (128, 256), (700, 64)], ids=str)
@pytest.mark.parametrize("mask_mod", MASKS)
def test_lengths_around_a_block(mask_mod: Any, sizes: Any):
    compare(mask_mod, None, None, *sizes)


@pytest.mark.parametrize("extents", [(None, 3), (2, None), (2, 3), (1, 1)], ids=str)
def test_batch_and_heads(extents: Any):
    mask = compare(window, *extents, 260, 390, block=64)
    assert mask.kv_num_blocks.shape[:2] == tuple(1 if e is None else e for e in extents)


@pytest.mark.parametrize("sizes", [(0, 300), (300, 0), (0, 0)], ids=str)
def test_zero_lengths(sizes: Any):
    compare(causal, 2, None, *sizes)
    compare(causal, 0, 2, *sizes)


def check_one_large_block(device: str) -> None:
    """PyTorch pads to whole blocks, and has no memory for one like this."""
    mask = block_mask_from(everything, None, None, 100, 100, device, 2**30)
    assert [getattr(mask, name).tolist() for name in NAMES] == [[[[1]]], [[[[0]]]], [[[0]]]] + [
        [[[[0]]]], [[[1]]], [[[[0]]]], [[[0]]], [[[[0]]]]
    ]  # fmt: skip


def test_a_block_larger_than_everything_is_never_full():
    check_one_large_block("cpu")


def test_arguments_are_named_and_ordered_as_in_pytorch():
    by_name = block_mask_from(
        causal, batch=None, num_heads=2, seqlen_q=200, seqlen_k=100, device="cpu", block_size=64
    )
    assert_same_lists(by_name, block_mask_from(causal, None, 2, 200, 100, "cpu", (64, 64)))
    if not torch.accelerator.is_available():
        assert block_mask_from(causal, None, None, 8, 8).kv_indices.device.type == "cpu"


def test_never_more_than_one_row_of_blocks_is_evaluated():
    seen: list[int] = []

    def counted(*args: Any) -> torch.Tensor:
        result = visible_rows(*args)
        seen.append(result.numel())
        return result

    visible_rows = builder.visible_rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "visible_rows", counted)
        compare(causal, None, None, 1000, 2000, block=64)
    assert max(seen) == 64 * 2000


def test_pytorch_and_we_take_the_result(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    q, k, v = (
        torch.randn(2, 4, 64, 16, generator=torch.Generator().manual_seed(i)) for i in range(3)
    )
    mask_mod = callbacks.MASK_MODS["some_heads_local"]("cpu")
    mask = block_mask_from(mask_mod, 2, 4, 64, 64, "cpu", 16)
    expected = torch_flex.flex_attention(q, k, v, block_mask=mask)
    got = flex_attention(q, k, v, block_mask=mask)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)


def native(b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
    return q_idx + seqlen_info.seqlen_k - seqlen_info.seqlen_q >= kv_idx


def returns_numbers(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx - kv_idx


REFUSED = {
    "negative length": ((causal, 1, 1, -1, 8), InvalidProblem, "seqlen_q is -1, expected an int"),
    "a float": ((causal, 1, 1, 8, 8.0), InvalidProblem, "seqlen_k is 8.0, expected an int"),
    "a bool": ((causal, True, 1, 8, 8), InvalidProblem, "batch is True, expected an int"),
    "heads": ((causal, 1, "2", 8, 8), InvalidProblem, "num_heads is '2', expected an int"),
    "block": ((causal, 1, 1, 8, 8, "cpu", 0), InvalidProblem, "block_size is 0, expected a pos"),
    "pair": ((causal, 1, 1, 8, 8, "cpu", (8,)), InvalidProblem, "block_size is (8,), expected"),
    "device": ((causal, 1, 1, 8, 8, "meta"), InvalidProblem, "device is meta, expected cuda or"),
    "no mask": ((None, 1, 1, 8, 8, "cpu"), InvalidProblem, "mask_mod is of type NoneType, exp"),
    "score_mod": ((callbacks.noop, 1, 1, 8, 8, "cpu"), InvalidProblem, "mask_mod is a function"),
    "numbers": ((returns_numbers, 1, 1, 8, 8, "cpu"), InvalidProblem, "mask_mod returned torch.i"),
    "native": ((native, 1, 1, 8, 8, "cpu"), UnsupportedProblem, "mask_mod is in the native form"),
}  # fmt: skip


@pytest.mark.parametrize(("args", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_wrong_arguments_are_refused(args: Any, error: type[Exception], message: str):
    with pytest.raises(error) as caught:
        block_mask_from(*args)
    assert str(caught.value).startswith(message)


# ---- Kernels without a GPU -----------------------------------------------------------------------


def key_of(mask_mod: Any, arch: str = "sm_90a", keys_per_lane: int = 4) -> BuilderKey:
    return BuilderKey(arch, as_callback(mask_mod, "mask_mod").key, keys_per_lane)


ON_SM80 = {"causal": 4, "document_causal": 1, "hashed": 4, "natten_tiled": 2}


@pytest.mark.compile
@pytest.mark.parametrize(
    ("name", "arch", "keys_per_lane"),
    [(name, "sm_90a", 4) for name in callbacks.MASK_MODS]
    + [(name, "sm_80", keys) for name, keys in ON_SM80.items()],
)
def test_kernels_compile_without_spills(name: str, arch: str, keys_per_lane: int):
    pytest.importorskip("cutlass")
    kernel = selection.kernel_for(key_of(callbacks.MASK_MODS[name]("cpu"), arch, keys_per_lane))
    report = compile.inspect_kernel(kernel, arch)
    if report.missing:
        pytest.skip("; ".join(report.missing))
    checks.assert_no_spills(report)
    assert report.registers is not None and report.registers <= 96
    assert f".entry {kernel.name}" in report.ptx and ".entry flash_block_lists" in report.ptx


@pytest.mark.compile
def test_native_masks_and_captured_numbers_compile():
    pytest.importorskip("cutlass")
    size = torch.tensor(100)  # 0-dim: loaded once, before the elements
    for mask_mod in (native, lambda b, h, q_idx, kv_idx: q_idx - kv_idx < size):
        report = compile.inspect_kernel(selection.kernel_for(key_of(mask_mod)), "sm_90a")
        assert report.stack_bytes in (0, None)


@pytest.mark.compile
def test_what_cannot_be_compiled_names_the_line():
    pytest.importorskip("cutlass")

    def odd(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.fft.fft(q_idx) >= kv_idx

    with pytest.raises(UnsupportedProblem, match=r"test_block_mask_from.py:\d+ .*fft"):
        compile.inspect_kernel(selection.kernel_for(key_of(odd)), "sm_90a")


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    """The host side of a GPU, its memory on the CPU; nothing can be launched."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: the tests below run on it")
    monkeypatch.setenv("FLASH_CUTE_ARCH", "sm_80")
    monkeypatch.setenv("FLASH_CUTE_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(cache, "_memory", {})
    monkeypatch.setattr(builder, "_device", lambda device: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(current, "raw_stream", lambda index: 0)
    monkeypatch.setattr(
        current, "empty", lambda size, strides, dtype: torch.empty(size, dtype=dtype)
    )
    monkeypatch.setattr(current, "is_capturing", lambda: False)


def test_launch_arguments_are_those_of_the_result(fake_gpu: None, monkeypatch: pytest.MonkeyPatch):
    calls: list[BlockBuilderArguments] = []
    keys: list[BuilderKey] = []

    def ready(key: BuilderKey) -> Any:
        keys.append(key)
        return lambda *args: calls.append(BlockBuilderArguments(*args))

    monkeypatch.setattr(launch, "ready_executable", ready)
    mask = block_mask_from(causal, 2, 3, 300, 421, "cuda", (64, 2**30))
    (args,), (key,) = calls, keys
    addresses = {
        f"{kind}_{lines}_{what}": getattr(mask, f"{prefix}{side}_{name}").data_ptr()
        for kind, prefix in (("partial", ""), ("full", "full_"))
        for lines, side in (("rows", "kv"), ("cols", "q"))
        for what, name in (("counts", "num_blocks"), ("indices", "indices"))
    }
    assert addresses.items() <= args._asdict().items()
    assert args[9:13] == (2, 3, 5, 1) and args[13:] == (64, 2**25, 300, 421, 0)
    assert (key.arch, key.keys_per_lane) == ("sm_80", 4)
    assert mask.kv_indices.shape == (2, 3, 5, 1) and mask.q_indices.shape == (2, 3, 1, 5)
    block_mask_from(causal, None, None, 50, 50, "cuda", 48)
    assert keys[-1].keys_per_lane == 2
    mask = block_mask_from(causal, 2, None, 0, 300, "cuda")
    assert len(calls) == 2, "nothing is launched where there is nothing to do"
    assert mask.q_num_blocks.tolist() == [[[0] * 3]] * 2 and mask.kv_indices.shape == (2, 1, 0, 3)


def test_host_refuses_before_compiling(fake_gpu: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "ready_executable", lambda key: pytest.fail("compiled"))
    table = torch.zeros(4)
    with pytest.raises(InvalidProblem, match=r"captures 'table' on cpu, expected cuda:0 \(device "):
        block_mask_from(lambda b, h, q_idx, kv_idx: table[h] > 0, 1, 1, 8, 8, "cuda")
    with pytest.raises(UnsupportedProblem, match="indices up to 16777216 only"):
        block_mask_from(causal, 1, 1, 2**24 + 1, 8, "cuda")
    with pytest.raises(UnsupportedProblem, match="block mask of 1099511627776 blocks"):
        block_mask_from(causal, 1, 1, 2**20, 2**20, "cuda", 1)


@pytest.mark.compile
def test_a_first_call_in_a_capture_is_refused(fake_gpu: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(current, "is_capturing", lambda: True)
    with pytest.raises(CaptureError, match="BuilderKey"):
        block_mask_from(causal, 1, 1, 8, 8, "cuda")


@pytest.mark.compile
def test_kernels_are_cached_and_take_what_the_host_passes(fake_gpu: None):
    pytest.importorskip("cutlass")
    before = cache_info()
    for _ in range(3):  # compiled, then in memory
        with pytest.raises(RuntimeError, match="cudaErrorInsufficientDriver|cudaErrorNoDevice"):
            block_mask_from(causal, 1, 1, 300, 300, "cuda")
    clear_cache(disk=False)
    with pytest.raises(RuntimeError, match="cudaErrorInsufficientDriver|cudaErrorNoDevice"):
        block_mask_from(causal, 1, 1, 500, 900, "cuda", 256)  # sizes are no part of the key
    after = cache_info()
    assert (after.compiles - before.compiles, after.disk_hits - before.disk_hits) == (1, 1)
    assert after.entries == 1


# ---- BlockSparseTensors --------------------------------------------------------------------------


def tensors_of(mask: BlockMask, **changes: Any) -> BlockSparseTensors:
    lists = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    mine = BlockSparseTensors(*lists, mask.BLOCK_SIZE, mask.mask_mod)
    return dataclasses.replace(mine, **changes)


ROWS, KEYS, HEADS = 200, 300, 3


def operands(device: str = "cpu", rows: int = ROWS, keys: int = KEYS, d: int = 64):
    case = checks.Case(2, HEADS, 1 if device == "cuda" else HEADS, rows, keys, d)
    return checks.gaussian(case, device)


@pytest.mark.parametrize("extents", [(None, None), (2, 3), (2, None)], ids=str)
def test_tensors_give_the_result_of_the_block_mask(extents: Any):
    mask = block_mask_from(window, *extents, ROWS, KEYS, "cpu", (64, 32))
    tensors = operands()
    expected = flash_attn_func(*tensors, block_mask=mask, return_lse=True)
    got = flash_attn_func(*tensors, block_mask=tensors_of(mask), return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    flat = [tensor.transpose(1, 2) for tensor in tensors]
    out = flex_attention(*flat, block_mask=tensors_of(mask), scale=0.125)
    assert torch.equal(out, flex_attention(*flat, block_mask=mask, scale=0.125))


def test_tensors_without_full_blocks_and_without_a_mask_mod():
    count = torch.tensor([[[1, 2]]], dtype=torch.int32)
    index = torch.tensor([[[[1, 7], [0, 1]]]], dtype=torch.int32)
    mine = BlockSparseTensors(count, index, block_size=128)
    assert mine.block_size == (128, 128)
    tensors = operands(keys=256)
    shown = lambda b, h, q_idx, kv_idx: (q_idx >= 128) | (kv_idx >= 128)
    assert torch.equal(
        flash_attn_func(*tensors, block_mask=mine), flash_attn_func(*tensors, mask_mod=shown)
    )


def test_tensors_can_be_drawn_and_serve_one_batch_of_keys():
    mask = block_mask_from(window, 2, HEADS, ROWS, KEYS, "cpu", 64)
    drawn = mask_matrix(tensors_of(mask), batch=1, head=2, seqlen_q=ROWS, seqlen_k=KEYS)
    assert torch.equal(drawn, mask_matrix(mask, batch=1, head=2))
    q, k, v = (tensor.transpose(1, 2) for tensor in operands())
    out = flex_attention(q, k[:1], v[:1], block_mask=tensors_of(mask))
    assert torch.equal(out, flex_attention(q, k[:1], v[:1], block_mask=mask))


def wrong_tensors() -> dict[str, tuple[dict[str, Any], str]]:
    ones = lambda *shape, **options: torch.ones(shape, **{"dtype": torch.int32} | options)
    return {
        "rows": ({"mask_block_cnt": ones(2, 3, 5)}, "mask_block_cnt.shape[2] is 5, expected 4"),
        "batch": ({"mask_block_cnt": ones(3, 3, 4)}, "mask_block_cnt.shape[0] is 3, expected 1 or"),
        "heads": ({"full_block_cnt": ones(2, 2, 4)}, "full_block_cnt.shape[1] is 2, expected 1 or"),
        "cols": ({"full_block_idx": ones(2, 3, 4, 4)}, "full_block_idx.shape is (2, 3, 4, 4), exp"),
        "rank": ({"mask_block_idx": ones(2, 3, 4)}, "mask_block_idx.dim() is 3, expected 4"),
        "dtype": (
            {"mask_block_cnt": ones(2, 3, 4, dtype=torch.float32)},
            "mask_block_cnt.dtype is torch.float32, expected torch.int32",
        ),
        "half": ({"full_block_cnt": None}, "full_block_cnt is of type NoneType, expected a"),
        "list": ({"mask_block_cnt": [1]}, "mask_block_cnt is of type list, expected a"),
        "device": (
            {"mask_block_idx": ones(2, 3, 4, 5, device="meta")},
            "mask_block_idx.device is meta, expected cpu (device of q)",
        ),
        "count": ({"mask_block_cnt": 9 * ones(2, 3, 4)}, "mask_block_cnt is 9 to 9, expected 0"),
        "index": (
            {"full_block_cnt": ones(2, 3, 4), "full_block_idx": 5 * ones(2, 3, 4, 5)},
            "full_block_idx is 5, expected 0 to 4",
        ),
    }  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), wrong_tensors().values(), ids=wrong_tensors())
def test_wrong_tensors_are_refused(changes: dict[str, Any], message: str):
    mask = block_mask_from(window, 2, HEADS, ROWS, KEYS, "cpu", 64)
    with pytest.raises(InvalidProblem) as caught:
        flash_attn_func(*operands(), block_mask=tensors_of(mask, **changes))
    assert f"block_mask.{message}" in str(caught.value)


def test_wrong_block_sizes_and_callbacks_of_tensors_are_refused():
    mask = block_mask_from(window, 2, HEADS, ROWS, KEYS, "cpu", 64)
    with pytest.raises(InvalidProblem, match=r"block_size is \(64, 0\), expected a positive int"):
        tensors_of(mask, block_size=(64, 0))
    with pytest.raises(InvalidProblem, match="mask_mod is a function of"):
        flash_attn_func(*operands(), block_mask=tensors_of(mask, mask_mod=callbacks.noop))


# ---- On a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", callbacks.MASK_MODS)
@pytest.mark.parametrize("block", [16, (8, 24)], ids=str)
def test_published_masks_on_a_gpu(any_gpu: Any, name: str, block: Any):
    mask_mod = callbacks.MASK_MODS[name]("cuda")
    sizes = (callbacks.BATCH, callbacks.HEADS, callbacks.SEQLEN, callbacks.SEQLEN)
    compare(mask_mod, *sizes, device="cuda", block=block)


@pytest.mark.gpu
@pytest.mark.parametrize("mask_mod", MASKS)
@pytest.mark.parametrize(
    ("sizes", "block"),
    [
        ((640, 640), 128),  # 5 blocks wide
        ((130, 300 * 64), 64),  # 300 wide
        ((300 * 64 - 7, 130), 64),  # 300 high
        ((300, 421), (1, 100)),
        ((300, 421), (100, 1)),
        ((1000, 777), 256),
        ((1000, 777), (128, 512)),
        ((1, 1), 128),
    ],
    ids=str,
)
def test_sizes_on_a_gpu(any_gpu: Any, mask_mod: Any, sizes: Any, block: Any):
    compare(mask_mod, None, None, *sizes, device="cuda", block=block)


@pytest.mark.gpu
@pytest.mark.parametrize("extents", [(None, 3), (2, None), (2, 3)], ids=str)
def test_batch_and_heads_on_a_gpu(any_gpu: Any, extents: Any):
    compare(window, *extents, 700, 1030, device="cuda", block=64)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(0, 300), (300, 0), (0, 0)], ids=str)
def test_zero_lengths_on_a_gpu(any_gpu: Any, sizes: Any):
    compare(causal, 2, None, *sizes, device="cuda")
    compare(causal, 0, 2, 300, 300, device="cuda")


@pytest.mark.gpu
def test_all_or_nothing_on_a_gpu(any_gpu: Any):
    check_one_large_block("cuda")
    full = block_mask_from(everything, None, None, 1024, 2048, "cuda")
    assert (full.full_kv_num_blocks == 16).all() and not full.kv_num_blocks.any()
    empty = block_mask_from(nothing, None, None, 1024, 2048, "cuda")
    assert not empty.full_kv_num_blocks.any() and not empty.kv_num_blocks.any()


@pytest.mark.gpu
def test_captured_values_and_sizes_never_recompile(any_gpu: Any):
    def documents(labels: torch.Tensor) -> Callable[..., Any]:
        return lambda b, h, q_idx, kv_idx: labels[q_idx] == labels[kv_idx]

    labels = torch.zeros(1000, dtype=torch.int32, device="cuda")
    mask_mod = documents(labels)
    compare(mask_mod, None, None, 1000, 1000, device="cuda")
    before = cache_info().compiles
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        labels.copy_(torch.randint(4, (1000,), generator=generator).sort().values)
        compare(mask_mod, None, None, 1000, 1000, device="cuda")
    other = (torch.arange(2000, device="cuda") // 300).int()
    compare(documents(other), 2, 3, 2000, 1500, device="cuda", block=(256, 128))
    assert cache_info().compiles == before


@pytest.mark.gpu
def test_native_masks_on_a_gpu(any_gpu: Any):
    got = block_mask_from(native, None, None, 300, 1000, "cuda")
    same = lambda b, h, q_idx, kv_idx: q_idx + 700 >= kv_idx
    expected = create_block_mask(same, None, None, 300, 1000, "cuda", 128)
    expected.mask_mod = native
    assert_same_lists(got, expected)


@pytest.mark.gpu
def test_graphs_replay_it(any_gpu: Any):
    labels = torch.zeros(1000, dtype=torch.int32, device="cuda")
    mask_mod = lambda b, h, q_idx, kv_idx: labels[q_idx] == labels[kv_idx]
    block_mask_from(mask_mod, None, None, 1000, 1000, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mask = block_mask_from(mask_mod, None, None, 1000, 1000, "cuda")
    labels.copy_(torch.arange(1000) // 150)
    graph.replay()
    assert_same_lists(mask, create_block_mask(mask_mod, None, None, 1000, 1000, "cuda", 128))


@pytest.mark.gpu
def test_attention_takes_it_on_a_gpu(gpu: None):
    mask = block_mask_from(window, 2, HEADS, 700, 1000, "cuda")
    tensors = operands("cuda", 700, 1000, 128)
    got = flash_attn_func(*tensors, block_mask=mask, return_lse=True)
    checks.assert_attention(got, *checks.oracle(*tensors, block_mask=mask))


@pytest.mark.gpu
@pytest.mark.parametrize("has_full", [True, False])
def test_tensors_on_a_gpu(gpu: None, has_full: bool):
    mask = create_block_mask(window, 2, HEADS, 700, 1000, "cuda", (128, 256))
    if not has_full:  # full blocks become hidden ones
        lists = (mask.kv_num_blocks, mask.kv_indices)
        options = {"BLOCK_SIZE": (128, 256), "mask_mod": window, "seq_lengths": (700, 1000)}
        mask = BlockMask.from_kv_blocks(*lists, **options)
    tensors = operands("cuda", 700, 1000, 128)
    mine = tensors_of(mask)
    got = flash_attn_func(*tensors, block_mask=mine, return_lse=True)
    checks.assert_attention(got, *checks.oracle(*tensors, block_mask=mine))
    expected = flash_attn_func(*tensors, block_mask=mask)
    checks.assert_same_bits("out", got[0], expected)
