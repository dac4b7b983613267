"""Reports of measurement documents: tables, an HTML page with charts, and comparison of two runs."""
