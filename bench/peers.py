"""The contestants of `bench fwd`: flash_cute and the libraries it is measured against.

Facts of each library only, taken from its documentation and signatures; each is called as its users
call it. A peer that cannot run says why (`missing`, `refuses`), and the table repeats it.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from .machine import version_of
from .report import EVENTS
from .shapes import Shape
from .timing import Contestant, Sample, blocked_slope, cuda_events

Inputs = Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]  # sets of (q, k, v), bshd


class Peer:
    """One library. Subclasses say what it needs, what it refuses and how it is called."""

    name: str
    label: str
    package: str
    timed_by = EVENTS
    stopwatch: Callable[[Contestant, int], Sample] = staticmethod(cuda_events)

    def version(self) -> str | None:
        return version_of(self.package)

    def missing(self) -> str | None:
        """Why the library cannot be used here; None when it can. Imports it."""
        raise NotImplementedError

    def refuses(self, shape: Shape) -> str | None:
        """Why the library does not do a shape; None when it does."""
        return None

    def call(self, shape: Shape, sets: Inputs) -> Callable[[int], Any]:
        """The function that enqueues one call on input set `i % len(sets)`."""
        raise NotImplementedError

    def scope(self) -> AbstractContextManager[object]:
        return nullcontext()

    def wait(self, result: Any) -> Any:
        return result

    def output(self, result: Any) -> torch.Tensor:
        """A result as a torch tensor (batch, seqlen_q, heads, head_dim_v), for the gate."""
        return result

    def contestant(self, shape: Shape, sets: Inputs) -> Contestant:
        return Contestant(
            self.name, self.call(shape, sets), self.stopwatch, scope=self.scope, wait=self.wait
        )


def import_error(*modules: str) -> str | None:
    """Why one of `modules` cannot be imported, in one line; None when all can."""
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # a broken installation raises anything, OSError included
            return f"import {module}: {one_line(error)}"
    return None


def one_line(error: BaseException) -> str:
    """An error's type and the first line of its text, cut to what fits under a table."""
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"[:200]


class FlashCute(Peer):
    """The package under test."""

    name, label, package = "flash_cute", "flash_cute", "flash-cute"

    def missing(self) -> str | None:
        return import_error("flash_cute")

    def call(self, shape: Shape, sets: Inputs) -> Callable[[int], Any]:
        from flash_cute import flash_attn_func

        def enqueue(i: int) -> Any:
            q, k, v = sets[i % len(sets)]
            return flash_attn_func(q, k, v, causal=shape.is_causal)

        return enqueue


class FlashAttention4(Peer):
    """FA4: the CuTe-DSL FlashAttention (`flash-attn-4`); returns (out, lse)."""

    name, label, package = "fa4", "FA4", "flash-attn-4"

    def missing(self) -> str | None:
        return import_error("flash_attn.cute.interface")

    def call(self, shape: Shape, sets: Inputs) -> Callable[[int], Any]:
        attend = importlib.import_module("flash_attn.cute.interface").flash_attn_func

        def enqueue(i: int) -> Any:
            q, k, v = sets[i % len(sets)]
            return attend(q, k, v, causal=shape.is_causal)

        return enqueue

    def output(self, result: Any) -> torch.Tensor:
        return result[0] if isinstance(result, tuple) else result


class Sdpa(Peer):
    """One backend of torch.nn.functional.scaled_dot_product_attention, on transposed views."""

    package = "torch"
    backend: str

    def missing(self) -> str | None:
        from torch.nn.attention import SDPBackend

        if not hasattr(SDPBackend, self.backend):
            return f"torch {torch.__version__} has no SDPBackend.{self.backend}"
        return None if torch.cuda.is_available() else "torch sees no GPU"

    def refuses(self, shape: Shape) -> str | None:
        if shape.is_causal and shape.seqlen_q != shape.seqlen_k:
            return "its causal mask is aligned top-left, ours bottom-right"
        return None

    def call(self, shape: Shape, sets: Inputs) -> Callable[[int], Any]:
        views = [tuple(t.transpose(1, 2) for t in one) for one in sets]  # (b, h, s, d), no copy
        is_gqa = shape.num_heads_q != shape.num_heads_kv
        attend = torch.nn.functional.scaled_dot_product_attention

        def enqueue(i: int) -> Any:
            q, k, v = views[i % len(views)]
            return attend(q, k, v, is_causal=shape.is_causal, enable_gqa=is_gqa)

        return enqueue

    def scope(self) -> AbstractContextManager[object]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return sdpa_kernel([getattr(SDPBackend, self.backend)])

    def output(self, result: Any) -> torch.Tensor:
        return result.transpose(1, 2)


class Cudnn(Sdpa):
    """cuDNN's attention through torch SDPA."""

    name, label, backend = "cudnn", "cuDNN", "CUDNN_ATTENTION"

    def version(self) -> str | None:
        found = torch.backends.cudnn.version() if torch.cuda.is_available() else None
        return f"{found} (torch {torch.__version__})"


class FlashAttention2(Sdpa):
    """FA2 through torch SDPA."""

    name, label, backend = "fa2", "FA2", "FLASH_ATTENTION"

    def refuses(self, shape: Shape) -> str | None:
        if shape.head_dim != shape.head_dim_v:
            return f"one width for keys and values, not {shape.dims}"
        return super().refuses(shape)


class FlashAttention3(Peer):
    """FA3: Hopper's CUDA kernels as a JAX FFI library, on JAX's own stream.

    Its time is the slope of the host's clock over back-to-back calls of one jitted function (see
    timing.blocked_slope); the inputs are torch's memory through DLPack.
    """

    name, label, package = "fa3", "FA3", "dew-flash-attn-cu13"
    timed_by = "slope of the host's clock over back-to-back jitted calls (JAX has its own stream)"
    stopwatch: Callable[[Contestant, int], Sample] = staticmethod(blocked_slope)

    def missing(self) -> str | None:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch has the memory
        problem = load_cudart() or import_error("jax", "jax.dlpack", "dew_flash_attn")
        if problem is not None:
            return problem
        try:
            devices = importlib.import_module("jax").devices("gpu")
        except Exception as error:
            return f"jax sees no GPU: {one_line(error)}"
        built_for = importlib.import_module("dew_flash_attn").ARCHITECTURES
        capability = f"sm{str(devices[0].compute_capability).replace('.', '')}"
        return None if capability in built_for else f"built for {built_for}, not {capability}"

    def refuses(self, shape: Shape) -> str | None:
        if shape.head_dim != shape.head_dim_v:
            return f"one width for keys and values, not {shape.dims}"
        return None

    def call(self, shape: Shape, sets: Inputs) -> Callable[[int], Any]:
        jax = importlib.import_module("jax")
        flash_mha = importlib.import_module("dew_flash_attn").flash_mha
        attend = jax.jit(partial(flash_mha, is_causal=shape.is_causal))
        torch.cuda.synchronize()  # JAX's stream does not wait for torch's
        arrays = [tuple(jax.dlpack.from_dlpack(t.contiguous()) for t in one) for one in sets]

        def enqueue(i: int) -> Any:
            return attend(*arrays[i % len(arrays)])

        return enqueue

    def wait(self, result: Any) -> Any:
        return importlib.import_module("jax").block_until_ready(result)

    def output(self, result: Any) -> torch.Tensor:
        return torch.from_dlpack(self.wait(result))


class FlexAttention(Peer):
    """torch's flex_attention, compiled (Triton), on transposed views."""

    name, label, package = "flex", "FlexAttention", "torch"

    def missing(self) -> str | None:
        if not torch.cuda.is_available():
            return "torch sees no GPU"
        return import_error("triton", "torch.nn.attention.flex_attention")

    def call(self, shape: Shape, sets: Inputs) -> Callable[[int], Any]:
        return self.compiled(shape, sets, None)

    def compiled(
        self, shape: Shape, sets: Inputs, score_mod: Callable[..., Any] | None
    ) -> Callable[[int], Any]:
        """Its call with a score_mod, under the causal mask of the shape if it has one."""
        flex = importlib.import_module("torch.nn.attention.flex_attention")
        attend = torch.compile(flex.flex_attention, dynamic=False)
        views = [tuple(t.transpose(1, 2) for t in one) for one in sets]  # (b, h, s, d), no copy
        options = {"enable_gqa": shape.num_heads_q != shape.num_heads_kv, "score_mod": score_mod}
        if shape.is_causal:
            shift = shape.seqlen_k - shape.seqlen_q
            sizes = (None, None, shape.seqlen_q, shape.seqlen_k)
            mask = flex.create_block_mask(
                lambda b, h, q_idx, kv_idx: q_idx + shift >= kv_idx,
                *sizes,
                device=sets[0][0].device,
            )
            options["block_mask"] = mask

        def enqueue(i: int) -> Any:
            return attend(*views[i % len(views)], **options)

        return enqueue

    def output(self, result: Any) -> torch.Tensor:
        return result.transpose(1, 2)


@cache
def load_cudart() -> str | None:
    """Load libcudart.so.13 so that later libraries find its symbols; why that failed, else None."""
    candidates = ["libcudart.so.13"]
    packages = Path(torch.__file__).resolve().parent.parent / "nvidia"
    candidates += [str(path) for path in sorted(packages.glob("**/libcudart.so.13"))]
    candidates.append("/usr/local/cuda/lib64/libcudart.so.13")
    problem = ""
    for candidate in candidates:
        try:
            ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            problem = problem or one_line(error)
        else:
            return None
    return f"libcudart.so.13 cannot be loaded: {problem}"


OURS = FlashCute()
ARCHS = ("sm80",)  # whose kernels can be measured on other GPUs than their own


def prefer(arch: str | None) -> None:
    """Let all calls of this process run on the kernel of an architecture, compiled for the GPU."""
    from flash_cute import selection

    if arch == "sm80":
        selection.KERNELS = selection.preferring(selection.SM80)


def kernels_of(problems: Iterable[Any]) -> list[str]:
    """The kernels of ours that run problems, or why none does."""
    from flash_cute import is_supported

    answers = [is_supported(problem) for problem in problems]
    return list(dict.fromkeys(one.backend or one.reason for one in answers))


PEERS: tuple[Peer, ...] = (FlashAttention4(), Cudnn(), FlashAttention3(), FlashAttention2())
EXTRA: tuple[Peer, ...] = (FlexAttention(),)  # on request only: it compiles for every shape


def choose(names: str | None) -> list[Peer]:
    """The peers named in a comma-separated list; the usual ones without; none for ``none``.

    Raises: ValueError for a name that is no peer.
    """
    if names is None:
        return list(PEERS)
    wanted = [n.strip().lower() for n in names.split(",") if n.strip() and n.strip() != "none"]
    known = {p.name: p for p in (*PEERS, *EXTRA)}
    for name in wanted:
        if name not in known:
            raise ValueError(f"--peers names {name!r}, expected some of {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(wanted)]
