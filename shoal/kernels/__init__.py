"""One file per kernel, with its plain PyTorch reference beside it."""
