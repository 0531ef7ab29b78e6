"""Inputs of one training call, for the architectures of ``zoo_entries``.

Each function takes (batch size, sequence length) and gives the keyword arguments of the
call. Numbers are random and the same at every call. Models with a fixed token count
(images, audio) ignore the length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

VOCAB = 97
IMAGE = 32  # pixels a side; patches of 8 give 16 tokens and the class token
SOURCE = 20  # audio tokens of a whisper encoder, two mel frames each
MELS = 8
CLASSES = 3

Inputs = dict[str, Any]


def random_ids(batch: int, length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, VOCAB, (batch, length), generator=generator)


def random_values(*shape: int, seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def padding(batch: int, length: int) -> Tensor:
    """Attention mask whose last row ends early."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[-1, length - length // 3 :] = 0
    return mask


def causal(batch: int, length: int) -> Inputs:
    """Next token prediction; the first two tokens are a prompt without a loss."""
    ids = random_ids(batch, length, seed=0)
    labels = ids.clone()
    labels[:, :2] = -100
    return {"input_ids": ids, "labels": labels}


def causal_padded(batch: int, length: int) -> Inputs:
    """Next token prediction with padding on the right."""
    inputs = causal(batch, length)
    mask = padding(batch, length)
    inputs["labels"] = inputs["labels"].masked_fill(mask == 0, -100)
    return {**inputs, "attention_mask": mask}


def masked(batch: int, length: int) -> Inputs:
    """Masked language modelling: a loss at every fourth token, padding on the right."""
    ids, mask = random_ids(batch, length, seed=0), padding(batch, length)
    labels = torch.where(torch.arange(length) % 4 == 1, ids, -100)
    labels = labels.masked_fill(mask == 0, -100)
    ids = ids.masked_fill((labels >= 0), 4)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def classified(batch: int, length: int) -> Inputs:
    """One class for each sequence."""
    ids = random_ids(batch, length, seed=0)
    labels = torch.arange(batch) % CLASSES
    mask = padding(batch, length)
    ids = ids.masked_fill(
        mask == 0, 0
    )  # decoders look for the last token that is no pad
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def classified_tokens(batch: int, length: int) -> Inputs:
    inputs = masked(batch, length)
    labels = inputs["input_ids"] % CLASSES
    return {**inputs, "labels": labels.masked_fill(inputs["attention_mask"] == 0, -100)}


def answered(batch: int, length: int) -> Inputs:
    """Start and end of the answer to a question: a softmax over the tokens."""
    inputs = masked(batch, length)
    del inputs["labels"]
    start = torch.arange(batch) + 2
    return {**inputs, "start_positions": start, "end_positions": start + 3}


def translated(batch: int, length: int) -> Inputs:
    """A padded source, and a target of another length."""
    target = random_ids(batch, max(2, 2 * length // 3), seed=1)
    target[-1, -2:] = -100
    return {
        "input_ids": random_ids(batch, length, seed=0),
        "attention_mask": padding(batch, length),
        "labels": target,
    }


def image(batch: int, length: int) -> Inputs:
    return {
        "pixel_values": random_values(batch, 3, IMAGE, IMAGE),
        "labels": torch.arange(batch) % CLASSES,
    }


def image_only(batch: int, length: int) -> Inputs:
    return {"pixel_values": random_values(batch, 3, IMAGE, IMAGE)}


def image_and_text(batch: int, length: int) -> Inputs:
    """Pairs for a contrastive loss; the text ends with the largest token id."""
    ids = random_ids(batch, length, seed=0)
    ids[:, -1] = VOCAB - 1
    pixels = random_values(batch, 3, IMAGE, IMAGE)
    return {"input_ids": ids, "pixel_values": pixels, "return_loss": True}


def mel_classified(batch: int, length: int) -> Inputs:
    return {
        "input_features": random_values(batch, MELS, 2 * SOURCE),
        "labels": torch.arange(batch) % CLASSES,
    }


def mel_transcribed(batch: int, length: int) -> Inputs:
    return {
        "input_features": random_values(batch, MELS, 2 * SOURCE),
        "labels": random_ids(batch, length, seed=1),
    }


def wave_transcribed(batch: int, length: int) -> Inputs:
    """Raw audio, 4 samples a token after the convolutions, and its text for a CTC loss."""
    return {
        "input_values": random_values(batch, 4 * length + 6),
        "labels": random_ids(batch, 5, seed=1) % 30,
    }


def wave_classified(batch: int, length: int) -> Inputs:
    return {
        "input_values": random_values(batch, 4 * length + 6),
        "labels": torch.arange(batch) % CLASSES,
    }


def hidden(batch: int, length: int) -> Inputs:
    """Vectors in, for layers of plain torch."""
    return {"x": random_values(batch, length, 32)}


def hidden_pair(batch: int, length: int) -> Inputs:
    return {
        "x": random_values(batch, length, 32),
        "memory": random_values(batch, length - 6, 32, seed=4),
    }


def tokens(batch: int, length: int) -> Inputs:
    ids = random_ids(batch, length, seed=0)
    return {"ids": ids, "labels": ids}
