"""Frozen configuration of a cluster. The settings of each replica are those of `shoal serve` (`shoal/settings`)."""

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.api.config import ServerConfig
from shoal.cluster.routing import StrategyName
from shoal.engine.process.worker import EngineSource
from shoal.errors import InvalidRequest
from shoal.server.logging import LogFormat


@dataclass(frozen=True)
class Autoscale:
    """Minimum and maximum number of replicas."""

    min_replicas: int
    max_replicas: int

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise InvalidRequest(f"--autoscale needs 1 <= MIN <= MAX, not {self.min_replicas}:{self.max_replicas}")

    @classmethod
    def parse(cls, text: str) -> "Autoscale":
        """Parse `MIN:MAX`, such as `2:8`. Raises InvalidRequest."""
        low, colon, high = text.partition(":")
        if not (colon and low.isdigit() and high.isdigit()):
            raise InvalidRequest(f"--autoscale must be MIN:MAX, such as 2:8, not {text!r}")
        return cls(int(low), int(high))


@dataclass(frozen=True)
class ClusterConfig:
    replicas: int = 1
    strategy: StrategyName = "voice-affinity"
    autoscale: Autoscale | None = None
    shrink_after: float = 300.0  # seconds of low load before a replica is removed
    stagger_seconds: float = 0.0  # minimum time between two replica starts, to limit concurrent model loading
    cpus: float = 1.0  # Ray CPUs per replica
    gpus: float = 0.0  # Ray GPUs per replica; 0.5 lets two share one
    frontends: int = 1

    def __post_init__(self) -> None:
        if self.gpus > 1 and not float(self.gpus).is_integer():
            raise InvalidRequest(f"--gpus must be a fraction of one GPU or a whole number, not {self.gpus:g}")

    @property
    def max_replicas(self) -> int:
        """Maximum number of replicas at any time."""
        return self.autoscale.max_replicas if self.autoscale else self.replicas


@dataclass(frozen=True)
class ClusterPlan:
    """Everything that is deployed. Deploying a changed plan replaces the replicas one by one."""

    server: ServerConfig
    cluster: ClusterConfig
    source: EngineSource
    voices: Path
    log_format: LogFormat = "json"
    log_level: str = "info"


def split_gpu_memory(source: EngineSource, gpus: float) -> EngineSource:
    """Scale a fractional `gpu_memory` by the GPU fraction of a replica, for replicas that share a GPU."""
    memory = source.config.gpu_memory
    with suppress(ValueError):  # a size in bytes, not a fraction
        memory = f"{float(memory) * gpus:g}" if 0 < gpus < 1 else memory
    return replace(source, config=replace(source.config, gpu_memory=memory))
