"""Who runs when, on which memory: continuous batching over paged keys and values."""
