"""The cluster as an application that Ray Serve imports by name, as KubeRay's RayService requires.

The import path is `shoal.deploy.kuberay:app`. Its `args` are cluster flags of `shoal cluster up`, with underscores, and
any setting of `shoal serve`.
"""

from dataclasses import replace
from typing import Any

from ray import serve

from shoal.cluster.application import application
from shoal.cluster.config import Autoscale, ClusterConfig, ClusterPlan
from shoal.cluster.routing import check_strategy
from shoal.server.run import check_access
from shoal.settings import read_settings


def app(args: dict[str, Any]) -> serve.Application:
    """Build the application. Raises InvalidRequest for unknown settings and for a server without API keys."""
    settings = dict(args)
    autoscale = settings.pop("autoscale", None)
    cluster = ClusterConfig(
        replicas=int(settings.pop("replicas", ClusterConfig.replicas)),
        strategy=check_strategy(str(settings.pop("strategy", ClusterConfig.strategy))),
        autoscale=Autoscale.parse(str(autoscale)) if autoscale else None,
        shrink_after=float(settings.pop("shrink_after", ClusterConfig.shrink_after)),
        stagger_seconds=float(settings.pop("stagger_start", ClusterConfig.stagger_seconds)),
        cpus=float(settings.pop("cpus", ClusterConfig.cpus)),
        gpus=float(settings.pop("gpus", ClusterConfig.gpus)),
        frontends=int(settings.pop("fronts", ClusterConfig.frontends)),
    )
    read = read_settings(settings).settings
    # Ray's proxy listens on every node.
    server = replace(read.server(), host="0.0.0.0")
    check_access(server)
    return application(
        ClusterPlan(server, cluster, read.source(), read.voice_directory(), read.log_format, read.log_level)
    )
