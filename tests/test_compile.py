"""Compiling, loading and inspecting a real kernel: tests/toy_kernel.py, cross-compiled for sm_90a.

Also pins down what the DSL and tvm-ffi do with the Python values we pass, which their documentation
says little about. Without a GPU a compiled kernel is loaded and called up to the launch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from flash_cute import cache, compile, env, selection
from flash_cute.cache import CacheWarning, Entry
from flash_cute.env import CompilePolicy
from flash_cute.errors import CompileDisallowed, DependencyError, UnsupportedProblem
from flash_cute.target import Target
from tests import toy_kernel
from tests.toy_kernel import ToyKey

pytestmark = pytest.mark.compile
ROOT = Path(__file__).resolve().parent.parent
HAS_GPU = torch.cuda.is_available()
LOAD_LIMIT_S = 1.0  # for a first call from a filled cache, beyond imports; the goal is 0.15


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of its own, and no settings of the user's."""
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    directory = tmp_path / "kernels"
    monkeypatch.setenv("FLASH_CUTE_CACHE_DIR", str(directory))
    monkeypatch.setattr(cache, "_counts", cache._Counts())
    monkeypatch.setattr(cache, "_memory", {})
    monkeypatch.setattr(cache, "_warned", set())
    monkeypatch.setattr(cache, "_source_stamps", lambda: cache._STAMPS_AT_IMPORT)
    monkeypatch.setattr(compile, "_after_warmup", None)
    yield directory


def fetch(key: ToyKey) -> Callable[..., None]:
    return compile.fetch(key, toy_kernel.kernel_for)


def refused_by_the_driver(function: Callable[..., None], *arguments: object) -> None:
    """Call up to the launch: a machine without a driver refuses there, and only there."""
    with pytest.raises(RuntimeError, match="cudaErrorInsufficientDriver|cudaErrorNoDevice"):
        function(*arguments)


def load_and_call(compiled: compile.Compiled) -> None:
    """Load a compiled toy; without a GPU, also call it."""
    function = compiled.load()
    if not HAS_GPU:
        refused_by_the_driver(function, 0, 0, 1, 1.0, 0)


@pytest.fixture(scope="module")
def toy() -> Callable[..., None]:
    return compile.compile_kernel(toy_kernel.kernel_for(ToyKey(2)), "sm_90a").load()


# -- what a compiled function takes ---------------------------------------------------------------


class OpaquePointer:
    def __tvm_ffi_opaque_ptr__(self) -> int:
        return 0


class Stream:
    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 0


@pytest.mark.parametrize("pointer", [0, None, OpaquePointer()], ids=["int", "None", "opaque"])
@pytest.mark.parametrize("stream", [0, None, Stream()], ids=["int", "None", "protocol"])
def test_function_takes_pointers_and_streams_as_plain_values(toy, pointer, stream):
    if HAS_GPU:
        pytest.skip("a GPU would run it on null pointers")
    refused_by_the_driver(toy, pointer, pointer, 1, 1.0, stream)


@pytest.mark.parametrize(
    ("position", "value", "error"),
    [
        (0, 1.5, TypeError),
        (0, torch.zeros(1), TypeError),
        (0, 2**63, TypeError),
        (2, 1.5, TypeError),
        (2, None, TypeError),
        (2, 2**31, ValueError),
        (3, "x", TypeError),
        (4, "x", TypeError),
    ],
)
def test_function_refuses_other_values_before_the_launch(toy, position, value, error):
    arguments: list[object] = [0, 0, 1, 1.0, 0]
    arguments[position] = value
    with pytest.raises(error, match=rf"argument #{position}"):
        toy(*arguments)


def test_function_counts_its_arguments(toy):
    with pytest.raises(TypeError, match="Expects 5 parameters"):
        toy(0, 0, 1, 1.0)


def test_function_is_bare(toy):
    # A Python wrapper around it would cost half a microsecond and more on every launch.
    tvm_ffi = pytest.importorskip("tvm_ffi")
    assert type(toy) is tvm_ffi.Function


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no GPU")
def test_function_from_disk_computes(monkeypatch: pytest.MonkeyPatch):
    arch = selection.current_target().arch
    fetch(ToyKey(3, arch))
    cache.clear_cache(disk=False)
    function = fetch(ToyKey(3, arch))
    assert cache.cache_info().disk_hits == 1
    src = torch.arange(1000, device="cuda", dtype=torch.float32)
    dst = torch.empty_like(src)
    stream = torch.cuda.current_stream().cuda_stream
    function(src.data_ptr(), dst.data_ptr(), 1000, 0.5, stream)
    assert torch.equal(dst, 3 * src + 0.5)


# -- compiling ------------------------------------------------------------------------------------


def test_archs_and_threads_compile_in_one_process():
    """The DSL itself is not safe to use from threads; here it has to look as if it were."""
    results: dict[tuple[int, str], object] = {}

    def work(scale: int, arch: str) -> None:
        try:
            kernel = toy_kernel.kernel_for(ToyKey(scale, arch))
            results[scale, arch] = compile.compile_kernel(kernel, arch)
        except BaseException as error:
            results[scale, arch] = error

    cases = [(scale, arch) for scale in (5, 6) for arch in ("sm_80", "sm_90a", "sm_100a")]
    threads = [threading.Thread(target=work, args=case) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for case in cases:
        compiled = results[case]
        assert isinstance(compiled, compile.Compiled), compiled
        assert (compiled.symbol, compiled.arch) == (f"toy_scale_{case[0]}", case[1])
        load_and_call(compiled)
    assert len({results[case].payload for case in cases}) == len(cases)


def test_sixty_compiles_keep_threads_and_memory_bounded():
    fetch(ToyKey(100))
    before = resources()
    for scale in range(101, 160):
        fetch(ToyKey(scale))
    threads, mib = (now - then for now, then in zip(resources(), before, strict=True))
    print(f"60 compiles: {threads:+d} threads, {mib:+.0f} MiB")
    assert cache.cache_info().compiles == 60
    assert threads == 0
    assert mib < 300  # 1.6 MiB each in the DSL, 20 KiB each here


def resources() -> tuple[int, float]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return len(os.listdir("/proc/self/task")), pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_kernel_name_must_be_a_symbol():
    kernel = toy_kernel.kernel_for(ToyKey(2))
    kernel.name = "toy scale"
    with pytest.raises(ValueError, match="kernel.name is 'toy scale', expected a C identifier"):
        compile.compile_kernel(kernel, "sm_90a")


def test_guards_of_a_kernel_pass_through():
    kernel = toy_kernel.kernel_for(ToyKey(-1))
    kernel.name = "toy_guarded"
    with pytest.raises(UnsupportedProblem, match="scale is -1, expected at least 0"):
        compile.compile_kernel(kernel, "sm_90a")


def test_other_errors_of_the_dsl_name_the_kernel():
    kernel = toy_kernel.kernel_for(ToyKey(2))
    kernel.compile_args = lambda: (object(),) * 5
    with pytest.raises(compile.CompileError, match="compiling toy_scale_2 for sm_90a failed: "):
        compile.compile_kernel(kernel, "sm_90a")
    compile.compile_kernel(toy_kernel.kernel_for(ToyKey(2)), "sm_90a")  # and nothing is stuck


@pytest.mark.parametrize("linker", ["absent", "failing"])
def test_without_a_linker_the_object_file_is_kept(monkeypatch: pytest.MonkeyPatch, linker: str):
    path = None if linker == "absent" else "/bin/false"
    monkeypatch.setattr(compile, "find_linker", lambda: path)
    compiled = compile.compile_kernel(toy_kernel.kernel_for(ToyKey(7)), "sm_90a")
    assert compiled.kind == "o"
    load_and_call(compiled)


@pytest.mark.parametrize("name", ["cc", "gcc", "ld"])
def test_every_linker_here_links(monkeypatch: pytest.MonkeyPatch, name: str):
    path = compile.shutil.which(name)
    if path is None:
        pytest.skip(f"no {name}")
    monkeypatch.setattr(compile, "find_linker", lambda: path)
    compiled = compile.compile_kernel(toy_kernel.kernel_for(ToyKey(8)), "sm_90a")
    assert compiled.kind == "so" and callable(compiled.load())


def test_shared_object_shows_one_symbol(tmp_path: Path):
    nm = compile.shutil.which("nm")
    if nm is None:
        pytest.skip("no nm")
    path = tmp_path / "toy.so"
    path.write_bytes(compile.compile_kernel(toy_kernel.kernel_for(ToyKey(2)), "sm_90a").payload)
    command = [nm, "-D", "--defined-only", str(path)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[-1] for line in lines] == ["__tvm_ffi_toy_scale_2"]


def test_payload_that_cannot_be_loaded_is_an_error():
    facts = {"symbol": "toy", "kind": "so", "arch": "sm_90a"}
    with pytest.raises(RuntimeError, match="cannot load toy: in "):
        compile.load_entry(Entry(b"\x7fELF not really", facts))


# -- the runtime library --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("installed", "driver", "chosen"),
    [
        (("cu12", "cu13"), None, "cu13"),
        (("cu12", "cu13"), 13, "cu13"),
        (("cu12", "cu13"), 14, "cu13"),
        (("cu12", "cu13"), 12, "cu12"),
        (("cu12",), 13, "cu12"),
        (("cu13",), 12, "cu13 of the DSL's.*a driver for CUDA 12 can use: pip install"),
        ((), None, "none of the DSL's.*pip install 'nvidia-cutlass-dsl"),
    ],
)
def test_runtime_library_suits_the_driver(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    installed: tuple[str, ...],
    driver: int | None,
    chosen: str,
):
    for flavour in installed:
        library = tmp_path / "nvidia_cutlass_dsl" / flavour / "lib" / "libcute_dsl_runtime.so"
        library.parent.mkdir(parents=True)
        library.touch()
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path / "nvidia_cutlass_dsl")]})
    monkeypatch.delenv("CUTE_DSL_LIBS", raising=False)
    monkeypatch.setattr(compile, "driver_cuda_version", lambda: driver)
    monkeypatch.setattr(compile.importlib.util, "find_spec", lambda name: spec)
    find = compile.runtime_library.__wrapped__
    if chosen in installed:
        assert find().parent.parent.name == chosen
    else:
        with pytest.raises(DependencyError, match=chosen):
            find()


def test_runtime_library_can_be_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUTE_DSL_LIBS", "/x/libother.so:/x/lib/libcute_dsl_runtime.so")
    assert compile.runtime_library.__wrapped__() == Path("/x/lib/libcute_dsl_runtime.so")


def test_runtime_library_is_the_dsls_own_choice():
    runtime = pytest.importorskip("cutlass.cute.runtime")
    assert str(compile.runtime_library()) in runtime.find_runtime_libraries(enable_tvm_ffi=False)


# -- inspecting -----------------------------------------------------------------------------------


def test_inspect_reports_the_machine_code():
    kernel = toy_kernel.kernel_for(ToyKey(9))
    kernel.smem_bytes = 1000
    report = compile.inspect_kernel(kernel, "sm_90a")
    assert ".target sm_90a" in report.ptx and ".entry toy_scale_9_0" in report.ptx
    assert report.cubin[:4] == b"\x7fELF"
    if report.missing:
        pytest.skip(f"not found: {report.missing}")
    assert 0 < report.registers < 64 and report.stack_bytes == 0
    assert (report.spill_store_bytes, report.spill_load_bytes) == (0, 0)
    assert report.smem_bytes == 1000
    assert f"toy_scale_9 (sm_90a): {report.registers} registers, 0 bytes spilled" in str(
        report.summary()
    )


def test_inspect_leaves_no_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    started_in = Path.cwd()  # where the DSL would put them: it remembers
    monkeypatch.chdir(tmp_path)
    compile.inspect_kernel(toy_kernel.kernel_for(ToyKey(9)), "sm_80")
    assert list(tmp_path.iterdir()) == []
    assert not [*started_in.glob("*.ptx"), *started_in.glob("*.cubin")]


def test_inspect_says_which_tool_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compile, "find_tools", lambda *names: [])
    report = compile.inspect_kernel(toy_kernel.kernel_for(ToyKey(9)), "sm_90a")
    assert report.registers is None and report.spill_store_bytes is None
    assert [text.split(" ")[0] for text in report.missing] == ["cuobjdump", "ptxas"]
    assert all("pip install triton" in text for text in report.missing)
    assert "? registers, ? bytes spilled" in report.summary()


def test_inspect_says_when_ptxas_is_too_old(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compile, "find_tools", lambda *names: ["/bin/false"])
    report = compile.inspect_kernel(toy_kernel.kernel_for(ToyKey(9)), "sm_90a")
    assert report.registers is None and report.missing[1].startswith("/bin/false")


# -- the way from a key ---------------------------------------------------------------------------


def test_executable_asks_selection_for_the_kernel(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compile, "kernel_for", toy_kernel.kernel_for)
    function = compile.executable(ToyKey(10))
    assert compile.executable(ToyKey(10)) is function
    assert compile.executable(ToyKey(11)) is not function
    info = cache.cache_info()
    assert (info.compiles, info.memory_hits) == (2, 1)


def test_entry_of_another_arch_is_replaced(own_cache: Path):
    fetch(ToyKey(12, "sm_80"))
    (other,) = own_cache.iterdir()
    fetch(ToyKey(12))
    (path,) = set(own_cache.iterdir()) - {other}
    good = path.read_bytes()
    path.write_bytes(other.read_bytes())
    cache.clear_cache(disk=False)
    with pytest.warns(CacheWarning, match="another kernel, version or architecture"):
        fetch(ToyKey(12))
    assert len(path.read_bytes()) == len(good) and b"sm_90a" in path.read_bytes()
    assert cache.cache_info().compiles == 3


def test_policy_allows_warns_or_forbids(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLASH_CUTE_COMPILE", "error")
    with pytest.raises(
        CompileDisallowed, match=r"sm_90a has to be compiled.*warmup.*ToyKey\(scale"
    ):
        fetch(ToyKey(13))
    assert cache.cache_info().compiles == 0
    monkeypatch.setenv("FLASH_CUTE_COMPILE", "warn")
    with pytest.warns(compile.CompileWarning, match="outside warmup"):
        fetch(ToyKey(13))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setenv("FLASH_CUTE_COMPILE", "error")
        fetch(ToyKey(13))  # in memory
        cache.clear_cache(disk=False)
        fetch(ToyKey(13))  # on disk
    monkeypatch.setenv("FLASH_CUTE_COMPILE", "nonsense")
    with pytest.raises(ValueError, match="FLASH_CUTE_COMPILE is 'nonsense'"):
        fetch(ToyKey(14))


def test_warmup_compiles_in_spite_of_the_policy_and_sets_a_new_one(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(compile, "kernel_for", toy_kernel.kernel_for)
    monkeypatch.setenv("FLASH_CUTE_COMPILE", "error")
    info = compile.warmup([ToyKey(15), ToyKey(16), ToyKey(15)])
    assert (info.compiles, info.entries) == (2, 2)
    assert "2 kernels ready" in (line := capfd.readouterr().err) and "2 compiled here" in line
    with pytest.raises(CompileDisallowed):
        compile.executable(ToyKey(17))
    compile.warmup([ToyKey(15)], progress=False, after="allow")
    assert capfd.readouterr().err == ""
    compile.executable(ToyKey(17))
    compile.warmup([], after="error", progress=False)
    with pytest.raises(CompileDisallowed):
        compile.executable(ToyKey(18))
    assert compile._after_warmup is CompilePolicy.ERROR


def test_warmup_checks_its_arguments(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match="after is 'stop', expected one of allow, warn, error"):
        compile.warmup([], after="stop")
    with pytest.raises(ValueError, match="jobs is 0, expected at least 1"):
        compile.warmup([], jobs=0)
    monkeypatch.setenv("FLASH_CUTE_DISK_CACHE", "0")
    with pytest.raises(ValueError, match="jobs is 2, expected 1: there is no cache on disk"):
        compile.warmup([], jobs=2)


def test_warmup_compiles_in_several_processes(capfd: pytest.CaptureFixture[str]):
    keys = [ToyKey(scale) for scale in (20, 21)]
    compile.prepare(keys, toy_kernel.kernel_for, jobs=2)
    info = cache.cache_info()
    assert (info.compiles, info.disk_hits, info.entries) == (0, 2, 2)
    assert "0 compiled here, 2 from disk" in capfd.readouterr().err


def test_current_target_is_given_or_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLASH_CUTE_ARCH", "sm_100")
    assert selection.current_target() == Target.from_arch("sm_100a")
    monkeypatch.delenv("FLASH_CUTE_ARCH")
    if HAS_GPU:
        assert selection.current_target().num_sms > 0
        return
    with pytest.raises(UnsupportedProblem, match="no GPU to compile for; name one with FLASH_CUTE"):
        selection.current_target()


# -- other processes ------------------------------------------------------------------------------

CHILD = """
import json, sys, time
import torch, flash_cute
from flash_cute import cache, compile
from tests import toy_kernel
import tvm_ffi
started = time.perf_counter()
function = compile.fetch(toy_kernel.ToyKey(int(sys.argv[1])), toy_kernel.kernel_for)
seconds = time.perf_counter() - started
info = cache.cache_info()
print(json.dumps({
    "seconds": seconds, "compiles": info.compiles, "disk_hits": info.disk_hits,
    "dsl": "cutlass" in sys.modules,
    "type": type(function).__name__,
}))
"""


def start(scale: int, **environment: str) -> subprocess.Popen[str]:
    """Start a fresh interpreter that fetches one toy kernel."""
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(scale)],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )


def result(child: subprocess.Popen[str]) -> dict[str, object]:
    output, _ = child.communicate(timeout=120)
    assert child.returncode == 0
    return json.loads(output)


def test_second_process_loads_from_disk_without_the_dsl():
    fetch(ToyKey(30))
    found = result(start(30))
    print(f"first call from a filled cache: {found['seconds'] * 1e3:.1f} ms")
    assert (found["compiles"], found["disk_hits"], found["dsl"]) == (0, 1, False)
    assert found["type"] == "Function"
    assert found["seconds"] < LOAD_LIMIT_S


@pytest.mark.slow
def test_eight_cold_processes_compile_once(tmp_path: Path, own_cache: Path):
    log = tmp_path / "log"
    started = time.perf_counter()
    results = [result(child) for child in [start(31, TOY_LOG=str(log)) for _ in range(8)]]
    print(f"8 cold processes: {time.perf_counter() - started:.1f} s")
    assert len(log.read_text().splitlines()) == 1
    assert sum(found["compiles"] for found in results) == 1
    assert sum(found["disk_hits"] for found in results) == 7
    assert [path.suffix for path in own_cache.iterdir()] == [".kernel"]
