"""HTTP and WebSocket routes, one package or module per API."""
