"""Hash everything that the audio of a sentence depends on, without loading the model: model, voices, language."""

import json
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

from shoal.book.work import Speaker
from shoal.checkpoint.find import RANDOM_PREFIX, find_directory
from shoal.checkpoint.format.layout import read_json
from shoal.checkpoint.format.profile import read_alignment
from shoal.voices.store import VoiceStore

PROFILE = "shoal.json"
BUILTIN_VOICES = "voices"  # directory of a model's own voices
MODEL_FILES = (".json", ".pth", ".safetensors", ".tiktoken")
SAMPLES, SAMPLE_BYTES = 8, 64 << 10  # blocks hashed of a large file, evenly spaced: models have gigabytes


def model_fingerprint(name: str, codec: Path | None) -> str:
    """Hash the names, sizes and samples of a model's files; the name of random weights. Raises ModelNotFound."""
    digest = blake2b(digest_size=16)
    if name.startswith(RANDOM_PREFIX):
        digest.update(name.encode())
    else:
        files = sorted(path for path in find_directory(name).iterdir() if path.suffix in MODEL_FILES and path.is_file())
        for path in [*files, *([codec] if codec is not None and codec.is_file() else [])]:
            digest.update(f"{path.name}\0".encode())
            for sample in [_sampling_profile(path)] if path.name == PROFILE else _samples(path):
                digest.update(sample)
    return digest.hexdigest()


def _sampling_profile(path: Path) -> bytes:
    """Return a model's profile without the heads for word times, which do not change the audio."""
    stored = {name: value for name, value in read_json(path).items() if name != "alignment"}
    return json.dumps(stored, sort_keys=True).encode()


def has_word_times(model: str) -> bool:
    """Return whether the attention heads that follow the text are known, so that words have times."""
    if model.startswith(RANDOM_PREFIX):
        return False
    profile = find_directory(model) / PROFILE
    alignment = read_alignment(read_json(profile).get("alignment")) if profile.is_file() else None
    return alignment is not None and bool(alignment.heads)


def joins_short_sentences(model: str) -> bool:
    """Return whether a model speaks a short sentence in one turn with the next one, and word times divide the two."""
    return has_word_times(model) and read_json(find_directory(model) / PROFILE).get("sentence_turns") is True


def speaks_english_only(model: str) -> bool:
    """Return whether a model needs texts that are spelled out in English. Raises ModelNotFound."""
    if model.startswith(RANDOM_PREFIX):
        return False
    profile = find_directory(model) / PROFILE
    return profile.is_file() and read_json(profile).get("normalize") is True


def _samples(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    last = max(0, size - SAMPLE_BYTES)
    yield str(size).encode()
    with path.open("rb") as file:
        for place in range(SAMPLES):
            file.seek(last * place // (SAMPLES - 1))
            yield file.read(SAMPLE_BYTES)


def speaker(name: str | None, model: str, voices: Path) -> Speaker:
    """Return a stored or built-in voice with the hash of its recordings. Raises VoiceNotFound, ModelNotFound."""
    if name is None:
        return Speaker(None)
    builtin = () if model.startswith(RANDOM_PREFIX) else (find_directory(model) / BUILTIN_VOICES,)
    store = VoiceStore(voices, [path for path in builtin if path.is_dir()])
    details = store.details(name)
    if details is not None:
        content = [recording.sha256 for recording in details.recordings]
    else:
        content = [f"{file} {size}" for file, _, size, _ in store.stamp(name)]
    return Speaker(name, blake2b(json.dumps(content).encode(), digest_size=16).hexdigest())
