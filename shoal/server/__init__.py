"""HTTP and WebSocket server with the Fish, OpenAI, ElevenLabs and SageMaker APIs over one engine; Wyoming over TCP.

`routes` holds a package per API and modules for shared routes, `middleware` what applies to every request;
`error_responses` maps errors to status codes. Everything that does not need HTTP is in `shoal.api`.
"""
