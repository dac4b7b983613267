"""The site is built strictly, and says what is true."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from shoal.api.bodies.schemas import SpeechBody
from shoal.checkpoint.inspect import inspect
from shoal.metrics import ENGINE_METRICS, Metrics
from tests.cli.test_command import COMMANDS
from tests.docs.here import DOCS, PAGES, ROOT

PLAIN_PAGES = [*PAGES, *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"))]
PLAIN_PAGES += [ROOT / "examples" / "README.md", ROOT / "training" / "README.md"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pages, links and anchors that are wrong are warnings, and warnings are errors (not with --quiet)."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env, timeout=240)
    assert built.returncode == 0, built.stdout + built.stderr
    return out


def test_every_page_is_built_and_can_be_searched(site: Path) -> None:
    assert {page.with_suffix(".html").name for page in DOCS.glob("*.md")} <= {path.name for path in site.iterdir()}
    assert len(json.loads((site / "search" / "search_index.json").read_text())["docs"]) > 50


def test_nothing_is_fetched_from_other_hosts(site: Path) -> None:
    for page in site.glob("*.html"):
        loaded = re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"?(https?://[^\s\">]+)", page.read_text())
        assert [address for address in loaded if "rel=canonical" not in address] == []


def test_every_page_is_in_the_table_of_contents() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    listed = re.findall(r"[\w-]+\.md", json.dumps(nav))
    assert sorted(listed) == sorted(page.name for page in DOCS.glob("*.md"))


@pytest.mark.parametrize("page", PLAIN_PAGES, ids=lambda page: page.name)
def test_links_between_files_have_targets(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text):
        assert (page.parent / target).exists(), target


def test_every_metric_is_explained() -> None:
    reported = (DOCS / "monitoring.md").read_text()
    kinds = {family.name: family.type for family in Metrics(lambda: None).registry.collect()}
    kinds = {name: kind for name, kind in kinds.items() if name.startswith("shoal_")}
    kinds |= {figure.name: figure.kind for figure in ENGINE_METRICS}
    names = [f"{name}_total" if kind == "counter" else name for name, kind in kinds.items()]
    assert [name for name in names if f"| `{name}` | " not in reported] == []


def test_every_command_is_named() -> None:
    reported = (DOCS / "command-line.md").read_text()
    assert [path[0] for path in COMMANDS if f"`shoal {path[0]}`" not in reported] == []


def test_every_field_of_upstream_is_on_the_migration_page() -> None:
    reported = (DOCS / "migration.md").read_text()
    table = reported[reported.index("field by field") : reported.index("## Audio output")]
    ours_alone = {"min_chunk_length", "condition_on_previous_chunks", "early_stop_threshold"}
    ours_alone |= {"ssml", "lexicon", "show_text"}
    assert [name for name in SpeechBody.model_fields if f"`{name}`" not in table and name not in ours_alone] == []


@pytest.mark.parametrize(("model", "column"), [("s1-mini", 1), ("s2-pro", 3)])
def test_the_arithmetic_of_memory_is_right(model: str, column: int) -> None:
    reported = (DOCS / "tuning.md").read_text()
    found = inspect(f"random:{model}")
    assert found.language is not None
    assert found.sound is not None
    assert f"{found.language.kv_bytes_per_token:,} bytes" in reported
    columns = 50 * found.sound.frame_rate
    one = columns * found.language.kv_bytes_per_token + 8.9e6
    for row in re.findall(r"^\| (\d+) GB \| ([\d.]+) GB \| (\d+) \| ([\d.]+) GB \| (\d+) \|$", reported, re.MULTILINE):
        left = 0.9 * int(row[0]) * 1e9 - found.bytes
        assert (float(row[column]), int(row[column + 1])) == (round(left / 1e9, 1), int(left / one))
