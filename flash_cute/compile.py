"""From a kernel object to something that can be called, and everything that is asked about one.

`executable(key)` is the way in for launches: memory, then disk, then a compile. What it returns is
a bare function of the shared object a compile produces, also right after the compile: one code path
for fresh and cached kernels, and less than half the call overhead of the compiler's own object.

A kernel object, as selection builds it, has

    name             the symbol, e.g. "flash_fwd_sm90_bf16_d128_m128n128_causal"
    compile_args()   placeholder arguments in the order of __call__: no tensors, no driver
    __call__         @cute.jit: describes, guards, launches
    kernel           @cute.kernel: the device function
    smem_bytes       optional: dynamic shared memory per block, for `inspect_kernel`

Contract: the DSL keeps global state while it compiles and is not safe to use from several threads
          (tried with 4.8.1), so it runs under one lock; look-ups and loading from disk never take
          it. Processes compile in parallel.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import functools
import importlib.util
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from flash_cute import cache, env
from flash_cute.cache import CacheInfo, Entry, Executable, Recipe
from flash_cute.env import CompilePolicy
from flash_cute.errors import (
    CompileDisallowed,
    CompileError,
    DependencyError,
    FlashCuteError,
)
from flash_cute.problem import AttentionProblem
from flash_cute.subclassing import place_of


class CompileWarning(RuntimeWarning):
    """A kernel was compiled outside `warmup` while FLASH_CUTE_COMPILE=warn."""


class Kernel(Protocol):
    """What a kernel object has to offer; the module's docstring says more."""

    name: str

    def compile_args(self) -> tuple[Any, ...]:
        """Return placeholder arguments in the order of __call__."""
        ...


class Key(Hashable, Protocol):
    """What compiling needs of selection's KernelKey: the rest is opaque here.

    A key with a true `is_in_memory_only` has no text that means the same in another process.
    """

    @property
    def arch(self) -> str: ...


KernelFactory = Callable[[Any], Kernel]


def kernel_for(key: Any) -> Kernel:
    """Build the kernel object of a key; imports the DSL, so a cached kernel never comes here."""
    from flash_cute import selection

    return selection.kernel_for(key)


# -- the DSL's runtime library --------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def runtime_library() -> Path:
    """Find the runtime library that compiled kernels call, without importing the DSL.

    Takes the flavour the DSL itself takes: the one named in CUTE_DSL_LIBS, else the newest that
    the driver supports, else (no driver) the newest installed.
    Raises: DependencyError when there is none.
    """
    name = "libcute_dsl_runtime.so"
    for item in os.environ.get("CUTE_DSL_LIBS", "").split(os.pathsep):
        if item.endswith(name):
            return Path(item)
    found = importlib.util.find_spec("nvidia_cutlass_dsl")
    roots = list(found.submodule_search_locations or ()) if found is not None else []
    flavours = {
        int(match.group(1)): path
        for root in roots
        for path in Path(root).glob(f"cu*/lib/{name}")
        if (match := re.fullmatch(r"cu(\d+)", path.parent.parent.name))
    }
    driver = driver_cuda_version()
    usable = [cuda for cuda in flavours if driver is None or cuda <= driver]
    if not usable:
        have = ", ".join(f"cu{cuda}" for cuda in sorted(flavours)) or "none"
        limit = "" if driver is None else f" that a driver for CUDA {driver} can use"
        raise DependencyError(
            f"{have} of the DSL's runtime libraries found, flash_cute needs one{limit}: "
            f"{env.DSL.command()}"
        )
    return flavours[max(usable)]


@functools.lru_cache(maxsize=1)
def driver_cuda_version() -> int | None:
    """Return the major CUDA version the installed driver supports, or None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        version = ctypes.c_int(0)
        if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000


def toolkit() -> str:
    """Name the flavour of the DSL: "cu13". Its assembler and runtime differ between flavours."""
    return runtime_library().parent.parent.name


@functools.lru_cache(maxsize=1)
def _load_runtime() -> ctypes.CDLL:
    # Global, so that the loader finds in it what a kernel's shared object leaves undefined.
    return ctypes.CDLL(str(runtime_library()), mode=ctypes.RTLD_GLOBAL)


# -- compiling ------------------------------------------------------------------------------------

_dsl_lock = threading.Lock()


def _after_fork() -> None:
    global _dsl_lock
    _dsl_lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel as bytes that can be kept and loaded in another process.

    `kind` is "so", a shared object, or "o", an object file that could not be linked for want of a
    linker; the second needs the DSL to be loaded.
    """

    symbol: str
    arch: str
    kind: str
    payload: bytes
    seconds: float

    def entry(self) -> Entry:
        """Return what the cache keeps of it."""
        facts = {"symbol": self.symbol, "arch": self.arch, "kind": self.kind}
        return Entry(self.payload, {**facts, "seconds": f"{self.seconds:.3f}"})

    def load(self) -> Executable:
        """Load it into this process; see `load_entry`."""
        return load_entry(self.entry())


def compile_kernel(kernel: Kernel, arch: str) -> Compiled:
    """Compile a kernel for an architecture: no tensors, no GPU, no cache, nothing launched.

    Raises: DependencyError when the DSL is not usable, CompileError when it refuses the kernel;
            InvalidProblem and UnsupportedProblem of the kernel's own guards pass through.
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="flash_cute-") as scratch:
        object_file = Path(scratch, "kernel.o")
        with _dsl_lock:
            compiled = _run_dsl(kernel, arch)
            _export(compiled, object_file, kernel.name)
            del (
                compiled
            )  # it holds the module and, where the GPU is ours, a second copy of the code
        shared = _link(object_file)
        kind, payload = ("o", object_file.read_bytes()) if shared is None else ("so", shared)
    seconds = time.perf_counter() - started
    env.LOGGER.info("compiled %s for %s in %.2f s", kernel.name, arch, seconds)
    return Compiled(kernel.name, arch, kind, payload, seconds)


def _run_dsl(kernel: Kernel, arch: str, options: str = "") -> Any:
    """Run the DSL on a kernel; the caller holds the lock."""
    if re.fullmatch(r"[A-Za-z_]\w*", kernel.name) is None:
        raise ValueError(f"kernel.name is {kernel.name!r}, expected a C identifier")
    env.check_dependencies()
    import cutlass.cute as cute

    # The entry in the PTX, which profilers show, is then the kernel's name and not a mangled one.
    set_name = getattr(getattr(type(kernel), "kernel", None), "set_name_prefix", None)
    if set_name is not None:
        set_name(kernel.name, remove_cutlass_symbol=True, keep_mangled_name=False)
    flags = f"--enable-tvm-ffi --gpu-arch={arch} {options}".strip()
    try:
        return cast(Any, cute).compile(kernel, *kernel.compile_args(), options=flags)
    except FlashCuteError:
        raise
    except Exception as error:
        where = place_of(error, type(kernel))
        raise CompileError(
            f"compiling {kernel.name} for {arch} failed{where}: {_short(error)}"
        ) from error


def _export(compiled: Any, path: Path, symbol: str) -> None:
    # Only the one symbol is visible: two kernels in a process then share no name by accident.
    compiled.export_to_c(str(path), function_name=symbol, export_only_tvm_ffi_symbols=True)


def _short(error: Exception) -> str:
    """Return the first lines of an error, without colours and ornaments."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:400]}"


_LINKERS = ("ld", "ld.lld", "ld.gold", "ld.mold", "cc", "gcc", "clang")


@functools.lru_cache(maxsize=1)
def find_linker() -> str | None:
    """Return the path of a linker, or of a compiler that calls one; None when there is none."""
    return next((path for name in _LINKERS if (path := shutil.which(name))), None)


def _link(object_file: Path) -> bytes | None:
    """Link an object file to a shared object; None where there is no linker that works."""
    linker = find_linker()
    if linker is None:
        env.LOGGER.info("no linker found (%s): kernels load slower", ", ".join(_LINKERS))
        return None
    output = object_file.with_suffix(".so")
    command = [linker, "-shared", "-o", str(output), str(object_file)]
    if not Path(linker).name.startswith("ld"):
        command.insert(1, "-nostdlib")
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        env.LOGGER.info("%s failed: %s", linker, done.stderr.strip())
        return None
    return output.read_bytes()


# -- loading --------------------------------------------------------------------------------------


def load_entry(entry: Entry) -> Executable:
    """Load a compiled kernel; a shared object needs no import of the DSL.

    Raises: DependencyError when the DSL's runtime library is not there; RuntimeError or OSError
            when the bytes cannot be loaded.
    """
    symbol = entry.metadata["symbol"]
    load = _load_shared if entry.metadata["kind"] == "so" else _load_object
    failures: list[str] = []
    # The second is for machines that mount /tmp without the right to execute.
    for parent in (tempfile.gettempdir(), "/dev/shm"):
        try:
            with tempfile.TemporaryDirectory(prefix="flash_cute-", dir=parent) as scratch:
                # The mapping outlives the file, and no one can alter a file that is gone. The
                # directory's random name keeps the loader from taking it for an earlier one.
                path = Path(scratch, f"{symbol[:80]}.{entry.metadata['kind']}")
                path.write_bytes(entry.payload)
                return load(path, symbol)
        except FlashCuteError:
            raise
        except Exception as error:
            failures.append(f"in {parent}: {_short(error)}")
    raise RuntimeError(f"cannot load {symbol}: {'; '.join(failures)}")


def _load_shared(path: Path, symbol: str) -> Executable:
    env.check_dependencies()
    import tvm_ffi

    _load_runtime()
    return cast(Any, tvm_ffi).load_module(path).get_function(symbol)


def _load_object(path: Path, symbol: str) -> Executable:
    env.check_dependencies()
    with _dsl_lock:
        import cutlass.cute as cute

        module = cast(Any, cute).runtime.load_module(str(path), enable_tvm_ffi=True)
        return cast(Executable, module[symbol])


# -- from a key to an executable ------------------------------------------------------------------

_after_warmup: CompilePolicy | None = None
_warming = threading.local()


def executable(key: Key) -> Executable:
    """Return the compiled kernel of `key`: from memory, from disk, or compiled now.

    It is called with plain Python values in the order of the kernel's `compile_args()`: pointers
    and the stream as int, scalars as int or float. Types and counts are checked by compiled code.
    Raises: CompileDisallowed when it has to be compiled and the policy forbids it; what
            `compile_kernel` and `load_entry` raise.
    """
    found = cache.lookup(key)
    return fetch(key, kernel_for) if found is None else found


def fetch(key: Key, factory: KernelFactory) -> Executable:
    """Return the compiled kernel of `key`, whose kernel object `factory(key)` builds if need be."""
    env.configure_logging(env.settings().log)
    recipe = Recipe(
        identity=None if _stays_here(key) else lambda: cache.identity(key, key.arch, toolkit()),
        permit=lambda: _permit(key),
        build=lambda: compile_kernel(factory(key), key.arch).entry(),
        load=load_entry,
    )
    return cache.fetch(key, recipe)


def _stays_here(key: Key) -> bool:
    return bool(getattr(key, "is_in_memory_only", False))


def _permit(key: Key) -> None:
    """Apply the compile policy to a compile that is about to start."""
    if getattr(_warming, "active", False):
        return
    policy = _after_warmup or env.settings().compile_policy
    if policy is CompilePolicy.ALLOW:
        return
    message = (
        f"a kernel for {key.arch} has to be compiled outside warmup; add its problem to "
        f"flash_cute.warmup(...) or to `python -m flash_cute precompile`: {key}"
    )
    if policy is CompilePolicy.ERROR:
        raise CompileDisallowed(message)
    warnings.warn(message, CompileWarning, stacklevel=2)


@contextlib.contextmanager
def _warmup_scope() -> Generator[None]:
    before = getattr(_warming, "active", False)
    _warming.active = True
    try:
        yield
    finally:
        _warming.active = before


# -- warm-up --------------------------------------------------------------------------------------


def warmup(
    items: Iterable[AttentionProblem | Key],
    *,
    progress: bool = True,
    jobs: int = 1,
    after: str | None = None,
) -> CacheInfo:
    """Compile or load the kernels of problems (or kernel keys), so that later calls find them.

    Needs no tensors, and no GPU either where FLASH_CUTE_ARCH names one. With `jobs` above 1 the
    kernels are compiled by that many processes, which needs the cache on disk. `after` decides
    what a later compile in this process does, over FLASH_CUTE_COMPILE: "allow", "warn", "error".
    `progress` keeps a line on stderr up to date.
    Raises: ValueError for a wrong `after` or `jobs`; whatever selection raises for a problem, and
            compiling for a kernel.
    """
    global _after_warmup
    policies = [policy.value for policy in CompilePolicy]
    if after is not None and after not in policies:
        raise ValueError(f"after is {after!r}, expected one of {', '.join(policies)} or None")
    keys = list(dict.fromkeys(key for item in items for key in _keys_of(item)))
    prepare(keys, kernel_for, progress=progress, jobs=jobs)
    if after is not None:
        _after_warmup = CompilePolicy(after)
    return cache.cache_info()


def _keys_of(item: AttentionProblem | Key) -> list[Key]:
    """The kernels of a problem: others append before it, and merge and count parts of its keys."""
    if not isinstance(item, AttentionProblem):
        return [item]
    from flash_cute import selection, splitting

    key = selection.key_for(item, selection.target_of(item))
    more = (splitting.merge_key(item, key), splitting.planner_key(item, key))
    more += (selection.append_key(item, key.arch),)
    return [cast(Key, key), *(cast(Key, other) for other in more if other is not None)]


def prepare(
    keys: Sequence[Key], factory: KernelFactory, *, progress: bool = True, jobs: int = 1
) -> None:
    """Make the kernels of `keys` ready in memory and on disk, whatever the compile policy says.

    Raises: ValueError when `jobs` is below 1, or above it without a cache on disk to meet in.
    """
    if jobs < 1:
        raise ValueError(f"jobs is {jobs}, expected at least 1")
    if jobs > 1 and cache.disk_cache() is None:
        raise ValueError(f"jobs is {jobs}, expected 1: there is no cache on disk to share")
    before, started = cache.cache_info(), time.perf_counter()
    line = _ProgressLine(len(keys), progress)
    with _warmup_scope():
        if jobs > 1:
            shared = [key for key in keys if not _stays_here(key)]
            _compile_in_processes(shared, factory, jobs, line)
        for key in keys:
            fetch(key, factory)
            if jobs == 1 or _stays_here(key):
                line.advance()
    now = cache.cache_info()
    line.finish(
        f"{len(keys)} kernels ready in {time.perf_counter() - started:.1f} s: "
        f"{now.compiles - before.compiles} compiled here, "
        f"{now.disk_hits - before.disk_hits} from disk"
    )


def _compile_in_processes(
    keys: Sequence[Key], factory: KernelFactory, jobs: int, line: _ProgressLine
) -> None:
    # Not forked: a child of a process with threads or a CUDA context is not safe to use.
    context = multiprocessing.get_context("spawn")
    workers = min(jobs, max(1, len(keys)))
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        futures = [pool.submit(_compile_in_worker, key, factory) for key in keys]
        try:
            for future in concurrent.futures.as_completed(futures):
                future.result()
                line.advance()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _compile_in_worker(key: Key, factory: KernelFactory) -> None:
    with _warmup_scope():
        fetch(key, factory)


class _ProgressLine:
    """A line on stderr that counts on a terminal; elsewhere only its result is written."""

    def __init__(self, total: int, visible: bool) -> None:
        self.total, self.visible, self.done = total, visible, 0
        self.started = time.perf_counter()
        self.is_terminal = visible and sys.stderr.isatty()
        self._show()

    def advance(self) -> None:
        """Count one more."""
        self.done += 1
        self._show()

    def finish(self, text: str) -> None:
        """Replace the line by its result."""
        if self.visible:
            sys.stderr.write(f"{chr(13) if self.is_terminal else ''}flash_cute: {text:<70}\n")
            sys.stderr.flush()

    def _show(self) -> None:
        if not self.is_terminal or not self.total:
            return
        width = 30
        filled = width * self.done // self.total
        bar = "#" * filled + "." * (width - filled)
        elapsed = time.perf_counter() - self.started
        sys.stderr.write(f"\rflash_cute: [{bar}] {self.done}/{self.total} {elapsed:.0f} s")
        sys.stderr.flush()


# -- looking into a kernel ------------------------------------------------------------------------


@dataclass(frozen=True)
class KernelReport:
    """What came out of a compile, for tests, CI and `make demo`.

    Units: bytes, and registers per thread. `stack_bytes` and `registers` are the machine code's;
           the spills are those of the external assembler, None where it is missing. `missing` says
           which tool was not found and what brings it.
    """

    name: str
    arch: str
    ptx: str
    cubin: bytes
    registers: int | None
    stack_bytes: int | None
    smem_bytes: int | None  # static and dynamic; the dynamic part is what the kernel declares
    spill_store_bytes: int | None
    spill_load_bytes: int | None
    missing: tuple[str, ...]

    def summary(self) -> str:
        """Return one line for people."""

        def shown(value: int | None) -> str:
            return "?" if value is None else str(value)

        spills = None
        if self.spill_store_bytes is not None and self.spill_load_bytes is not None:
            spills = self.spill_store_bytes + self.spill_load_bytes
        return (
            f"{self.name} ({self.arch}): {shown(self.registers)} registers, "
            f"{shown(spills)} bytes spilled, {shown(self.stack_bytes)} bytes of stack, "
            f"{shown(self.smem_bytes)} bytes of shared memory, cubin {len(self.cubin)} bytes"
        )


def inspect_kernel(kernel: Kernel, arch: str) -> KernelReport:
    """Compile a kernel for an architecture and report registers, stack, spills, shared memory.

    Needs no GPU. Uses cuobjdump and ptxas of the installed triton wheel, else of the CUDA toolkit
    on PATH. The DSL assembles with its own assembler, so registers, stack and shared memory are
    read from its machine code; spills are what ptxas says about the same PTX.
    """
    with tempfile.TemporaryDirectory(prefix="flash_cute-") as scratch, _dsl_lock:
        # A directory that exists, or the DSL puts the path in the place of the content.
        compiled = _run_dsl(kernel, arch, f"--keep-ptx --keep-cubin --dump-dir={scratch}")
        ptx, cubin = str(compiled.artifacts.PTX), bytes(compiled.artifacts.CUBIN)
    missing: list[str] = []
    usage = _resource_usage(cubin, missing)
    spills = _spills(ptx, arch, missing)
    static = usage.get("SHARED")
    dynamic = int(getattr(kernel, "smem_bytes", 0))
    return KernelReport(
        name=kernel.name,
        arch=arch,
        ptx=ptx,
        cubin=cubin,
        registers=usage.get("REG"),
        stack_bytes=usage.get("STACK"),
        smem_bytes=None if static is None else static + dynamic,
        spill_store_bytes=None if spills is None else spills[0],
        spill_load_bytes=None if spills is None else spills[1],
        missing=tuple(missing),
    )


def find_tools(*names: str) -> list[str]:
    """Return the paths of CUDA tools: of the triton wheel first, then on PATH."""
    found = importlib.util.find_spec("triton")
    roots = list(found.submodule_search_locations or ()) if found is not None else []
    folders = [Path(root, "backends", "nvidia", "bin") for root in roots]
    paths = [str(folder / name) for name in names for folder in folders if (folder / name).exists()]
    return paths + [path for name in names if (path := shutil.which(name))]


def _resource_usage(cubin: bytes, missing: list[str]) -> dict[str, int]:
    """Read {"REG": 168, "STACK": 0, "SHARED": 1024, ...} from machine code with cuobjdump."""
    tools = find_tools("cuobjdump")
    if not tools:
        missing.append("cuobjdump (registers, stack, shared memory): pip install triton")
        return {}
    with tempfile.TemporaryDirectory(prefix="flash_cute-") as scratch:
        path = Path(scratch, "kernel.cubin")
        path.write_bytes(cubin)
        text = _output([tools[0], "-res-usage", str(path)])
    usage: dict[str, int] = {}
    for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text):
        usage[name] = max(usage.get(name, 0), int(value))
    if "REG" not in usage:
        missing.append(f"{tools[0]} cannot read this machine code: {text.strip()[:200]}")
    return usage


def _spills(ptx: str, arch: str, missing: list[str]) -> tuple[int, int] | None:
    """Assemble the PTX once more with ptxas, which alone counts spilled bytes: (stores, loads)."""
    tools, reasons = find_tools("ptxas-blackwell", "ptxas"), list[str]()
    with tempfile.TemporaryDirectory(prefix="flash_cute-") as scratch:
        path = Path(scratch, "kernel.ptx")
        path.write_text(ptx)
        for tool in tools:  # the first one that knows the PTX version
            command = [tool, "-v", f"-arch={arch}", str(path), "-o", str(path.with_suffix(".out"))]
            text = _output(command)
            found = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
            if found:
                return sum(int(s) for s, _ in found), sum(int(l) for _, l in found)
            reasons.append(f"{tool}: {text.strip()[:200]}")
    missing.append("; ".join(reasons) or "ptxas (spilled bytes): pip install triton")
    return None


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return done.stdout + done.stderr
