"""`shoal cluster`: several replicas on Ray Serve, on this machine or on a Ray cluster."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.flags import Codec, Json
from shoal.cli.serving.serve import (
    Device,
    File,
    Host,
    Insecure,
    Model,
    Set,
    Slots,
    resolve_settings,
    server_extra,
)
from shoal.errors import counted

if TYPE_CHECKING:
    from shoal.cluster.config import ClusterConfig, ClusterPlan
    from shoal.settings import ResolvedSettings

PANEL = "Serve"
DEFAULT_PORT = 8000

Strategy = Annotated[
    str,
    typer.Option(help="Routing of requests to replicas: round-robin, least-connections or voice-affinity."),
]
Bounds = Annotated[
    str | None,
    typer.Option(metavar="MIN:MAX", help="Scale the number of replicas with the load, between MIN and MAX."),
]
Gpus = Annotated[
    float | None,
    typer.Option(min=0, help="GPUs per replica; 0.5 puts two replicas on one GPU. Default: 1 if there is a GPU."),
]
Address = Annotated[
    str | None,
    typer.Option(help="Running Ray cluster to deploy to: HOST:PORT, or auto for the one on this machine."),
]
Running = Annotated[str, typer.Option("--address", help="Ray cluster: HOST:PORT, or auto for the one on this machine.")]


Replicas = Annotated[int, typer.Option(min=1, help="Number of replicas; each runs one engine.")]
ShrinkAfter = Annotated[
    float, typer.Option(min=0, help="With --autoscale: seconds of low load before a replica is removed.")
]
StaggerStart = Annotated[float, typer.Option(min=0, help="Seconds between the starts of two replicas.")]
Cpus = Annotated[float, typer.Option(min=0, help="CPUs per replica, reserved in Ray.")]
Fronts = Annotated[int, typer.Option(min=1, help="Number of HTTP frontend processes.")]
Port = Annotated[int | None, typer.Option(help=f"Port to listen on. Default: {DEFAULT_PORT}.")]


def add_to(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Run several replicas behind one port with Ray Serve.")
    group.command("up")(up)
    group.command("status")(status)
    group.command("down")(down)
    app.add_typer(group, name="cluster", rich_help_panel=PANEL)


def up(
    replicas: Replicas = 1,
    strategy: Strategy = "voice-affinity",
    autoscale: Bounds = None,
    shrink_after: ShrinkAfter = 300.0,
    stagger_start: StaggerStart = 0.0,
    gpus: Gpus = None,
    cpus: Cpus = 1.0,
    fronts: Fronts = 1,
    address: Address = None,
    model: Model = None,
    codec: Codec = None,
    device: Device = None,
    host: Host = None,
    port: Port = None,
    slots: Slots = None,
    insecure: Insecure = None,
    file: File = None,
    set: Set = None,
) -> None:
    """Serve from several replicas until a signal or `shoal cluster down` stops them.

    With --address the application is deployed to that Ray cluster and the command returns. An application that is
    already deployed there is updated one replica at a time, without interrupting requests.

    Example: shoal cluster up --replicas 2 --model random:tiny
    """
    with server_extra():
        from shoal.cluster.config import Autoscale, ClusterConfig
        from shoal.cluster.routing import check_strategy

    cluster = ClusterConfig(
        replicas=replicas,
        strategy=check_strategy(strategy),
        autoscale=Autoscale.parse(autoscale) if autoscale else None,
        shrink_after=shrink_after,
        stagger_seconds=stagger_start,
        cpus=cpus,
        gpus=gpus or 0.0,
        frontends=fronts,
    )
    flags = {"model": model, "codec": codec, "device": device, "host": host, "port": port, "slots": slots}
    resolved = resolve_settings({**flags, "insecure": insecure}, file, set)
    plan = _plan(resolved, cluster)
    if address is not None:
        _deploy_remote(plan, address, gpus)
    else:
        _run_local(plan, gpus)


def status(address: Running = "auto", json: Json = False) -> None:
    """Show the state of the cluster, its replicas and their load.

    Example: shoal cluster status
    """
    from shoal.cli.tables import print_json, show_table
    from shoal.cluster import lifecycle as life

    with life.connect_ray(address):
        found = life.status()
        workers = life.reports() if found["state"] == "RUNNING" else []
    if json:
        print_json({**found, "workers": workers})
        return
    typer.echo(f"{found['state']}{': ' + life.failure_reason(found) if found['message'] else ''}")
    if workers:
        show_table(_table(workers))


def down(address: Running = "auto") -> None:
    """Shut the cluster down after the requests in flight have finished.

    Example: shoal cluster down
    """
    from shoal.cluster import lifecycle as life

    with life.connect_ray(address):
        was_running = life.delete_application()
    typer.echo("cluster shut down" if was_running else "no cluster was running", err=True)


def _plan(resolved: "ResolvedSettings", cluster: "ClusterConfig") -> "ClusterPlan":
    from dataclasses import replace

    from shoal.cluster.config import ClusterPlan
    from shoal.server.run import check_access

    settings = resolved.settings
    server = settings.server()
    if resolved.sources["port"] == "default":
        server = replace(server, port=DEFAULT_PORT)
    check_access(server)
    return ClusterPlan(
        server, cluster, settings.source(), settings.voice_directory(), settings.log_format, settings.log_level
    )


def _run_local(plan: "ClusterPlan", gpus: float | None) -> None:
    from contextlib import closing, suppress

    from shoal.cluster import lifecycle as life
    from shoal.server.run import bind, check_model

    # Fail before Ray starts. On a Ray cluster the model may be on other machines only.
    check_model(plan.source.model)
    # Bind once to fail early: Ray only logs that a port is in use.
    with closing(bind(plan.server)):
        pass
    with life.local_ray(logs=True):
        plan = _with_gpus(plan, gpus)
        life.check_resources(plan.cluster.max_replicas, plan.cluster.cpus, plan.cluster.gpus)
        try:
            _deploy(plan, everywhere=False)
            typer.echo("press Ctrl-C to shut down", err=True)
            # A requested shutdown exits with code 0.
            with suppress(KeyboardInterrupt, SystemExit):
                life.wait_until_deleted()
        finally:
            typer.echo("shutting down", err=True)
            life.delete_application()


def _deploy_remote(plan: "ClusterPlan", address: str, gpus: float | None) -> None:
    from shoal.cluster import lifecycle as life
    from shoal.errors import InvalidRequest

    with life.connect_ray(address):
        plan = _with_gpus(plan, gpus)
        try:
            life.check_resources(plan.cluster.replicas, plan.cluster.cpus, plan.cluster.gpus)
        except InvalidRequest as problem:
            # An autoscaling Ray cluster may add nodes; the message says what the deployment waits for.
            typer.echo(f"waiting for the cluster to add resources: {problem}", err=True)
        _deploy(plan, everywhere=True)


def _with_gpus(plan: "ClusterPlan", gpus: float | None) -> "ClusterPlan":
    """Give every replica one GPU if the cluster has GPUs and `gpus` was not set."""
    from dataclasses import replace

    from shoal.cluster import lifecycle as life

    if gpus is not None or plan.source.device == "cpu" or not life.has_gpus():
        return plan
    return replace(plan, cluster=replace(plan.cluster, gpus=1.0))


def _deploy(plan: "ClusterPlan", *, everywhere: bool) -> None:
    from rich.console import Console

    from shoal.cluster import lifecycle as life

    server, cluster = plan.server, plan.cluster
    console = Console(stderr=True)
    replicas = f"{counted(cluster.replicas, 'replica')} of {plan.source.model}"
    with console.status(f"starting {replicas}"):
        life.deploy(plan, everywhere=everywhere)
    console.print(f"{replicas}, {cluster.strategy}: http://{server.host}:{server.port}")


def _table(workers: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table("rank", "node", "pid", "state", "requests", "in flight", "first audio p95", "restarts", "voices")
    for worker in workers:
        first = worker["first_audio_seconds"]
        table.add_row(
            str(worker["rank"]),
            worker["node"],
            str(worker["pid"]),
            worker["state"],
            str(worker["requests"]),
            str(worker["in_flight"]),
            f"{first['p95'] * 1000:.0f} ms" if first else "",
            str(worker["restarts"]),
            str(worker.get("cached_voices", "")),
        )
    return table
