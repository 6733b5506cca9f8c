"""The attention kernels of the package, launched by launch.py in the place of the DSL's launcher.

`substitute` puts it under the public functions: whatever calls them then runs a kernel that was
compiled for sm_100a on the Hopper GPU that is there. It does the same with a kernel for sm_90a,
which shows that the launcher itself is right.

The launch record follows the fields of the kernel's ForwardParams by name; one that is not known is
refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flash_cute.arguments import ForwardArguments
from sm100_on_hopper import record
from sm100_on_hopper.build import Program, build, kernel_ptx
from sm100_on_hopper.lowering import PLAIN, Fault, Mode, RefusalError
from sm100_on_hopper.record import Field, TmaTile

ELEMENT_BYTES = 2
LIST_ARGUMENTS = 6  # of a list of blocks, as device/block_sparsity.py has them
Known = dict[str, list[Field]]


def ordered(kind: type, known: Known) -> list[Field]:
    """The fields of a dataclass of the kernel's, in its order.

    Raises: RefusalError for one that is not known.
    """
    names = [field.name for field in dataclasses.fields(kind)]
    if unknown := [name for name in names if name not in known]:
        raise RefusalError(f"{kind.__name__} with the fields {', '.join(unknown)}")
    return [field for name in names for field in known[name]]


class ForwardRecord:
    """The launch record of a forward kernel object and the values of one launch."""

    def __init__(self, kernel: Any, values: Sequence[Any]):
        count = len(ForwardArguments._fields)
        self.kernel, self.spec, self.config = kernel, kernel.spec, kernel.config
        self.args, self.more = ForwardArguments(*values[:count]), list(values[count:])

    def fields(self) -> list[Field]:
        """Every kernel parameter, in the order of ForwardParams.

        Raises: RefusalError for fields that are not known here.
        """
        module = sys.modules[type(self.kernel.description).__module__]
        captured = self.captured()  # first: what follows is about blocks
        args = self.args
        known: Known = {
            **self.operands(),
            **self.results(),
            "mma_qk": [record.unread("mma_qk")],
            "mma_pv": [record.unread("mma_pv")],
            "scheduler": self.scheduler(),
            "split_blocks": [record.int32("split_blocks", args.split_blocks)],
            "sequences": self.sequences(),
            "bounds": [
                record.int32(name, getattr(args, name))
                for name in ("window_left", "window_right", "chunk")
            ],
            "head_dim_v": [record.int32("head_dim_v", args.head_dim_v)],
            "packing": [
                record.int32("group", args.num_heads_q // args.num_heads_kv),
                record.int32("packs", self.packs),
            ],
            "pages": self.pages(),
            "scale_log2": [record.float32("scale_log2", args.scale_log2)],
            "softcap": [record.float32("softcap", args.softcap)],
            "captured": captured,
            "blocks": self.blocks(),
        }
        return ordered(module.ForwardParams, known)

    @property
    def packs(self) -> int:
        """Tiles that the query heads of a key/value head are spread over."""
        return -(-(self.args.num_heads_q // self.args.num_heads_kv) // self.spec.pack_heads)

    def operands(self) -> Known:
        """What TMA reads, and keys that are gathered instead."""
        args, spec, config = self.args, self.spec, self.config
        heads, rows = args.num_heads_kv, config.tile_n
        if spec.page_rows and not spec.gathers_keys:
            rows = spec.page_rows
        k = ("k", args.rows_k, heads, args.head_dim)
        v = ("v", args.rows_k, heads, args.head_dim_v)
        positions = config.positions(spec)
        q = ("q", args.rows_q, args.num_heads_q, args.head_dim)
        return {
            "q": [*self.tma(*q, spec.tile_d, positions)],
            "k": [*self.tma(*k, spec.tile_d, rows)],
            "v": [*self.tma(*v, spec.tile_dv, rows)],
            "mK": [self.view("mK", *k)] if spec.gathers_keys else [],
            "mV": [self.view("mV", *v)] if spec.gathers_keys else [],
        }

    def batch_of(self, name: str) -> int | None:
        """The extent of an operand's batches; None where it is 1 at compile time."""
        if name in ("q", "out"):
            return None if self.spec.is_packed_q else self.args.batch
        return None if self.spec.is_packed_k else self.args.batch_k

    def strides(self, name: str) -> tuple[int, int, int]:
        """Strides in elements between rows, heads and batches."""
        modes = ("seqlen", "head", "batch")
        row, head, batch = (getattr(self.args, f"{name}_stride_{mode}") for mode in modes)
        return row, head, batch

    def tma(
        self, name: str, rows: int, heads: int, dim: int, tile_dim: int, box_rows: int
    ) -> list[Field]:
        """The tensor map of an operand and the dynamic sizes of its coordinates.

        Where the batch is 1 at compile time neither has that dimension.
        """
        swizzle = next(size for size in (128, 64, 32) if tile_dim * ELEMENT_BYTES % size == 0)
        batch = self.batch_of(name)
        batches = () if batch is None else (batch,)
        sizes = (dim, rows, heads, *batches)
        tile = TmaTile(
            address=getattr(self.args, name),
            dtype=self.spec.dtype,
            sizes=sizes,
            strides=tuple(ELEMENT_BYTES * s for s in self.strides(name)[: len(sizes) - 1]),
            box=(swizzle // ELEMENT_BYTES, box_rows, *(1 for _ in sizes[2:])),
            swizzle_bytes=swizzle,
        )
        return [Field(name, tile), record.sizes(f"{name}.sizes", rows, dim, heads, *batches)]

    def view(self, label: str, name: str, rows: int, heads: int, dim: int) -> Field:
        """A (rows, dim, heads, batch) tensor that threads access."""
        batch = self.batch_of(name)
        shape = (rows, dim, heads) + (() if batch is None else (batch,))
        return record.tensor(label, getattr(self.args, name), shape, self.strides(name))

    def results(self) -> Known:
        """Output, log-sum-exp and the sink."""
        args, heads = self.args, self.args.num_heads_q
        strides = (args.rows_q, args.rows_q * heads)
        return {
            "mO": [self.view("mO", "out", args.rows_q, heads, args.head_dim_v)],
            "mLSE": [record.tensor("mLSE", args.lse, (args.rows_q, heads, args.batch), strides)],
            "parts": self.parts(),
            "mSink": [record.tensor("mSink", args.sink, (heads,))],
        }

    def parts(self) -> list[Field]:
        """The workspace of split keys: partial results, behind them their log-sum-exp."""
        args, heads, dim = self.args, self.args.num_heads_q, self.args.head_dim_v
        if not self.spec.is_split:
            return []
        batch = args.num_splits * (self.batch_of("out") or 1)
        row, sequence = heads * dim, args.rows_q * heads * dim
        lse_address = args.partials + 4 * batch * sequence
        shapes = (args.rows_q, dim, heads, batch), (args.rows_q, heads, batch)
        return [
            record.tensor("partials", args.partials, shapes[0], (row, dim, sequence)),
            record.tensor(
                "partial lse", lse_address, shapes[1], (args.rows_q, args.rows_q * heads)
            ),
            record.address("arrivals", args.arrivals),
        ]

    def sequences(self) -> list[Field]:
        """Lengths, and the tables that the specialization has."""
        from flash_cute.device.seqlen import SequenceTable

        args, spec = self.args, self.spec
        rows_k = args.rows_k * args.max_pages if spec.page_rows else args.rows_k
        tables = {
            "cu_seqlens_q": (spec.is_packed_q, args.batch + 1),
            "cu_seqlens_k": (spec.is_packed_k, args.batch + 1),
            "seqused_q": (spec.has_seqused_q, args.batch),
            "seqused_k": (spec.has_seqused_k, args.batch),
            "batch_idx": (spec.has_batch_idx, args.batch),
            "leftpad": (spec.has_leftpad, args.batch),
        }
        known: Known = {
            "batch": [record.int32("batch", args.batch)],
            "seqlen_q": [record.int32("seqlen_q", args.rows_q)],
            "seqlen_k": [record.int32("seqlen_k", rows_k)],
        }
        for name, (is_present, size) in tables.items():
            table = record.tensor(name, getattr(args, name), (size,))
            known[name] = [table] if is_present else []
        return ordered(SequenceTable, known)

    def scheduler(self) -> list[Field]:
        """The tile scheduler."""
        from flash_cute.device.tile_scheduler import TileScheduler

        args, spec = self.args, self.spec
        positions = self.config.positions(spec)
        counts = record.tensor("split_counts", args.split_counts, (args.batch,))
        known: Known = {
            "num_m_blocks": [record.int32("num_m_blocks", -(-args.rows_q // positions))],
            "num_heads": [record.int32("num_heads", args.num_heads_kv * self.packs)],
            "num_splits": [record.int32("num_splits", args.num_splits)],
            "split_counts": [counts] if spec.has_split_counts else [],
            "section": [record.int32("section", args.section)],
            "num_ctas": [record.int32("num_ctas", args.num_ctas)],
            "counter": [record.address("counter", args.tile_counter)],
            "sequences": self.sequences(),
            **dict.fromkeys(("rows_per_query", "tile_m", "is_even", "is_split"), []),
        }
        return ordered(TileScheduler, known)

    def pages(self) -> list[Field]:
        """The page table."""
        args = self.args
        if not self.spec.page_rows:
            return []
        shape, strides = (args.batch, args.max_pages), (args.page_table_stride,)
        return [
            record.tensor("page_table", args.page_table, shape, strides),
            record.int32("page_size", args.rows_k),
            record.int32("num_pages", args.batch_k),
        ]

    def captured(self) -> list[Field]:
        """The tensors that callbacks captured; takes their arguments off `more`."""
        found = []
        for key in (self.spec.score_mod, self.spec.mask_mod, self.spec.block_mod):
            for facts in () if key is None else key.tensors:
                at, shape = self.more.pop(0), [self.more.pop(0) for _ in range(facts.rank)]
                strides = [self.more.pop(0) for stride in facts.strides if stride <= 0]
                found.append(record.tensor("captured", at, shape, strides))
        return found

    def blocks(self) -> list[Field]:
        """The lists of the block mask."""
        if not self.spec.has_block_mask:
            return []
        sub_m, sub_n, *rest = self.more
        found = []
        for begin in range(0, len(rest), LIST_ARGUMENTS):
            counts, indices, batch_rows, head_rows, rows, cols = rest[begin:][:LIST_ARGUMENTS]
            all_rows = self.args.batch * self.args.num_heads_q * rows
            found += [
                record.tensor("counts", counts, (all_rows,)),
                record.tensor("indices", indices, (all_rows, cols), (cols,)),
                record.int32("batch_rows", batch_rows),
                record.int32("head_rows", head_rows),
                record.int32("num_rows", rows),
            ]
        return [*found, record.int32("sub_m", sub_m), record.int32("sub_n", sub_n)]


@functools.cache
def _ptx(key: Any, arch: str) -> str:
    from flash_cute import selection

    return kernel_ptx(selection.kernel_for(key), arch)


@functools.cache
def _program(key: Any, arch: str, mode: Mode, faults: tuple[Fault, ...]) -> Program:
    return build(_ptx(key, arch), mode, faults)


class HopperExecutable:
    """Called like a compiled forward kernel; launches it through the driver and waits."""

    def __init__(self, key: Any, arch: str, mode: Mode, faults: Sequence[Fault] = ()):
        from flash_cute import selection

        self.kernel = selection.kernel_for(key)
        self.program = _program(key, arch, mode, tuple(faults))

    def __call__(self, *values: Any) -> None:
        """Launch.

        Raises: RefusalError, HangError, LaunchError.
        """
        from sm100_on_hopper.launch import loaded

        launch = ForwardRecord(self.kernel, values)
        loaded(self.program).launch(launch.fields(), launch.args.num_ctas, self.kernel.smem_bytes)


@contextlib.contextmanager
def substitute(
    declaration: Any, arch: str, mode: Mode = PLAIN, faults: Sequence[Fault] = ()
) -> Iterator[list[str]]:
    """Have all attention run by one kernel, compiled for `arch`; yields the names of those built.

    Kernels that are no forward kernel (which merge splits and the like) stay what they are.
    """
    from flash_cute import compile, launch, selection

    here = dataclasses.replace(declaration, archs=("sm_90a",), archs_by_class=())
    built: dict[Any, HopperExecutable] = {}
    names: list[str] = []
    before = compile.executable, selection.KERNELS, launch._plans

    def executable(key: Any) -> Any:
        if getattr(key, "kernel", None) != declaration.kernel:
            return before[0](key)
        if key not in built:
            built[key] = HopperExecutable(key, arch, mode, faults)
            names.append(built[key].kernel.name)
        return built[key]

    compile.executable, selection.KERNELS, launch._plans = executable, (here,), {}
    try:
        yield names
    finally:
        compile.executable, selection.KERNELS, launch._plans = before


GPU_FIXTURES = {"gpu", "any_gpu", "hopper"}  # of the suite: they skip, and have no value to use


def bound(module: str, function: str, arguments: dict[str, Any]) -> Callable[[], Any]:
    """A function of a test module with its arguments; fixtures that ask for a GPU get None.

    Raises: TypeError where it takes others.
    """
    called = getattr(importlib.import_module(module), function)
    signature = inspect.signature(called)
    fixtures = dict.fromkeys(GPU_FIXTURES & signature.parameters.keys())
    given = signature.bind(**fixtures, **arguments)
    return functools.partial(called, *given.args, **given.kwargs)


def run_test(
    declared: str,
    arch: str,
    module: str,
    function: str,
    arguments: dict[str, Any],
    mode: Mode = PLAIN,
    faults: Sequence[Fault] = (),
) -> list[str]:
    """Run a function of a test module with one kernel under it; returns the kernels' names.

    Args:
        declared: the kernel's name in `selection`: "SM90".
    Raises: AssertionError where no kernel ran, and what the function raises.
    """
    from flash_cute import selection

    called = bound(module, function, arguments)
    with substitute(getattr(selection, declared), arch, mode, faults) as names:
        called()
    if not names:
        raise AssertionError(f"{module}.{function} launched no kernel of {declared}")
    return names
