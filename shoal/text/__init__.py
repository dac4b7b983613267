"""Text -> prompt grids: cleaning, normalization, splitting, tokenizers, and the prompt formats of the Fish family."""
