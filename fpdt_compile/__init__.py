"""Train unmodified transformers on long sequences: ``optimize``, ``chunked_loss``, ``explain``."""

from .api import compile_stats, optimize
from .chunked_loss import chunked_loss
from .config import FpdtConfig
from .errors import CantChunk, FpdtError, OutputNotMaterialized, Rejection
from .explain import Report, explain

__all__ = [
    "CantChunk",
    "FpdtConfig",
    "FpdtError",
    "OutputNotMaterialized",
    "Rejection",
    "Report",
    "chunked_loss",
    "compile_stats",
    "explain",
    "optimize",
]
__version__ = "0.1.0"
