"""Describe a SageMaker endpoint and compute the API calls that bring the account to that state.

Models and endpoint configurations are immutable in SageMaker, so their names contain a digest of their content:
an existing name means equal content, and repeating a deployment does nothing.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from shoal.errors import InvalidRequest, MissingExtra, ShoalError

VARIANT = "voice"
DIMENSION = "sagemaker:variant:DesiredInstanceCount"
METRIC = "SageMakerVariantConcurrentRequestsPerModelHighResolution"
STARTUP_SECONDS = 900  # time to load a large model; SageMaker kills containers that are unhealthy after it
DOWNLOAD_SECONDS = 900
COOLDOWN_SECONDS = 300  # before an instance is removed: starting one takes minutes
NAME = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,49}")
NOT_FOUND = ("Could not find", "Cannot find")

Spec = dict[str, Any]


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

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise InvalidRequest(f"{self.name!r} is no valid endpoint name: use up to 50 letters, digits and single -")
        if not self.model_data.startswith("s3://"):
            raise InvalidRequest(f"the model must be in S3, s3://BUCKET/KEY, not {self.model_data!r}")
        if self.multi_model and not self.model_data.endswith("/"):
            raise InvalidRequest("a multi-model endpoint needs the S3 prefix of its models: s3://BUCKET/PREFIX/")
        if not 1 <= self.min_instances <= self.max_instances:
            raise InvalidRequest(f"instances must be 1 <= MIN <= MAX, not {self.min_instances}:{self.max_instances}")

    @property
    def container(self) -> Spec:
        return {
            "Image": self.image,
            "ModelDataUrl": self.model_data,
            "Mode": "MultiModel" if self.multi_model else "SingleModel",
            "Environment": self.environment,
        }

    @property
    def model_name(self) -> str:
        return f"{self.name}-{_digest([self.container, self.role])}"

    @property
    def model(self) -> Spec:
        return {"ModelName": self.model_name, "PrimaryContainer": self.container, "ExecutionRoleArn": self.role}

    @property
    def variant(self) -> Spec:
        return {
            "VariantName": VARIANT,
            "ModelName": self.model_name,
            "InstanceType": self.instance,
            "InitialInstanceCount": self.min_instances,
            "ContainerStartupHealthCheckTimeoutInSeconds": STARTUP_SECONDS,
            "ModelDataDownloadTimeoutInSeconds": DOWNLOAD_SECONDS,
        }

    @property
    def config_name(self) -> str:
        return f"{self.name}-{_digest(self.variant)}"

    @property
    def config(self) -> Spec:
        return {"EndpointConfigName": self.config_name, "ProductionVariants": [self.variant]}

    @property
    def resource(self) -> Spec:
        return {
            "ServiceNamespace": "sagemaker",
            "ResourceId": f"endpoint/{self.name}/variant/{VARIANT}",
            "ScalableDimension": DIMENSION,
        }

    @property
    def target(self) -> Spec:
        return self.resource | {"MinCapacity": self.min_instances, "MaxCapacity": self.max_instances}

    @property
    def policy(self) -> Spec:
        return self.resource | {
            "PolicyName": f"{self.name}-concurrency",
            "PolicyType": "TargetTrackingScaling",
            "TargetTrackingScalingPolicyConfiguration": {
                "TargetValue": float(self.concurrency),
                "PredefinedMetricSpecification": {"PredefinedMetricType": METRIC},
                "ScaleInCooldown": COOLDOWN_SECONDS,
            },
        }


@dataclass(frozen=True)
class Step:
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

    def steps(self, spec: EndpointSpec) -> list[Step]:
        """Return the calls to make, in order; empty when the endpoint is up to date. Only reads from AWS."""
        with aws_errors():
            return [*self._endpoint_steps(spec), *self._scaling_steps(spec)]

    def _endpoint_steps(self, spec: EndpointSpec) -> Iterator[Step]:
        sagemaker = self._sagemaker
        if _describe(lambda: sagemaker.describe_model(ModelName=spec.model_name)) is None:
            yield Step(f"create the model {spec.model_name}", lambda: sagemaker.create_model(**spec.model))
        if _describe(lambda: sagemaker.describe_endpoint_config(EndpointConfigName=spec.config_name)) is None:
            description = f"create the configuration {spec.config_name} ({spec.min_instances} x {spec.instance})"
            yield Step(description, lambda: sagemaker.create_endpoint_config(**spec.config))
        found = _describe(lambda: sagemaker.describe_endpoint(EndpointName=spec.name))
        names = {"EndpointName": spec.name, "EndpointConfigName": spec.config_name}
        if found is None:
            yield Step(f"create the endpoint {spec.name}", lambda: sagemaker.create_endpoint(**names))
        elif found["EndpointConfigName"] != spec.config_name:
            # Keep the current instance count: an update under load must not start with too few instances.
            description = f"update the endpoint {spec.name} from {found['EndpointConfigName']}"
            yield Step(description, lambda: sagemaker.update_endpoint(**names, RetainAllVariantProperties=True))
        if found is None or found["EndpointConfigName"] != spec.config_name or found["EndpointStatus"] != "InService":
            # Scaling can only be set on an endpoint that is in service.
            yield Step(f"wait until {spec.name} is in service", lambda: self._wait(spec.name))

    def _scaling_steps(self, spec: EndpointSpec) -> Iterator[Step]:
        scaling, resource = self._scaling, spec.resource
        targets = scaling.describe_scalable_targets(
            ServiceNamespace="sagemaker", ResourceIds=[resource["ResourceId"]], ScalableDimension=DIMENSION
        )["ScalableTargets"]
        if not targets or not _matches(targets[0], spec.target):
            description = f"scale between {spec.min_instances} and {spec.max_instances} instances"
            yield Step(description, lambda: scaling.register_scalable_target(**spec.target))
        policies = scaling.describe_scaling_policies(**resource)["ScalingPolicies"]
        if not any(_matches(policy, spec.policy) for policy in policies):
            description = f"aim at {spec.concurrency} concurrent requests per instance"
            yield Step(description, lambda: scaling.put_scaling_policy(**spec.policy))

    def _wait(self, name: str) -> None:
        self._sagemaker.get_waiter("endpoint_in_service").wait(EndpointName=name)


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
    """Return the description, or None if it does not exist: SageMaker has no error code of its own for that."""
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
