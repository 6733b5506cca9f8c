"""Append new keys and values to a cache, in place, and rotate queries: what precedes attention.

Algorithm, one thread for each 16 bytes of a row (a head of a token); CTAs divide into four ranges:
    queries    rotated into a tensor of their own
    keys       rotated, rounded once, written into the cache
    values     copied into the cache
    lengths    keys of each sequence afterwards, one thread each, for the attention that follows

Memory bound, and with few rows bound by latency: a thread asks for its row before it looks up where
that belongs. Nothing is shared between threads. Lengths, positions and page numbers are read on the
device, where nobody has checked them: a row that would come to lie outside the cache is dropped,
one whose position is outside the tables of angles becomes NaN, and neither is looked up there. Who
is absent has address 0. All sizes and strides are launch arguments; nothing here belongs to one
architecture.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from flash_cute.arguments import AppendArguments
from flash_cute.device.placeholders import placeholders

THREADS = 128
PIECE = 8  # channels of a thread, selection.APPEND_PIECE: 16 bytes
DTYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}


@dataclass(frozen=True)
class Rows:
    """Rows of q, k or v, in pieces: padded sequences, or packed ones that begin at `starts`.

    Shapes: data: (dim, num_heads, rows, batch), packed with rows = total and a batch of 1
            starts: (batch + 1,), address 0 for padded ones
    """

    data: cute.Tensor
    starts: cute.Tensor
    rows: Int32
    num_heads: Int32
    dim: Int32
    num_pieces: Int32  # of all rows


@dataclass(frozen=True)
class Piece:
    """The piece of a thread: one that is not live stands for another and must not be written."""

    row: cute.Tensor  # (dim,), where it comes from
    channel: Int32
    head: Int32
    place: tuple  # (row, batch) in the tensor that it comes from
    sequence: Int32
    index: Int32  # of its token within the sequence
    is_live: Boolean


@dataclass(frozen=True)
class Angles:
    """Cosines and sines by position, and the positions of the sequences.

    Shapes: cos, sin: (dim / 2, num_positions); first: (batch,), address 0 for the cache's lengths
    """

    cos: cute.Tensor
    sin: cute.Tensor
    first: cute.Tensor
    dim: Int32
    num_positions: Int32
    advance: Int32  # of a query's position with its index: 1 or 0


@dataclass(frozen=True)
class Cache:
    """Where rows are appended: row j of a sequence is in slot j % page_size of its page j // size.

    Shapes: lengths: (batch,), batch_idx: (batch,), pages: (num_rows, capacity / page_size);
            address 0 for one length, for row b of sequence b, and for rows that are pages
    """

    lengths: cute.Tensor
    batch_idx: cute.Tensor
    pages: cute.Tensor
    length: Int32
    capacity: Int32
    page_size: Int32
    num_pages: Int32
    num_rows: Int32

    @cute.jit
    def length_of(self, sequence: Int32) -> Int32:
        """Keys of a sequence before the call, unchecked."""
        length = self.length
        if is_there(self.lengths):
            length = self.lengths[sequence]
        return length

    @cute.jit
    def slot(self, sequence: Int32, index: Int32):
        """(page, slot in it, whether there is such a slot) of the new row `index` of a sequence."""
        length, row = self.length_of(sequence), sequence
        if is_there(self.batch_idx):
            row = self.batch_idx[sequence]
        # In this form nothing overflows, whatever the length.
        exists = (length >= 0) & (index < self.capacity - length)
        exists = exists & (row >= 0) & (row < self.num_rows)
        page, slot = row, length + index
        if is_there(self.pages):
            page = Int32(-1)
            if exists:
                page = self.pages[row, slot // self.page_size]
                slot = slot % self.page_size
        exists = exists & (page >= 0) & (page < self.num_pages)
        return page, slot, exists


@dataclass(frozen=True)
class AppendParams:
    """What the kernel gets."""

    q: Rows
    k: Rows
    v: Rows
    mRotated: cute.Tensor  # like q.data
    mKCache: cute.Tensor  # (head_dim, num_heads_kv, slots of a page, pages)
    mVCache: cute.Tensor  # (head_dim_v, …)
    mLengths: cute.Tensor  # (batch,)
    angles: Angles
    cache: Cache
    batch: Int32
    ctas_q: Int32
    ctas_k: Int32
    ctas_v: Int32


def is_there(tensor: cute.Tensor) -> Boolean:
    """Whether a tensor that may be absent is not."""
    return tensor.iterator.toint() != 0


class CacheAppender:
    """Appends and rotates for one dtype; see the module docstring.

    rotary: "interleaved" rotates channels (0, 1), (2, 3), …, "halves" the first half of the rotated
            ones with the second; None rotates nothing
    is_wide: whether every address and stride is a multiple of 16 bytes; if not, elements go singly
    """

    smem_bytes = 0

    def __init__(self, dtype: str, rotary: str | None, is_wide: bool):
        self.dtype, self.rotary, self.is_wide = DTYPES[dtype], rotary, is_wide
        self.name = f"flash_append_{dtype}_{rotary or 'plain'}{'' if is_wide else '_narrow'}"

    # ---------------------------------------------------------------- host

    def compile_args(self) -> tuple:
        """Arguments that stand for the real ones while compiling."""
        names = ("q", "k", "v", "k_cache", "v_cache", "rotary_cos", "rotary_sin", "rotated")
        return placeholders(AppendArguments, dict.fromkeys(names, self.dtype))

    @cute.jit
    def __call__(self, *launch_args):
        """Host side: from flat AppendArguments to the launch."""
        args = AppendArguments(*launch_args)
        params = self.params(args)
        ctas = params.ctas_q + params.ctas_k + params.ctas_v
        self.kernel(params).launch(
            grid=[ctas + cute.ceil_div(args.batch, THREADS), 1, 1],
            block=[THREADS, 1, 1],
            stream=args.stream,
        )

    @cute.jit
    def params(self, args: AppendArguments) -> AppendParams:
        """Describe the operands."""
        q_rows = (args.head_dim, args.num_heads_q, args.rows_q, args.batch)
        row = Int64(args.num_heads_q) * args.head_dim
        rotated = cute.make_layout(q_rows, stride=(1, args.head_dim, row, row * args.rows_q))
        cache = Cache(
            lengths=self.vector(args.cache_seqlens, args.batch),
            batch_idx=self.vector(args.cache_batch_idx, args.batch),
            pages=self.table(
                args.page_table, args.num_cache_rows, args.page_table_stride, args.capacity
            ),
            length=args.cache_length,
            capacity=args.capacity,
            page_size=args.page_size,
            num_pages=args.num_pages,
            num_rows=args.num_cache_rows,
        )
        return AppendParams(
            q=self.rows(args, "q", args.head_dim),
            k=self.rows(args, "k", args.head_dim),
            v=self.rows(args, "v", args.head_dim_v),
            mRotated=cute.make_tensor(args.rotated, rotated),
            mKCache=self.cache_view(args, "k_cache", args.head_dim),
            mVCache=self.cache_view(args, "v_cache", args.head_dim_v),
            mLengths=self.vector(args.lengths, args.batch),
            angles=self.angles(args),
            cache=cache,
            batch=args.batch,
            ctas_q=cute.ceil_div(args.pieces_q, THREADS),
            ctas_k=cute.ceil_div(args.pieces_k, THREADS),
            ctas_v=cute.ceil_div(args.pieces_v, THREADS),
        )

    def rows(self, args: AppendArguments, name: str, dim: Int32) -> Rows:
        """q, k or v and how its rows belong to sequences."""
        is_q = name == "q"
        rows = args.rows_q if is_q else args.rows_new
        num_heads = args.num_heads_q if is_q else args.num_heads_kv
        stride = tuple(getattr(args, f"{name}_stride_{mode}") for mode in ("head", "row", "batch"))
        layout = cute.make_layout((dim, num_heads, rows, args.batch), stride=(1, *stride))
        starts = args.cu_seqlens_q if is_q else args.cu_seqlens_k_new
        return Rows(
            data=cute.make_tensor(getattr(args, name), layout),
            starts=self.vector(starts, args.batch + 1),
            rows=rows,
            num_heads=num_heads,
            dim=dim,
            num_pieces=getattr(args, f"pieces_{name}"),
        )

    def cache_view(self, args: AppendArguments, name: str, dim: Int32) -> cute.Tensor:
        """One of the caches as AppendParams has it."""
        stride = tuple(getattr(args, f"{name}_stride_{mode}") for mode in ("head", "slot", "page"))
        shape = (dim, args.num_heads_kv, args.page_size, args.num_pages)
        layout = cute.make_layout(shape, stride=(1, *stride))
        return cute.make_tensor(getattr(args, name), layout)

    def angles(self, args: AppendArguments) -> Angles:
        """The tables of angles."""
        half, count = args.rotary_dim // 2, args.num_positions
        cos, sin = (
            cute.make_tensor(table, cute.make_layout((half, count), stride=(1, stride)))
            for table, stride in (
                (args.rotary_cos, args.rotary_cos_stride),
                (args.rotary_sin, args.rotary_sin_stride),
            )
        )
        first = self.vector(args.rotary_seqlens, args.batch)
        return Angles(cos, sin, first, args.rotary_dim, count, args.advance)

    def vector(self, address: cute.Pointer, length: Int32) -> cute.Tensor:
        """A tensor of one mode."""
        return cute.make_tensor(address, cute.make_layout(length))

    def table(self, address: cute.Pointer, rows: Int32, stride: Int64, cols: Int32) -> cute.Tensor:
        """A tensor of rows `stride` apart."""
        return cute.make_tensor(address, cute.make_layout((rows, cols), stride=(stride, 1)))

    # ---------------------------------------------------------------- device

    @cute.kernel
    def kernel(self, p: AppendParams):
        """Do the work of one CTA, which is of one kind."""
        block, _, _ = cute.arch.block_idx()
        past_k = p.ctas_q + p.ctas_k
        past_v = past_k + p.ctas_v
        if block < p.ctas_q:
            if const_expr(self.rotary is not None):
                self.rotate_queries(p, block)
        elif block < past_k:
            self.append(p, p.k, p.mKCache, block - p.ctas_q, self.rotary is not None)
        elif block < past_v:
            self.append(p, p.v, p.mVCache, block - past_k, False)
        else:
            self.count(p, block - past_v)

    @cute.jit
    def rotate_queries(self, p: AppendParams, block: Int32):
        """Rotate the pieces of q of one CTA."""
        piece = self.locate(p.q, block, p.batch)
        values = self.load(piece.row, piece.channel, PIECE)
        self.turn(p, piece, values, p.angles.advance)
        if piece.is_live:
            self.store(values, p.mRotated[(None, piece.head, *piece.place)], piece.channel)

    @cute.jit
    def append(
        self,
        p: AppendParams,
        new: Rows,
        mCache: cute.Tensor,
        block: Int32,
        is_rotated: cutlass.Constexpr[bool],
    ):
        """Write the pieces of k or v of one CTA into their cache."""
        piece = self.locate(new, block, p.batch)
        values = self.load(piece.row, piece.channel, PIECE)
        page, slot, exists = p.cache.slot(piece.sequence, piece.index)
        if const_expr(is_rotated):
            self.turn(p, piece, values, Int32(1))
        if piece.is_live & exists:
            self.store(values, mCache[(None, piece.head, slot, page)], piece.channel)

    @cute.jit
    def count(self, p: AppendParams, block: Int32):
        """Write the lengths of the sequences of one CTA: what is in the cache afterwards."""
        thread, _, _ = cute.arch.thread_idx()
        sequence = block * THREADS + thread
        if sequence < p.batch:
            before, added = p.cache.length_of(sequence), p.v.rows
            if is_there(p.v.starts):
                added = p.v.starts[sequence + 1] - p.v.starts[sequence]
            room = p.cache.capacity - before
            after = before + cutlass.max(cutlass.min(added, room), 0)
            # Beyond the capacity, or negative: nothing was appended.
            after = cutlass.select_(before > p.cache.capacity, p.cache.capacity, after)
            p.mLengths[sequence] = cutlass.select_(before < 0, Int32(0), after)

    @cute.jit
    def locate(self, rows: Rows, block: Int32, batch: Int32) -> Piece:
        """The piece of this thread; threads past the end get the last one, not live."""
        thread, _, _ = cute.arch.thread_idx()
        number = block * THREADS + thread
        is_live = number < rows.num_pieces
        number = cutlass.min(number, rows.num_pieces - 1)
        per_row = rows.dim // PIECE
        row = number // per_row
        token = row // rows.num_heads
        head, channel = row - token * rows.num_heads, (number - row * per_row) * PIECE
        sequence = token // rows.rows  # 0 if packed: rows are all tokens then
        index = token - sequence * rows.rows
        place = (index, sequence)
        if is_there(rows.starts):
            # The last sequence that begins at or before the token: never an empty one before the
            # end. Tokens past the end of all of them belong to none.
            first, past = Int32(0), batch
            while past - first > 1:
                middle = (first + past) // 2
                is_after = rows.starts[middle] > token
                first = cutlass.select_(is_after, first, middle)
                past = cutlass.select_(is_after, middle, past)
            sequence, index = first, token - rows.starts[first]
            is_live = is_live & (index >= 0) & (token < rows.starts[first + 1])
        return Piece(
            row=rows.data[(None, head, *place)],
            channel=channel,
            head=head,
            place=place,
            sequence=sequence,
            index=index,
            is_live=is_live,
        )

    @cute.jit
    def turn(self, p: AppendParams, piece: Piece, values: cute.Tensor, advance: Int32):
        """Rotate a piece in place, in float32, rounded once; channels past the rotated ones stay.

        Shapes: values: (PIECE,) rmem, the channels from piece.channel on
        """
        angles = p.angles
        position = p.cache.length_of(piece.sequence)
        if is_there(angles.first):
            position = angles.first[piece.sequence]
        position = position + piece.index * advance
        if piece.channel < angles.dim:
            if const_expr(self.rotary == "interleaved"):
                self.turn_pairs(angles, position, piece, values)
            else:
                self.turn_half(angles, position, piece, values)

    @cute.jit
    def turn_pairs(self, angles: Angles, position: Int32, piece: Piece, values: cute.Tensor):
        """Rotate neighbouring channels."""
        cos, sin = self.look_up(angles, position, piece.channel // 2, PIECE // 2)
        for i in cutlass.range_constexpr(PIECE // 2):
            first, second = values[2 * i].to(Float32), values[2 * i + 1].to(Float32)
            values[2 * i] = self.turned(first, -second, cos[i], sin[i])
            values[2 * i + 1] = self.turned(second, first, cos[i], sin[i])

    @cute.jit
    def turn_half(self, angles: Angles, position: Int32, piece: Piece, values: cute.Tensor):
        """Rotate channels of one half with those of the other, which another thread writes."""
        half = angles.dim // 2
        is_second = piece.channel >= half
        other = cutlass.select_(is_second, piece.channel - half, piece.channel + half)
        others = self.load(piece.row, other, PIECE)
        cos, sin = self.look_up(angles, position, cutlass.min(piece.channel, other), PIECE)
        sign = cutlass.select_(is_second, Float32(1.0), Float32(-1.0))
        for i in cutlass.range_constexpr(PIECE):
            channel, other_channel = values[i].to(Float32), others[i].to(Float32)
            values[i] = self.turned(channel, sign * other_channel, cos[i], sin[i])

    def turned(self, channel: Float32, other: Float32, cos: Float32, sin: Float32):
        """channel * cos + other * sin, rounded to the dtype.

        Spelled out, so that every specialization computes the same bits.
        """
        return cute.math.fma(channel, cos, other * sin).to(self.dtype)

    @cute.jit
    def look_up(self, angles: Angles, position: Int32, first: Int32, count: cutlass.Constexpr[int]):
        """(cos, sin) of `count` pairs from pair `first` on, (count,) f32 rmem."""
        cos = cute.make_rmem_tensor(count, Float32)
        sin = cute.make_rmem_tensor(count, Float32)
        cos.fill(Float32.nan)
        sin.fill(Float32.nan)
        if (position >= 0) & (position < angles.num_positions):
            cos.store(self.load(angles.cos[None, position], first, count).load().to(Float32))
            sin.store(self.load(angles.sin[None, position], first, count).load().to(Float32))
        return cos, sin

    @cute.jit
    def load(self, gRow: cute.Tensor, first: Int32, count: cutlass.Constexpr[int]) -> cute.Tensor:
        """Elements of a row from `first` on, (count,) rmem."""
        values = cute.make_rmem_tensor(count, self.dtype)
        if const_expr(self.is_wide):
            source = cute.domain_offset((first,), gRow).iterator.align(2 * count)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(count)), values)
        else:
            for i in cutlass.range_constexpr(count):
                values[i] = gRow[first + i]
        return values

    @cute.jit
    def store(self, values: cute.Tensor, gRow: cute.Tensor, first: Int32):
        """Write a piece to channels `first` and following of a row."""
        if const_expr(self.is_wide):
            target = cute.domain_offset((first,), gRow).iterator.align(2 * PIECE)
            cute.autovec_copy(values, cute.make_tensor(target, cute.make_layout(PIECE)))
        else:
            for i in cutlass.range_constexpr(PIECE):
                gRow[first + i] = values[i]
