"""What a result depends on besides the code under test: GPU, driver, versions, source, clocks."""

from __future__ import annotations

import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from flash_cute.cache import source_fingerprint

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (  # flash_cute itself is told by commit and source fingerprint
    "torch",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "triton",
    "flash-attn-4",
    "quack-kernels",
    "dew-flash-attn-cu13",
    "jax",
)
STATE_FIELDS = {
    "sm_mhz": "clocks.sm",
    "mem_mhz": "clocks.mem",
    "temp_c": "temperature.gpu",
    "power_w": "power.draw",
    "throttle": "clocks_event_reasons.active",  # unknown to drivers before 535
}
SLOW_QUERY_S = 0.5  # a query slower than this is made at the start and the end only


def version_of(package: str) -> str | None:
    """Installed version of a distribution, None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """Standard output of a command; None where it is missing, fails or hangs."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True, cwd=ROOT
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def commit() -> str:
    """The commit that is checked out, marked where files differ from it."""
    head = _output("git", "rev-parse", "--short=12", "HEAD")
    if head is None:
        return "unknown (no git, or no commit)"
    return head + (" + changes" if _output("git", "status", "--porcelain") else "")


def facts() -> dict[str, Any]:
    """Everything printed above a table and kept in its JSON."""
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "python": platform.python_version(),
        "commit": commit(),
        "source_fingerprint": source_fingerprint()[:16],
        "versions": {name: version_of(name) for name in PACKAGES},
        "torch_cuda": torch.version.cuda,
        "gpu": None,
        "driver": None,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found["gpu"] = properties.name
        found["num_sms"] = properties.multi_processor_count
        found["l2_bytes"] = l2_bytes()
        found["cudnn"] = torch.backends.cudnn.version()
        found["driver"] = _query("driver_version")
    return found


def l2_bytes() -> int:
    """Size of the L2 of the current device; 64 MiB where torch does not say."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return int(getattr(properties, "L2_cache_size", 0)) or 64 * 2**20


def _query(fields: str) -> str | None:
    """One line of nvidia-smi about the current device."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    uuid = getattr(properties, "uuid", None)
    which = [] if uuid is None else [f"--id=GPU-{str(uuid).removeprefix('GPU-')}"]
    line = _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", *which)
    return line.splitlines()[0].strip() if line else None


class ClockProbe:
    """Reads clocks, temperature and power; only at the ends of a run where reading is slow."""

    def __init__(self) -> None:
        self.fields = dict(STATE_FIELDS)
        if _query(self.fields["throttle"]) is None:
            del self.fields["throttle"]
        begin = time.perf_counter()
        self.first = self.read()
        self.is_slow = time.perf_counter() - begin > SLOW_QUERY_S

    def read(self) -> dict[str, str] | None:
        line = _query(",".join(self.fields.values()))
        if line is None:
            return None
        return dict(zip(self.fields, (v.strip() for v in line.split(",")), strict=False))

    def between_cells(self) -> dict[str, str] | None:
        return None if self.is_slow else self.read()
