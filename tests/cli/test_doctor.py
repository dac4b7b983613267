import builtins
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal.kernels.jit import TEMPORARY_CACHE
from shoal.native import choice
from shoal.native.choice import LibraryStatus
from shoal.quantize import modes
from shoal.tools import doctor
from shoal.tools.doctor import examine
from tests.cli.conftest import Shoal


def test_doctor_lists_its_findings_and_the_defaults(shoal: Shoal) -> None:
    ran = shoal("doctor")
    assert ran.code == 0
    for subject in ("Python", "torch", "CPU", "memory", "GPU", "Triton", "audio formats", "models", "will be used"):
        assert subject in ran.text


def test_every_finding_that_is_not_ok_says_what_to_do(shoal: Shoal) -> None:
    document = json.loads(shoal("doctor", "--json").out)
    assert document["choice"]["device"] in ("cpu", "cuda")
    assert all(finding["advice"] for finding in document["findings"] if finding["mark"] != "ok")


@pytest.mark.parametrize(("integers", "how"), [(True, "int8 (VNNI, oneDNN)"), (False, "int8 (weight-only)")])
def test_it_says_what_computes_int8_weights_on_the_cpu(
    integers: bool, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modes, "has_int8_matmul", lambda: integers)
    for available, expected in ((True, "int8 (in the native backend)"), (False, how)):
        monkeypatch.setattr(choice, "native_library", lambda found=available: LibraryStatus(found, ""))
        findings = {finding.subject: finding for finding in doctor._torch()}
        assert findings["CPU weights"].value == f"float32, {expected}"


@pytest.mark.parametrize(
    ("unavailable", "advice"), [(("dotprod",), "unset SHOAL_CPU_ISA"), (("dotprod", "auto"), "install g++ or clang++")]
)
def test_the_advice_fits_the_reason_why_the_native_backend_is_not_available(
    unavailable: tuple[str, ...], advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def status(isa: str = "dotprod") -> LibraryStatus:
        return LibraryStatus(isa not in unavailable, "")

    monkeypatch.setattr(choice, "native_library", status)
    findings = {finding.subject: finding for finding in doctor._torch()}
    assert findings["CPU backend"].advice == f"{advice}: eager is several times slower on a CPU"


def test_a_missing_extra_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_installed", lambda package: None if package == "av" else "1.0")
    findings = {finding.subject: finding for finding in examine().findings}
    assert findings["extra formats"].mark == "missing"
    assert findings["extra formats"].advice == "pip install 'shoal-tts[formats]'"
    assert findings["audio formats"].value == "wav, pcm"


def test_a_torch_that_cannot_be_imported_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, *rest: object) -> object:
        if name == "torch":
            raise ImportError("libtorch.so is not there")
        return whole(name, *rest)

    whole = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", refuse)
    report = examine()
    assert report.choice is None
    assert report.findings[-1].mark == "missing"
    assert "libtorch.so" in report.findings[-1].value


def test_a_missing_compiler_matters_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert list(doctor._compiler()) == []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    (finding,) = doctor._compiler()
    assert finding.mark == "missing"
    assert "gcc" in finding.advice


def test_a_compiler_is_of_use_to_triton_only_with_the_headers_of_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(doctor, "python_headers", lambda: tmp_path)
    monkeypatch.setattr(doctor, "which", lambda name: f"/usr/bin/{name}")
    (finding,) = doctor._compiler()
    assert finding.mark == "missing"
    assert "python3-dev" in finding.advice
    (tmp_path / "Python.h").touch()
    (finding,) = doctor._compiler()
    assert finding.mark == "ok"
    monkeypatch.setattr(doctor, "which", lambda name: "/usr/bin/cc" if name == "cc" else None)
    monkeypatch.delenv("CC", raising=False)
    (finding,) = doctor._compiler()  # Triton does not look for cc
    assert finding.mark == "missing"


def test_the_headers_of_this_python_are_found_where_it_is_built_against() -> None:
    assert doctor.python_headers().name.startswith("python3")


def test_a_rocm_build_needs_neither_triton_nor_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused kernels do not run there, and Triton from PyPI would replace the one that torch uses."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.version.hip", "6.4")
    monkeypatch.setattr(doctor, "which", lambda name: None)
    monkeypatch.setattr(doctor, "_installed", lambda package: None)
    assert [finding.mark for finding in (*doctor._triton(), *doctor._compiler())] == ["ok"]


def test_a_package_from_a_distribution_of_another_name_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reef_kernels.py").write_text('__version__ = "3.5"')
    monkeypatch.syspath_prepend(tmp_path)
    assert doctor._installed("reef_kernels") == "3.5"
    assert doctor._installed("no_such_kernels") is None


def test_it_speaks_only_of_what_the_engine_uses(shoal: Shoal) -> None:
    assert "torch.compile" not in shoal("doctor").text + shoal("doctor", "--help").text


def test_the_kernel_cache_is_shown_with_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(doctor._kernel_cache()) == []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    (tmp_path / "abc").mkdir()
    (tmp_path / "abc" / "linear.cubin").write_bytes(b"x" * 2_000_000)
    (finding,) = doctor._kernel_cache()
    assert (finding.value, finding.mark) == (f"{tmp_path}, 1 kernels, 2 MB", "ok")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / f"{TEMPORARY_CACHE}abc"))
    (finding,) = doctor._kernel_cache()
    assert finding.mark == "warn"
    assert "XDG_CACHE_HOME" in finding.advice


def test_the_memory_limit_of_the_container_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/meminfo": "MemTotal: 64000000 kB\nMemAvailable: 60000000 kB\n",
        "/sys/fs/cgroup/memory.max": "2000000000\n",
        "/sys/fs/cgroup/memory.current": "500000000\n",
    }
    monkeypatch.setattr(doctor, "_read", lambda path: files[str(path)])
    assert doctor._memory_bytes() == (1_500_000_000, 2_000_000_000)
    (finding,) = doctor._memory()
    assert finding.mark == "warn"


def test_only_complete_models_of_the_cache_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    needed = {"config.json": "{}", "tokenizer.json": "{}", "model.safetensors": ""}
    cached(tmp_path, "models--reef--small", needed)  # quantized models use the codec of another model
    cached(tmp_path, "models--reef--half", {"config.json": "{}"})
    cached(tmp_path, "models--reef--broken", needed | {"model.safetensors.index.json": '{"weight_map": []}'})
    cached(tmp_path, "models--fishaudio--s2-pro", needed)  # released models need their own codec
    cached(tmp_path, "models--no--name--at--all", needed)
    assert next(found for found in doctor._models() if found.subject == "models").value == "nano, reef/small"


MISSING = "Triton is not installed"


@pytest.mark.parametrize(
    ("model", "codec", "backends", "why"),
    [
        (None, None, ("graph", "graph"), "; the largest kernels compile and fit"),
        (MISSING, MISSING, ("plain-graph", "plain-graph"), f"; no fused kernels: {MISSING}"),
        ("too large", None, ("plain-graph", "graph"), "; no fused kernels for the model: too large"),
        (None, "too large", ("graph", "plain-graph"), "; no fused kernels for the codec: too large"),
    ],
)
def test_the_backends_of_a_gpu_are_predicted_from_its_kernels(
    monkeypatch: pytest.MonkeyPatch, model: str | None, codec: str | None, backends: tuple[str, str], why: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr("shoal.kernels.compile_check.check_kernels", lambda device, dtype: model)
    monkeypatch.setattr("shoal.kernels.compile_check.check_codec_kernels", lambda device, dtype: codec)
    choice = doctor._choose()
    assert (choice.device, choice.dtype) == ("cuda", "float16")
    assert (choice.backend, choice.codec_backend) == backends
    assert choice.why.endswith(why)


def test_a_gpu_for_which_torch_has_no_code_is_named_and_the_cpu_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(name="Reef 9000", total_memory=8e9, major=6, minor=1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_arch_list", lambda: ["sm_75", "sm_80"])
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: card)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (6, 1))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "Reef 9000")
    (finding,) = doctor._gpu()
    assert finding.mark == "missing"
    assert "only sm_75 sm_80: install another build of torch" in finding.advice
    choice = doctor._choose()
    assert (choice.device, choice.why) == ("cpu", "torch has no code for the GPU")


def cached(cache: Path, folder: str, files: dict[str, str]) -> None:
    snapshot = cache / folder / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (cache / folder / "refs").mkdir()
    (cache / folder / "refs" / "main").write_text("0123")
    for name, content in files.items():
        (snapshot / name).write_text(content)


def test_plan_shows_the_capacity_of_common_gpus(shoal: Shoal) -> None:
    document = json.loads(shoal("doctor", "--plan", "--json").out)
    assert {(row["card"], row["model"]) for row in document["cards"]} >= {(8, "s1-mini"), (141, "s2-pro")}
    predicted = {(row["card"], row["model"]): row for row in document["predicted"]}
    measured = predicted["H200", "s1-mini"], predicted["H200", "s2-pro"]
    assert [row["frame_ms"] for row in measured] == [1.06, 5.23]  # what the prediction is fitted to
    assert predicted["T4", "s1-mini"]["backend"] == "plain-graph"
    assert predicted["RTX 3060", "s2-pro"]["weights"] == "slow=int4,fast=int8"
    assert 0 < predicted["A100", "s1-mini"]["frame_ms"] < predicted["L4", "s1-mini"]["frame_ms"]
    shown = shoal("doctor", "--plan").text
    assert "24 GB" in shown
    assert "Predicted speed" in shown
    assert "16-bit / 8-bit" in shown


@pytest.mark.parametrize(
    ("cores", "rtf"),
    [(1, "4.4 "), (2, "2.2 with one voice in int8 (measured"), (6, "1.2 "), (8, "0.89 "), (64, "0.89 ")],
)
def test_the_speed_of_s1_mini_on_a_cpu_is_interpolated_from_the_measured_ones(cores: int, rtf: str) -> None:
    assert f"RTF about {rtf}" in doctor.predicted_cpu_speed(cores)
    assert ("measured" in doctor.predicted_cpu_speed(cores)) == (cores in doctor.CPU_RTF)


@pytest.mark.parametrize(
    ("reason", "value", "mark"),
    [
        (None, "CUDA C++ for compute capability 9.0 (codec, S2-Pro)", "ok"),
        ("cuda-bindings is not installed", "Triton", "warn"),
    ],
)
def test_a_hopper_gpu_names_its_kernels(
    reason: str | None, value: str, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not [*doctor._hopper()]
    monkeypatch.setattr("shoal.kernels.sm90.launch.is_hopper", lambda device: True)
    monkeypatch.setattr("shoal.kernels.sm90.launch.kernels_unavailable", lambda device: reason)
    (finding,) = doctor._hopper()
    assert (finding.value, finding.mark) == (value, mark)
    assert (reason or "") in finding.advice
