"""The host side of a launch: what kernels of all architectures get from its arguments."""

import typing
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from flash_cute.arguments import ForwardArguments
from flash_cute.device.block_sparsity import block_args, block_lists
from flash_cute.device.mask import MaskBounds
from flash_cute.device.pack_gqa import HeadPacking
from flash_cute.device.paged_kv import PageTable
from flash_cute.device.partials import PartialResults
from flash_cute.device.placeholders import placeholders
from flash_cute.device.score import tensor_args, tensors_from
from flash_cute.device.seqlen import SequenceTable
from flash_cute.device.tile_scheduler import TileScheduler
from flash_cute.specialization import ForwardSpecialization

DTYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}
SINK_DTYPES = {**DTYPES, "fp32": Float32}


class Captured(typing.NamedTuple):
    """The tensors that each callback captured."""

    score: tuple
    mask: tuple
    block: tuple


@dataclass(frozen=True)
class CommonParams:
    """What every kernel gets: outputs, tiles, lengths, numbers."""

    mO: cute.Tensor  # (rows_q, head_dim_v, num_heads_q, batch)
    mLSE: cute.Tensor  # (rows_q, num_heads_q, batch)
    parts: PartialResults  # None where keys are not split
    mSink: cute.Tensor  # (num_heads_q,)
    scheduler: TileScheduler
    split_blocks: Int32
    sequences: SequenceTable
    bounds: MaskBounds
    head_dim_v: Int32
    pages: PageTable  # None where keys are not paged
    scale_log2: Float32
    softcap: Float32


class LaunchDescription:
    """Describes launches of one specialization with one config.

    Contract: a derived class has `params`, which says what its kernel gets.
    """

    def __init__(self, spec: ForwardSpecialization, config: typing.Any):
        self.spec, self.config = spec, config
        self.dtype = DTYPES[spec.dtype]

    def compile_args(self) -> tuple:
        """Arguments that stand for the real ones while compiling."""
        data = {"lse": Float32, "partials": Float32}
        data["sink"] = SINK_DTYPES[self.spec.sink_dtype or "fp32"]
        data |= dict.fromkeys(("q", "qv", "k", "v", "out"), self.dtype)
        args = placeholders(ForwardArguments, data)
        args = sum((tensor_args(key) for key in self.callback_keys if key is not None), args)
        return args + (block_args(self.spec.has_full_blocks) if self.spec.has_block_mask else ())

    @property
    def callback_keys(self) -> tuple:
        """score_mod, mask_mod and the block mask's mask_mod, in the order of `Captured`."""
        return self.spec.score_mod, self.spec.mask_mod, self.spec.block_mod

    def head_packing(self, args: ForwardArguments) -> HeadPacking:
        """How the query heads are packed into tiles."""
        group = args.num_heads_q // args.num_heads_kv
        packs = (group + self.spec.pack_heads - 1) // self.spec.pack_heads
        positions = self.config.positions(self.spec)
        return HeadPacking(group, packs, self.spec.pack_heads, positions)

    def common(
        self, args: ForwardArguments, packs, tile_m: int, rows_per_query=None
    ) -> dict[str, typing.Any]:
        """The fields of CommonParams by name.

        Args:
            packs: of the query heads of a key/value head; a sequence has tiles for each.
            tile_m: rows of a tile, of which a query takes rows_per_query, one if that is None.
        """
        sequences = self.sequence_table(args)
        num_rows = args.rows_q if rows_per_query is None else args.rows_q * rows_per_query
        return {
            "mO": self.view(args, "out", args.rows_q, args.num_heads_q, args.head_dim_v),
            "mLSE": cute.make_tensor(args.lse, self.lse_layout(args, args.batch)),
            "parts": self.partial_results(args),
            "mSink": cute.make_tensor(args.sink, cute.make_layout(args.num_heads_q)),
            "scheduler": TileScheduler(
                num_m_blocks=(num_rows + tile_m - 1) // tile_m,
                num_heads=args.num_heads_kv * packs,
                num_splits=args.num_splits,
                split_counts=self.split_counts(args),
                section=args.section,
                num_ctas=args.num_ctas,
                counter=args.tile_counter,
                sequences=sequences,
                rows_per_query=rows_per_query,
                tile_m=tile_m,
                is_even=not (self.spec.is_packed_q or self.spec.has_split_counts),
                is_split=self.spec.is_split,
            ),
            "split_blocks": args.split_blocks,
            "sequences": sequences,
            "bounds": MaskBounds(args.window_left, args.window_right, args.chunk),
            "head_dim_v": args.head_dim_v,
            "pages": self.page_table(args),
            "scale_log2": args.scale_log2,
            "softcap": args.softcap,
        }

    def lse_layout(self, args: ForwardArguments, batch) -> cute.Layout:
        """(rows, heads, batch) of log-sum-exps; packed ones are those of a single sequence."""
        rows, heads = Int64(args.rows_q), args.num_heads_q
        return cute.make_layout((args.rows_q, heads, batch), stride=(1, rows, rows * heads))

    def partial_results(self, args: ForwardArguments) -> typing.Any:
        """The workspace; None where keys are not split."""
        if not self.spec.is_split:
            return None
        batch = args.num_splits * (1 if self.spec.is_packed_q else args.batch)
        head_stride = cute.assume(Int64(args.head_dim_v), divby=8)
        row = head_stride * args.num_heads_q
        sequence = row * args.rows_q
        layout = cute.make_layout(
            (args.rows_q, args.head_dim_v, args.num_heads_q, batch),
            stride=(row, 1, head_stride, sequence),
        )
        lse = cute.make_tensor(args.partials + sequence * batch, self.lse_layout(args, batch))
        return PartialResults(cute.make_tensor(args.partials, layout), lse, args.arrivals)

    def captured(self, args):
        """The tensors that callbacks captured, and the arguments that follow theirs."""
        tensors = []
        for key in self.callback_keys:
            count = 0 if key is None else len(tensor_args(key))
            tensors.append(() if key is None else tensors_from(key, args[:count]))
            args = args[count:]
        return Captured(*tensors), args

    def block_lists(self, args: ForwardArguments, more) -> typing.Any:
        """The lists of the block mask."""
        num_lists = args.batch * args.num_heads_q
        return block_lists(more, num_lists) if self.spec.has_block_mask else None

    def sequence_table(self, args: ForwardArguments) -> SequenceTable:
        """The lengths, with a table for each kind that the specialization has."""
        spec = self.spec

        def table(address, size, is_present):
            return cute.make_tensor(address, cute.make_layout(size)) if is_present else None

        return SequenceTable(
            batch=args.batch,
            seqlen_q=args.rows_q,
            seqlen_k=args.rows_k * args.max_pages if spec.page_rows else args.rows_k,
            cu_seqlens_q=table(args.cu_seqlens_q, args.batch + 1, spec.is_packed_q),
            cu_seqlens_k=table(args.cu_seqlens_k, args.batch + 1, spec.is_packed_k),
            seqused_q=table(args.seqused_q, args.batch, spec.has_seqused_q),
            seqused_k=table(args.seqused_k, args.batch, spec.has_seqused_k),
            batch_idx=table(args.batch_idx, args.batch, spec.has_batch_idx),
            leftpad=table(args.leftpad, args.batch, spec.has_leftpad),
        )

    def split_counts(self, args: ForwardArguments) -> typing.Any:
        """Into how many parts the keys of each sequence are split."""
        if not self.spec.has_split_counts:
            return None
        return cute.make_tensor(args.split_counts, cute.make_layout(args.batch))

    def page_table(self, args: ForwardArguments) -> typing.Any:
        """Where the pages of each sequence are."""
        if not self.spec.page_rows:
            return None
        layout = cute.make_layout((args.batch, args.max_pages), stride=(args.page_table_stride, 1))
        table = cute.make_tensor(args.page_table, layout)
        return PageTable(table, args.rows_k, args.batch_k, self.spec.page_rows)

    def view(self, args: ForwardArguments, name: str, rows, heads, dim) -> cute.Tensor:
        """(rows, dim, heads, batch) view of an argument; a packed one is a single sequence."""
        stride_batch, stride_seqlen, stride_head = (
            cute.assume(getattr(args, f"{name}_stride_{mode}"), divby=8)
            for mode in ("batch", "seqlen", "head")
        )
        is_packed = self.spec.is_packed_q if name in ("q", "qv", "out") else self.spec.is_packed_k
        batch = 1 if is_packed else args.batch
        if name in ("k", "v") and not is_packed:
            batch = args.batch_k
        layout = cute.make_layout(
            (rows, dim, heads, batch), stride=(stride_seqlen, 1, stride_head, stride_batch)
        )
        return cute.make_tensor(getattr(args, name), layout)
