"""`shoal balance`: a load balancer for several servers, without Ray."""

import sys
from functools import partial
from typing import Annotated

import typer

from shoal.cli.serving.cluster import DEFAULT_PORT, PANEL, Strategy
from shoal.cli.serving.serve import print_address, server_extra
from shoal.errors import counted

Workers = Annotated[str, typer.Option(help="URLs of the servers, separated by commas.")]
Weight = Annotated[
    list[str] | None,
    typer.Option(
        metavar="URL=NUMBER",
        help="Share of the requests for a server relative to the others, whose weight is 1; may be repeated.",
    ),
]
Compare = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Server that gets copies of a share of the speech requests; /v1/comparison compares its answers.",
    ),
]
CompareShare = Annotated[float, typer.Option(help="Share of the speech requests for --compare, 0 to 1.")]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(help="Port to listen on.")]
Origin = Annotated[
    list[str] | None, typer.Option(help="Origin whose web pages may call the balancer; may be repeated.")
]
AllowedHost = Annotated[
    list[str] | None,
    typer.Option(
        help="Name that a Host header may have, or * for any; may be repeated. Default: localhost and addresses "
        "for a balancer on loopback, else any."
    ),
]


def add_to(app: typer.Typer) -> None:
    app.command(rich_help_panel=PANEL)(balance)


def balance(
    workers: Workers,
    strategy: Strategy = "least-connections",
    weight: Weight = None,
    compare: Compare = None,
    compare_share: CompareShare = 0.05,
    host: Host = "127.0.0.1",
    port: Port = DEFAULT_PORT,
    origin: Origin = None,
    allowed_host: AllowedHost = None,
) -> None:
    """Distribute requests over several running servers, without Ray.

    Health is checked every two seconds. A request that has sent no audio is retried on another server if its own fails
    or is full. The servers check API keys. `/v1/workers` shows the health, load and latency of each server.

    Example: shoal balance --workers http://a:8080,http://b:8080

    Example: shoal balance --workers http://a:8080,http://b:8080 --weight http://b:8080=0.05

    Example: shoal balance --workers http://a:8080 --compare http://new:8080 --compare-share 0.1
    """
    with server_extra():
        from shoal.cluster.balancer.app import balance
        from shoal.cluster.balancer.config import BalancerConfig, parse_candidate, parse_weights, parse_workers
        from shoal.cluster.routing import check_strategy
        from shoal.server.logging import set_up_logging

    found = parse_workers([url for url in workers.split(",") if url.strip()], parse_weights(weight or ()))
    set_up_logging("auto", "info")
    balance(
        BalancerConfig(
            found,
            host,
            port,
            strategy=check_strategy(strategy),
            cors_origins=tuple(origin or ()),
            allowed_hosts=tuple(allowed_host or ()),
            compare_url=parse_candidate(compare, compare_share, found),
            compare_share=compare_share,
        ),
        partial(print_address, model=counted(len(found), "server")) if sys.stderr.isatty() else None,
    )
