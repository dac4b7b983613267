"""Describe a SageMaker endpoint and compute the API calls that bring the account to that state.

Models and endpoint configurations are immutable in SageMaker, so their names contain a digest of their content:
a name that exists has the same content, so repeating a deployment does nothing.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from shoal.errors import InvalidRequest, MissingExtra, ShoalError

VARIANT, CANDIDATE = "voice", "candidate"
DIMENSION = "sagemaker:variant:DesiredInstanceCount"
METRIC = "SageMakerVariantConcurrentRequestsPerModelHighResolution"
STARTUP_SECONDS = 900  # time to load a large model; SageMaker kills containers that are unhealthy after it
DOWNLOAD_SECONDS = 900
COOLDOWN_SECONDS = 300  # before an instance is removed: starting one takes minutes
ALARM_ERROR_SHARE = 0.01  # fraction of the invocations of one minute that are answered with 5xx
ALARM_MINUTES = 2  # consecutive minutes above the share
KEPT_SECONDS = 300  # the old instances are kept this long after all traffic has moved, for a rollback
NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,49}")
NOT_FOUND = ("Could not find", "Cannot find")

Spec = dict[str, Any]


@dataclass(frozen=True)
class Canary:
    """Update in two steps: `percent` of the new instances serve first, then all. An alarm rolls the update back."""

    percent: int
    seconds: int = 600  # between the two steps
    alarms: tuple[str, ...] = ()  # names of CloudWatch alarms; empty: an alarm on 5xx answers is created

    def __post_init__(self) -> None:
        if not 1 <= self.percent <= 50:
            raise InvalidRequest(f"a canary takes 1 to 50 percent of the instances, not {self.percent}")
        if not 60 <= self.seconds <= 3600:
            raise InvalidRequest(f"a canary lasts 60 to 3600 seconds, not {self.seconds}")


@dataclass(frozen=True)
class CandidateModel:
    """Second variant of an endpoint, which gets `percent` of the requests until it is removed or replaces the first."""

    image: str
    model_data: str
    percent: float

    def __post_init__(self) -> None:
        if not 0 < self.percent < 100:
            raise InvalidRequest(f"a candidate takes more than 0 and less than 100 percent, not {self.percent:g}")
        if not self.model_data.startswith("s3://"):
            raise InvalidRequest(f"the candidate must be in S3, s3://BUCKET/KEY, not {self.model_data!r}")


@dataclass(frozen=True)
class EndpointSpec:
    """Desired state of an endpoint."""

    name: str
    image: str
    model_data: str  # s3://…/model.tar.gz, or with `multi_model` the prefix of all models
    role: str
    instance: str
    min_instances: int = 1
    max_instances: int = 1
    concurrency: int = 16  # target of autoscaling: concurrent requests per instance
    multi_model: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    canary: Canary | None = None  # rollout of an update; not part of the desired state
    candidate: CandidateModel | None = None

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise InvalidRequest(f"invalid endpoint name {self.name!r}: use up to 50 letters, digits and single -")
        if not self.model_data.startswith("s3://"):
            raise InvalidRequest(f"the model must be in S3, s3://BUCKET/KEY, not {self.model_data!r}")
        if self.multi_model and not self.model_data.endswith("/"):
            raise InvalidRequest("a multi-model endpoint needs the S3 prefix of its models: s3://BUCKET/PREFIX/")
        if not 1 <= self.min_instances <= self.max_instances:
            raise InvalidRequest(f"instances must be 1 <= MIN <= MAX, not {self.min_instances}:{self.max_instances}")
        if self.multi_model and self.candidate is not None:
            raise InvalidRequest("a multi-model endpoint has one variant: deploy the candidate as one of its models")

    @property
    def models(self) -> list[Spec]:
        """One model per variant."""
        containers = [self._container(self.image, self.model_data)]
        if self.candidate is not None:
            containers.append(self._container(self.candidate.image, self.candidate.model_data))
        return [self._model(container) for container in containers]

    @property
    def variants(self) -> list[Spec]:
        share = 0.0 if self.candidate is None else self.candidate.percent
        weights = {VARIANT: 100 - share, CANDIDATE: share}
        return [
            self._variant(name, model["ModelName"], weights[name])
            for name, model in zip((VARIANT, CANDIDATE), self.models, strict=False)
        ]

    @property
    def config_name(self) -> str:
        return f"{self.name}-{_digest(self.variants)}"

    @property
    def config(self) -> Spec:
        return {"EndpointConfigName": self.config_name, "ProductionVariants": self.variants}

    @property
    def names(self) -> Spec:
        return {"EndpointName": self.name, "EndpointConfigName": self.config_name}

    @property
    def update(self) -> Spec:
        """Arguments of UpdateEndpoint. The current instance count is kept: an update under load must not shrink it."""
        kept = {
            "RetainAllVariantProperties": True,
            "ExcludeRetainedVariantProperties": [{"VariantPropertyType": "DesiredWeight"}],
        }
        return self.names | kept | ({} if self.canary is None else {"DeploymentConfig": self._deployment(self.canary)})

    @property
    def alarm(self) -> Spec:
        """Alarm on the share of 5xx answers, which rolls a canary back."""
        return {
            "AlarmName": f"{self.name}-5xx",
            "Namespace": "AWS/SageMaker",
            "MetricName": "Invocation5XXErrors",
            "Dimensions": [{"Name": "EndpointName", "Value": self.name}, {"Name": "VariantName", "Value": VARIANT}],
            "Statistic": "Average",
            "Period": 60,
            "EvaluationPeriods": ALARM_MINUTES,
            "Threshold": ALARM_ERROR_SHARE,
            "ComparisonOperator": "GreaterThanThreshold",
            "TreatMissingData": "notBreaching",
        }

    @property
    def instances(self) -> dict[str, str]:
        """Instance type of each variant, by its name."""
        return {variant["VariantName"]: variant["InstanceType"] for variant in self.variants}

    def resource(self, variant: str) -> Spec:
        """Return the scalable resource of a variant, as Application Auto Scaling identifies it."""
        resource = f"endpoint/{self.name}/variant/{variant}"
        return {"ServiceNamespace": "sagemaker", "ResourceId": resource, "ScalableDimension": DIMENSION}

    def target(self, resource: Spec) -> Spec:
        return resource | {"MinCapacity": self.min_instances, "MaxCapacity": self.max_instances}

    def policy(self, resource: Spec) -> Spec:
        return resource | {
            "PolicyName": f"{self.name}-concurrency",
            "PolicyType": "TargetTrackingScaling",
            "TargetTrackingScalingPolicyConfiguration": {
                "TargetValue": float(self.concurrency),
                "PredefinedMetricSpecification": {"PredefinedMetricType": METRIC},
                "ScaleInCooldown": COOLDOWN_SECONDS,
            },
        }

    def _container(self, image: str, model_data: str) -> Spec:
        return {
            "Image": image,
            "ModelDataUrl": model_data,
            "Mode": "MultiModel" if self.multi_model else "SingleModel",
            "Environment": self.environment,
        }

    def _model(self, container: Spec) -> Spec:
        name = f"{self.name}-{_digest([container, self.role])}"
        return {"ModelName": name, "PrimaryContainer": container, "ExecutionRoleArn": self.role}

    def _variant(self, name: str, model: str, weight: float) -> Spec:
        return {
            "VariantName": name,
            "ModelName": model,
            "InstanceType": self.instance,
            "InitialInstanceCount": self.min_instances,
            "InitialVariantWeight": weight,
            "ContainerStartupHealthCheckTimeoutInSeconds": STARTUP_SECONDS,
            "ModelDataDownloadTimeoutInSeconds": DOWNLOAD_SECONDS,
        }

    def _deployment(self, canary: Canary) -> Spec:
        alarms = canary.alarms or (self.alarm["AlarmName"],)
        routing = {
            "Type": "CANARY",
            "CanarySize": {"Type": "CAPACITY_PERCENT", "Value": canary.percent},
            "WaitIntervalInSeconds": canary.seconds,
        }
        return {
            "BlueGreenUpdatePolicy": {
                "TrafficRoutingConfiguration": routing,
                "TerminationWaitInSeconds": KEPT_SECONDS,
            },
            "AutoRollbackConfiguration": {"Alarms": [{"AlarmName": name} for name in alarms]},
        }


@dataclass(frozen=True)
class ApiCall:
    """API call that changes something, with a description."""

    description: str
    call: Callable[[], object]

    def do(self) -> None:
        """Make the call. Raises ShoalError with the message of AWS."""
        with aws_errors():
            self.call()


class SageMakerAccount:
    """Clients of SageMaker and its autoscaling in one region. Raises ShoalError for errors of AWS."""

    def __init__(self, region: str | None = None) -> None:
        try:
            import boto3
        except ModuleNotFoundError as missing:
            raise MissingExtra(
                f"deploying to SageMaker needs {missing.name}: pip install 'shoal-tts[sagemaker]'"
            ) from None
        with aws_errors():
            self._sagemaker = boto3.client("sagemaker", region_name=region)
            self._scaling = boto3.client("application-autoscaling", region_name=region)
            self._alarms = boto3.client("cloudwatch", region_name=region)

    def calls(self, spec: EndpointSpec) -> list[ApiCall]:
        """Return the calls to make, in order; empty when the endpoint is up to date. Only reads from AWS."""
        with aws_errors():
            current = self._current_instances(spec)
            _check_canary(spec, current)
            outdated = [name for name in current if self._is_outdated(spec, name, current[name])]
            return [*self._endpoint_calls(spec, outdated), *self._scaling_calls(spec, outdated)]

    def _current_instances(self, spec: EndpointSpec) -> dict[str, str]:
        """Return the instance type of each variant that the endpoint has now; empty if there is no endpoint."""
        endpoint = _describe(lambda: self._sagemaker.describe_endpoint(EndpointName=spec.name))
        if endpoint is None:
            return {}
        name = endpoint["EndpointConfigName"]
        config = _describe(lambda: self._sagemaker.describe_endpoint_config(EndpointConfigName=name))
        return {
            each["VariantName"]: each.get("InstanceType", "") for each in (config or {}).get("ProductionVariants", ())
        }

    def _is_outdated(self, spec: EndpointSpec, variant: str, instance: str) -> bool:
        """Return whether scaling must stop before the update: AWS refuses to remove or retype a scaled variant."""
        return spec.instances.get(variant) != instance and self._target(spec.resource(variant)) is not None

    def _endpoint_calls(self, spec: EndpointSpec, outdated: Sequence[str]) -> Iterator[ApiCall]:
        sagemaker = self._sagemaker
        yield from filter(None, (self._model_call(model) for model in spec.models))
        if _describe(lambda: sagemaker.describe_endpoint_config(EndpointConfigName=spec.config_name)) is None:
            description = f"create the configuration {spec.config_name} ({spec.min_instances} x {spec.instance})"
            yield ApiCall(description, lambda: sagemaker.create_endpoint_config(**spec.config))
        found = _describe(lambda: sagemaker.describe_endpoint(EndpointName=spec.name))
        changed = found is not None and found["EndpointConfigName"] != spec.config_name
        if found is None:
            yield ApiCall(f"create the endpoint {spec.name}", lambda: sagemaker.create_endpoint(**spec.names))
        elif changed:
            yield from (self._stop_scaling_call(spec, variant) for variant in outdated)
            yield from self._update_calls(spec, found["EndpointConfigName"])
        if found is None or changed or found["EndpointStatus"] != "InService":
            # Scaling can only be set on an endpoint that is in service.
            yield ApiCall(f"wait until {spec.name} is in service", lambda: self._wait(spec))

    def _model_call(self, model: Spec) -> ApiCall | None:
        name, sagemaker = model["ModelName"], self._sagemaker
        if _describe(lambda: sagemaker.describe_model(ModelName=name)) is not None:
            return None
        return ApiCall(f"create the model {name}", lambda: sagemaker.create_model(**model))

    def _stop_scaling_call(self, spec: EndpointSpec, variant: str) -> ApiCall:
        resource = spec.resource(variant)
        return ApiCall(f"stop scaling {variant}", lambda: self._scaling.deregister_scalable_target(**resource))

    def _update_calls(self, spec: EndpointSpec, current: str) -> Iterator[ApiCall]:
        canary = spec.canary
        if canary is not None and not canary.alarms and not self._alarm_exists(spec):
            description = f"create the alarm {spec.alarm['AlarmName']} (more than {ALARM_ERROR_SHARE:.0%} 5xx)"
            yield ApiCall(description, lambda: self._alarms.put_metric_alarm(**spec.alarm))
        how = "" if canary is None else f", {canary.percent} % of the instances first, for {canary.seconds} s"
        yield ApiCall(
            f"update the endpoint {spec.name} from {current}{how}",
            lambda: self._sagemaker.update_endpoint(**spec.update),
        )

    def _alarm_exists(self, spec: EndpointSpec) -> bool:
        found = self._alarms.describe_alarms(AlarmNames=[spec.alarm["AlarmName"]])["MetricAlarms"]
        return bool(found) and _matches(found[0], spec.alarm)

    def _scaling_calls(self, spec: EndpointSpec, outdated: Sequence[str]) -> Iterator[ApiCall]:
        for variant in spec.instances:
            yield from self._variant_scaling_calls(spec, variant, force=variant in outdated)

    def _variant_scaling_calls(self, spec: EndpointSpec, variant: str, *, force: bool) -> Iterator[ApiCall]:
        scaling, resource = self._scaling, spec.resource(variant)
        target, policy = spec.target(resource), spec.policy(resource)
        if force or not _matches(self._target(resource), target):
            description = f"scale {variant} between {spec.min_instances} and {spec.max_instances} instances"
            yield ApiCall(description, lambda: scaling.register_scalable_target(**target))
        policies = scaling.describe_scaling_policies(**resource)["ScalingPolicies"]
        if force or not any(_matches(each, policy) for each in policies):
            description = f"aim at {spec.concurrency} concurrent requests per instance of {variant}"
            yield ApiCall(description, lambda: scaling.put_scaling_policy(**policy))

    def _target(self, resource: Spec) -> Spec | None:
        """Return the variant's registration for scaling."""
        found = self._scaling.describe_scalable_targets(
            ServiceNamespace="sagemaker", ResourceIds=[resource["ResourceId"]], ScalableDimension=DIMENSION
        )["ScalableTargets"]
        return found[0] if found else None

    def _wait(self, spec: EndpointSpec) -> None:
        """Wait until the update has completed. Raises ShoalError if an alarm has rolled it back."""
        seconds = 0 if spec.canary is None else spec.canary.seconds + KEPT_SECONDS
        attempts = 120 + seconds // 30  # the waiter polls every 30 s
        waiter = self._sagemaker.get_waiter("endpoint_in_service")
        waiter.wait(EndpointName=spec.name, WaiterConfig={"MaxAttempts": attempts})
        found = self._sagemaker.describe_endpoint(EndpointName=spec.name)
        if found["EndpointConfigName"] != spec.config_name:
            reason = found.get("FailureReason") or "an alarm went off"
            raise ShoalError(f"{spec.name} was rolled back to {found['EndpointConfigName']}: {reason}")


def _check_canary(spec: EndpointSpec, current: Mapping[str, str]) -> None:
    """Raise InvalidRequest for a canary that adds or removes a variant, which SageMaker does not support."""
    if spec.canary is not None and current and current.keys() != spec.instances.keys():
        raise InvalidRequest(
            "a canary cannot add or remove a variant: deploy with or without --candidate first, without --canary"
        )


@contextmanager
def aws_errors() -> Iterator[None]:
    """Convert errors of AWS and boto3 into ShoalErrors."""
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, NoRegionError

    try:
        yield
    except NoRegionError:
        raise InvalidRequest("no AWS region is set: give --region, or set AWS_DEFAULT_REGION") from None
    except NoCredentialsError:
        raise InvalidRequest("no AWS credentials found: run `aws configure`") from None
    except ClientError as problem:
        error = problem.response["Error"]
        raise ShoalError(f"AWS rejected {problem.operation_name}: {error['Message']} ({error['Code']})") from None
    except BotoCoreError as problem:
        raise ShoalError(f"AWS: {problem}") from None


def _describe(describe: Callable[[], Spec]) -> Spec | None:
    """Return the description, None if the resource does not exist, which SageMaker reports as a ValidationException."""
    from botocore.exceptions import ClientError

    try:
        return describe()
    except ClientError as problem:
        error = problem.response["Error"]
        if error["Code"] == "ValidationException" and error["Message"].startswith(NOT_FOUND):
            return None
        raise


def _matches(found: Any, spec: Any) -> bool:
    """Return whether `found` contains everything in `spec`; AWS adds further keys."""
    if isinstance(spec, dict):
        return isinstance(found, dict) and all(_matches(found.get(name), value) for name, value in spec.items())
    return bool(found == spec)


def _digest(content: Any) -> str:
    return blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=4).hexdigest()
