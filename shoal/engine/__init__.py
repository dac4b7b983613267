"""Scheduling and execution: continuous batching over a paged KV cache."""
