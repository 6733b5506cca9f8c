"""The command line: `python -m flash_cute doctor | precompile | cache`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flash_cute import __main__ as command_line
from flash_cute import cache, compile, env, selection, splitting
from flash_cute.errors import DependencyError, UnsupportedProblem
from tests import toy_kernel

ROOT = Path(__file__).resolve().parent.parent
HAS_GPU = torch.cuda.is_available()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of its own, and no settings of the user's; what --arch sets is undone."""
    for variable in env.VARIABLES:
        monkeypatch.setenv(variable.name, "")
    directory = tmp_path / "kernels"
    monkeypatch.setenv("FLASH_CUTE_CACHE_DIR", str(directory))
    monkeypatch.setattr(cache, "_counts", cache._Counts())
    monkeypatch.setattr(cache, "_memory", {})
    monkeypatch.setattr(cache, "_warned", set())
    monkeypatch.setattr(cache, "_source_stamps", lambda: cache._STAMPS_AT_IMPORT)
    monkeypatch.setattr(compile, "_after_warmup", None)
    yield directory


@pytest.fixture
def toy_selection(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Let selection choose toy kernels, one per head_dim; returns the problems it was asked."""
    asked: list[object] = []

    def key_for(problem, target):
        asked.append(problem)
        if problem.head_dim > 256:
            raise UnsupportedProblem(f"head_dim is {problem.head_dim}, expected at most 256")
        return toy_kernel.ToyKey(problem.head_dim, target.arch)

    monkeypatch.setattr(selection, "key_for", key_for)
    for name in ("merge_key", "planner_key"):
        monkeypatch.setattr(splitting, name, lambda problem, key: None)
    monkeypatch.setattr(selection, "kernel_for", toy_kernel.kernel_for)
    monkeypatch.setattr(compile, "kernel_for", toy_kernel.kernel_for)
    return asked


def output(*arguments: str, status: int = 0) -> str:
    """Run the module in a fresh interpreter; returns what it printed."""
    command = [sys.executable, "-m", "flash_cute", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


# -- cache ----------------------------------------------------------------------------------------


def test_cache_shows_and_clears(own_cache: Path, capsys: pytest.CaptureFixture[str]):
    assert command_line.main(["cache"]) == 0
    assert capsys.readouterr().out == f"{own_cache}: 0 entries, 0.0 MiB\n"
    own_cache.mkdir()
    (own_cache / f"{'0' * 64}.kernel").write_bytes(bytes(2**20))
    assert command_line.main(["cache", "info"]) == 0
    assert capsys.readouterr().out == f"{own_cache}: 1 entries, 1.0 MiB\n"
    assert command_line.main(["cache", "path"]) == 0
    assert capsys.readouterr().out == f"{own_cache}\n"
    assert command_line.main(["cache", "clear"]) == 0
    assert capsys.readouterr().out == f"1 entries deleted from {own_cache}\n"
    assert list(own_cache.iterdir()) == []


def test_cache_says_when_it_is_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("FLASH_CUTE_DISK_CACHE", "0")
    assert command_line.main(["cache"]) == 0
    assert "switched off (FLASH_CUTE_DISK_CACHE=0)" in capsys.readouterr().out


# -- precompile -----------------------------------------------------------------------------------


@pytest.mark.compile
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_precompile_fills_the_cache(
    jobs: str, toy_selection: list, capfd: pytest.CaptureFixture[str], own_cache: Path
):
    arguments = ["precompile", "--arch", "sm_90", "--head-dim", "64,192x128", "-j", jobs]
    assert command_line.main([*arguments, "--dtype", "bf16", "--lse", "no"]) == 0
    text = capfd.readouterr()
    assert text.out == f"{own_cache}: 2 entries, {cache.cache_info().bytes / 2**20:.1f} MiB\n"
    assert "2 kernels ready" in text.err
    seen = {(p.head_dim, p.head_dim_v, p.dtype, p.causal) for p in toy_selection}
    pairs = [(64, 64), (192, 128)]
    assert seen == {(d, v, torch.bfloat16, c) for d, v in pairs for c in (True, False)}
    assert all(path.suffix == ".kernel" for path in own_cache.iterdir())


@pytest.mark.compile
def test_precompile_is_quiet_when_asked(toy_selection: list, capfd: pytest.CaptureFixture[str]):
    arguments = ["precompile", "--arch", "sm_90a", "--head-dim", "64", "-j", "1", "-q"]
    assert command_line.main([*arguments, "--heads", "32/8", "--seqlen", "128"]) == 0
    assert capfd.readouterr().err == ""
    (shape,) = {(p.num_heads_q, p.num_heads_kv, p.seqlen_q, p.seqlen_k) for p in toy_selection}
    assert shape == (32, 8, 128, 128)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--arch", "hopper"], "flash_cute: arch is 'hopper', expected one of sm_80"),
        (["--arch", "sm_90a", "--head-dim", "512"], "head_dim is 512, expected at most 256"),
        (["--arch", "sm_90a", "-j", "0"], "jobs is 0, expected at least 1"),
    ],
)
def test_precompile_refuses_in_one_line(
    arguments: list[str], words: str, toy_selection: list, capsys: pytest.CaptureFixture[str]
):
    assert command_line.main(["precompile", *arguments]) == 1
    text = capsys.readouterr().err
    assert words in text and len(text.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments", [["--dtype", "fp64"], ["--causal", "maybe"], ["--head-dim", "x"], ["--heads", "a"]]
)
def test_precompile_refuses_options_it_does_not_have(arguments: list[str]):
    with pytest.raises(SystemExit, match="2"):
        command_line.main(["precompile", "--arch", "sm_90a", *arguments])


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU to compile for")
def test_precompile_without_gpu_or_arch_says_what_to_do(
    toy_selection: list, capsys: pytest.CaptureFixture[str]
):
    assert command_line.main(["precompile", "-j", "1"]) == 1
    assert "no GPU to compile for; name one with" in capsys.readouterr().err


def test_precompile_needs_a_cache(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("FLASH_CUTE_DISK_CACHE", "0")
    assert command_line.main(["precompile", "--arch", "sm_90a"]) == 1
    assert "no cache on disk to fill" in capsys.readouterr().err


# -- doctor ---------------------------------------------------------------------------------------


@pytest.mark.compile
def test_doctor_shows_everything_and_compiles(
    toy_selection: list, capsys: pytest.CaptureFixture[str], own_cache: Path
):
    if HAS_GPU:
        pytest.skip("with a GPU the self check launches a real kernel")
    assert command_line.main(["doctor"]) == 0
    text = capsys.readouterr().out
    for name in ("torch", *env.DSL_LIBRARIES, "apache-tvm-ffi", "driver", "linker", "cuobjdump"):
        assert re.search(rf"^  {re.escape(name)} +\S", text, re.MULTILINE), name
    for variable in env.VARIABLES:
        assert f"  {variable.name} " in text
    assert str(own_cache) in text and "none: CPU tensors run the reference" in text
    assert re.search(r"reference on the CPU +largest difference to PyTorch \d\.\de-0[4-9]", text)
    assert "toy_scale_64 (sm_90a): " in text and "everything looks right" in text


def test_doctor_names_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def wrong():
        raise DependencyError("nvidia-cutlass-dsl 4.7.1 is installed, flash_cute needs ...")

    monkeypatch.setattr(env, "check_dependencies", wrong)
    monkeypatch.setenv("FLASH_CUTE_COMPILE", "nonsense")
    assert command_line.main(["doctor", "--no-check"]) == 1
    text = capsys.readouterr().out
    assert "PROBLEM: nvidia-cutlass-dsl 4.7.1 is installed" in text
    assert "PROBLEM: FLASH_CUTE_COMPILE is 'nonsense', expected one of" in text
    assert "2 problem(s)" in text


def test_doctor_runs_as_a_module():
    text = output("doctor", "--no-check")
    assert f"python                         {sys.version.split()[0]}" in text
    assert "everything looks right" in text


def test_help_names_the_commands():
    text = output("--help")
    assert all(name in text for name in ("doctor", "precompile", "cache"))
    assert "usage: python -m flash_cute" in output(status=2)


@pytest.mark.compile
@pytest.mark.slow
def test_doctor_checks_the_real_kernel():
    text = output("doctor")
    expected = "kernel on the GPU" if HAS_GPU else "compiled, not run"
    assert expected in text and "everything looks right" in text
