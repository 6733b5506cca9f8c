"""From a kernel object to machine code for Hopper: compile, lower, assemble. Needs no GPU."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm100_on_hopper import lowering
from sm100_on_hopper.lowering import PLAIN, Fault, Lowering, Mode, RefusalError

HERE = Path(__file__).resolve().parent
TOOLS = ("nvcc", "ptxas")
REGISTERS_PER_SM, MOST_REGISTERS = 65536, 255
SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}  # bytes, by the bits in a type's name


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter as PTX declares it; `is_read` where the kernel mentions it."""

    size: int
    alignment: int
    is_read: bool


@dataclass(frozen=True)
class Program:
    """A kernel that Hopper can run, with what a launch has to know."""

    entry: str
    cubin: bytes
    parameters: tuple[Parameter, ...]
    threads: int
    mode: Mode
    uses_tensor_memory: bool
    tma_ranks: frozenset[int]


def missing_tools() -> list[str]:
    """The CUDA tools that are not on PATH."""
    return [name for name in TOOLS if shutil.which(name) is None]


def kernel_ptx(kernel: Any, arch: str) -> str:
    """Compile a kernel object of ours for an architecture and return its PTX."""
    from flash_cute.compile import inspect_kernel

    return inspect_kernel(kernel, arch).ptx


def build(ptx: str, mode: Mode = PLAIN, faults: Sequence[Fault] = ()) -> Program:
    """Lower PTX for sm_100a, or take PTX for sm_90a as it is, and assemble it for Hopper.

    Raises: RefusalError for what has no equivalent, in ptxas's words where ptxas refuses it.
    """
    for fault in faults:
        ptx = fault.plant(ptx)
    parameters, entry = declared_parameters(ptx), entry_name(ptx)
    is_hopper = re.search(r"^\.target\s+sm_90a\b", ptx, flags=re.M) is not None
    if is_hopper:
        version = f".version {lowering.VERSION}"
        lowered = re.sub(r"^\.version .*$", version, ptx, count=1, flags=re.M)
    else:
        lowered = Lowering(mode).run(ptx)
    uses_tensor_memory = re.search(r"\bcall sm100_|\[sm100_memory\]", lowered) is not None
    if uses_tensor_memory:
        lowered = lowering.join(lowered, device_functions(mode.lazy))
    threads = thread_count(ptx)
    cubin = assemble(lowered, min(MOST_REGISTERS, REGISTERS_PER_SM // threads // 8 * 8))
    ranks = tma_ranks(ptx)
    return Program(entry, cubin, parameters, threads, mode, uses_tensor_memory, ranks)


@functools.cache
def device_functions(lazy: bool) -> str:
    """The functions of tensor_memory.cu as PTX."""
    with tempfile.TemporaryDirectory(prefix="sm100-") as scratch:
        out = Path(scratch, "functions.ptx")
        options = ["-std=c++17", "-O3", "-arch=sm_90a", "-ptx", "-rdc=true"]
        options += ["-DSM100_LAZY"] if lazy else []
        run("nvcc", *options, str(HERE / "tensor_memory.cu"), "-o", str(out))
        return out.read_text()


def assemble(ptx: str, registers: int) -> bytes:
    """Machine code for sm_90a.

    Raises: RefusalError with the errors of ptxas.
    """
    with tempfile.TemporaryDirectory(prefix="sm100-") as scratch:
        source, cubin = Path(scratch, "kernel.ptx"), Path(scratch, "kernel.cubin")
        source.write_text(ptx)
        limit = f"-maxrregcount={registers}"
        run("ptxas", "-arch=sm_90a", "-w", limit, str(source), "-o", str(cubin))
        return cubin.read_bytes()


def run(*command: str) -> None:
    """Run a tool.

    Raises: RefusalError with its words where it fails.
    """
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RefusalError(f"{command[0]}: {(done.stderr + done.stdout).strip()[-2000:]}")


# -- what the PTX says of a launch


def entry_name(ptx: str) -> str:
    """The only kernel in a text."""
    names = re.findall(r"\.entry\s+([\w$]+)", ptx)
    if len(names) != 1:
        raise RefusalError(f"PTX with {len(names)} kernels")
    return names[0]


def declared_parameters(ptx: str) -> tuple[Parameter, ...]:
    """The parameters of the kernel, in order."""
    header = re.search(r"\.entry\s+[\w$]+\s*\((.*?)\)", ptx, flags=re.S)
    if header is None:
        raise RefusalError("PTX without a kernel")
    body = ptx[header.end() :]
    found = []
    pattern = (
        r"\.param\s+(?:\.align\s+(\d+)\s+)?\.[busf](\d+)"
        r"(?:\s+\.ptr(?:\s+\.\w+)?(?:\s+\.align\s+\d+)?)?\s+([\w$]+)(?:\[(\d+)\])?\s*$"
    )
    for declaration in header[1].split(","):
        parsed = re.match(pattern, declaration.strip())
        if parsed is None:
            raise RefusalError(f"the parameter {declaration.strip()!r}")
        alignment, bits, name, length = parsed.groups()
        size = SIZES[bits]
        is_read = re.search(rf"(?<![\w$]){re.escape(name)}(?![\w$])", body) is not None
        found.append(Parameter(size * int(length or 1), int(alignment or size), is_read))
    return tuple(found)


def tma_ranks(ptx: str) -> frozenset[int]:
    """The dimensions that its tensor maps have; the hardware stops a kernel at another number."""
    return frozenset(map(int, re.findall(r"\bcp\.async\.bulk\.tensor\.(\d)d\b", ptx)))


def thread_count(ptx: str) -> int:
    """The threads of a CTA, which our kernels fix at compile time."""
    found = re.search(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", ptx)
    if found is None:
        raise RefusalError("a kernel without .reqntid")
    x, y, z = (int(extent or 1) for extent in found.groups())
    if (y, z) != (1, 1) or x % 32:
        raise RefusalError(f"CTAs of {x} x {y} x {z} threads")
    return x
