"""Build the Ray Serve application: frontends, replicas and the startup gate."""

from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from shoal.cluster.config import ClusterPlan, split_gpu_memory
from shoal.cluster.frontend import FRONTENDS, GATE, REPLICAS, Frontend
from shoal.cluster.replica import Replica
from shoal.cluster.router import StrategyRouter
from shoal.cluster.startup_gate import StartupGate

# Fraction of a replica's slots in use that autoscaling aims at; the rest is headroom while a new replica loads.
TARGET_LOAD = 0.75
LOOK_BACK_SECONDS, UPSCALE_DELAY_SECONDS = 15.0, 5.0
MAX_CONSTRUCTOR_RETRIES = 2


def application(plan: ClusterPlan) -> serve.Application:
    source, config = split_gpu_memory(plan.source, plan.cluster.gpus), plan.source.config
    logs = {"log_format": plan.log_format, "log_level": plan.log_level}
    drain = {"graceful_shutdown_timeout_s": plan.server.drain_seconds, "graceful_shutdown_wait_loop_s": 0.2}
    gate = serve.deployment(StartupGate, name=GATE, ray_actor_options={"num_cpus": 0})
    replicas = serve.deployment(
        Replica,
        name=REPLICAS,
        ray_actor_options={"num_cpus": plan.cluster.cpus, "num_gpus": plan.cluster.gpus},
        max_ongoing_requests=config.slots + config.max_waiting,
        request_router_config=RequestRouterConfig(
            request_router_class=StrategyRouter,
            request_router_kwargs={
                "strategy": plan.cluster.strategy,
                "slots": config.slots,
                "frontends": plan.cluster.frontends,
            },
        ),
        max_constructor_retry_count=MAX_CONSTRUCTOR_RETRIES,
        health_check_period_s=2.0,
        **scaling_options(plan),
        **drain,
    ).bind(source, gate.bind(plan.cluster.stagger_seconds), **logs)
    return serve.deployment(
        serve.ingress()(Frontend),
        name=FRONTENDS,
        num_replicas=plan.cluster.frontends,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=plan.server.limits.connections,
        # Frontends need few resources: an update starts the new one before it stops the old one.
        max_surge_percent=100,
        **drain,
    ).bind(plan.server, plan.cluster, source, plan.voices, replicas, **logs)


def scaling_options(plan: ClusterPlan) -> dict[str, Any]:
    """Return the options for a fixed number of replicas or for autoscaling."""
    autoscale = plan.cluster.autoscale
    if autoscale is None:
        return {"num_replicas": plan.cluster.replicas}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=autoscale.min_replicas,
            max_replicas=autoscale.max_replicas,
            initial_replicas=min(max(plan.cluster.replicas, autoscale.min_replicas), autoscale.max_replicas),
            target_ongoing_requests=max(1.0, TARGET_LOAD * plan.source.config.slots),
            look_back_period_s=LOOK_BACK_SECONDS,
            upscale_delay_s=UPSCALE_DELAY_SECONDS,
            downscale_delay_s=plan.cluster.shrink_after,
        )
    }
