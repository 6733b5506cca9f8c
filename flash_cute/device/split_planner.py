"""Counts into how many parts the keys of each sequence are split, from lengths on the device.

A part is a run of key blocks. All parts are of at most one size: the given one, or the smallest for
which all tiles run at the same time. Where there are more tiles than slots even without splitting,
the size is what each slot has to do on average: only sequences longer than that are split.

One CTA. A thread looks at every THREADS-th sequence first; then each warp tries a size, all of them
together WARPS sizes at a time, so that four rounds find the best of thousands.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from flash_cute.arguments import SplitPlannerArguments
from flash_cute.device.placeholders import placeholders
from flash_cute.device.seqlen import SequenceTable

THREADS = 256
WARP = 32
WARPS = THREADS // WARP


@dataclass(frozen=True)
class PlannerParams:
    """What the kernel gets; the numbers are those of split_plan.SplitPlan."""

    sequences: SequenceTable
    counts: cute.Tensor  # (batch,) int32
    positions: Int32
    tile_n: Int32
    heads: Int32
    visible_blocks: Int32
    slots: Int32
    least_blocks: Int32
    split_blocks: Int32
    most: Int32


class SplitPlanner:
    """See the module docstring; `lengths` says which there are.

    Args:
        lets_next_start: attention is launched as a programmatic dependent kernel (compute
            capability 9.0 and later), so its CTAs may come while this one counts.
    """

    smem_bytes = 0  # dynamic; a few words are static

    def __init__(self, lengths: tuple[str, ...], lets_next_start: bool = False):
        self.lengths = lengths
        self.lets_next_start = lets_next_start
        self.name = "_".join(["flash_split_planner", *lengths])

    # ---------------------------------------------------------------- host

    def compile_args(self) -> tuple:
        """Arguments that stand for the real ones while compiling."""
        return placeholders(SplitPlannerArguments, {})

    @cute.jit
    def __call__(self, *launch_args):
        """Host side: from flat SplitPlannerArguments to the launch."""
        args = SplitPlannerArguments(*launch_args)
        params = PlannerParams(
            sequences=SequenceTable(
                batch=args.batch,
                seqlen_q=args.rows_q,
                seqlen_k=args.rows_k,
                cu_seqlens_q=self.table(args, "cu_seqlens_q", args.batch + 1),
                cu_seqlens_k=self.table(args, "cu_seqlens_k", args.batch + 1),
                seqused_q=self.table(args, "seqused_q", args.batch),
                seqused_k=self.table(args, "seqused_k", args.batch),
                batch_idx=None,
                leftpad=self.table(args, "leftpad", args.batch),
            ),
            counts=cute.make_tensor(args.counts, cute.make_layout(args.batch)),
            positions=args.positions,
            tile_n=args.tile_n,
            heads=args.heads,
            visible_blocks=args.visible_blocks,
            slots=args.slots,
            least_blocks=args.least_blocks,
            split_blocks=args.split_blocks,
            most=args.most,
        )
        self.kernel(params).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=args.stream)

    def table(self, args: SplitPlannerArguments, name: str, size: Int32):
        """A table of lengths; None for one that there is none of."""
        address = getattr(args, name)
        return cute.make_tensor(address, cute.make_layout(size)) if name in self.lengths else None

    # ---------------------------------------------------------------- device

    @cute.kernel
    def kernel(self, p: PlannerParams):
        """One CTA."""
        if const_expr(self.lets_next_start):
            cute.arch.griddepcontrol_launch_dependents()
        thread, _, _ = cute.arch.thread_idx()
        words = SmemAllocator().allocate_tensor(Float32, cute.make_layout(WARPS), 16)
        size = p.split_blocks
        if size <= 0:
            size = self.best_size(p, words, thread)
        for batch in cutlass.range(thread, p.sequences.batch, THREADS, unroll=1):
            _, blocks = self.work_of(p, batch)
            count = (blocks + size - 1) // size
            p.counts[batch] = cutlass.max(cutlass.min(count, p.most), 1)

    @cute.jit
    def work_of(self, p: PlannerParams, batch: Int32):
        """(tiles of a sequence without splits, blocks of keys of one)."""
        seqlen = p.sequences.of(batch)
        tiles = (seqlen.seqlen_q + p.positions - 1) // p.positions * p.heads
        blocks = (seqlen.seqlen_k + p.tile_n - 1) // p.tile_n
        return tiles, cutlass.max(cutlass.min(blocks, p.visible_blocks), 1)

    @cute.jit
    def best_size(self, p: PlannerParams, words: cute.Tensor, thread: Int32) -> Int32:
        """Blocks of a part; tiles and blocks are counted in float32, as they are many."""
        num_tiles, num_blocks, longest = Float32(0.0), Float32(0.0), Float32(1.0)
        for batch in cutlass.range(thread, p.sequences.batch, THREADS, unroll=1):
            tiles, blocks = self.work_of(p, batch)
            num_tiles += Float32(tiles)
            num_blocks += Float32(tiles) * Float32(blocks)
            longest = cute.arch.fmax(longest, Float32(blocks))
        num_tiles = self.over_all(words, thread, num_tiles, False)
        num_blocks = self.over_all(words, thread, num_blocks, False)
        longest = self.over_all(words, thread, longest, True)
        slots = Float32(p.slots)
        share = cute.arch.fmin(num_blocks / slots, longest)
        low = cutlass.max(Int32(share), p.least_blocks)
        high = cutlass.max(Int32(longest), low)
        if num_tiles >= slots:
            high = low
        while low < high:
            low, high = self.narrowed(p, words, thread, low, high)
        return low

    @cute.jit
    def narrowed(
        self, p: PlannerParams, words: cute.Tensor, thread: Int32, low: Int32, high: Int32
    ):
        """Closer bounds of the smallest size that fits: each warp tries a size between them."""
        span, warp, lane = high - low, thread // WARP, thread % WARP
        size = low + (warp + 1) * span // (WARPS + 1)
        num_tiles = Float32(0.0)
        for batch in cutlass.range(lane, p.sequences.batch, WARP, unroll=1):
            tiles, blocks = self.work_of(p, batch)
            num_tiles += Float32(tiles) * Float32((blocks + size - 1) // size)
        num_tiles = self.over_warp(num_tiles, False)
        if lane == 0:
            words[warp] = num_tiles
        cute.arch.sync_threads()
        first = low
        for i in cutlass.range_constexpr(WARPS):
            tried = first + (i + 1) * span // (WARPS + 1)
            if words[i] <= Float32(p.slots):
                high = cutlass.min(high, tried)
            else:
                low = cutlass.max(low, tried + 1)
        cute.arch.sync_threads()  # before the next sizes are tried
        return low, high

    @cute.jit
    def over_all(
        self, words: cute.Tensor, thread: Int32, value: Float32, is_max: cutlass.Constexpr[bool]
    ) -> Float32:
        """The sum or the maximum over all threads, for all threads."""
        value = self.over_warp(value, is_max)
        if thread % WARP == 0:
            words[thread // WARP] = value
        cute.arch.sync_threads()
        result = words[0]
        for warp in cutlass.range_constexpr(1, WARPS):
            result = self.joined(result, words[warp], is_max)
        cute.arch.sync_threads()  # before the next value is written
        return result

    @cute.jit
    def over_warp(self, value: Float32, is_max: cutlass.Constexpr[bool]) -> Float32:
        """The sum or the maximum over a warp, for all its lanes."""
        for offset in (16, 8, 4, 2, 1):
            other = cute.arch.shuffle_sync_bfly(value, offset=offset)
            value = self.joined(value, other, is_max)
        return value

    def joined(self, a: Float32, b: Float32, is_max: bool) -> Float32:
        """The sum or the maximum of two."""
        return cute.arch.fmax(a, b) if const_expr(is_max) else a + b
