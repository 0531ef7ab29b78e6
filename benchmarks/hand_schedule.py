"""One training step of the reference model with the FPDT schedule written by hand.

What a compiler has to reach: the loss and gradients of the plain step, at a small multiple of
this time. It knows the model, runs on one CPU process, keeps everything in RAM and does nothing
ahead of time.

In: the reference Llama (any depth) and tokens ``[1, S]``, S a multiple of the chunk length.
Out: the loss as a float, gradients accumulated in ``.grad``.

The schedule (shapes: c chunk length, d width, H query heads, G key/value heads, D head size):

1. Forward, block by block and chunk by chunk: pre (norm, projections, rotary), attention of the
   query chunk to every key chunk up to its own with online softmax, post (output projection,
   feed-forward). Saved: the residual stream and, unless ``save="hidden"``, attention output and
   logsumexp.
2. Head and loss in pieces, forward and backward at once: logits exist for one piece only.
3. Backward, block by block: pre for q, k, v again; post backward for every chunk; then tiles
   with queries outermost from the last chunk, so that dq, dk, dv of chunk i are complete
   together and go through pre's backward at once.

    python hand_schedule.py --seq 16384 --chunk-len 2048 --save attention
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from reference_model import (
    DEFAULT_LAYERS,
    reference_model,
    reference_tokens,
    watched_gradient,
)
from torch import Tensor, nn
from transformers import LlamaForCausalLM

IGNORED_LABEL = -100
DEFAULT_CHUNK_LEN = 2048
HEAD_CHUNK_LEN = 512


@dataclass(kw_only=True, slots=True)
class BlockSaved:
    """What the forward of one block leaves for its backward, per chunk."""

    out: list[Tensor] = field(default_factory=list)  # [1, H, c, D]
    lse: list[Tensor] = field(default_factory=list)  # [1, H, c]


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def accumulate(parameters: Sequence[nn.Parameter], grads: Sequence[Tensor]) -> None:
    for parameter, grad in zip(parameters, grads, strict=True):
        if parameter.grad is None:
            parameter.grad = grad
        else:
            parameter.grad.add_(grad)


def attend(
    q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Causal attention of the last chunk's queries; returns out and logsumexp, merged."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    last = len(keys) - 1
    out, lse = flash(q, keys[0], values[0], 0.0, last == 0)
    for j in range(1, last + 1):
        tile_out, tile_lse = flash(q, keys[j], values[j], 0.0, j == last)
        merged = torch.logaddexp(lse, tile_lse)
        out = out * torch.exp(lse - merged).unsqueeze(-1)
        out.add_(tile_out * torch.exp(tile_lse - merged).unsqueeze(-1))
        lse = merged
    return out, lse


class HandSchedule:
    """The step of one model; call it with token ids to accumulate gradients.

    ``save`` is ``"attention"`` (attention is not computed again in backward) or ``"hidden"``.
    ``compiled=False`` runs pre, post and head as eager code.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        *,
        chunk_len: int = DEFAULT_CHUNK_LEN,
        head_chunk_len: int = HEAD_CHUNK_LEN,
        save: str = "attention",
        compiled: bool = True,
    ) -> None:
        if save not in ("attention", "hidden"):
            raise ValueError(f"save must be 'attention' or 'hidden', not {save!r}")
        config = model.config
        self.chunk_len = chunk_len
        self.head_chunk_len = min(head_chunk_len, chunk_len)
        self.save = save
        self.width = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = self.width // self.num_heads
        self.eps = config.rms_norm_eps
        self.inverse_frequencies = model.model.rotary_emb.inv_freq
        self.embedding = model.model.embed_tokens.weight
        self.pre_parameters = [
            [
                layer.input_layernorm.weight,
                layer.self_attn.q_proj.weight,
                layer.self_attn.k_proj.weight,
                layer.self_attn.v_proj.weight,
            ]
            for layer in model.model.layers
        ]
        self.post_parameters = [
            [
                layer.self_attn.o_proj.weight,
                layer.post_attention_layernorm.weight,
                layer.mlp.gate_proj.weight,
                layer.mlp.up_proj.weight,
                layer.mlp.down_proj.weight,
            ]
            for layer in model.model.layers
        ]
        self.head_parameters = [model.model.norm.weight, model.lm_head.weight]

        def prepare(body: Callable) -> Callable:
            return torch.compile(body, dynamic=False) if compiled else body

        self.pre = prepare(self._pre)
        self.post = prepare(self._post)
        self.head = prepare(self._head)

    # Region bodies: everything between two attentions, over the tokens of one chunk.

    def _pre(
        self,
        h: Tensor,
        positions: Tensor,
        norm: Tensor,
        wq: Tensor,
        wk: Tensor,
        wv: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        angles = positions[:, None].float() * self.inverse_frequencies
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos(), angles.sin()
        x = F.rms_norm(h, (self.width,), norm, self.eps)

        def heads(weight: Tensor, num_heads: int) -> Tensor:
            y = F.linear(x, weight).view(1, h.shape[1], num_heads, self.head_dim)
            return y.transpose(1, 2)

        q, k = heads(wq, self.num_heads), heads(wk, self.num_kv_heads)
        v = heads(wv, self.num_kv_heads)
        return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin, v

    def _post(
        self,
        h: Tensor,
        out: Tensor,
        wo: Tensor,
        norm: Tensor,
        gate: Tensor,
        up: Tensor,
        down: Tensor,
    ) -> Tensor:
        h = h + F.linear(out.transpose(1, 2).reshape(1, -1, self.width), wo)
        x = F.rms_norm(h, (self.width,), norm, self.eps)
        return h + F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    def _head(self, h: Tensor, labels: Tensor, norm: Tensor, weight: Tensor) -> Tensor:
        logits = F.linear(F.rms_norm(h, (self.width,), norm, self.eps), weight)[0]
        return F.cross_entropy(
            logits, labels, reduction="sum", ignore_index=IGNORED_LABEL
        )

    # The schedule.

    def __call__(self, ids: Tensor) -> float:
        """Adds the gradients of the mean next-token loss over ``ids`` [1, S]; returns it."""
        batch, seq_len = ids.shape
        if batch != 1 or seq_len % self.chunk_len:
            raise ValueError(
                f"ids must be [1, S], S a multiple of {self.chunk_len}; got {tuple(ids.shape)}"
            )
        starts = range(0, seq_len, self.chunk_len)
        rows = [slice(start, start + self.chunk_len) for start in starts]
        positions = torch.arange(seq_len)
        labels = F.pad(ids, (0, 1), value=IGNORED_LABEL)[0, 1:]
        pieces = [ids[:, r] for r in rows]
        h = [self.embedding.detach()[piece] for piece in pieces]
        chunk_positions = [positions[r] for r in rows]

        hidden, saved = [], []
        for layer in range(len(self.pre_parameters)):
            hidden.append(h)
            h, block = self._forward_block(layer, h, chunk_positions)
            saved.append(block)
        loss, dh = self._head_step(h, [labels[r] for r in rows])
        del h
        for layer in reversed(range(len(self.pre_parameters))):
            self._backward_block(layer, hidden.pop(), saved.pop(), dh, chunk_positions)
        if self.embedding.grad is None:
            self.embedding.grad = torch.zeros_like(self.embedding)
        for piece, grad in zip(pieces, dh, strict=True):
            self.embedding.grad.index_add_(0, piece[0], grad[0])
        return loss

    @torch.no_grad()
    def _forward_block(
        self, layer: int, h: Sequence[Tensor], positions: Sequence[Tensor]
    ) -> tuple[list[Tensor], BlockSaved]:
        keys, values, outputs = [], [], []
        saved = BlockSaved()
        for h_i, positions_i in zip(h, positions, strict=True):
            q, k, v = self.pre(h_i, positions_i, *self.pre_parameters[layer])
            keys.append(k.contiguous())
            values.append(v.contiguous())
            out, lse = attend(q, keys, values)
            if self.save == "attention":
                saved.out.append(out)
                saved.lse.append(lse)
            outputs.append(self.post(h_i, out, *self.post_parameters[layer]))
        return outputs, saved

    def _head_step(
        self, h: list[Tensor], labels: Sequence[Tensor]
    ) -> tuple[float, list[Tensor]]:
        """Loss, and its gradient by each chunk of ``h``; ``h`` is emptied on the way."""
        count = sum(int((piece != IGNORED_LABEL).sum()) for piece in labels)
        scale = torch.tensor(1.0 / count)
        total, dh = 0.0, []
        while h:
            grads = []
            h_pieces = h.pop(0).split(self.head_chunk_len, 1)
            label_pieces = labels[len(dh)].split(self.head_chunk_len)
            for h_piece, label_piece in zip(h_pieces, label_pieces, strict=True):
                leaf = h_piece.detach().requires_grad_()
                part = self.head(leaf, label_piece, *self.head_parameters)
                grad, *weight_grads = torch.autograd.grad(
                    part, [leaf, *self.head_parameters], scale
                )
                accumulate(self.head_parameters, weight_grads)
                grads.append(grad)
                total += part.item()
            dh.append(torch.cat(grads, 1))
        return total / count, dh

    def _backward_block(
        self,
        layer: int,
        h: list[Tensor | None],
        saved: BlockSaved,
        dh: list[Tensor],
        positions: Sequence[Tensor],
    ) -> None:
        """Replaces ``dh``, the gradient by the block's output, by that by its input.

        Everything of a chunk is dropped as soon as its part is done.
        """
        flash_backward = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        )
        pre_parameters = self.pre_parameters[layer]
        post_parameters = self.post_parameters[layer]
        num_chunks = len(h)
        q, k, v = [], [], []
        with torch.no_grad():
            for h_i, positions_i in zip(h, positions, strict=True):
                qkv = self.pre(h_i, positions_i, *pre_parameters)
                for kept, tensor in zip((q, k, v), qkv, strict=True):
                    kept.append(tensor.contiguous())
            if self.save == "hidden":
                for i in range(num_chunks):
                    out, lse = attend(q[i], k[: i + 1], v[: i + 1])
                    saved.out.append(out)
                    saved.lse.append(lse)
        out, lse = saved.out, saved.lse

        d_out = []
        for i in range(num_chunks):
            leaves = [h[i].detach().requires_grad_(), out[i].detach().requires_grad_()]
            y = self.post(*leaves, *post_parameters)
            dh[i], d_out_i, *weight_grads = torch.autograd.grad(
                y, [*leaves, *post_parameters], dh[i]
            )
            accumulate(post_parameters, weight_grads)
            d_out.append(d_out_i)

        dk = [torch.zeros_like(tensor) for tensor in k]
        dv = [torch.zeros_like(tensor) for tensor in v]
        for i in reversed(range(num_chunks)):
            dq = None
            for j in range(i + 1):
                dq_j, dk_j, dv_j = flash_backward(
                    d_out[i], q[i], k[j], v[j], out[i], lse[i], 0.0, i == j
                )
                dq = dq_j if dq is None else dq.add_(dq_j)
                dk[j].add_(dk_j)
                dv[j].add_(dv_j)
            leaf = h[i].detach().requires_grad_()
            qkv = self.pre(leaf, positions[i], *pre_parameters)
            d_input, *weight_grads = torch.autograd.grad(
                qkv, [leaf, *pre_parameters], [dq, dk[i], dv[i]]
            )
            accumulate(pre_parameters, weight_grads)
            dh[i] = dh[i] + d_input
            for kept in (q, k, v, out, lse, d_out, dk, dv, h):
                kept[i] = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seq", type=int, default=8192, metavar="S")
    parser.add_argument("--layers", type=int, default=DEFAULT_LAYERS)
    parser.add_argument("--chunk-len", type=int, default=DEFAULT_CHUNK_LEN)
    parser.add_argument("--head-chunk-len", type=int, default=HEAD_CHUNK_LEN)
    parser.add_argument("--save", choices=["attention", "hidden"], default="attention")
    parser.add_argument("--eager", action="store_true", help="bodies uncompiled")
    args = parser.parse_args()

    model = reference_model(num_layers=args.layers)
    step = HandSchedule(
        model,
        chunk_len=args.chunk_len,
        head_chunk_len=args.head_chunk_len,
        save=args.save,
        compiled=not args.eager,
    )
    ids = reference_tokens(args.seq)
    step(ids[:, : 2 * args.chunk_len])  # compiles
    model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    loss = step(ids)
    seconds = time.perf_counter() - start
    norm = watched_gradient(model).norm().item()
    print(f"loss={loss:.6f} grad_norm={norm:.8f} step_s={seconds:.2f}")


if __name__ == "__main__":
    main()
