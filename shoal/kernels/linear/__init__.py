"""Linear layers on the GPU: fused, split-K and int4 products, and the tiles they use."""
