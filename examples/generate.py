"""Generate: a small transformer writes tokens with prefill, a paged cache and a CUDA graph.

Its weights are trained here, in seconds, to repeat what came `PERIOD` tokens before. Prompts of
different lengths are prefilled in one packed call; then each step writes a token of each sequence:
`flash_attn_with_kvcache` rotates queries and keys, appends to the pages, and attends. On a GPU the
step is a CUDA graph, replayed for every token. Tokens and logits are compared with full attention
over the whole text, without a cache, in float64.

    python examples/generate.py
"""

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from flash_cute import __version__, flash_attn_with_kvcache

VOCAB, PERIOD, WIDTH, LAYERS, HEADS, HEADS_KV, HEAD_DIM = 64, 7, 128, 2, 4, 2, 64
DTYPE, PAGE, CONTEXT, PROMPTS, NEW_TOKENS = torch.bfloat16, 16, 80, (9, 30, 17, 44), 32
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

Attend = Callable[..., Any]  # (layer, q, k, v) -> out, all (..., heads, HEAD_DIM)


class Transformer(nn.Module):
    """Pre-norm blocks on tokens of any shape; `attend` mixes the tokens of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (WIDTH, (HEADS + 2 * HEADS_KV) * HEAD_DIM), (HEADS * HEAD_DIM, WIDTH)
        sizes += (WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH)
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers: Any = nn.ModuleList(
            nn.ModuleList(nn.Linear(*size) for size in sizes) for _ in range(LAYERS)
        )

    def forward(self, tokens: torch.Tensor, attend: Attend) -> torch.Tensor:
        x = self.embed(tokens)
        for number, (qkv, out, up, down) in enumerate(self.layers):
            heads = qkv(nn.functional.layer_norm(x, (WIDTH,))).unflatten(-1, (-1, HEAD_DIM))
            mixed = attend(number, *heads.split((HEADS, HEADS_KV, HEADS_KV), dim=-2))
            x = x + out(mixed.flatten(-2))
            x = x + down(nn.functional.gelu(up(nn.functional.layer_norm(x, (WIDTH,)))))
        return self.head(nn.functional.layer_norm(x, (WIDTH,)))


def rotary_tables(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of each position and pair of channels, (CONTEXT, HEAD_DIM / 2)."""
    frequencies = 100.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.arange(CONTEXT)[:, None] * frequencies
    return angles.cos().to(DTYPE).to(like), angles.sin().to(DTYPE).to(like)


def full_attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention by definition: rotate, all scores, softmax; (batch, seqlen, heads, dim)."""
    cos, sin = (table[: q.shape[1], None] for table in rotary_tables(q))
    halves = (q.chunk(2, -1), k.chunk(2, -1))
    q, k = (torch.cat([a * cos - b * sin, b * cos + a * sin], -1) for a, b in halves)
    k, v = (x.repeat_interleave(HEADS // HEADS_KV, dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * HEAD_DIM**-0.5
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def train(steps: int = 120) -> Transformer:
    """Teach a model to copy the token `PERIOD` places back."""
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        text = torch.randint(VOCAB, (4, PERIOD)).repeat(1, CONTEXT // PERIOD)
        logits = model(text[:, :-1], full_attention)[:, PERIOD:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), text[:, PERIOD + 1 :].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"trained {steps} steps, loss {loss.item():.4f}")
    return model.requires_grad_(False)


def generate(model: Transformer, prompts: list[torch.Tensor]) -> torch.Tensor:
    """Write the likeliest token, NEW_TOKENS times; the logits (batch, NEW_TOKENS, VOCAB)."""
    batch, columns = len(prompts), CONTEXT // PAGE
    shape = (2, LAYERS, batch * columns, PAGE, HEADS_KV, HEAD_DIM)
    keys, values = torch.full(shape, float("nan"), dtype=DTYPE, device=DEVICE)
    table = torch.randperm(batch * columns).view(batch, columns)  # pages as after long use
    lengths = torch.zeros(batch, dtype=torch.int32, device=DEVICE)
    options: dict[str, Any] = {"cache_seqlens": lengths, "page_table": table.int().to(DEVICE)}
    options |= dict(zip(("rotary_cos", "rotary_sin"), rotary_tables(keys), strict=True))
    options |= {"rotary_interleaved": False, "causal": True}

    def attend(layer: int, q: Any, k: Any, v: Any, **packing: Any) -> Any:
        return flash_attn_with_kvcache(q, keys[layer], values[layer], k, v, **options, **packing)

    counts = torch.tensor([0, *map(len, prompts)], dtype=torch.int32, device=DEVICE)
    starts = counts.cumsum(0).to(torch.int32)
    packing = {"cu_seqlens_q": starts, "cu_seqlens_k_new": starts, "max_seqlen_q": max(PROMPTS)}
    logits = model(torch.cat(prompts), lambda *layer: attend(*layer, **packing))[starts[1:] - 1]
    lengths += counts[1:]

    def step() -> None:  # all on the device and in place, so that a graph can replay it
        logits.copy_(model(logits.argmax(-1, keepdim=True), attend)[:, -1])
        lengths.add_(1)

    written, run = [logits.clone()], step
    while len(written) < NEW_TOKENS:
        if DEVICE == "cuda" and len(written) == 2:  # the first step has compiled what it needs
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            run = graph.replay
        run()
        written.append(logits.clone())
    return torch.stack(written, 1)


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small
    print(f"flash_cute {__version__}, {DEVICE}")
    model = train().to(DEVICE, DTYPE)
    exact_model = copy.deepcopy(model).to("cpu", torch.float64)
    texts = torch.randint(VOCAB, (len(PROMPTS), PERIOD)).repeat(1, CONTEXT // PERIOD)
    prompts = [text[:n].to(DEVICE) for text, n in zip(texts, PROMPTS, strict=True)]
    rows: list[torch.Tensor] = []
    for prompt, logits in zip(prompts, generate(model, prompts), strict=True):
        tokens, begin = logits.argmax(-1).cpu(), len(prompt) - 1
        text = torch.cat([prompt.cpu(), tokens[:-1]])[None]
        exact = exact_model(text, full_attention)[0, begin:]
        plain = model(text.to(DEVICE), full_attention)[0, begin:].cpu()
        print(f"  {len(prompt)} tokens, then {tokens[: PERIOD + 3].tolist()} ...")
        if not torch.equal(tokens, exact.argmax(-1)):
            sys.exit("full attention writes other tokens")
        rows.append(torch.stack([logits.cpu() - exact, plain - exact, exact]))
    error, yardstick, largest = torch.cat(rows, 1).abs().amax((1, 2)).tolist()
    allowed = 2 * yardstick + torch.finfo(DTYPE).eps * largest
    print(f"tokens are those of full attention; logits: error {error:.1e}, {allowed:.1e} allowed")
    if not error <= allowed:
        sys.exit("the logits are wrong")
    if DEVICE == "cpu":
        why = "that needs a GPU of compute capability 8.x, 9.0 or 12.x"
        print(f"The CPU reference ran. No kernel was executed: {why}.")


if __name__ == "__main__":
    main()
