"""HTTP and WebSocket server with the Fish, OpenAI and SageMaker APIs over one engine.

`routes` holds one module per API, `middleware` what applies to all of them, `error_responses` maps errors to status
codes. Everything that does not need HTTP is in `shoal.api`.
"""
