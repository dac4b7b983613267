"""Attention of the slow and the fast transformer, and the KV cache writes before it."""
