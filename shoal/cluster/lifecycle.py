"""Start or connect to Ray, deploy the application, watch it and shut it down."""

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import EngineStopped, InvalidRequest, MissingExtra, counted
from shoal.paths import atomic_write, state_directory

# Read when Ray is imported: no usage reports, and a local cluster listens on loopback only.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
# By default Ray runs workers at a lower CPU priority, which would delay live streams.
os.environ.setdefault("RAY_worker_niceness", "0")
# Read by Ray Serve's controller. The defaults, 5 and 10 s, kill an HTTP proxy that starts on a busy machine.
os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
os.environ.setdefault("RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S", "30")
# Read by the process of Ray's HTTP proxy.
os.environ.setdefault("RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", "shoal.cluster.proxy_errors.middlewares")

if TYPE_CHECKING:
    from shoal.cluster.config import ClusterPlan

logger = logging.getLogger(__name__)

APP_NAME = "shoal"
NOT_THERE = "NOT THERE"
WATCH_SECONDS = 1.0
SHUTDOWN_SECONDS = 15.0
CONNECT_SECONDS = 5.0
START_ONE = "start one with `shoal cluster up` or `ray start --head`"
QUIET = {"log_level": "WARNING", "enable_access_log": False}
OBJECT_STORE_BYTES = 256 << 20  # audio is streamed between processes; the store stays almost empty


@contextmanager
def local_ray(*, logs: bool) -> Iterator[None]:
    """Run a private Ray cluster on this machine; with `logs` its processes write to our standard error.

    Enter this before anything imports Ray. Raises EngineStopped when Ray does not start.
    """
    os.environ.update(LOOPBACK_ONLY)
    ray = import_ray()
    try:
        ray.init(
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=logs,
            logging_level=logging.ERROR,
            _node_ip_address="127.0.0.1",
        )
    except Exception as problem:  # edge: Ray raises no narrower class when a node is not up within its 30 seconds
        reason = str(problem).partition("\n")[0]
        raise EngineStopped(f"Ray did not start: {reason} On a busy machine, try again") from problem
    _exit_on_sigterm()
    try:
        with _stored_address(ray.get_runtime_context().gcs_address):
            yield
    finally:
        ray.shutdown()


@contextmanager
def _stored_address(address: str) -> Iterator[None]:
    """Store the address for other commands of the same user, then that of an earlier cluster if it still runs."""
    file = _address_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    earlier = file.read_text() if file.exists() else ""
    atomic_write(file, address.encode())
    try:
        yield
    finally:
        if file.exists() and file.read_text() == address:  # else a later cluster stored its own
            if earlier and _accepts_connections(earlier):
                atomic_write(file, earlier.encode())
            else:
                file.unlink()


def _exit_on_sigterm() -> None:
    """Exit on SIGTERM without the stack trace that Ray's own handler prints."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


@contextmanager
def connect_ray(address: str) -> Iterator[None]:
    """Connect to an existing cluster; `auto` is the one on this machine. Raises InvalidRequest when there is none.

    Enter this before anything imports Ray.
    """
    if address == "auto" and _address_file().exists():
        address = _address_file().read_text()
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # the mode of clusters that Ray starts locally
    if not _accepts_connections(address):  # Ray tries for minutes
        raise InvalidRequest(f"no Ray cluster responds at {address!r}: {START_ONE}")
    if address.startswith(("127.", "localhost")):
        os.environ.update(LOOPBACK_ONLY)  # otherwise Ray connects to the external address
    ray = import_ray()
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError) as problem:
        reason = str(problem).partition("\n")[0]
        raise InvalidRequest(f"no Ray cluster responds at {address!r}: {reason.rstrip('.')}; {START_ONE}") from None
    try:
        yield
    finally:
        ray.shutdown()


def _accepts_connections(address: str) -> bool:
    """Return whether HOST:PORT can be reached; True for addresses of other forms, which Ray resolves."""
    host, _, port = address.rpartition(":")
    if "/" in host or not (host and port.isascii() and port.isdigit()):
        return True
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError):
        return False
    return True


def _address_file() -> Path:
    """Return the file in which `local_ray` stores its address for other commands of the same user."""
    return state_directory() / "cluster-address"


def check_resources(replicas: int, cpus: float, gpus: float) -> None:
    """Raise InvalidRequest when the cluster lacks resources for the replicas: they would never start."""
    have = import_ray().cluster_resources()
    for name, each in (("CPU", cpus), ("GPU", gpus)):
        needed, available = replicas * each, have.get(name, 0.0)
        if needed > available:
            raise InvalidRequest(
                f"{counted(replicas, 'replica')} with {each:g} {name}s each need {needed:g}, but the cluster has "
                f"{available:g}: lower --{name.lower()}s or the number of replicas"
            )


def has_gpus() -> bool:
    return bool(import_ray().cluster_resources().get("GPU"))


def deploy(plan: "ClusterPlan", *, everywhere: bool) -> None:
    """Start the application, or update the running one replica by replica; return when it is up.

    With `everywhere` each machine that has a replica listens on the port. Raises EngineStopped with the cause.
    """
    from ray import serve

    from shoal.cluster.application import application

    _start_serve("EveryNode" if everywhere else "HeadOnly", plan.server.host, plan.server.port)
    try:
        serve.run(application(plan), name=APP_NAME, route_prefix="/", logging_config=QUIET)
    except RuntimeError:
        raise EngineStopped(f"the cluster failed to start: {failure_reason(status())}") from None


def _start_serve(proxy_location: str, host: str, port: int) -> None:
    """Start Ray Serve if it is not running yet. Raises EngineStopped when its HTTP proxy does not start."""
    from ray import serve
    from ray.exceptions import RayActorError

    try:
        serve.start(proxy_location=proxy_location, http_options={"host": host, "port": port}, logging_config=QUIET)
    except (TimeoutError, RayActorError) as problem:
        reason = str(problem).partition("\n")[0]
        raise EngineStopped(f"Ray Serve did not start: {reason} On a busy machine, try again") from problem


def status() -> dict[str, Any]:
    """Return the application's state and message, and the replicas of each deployment by state."""
    found = applications().get(APP_NAME)
    if found is None:
        return {"state": NOT_THERE, "message": "", "parts": {}}
    parts = {
        name: {"state": part.status.value, "message": part.message, "replicas": dict(part.replica_states)}
        for name, part in found.deployments.items()
    }
    return {"state": found.status.value, "message": found.message, "parts": parts}


def applications() -> dict[str, Any]:
    """Return Ray Serve's status of every application, by name; empty if Ray Serve is not running."""
    from ray import serve
    from ray.exceptions import RayActorError

    try:
        return dict(serve.status().applications) if serve_is_running() else {}
    except RayActorError:  # another command has just shut Serve down
        return {}


def serve_is_running() -> bool:
    """Return whether Ray Serve is running; `serve.status` would start it."""
    try:
        import_ray().get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return False
    return True


def reports() -> list[dict[str, Any]]:
    """Return the report of every replica."""
    from ray import serve

    from shoal.cluster.frontend import REPLICAS
    from shoal.cluster.service import gather

    return gather(serve.get_deployment_handle(REPLICAS, APP_NAME))


def failure_reason(found: dict[str, Any]) -> str:
    """Return why the application is not up, from Ray's messages."""
    messages = [part["message"] for part in found["parts"].values() if part["message"].strip()]
    return last_error_line("\n".join(messages) or found["message"])


def last_error_line(traceback: str) -> str:
    """Return the message of the last ShoalError in a traceback, or else its last line."""
    lines = [line.strip() for line in traceback.splitlines() if line.strip()]
    ours = [line.partition(": ")[2] for line in lines if line.startswith("shoal.errors.")]
    return ours[-1] if ours else lines[-1] if lines else "Ray reports no cause"


def wait_until_deleted() -> None:
    """Return when the application has been deleted, for example by `shoal cluster down`."""
    while status()["state"] != NOT_THERE:
        time.sleep(WATCH_SECONDS)
    # The command that deleted it still needs Ray, to shut down Ray Serve.
    until = time.monotonic() + SHUTDOWN_SECONDS
    while serve_is_running() and time.monotonic() < until:
        time.sleep(0.1)


def delete_application() -> bool:
    """Delete the application after its requests have finished; return False if there was none."""
    from ray import serve
    from ray.exceptions import RayActorError

    if status()["state"] == NOT_THERE:
        return False
    with suppress(RayActorError):  # another command has shut down Ray Serve meanwhile
        serve.delete(APP_NAME)
    if not applications():
        with suppress(Exception):  # edge to Ray: dying actors raise anything, and the application is deleted already
            serve.shutdown()
    return True


def import_ray() -> Any:
    """Import Ray and Ray Serve. Raises MissingExtra."""
    try:
        import ray
        import ray.serve
    except ModuleNotFoundError as missing:
        raise MissingExtra(f"a cluster needs {missing.name}: pip install 'shoal-tts[cluster]'") from None
    # Ray Serve logs every step of a deployment; the command prints its own progress.
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    return ray
