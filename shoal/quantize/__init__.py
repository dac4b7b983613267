"""Weight quantization: modes, device support, application to models and codecs, and loss of accuracy."""
