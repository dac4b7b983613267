"""List the voices that a client may choose from, with their descriptions."""

from dataclasses import dataclass

from shoal.api.engine_client import EngineHandle


@dataclass(frozen=True, slots=True)
class KnownVoice:
    """A stored or built-in voice. The fields that describe it may be empty."""

    name: str
    builtin: bool  # shipped with the model: it can be neither renamed nor deleted
    default: bool  # spoken by requests that name no voice
    title: str
    description: str
    gender: str
    accent: str
    preview: str
    openai_names: tuple[str, ...]  # OpenAI's names that mean this voice

    @property
    def label(self) -> str:
        """One line for a list: title, gender and accent, or the name."""
        words = ", ".join(word for word in (self.gender, self.accent) if word)
        return f"{self.title or self.name} ({words})" if words else self.title or self.name


def known_voices(engine: EngineHandle) -> list[KnownVoice]:
    """List the voices in order of name. Blocks on file I/O."""
    return [_known(engine, name) for name in engine.voices.names()]


def _known(engine: EngineHandle, name: str) -> KnownVoice:
    about = engine.voices.description(name)
    return KnownVoice(
        name=name,
        builtin=engine.voices.is_builtin(name),
        default=name == engine.service.default_voice,
        title=about.title,
        description=about.description,
        gender=about.gender,
        accent=about.accent,
        preview=about.preview,
        openai_names=tuple(alias for alias, voice in engine.openai_voices.items() if voice == name),
    )
