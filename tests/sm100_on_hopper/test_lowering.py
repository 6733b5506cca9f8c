"""Lowering of small PTX texts, refusals by name, and what ptxas says of the matrix product."""

from __future__ import annotations

import pytest

from sm100_on_hopper import build, faults, lowering, matmul
from sm100_on_hopper.lowering import (
    Fault,
    Lowering,
    Mode,
    RefusalError,
    matrix_descriptors,
    split_operands,
)

pytestmark = pytest.mark.compile

HEAD = ".version 9.4\n.target sm_100a\n.address_size 64\n"
ENTRY = ".visible .entry k(.param .u64 k_param_0)\n.reqntid 128, 1, 1\n{\n"
REGISTERS = (
    ".reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<140>; .reg .f32 %f<9>; .reg .b64 %rd<9>;\n"
)


def kernel(*lines: str) -> str:
    """A kernel for sm_100a around some instructions."""
    return HEAD + ENTRY + REGISTERS + "\n".join(lines) + "\nret;\n}\n"


def lower(*lines: str, mode: Mode = lowering.PLAIN) -> str:
    """What lowering makes of them, without white space."""
    return " ".join(Lowering(mode).run(kernel(*lines)).split())


def registers(count: int) -> str:
    """A list of registers."""
    return "{" + ", ".join(f"%r{i}" for i in range(1, count + 1)) + "}"


KNOWN = {
    "packed fma": "fma.rn.ftz.f32x2 %rd1, %rd2, %rd3, %rd4;",
    "packed sum": "@%p1 add.rm.ftz.f32x2 %rd1, %rd2, %rd3;",
    "packed product": "@!%p1 mul.rn.f32x2 %rd1, %rd1, %rd1;",
    "maximum of three": "max.ftz.f32 %f1, %f2, %f3, %f4;",
    "minimum of three": "@%p1 min.NaN.f32 %f1, %f2, %f3, %f4;",
    "mixed fma": "fma.rn.f32.bf16 %f1, %h1, %h2, %f2;",
    "mixed sum": "add.rn.f32.f16 %f1, %h1, %f2;",
    "registers": "setmaxnreg.inc.sync.aligned.u32 184;",
    "waits": "tcgen05.wait::ld.sync.aligned; tcgen05.wait::st.sync.aligned;",
    "fences": "tcgen05.fence::before_thread_sync; tcgen05.fence::after_thread_sync;",
    "permit": "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;",
    "alloc": "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1+8], 512;",
    "dealloc": "@%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 512;",
    "commit": "@!%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [%r1+8];",
    "product from shared memory": (
        "tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, {%r3, %r3, %r3, %r3}, %p1;"
    ),
    "product from tensor memory": (
        "@%p2 tcgen05.mma.cta_group::1.kind::f16.collector::a::lastuse [%r1+64], [%r2+16], %rd2, "
        "%r2, !%p1;"
    ),
    "product that always adds": "tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, 1;",
    **{
        f"load of {n}": f"tcgen05.ld.sync.aligned.32x32b.x{n}.b32 {registers(n)}, [%r0+{n}];"
        for n in (1, 2, 4, 8, 16, 32, 64, 128)
    },
    **{
        f"store of {n}": f"@%p1 tcgen05.st.sync.aligned.32x32b.x{n}.b32 [%r0], {registers(n)};"
        for n in (1, 16, 128)
    },
}


@pytest.mark.parametrize("mode", lowering.MODES, ids=str)
def test_everything_known_assembles(tools: None, mode: Mode):
    names = [name for name in KNOWN]
    program = build.build(kernel(*(KNOWN[name] for name in names)), mode)
    assert program.uses_tensor_memory and program.threads == 128
    assert len(program.cubin) > 1000


@pytest.mark.parametrize("name", KNOWN)
def test_nothing_of_sm100_is_left(name: str):
    text = lower(KNOWN[name])
    assert not any(word in text for word in ("tcgen05", "f32x2", "setmaxnreg"))
    assert ".target sm_90a" in text


def test_packed_arithmetic_keeps_rounding_and_guard():
    text = lower(KNOWN["packed sum"])
    assert "mov.b64 {sx_lo0, sx_hi0}, %rd2;" in text
    assert "add.rm.ftz.f32 sx_lo, sx_lo0, sx_lo1;" in text
    assert "add.rm.ftz.f32 sx_hi, sx_hi0, sx_hi1;" in text
    assert "@%p1 mov.b64 %rd1, {sx_lo, sx_hi};" in text


def test_maximum_of_two_stays():
    assert "max.ftz.f32 %f1, %f2, %f3;" in lower("max.ftz.f32 %f1, %f2, %f3;")


def test_columns_lie_512_bytes_apart():
    text = lower(KNOWN["load of 4"])
    assert "add.s32 sx_t, %r0, 4;" in text
    cells = [f"ld.relaxed.gpu.global.b32 %r{i + 1}, [sx_at+{512 * i}];" for i in range(4)]
    assert all(cell in text for cell in cells)
    assert "setp.gt.u32 sx_q, sx_t, 508;" in text  # columns past the end are an error


def test_commit_arrives_after_a_fence_and_only_under_its_guard():
    text = lower(KNOWN["commit"])
    arrive = "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r1+8];"
    assert text.index("@%p1 bra SM100_") < text.index("fence.acq_rel.gpu;") < text.index(arrive)
    assert "sm100_run_queued" not in text


def test_lazy_commit_joins_the_queue_that_runs_where_a_warp_blocks():
    wait = "@%p1 mbarrier.try_wait.parity.shared.b64 %p2, [%r1], %r2, 1000;"
    text = lower(KNOWN["commit"], wait, "bar.sync 0;", mode=lowering.LAZY)
    assert "mbarrier.arrive" not in text
    assert "selp.b32 sx_flags, 0, 1, %p1;" in text and "call sm100_commit" in text
    for blocking in (wait, "bar.sync 0;", "ret ;"):
        assert f"call sm100_run_queued; {blocking}" in text
    assert "sm100_run_queued" not in lower(wait)


def test_product_passes_guard_accumulation_and_operands():
    text = lower(KNOWN["product from tensor memory"])
    assert "add.s32 sx_d, %r1, 64;" in text
    assert "add.s32 sx_t, %r2, 16; cvt.u64.u32 sx_a, sx_t;" in text
    assert "selp.b32 sx_flags, 1, 0, %p2;" in text
    assert "selp.b32 sx_t, 0, 2, %p1;" in text
    assert "or.b32 sx_flags, sx_flags, 4;" in text


def test_only_kernels_with_tensor_memory_get_its_address():
    assert "sm100_memory" not in lower("max.f32 %f1, %f2, %f3, %f4;")
    assert "sm100_memory" in lower(KNOWN["load of 1"])


def test_comments_and_other_instructions_stay_out_of_it():
    text = lower("add.s32 %r1, %r2, %r3; // tcgen05.mma.nonsense;", "@%p1 bra L;", "L:")
    assert "add.s32 %r1, %r2, %r3;" in text and "@%p1 bra L;" in text and "tcgen05" not in text


UNKNOWN = {
    "a pair's product": "tcgen05.mma.cta_group::2.kind::f16 [%r1], %rd1, %rd2, %r2, %p1;",
    "a pair's load": (
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".cta_group::2 [%r1], [%rd1, {%r2, %r3}], [%r4];"
    ),
    "fp8": "tcgen05.mma.cta_group::1.kind::f8f6f4 [%r1], %rd1, %rd2, %r2, %p1;",
    "sparse": "tcgen05.mma.sp.cta_group::1.kind::f16 [%r1], %rd1, %rd2, [%r3], %r2, %p1;",
    "scaled input": "tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, %p1, 3, 4, 5;",
    "multicast": (
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 "
        "[%r1], %h1;"
    ),
    "another shape": "tcgen05.ld.sync.aligned.16x256b.x1.b32 {%r1, %r2, %r3, %r4}, [%r5];",
    "packing": "tcgen05.ld.sync.aligned.32x32b.x2.pack::16b.b32 {%r1, %r2}, [%r5];",
    "copy": "tcgen05.cp.cta_group::1.128x256b [%r1], %rd1;",
    "launch control": (
        "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 "
        "[%r1], [%r2];"
    ),
    "missing registers": "tcgen05.ld.sync.aligned.32x32b.x4.b32 {%r1, %r2}, [%r5];",
    "other packed arithmetic": "sqrt.rn.f32x2 %rd1, %rd2;",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_is_refused_by_name(name: str):
    opcode = UNKNOWN[name].split()[0]
    with pytest.raises(RefusalError) as refusal:
        lower(UNKNOWN[name])
    assert opcode in str(refusal.value)


def test_every_refusal_is_counted():
    with pytest.raises(RefusalError, match=r"2x tcgen05\.cp"):
        lower(UNKNOWN["copy"], UNKNOWN["fp8"], UNKNOWN["copy"])


def test_what_only_ptxas_knows_is_refused_in_its_words(tools: None):
    with pytest.raises(RefusalError, match="ptxas"):
        build.build(kernel("redux.sync.max.f32 %f1, %f2, 0xffffffff;"))


def test_clusters_and_other_targets_are_refused():
    with pytest.raises(RefusalError, match="clusters"):
        Lowering().run(kernel().replace(".reqntid", ".reqnctapercluster 2\n.reqntid"))
    with pytest.raises(RefusalError, match="sm_100a"):
        Lowering().run(kernel().replace("sm_100a", "sm_80"))


def test_operands_split_outside_brackets():
    assert split_operands("[%r1+4], {%r2, %r3}, %p1") == ("[%r1+4]", "{%r2, %r3}", "%p1")


def test_fault_must_match():
    assert Fault("a", "b", 1).plant("aXa") == "aXb"
    assert Fault("a", "b").plant("aXa") == "bXb"
    for lost in (Fault("c", "b"), Fault("a", "b", 2)):
        with pytest.raises(RefusalError, match="a fault at match"):
            lost.plant("aXa")


# -- the matrix product


def test_matrix_descriptors_are_found():
    def fields(descriptor: int) -> tuple[int, int, int]:
        return descriptor >> 61, (descriptor >> 32 & 0x3FFF) << 4, (descriptor >> 16 & 0x3FFF) << 4

    a, b = matrix_descriptors(matmul.ptx())
    # 128-byte swizzle; A: 8 rows of k are 1024 bytes; B: 8 of k likewise, 64 columns 8192.
    assert fields(a)[:2] == (2, 1024)
    assert fields(b) == (2, 1024, 8192)


@pytest.mark.parametrize("mode", lowering.MODES, ids=str)
def test_matrix_product_assembles(tools: None, mode: Mode):
    program = matmul.program(mode)
    assert program.entry.startswith("sm100_matmul_s3")
    assert program.threads == 192 and program.uses_tensor_memory


@pytest.mark.parametrize("name", faults.NAMES)
def test_planted_fault_assembles(tools: None, name: str):
    mode, fault = faults.named(name)
    assert matmul.program(mode, (fault,)).cubin != matmul.program(mode).cubin


@pytest.mark.parametrize(
    "fault", [*faults.MISSING_COMMITS, faults.NO_COMMITS, faults.NO_DEALLOC, faults.OTHER_LANES]
)
def test_other_planted_fault_assembles(tools: None, fault: Fault):
    assert matmul.program(lowering.LAZY, (fault,)).cubin != matmul.program(lowering.LAZY).cubin


def test_matrix_product_is_as_the_tests_of_faults_expect():
    ptx = matmul.ptx()
    assert ptx.count("tcgen05.commit.") == 2
    assert ptx.count("tcgen05.mma.") == matmul.TILE_K // 16
