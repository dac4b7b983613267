"""Weight quantization: the modes, which of them a device supports, how to apply them and what they cost in accuracy."""
