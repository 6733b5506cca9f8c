"""Command line: `python -m flash_cute doctor | precompile | cache`.

- doctor      versions, GPU, cache, tools, and a small self check; exits 1 when something is wrong
- precompile  fills the cache on disk, without a GPU if --arch names one
- cache       shows or empties the cache
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch

import flash_cute
from flash_cute import cache, compile, env, reference, selection
from flash_cute.errors import FlashCuteError
from flash_cute.problem import AttentionProblem, Lengths, Options, attention_request
from flash_cute.target import KNOWN_ARCHS, Target

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SELF_CHECK_ARCH = "sm_90a"  # what a machine without a GPU compiles in the self check

Line = tuple[str, str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        return cast("Callable[[argparse.Namespace], int]", options.run)(options)
    except (FlashCuteError, ValueError) as error:
        print(f"flash_cute: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m flash_cute", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="show versions, GPU and cache; check that it works")
    doctor.add_argument("--no-check", action="store_true", help="only show, run nothing")
    doctor.set_defaults(run=run_doctor)

    fill = commands.add_parser(
        "precompile",
        help="compile kernels into the cache on disk",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog="Every combination of the lists is compiled. A cache made by root for another user "
        "has to be made readable: chmod -R a+rX DIRECTORY.",
    )
    fill.add_argument("--arch", help=f"one of {', '.join(KNOWN_ARCHS)}; default: this GPU's")
    fill.add_argument("--head-dim", type=_head_dims, default="64,128", help="as 64,128,192x128")
    fill.add_argument("--dtype", type=_choices(DTYPES), default="bf16,fp16", help="bf16, fp16")
    fill.add_argument("--causal", type=_choices(_YES_NO), default="yes,no", help="yes, no")
    fill.add_argument("--lse", type=_choices(_YES_NO), default="yes,no", help="return_lse: yes, no")
    fill.add_argument("--heads", type=_heads, default="16", help="query heads, or query/key: 32/8")
    fill.add_argument("--seqlen", type=int, default=4096, help="typical length, for the choice")
    jobs = min(8, os.cpu_count() or 1)
    fill.add_argument("-j", "--jobs", type=int, default=jobs, help="processes")
    fill.add_argument("-q", "--quiet", action="store_true", help="no progress")
    fill.set_defaults(run=run_precompile)

    store = commands.add_parser("cache", help="show or empty the cache")
    store.add_argument("action", nargs="?", choices=("info", "clear", "path"), default="info")
    store.set_defaults(run=run_cache)
    return parser


# -- cache ----------------------------------------------------------------------------------------


def run_cache(options: argparse.Namespace) -> int:
    """Show where the cache is and what it holds, or delete its entries."""
    info = cache.cache_info()
    if info.directory is None:
        print("the cache on disk is switched off (FLASH_CUTE_DISK_CACHE=0)")
    elif options.action == "path":
        print(info.directory)
    elif options.action == "clear":
        print(f"{cache.clear_cache()} entries deleted from {info.directory}")
    else:
        print(f"{info.directory}: {info.entries} entries, {info.bytes / 2**20:.1f} MiB")
    return 0


# -- precompile -----------------------------------------------------------------------------------

_YES_NO = {"yes": True, "no": False}


def _choices(table: dict[str, Any]) -> Callable[[str], list[Any]]:
    def parse(text: str) -> list[Any]:
        names = text.split(",")
        if wrong := [name for name in names if name not in table]:
            raise argparse.ArgumentTypeError(f"{wrong[0]!r} is none of {', '.join(table)}")
        return [table[name] for name in names]

    return parse


def _head_dims(text: str) -> list[tuple[int, int]]:
    pairs = [item.split("x") for item in text.split(",")]
    return [(int(pair[0]), int(pair[-1])) for pair in pairs]


def _heads(text: str) -> tuple[int, int]:
    query, _, key = text.partition("/")
    return int(query), int(key or query)


def _problem(
    heads: tuple[int, int], seqlen: int, head_dims: tuple[int, int], **options: Any
) -> AttentionProblem:
    """Describe a call on a GPU that need not be there."""
    return AttentionProblem(
        device=torch.device("cuda", 0),
        batch=1,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        num_heads_q=heads[0],
        num_heads_kv=heads[1],
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
        **options,
    )


def run_precompile(options: argparse.Namespace) -> int:
    """Compile every combination of the options into the cache on disk."""
    if options.arch:
        os.environ["FLASH_CUTE_ARCH"] = Target.from_arch(options.arch).arch
    if cache.disk_cache() is None:
        print("flash_cute: there is no cache on disk to fill", file=sys.stderr)
        return 1
    problems = [
        _problem(
            heads=options.heads,
            seqlen=options.seqlen,
            head_dims=head_dims,
            dtype=dtype,
            causal=causal,
            return_lse=return_lse,
        )
        for head_dims in options.head_dim
        for dtype in options.dtype
        for causal in options.causal
        for return_lse in options.lse
    ]
    info = compile.warmup(problems, progress=not options.quiet, jobs=options.jobs)
    print(f"{info.directory}: {info.entries} entries, {info.bytes / 2**20:.1f} MiB")
    return 0


# -- doctor ---------------------------------------------------------------------------------------


def run_doctor(options: argparse.Namespace) -> int:
    """Show the surroundings and run one small self check; 1 when something is wrong."""
    problems: list[str] = []
    _print("versions", _versions(problems))
    _print("settings", _settings())
    try:
        env.settings()
    except ValueError as error:
        problems.append(str(error))  # and what depends on them cannot be looked at
    else:
        _print("gpu", _gpu(problems))
        _print("cache", _cache(problems))
    _print("tools", _tool_lines())
    if not options.no_check and not problems:
        _print("self check", _self_check(problems))
    for problem in problems:
        print(f"\nPROBLEM: {problem}")
    print(f"\n{'everything looks right' if not problems else f'{len(problems)} problem(s)'}")
    return 1 if problems else 0


def _print(title: str, lines: Iterable[Line]) -> None:
    print(title, flush=True)
    for name, value in lines:
        print(f"  {name:<30} {value}", flush=True)


def _versions(problems: list[str]) -> Iterable[Line]:
    yield "flash_cute", flash_cute.__version__
    yield "python", f"{platform.python_version()} ({platform.platform()})"
    yield "torch", f"{torch.__version__} (CUDA {torch.version.cuda})"
    for name in (env.DSL.distribution, *env.DSL_LIBRARIES, env.TVM_FFI.distribution, "triton"):
        yield name, env.installed_version(name) or "not installed"
    try:
        env.check_dependencies()
        yield "runtime library", str(compile.runtime_library())
    except FlashCuteError as error:
        problems.append(str(error))


def _gpu(problems: list[str]) -> Iterable[Line]:
    driver = compile.driver_cuda_version()
    yield "driver", "none" if driver is None else f"for CUDA {driver}"
    if not torch.cuda.is_available():
        yield "GPU", "none: CPU tensors run the reference; kernels can be compiled, not run"
        if driver is not None:
            problems.append(f"there is a driver, but torch {torch.__version__} sees no GPU")
    for index in range(torch.cuda.device_count()):
        yield f"cuda:{index}", torch.cuda.get_device_name(index)
    try:
        target = selection.current_target()
        yield "compiles for", f"{target.arch}, {target.num_sms} SMs, {target.smem_bytes} B a block"
    except FlashCuteError as error:
        if torch.cuda.is_available():
            problems.append(str(error))
    yield "host", env.host_cpu()


def _cache(problems: list[str]) -> Iterable[Line]:
    info = cache.cache_info()
    if info.directory is None:
        yield "directory", "none: compiled kernels stay in memory"
        return
    yield "directory", info.directory
    yield "entries", f"{info.entries} ({info.bytes / 2**20:.1f} MiB)"
    disk = cache.disk_cache()
    if disk is None:
        problems.append(f"the cache directory {info.directory} cannot be used, see the warning")
    else:
        yield "writable", "yes" if os.access(disk.directory, os.W_OK) else "no: read only"


def _tool_lines() -> Iterable[Line]:
    linker = compile.find_linker()
    yield "linker", linker or "none: cached kernels load through the DSL, a second slower"
    for name in ("cuobjdump", "ptxas"):
        found = compile.find_tools(name)
        yield name, found[0] if found else "none: no registers and spills in reports"


def _settings() -> Iterable[Line]:
    for variable in env.VARIABLES:
        yield variable.name, os.environ.get(variable.name) or f"not set: {variable.default}"


def _self_check(problems: list[str]) -> Iterable[Line]:
    """Compare one small call with an independent result; without a GPU, also compile a kernel."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 96, 4, 64, generator=generator).half() for _ in range(3))
    rows = [x.double().transpose(1, 2) for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(
        rows[0], rows[1], rows[2], is_causal=True
    ).transpose(1, 2)
    # float16 rounds the result to 2^-11 of values that stay below 4.
    results = {"reference on the CPU": _reference(q, k, v)}
    if device == "cuda":
        out = flash_cute.flash_attn_func(q.cuda(), k.cuda(), v.cuda(), causal=True)
        results["kernel on the GPU"] = cast(torch.Tensor, out).cpu()
    for name, result in results.items():
        error = float((result.double() - expected).abs().max())
        yield name, f"largest difference to PyTorch {error:.1e}"
        if not error < 4e-3:
            problems.append(f"{name}: largest difference {error:.1e}, expected below 4e-3")
    if device == "cpu":
        yield from _compile_check(problems)


def _reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    problem, inputs = attention_request(q, k, v, Options(causal=True), Lengths())
    return reference.attention(problem, inputs)[0]


def _compile_check(problems: list[str]) -> Iterable[Line]:

    problem = _problem((16, 16), 4096, (64, 64), dtype=torch.float16, causal=True)
    target = Target.from_arch(env.settings().arch or SELF_CHECK_ARCH)
    try:
        key = selection.key_for(problem, target)
        report = compile.inspect_kernel(compile.kernel_for(key), target.arch)
        yield "compiled, not run", report.summary()
        for missing in report.missing:
            yield "not found", missing
        if report.spill_store_bytes:
            problems.append(f"{report.name} spills {report.spill_store_bytes} bytes")
    except FlashCuteError as error:
        problems.append(str(error))


if __name__ == "__main__":
    sys.exit(main())
