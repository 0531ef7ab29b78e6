"""Options of ``optimize``, the ``fpdt`` backend and ``explain``, checked where they are given."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

CODEGEN = ("inductor", "eager")
OFFLOAD = ("host", "disk", "none")
KINDS = ("hidden", "kv", "attention")
SAVE = ("hidden", "attention", "qkv")
ORDER = ("queries", "keys")
OUTPUTS = ("auto", "all")
INPUTS = ("whole", "sharded")


@dataclass(frozen=True, kw_only=True, slots=True)
class FpdtConfig:
    """How a model is chunked.

    - ``seq_parallel``: ranks that share one sequence (1: one process). An int P makes groups of P
      consecutive ranks of the world; a 1-D ``DeviceMesh`` (a dimension of a larger one) is taken as
      it is.
    - ``inputs``: "whole" means that every rank passes the same full batch; "sharded" that each rank
      passes its own tokens, as ``shard_tokens`` cuts them (``chunk_len`` must be given).
    - ``reduce_gradients``: sum parameter gradients over these ranks; False leaves each rank's part
      to somebody else (FSDP2).
    - ``overlap``: run exchanges between ranks under the compute; False waits for each.
    - ``chunk_len``: tokens per chunk and rank; None picks one from the model's widths.
    - ``head_len``: tokens per piece of the LM head; None picks one from the vocabulary.
    - ``offload``: where values wait: "host" is main memory (pinned for a GPU), "disk" a file in
      ``offload_dir``, "none" the device. A dict gives the tier by kind, "host" for those it leaves
      out: {"hidden": "disk"} (states between blocks, their gradients), {"kv": "host"} (q, k, v and
      their gradients), {"attention": "none"} (attention outputs). On a CPU-only machine "host" and
      "none" are the same memory.
    - ``offload_dir``: the directory of that file; None is the system's for temporary files.
    - ``lookahead``: how many tiles (or chunks) ahead of its use a value is read back; 0 waits for
      every read.
    - ``resident_bytes``: a block's q, k, v and their gradients stay on the device if they take no
      more than this; None is 4 GiB for a GPU and nothing for a CPU.
    - ``save``: what the backward finds: "hidden" (the blocks' inputs, all else is computed again),
      "attention" (attention outputs too: attention runs once), "qkv" (projections as well).
    - ``save_bytes``: what is saved besides the blocks' inputs takes no more than this on a rank;
      some blocks save less than ``save`` says. None is no limit.
    - ``order``: which loop over attention tiles is the outer one in the backward: "queries" reads
      and writes k, v and their gradients for every tile, "keys" (FPDT's) q, out and theirs.
    - ``max_intermediate_bytes``: no intermediate of a chunk is larger, which bounds chunk_len and
      head_len where they are picked; None goes by the device.
    - ``codegen``: "inductor" compiles region bodies, "eager" runs them as traced.
    - ``outputs``: "auto" does not materialize outputs that training does not need (logits, caches)
      when the model returns a loss and gradients are enabled; "all" returns everything.
    - ``token_dims``: the token dimension, or a tuple of them, by input name
      (``{"input_ids": 1, "mask": (0, 1)}``); None goes by convention, see ``token_dims.py``.
    - ``strict``: raise for the first part that would run whole instead of warning.
    - ``verify``: at compile time run every region whole and in chunks on random data and compare.
    - ``disable_passes``: exact names of rewriting passes to skip; ``max_rewrites``: apply only the
      first N rewrites. Both are for finding a miscompile.
    """

    seq_parallel: int | DeviceMesh = 1
    inputs: str = "whole"
    reduce_gradients: bool = True
    overlap: bool = True
    chunk_len: int | None = None
    head_len: int | None = None
    offload: str | Mapping[str, str] = "host"
    offload_dir: str | os.PathLike[str] | None = None
    lookahead: int = 2
    resident_bytes: int | None = None
    save: str = "attention"
    save_bytes: int | None = None
    order: str = "queries"
    max_intermediate_bytes: int | None = None
    codegen: str = "inductor"
    outputs: str = "auto"
    token_dims: Mapping[str, int | tuple[int, ...]] | None = None
    strict: bool = False
    verify: bool = False
    disable_passes: tuple[str, ...] = ()
    max_rewrites: int | None = None

    def __post_init__(self) -> None:
        _mesh(self.seq_parallel)
        _choice("inputs", self.inputs, INPUTS)
        if self.inputs == "sharded" and self.chunk_len is None:
            raise ValueError(
                'chunk_len=None: with inputs="sharded" allowed are integers >= 1, the same as in '
                "shard_tokens"
            )
        for name in ("chunk_len", "head_len"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        for name in ("max_rewrites", "save_bytes", "resident_bytes"):
            _count(name, getattr(self, name), "None and integers >= 0")
        if self.lookahead is None:
            raise ValueError("lookahead=None: allowed are integers >= 0")
        _count("lookahead", self.lookahead, "integers >= 0")
        if self.max_intermediate_bytes is not None:
            _positive("max_intermediate_bytes", self.max_intermediate_bytes)
        _offload(self.offload)
        _directory(self.offload_dir)
        _choice("order", self.order, ORDER)
        _choice("save", self.save, SAVE)
        _choice("codegen", self.codegen, CODEGEN)
        _choice("outputs", self.outputs, OUTPUTS)
        for name in ("strict", "verify", "overlap", "reduce_gradients"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: allowed are True and False"
                )
        _token_dims(self.token_dims)
        if isinstance(self.disable_passes, str):
            raise ValueError(
                f"disable_passes={self.disable_passes!r}: allowed is a tuple of pass names"
            )

    @classmethod
    def from_options(cls, options: Mapping[str, Any] | None) -> FpdtConfig:
        """From ``torch.compile(..., options=...)``; unknown names raise ValueError."""
        options = dict(options or {})
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                raise ValueError(
                    f"unknown option {name}={options[name]!r}: allowed are {', '.join(known)}"
                )
        return cls(**options)


def _mesh(value: object) -> None:
    if isinstance(value, DeviceMesh):
        if value.ndim != 1:
            raise ValueError(
                f"seq_parallel={value}: allowed are meshes of one dimension; select it by name, "
                f'as in mesh["sp"]'
            )
        return
    _positive("seq_parallel", value)


def _positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        allowed = (
            "integers >= 1 and a 1-D DeviceMesh"
            if name == "seq_parallel"
            else "None and integers >= 1"
        )
        raise ValueError(f"{name}={value!r}: allowed are {allowed}")


def _count(name: str, value: object, allowed: str) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if value is not None and not whole:
        raise ValueError(f"{name}={value!r}: allowed are {allowed}")


def _offload(value: object) -> None:
    if not isinstance(value, Mapping):
        _choice("offload", value, OFFLOAD)
        return
    for kind, tier in value.items():
        if kind not in KINDS or tier not in OFFLOAD:
            raise ValueError(
                f"offload={dict(value)!r}: allowed are {', '.join(map(repr, OFFLOAD))} and a dict "
                f"of {', '.join(map(repr, KINDS))} to one of them"
            )


def _directory(value: object) -> None:
    if value is None:
        return
    if not isinstance(value, (str, os.PathLike)) or not os.path.isdir(value):
        raise ValueError(
            f"offload_dir={value!r}: allowed are None and directories that exist"
        )


def _choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        listed = ", ".join(repr(a) for a in allowed)
        raise ValueError(f"{name}={value!r}: allowed are {listed}")


def _is_dims(value: object) -> bool:
    dims = value if isinstance(value, tuple) else (value,)
    return all(isinstance(d, int) and not isinstance(d, bool) for d in dims)


def _token_dims(value: object) -> None:
    if value is None:
        return
    if not isinstance(value, Mapping) or not all(
        isinstance(k, str) and _is_dims(v) for k, v in value.items()
    ):
        raise ValueError(
            f"token_dims={value!r}: allowed are None and a dict of input name to dimension "
            'or tuple of dimensions, for instance {"input_ids": 1}'
        )


def tiers_of(offload: str | Mapping[str, str]) -> dict[str, str]:
    """The tier of every kind of value, of either form of the option."""
    given = offload if isinstance(offload, Mapping) else dict.fromkeys(KINDS, offload)
    found = {kind: given.get(kind, "host") for kind in KINDS}
    return {k: "device" if tier == "none" else tier for k, tier in found.items()}


def num_ranks(seq_parallel: int | DeviceMesh) -> int:
    """P, of either form of the option."""
    return seq_parallel.size() if isinstance(seq_parallel, DeviceMesh) else seq_parallel
