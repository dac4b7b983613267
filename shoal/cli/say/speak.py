"""Generate the speech of `shoal say`: on a server of this user that has the model loaded, or in this process."""

import logging
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import typer

from shoal.checkpoint.find import BUNDLED
from shoal.cli.flags import Codec, Device, Lexicon, Quantize
from shoal.cli.say import flags
from shoal.cli.say.options import default_seed
from shoal.cli.say.prosody import ProsodyOptions
from shoal.cli.say.sinks import AudioSinks
from shoal.gc_pause import paused_gc, resume_full_gc

if TYPE_CHECKING:
    from shoal.api.local_server import EngineIdentity
    from shoal.cli.say.progress import SpeechProgress
    from shoal.config import EngineConfig
    from shoal.engine.engine import Engine
    from shoal.engine.native_engine import NativeEngine
    from shoal.speech import SpeechRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineOptions:
    """Model, device and files that an engine is loaded from."""

    model: flags.Model = BUNDLED
    codec: Codec = None
    device: Device = "auto"
    dtype: flags.Dtype = None
    quantize: Quantize = None
    lexicon: Lexicon = None

    @property
    def config(self) -> "EngineConfig":
        from shoal.config import EngineConfig

        return EngineConfig(quantize=self.quantize or EngineConfig.quantize)

    def identity(self) -> "EngineIdentity":
        from shoal.api.local_server import engine_identity
        from shoal.voices.store import voice_directory

        return engine_identity(
            self.model,
            voice_directory(),
            device=self.device,
            dtype=self.dtype,
            codec=self.codec,
            lexicon=self.lexicon,
            config=self.config,
        )

    def load_native(self, request: "SpeechRequest") -> "NativeEngine | None":
        """Return an engine that needs no torch and starts in half the time; None if the request needs `load`."""
        plain = self.codec is None and self.dtype is None and self.quantize is None
        if self.model != BUNDLED or self.device not in ("auto", "cpu") or not plain:
            return None
        with paused_gc():
            from shoal.engine.native_engine import NeedsTorch, gpu_driver_present, load_native
            from shoal.voices.store import voice_directory

            if self.device == "auto" and gpu_driver_present():
                return None
            try:
                return load_native(self.model, self.config, voice_directory(), self.lexicon, request)
            except NeedsTorch as reason:
                logger.info("loading with torch: %s", reason)
                return None

    def load(self) -> "Engine":
        with paused_gc():
            from shoal import load

            return load(
                self.model,
                device=self.device,
                dtype=self.dtype,
                codec=self.codec,
                config=self.config,
                lexicon=self.lexicon,
            )


@dataclass(frozen=True)
class UsedServer:
    url: str
    seed: int


def speak_on_local_server(
    options: EngineOptions,
    request: "SpeechRequest",
    overrides: dict[str, Any],
    sinks: AudioSinks,
    progress: "SpeechProgress",
    *,
    quiet: bool,
) -> UsedServer | None:
    """Speak on a running server of this user; None if no server can take the request."""
    from shoal.api.local_server import find_server

    server = find_server(options.identity())
    if server is None:
        return None
    from shoal.cli.say.server_speech import ServerRefused, check_ready, speak_on_server

    seed = overrides.get("seed", default_seed(options.model))
    progress.begin()
    try:
        check_ready(server)
        speech = speak_on_server(server, request, {**overrides, "seed": seed}, sinks.prosody)
    except ConnectionError:
        return None  # the server has ended
    except ServerRefused as reason:
        typer.echo(f"note: not using the server at {server.url}: {reason}", err=True)
        return None
    if not quiet:
        typer.echo(f"using the server at {server.url}; --no-server loads the model instead", err=True)
    with closing(speech):
        # The server has applied rate and volume already, before rounding to 16 bits.
        unchanged = replace(sinks, prosody=ProsodyOptions())
        unchanged.write(speech.sample_rate, ((chunk, (1, 1)) for chunk in speech.chunks()), progress)
    return UsedServer(server.url, seed)


def speak_here(
    options: EngineOptions,
    request: "SpeechRequest",
    overrides: dict[str, Any],
    sinks: AudioSinks,
    progress: "SpeechProgress",
) -> int:
    """Load the model, speak, and return the seed."""
    try:
        with ExitStack() as stack:
            service = options.load_native(request) or stack.enter_context(options.load()).service
            sampling = replace(service.default_sampling, **overrides)
            progress.begin()
            speaking = service.speak_blocking(replace(request, sampling=sampling))
            sinks.write(service.sample_rate, ((chunk, speaking.turn) for chunk in speaking), progress)
        return sampling.seed
    finally:
        resume_full_gc()
