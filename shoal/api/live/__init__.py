"""Live sessions: text arrives in pieces over a WebSocket, and audio returns while more text arrives."""
