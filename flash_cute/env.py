"""What the surroundings decide: environment variables, versions of dependencies, the host CPU.

Every FLASH_CUTE_* variable is read here, and only here; VARIABLES is their table.
They are read again at every use, on the path of a first call only; a warm call reads none of them.
Nothing here imports torch, the DSL or the driver: versions come from the installed metadata.
"""

from __future__ import annotations

import difflib
import enum
import functools
import hashlib
import importlib.metadata
import logging
import os
import platform
import re
import sys
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flash_cute.errors import DependencyError

PREFIX = "FLASH_CUTE_"
LOGGER = logging.getLogger("flash_cute")


class CompilePolicy(enum.Enum):
    """What happens when a kernel has to be compiled outside `warmup`."""

    ALLOW = "allow"
    WARN = "warn"
    ERROR = "error"


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, what it takes and what it means."""

    name: str
    values: str
    default: str
    meaning: str


# name, values, default, meaning
VARIABLES = (
    Variable("FLASH_CUTE_CACHE_DIR", "a path", "$XDG_CACHE_HOME/flash_cute", "compiled kernels"),
    Variable("FLASH_CUTE_DISK_CACHE", "0, 1", "1", "0 keeps compiled kernels in memory only"),
    Variable("FLASH_CUTE_COMPILE", "allow, warn, error", "allow", "a compile outside warmup"),
    Variable("FLASH_CUTE_ARCH", "sm_90a, ...", "the GPU's", "compile for this GPU; needs no GPU"),
    Variable("FLASH_CUTE_LOG", "off, info, debug", "off", "compiles and cache events on stderr"),
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """The FLASH_CUTE_* variables, read and checked."""

    cache_dir: str | None = None
    disk_cache: bool = True
    compile_policy: CompilePolicy = CompilePolicy.ALLOW
    arch: str | None = None
    log: str = "off"


def settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the variables from `environ` (the process's when None).

    Raises: ValueError naming the variable, what it holds and what it may hold. A variable that
            starts with FLASH_CUTE_ and is none of ours is warned about once: a misspelt option
            must not be ignored in silence.
    """
    environ = os.environ if environ is None else environ
    _warn_unknown(frozenset(name for name in environ if name.startswith(PREFIX)))

    def choice(name: str, allowed: tuple[str, ...], default: str) -> str:
        value = environ.get(name, "").strip().lower() or default
        if value not in allowed:
            raise ValueError(f"{name} is {value!r}, expected one of {', '.join(allowed)}")
        return value

    policies = tuple(policy.value for policy in CompilePolicy)
    return Settings(
        cache_dir=environ.get("FLASH_CUTE_CACHE_DIR", "").strip() or None,
        disk_cache=choice("FLASH_CUTE_DISK_CACHE", ("0", "1"), "1") == "1",
        compile_policy=CompilePolicy(choice("FLASH_CUTE_COMPILE", policies, "allow")),
        arch=environ.get("FLASH_CUTE_ARCH", "").strip() or None,
        log=choice("FLASH_CUTE_LOG", ("off", "info", "debug"), "off"),
    )


@functools.lru_cache(maxsize=8)
def _warn_unknown(names: frozenset[str]) -> None:
    known = [variable.name for variable in VARIABLES]
    for name in sorted(names - set(known)):
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else f"; known are {', '.join(known)}"
        warnings.warn(f"{name} is no option of flash_cute{hint}", RuntimeWarning, stacklevel=3)


_handler: logging.Handler | None = None
_handler_lock = threading.Lock()


def configure_logging(level: str) -> None:
    """Send the package's log to stderr at `level` ("off", "info", "debug"); safe to repeat."""
    global _handler
    if level == "off" and _handler is None:
        return
    with _handler_lock:
        if _handler is None:
            _handler = logging.StreamHandler()
            _handler.setFormatter(logging.Formatter("flash_cute: %(message)s"))
            LOGGER.addHandler(_handler)
        _handler.setLevel(logging.CRITICAL if level == "off" else level.upper())
        if level != "off":
            LOGGER.setLevel(level.upper())


# -- dependencies ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Requirement:
    """A distribution and the range of versions this package is tested with."""

    distribution: str
    minimum: str
    below: str | None = None
    extra: str = ""  # named in the command that installs it, not required to be present

    def specifier(self) -> str:
        """Return the range as pip spells it: ">=4.8,<4.9"."""
        return f">={self.minimum}" + (f",<{self.below}" if self.below else "")

    def command(self) -> str:
        """Return the pip command that brings a version of the range."""
        return f"pip install '{self.distribution}{self.extra}{self.specifier()}'"

    def accepts(self, version: str) -> bool:
        """Say whether `version` lies in the range; a pre-release of a bound does not."""
        key = version_key(version)
        if key < version_key(self.minimum):
            return False
        return self.below is None or key[0] < version_key(self.below)[0]


# pyproject.toml declares the same ranges; tests/test_packaging.py compares the two.
DSL = Requirement("nvidia-cutlass-dsl", "4.8", "4.9", "[cu13]")
TVM_FFI = Requirement("apache-tvm-ffi", "0.1.15")
REQUIREMENTS = (DSL, TVM_FFI)

# The parts one release of the DSL is shipped in. pip keeps a part of another release when only the
# main package is upgraded with --no-deps, and the mixture fails in obscure ways.
DSL_LIBRARIES = (
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
)


def version_key(version: str) -> tuple[tuple[int, ...], bool]:
    """Order versions: (release numbers without trailing zeros, is not a pre-release)."""
    match = re.match(r"v?(?:\d+!)?(\d+(?:\.\d+)*)(.*)", version.strip())
    if match is None:
        return ((), False)
    release = [int(number) for number in match.group(1).split(".")]
    while len(release) > 1 and release[-1] == 0:
        release.pop()
    suffix = match.group(2).split("+")[0]
    return (tuple(release), re.match(r"[-_.]?(a|b|c|rc|dev|alpha|beta|pre)", suffix) is None)


def installed_version(distribution: str) -> str | None:
    """Return the installed version of a distribution, or None; imports nothing of it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Versions:
    """The versions that shape a compiled kernel."""

    dsl: str
    tvm_ffi: str


@functools.lru_cache(maxsize=1)
def check_dependencies() -> Versions:
    """Check the DSL and tvm-ffi against the tested ranges; called when the DSL is first needed.

    Raises: DependencyError with one sentence: what was found, what is needed, the command that
            brings it.
    """
    found: dict[str, str] = {}
    for requirement in REQUIREMENTS:
        version = installed_version(requirement.distribution)
        if version is None or not requirement.accepts(version):
            state = "is not installed" if version is None else f"{version} is installed"
            raise DependencyError(
                f"{requirement.distribution} {state}, flash_cute needs "
                f"{requirement.distribution}{requirement.specifier()}: {requirement.command()}"
            )
        found[requirement.distribution] = version
    _check_dsl_libraries(found[DSL.distribution])
    return Versions(found[DSL.distribution], found[TVM_FFI.distribution])


def _check_dsl_libraries(dsl: str) -> None:
    """Check that the DSL's parts are of one release, and that one CUDA flavour is there."""
    command = f"pip install --force-reinstall '{DSL.distribution}{DSL.extra}=={dsl}'"
    parts = {name: installed_version(name) for name in DSL_LIBRARIES}
    mixed = [f"{name} {version}" for name, version in parts.items() if version not in (None, dsl)]
    if mixed:
        raise DependencyError(
            f"{DSL.distribution} {dsl} is installed beside {', '.join(mixed)}, flash_cute needs "
            f"all of its libraries in one version: {command}"
        )
    flavours = [name for name in DSL_LIBRARIES if re.search(r"-cu\d+$", name)]
    if all(parts[name] is None for name in flavours):
        raise DependencyError(
            f"{DSL.distribution} {dsl} is installed without its libraries, flash_cute needs "
            f"{' or '.join(flavours)}: {command}"
        )


# Settings of the DSL that say where things are or what is printed, not what is compiled. The
# architecture is given with every compile, and the libraries are told apart by their flavour.
_DSL_HARMLESS = re.compile(
    r"CUTE_DSL_(ARCH|LIBS|LOG_\w+|CACHE_DIR|DUMP_DIR|PRINT_\w+|SHOW_STACKTRACE|FILTER_STACKTRACE"
    r"|JIT_\w+|NO_CACHE|DISABLE_FILE_CACHING|ENABLE_TVM_FFI|WARNINGS_\w+)"
)


def compiler_environment(environ: Mapping[str, str] | None = None) -> str:
    """Return the CUTE_DSL_* variables that may change what the DSL compiles, as text.

    A kernel compiled with line numbers or assertions must not be served to a process that asks for
    none, nor the other way round. A variable not known to be harmless counts.
    """
    environ = os.environ if environ is None else environ
    names = (name for name in environ if name.startswith("CUTE_DSL_") and environ[name])
    chosen = sorted(name for name in names if not _DSL_HARMLESS.fullmatch(name))
    return " ".join(f"{name}={environ[name]}" for name in chosen)


# -- the host CPU ---------------------------------------------------------------------------------

_ISA_PREFIXES = ("sse", "ssse", "avx", "bmi", "amx")
_ISA_FLAGS = frozenset(
    "abm adx aes asimd asimddp f16c fma fphp gfni i8mm movbe pclmulqdq popcnt sha_ni sve sve2 "
    "vaes vpclmulqdq".split()
)


@functools.lru_cache(maxsize=1)
def host_cpu() -> str:
    """Name the platform and the instruction sets that compiled host code may rely on.

    The DSL compiles the host side of a kernel for the CPU it runs on, so a cache shared between
    machines (a network home, an image) must tell CPUs apart: the wrong one is an illegal
    instruction, not an error. Reads the first block of /proc/cpuinfo only; the whole file takes
    tens of milliseconds on a machine with hundreds of cores.
    """
    try:
        with Path("/proc/cpuinfo").open() as file:
            head = file.read(8192)
    except OSError:
        head = ""
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", head, re.MULTILINE)
    flags = sorted(
        flag
        for flag in set(match.group(1).split() if match else ())
        if flag.startswith(_ISA_PREFIXES) or flag in _ISA_FLAGS
    )
    digest = hashlib.sha256(" ".join(flags).encode()).hexdigest()[:12]
    return f"{sys.platform}-{platform.machine()}-{digest}"
