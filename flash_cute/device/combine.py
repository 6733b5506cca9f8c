"""Merge attention over parts of the keys: out = sum of exp(lse_i - lse) out_i over the parts.

Algorithm, one row (query and head) for each group of `threads_per_row` lanes, or for `teams` groups
of a CTA, each of which takes every teams-th part, and whose sums are added in shared memory:
    1  the largest lse of the row's parts, a part for each lane
    2  all lanes walk the parts: 16 bytes of out_i each, accumulated in float32 with the weight
       exp(lse_i - largest); the lse comes out of L1, where step 1 left it
    3  times one over the sum of the weights, rounded, stored; the first lane stores the lse

Memory bound. Each lane has a ring of 16-byte slots in shared memory that it alone fills, by
cp.async, and reads: no barrier, and the loads of `stages` parts are under way however few registers
the assembler spends on them (loads into registers it put one after the other). Parts with lse -inf
are not read. Neighbouring rows are neighbouring queries of a head, whose partial lse are neighbours
as well, so that a CTA finds them in L1. Numbers of parts and rows, lengths and strides are launch
arguments. Rows depend on nothing but their own parts. Nothing here belongs to one architecture.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from flash_cute.arguments import CombineArguments
from flash_cute.device.placeholders import placeholders
from flash_cute.device.primitives import copy_or_zero, exp2, log2
from flash_cute.device.softmax import LN2, LOG2_E

WARP = 32
THREADS = 128
LOAD_BYTES = 16
SLOTS = 8  # of a lane: loads under way
DTYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "fp32": Float32}


@dataclass(frozen=True)
class CombineParams:
    """What the kernel gets: views of its operands, and sizes."""

    mPartial: cute.Tensor  # (head_dim, num_splits, seqlen, num_heads, batch)
    mPartialLSE: cute.Tensor  # (num_splits, seqlen, num_heads, batch)
    mO: cute.Tensor  # (head_dim, seqlen, num_heads, batch)
    mLSE: cute.Tensor  # (seqlen, num_heads, batch); address 0 for none
    mCuSeqlens: cute.Tensor  # (num_sequences + 1,)
    mSeqused: cute.Tensor  # (num_sequences,)
    mCounts: cute.Tensor  # (num_sequences,)
    num_splits: Int32
    seqlen: Int32
    num_heads: Int32
    num_rows: Int32
    head_dim: Int32
    num_sequences: Int32
    teams: Int32


@dataclass(frozen=True)
class Row:
    """One row and what its lanes have found out about it."""

    gPartial: cute.Tensor  # (head_dim, num_splits)
    gPartialLSE: cute.Tensor  # (num_splits,)
    num_parts: Int32  # of this team: `team`, `team` + `teams`, ...; 0 for a row that is not wanted
    team: Int32
    teams: Int32
    head_dim: Int32
    lane: Int32  # within the row
    largest: Float32  # lse, or 0


class PartsCombiner:
    """Merges partial results of one pair of dtypes; see the module docstring.

    tile_d: head_dim rounded up to one of selection.COMBINE_TILE_DIMS
    starts_early: the kernel is launched as a programmatic dependent one (compute capability 9.0 and
                  later): its CTAs start as those of the kernel before it end, and wait
    """

    smem_bytes = 0  # dynamic; the rings are static: 16 KiB

    def __init__(
        self,
        dtype: str,
        out_dtype: str,
        tile_d: int,
        is_packed: bool,
        has_seqused: bool,
        has_split_counts: bool,
        starts_early: bool = False,
    ):
        self.dtype, self.out_dtype = DTYPES[dtype], DTYPES[out_dtype]
        self.is_packed, self.has_seqused = is_packed, has_seqused
        self.has_split_counts = has_split_counts
        self.starts_early = starts_early
        self.elements = LOAD_BYTES * 8 // self.dtype.width  # of a load
        self.threads_per_row = min(WARP, tile_d // self.elements)
        self.loads = tile_d // (self.elements * self.threads_per_row)  # of a lane and part
        self.stages = SLOTS // self.loads
        self.groups = THREADS // self.threads_per_row
        suffix = "_packed" * is_packed + "_seqused" * has_seqused + "_counts" * has_split_counts
        self.name = f"flash_combine_{dtype}_{out_dtype}_d{tile_d}{suffix}"

    # ---------------------------------------------------------------- host

    def compile_args(self) -> tuple:
        """Arguments that stand for the real ones while compiling."""
        data = dict.fromkeys(("lse_partial", "lse"), Float32)
        data |= {"out_partial": self.dtype, "out": self.out_dtype}
        return placeholders(CombineArguments, data)

    @cute.jit
    def __call__(self, *launch_args):
        """Host side: from flat CombineArguments to the launch."""
        args = CombineArguments(*launch_args)
        rows = (args.seqlen, args.num_heads, args.batch)
        params = CombineParams(
            mPartial=self.view(args, "out_partial", (args.head_dim, args.num_splits, *rows)),
            mPartialLSE=self.view(args, "lse_partial", (args.num_splits, *rows)),
            mO=self.view(args, "out", (args.head_dim, *rows)),
            mLSE=self.view(args, "lse", rows),
            mCuSeqlens=cute.make_tensor(args.cu_seqlens, cute.make_layout(args.num_sequences + 1)),
            mSeqused=cute.make_tensor(args.seqused, cute.make_layout(args.num_sequences)),
            mCounts=cute.make_tensor(args.split_counts, cute.make_layout(args.num_sequences)),
            num_splits=args.num_splits,
            seqlen=args.seqlen,
            num_heads=args.num_heads,
            num_rows=args.seqlen * args.num_heads * args.batch,
            head_dim=args.head_dim,
            num_sequences=args.num_sequences,
            teams=args.teams,
        )
        self.kernel(params).launch(
            grid=[cute.ceil_div(params.num_rows, self.groups // args.teams), 1, 1],
            block=[THREADS, 1, 1],
            stream=args.stream,
            preferred_smem_carveout=100,  # as attention: between two kinds a multiprocessor stops
            use_pdl=self.starts_early,
        )

    def view(self, args: CombineArguments, name: str, shape: tuple) -> cute.Tensor:
        """An operand as CombineParams has it: its modes are dim, split, seqlen, head and batch."""
        modes = ("dim", "split", "seqlen", "head", "batch")[-len(shape) :]
        if name == "out":
            modes = ("dim", *modes[-3:])
        stride = tuple(
            1 if mode == "dim" else getattr(args, f"{name}_stride_{mode}") for mode in modes
        )
        return cute.make_tensor(getattr(args, name), cute.make_layout(shape, stride=stride))

    # ---------------------------------------------------------------- device

    @cute.kernel
    def kernel(self, p: CombineParams):
        """Merge the rows of one CTA; rows past the end stand for the last one and write nothing."""
        if const_expr(self.starts_early):
            cute.arch.griddepcontrol_wait()
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        group = thread // self.threads_per_row
        row = block * (self.groups // p.teams) + group // p.teams
        is_live = row < p.num_rows
        row = cutlass.min(row, p.num_rows - 1)
        pair = row // p.seqlen
        batch = pair // p.num_heads
        position, head = row - pair * p.seqlen, pair - batch * p.num_heads
        sequence = self.sequence_of(p, position, batch)
        is_live = is_live & (position < self.end(p, sequence))
        num_splits = p.num_splits
        if const_expr(self.has_split_counts):
            num_splits = cutlass.max(cutlass.min(p.mCounts[sequence], num_splits), 1)
            is_live = is_live & (num_splits > 1)  # one part is a result already
        num_splits = cutlass.select_(is_live, num_splits, Int32(0))
        if cute.arch.vote_any_sync(is_live) | (p.teams > 1):  # teams meet at a barrier
            self.merge(p, (position, head, batch), is_live, num_splits, group % p.teams)

    @cute.jit
    def sequence_of(self, p: CombineParams, position: Int32, batch: Int32) -> Int32:
        """The sequence that a row belongs to, where that matters."""
        sequence = batch
        if const_expr(self.is_packed and (self.has_seqused or self.has_split_counts)):
            # The last sequence that begins at or before the row: never an empty one before end.
            first, past = Int32(0), p.num_sequences
            while past - first > 1:
                middle = (first + past) // 2
                is_after = p.mCuSeqlens[middle] > position
                first = cutlass.select_(is_after, first, middle)
                past = cutlass.select_(is_after, middle, past)
            sequence = first
        return sequence

    @cute.jit
    def end(self, p: CombineParams, sequence: Int32) -> Int32:
        """One past the last used row of a sequence, or of all packed ones."""
        end = p.seqlen
        if const_expr(self.is_packed):
            end = p.mCuSeqlens[p.num_sequences]
            if const_expr(self.has_seqused):
                used = p.mCuSeqlens[sequence] + cutlass.max(p.mSeqused[sequence], 0)
                end = cutlass.min(p.mCuSeqlens[sequence + 1], used)
        elif const_expr(self.has_seqused):
            end = cutlass.min(end, p.mSeqused[sequence])
        return end

    @cute.jit
    def merge(
        self, p: CombineParams, place: tuple, is_live: Boolean, num_splits: Int32, team: Int32
    ):
        """Merge the parts of one row; all lanes of a warp come here together."""
        lane = cute.arch.lane_idx() % self.threads_per_row
        gPartialLSE = p.mPartialLSE[(None, *place)]
        row = Row(
            gPartial=p.mPartial[(None, None, *place)],
            gPartialLSE=gPartialLSE,
            num_parts=(num_splits - team + p.teams - 1) // p.teams,
            team=team,
            teams=p.teams,
            head_dim=p.head_dim,
            lane=lane,
            largest=self.largest(gPartialLSE, lane, num_splits),
        )
        acc, total = self.accumulate(row)
        if p.teams > 1:
            total = self.join_teams(row, acc, total)
        if is_live & (team == 0):
            scale = cutlass.select_(total == 0.0, Float32(0.0), Float32(1.0) / total)
            self.store(p, place, lane, acc, scale)
            if lane == 0 and p.mLSE.iterator.toint() != 0:
                p.mLSE[place] = row.largest + log2(total) * LN2

    @cute.jit
    def largest(self, gPartialLSE: cute.Tensor, lane: Int32, num_splits: Int32) -> Float32:
        """The largest lse of a row's parts; 0 where it is infinite.

        An infinite one would make every difference NaN. Against 0 parts of -inf have weight 0, and
        a part of +inf makes the sum inf and the output NaN.
        """
        largest = -Float32.inf
        for split in cutlass.range(lane, num_splits, self.threads_per_row, unroll=1):
            largest = cute.arch.fmax(largest, gPartialLSE[split])
        offset = 1
        while const_expr(offset < self.threads_per_row):
            largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, offset=offset))
            offset *= 2
        is_infinite = (largest == -Float32.inf) | (largest == Float32.inf)
        return cutlass.select_(is_infinite, Float32(0.0), largest)

    @cute.jit
    def accumulate(self, row: Row):
        """(sum of weight_i out_i over this lane's columns, sum of weight_i); all weights <= 1.

        Shapes:   the first is (elements, loads) f32 rmem; load j begins at column
                  (j * threads_per_row + lane) * elements
        Contract: the team's part i is copied into slots i % stages and is the i-th group of copies,
                  so it has landed when at most stages - 1 later ones are under way.
        """
        sRing = self.ring()  # (elements, loads, stages)
        weights = cute.make_rmem_tensor(self.stages, Float32)
        acc = cute.make_rmem_tensor((self.elements, self.loads), Float32)
        acc.fill(0.0)
        total = Float32(0.0)
        for stage in cutlass.range_constexpr(self.stages):
            weights[stage] = self.fetch(row, sRing, Int32(stage), stage)
        for first in cutlass.range(0, row.num_parts, self.stages, unroll=1):
            for stage in cutlass.range_constexpr(self.stages):
                part = first + stage
                cute.arch.cp_async_wait_group(self.stages - 1)
                if part < row.num_parts:
                    weight = weights[stage]
                    total += weight
                    for j in cutlass.range_constexpr(self.loads):
                        values = cute.make_rmem_tensor(self.elements, self.dtype)
                        cute.autovec_copy(sRing[None, j, stage], values)
                        for e in cutlass.range_constexpr(self.elements):
                            acc[e, j] = cute.math.fma(weight, values[e].to(Float32), acc[e, j])
                weights[stage] = self.fetch(row, sRing, part + self.stages, stage)
        return acc, total

    @cute.jit
    def join_teams(self, row: Row, acc: cute.Tensor, total: Float32) -> Float32:
        """Add the sums of the teams of a row, for all of them: acc in place; returns the total."""
        thread, _, _ = cute.arch.thread_idx()
        size = cute.size(acc)
        sums = cute.arch.alloc_smem(Float32, THREADS * (size + 1), LOAD_BYTES)
        sSums = cute.make_tensor(sums, cute.make_layout((THREADS, size + 1)))
        for i in cutlass.range_constexpr(size):
            sSums[thread, i] = acc[i]
        sSums[thread, size] = total
        cute.arch.sync_threads()
        acc.fill(0.0)
        total = Float32(0.0)
        first = thread - row.team * self.threads_per_row
        for team in cutlass.range(row.teams, unroll=1):
            for i in cutlass.range_constexpr(size):
                acc[i] = acc[i] + sSums[first + team * self.threads_per_row, i]
            total += sSums[first + team * self.threads_per_row, size]
        return total

    def ring(self) -> cute.Tensor:
        """This thread's slots in shared memory; the threads of a CTA have theirs side by side."""
        thread, _, _ = cute.arch.thread_idx()
        base = cute.arch.alloc_smem(self.dtype, THREADS * SLOTS * self.elements, LOAD_BYTES)
        layout = cute.make_layout(
            (self.elements, self.loads, self.stages),
            stride=(1, THREADS * self.elements, THREADS * self.elements * self.loads),
        )
        return cute.make_tensor((base + thread * self.elements).align(LOAD_BYTES), layout)

    @cute.jit
    def fetch(self, row: Row, sRing: cute.Tensor, part: Int32, stage: cutlass.Constexpr[int]):
        """Start the copies of one part, a group of their own; returns the part's weight."""
        weight = Float32(0.0)
        if part < row.num_parts:
            split = part * row.teams + row.team
            lse = row.gPartialLSE[split]
            weight = exp2((lse - row.largest) * LOG2_E)
            for j in cutlass.range_constexpr(self.loads):
                col = (j * self.threads_per_row + row.lane) * self.elements
                source = cute.domain_offset((col, split), row.gPartial).iterator
                # A part whose lse is NaN counts.
                is_wanted = (lse != -Float32.inf) & (col < row.head_dim)
                copy_or_zero(sRing[None, j, stage].iterator.toint(), source.toint(), is_wanted)
        cute.arch.cp_async_commit_group()
        return weight

    @cute.jit
    def store(self, p: CombineParams, place: tuple, lane: Int32, acc: cute.Tensor, scale: Float32):
        """Write this lane's columns of one row: acc times scale."""
        gO = p.mO[(None, *place)]
        rounded = cute.make_rmem_tensor((self.elements, self.loads), self.out_dtype)
        rounded.store((acc.load() * scale).to(self.out_dtype))
        # Eight float32 of 16-bit parts are two stores of 16 bytes; four float32 become one of 8.
        num_bytes = min(LOAD_BYTES, self.elements * self.out_dtype.width // 8)
        for j in cutlass.range_constexpr(self.loads):
            col = (j * self.threads_per_row + lane) * self.elements
            if col < p.head_dim:
                target = cute.domain_offset((col,), gO).iterator.align(num_bytes)
                cute.autovec_copy(
                    rounded[None, j], cute.make_tensor(target, cute.make_layout(self.elements))
                )
