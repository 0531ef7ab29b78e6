"""Attention over one (query chunk, key chunk) tile, and what merges tiles."""
