"""HTTP and WebSocket: three APIs people already use, over one engine.

`fish`, `voices`, `codec` and `live` speak the Fish API, `openai` OpenAI's, `sagemaker` the container contract. Each
turns a body into a `SpeechRequest` and a `Rendering`; `performance` makes bytes of them. `problems` alone knows status
codes.
"""
