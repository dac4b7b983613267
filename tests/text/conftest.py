"""Tokenizers of the golden checkpoints, and a vocabulary of single bytes."""

import base64
import json
from pathlib import Path

import pytest

from shoal.text.tokenizer import JsonTokenizer, TiktokenTokenizer

GOLDEN = Path(__file__).parents[1] / "golden"
CONTROLS = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<|voice|>", "<|interleave|>")


@pytest.fixture(scope="session")
def golden() -> Path:
    return GOLDEN


@pytest.fixture(scope="session")
def s1_tokenizer() -> TiktokenTokenizer:
    return TiktokenTokenizer(GOLDEN / "s1" / "checkpoint")


@pytest.fixture(scope="session")
def s2_tokenizer() -> JsonTokenizer:
    return JsonTokenizer(GOLDEN / "s2" / "checkpoint")


@pytest.fixture
def byte_directory(tmp_path: Path) -> Path:
    """A checkpoint directory whose vocabulary is the 256 bytes, five control tokens and 16 codes."""
    ranks = "".join(f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256))
    names = (*CONTROLS, *(f"<|semantic:{code}|>" for code in range(16)))
    (tmp_path / "tokenizer.tiktoken").write_text(ranks)
    (tmp_path / "special_tokens.json").write_text(json.dumps({name: 256 + i for i, name in enumerate(names)}))
    return tmp_path
