"""ASGI middleware: request ids, connection limit, origins, errors."""
