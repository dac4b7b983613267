"""Files <-> modules: find, load, save, pull and inspect checkpoints. Files are read strictly and never executed."""
