"""Compiled kernels, kept in memory and on disk: bytes in, bytes out.

A key is a frozen dataclass that holds everything that shapes the code. In memory it is looked up
as it is; on disk its canonical text, together with the package's own sources, the versions of the
compiler and the host, is hashed into the name of a file.

Contract:
- One build per key: threads wait for one another per key, processes through a lock file per entry,
  and different keys never wait for each other. A dead or stuck holder delays, it never blocks.
- A file appears whole or not at all, and carries a checksum and the text it was hashed from. What
  is damaged or foreign is dropped with one warning and built again.
- A directory that cannot be written or trusted costs one warning; everything then stays in memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import errno
import fcntl
import functools
import hashlib
import json
import os
import re
import stat
import struct
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Generator, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from flash_cute import env
from flash_cute.errors import FlashCuteError

FORMAT = 1  # of an entry's file; part of its name, so another format is never read
MAX_BYTES = 1 << 30  # of all entries together; beyond it the longest unused go
LOCK_TIMEOUT_S = 60.0  # the slowest compile seen takes 13 s; after this we build without the lock
STALE_S = 3600.0  # a temporary file this old belongs to a process that was killed

Executable = Callable[..., Any]


class CacheWarning(RuntimeWarning):
    """The cache on disk had to give something up; results are right all the same."""


# -- keys -----------------------------------------------------------------------------------------


def canonical_text(value: object) -> str:
    """Write a key as text: equal text if and only if equal type and value, in any process.

    Accepts frozen dataclasses (fields ordered by name), enums, tuples, str, int, bool, float and
    None, nested at will.
    Raises: TypeError for anything else. A set, list or object has no text that is the same in
            every process, and what cannot be written down must not shape code.
    """
    kind = type(value)
    if isinstance(value, enum.Enum):
        return f"{kind.__module__}.{kind.__qualname__}.{value.name}"
    if value is None or kind in (bool, int):
        return repr(value)
    if kind is str:
        return json.dumps(value)
    if kind is float:
        return f"float({cast(float, value).hex()})"
    if kind is tuple:
        items = (canonical_text(item) for item in cast("tuple[object, ...]", value))
        return f"({','.join(items)})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if not cast(Any, value).__dataclass_params__.frozen:
            raise TypeError(f"key holds a {kind.__qualname__}, expected a frozen dataclass")
        names = sorted(f.name for f in dataclasses.fields(value))
        pairs = (f"{name}={canonical_text(getattr(value, name))}" for name in names)
        return f"{kind.__module__}.{kind.__qualname__}({','.join(pairs)})"
    raise TypeError(
        f"key holds a {kind.__module__}.{kind.__qualname__}, expected frozen dataclasses, enums, "
        "tuples, str, int, float, bool or None"
    )


@dataclass(frozen=True)
class Identity:
    """Everything one entry on disk depends on, as text, and the digest that names its file."""

    text: str
    digest: str


def identity(key: object, arch: str, toolkit: str) -> Identity:
    """Identify the entry of `key` for `arch`, compiled by the DSL flavour `toolkit` ("cu13")."""
    versions = env.check_dependencies()
    facts = {
        "format": str(FORMAT),
        "key": canonical_text(key),
        "arch": arch,
        "sources": source_fingerprint(),
        "dsl": f"{versions.dsl} {toolkit}",
        "tvm_ffi": versions.tvm_ffi,
        "options": env.compiler_environment(),
        "host": env.host_cpu(),
    }
    text = json.dumps(facts, sort_keys=True, indent=0)
    return Identity(text, hashlib.sha256(text.encode()).hexdigest())


# -- the package's own sources --------------------------------------------------------------------

_PACKAGE = Path(__file__).resolve().parent


def _source_stamps() -> dict[str, tuple[int, int]]:
    """Return (time of change, size) of every source file of the package."""
    stamps: dict[str, tuple[int, int]] = {}
    for path in sorted(_PACKAGE.rglob("*.py")):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            stamps[path.relative_to(_PACKAGE).as_posix()] = (status.st_mtime_ns, status.st_size)
    return stamps


# Taken when this module is imported, which comes with launch and before the kernels: the code that
# runs is the code of this moment, whatever is edited later.
_STAMPS_AT_IMPORT = _source_stamps()


def sources_changed() -> bool:
    """Say whether a source file changed since the import, so that files and code may differ."""
    return _source_stamps() != _STAMPS_AT_IMPORT


@functools.lru_cache(maxsize=1)
def source_fingerprint() -> str:
    """Hash every source file of the package: any edit makes other entries."""
    digest = hashlib.sha256()
    for name in _STAMPS_AT_IMPORT:
        content = (_PACKAGE / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


# -- the directory --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A compiled kernel as bytes, with what its loader has to know."""

    payload: bytes
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])


# Only what the cache itself may have made is ever deleted: the directory may be anybody's home.
_ENTRY_NAME = re.compile(r"[0-9a-f]{64}\.kernel")
_LEFTOVER_NAME = re.compile(r"\.[0-9a-f]{64}(-\w+\.tmp|\.lock)")

_MAGIC = b"flashcute\n"
_HEADER = struct.Struct("<32sI")  # SHA-256 of all that follows it, length of the JSON text
_PERMANENT = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR}


class BadEntryError(Exception):
    """A file of the cache is damaged or is not what its name says."""


def pack(entry: Entry, identity: Identity) -> bytes:
    """Write an entry as the content of a file."""
    header = json.dumps({"identity": identity.text, "metadata": dict(entry.metadata)}).encode()
    body = struct.pack("<I", len(header)) + header + entry.payload
    return _MAGIC + hashlib.sha256(body).digest() + body


def unpack(content: bytes, identity: Identity) -> Entry:
    """Read an entry back.

    Raises: BadEntryError when the content is cut short, altered, or of another identity.
    """
    start = len(_MAGIC) + _HEADER.size
    if len(content) < start or not content.startswith(_MAGIC):
        raise BadEntryError("it is cut short or no entry at all")
    checksum, length = _HEADER.unpack_from(content, len(_MAGIC))
    if hashlib.sha256(content[len(_MAGIC) + 32 :]).digest() != checksum:
        raise BadEntryError("its checksum does not match")
    header = json.loads(content[start : start + length])
    if header["identity"] != identity.text:
        raise BadEntryError("it belongs to another kernel, version or architecture")
    return Entry(content[start + length :], header["metadata"])


class DiskCache:
    """The entries in one directory; no method raises OSError."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.can_write = True

    def path(self, digest: str) -> Path:
        """Return the file of an entry."""
        return self.directory / f"{digest}.kernel"

    def read(self, identity: Identity) -> Entry | None:
        """Return the entry, or None when there is none; a bad one is dropped with a warning."""
        path = self.path(identity.digest)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._failed("read", error)
            return None
        try:
            entry = unpack(content, identity)
        except BadEntryError as error:
            self.discard(identity.digest, str(error))
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # the longest unused is pruned first
        return entry

    def discard(self, digest: str, reason: str) -> None:
        """Drop an entry that cannot be used, with one warning."""
        _count(disk_errors=1)
        _warn_once(digest, f"dropped {self.path(digest)}: {reason}; the kernel is compiled again")
        with contextlib.suppress(OSError):
            self.path(digest).unlink()

    def write(self, identity: Identity, entry: Entry) -> bool:
        """Publish an entry; returns whether it is on disk. A reader sees all of it or nothing."""
        if not self.can_write:
            return False
        temporary = None
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                dir=self.directory, prefix=f".{identity.digest}-", suffix=".tmp", delete=False
            ) as file:
                temporary = Path(file.name)
                file.write(pack(entry, identity))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path(identity.digest))
        except OSError as error:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    temporary.unlink()
            self._failed("write", error)
            return False
        self._prune()
        return True

    def entries(self) -> list[tuple[Path, os.stat_result]]:
        """List the entries with their file status."""
        return self._files(_ENTRY_NAME)

    def clear(self) -> int:
        """Delete every entry and what killed processes left; returns the number of entries."""
        removed = 0
        for path, _ in self.entries():
            with contextlib.suppress(OSError):
                path.unlink()
                removed += 1
        self._sweep(0.0)
        return removed

    @contextlib.contextmanager
    def lock(self, digest: str, timeout_s: float = LOCK_TIMEOUT_S) -> Generator[bool]:
        """Hold the lock of an entry against other processes; yields whether it is held.

        The kernel frees the lock of a process that dies. After `timeout_s`, or where lock files
        cannot be made, the caller goes on without: the worst case is a second compile.
        """
        file = self._acquire(digest, timeout_s) if self.can_write else None
        try:
            yield file is not None
        finally:
            if file is not None:
                _held.discard(file)
                # Unlinked while held: whoever waits for this file sees below that it is gone.
                with contextlib.suppress(OSError):
                    self._lock_path(digest).unlink()
                os.close(file)

    def _lock_path(self, digest: str) -> Path:
        return self.directory / f".{digest}.lock"

    def _acquire(self, digest: str, timeout_s: float) -> int | None:
        deadline = time.monotonic() + timeout_s
        path, delay = self._lock_path(digest), 0.005
        while True:
            try:
                self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                self._failed("lock", error)
                return None
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.exists() and os.path.samestat(os.fstat(file), path.stat()):
                    _held.add(file)
                    return file
                os.close(file)  # released and unlinked between our open and our lock: again
                continue
            except OSError as error:
                os.close(file)
                if error.errno not in (errno.EAGAIN, errno.EACCES, errno.ENOENT):
                    env.LOGGER.debug("no file lock in %s: %s", self.directory, error)
                    return None
            if time.monotonic() > deadline:
                env.LOGGER.info("waited %.0f s for another process, going on", timeout_s)
                return None
            time.sleep(delay)
            delay = min(2 * delay, 0.1)

    def _failed(self, doing: str, error: OSError) -> None:
        _count(disk_errors=1)
        if doing != "read" and error.errno in _PERMANENT:
            self.can_write = False
        _warn_once(
            str(self.directory),
            f"cannot {doing} in {self.directory} ({error.strerror}): newly compiled kernels stay "
            "in memory. Set FLASH_CUTE_CACHE_DIR to a directory of yours, or "
            "FLASH_CUTE_DISK_CACHE=0",
        )

    def _files(self, names: re.Pattern[str]) -> list[tuple[Path, os.stat_result]]:
        found: list[tuple[Path, os.stat_result]] = []
        try:
            with os.scandir(self.directory) as listing:
                for item in listing:
                    if names.fullmatch(item.name):
                        with contextlib.suppress(OSError):
                            found.append((Path(item.path), item.stat(follow_symlinks=False)))
        except OSError:
            pass
        return found

    def _sweep(self, age_s: float) -> None:
        limit = time.time() - age_s
        for path, status in self._files(_LEFTOVER_NAME):
            if status.st_mtime <= limit:
                with contextlib.suppress(OSError):
                    path.unlink()

    def _prune(self) -> None:
        self._sweep(STALE_S)
        entries = sorted(self.entries(), key=lambda item: item[1].st_mtime)
        total = sum(status.st_size for _, status in entries)
        while total > MAX_BYTES and len(entries) > 1:
            path, status = entries.pop(0)
            total -= status.st_size
            with contextlib.suppress(OSError):
                path.unlink()


def directory(settings: env.Settings | None = None) -> Path | None:
    """Return the directory of the cache, or None when it is switched off or there is no home."""
    settings = env.settings() if settings is None else settings
    if not settings.disk_cache:
        return None
    if settings.cache_dir is not None:
        return Path(settings.cache_dir).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the XDG specification: a relative path is to be ignored
        return Path(base) / "flash_cute"
    try:
        return Path.home() / ".cache" / "flash_cute"
    except RuntimeError:  # a user id without an entry in the password file, as in some containers
        _warn_once("home", "there is no home directory to cache in: set FLASH_CUTE_CACHE_DIR")
        return None


def distrust(status: os.stat_result) -> str | None:
    """Say why native code must not be loaded from a directory, or None when it may.

    The owner is this user, or root: an image may ship a filled cache that its user only reads.
    """
    if not stat.S_ISDIR(status.st_mode):
        return "it is no directory"
    if status.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {status.st_uid}, expected {os.geteuid()}"
    if status.st_mode & stat.S_IWOTH:
        return f"everybody may write to it (mode {stat.S_IMODE(status.st_mode):o}, expected 700)"
    return None


@functools.lru_cache(maxsize=8)
def _open(path: Path) -> DiskCache | None:
    """Open the cache in `path`, made where it is missing; None when it cannot be used."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = distrust(path.stat())
    except OSError as error:
        reason = error.strerror
    if reason is not None:
        _warn_once(
            str(path),
            f"not using {path}: {reason}. Compiled kernels stay in memory; set "
            "FLASH_CUTE_CACHE_DIR to a directory of yours, or FLASH_CUTE_DISK_CACHE=0",
        )
        return None
    return DiskCache(path)


def disk_cache() -> DiskCache | None:
    """Return the cache on disk as the settings ask for it, or None: memory only."""
    path = directory()
    if path is None:
        return None
    if not _STAMPS_AT_IMPORT:
        _warn_once(
            "sources",
            f"no source files in {_PACKAGE}, which an entry on disk would be told apart by: "
            "compiled kernels stay in memory",
        )
        return None
    if sources_changed():
        # This process runs the code it imported; entries of the files as they are now may take
        # other arguments, and what it compiles belongs to neither state of the files.
        _warn_once(
            "sources",
            "files of flash_cute changed since they were imported: compiled kernels stay in "
            "memory until the process is restarted",
        )
        return None
    return _open(path)


# -- memory, single flight, counters --------------------------------------------------------------


@dataclass
class _Counts:
    compiles: int = 0
    memory_hits: int = 0
    disk_hits: int = 0
    disk_errors: int = 0


@dataclass(frozen=True)
class CacheInfo:
    """What the cache did in this process, and what lies on disk.

    Units: `entries` and `bytes` count the directory, which other processes share.
    """

    compiles: int
    memory_hits: int
    disk_hits: int
    disk_errors: int
    directory: str | None
    entries: int
    bytes: int


_counts = _Counts()
_mutex = threading.Lock()
_memory: dict[Hashable, Executable] = {}
_flights: dict[Hashable, tuple[threading.RLock, list[None]]] = {}
_held: set[int] = set()  # descriptors of the lock files this process holds
_warned: set[str] = set()


def _after_fork() -> None:
    """Make a forked child independent: no lock stays taken by a thread that is not there."""
    global _mutex
    _mutex = threading.Lock()
    _flights.clear()
    for file in _held:  # a copy kept open would keep the lock after the parent's release
        with contextlib.suppress(OSError):
            os.close(file)
    _held.clear()


os.register_at_fork(after_in_child=_after_fork)


def _count(**increments: int) -> None:
    with _mutex:
        for name, increment in increments.items():
            setattr(_counts, name, getattr(_counts, name) + increment)


def _warn_once(topic: str, message: str) -> None:
    with _mutex:
        if topic in _warned:
            return
        _warned.add(topic)
    warnings.warn(f"flash_cute cache: {message}", CacheWarning, stacklevel=2)


@contextlib.contextmanager
def _single_flight(key: Hashable) -> Generator[None]:
    """Let one thread at a time build `key`; other keys are not held up."""
    with _mutex:
        lock, users = _flights.setdefault(key, (threading.RLock(), []))
        users.append(None)
    try:
        with lock:
            yield
    finally:
        with _mutex:
            users.pop()
            if not users:
                _flights.pop(key, None)


def lookup(key: Hashable) -> Executable | None:
    """Return what is loaded for `key`, or None: one probe of a dict."""
    found = _memory.get(key)
    if found is not None:
        # Not under the mutex: a lost count in a race is cheaper than a lock on every call.
        _counts.memory_hits += 1
    return found


@dataclass(frozen=True)
class Recipe:
    """How to come by one executable; each step runs at most once per process and key."""

    identity: Callable[[], Identity] | None  # may raise DependencyError; None: never on disk
    permit: Callable[[], None]  # raises when a build is not allowed
    build: Callable[[], Entry]
    load: Callable[[Entry], Executable]


def fetch(key: Hashable, recipe: Recipe) -> Executable:
    """Return the executable of `key`: from memory, else from disk, else built and published.

    Raises: whatever the recipe raises. Nothing of the disk: it is then as if there were none.
    """
    with _single_flight(key):
        found = lookup(key)
        if found is None:
            found = _from_disk(recipe)
            _memory[key] = found
        return found


def _from_disk(recipe: Recipe) -> Executable:
    disk = None if recipe.identity is None else disk_cache()
    if recipe.identity is None or disk is None:
        return _build(recipe)[1]
    identity = recipe.identity()
    found = _load(disk, identity, recipe)
    if found is None:
        with disk.lock(identity.digest):
            # Another process may have built it while this one waited.
            found = _load(disk, identity, recipe)
            if found is None:
                entry, found = _build(recipe)
                disk.write(identity, entry)
    return found


def _load(disk: DiskCache, identity: Identity, recipe: Recipe) -> Executable | None:
    entry = disk.read(identity)
    if entry is None:
        return None
    try:
        found = recipe.load(entry)
    except FlashCuteError:
        raise  # says what the user has to put right; the entry is not to blame
    except Exception as error:
        disk.discard(identity.digest, f"it cannot be loaded ({error})")
        return None
    _count(disk_hits=1)
    return found


def _build(recipe: Recipe) -> tuple[Entry, Executable]:
    recipe.permit()
    entry = recipe.build()
    _count(compiles=1)
    return entry, recipe.load(entry)


def cache_info() -> CacheInfo:
    """Return the counters of this process and the size of the directory."""
    path = directory()
    entries = DiskCache(path).entries() if path is not None else []
    size = sum(status.st_size for _, status in entries)
    where = None if path is None else str(path)
    return CacheInfo(
        **dataclasses.asdict(_counts), directory=where, entries=len(entries), bytes=size
    )


def clear_cache(*, disk: bool = True) -> int:
    """Forget the kernels in memory and, with `disk`, delete those on disk.

    Returns the number of entries deleted from the directory. The counters keep counting, and code
    that is loaded stays mapped until the process ends: a call in another thread may be using it.
    """
    _memory.clear()
    path = directory() if disk else None
    return DiskCache(path).clear() if path is not None else 0
