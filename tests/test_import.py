"""Importing the package is cheap and has no side effects, in a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 1.0  # beyond torch; about 0.02 s here

SCRIPT = """
import json, os, sys, threading, time
import torch
before, environ, threads = set(sys.modules), dict(os.environ), threading.active_count()
started = time.perf_counter()
import flash_cute
seconds = time.perf_counter() - started
new = sorted(set(sys.modules) - before)
print(json.dumps({
    "seconds": seconds,
    "outside": sorted({name.split(".")[0] for name in new} - set(sys.stdlib_module_names)),
    "loaded": new,
    "environ": environ == dict(os.environ),
    "threads": threading.active_count() - threads,
    "cuda": torch.cuda.is_initialized(),
}))
"""


def fresh(script: str, *arguments: str) -> str:
    """Run a script in a new interpreter; returns what it printed."""
    command = [sys.executable, "-W", "error", "-c", script, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_torch_and_nothing_else():
    found = json.loads(fresh(SCRIPT))
    print(f"import flash_cute after torch: {found['seconds'] * 1e3:.0f} ms")
    # Compared with torch alone: torch itself imports cuda.bindings where that is installed.
    assert found["outside"] == ["flash_cute"]
    for module in ("flash_cute.sm90.fwd", "flash_cute.device"):
        assert module not in found["loaded"]
    assert found["seconds"] < LIMIT_S
    assert found["environ"] and found["threads"] == 0 and not found["cuda"]


def test_import_writes_no_file(tmp_path: Path):
    script = (
        "import os, sys; os.environ['XDG_CACHE_HOME'] = sys.argv[1]\n"
        "import flash_cute; print(os.listdir(sys.argv[1]))"
    )
    assert fresh(script, str(tmp_path)).strip() == "[]"


def test_a_call_on_the_cpu_needs_no_dsl():
    script = (
        "import sys, torch, flash_cute\n"
        "before = set(sys.modules)\n"
        "x = torch.ones(1, 4, 1, 8)\n"
        "flash_cute.flash_attn_func(x, x, x, causal=True)\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new & {'cutlass', 'tvm_ffi', 'cuda', 'nvidia_cutlass_dsl'}))"
    )
    assert fresh(script).strip() == "[]"
