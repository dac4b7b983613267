"""From frames to the audio of a request: codec calls, chunk sizes, rate and pauses of turns, word times."""
