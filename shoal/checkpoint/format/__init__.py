"""What the files of a model directory contain: names of files and tensors, configuration, profile, text rules."""
