"""ElevenLabs' API."""

from shoal.server.routes.elevenlabs import live, speech, voices

ROUTERS = (speech.router, voices.router, live.router)
# Mounted under a prefix, where `/v1/models` does not collide with OpenAI's route.
SEPARATE_ROUTERS = (*ROUTERS, voices.models_router)
