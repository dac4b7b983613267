"""Benchmarks of engine, server and speech quality; their results are JSON documents (`schema.json`) and reports."""
