"""Comparisons of the DualAR model: logits, hidden states, probabilities and decoded frames."""

from collections.abc import Iterator

import torch
from torch import Tensor

from shoal.kernels.sampling.sample import apply_repetition_penalty, exponential_noise, probabilities
from shoal.kernels.sampling.sample_token import SEMANTIC_LANE
from shoal.model.cache import NoKVCache
from shoal.model.dual_ar import DualAR
from shoal.model.frame import FrameSampler, FrameState, Noise
from shoal.model.generate import generate_tokens
from shoal.model.sampling import SamplingTensors
from shoal.model.slow import Head
from shoal.speech import SamplingParams
from shoal.tools.verify.comparison import LOGITS, PROBABILITIES, QUANTIZED, ParityComparison, close, equal
from shoal.tools.verify.golden import Case, Golden, TensorFile

ROUNDING = 1e-6  # rounding error of a sum of probabilities in fp32


def prefill(golden: Golden, family: str) -> Iterator[ParityComparison]:
    model, stored = golden.model(family), golden.tensors(f"{family}/prefill.safetensors")
    yield from _prompts(golden, family, model, stored, f"{family}/prefill", LOGITS)


def fast(golden: Golden, family: str) -> Iterator[ParityComparison]:
    stored = golden.tensors(f"{family}/fast.safetensors")
    logits = _fast_logits(golden, golden.model(family), stored["hidden"], stored["codes"])
    yield close(f"{family}/fast", "logits", logits, stored["logits"], LOGITS)


def sampler(golden: Golden, family: str) -> Iterator[ParityComparison]:
    """Compare probabilities and the set of tokens that survive top-p and top-k."""
    group, stored = f"{family}/sampler", golden.tensors(f"{family}/sampler.safetensors")
    for case in golden.cases(f"{family}/sampler.json"):
        name = str(case["case"])
        logits = _penalised(stored[f"{name}.logits"][None].to(golden.device), case)
        rows = SamplingTensors.from_settings([_sampling(case)], logits.device)
        probs = probabilities(logits, rows.temperature, rows.top_p, rows.top_k)[0].cpu()
        edge = _at_cutoff(logits[0], case["top_p"])
        ours, theirs = _without(probs, edge), _without(stored[f"{name}.probs"], edge)
        yield close(group, f"{name}.probs", ours, theirs, PROBABILITIES)
        yield equal(group, f"{name}.survivors", ours > 0, theirs > 0)


def candidate_ids(golden: Golden) -> Iterator[ParityComparison]:
    """Compare the ids of the reduced head with those that upstream's constraint allows."""
    allowed = golden.tensors("s2/sampler.safetensors")["constraint_bias"] == 0
    ids = Head(golden.model("s2").slow).ids.sort().values
    yield equal("s2/legal", "ids", ids, allowed.nonzero().flatten())


def decode(golden: Golden, family: str) -> Iterator[ParityComparison]:
    """Compare greedy frames, and their hidden states in one teacher-forced pass."""
    group, stored = f"{family}/decode", golden.tensors(f"{family}/decode.safetensors")
    model = golden.model(family)
    for case in golden.cases(f"{family}/decode.json"):
        if "file" in case:
            continue
        prompt, frames = golden.prompt(family, case["prompt"]), stored[f"{case['name']}.frames"]
        ours = _decoded_tokens(model, prompt, case, exponential_noise)
        yield equal(group, f"{case['name']}.frames", ours, frames)
        hidden = _hidden_behind(model, prompt, frames.to(golden.device))
        yield close(group, f"{case['name']}.hidden", hidden, stored[f"{case['name']}.hidden"], LOGITS)


def decode_with_noise(golden: Golden, family: str) -> Iterator[ParityComparison]:
    """Compare sampled frames, using upstream's stored noise."""
    model = golden.model(family)
    for case in golden.cases(f"{family}/decode.json"):
        if "file" not in case:
            continue
        stored = golden.tensors(f"{family}/{case['file']}")
        noise = _StoredNoise(stored, _head(model), golden.device)
        ours = _decoded_tokens(model, golden.prompt(family, case["prompt"]), case, noise)
        yield equal(f"{family}/noise", f"{case['name']}.frames", ours, stored["frames"])


def repetition(golden: Golden) -> Iterator[ParityComparison]:
    """Compare S2's repetition-aware sampling (RAS), one decision at a time."""
    model, stored = golden.model("s2"), golden.tensors("s2/ras.safetensors")
    head = _head(model)
    for case in golden.cases("s2/ras.json"):
        name = str(case["case"])
        noise = _StoredDraws(stored, name, head, golden.device)
        decoder = FrameSampler(model, head, noise)
        logits = stored[f"{name}.logits"].to(golden.device)[head.ids][None]
        token = head.ids[decoder.sample_semantic(logits, _state_after(golden, model, case))]
        yield equal("s2/ras", f"{name} {case['kind']}", token, torch.tensor([case["token"]]))


def int8(golden: Golden) -> Iterator[ParityComparison]:
    group, model, stored = "quant/int8", golden.int8_model(), golden.tensors("quant/int8.safetensors")
    yield from _prompts(golden, "s1", model, stored, group, QUANTIZED)
    first = golden.tensors("s1/fast.safetensors")
    logits = _fast_logits(golden, model, first["hidden"][:1], first["codes"][:1])
    yield close(group, "fast.logits", logits, stored["fast.logits"], QUANTIZED)
    case = golden.document("quant/quant.json")["int8"]["decode"]
    ours = _decoded_tokens(model, golden.prompt("s1", case["prompt"]), case, exponential_noise)
    yield equal(group, "decode.frames", ours, stored["decode.frames"])


def int4(golden: Golden) -> Iterator[ParityComparison]:
    stored = golden.tensors("quant/int4_g128_unpacked.safetensors")
    yield from _prompts(golden, "s1", golden.int4_model(), stored, "quant/int4", QUANTIZED)


def _prompts(
    golden: Golden, family: str, model: DualAR, stored: TensorFile, group: str, tolerance: float
) -> Iterator[ParityComparison]:
    """Compare what is stored of each prompt: logits and hidden state of the last token, hidden states of all."""
    head = Head(model.slow, full_vocab=True)
    names = [name for name in stored.parts("logits") if name != "fast"]
    for name in names:
        hidden, normed = _run(model, golden.prompt(family, name))
        given = model.fast_input(hidden, normed)
        ours = {"logits": head(normed[-1]), "hidden": given[-1], "hidden_all": given}
        for kind, tensor in ours.items():
            if f"{name}.{kind}" in stored:
                yield close(group, f"{name}.{kind}", tensor, stored[f"{name}.{kind}"], tolerance)


def _run(model: DualAR, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return hidden states [T, dim] of tokens [1 + codebooks, T], before and after the final norm."""
    positions = torch.arange(tokens.shape[1], device=model.device)
    hidden = model.slow(tokens.T, positions, NoKVCache(1))
    return hidden, model.slow.norm(hidden)


def _hidden_behind(model: DualAR, prompt: Tensor, frames: Tensor) -> Tensor:
    """Return the input of the fast model for each frame [n, dim]. The last frame is sampled but never fed back."""
    given = model.fast_input(*_run(model, torch.cat((prompt, frames[:, :-1]), dim=1)))
    return given[prompt.shape[1] - 1 :]


def _fast_logits(golden: Golden, model: DualAR, hidden: Tensor, codes: Tensor) -> Tensor:
    return model.fast.teacher_forced(hidden.to(golden.device, golden.dtype), codes.long().to(golden.device))


def _penalised(logits: Tensor, case: Case) -> Tensor:
    previous = case.get("previous_tokens")
    if previous is None:
        return logits
    penalty = torch.tensor([case["repetition_penalty"]], device=logits.device)
    return apply_repetition_penalty(logits, torch.tensor([previous], device=logits.device), penalty)


def _at_cutoff(logits: Tensor, top_p: float) -> Tensor:
    """Return a mask of the tokens whose cumulative probability equals top_p within rounding.

    fp32 may keep or drop these, depending on the CPU's summation order. With top_p = 1 this is the whole tail.
    """
    ranked, order = logits.double().cpu().sort(descending=True)
    near = (ranked.softmax(-1).cumsum(-1) - top_p).abs() < ROUNDING
    near[0] = False  # the likeliest token is always kept
    return torch.empty_like(near).scatter_(0, order, near)


def _without(probs: Tensor, entries: Tensor) -> Tensor:
    left = probs.masked_fill(entries, 0.0)
    return left / left.sum()


def _decoded_tokens(model: DualAR, prompt: Tensor, case: Case, noise: Noise) -> Tensor:
    """Return all frames of a decode [1 + codebooks, n], including the one with the stop token."""
    return torch.stack(list(generate_tokens(model, _head(model), prompt, _sampling(case), noise)), dim=1)


def _head(model: DualAR) -> Head:
    """Return the head as upstream uses it: S1 samples from the whole vocabulary."""
    return Head(model.slow, full_vocab=not model.config.family.constrained)


def _sampling(case: Case) -> SamplingParams:
    return SamplingParams(
        temperature=case["temperature"],
        top_p=case["top_p"],
        top_k=case.get("top_k", 0),
        repetition_penalty=case.get("repetition_penalty", 1.0),
        max_frames=case.get("max_new_tokens", 0),
    )


def _state_after(golden: Golden, model: DualAR, case: Case) -> FrameState:
    """Return upstream's sampling state at a decision; the first frame has no window of earlier tokens."""
    state = FrameState.initial(model.config, SamplingTensors.from_settings([_sampling(case)], model.device))
    if case["window"] is not None:
        state.window[0, 0] = torch.tensor(case["window"], device=golden.device)
        state.frame += 1 + len(case["window"])
    return state


class _StoredNoise:
    """Noise source that replays a stored decode, by frame, reduced to the ids of the head."""

    def __init__(self, stored: TensorFile, head: Head, device: str) -> None:
        names = ("noise_main",) if "noise_main" in stored else ("noise_normal", "noise_high")
        self.main = [stored[name].float().to(device)[:, head.ids] for name in names]
        self.residual = stored["noise_residual"].float().to(device)

    def __call__(self, seed: Tensor, frame: Tensor, lane: int | Tensor, size: int) -> Tensor:
        if isinstance(lane, Tensor):
            return self.residual[frame]
        return self.main[0 if lane == SEMANTIC_LANE else 1][frame]


class _StoredDraws:
    """Noise source of a single RAS decision: the normal draw and the high-temperature redraw."""

    def __init__(self, stored: TensorFile, case: str, head: Head, device: str) -> None:
        self.normal, self.redraw = (
            stored[f"{case}.{name}"].float().to(device)[head.ids][None] for name in ("noise_normal", "noise_high")
        )

    def __call__(self, seed: Tensor, frame: Tensor, lane: int | Tensor, size: int) -> Tensor:
        return self.normal if lane == SEMANTIC_LANE else self.redraw
