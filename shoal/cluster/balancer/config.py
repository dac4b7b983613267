"""Settings of the balancer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from shoal.api.config import Limits
from shoal.cluster.routing import StrategyName
from shoal.errors import InvalidRequest

RETRY_SECONDS = 2.0  # Retry-After of requests that the balancer itself refuses


@dataclass(frozen=True)
class WorkerAddress:
    """URL of a worker and its share of the requests relative to the other workers."""

    url: str
    weight: float = 1.0


@dataclass(frozen=True)
class BalancerConfig:
    workers: tuple[WorkerAddress, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    strategy: StrategyName = "least-connections"
    check_seconds: float = 2.0  # interval of a worker's health checks
    connect_seconds: float = 2.0
    give_up_checks: int = 5  # consecutive unanswered health checks after which requests are retried or ended
    attempts: int = 3  # maximum workers per request: a request that crashes its worker must not crash all of them
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()  # names in Host headers, which workers do not see; see HostMiddleware
    limits: Limits = field(default=Limits())
    compare_url: str | None = None  # server that gets copies of requests; None: no comparison
    compare_share: float = 0.05  # fraction of the speech requests


def parse_workers(urls: Sequence[str], weights: Mapping[str, float]) -> tuple[WorkerAddress, ...]:
    """Return the workers. Raises InvalidRequest for a URL that is wrong or given twice, and for unknown weights."""
    found = [_checked_url(url) for url in urls]
    if not found:
        raise InvalidRequest("no workers: pass --workers http://HOST:PORT,http://HOST:PORT")
    if repeated := sorted({url for url in found if found.count(url) > 1}):
        raise InvalidRequest(f"worker given twice: {', '.join(repeated)}")
    by_url = {_checked_url(url): weight for url, weight in weights.items()}
    if unknown := sorted(set(by_url) - set(found)):
        raise InvalidRequest(f"--weight names {', '.join(unknown)}, which is not one of --workers")
    return tuple(WorkerAddress(url, _checked_weight(url, by_url.get(url, 1.0))) for url in found)


def parse_candidate(url: str | None, share: float, workers: Sequence[WorkerAddress]) -> str | None:
    """Return the URL of the server to compare with. Raises InvalidRequest."""
    if not 0 < share <= 1:
        raise InvalidRequest(f"--compare-share must be greater than 0 and at most 1, not {share:g}")
    found = None if url is None else _checked_url(url)
    if found in [worker.url for worker in workers]:
        raise InvalidRequest(f"--compare names {found}, which is one of --workers: compare with another server")
    return found


def parse_weights(texts: Sequence[str]) -> dict[str, float]:
    """Parse `URL=WEIGHT` values. Raises InvalidRequest."""
    weights = {}
    for text in texts:
        url, equals, weight = text.rpartition("=")
        try:
            weights[url] = float(weight)
        except ValueError:
            equals = ""
        if not equals:
            raise InvalidRequest(f"--weight {text!r} is not of the form URL=NUMBER")
    return weights


def _checked_url(url: str) -> str:
    parts = urlsplit(url.strip())
    try:
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        (parts.hostname or "").encode("idna")  # raises for names that cannot be looked up
    except ValueError:
        valid = False
    if not valid or parts.path.strip("/") or parts.query or parts.username or " " in parts.netloc:
        raise InvalidRequest(f"worker {url[:128]!r} is not of the form http://HOST:PORT")
    return f"{parts.scheme}://{parts.netloc}"


def _checked_weight(url: str, weight: float) -> float:
    if not 0 < weight <= 1e6:
        raise InvalidRequest(f"the weight of {url} must be a positive number, not {weight:g}")
    return weight
