"""A server under load, seen from outside: what its listeners hear, and when."""
