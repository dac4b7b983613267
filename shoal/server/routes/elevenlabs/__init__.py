"""ElevenLabs' API."""

from shoal.server.routes.elevenlabs import live, speech, voices

ROUTERS = (speech.router, voices.router, live.router)
# On a path of its own, where `/v1/models` is not OpenAI's.
SEPARATE_ROUTERS = (*ROUTERS, voices.models_router)
