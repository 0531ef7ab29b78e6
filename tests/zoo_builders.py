"""What an entry of the zoo is, and how one is added.

Sizes are those of ``BASE``, as far as the architecture's configuration has the field, and
every dropout is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
import zoo_inputs as inputs_of
from torch import Tensor, nn
from transformers import AutoConfig
from zoo_inputs import IMAGE, MELS, SOURCE, VOCAB

BASE = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    embedding_size=32,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
    use_cache=False,
    num_experts=4,
    num_local_experts=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    shared_expert_intermediate_size=24,
    sliding_window=6,
    encoder_layers=2,
    decoder_layers=2,
    num_decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    ffn_dim=48,
    image_size=IMAGE,
    patch_size=8,
    num_mel_bins=MELS,
    max_source_positions=SOURCE,
)
FLOAT64_ONLY, CASTS = 1e-9, 2e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One row of the zoo.

    ``lengths`` are the sequence lengths of the calls, in order; ``tolerance`` is for loss
    and gradients, relative (see ``fpdt_compile.testing``): 2e-6 in float64, because
    transformers casts to float32 inside, 1e-9 where nothing does.
    """

    name: str
    family: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int, int], dict[str, Any]]
    loss_of: Callable[[Any], Tensor]
    dtype: torch.dtype
    tolerance: float
    lengths: tuple[int, ...]

    def call(self, length: int) -> dict[str, Any]:
        """Arguments of one training call at batch 2; floating values in ``dtype``."""
        return {
            name: value.to(self.dtype)
            if isinstance(value, Tensor) and value.is_floating_point()
            else value
            for name, value in self.inputs(2, length).items()
        }

    def model(self) -> nn.Module:
        """In train mode; parameters moved a little, so that none is zero or one."""
        torch.manual_seed(0)
        model = self.build().to(self.dtype).train()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.05 * noise.to(self.dtype))
        return model


def without_dropout(config: transformers.PreTrainedConfig) -> None:
    """Set every dropout probability of a configuration and its parts to 0."""
    for name, value in vars(config).items():
        if isinstance(value, transformers.PreTrainedConfig):
            without_dropout(value)
        elif isinstance(value, float) and ("drop" in name or "jitter" in name):
            setattr(config, name, 0.0)


def configured(model_type: str, changes: Mapping[str, Any]) -> Any:
    """The configuration of an architecture with the sizes of ``BASE`` that it knows."""
    default = AutoConfig.for_model(model_type)
    known = {*default.to_dict(), *(default.attribute_map or {})}
    sizes = {name: value for name, value in BASE.items() if name in known}
    config = AutoConfig.for_model(model_type, **{**sizes, **changes})
    without_dropout(config)
    return config


def build(
    model_type: str, head: str, attention: str, prepare: str, changes: dict
) -> nn.Module:
    config = configured(model_type, changes)
    maker = getattr(transformers, head)
    make = maker.from_config if head.startswith("Auto") else maker._from_config
    model = make(config, attn_implementation=attention)
    if prepare:
        getattr(model, prepare)()
    return model


ENTRIES: dict[str, Entry] = {}


def add(
    name: str,
    family: str,
    head: str,
    inputs: Callable[[int, int], dict[str, Any]],
    *,
    model: str | None = None,
    prepare: str = "",
    attention: tuple[str, ...] = ("sdpa",),
    dtype: torch.dtype = torch.float64,
    tolerance: float | None = None,
    lengths: tuple[int, ...] = (27, 18),
    loss_of: Callable[[Any], Tensor] = lambda output: output.loss,
    **changes: Any,
) -> None:
    """Add an architecture of transformers; the first of ``attention`` has the plain name.

    ``prepare`` names a method of the model to call first.
    """
    for kind in attention:
        label = name if kind == attention[0] else f"{name}/{kind}"
        ENTRIES[label] = Entry(
            name=label,
            family=family,
            build=partial(build, model or name, head, kind, prepare, changes),
            inputs=inputs,
            loss_of=loss_of,
            dtype=dtype,
            tolerance=tolerance or (CASTS if dtype is torch.float64 else 1e-4),
            lengths=lengths,
        )


def plain(
    name: str,
    make: Callable[[], nn.Module],
    inputs: Callable[[int, int], dict[str, Any]] = inputs_of.hidden,
) -> None:
    ENTRIES[name] = Entry(
        name=name,
        family="plain torch",
        build=make,
        inputs=inputs,
        loss_of=lambda loss: loss,
        dtype=torch.float64,
        tolerance=FLOAT64_ONLY,
        lengths=(27, 18),
    )
