"""Contents of a model directory: names of files and tensors, configuration, profile, text rules."""
