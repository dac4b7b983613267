"""Parity with upstream, and sensitivity of `verify` to bugs."""

import json
import shutil
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from shoal.codec import layers as codec_layers
from shoal.codec.layers import WindowTransformer, window_mask
from shoal.codec.streaming import Past
from shoal.errors import CheckpointError, InvalidRequest, VerificationFailed
from shoal.kernels.sampling.sample import probabilities
from shoal.model import cache as cache_module
from shoal.model import frame as frame_module
from shoal.model import layers as model_layers
from shoal.model.fast import FastTransformer
from shoal.model.frame import FrameSampler
from shoal.model.sampling import SamplingTensors
from shoal.model.slow import SlowTransformer
from shoal.tools.verify import GROUPS, ParityComparison, as_json, as_table, require_all, verify
from shoal.tools.verify import model as verified_model

# Files of the golden directory and the groups that read them.
READERS = {
    "s1/tokenizer_cases.json": ["s1/tokenizer"],
    "s2/tokenizer_cases.json": ["s2/tokenizer"],
    "prompts/cases.json": ["s1/prompts", "s2/prompts", "s2/batches"],
    "prompts/s1.npz": ["s1/prompts"],
    "prompts/s2.npz": ["s2/prompts"],
    "s1/prefill.safetensors": ["s1/prefill"],
    "s2/prefill.safetensors": ["s2/prefill"],
    "s1/fast.safetensors": ["s1/fast"],
    "s2/fast.safetensors": ["s2/fast"],
    "s1/sampler.json": ["s1/sampler"],
    "s1/sampler.safetensors": ["s1/sampler"],
    "s2/sampler.json": ["s2/sampler"],
    "s2/sampler.safetensors": ["s2/sampler", "s2/legal"],
    "s1/decode.json": ["s1/decode", "s1/noise"],
    "s2/decode.json": ["s2/decode", "s2/noise"],
    "s1/decode.safetensors": ["s1/decode"],
    "s2/decode.safetensors": ["s2/decode"],
    "s1/decode_noise.safetensors": ["s1/noise"],
    "s2/decode_noise.safetensors": ["s2/noise"],
    "s2/ras.json": ["s2/ras"],
    "s2/ras.safetensors": ["s2/ras"],
    "codec/config.json": ["codec/decode"],
    "codec/codec.pth": ["codec/encode"],
    "codec/decode.safetensors": ["codec/decode", "codec/prefixes", "codec/clamp", "codec/streaming"],
    "codec/encode.safetensors": ["codec/encode", "codec/short"],
    "quant/quant.json": ["quant/int8"],
    "quant/int8.safetensors": ["quant/int8"],
    "quant/int4_g128_unpacked.safetensors": ["quant/int4"],
}


@pytest.fixture(scope="module")
def compared(golden: Path) -> dict[str, list[ParityComparison]]:
    """Return the comparisons of the stored data by group, in order."""
    found: dict[str, list[ParityComparison]] = {}
    for comparison in verify(golden):
        found.setdefault(comparison.group, []).append(comparison)
    return found


@pytest.fixture
def copy(golden: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(golden, tmp_path / "golden"))


# Parity


@pytest.mark.parametrize("group", GROUPS)
def test_every_comparison_of_a_group_holds(group: str, compared: dict[str, list[ParityComparison]]) -> None:
    assert [comparison for comparison in compared[group] if not comparison.ok] == []


def test_every_group_is_run_under_its_own_name_and_in_order(compared: dict[str, list[ParityComparison]]) -> None:
    assert list(compared) == list(GROUPS)


def test_every_stored_tensor_is_compared_or_an_input(golden: Path, compared: dict[str, list[ParityComparison]]) -> None:
    """The number of comparisons equals that of stored outputs, so that no group skips a case."""
    assert {group: len(found) for group, found in compared.items()} == {
        "s1/tokenizer": 32, "s2/tokenizer": 32, "s1/prompts": 15, "s2/prompts": 19, "s2/batches": 15,
        "s1/prefill": 15, "s2/prefill": 14, "s1/fast": 1, "s2/fast": 1, "s1/sampler": 42, "s2/sampler": 48,
        "s2/legal": 1, "s1/decode": 10, "s2/decode": 10, "s1/noise": 1, "s2/noise": 1, "s2/ras": 19,
        "codec/decode": 4, "codec/prefixes": 4, "codec/clamp": 1, "codec/streaming": 4, "codec/encode": 4,
        "codec/short": 4, "quant/int8": 12, "quant/int4": 5,
    }  # fmt: skip


def test_every_file_of_the_golden_directory_has_a_reader(golden: Path) -> None:
    files = {path.relative_to(golden).as_posix() for path in golden.rglob("*") if path.is_file()}
    checkpoints = {name for name in files if "checkpoint/" in name or name.startswith("quant/fs-")}
    assert files - checkpoints - {"README.md", "codec/notes.json"} == set(READERS)
    assert {group for groups in READERS.values() for group in groups} == set(GROUPS)


@pytest.mark.gpu
@pytest.mark.parametrize("group", GROUPS)
def test_every_comparison_of_a_group_holds_on_the_gpu(group: str, golden: Path) -> None:
    require_all(verify(golden, device="cuda", only=[group]))


# Bugs are detected


Alteration = Callable[[pytest.MonkeyPatch], None]


def exact_rope_tables(patch: pytest.MonkeyPatch) -> None:
    def table(length: int, head_dim: int, base: float, device: object = None) -> Tensor:
        with torch.device("cpu"):
            angle = torch.outer(torch.arange(length).float(), base ** (-torch.arange(0, head_dim, 2) / head_dim))
            return torch.stack((angle.cos(), angle.sin()), dim=-1)

    patch.setattr(model_layers, "rope_table", table)
    patch.setattr(codec_layers, "rope_table", table)


def half_split_rotation(patch: pytest.MonkeyPatch) -> None:
    def rotate(x: Tensor, table: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        cos, sin = table.unsqueeze(-3).unbind(-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    patch.setattr(model_layers, "rotate", rotate)


def positions_from_one(patch: pytest.MonkeyPatch) -> None:
    forward = SlowTransformer.forward
    patch.setattr(SlowTransformer, "forward", lambda self, x, at, cache: forward(self, x, at + 1, cache))


def no_causal_mask(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cache_module, "causal_mask", lambda new, seen, device: torch.ones(new, seen, dtype=torch.bool))


def unscaled_embeddings(patch: pytest.MonkeyPatch) -> None:
    embed = SlowTransformer.embed

    def without_scale(self: SlowTransformer, columns: Tensor) -> Tensor:
        main, scaled = columns[:, :1], embed(self, columns)
        semantic = (main >= self.config.semantic_begin_id) & (main <= self.config.semantic_end_id)
        return torch.where(semantic, scaled * 11**0.5, scaled)

    patch.setattr(SlowTransformer, "embed", without_scale)


def other_hidden_for_the_fast_model(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("shoal.model.dual_ar.DualAR.fast_input", lambda self, hidden, normed: (
        hidden if self.config.norm_fastlayer_input else normed
    ))  # fmt: skip


def fast_model_without_its_hidden(patch: pytest.MonkeyPatch) -> None:
    forced = FastTransformer.teacher_forced
    patch.setattr(FastTransformer, "teacher_forced", lambda self, hidden, codes: forced(self, 0 * hidden, codes))


def temperature_before_the_nucleus(patch: pytest.MonkeyPatch) -> None:
    def probs(logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
        return probabilities(logits / temperature[:, None].clamp_min(1e-5), torch.ones_like(temperature), top_p, top_k)

    patch.setattr(verified_model, "probabilities", probs)


def crossing_token_kept(patch: pytest.MonkeyPatch) -> None:
    def probs(logits: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
        ranked, order = logits.sort(dim=-1, descending=True)
        share = ranked.softmax(-1)
        drop = (share.cumsum(-1) - share > top_p[:, None]) | (torch.arange(logits.shape[-1]) >= top_k[:, None])
        kept = torch.empty_like(logits).scatter_(-1, order, ranked.masked_fill(drop, -torch.inf))
        return (kept / temperature[:, None].clamp_min(1e-5)).softmax(-1)

    patch.setattr(verified_model, "probabilities", probs)


def penalty_by_own_history(patch: pytest.MonkeyPatch) -> None:
    make = SamplingTensors.from_settings.__func__  # type: ignore[attr-defined]

    def from_settings(cls: type[SamplingTensors], settings: list[Any], device: torch.device) -> SamplingTensors:
        rows: SamplingTensors = make(cls, settings, device)
        rows.whole_window |= True
        return rows

    patch.setattr(SamplingTensors, "from_settings", classmethod(from_settings))


def no_penalty(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(frame_module, "apply_repetition_penalty", lambda logits, columns, penalty: logits)


def first_frame_remembered(patch: pytest.MonkeyPatch) -> None:
    fresh = frame_module.FrameState.initial.__func__  # type: ignore[attr-defined]

    def from_one(cls: type[frame_module.FrameState], config: Any, settings: SamplingTensors) -> frame_module.FrameState:
        state: frame_module.FrameState = fresh(cls, config, settings)
        state.frame += 1
        return state

    patch.setattr(frame_module.FrameState, "initial", classmethod(from_one))


def no_redraw_of_repeated_tokens(patch: pytest.MonkeyPatch) -> None:
    def draw(self: FrameSampler, logits: Tensor, state: frame_module.FrameState) -> Tensor:
        settings = state.settings
        return self._race(logits, settings.temperature, settings.top_p, state, self._semantic_noise(state, 0))

    patch.setattr(FrameSampler, "_sample_semantic_ras", draw)


def whole_residual_head(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("shoal.model.config.DualARConfig.residual_size", property(lambda config: config.codebook_size))


def restarted_positions(patch: pytest.MonkeyPatch) -> None:
    def forward(self: WindowTransformer, x: Tensor, past: Past) -> Tensor:
        seen = torch.zeros(1, dtype=torch.long) if past.position is None else past.position
        table = self.table[torch.arange(x.shape[-1])][None]
        mask = window_mask(seen * self.steps_per_frame, x.shape[-1], self.config.window_size)
        h = x.transpose(1, 2)
        for layer in self.layers:
            h = layer(h, table, mask, past)
        normed: Tensor = self.norm(h)
        return normed.transpose(1, 2)

    patch.setattr(WindowTransformer, "forward", forward)


def forgotten_left_context(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("shoal.codec.streaming.SlotPast.join", lambda self, x, steps: torch.nn.functional.pad(x, (steps, 0)))


def codes_not_clamped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("shoal.codec.quantizer.torch.minimum", lambda codes, most: codes % (most + 1))


@pytest.mark.parametrize(
    ("alter", "groups"),
    [
        (exact_rope_tables, ["s1/prefill", "s2/prefill", "s1/fast", "s2/fast", "codec/decode"]),
        (half_split_rotation, ["s1/prefill", "s2/fast"]),
        (positions_from_one, ["s1/prefill", "s2/prefill"]),
        (no_causal_mask, ["s1/prefill", "s2/fast"]),
        (unscaled_embeddings, ["s1/prefill", "s2/prefill", "s1/decode"]),
        (other_hidden_for_the_fast_model, ["s1/prefill", "s2/prefill", "s1/decode"]),
        (fast_model_without_its_hidden, ["s1/fast", "s2/fast"]),
        (temperature_before_the_nucleus, ["s1/sampler", "s2/sampler"]),
        (crossing_token_kept, ["s1/sampler", "s2/sampler"]),
        (penalty_by_own_history, ["s1/decode"]),
        (no_penalty, ["s1/decode", "quant/int8"]),
        (first_frame_remembered, ["s1/decode"]),
        (no_redraw_of_repeated_tokens, ["s2/ras", "s2/noise"]),
        (whole_residual_head, ["s1/decode"]),
        (restarted_positions, ["codec/streaming"]),
        (forgotten_left_context, ["codec/streaming"]),
        (codes_not_clamped, ["codec/clamp"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_bug_fails_the_groups_that_it_affects(
    alter: Alteration, groups: list[str], golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alter(monkeypatch)
    assert set(failing(verify(golden, only=groups))) == set(groups)


@pytest.mark.parametrize(
    ("file", "keys", "value", "group"),
    [
        ("s1/checkpoint/config.json", ("norm_eps",), 1e-5, "s1/prefill"),
        ("s2/checkpoint/config.json", ("text_config", "norm_eps"), 1e-5, "s2/fast"),
        ("s1/checkpoint/config.json", ("scale_codebook_embeddings",), False, "s1/prefill"),
        ("s1/checkpoint/config.json", ("norm_fastlayer_input",), True, "s1/prefill"),
        ("s1/checkpoint/config.json", ("rope_base",), 10000, "s1/prefill"),
        ("codec/config.json", ("window_transformer", "window_size"), 128, "codec/decode"),
        ("codec/config.json", ("window_transformer", "window_size"), 128, "codec/encode"),
        ("codec/config.json", ("encoder_transformer", "window_size"), 512, "codec/encode"),
        ("codec/config.json", ("window_transformer", "norm_eps"), 1e-4, "codec/decode"),
    ],
)
def test_a_wrong_number_in_a_configuration_fails_its_group(
    file: str, keys: tuple[str, ...], value: object, group: str, copy: Path
) -> None:
    document = json.loads((copy / file).read_text())
    section = document
    for key in keys[:-1]:
        section = section[key]
    section[keys[-1]] = value
    (copy / file).write_text(json.dumps(document))
    assert failing(verify(copy, only=[group])) == [group]


@pytest.mark.parametrize(
    ("file", "old", "new", "group"),
    [
        ("s1/tokenizer_cases.json", "275", "276", "s1/tokenizer"),
        ("prompts/cases.json", "Hello, world!", "Hello world!", "s1/prompts"),
        ("prompts/cases.json", '"chunk_length": 100', '"chunk_length": 60', "s2/batches"),
        ("s2/ras.json", '"token": 489', '"token": 487', "s2/ras"),
    ],
)
def test_another_stored_result_fails_its_group(file: str, old: str, new: str, group: str, copy: Path) -> None:
    stored = (copy / file).read_text()
    assert old in stored
    (copy / file).write_text(stored.replace(old, new, 1))
    assert failing(verify(copy, only=[group])) == [group]


def failing(comparisons: list[ParityComparison]) -> list[str]:
    return list(dict.fromkeys(comparison.group for comparison in comparisons if not comparison.ok))


# Invalid directories


@pytest.mark.parametrize(("part", "groups"), READERS.items(), ids=list(READERS))
def test_a_missing_part_is_named(part: str, groups: list[str], copy: Path) -> None:
    (copy / part).unlink()
    with pytest.raises(CheckpointError, match=part.rpartition("/")[2]):
        verify(copy, only=groups[-1:])


def test_a_missing_part_does_not_matter_to_the_groups_that_do_not_read_it(copy: Path) -> None:
    shutil.rmtree(copy / "s2")
    shutil.rmtree(copy / "quant")
    require_all(verify(copy, only=["s1/tokenizer", "s1/prompts", "codec/clamp"]))


def test_a_directory_that_does_not_exist_is_an_invalid_request(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no such directory"):
        verify(tmp_path / "nowhere")


def test_an_empty_directory_names_the_first_part_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no tokenizer found"):
        verify(tmp_path)


def test_an_unknown_group_is_rejected_with_the_list_of_groups(golden: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"called s3/prefill; the groups are s1/tokenizer, "):
        verify(golden, only=["s3/prefill"])


@pytest.mark.parametrize(
    ("part", "content", "group", "message"),
    [
        ("s1/tokenizer_cases.json", b"{", "s1/tokenizer", "not readable as JSON"),
        ("s1/tokenizer_cases.json", b"\xff", "s1/tokenizer", "not readable as JSON"),
        ("s1/tokenizer_cases.json", b"{}", "s1/tokenizer", "expected a list of cases"),
        ("s1/tokenizer_cases.json", b"[]", "s1/tokenizer", "nothing to compare for s1/tokenizer"),
        ("s1/tokenizer_cases.json", b'[{"text": "a"}]', "s1/tokenizer", "s1/tokenizer are inconsistent: .*'ids'"),
        ("prompts/s1.npz", b"PK\x03\x04", "s1/prompts", "s1.npz: not readable as numpy arrays"),
        ("prompts/s1.npz", b"", "s1/prompts", "s1.npz: not readable as numpy arrays"),
        ("s1/prefill.safetensors", b"12", "s1/prefill", "prefill.safetensors: truncated"),
        ("s1/checkpoint/model.pth", b"PK", "s1/prefill", "model.pth: truncated"),
        ("codec/config.json", b"{}", "codec/decode", "codec configuration: "),
        ("quant/quant.json", b"{}", "quant/int8", "quant/int8 are inconsistent: .*'int8'"),
    ],
)
def test_a_broken_part_is_named_with_its_fault(part: str, content: bytes, group: str, message: str, copy: Path) -> None:
    (copy / part).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        verify(copy, only=[group])


def test_a_tensor_that_is_missing_in_its_file_is_named(copy: Path) -> None:
    shutil.copy(copy / "s2" / "fast.safetensors", copy / "s1" / "decode.safetensors")
    with pytest.raises(CheckpointError, match=r"decode\.safetensors: no tensor plain_rep1\.frames"):
        verify(copy, only=["s1/decode"])


# Reports


def test_progress_is_called_with_each_group_before_it_runs(golden: Path) -> None:
    received: list[str] = []
    verify(golden, only=["s1/tokenizer", "prompts", "s2/batches"][::2], progress=received.append)
    assert received == ["s1/tokenizer", "s2/batches"]


def test_a_family_of_groups_is_chosen_by_its_first_word(golden: Path) -> None:
    received: list[str] = []
    verify(golden, only=["codec"], progress=received.append)
    assert received == [group for group in GROUPS if group.startswith("codec/")]


FAILED = ParityComparison("a", "name [of it]", 2e-4, 1e-4)
NAN = ParityComparison("a", "nan", float("nan"), 1e-4)
EXACT = ParityComparison("b", "frames", 0.0, 0.0)
UNEQUAL = ParityComparison("b", "codes", 3.0, 0.0)


def test_the_table_has_a_line_per_group_with_its_worst_comparison() -> None:
    console = Console(width=120, file=StringIO())
    with console.capture() as printed:
        console.print(as_table([ParityComparison("a", "fine", 1e-5, 1e-4), FAILED, EXACT]))
    lines = [line for line in printed.get().splitlines() if line.startswith("│")]
    assert [line.strip("│").split("│")[0].strip() for line in lines] == ["a", "b"]
    assert "name [of it]" in lines[0]
    assert "2.0e-04" in lines[0]
    assert "1 failed" in lines[0]
    assert "0 unequal" in lines[1]


def test_json_holds_every_comparison_and_the_verdict() -> None:
    document = json.loads(as_json([FAILED, EXACT]))
    assert document["ok"] is False
    assert document["comparisons"][0] == {
        "group": "a", "name": "name [of it]", "difference": 2e-4, "tolerance": 1e-4, "ok": False,
    }  # fmt: skip
    assert json.loads(as_json([EXACT]))["ok"] is True


def test_nan_fails_and_is_null_in_json() -> None:
    assert not NAN.ok
    assert json.loads(as_json([NAN]))["comparisons"][0]["difference"] is None


def test_failures_raise_an_error_with_their_groups_and_its_own_exit_code() -> None:
    require_all([EXACT])
    with pytest.raises(VerificationFailed, match="3 of 4 comparisons failed, in a, b") as failure:
        require_all([FAILED, NAN, EXACT, UNEQUAL])
    assert failure.value.exit_code == 12


def test_results_of_a_different_shape_fail() -> None:
    from shoal.tools.verify.comparison import close, equal

    assert not close("g", "n", torch.zeros(2), torch.zeros(3), 1.0).ok
    assert equal("g", "n", torch.zeros(2), torch.zeros(3)).difference == 3
