"""Commands that speak whole files: batches of lines and books."""
