"""Instructions of the fifth-generation tensor cores: products, tensor memory, and their order.

A tensor-memory address is a lane in its high and a column in its low 16 bits; a warp reaches the 32
lanes of its place in its warpgroup. Loads carry their wait, so that no use of what they load can be
moved before it.

Products are issued by one lane of the warp, told by `elect`. Those of one thread run in the order
in which they are issued; others learn of their end by `commit` alone.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

MMA_DEPTH = 16  # inner extent of one product of 16-bit elements
LOADED = 32  # columns of one load: more would need as many registers in a row
VERSION = 1 << 14  # of the descriptor, in its upper word
SWIZZLES = {128: 2, 64: 4, 32: 6}  # by bytes of a swizzled row


@dataclass(frozen=True)
class SmemOperand:
    """How a (rows, dim) tile of 16-bit elements lies in shared memory, as descriptors say it.

    It consists of panels as wide as a swizzled row, and these of groups of 8 rows.
    """

    rows: int
    dim: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a swizzled row."""
        return next(size for size in SWIZZLES if 2 * self.dim % size == 0)

    @property
    def panel_bytes(self) -> int:
        """Bytes of a panel."""
        return self.rows * self.row_bytes

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile, or of a stage of a ring of them."""
        return 2 * self.rows * self.dim

    @property
    def upper(self) -> int:
        """The upper word of its descriptors: distance of groups of rows, version, swizzle."""
        return 8 * self.row_bytes >> 4 | VERSION | SWIZZLES[self.row_bytes] << 29

    def along_dim(self, k: int) -> int:
        """Offset in bytes of step k of a product over the head dim."""
        panel, within = divmod(2 * MMA_DEPTH * k, self.row_bytes)
        return panel * self.panel_bytes + within

    def along_rows(self, k: int) -> int:
        """Offset in bytes of step k of a product over the rows."""
        return MMA_DEPTH * self.row_bytes * k

    def lower(self, address: Int32, is_transposed: bool) -> Int32:
        """The lower word of the descriptor of the tile at an address: where it is.

        Args:
            is_transposed: the product is over the rows; panels are then `panel_bytes` apart.
        """
        distance = self.panel_bytes >> 4 if is_transposed else 1
        return (address & 0x3FFFF) >> 4 | distance << 16


def instruction(num_rows: int, num_cols: int, dtype, is_transposed: bool) -> int:
    """The descriptor of a product: f32 += 16-bit x 16-bit; is_transposed tells of B."""
    kind = 1 if dtype is cutlass.BFloat16 else 0
    word = 1 << 4 | kind << 7 | kind << 10 | int(is_transposed) << 16
    return word | num_cols // 8 << 17 | num_rows // 16 << 24


def elect() -> Int32:
    """1 in one lane of a converged warp, the same one each time, and 0 in the others."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 {$w0}, 1, 0, p; }",
        write_only_types=[Int32],
    )


def multiply(acc: Int32, a, b, kind: int, is_added, is_issuer: Int32):
    """Issue one product, acc (+)= A B.

    Args:
        acc: address of the result.
        a: (lower word, upper word) of a descriptor, or an address in tensor memory.
        b: (lower word, upper word) of a descriptor.
        kind: as `instruction`.
        is_added: whether to add to what is there, 1 or 0.
    """
    is_in_smem = isinstance(a, tuple)
    first = "mov.b64 a, {{$r6}, {$r7}};" if is_in_smem else ""
    source = "a" if is_in_smem else "[{$r6}]"
    cute.arch.inline_ptx(
        "{ .reg .pred p, q; .reg .b64 a, b; setp.ne.b32 p, {$r3}, 0; setp.ne.b32 q, {$r4}, 0; "
        f"mov.b64 b, {{{{$r1}}, {{$r2}}}}; {first} "
        f"@q tcgen05.mma.cta_group::1.kind::f16 [{{$r0}}], {source}, b, {{$r5}}, p; }}",
        read_only_args=[
            acc,
            b[0],
            Int32(b[1]),
            Int32(is_added),
            is_issuer,
            Int32(kind),
            *((a[0], Int32(a[1])) if is_in_smem else (a,)),
        ],
    )


def commit(barrier, is_issuer: Int32):
    """Arrive at a barrier when all products that this lane has issued are done."""
    cute.arch.inline_ptx(
        "{ .reg .pred q; setp.ne.b32 q, {$r1}, 0; @q tcgen05.commit.cta_group::1."
        "mbarrier::arrive::one.shared::cluster.b64 [{$r0}]; }",
        read_only_args=[barrier.toint(), is_issuer],
    )


def load(address: Int32, num: int) -> list:
    """`num` columns of this thread's lane, 16 or a multiple of 32; the whole warp takes part."""
    loads, at_once = [], min(num, LOADED)
    for i in range(0, num, at_once):
        registers = ", ".join(f"{{$w{j}}}" for j in range(i, i + at_once))
        loads.append(
            f"tcgen05.ld.sync.aligned.32x32b.x{at_once}.b32 {{{registers}}}, [{{$r0}} + {i}];"
        )
    return list(
        cute.arch.inline_ptx(
            "\n\t".join([*loads, "tcgen05.wait::ld.sync.aligned;"]),
            write_only_types=[Float32] * num,
            read_only_args=[address],
        )
    )


def store(address: Int32, words: list):
    """Write columns of this thread's lane; `wait_for_stores` before anyone is told."""
    registers = ", ".join(f"{{$r{i + 1}}}" for i in range(len(words)))
    cute.arch.inline_ptx(
        f"tcgen05.st.sync.aligned.32x32b.x{len(words)}.b32 [{{$r0}}], {{{registers}}};",
        read_only_args=[address, *words],
    )


def wait_for_stores():
    """Wait until this thread's stores are done, and order them before what tells of them."""
    cute.arch.inline_ptx(
        "tcgen05.wait::st.sync.aligned;\n\ttcgen05.fence::before_thread_sync;",
    )


def order_before():
    """Order this thread's loads before the barrier that it arrives at next."""
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")


def order_after():
    """Order this thread's next accesses and products after the barrier that it waited for."""
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")


def allocate(slot, num_columns: int):
    """Take columns of tensor memory and write their address to shared memory; one warp."""
    cute.arch.inline_ptx(
        "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 "
        f"[{{$r0}}], {num_columns};\n\ttcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;",
        read_only_args=[slot.toint()],
    )


def free(address: Int32, num_columns: int):
    """Give back what the same warp allocated, when no one uses it any more."""
    cute.arch.inline_ptx(
        f"tcgen05.dealloc.cta_group::1.sync.aligned.b32 {{$r0}}, {num_columns};",
        read_only_args=[address],
    )
