"""Decode untrusted audio in a child process with resource limits: pool (parent side), worker (child side)."""
