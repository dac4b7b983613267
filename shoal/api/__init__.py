"""The serving layer without HTTP: request bodies -> SpeechRequest -> encoded byte stream.

`schemas` defines the bodies, `requests` turns them into jobs, `admission` decides which may run and accounts for them,
`speech_stream` runs them on an engine and encodes the audio. Used by the HTTP server, Ray Serve, the serverless
workers and batch.
"""
