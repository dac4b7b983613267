"""Fronts, replicas and the gate as one Ray Serve application."""

from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from shoal.cluster.config import ClusterPlan, split_gpu_memory
from shoal.cluster.frontend import FRONTENDS, GATE, REPLICAS, Frontend
from shoal.cluster.replica import Replica
from shoal.cluster.router import StrategyRouter
from shoal.cluster.startup_gate import StartupGate

# Replicas are added before all slots are taken: a model takes a while to load.
BUSY = 0.75
# Seconds: how far back the load is looked at, and how long it must ask for more before there is more.
LOOK_BACK, GROW_AFTER = 15.0, 5.0
# A model that cannot be loaded cannot be loaded by trying often.
CONSTRUCTIONS = 2


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
            request_router_kwargs={"strategy": plan.cluster.strategy, "slots": config.slots},
        ),
        max_constructor_retry_count=CONSTRUCTIONS,
        health_check_period_s=2.0,
        **scale(plan),
        **drain,
    ).bind(source, gate.bind(plan.cluster.stagger_seconds), **logs)
    return serve.deployment(
        serve.ingress()(Frontend),
        name=FRONTENDS,
        num_replicas=plan.cluster.frontends,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=plan.server.limits.connections,
        # A front weighs little: the new one is there before the old one goes.
        max_surge_percent=100,
        **drain,
    ).bind(plan.server, plan.cluster, source, plan.voices, replicas, **logs)


def scale(plan: ClusterPlan) -> dict[str, Any]:
    """A number of replicas, or bounds and when to add one."""
    wanted = plan.cluster.autoscale
    if wanted is None:
        return {"num_replicas": plan.cluster.replicas}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=wanted.min_replicas,
            max_replicas=wanted.max_replicas,
            initial_replicas=min(max(plan.cluster.replicas, wanted.min_replicas), wanted.max_replicas),
            target_ongoing_requests=max(1.0, BUSY * plan.source.config.slots),
            look_back_period_s=LOOK_BACK,
            upscale_delay_s=GROW_AFTER,
            downscale_delay_s=plan.cluster.shrink_after,
        )
    }
