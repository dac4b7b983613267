"""The cluster's own settings, frozen. What one replica serves with is in `shoal/settings.py`, as for `shoal serve`."""

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
    """How many replicas there may be."""

    min_replicas: int
    max_replicas: int

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise InvalidRequest(f"--autoscale needs 1 <= MIN <= MAX, not {self.min_replicas}:{self.max_replicas}")

    @classmethod
    def parse(cls, text: str) -> "Autoscale":
        """`2:8`. Raises InvalidRequest."""
        low, colon, high = text.partition(":")
        if not (colon and low.isdigit() and high.isdigit()):
            raise InvalidRequest(f"--autoscale is MIN:MAX, such as 2:8, not {text!r}")
        return cls(int(low), int(high))


@dataclass(frozen=True)
class ClusterConfig:
    replicas: int = 1
    strategy: StrategyName = "voice-affinity"
    autoscale: Autoscale | None = None
    shrink_after: float = 300.0  # seconds that fewer would have done before one goes
    stagger_seconds: float = 0.0  # between the starts of two replicas: loading together may be more than a disk bears
    cpus: float = 1.0  # per replica, as Ray counts them
    gpus: float = 0.0  # per replica; 0.5 lets two share one
    frontends: int = 1

    def __post_init__(self) -> None:
        if self.gpus > 1 and not float(self.gpus).is_integer():
            raise InvalidRequest(f"--gpus is a part of one GPU or a whole number of them, not {self.gpus:g}")

    @property
    def max_replicas(self) -> int:
        """Replicas there may ever be."""
        return self.autoscale.max_replicas if self.autoscale else self.replicas


@dataclass(frozen=True)
class ClusterPlan:
    """Everything that is deployed. Deploying a changed plan over a running one replaces replica after replica."""

    server: ServerConfig
    cluster: ClusterConfig
    source: EngineSource
    voices: Path
    log_format: LogFormat = "json"
    log_level: str = "info"


def split_gpu_memory(source: EngineSource, gpus: float) -> EngineSource:
    """Engines that share a GPU share its memory: what each may take is a share of its own part."""
    memory = source.config.gpu_memory
    with suppress(ValueError):  # a size, not a share
        memory = f"{float(memory) * gpus:g}" if 0 < gpus < 1 else memory
    return replace(source, config=replace(source.config, gpu_memory=memory))
