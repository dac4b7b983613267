"""Sampling from logits, and of one token of a frame on the device."""
