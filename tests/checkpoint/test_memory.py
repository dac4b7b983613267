"""Loading maps files: what is resident at the worst moment is hardly more than the weights themselves."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

BOUND = 1.25
NEEDED_DISK = 2 << 30

# All weights alike: drawing a quarter of a billion numbers would take longer than everything else here.
MAKE = """
import sys
from dataclasses import replace
from pathlib import Path
import torch
from shoal.checkpoint.random import SIZES, random_checkpoint
from shoal.checkpoint.save import save_random

config, codec = SIZES["s1-mini"]
few = replace(codec, transformer=replace(codec.transformer, n_layer=1), decoder_dim=512)
few = replace(few, encoder_transformer_layers=(0, 0, 0, 0))
parts = {name: replace(getattr(config, name), n_layer=1, dim=512) for name in ("slow", "fast")}
SIZES["s1-mini"] = replace(config, **parts), few
torch.Tensor.normal_ = lambda self, *some, **rest: self.fill_(0.01)
save_random(Path(sys.argv[1]), random_checkpoint("s1-mini"))
"""
# Run alone, so that the peak is its own: what importing and the tokenizer take is measured first and subtracted.
MEASURE = """
import json, re, sys
from pathlib import Path
import torch
from shoal.checkpoint.load import load_codec, load_model
from shoal.text.tokenizer import load_tokenizer

def peak():
    # Not getrusage: its maximum is inherited from the parent process.
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

def touch(module):
    for tensor in module.state_dict().values():
        tensor.view(-1)[::1024].float().sum()

directory = Path(sys.argv[1])
tokenizer = load_tokenizer(directory)
before, loaded, files = peak(), [], 0
for part in ("model.pth", "codec.pth"):
    loaded.append(load_model(directory, tokenizer) if part == "model.pth" else load_codec(directory))
    touch(loaded[-1])
    files += (directory / part).stat().st_size
    print(json.dumps({"resident": peak() - before, "files": files}))
"""


@pytest.fixture(scope="module")
def s1_mini(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A random checkpoint of the released vocabulary and few layers: 0.4 GB of model in bf16 and of codec in fp32."""
    folder = tmp_path_factory.mktemp("few-layers")
    if shutil.disk_usage(folder).free < NEEDED_DISK:
        pytest.skip("needs 2 GB of disk")
    run(MAKE, folder / "s1-mini")
    yield folder / "s1-mini"
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
def test_loading_and_using_a_checkpoint_takes_hardly_more_than_its_files(s1_mini: Path) -> None:
    steps = [json.loads(line) for line in run(MEASURE, s1_mini).splitlines()]
    assert len(steps) == 2  # the model, then the codec beside it
    for measured in steps:
        assert measured["files"] < measured["resident"] + (100 << 20), "the weights were not touched"
        assert measured["resident"] <= BOUND * measured["files"]


def run(program: str, *arguments: object) -> str:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
