"""The examples are documentation that runs."""

from __future__ import annotations

import copy
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from flash_cute import Feature, Support, compile, reference_mask, selection
from flash_cute.variant import as_callback

ROOT = Path(__file__).resolve().parent.parent
# Every file is run; a name with an underscore is a helper. Those that are not one call, or whose
# kernel the CPU reference cannot stand in for, have tests of their own.
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("[!_]*.py"))
LISTED = [name for name in EXAMPLES if name != "quickstart.py"]
GALLERY = [name for name in LISTED if name not in ("generate.py", "sigmoid_attention.py")]
HAS_GPU = torch.cuda.is_available()
NEEDED = "that needs a GPU of compute capability 8.x, 9.0 or 12.x"


def run_example(name: str, cache: Path, *arguments: str) -> str:
    """Run an example in its own process, as a reader would; returns what it printed."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "FLASH_CUTE_CACHE_DIR": str(cache), "PYTHONPATH": paths}
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=cache.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def load_example(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    """Import an example and its `_common` in this process."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    common = importlib.import_module("_common")
    return importlib.import_module(name.removesuffix(".py")), common


@pytest.mark.cpu
@pytest.mark.skipif(HAS_GPU, reason="there is a GPU: it runs the kernel as well")
@pytest.mark.parametrize("name", GALLERY)
def test_example_on_the_cpu_checks_itself_and_says_that_no_kernel_ran(name: str, tmp_path: Path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.png"
    text = run_example(name, tmp_path / "cache", "--plot", str(picture))
    assert re.search(
        r"reference, .*: worst row: error \d\.\de[-+]\d\d, \d\.\de[-+]\d\d allowed", text
    )
    assert f"The CPU reference ran. No kernel was executed: {NEEDED}." in text
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "cache").exists(), "nothing is compiled without a GPU"


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no GPU here")
@pytest.mark.parametrize("name", GALLERY)
def test_example_on_a_gpu_checks_and_measures_or_says_why_not(name: str, tmp_path: Path):
    text = run_example(name, tmp_path / "cache")
    checked = re.findall(r"kernel, .*: worst row: error", text)
    assert len(re.findall(r"\d+\.\d{3} ms, \d+ TFLOP/s", text)) == len(checked)
    refused = re.findall(r"refused: no kernel runs this problem", text)
    assert len(checked) + len(refused) == len(re.findall(r"reference, .*: worst row", text))
    assert ("No kernel was executed" in text) == (not checked)


@pytest.mark.cpu
@pytest.mark.parametrize("name", GALLERY)
def test_example_way_of_the_gpu(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Walk the way of a GPU with the CPU in its place."""
    example, common = load_example(name, monkeypatch)
    for what, value in (("GPU", "cpu"), ("SMALL", (1, 256)), ("LARGE", (1, 512))):
        monkeypatch.setattr(common, what, value)
    monkeypatch.setattr(common, "time_on_gpu", lambda call: 1e-3 if call() is not None else 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a pretended GPU")
    monkeypatch.setattr(sys, "argv", [name])
    common.run(example.build, example.draw)
    text = capsys.readouterr().out
    num_ways = len(example.build("cpu", 1, 256).ways)
    assert len(re.findall(r"kernel, .*: worst row", text)) == num_ways
    assert len(re.findall(r"differs from the reference by 0\.0e", text)) == num_ways
    assert len(re.findall(r": 1\.000 ms, \d+ TFLOP/s", text)) == num_ways
    assert "No kernel" not in text


@pytest.mark.cpu
def test_example_that_is_refused_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    example, common = load_example("prefix_lm.py", monkeypatch)
    for what, value in (("GPU", "cpu"), ("SMALL", (1, 64))):
        monkeypatch.setattr(common, what, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a pretended GPU")
    monkeypatch.setattr(common, "is_supported", lambda *a, **k: Support(reason="it lacks masks"))
    monkeypatch.setattr(sys, "argv", ["prefix_lm.py"])
    common.run(example.build, example.draw)
    text = capsys.readouterr().out
    assert "prefix as a mask_mod: refused: it lacks masks" in text
    assert "The CPU reference ran. No kernel was executed.\n" in text


WRONG = {  # example -> how its definition is broken: the scores that it gets
    "alibi.py": lambda scores: scores * 1.05,
    "sliding_window_sink.py": lambda scores: scores.roll(1, dims=-1),
    "tree_mask.py": lambda scores: scores.flip(-2),
}


@pytest.mark.cpu
@pytest.mark.parametrize("name", WRONG)
def test_example_that_is_wrong_stops(name: str, monkeypatch: pytest.MonkeyPatch):
    example, common = load_example(name, monkeypatch)
    monkeypatch.setattr(sys, "argv", [name])
    monkeypatch.setattr(common, "SMALL", (1, 256))

    def build(device: str, batch: int, seqlen: int) -> object:
        right = example.build(device, batch, seqlen)
        weights = right.weights
        return replace(right, weights=lambda scores: weights(WRONG[name](scores)))

    with pytest.raises(SystemExit, match="reference, .* is wrong"):
        common.run(build, example.draw)


@pytest.mark.cpu
@pytest.mark.parametrize("name", GALLERY)
def test_example_counts_the_work_that_its_definition_sees(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    example, _ = load_example(name, monkeypatch)
    one = example.build("cpu", 2, 300)
    sizes = (one.q.shape[1], one.k.shape[1])
    mask = reference_mask(*sizes, batch=2, **one.mask)
    scores = torch.zeros(2, one.q.shape[2], *sizes, dtype=torch.float64)
    assert torch.equal(one.weights(scores) > 0, mask.expand_as(scores))


@pytest.mark.compile
@pytest.mark.parametrize("name", GALLERY)
def test_example_callbacks_translate_for_a_kernel(name: str, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("cutlass")
    from tests.toy_callback_dsl import ToyCallback

    example, _ = load_example(name, monkeypatch)
    one = example.build("cpu", 1, 256)
    for options in [one.mask, *(way.options for way in one.ways)]:
        block_mod = getattr(options.get("block_mask"), "mask_mod", None)
        for function in (options.get("score_mod"), options.get("mask_mod"), block_mod):
            if function is not None:
                kind = "score_mod" if function is options.get("score_mod") else "mask_mod"
                kernel = ToyCallback(as_callback(function, kind).key)
                assert compile.inspect_kernel(kernel, "sm_90a").ptx


def test_gallery_page_lists_every_example():
    page = (ROOT / "docs" / "gallery.md").read_text()
    listed = re.findall(r"^\| `(\w+\.py)` \|", page, re.M)
    assert sorted(listed) == LISTED


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.skipif(HAS_GPU, reason="there is a GPU: it runs the kernel instead")
def test_quickstart_without_gpu_compiles_and_says_that_nothing_ran(tmp_path: Path):
    text = run_example("quickstart.py", tmp_path / "cache")
    assert re.search(r"largest error of the reference: \d\.\de-\d\d", text)
    assert re.search(r"flash_fwd_sm90_bf16_d128_\w*causal\w*, compiled in", text)
    registers, shared, spilled = (
        int(re.search(rf"{what} +(\d+)", text).group(1))  # type: ignore[union-attr]
        for what in ("registers per thread", "shared memory, bytes", "bytes spilled")
    )
    assert 0 < registers <= 255 and spilled == 0
    assert 65_536 < shared <= 232_448, "q, k and v tiles live there"
    assert "No kernel was executed" in text


@pytest.mark.compile
@pytest.mark.skipif(HAS_GPU, reason="there is a GPU: it runs the kernel instead")
def test_sigmoid_without_gpu_compiles_and_says_that_nothing_ran(tmp_path: Path):
    text = run_example("sigmoid_attention.py", tmp_path / "cache")
    assert re.search(r"flash_fwd_sm90_SigmoidAttention_bf16_d128_causal\w*, compiled in", text)
    assert re.search(r"registers per thread +\d+\n", text)
    assert re.search(r"bytes spilled +0\n", text)
    assert text.endswith("No kernel was executed: that needs a Hopper GPU.\n")
    assert not (tmp_path / "cache").exists(), "a derived class is never on disk"


@pytest.mark.cpu
def test_sigmoid_definition_is_the_formula(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("cutlass")
    example, _ = load_example("sigmoid_attention.py", monkeypatch)
    scores = torch.randn(1, 2, 5, 5, dtype=torch.float64)
    got = example.weights(scores)
    for i in range(5):
        for j in range(5):
            # sigmoid(s - log n) is 1 / (1 + n exp(-s))
            expected = 1 / (1 + 5 * torch.exp(-scores[..., i, j])) if j <= i else 0.0
            assert torch.allclose(got[..., i, j], torch.as_tensor(expected, dtype=torch.float64))


@pytest.mark.cpu
@pytest.mark.parametrize("is_right", [True, False], ids=["right", "wrong"])
def test_sigmoid_way_of_the_gpu(
    is_right: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Walk the way of a GPU with the definition in the place of the kernel."""
    pytest.importorskip("cutlass")
    example, common = load_example("sigmoid_attention.py", monkeypatch)
    factor = 1.0 if is_right else 1.05

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object
    ) -> torch.Tensor:
        assert options["causal"] is True
        if "kernel" not in options:
            return torch.zeros_like(q)
        one = common.Example(q, k, v, (common.Way("", {}),), example.weights)
        return (factor * common.by_definition(one, torch.float64)).to(q.dtype)

    for module in (common, example):
        for what, value in (("GPU", "cpu"), ("SMALL", (1, 256)), ("LARGE", (1, 512))):
            monkeypatch.setattr(module, what, value)
    monkeypatch.setattr(common, "flash_attn_func", attend)
    monkeypatch.setattr(common, "is_supported", lambda *a, **k: Support(backend="a kernel"))
    monkeypatch.setattr(common, "time_on_gpu", lambda call: 1e-3 if call() is not None else 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a pretended GPU")
    if not is_right:
        with pytest.raises(SystemExit, match="kernel, sigmoid attention is wrong"):
            example.main()
        return
    example.main()
    text = capsys.readouterr().out
    assert re.search(r"kernel, sigmoid attention: worst row: error", text)
    assert len(re.findall(r": 1\.000 ms, \d+ TFLOP/s", text)) == 2, "sigmoid and softmax"
    assert text.index("softmax attention") < text.rindex("TFLOP/s")


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no GPU here")
def test_sigmoid_with_gpu_checks_and_measures(tmp_path: Path):
    text = run_example("sigmoid_attention.py", tmp_path / "cache")
    assert re.search(r"kernel, sigmoid attention: worst row: error", text)
    assert len(re.findall(r"\d+\.\d{3} ms, \d+ TFLOP/s", text)) == 2, "sigmoid and softmax"


GENERATED = r"tokens are those of full attention; logits: error \d\.\de-\d\d, \d\.\de-\d\d allowed"


@pytest.mark.cpu
@pytest.mark.skipif(HAS_GPU, reason="there is a GPU: it runs the kernel as well")
def test_generate_on_the_cpu_writes_what_full_attention_writes(tmp_path: Path):
    text = run_example("generate.py", tmp_path / "cache")
    assert re.search(GENERATED, text)
    assert text.endswith(f"No kernel was executed: {NEEDED}.\n")
    lines = re.findall(r"tokens, then \[(.*)\] ...", text)
    assert len(lines) == 4
    for tokens in (line.split(", ") for line in lines):
        assert tokens[7:] == tokens[:3], "it has learnt to repeat"


@pytest.fixture(scope="module")
def trained() -> Iterator[Any]:
    """The weights of generate.py."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        torch.set_num_threads(1)
        yield load_example("generate.py", patch)[0].train()
    torch.set_num_threads(threads)


@pytest.mark.cpu
@pytest.mark.parametrize("wrong", ["lengths", "rotary", "appended", "nothing"])
def test_generate_that_is_wrong_stops(wrong: str, trained: Any, monkeypatch: pytest.MonkeyPatch):
    example, _ = load_example("generate.py", monkeypatch)
    right = example.flash_attn_with_kvcache

    def attend(q: object, keys: torch.Tensor, values: object, k: torch.Tensor, v: object, **o: Any):
        if wrong == "lengths" and "cu_seqlens_q" not in o:
            o["cache_seqlens"] = o["cache_seqlens"] - 1
        if wrong == "rotary":
            o["rotary_interleaved"] = True
        return right(q, keys, values, k.flip(-1) if wrong == "appended" else k, v, **o)

    monkeypatch.setattr(example, "DEVICE", "cpu")
    monkeypatch.setattr(example, "train", lambda: copy.deepcopy(trained))
    monkeypatch.setattr(example, "flash_attn_with_kvcache", attend)
    if wrong == "nothing":
        example.main()
        return
    with pytest.raises(SystemExit, match="other tokens|logits are wrong"):
        example.main()


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no GPU here")
def test_generate_with_gpu_writes_what_full_attention_writes(tmp_path: Path):
    needed = {Feature.APPEND_KV, Feature.ROTARY, Feature.PAGED_KV, Feature.VARLEN, Feature.GQA}
    if missing := sorted(f.value for f in needed - selection.SM90.features):
        pytest.skip(f"no kernel declares: {', '.join(missing)}")
    text = run_example("generate.py", tmp_path / "cache")
    assert re.search(GENERATED, text) and "No kernel" not in text


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no GPU here")
def test_quickstart_with_gpu_checks_and_measures(tmp_path: Path):
    text = run_example("quickstart.py", tmp_path / "cache")
    assert "kernel compiled" in text
    assert re.search(r"largest error of the kernel: \d\.\de-\d\d", text)
    assert re.search(r"\d+ µs a call, \d+ TFLOP/s", text)


def readme_blocks() -> list[str]:
    """The Python blocks of the README, for the CPU."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    return [block.replace('"cuda"', '"cpu"') for block in blocks]


def test_readme_example_is_the_public_api():
    """With a short sequence."""
    block, _ = readme_blocks()
    assert "4096" in block
    names: dict[str, torch.Tensor] = {}
    exec(block.replace("4096", "64"), names)
    assert names["out"].shape == (2, 64, 32, 128)
    assert names["lse"].shape == (2, 32, 64)


def test_readme_example_of_serving_is_the_public_api():
    _, block = readme_blocks()
    names: dict[str, torch.Tensor] = {}
    exec(block, names)
    assert names["out"].shape == (4, 1, 32, 128)
    page, slot = names["table"][1, 1], 1  # row 17 of sequence 1
    assert torch.equal(names["v_cache"][page, slot], names["v"][1, 0])


def test_gallery_page_block_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("matplotlib")
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "gallery.md").read_text(), re.S)
    monkeypatch.chdir(tmp_path)
    exec(block, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mask.png", "window.png"]
