"""Create the project's virtual environment; `make demo`, `make test` and `make lint` call this.

Needs nothing but the standard library and runs on any Python 3, so that an unsuitable interpreter
gets a sentence instead of a SyntaxError. Nothing is installed outside the environment's folder.

Which torch goes in:
- no NVIDIA GPU: the CPU build of torch 2.13.0. Never a CUDA build: several GB of no use there.
- an NVIDIA GPU, and the base interpreter has a CUDA torch that is new enough: that one is shared.
- an NVIDIA GPU otherwise: whatever `pip install 'torch>=2.11'` gives.

A stamp of everything that decides the content makes a repeated call return at once.
"""

import argparse
import ctypes
import hashlib
import importlib.metadata
import platform
import re
import shutil
import site
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON_MIN, PYTHON_END = (3, 10), (3, 14)  # requires-python; tests/test_packaging.py compares them
TORCH_MIN = (2, 11)  # the floor in pyproject.toml; same test
TORCH_CPU = "torch==2.13.0+cpu"
# Asked only when the configured package index has no CPU build of that version for this Python.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
STAMP = ".flash_cute-stamp"


class SetupError(Exception):
    """The environment cannot be made; the message says what the user can do."""


def cuda_driver_version():
    """Return the CUDA version of a working driver that sees a GPU (13000 is 13.0), or 0."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count, version = ctypes.c_int(0), ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return 0
    return 0 if driver.cuDriverGetVersion(ctypes.byref(version)) else version.value


def base_torch_version():
    """Return the version of the torch that this interpreter has installed, or ''."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def plan(driver, base_torch, torch=""):
    """Decide what to install.

    Returns (torch requirement or '' to share the base's torch, extras that the driver asks for).
    `driver` is cuda_driver_version(), `base_torch` is base_torch_version(), and `torch`, a pip
    requirement, overrules the choice.
    """
    extras = ["cu13"] if driver >= 13000 else []
    if torch:
        return torch, extras
    if not driver:
        return TORCH_CPU, extras
    release = tuple(int(part) for part in re.findall(r"\d+", base_torch.split("+")[0])[:2])
    if release >= TORCH_MIN and not base_torch.endswith("+cpu"):
        return "", extras
    return "torch>={}.{}".format(*TORCH_MIN), extras


def describe(driver, requirement, base_torch):
    """Return what was found and what goes in, for the reader of the terminal."""
    found = f"GPU driver for CUDA {driver // 1000}.{driver % 1000 // 10}" if driver else "no GPU"
    return f"{found}; " + (
        f"installing {requirement}" if requirement else f"sharing torch {base_torch}"
    )


def environment_python(venv):
    """Return the path of the interpreter in the environment `venv`."""
    return venv / "bin" / "python"


def digest(requirement):
    """Return the text that changes whenever the environment has to be brought up to date."""
    state = hashlib.sha256()
    for path in (ROOT / "pyproject.toml", Path(__file__)):
        state.update(path.read_bytes())
    facts = [sys.prefix, platform.python_version(), str(ROOT), requirement]
    state.update("\n".join(facts).encode())
    return state.hexdigest()


def completed_extras(venv, key):
    """Return the extras that `venv` has for this `key`, or None where it has to be made anew.

    The stamp's first line is the key, the others are extras.
    """
    stamp = venv / STAMP
    if not (environment_python(venv).exists() and stamp.exists()):
        return None
    recorded, *extras = stamp.read_text().splitlines()
    return set(extras) if recorded == key else None


def create(venv, share_base):
    """Make an empty environment, or keep the one there if it runs this Python version.

    `share_base` lets it see the packages of the running interpreter. venv's own
    --system-site-packages would not: where that interpreter is itself in a virtual environment (a
    container image often does that), it shows the packages of the interpreter below it instead.
    """
    folder = venv / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    if not (environment_python(venv).exists() and folder.exists()):
        if venv.exists() and not (venv / "pyvenv.cfg").exists():
            raise SetupError(f"{venv} exists and is no virtual environment; name another VENV.")
        shutil.rmtree(venv, ignore_errors=True)
        made = subprocess.run([sys.executable, "-m", "venv", str(venv)], stdin=subprocess.DEVNULL)
        if made.returncode:
            shutil.rmtree(venv, ignore_errors=True)
            raise SetupError(
                f"{sys.executable} -m venv failed. On Debian and Ubuntu: apt-get install "
                "python3-venv; or name another interpreter: make demo PYTHON=python3.12"
            )
    link = folder / "flash_cute_base.pth"
    if share_base:
        shared = site.getsitepackages()
        if site.ENABLE_USER_SITE:
            shared.append(site.getusersitepackages())
        link.write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in shared))
    elif link.exists():
        link.unlink()


def pip_install(venv, *arguments):
    """Run pip in the environment; return whether it succeeded."""
    quiet = [] if sys.stdout.isatty() else ["-qq"]
    command = [str(environment_python(venv)), "-m", "pip", "install", "--disable-pip-version-check"]
    run = subprocess.run([*command, *quiet, *arguments], stdin=subprocess.DEVNULL, cwd=str(ROOT))
    return run.returncode == 0


def install(venv, requirement, extras):
    """Install torch as planned, then this project in editable form with `extras`."""
    if requirement and not pip_install(venv, requirement):
        on_pytorch_index = requirement == TORCH_CPU and pip_install(
            venv, requirement, "--index-url", TORCH_CPU_INDEX
        )
        if not on_pytorch_index:
            raise SetupError(
                f"pip could not install {requirement} for Python {platform.python_version()}. "
                "Another build can be named: make demo TORCH='torch==2.13.0' (without a GPU, mind "
                "that the default Linux wheel may be a CUDA build of several GB); so can another "
                "interpreter: make demo PYTHON=python3.11"
            )
    project = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
    # torch is named again so that no dependency can trade the CPU build for another one.
    if not pip_install(venv, *([requirement] if requirement else []), "--editable", project):
        raise SetupError("pip could not install flash_cute; its message is above.")


def main(argv=None):
    """Bring the environment up to date; return the exit status."""
    parser = argparse.ArgumentParser(
        description="Create or update the virtual environment of flash_cute."
    )
    parser.add_argument(
        "--venv", type=Path, default=ROOT / ".venv", help="the environment's folder"
    )
    parser.add_argument("--extra", action="append", default=[], help="extra to install; repeatable")
    parser.add_argument("--torch", default="", help="pip requirement that overrules the choice")
    options = parser.parse_args(argv)
    if not PYTHON_MIN <= sys.version_info[:2] < PYTHON_END:
        print(
            f"setup: {sys.executable} is Python {platform.python_version()}; flash_cute needs 3.10 "
            "to 3.13. Name another interpreter: make demo PYTHON=python3.12",
            file=sys.stderr,
        )
        return 1
    venv = options.venv.resolve()
    driver, base_torch = cuda_driver_version(), base_torch_version()
    requirement, driver_extras = plan(driver, base_torch, options.torch)
    key, wanted = digest(requirement), {*options.extra, *driver_extras}
    done = completed_extras(venv, key)
    if done is not None and wanted <= done:
        return 0
    wanted |= done or set()
    print(f"setup: {describe(driver, requirement, base_torch)}, into {venv}", flush=True)
    try:
        create(venv, share_base=not requirement)
        install(venv, requirement, sorted(wanted))
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    (venv / STAMP).write_text("\n".join([key, *sorted(wanted)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
