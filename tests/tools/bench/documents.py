"""Synthetic documents for tests, and their check against the schema."""

import json
from pathlib import Path
from random import Random
from typing import Any

import jsonschema_rs

from shoal.tools.bench.document import Document, new_document
from shoal.tools.bench.machine import describe_client
from shoal.tools.bench.sweep import summarize_run

SCHEMA = json.loads((Path(__file__).parents[3] / "shoal" / "tools" / "bench" / "schema.json").read_text())


def check_schema(document: Document) -> None:
    """Raise the error of jsonschema_rs for an invalid document, after a round trip through JSON."""
    kind = next(each for each in SCHEMA["oneOf"] if each["properties"]["kind"]["const"] == document["kind"])
    # Validate against the branch of this kind: the error of `oneOf` does not say what is wrong.
    schema = {**{key: value for key, value in SCHEMA.items() if key != "oneOf"}, "allOf": [kind]}
    jsonschema_rs.validator_for(schema).validate(json.loads(json.dumps(document)))
    jsonschema_rs.validator_for(SCHEMA).validate(json.loads(json.dumps(document)))


def bench_document(
    seed: int, *, slower: float = 1.0, noise: float = 0.04, names: tuple[str, ...] = ("bf16",)
) -> Document:
    """Return a synthetic benchmark on a machine slowed down by `slower`, with relative noise `noise`."""
    rng = Random(seed)
    machine = {**describe_client(), "others_cpu": 0.01}
    document = new_document("bench", machine, {"model": "made up", "currency": "USD", "price": 1.0})
    document["complete"] = True
    for name in names:
        run: dict[str, Any] = {"name": name, "settings": {}, "reason": None, "edges": []}
        run["startup"] = {"cold": {"load": 2.0, "warm_up": 3.0}, "warm": {"load": 1.0, "warm_up": 0.5}}
        run["memory"] = {"kind": "RSS", "baseline": 300_000_000, "loaded": 900_000_000, "peak": 1_100_000_000}
        run["engine"] = {"dtype": "bfloat16", "weights": "none", "backend": "eager", "sample_rate": 44_100}
        run["rounds"] = [_round(voices, rng, slower, noise) for voices in (1, 4, 16) for _ in range(5)]
        run["edges"].append({"name": "one word", "characters": 6, **_request(0, 0.4, 1.0, 0.1)})
        document["runs"].append(summarize_run(run, 1.0))
    unavailable = {"name": "fp8", "settings": {"quantize": "fp8"}, "reason": "fp8 cannot be used on cpu"}
    document["runs"].append(summarize_run(unavailable, 1.0))
    return document


def _round(voices: int, rng: Random, slower: float, noise: float) -> dict[str, Any]:
    # Disturbances last, so the requests of a round are slow or fast together.
    slowdown = slower * (1 + noise * rng.gauss(0, 1)) * (1 + voices / 20)
    requests = []
    for number in range(max(4, voices)):
        audio = 2.0 + number % 4
        factor = slowdown * (1 + noise * rng.gauss(0, 1))
        requests.append(_request(number, audio, 0.3 * audio * factor, 0.05 * factor))
    seconds = sum(each["seconds"] for each in requests) / voices
    return {"voices": voices, "seconds": seconds, "cpu_seconds": seconds, "requests": requests}


def _request(number: int, audio: float, seconds: float, first: float) -> dict[str, Any]:
    return {
        "text": number,
        "seconds": seconds,
        "first_audio": first,
        "audio_seconds": audio,
        "frames": round(audio * 21.5),
        "error": None,
    }
