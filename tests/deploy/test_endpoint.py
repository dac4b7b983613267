"""An endpoint of SageMaker, set up against moto."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber
from moto import mock_aws
from typer.testing import CliRunner

from shoal.cli import app
from shoal.deploy.endpoint import METRIC, Canary, CandidateModel, EndpointSpec, SageMakerAccount
from shoal.errors import InvalidRequest, ShoalError

SPEC = EndpointSpec(
    "voices",
    image="123456789012.dkr.ecr.us-east-1.amazonaws.com/shoal:cuda",
    model_data="s3://bucket/model.tar.gz",
    role="arn:aws:iam::123456789012:role/shoal",
    instance="ml.g4dn.xlarge",
    min_instances=1,
    max_instances=4,
    concurrency=12,
    environment={"SHOAL_SLOTS": "16"},
)
ARGUMENTS = ["deploy", "sagemaker", "voices", "--image", SPEC.image, "--model-data", SPEC.model_data]
ARGUMENTS += ["--role", SPEC.role, "--instance", SPEC.instance, "--instances", "1:4", "--concurrency", "12"]
ARGUMENTS += ["--env", "SHOAL_SLOTS=16"]


@pytest.fixture(autouse=True)
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with mock_aws():
        yield


def do_all(spec: EndpointSpec) -> list[str]:
    calls = SageMakerAccount().calls(spec)
    for call in calls:
        call.do()
    return [call.description for call in calls]


def test_every_resource_is_created_once() -> None:
    assert [reported.split()[0] for reported in do_all(SPEC)] == ["create", "create", "create", "wait", "scale", "aim"]
    assert do_all(SPEC) == []


def test_the_created_resources_match_the_options() -> None:
    do_all(SPEC)
    sagemaker = boto3.client("sagemaker")
    endpoint = sagemaker.describe_endpoint(EndpointName="voices")
    config = sagemaker.describe_endpoint_config(EndpointConfigName=endpoint["EndpointConfigName"])
    (variant,) = config["ProductionVariants"]
    assert (variant["InstanceType"], variant["InitialInstanceCount"]) == ("ml.g4dn.xlarge", 1)
    container = sagemaker.describe_model(ModelName=variant["ModelName"])["PrimaryContainer"]
    assert container["ModelDataUrl"] == SPEC.model_data
    assert container["Environment"] == {"SHOAL_SLOTS": "16"}
    scaling = boto3.client("application-autoscaling")
    (target,) = scaling.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"]
    assert (target["MinCapacity"], target["MaxCapacity"]) == (1, 4)
    (policy,) = scaling.describe_scaling_policies(ServiceNamespace="sagemaker")["ScalingPolicies"]
    tracking = policy["TargetTrackingScalingPolicyConfiguration"]
    assert tracking["TargetValue"] == 12
    assert tracking["PredefinedMetricSpecification"]["PredefinedMetricType"] == METRIC


def test_only_changed_resources_are_updated() -> None:
    do_all(SPEC)
    assert do_all(replace(SPEC, max_instances=8)) == ["scale voice between 1 and 8 instances"]
    aimed = do_all(replace(SPEC, max_instances=8, concurrency=20))
    assert aimed == ["aim at 20 concurrent requests per instance of voice"]


def test_another_image_is_a_new_model_and_an_update_that_keeps_the_instances() -> None:
    """moto does not update endpoints: the call itself is checked against the API's own description."""
    do_all(SPEC)
    changed, account = replace(SPEC, image="other:1"), SageMakerAccount()
    calls = account.calls(changed)
    assert [call.description.split()[0] for call in calls] == ["create", "create", "update", "wait"]
    expected: dict[str, Any] = {
        "EndpointName": "voices",
        "EndpointConfigName": changed.config_name,
        "RetainAllVariantProperties": True,
        "ExcludeRetainedVariantProperties": [{"VariantPropertyType": "DesiredWeight"}],
    }
    with Stubber(account._sagemaker) as stubbed:
        stubbed.add_response("update_endpoint", {"EndpointArn": "arn:aws:sagemaker:us-east-1:1:endpoint/x"}, expected)
        calls[2].do()
        stubbed.assert_no_pending_responses()


UPDATED = {"EndpointArn": "arn:aws:sagemaker:us-east-1:1:endpoint/x"}


def test_a_canary_updates_a_share_first_and_an_alarm_rolls_it_back() -> None:
    do_all(SPEC)
    changed, account = replace(SPEC, image="other:1", canary=Canary(10, 300)), SageMakerAccount()
    calls = account.calls(changed)
    assert [call.description.split()[0] for call in calls] == ["create", "create", "create", "update", "wait"]
    assert calls[3].description.endswith("10 % of the instances first, for 300 s")
    calls[2].do()
    (alarm,) = boto3.client("cloudwatch").describe_alarms()["MetricAlarms"]
    assert (alarm["AlarmName"], alarm["MetricName"], alarm["Threshold"]) == ("voices-5xx", "Invocation5XXErrors", 0.01)
    with Stubber(account._sagemaker) as stubbed:  # checks the arguments against the API's own description
        stubbed.add_response("update_endpoint", UPDATED, changed.update)
        calls[3].do()
    deployment = changed.update["DeploymentConfig"]
    assert deployment["AutoRollbackConfiguration"] == {"Alarms": [{"AlarmName": "voices-5xx"}]}
    assert deployment["BlueGreenUpdatePolicy"]["TrafficRoutingConfiguration"]["CanarySize"]["Value"] == 10
    # The alarm is there now; alarms of one's own replace it.
    assert "alarm" not in " ".join(call.description for call in account.calls(changed))
    own = replace(changed, canary=Canary(10, 300, ("too-slow",)))
    assert own.update["DeploymentConfig"]["AutoRollbackConfiguration"] == {"Alarms": [{"AlarmName": "too-slow"}]}
    assert own.config_name == changed.config_name


def test_an_update_that_was_rolled_back_is_an_error() -> None:
    do_all(SPEC)
    account = SageMakerAccount()
    with pytest.raises(ShoalError, match=f"rolled back to {SPEC.config_name}: an alarm went off"):
        account._wait(replace(SPEC, image="other:1"))


def test_a_candidate_gets_its_share_of_the_requests() -> None:
    candidate = CandidateModel("other:2", "s3://bucket/next.tar.gz", 5.0)
    spec = replace(SPEC, candidate=candidate)
    do_all(spec)
    sagemaker = boto3.client("sagemaker")
    config = sagemaker.describe_endpoint_config(EndpointConfigName=spec.config_name)
    weights = {variant["VariantName"]: variant["InitialVariantWeight"] for variant in config["ProductionVariants"]}
    assert weights == {"voice": 95.0, "candidate": 5.0}
    models = [variant["ModelName"] for variant in config["ProductionVariants"]]
    containers = [sagemaker.describe_model(ModelName=name)["PrimaryContainer"] for name in models]
    assert [each["ModelDataUrl"] for each in containers] == [SPEC.model_data, candidate.model_data]
    targets = boto3.client("application-autoscaling").describe_scalable_targets(ServiceNamespace="sagemaker")
    assert len(targets["ScalableTargets"]) == 2
    assert do_all(spec) == []
    assert replace(spec, candidate=replace(candidate, percent=50.0)).config_name != spec.config_name


def scaled_variants() -> list[str]:
    targets = boto3.client("application-autoscaling").describe_scalable_targets(ServiceNamespace="sagemaker")
    return sorted(each["ResourceId"].rpartition("/")[2] for each in targets["ScalableTargets"])


def test_scaling_stops_before_a_variant_is_removed() -> None:
    """AWS rejects an update that removes a variant which is registered for scaling."""
    do_all(replace(SPEC, candidate=CandidateModel("other:2", "s3://bucket/next.tar.gz", 5.0)))
    calls = SageMakerAccount().calls(SPEC)
    assert [each.description.split()[0] for each in calls] == ["create", "stop", "update", "wait"]
    assert (calls[1].description, scaled_variants()) == ("stop scaling candidate", ["candidate", "voice"])
    calls[1].do()
    assert scaled_variants() == ["voice"]


def test_scaling_stops_while_the_instance_type_changes() -> None:
    do_all(SPEC)
    calls = SageMakerAccount().calls(replace(SPEC, instance="ml.g4dn.2xlarge"))
    assert [each.description.split()[0] for each in calls] == ["create", "stop", "update", "wait", "scale", "aim"]
    calls[1].do()
    assert scaled_variants() == []
    for call in calls[4:]:
        call.do()
    assert scaled_variants() == ["voice"]


def test_a_canary_that_changes_the_variants_is_refused() -> None:
    do_all(SPEC)
    candidate = CandidateModel("other:2", "s3://bucket/next.tar.gz", 5.0)
    with pytest.raises(InvalidRequest, match="cannot add or remove a variant"):
        SageMakerAccount().calls(replace(SPEC, candidate=candidate, canary=Canary(10)))
    assert SageMakerAccount().calls(replace(SPEC, image="other:1", canary=Canary(10)))


def test_a_multi_model_endpoint_needs_a_prefix() -> None:
    spec = replace(SPEC, model_data="s3://bucket/models/", multi_model=True, instance="ml.c5.2xlarge")
    do_all(spec)
    described = boto3.client("sagemaker").describe_model(ModelName=spec.models[0]["ModelName"])
    assert described["PrimaryContainer"]["Mode"] == "MultiModel"
    with pytest.raises(InvalidRequest, match="prefix"):
        replace(spec, model_data="s3://bucket/model.tar.gz")


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "a_b"},
        {"name": "x" * 51},
        {"model_data": "/tmp/model.tar.gz"},
        {"min_instances": 3, "max_instances": 2},
        {"min_instances": 0},
        {"canary": (51,)},
        {"canary": (10, 5)},
        {"candidate": ("image", "/tmp/model.tar.gz", 10.0)},
        {"candidate": ("image", "s3://bucket/model.tar.gz", 100.0)},
    ],
)
def test_what_aws_would_refuse_is_refused_before(wrong: dict[str, Any]) -> None:
    made = {"canary": Canary, "candidate": CandidateModel}
    with pytest.raises(InvalidRequest):
        replace(SPEC, **{name: made[name](*value) if name in made else value for name, value in wrong.items()})


def test_what_aws_refuses_is_reported() -> None:
    with pytest.raises(ShoalError, match="AWS rejected CreateEndpointConfig"):
        do_all(replace(SPEC, instance="ml.nonsense"))


def test_a_dry_run_says_what_it_would_do_and_does_nothing() -> None:
    runner = CliRunner()
    dry = runner.invoke(app, [*ARGUMENTS, "--dry-run"])
    assert dry.exit_code == 0
    assert all(line.startswith("would ") for line in dry.stdout.splitlines())
    assert boto3.client("sagemaker").list_models()["Models"] == []
    wet = runner.invoke(app, ARGUMENTS)
    assert wet.exit_code == 0
    assert wet.stdout == dry.stdout.replace("would ", "")
    assert "is up to date" in runner.invoke(app, ARGUMENTS).stdout
    canary = runner.invoke(app, [*ARGUMENTS, "--env", "SHOAL_SLOTS=8", "--canary", "10", "--dry-run"])
    assert "10 % of the instances first, for 600 s" in canary.stdout
    candidate = ["--candidate", "other:2,s3://bucket/next.tar.gz", "--candidate-percent", "5", "--dry-run"]
    planned = runner.invoke(app, [*ARGUMENTS, *candidate])
    assert "scale candidate between 1 and 4 instances" in planned.stdout
    assert runner.invoke(app, [*ARGUMENTS, "--candidate", "other:2"]).exit_code == 2


def test_without_a_region_it_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    with pytest.raises(InvalidRequest, match="--region"):
        SageMakerAccount()
