from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from shoal.cli.serving import cluster as command
from shoal.cluster import lifecycle as life
from shoal.cluster.config import Autoscale, ClusterConfig, split_gpu_memory
from shoal.config import EngineConfig
from shoal.engine.process.worker import EngineSource
from shoal.errors import EngineStopped, InvalidRequest


def test_bounds_are_read_and_the_upper_one_counts_for_capacity() -> None:
    assert Autoscale.parse("2:8") == Autoscale(2, 8)
    assert ClusterConfig(replicas=3).max_replicas == 3
    assert ClusterConfig(replicas=3, autoscale=Autoscale(1, 5)).max_replicas == 5


@pytest.mark.parametrize("text", ["", "3", "a:b", "0:2", "3:2", "1:2:3", "-1:2"])
def test_invalid_bounds_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="--autoscale"):
        Autoscale.parse(text)


@pytest.mark.parametrize(
    ("gpus", "asked", "given"),
    [(0.5, "0.9", "0.45"), (0.25, "1", "0.25"), (0.5, "4GB", "4GB"), (1.0, "0.9", "0.9"), (0.0, "0.9", "0.9")],
)
def test_replicas_that_share_a_gpu_share_its_memory(gpus: float, asked: str, given: str) -> None:
    assert split_gpu_memory(EngineSource(config=EngineConfig(gpu_memory=asked)), gpus).config.gpu_memory == given


def test_one_and_a_half_gpus_are_refused_before_ray_does() -> None:
    assert ClusterConfig(gpus=2.0).gpus == 2
    with pytest.raises(InvalidRequest, match="--gpus"):
        ClusterConfig(gpus=1.5)


def test_a_joined_cluster_that_is_too_small_says_what_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    deployed: list[int] = []
    monkeypatch.setattr(life, "connect_ray", lambda address: nullcontext())
    monkeypatch.setattr(life, "import_ray", lambda: SimpleNamespace(cluster_resources=lambda: {"CPU": 3.0}))
    monkeypatch.setattr(command, "_deploy", lambda plan, everywhere: deployed.append(plan.cluster.replicas))
    for replicas in (3, 4):
        plan = SimpleNamespace(cluster=ClusterConfig(replicas=replicas, cpus=1.0), source=EngineSource(device="cpu"))
        command._deploy_remote(plan, "auto", None)  # type: ignore[arg-type]
    assert deployed == [3, 4]
    reported = capsys.readouterr().err.splitlines()
    assert len(reported) == 1
    assert "4 replicas with 1 CPUs each need 4, but the cluster has 3" in reported[0]


def test_a_ray_that_does_not_start_is_reported_without_a_stack_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise Exception("The current node timed out during startup.\nMore.")

    monkeypatch.setattr(life, "import_ray", lambda: SimpleNamespace(init=fail))
    monkeypatch.setattr(life, "LOOPBACK_ONLY", {})
    with (
        pytest.raises(EngineStopped, match=r"Ray did not start: The current node timed out.* try again"),
        life.local_ray(logs=False),
    ):
        pass
