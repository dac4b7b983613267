from pathlib import Path

import pytest
import torch

import training.divergence
from shoal.checkpoint.load import Checkpoint
from shoal.quantize import apply
from shoal.quantize.modes import has_int8_matmul
from training.divergence import main, markdown, table

needs_vnni = pytest.mark.skipif(not has_int8_matmul(), reason="this CPU has no VNNI")


@pytest.mark.parametrize(
    ("integers", "how"), [pytest.param(True, "multiplied in integers", marks=needs_vnni), (False, "weight-only")]
)
def test_every_mode_is_held_against_the_trained_model(
    tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch, integers: bool, how: str
) -> None:
    for module in (apply, training.divergence):
        monkeypatch.setattr(module, "has_int8_matmul", lambda: integers)
    columns = torch.randint(0, 100, (40, 11), generator=torch.Generator().manual_seed(2))
    columns[20:, 0] = tiny.model.config.semantic_begin_id + columns[20:, 1]
    rows = dict(table(tiny.model, [columns, columns[:30]]))
    assert all(row.frames == 30 and row.semantic >= 0 for row in rows.values())
    assert rows["weights int8"].semantic < rows["weights fp8"].semantic < rows["weights int4"].semantic
    assert rows[f"weights int8, {how}"].semantic < rows["weights fp8"].semantic
    assert rows["weights slow=int4"].codes < rows["weights int4"].codes
    assert rows["weights fast=int4"].semantic == 0
    assert 0 < rows["keys and values int8"].semantic < rows["keys and values fp8"].semantic
    assert markdown(list(rows.items())).count("\n") == len(rows) + 2


def test_the_bundled_model_can_be_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("Yes.\n")
    main(["--text", str(tmp_path / "text"), "--markdown", str(tmp_path / "table.md")])
    assert "frames in 1 utterances" in capsys.readouterr().out
    assert "| keys and values int8 |" in (tmp_path / "table.md").read_text()
