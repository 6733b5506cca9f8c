"""Environment variables and dependency versions."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from flash_cute import env
from flash_cute.env import CompilePolicy, Settings
from flash_cute.errors import DependencyError

ROOT = Path(__file__).resolve().parent.parent
GOOD = {
    "nvidia-cutlass-dsl": "4.8.1",
    "nvidia-cutlass-dsl-libs-base": "4.8.1",
    "nvidia-cutlass-dsl-libs-core": "4.8.1",
    "nvidia-cutlass-dsl-libs-cu12": "4.8.1",
    "nvidia-cutlass-dsl-libs-cu13": "4.8.1",
    "apache-tvm-ffi": "0.1.15.post2",
}


@pytest.fixture(autouse=True)
def fresh_caches() -> Iterator[None]:
    """Forget what was read before and what this test pretended."""
    for function in (env.check_dependencies, env.host_cpu, env._warn_unknown):
        function.cache_clear()
    yield
    for function in (env.check_dependencies, env.host_cpu, env._warn_unknown):
        function.cache_clear()


# -- variables ------------------------------------------------------------------------------------


def test_settings_default():
    assert env.settings({}) == Settings()
    assert env.settings({"FLASH_CUTE_ARCH": " ", "FLASH_CUTE_COMPILE": ""}) == Settings()


def test_settings_read_every_variable():
    given = {
        "FLASH_CUTE_CACHE_DIR": "/somewhere",
        "FLASH_CUTE_DISK_CACHE": "0",
        "FLASH_CUTE_COMPILE": "Error",
        "FLASH_CUTE_ARCH": "sm_100a",
        "FLASH_CUTE_LOG": "debug",
    }
    assert set(given) == {variable.name for variable in env.VARIABLES}
    expected = Settings("/somewhere", False, CompilePolicy.ERROR, "sm_100a", "debug")
    assert env.settings(given) == expected


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("FLASH_CUTE_DISK_CACHE", "yes", "0, 1"),
        ("FLASH_CUTE_COMPILE", "never", "allow, warn, error"),
        ("FLASH_CUTE_LOG", "verbose", "off, info, debug"),
    ],
)
def test_settings_refuse_other_values(name: str, value: str, expected: str):
    with pytest.raises(ValueError, match=f"{name} is '{value}', expected one of {expected}"):
        env.settings({name: value})


def test_settings_warn_of_a_misspelt_variable_once():
    with pytest.warns(RuntimeWarning, match="FLASH_CUTE_CACHEDIR is no option.*CACHE_DIR?"):
        env.settings({"FLASH_CUTE_CACHEDIR": "/x"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env.settings({"FLASH_CUTE_CACHEDIR": "/x"})


def test_variables_are_read_in_env_only():
    sources = [p for p in (ROOT / "flash_cute").rglob("*.py") if p.name not in ("env.py",)]
    reads = re.compile(r"(environ|getenv)[^\n]*FLASH_CUTE_")
    found = {p.name: reads.findall(p.read_text()) for p in sources}
    # __main__ sets one from its --arch, for the processes it starts.
    assert {name for name, hits in found.items() if hits} <= {"__main__.py"}


def test_logging_goes_to_stderr_when_asked(capfd: pytest.CaptureFixture[str]):
    script = (
        "from flash_cute import env\n"
        "env.configure_logging('off'); env.LOGGER.info('quiet')\n"
        "env.configure_logging('info'); env.LOGGER.info('loud'); env.LOGGER.debug('quiet')\n"
        "env.configure_logging('info'); env.LOGGER.info('once')\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)
    assert capfd.readouterr().err == "flash_cute: loud\nflash_cute: once\n"
    assert not logging.getLogger("flash_cute").handlers


# -- versions -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "accepted"),
    [
        ("4.8", True),
        ("4.8.0", True),
        ("4.8.1", True),
        ("4.8.99.post1", True),
        ("4.8.1+local", True),
        ("4.7.1", False),
        ("4.9.0", False),
        ("4.9.0.dev0", False),
        ("4.8.0.dev3", False),
        ("4.8rc1", False),
        ("4.10.0", False),
        ("5", False),
        ("unknown", False),
    ],
)
def test_requirement_accepts_its_range(version: str, accepted: bool):
    assert env.DSL.accepts(version) is accepted


def test_requirement_without_upper_bound():
    assert env.TVM_FFI.accepts("0.1.15.post2") and env.TVM_FFI.accepts("1.0")
    assert not env.TVM_FFI.accepts("0.1.9")


def pretend(monkeypatch: pytest.MonkeyPatch, **changes: str | None) -> None:
    """Let these distributions seem installed; names are given with underscores."""
    found = GOOD | {name.replace("_", "-"): version for name, version in changes.items()}
    monkeypatch.setattr(env, "installed_version", lambda name: found.get(name))


def test_dependencies_of_this_machine_are_fine():
    versions = env.check_dependencies()
    assert env.DSL.accepts(versions.dsl) and env.TVM_FFI.accepts(versions.tvm_ffi)


def test_dependencies_accept_one_cuda_flavour(monkeypatch: pytest.MonkeyPatch):
    pretend(monkeypatch, nvidia_cutlass_dsl_libs_cu12=None)
    assert env.check_dependencies() == env.Versions("4.8.1", "0.1.15.post2")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"nvidia_cutlass_dsl": "4.7.1"},
            "nvidia-cutlass-dsl 4.7.1 is installed, flash_cute needs nvidia-cutlass-dsl>=4.8,<4.9: "
            "pip install 'nvidia-cutlass-dsl[cu13]>=4.8,<4.9'",
        ),
        (
            {"nvidia_cutlass_dsl": None},
            "nvidia-cutlass-dsl is not installed, flash_cute needs nvidia-cutlass-dsl>=4.8,<4.9: "
            "pip install 'nvidia-cutlass-dsl[cu13]>=4.8,<4.9'",
        ),
        (
            {"apache_tvm_ffi": "0.1.11"},
            "apache-tvm-ffi 0.1.11 is installed, flash_cute needs apache-tvm-ffi>=0.1.15: "
            "pip install 'apache-tvm-ffi>=0.1.15'",
        ),
        (
            {"nvidia_cutlass_dsl_libs_cu13": "4.8.0"},
            "nvidia-cutlass-dsl 4.8.1 is installed beside nvidia-cutlass-dsl-libs-cu13 4.8.0, "
            "flash_cute needs all of its libraries in one version: "
            "pip install --force-reinstall 'nvidia-cutlass-dsl[cu13]==4.8.1'",
        ),
        (
            {"nvidia_cutlass_dsl_libs_cu12": None, "nvidia_cutlass_dsl_libs_cu13": None},
            "nvidia-cutlass-dsl 4.8.1 is installed without its libraries, flash_cute needs "
            "nvidia-cutlass-dsl-libs-cu12 or nvidia-cutlass-dsl-libs-cu13: "
            "pip install --force-reinstall 'nvidia-cutlass-dsl[cu13]==4.8.1'",
        ),
    ],
    ids=["old", "absent", "tvm-ffi", "mixed", "no-libraries"],
)
def test_dependencies_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str | None], sentence: str
):
    pretend(monkeypatch, **changes)
    with pytest.raises(DependencyError) as caught:
        env.check_dependencies()
    assert str(caught.value) == sentence


# -- what else decides a compile ------------------------------------------------------------------


def test_compiler_environment_keeps_what_shapes_code():
    given = {
        "CUTE_DSL_LINEINFO": "1",
        "CUTE_DSL_ENABLE_ASSERTIONS": "1",
        "CUTE_DSL_ARCH": "sm_80",
        "CUTE_DSL_LOG_LEVEL": "10",
        "CUTE_DSL_DUMP_DIR": "/x",
        "CUTE_DSL_DEBUG": "",
        "HOME": "/x",
    }
    assert env.compiler_environment(given) == "CUTE_DSL_ENABLE_ASSERTIONS=1 CUTE_DSL_LINEINFO=1"
    assert env.compiler_environment({}) == ""


def test_host_cpu_tells_instruction_sets_apart(monkeypatch: pytest.MonkeyPatch):
    here = env.host_cpu()
    assert here.startswith(f"{sys.platform}-{os.uname().machine}-") and here == env.host_cpu()
    text = Path("/proc/cpuinfo").read_text()
    features = re.search(r"^(?:flags|Features)\s*:.*$", text, re.MULTILINE)
    if features is None:
        pytest.skip("/proc/cpuinfo lists no instruction sets here")
    without = features.group(0)
    for name in ("avx2", "asimd"):
        without = without.replace(f" {name}", "")
    monkeypatch.setattr(Path, "open", lambda self: __import__("io").StringIO(without))
    env.host_cpu.cache_clear()
    assert env.host_cpu() != here
    noise = features.group(0) + " md_clear flush_l1d"  # what a kernel update brings
    monkeypatch.setattr(Path, "open", lambda self: __import__("io").StringIO(noise))
    env.host_cpu.cache_clear()
    assert env.host_cpu() == here
