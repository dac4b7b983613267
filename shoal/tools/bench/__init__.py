"""How fast, on which machine: benchmarks that print a table and, as their last line, one JSON object."""
