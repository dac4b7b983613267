"""The engine in its own process: supervisor, worker, and the messages between them."""
