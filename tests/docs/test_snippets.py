"""Code in the pages that is marked with `<!-- runs -->` is run as it stands there."""

import gc
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tests.docs.here import Snippet, snippets
from tests.server.conftest import Serving
from tests.waiting import TIMEOUT_SECONDS

SNIPPETS = snippets()


def test_the_readme_shows_curl_openai_and_python() -> None:
    first = [each for each in SNIPPETS if each.page == "README"]
    assert any(each.language == "sh" and "curl" in each.code for each in first)
    assert any("from openai import" in each.code for each in first)
    assert any("shoal.load" in each.code for each in first)


@pytest.mark.parametrize("snippet", [each for each in SNIPPETS if each.language == "python"], ids=str)
def test_python_runs(snippet: Snippet, site_server: Serving, elsewhere: Path) -> None:
    exec(compile(snippet.at(site_server.url), str(snippet), "exec"), {"__name__": "__main__"})
    # A short program leaves its connections to its end, which does not come here.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.mark.parametrize("snippet", [each for each in SNIPPETS if each.language == "sh"], ids=str)
def test_shell_runs(snippet: Snippet, site_server: Serving, elsewhere: Path) -> None:
    here = str(Path(sys.executable).parent)
    env = os.environ | {"PATH": f"{here}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        ["sh", "-ec", snippet.at(site_server.url)], capture_output=True, text=True, env=env, timeout=TIMEOUT_SECONDS
    )
    assert ran.returncode == 0, ran.stderr
    written = [path for path in elsewhere.iterdir() if path.suffix in (".wav", ".mp3", ".opus")]
    assert all(path.stat().st_size > 100 for path in written)
    assert written


def test_every_kind_of_block_that_is_marked_is_run() -> None:
    assert {each.language for each in SNIPPETS} == {"python", "sh"}
