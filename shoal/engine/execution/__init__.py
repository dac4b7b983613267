"""Execution of one step on a device: runners, CUDA graphs, backend fallback, per-slot state."""
