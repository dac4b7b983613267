"""HTTP and WebSocket server with the Fish, OpenAI, ElevenLabs and SageMaker APIs over one engine; Wyoming over TCP.

`routes` holds one module per API, `middleware` what applies to all of them, `error_responses` maps errors to status
codes. Everything that does not need HTTP is in `shoal.api`.
"""
