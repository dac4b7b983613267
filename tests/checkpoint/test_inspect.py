import json
import resource
import shutil
from pathlib import Path

import pytest
import torch

from shoal.checkpoint.empty_weights import init_empty_weights
from shoal.checkpoint.format.model_config import config_document
from shoal.checkpoint.inspect import as_json, inspect
from shoal.checkpoint.load import load_checkpoint
from shoal.checkpoint.random import SIZES, write_synthetic_tokenizer
from shoal.checkpoint.save import upstream_tensors, write_json
from shoal.errors import CheckpointError, ModelNotFound, UnsafeCheckpoint
from shoal.model.dual_ar import DualAR


@pytest.fixture
def copied(tiny_directory: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_directory, tmp_path / "model"))


# The counts of the released models, read off their published headers.
@pytest.mark.parametrize(("size", "parameters"), [("s1-mini", 860_169_216), ("s2-pro", 4_561_852_416)])
def test_the_released_sizes_have_the_released_numbers_of_parameters(size: str, parameters: int) -> None:
    found = inspect(f"random:{size}")
    codec = sum(part.parameters for part in found.parts if part.name.startswith("codec"))
    assert found.parameters - codec == parameters
    assert found.bytes == 2 * parameters + 4 * codec


@pytest.mark.parametrize("directory", ["tiny_directory", "tiny_s2_directory"])
def test_inspect_counts_what_the_loader_loads(directory: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(directory)
    found, loaded = inspect(str(path)), load_checkpoint(path)
    tensors = [*loaded.model.state_dict().values(), *loaded.codec.state_dict().values()]
    assert found.parameters == sum(tensor.numel() for tensor in tensors)
    assert found.bytes == sum(tensor.nbytes for tensor in tensors)
    assert found.problems == found.notes == []


def test_inspect_reports_the_sizes_of_model_and_codec(tiny_s2_directory: Path) -> None:
    found = inspect(str(tiny_s2_directory))
    assert found.language is not None
    assert found.sound is not None
    assert (found.language.family, found.language.context, found.language.codebooks) == ("s2", 2048, 10)
    assert (found.sound.sample_rate, found.sound.frame_rate) == (16000, 25.0)
    assert found.language.kv_bytes_per_token == 2 * 2 * 3 * 2 * 16
    assert found.files["codec.json"] == (tiny_s2_directory / "codec.json").stat().st_size
    assert found.tokenizer_size == found.language.vocabulary
    assert [part.name for part in found.parts if part.name == "head"] == []


def test_nine_gigabytes_are_inspected_without_being_read(tmp_path: Path) -> None:
    """The shard is a header and a hole: reading it would take its size in memory."""
    config = SIZES["s2-pro"][0]
    write_json(tmp_path / "config.json", config_document(config))
    write_synthetic_tokenizer(tmp_path, config)
    with init_empty_weights():
        model = DualAR(config).to(torch.bfloat16)
    write_hollow_safetensors(tmp_path / "model.safetensors", upstream_tensors(model))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = inspect(str(tmp_path))
    grown_kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert found.problems == []
    assert found.files["model.safetensors"] > found.bytes > 9e9
    assert found.parameters == 4_561_852_416
    assert grown_kilobytes < 500_000


def write_hollow_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    header, end = {}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # tensors must be aligned, or they are copied to where they are
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + end)


def test_upstreams_int8_is_recognised(golden: Path) -> None:
    found = inspect(str(golden / "quant" / "fs-1.2-int8-20250603_120000"))
    whole = inspect(str(golden / "s1" / "checkpoint"))
    assert found.language is not None
    assert found.language.quantization == "int8"
    assert found.parameters == whole.parameters
    assert found.bytes < whole.bytes
    assert found.notes == ["no codec: name one with --codec to generate speech"]
    assert found.problems == []


def test_a_borrowed_codec_is_counted(golden: Path, tiny_directory: Path) -> None:
    found = inspect(str(golden / "s1" / "checkpoint"), codec=tiny_directory)
    assert found.sound is not None
    assert found.notes == found.problems == []


def test_each_problem_is_found_and_the_rest_is_still_shown(copied: Path) -> None:
    (copied / "model.pth").write_bytes(b"PK not a model")
    (copied / "codec.pth").write_bytes((copied / "codec.pth").read_bytes()[:1000])
    found = inspect(str(copied))
    assert [type(problem) for problem in found.problems] == [CheckpointError, CheckpointError]
    assert found.language is not None
    assert found.parts == []


def test_a_tensor_of_another_shape_is_named(copied: Path) -> None:
    stored = torch.load(copied / "model.pth", weights_only=True)
    stored["norm.weight"] = torch.ones(7)
    torch.save(stored, copied / "model.pth")
    (problem,) = inspect(str(copied)).problems
    assert "slow.norm.weight is [7]" in str(problem)


def test_a_pickle_with_code_is_a_problem_and_is_not_run(copied: Path, tmp_path: Path) -> None:
    torch.save({"norm.weight": Trap(tmp_path / "sprung")}, copied / "model.pth")
    (problem,) = inspect(str(copied)).problems
    assert isinstance(problem, UnsafeCheckpoint)
    assert not (tmp_path / "sprung").exists()


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def test_packed_int4_is_recognised(golden: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(golden / "s1" / "checkpoint", tmp_path / "model"))
    stored = torch.load(copied / "model.pth", weights_only=True)
    packed = {}
    for name, tensor in stored.items():
        if "embeddings" in name or "norm" in name:
            packed[name] = tensor
            continue
        rows, module = len(tensor), name.removesuffix(".weight")
        packed[f"{module}.weight"] = torch.zeros(rows // 8, 1024 // 128, 32, 4, dtype=torch.int32)
        packed[f"{module}.scales_and_zeros"] = torch.zeros(1024 // 32, rows, 2, dtype=torch.bfloat16)
    torch.save(packed, copied / "model.pth")
    found = inspect(str(copied))
    assert found.problems == []
    assert found.language is not None
    assert found.language.quantization == "int4, groups of 32"
    assert found.parameters == inspect(str(golden / "s1" / "checkpoint")).parameters


def test_a_directory_that_is_not_there_is_not_found() -> None:
    with pytest.raises(ModelNotFound, match="no such directory"):
        inspect("./nowhere")


def test_the_inspection_is_serializable_as_json(tiny_directory: Path) -> None:
    document = json.loads(json.dumps(as_json(inspect(str(tiny_directory)))))
    assert document["language"]["family"] == "s1"
    assert document["directory"] == str(tiny_directory)
    assert {part["name"] for part in document["parts"]} >= {"slow transformer", "codec, decode side"}
