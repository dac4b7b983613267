"""Dockerfiles, the compose file and the manifests of Kubernetes: linted and checked by schemas, without a daemon."""

import contextlib
import json
import re
import shutil
import socket
import subprocess
import sys
import venv
import warnings
from importlib.metadata import files, requires, version
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement

from shoal.api.config import ServerConfig
from shoal.config import EngineConfig
from shoal.errors import InvalidRequest
from shoal.metrics import Metrics
from shoal.settings import Settings
from tests.deploy.conftest import ROOT
from tests.native.conftest import place_library
from tests.server.conftest import free_port
from tests.waiting import TIMEOUT_SECONDS, wait_until

PROGRAMS = Path(sys.executable).parent
DOCKERFILES = [ROOT / "Dockerfile", *sorted((ROOT / "shoal/deploy/recipes").glob("*.Dockerfile"))]
KUBERNETES = ROOT / "deploy" / "kubernetes"
PLAIN = [
    path for path in sorted(KUBERNETES.glob("*.yaml")) if path.name not in ("kustomization.yaml", "rayservice.yaml")
]
KUBERNETES_VERSION = "1.31"
# Fields of KubeRay's RayService v1 that we use; its own schema is not in any package.
RAY_SERVICE = {"serveConfigV2", "rayClusterConfig"}
RAY_CLUSTER = {"rayVersion", "enableInTreeAutoscaling", "headGroupSpec", "workerGroupSpecs"}
HEAD = {"rayStartParams", "template"}
WORKERS = HEAD | {"groupName", "replicas", "minReplicas", "maxReplicas"}


def ran(*command: object) -> str:
    """Return the findings of a linter."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def manifest(name: str) -> Any:
    return yaml.safe_load((KUBERNETES / name).read_text())


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    assert ran(PROGRAMS / "hadolint", path) == ""


def test_hadolint_reports_a_faulty_dockerfile(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM python\nRUN cd /tmp\n")
    with pytest.raises(AssertionError, match="DL3006"):
        ran(PROGRAMS / "hadolint", tmp_path / "Dockerfile")


def stages() -> dict[str, str]:
    text = (ROOT / "Dockerfile").read_text()
    found = re.split(r"^FROM \S+ AS (\w+)$", text, flags=re.MULTILINE)[1:]
    return dict(zip(found[::2], found[1::2], strict=True))


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_an_image_runs_as_an_ordinary_user_and_has_a_health_check(target: str) -> None:
    stage = stages()
    assert stage[target].rstrip().endswith("USER 1000")
    assert "HEALTHCHECK" in stage["base"]
    assert 'VOLUME ["/var/cache/shoal", "/var/lib/shoal"]' in stage["base"]


def test_the_image_has_the_torch_of_the_constraints() -> None:
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert set(re.findall(r"torch==(\S+)", (ROOT / "Dockerfile").read_text())) == {pinned[1]}


def test_the_cpu_image_has_at_most_1600_megabytes() -> None:
    """Installed files of the packages that the image gets; the Python image with wget has about 140 MB."""
    if "+cpu" not in version("torch"):
        pytest.skip("this torch is not the one of the CPU image")
    packages = sum(map(installed_bytes, closure("shoal-tts", "server")))
    own = sum(path.stat().st_size for path in (ROOT / "shoal").rglob("*") if path.is_file())
    assert 900e6 < packages + own + 140e6 < 1600e6


def closure(name: str, extra: str) -> set[str]:
    """Return the distributions that pip installs for a requirement."""
    found: set[str] = set()
    waiting = [(name, extra)]
    while waiting:
        name, extra = waiting.pop()
        if f"{name}[{extra}]" in found:
            continue
        found.add(f"{name}[{extra}]")
        for needed in map(Requirement, requires(name) or ()):
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                waiting += [(needed.name, each) for each in ("", *needed.extras)]
    return {each.partition("[")[0].lower().replace("_", "-") for each in found}


def installed_bytes(name: str) -> int:
    places = (Path(str(file.locate())) for file in files(name) or ())
    return sum(place.stat().st_size for place in places if place.is_file())


def test_what_the_image_copies_is_not_ignored() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = re.findall(r"^COPY (.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert {name for names in copied for name in names.split()} == kept


@pytest.fixture(scope="module")
def image_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the first stage, without its image: built from the files that it copies and nothing else."""
    folder = tmp_path_factory.mktemp("image")
    for names in re.findall(r"^COPY (.+) \S+$", stages()["wheel"], re.MULTILINE):
        for name in names.split():
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, folder / name)
    place_library(folder)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "wheels")]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=TIMEOUT_SECONDS)
    (wheel,) = (folder / "wheels").iterdir()
    return wheel


def test_the_images_install_the_wheel_that_they_build(image_wheel: Path) -> None:
    patterns = re.findall(r"/wheels/(\S+\.whl)", stages()["cpu"] + stages()["cuda"])
    assert patterns
    assert all(image_wheel.match(pattern) for pattern in patterns)


def steps(stage: str) -> list[str]:
    """Return the commands of the RUN lines of a stage."""
    joined = stages()[stage].replace("\\\n", " ")
    return re.findall(r"^RUN (?:--mount=\S+ +)?(.+)$", joined, re.MULTILINE)


def image_variables(folder: Path) -> dict[str, str]:
    """Return the variables of the CPU image, with its volumes in `folder`, for pip without an index."""
    lines = stages()["base"].replace("\\\n", " ") + stages()["cpu"]
    found = re.findall(r"\b([A-Z_]+)=(\S+)", " ".join(re.findall(r"^(?:ENV|ARG) (.+)$", lines, re.MULTILINE)))
    variables = {name: value.replace("/var/", f"{folder}/var/") for name, value in found}
    return variables | {"PIP_NO_INDEX": "1", "HOME": str(folder), "OMP_NUM_THREADS": "1"}


def environment_without_shoal(folder: Path) -> Path:
    """Return the directory of programs of a virtual environment with all packages of this one but ours."""
    venv.create(folder, with_pip=False, symlinks=True)
    (here,), (packages,) = (list(Path(root).glob("lib/python*/site-packages")) for root in (sys.prefix, folder))
    for entry in here.iterdir():
        if "shoal" not in entry.name:
            (packages / entry.name).symlink_to(entry)
    pip = folder / "bin" / "pip"
    pip.write_text(f'#!/bin/sh\nexec {folder}/bin/python -m pip "$@"\n')
    pip.chmod(0o755)
    return pip.parent


def is_listening(port: int) -> bool:
    with contextlib.suppress(ConnectionRefusedError), contextlib.closing(socket.create_connection(("127.0.0.1", port))):
        return True
    return False


def test_the_steps_of_the_cpu_image_install_a_server_that_is_healthy(image_wheel: Path, tmp_path: Path) -> None:
    """Offline: pip finds every requirement of the image installed, at a version that the constraints allow."""
    programs = environment_without_shoal(tmp_path / "venv")
    env = image_variables(tmp_path) | {"PATH": f"{programs}:/usr/bin:/bin"}
    for step in steps("cpu"):
        command = step.replace("/wheels", str(image_wheel.parent)).replace("/opt/shoal", str(ROOT))
        done = subprocess.run(["sh", "-ec", command], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    port = free_port()
    env |= {"SHOAL_PORT": str(port), "SHOAL_HOST": "127.0.0.1"}
    (check,) = re.findall(r'CMD (\["python".+\])$', stages()["base"], re.MULTILINE)
    health = [str(programs / "python"), *json.loads(check)[1:]]
    with subprocess.Popen([programs / "shoal", "serve"], cwd=tmp_path, env=env, stderr=subprocess.PIPE) as server:
        try:
            wait_until(lambda: server.poll() is not None or is_listening(port), interval=0.1)
            assert server.poll() is None
            subprocess.run(health, cwd=tmp_path, env=env, capture_output=True, check=True)
        finally:
            server.kill()


def test_the_health_check_requests_an_existing_path() -> None:
    assert "'/health'" in stages()["base"]
    code = re.search(r'CMD \["python", "-c", "(.+)"\]', stages()["base"])
    assert code is not None
    compile(code[1], "health check", "exec")


def test_variables_in_images_and_manifests_are_settings() -> None:
    files = [*DOCKERFILES, ROOT / "compose.yaml", *KUBERNETES.glob("*.yaml"), ROOT / "deploy/runpod/setup.sh"]
    named = {name.lower() for path in files for name in re.findall(r"\bSHOAL_([A-Z_]+)\b", path.read_text())}
    # Build arguments of the files: the base image and what pip installs.
    assert named - set(Settings.model_fields) <= {"image", "package"}


def test_the_compose_file_is_valid() -> None:
    ran(PROGRAMS / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", ROOT / "compose.yaml")
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    assert {service["build"]["target"] for service in services.values()} <= set(stages())


def test_the_page_pulls_the_model_that_compose_serves() -> None:
    """Into the volume of Compose, that is by Compose."""
    model = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["gpu"]["environment"]["SHOAL_MODEL"]
    page = (ROOT / "docs/containers.md").read_text()
    default = model.removeprefix("${SHOAL_MODEL:-").removesuffix("}")
    assert f"docker compose run --rm -e HF_TOKEN gpu pull {default} " in page


@pytest.mark.parametrize("path", PLAIN, ids=lambda path: path.name)
def test_a_manifest_is_valid(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)


def test_the_job_stores_the_model_where_the_deployment_reads_it() -> None:
    job, deployment = manifest("jobs/pull.yaml"), manifest("deployment.yaml")
    kubernetes_validate.validate(job, KUBERNETES_VERSION, strict=True)
    (pulling,), (serving,) = (each["spec"]["template"]["spec"]["containers"] for each in (job, deployment))
    assert pulling["args"] == ["pull", variables(serving)["SHOAL_MODEL"]]
    assert volume_of(job["spec"]["template"]["spec"], "/var/cache/shoal") == volume_of(
        deployment["spec"]["template"]["spec"], "/var/cache/shoal"
    )


def test_stored_voices_are_on_the_volume_that_all_pods_share() -> None:
    cluster = manifest("rayservice.yaml")["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"], manifest("deployment.yaml")["spec"]]
    for pod in (group["template"]["spec"] for group in groups):
        (container,) = pod["containers"]
        volume = volume_of(pod, variables(container)["SHOAL_VOICES"])
        assert volume["persistentVolumeClaim"]["claimName"] == manifest("cache.yaml")["metadata"]["name"]
    assert "ReadWriteMany" in manifest("cache.yaml")["spec"]["accessModes"]


def variables(container: Any) -> dict[str, Any]:
    return {each["name"]: each.get("value") for each in container["env"]}


def volume_of(pod: Any, path: str) -> Any:
    """Return the value under a path in the only container of a pod."""
    (mount,) = (each for each in pod["containers"][0]["volumeMounts"] if Path(path).is_relative_to(each["mountPath"]))
    return next(each for each in pod["volumes"] if each["name"] == mount["name"])


def test_a_manifest_with_a_wrong_field_is_invalid() -> None:
    wrong = manifest("deployment.yaml")
    wrong["spec"]["template"]["spec"]["containers"][0]["imagePullSecret"] = "x"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES_VERSION, strict=True)


def test_the_kustomization_lists_every_manifest() -> None:
    assert sorted(manifest("kustomization.yaml")["resources"]) == [path.name for path in PLAIN]


def test_the_parts_of_the_deployment_refer_to_each_other() -> None:
    pod = manifest("deployment.yaml")["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    labels = pod["metadata"]["labels"].items()
    assert manifest("service.yaml")["spec"]["selector"].items() <= labels
    assert manifest("disruption.yaml")["spec"]["selector"]["matchLabels"].items() <= labels
    assert manifest("service.yaml")["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]
    claims = {
        each["persistentVolumeClaim"]["claimName"] for each in pod["spec"]["volumes"] if "persistentVolumeClaim" in each
    }
    assert claims == {manifest("cache.yaml")["metadata"]["name"]}
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["spec"]["volumes"]}
    assert pod["spec"]["terminationGracePeriodSeconds"] > ServerConfig.drain_seconds + 5


def test_the_autoscaler_uses_an_existing_metric() -> None:
    spec = manifest("autoscaler.yaml")["spec"]
    assert spec["scaleTargetRef"]["name"] == manifest("deployment.yaml")["metadata"]["name"]
    (metric,) = spec["metrics"]
    names = {family.name for family in Metrics(lambda: None).registry.collect()}
    assert metric["pods"]["metric"]["name"] in names
    assert int(metric["pods"]["target"]["averageValue"]) < EngineConfig.slots


def test_the_ray_service_is_built_of_valid_parts() -> None:
    spec = manifest("rayservice.yaml")["spec"]
    cluster = spec["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert set(spec) == RAY_SERVICE
    assert set(cluster) == RAY_CLUSTER
    assert set(groups[0]) == HEAD
    assert all(set(group) == WORKERS for group in groups[1:])
    for group in groups:
        # A template of pods is that of any workload.
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": group["template"]}
        kubernetes_validate.validate(pod, KUBERNETES_VERSION, strict=True)
    assert cluster["rayVersion"] == version("ray")


def test_ray_serve_understands_the_ray_service(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Ray, about itself
        from ray.serve.schema import ServeDeploySchema

        from shoal.deploy.kuberay import app

    config = ServeDeploySchema.model_validate(yaml.safe_load(manifest("rayservice.yaml")["spec"]["serveConfigV2"]))
    (application,) = config.applications
    assert application.import_path == "shoal.deploy.kuberay:app"
    with pytest.raises(InvalidRequest, match="API key"):
        app(application.args)
    monkeypatch.setenv("SHOAL_API_KEYS", "a-key")
    assert app(application.args)._bound_deployment.name == "fronts"
    with pytest.raises(InvalidRequest, match="colour"):
        app({**application.args, "colour": "red"})


def test_shellcheck_finds_nothing() -> None:
    ran(PROGRAMS / "shellcheck", ROOT / "deploy/runpod/setup.sh")
