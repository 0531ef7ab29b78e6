"""Train unmodified transformers on sequences that do not fit: see ``optimize`` and ``explain``."""

from .api import compile_stats, optimize
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
    "compile_stats",
    "explain",
    "optimize",
]
__version__ = "0.1.0"
