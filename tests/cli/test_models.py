import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal.checkpoint.random import random_checkpoint
from shoal.checkpoint.save import save_random
from tests.cli.conftest import Shoal


def test_a_random_model_is_saved_and_can_be_inspected(shoal: Shoal, tmp_path: Path) -> None:
    directory = tmp_path / "tiny"
    assert shoal("random", "tiny", directory).text == f"{directory}\n"
    shown = shoal("inspect", directory)
    assert shown.code == 0
    assert "codec, decode side" in shown.text
    document = json.loads(shoal("inspect", directory, "--json").out)
    assert document["parameters"] == json.loads(shoal("inspect", "random:tiny", "--json").out)["parameters"]


def test_a_random_model_never_overwrites(shoal: Shoal, tmp_path: Path) -> None:
    ran = shoal("random", "tiny", tmp_path)
    assert ran.code == 10
    assert "already exists" in ran.err


@pytest.mark.parametrize("size", ["huge", "random:huge", ""])
def test_an_unknown_size_is_rejected(shoal: Shoal, tmp_path: Path, size: str) -> None:
    ran = shoal("random", size, tmp_path / "model")
    assert ran.code == 8
    assert "random:s1-mini" in ran.said
    assert list(tmp_path.iterdir()) == []


def test_a_broken_directory_is_shown_and_fails(shoal: Shoal, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    ran = shoal("inspect", tmp_path, "--json")
    assert ran.code == 6
    assert "no tokenizer found" in ran.said
    assert json.loads(ran.out)["problems"]


class Trap:
    """Unpickling it would touch a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def truncate_a_shard(model: Path) -> None:
    shard = next(model.glob("model-*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1000])


def lose_a_shard(model: Path) -> None:
    next(model.glob("model-*.safetensors")).unlink()


def store_whole_numbers(model: Path) -> None:
    shard = next(model.glob("model-*.safetensors"))
    save_file({name: tensor.to(torch.int32) for name, tensor in load_file(shard).items()}, shard)


def invent_a_key(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config["text_config"]["rope_scaling"] = 4
    (model / "config.json").write_text(json.dumps(config))


def set_a_trap(model: Path) -> None:
    torch.save({"decoder.model.0.conv.bias": Trap(model / "sprung")}, model / "codec.pth")


@pytest.mark.parametrize(
    ("damage", "code", "reason"),
    [
        (truncate_a_shard, 6, "truncated"),
        (lose_a_shard, 6, "no such file"),
        (store_whole_numbers, 6, "int32"),
        (invent_a_key, 6, "rope_scaling"),
        (set_a_trap, 7, "would run code"),
    ],
)
def test_a_damaged_model_does_not_speak(
    shoal: Shoal, tmp_path: Path, damage: Callable[[Path], None], code: int, reason: str
) -> None:
    model = tmp_path / "model"
    save_random(model, random_checkpoint("tiny-s2"))
    damage(model)
    for ran in (shoal("say", "Hi.", "--model", model, "-o", tmp_path / "a.wav"), shoal("inspect", model)):
        assert ran.code == code
        assert reason in ran.said
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert not (model / "sprung").exists()


def test_a_pull_without_a_network_fails_at_once(shoal: Shoal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    ran = shoal("pull", "s1-mini")
    assert ran.code == 8
    assert "shoal pull s1-mini" in ran.said


def test_a_name_the_hub_cannot_have_is_rejected(shoal: Shoal) -> None:
    ran = shoal("pull", "../secrets")
    assert ran.code == 2
    assert "OWNER/NAME" in ran.said


def test_verification_reports_the_selected_groups(shoal: Shoal, golden: Path) -> None:
    ran = shoal("verify", golden, "--only", "s1/tokenizer", "--only", "s1/fast", "--json")
    assert ran.code == 0
    document = json.loads(ran.out)
    assert document["ok"]
    assert {row["group"] for row in document["comparisons"]} == {"s1/tokenizer", "s1/fast"}
    assert "s1/fast" in shoal("verify", golden, "--only", "s1/fast").text


def test_verification_that_fails_has_its_exit_code(shoal: Shoal, golden: Path) -> None:
    """bfloat16 exceeds the tolerances of fp32."""
    ran = shoal("verify", golden, "--only", "s1/fast", "--dtype", "bfloat16")
    assert ran.code == 12
    assert "comparisons failed" in ran.said


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--only", "s9"], "no group"),
        (["--dtype", "int3"], "unknown dtype"),
        (["--device", "abacus"], "unknown device"),
    ],
)
def test_verification_rejects_unknown_values(shoal: Shoal, golden: Path, flags: list[str], reason: str) -> None:
    ran = shoal("verify", golden, *flags)
    assert ran.code == 2
    assert reason in ran.said


def test_verification_needs_a_directory(shoal: Shoal) -> None:
    assert shoal("verify", "./nowhere").code == 2


def test_a_quantized_model_is_saved_and_speaks(shoal: Shoal, tmp_path: Path) -> None:
    save_random(tmp_path / "model", random_checkpoint("tiny"))
    small = tmp_path / "small"
    assert shoal("quantize", tmp_path / "model", "--mode", "int8,codec=int8", "-o", small).text == f"{small}\n"
    assert json.loads(shoal("inspect", small, "--json").out)["language"]["quantization"] == "int8"
    ran = shoal("say", "Hi.", "--model", small, "-o", tmp_path / "a.wav", "--max-frames", "3")
    assert ran.code == 0
    assert (tmp_path / "a.wav").stat().st_size > 44


@pytest.mark.parametrize(
    ("command", "code", "reason"),
    [
        (["quantize", "random:tiny", "-o", "out"], 8, "random:tiny"),
        (["quantize", "MODEL", "--mode", "int3", "-o", "out"], 2, "cannot quantize to 'int3'"),
        (["quantize", "MODEL", "-o", "MODEL"], 10, "already exists"),
        (
            ["say", "Hi.", "--model", "MODEL", "-o", "a.wav", "--quantize", "fp8", "--device", "cpu"],
            2,
            "slow can be",
        ),
    ],
)
def test_invalid_quantization_is_rejected(
    shoal: Shoal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], code: int, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    save_random(tmp_path / "MODEL", random_checkpoint("tiny"))
    ran = shoal(*command)
    assert ran.code == code
    assert reason in ran.said
    assert [path.name for path in tmp_path.iterdir()] == ["MODEL"]
