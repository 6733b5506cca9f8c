"""The request of a call with a key/value cache: validated before anything is read or written.

``cache_request`` checks all that can be known without reading device memory, ``check_cache_values``
the contents of the index tensors, and so waits for the device. A call that asks for nothing but
used lengths or pages is an ordinary request, which a kernel or the reference runs as it is;
whatever it asks for beyond that is in the features that its problem requires.
"""

from __future__ import annotations

import dataclasses
import types
from typing import Any, cast

import torch

from flash_cute.errors import InvalidProblem, UnsupportedProblem, refuse
from flash_cute.problem import (
    AttentionInputs,
    AttentionProblem,
    Lengths,
    Options,
    attention_request,
    check_bool,
    check_hint,
    check_index_tensor,
    check_last_stride,
    check_sink,
    check_tensor,
    takes_part_in_autograd,
)
from flash_cute.values import check_cu_seqlens, to_list
from flash_cute.variant import NATIVE, callback_form

VERSIONS = (3, 4)
ROTARY_STEP = 16  # the rotated part of a head is a multiple of it


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CacheArguments:
    """The arguments of a call with a cache that Options does not have, as the user gave them."""

    q: torch.Tensor | None
    k_cache: torch.Tensor | None
    v_cache: torch.Tensor | None
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    qv: torch.Tensor | None = None
    rotary_cos: torch.Tensor | None = None
    rotary_sin: torch.Tensor | None = None
    rotary_interleaved: bool = True
    rotary_seqlens: torch.Tensor | None = None
    cache_seqlens: int | torch.Tensor | None = None
    cache_batch_idx: torch.Tensor | None = None
    cache_leftpad: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k_new: torch.Tensor | None = None
    max_seqlen_q: int | torch.Tensor | None = None
    max_seqlen_k: int | torch.Tensor | None = None
    only_qv: bool = False
    descales: tuple[object, object, object] = (None, None, None)
    aux_tensors: object = None
    ver: int = 3

    @property
    def query(self) -> torch.Tensor:
        """The tensor that says how the queries lie: q, or qv where it is alone."""
        return cast(torch.Tensor, self.qv if self.only_qv else self.q)

    @property
    def query_name(self) -> str:
        """What the caller calls it."""
        return "qv" if self.only_qv else "q"

    @property
    def keys(self) -> torch.Tensor:
        """The tensor that says how the keys lie: k_cache, or v_cache where qv is alone."""
        return cast(torch.Tensor, self.v_cache if self.only_qv else self.k_cache)

    @property
    def num_new(self) -> int:
        """New keys of each sequence, an upper bound where they are packed; 0 without."""
        if self.v is None:
            return 0
        return self.v.shape[1] if self.cu_seqlens_k_new is None else self.v.shape[0]

    @property
    def capacity(self) -> int:
        """Keys that each sequence has room for."""
        page_size = self.keys.shape[1]
        return page_size if self.page_table is None else self.page_table.shape[1] * page_size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CacheRequest:
    """One validated call.

    `problem` and `inputs` are the call as a kernel sees it, but for new keys and rotation.
    Where `is_plain` is False, `reference_cache.lower` makes a request that the reference runs.
    """

    problem: AttentionProblem
    inputs: AttentionInputs
    options: Options
    arguments: CacheArguments
    cache_seqlens: torch.Tensor | None

    @property
    def is_plain(self) -> bool:
        """Whether it is attention over used lengths or pages and nothing more."""
        p = self.problem
        return not (p.has_new_keys or p.has_batch_idx or p.has_leftpad or p.has_qv)

    @property
    def rotation_advances(self) -> bool:
        """Whether query i is rotated by its own position; if not, all by that of the first."""
        p = self.problem
        has_bound = p.visible_left is not None or p.visible_right is not None
        return has_bound or p.attention_chunk > 0

    @property
    def positions(self) -> int:
        """Positions that some sequence is rotated to, as far as the host can tell."""
        a, p = self.arguments, self.problem
        if a.rotary_cos is None or not p.batch:
            return 0
        queries = 0 if p.is_packed_q else p.seqlen_q
        if not self.rotation_advances:
            queries = min(queries, 1)
        return max(queries, a.num_new if a.cu_seqlens_k_new is None else 0)

    @property
    def most_keys(self) -> int:
        """The largest single cache_seqlens that leaves room for what is new, and has its angles."""
        a = self.arguments
        most = a.capacity - (a.num_new if a.cu_seqlens_k_new is None else 0)
        if a.rotary_cos is None or a.rotary_seqlens is not None:
            return most
        return min(most, a.rotary_cos.shape[0] - self.positions)


@dataclasses.dataclass(frozen=True, slots=True)
class CacheSpan:
    """Where one sequence lies, read on the host.

    Units: row: of the cache, or of the page table; keys lie in [first, end) before the call, and
           `num_new` more in [end, end + num_new) after it; angle: rotary position of the first
           query and new key
    """

    row: int
    first: int
    end: int
    start_q: int
    len_q: int
    start_new: int
    num_new: int
    angle: int


def cache_request(arguments: CacheArguments, options: Options) -> CacheRequest:
    """Build and validate one call, reading no device memory.

    Raises: InvalidProblem naming the argument, what came and what was expected;
            UnsupportedProblem for what no backend has.
    """
    a = arguments
    _check_presence(a)
    _check_plain_values(a)
    _check_operands(a)
    batch = _check_lengths(a)
    _check_new(a, batch)
    _check_rotary(a)
    check_sink(options.sink, a.query.shape[-2], a.query.device, "sinks")
    check_bool("return_softmax_lse", options.return_lse)
    _check_out_memory(a, options.out)
    options = dataclasses.replace(
        options, softmax_scale=_scale(a, options), score_mod=_score_mod(a, options)
    )
    cache_seqlens = _length_tensor(a)
    lengths = Lengths(
        cu_seqlens_q=a.cu_seqlens_q,
        max_seqlen_q=a.max_seqlen_q,
        max_seqlen_k=a.max_seqlen_k,
        seqused_k=cache_seqlens,
        page_table=None if a.page_table is None else _chosen("page_table", a.page_table, a, batch),
    )
    values_of_cache = cast(torch.Tensor, a.v_cache)
    keys, values = a.keys, values_of_cache
    if a.page_table is None:
        keys, values = (_chosen("v_cache", cache, a, batch) for cache in (keys, values))
    problem, inputs = attention_request(a.query, keys, values, options, lengths)
    _check_descales(a)
    inputs = dataclasses.replace(
        inputs,
        k=a.keys,
        v=values_of_cache,
        page_table=a.page_table,
        batch_idx=a.cache_batch_idx,
        leftpad=a.cache_leftpad,
        qv=a.qv,
    )
    others = (a.qv, a.k, a.v, a.rotary_cos, a.rotary_sin)
    problem = dataclasses.replace(
        problem,
        has_new_keys=a.v is not None,
        has_rotary=a.rotary_cos is not None,
        is_rotary_interleaved=a.rotary_cos is None or a.rotary_interleaved,
        has_batch_idx=a.cache_batch_idx is not None,
        has_leftpad=a.cache_leftpad is not None,
        has_qv=a.qv is not None,
        is_only_qv=a.only_qv,
        requires_grad=problem.requires_grad or takes_part_in_autograd(*others),
    )
    if problem.has_new_keys and problem.requires_grad:
        raise UnsupportedProblem(
            "new keys are appended while an argument requires grad: the cache is written in place, "
            "outside autograd; call under torch.no_grad(), or pass tensors after .detach()"
        )
    request = CacheRequest(
        problem=problem, inputs=inputs, options=options, arguments=a, cache_seqlens=cache_seqlens
    )
    _check_positions(request)
    return request


def fill_lengths(
    length: int, query: torch.Tensor, cu_seqlens_q: torch.Tensor | None
) -> torch.Tensor:
    """Return one length for every sequence, as kernels take lengths."""
    batch = query.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    return torch.full((batch,), length, dtype=torch.int32, device=query.device)


# ---- What can be checked without the device ------------------------------------------------------


def _check_presence(a: CacheArguments) -> None:
    """Check which arguments are given together."""
    check_bool("only_qv", a.only_qv)
    if a.v_cache is None:
        raise InvalidProblem("v_cache must be provided")
    for name in ("k_cache", "q"):
        if getattr(a, name) is None and not a.only_qv:
            raise InvalidProblem(f"{name} can only be None when only_qv=True")
    if a.only_qv and a.qv is None:
        if a.q is None:
            raise InvalidProblem("q must be provided unless qv is provided with only_qv=True")
        raise InvalidProblem("only_qv=True requires qv to be provided")
    if a.only_qv:
        for name in ("q", "k_cache", "k", "rotary_cos", "rotary_sin"):
            if getattr(a, name) is not None:
                refuse(name, "given", None, "only_qv=True: scores are qv·v, there are no other")
    elif (a.k is None) != (a.v is None):
        given, missing = ("k", "v") if a.v is None else ("v", "k")
        refuse(missing, None, "a tensor", f"{given} is given: keys are appended with their values")
    if (a.rotary_cos is None) != (a.rotary_sin is None):
        missing = "rotary_cos" if a.rotary_cos is None else "rotary_sin"
        refuse(missing, None, "a tensor", "rotary_cos and rotary_sin are given together")
    needs = (
        ("rotary_cos", "k", "they are rotated with q"),
        ("rotary_seqlens", "rotary_cos", "they are positions in it"),
        ("cu_seqlens_k_new", "v", "it delimits what is appended"),
        ("v", "cache_seqlens", "what is new is appended there"),
    )
    for name, needed, why in needs:
        if getattr(a, name) is not None and getattr(a, needed) is None:
            expected = "lengths" if needed == "cache_seqlens" else "a tensor"
            refuse(needed, None, expected, f"{name} is given, {why}")


def _check_plain_values(a: CacheArguments) -> None:
    """Check what is no tensor."""
    if isinstance(a.ver, bool) or a.ver not in VERSIONS:
        refuse("ver", repr(a.ver), "3 or 4", "the two mean the same here")
    check_bool("rotary_interleaved", a.rotary_interleaved)
    check_hint("max_seqlen_q", a.max_seqlen_q)
    check_hint("max_seqlen_k", a.max_seqlen_k)


def _layout(name: str, a: CacheArguments) -> tuple[int, str]:
    """Rank of an operand and what it means."""
    if name in ("q", "qv"):
        if a.cu_seqlens_q is not None:
            return 3, "(total_q, num_heads_q, dim), packed as cu_seqlens_q is given"
        return 4, "(batch, seqlen_q, num_heads_q, dim)"
    if name in ("k", "v"):
        if a.cu_seqlens_k_new is not None:
            return 3, "(total_new, num_heads_kv, dim), packed as cu_seqlens_k_new is given"
        return 4, "(batch, seqlen_new, num_heads_kv, dim)"
    if a.page_table is not None:
        return 4, "(num_pages, page_size, num_heads_kv, dim), paged as page_table is given"
    return 4, "(batch_cache, seqlen_cache, num_heads_kv, dim)"


def _check_operands(a: CacheArguments) -> None:
    """Check queries, caches and new keys against one another."""
    query_name = a.query_name
    check_tensor(query_name, a.query)
    for name in ("q", "qv", "k_cache", "v_cache", "k", "v"):
        tensor = getattr(a, name)
        if tensor is None:
            continue
        check_tensor(name, tensor)
        rank, why = _layout(name, a)
        if tensor.dim() != rank:
            refuse(f"{name}.dim()", tensor.dim(), rank, why)
        if tensor.dtype != a.query.dtype:
            refuse(f"{name}.dtype", tensor.dtype, a.query.dtype, f"dtype of {query_name}")
        if tensor.device != a.query.device:
            refuse(f"{name}.device", tensor.device, a.query.device, f"device of {query_name}")
        check_last_stride(name, tensor)
    pairs = (
        ("k_cache", "q", (-1,)),
        ("v_cache", "k_cache", (0, 1, 2)),
        ("qv", "q", tuple(range(a.query.dim() - 1))),
        ("qv", "v_cache", (-1,)),
        ("k", "k_cache", (-2, -1)),
        ("v", "v_cache", (-2, -1)),
        ("v", "k", (0, 1) if a.cu_seqlens_k_new is None else (0,)),
    )
    for name, other, axes in pairs:
        tensor, expected = getattr(a, name), getattr(a, other)
        if tensor is None or expected is None:
            continue
        for axis in axes:
            if tensor.shape[axis] != expected.shape[axis]:
                what = f"{name}.shape[{axis}]"
                refuse(what, tensor.shape[axis], expected.shape[axis], f"{other}.shape[{axis}]")
    if a.page_table is not None and a.keys.shape[1] < 1:
        refuse("v_cache.shape[1]", 0, "at least 1", "page size")


def _check_lengths(a: CacheArguments) -> int:
    """Check the index tensors and return the batch size."""
    device, batch = a.query.device, a.query.shape[0]
    batch_of = f"batch of {a.query_name}"
    if a.cu_seqlens_q is not None:
        check_index_tensor("cu_seqlens_q", a.cu_seqlens_q, 1, device)
        if a.cu_seqlens_q.shape[0] < 1:
            refuse("cu_seqlens_q.shape[0]", 0, "at least 1", "batch + 1")
        batch, batch_of = a.cu_seqlens_q.shape[0] - 1, "cu_seqlens_q.shape[0] - 1"
    names = ("cache_seqlens", "cache_batch_idx", "cache_leftpad", "rotary_seqlens")
    for name in (*names, "page_table", "cu_seqlens_k_new"):
        tensor = getattr(a, name)
        if tensor is None or (name == "cache_seqlens" and not isinstance(tensor, torch.Tensor)):
            continue
        check_index_tensor(name, tensor, 2 if name == "page_table" else 1, device)
        expected = batch + 1 if name == "cu_seqlens_k_new" else batch
        is_free = name == "page_table" and a.cache_batch_idx is not None
        if tensor.shape[0] != expected and not is_free:
            refuse(f"{name}.shape[0]", tensor.shape[0], expected, batch_of)
    if a.page_table is None and a.cache_batch_idx is None and a.keys.shape[0] != batch:
        name = "v_cache" if a.only_qv else "k_cache"
        why = f"{batch_of}; cache_batch_idx chooses rows of a larger cache"
        refuse(f"{name}.shape[0]", a.keys.shape[0], batch, why)
    return batch


def _length_tensor(a: CacheArguments) -> torch.Tensor | None:
    """Return cache_seqlens as a tensor; an integer is checked here, on any device."""
    lengths: Any = a.cache_seqlens
    if lengths is None or isinstance(lengths, torch.Tensor):
        return lengths
    if not isinstance(lengths, int) or isinstance(lengths, bool):
        refuse("cache_seqlens", repr(lengths), "an integer or an int32 tensor (batch,)")
    num_new = a.num_new if a.cu_seqlens_k_new is None else 0
    _check_length("cache_seqlens", lengths, num_new, a.capacity)
    return fill_lengths(lengths, a.query, a.cu_seqlens_q)


def _check_length(name: str, length: int, num_new: int, capacity: int) -> None:
    """Check that a length, and so many new keys after it, fit into the cache."""
    if num_new > capacity:
        refuse("number of new keys", num_new, f"at most {capacity}", "capacity of the cache")
    if not 0 <= length <= capacity - num_new:
        why = f"capacity of the cache {capacity}" + (f", {num_new} new keys" if num_new else "")
        refuse(name, length, f"0 to {capacity - num_new}", why)


def _check_new(a: CacheArguments, batch: int) -> None:
    """Check what is appended, and that the cache can be written."""
    if a.v is None:
        return
    if a.cu_seqlens_k_new is None and a.v.shape[0] != batch:
        name = "v" if a.only_qv else "k"
        refuse(f"{name}.shape[0]", a.v.shape[0], batch, f"batch of {a.query_name}")
    for name in ("k_cache", "v_cache"):
        cache = getattr(a, name)
        if cache is None:
            continue
        for axis in range(3):
            if cache.shape[axis] > 1 and cache.stride(axis) == 0:
                refuse(f"{name}.stride({axis})", 0, "nonzero", "it is written, its rows overlap")


def _check_rotary(a: CacheArguments) -> None:
    if a.rotary_cos is None or a.rotary_sin is None or a.q is None:
        return
    for name, tensor in (("rotary_cos", a.rotary_cos), ("rotary_sin", a.rotary_sin)):
        check_tensor(name, tensor)
        if tensor.dim() != 2:
            refuse(f"{name}.dim()", tensor.dim(), 2, "(seqlen_rotary, rotary_dim / 2)")
        if tensor.dtype != a.q.dtype:
            refuse(f"{name}.dtype", tensor.dtype, a.q.dtype, "dtype of q")
        if tensor.device != a.q.device:
            refuse(f"{name}.device", tensor.device, a.q.device, "device of q")
        check_last_stride(name, tensor)
    if a.rotary_sin.shape != a.rotary_cos.shape:
        shapes = tuple(a.rotary_sin.shape), tuple(a.rotary_cos.shape)
        refuse("rotary_sin.shape", *shapes, "rotary_cos.shape")
    dim, head_dim = 2 * a.rotary_cos.shape[1], a.q.shape[-1]
    if not ROTARY_STEP <= dim <= head_dim or dim % ROTARY_STEP:
        expected = f"a multiple of {ROTARY_STEP} up to {head_dim}"
        refuse("2 * rotary_cos.shape[1]", dim, expected, "rotated part of the head_dim of q")


def _check_positions(request: CacheRequest) -> None:
    """Check that the tables of angles reach as far as is known without reading lengths."""
    a, needed = request.arguments, request.positions
    if a.rotary_cos is None or not needed:
        return
    first, why = 0, f"{needed} positions"
    if isinstance(a.cache_seqlens, int) and a.rotary_seqlens is None:
        first, why = a.cache_seqlens, f"{needed} positions from cache_seqlens = {a.cache_seqlens}"
    rows = a.rotary_cos.shape[0]
    if first + needed > rows:
        refuse("rotary_cos.shape[0]", rows, f"at least {first + needed}", why)


def _check_descales(a: CacheArguments) -> None:
    """Refuse scales of 8-bit inputs; those inputs were refused before, for want of a kernel."""
    for name, descale in zip(("q_descale", "k_descale", "v_descale"), a.descales, strict=True):
        if descale is not None:
            refuse(name, "given", None, f"for float8 inputs only, q has {a.query.dtype}")


def _check_out_memory(a: CacheArguments, out: object) -> None:
    if not isinstance(out, torch.Tensor) or not out.numel():
        return
    for name in ("q", "qv", "k_cache", "v_cache", "k", "v"):
        tensor = getattr(a, name)
        if tensor is not None and tensor.data_ptr() == out.data_ptr():
            refuse("out", f"the memory of {name}", "memory of its own")


def _scale(a: CacheArguments, options: Options) -> float | None:
    """The softmax scale; None leaves head_dim ** -0.5 to the problem."""
    if options.softmax_scale is not None or a.qv is None or a.only_qv:
        return options.softmax_scale
    return (a.query.shape[-1] + a.qv.shape[-1]) ** -0.5


def _score_mod(a: CacheArguments, options: Options) -> Any:
    """The score_mod with the tensors it reads, where they come apart from it."""
    score_mod: Any = options.score_mod
    if a.aux_tensors is None:
        return score_mod
    if not isinstance(a.aux_tensors, (tuple, list)):
        refuse("aux_tensors", f"of type {type(a.aux_tensors).__name__}", "a tuple of tensors")
    tensors = cast("tuple[object, ...]", tuple(cast(Any, a.aux_tensors)))
    for index, tensor in enumerate(tensors):
        check_tensor(f"aux_tensors[{index}]", tensor)
    if score_mod is None:
        refuse("aux_tensors", "given without score_mod", None, "nothing would read them")
    if callback_form(score_mod, "score_mod") != NATIVE:
        why = "a score_mod of five parameters reads the tensors that it captures"
        refuse("aux_tensors", "given with a portable score_mod", None, why)
    if not isinstance(score_mod, types.FunctionType) or hasattr(score_mod, "aux_tensors"):
        why = "set the attribute aux_tensors of score_mod instead"
        refuse("aux_tensors", "given beside a score_mod that has its own", None, why)
    inner = cast(types.FunctionType, score_mod)
    parts = (inner.__code__, inner.__globals__, inner.__name__, inner.__defaults__)
    copy = types.FunctionType(*parts, inner.__closure__)
    copy.__kwdefaults__ = inner.__kwdefaults__
    copy.__dict__.update(inner.__dict__, aux_tensors=tensors)
    return copy


def _chosen(name: str, tensor: torch.Tensor, a: CacheArguments, batch: int) -> torch.Tensor:
    """A view of the shape that the rows chosen by cache_batch_idx have, but not of their values."""
    if a.cache_batch_idx is None:
        return tensor
    if batch and not tensor.shape[0]:
        refuse(f"{name}.shape[0]", 0, "at least 1", "cache_batch_idx chooses among its rows")
    return tensor.narrow(0, 0, min(batch, 1)).expand(batch, *tensor.shape[1:])


# ---- Contents of the index tensors ---------------------------------------------------------------


def check_cache_values(request: CacheRequest) -> list[CacheSpan]:
    """Check the contents of the index tensors and return where each sequence lies.

    Reads them on the host, so it waits for the device. Page table entries past the used length and
    before the left padding ends may hold anything.

    Raises: InvalidProblem naming the entry.
    """
    a, problem = request.arguments, request.problem
    spans = _read_spans(request)
    num_rows = a.keys.shape[0] if a.page_table is None else a.page_table.shape[0]
    for b, span in enumerate(spans):
        if not 0 <= span.row < num_rows:
            refuse(f"cache_batch_idx[{b}]", span.row, f"0 to {num_rows - 1}", "rows of the cache")
        _check_length(f"cache_seqlens[{b}]", span.end, span.num_new, a.capacity)
        if not 0 <= span.first <= span.end:
            refuse(f"cache_leftpad[{b}]", span.first, f"0 to {span.end}", "cache_seqlens")
        _check_pages(request, span)
        if problem.has_rotary:
            _check_angle(request, b, span)
    hint = a.max_seqlen_k
    if hint is not None and not (isinstance(hint, torch.Tensor) and hint.device.type != "cpu"):
        longest = max((span.end + span.num_new - span.first for span in spans), default=0)
        if int(hint) < longest:
            refuse("max_seqlen_k", int(hint), f"at least {longest}", "longest sequence of keys")
    if problem.has_new_keys:
        _check_written(request, spans)
    return spans


def _read_spans(request: CacheRequest) -> list[CacheSpan]:
    a, batch = request.arguments, request.problem.batch

    def values(tensor: torch.Tensor | None, default: list[int]) -> list[int]:
        return default if tensor is None else to_list(tensor)

    starts_q = values(a.cu_seqlens_q, [0] * (batch + 1))
    lens_q = check_cu_seqlens("q", a.cu_seqlens_q, a.query, request.problem.seqlen_q)
    starts_new = values(a.cu_seqlens_k_new, [0] * (batch + 1))
    lens_new = [a.num_new] * batch
    if a.cu_seqlens_k_new is not None and a.v is not None:
        lens_new = check_cu_seqlens("k_new", a.cu_seqlens_k_new, a.v, a.v.shape[0])
    ends = values(request.cache_seqlens, [a.capacity] * batch)
    rows = values(a.cache_batch_idx, list(range(batch)))
    firsts = values(a.cache_leftpad, [0] * batch)
    angles = values(a.rotary_seqlens, ends)
    return [
        CacheSpan(
            row=rows[b],
            first=firsts[b],
            end=ends[b],
            start_q=starts_q[b],
            len_q=lens_q[b] if lens_q else request.problem.seqlen_q,
            start_new=starts_new[b],
            num_new=lens_new[b],
            angle=angles[b],
        )
        for b in range(batch)
    ]


def _check_pages(request: CacheRequest, span: CacheSpan) -> None:
    a, page_size = request.arguments, request.problem.page_size
    if a.page_table is None or page_size is None:
        return
    end_key, num_pages = span.end + span.num_new, a.keys.shape[0]
    if span.first == end_key:  # all padding: no row of the page it ends in is in use
        return
    first, end = span.first // page_size, -(-end_key // page_size)
    for column, page in enumerate(to_list(a.page_table[span.row, first:end]), first):
        if not 0 <= page < num_pages:
            name = f"page_table[{span.row}, {column}]"
            refuse(name, page, f"0 to {num_pages - 1}", "pages of the cache")


def _check_angle(request: CacheRequest, b: int, span: CacheSpan) -> None:
    """Check that the tables reach every position that is rotated."""
    a = request.arguments
    name = "cache_seqlens" if a.rotary_seqlens is None else "rotary_seqlens"
    if span.angle < 0:
        refuse(f"{name}[{b}]", span.angle, "at least 0", "a position in rotary_cos")
    queries = span.len_q if request.rotation_advances else min(span.len_q, 1)
    needed = max(span.num_new, queries)
    rows = cast(torch.Tensor, a.rotary_cos).shape[0]
    if needed and span.angle + needed > rows:
        why = f"{needed} positions from {name}[{b}] = {span.angle}"
        refuse("rotary_cos.shape[0]", rows, f"at least {span.angle + needed}", why)


def slots(
    request: CacheRequest, span: CacheSpan, begin: int, end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where keys begin to end - 1 of a sequence lie: indices of the first two axes of the cache."""
    a, page_size = request.arguments, request.problem.page_size
    position = torch.arange(begin, end, device=a.query.device)
    if a.page_table is None or page_size is None:
        return torch.full_like(position, span.row), position
    page = a.page_table[span.row][position // page_size].long()
    return page, position % page_size


def _check_written(request: CacheRequest, spans: list[CacheSpan]) -> None:
    """Check that what one sequence appends is nothing that another one appends or reads."""
    a = request.arguments
    if a.cache_batch_idx is not None:
        seen: dict[int, int] = {}
        for b, span in enumerate(spans):
            other = seen.setdefault(span.row, b)
            if other != b:
                why = f"new keys are appended, and cache_batch_idx[{other}] is {span.row} too"
                refuse(f"cache_batch_idx[{b}]", span.row, "a row of its own", why)
    if a.page_table is None:
        return
    uses = torch.zeros(a.keys.shape[:2], dtype=torch.int32, device=a.query.device)
    for span in spans:
        index = slots(request, span, span.first, span.end + span.num_new)
        uses.index_put_(index, torch.ones_like(index[0], dtype=torch.int32), accumulate=True)
    for span in spans:
        page, offset = slots(request, span, span.end, span.end + span.num_new)
        shared = (uses[page, offset] > 1).nonzero()
        if shared.numel():
            at = int(shared[0, 0])
            column = (span.end + at) // a.keys.shape[1]
            why = f"a new key is appended in its slot {int(offset[at])}, which is used twice"
            refuse(f"page_table[{span.row}, {column}]", int(page[at]), "a page of its own", why)
