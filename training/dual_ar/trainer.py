"""One step of training: losses, clipping, averages, and the state that a checkpoint holds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shoal.model.dual_ar import DualAR
from training.dual_ar.plan import Pace, Plan
from training.language import add_dropout, cross_entropies, initialise, is_audio, losses
from training.means import Means
from training.muon import Muon
from training.optimisers import adam, clip_to_running_norm, held_rate, set_rate
from training.packing import Library, Packer, corrupt, lower

STATS = ("loss", "semantic", "residual", "norm")
BETAS = (0.9, 0.95)


class Trainer:
    """Model, optimisers and buffers of the steps. Only `stats` synchronizes with the device."""

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
        self.means = Means(STATS, device)
        self.running_norm = torch.zeros((), device=device)
        matrices, others = split_weights(self.model)
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            "matrices": Muon(matrices, held_rate(plan.matrix_rate, device), weight_decay=plan.weight_decay),
            "others": adam(others, plan.rate, device, BETAS),
        }

    @torch.no_grad()
    def begin_with(self, trained: DualAR) -> None:
        """Load the weights of a trained model. Layers that it lacks keep their initial weights, which add nothing."""
        problems = self.model.load_state_dict(trained.state_dict(), strict=False)
        layers = [f"fast.layers.{n}." for n in range(trained.config.fast.n_layer, self.plan.config.fast.n_layer)]
        missing = [name for name in problems.missing_keys if not name.startswith(tuple(layers))]
        if missing or problems.unexpected_keys:
            raise ValueError(f"the model to begin with has another shape: {(missing + problems.unexpected_keys)[0]}")
        self.ema.load_state_dict(self.model.state_dict())

    def feed(self) -> None:
        """Copy the rows of the next step to the device; the previous step may still be running."""
        rows = self.packer.draw()
        for buffer, drawn in ((self.positions, rows.positions), (self.lowered, rows.lowered)):
            source = torch.from_numpy(drawn)
            buffer.copy_(source.pin_memory() if buffer.is_cuda else source, non_blocking=True)

    def step(self) -> None:
        """Update the weights once. No host synchronization, so it can be captured."""
        plan, size = self.plan, self.plan.config.codebook_size
        columns = lower(self.library.columns[self.positions].long(), self.lowered)
        inputs = corrupt(columns[:, :-1], size, plan.wrong_frames, plan.wrong_codes)
        targets = columns[:, 1:].flatten(0, 1)
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        with self.precision():
            semantic, residual = self.losses(self.model, inputs, targets, self.choose(targets))
        loss = semantic + residual
        loss.backward()
        norm = self._clip()
        for optimizer in self.optimizers.values():
            optimizer.step()
        self._average()
        self.means.note(torch.stack([loss, semantic, residual, norm]))

    def precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def choose(self, targets: Tensor) -> Tensor:
        """Return positions [n] of random frames, always the same number because graphs have fixed shapes."""
        lot = torch.rand(len(targets), device=self.device) * is_audio(targets[:, 0])
        return lot.topk(min(self.plan.residual_frames, len(targets)), sorted=False).indices

    def _clip(self) -> Tensor:
        """Clip the gradients relative to their running norm and return their norm."""
        gradients = [weight.grad for weight in self.model.parameters() if weight.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        clip_to_running_norm(gradients, norm, self.running_norm)
        return norm

    @torch.no_grad()
    def _average(self) -> None:
        torch._foreach_lerp_(list(self.ema.parameters()), list(self.model.parameters()), 1 - self.plan.ema)

    def stats(self) -> dict[str, float]:
        """Read the means of the steps, the only host synchronization. Raises Diverged."""
        return self.means.read(self.pace.step)

    def validate(self, model: DualAR | None = None) -> dict[str, Any]:
        """Return cross-entropies on held-out sentences, of the averaged weights unless others are given."""
        if self.validation is None:
            self.heldout.refresh()
            rows = Packer(self.heldout, self.plan.validation_rows, self.plan.length + 1).draw()
            self.validation = torch.from_numpy(rows.positions).to(self.device)
        columns = self.heldout.columns[self.validation].long()
        with self.precision():
            return cross_entropies(self.ema if model is None else model, columns)

    def set_rate(self, share: float) -> None:
        set_rate(self.optimizers["matrices"], self.plan.matrix_rate * share)
        set_rate(self.optimizers["others"], self.plan.rate * share)

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
            "running_norm": self.running_norm,
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
        self.running_norm.copy_(state["running_norm"])
        torch.set_rng_state(state["random"].cpu())
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state["device_random"].cpu())
        self.means.clear()


def split_weights(model: DualAR) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the matrices inside the layers, and all other weights: embeddings, heads, norms."""
    matrices = [weight for name, weight in model.named_parameters() if ".layers." in name and weight.dim() == 2]
    inside = set(map(id, matrices))
    return matrices, [weight for weight in model.parameters() if id(weight) not in inside]
