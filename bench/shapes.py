"""Every shape that the benchmarks use, and the arithmetic that a shape implies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

TOKENS = 32 * 1024  # tokens in a batch of the forward grid
HIDDEN = 2048  # heads x head_dim_v of the forward grid
SEQLENS = (1024, 4096, 16384)
HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))  # (head_dim, head_dim_v)
DTYPE_BYTES = {"bfloat16": 2, "float16": 2}
SHORT_DTYPE = {"bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class Shape:
    """One dense attention call: sizes, mask and dtype."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    is_causal: bool
    dtype: str = "bfloat16"

    @property
    def id(self) -> str:
        """A readable name, e.g. ``b8-hq16-hkv16-sq4096-sk4096-d128-bf16-causal``."""
        return (
            f"b{self.batch}-hq{self.num_heads_q}-hkv{self.num_heads_kv}"
            f"-sq{self.seqlen_q}-sk{self.seqlen_k}-d{self.dims.replace('/', 'v')}"
            f"-{SHORT_DTYPE[self.dtype]}-{self.mask}"
        )

    @property
    def dims(self) -> str:
        """``128``, or ``192/128`` where the value heads have another width."""
        if self.head_dim == self.head_dim_v:
            return str(self.head_dim)
        return f"{self.head_dim}/{self.head_dim_v}"

    @property
    def mask(self) -> str:
        return "causal" if self.is_causal else "full"

    @property
    def flops(self) -> float:
        """Operations counted for a call: two matrix products, the causal mask halves them.

        Units: 4 b h sq sk (d + d_v) / 2, the count that FlashAttention's own benchmarks use.
        """
        pairs = self.batch * self.num_heads_q * self.seqlen_q * self.seqlen_k
        full = 4.0 * pairs * (self.head_dim + self.head_dim_v) / 2
        return full / 2 if self.is_causal else full

    @property
    def input_bytes(self) -> int:
        """Bytes of one set of q, k and v."""
        q = self.batch * self.seqlen_q * self.num_heads_q * self.head_dim
        kv = self.batch * self.seqlen_k * self.num_heads_kv * (self.head_dim + self.head_dim_v)
        return (q + kv) * DTYPE_BYTES[self.dtype]


def square(seqlen: int, batch: int, heads: int, dims: tuple[int, int], is_causal: bool) -> Shape:
    """A self-attention shape: as many keys as queries, as many key heads as query heads."""
    return Shape(batch, seqlen, seqlen, heads, heads, dims[0], dims[1], is_causal)


def fwd_grid() -> list[Shape]:
    """The grid of `bench fwd`: 4 head dims x 2 masks x 3 lengths, 32k tokens, 2048 hidden, bf16."""
    return [
        square(seqlen, TOKENS // seqlen, HIDDEN // dims[1], dims, is_causal)
        for dims in HEAD_DIMS
        for is_causal in (False, True)
        for seqlen in SEQLENS
    ]


def fwd_grid_of(arch: str | None) -> list[Shape]:
    """The grid for our kernel of an architecture: of SM80 what FA2, its measure, has too."""
    return [s for s in fwd_grid() if arch != "sm80" or s.head_dim == s.head_dim_v]


def problem_of(shape: Shape, device: Any) -> Any:
    """The AttentionProblem of a shape on a torch device."""
    import torch

    from flash_cute.problem import AttentionProblem

    return AttentionProblem(
        dtype=getattr(torch, shape.dtype),
        device=torch.device(device),
        batch=shape.batch,
        seqlen_q=shape.seqlen_q,
        seqlen_k=shape.seqlen_k,
        num_heads_q=shape.num_heads_q,
        num_heads_kv=shape.num_heads_kv,
        head_dim=shape.head_dim,
        head_dim_v=shape.head_dim_v,
        causal=shape.is_causal,
    )


def specialisations(shapes: Iterable[Shape]) -> list[Shape]:
    """One small shape for each distinct kernel behind `shapes` (head dims, mask and dtype).

    Lengths, batch and head count are launch arguments, so a small problem compiles the same kernel.
    """
    kinds = {(s.head_dim, s.head_dim_v, s.is_causal, s.dtype): s for s in shapes}
    return [
        Shape(1, 256, 256, 2, 2, dim, dim_v, is_causal, dtype)
        for dim, dim_v, is_causal, dtype in kinds
    ]


# `bench variants`: lengths of 8k, and packed sequences of 128 to 8k tokens, 32k in all.
VARIANT_SEQLEN = 8192
VARLEN_LENGTHS = (8192, 4096, 128, 2048, 1024, 6144, 512, 256, 3072, 384, 4480, 2432)
DENSITIES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9)  # of random block masks
MASK_BLOCK = 128


# `bench decode`: (batch, keys of each sequence), (query, key/value heads), keys of a page, and the
# queries of a step that checks guesses.
DECODE_SIZES = ((1, 8192), (1, 131072), (8, 8192), (8, 32768), (64, 4096), (128, 8192))
DECODE_HEADS = ((32, 8), (32, 4))
DECODE_HEAD_DIM = 128
DECODE_PAGES = (16, 64, 128)
GUESSES = (4, 8, 16)
LARGE_BYTES = 10**9  # caches from here on have to come near the bandwidth of a copy


@dataclass(frozen=True)
class Step(Shape):
    """A step of decoding: few queries of each sequence, which has `seqlen_k` keys in a cache.

    page_size: the cache is paged; None where it is dense
    """

    page_size: int | None = None

    @property
    def cache_bytes(self) -> int:
        """Bytes of K and V, each of which is read once."""
        dims = self.head_dim + self.head_dim_v
        keys = self.batch * self.seqlen_k * self.num_heads_kv
        return keys * dims * DTYPE_BYTES[self.dtype]

    @property
    def title(self) -> str:
        """``8 x 32k, 32/4 heads``."""
        heads = f"{self.num_heads_q}/{self.num_heads_kv} heads"
        return f"{self.batch} x {self.seqlen_k // 1024}k, {heads}"


def decode_grid() -> list[Step]:
    """The sizes of `bench decode`, each with one query and a dense cache, bf16."""
    dims = (DECODE_HEAD_DIM, DECODE_HEAD_DIM)
    return [
        Step(batch, 1, keys, *heads, *dims, False)
        for batch, keys in DECODE_SIZES
        for heads in DECODE_HEADS
    ]


def decode_grid_of(arch: str | None) -> list[Step]:
    """The sizes for our kernel of an architecture: of SM80 those of which something is claimed."""
    return [s for s in decode_grid() if arch != "sm80" or s.cache_bytes >= LARGE_BYTES]


def select_steps(steps: Sequence[Step], only: str | None) -> list[Step]:
    """The steps that match a filter such as ``batch=8,keys=32k,hkv=4``, as of `select`.

    Raises: ValueError for a term that is not understood, or when nothing is left.
    """
    if not only:
        return list(steps)
    wanted: dict[str, set[int]] = {"batch": set(), "keys": set(), "hkv": set()}
    for term in (t.strip() for t in only.split(",")):
        key, _, value = term.partition("=")
        if key not in wanted or not value.lower().removesuffix("k").isdigit():
            raise ValueError(f"--only has the term {term!r}, expected batch=N, keys=N, hkv=N")
        wanted[key].add(parse_seqlen(value))
    chosen = [
        step
        for step in steps
        if all(
            not values or found in values
            for values, found in zip(
                wanted.values(), (step.batch, step.seqlen_k, step.num_heads_kv), strict=True
            )
        )
    ]
    if not chosen:
        raise ValueError(f"--only {only} leaves no step of the grid")
    return chosen


def host_shape() -> Shape:
    """The shape of `bench host`: so little device work that the host's time is what is seen."""
    return square(128, 1, 1, (128, 128), False)


def parse_seqlen(text: str) -> int:
    """``4096`` or ``4k``."""
    digits = text.lower()
    return int(digits[:-1]) * 1024 if digits.endswith("k") else int(digits)


def select(shapes: Sequence[Shape], only: str | None) -> list[Shape]:
    """The shapes that match a filter such as ``d=128,causal,seqlen=4k``.

    Terms of one kind are alternatives (``d=64,d=128``), terms of different kinds must all hold.
    Raises: ValueError for a term that is not understood, or when nothing is left.
    """
    if not only:
        return list(shapes)
    dims: set[str] = set()
    masks: set[str] = set()
    lengths: set[int] = set()
    for term in (t.strip() for t in only.split(",")):
        key, _, value = term.partition("=")
        if term in ("causal", "full"):
            masks.add(term)
        elif key == "d" and value:
            dims.add(value)
        elif key in ("seqlen", "s") and value.lower().removesuffix("k").isdigit():
            lengths.add(parse_seqlen(value))
        else:
            raise ValueError(f"--only has the term {term!r}, expected d=N, seqlen=N, causal, full")
    chosen = [
        s
        for s in shapes
        if (not dims or s.dims in dims or str(s.head_dim) in dims)
        and (not masks or s.mask in masks)
        and (not lengths or s.seqlen_q in lengths)
    ]
    if not chosen:
        raise ValueError(f"--only {only} leaves no shape of the grid")
    return chosen
