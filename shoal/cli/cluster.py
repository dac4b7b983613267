"""Commands for many replicas: on this machine, or on a Ray cluster."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.flags import Codec, Json
from shoal.cli.serve import Device, File, Host, Insecure, Model, Set, Slots, resolve_settings, server_extra

if TYPE_CHECKING:
    from shoal.cluster.config import ClusterConfig, ClusterPlan
    from shoal.settings import ResolvedSettings

PANEL = "Serve"
USUAL_PORT = 8000

Strategy = Annotated[str, typer.Option(help="Who speaks a request: round-robin, least-connections or voice-affinity.")]
Bounds = Annotated[str | None, typer.Option(metavar="MIN:MAX", help="Let the number of replicas follow the load.")]
Gpus = Annotated[
    float | None, typer.Option(min=0, help="GPUs per replica, 0.5 for two on one; else 1 where there are any.")
]
Address = Annotated[
    str | None, typer.Option(help="A Ray cluster to use: HOST:PORT, or auto for the one on this machine.")
]
Running = Annotated[str, typer.Option("--address", help="The Ray cluster: HOST:PORT, or the one on this machine.")]


def add_to(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Several replicas behind one port, on Ray Serve.")
    group.command("up")(up)
    group.command("status")(status)
    group.command("down")(down)
    app.add_typer(group, name="cluster", rich_help_panel=PANEL)


def up(
    replicas: Annotated[int, typer.Option(min=1, help="Engines to run.")] = 1,
    strategy: Strategy = "voice-affinity",
    autoscale: Bounds = None,
    shrink_after: Annotated[float, typer.Option(min=0, help="Seconds of little load before a replica goes.")] = 300.0,
    stagger_start: Annotated[float, typer.Option(min=0, help="Seconds between the starts of two replicas.")] = 0.0,
    gpus: Gpus = None,
    cpus: Annotated[float, typer.Option(min=0, help="CPUs per replica, as Ray counts them.")] = 1.0,
    fronts: Annotated[int, typer.Option(min=1, help="Processes that speak HTTP.")] = 1,
    address: Address = None,
    model: Model = None,
    codec: Codec = None,
    device: Device = None,
    host: Host = None,
    port: Annotated[int | None, typer.Option(help=f"Port to listen on; else {USUAL_PORT}.")] = None,
    slots: Slots = None,
    insecure: Insecure = None,
    file: File = None,
    set: Set = None,
) -> None:
    """Serve from several replicas, until a signal or `shoal cluster down` ends it.

    With --address the application is left on that cluster and the command returns. If it runs there already it is
    changed to what is asked for, one replica after the other, while requests go on.

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
        _up_there(plan, address, gpus)
    else:
        _up_here(plan, gpus)


def status(address: Running = "auto", json: Json = False) -> None:
    """Show the replicas and what they do.

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
    """Take the cluster down after what it speaks is spoken.

    Example: shoal cluster down
    """
    from shoal.cluster import lifecycle as life

    with life.connect_ray(address):
        there = life.delete_application()
    typer.echo("taken down" if there else "there was nothing to take down", err=True)


def _plan(resolved: "ResolvedSettings", cluster: "ClusterConfig") -> "ClusterPlan":
    from dataclasses import replace

    from shoal.cluster.config import ClusterPlan
    from shoal.server.run import check_door

    settings = resolved.settings
    server = settings.server()
    if resolved.sources["port"] == "default":
        server = replace(server, port=USUAL_PORT)
    check_door(server)
    return ClusterPlan(
        server, cluster, settings.source(), settings.voice_directory(), settings.log_format, settings.log_level
    )


def _up_here(plan: "ClusterPlan", gpus: float | None) -> None:
    from contextlib import closing, suppress

    from shoal.cluster import lifecycle as life
    from shoal.server.run import bind

    # Ray would only write a busy port to a log.
    with closing(bind(plan.server)):
        pass
    with life.local_ray(logs=True):
        plan = _with_gpus(plan, gpus)
        life.check_resources(plan.cluster.max_replicas, plan.cluster.cpus, plan.cluster.gpus)
        try:
            _deploy(plan, everywhere=False)
            typer.echo("Ctrl-C ends it", err=True)
            # Whoever was asked to stop, and does, has not failed.
            with suppress(KeyboardInterrupt, SystemExit):
                life.wait_until_deleted()
        finally:
            typer.echo("going down", err=True)
            life.delete_application()


def _up_there(plan: "ClusterPlan", address: str, gpus: float | None) -> None:
    from shoal.cluster import lifecycle as life
    from shoal.errors import InvalidRequest

    with life.connect_ray(address):
        plan = _with_gpus(plan, gpus)
        try:
            life.check_resources(plan.cluster.replicas, plan.cluster.cpus, plan.cluster.gpus)
        except InvalidRequest as problem:
            # Ray may bring up more machines; if it does not, nobody should wonder what is waited for.
            typer.echo(f"waiting for the cluster to grow: {problem}", err=True)
        _deploy(plan, everywhere=True)


def _with_gpus(plan: "ClusterPlan", gpus: float | None) -> "ClusterPlan":
    """Where there are GPUs and none were asked for, a replica has one."""
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
    with console.status(f"starting {cluster.replicas} replicas of {plan.source.model}"):
        life.deploy(plan, everywhere=everywhere)
    console.print(
        f"{cluster.replicas} replicas of {plan.source.model}, {cluster.strategy}: http://{server.host}:{server.port}"
    )


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
