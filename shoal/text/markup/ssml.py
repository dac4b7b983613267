"""SSML: `speak, p, s, break, sub, say-as, phoneme, prosody, voice`. Other elements are refused with their place."""

import re
from dataclasses import dataclass, field, replace

from shoal.errors import TextError
from shoal.text.markup.pauses import break_seconds
from shoal.text.markup.say_as import say_as
from shoal.text.markup.segments import Delivery, Passage, Pause, Segment
from shoal.text.markup.xml_reader import read_xml
from shoal.text.phonemes import arpabet, tagged

SPEAK = re.compile(r"\s*(?:<\?xml[^<>]{0,200}\?>\s*)?(?:<!--.{0,1000}?-->\s*)?<speak[\s>/]", re.DOTALL)
# Attributes by element. Attributes of the document (`xml:lang`, `xmlns`, `xsi:…`) are accepted everywhere and ignored.
ATTRIBUTES = {
    "speak": {"version"},
    "p": set[str](),
    "s": set[str](),
    "break": {"time", "strength"},
    "sub": {"alias"},
    "say-as": {"interpret-as", "format", "detail"},
    "phoneme": {"alphabet", "ph"},
    "prosody": {"rate", "volume"},
    "voice": {"name"},
}
REPLACING = ("sub", "say-as", "phoneme")  # elements whose content is replaced by their reading
RATES = {"x-slow": 0.5, "slow": 0.75, "medium": 1.0, "default": 1.0, "fast": 1.25, "x-fast": 1.5}
VOLUMES = {"x-soft": -12.0, "soft": -6.0, "medium": 0.0, "default": 0.0, "loud": 6.0, "x-loud": 12.0}
PERCENT = re.compile(r"([+-]?)(\d{1,4}(?:\.\d{1,4})?)%")
FACTOR = re.compile(r"\d{1,2}(?:\.\d{1,4})?")
DECIBELS = re.compile(r"([+-]?\d{1,3}(?:\.\d{1,4})?)\s?dB", re.IGNORECASE)
MIN_RATE, MAX_RATE = 0.5, 2.0
MAX_DECIBELS = 20.0
# An empty line ends a sentence in every model.
BOUNDARY = "\n\n"
BOUNDARIES = re.compile(r" ?\n[\n ]*")


def is_ssml(text: str) -> bool:
    """Return whether a text begins with a `speak` element."""
    return SPEAK.match(text) is not None


def parse_ssml(text: str, *, phonemes: bool) -> list[Segment]:
    """Return the passages and pauses of a document; `phonemes`: the model reads phoneme tags.

    For other models the words inside a `phoneme` element are spoken. Raises TextError with line and column.
    """
    builder = SegmentBuilder(phonemes)
    read_xml(text, builder, "SSML")
    builder.flush()
    return builder.segments


@dataclass
class SegmentBuilder:
    """Handler of the XML reader. Text of one delivery is collected into one passage."""

    phonemes: bool
    segments: list[Segment] = field(default_factory=list)
    _deliveries: list[Delivery] = field(default_factory=lambda: [Delivery()])
    _text: list[str] = field(default_factory=list)
    _open: list[str] = field(default_factory=list)
    _replacing: tuple[str, dict[str, str], list[str]] | None = None

    def start(self, name: str, attributes: dict[str, str]) -> None:
        self._check(name, attributes)
        self._open.append(name)
        if name in REPLACING:
            self._replacing = (name, attributes, [])
        elif name in ("p", "s"):
            self._text.append(BOUNDARY)
        elif name == "break":
            self.flush()
            self.segments.append(Pause(break_seconds(attributes)))
        elif name in ("prosody", "voice"):
            self.flush()
            self._deliveries.append(delivery(self._deliveries[-1], name, attributes))

    def end(self, name: str) -> None:
        self._open.pop()
        if self._replacing is not None:
            element, attributes, content = self._replacing
            self._replacing = None
            self._text.append(self._replacement(element, attributes, "".join(content)))
        elif name in ("p", "s"):
            self._text.append(BOUNDARY)
        elif name in ("prosody", "voice"):
            self.flush()
            self._deliveries.pop()

    def text(self, text: str) -> None:
        if self._replacing is not None:
            self._replacing[2].append(text)
        elif self._open[-1:] == ["break"]:
            raise TextError("break has no content")
        else:
            # Line ends inside a document are spaces; only p and s are boundaries.
            self._text.append(re.sub(r"\s+", " ", text))

    def flush(self) -> None:
        """End the current passage."""
        text, self._text = BOUNDARIES.sub(BOUNDARY, "".join(self._text)).strip(), []
        if text:
            self.segments.append(Passage(text, self._deliveries[-1]))

    def _check(self, name: str, attributes: dict[str, str]) -> None:
        if name not in ATTRIBUTES:
            raise TextError(f"<{name[:32]}> is not supported: use {', '.join(ATTRIBUTES)}")
        if (name == "speak") is not (not self._open):
            raise TextError("a document is one <speak> element, with all others inside it")
        if self._replacing is not None:
            raise TextError(f"<{self._replacing[0]}> takes text only, not <{name}>")
        for attribute in attributes:
            known = attribute in ATTRIBUTES[name] or attribute.startswith(("xml:", "xmlns", "xsi:"))
            if not known:
                allowed = ", ".join(sorted(ATTRIBUTES[name])) or "none"
                raise TextError(f"<{name}> does not support the attribute {attribute[:32]!r}; allowed: {allowed}")

    def _replacement(self, name: str, attributes: dict[str, str], content: str) -> str:
        if name == "sub":
            return _required(name, attributes, "alias")
        if name == "say-as":
            return say_as(content, _required(name, attributes, "interpret-as"), attributes.get("format", ""))
        phonemes = arpabet(_required(name, attributes, "ph"), attributes.get("alphabet", "ipa"))
        return tagged(phonemes) if self.phonemes else content


def delivery(outer: Delivery, name: str, attributes: dict[str, str]) -> Delivery:
    """Return the delivery inside a `prosody` or `voice` element. Rates multiply and decibels add up."""
    if name == "voice":
        return replace(outer, voice=_required(name, attributes, "name"))
    rate = outer.rate * parse_rate(attributes.get("rate", "default"))
    decibels = outer.decibels + parse_volume(attributes.get("volume", "default"))
    if not MIN_RATE <= rate <= MAX_RATE:
        raise TextError(f"a rate of {rate:.0%} is out of range: use {MIN_RATE:.0%} to {MAX_RATE:.0%}")
    if abs(decibels) > MAX_DECIBELS:
        raise TextError(f"a volume of {decibels:+g} dB is out of range: use -{MAX_DECIBELS:g} to +{MAX_DECIBELS:g} dB")
    return replace(outer, rate=rate, decibels=decibels)


def parse_rate(written: str) -> float:
    """Return the factor of `120%`, `+20%`, `1.2` or `fast`. Raises TextError."""
    if written in RATES:
        return RATES[written]
    if match := PERCENT.fullmatch(written):
        value = float(match[2]) / 100.0
        return {"": value, "+": 1.0 + value, "-": 1.0 - value}[match[1]]
    if FACTOR.fullmatch(written):
        return float(written)
    raise TextError(f"{written[:32]!r} is not a rate: write 120%, +20%, 1.2 or one of {', '.join(RATES)}")


def parse_volume(written: str) -> float:
    """Return the decibels of `+6dB` or `loud`. Raises TextError."""
    if written in VOLUMES:
        return VOLUMES[written]
    if match := DECIBELS.fullmatch(written):
        return float(match[1])
    raise TextError(f"{written[:32]!r} is not a volume: write +6dB or one of {', '.join(VOLUMES)}")


def _required(name: str, attributes: dict[str, str], attribute: str) -> str:
    if not attributes.get(attribute, "").strip():
        raise TextError(f"<{name}> needs the attribute {attribute}")
    return attributes[attribute]
