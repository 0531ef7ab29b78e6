"""Train unmodified transformers on long sequences: ``optimize``, ``chunked_loss``, ``explain``."""

from .api import compile_stats, optimize
from .chunked_loss import chunked_loss
from .config import FpdtConfig
from .errors import (
    CantChunk,
    FpdtError,
    OutputNotMaterialized,
    RankMismatch,
    Rejection,
)
from .explain import Report, explain
from .sharding import shard_tokens, unshard_tokens

__all__ = [
    "CantChunk",
    "FpdtConfig",
    "FpdtError",
    "OutputNotMaterialized",
    "RankMismatch",
    "Rejection",
    "Report",
    "chunked_loss",
    "compile_stats",
    "explain",
    "optimize",
    "shard_tokens",
    "unshard_tokens",
]
__version__ = "0.1.0"
