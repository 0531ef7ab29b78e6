"""Tiny random models for the tests: transformers configs, and a transformer written in
plain torch."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from fpdt_compile.runtime.autograd import StepRunner

VOCAB = 97
BASE = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    use_cache=False,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
EXTRA = {
    "mistral_window": dict(model="mistral", sliding_window=6),
    "mistral": dict(sliding_window=None),
    "gemma": dict(head_dim=8),
    "gemma3_text": dict(
        head_dim=8,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "qwen3": dict(head_dim=8),
    "glm4": dict(head_dim=8),
    "smollm3": dict(no_rope_layers=[1, 0]),
    "opt": dict(ffn_dim=48, word_embed_proj_dim=32, dropout=0.0),
    "falcon": dict(num_kv_heads=2, new_decoder_architecture=True),
}
DECODERS = [
    "llama",
    "mistral_window",
    "qwen3",
    "gemma3_text",
    "gpt_neox",
    "cohere",
    "opt",
    "falcon",
]


def decoder(
    name: str, dtype: torch.dtype = torch.float64, **changes: object
) -> nn.Module:
    """A tiny decoder of an architecture, in train mode; buffers keep their own dtype."""
    torch.manual_seed(0)
    extra = dict(EXTRA.get(name, {}))
    model = extra.pop("model", name)
    config = AutoConfig.for_model(model, **{**BASE, **extra, **changes})
    return AutoModelForCausalLM.from_config(config).to(dtype).train()


def pair(name: str, dtype: torch.dtype = torch.float64, **changes: object):
    """(model to optimize, untouched copy)."""
    model = decoder(name, dtype, **changes)
    return model, copy.deepcopy(model)


def batch(batch_size: int, length: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (batch_size, length), generator=generator)
    return {"input_ids": ids, "labels": ids}


class PlainBlock(nn.Module):
    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, size = heads, groups, width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, (heads + 2 * groups) * size)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch_size, length, width = x.shape
        size = width // self.heads
        qkv = self.qkv(self.norm1(x)).view(batch_size, length, -1, size).transpose(1, 2)
        q, k, v = qkv.split([self.heads, self.groups, self.groups], dim=1)
        a = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.groups != self.heads
        )
        x = x + self.out(a.transpose(1, 2).reshape(batch_size, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class PlainTransformer(nn.Module):
    """Nobody's class: no float32 casts, so float64 comparisons are exact to rounding."""

    def __init__(
        self,
        width: int = 32,
        heads: int = 4,
        groups: int = 2,
        layers: int = 2,
        vocab: int = VOCAB,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(
            PlainBlock(width, heads, groups) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.vocab_head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.vocab_head(self.norm(x))
        if labels is None:
            return logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def plain_pair(dtype: torch.dtype = torch.float64, **sizes: int):
    torch.manual_seed(0)
    model = PlainTransformer(**sizes).to(dtype).train()
    return model, copy.deepcopy(model)


@contextlib.contextmanager
def watching(mode: TorchDispatchMode) -> Iterator[TorchDispatchMode]:
    """``mode`` sees the operators of the steps in here, forward and backward; Dynamo does not see
    ``mode``, for which it would trace the model again."""
    run = StepRunner.__call__

    def watched(self: StepRunner, *inputs: object) -> list:
        with mode:
            return run(self, *inputs)

    backward = Tensor.backward

    def watched_backward(self: Tensor, *args: object, **kwargs: object) -> None:
        with mode:
            backward(self, *args, **kwargs)

    StepRunner.__call__, Tensor.backward = watched, watched_backward
    try:
        yield mode
    finally:
        StepRunner.__call__, Tensor.backward = run, backward
