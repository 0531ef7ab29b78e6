"""How long a chunk may be: bytes of intermediates against a budget.

All functions take plain numbers: bytes per token as counted by ``passes/plan_chunks``.
"""

from __future__ import annotations

# Bytes that the intermediates of one chunk (one head piece) may take. On a CPU the point is to
# stay near the last-level cache; see README, "How chunk lengths are chosen".
CPU_CHUNK_BYTES = 128 << 20
CPU_HEAD_BYTES = 32 << 20
# On a GPU a chunk must be long enough to hide a copy under attention: the FPDT paper (arXiv
# 2408.16978, section 5.3) settles on 64K tokens.
CUDA_CHUNK_BYTES = 2 << 30
CUDA_HEAD_BYTES = 1 << 30

# q, k, v of a block and their gradients stay on the device if they take no more than this.
RESIDENT_BYTES = {"cpu": 0, "cuda": 4 << 30}

MIN_LEN = 128
MAX_CHUNK_LEN = {"cpu": 2048, "cuda": 65536}
MAX_HEAD_LEN = {"cpu": 1024, "cuda": 8192}
MAX_ELEMENTS = (1 << 31) - 1


def power_of_two_below(value: int) -> int:
    return 1 << (max(1, value).bit_length() - 1)


def chunk_length(bytes_per_token: int, elements_per_token: int, device: str) -> int:
    """Tokens per chunk: a power of two within the budget, and never 2^31 elements in a tensor.

    ``bytes_per_token``: all intermediates of the widest region for one token (times the batch);
    ``elements_per_token``: of the widest single tensor.
    """
    budget = CUDA_CHUNK_BYTES if device == "cuda" else CPU_CHUNK_BYTES
    return _fit(budget, bytes_per_token, elements_per_token, MAX_CHUNK_LEN[device])


def head_length(bytes_per_token: int, elements_per_token: int, device: str) -> int:
    """Tokens per head piece, from the logits' bytes per token; see :func:`chunk_length`."""
    budget = CUDA_HEAD_BYTES if device == "cuda" else CPU_HEAD_BYTES
    return _fit(budget, bytes_per_token, elements_per_token, MAX_HEAD_LEN[device])


def _fit(
    budget: int, bytes_per_token: int, elements_per_token: int, longest: int
) -> int:
    length = power_of_two_below(budget // max(1, bytes_per_token))
    length = max(MIN_LEN, min(longest, length))
    return max(1, min(length, MAX_ELEMENTS // max(1, elements_per_token)))
