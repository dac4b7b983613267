"""OpenAI's API."""

from shoal.server.routes.openai import speech, voices

ROUTERS = (speech.router, voices.router)
