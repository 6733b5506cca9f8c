"""The cache itself, with made-up executables: keys, files, faults, threads and processes.

Nothing here compiles; tests/test_compile.py runs the same cache with a real kernel. Processes are
forked: a child starts in milliseconds, and that a forked child works is part of what is tested.
"""

from __future__ import annotations

import dataclasses
import enum
import errno
import multiprocessing
import os
import signal
import struct
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from flash_cute import cache, env
from flash_cute.cache import CacheWarning, DiskCache, Entry, Identity, Recipe
from flash_cute.errors import CompileDisallowed, DependencyError

fork = multiprocessing.get_context("fork")
source_stamps = cache._source_stamps


@dataclass(frozen=True)
class Inner:
    tiles: tuple[int, ...] = (128, 64)


@dataclass(frozen=True)
class Key:
    name: str
    arch: str = "sm_90a"
    inner: Inner = Inner()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of its own and counters at zero; nothing of the user's is touched."""
    directory = tmp_path / "kernels"
    monkeypatch.setenv("FLASH_CUTE_CACHE_DIR", str(directory))
    monkeypatch.delenv("FLASH_CUTE_DISK_CACHE", raising=False)
    monkeypatch.setattr(cache, "_counts", cache._Counts())
    monkeypatch.setattr(cache, "_memory", {})
    monkeypatch.setattr(cache, "_warned", set())
    # An editor saving a file of the package during the run is not what these tests are about.
    monkeypatch.setattr(cache, "_source_stamps", lambda: cache._STAMPS_AT_IMPORT)
    cache._open.cache_clear()
    yield directory
    cache._open.cache_clear()


def identity_of(key: Key, toolkit: str = "cu13") -> Identity:
    return cache.identity(key, key.arch, toolkit)


def load(entry: Entry) -> Callable[[], str]:
    """Load a made-up executable: it returns its payload, and b"broken" cannot be loaded."""
    text = entry.payload.decode()
    if text == "broken":
        raise OSError("file too short")
    return lambda: text


def recipe(key: Key, built: list[str] | None = None, seconds: float = 0.0) -> Recipe:
    """A recipe that notes each build in `built`."""

    def build() -> Entry:
        time.sleep(seconds)
        if built is not None:
            built.append(key.name)
        return Entry(f"code of {key.name}".encode(), {"symbol": key.name})

    return Recipe(lambda: identity_of(key), lambda: None, build, load)


def fetch(key: Key, built: list[str] | None = None) -> str:
    return cache.fetch(key, recipe(key, built))()


def forget() -> None:
    """Stand in for a new process: nothing in memory."""
    cache._memory.clear()


def run(target: Callable[..., None], *arguments: object) -> None:
    """Run a function in a forked child and require that it succeeds."""
    child = fork.Process(target=target, args=arguments)
    child.start()
    child.join(30)
    assert child.exitcode == 0


# -- keys -----------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1
    GREEN = 2


class Number(enum.IntEnum):
    ONE = 1


class Mode(str, enum.Enum):
    A = "a"


@dataclass(frozen=True)
class OtherKey:
    name: str
    arch: str = "sm_90a"
    inner: Inner = Inner()


VALUES = [
    None, True, False, 0, 1, -1, 10, "", "0", "1", "None", "True", "a", "a,b", 'a"', "a\\", "(1,2)",
    1.0, 0.0, -0.0, 0.1, 0.1 + 2**-56, 1e300, float("inf"), float("-inf"), float("nan"),
    (), (1,), (1, 2), ((1,), 2), ((1, 2),), ("1", "2"), ("1,2",), (None,), ((),),
    ("a", "b"), ("ab",), Colour.RED, Colour.GREEN, Number.ONE, Mode.A, "RED",
    Inner(), Inner((128,)), Inner((12, 864)), Key("a"), Key("a", "sm_80"),
    Key("a", inner=Inner(())), OtherKey("a"), Key('a",arch="sm_90a'), Key("a,arch=b"),
    (Key("a"), 1), (Key("a"), "1"),
]  # fmt: skip


def test_canonical_text_differs_for_any_two_values():
    texts = [cache.canonical_text(value) for value in VALUES]
    assert len(set(texts)) == len(VALUES)
    assert all("\n" not in text for text in texts)


def test_canonical_text_does_not_depend_on_field_order_or_process():
    forward = dataclasses.make_dataclass("K", [("a", int), ("b", str)], frozen=True)
    backward = dataclasses.make_dataclass("K", [("b", str), ("a", int)], frozen=True)
    assert cache.canonical_text(forward(a=1, b="x")) == cache.canonical_text(backward("x", 1))
    name = f"{__name__}.Key"
    text = f'{name}(arch="sm_90a",inner={__name__}.Inner(tiles=(128,64)),name="a")'
    assert cache.canonical_text(Key("a")) == text


@dataclass
class Thawed:
    x: int = 1


class IntSubclass(int):
    pass


@pytest.mark.parametrize(
    "value",
    [[1], {1: 2}, {1}, frozenset(), b"x", object(), Thawed(), Key, len, IntSubclass(1), 1j]
    + [Key([1]), (1, [2]), Inner(({},))],  # type: ignore[arg-type]
    ids=lambda value: type(value).__name__,  # not repr: xdist's processes must agree on it
)
def test_canonical_text_refuses_what_has_no_fixed_text(value: object):
    with pytest.raises(TypeError, match=r"key holds a .*, expected"):
        cache.canonical_text(value)


def test_identity_depends_on_everything_that_shapes_code(monkeypatch: pytest.MonkeyPatch):
    seen = {identity_of(Key("a")).digest}

    def fresh() -> bool:
        digest = identity_of(Key("a")).digest
        return digest not in seen and not seen.add(digest)

    assert not fresh()
    for other in (identity_of(Key("b")), identity_of(Key("a"), "cu12")):
        assert other.digest not in seen
    assert cache.identity(Key("a"), "sm_80", "cu13").digest not in seen
    for owner, name, value in [
        (cache, "source_fingerprint", lambda: "edited"),
        (env, "check_dependencies", lambda: env.Versions("4.8.2", "0.1.15")),
        (env, "check_dependencies", lambda: env.Versions("4.8.1", "0.1.16")),
        (env, "host_cpu", lambda: "linux-aarch64-0"),
        (env, "compiler_environment", lambda: "CUTE_DSL_LINEINFO=1"),
        (cache, "FORMAT", 2),
    ]:
        monkeypatch.setattr(owner, name, value)
        assert fresh(), name


def test_source_fingerprint_covers_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.py").write_text("x = 1")
    (tmp_path / "sm90").mkdir()
    (tmp_path / "sm90" / "fwd.py").write_text("y = 1")
    monkeypatch.setattr(cache, "_PACKAGE", tmp_path)

    def fingerprint() -> str:
        monkeypatch.setattr(cache, "_STAMPS_AT_IMPORT", source_stamps())
        return cache.source_fingerprint.__wrapped__()

    before = fingerprint()
    assert fingerprint() == before
    (tmp_path / "sm90" / "fwd.py").write_text("y = 2")
    after = fingerprint()
    (tmp_path / "sm90" / "fwd.py").rename(tmp_path / "sm90" / "fwd2.py")
    assert len({before, after, fingerprint()}) == 3


# -- one process ----------------------------------------------------------------------------------


def test_fetch_builds_once_then_hits_memory_then_disk():
    built: list[str] = []
    assert fetch(Key("a"), built) == fetch(Key("a"), built) == "code of a"
    forget()
    assert fetch(Key("a"), built) == "code of a"
    assert built == ["a"]
    info = cache.cache_info()
    assert (info.compiles, info.memory_hits, info.disk_hits, info.disk_errors) == (1, 1, 1, 0)
    assert info.entries == 1 and info.bytes > 0 and info.directory == str(cache.directory())


def test_directory_and_files_are_the_users_alone(own_cache: Path):
    fetch(Key("a"))
    modes = {path.name: path.stat().st_mode & 0o777 for path in own_cache.iterdir()}
    assert own_cache.stat().st_mode & 0o777 == 0o700
    assert list(modes.values()) == [0o600], "one entry, and neither lock nor temporary file"
    digest = identity_of(Key("a")).digest
    assert list(modes) == [f"{digest}.kernel"]


def test_disk_can_be_switched_off(own_cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLASH_CUTE_DISK_CACHE", "0")
    built: list[str] = []
    fetch(Key("a"), built)
    forget()
    fetch(Key("a"), built)
    assert built == ["a", "a"] and not own_cache.exists()
    info = cache.cache_info()
    assert (info.compiles, info.directory, info.entries) == (2, None, 0)


def test_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("FLASH_CUTE_CACHE_DIR", "~/mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.directory() == tmp_path / "mine"
    monkeypatch.delenv("FLASH_CUTE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.directory() == tmp_path / "xdg" / "flash_cute"
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache.directory() == tmp_path / ".cache" / "flash_cute"


def test_no_home_means_memory_only_with_one_warning(monkeypatch: pytest.MonkeyPatch):
    def no_home() -> Path:
        raise RuntimeError("no home")

    monkeypatch.delenv("FLASH_CUTE_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.warns(CacheWarning, match="no home directory") as caught:
        assert fetch(Key("a")) == "code of a" and fetch(Key("b")) == "code of b"
    assert len(caught) == 1


def test_clear_cache_forgets_and_deletes_only_its_own(own_cache: Path):
    fetch(Key("a"))
    foreign = [own_cache / name for name in ("notes.kernel", ".x.lock", ".y.tmp", "a" * 64)]
    for path in foreign:
        path.write_text("not ours")
    stale = own_cache / f".{'0' * 64}-abc.tmp"
    stale.write_text("left by a killed process")
    assert cache.clear_cache() == 1
    assert sorted(own_cache.iterdir()) == sorted(foreign)
    built: list[str] = []
    fetch(Key("a"), built)
    assert built == ["a"]
    assert cache.clear_cache(disk=False) == 0
    fetch(Key("a"), built)
    assert built == ["a"] and cache.cache_info().disk_hits == 1


def test_longest_unused_entries_go_first(monkeypatch: pytest.MonkeyPatch, own_cache: Path):
    disk = DiskCache(own_cache)
    entry = Entry(bytes(1000))
    identities = [identity_of(Key(name)) for name in "abcd"]
    for age, identity in enumerate(identities[:3]):
        disk.write(identity, entry)
        os.utime(disk.path(identity.digest), (age + 1, age + 1))
    assert disk.read(identities[0]) is not None  # used now, so no longer the oldest
    size = disk.path(identities[0].digest).stat().st_size
    monkeypatch.setattr(cache, "MAX_BYTES", 3 * size)
    disk.write(identities[3], entry)
    kept = [disk.read(identity) is not None for identity in identities]
    assert kept == [True, False, True, True]


def test_changed_sources_keep_to_memory(monkeypatch: pytest.MonkeyPatch):
    fetch(Key("a"))
    forget()
    monkeypatch.setattr(cache, "_source_stamps", lambda: {"api.py": (1, 1)})
    built: list[str] = []
    with pytest.warns(CacheWarning, match="changed since they were imported") as caught:
        fetch(Key("a"), built)
        fetch(Key("b"), built)
    assert built == ["a", "b"] and len(caught) == 1 and cache.cache_info().entries == 1


def test_no_sources_keep_to_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache, "_STAMPS_AT_IMPORT", {})
    with pytest.warns(CacheWarning, match="no source files"):
        assert cache.disk_cache() is None


def test_failed_build_leaves_nothing_and_may_be_repeated(own_cache: Path):
    def refuse() -> None:
        raise CompileDisallowed("no compiles now")

    allowed = recipe(Key("a"))
    with pytest.raises(CompileDisallowed):
        cache.fetch(Key("a"), dataclasses.replace(allowed, permit=refuse))
    with pytest.raises(ZeroDivisionError):
        cache.fetch(Key("a"), dataclasses.replace(allowed, build=lambda: Entry(bytes(1 // 0))))
    assert list(own_cache.iterdir()) == [] and not cache._flights
    assert cache.fetch(Key("a"), allowed)() == "code of a"
    assert cache.cache_info().compiles == 1


def test_missing_dependency_does_not_cost_the_entry():
    fetch(Key("a"))
    forget()

    def cannot_load(entry: Entry) -> Callable[[], str]:
        raise DependencyError("tvm-ffi is not installed")

    with pytest.raises(DependencyError):
        cache.fetch(Key("a"), dataclasses.replace(recipe(Key("a")), load=cannot_load))
    assert cache.cache_info().entries == 1 and cache.cache_info().disk_errors == 0


# -- damaged files --------------------------------------------------------------------------------


def test_every_flipped_byte_and_every_cut_is_noticed():
    identity = identity_of(Key("a"))
    content = cache.pack(Entry(b"payload", {"symbol": "s"}), identity)
    assert cache.unpack(content, identity) == Entry(b"payload", {"symbol": "s"})
    for position in range(len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 0x10
        for bad in (bytes(flipped), content[:position]):
            with pytest.raises(cache.BadEntryError):
                cache.unpack(bad, identity)


def damage_cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def damage_empty(path: Path) -> None:
    path.write_bytes(b"")


def damage_flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def damage_foreign(path: Path) -> None:
    path.write_bytes(b"\x7fELF" + bytes(2000))


def damage_other_arch(path: Path) -> None:
    path.write_bytes(cache.pack(Entry(b"sm_80 code"), cache.identity(Key("a"), "sm_80", "cu13")))


def damage_other_version(path: Path) -> None:
    other = Identity(identity_of(Key("a")).text.replace("4.8", "4.7"), "")
    path.write_bytes(cache.pack(Entry(b"old code"), other))


def damage_unloadable(path: Path) -> None:
    path.write_bytes(cache.pack(Entry(b"broken"), identity_of(Key("a"))))


def damage_wrong_length(path: Path) -> None:
    content = bytearray(path.read_bytes())
    struct.pack_into("<I", content, len(cache._MAGIC) + 32, 2**31)
    path.write_bytes(content)


DAMAGES = [
    (damage_cut, "checksum"),
    (damage_empty, "cut short"),
    (damage_flip, "checksum"),
    (damage_foreign, "no entry"),
    (damage_other_arch, "another kernel, version or architecture"),
    (damage_other_version, "another kernel, version or architecture"),
    (damage_unloadable, "cannot be loaded"),
    (damage_wrong_length, "checksum"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGES, ids=lambda d: getattr(d, "__name__", ""))
def test_bad_entry_is_replaced_with_one_warning(
    damage: Callable[[Path], None], words: str, own_cache: Path
):
    fetch(Key("a"))
    forget()
    (path,) = own_cache.iterdir()
    good = path.read_bytes()
    damage(path)
    built: list[str] = []
    with pytest.warns(CacheWarning, match=words) as caught:
        assert fetch(Key("a"), built) == "code of a"
    assert len(caught) == 1 and built == ["a"] and cache.cache_info().disk_errors == 1
    assert path.read_bytes() == good, "replaced by a good one"
    forget()
    assert fetch(Key("a"), built) == "code of a" and built == ["a"]


# -- directories that do not serve ----------------------------------------------------------------


def as_nobody(function: Callable[[], None]) -> None:
    """Run in a child without root's right to write anywhere."""

    def child() -> None:
        if os.geteuid() == 0:
            os.setegid(65534)
            os.seteuid(65534)
        function()

    run(child)


@pytest.fixture
def nobodys_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A filled cache that its owner, nobody where the tests run as root, cannot write to."""
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        directory = Path(parent) / "kernels"
        monkeypatch.setenv("FLASH_CUTE_CACHE_DIR", str(directory))
        fetch(Key("kept"))
        forget()
        if os.geteuid() == 0:
            for path in (Path(parent), directory, *directory.iterdir()):
                os.chown(path, 65534, 65534)
        directory.chmod(0o500)
        yield directory
        directory.chmod(0o700)


def test_read_only_directory_is_read_and_costs_one_warning(nobodys_cache: Path):
    def check() -> None:
        built: list[str] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert fetch(Key("kept"), built) == "code of kept" and built == []
            assert not caught, "reading alone is no reason to warn"
            assert fetch(Key("a"), built) == "code of a"
            assert fetch(Key("b"), built) == "code of b"
        assert [str(w.message)[:30] for w in caught] == ["flash_cute cache: cannot lock "]
        assert "Permission denied" in str(caught[0].message) and built == ["a", "b"]
        forget()
        assert fetch(Key("a"), built) and built == ["a", "b", "a"]

    as_nobody(check)


def test_directory_that_cannot_be_made_means_memory_only(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLASH_CUTE_CACHE_DIR", "/proc/flash_cute/kernels")
    with pytest.warns(CacheWarning, match="not using /proc/flash_cute/kernels") as caught:
        assert fetch(Key("a")) == "code of a" and fetch(Key("b")) == "code of b"
    assert len(caught) == 1 and cache.cache_info().entries == 0


def test_full_disk_means_memory_only(monkeypatch: pytest.MonkeyPatch, own_cache: Path):
    tried: list[int] = []

    def full(file: int) -> None:
        tried.append(file)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache.os, "fsync", full)
    with pytest.warns(CacheWarning, match="cannot write in .*No space left") as caught:
        assert fetch(Key("a")) == "code of a" and fetch(Key("b")) == "code of b"
    assert len(caught) == 1 and len(tried) == 1 and list(own_cache.iterdir()) == []


@pytest.mark.parametrize(
    ("mode", "uid", "reason"),
    [
        (0o40700, None, None),
        (0o40755, 0, None),
        (0o40777, None, "everybody may write to it"),
        (0o41777, 0, "everybody may write to it"),
        (0o40700, 12345, "it belongs to user 12345"),
        (0o100600, None, "it is no directory"),
    ],
)
def test_directory_is_trusted_or_not(mode: int, uid: int | None, reason: str | None):
    status = SimpleNamespace(st_mode=mode, st_uid=os.geteuid() if uid is None else uid)
    found = cache.distrust(status)  # type: ignore[arg-type]
    assert found is None if reason is None else reason in (found or "")


def test_directory_of_everybody_is_not_used(own_cache: Path):
    own_cache.mkdir()
    own_cache.chmod(0o777)
    with pytest.warns(CacheWarning, match="everybody may write to it .mode 777, expected 700"):
        assert fetch(Key("a")) == "code of a"
    assert list(own_cache.iterdir()) == []


# -- threads --------------------------------------------------------------------------------------


def in_threads(*functions: Callable[[], object]) -> list[object]:
    """Run functions at the same time; returns what they return, exceptions included."""
    results: list[object] = [None] * len(functions)

    def call(index: int) -> None:
        try:
            results[index] = functions[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results


@pytest.mark.parametrize("disk", ["0", "1"])
def test_threads_with_one_key_build_once(disk: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLASH_CUTE_DISK_CACHE", disk)
    built: list[str] = []
    slow = recipe(Key("a"), built, seconds=0.1)
    results = in_threads(*[lambda: cache.fetch(Key("a"), slow)] * 8)
    assert built == ["a"] and len({id(result) for result in results}) == 1
    info = cache.cache_info()
    assert (info.compiles, info.memory_hits) == (1, 7) and not cache._flights


@pytest.mark.parametrize("disk", ["0", "1"])
def test_threads_with_different_keys_build_at_the_same_time(
    disk: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FLASH_CUTE_DISK_CACHE", disk)
    meeting = threading.Barrier(2, timeout=10)  # broken when one build waits for the other

    def meet(name: str) -> object:
        plain = recipe(Key(name))

        def build() -> Entry:
            meeting.wait()
            return plain.build()

        return cache.fetch(Key(name), dataclasses.replace(plain, build=build))()

    assert in_threads(lambda: meet("a"), lambda: meet("b")) == ["code of a", "code of b"]


def test_waiting_threads_each_see_the_failure_and_the_next_build_works():
    def fail() -> Entry:
        time.sleep(0.05)
        raise ZeroDivisionError

    failing = dataclasses.replace(recipe(Key("a")), build=fail)
    results = in_threads(*[lambda: cache.fetch(Key("a"), failing)] * 3)
    assert all(isinstance(result, ZeroDivisionError) for result in results)
    assert fetch(Key("a")) == "code of a"


# -- processes ------------------------------------------------------------------------------------


def build_and_log(log: Path, seconds: float) -> None:
    def build() -> Entry:
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(seconds)
        return Entry(b"code of a")

    plain = recipe(Key("a"))
    assert cache.fetch(Key("a"), dataclasses.replace(plain, build=build))() == "code of a"


def test_cold_processes_build_once(tmp_path: Path, own_cache: Path):
    log = tmp_path / "log"
    children = [fork.Process(target=build_and_log, args=(log, 0.3)) for _ in range(8)]
    for child in children:
        child.start()
    for child in children:
        child.join(30)
    assert [child.exitcode for child in children] == [0] * 8
    assert len(log.read_text().splitlines()) == 1
    assert len(list(own_cache.iterdir())) == 1


def test_process_killed_while_writing_leaves_no_damage(own_cache: Path):
    def killed_in_fsync() -> None:
        cache.os.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        fetch(Key("a"))

    child = fork.Process(target=killed_in_fsync)
    child.start()
    child.join(30)
    assert child.exitcode == -signal.SIGKILL
    left = sorted(path.name[-5:] for path in own_cache.iterdir())
    assert left == [".lock", "k.tmp"] or left[-1].endswith(".tmp"), left
    built: list[str] = []
    started = time.monotonic()
    assert fetch(Key("a"), built) == "code of a" and built == ["a"]
    assert time.monotonic() - started < 5, "the lock of a dead process holds nobody up"
    old = time.time() - 2 * cache.STALE_S
    for path in own_cache.glob(".*"):
        os.utime(path, (old, old))
    fetch(Key("b"))
    assert all(path.suffix == ".kernel" for path in own_cache.iterdir()), "swept up later"


def test_process_that_hangs_with_the_lock_only_delays(own_cache: Path):
    ready, digest = fork.Event(), identity_of(Key("a")).digest

    def hang() -> None:
        with DiskCache(own_cache).lock(digest):
            ready.set()
            time.sleep(60)

    child = fork.Process(target=hang)
    child.start()
    try:
        assert ready.wait(10)
        started = time.monotonic()
        with DiskCache(own_cache).lock(digest, timeout_s=0.3) as held:
            assert not held
        assert 0.2 < time.monotonic() - started < 5
        with DiskCache(own_cache).lock(identity_of(Key("b")).digest) as held:
            assert held, "another entry is another lock"
    finally:
        child.kill()
        child.join(10)


def test_lock_survives_a_forked_child_and_ends_with_its_holder(own_cache: Path):
    disk = DiskCache(own_cache)
    ended = fork.Event()

    def outlive() -> None:
        assert not cache._held, "the child let go of its parent's descriptor"
        ended.wait(30)

    with disk.lock("0" * 64) as held:
        assert held
        child = fork.Process(target=outlive)
        child.start()

        def contend() -> None:
            with disk.lock("0" * 64, timeout_s=0.1) as held:
                assert not held

        run(contend)
    try:
        with disk.lock("0" * 64, timeout_s=0.0) as held:
            assert held, "released although the child lives on"
    finally:
        ended.set()
        child.join(10)
    assert child.exitcode == 0 and list(own_cache.iterdir()) == []


def test_lock_on_a_file_that_was_just_released_is_taken_anew(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
):
    """Between our open and our lock the holder may unlink the file; its lock is then worthless."""
    disk, flock = DiskCache(own_cache), cache.fcntl.flock
    path, removed = disk._lock_path("0" * 64), []

    def late(file: int, operation: int) -> None:
        if not removed:
            removed.append(path.unlink())
        flock(file, operation)

    monkeypatch.setattr(cache.fcntl, "flock", late)
    with disk.lock("0" * 64) as held:
        assert held and removed and path.exists(), "others meet at the file that is there"


def test_fork_while_another_thread_builds(own_cache: Path):
    """The child must not wait for a thread that does not exist in it."""
    inside, go_on = threading.Event(), threading.Event()

    def build() -> Entry:
        with cache._mutex:
            inside.set()
            go_on.wait(30)
        return Entry(b"code of a")

    def child() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            os.environ["FLASH_CUTE_DISK_CACHE"] = "0"  # the parent rightly holds the file lock
            assert fetch(Key("a")) == "code of a"

    slow = dataclasses.replace(recipe(Key("a")), build=build)
    thread = threading.Thread(target=lambda: cache.fetch(Key("a"), slow))
    thread.start()
    try:
        assert inside.wait(10)
        run(child)
    finally:
        go_on.set()
        thread.join(10)
