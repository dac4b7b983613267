"""The serving layer without HTTP: request bodies -> SpeechRequest -> encoded byte stream.

`bodies` parses and validates, `requests` turns bodies into jobs, `admission` decides which may run and `accounting`
counts them, `speech_stream` runs them on an engine and encodes the audio, `live` does the same for text that arrives
in pieces. Used by the HTTP server, Ray Serve, the serverless workers and batch.
"""
