"""What the parts of a tile's keys leave: written by each, merged by the last one or by a kernel.

A sequence whose keys are in one part leaves nothing: its results are final. Where all parts of a
few rows are to be merged, the warp that writes the last of them does it at once. It finds out that
it is the last by a counter for each warp of each tile, which it puts back to zero. A kernel of its
own (`device/combine.py`) merges many rows sooner, as it has the whole GPU for them.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from flash_cute.device.pack_gqa import Rows
from flash_cute.device.primitives import exp2, log2, pack_halves
from flash_cute.device.softmax import LN2, LOG2_E

LANES = 32
ELEMENTS = 4  # of a load: 16 bytes
LOADS = 8  # of a row under way


@dataclass(frozen=True)
class PartialResults:
    """Views of the workspace; the parts of a head are batches, all sequences of a part together.

    Shapes: out: (rows_q, head_dim_v, num_heads_q, num_splits * batch) f32
            lse: (rows_q, num_heads_q, num_splits * batch) f32
            arrivals: int32, zero between launches, one for each warp of a tile; address 0 where
            another kernel merges
    """

    out: cute.Tensor
    lse: cute.Tensor
    arrivals: cute.Pointer

    def has_arrivals(self):
        """Whether the kernel merges by itself."""
        return self.arrivals.toint() != 0

    @cute.jit
    def is_last(self, index: Int32, num_parts: Int32):
        """Whether the warp is the last of `num_parts` to come here; what others wrote is visible.

        Args:
            index: of the warp among those of all tiles, the same for all parts.
        """
        cute.arch.fence_acq_rel_gpu()
        cute.arch.sync_warp()
        before = Int32(0)
        if cute.arch.lane_idx() == 0:
            counter = self.arrivals + index
            before = cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")
            if before == num_parts - 1:
                cute.arch.atomic_exch(counter, Int32(0), sem="relaxed", scope="gpu")
        is_last = cute.arch.shuffle_sync(before, 0) == num_parts - 1
        if is_last:
            cute.arch.fence_acq_rel_gpu()
        return is_last


@dataclass(frozen=True)
class RowMerger:
    """Merges rows of one warp; each lane has `ELEMENTS` of every LANES * ELEMENTS columns.

    The arithmetic is that of `device/combine.py`: weights against the largest lse, parts in order.

    Shapes: mO: (rows_q, head_dim_v, num_heads_q) and mLSE: (rows_q, num_heads_q), of a sequence
            out: (rows_q, head_dim_v, num_heads_q, parts), lse: (rows_q, num_heads_q, parts) f32
    Units:  end: queries of the sequence; step: batches of `out` from one part to the next
    """

    out: cute.Tensor
    lse: cute.Tensor
    mO: cute.Tensor
    mLSE: cute.Tensor
    has_lse: Boolean  # whether it is wanted
    end: Int32
    num_parts: Int32
    step: Int32
    head_dim: Int32
    tile_dv: cutlass.Constexpr[int]

    @cute.jit
    def merge(self, rows: Rows, lanes_per_row: cutlass.Constexpr[int]):
        """Merge the rows of a warp's lanes, `lanes_per_row` of which share theirs.

        Rows of one lane are merged side by side, so that the loads of all are under way together.
        """
        lane = cute.arch.lane_idx()
        is_there = rows.q_idx[0] < self.end
        for q_idx in rows.q_idx[1:]:
            is_there = is_there | (q_idx < self.end)
        owners = cute.arch.vote_ballot_sync(is_there & (lane % lanes_per_row == 0))
        while owners != 0:
            owner = Int32(LANES - 1) - cute.arch.clz(owners & -owners)
            owners = owners & (owners - 1)
            queries = [cute.arch.shuffle_sync(q_idx, owner) for q_idx in rows.q_idx]
            heads = [cute.arch.shuffle_sync(head, owner) for head in rows.heads]
            self.merge_rows(queries, heads, lane)

    @cute.jit
    def merge_rows(self, queries: list, heads: list, lane: Int32):
        """Merge a few rows, of which those past the queries are not there."""
        num_rows, loads = len(queries), self.loads()
        lse = [self.lse_of(queries[i], heads[i], lane) for i in range(num_rows)]
        largest = cute.make_rmem_tensor(num_rows, Float32)
        total = cute.make_rmem_tensor(num_rows, Float32)
        acc = cute.make_rmem_tensor((ELEMENTS, loads, num_rows), Float32)
        acc.fill(0.0)
        total.fill(0.0)
        for i in cutlass.range_constexpr(num_rows):
            largest[i] = lse[i]
            for part in cutlass.range(lane + LANES, self.num_parts, LANES, unroll=1):
                other = self.lse_of(queries[i], heads[i], part)
                largest[i] = cute.arch.fmax(largest[i], other)
            largest[i] = warp_maximum(largest[i])
        for first in cutlass.range(0, self.num_parts, LANES, unroll=1):
            end = cutlass.min(self.num_parts, first + LANES)
            chunk = [self.lse_of(queries[i], heads[i], first + lane) for i in range(num_rows)]
            for part in cutlass.range(first, end, LOADS // loads, unroll=1):
                self.add_parts(queries, heads, part, chunk, largest, total, acc)
        for i in cutlass.range_constexpr(num_rows):
            if queries[i] < self.end:
                self.store(queries[i], heads[i], lane, acc[None, None, i], total[i], largest[i])

    def loads(self) -> int:
        """Loads of a lane for a part of a row."""
        return -(-self.tile_dv // (LANES * ELEMENTS))

    @cute.jit
    def lse_of(self, query: Int32, head: Int32, part: Int32) -> Float32:
        """The log-sum-exp of a part; -inf, which counts for nothing, of one that is not there."""
        lse = -Float32.inf
        if part < self.num_parts and query < self.end:
            lse = self.lse[query, head, part * self.step]
        return lse

    @cute.jit
    def add_parts(self, queries: list, heads: list, first: Int32, chunk: list, largest, total, acc):
        """Add a few parts, the loads of all of them under way together.

        Args:
            chunk: for each row the log-sum-exp of one part a lane.
        """
        lane, loads, num_rows = cute.arch.lane_idx(), self.loads(), len(queries)
        num_parts = LOADS // loads
        values = cute.make_rmem_tensor((ELEMENTS, loads, num_parts, num_rows), Float32)
        values.fill(0.0)
        lse = [
            [cute.arch.shuffle_sync(row, (first + k) % LANES) for k in range(num_parts)]
            for row in chunk
        ]
        for k in cutlass.range_constexpr(num_parts):
            for i in cutlass.range_constexpr(num_rows):
                for j in cutlass.range_constexpr(loads):
                    col = ELEMENTS * (lane + LANES * j)
                    is_wanted = (first + k < self.num_parts) & (lse[i][k] != -Float32.inf)
                    if is_wanted & (col < self.head_dim):
                        place = (queries[i], col, heads[i], (first + k) * self.step)
                        source = cute.domain_offset(place, self.out).iterator.align(16)
                        run = cute.make_tensor(source, cute.make_layout(ELEMENTS))
                        cute.autovec_copy(run, values[None, j, k, i])
        for k in cutlass.range_constexpr(num_parts):
            for i in cutlass.range_constexpr(num_rows):
                weight = Float32(0.0)
                if first + k < self.num_parts:
                    weight = exp2((lse[i][k] - largest[i]) * LOG2_E)
                total[i] = total[i] + weight
                for j in cutlass.range_constexpr(loads):
                    for e in cutlass.range_constexpr(ELEMENTS):
                        acc[e, j, i] = cute.math.fma(weight, values[e, j, k, i], acc[e, j, i])

    @cute.jit
    def store(self, query: Int32, head: Int32, lane: Int32, acc: cute.Tensor, total, largest):
        """Write one row of the result and its log-sum-exp."""
        scale = cutlass.select_(total == 0.0, Float32(0.0), Float32(1.0) / total)
        for j in cutlass.range_constexpr(self.loads()):
            col = ELEMENTS * (lane + LANES * j)
            if col < self.head_dim:
                words = cute.make_rmem_tensor(2, Int32)
                for w in cutlass.range_constexpr(2):
                    pair = acc[2 * w, j] * scale, acc[2 * w + 1, j] * scale
                    words[w] = pack_halves(*pair, self.mO.element_type)
                target = cute.domain_offset((query, col, head), self.mO).iterator
                target = cute.recast_ptr(target.align(8), dtype=Int32)
                cute.autovec_copy(words, cute.make_tensor(target, cute.make_layout(2)))
        if lane == 0 and self.has_lse:
            self.mLSE[query, head] = largest + log2(total) * LN2


@cute.jit
def warp_maximum(value: Float32) -> Float32:
    """The largest over a warp; 0 where it is infinite: against it parts of -inf have weight 0."""
    for offset in (16, 8, 4, 2, 1):
        value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=offset))
    is_infinite = (value == -Float32.inf) | (value == Float32.inf)
    return cutlass.select_(is_infinite, Float32(0.0), value)
