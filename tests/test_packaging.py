"""What gets installed: versions that agree, a wheel that is complete, an environment that suits."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import flash_cute
from flash_cute import env

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
GPU_TORCH = "2.11.0+cu130"


def load_setup_env() -> ModuleType:
    """Import tools/setup_env.py, which is a script and no package."""
    spec = importlib.util.spec_from_file_location("setup_env", ROOT / "tools" / "setup_env.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


setup_env = load_setup_env()


def declared(name: str) -> Requirement:
    """Return what pyproject.toml requires of one distribution."""
    requirements = [Requirement(text) for text in PROJECT["dependencies"]]
    return next(requirement for requirement in requirements if requirement.name == name)


def test_version_is_single_sourced():
    assert PROJECT["dynamic"] == ["version"]
    assert PYPROJECT["tool"]["setuptools"]["dynamic"]["version"] == {
        "attr": "flash_cute.__version__"
    }
    assert str(Version(flash_cute.__version__)) == flash_cute.__version__


@pytest.mark.parametrize("requirement", env.REQUIREMENTS, ids=lambda r: r.distribution)
def test_run_time_check_accepts_what_is_declared(requirement: env.Requirement):
    assert declared(requirement.distribution).specifier == SpecifierSet(requirement.specifier())


def test_cu13_extra_has_the_range_of_the_dsl():
    (extra,) = [Requirement(text) for text in PROJECT["optional-dependencies"]["cu13"]]
    assert extra.extras == {"cu13"}
    assert extra.specifier == declared("nvidia-cutlass-dsl").specifier


def test_setup_accepts_the_declared_pythons():
    span = SpecifierSet(PROJECT["requires-python"])
    for minor in range(20):
        accepted = setup_env.PYTHON_MIN <= (3, minor) < setup_env.PYTHON_END
        assert span.contains(f"3.{minor}") == accepted
        classified = f"Programming Language :: Python :: 3.{minor}" in PROJECT["classifiers"]
        assert classified == accepted


def test_setup_installs_a_declared_torch():
    assert declared("torch").specifier == SpecifierSet(">={}.{}".format(*setup_env.TORCH_MIN))
    (pin,) = Requirement(setup_env.TORCH_CPU).specifier
    assert declared("torch").specifier.contains(pin.version)


@pytest.mark.parametrize(
    ("driver", "base_torch", "asked", "expected"),
    [
        (0, "", "", ("torch==2.13.0+cpu", [])),
        (0, GPU_TORCH, "", ("torch==2.13.0+cpu", [])),
        (0, "", "torch==2.12.0", ("torch==2.12.0", [])),
        (13000, GPU_TORCH, "", ("", ["cu13"])),
        (12080, "2.12.1", "", ("", [])),
        (13000, "2.13.0+cpu", "", ("torch>=2.11", ["cu13"])),
        (13000, "2.9.1", "", ("torch>=2.11", ["cu13"])),
        (12080, "", "", ("torch>=2.11", [])),
        (13000, GPU_TORCH, "torch==2.12.0", ("torch==2.12.0", ["cu13"])),
    ],
)
def test_setup_plans_a_torch_that_suits(
    driver: int, base_torch: str, asked: str, expected: tuple[str, list[str]]
):
    assert setup_env.plan(driver, base_torch, asked) == expected


def test_setup_never_falls_back_to_a_cuda_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    calls: list[tuple[str, ...]] = []

    def failing_pip(venv: Path, *arguments: str) -> bool:
        calls.append(arguments)
        return False

    monkeypatch.setattr(setup_env, "pip_install", failing_pip)
    with pytest.raises(setup_env.SetupError, match="TORCH="):
        setup_env.install(tmp_path, setup_env.TORCH_CPU, [])
    assert calls and all(arguments[0] == "torch==2.13.0+cpu" for arguments in calls)


def test_setup_repeats_only_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    installed: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(setup_env, "cuda_driver_version", lambda: 0)
    monkeypatch.setattr(setup_env, "create", lambda venv, share_base: make_python(venv))
    monkeypatch.setattr(setup_env, "install", lambda venv, *what: installed.append(what))

    def make_python(venv: Path) -> None:
        path = setup_env.environment_python(venv)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def run(*arguments: str) -> list[tuple[str, list[str]]]:
        installed.clear()
        assert setup_env.main(["--venv", str(tmp_path / "venv"), *arguments]) == 0
        return list(installed)

    assert run("--extra", "test") == [("torch==2.13.0+cpu", ["test"])]
    assert run("--extra", "test") == []
    assert run() == []
    assert run("--extra", "lint") == [("torch==2.13.0+cpu", ["lint", "test"])]
    assert run("--extra", "test") == []
    assert run("--extra", "test", "--torch", "torch==2.12.0") == [("torch==2.12.0", ["test"])]
    assert run("--extra", "test") == [("torch==2.13.0+cpu", ["test"])]
    setup_env.environment_python(tmp_path / "venv").unlink()
    assert run("--extra", "test") == [("torch==2.13.0+cpu", ["test"])]


def test_setup_leaves_a_folder_alone_that_is_no_environment(tmp_path: Path):
    (tmp_path / "precious").touch()
    with pytest.raises(setup_env.SetupError, match="no virtual environment"):
        setup_env.create(tmp_path, share_base=False)
    assert (tmp_path / "precious").exists()


def test_setup_explains_an_unsuitable_python(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    monkeypatch.setattr(setup_env, "PYTHON_END", (3, 0))
    assert setup_env.main(["--venv", str(tmp_path / "venv")]) == 1
    assert re.search(r"is Python 3\.\d+.*needs 3\.10 to 3\.13", capsys.readouterr().err)
    assert not (tmp_path / "venv").exists()


@pytest.mark.slow
def test_wheel_holds_the_package_and_nothing_else(tmp_path: Path):
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    # setuptools writes build/ beside the sources, so it gets a copy of them.
    sources = tmp_path / "sources"
    copy = "pyproject.toml README.md LICENSE flash_cute"
    sources.mkdir()
    subprocess.run(f"cp -r {copy} {sources}", shell=True, check=True, cwd=ROOT)
    wheels = ["--no-build-isolation", "--wheel-dir", str(tmp_path), str(sources)]
    subprocess.run([*command, *wheels], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"flash_cute-{flash_cute.__version__}-py3-none-any.whl"
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {p.relative_to(ROOT).as_posix() for p in (ROOT / "flash_cute").rglob("*.py")}
    assert names == expected | {"flash_cute/py.typed"}
