"""Train unmodified transformers on long sequences: ``optimize``, ``chunked_loss``, ``explain``."""

from .api import compile_stats, forecast_memory, optimize
from .chunked_loss import chunked_loss
from .config import FpdtConfig
from .errors import (
    CantChunk,
    FpdtError,
    OutputNotMaterialized,
    RankMismatch,
    Rejection,
    StoreError,
)
from .explain import Report, explain
from .sharding import shard_tokens, unshard_tokens
from .timeline import plot_timeline, recorded_timeline, write_timeline

__all__ = [
    "CantChunk",
    "FpdtConfig",
    "FpdtError",
    "OutputNotMaterialized",
    "RankMismatch",
    "Rejection",
    "Report",
    "StoreError",
    "chunked_loss",
    "compile_stats",
    "explain",
    "forecast_memory",
    "optimize",
    "plot_timeline",
    "recorded_timeline",
    "shard_tokens",
    "unshard_tokens",
    "write_timeline",
]
__version__ = "0.1.0"
