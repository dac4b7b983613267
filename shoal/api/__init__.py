"""Request bodies to SpeechRequest to encoded byte streams, without HTTP."""
