"""Offline batches: a JSONL file of requests -> audio files, resumable, on one engine or a Ray cluster."""
