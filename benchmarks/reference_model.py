"""The reference step's model and data: a Llama shape with random weights, float32.

The same weights and the same tokens in every process and on every machine that has the same
torch: both come from a seed. Depth is the only thing that varies.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 32000
HIDDEN_SIZE = 256
NUM_HEADS = 8
NUM_KV_HEADS = 2
FEED_FORWARD_SIZE = 688
DEFAULT_LAYERS = 4


def reference_model(*, num_layers: int = DEFAULT_LAYERS) -> LlamaForCausalLM:
    """The model in training mode; ``num_layers`` decoder layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=FEED_FORWARD_SIZE,
        num_hidden_layers=num_layers,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        max_position_embeddings=1 << 20,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def reference_tokens(seq_len: int) -> torch.Tensor:
    """Token ids ``[1, seq_len]``, int64; the labels of the step are the same tensor."""
    torch.manual_seed(1)
    return torch.randint(0, VOCAB_SIZE, (1, seq_len))


def watched_gradient(model: LlamaForCausalLM) -> torch.Tensor:
    """The gradient whose norm is compared between implementations."""
    grad = model.model.layers[0].mlp.up_proj.weight.grad
    assert grad is not None, "the step left no gradient"
    return grad
