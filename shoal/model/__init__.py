"""Prompt -> logits -> frames: the dual autoregressive transformer. Nothing here knows of requests."""
