"""The launch arguments of the kernels: one list each for compiling, launching and the kernel.

Plain Python, so that a launch needs no DSL: the compiled function takes these values by position.
Kernels map the kinds to their own types when they are compiled.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

Address = Annotated[int, "address"]  # on the device; 0 where the specialization has no such tensor
Int32 = Annotated[int, "int32"]
Int64 = Annotated[int, "int64"]
Float32 = Annotated[float, "float32"]
Stream = Annotated[int, "stream"]

NUM_ADDRESSES = 18  # they come first


class ForwardArguments(NamedTuple):
    """Launch arguments in order.

    Shapes: q, k, v, out: (batch, seqlen, heads, dim), packed (total, heads, dim); last stride 1,
            addresses and the other strides multiples of 16 bytes; rows_q, rows_k: seqlen or total
            lse: (batch, num_heads_q, seqlen_q), packed (num_heads_q, total_q), f32
            tile_counter: one int32, zero between launches; 0 where every CTA has one tile
            partials: with keys split, (num_splits, …) of what out is, contiguous, then of what lse
            is, both f32; lse may be 0 then. arrivals: int32, zero between launches, one for each
            warp of a tile; 0 where another kernel merges
            cu_seqlens: (batch + 1,), seqused: (batch,) int32; sink: (num_heads_q,)
            page_table: (batch, max_pages) int32; k, v: (num_pages, page_size, heads, dim) then,
            rows_k is the page size, and the strides of a batch are those of a page
            batch_idx, leftpad: (batch,) int32, row of the cache or of page_table and first key of
            each sequence; batch_k: the first extent of k and v
            split_counts: (batch,) int32, parts of each sequence's keys, 1 to num_splits
            qv: like q with head_dim_v; with qv alone q and k are not there
    Units:  strides in elements; window bounds and chunk in keys; split_blocks in blocks of keys, 0
            for parts of equal numbers of blocks; scale_log2 is |softmax_scale| *
            log2(e); the signed softmax_scale where a score_mod works on scaled scores, with a
            softcap divided by it

    The tensors that score_mod and mask_mod captured follow, as Callback.launch_arguments has them.
    """

    q: Address
    k: Address
    v: Address
    out: Address
    lse: Address
    tile_counter: Address
    partials: Address
    arrivals: Address
    cu_seqlens_q: Address
    cu_seqlens_k: Address
    seqused_q: Address
    seqused_k: Address
    sink: Address
    page_table: Address
    batch_idx: Address
    leftpad: Address
    qv: Address
    split_counts: Address
    batch: Int32
    rows_q: Int32
    rows_k: Int32
    num_heads_q: Int32
    num_heads_kv: Int32
    head_dim: Int32
    head_dim_v: Int32
    batch_k: Int32
    max_pages: Int32
    page_table_stride: Int64
    q_stride_batch: Int64
    q_stride_seqlen: Int64
    q_stride_head: Int64
    qv_stride_batch: Int64
    qv_stride_seqlen: Int64
    qv_stride_head: Int64
    k_stride_batch: Int64
    k_stride_seqlen: Int64
    k_stride_head: Int64
    v_stride_batch: Int64
    v_stride_seqlen: Int64
    v_stride_head: Int64
    out_stride_batch: Int64
    out_stride_seqlen: Int64
    out_stride_head: Int64
    scale_log2: Float32
    softcap: Float32
    window_left: Int32
    window_right: Int32
    chunk: Int32
    num_splits: Int32
    split_blocks: Int32
    section: Int32
    num_ctas: Int32
    stream: Stream


class BlockBuilderArguments(NamedTuple):
    """Launch arguments of the kernels that build a block mask, in order.

    Shapes: classes: (batch, num_heads, num_rows, num_cols) int8, scratch
            partial_rows_*, full_rows_*: int32, counts (batch, num_heads, num_rows), indices (...,
            num_cols): the lists along each row of blocks; *_cols_* likewise along each column
    Units:  num_rows, num_cols in blocks; block_q, block_k, seqlen_q, seqlen_k in elements. The
            product of the first four extents is at most 2**30

    The tensors that the mask_mod captured follow, as Callback.launch_arguments has them.
    """

    classes: Address
    partial_rows_counts: Address
    partial_rows_indices: Address
    full_rows_counts: Address
    full_rows_indices: Address
    partial_cols_counts: Address
    partial_cols_indices: Address
    full_cols_counts: Address
    full_cols_indices: Address
    batch: Int32
    num_heads: Int32
    num_rows: Int32
    num_cols: Int32
    block_q: Int32
    block_k: Int32
    seqlen_q: Int32
    seqlen_k: Int32
    stream: Stream


class SplitPlannerArguments(NamedTuple):
    """Launch arguments of the kernel that counts the parts of each sequence's keys, in order.

    Shapes: cu_seqlens: (batch + 1,), seqused, leftpad: (batch,) int32, 0 for what there is none of
            counts: (batch,) int32, written
    Units:  rows_q, rows_k: lengths without cu_seqlens; the other numbers are those of SplitPlan,
            and least_blocks: blocks of keys that are worth a part
    """

    cu_seqlens_q: Address
    cu_seqlens_k: Address
    seqused_q: Address
    seqused_k: Address
    leftpad: Address
    counts: Address
    batch: Int32
    rows_q: Int32
    rows_k: Int32
    positions: Int32
    tile_n: Int32
    heads: Int32
    visible_blocks: Int32
    slots: Int32
    least_blocks: Int32
    split_blocks: Int32
    most: Int32
    stream: Stream


NUM_COMBINE_ADDRESSES = 7  # of CombineArguments; they come first


class CombineArguments(NamedTuple):
    """Launch arguments of the kernel that merges partial results, in order.

    Shapes: out_partial: (num_splits, batch, seqlen, num_heads, head_dim), last stride 1, address
            and other strides multiples of 16 bytes; out: (batch, seqlen, num_heads, head_dim)
            likewise; lse_partial: (num_splits, batch, seqlen, num_heads) f32; lse: (batch, seqlen,
            num_heads) f32, 0 for none. Packed tensors are one batch of seqlen = total rows
            cu_seqlens: (num_sequences + 1,), seqused: (num_sequences,) int32; padded ones have
            num_sequences = batch. split_counts: (num_sequences,) int32, parts of each sequence
    Units:  teams: groups of threads that share the parts of a row; strides in elements;
            batch * seqlen * num_heads is at most MAX_COMBINED_ROWS
    """

    out_partial: Address
    lse_partial: Address
    out: Address
    lse: Address
    cu_seqlens: Address
    seqused: Address
    split_counts: Address
    num_splits: Int32
    batch: Int32
    seqlen: Int32
    num_heads: Int32
    head_dim: Int32
    num_sequences: Int32
    teams: Int32
    out_partial_stride_split: Int64
    out_partial_stride_batch: Int64
    out_partial_stride_seqlen: Int64
    out_partial_stride_head: Int64
    lse_partial_stride_split: Int64
    lse_partial_stride_batch: Int64
    lse_partial_stride_seqlen: Int64
    lse_partial_stride_head: Int64
    out_stride_batch: Int64
    out_stride_seqlen: Int64
    out_stride_head: Int64
    lse_stride_batch: Int64
    lse_stride_seqlen: Int64
    lse_stride_head: Int64
    stream: Stream


MAX_COMBINED_ROWS = 2**31 - 2**10  # numbered in 32 bits, with the last CTA's rows past the end


NUM_APPEND_ADDRESSES = 15  # of AppendArguments; they come first


class AppendArguments(NamedTuple):
    """Launch arguments of the kernel that appends to a cache and rotates, in order.

    Shapes: q, rotated: (batch, rows_q, num_heads_q, head_dim), packed (total_q, …); rotated is
            contiguous. k, v: (batch, rows_new, num_heads_kv, dim), packed (total_new, …). k_cache,
            v_cache: (num_pages, page_size, num_heads_kv, dim); without a page_table a page is a row
            of the cache. All with last stride 1; where the key says is_wide, addresses and other
            strides, also those of rotary_cos and rotary_sin, are multiples of 16 bytes
            rotary_cos, rotary_sin: (num_positions, rotary_dim / 2)
            cache_seqlens, rotary_seqlens, cache_batch_idx, lengths: (batch,), page_table:
            (num_cache_rows, capacity / page_size), cu_seqlens: (batch + 1,), all int32. All but
            lengths may be absent: address 0. Without cache_seqlens every sequence has cache_length
            keys; without rotary_seqlens those are the positions, too
    Units:  strides in elements; dims are multiples of 8; pieces are 8 elements of a row, at most
            MAX_PIECES in q, k and v, of q 0 where it is not rotated and of k where there is none
            capacity: rows that each sequence has room for; advance: 1 where query i is rotated to
            its own position, 0 where all are to the first
    """

    q: Address
    k: Address
    v: Address
    k_cache: Address
    v_cache: Address
    rotary_cos: Address
    rotary_sin: Address
    cache_seqlens: Address
    rotary_seqlens: Address
    cache_batch_idx: Address
    page_table: Address
    cu_seqlens_q: Address
    cu_seqlens_k_new: Address
    rotated: Address
    lengths: Address
    cache_length: Int32
    batch: Int32
    rows_q: Int32
    rows_new: Int32
    num_heads_q: Int32
    num_heads_kv: Int32
    head_dim: Int32
    head_dim_v: Int32
    rotary_dim: Int32
    advance: Int32
    num_positions: Int32
    capacity: Int32
    page_size: Int32
    num_pages: Int32
    num_cache_rows: Int32
    pieces_q: Int32
    pieces_k: Int32
    pieces_v: Int32
    page_table_stride: Int64
    rotary_cos_stride: Int64
    rotary_sin_stride: Int64
    q_stride_batch: Int64
    q_stride_row: Int64
    q_stride_head: Int64
    k_stride_batch: Int64
    k_stride_row: Int64
    k_stride_head: Int64
    v_stride_batch: Int64
    v_stride_row: Int64
    v_stride_head: Int64
    k_cache_stride_page: Int64
    k_cache_stride_slot: Int64
    k_cache_stride_head: Int64
    v_cache_stride_page: Int64
    v_cache_stride_slot: Int64
    v_cache_stride_head: Int64
    stream: Stream


MAX_PIECES = 2**31 - 2**10  # numbered in 32 bits, with the last CTA's past the end
