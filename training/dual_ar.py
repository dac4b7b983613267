"""Train the language model of `nano`: the modules of `shoal.model` themselves, on codes that are still being made.

    python -m training.dual_ar --codes build/codes --heldout-codes build/heldout-codes --out build/nano-lm --minutes 20

With `--teachers` the same command also speaks the corpus and encodes it, in processes beside this one, and training
starts as soon as enough is there. The wall clock drives the schedule: after a warm-up the rates stay, then fall in a
straight line to the end. What is kept is an average of the weights, the one that did best on held-out sentences.
`--resume` goes on from the checkpoint in --out.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.checkpoint.random import write_synthetic_tokenizer
from shoal.checkpoint.save import config_document, save_sharded_model, write_json
from shoal.model.config import DualARConfig
from shoal.model.dual_ar import DualAR
from training.codec import PIECE_BYTES, Diverged
from training.encode import ABOUT, About
from training.int8 import int8_rounded
from training.language import SHAPES, add_dropout, cross_entropies, initialise, is_audio, losses, model_config
from training.makers import Makers, Speaking
from training.muon import Muon
from training.packing import SEMANTIC_BEGIN, Library, Packer, corrupt, lower

logger = logging.getLogger(__name__)

FINISH_SECONDS = 20.0  # kept of the time for the last validation and the files
POSITIONS_PER_HOUR = 180_000  # 25 frames a second, and the text beside them


# ---------------------------------------------------------------------------------------------------------------------
# Training.


@dataclass(frozen=True)
class Plan:
    """Everything that decides a run besides the codes."""

    config: DualARConfig
    minutes: float = 20.0
    rows: int = 40
    length: int = 1024
    residual_frames: int = 12_288  # of the about 24,000 frames of a step, those that the fast transformer learns from
    seed: int = 0
    matrix_rate: float = 0.015
    rate: float = 2e-3
    weight_decay: float = 0.01
    warm_up: int = 150
    decay_share: float = 0.5
    final_share: float = 0.02
    dropout: float = 0.1
    lowered: float = 0.2
    wrong_frames: float = 0.04
    wrong_codes: float = 0.06
    ema: float = 0.999
    validation_rows: int = 64
    least_hours: float = 20.0
    max_steps: int = 1 << 40
    recoveries: int = 2


@dataclass
class Pace:
    """Where a run stands; all of it goes into the checkpoint."""

    step: int = 0
    spent: float = 0.0
    began_share: float = -1.0  # of the time that was over when the first step was taken
    ramp_from: int = 0
    rate_scale: float = 1.0
    best_score: float = math.inf
    best_step: int = -1


STATS = ("loss", "semantic", "residual", "norm")


class Trainer:
    """Model, optimisers and the buffers that steps read and write; nothing here waits for the device but `stats`."""

    def __init__(self, plan: Plan, library: Library, heldout: Library, device: torch.device) -> None:
        torch.manual_seed(plan.seed)
        self.plan, self.library, self.heldout, self.device = plan, library, heldout, device
        self.model = DualAR(plan.config).to(device)
        initialise(self.model)
        self.ema = copy.deepcopy(self.model).eval().requires_grad_(False)
        self.best: dict[str, Tensor] = {}
        add_dropout(self.model, plan.dropout)
        self.packer = Packer(library, plan.rows, plan.length + 1, plan.seed, plan.lowered)
        self.validation: Tensor | None = None
        self.losses: Callable[[DualAR, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = losses
        self.pace = Pace()
        self.positions = torch.zeros(plan.rows, plan.length + 1, dtype=torch.long, device=device)
        self.lowered = torch.zeros(plan.rows, plan.length + 1, dtype=torch.bool, device=device)
        self.means = torch.zeros(len(STATS), device=device)
        self.usual_norm = torch.zeros((), device=device)
        self.optimizers = self._optimizers()

    def _optimizers(self) -> dict[str, torch.optim.Optimizer]:
        matrices, others = split_weights(self.model)
        held = self.device.type == "cuda"
        options: dict[str, Any] = {"fused": True, "capturable": True} if held else {}

        def rate(value: float) -> Any:
            return torch.tensor(value, device=self.device) if held else value

        return {
            "matrices": Muon(matrices, rate(self.plan.matrix_rate), weight_decay=self.plan.weight_decay),
            "others": torch.optim.AdamW(
                others, lr=rate(self.plan.rate), betas=(0.9, 0.95), weight_decay=0.0, **options
            ),
        }

    def feed(self) -> None:
        """Put the rows of the next step in place; the device may still be busy with the one before."""
        rows = self.packer.draw()
        for buffer, drawn in ((self.positions, rows.positions), (self.lowered, rows.lowered)):
            source = torch.from_numpy(drawn)
            buffer.copy_(source.pin_memory() if buffer.is_cuda else source, non_blocking=True)

    def step(self) -> None:
        """One update of everything. No host reads: a graph can hold all of it."""
        plan, size = self.plan, self.plan.config.codebook_size
        columns = lower(self.library.columns[self.positions].long(), self.lowered)
        inputs = corrupt(columns[:, :-1], size, plan.wrong_frames, plan.wrong_codes)
        targets = columns[:, 1:].flatten(0, 1)
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        with self.precision():
            main, residual = self.losses(self.model, inputs, targets, self._choose(targets))
        loss = main + residual
        loss.backward()
        norm = self._clip()
        for optimizer in self.optimizers.values():
            optimizer.step()
        self._average()
        self._note(torch.stack([loss, main, residual, norm]))

    def precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def _choose(self, targets: Tensor) -> Tensor:
        """Positions [n] of random frames; always the same number, since a graph has fixed shapes."""
        lot = torch.rand(len(targets), device=self.device) * is_audio(targets[:, 0])
        return lot.topk(min(self.plan.residual_frames, len(targets)), sorted=False).indices

    def _clip(self) -> Tensor:
        """Hold a step's gradient to three times the usual norm; what is usual, the run finds out itself."""
        gradients = [weight.grad for weight in self.model.parameters() if weight.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        usual = torch.where(self.usual_norm > 0, self.usual_norm, norm)
        torch._foreach_mul_(gradients, (3 * usual / (norm + 1e-6)).clamp(max=1.0))
        self.usual_norm.copy_(usual.lerp(torch.minimum(norm, 3 * usual), 0.02))
        return norm

    @torch.no_grad()
    def _average(self) -> None:
        torch._foreach_lerp_(list(self.ema.parameters()), list(self.model.parameters()), 1 - self.plan.ema)

    @torch.no_grad()
    def _note(self, now: Tensor) -> None:
        now = now.detach().float()
        self.means.copy_(torch.where(self.means == 0, now, self.means.lerp(now, 0.02)))

    def stats(self) -> dict[str, float]:
        """Running means; raises Diverged. The one place where a step's numbers reach the host."""
        found = dict(zip(STATS, self.means.tolist(), strict=True))
        if not all(math.isfinite(value) for value in found.values()):
            raise Diverged(f"step {self.pace.step}: {found}")
        return {key: round(value, 4) for key, value in found.items()}

    def validate(self, model: DualAR | None = None) -> dict[str, Any]:
        """Cross-entropies on held-out sentences, of the averaged weights unless others are given."""
        if self.validation is None:
            self.heldout.refresh()
            rows = Packer(self.heldout, self.plan.validation_rows, self.plan.length + 1).draw()
            self.validation = torch.from_numpy(rows.positions).to(self.device)
        columns = self.heldout.columns[self.validation].long()
        with self.precision():
            return cross_entropies(self.ema if model is None else model, columns)

    def set_rate(self, share: float) -> None:
        for name, rate in (("matrices", self.plan.matrix_rate), ("others", self.plan.rate)):
            for group in self.optimizers[name].param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate * share)
                else:
                    group["lr"] = rate * share

    @torch.no_grad()
    def keep_if_best(self, score: float) -> bool:
        if score >= self.pace.best_score:
            return False
        self.pace.best_score, self.pace.best_step = score, self.pace.step
        self.best = {name: value.detach().clone() for name, value in self.ema.state_dict().items()}
        return True

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "ema": self.ema.state_dict(),
            "best": self.best,
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
            "packer": self.packer.state(),
            "pace": vars(self.pace),
            "usual_norm": self.usual_norm,
            "random": torch.get_rng_state(),
            "device_random": torch.cuda.get_rng_state() if self.device.type == "cuda" else None,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.ema.load_state_dict(state["ema"])
        self.best = state["best"]
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        self.packer.load(state["packer"])
        self.pace = Pace(**state["pace"])
        self.usual_norm.copy_(state["usual_norm"])
        torch.set_rng_state(state["random"].cpu())
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state["device_random"].cpu())
        self.means.zero_()


def split_weights(model: DualAR) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices inside the layers, and all the rest: embeddings, heads, norms."""
    matrices = [weight for name, weight in model.named_parameters() if ".layers." in name and weight.dim() == 2]
    inside = set(map(id, matrices))
    return matrices, [weight for weight in model.parameters() if id(weight) not in inside]


# ---------------------------------------------------------------------------------------------------------------------
# Speed: a compiled loss and a captured step, each with a way back.


def compile_losses(trainer: Trainer) -> None:
    """Compile the loss; on any failure train with the plain one."""
    try:
        compiled = torch.compile(losses, dynamic=False, fullgraph=True)
        began = time.monotonic()
        plan = trainer.plan
        columns = torch.zeros(plan.rows, plan.length + 1, 1 + plan.config.num_codebooks, dtype=torch.long)
        columns[..., 0] = SEMANTIC_BEGIN
        columns = columns.to(trainer.device)
        targets = columns[:, 1:].flatten(0, 1)
        with trainer.precision():
            main, residual = compiled(trainer.model, columns[:, :-1].clone(), targets, trainer._choose(targets))
        (main + residual).backward()
        trainer.model.zero_grad(set_to_none=True)
        trainer.losses = compiled
        logger.info("compiled in %.0f s", time.monotonic() - began)
    except Exception as problem:  # noqa: BLE001 - whatever the compiler raises, plain code still trains
        logger.warning("not compiled: %s", problem)
        trainer.model.zero_grad(set_to_none=True)


def make_runner(trainer: Trainer, *, capture: bool) -> Callable[[], None]:
    """A step, captured as one graph where that works. Takes three steps on the way, which count like any other."""
    if not capture or trainer.device.type != "cuda":
        return trainer.step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            trainer.feed()
            trainer.step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            trainer.step()
    except Exception as problem:  # noqa: BLE001 - a step that cannot be captured is slow, not wrong
        logger.warning("not captured: %s", problem)
        torch.cuda.synchronize()
        return trainer.step
    return graph.replay


# ---------------------------------------------------------------------------------------------------------------------
# The run.


@dataclass
class Run:
    """The loop around the steps: schedule, log, validation, checkpoints."""

    trainer: Trainer
    about: About
    out: Path
    began: float
    capture: bool = True
    log_every: int = 100
    sync_every: int = 10
    validate_seconds: float = 30.0
    checkpoint_seconds: float = 60.0
    refresh_seconds: float = 3.0
    runner: Callable[[], None] | None = None
    recovered: int = 0
    written: int = -1  # the step of the best weights that are on disk
    due: dict[str, float] = field(default_factory=dict)
    marked: tuple[int, float] = (0, 0.0)

    @property
    def pace(self) -> Pace:
        return self.trainer.pace

    @property
    def share(self) -> float:
        """Of the time there is for steps, how much is over; the last seconds are for the files."""
        return min((time.monotonic() - self.began) / max(60 * self.trainer.plan.minutes - FINISH_SECONDS, 1e-9), 1.0)

    def go(self) -> None:
        """Until the time is over; raises Diverged when recovering did not help, with the best weights written."""
        now = time.monotonic()
        self.due = {"validate": now + 20, "checkpoint": now + self.checkpoint_seconds, "refresh": now}
        self.marked = (self.pace.step, now)
        if self.pace.began_share < 0:
            self.pace.began_share = self.share
        try:
            while self.share < 1 and self.pace.step < self.trainer.plan.max_steps and not (self.out / "stop").exists():
                try:
                    self._advance()
                except Diverged as problem:
                    self._recover(problem)
            self.trainer.stats()
            self._validate()
            self._checkpoint()
        finally:
            self.export()

    def _advance(self) -> None:
        self._set_rate()
        if self.runner is None:
            self.runner = make_runner(self.trainer, capture=self.capture)
        self.trainer.feed()
        self.runner()
        self.pace.step += 1
        if self.pace.step % self.log_every == 0:
            self._report()
        if self.pace.step % self.sync_every == 0:
            # Waits for the device, so that the host never runs minutes ahead of the clock it looks at.
            self.trainer.stats()
            self._look_at_the_clock()

    def _set_rate(self) -> None:
        plan, pace = self.trainer.plan, self.pace
        warm = min(1.0, (pace.step - pace.ramp_from + 1) / plan.warm_up)
        left = (1 - self.share) / ((1 - max(pace.began_share, 0.0)) * plan.decay_share)
        self.trainer.set_rate(warm * max(plan.final_share, min(1.0, left)) * pace.rate_scale)

    def _report(self) -> None:
        stats = self.trainer.stats()
        now, (step, then) = time.monotonic(), self.marked
        self.marked = (self.pace.step, now)
        library = self.trainer.library
        hours = library.frames * self.about.frame_length / self.about.sample_rate / 3600
        pace = {"step": self.pace.step, "share": round(self.share, 4), "hours": round(hours, 2)}
        epochs = self.pace.step * self.trainer.positions.numel() / library.filled
        ms = 1000 * (now - then) / max(self.pace.step - step, 1)
        self.write({**pace, "passes": round(epochs, 2), "ms": round(ms, 2), **stats})

    def _look_at_the_clock(self) -> None:
        tasks: tuple[tuple[str, float, Callable[[], object]], ...] = (
            ("refresh", self.refresh_seconds, self.trainer.library.refresh),
            ("validate", self.validate_seconds, self._validate),
            ("checkpoint", self.checkpoint_seconds, self._checkpoint),
        )
        for name, period, work in tasks:
            if time.monotonic() >= self.due[name]:
                work()
                self.due[name] = time.monotonic() + period

    def _validate(self) -> None:
        found = self.trainer.validate()
        kept = self.trainer.keep_if_best(found["score"])
        self.write({"step": self.pace.step, "validation": found, "best": kept})

    def _checkpoint(self) -> None:
        """A checkpoint is never half written, and never holds a model that has diverged."""
        self.trainer.stats()
        self.pace.spent = time.monotonic() - self.began
        temporary = self.out / "state.pt.tmp"
        torch.save(self.trainer.state(), temporary)
        temporary.replace(self.out / "state.pt")
        if self.pace.best_step != self.written:
            self._save_best({"step": self.pace.best_step, "score": self.pace.best_score})

    def _save_best(self, trained: dict[str, Any]) -> None:
        """The best weights as a model of their own, for whoever cannot wait for the end."""
        best = DualAR(self.trainer.plan.config)
        best.load_state_dict(self.trainer.best)
        save_language_model(self.out / "best", best, self.about, trained)
        self.written = self.pace.best_step

    def _recover(self, problem: Diverged) -> None:
        """Go back to the last checkpoint and on with half the rates."""
        stored = self.out / "state.pt"
        self.write({"diverged": str(problem)})
        if self.recovered >= self.trainer.plan.recoveries or not stored.exists():
            raise problem
        self.recovered += 1
        scale = self.pace.rate_scale
        self.trainer.load(torch.load(stored, map_location=self.trainer.device, weights_only=True))
        self.pace.rate_scale = scale / 2
        self.pace.ramp_from = self.pace.step
        self.runner = None  # the optimisers hold new tensors, so the step has to be captured again

    def export(self) -> None:
        """The best weights so far, and what int8 storage would make of them."""
        trainer = self.trainer
        if not trainer.best:
            return
        trainer.ema.load_state_dict(trainer.best)
        found = {"fp32": trainer.validate(), "int8": trainer.validate(int8_rounded(trainer.ema))}
        self.write({"best_step": self.pace.best_step, "storage": found})
        self._save_best({"step": self.pace.best_step, **found})

    def write(self, line: dict[str, Any]) -> None:
        line = {"t": round(time.monotonic() - self.began, 1), **line}
        text = json.dumps(line)
        with (self.out / "log.jsonl").open("a") as log:
            log.write(text + "\n")
        print(text, flush=True)


def save_language_model(folder: Path, model: DualAR, about: About, trained: dict[str, Any]) -> None:
    """A directory that the ordinary loader reads, beside a codec: fp16, in files small enough to carry.

    What was there before is replaced at once, when everything is written.
    """
    made = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    write_json(made / "config.json", config_document(model.config))
    write_json(made / ABOUT, asdict(about))
    write_json(made / "trained.json", trained)
    write_synthetic_tokenizer(made, model.config)
    save_sharded_model(made, copy.deepcopy(model).to("cpu", torch.float16), PIECE_BYTES)
    shutil.rmtree(folder, ignore_errors=True)
    made.rename(folder)


# ---------------------------------------------------------------------------------------------------------------------
# Command line.


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m training.dual_ar", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--codes", type=Path, required=True, help="folder of encoded shards; may still be growing")
    parser.add_argument("--heldout-codes", type=Path, required=True, help="the same of held-out sentences")
    parser.add_argument("--out", type=Path, required=True, help="log, checkpoint and the finished model")
    parser.add_argument("--minutes", type=float, default=Plan.minutes, help="wall clock from start to finished files")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="nano")
    parser.add_argument("--rows", type=int, default=Plan.rows, help="rows per step")
    parser.add_argument("--length", type=int, default=Plan.length, help="positions per row")
    parser.add_argument("--residual-frames", type=int, default=Plan.residual_frames)
    parser.add_argument("--validation-rows", type=int, default=Plan.validation_rows)
    parser.add_argument("--matrix-rate", type=float, default=Plan.matrix_rate, help="peak rate inside the layers")
    parser.add_argument("--rate", type=float, default=Plan.rate, help="peak rate of embeddings, heads and norms")
    parser.add_argument("--dropout", type=float, default=Plan.dropout)
    parser.add_argument("--least-hours", type=float, default=Plan.least_hours, help="speech to wait for before step 1")
    parser.add_argument("--hours", type=float, default=400.0, help="most speech to make, and to keep in device memory")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-steps", type=int, default=Plan.max_steps)
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--plain", action="store_true", help="neither compile nor capture")
    making = parser.add_argument_group("speak and encode the corpus meanwhile")
    making.add_argument("--teachers", type=Path, help="folder made by training/teachers/build.sh")
    making.add_argument("--text", type=Path, help="sentences to train on")
    making.add_argument("--heldout-text", type=Path, help="sentences to validate on")
    making.add_argument("--codec", type=Path, help="folder of the finished codec")
    making.add_argument("--codebooks", type=int, help="use the first so many of the codec's; all if not given")
    making.add_argument("--speech", type=Path, help="folder for the recordings, which are emptied once encoded")
    making.add_argument("--processes", type=int, default=14, help="processes that speak")
    options = parser.parse_args(arguments)
    speaking = (options.teachers, options.text, options.heldout_text, options.codec, options.speech)
    if any(speaking) and not all(speaking):
        parser.error("--teachers, --text, --heldout-text, --codec and --speech go together")
    return options


def make_plan(options: argparse.Namespace, about: About) -> Plan:
    named = (
        "minutes", "rows", "length", "residual_frames", "validation_rows", "matrix_rate", "rate", "dropout",
        "least_hours", "seed", "max_steps",
    )  # fmt: skip
    config = model_config(SHAPES[options.shape], about.codebooks, about.codebook_size)
    return replace(Plan(config), **{name: getattr(options, name) for name in named})


def speaking(options: argparse.Namespace) -> Speaking | None:
    """What to run beside the training, if anything."""
    if options.teachers is None:
        return None
    return Speaking(
        teachers=options.teachers,
        text=options.text,
        heldout_text=options.heldout_text,
        codec=options.codec,
        codebooks=options.codebooks,
        speech=options.speech,
        codes=options.codes,
        heldout_codes=options.heldout_codes,
        hours=options.hours,
        processes=options.processes,
    )


def wait_for(ready: Callable[[], bool], what: str, seconds: float, makers: Makers) -> None:
    """Until it is ready; raises TimeoutError, or RuntimeError if those who should make it have failed."""
    end = time.monotonic() + seconds
    while not ready():
        makers.check()
        if time.monotonic() > end:
            raise TimeoutError(f"{what} after {seconds:.0f} s")
        time.sleep(0.3)


def train(options: argparse.Namespace, makers: Makers, began: float) -> None:
    limit = 60 * options.minutes
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wait_for((options.codes / ABOUT).exists, f"{options.codes}: no codes", limit, makers)
    about = About.read(options.codes)
    plan = make_plan(options, about)
    capacity = int(options.hours * POSITIONS_PER_HOUR)
    library = Library(options.codes, about.codebooks, capacity, device)
    heldout = Library(options.heldout_codes, about.codebooks, capacity // 20 + 1_000_000, device)
    trainer = Trainer(plan, library, heldout, device)
    if not options.plain:
        compile_losses(trainer)
    least = plan.least_hours * 3600 * about.sample_rate / about.frame_length

    def enough() -> bool:
        library.refresh()
        heldout.refresh()
        return library.frames >= least and len(heldout) > 0

    wait_for(enough, f"{options.codes}: too few codes", limit, makers)
    if options.resume:
        trainer.load(torch.load(options.out / "state.pt", map_location=device, weights_only=True))
        began -= trainer.pace.spent
    Run(trainer, about, options.out, began, capture=not options.plain).go()


def main(arguments: Sequence[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    began = time.monotonic()
    options = parse_arguments(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    with Makers.start(speaking(options), options.out) as makers:
        train(options, makers, began)


if __name__ == "__main__":
    main()
