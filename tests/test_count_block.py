"""tools/count_block.py: loops of machine code and what their instructions occupy."""

from __future__ import annotations

from pathlib import Path

import checks
import pytest

tool = checks.load_tool("count_block")
SOFTMAX = [*["MUFU.EX2 R1, R2"] * 40, "@!P0 FFMA2 R2, R2, R4, R6", "STTM.x16 tmem[UR1], R5"]


def listing(bodies: list[list[str]]) -> str:
    """As nvdisasm prints loops, one after the other."""
    lines: list[str] = []
    for number, body in enumerate(bodies):
        lines.append(f".L_x_{number}:")
        lines += [f"        /*{i:04x}*/                   {text} ;" for i, text in enumerate(body)]
        lines.append(f"        /*fff0*/              @P1 BRA `(.L_x_{number}) ;")
    return "\n".join(lines)


def test_the_shortest_loop_of_each_role_is_counted():
    rescaling = [*["FMUL2 R1, R1, R2"] * 32, "STTM.x16 tmem[UR1], R5"]
    products = ["UTCHMMA gdesc[UR1], gdesc[UR2], tmem[UR3]"] * 16
    sass = listing([[*SOFTMAX, "FADD R1, R1, R2"], SOFTMAX, rescaling, products, ["MOV R1, R2"]])
    lines = tool.report(sass)
    by_role = {line.split(":")[0]: line for line in lines[::2]}
    assert set(by_role) == {"softmax", "correction", "products"}
    assert by_role["softmax"] == "softmax: issue 43, exponential 40, fma 2, tensor memory 1"
    assert by_role["correction"] == "correction: issue 34, fma 64, tensor memory 1"
    assert by_role["products"] == "products: issue 17, products 16"


def test_branches_forward_are_no_loops():
    forward = "        /*0010*/   BRA `(.L_x_9) ;\n.L_x_9:\n        /*0020*/   EXIT ;"
    assert tool.loops(forward) == []


@pytest.mark.compile
def test_the_kernel_has_the_counts_that_the_page_tells(tmp_path: Path):
    """Of the main loop, which the page compares with another kernel's."""
    pytest.importorskip("cutlass")
    import subprocess

    from test_sm100 import choose, spec_of

    from flash_cute.compile import inspect_kernel
    from flash_cute.sm100.fwd import FlashAttentionForwardSm100

    try:
        nvdisasm = tool.nvdisasm()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    config, spec = choose(spec_of(128))
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(inspect_kernel(FlashAttentionForwardSm100(spec, config), "sm_100a").cubin)
    command = [nvdisasm, "-c", str(cubin)]
    sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    counts = next(c for c in tool.loops(sass) if tool.role_of(c) == "softmax")
    units = tool.by_unit(counts)
    # Those of the other kernel; the assembler of CUDA 12 takes up to 3 more ALU instructions.
    most = {"issue": 543, "exponential": 105, "fma": 431, "alu": 170}
    assert {unit: max(units[unit], limit) for unit, limit in most.items()} == most
