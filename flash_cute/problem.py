"""The request: one attention call, validated and frozen.

``AttentionProblem`` holds what a call asks for (sizes, masks, options) and no tensor; it is
hashable, drives the choice of a kernel, and can be written by hand to ask ``is_supported`` or to
warm up. ``AttentionInputs`` holds the tensors and callables of the call. ``attention_request``
builds both and checks everything that can be known without reading device memory;
``values.check_values`` checks the rest, and so waits for the device.

Every refusal reads ``<argument> is <got>, expected <expected> (<why>)``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from flash_cute.block_mask import BlockStructure, block_structure, sizes_of
from flash_cute.errors import InvalidProblem, UnsupportedProblem, refuse
from flash_cute.features import Feature
from flash_cute.modifiers import Modifiers
from flash_cute.split_plan import SchedulerMetadata
from flash_cute.variant import NATIVE, Callback, callback_form, callback_on

_HALF_DTYPES = (torch.float16, torch.bfloat16)
_CPU_DTYPES = (*_HALF_DTYPES, torch.float32, torch.float64)
_SINK_DTYPES = _CPU_DTYPES
_FP8_DTYPES = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
    if hasattr(torch, name)
)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_int(what: str, value: object, least: int) -> None:
    """Refuse what is no integer, or below `least`."""
    if not _is_int(value) or cast(int, value) < least:
        refuse(what, repr(value), f"an integer of at least {least}")


def check_bool(what: str, value: object) -> None:
    """Refuse what is not True or False."""
    if not isinstance(value, bool):
        refuse(what, repr(value), "True or False")


def _check_finite(what: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        refuse(what, repr(value), "a finite number")


def _window_bound(what: str, value: object) -> int | None:
    """One side of a window: None and the legacy -1 are unbounded, other integers are bounds."""
    if value is None:
        return None
    if not _is_int(value):
        refuse(what, repr(value), "an integer or None")
    bound = cast(int, value)
    return None if bound == -1 else bound


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionProblem:
    """What one call asks for: validated on construction, frozen, hashable, free of tensors.

    Shapes: batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv, head_dim (of q and k), head_dim_v.
            Of a packed side, seqlen is an upper bound of the longest sequence: the caller's hint,
            or the total. Of paged keys it is the capacity of the page table, or the hint.
    Units:  softmax_scale multiplies q·k (None: head_dim ** -0.5); softcap in scaled scores, 0 for
            none; window bounds in keys, both inclusive, None (or the legacy -1) for unbounded.
            Other negative bounds are ordinary: with the diagonal of query i at
            d = i + seqlen_k - seqlen_q, the window (left, right) shows keys d - left to d + right,
            so (7, -8) shows none and (-3, 5) shows d + 3 to d + 5. split_size in keys, 0 for none;
            mean_q: queries of a packed sequence on average; room_k: keys that one has room for.
    Raises: InvalidProblem for a value that means nothing; UnsupportedProblem for fp8 dtypes.
    """

    dtype: torch.dtype
    device: torch.device
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool = False
    window_left: int | None = None
    window_right: int | None = None
    attention_chunk: int = 0
    softcap: float = 0.0
    softmax_scale: float = cast(float, None)  # resolved to a number on construction
    has_sink: bool = False
    sink_dtype: torch.dtype | None = None  # of a sink; None is the dtype of q
    has_score_mod: bool = False
    has_mask_mod: bool = False
    has_block_mask: bool = False
    is_packed_q: bool = False
    is_packed_k: bool = False
    has_seqused_q: bool = False
    has_seqused_k: bool = False
    page_size: int | None = None
    # Of a call with a cache: what is done to it and to q on the way.
    has_new_keys: bool = False
    has_rotary: bool = False
    is_rotary_interleaved: bool = True  # whether channels are rotated in pairs (0, 1), (2, 3), …
    has_batch_idx: bool = False
    has_leftpad: bool = False
    has_qv: bool = False
    is_only_qv: bool = False  # there are no q and k; head_dim is that of v then
    pack_gqa: bool | None = None
    num_splits: int = 1
    split_size: int = 0
    has_scheduler_metadata: bool = False
    sm_margin: int = 0
    # Facts of packed and paged sequences that hints do not change; None where they are not known.
    mean_q: int | None = None
    room_k: int | None = None
    return_lse: bool = False
    requires_grad: bool = False

    def __post_init__(self) -> None:
        self._normalise()
        self._check_dtype()
        self._check_sizes()
        self._check_options()

    def _normalise(self) -> None:
        put = object.__setattr__
        put(self, "device", torch.device(self.device))
        put(self, "window_left", _window_bound("window_size[0]", self.window_left))
        put(self, "window_right", _window_bound("window_size[1]", self.window_right))
        if cast("float | None", self.softmax_scale) is None:
            check_int("head_dim", self.head_dim, 1)
            put(self, "softmax_scale", self.head_dim**-0.5)
        _check_finite("softmax_scale", self.softmax_scale)
        _check_finite("softcap", self.softcap)
        put(self, "softmax_scale", float(self.softmax_scale))
        put(self, "softcap", float(self.softcap))
        if self.room_k == self.seqlen_k:
            put(self, "room_k", None)

    def _check_dtype(self) -> None:
        if self.device.type not in ("cpu", "cuda"):
            refuse("device", self.device, "cuda or cpu")
        allowed = _CPU_DTYPES if self.device.type == "cpu" else _HALF_DTYPES
        names = ", ".join(str(dtype) for dtype in allowed)
        if self.dtype in _FP8_DTYPES:
            raise UnsupportedProblem(f"dtype {self.dtype}: no fp8 kernel exists yet; use {names}")
        if self.dtype not in allowed:
            refuse("dtype", self.dtype, f"one of {names}", f"tensors on {self.device.type}")

    def _check_sizes(self) -> None:
        for name in ("batch", "seqlen_q", "seqlen_k"):
            check_int(name, getattr(self, name), 0)
        for name in ("num_heads_q", "num_heads_kv", "head_dim", "head_dim_v"):
            check_int(name, getattr(self, name), 1)
        if self.num_heads_q % self.num_heads_kv:
            multiple = f"a multiple of {self.num_heads_kv}"
            refuse("num_heads_q", self.num_heads_q, multiple, "num_heads_kv")
        if self.page_size is not None:
            check_int("page_size", self.page_size, 1)
            if self.is_packed_k:
                refuse("is_packed_k", True, False, "paged keys have no cu_seqlens_k")

    def _check_options(self) -> None:
        check_int("attention_chunk", self.attention_chunk, 0)
        check_int("num_splits", self.num_splits, 0)
        check_int("split_size", self.split_size, 0)
        check_int("sm_margin", self.sm_margin, 0)
        if self.split_size and self.num_splits > 1:
            refuse("num_splits", self.num_splits, "0 or 1", "split_size is given too")
        for name in ("mean_q", "room_k"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 0)
        if self.is_only_qv and not self.has_qv:
            refuse("is_only_qv", True, False, "has_qv is False")
        if self.softcap < 0:
            refuse("softcap", self.softcap, "0 (none) or a positive number")
        if self.pack_gqa is not None:
            check_bool("pack_gqa", self.pack_gqa)
        for name in _BOOL_FIELDS:
            check_bool(name, getattr(self, name))

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads_q // self.num_heads_kv

    @property
    def queries(self) -> int:
        """Queries of a sequence as far as they shape the launch: whatever the hint says."""
        if not self.is_packed_q or self.mean_q is None:
            return self.seqlen_q
        # The same sequence in any batch is to be cut into tiles in the same way.
        return 1 if self.split_size else self.mean_q

    @property
    def capacity(self) -> int:
        """Keys that a sequence has room for, whatever the hint says."""
        return self.seqlen_k if self.room_k is None else self.room_k

    @property
    def has_ragged_lengths(self) -> bool:
        """Whether lengths lie on the device, and the host knows nothing but what they may be."""
        return (
            self.is_packed_q
            or self.is_packed_k
            or self.has_seqused_q
            or self.has_seqused_k
            or self.has_leftpad
        )

    @property
    def may_split(self) -> bool:
        """Whether the package may split the keys, or is told to."""
        return self.num_splits != 1 or self.split_size > 0 or self.has_scheduler_metadata

    @property
    def visible_left(self) -> int | None:
        """Keys visible before the diagonal, the diagonal included at 0; None is unbounded."""
        return self.window_left

    @property
    def visible_right(self) -> int | None:
        """Keys visible past the diagonal, causal folded in; None is unbounded."""
        if not self.causal:
            return self.window_right
        return 0 if self.window_right is None else min(self.window_right, 0)

    @property
    def is_causal_only(self) -> bool:
        """Whether the bounds come to exactly the causal mask, however the caller spelled it."""
        return self.visible_left is None and self.visible_right == 0

    @property
    def is_local(self) -> bool:
        """Whether the bounds are more than the causal mask: a window."""
        has_bound = self.visible_left is not None or self.visible_right is not None
        return has_bound and not self.is_causal_only

    def required_features(self) -> frozenset[Feature]:
        """Return the features that a kernel has to declare to run this problem."""
        required = {
            Feature.CAUSAL: self.is_causal_only,
            Feature.WINDOW: self.is_local,
            Feature.ATTENTION_CHUNK: self.attention_chunk > 0,
            Feature.SOFTCAP: self.softcap > 0,
            Feature.SINK: self.has_sink,
            Feature.GQA: self.group > 1,
            Feature.LSE: self.return_lse,
            Feature.VARLEN: self.is_packed_q or self.is_packed_k,
            Feature.SEQUSED: self.has_seqused_q or self.has_seqused_k,
            Feature.PAGED_KV: self.page_size is not None,
            Feature.SPLIT_KV: self.num_splits > 1
            or self.split_size > 0
            or self.has_scheduler_metadata,
            Feature.PACK_GQA: bool(self.pack_gqa) and self.group > 1,
            Feature.SCORE_MOD: self.has_score_mod,
            Feature.MASK_MOD: self.has_mask_mod,
            Feature.BLOCK_SPARSITY: self.has_block_mask,
            Feature.HEAD_DIM_V: self.head_dim_v != self.head_dim,
            Feature.QV: self.has_qv,
            Feature.APPEND_KV: self.has_new_keys,
            Feature.ROTARY: self.has_rotary,
            Feature.BATCH_IDX: self.has_batch_idx,
            Feature.LEFTPAD: self.has_leftpad,
            Feature.GRADIENT: self.requires_grad,
        }
        return frozenset(feature for feature, is_required in required.items() if is_required)


_BOOL_FIELDS = tuple(f.name for f in dataclasses.fields(AttentionProblem) if f.type == "bool")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Options:
    """The options of a call as the user gave them; the public functions document each."""

    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int | None, int | None] = (None, None)
    attention_chunk: int = 0
    softcap: float = 0.0
    sink: torch.Tensor | None = None
    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    block_mask: object | None = None
    pack_gqa: bool | None = None
    num_splits: int = 1
    split_size: int = 0
    scheduler_metadata: SchedulerMetadata | None = None
    sm_margin: int = 0
    return_lse: bool = False
    out: torch.Tensor | None = None
    kernel: type[Any] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lengths:
    """The length arguments of a call as the user gave them; all None is a dense call."""

    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    max_seqlen_q: int | torch.Tensor | None = None
    max_seqlen_k: int | torch.Tensor | None = None
    seqused_q: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None
    page_table: torch.Tensor | None = None


DENSE = Lengths()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionInputs:
    """The tensors and callables of one call, validated against its AttentionProblem.

    Shapes: q (batch, seqlen_q, num_heads_q, head_dim), or packed (total_q, num_heads_q, head_dim)
            k (batch, seqlen_k, num_heads_kv, head_dim), or packed (total_k, …), or paged
            (num_pages, page_size, …); v like k with head_dim_v; out like q with head_dim_v
            cu_seqlens_q, cu_seqlens_k (batch + 1,) int32 contiguous; seqused_q, seqused_k (batch,)
            int32 contiguous; page_table (batch, max_pages) int32; batch_idx, leftpad (batch,) int32
            contiguous: row of the cache or page_table, and first key, of each sequence; sink
            (num_heads_q,) contiguous
            qv like q with head_dim_v; where it is alone it stands in the place of q, and v of k
            q, k, v, qv, out and page_table have last stride 1 and any other strides
    Units:  the callbacks are those of the functions of the same name, on a GPU only; those of the
            block mask's own mask_mod are in block_callback
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    seqused_q: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    batch_idx: torch.Tensor | None = None
    leftpad: torch.Tensor | None = None
    qv: torch.Tensor | None = None
    sink: torch.Tensor | None = None
    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    block_mask: BlockStructure | None = None
    score_callback: Callback | None = None
    mask_callback: Callback | None = None
    block_callback: Callback | None = None
    scheduler_metadata: SchedulerMetadata | None = None
    out: torch.Tensor | None = None
    kernel: type[Any] | None = None

    @property
    def modifiers(self) -> Modifiers:
        """The callbacks that a kernel runs, and its block lists."""
        return Modifiers(
            self.score_callback, self.mask_callback, self.block_callback, self.block_mask
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Support:
    """The answer of ``is_supported``: true when ``reason`` is empty; ``backend`` would run it.

    A call takes `workspace_bytes` from PyTorch's allocator for partial results, and gives them back
    to it; they depend on nothing but the problem.
    """

    reason: str = ""
    backend: str = ""
    workspace_bytes: int = 0

    def __bool__(self) -> bool:
        return not self.reason


def attention_request(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, lengths: Lengths = DENSE
) -> tuple[AttentionProblem, AttentionInputs]:
    """Build and validate the problem and the inputs of one call, reading no device memory.

    Raises: InvalidProblem naming the argument, what came and what was expected;
            UnsupportedProblem for fp8, a block mask of ragged sequences, native callbacks on the
            CPU and callbacks on a GPU that cannot be keyed.
    """
    _check_operands(q, k, v, lengths)
    batch = _check_lengths(q, k, lengths)
    _check_callbacks(options, q.device)
    structure = _block_structure(q, k, options, lengths)
    inputs = _inputs(q, k, v, options, lengths, structure)
    num_heads_q, head_dim = q.shape[-2], q.shape[-1]
    check_sink(options.sink, num_heads_q, q.device)
    window_left, window_right = _window_pair(options.window_size)
    page_size = None if lengths.page_table is None else k.shape[1]
    metadata = _check_metadata(options, batch, q.device)
    problem = AttentionProblem(
        dtype=q.dtype,
        device=q.device,
        batch=batch,
        seqlen_q=_seqlen_q(q, lengths),
        seqlen_k=_seqlen_k(k, lengths),
        num_heads_q=num_heads_q,
        num_heads_kv=k.shape[-2],
        head_dim=head_dim,
        head_dim_v=v.shape[-1],
        causal=options.causal,
        window_left=window_left,
        window_right=window_right,
        attention_chunk=options.attention_chunk,
        softcap=options.softcap,
        softmax_scale=cast(float, options.softmax_scale),
        has_sink=options.sink is not None,
        sink_dtype=None if options.sink is None else options.sink.dtype,
        has_score_mod=options.score_mod is not None,
        has_mask_mod=options.mask_mod is not None or _has_mask(structure),
        has_block_mask=structure is not None,
        is_packed_q=lengths.cu_seqlens_q is not None,
        is_packed_k=lengths.cu_seqlens_k is not None,
        has_seqused_q=lengths.seqused_q is not None,
        has_seqused_k=lengths.seqused_k is not None,
        page_size=page_size,
        pack_gqa=options.pack_gqa,
        num_splits=options.num_splits if metadata is None else 0,
        split_size=options.split_size,
        has_scheduler_metadata=metadata is not None,
        sm_margin=options.sm_margin,
        mean_q=_mean_q(q, batch, metadata) if lengths.cu_seqlens_q is not None else None,
        room_k=_seqlen_k(k, dataclasses.replace(lengths, max_seqlen_k=None)),
        return_lse=options.return_lse,
        requires_grad=takes_part_in_autograd(q, k, v, options.sink, *_captured(inputs)),
    )
    _check_out(options.out, q, k, v, problem.requires_grad)
    return problem, inputs


def _mean_q(q: torch.Tensor, batch: int, metadata: SchedulerMetadata | None) -> int:
    """Queries of a packed sequence on average; those that a given plan was made for."""
    return -(-q.shape[0] // max(batch, 1)) if metadata is None else metadata.plan.mean_q


def _check_metadata(options: Options, batch: int, device: torch.device) -> SchedulerMetadata | None:
    """Check that a plan is one, and there is nothing else to plan by."""
    metadata = options.scheduler_metadata
    if metadata is None:
        return None
    if not isinstance(cast(object, metadata), SchedulerMetadata):
        got = f"of type {type(metadata).__name__}"
        refuse("scheduler_metadata", got, "what flash_cute.get_scheduler_metadata returns")
    if metadata.plan.batch != batch:
        refuse("scheduler_metadata", f"a plan for {metadata.plan.batch} sequences", batch)
    for name, own in (("num_splits", metadata.plan.most), ("split_size", 0)):
        given = getattr(options, name)
        if given > (name == "num_splits") and given != own:
            refuse(name, given, "0", "scheduler_metadata has the numbers of parts")
    check_index_tensor("scheduler_metadata.split_counts", metadata.split_counts, 1, device)
    return metadata


def _inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Options,
    lengths: Lengths,
    structure: BlockStructure | None,
) -> AttentionInputs:
    block_mod = None if structure is None else structure.mask_mod
    return AttentionInputs(
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=lengths.cu_seqlens_q,
        cu_seqlens_k=lengths.cu_seqlens_k,
        seqused_q=lengths.seqused_q,
        seqused_k=lengths.seqused_k,
        page_table=lengths.page_table,
        sink=options.sink,
        score_mod=options.score_mod,
        mask_mod=options.mask_mod,
        block_mask=structure,
        score_callback=_callback("score_mod", options.score_mod, q.device),
        mask_callback=_callback("mask_mod", options.mask_mod, q.device),
        block_callback=_callback("mask_mod", block_mod, q.device),
        scheduler_metadata=options.scheduler_metadata,
        out=options.out,
        kernel=options.kernel,
    )


def _callback(
    kind: str, function: Callable[..., Any] | None, device: torch.device
) -> Callback | None:
    """Key a callback that a kernel will run; the reference runs any function, and keys none."""
    return None if device.type == "cpu" else callback_on(device, function, kind)


def _captured(inputs: AttentionInputs) -> list[torch.Tensor]:
    return [tensor for callback in inputs.modifiers.callbacks for tensor in callback.tensors]


def _has_mask(structure: BlockStructure | None) -> bool:
    return structure is not None and structure.mask_mod is not None


def _block_structure(
    q: torch.Tensor, k: torch.Tensor, options: Options, lengths: Lengths
) -> BlockStructure | None:
    if options.block_mask is None:
        return None
    ragged = (lengths.cu_seqlens_q, lengths.cu_seqlens_k, lengths.page_table)
    sizes = sizes_of(q, k, *ragged)
    return block_structure(options.block_mask, sizes, q.device)


def takes_part_in_autograd(*tensors: torch.Tensor | None) -> bool:
    """Whether grad mode is on and one of the tensors requires grad."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _check_operands(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Lengths) -> None:
    """Check q, k and v against one another: type, dtype, device, rank, shape, last stride."""
    if lengths.page_table is not None and lengths.cu_seqlens_k is not None:
        raise InvalidProblem(
            "page_table and cu_seqlens_k are both given, expected at most one: "
            "paged keys take their lengths from seqused_k"
        )
    ranks = {
        "q": 3 if lengths.cu_seqlens_q is not None else 4,
        "k": 3 if lengths.cu_seqlens_k is not None else 4,
    }
    ranks["v"] = ranks["k"]
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, tensor)
        if tensor.dim() != ranks[name]:
            refuse(f"{name}.dim()", tensor.dim(), ranks[name], _layout(name, lengths))
        if tensor.dtype != q.dtype:
            refuse(f"{name}.dtype", tensor.dtype, q.dtype, "dtype of q")
        if tensor.device != q.device:
            refuse(f"{name}.device", tensor.device, q.device, "device of q")
        check_last_stride(name, tensor)
    if k.shape[-1] != q.shape[-1]:
        refuse("k.shape[-1]", k.shape[-1], q.shape[-1], "head_dim of q")
    for axis in range(ranks["k"] - 1):
        if v.shape[axis] != k.shape[axis]:
            refuse(f"v.shape[{axis}]", v.shape[axis], k.shape[axis], f"k.shape[{axis}]")
    if lengths.page_table is not None and k.shape[1] < 1:
        refuse("k.shape[1]", k.shape[1], "at least 1", "page size")


def _layout(name: str, lengths: Lengths) -> str:
    if name == "q":
        if lengths.cu_seqlens_q is not None:
            return "(total_q, num_heads_q, head_dim), packed as cu_seqlens_q is given"
        return "(batch, seqlen_q, num_heads_q, head_dim)"
    if lengths.cu_seqlens_k is not None:
        return "(total_k, num_heads_kv, head_dim), packed as cu_seqlens_k is given"
    if lengths.page_table is not None:
        return "(num_pages, page_size, num_heads_kv, head_dim), paged as page_table is given"
    return "(batch, seqlen_k, num_heads_kv, head_dim)"


def check_tensor(name: str, tensor: object) -> None:
    """Refuse what is no tensor."""
    if not isinstance(tensor, torch.Tensor):
        refuse(name, f"of type {type(tensor).__name__}", "a torch.Tensor")


def check_last_stride(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose last dimension has gaps."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        refuse(
            f"{name}.stride(-1)",
            tensor.stride(-1),
            1,
            f"pass {name}.contiguous(); all other strides are free",
        )


def _check_lengths(q: torch.Tensor, k: torch.Tensor, lengths: Lengths) -> int:
    """Check the length tensors and return the batch size."""
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "page_table"):
        tensor = getattr(lengths, name)
        if tensor is not None:
            check_index_tensor(name, tensor, 2 if name == "page_table" else 1, q.device)
    batch, batch_of = _batch(q, lengths)
    expected = {
        "cu_seqlens_k": batch + 1,
        "seqused_q": batch,
        "seqused_k": batch,
        "page_table": batch,
    }
    for name, length in expected.items():
        tensor = getattr(lengths, name)
        if tensor is not None and tensor.shape[0] != length:
            why = f"batch + 1, batch is {batch_of}" if name == "cu_seqlens_k" else batch_of
            refuse(f"{name}.shape[0]", tensor.shape[0], length, why)
    is_dense_k = lengths.cu_seqlens_k is None and lengths.page_table is None
    if is_dense_k and k.shape[0] != batch:
        refuse("k.shape[0]", k.shape[0], batch, batch_of)
    check_hint("max_seqlen_q", lengths.max_seqlen_q)
    check_hint("max_seqlen_k", lengths.max_seqlen_k)
    return batch


def check_index_tensor(name: str, tensor: object, rank: int, device: torch.device) -> None:
    """Refuse what is no int32 tensor of that rank on the device of q."""
    check_tensor(name, tensor)
    index = cast(torch.Tensor, tensor)
    if index.dtype != torch.int32:
        refuse(f"{name}.dtype", index.dtype, torch.int32)
    if index.dim() != rank:
        refuse(f"{name}.dim()", index.dim(), rank)
    if index.device != device:
        refuse(f"{name}.device", index.device, device, "device of q")
    check_last_stride(name, index)


def _batch(q: torch.Tensor, lengths: Lengths) -> tuple[int, str]:
    """Return the batch size and where it comes from."""
    cu_seqlens_q = lengths.cu_seqlens_q
    if cu_seqlens_q is None:
        return q.shape[0], "batch of q"
    if cu_seqlens_q.shape[0] < 1:
        refuse("cu_seqlens_q.shape[0]", 0, "at least 1", "batch + 1")
    return cu_seqlens_q.shape[0] - 1, "cu_seqlens_q.shape[0] - 1"


def check_hint(name: str, hint: object) -> None:
    """Refuse what is no maximum length: an integer or a 0-dim tensor, which a GPU keeps unread."""
    if hint is None:
        return
    if isinstance(hint, torch.Tensor):
        if hint.dim() != 0 or hint.dtype not in (torch.int32, torch.int64):
            got = f"a tensor of shape {tuple(hint.shape)} and dtype {hint.dtype}"
            refuse(name, got, "an integer or a 0-dim int32 or int64 tensor")
        if hint.device.type != "cpu":
            return
        hint = int(hint)
    check_int(name, hint, 0)


def _hint(hint: int | torch.Tensor | None, most: int) -> int:
    """Return the smaller of the hint and what is possible; a hint on a GPU is not read."""
    if hint is None or (isinstance(hint, torch.Tensor) and hint.device.type != "cpu"):
        return most
    return min(int(hint), most)


def _seqlen_q(q: torch.Tensor, lengths: Lengths) -> int:
    if lengths.cu_seqlens_q is None:
        return q.shape[1]
    return _hint(lengths.max_seqlen_q, q.shape[0])


def _seqlen_k(k: torch.Tensor, lengths: Lengths) -> int:
    if lengths.cu_seqlens_k is not None:
        return _hint(lengths.max_seqlen_k, k.shape[0])
    if lengths.page_table is None:
        return k.shape[1]
    capacity = lengths.page_table.shape[1] * k.shape[1]
    # Without seqused_k every slot of the table is a key: a smaller hint would change the result.
    return capacity if lengths.seqused_k is None else _hint(lengths.max_seqlen_k, capacity)


def _window_pair(window_size: object) -> tuple[int | None, int | None]:
    if isinstance(window_size, (tuple, list)):
        pair = cast("Sequence[int | None]", window_size)
        if len(pair) == 2:
            return pair[0], pair[1]
    got = repr(cast(object, window_size))
    refuse("window_size", got, "a pair (left, right) of integers or None")


def check_sink(sink: object, num_heads_q: int, device: torch.device, name: str = "sink") -> None:
    """Refuse what is no logit per query head; `name` is what the caller calls it."""
    if sink is None:
        return
    check_tensor(name, sink)
    tensor = cast(torch.Tensor, sink)
    if tensor.dtype not in _SINK_DTYPES:
        refuse(f"{name}.dtype", tensor.dtype, f"one of {', '.join(map(str, _SINK_DTYPES))}")
    if tuple(tensor.shape) != (num_heads_q,):
        refuse(f"{name}.shape", tuple(tensor.shape), (num_heads_q,), "num_heads of q")
    if tensor.device != device:
        refuse(f"{name}.device", tensor.device, device, "device of q")
    check_last_stride(name, tensor)


def _check_callbacks(options: Options, device: torch.device) -> None:
    for kind, function in (("score_mod", options.score_mod), ("mask_mod", options.mask_mod)):
        if function is None or callback_form(function, kind) != NATIVE:
            continue
        if device.type == "cpu":
            raise UnsupportedProblem(
                f"{kind} is in the native form, of CuTe values, which runs in GPU kernels only; "
                "on the CPU the portable form runs"
            )
    if options.kernel is not None and not isinstance(cast(object, options.kernel), type):
        refuse("kernel", f"of type {type(options.kernel).__name__}", "a kernel class")


def _check_out(
    out: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, requires_grad: bool
) -> None:
    """Check a given output; beyond out being q, k or v itself, overlap is the caller's business."""
    if out is None:
        return
    check_tensor("out", out)
    tensor = cast(torch.Tensor, out)
    expected = (*q.shape[:-1], v.shape[-1])
    if tuple(tensor.shape) != expected:
        refuse("out.shape", tuple(tensor.shape), expected, "shape of q with head_dim of v")
    if tensor.dtype != q.dtype:
        refuse("out.dtype", tensor.dtype, q.dtype, "dtype of q")
    if tensor.device != q.device:
        refuse("out.device", tensor.device, q.device, "device of q")
    check_last_stride("out", tensor)
    for axis in range(tensor.dim() - 1):
        if tensor.shape[axis] > 1 and tensor.stride(axis) == 0:
            refuse(f"out.stride({axis})", 0, "nonzero", "rows of out would overlap")
    if requires_grad or (torch.is_grad_enabled() and tensor.requires_grad):
        raise InvalidProblem(
            "out is given while an argument requires grad, expected no out, or torch.no_grad()"
        )
    if tensor.numel():
        for name, operand in (("q", q), ("k", k), ("v", v)):
            if operand.data_ptr() == tensor.data_ptr():
                refuse("out", f"the memory of {name}", "memory of its own")
