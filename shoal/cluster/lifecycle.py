"""The life of a cluster: start Ray or join one, deploy, watch, take down."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import EngineStopped, InvalidRequest, MissingExtra
from shoal.paths import atomic_write, state_directory

# Read when Ray is imported. Nothing is told to its makers; and what runs on one machine is heard on that machine only.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
# Ray lets its workers run behind everything else on the machine, for jobs that can wait. Whoever listens cannot.
os.environ.setdefault("RAY_worker_niceness", "0")

if TYPE_CHECKING:
    from shoal.cluster.config import ClusterPlan

logger = logging.getLogger(__name__)

APP_NAME = "shoal"
NOT_THERE = "NOT THERE"
WATCH_SECONDS = 1.0
PATIENCE_SECONDS = 15.0
OBJECT_STORE_BYTES = 256 << 20  # audio goes from process to process; little ever lies in the store


@contextmanager
def local_ray(*, logs: bool) -> Iterator[None]:
    """A Ray of our own on this machine, gone at the end. With `logs` its processes write to our standard error.

    To be entered before anything imports Ray.
    """
    os.environ.update(LOOPBACK_ONLY)
    ray = import_ray()
    ray.init(
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=logs,
        logging_level=logging.ERROR,
        _node_ip_address="127.0.0.1",
    )
    _end_quietly()
    _ours().parent.mkdir(parents=True, exist_ok=True)
    atomic_write(_ours(), ray.get_runtime_context().gcs_address.encode())
    try:
        yield
    finally:
        _ours().unlink(missing_ok=True)
        ray.shutdown()


def _end_quietly() -> None:
    """To be asked to end is nothing that a stack trace has to be printed for, as Ray would."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


@contextmanager
def connect_ray(address: str) -> Iterator[None]:
    """An existing cluster; `auto` is the one of this machine. Raises InvalidRequest when there is none.

    To be entered before anything imports Ray.
    """
    if address == "auto" and _ours().exists():
        address = _ours().read_text()
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # as Ray has it for the clusters it starts on one machine
    if address.startswith(("127.", "localhost")):
        os.environ.update(LOOPBACK_ONLY)  # Ray would look for it at this machine's other address
    ray = import_ray()
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError) as problem:
        reason = str(problem).partition("\n")[0]
        raise InvalidRequest(
            f"no Ray cluster answers at {address!r}: {reason} Start one with `shoal cluster up` or `ray start --head`."
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def _ours() -> Path:
    """Where `local_ray` writes down its address for other commands of the same user."""
    return state_directory() / "cluster-address"


def check_resources(replicas: int, cpus: float, gpus: float) -> None:
    """Raises InvalidRequest when the cluster has not enough for the replicas: they would wait for ever."""
    have = import_ray().cluster_resources()
    for name, each in (("CPU", cpus), ("GPU", gpus)):
        needed, there = replicas * each, have.get(name, 0.0)
        if needed > there:
            raise InvalidRequest(
                f"{replicas} replicas of {each:g} {name}s need {needed:g} and there are {there:g}: "
                f"give each less with --{name.lower()}s, or have fewer replicas"
            )


def has_gpus() -> bool:
    return bool(import_ray().cluster_resources().get("GPU"))


def deploy(plan: "ClusterPlan", *, everywhere: bool) -> None:
    """Start the application, or change the running one replica by replica; returns when it is up.

    With `everywhere` each machine that has a replica listens on the port. Raises EngineStopped with what went wrong.
    """
    from ray import serve

    from shoal.cluster.application import application

    quiet = {"log_level": "WARNING", "enable_access_log": False}
    serve.start(
        proxy_location="EveryNode" if everywhere else "HeadOnly",
        http_options={"host": plan.server.host, "port": plan.server.port},
        logging_config=quiet,
    )
    try:
        serve.run(application(plan), name=APP_NAME, route_prefix="/", logging_config=quiet)
    except RuntimeError:
        raise EngineStopped(f"the cluster does not start: {failure_reason(status())}") from None


def status() -> dict[str, Any]:
    """The application as Ray sees it: state, what is wrong, and the replicas of each part by state."""
    from ray import serve

    found = serve.status().applications.get(APP_NAME) if serve_is_running() else None
    if found is None:
        return {"state": NOT_THERE, "message": "", "parts": {}}
    parts = {
        name: {"state": part.status.value, "message": part.message, "replicas": dict(part.replica_states)}
        for name, part in found.deployments.items()
    }
    return {"state": found.status.value, "message": found.message, "parts": parts}


def serve_is_running() -> bool:
    """Whether there is a Ray Serve at all; asking it for its status would start one."""
    try:
        import_ray().get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return False
    return True


def reports() -> list[dict[str, Any]]:
    """What every replica tells of itself."""
    from ray import serve

    from shoal.cluster.frontend import REPLICAS
    from shoal.cluster.service import gather

    return gather(serve.get_deployment_handle(REPLICAS, APP_NAME))


def failure_reason(found: dict[str, Any]) -> str:
    """Why it is not up, as far as Ray says."""
    told = [part["message"] for part in found["parts"].values() if part["message"].strip()]
    return last_error_line("\n".join(told) or found["message"])


def last_error_line(traceback: str) -> str:
    """What somebody said at the end of a traceback: our own error, if there is one, without its class."""
    lines = [line.strip() for line in traceback.splitlines() if line.strip()]
    ours = [line.partition(": ")[2] for line in lines if line.startswith("shoal.errors.")]
    return ours[-1] if ours else lines[-1] if lines else "Ray does not say why"


def wait_until_deleted() -> None:
    """Return when somebody has taken the application down."""
    while status()["state"] != NOT_THERE:
        time.sleep(WATCH_SECONDS)
    # Who did that still needs Ray for a moment, to end Serve as well.
    until = time.monotonic() + PATIENCE_SECONDS
    while serve_is_running() and time.monotonic() < until:
        time.sleep(0.1)


def delete_application() -> bool:
    """End the application after what it speaks is spoken; False if there was none. Other applications stay."""
    from ray import serve

    if status()["state"] == NOT_THERE:
        return False
    serve.delete(APP_NAME)
    if not serve.status().applications:
        with suppress(Exception):  # Ray raises what its dying actors say; the application is gone already
            serve.shutdown()
    return True


def import_ray() -> Any:
    """Raises MissingExtra."""
    try:
        import ray
        import ray.serve
    except ModuleNotFoundError as missing:
        raise MissingExtra(f"A cluster needs {missing.name}: pip install 'shoal[cluster]'") from None
    # Ray Serve tells every step of its life; ours are told by the command.
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    return ray
