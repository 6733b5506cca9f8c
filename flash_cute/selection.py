"""Which kernel runs a problem on a target, with which tiles: declared against required features.

Every kernel declares what it can do; a problem requires features and has numbers (head dims,
dtype). What no kernel covers is refused with what each one lacks. The same table answers
``is_supported`` and fills the support page of the documentation.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch

from flash_cute import env, splits
from flash_cute.errors import InvalidProblem, UnsupportedProblem, refuse
from flash_cute.features import Feature
from flash_cute.problem import AttentionProblem, Support
from flash_cute.sm80 import config as sm80
from flash_cute.sm90 import config as sm90
from flash_cute.sm100 import config as sm100
from flash_cute.specialization import LONG_SEQLEN, ForwardSpecialization, TileFacts
from flash_cute.subclassing import build, lacked_features
from flash_cute.target import Target
from flash_cute.variant import CallbackKey

Config = sm80.ForwardConfigSm80 | sm90.ConfigSm90 | sm100.ForwardConfigSm100

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
SINK_DTYPE_NAMES = {**DTYPE_NAMES, torch.float32: "fp32"}
PAGE_STEP = 8  # keys that TMA loads at once at least: the row group of the swizzle


@dataclass(frozen=True)
class Declaration:
    """What one kernel class can do, as the support table shows it.

    Units: head dims are multiples of `head_dim_step`, rounded up to one of `tile_head_dims`;
           head_dim_v likewise to one of `tile_head_dims_v` or, without any, to one of those of
           head_dim that is at most as large. `needs` is what calls ask for that the kernel is for;
           others are not its business. Blocks of a block mask are multiples of `block_step`.
           Without `gathers_keys` keys are loaded by 8 and more, without `loads_pieces` they are
           always gathered; without `leaves_sms` every multiprocessor takes part. On
           `archs_by_class` the kernel runs only where it is asked for.
    """

    kernel: str
    module: str
    archs: tuple[str, ...]
    features: frozenset[Feature]
    choose_config: Callable[[ForwardSpecialization, TileFacts], Config]
    archs_by_class: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("bf16", "fp16")
    head_dim_step: int = 8
    tile_head_dims: tuple[int, ...] = sm90.TILE_HEAD_DIMS
    tile_head_dims_v: tuple[int, ...] = ()
    needs: frozenset[Feature] = frozenset()
    block_step: tuple[int, int] = (64, 16)
    gathers_keys: bool = True
    loads_pieces: bool = True
    leaves_sms: bool = True

    def tile_of(self, p: AttentionProblem) -> tuple[int, int]:
        """Round the head dims up to ones that have tiles; a head dim of q that is not there to any.

        Contract: the kernel lacks nothing for the problem.
        """
        tiles_v = self.tile_head_dims_v or self.tile_head_dims
        tile_d = (
            self.tile_head_dims[0] if p.is_only_qv else _round_up(p.head_dim, self.tile_head_dims)
        )
        return tile_d, _round_up(p.head_dim_v, tiles_v)

    def serves(self, problem: AttentionProblem) -> bool:
        """Whether the kernel is for calls of this kind."""
        return self.needs <= problem.required_features()

    @property
    def loaded_class(self) -> type[Any] | None:
        """The declared class; None until its module is imported, which takes the DSL."""
        return getattr(sys.modules.get(self.module), self.kernel, None)

    def is_class(self, kernel: type[Any]) -> bool:
        """Whether `kernel` is the declared class or derived from it."""
        own = self.loaded_class
        return own is not None and issubclass(kernel, own)

    def narrowed(self, kernel: type[Any]) -> Declaration:
        """Return what such a class can do: the same, but for what it says it lacks."""
        features = self.features - lacked_features(kernel)
        return replace(self, kernel=kernel.__name__, features=features)

    def lacks(
        self, problem: AttentionProblem, target: Target, is_asked_for: bool = False
    ) -> list[str]:
        """Say what keeps this kernel from running `problem` on `target`; empty if nothing does."""
        missing: list[str] = []
        if target.arch not in self.archs + (self.archs_by_class if is_asked_for else ()):
            missing.append(f"runs on {', '.join(self.archs)}, not on {target.arch}")
        required = problem.required_features() - APPEND.features
        missing += sorted(feature.value for feature in required - self.features)
        if DTYPE_NAMES.get(problem.dtype) not in self.dtypes:
            missing.append(f"dtype {problem.dtype} (has {', '.join(self.dtypes)})")
        missing += [f"calls without {f.value}" for f in self.needs - problem.required_features()]
        if problem.sm_margin and not self.leaves_sms:
            missing.append(f"sm_margin {problem.sm_margin} (has 0: a CTA for each tile)")
        return missing + self._lacks_pages(problem) + self._lacks_head_dims(problem)

    def _lacks_pages(self, p: AttentionProblem) -> list[str]:
        if self.gathers_keys or p.page_size is None:
            return []
        missing: list[str] = []
        if p.page_size % PAGE_STEP:
            nearest = -(-p.page_size // PAGE_STEP) * PAGE_STEP
            missing.append(
                f"page_size {p.page_size} (has multiples of {PAGE_STEP}; nearest {nearest})"
            )
        if p.has_leftpad:
            missing.append("leftpad in pages")
        return missing

    def _lacks_head_dims(self, p: AttentionProblem) -> list[str]:
        step, tiles = self.head_dim_step, self.tile_head_dims
        dims = {"head_dim": (p.head_dim, tiles[-1])}
        dims["head_dim_v"] = (p.head_dim_v, (self.tile_head_dims_v or tiles)[-1])
        if p.is_only_qv:
            del dims["head_dim"]
        for name, (dim, largest) in dims.items():
            if dim % step or not step <= dim <= largest:
                nearest = min(largest, -(-dim // step) * step)
                return [
                    f"{name} {dim} (has multiples of {step} up to {largest}; nearest {nearest})"
                ]
        if self.tile_head_dims_v or p.is_only_qv:
            return []
        if _round_up(p.head_dim_v, tiles) > _round_up(p.head_dim, tiles):
            return [f"head_dim_v {p.head_dim_v} above head_dim {p.head_dim}"]
        return []


def _round_up(dim: int, tiles: tuple[int, ...]) -> int:
    return next(tile for tile in tiles if tile >= dim)


# What every kernel for Hopper does.
_ON_SM90 = frozenset(
    {
        Feature.CAUSAL,
        Feature.WINDOW,
        Feature.ATTENTION_CHUNK,
        Feature.SOFTCAP,
        Feature.SINK,
        Feature.GQA,
        Feature.LSE,
        Feature.VARLEN,
        Feature.SEQUSED,
        Feature.HEAD_DIM_V,
        Feature.PACK_GQA,
        Feature.PAGED_KV,
        Feature.SPLIT_KV,
        Feature.BATCH_IDX,
        Feature.LEFTPAD,
    }
)

SM90 = Declaration(
    kernel="FlashAttentionForwardSm90",
    module="flash_cute.sm90.fwd",
    archs=("sm_90a",),
    features=_ON_SM90 | {Feature.SCORE_MOD, Feature.MASK_MOD, Feature.BLOCK_SPARSITY},
    choose_config=sm90.choose_config,
)

SM90_MLA = Declaration(
    kernel="FlashAttentionMlaSm90",
    module="flash_cute.sm90.mla",
    archs=("sm_90a",),
    features=_ON_SM90 | {Feature.QV},
    choose_config=sm90.choose_config,
    tile_head_dims=(sm90.MLA_TILE_D,),
    tile_head_dims_v=(sm90.MLA_TILE_DV,),
    needs=frozenset({Feature.QV}),
    gathers_keys=False,
)

# Its tests have passed on an H200: it runs on Hopper too, where another kernel comes first.
SM80 = Declaration(
    kernel="FlashAttentionForwardSm80",
    module="flash_cute.sm80.fwd",
    archs=("sm_80", "sm_86", "sm_87", "sm_89", "sm_120a", "sm_121a"),
    archs_by_class=("sm_90a",),
    features=SM90.features,
    choose_config=sm80.choose_config,
    tile_head_dims=sm80.TILE_HEAD_DIMS,
    loads_pieces=False,
    leaves_sms=False,
)

# Its tests have passed on an H200, which its PTX is rewritten for: tests/sm100_on_hopper.
SM100 = Declaration(
    kernel="FlashAttentionForwardSm100",
    module="flash_cute.sm100.fwd",
    archs=("sm_100a", "sm_103a"),
    features=SM90.features,
    choose_config=sm100.choose_config,
    block_step=(64, 32),
)

ALL_KERNELS = (SM90, SM90_MLA, SM80, SM100)
KERNELS = (SM90, SM90_MLA, SM80, SM100)  # those whose tests have passed on a GPU


def preferring(declaration: Declaration) -> tuple[Declaration, ...]:
    """The table with one kernel first, also where it is else reached by its class alone.

    For tests and benchmarks, which put it in the place of KERNELS.
    """
    everywhere = declaration.archs + declaration.archs_by_class
    first = replace(declaration, archs=everywhere, archs_by_class=())
    return (first, *(d for d in KERNELS if d.kernel != first.kernel))


@dataclass(frozen=True)
class Companion:
    """A kernel that runs before attention, on any architecture, and does what `features` say.

    A problem that requires them is one for every attention kernel, which need not declare them.
    """

    kernel: str
    features: frozenset[Feature]


# The one switch: {Feature.APPEND_KV, Feature.ROTARY} when its tests have passed on a GPU.
APPEND = Companion("CacheAppender", frozenset({Feature.APPEND_KV, Feature.ROTARY}))


@dataclass(frozen=True)
class Variant:
    """What shapes code besides the problem: callbacks, and which lists a block mask has."""

    score_mod: CallbackKey | None = None
    mask_mod: CallbackKey | None = None
    block_mod: CallbackKey | None = None
    has_full_blocks: bool = False
    block_size: tuple[int, int] | None = None
    is_mask_per_head: bool = False


PLAIN = Variant()


@dataclass(frozen=True)
class KernelKey:
    """Everything that shapes a compiled kernel: the cache key, and all that compiling sees."""

    kernel: str
    arch: str
    spec: ForwardSpecialization
    config: Config


@dataclass(frozen=True)
class SubclassKey(KernelKey):
    """The key of a class that a user derived: of that very object, whatever its name.

    A class, its helpers and the globals they use have no text to find them by in another process.
    """

    kernel_class: type[Any]
    is_in_memory_only: ClassVar[bool] = True


@dataclass(frozen=True)
class BuilderKey:
    """Everything that shapes the kernels that build a block mask; any architecture runs them.

    Units: keys_per_lane: keys that a lane looks at between two votes
    """

    arch: str
    mask_mod: CallbackKey
    keys_per_lane: int


@dataclass(frozen=True)
class PlannerKey:
    """Everything that shapes the kernel that counts parts; any architecture runs it.

    Units: lengths: those of scheduling.LENGTHS that there are, in that order
    """

    arch: str
    lengths: tuple[str, ...]


COMBINE_TILE_DIMS = (8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class CombineKey:
    """Everything that shapes the kernel that merges partial results; any architecture runs it.

    Units: dtype, of the parts, and out_dtype as SINK_DTYPE_NAMES has them; tile_d is head_dim
           rounded up to one of COMBINE_TILE_DIMS
    """

    arch: str
    dtype: str
    out_dtype: str
    tile_d: int
    is_packed: bool = False
    has_seqused: bool = False
    has_split_counts: bool = False  # of each sequence


APPEND_PIECE = 8  # elements that a thread moves: 16 bytes


@dataclass(frozen=True)
class AppendKey:
    """Everything that shapes the kernel that appends to a cache; any architecture runs it.

    Units: dtype as DTYPE_NAMES has it; rotary: "interleaved", "halves" or None; is_wide: addresses
           and strides are multiples of 16 bytes
    """

    arch: str
    dtype: str
    rotary: str | None = None
    is_wide: bool = True


def current_target(device: torch.device | int | None = None) -> Target:
    """Return the GPU to compile for: FLASH_CUTE_ARCH, else the device (the current one if None).

    Raises: UnsupportedProblem when neither is there or the GPU is not known.
    """
    arch = env.settings().arch
    if arch is not None:
        return Target.from_arch(arch)
    if not torch.cuda.is_available():
        raise UnsupportedProblem(
            "there is no GPU to compile for; name one with FLASH_CUTE_ARCH=sm_90a, or with --arch "
            "on the command line"
        )
    facts: Any = cast(Any, torch.cuda).get_device_properties(device)
    return Target.from_capability(facts.major, facts.minor, facts.multi_processor_count)


def target_of(problem: AttentionProblem) -> Target:
    """Return the GPU that a problem is for: its own, or the current one of a problem without."""
    return current_target(problem.device if problem.device.type == "cuda" else None)


def is_supported(problem: AttentionProblem, target: Target | None = None) -> Support:
    """Say whether a kernel runs `problem` on `target` (the problem's own GPU if None)."""
    try:
        target = target or target_of(problem)
        key = key_for(problem, target)
    except UnsupportedProblem as error:
        return Support(reason=str(error))
    num_bytes = 0
    if key.spec.is_split:
        num_bytes = splits.workspace_bytes(problem, key.spec, key.config, target)
    return Support(backend=key.kernel, workspace_bytes=num_bytes)


def key_for(
    problem: AttentionProblem,
    target: Target,
    kernel: type[Any] | None = None,
    variant: Variant = PLAIN,
) -> KernelKey:
    """Choose the kernel and its config for `problem` on `target`.

    Args:
        variant: the callbacks and the block mask that the problem says it has; only to compile.
        kernel: the kernel class that must be used, one of the package's own or derived from one;
            None leaves the choice to the table.
    Raises: UnsupportedProblem with what each candidate lacks; InvalidProblem for a derived class
            that asks for a config that cannot be.
    """
    candidates = list(KERNELS)
    if kernel is not None:
        candidates = [d.narrowed(kernel) for d in KERNELS if d.is_class(kernel)]
    for declaration in candidates:
        if not declaration.lacks(problem, target, kernel is not None):
            is_own = any(kernel is d.loaded_class for d in KERNELS)
            return _key(declaration, problem, target, variant, None if is_own else kernel)
    raise UnsupportedProblem(_refusal(candidates, problem, target, kernel))


def kernel_for(key: KernelKey | BuilderKey | CombineKey | PlannerKey | AppendKey) -> Any:
    """Build the kernel object of a key; imports the DSL."""
    if isinstance(key, BuilderKey):
        from flash_cute.device.block_builder import BlockMaskBuilder

        return BlockMaskBuilder(key.mask_mod, key.keys_per_lane)
    if isinstance(key, CombineKey):
        from flash_cute.device.combine import PartsCombiner

        shape = (key.tile_d, key.is_packed, key.has_seqused, key.has_split_counts)
        starts_early = Target.from_arch(key.arch).has_dependent_launch
        return PartsCombiner(key.dtype, key.out_dtype, *shape, starts_early)
    if isinstance(key, PlannerKey):
        from flash_cute.device.split_planner import SplitPlanner

        return SplitPlanner(key.lengths, Target.from_arch(key.arch).has_dependent_launch)
    if isinstance(key, AppendKey):
        from flash_cute.device.append import CacheAppender

        return CacheAppender(key.dtype, key.rotary, key.is_wide)
    if isinstance(key, SubclassKey):
        base = next(d.loaded_class for d in ALL_KERNELS if d.is_class(key.kernel_class))
        return build(key.kernel_class, cast("type[Any]", base), key.spec, key.config)
    module = next(d.module for d in ALL_KERNELS if d.kernel == key.kernel)
    return getattr(importlib.import_module(module), key.kernel)(key.spec, key.config)


def append_key(problem: AttentionProblem, arch: str, is_wide: bool = True) -> AppendKey | None:
    """Return the key of the kernel that runs before attention; None where nothing does.

    Raises: UnsupportedProblem for head dims that the kernel does not have.
    """
    p = problem
    if not p.has_new_keys and not p.has_rotary:
        return None
    for name, dim in (("head_dim", p.head_dim), ("head_dim_v", p.head_dim_v)):
        if dim % APPEND_PIECE:
            raise UnsupportedProblem(
                f"{name} is {dim}, expected a multiple of {APPEND_PIECE}: {APPEND.kernel} moves "
                f"{APPEND_PIECE} elements at a time"
            )
    rotary = None
    if p.has_rotary:
        rotary = "interleaved" if p.is_rotary_interleaved else "halves"
    return AppendKey(arch, DTYPE_NAMES[p.dtype], rotary, is_wide)


def _key(
    declaration: Declaration,
    problem: AttentionProblem,
    target: Target,
    variant: Variant,
    subclass: type[Any] | None,
) -> KernelKey:
    p, right = problem, problem.visible_right
    sink_dtype = SINK_DTYPE_NAMES.get(p.sink_dtype or p.dtype, "fp32") if p.has_sink else None
    tile_d, tile_dv = declaration.tile_of(p)
    spec = ForwardSpecialization(
        dtype=DTYPE_NAMES[p.dtype],
        tile_d=tile_d,
        tile_dv=tile_dv,
        is_causal=right == 0,
        has_lse=p.return_lse,
        negate_scores=p.softmax_scale < 0 and not p.softcap and variant.score_mod is None,
        has_window_left=p.visible_left is not None,
        has_window_right=right is not None and right != 0,
        has_chunk=p.attention_chunk > 0,
        has_softcap=p.softcap > 0,
        sink_dtype=sink_dtype,
        is_packed_q=p.is_packed_q,
        is_packed_k=p.is_packed_k,
        has_seqused_q=p.has_seqused_q,
        has_seqused_k=p.has_seqused_k,
        score_mod=variant.score_mod,
        mask_mod=variant.mask_mod,
        has_block_mask=p.has_block_mask,
        has_full_blocks=variant.has_full_blocks,
        block_mod=variant.block_mod,
        page_rows=_page_rows(declaration, p, sm90.SMALLEST_TILE_N),
        has_batch_idx=p.has_batch_idx,
        has_leftpad=p.has_leftpad,
        has_qv=p.has_qv,
        is_only_qv=p.is_only_qv,
    )
    config = declaration.choose_config(spec, _tile_facts(p, variant, target))
    if subclass is not None:
        config = _asked_config(subclass, spec, config)
    if variant.block_size is not None and not config.divides(variant.block_size, spec):
        raise UnsupportedProblem(
            f"block_mask.BLOCK_SIZE is {variant.block_size}, expected multiples of "
            f"{declaration.block_step}: tiles of {declaration.kernel} must divide it"
        )
    spec = replace(spec, page_rows=_page_rows(declaration, p, config.tile_n))
    if Feature.PACK_GQA in declaration.features:
        spec = replace(spec, pack_heads=_pack_heads(p, config, variant))
    if Feature.SPLIT_KV in declaration.features:
        chosen = splits.choose(p, spec, config, target)
        is_split, is_counted = chosen.is_split, chosen.is_counted
        has_lse = spec.has_lse or is_split
        spec = replace(spec, is_split=is_split, has_split_counts=is_counted, has_lse=has_lse)
    if subclass is not None:
        return SubclassKey(declaration.kernel, target.arch, spec, config, subclass)
    return KernelKey(declaration.kernel, target.arch, spec, config)


def _tile_facts(p: AttentionProblem, variant: Variant, target: Target) -> TileFacts:
    # A packed length is a hint that must not shape code, nor must the room in a page table.
    is_hint = p.is_packed_k or p.page_size is not None
    seqlen_k = LONG_SEQLEN if is_hint else p.seqlen_k
    may_split = p.may_split and not p.has_block_mask
    # Few rows of a padded step over a cache are a decode step, also where its keys stay whole.
    is_step = p.has_seqused_k and not p.is_packed_q and not p.has_block_mask
    few_rows = _rows_of_heads(p) if may_split or is_step else None
    return TileFacts(seqlen_k, few_rows, variant.block_size, target.smem_bytes, may_split)


def _rows_of_heads(p: AttentionProblem) -> int:
    """Rows of a tile that the queries of all heads of one key/value head take, as far as packed."""
    group = 1 if p.pack_gqa is False else p.group
    return group * -(-p.queries // 8) * 8 if group > 1 else p.queries


def _page_rows(declaration: Declaration, p: AttentionProblem, tile_n: int) -> int:
    """Keys of one load, which lie in one page and one tile; 1 where they are gathered."""
    if p.page_size is None:
        return 0
    rows = math.gcd(p.page_size, tile_n)
    return 1 if rows % 8 or p.has_leftpad or not declaration.loads_pieces else rows


def _pack_heads(p: AttentionProblem, config: Config, variant: Variant) -> int:
    """Query heads in a tile: by itself only where one head's queries leave half of it empty.

    With qv, where heads are the fast index of rows, all that a tile has room for.
    """
    if p.group == 1 or p.pack_gqa is False:
        return 1
    if p.has_qv:
        return min(p.group, config.tile_m)
    packs = -(-p.group // (config.tile_m // 8))
    heads = -(-p.group // packs)
    if p.pack_gqa is None:
        is_short = 2 * p.queries <= config.tile_m
        return heads if is_short and not variant.is_mask_per_head else 1
    if variant.is_mask_per_head:
        raise UnsupportedProblem(
            "pack_gqa is True with a block mask that has lists for each head, expected None or "
            "False: heads that share a tile visit the same blocks"
        )
    return heads


def _asked_config(kernel: type[Any], spec: ForwardSpecialization, config: Config) -> Config:
    """The config that a derived class wants instead of the package's choice."""
    asked: object = kernel.config_for(spec, config)
    hook = f"{kernel.__name__}.config_for(...)"
    if not isinstance(asked, type(config)):
        refuse(hook, repr(asked), f"a {type(config).__name__}")
    if broken := asked.check(spec):
        raise InvalidProblem(f"{hook} is {asked}, which cannot run: {'; '.join(broken)}")
    return asked


def _refusal(
    candidates: list[Declaration],
    problem: AttentionProblem,
    target: Target,
    kernel: type[Any] | None,
) -> str:
    if not candidates:
        known = ", ".join(d.kernel for d in KERNELS)
        return f"kernel is {kernel}, expected one of {known}, or a class derived from one"
    concerned = [d for d in candidates if d.serves(problem)] or candidates
    lacks = {d: d.lacks(problem, target, kernel is not None) for d in concerned}
    # A kernel of other GPUs that lacks more than that is no news where there is one of this GPU.
    near = {d: x for d, x in lacks.items() if target.arch in d.archs or len(x) == 1} or lacks
    reasons = [f"{d.kernel} lacks {'; '.join(x)}" for d, x in near.items()]
    advice = _advice(problem, target, near)
    return f"no kernel runs this problem on {target.arch}: {'; '.join(reasons)} ({advice})"


def _advice(p: AttentionProblem, target: Target, candidates: Iterable[Declaration]) -> str:
    """The nearest thing that works."""
    if Feature.GRADIENT in p.required_features():
        return "there is no backward kernel yet: call under torch.no_grad(), or pass q.detach()"
    advice = "the CPU reference does all of it: move the tensors with .cpu()"
    if p.has_qv and not p.is_only_qv:
        dim = p.head_dim + p.head_dim_v
        joined = replace(p, has_qv=False, head_dim=dim)
        does = f"does q with qv, and k with v, concatenated to {dim} channels"
        names = [d.kernel for d in candidates if not d.lacks(joined, target)]
        advice += "".join(f"; {name} {does}" for name in names)
    return advice
