"""Count the machine instructions of a Blackwell attention kernel per block of keys, by unit.

`python tools/count_block.py kernel.cubin ...` disassembles with nvdisasm (CUDA toolkit, or the one
in the triton wheel) and finds three loops: that of the softmax, of the correction and of the
products, each the shortest with the instructions that tell it; docs/performance-sm100.md.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)")
LABEL = re.compile(r"(\.L_x_\d+):")
TARGET = re.compile(r"\bBRA\S*\s.*`\((\.L_x_\d+)\)")
# Lanes that an instruction occupies its unit for: packed ones twice as many.
UNITS = {
    "exponential": {"MUFU": 1},
    "fma": {"FFMA": 1, "FMUL": 1, "FADD": 1, "IMAD": 1, "FFMA2": 2, "FMUL2": 2, "FADD2": 2},
    "alu": dict.fromkeys(
        "FMNMX FMNMX3 F2FP FSEL FSETP ISETP SEL SHF LOP3 IADD3 LEA VIADD MOV PRMT".split(), 1
    ),
    "tensor memory": {"LDTM": 1, "STTM": 1},
    "shared memory": {"LDS": 1, "STS": 1, "SYNCS": 1},
    "products": {"UTCHMMA": 1},
}


def loops(sass: str) -> list[Counter[str]]:
    """The instructions of each loop that ends in a branch backwards, shortest first."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    found: list[tuple[int, int]] = []
    for line in sass.splitlines():
        if label := LABEL.match(line.strip()):
            labels[label[1]] = len(instructions)
        if instruction := INSTRUCTION.match(line):
            instructions.append(instruction[1])
            target = TARGET.search(line)
            if target and target[1] in labels:
                found.append((labels[target[1]], len(instructions)))
    found.sort(key=lambda span: span[1] - span[0])
    return [Counter(instructions[begin:end]) for begin, end in found]


def role_of(counts: Counter[str]) -> str | None:
    """Whose loop over blocks of keys it may be."""
    if counts["MUFU"] >= 32 and counts["STTM"]:
        return "softmax"
    if counts["UTCHMMA"] >= 8 and not counts["UTMALDG"]:
        return "products"
    is_rescaling = counts["FMUL2"] >= 32 and counts["STTM"] and counts["MUFU"] < 8
    return "correction" if is_rescaling else None


def by_unit(counts: Counter[str]) -> dict[str, int]:
    """Lanes' worth of each unit, and all instructions as `issue`."""
    units = {
        unit: sum(counts[name] * weight for name, weight in names.items())
        for unit, names in UNITS.items()
    }
    return {"issue": counts.total(), **units}


def report(sass: str) -> list[str]:
    """Lines on the loops of a kernel."""
    lines: list[str] = []
    seen: set[str] = set()
    for counts in loops(sass):
        role = role_of(counts)
        if role is None or role in seen:
            continue
        seen.add(role)
        units = ", ".join(f"{unit} {count}" for unit, count in by_unit(counts).items() if count)
        most = ", ".join(f"{name} {count}" for name, count in counts.most_common(9))
        lines += [f"{role}: {units}", f"    {most}"]
    return lines


def nvdisasm() -> str:
    """The disassembler.

    Raises: FileNotFoundError.
    """
    if on_path := shutil.which("nvdisasm"):
        return on_path
    spec = importlib.util.find_spec("triton")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        tool = Path(folder, "backends", "nvidia", "bin", "nvdisasm")
        if tool.exists():
            return str(tool)
    raise FileNotFoundError("nvdisasm is neither on PATH nor in an installed triton")


def main(paths: Sequence[str]) -> int:
    """Print the counts of each cubin."""
    for path in paths:
        command = [nvdisasm(), "-c", path]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        print(path, *report(sass), sep="\n  ")
    return 0 if paths else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
