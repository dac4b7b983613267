"""Prompt grid -> logits -> frames: the dual autoregressive (DualAR) transformer. Knows nothing of requests."""
