"""Fish Audio's API."""

from shoal.server.routes.fish import live, speech, voices

ROUTERS = (speech.router, voices.router, live.router)
