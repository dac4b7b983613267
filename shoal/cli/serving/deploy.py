"""`shoal package` and `shoal deploy`: package a model for a platform and create its endpoint."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.completion import complete_model
from shoal.cli.flag_groups import with_groups
from shoal.cli.flags import Codec, Quiet

if TYPE_CHECKING:
    from shoal.deploy.endpoint import Canary, CandidateModel
    from shoal.deploy.package import PackageFile, Progress

PANEL = "Serve"

Model = Annotated[
    str,
    typer.Option(
        help="Model to package: nano, s1-mini, s2-pro, OWNER/NAME or a directory.", autocompletion=complete_model
    ),
]
Output = Annotated[Path, typer.Option("--output", "-o", help="Directory to write to; it must not exist yet.")]


def add_to(app: typer.Typer) -> None:
    package = typer.Typer(no_args_is_help=True, help="Package a model for SageMaker, Triton or RunPod.")
    package.command("sagemaker")(package_sagemaker)
    package.command("triton")(package_triton)
    package.command("runpod")(package_runpod)
    app.add_typer(package, name="package", rich_help_panel=PANEL)
    deploy = typer.Typer(no_args_is_help=True, help="Create or update the endpoint of a packaged model.")
    deploy.command("sagemaker")(with_groups(deploy_sagemaker))
    app.add_typer(deploy, name="deploy", rich_help_panel=PANEL)


def package_sagemaker(
    output: Output,
    model: Model = "nano",
    codec: Codec = None,
    triton: Annotated[
        bool,
        typer.Option("--triton", help="Package for SageMaker's Triton container: many models on one GPU endpoint."),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Write model.tar.gz for S3 and the Dockerfile of the image. The archive is reproducible byte for byte.

    Example: shoal package sagemaker --model s1-mini -o sagemaker/
    """
    from shoal.deploy.package import package_sagemaker, package_sagemaker_triton

    _package(package_sagemaker_triton if triton else package_sagemaker, model, codec, output, quiet)


def package_triton(output: Output, model: Model = "nano", codec: Codec = None, quiet: Quiet = False) -> None:
    """Write a model repository for Triton Inference Server.

    Example: shoal package triton --model s1-mini -o models/ && tritonserver --model-repository models/
    """
    from shoal.deploy.package import package_triton

    _package(package_triton, model, codec, output, quiet)


def package_runpod(output: Output, model: Model = "nano", codec: Codec = None, quiet: Quiet = False) -> None:
    """Write the build context of a RunPod serverless worker, for `docker build`.

    Example: shoal package runpod --model s1-mini -o worker/ && docker build -t worker worker/
    """
    from shoal.deploy.package import package_runpod

    _package(package_runpod, model, codec, output, quiet)


Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the endpoint.")]
Image = Annotated[str, typer.Option(help="URI of the image in ECR, built from the packaged Dockerfile.")]
ModelData = Annotated[
    str,
    typer.Option(help="S3 URI of model.tar.gz; with --many the prefix that holds several archives."),
]
Role = Annotated[str, typer.Option(help="ARN of the execution role that SageMaker assumes.")]
Instance = Annotated[str, typer.Option(help="Instance type.")]
Instances = Annotated[str, typer.Option(metavar="MIN:MAX", help="Minimum and maximum number of instances.")]
Concurrency = Annotated[
    int, typer.Option(min=1, help="Target of the scaling policy: concurrent requests per instance.")
]
Many = Annotated[bool, typer.Option("--many", help="Multi-model endpoint: models are loaded at their first request.")]
CanaryOption = Annotated[
    int | None,
    typer.Option(min=1, max=50, metavar="PERCENT", help="Update this share of the instances first, then the others."),
]
CanarySeconds = Annotated[int, typer.Option(min=60, max=3600, help="Seconds between the two steps of --canary.")]
Alarm = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="CloudWatch alarm that rolls a --canary back; may be repeated. Default: more than 1 % of 5xx responses.",
    ),
]
Candidate = Annotated[
    str | None,
    typer.Option(metavar="IMAGE,S3-URI", help="Image and model of a second variant, for a share of the requests."),
]
CandidatePercent = Annotated[float, typer.Option(help="Percent of the requests for --candidate.")]
Env = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="Environment variable of the container; may be repeated."),
]
Region = Annotated[str | None, typer.Option(help="AWS region. Default: the region of your AWS configuration.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the changes without making them.")]


@dataclass(frozen=True)
class RolloutFlags:
    """Rollout options of an endpoint update: canary and candidate."""

    canary: CanaryOption = None
    canary_seconds: CanarySeconds = 600
    alarm: Alarm = None
    candidate: Candidate = None
    candidate_percent: CandidatePercent = 10.0

    def canary_step(self) -> "Canary | None":
        from shoal.deploy.endpoint import Canary

        return None if self.canary is None else Canary(self.canary, self.canary_seconds, tuple(self.alarm or ()))

    def candidate_model(self) -> "CandidateModel | None":
        from shoal.deploy.endpoint import CandidateModel

        if self.candidate is None:
            return None
        image, comma, model_data = self.candidate.partition(",")
        if not (image and comma and model_data):
            raise typer.BadParameter(f"{self.candidate!r} is not of the form IMAGE,S3-URI", param_hint="--candidate")
        return CandidateModel(image, model_data, self.candidate_percent)


def deploy_sagemaker(
    name: Name,
    image: Image,
    model_data: ModelData,
    role: Role,
    instance: Instance = "ml.g5.xlarge",
    instances: Instances = "1:1",
    concurrency: Concurrency = 16,
    many: Many = False,
    *,
    rollout: RolloutFlags,
    env: Env = None,
    region: Region = None,
    dry_run: DryRun = False,
) -> None:
    """Create or update a SageMaker endpoint: model, configuration, endpoint and scaling. Safe to run again.

    Example: shoal deploy sagemaker voices --image IMAGE --model-data s3://bucket/model.tar.gz --role ARN --dry-run
    """
    from shoal.deploy.endpoint import EndpointSpec, SageMakerAccount

    min_instances, max_instances = _bounds(instances)
    variables = dict(_pair(each) for each in env or ())
    spec = EndpointSpec(
        name,
        image=image,
        model_data=model_data,
        role=role,
        instance=instance,
        min_instances=min_instances,
        max_instances=max_instances,
        concurrency=concurrency,
        multi_model=many,
        environment=variables,
        canary=rollout.canary_step(),
        candidate=rollout.candidate_model(),
    )
    calls = SageMakerAccount(region).calls(spec)
    for call in calls:
        typer.echo(f"{'would ' if dry_run else ''}{call.description}")
        if not dry_run:
            call.do()
    if not calls:
        typer.echo(f"{name} is up to date")


def _bounds(text: str) -> tuple[int, int]:
    min_instances, colon, max_instances = text.partition(":")
    if not (colon and min_instances.isdigit() and max_instances.isdigit()):
        raise typer.BadParameter(f"{text!r} is not of the form MIN:MAX, such as 1:4", param_hint="--instances")
    return int(min_instances), int(max_instances)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise typer.BadParameter(f"{text!r} is not of the form NAME=VALUE", param_hint="--env")
    return name, value


def _package(
    pack: "Callable[[list[PackageFile], Path, Progress], None]",
    model: str,
    codec: Path | None,
    output: Path,
    quiet: bool,
) -> None:
    from shoal.cli.tables import progress_line
    from shoal.deploy.package import model_files

    parts = model_files(model, codec)
    with progress_line(quiet) as progress:
        pack(parts, output, progress)
    typer.echo(output)
