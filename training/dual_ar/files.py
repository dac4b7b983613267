"""Save and load trained language models."""

from __future__ import annotations

import copy
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.format.model_config import config_document
from shoal.checkpoint.load import load_model
from shoal.checkpoint.random import write_synthetic_tokenizer
from shoal.checkpoint.save import save_sharded_model, write_json
from shoal.model.dual_ar import DualAR
from training.codec import PIECE_BYTES
from training.encode import ABOUT, About, prompts_for


def save_language_model(folder: Path, model: DualAR, about: About, trained: dict[str, Any]) -> None:
    """Write a directory that the ordinary loader reads together with a codec: fp16, in files of limited size.

    An existing directory is replaced atomically when everything is written.
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


def read_language_model(folder: Path) -> DualAR:
    """Read what `save_language_model` wrote, in fp32."""
    return load_model(folder, prompts_for(About.read(folder)).grid.tokenizer, dtype=torch.float32)
