"""PTX for sm_100a to PTX for sm_90a: an instruction is replaced where Hopper has none like it.

Tensor memory becomes device memory, one array for each CTA (tensor_memory.cu says how it lies), and
`tcgen05` instructions become accesses to it or calls. Packed f32x2 arithmetic, the maximum of three
and arithmetic of mixed precision become the instructions that they stand for, with the same
rounding. `setmaxnreg` is dropped, which changes no result. All the rest (roles, barriers, TMA,
layouts, arithmetic) is the kernel's own. What is known neither here nor to ptxas is refused by
name.

Contract: launch.py provides the memory; kernels run without clusters.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable
from dataclasses import dataclass

VERSION = "9.0"  # of PTX, the newest that ptxas of CUDA 13.0 takes
COLUMNS = 512  # of tensor memory
COLUMN_BYTES = 512  # 128 lanes of 32 bits
# Codes that tensor_memory.cu has the messages for.
NOT_OWN_LANES, NO_SUCH_COLUMN, LANES_DISABLED = 1, 2, 3

COMMENT = re.compile(r"//[^\n]*")
INSTRUCTION = re.compile(
    r"(?:@(?P<guard>!?[%\w$]+)\s+)?(?<![\w.%$])"
    r"(?P<opcode>[a-z]\w*(?:::\w+|\.\w+)*)(?:\s+(?P<operands>[^;]*?))?\s*;"
)
ENTRY = re.compile(r"\.entry\b[^{]*\{")
# What may not be left over: ptxas names other instructions that it does not have.
FORBIDDEN = re.compile(r"\b(?:tcgen05\.[\w.:]+|[\w.:]+\.f32x2|clusterlaunchcontrol[\w.:]*)")

MMA = re.compile(r"tcgen05\.mma\.cta_group::1\.kind::f16(?:\.collector::a::\w+)*")
COMMIT = re.compile(
    r"tcgen05\.commit\.cta_group::1\.mbarrier::arrive::one(?:\.shared::cluster)?\.b64"
)
MOVE = re.compile(r"tcgen05\.(?P<kind>ld|st)\.sync\.aligned\.32x32b\.x(?P<count>\d+)\.b32")
ALLOC = re.compile(r"tcgen05\.alloc\.cta_group::1\.sync\.aligned(?:\.shared::cta)?\.b32")
DEALLOC = re.compile(r"tcgen05\.dealloc\.cta_group::1\.sync\.aligned\.b32")
RELINQUISH = re.compile(r"tcgen05\.relinquish_alloc_permit\.cta_group::1\.sync\.aligned")
ORDER = re.compile(r"tcgen05\.(?:wait::(?:ld|st)\.sync\.aligned|fence::\w+_thread_sync)")
PACKED = re.compile(r"(?:add|sub|mul|fma)(?:\.r[nzmp])?(?:\.ftz)?\.f32x2")
EXTREME = re.compile(r"(?:max|min)(?:\.ftz)?(?:\.NaN)?\.f32")
MIXED = re.compile(
    r"(?P<base>(?P<kind>fma|add|sub)(?:\.r[nzmp])?(?:\.sat)?\.f32)\.(?P<half>bf16|f16)"
)
BLOCKING = re.compile(
    r"mbarrier\.(?:try|test)_wait\.[\w.:]+|bar(?:rier)?(?:\.cta)?(?:\.sync|\.red)[\w.:]*|ret|exit"
)
REGISTERS = re.compile(r"setmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32")

PROLOGUE = """
    .reg .b64 %sm100_base;
    .reg .b32 %sm100_lane;
    {
    .reg .b32 index, more; .reg .b64 memory;
    mov.u32 index, %ctaid.z; mov.u32 more, %nctaid.y; mul.lo.u32 index, index, more;
    mov.u32 more, %ctaid.y; add.u32 index, index, more;
    mov.u32 more, %nctaid.x; mul.lo.u32 index, index, more;
    mov.u32 more, %ctaid.x; add.u32 index, index, more;
    ld.global.u64 memory, [sm100_memory];
    mad.wide.u32 memory, index, 262144, memory;
    mov.u32 index, %tid.x;
    and.b32 %sm100_lane, index, 96;
    and.b32 index, index, 127;
    mad.wide.u32 %sm100_base, index, 4, memory;
    }
"""


class RefusalError(Exception):
    """Something in the PTX that the harness cannot run on Hopper; the message names it."""


@dataclass(frozen=True)
class Mode:
    """When products run, and whether threads are delayed.

    lazy:   a product runs not at once but where its warp next blocks after the commit that covers
            it, which then arrives: finds results used, and operands overwritten, without a wait
            for that commit
    jitter: now and then a thread sleeps up to 2**jitter ns before it touches tensor memory; 0 never
    """

    lazy: bool = False
    jitter: int = 0


PLAIN, LAZY, JITTER = MODES = Mode(), Mode(lazy=True), Mode(jitter=14)


@dataclass(frozen=True)
class Instruction:
    """One instruction; `guard` is a predicate, perhaps with "!" before it, or empty."""

    guard: str
    opcode: str
    operands: tuple[str, ...]

    @property
    def at(self) -> str:
        return f"@{self.guard} " if self.guard else ""


def split_operands(text: str) -> tuple[str, ...]:
    """Split at the commas that are in no bracket."""
    pieces, depth = [""], 0
    for char in text:
        depth += (char in "{[(") - (char in "}])")
        if char == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += char
    return tuple(piece.strip() for piece in pieces if piece.strip())


def scope(declarations: str, *lines: str) -> str:
    """A block with registers of its own."""
    return "{\n\t" + "\n\t".join(line for line in (declarations, *lines) if line) + "\n\t}"


def call(function: str, *arguments: tuple[str, str]) -> str:
    """Call a device function with (type, register or constant) arguments."""
    names = [f"sx_argument{i}" for i in range(len(arguments))]
    pairs = list(zip(names, arguments, strict=True))
    declared = " ".join(f".param .{kind} {name};" for name, (kind, _) in pairs)
    stores = [f"st.param.{kind} [{name}], {value};" for name, (kind, value) in pairs]
    return scope(declared, *stores, f"call {function}, ({', '.join(names)});")


def address(operand: str, to: str) -> str:
    """Put the address in "[%r1+8]" into a 32-bit register."""
    found = re.fullmatch(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\w+))?\s*\]", operand)
    if found is None:
        raise RefusalError(f"address {operand}")
    base, offset = found.groups()
    return f"add.s32 {to}, {base}, {offset};" if offset else f"mov.b32 {to}, {base};"


def flag(predicate: str, bit: int, to: str) -> str:
    """Put `bit` into a register where a predicate holds, else 0; an empty one always does."""
    if predicate in ("", "1"):
        return f"mov.b32 {to}, {bit};"
    if predicate == "0":
        return f"mov.b32 {to}, 0;"
    values = (0, bit) if predicate.startswith("!") else (bit, 0)
    return f"selp.b32 {to}, {values[0]}, {values[1]}, {predicate.lstrip('!')};"


class Lowering:
    """Rewrites one PTX text; `counts` says how often it replaced what."""

    def __init__(self, mode: Mode = PLAIN):
        self.mode = mode
        self.counts: collections.Counter[str] = collections.Counter()
        self._labels = 0
        self._families: tuple[tuple[re.Pattern[str], Callable[[Instruction], str | None]], ...] = (
            (MMA, self.product),
            (COMMIT, self.commit),
            (MOVE, self.move),
            (ALLOC, self.alloc),
            (DEALLOC, self.dealloc),
            (RELINQUISH, lambda _: ""),
            (ORDER, lambda _: "fence.acq_rel.gpu;"),
            (PACKED, self.packed),
            (EXTREME, self.extreme),
            (MIXED, self.mixed),
            (REGISTERS, lambda _: ""),
            (BLOCKING, self.block),
        )

    def run(self, ptx: str) -> str:
        """Rewrite PTX for sm_100a.

        Raises: RefusalError with all that has no equivalent.
        """
        text = COMMENT.sub("", ptx)
        text = re.sub(r"^\.version .*$", f".version {VERSION}", text, flags=re.M)
        text, count = re.subn(r"^\.target\s+sm_100[af]?\b", ".target sm_90a", text, flags=re.M)
        if count != 1:
            raise RefusalError("PTX that is not for sm_100a")
        if re.search(r"\.(?:reqnctapercluster|explicitcluster)\b", text):
            raise RefusalError("a launch with clusters")
        refused: collections.Counter[str] = collections.Counter()

        def replace(found: re.Match[str]) -> str:
            operands = split_operands(found["operands"] or "")
            try:
                new = self.replacement(Instruction(found["guard"] or "", found["opcode"], operands))
            except RefusalError as refusal:
                refused[str(refusal)] += 1
                return ""
            return found[0] if new is None else new

        text = INSTRUCTION.sub(replace, text)
        refused.update(FORBIDDEN.findall(text))
        if refused:
            raise RefusalError("; ".join(f"{count}x {name}" for name, count in refused.items()))
        return self.with_prologue(text)

    def replacement(self, instruction: Instruction) -> str | None:
        """The text in the place of an instruction; None where it stays.

        Raises: RefusalError for an instruction of the families here in a form that is not known.
        """
        opcode = instruction.opcode
        if "cta_group::2" in opcode:
            raise RefusalError(opcode)
        for pattern, rewrite in self._families:
            if pattern.fullmatch(opcode):
                new = rewrite(instruction)
                if new is None:
                    return None
                self.counts[opcode] += 1
                touches = (MMA, COMMIT, MOVE)
                return self.delay() + new if self.mode.jitter and pattern in touches else new
        if opcode.startswith("tcgen05."):
            raise RefusalError(opcode)
        return None

    def with_prologue(self, text: str) -> str:
        """Give every entry that uses tensor memory the address of its thread's lane."""
        entries = list(ENTRY.finditer(text))
        ends = [entry.start() for entry in entries[1:]] + [len(text)]
        for entry, end in reversed(list(zip(entries, ends, strict=True))):
            if "%sm100_base" in text[entry.end() : end]:
                text = text[: entry.end()] + PROLOGUE + text[entry.end() :]
        return text

    def label(self) -> str:
        """A new label."""
        self._labels += 1
        return f"SM100_{self._labels}"

    def guarded(self, guard: str, declarations: str, *lines: str) -> str:
        """A block that is skipped where the guard does not hold."""
        if not guard:
            return scope(declarations, *lines)
        inverse = guard[1:] if guard.startswith("!") else "!" + guard
        label = self.label()
        return scope(declarations, f"@{inverse} bra {label};", *lines, f"{label}:")

    def fail_if(self, predicate: str, code: int, detail: str) -> str:
        """Stop the kernel with a message where a predicate holds."""
        return self.guarded(predicate, "", call("sm100_fail", ("b32", str(code)), ("b32", detail)))

    # -- tensor memory

    def product(self, i: Instruction) -> str:
        """`tcgen05.mma`: a call; lanes that do not issue it help those that do."""
        operands = list(i.operands)
        lines = []
        if len(operands) == 6 and operands[4].startswith("{"):
            lanes = split_operands(operands.pop(4)[1:-1])
            lines += ["mov.b32 sx_t, 0;", *(f"or.b32 sx_t, sx_t, {lane};" for lane in lanes)]
            lines += ["setp.ne.u32 sx_q, sx_t, 0;", self.fail_if("sx_q", LANES_DISABLED, "sx_t")]
        if len(operands) != 5:
            raise RefusalError(f"{i.opcode} with {len(operands)} operands")
        d, a, b, kind, accumulates = operands
        if a.startswith("["):
            lines += [address(a, "sx_t"), "cvt.u64.u32 sx_a, sx_t;"]
        else:
            lines.append(f"mov.b64 sx_a, {a};")
        lines += [address(d, "sx_d"), f"mov.b64 sx_b, {b};", f"mov.b32 sx_kind, {kind};"]
        lines += [
            flag(i.guard, 1, "sx_flags"),
            flag(accumulates, 2, "sx_t"),
            "or.b32 sx_flags, sx_flags, sx_t;",
        ]
        lines.append(f"or.b32 sx_flags, sx_flags, {4 if a.startswith('[') else 0};")
        values = (
            ("b32", "sx_d"),
            ("b64", "sx_a"),
            ("b64", "sx_b"),
            ("b32", "sx_kind"),
            ("b32", "sx_flags"),
        )
        registers = (
            ".reg .b32 sx_d, sx_t, sx_kind, sx_flags; .reg .b64 sx_a, sx_b; .reg .pred sx_q;"
        )
        return scope(registers, *lines, call("sm100_mma", *values))

    def commit(self, i: Instruction) -> str:
        """`tcgen05.commit`: the products of this thread are done, so arrive."""
        if len(i.operands) != 1:
            raise RefusalError(f"{i.opcode} with {len(i.operands)} operands")
        if self.mode.lazy:
            put = (address(i.operands[0], "sx_d"), flag(i.guard, 1, "sx_flags"))
            run = call("sm100_commit", ("b32", "sx_d"), ("b32", "sx_flags"))
            return scope(".reg .b32 sx_d, sx_flags;", *put, run)
        return self.guarded(
            i.guard,
            "",
            "fence.acq_rel.gpu;",
            f"mbarrier.arrive.release.cluster.shared::cluster.b64 _, {i.operands[0]};",
        )

    def block(self, i: Instruction) -> str | None:
        """Where a warp may wait for others, or ends: it first runs what it has put off."""
        if not self.mode.lazy:
            return None
        return f"call sm100_run_queued;\n\t{i.at}{i.opcode} {', '.join(i.operands)};"

    def move(self, i: Instruction) -> str:
        """`tcgen05.ld` and `.st` of 32 lanes x 32 bits: one access for each column."""
        found = MOVE.fullmatch(i.opcode)
        kind, count = found["kind"], int(found["count"])
        place, values = i.operands if kind == "st" else i.operands[::-1]
        registers = split_operands(values[1:-1]) if values.startswith("{") else (values,)
        if len(registers) != count:
            raise RefusalError(f"{i.opcode} with {len(registers)} registers")
        lines = [
            address(place, "sx_t"),
            "shr.u32 sx_lane, sx_t, 16;",
            "setp.ne.u32 sx_q, sx_lane, %sm100_lane;",
            self.fail_if("sx_q", NOT_OWN_LANES, "sx_t"),
            "and.b32 sx_t, sx_t, 0xffff;",
            f"setp.gt.u32 sx_q, sx_t, {COLUMNS - count};",
            self.fail_if("sx_q", NO_SUCH_COLUMN, "sx_t"),
            f"mad.wide.u32 sx_at, sx_t, {COLUMN_BYTES}, %sm100_base;",
        ]
        for column, register in enumerate(registers):
            cell = f"[sx_at+{COLUMN_BYTES * column}]"
            lines.append(
                f"ld.relaxed.gpu.global.b32 {register}, {cell};"
                if kind == "ld"
                else f"st.relaxed.gpu.global.b32 {cell}, {register};"
            )
        declared = ".reg .b32 sx_t, sx_lane; .reg .pred sx_q; .reg .b64 sx_at;"
        return self.guarded(i.guard, declared, *lines)

    def alloc(self, i: Instruction) -> str:
        """`tcgen05.alloc`: the address goes where the kernel wants it."""
        place, columns = i.operands
        run = call("sm100_alloc", ("b32", "sx_t"), ("b32", columns))
        return self.guarded(i.guard, ".reg .b32 sx_t;", address(place, "sx_t"), run)

    def dealloc(self, i: Instruction) -> str:
        """`tcgen05.dealloc`."""
        place, columns = i.operands
        return self.guarded(i.guard, "", call("sm100_dealloc", ("b32", place), ("b32", columns)))

    def delay(self) -> str:
        """One time in eight, sleep for a while that differs between warps and times."""
        label = self.label()
        return (
            scope(
                ".reg .b32 sx_now, sx_mix; .reg .pred sx_q;",
                "mov.u32 sx_now, %clock;",
                "mov.u32 sx_mix, %tid.x;",
                "shr.u32 sx_mix, sx_mix, 5;",
                "mad.lo.u32 sx_mix, sx_mix, 0x9E3779B1, sx_now;",
                "mul.lo.u32 sx_mix, sx_mix, 0x85EBCA6B;",
                "and.b32 sx_now, sx_mix, 0x7000;",
                "setp.ne.u32 sx_q, sx_now, 0;",
                f"@sx_q bra {label};",
                f"shr.u32 sx_mix, sx_mix, {32 - self.mode.jitter};",
                "nanosleep.u32 sx_mix;",
                f"{label}:",
            )
            + "\n\t"
        )

    # -- arithmetic

    def packed(self, i: Instruction) -> str:
        """Two f32 operations for one on a pair."""
        to, *sources = i.operands
        opcode = i.opcode.removesuffix("x2")
        names = [(f"sx_lo{n}", f"sx_hi{n}") for n in range(len(sources))]
        lines = [
            f"mov.b64 {{{lo}, {hi}}}, {source};"
            for (lo, hi), source in zip(names, sources, strict=True)
        ]
        for half, result in ((0, "sx_lo"), (1, "sx_hi")):
            lines.append(f"{opcode} {result}, {', '.join(pair[half] for pair in names)};")
        lines.append(f"{i.at}mov.b64 {to}, {{sx_lo, sx_hi}};")
        return scope(f".reg .b32 sx_lo, sx_hi, {', '.join(sum(names, ()))};", *lines)

    def extreme(self, i: Instruction) -> str | None:
        """The maximum or minimum of three."""
        if len(i.operands) != 4:
            return None
        to, a, b, c = i.operands
        return scope(
            ".reg .b32 sx_t;", f"{i.opcode} sx_t, {a}, {b};", f"{i.at}{i.opcode} {to}, sx_t, {c};"
        )

    def mixed(self, i: Instruction) -> str:
        """f32 arithmetic on 16-bit factors, which convert exactly."""
        found = MIXED.fullmatch(i.opcode)
        to, *sources = i.operands
        count = 2 if found["kind"] == "fma" else 1
        lines = [f"cvt.f32.{found['half']} sx_t{n}, {sources[n]};" for n in range(count)]
        values = [f"sx_t{n}" for n in range(count)] + sources[count:]
        return scope(
            ".reg .b32 sx_t0, sx_t1;", *lines, f"{i.at}{found['base']} {to}, {', '.join(values)};"
        )


def join(lowered: str, functions: str) -> str:
    """Put the device functions that tensor memory needs before a lowered kernel."""
    text = COMMENT.sub("", functions)
    text = re.sub(r"^\.(?:version|target|address_size).*$", "", text, flags=re.M)
    return re.sub(
        r"^\.address_size 64", lambda head: head[0] + "\n" + text, lowered, count=1, flags=re.M
    )


@dataclass(frozen=True)
class Fault:
    """A change of a kernel's PTX that must make it wrong: the `index`-th match, or all for -1."""

    pattern: str
    replacement: str
    index: int = -1

    def plant(self, ptx: str) -> str:
        """The PTX with the fault.

        Raises: RefusalError where nothing matches, so that a fault cannot get lost.
        """
        found = list(re.finditer(self.pattern, ptx))
        if not found or self.index >= len(found):
            raise RefusalError(
                f"a fault at match {self.index} of {self.pattern}: {len(found)} match"
            )
        for match in reversed(found if self.index < 0 else [found[self.index]]):
            ptx = ptx[: match.start()] + match.expand(self.replacement) + ptx[match.end() :]
        return ptx


def matrix_descriptors(ptx: str) -> tuple[int, ...]:
    """The constant parts of shared-memory matrix descriptors in a kernel, in order."""
    found = re.findall(r"\bor\.b64\s+%\w+, %\w+, (\d+);", ptx)
    return tuple(value for text in found if (value := int(text)) >> 46 & 7 == 1)


def descriptor_fault(ptx: str, index: int, flipped: int) -> Fault:
    """The fault that flips bits of the `index`-th matrix descriptor."""
    value = matrix_descriptors(ptx)[index]
    return Fault(rf"(\bor\.b64\s+%\w+, %\w+, ){value};", rf"\g<1>{value ^ flipped};")
