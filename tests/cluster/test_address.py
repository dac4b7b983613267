"""Addresses by which commands find a cluster. Without Ray, which takes seconds to import."""

import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from shoal.cluster import lifecycle
from tests.server.conftest import ROOT, command, free_port, surroundings

CONNECT = """
import sys
from shoal.cluster.lifecycle import connect_ray
from shoal.errors import InvalidRequest
try:
    with connect_ray(sys.argv[1]):
        pass
except InvalidRequest as problem:
    print(problem, "ray" in sys.modules)
"""


@pytest.mark.parametrize("stored", [False, True])
def test_an_address_without_a_cluster_is_refused_at_once(stored: bool, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    (tmp_path / "shoal").mkdir()
    (tmp_path / "shoal" / "cluster-address").write_text(address)  # as a killed cluster leaves it
    environment = surroundings(tmp_path) | {"XDG_STATE_HOME": str(tmp_path)}
    arguments = [sys.executable, "-c", CONNECT, "auto" if stored else address]
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=ROOT, env=environment)
    refusal = f"no Ray cluster responds at {address!r}: start one with `shoal cluster up` or `ray start --head`"
    assert done.stdout == f"{refusal} False\n", done.stderr


def test_a_cluster_is_found_again_after_a_later_one_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    file = tmp_path / "shoal" / "cluster-address"
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        earlier, later = f"127.0.0.1:{listener.getsockname()[1]}", f"127.0.0.1:{free_port()}"
        with lifecycle._stored_address(earlier):
            with lifecycle._stored_address(later):
                assert file.read_text() == later
            assert file.read_text() == earlier
        assert not file.exists()
        file.write_text(later)
        with lifecycle._stored_address(earlier):
            pass
        assert not file.exists()  # the cluster of the other address does not run


def test_an_unknown_model_is_refused_before_ray_starts(tmp_path: Path) -> None:
    arguments = command("cluster", "up", "--model", "no-such-model", "--port", str(free_port()))
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=ROOT, env=surroundings(tmp_path))
    assert (done.returncode, "no such directory and not a known name" in done.stderr) == (8, True), done.stderr
    assert "shutting down" not in done.stderr
