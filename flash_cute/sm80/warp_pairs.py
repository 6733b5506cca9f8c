"""Two warps that share 32 rows: each has half of the keys of S and half of the columns of O.

With 16 rows a warp, which is all that registers have room for at head dim 256, K and V of a block
pass from shared memory to registers eight times a CTA, and shared memory is the limit. So they pass
four times; what the warps of a pair owe each other goes through shared memory as well, per block:

    S | row maxima, the pair meets | exponentials, P posted, O += P V of the own keys | the pair
    meets | O += P V of the other's keys

Both then know the same maxima and scale O alike; sums of rows are added after the last block. The
barriers of the CTA between two blocks keep a warp from posting what the other one still reads.
"""

import typing

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from flash_cute.device import softmax
from flash_cute.device.primitives import fresh_thread_idx, quad_sum
from flash_cute.sm80.config import ELEMENT_BYTES, ForwardConfigSm80
from flash_cute.sm80.load import LANES
from flash_cute.sm80.tiles import CHUNK, TileLayout, load_matrices, moved_chunks, store_word
from flash_cute.specialization import ForwardSpecialization

ROWS = 32  # of a pair
FIRST_BARRIER = 1  # after that of the CTA


class Exchange(typing.NamedTuple):
    """Shared memory of the pairs."""

    weights: cute.Pointer  # P as tiles of (ROWS, keys of a warp), one for each warp
    rows: cute.Tensor  # (warps * ROWS,) f32: a number of each row


class WarpPairs:
    """What the warps of a pair do differently; without pairs a warp has all keys and columns."""

    def __init__(self, spec: ForwardSpecialization, config: ForwardConfigSm80):
        self.config = config
        self.columns = spec.tile_dv // config.warps_per_row  # of O
        self.layout = TileLayout(config.num_warps * ROWS, config.keys_per_warp)

    def first_row(self, thread: Int32) -> Int32:
        """The first row within the tile of a thread's warp."""
        shift = 5 + self.config.shares_rows  # warps of 32, or pairs of them
        return (thread >> shift) * self.config.rows_per_warp

    def half(self, thread: Int32) -> Int32 | int:
        """Which half of the keys and columns a thread has."""
        return thread >> 5 & 1 if self.config.shares_rows else 0

    def meet(self):
        """Wait for the other warp of the pair; what both have written before is then visible."""
        pair = fresh_thread_idx() >> 6
        cute.arch.barrier(barrier_id=FIRST_BARRIER + pair, number_of_threads=2 * LANES)

    def swap(self, exchange: Exchange, values: list) -> list:
        """The other warp's numbers of this thread's rows, which its quad knows as well."""
        thread = fresh_thread_idx()
        own = thread & -LANES | (thread & LANES - 1) >> 2
        other = own ^ ROWS
        for r, value in enumerate(values):
            exchange.rows[own + 8 * r] = value
        self.meet()
        return [exchange.rows[other + 8 * r] for r in range(len(values))]

    @cute.jit
    def raise_maximum(
        self,
        exchange: Exchange,
        S: cute.Tensor,
        state,
        scale_log2: Float32,
        threshold: cutlass.Constexpr[float],
    ):
        """`softmax.raise_maximum` over the scores of both warps."""
        row_max, row_sum, o_scale = state
        own = [softmax.row_maximum(S, r) for r in range(cute.size(row_max))]
        others = self.swap(exchange, own)
        for r in cutlass.range_constexpr(cute.size(row_max)):
            block_max = cute.arch.fmax(own[r], others[r])
            row_max[r], o_scale[r] = softmax.raise_row(row_max[r], block_max, scale_log2, threshold)
            row_sum[r] = row_sum[r] * o_scale[r]

    @cute.jit
    def add_sums(self, exchange: Exchange, row_sum: cute.Tensor):
        """The sums of both warps, as the share of the first lane of a quad."""
        own = [quad_sum(row_sum[r]) for r in range(cute.size(row_sum))]
        others = self.swap(exchange, own)
        is_first = (fresh_thread_idx() & 3) == 0
        for r in cutlass.range_constexpr(cute.size(row_sum)):
            row_sum[r] = cutlass.select_(is_first, own[r] + others[r], Float32(0.0))

    # -- P

    def own_place(self, thread: Int32) -> Int32:
        """Where a thread's first weight lies among the tiles of P."""
        row = thread & -LANES | (thread & LANES - 1) >> 2
        return self.layout.offset(row, 0) + 2 * (thread & 3)

    def other_place(self, thread: Int32) -> Int32:
        """A lane's offset for matrices of the other warp's P."""
        first = (thread & -LANES ^ ROWS) * self.layout.panel
        return first + self.layout.lane_of_rows(thread & LANES - 1)

    def address(self, exchange: Exchange, offset: Int32) -> Int32:
        """That of an element of the tiles of P."""
        return Int32(exchange.weights.toint()) + offset * ELEMENT_BYTES

    def post_weights(self, exchange: Exchange, rP: cute.Tensor, k: int):
        """Write this thread's weights of 16 of its warp's keys."""
        layout, words = self.layout, cute.recast_tensor(rP, Int32)
        first = self.address(exchange, self.own_place(fresh_thread_idx()))
        for chunk in (2 * k, 2 * k + 1):
            address = moved_chunks(first, chunk % layout.chunks)
            panel = chunk // layout.chunks * layout.rows
            for r in range(ROWS // 8):
                word = words[r // 2 * (self.config.keys_per_warp // 4) + 2 * chunk + r % 2]
                store_word(address, 2 * (panel + 8 * r) * layout.panel, word)

    def other_weights(self, exchange: Exchange, k: int, dtype) -> cute.Tensor:
        """A of P V: the other warp's weights of 16 keys, (8, rows / 16)."""
        layout = self.layout
        lane = self.address(exchange, self.other_place(fresh_thread_idx()))
        rA = cute.make_rmem_tensor((CHUNK, ROWS // 16), dtype)
        for m in range(ROWS // 16):
            place = layout.matrices(layout.places(lane), 16 * m, 2 * k)
            load_matrices(*place, rA[None, m], False)
        return rA

    def to_other_keys(self, layout: TileLayout) -> Int32:
        """Bytes from the matrices of V of the own keys to those of the other warp's."""
        step = self.config.keys_per_warp * layout.panel * ELEMENT_BYTES
        return step - 2 * step * self.half(fresh_thread_idx())
