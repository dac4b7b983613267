"""Files <-> modules: every on-disk layout of the family, read strictly and never executed."""
