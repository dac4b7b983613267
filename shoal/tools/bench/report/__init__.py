"""Documents of measurements -> something people read: tables, one HTML page, and what changed between two runs."""
