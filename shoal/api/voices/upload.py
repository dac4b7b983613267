"""Store voices that clients send: recordings with or without transcripts, or finished speech."""

import asyncio
from collections.abc import Sequence
from functools import partial

from shoal.api.keys import Key
from shoal.api.state import ServerState
from shoal.audio.decode import AudioLimits
from shoal.voices.description import NO_DESCRIPTION, VoiceDescription
from shoal.voices.recording_check import RecordingReport
from shoal.voices.store import VoiceStore
from shoal.voices.transcriber import transcribe_recording


async def store_recordings(
    state: ServerState,
    store: VoiceStore,
    name: str,
    clips: Sequence[tuple[bytes, str | None]],
    description: VoiceDescription = NO_DESCRIPTION,
) -> None:
    """Store a voice. A recording without a transcript gets one from the recogniser, if it is installed.

    Raises VoiceExists, AudioError, TextError, or MissingExtra without a transcript and a recogniser.
    """
    limits = AudioLimits(max_seconds=state.config.limits.reference_seconds)
    complete = [(audio, await _transcribed(state, audio, limits) if text is None else text) for audio, text in clips]
    await asyncio.to_thread(store.add_recordings, name, complete, description)


async def check_recording(state: ServerState, store: VoiceStore, audio: bytes, text: str | None) -> RecordingReport:
    """Measure a recording without storing it. Raises AudioError for one that cannot become a voice."""
    return await asyncio.get_running_loop().run_in_executor(state.convert_pool, store.check, audio, text)


async def store_speech(state: ServerState, store: VoiceStore, name: str, key: Key, request_id: str) -> None:
    """Store the speech of an earlier request of this key as a voice. Raises SpeechNotKept, VoiceExists, AudioError."""
    speech = state.kept_speech.find(key.name, request_id)
    await asyncio.to_thread(lambda: store.add(name, speech.wav(), speech.text))


async def _transcribed(state: ServerState, audio: bytes, limits: AudioLimits) -> str:
    work = partial(transcribe_recording, state.transcriber, audio, "`text`", limits)
    return await asyncio.get_running_loop().run_in_executor(state.convert_pool, work)
