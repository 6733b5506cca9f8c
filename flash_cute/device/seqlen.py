"""Where the sequences of a problem begin and how long they are, read on the device."""

import typing
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from flash_cute.device.primitives import prefetch


@dataclass(frozen=True)
class SeqlenInfo:
    """One sequence: its lengths, and the rows where it begins in a packed tensor (0 if padded)."""

    seqlen_q: Int32
    seqlen_k: Int32
    offset_q: Int32
    offset_k: Int32  # behind the left padding, where there is one


@dataclass(frozen=True)
class SequenceTable:
    """Lengths of all sequences: one for all, or from cu_seqlens and seqused.

    Shapes: cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32 or None; seqused_q, seqused_k, batch_idx,
            leftpad: (batch,) int32 or None; a used length is never taken to be more than what there
            is room for, and it counts the padding
    """

    batch: Int32
    seqlen_q: Int32
    seqlen_k: Int32
    cu_seqlens_q: cute.Tensor | None
    cu_seqlens_k: cute.Tensor | None
    seqused_q: cute.Tensor | None
    seqused_k: cute.Tensor | None
    batch_idx: cute.Tensor | None
    leftpad: cute.Tensor | None

    @cute.jit
    def of(self, batch: Int32) -> SeqlenInfo:
        """The sequence of index `batch`, which must be a valid one."""
        offset_q, seqlen_q = span(batch, self.seqlen_q, self.cu_seqlens_q, self.seqused_q)
        offset_k, seqlen_k = span(batch, self.seqlen_k, self.cu_seqlens_k, self.seqused_k)
        if const_expr(self.leftpad is not None):
            leftpad: typing.Any = self.leftpad
            offset_k = cutlass.max(leftpad[batch], 0)
            seqlen_k = cutlass.max(seqlen_k - offset_k, 0)
        return SeqlenInfo(seqlen_q, seqlen_k, offset_q, offset_k)

    def prefetch(self, lane: Int32):
        """Start to bring the tables of the first sequences near, which are read one by one."""
        batch = cutlass.min(lane, self.batch - 1)
        tables = (self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_q, self.seqused_k)
        for table in (*tables, self.batch_idx, self.leftpad):
            if table is not None:
                prefetch(table, batch)

    @cute.jit
    def row_k(self, batch: Int32) -> Int32:
        """The row of the padded keys, or of the page table, in which a sequence lies."""
        row = batch
        if const_expr(self.batch_idx is not None):
            batch_idx: typing.Any = self.batch_idx
            row = batch_idx[batch]
        return row

    @cute.jit
    def length_q(self, batch: Int32) -> Int32:
        """Queries of sequence `batch`; 0 past the last one."""
        length = Int32(0)
        if batch < self.batch:
            _, length = span(batch, self.seqlen_q, self.cu_seqlens_q, self.seqused_q)
        return length


@cute.jit
def span(batch: Int32, seqlen: Int32, cu_seqlens, seqused):
    """(first row, length) of one side of a sequence."""
    offset, length = Int32(0), seqlen
    if const_expr(cu_seqlens is not None):
        offset = cu_seqlens[batch]
        length = cu_seqlens[batch + 1] - offset
    if const_expr(seqused is not None):
        length = cutlass.min(length, seqused[batch])
    return offset, cutlass.max(length, 0)
