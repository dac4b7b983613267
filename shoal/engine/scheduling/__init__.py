"""Scheduling without tensors: sequences, their queue, KV blocks, admission policies, and the batch of the next step."""
