"""Access to the golden directory: its files by name and its checkpoints as modules, loaded on first use."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from shoal.checkpoint.empty_weights import init_empty_weights
from shoal.checkpoint.format.directory import read_model_config
from shoal.checkpoint.format.layout import read_json
from shoal.checkpoint.format.names import model_tensors
from shoal.checkpoint.format.weight_norm import codec_tensors
from shoal.checkpoint.load import assign, build_model, load_model
from shoal.checkpoint.tensors import read_tensors
from shoal.codec.config import CodecConfig
from shoal.codec.dac import Codec
from shoal.errors import CheckpointError
from shoal.model.dual_ar import DualAR
from shoal.text.prompt import Codes, Grid
from shoal.text.tokenizer import Tokenizer, load_tokenizer

Case = Mapping[str, Any]


class TensorFile(dict[str, Tensor]):
    """Tensors of one file. A missing tensor raises CheckpointError with the name of the file."""

    def __init__(self, path: Path) -> None:
        super().__init__(read_tensors(path))
        self.path = path

    def __missing__(self, name: str) -> Tensor:
        raise CheckpointError(f"{self.path}: no tensor {name}")

    def parts(self, ending: str) -> list[str]:
        """Return the names that end in `.ending`, without the ending, sorted."""
        return sorted(name.removesuffix(f".{ending}") for name in self if name.endswith(f".{ending}"))


@dataclass(eq=False)
class Golden:
    """A directory of stored inputs and outputs, with the device and dtype to recompute them in."""

    directory: Path
    device: str
    dtype: torch.dtype
    _tensors: dict[str, TensorFile] = field(default_factory=dict)
    _models: dict[str, DualAR] = field(default_factory=dict)

    def tensors(self, part: str) -> TensorFile:
        if part not in self._tensors:
            self._tensors[part] = TensorFile(self.directory / part)
        return self._tensors[part]

    def cases(self, part: str) -> list[Case]:
        path = self.directory / part
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path}: no such file") from None
        except (OSError, ValueError) as problem:
            raise CheckpointError(f"{path}: not readable as JSON: {problem}") from problem
        if not isinstance(stored, list) or not all(isinstance(case, dict) for case in stored):
            raise CheckpointError(f"{path}: expected a list of cases")
        return stored

    def document(self, part: str) -> Case:
        return read_json(self.directory / part)

    def grids(self, part: str) -> dict[str, Grid]:
        path = self.directory / part
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
                return dict(stored)
        except FileNotFoundError:
            raise CheckpointError(f"{path}: no such file") from None
        except (OSError, ValueError, EOFError, BadZipFile) as problem:
            raise CheckpointError(f"{path}: not readable as numpy arrays: {problem}") from problem

    def prompt(self, family: str, name: str) -> Tensor:
        """Return a stored prompt grid [1 + codebooks, T] on the device of the model."""
        return self.tensors(f"{family}/prefill.safetensors")[f"{name}.grid"].long().to(self.device)

    def tokenizer(self, family: str) -> Tokenizer:
        return load_tokenizer(self.directory / family / "checkpoint")

    def model(self, family: str) -> DualAR:
        if family not in self._models:
            self._models[family] = self._load(self.directory / family / "checkpoint")
        return self._models[family]

    def int8_model(self) -> DualAR:
        name = self.document("quant/quant.json")["int8"]["directory"]
        return self._load(self.directory / "quant" / name)

    def int4_model(self) -> DualAR:
        """Load the S1 checkpoint with every linear weight replaced by its stored int4 values."""
        folder, tokenizer = self.directory / "s1" / "checkpoint", self.tokenizer("s1")
        stored = self.tensors("quant/int4_g128_unpacked.safetensors")
        quantised = {f"{layer}.weight": stored[f"{layer}.q"] for layer in stored.parts("q")}
        quantised |= {name: tensor for name, tensor in stored.items() if name.endswith(".scales_and_zeros")}
        merged = {**read_tensors(folder / "model.pth"), **quantised}
        return build_model(
            read_model_config(folder, tokenizer),
            model_tensors(merged),
            stored.path,
            dtype=self.dtype,
            device=self.device,
        )

    @cached_property
    def codec(self) -> Codec:
        weights = self.directory / "codec" / "codec.pth"
        with init_empty_weights():
            codec = Codec(CodecConfig.from_dict(self.document("codec/config.json")))
        assign(codec, codec_tensors(read_tensors(weights), encoder=True), weights, dtype=self.dtype, device=self.device)
        return codec.to(self.device).eval()

    def _load(self, folder: Path) -> DualAR:
        return load_model(folder, load_tokenizer(folder), dtype=self.dtype, device=self.device)


def codes_of(matrices: Sequence[Sequence[Sequence[int]]]) -> list[Codes]:
    return [np.array(matrix, np.int32) for matrix in matrices]
