from pathlib import Path
from typing import get_args

import pytest

from shoal.engine.execution.fallback import BACKENDS
from shoal.errors import InvalidRequest, ModelNotFound
from shoal.server.preflight import check_device
from shoal.server.run import bind, check_access, serve
from shoal.settings import ResolvedSettings, Settings, read_settings
from tests.server.conftest import free_port


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "nothing"))


def read(variables: dict[str, str] | None = None, file: Path | None = None, **flags: object) -> ResolvedSettings:
    return read_settings(flags, file, variables or {})


def test_a_flag_wins_over_a_variable_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "shoal.toml"
    file.write_text("port = 1\nslots = 2\nhost = '127.0.0.2'\n")
    resolved = read({"SHOAL_PORT": "3", "SHOAL_SLOTS": "4"}, file, port=5)
    assert (resolved.settings.port, resolved.settings.slots, resolved.settings.host) == (5, 4, "127.0.0.2")
    assert [resolved.sources[name] for name in ("port", "slots", "host", "guard")] == [
        "flag",
        "SHOAL_SLOTS",
        str(file),
        "default",
    ]


def test_a_flag_wins_over_the_variable_of_the_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CPU_ISA", "avx2")
    assert read({"SHOAL_CPU_ISA": "avx2"}).settings.source().config.cpu_isa == "avx2"
    assert read({"SHOAL_CPU_ISA": "avx2"}, cpu_isa="auto").settings.source().config.cpu_isa == "auto"


def test_variables_of_the_older_server_are_read() -> None:
    resolved = read(
        {
            "S1_MINI_DEVICE": "cpu",
            "S1_MINI_PRECISION": "bf16",
            "S1_MINI_BATCH_SIZE": "3",
            "S1_MINI_BATCH_TIMEOUT_MS": "20",
            "S1_MINI_KV_CACHE_SIZE": "0",
            "S1_MINI_REQUEST_TIMEOUT_S": "7",
            "S1_MINI_METRICS_ENABLED": "false",
            "S1_MINI_REFERENCE_CACHE_SIZE": "8",
            "S1_MINI_VRAM_CLEAR_ON_OOM": "false",
        }
    )
    source, server = resolved.settings.source(), resolved.settings.server()
    assert (source.device, source.dtype, source.config.slots) == ("cpu", "bfloat16", 3)
    assert (source.config.batch_size, source.config.batch_seconds, source.config.prefix_cache) == (3, 0.02, False)
    assert (server.limits.request_seconds, server.metrics) == (7.0, False)
    assert (source.config.cached_voices, source.config.clear_on_oom) == (8, False)
    assert resolved.sources["slots"] == "S1_MINI_BATCH_SIZE"


def test_the_environment_of_the_older_server_is_accepted_as_it_stands() -> None:
    environment = """DEVICE=cuda PRECISION=float16 COMPILE=auto COMPILE_BACKEND=auto BATCH_SIZE=4 BATCH_TIMEOUT_MS=50
        KV_CACHE_SIZE=100 REFERENCE_CACHE_SIZE=1000 REQUEST_TIMEOUT_S=60 VRAM_CLEAR_ON_OOM=true METRICS_ENABLED=true"""
    source = read(dict(f"S1_MINI_{line}".split("=") for line in environment.split())).settings.source()
    assert (source.device, source.dtype, source.config.backend) == ("cuda", "float16", "auto")
    assert (source.config.slots, source.config.batch_size, source.config.batch_seconds) == (4, 4, 0.05)
    assert (source.config.prefix_cache, source.config.cached_voices, source.config.clear_on_oom) == (True, 1000, True)


def test_variables_of_the_older_server_that_do_less_are_named() -> None:
    variables = {"S1_MINI_BATCH_TIMEOUT_MS": "50", "S1_MINI_KV_CACHE_SIZE": "100"}
    notices = read(variables).notices()
    assert [notice.split()[0] for notice in notices] == ["S1_MINI_BATCH_TIMEOUT_MS", "S1_MINI_KV_CACHE_SIZE"]
    assert read({**variables, "SHOAL_POLICY": "dynamic", "SHOAL_PREFIX_CACHE": "true"}).notices() == []
    assert read({}).notices() == []


@pytest.mark.parametrize(
    ("variables", "backend", "place"),
    [
        ({}, "auto", "default"),
        ({"S1_MINI_COMPILE": "1"}, "auto", "S1_MINI_COMPILE"),
        ({"S1_MINI_COMPILE": "auto"}, "auto", "S1_MINI_COMPILE"),
        ({"S1_MINI_COMPILE": "auto", "S1_MINI_COMPILE_BACKEND": "auto"}, "auto", "S1_MINI_COMPILE_BACKEND"),
        ({"S1_MINI_COMPILE": "false"}, "eager", "S1_MINI_COMPILE"),
        ({"S1_MINI_COMPILE": "0", "S1_MINI_COMPILE_BACKEND": "inductor"}, "eager", "S1_MINI_COMPILE"),
        ({"S1_MINI_COMPILE": "1", "S1_MINI_COMPILE_BACKEND": "cudagraphs"}, "graph", "S1_MINI_COMPILE_BACKEND"),
        ({"S1_MINI_COMPILE_BACKEND": "inductor"}, "auto", "S1_MINI_COMPILE_BACKEND"),
        ({"S1_MINI_COMPILE": "0", "SHOAL_BACKEND": "fused"}, "fused", "SHOAL_BACKEND"),
    ],
)
def test_compile_switches_of_the_older_server_select_a_backend(
    variables: dict[str, str], backend: str, place: str
) -> None:
    resolved = read(variables)
    assert (resolved.settings.source().config.backend, resolved.sources["backend"]) == (backend, place)


@pytest.mark.parametrize(("cores", "given", "threads"), [(1, {}, 2), (16, {}, 16), (16, {"encoding_threads": 3}, 3)])
def test_audio_encoders_have_a_thread_per_core(
    cores: int, given: dict[str, int], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.settings.fields.usable_cores", lambda: cores)
    assert Settings(**given).server().encoding_threads == threads


def test_every_backend_can_be_set() -> None:
    assert get_args(Settings.model_fields["backend"].annotation) == ("auto", *BACKENDS)


def test_batch_sizes_are_a_list_of_counts() -> None:
    assert read({"SHOAL_BUCKETS": "1, 4,16"}).settings.source().config.buckets == (1, 4, 16)
    assert read().settings.source().config.buckets == ()
    for wrong in (",", "0", "2,x"):
        with pytest.raises(InvalidRequest, match=r"buckets.* \(SHOAL_BUCKETS\)"):
            read({"SHOAL_BUCKETS": wrong})


def test_a_shoal_variable_overrides_the_older_name() -> None:
    assert read({"S1_MINI_DEVICE": "cuda", "SHOAL_DEVICE": "cpu"}).settings.device == "cpu"


def test_the_service_variable_of_kubernetes_is_not_read_as_a_port() -> None:
    assert read({"SHOAL_PORT": "tcp://10.0.0.1:8080"}).settings.port == 8080


@pytest.mark.parametrize(
    ("variables", "flags", "message"),
    [
        ({"SHOAL_PORT": "high"}, {}, r"port \(SHOAL_PORT\)"),
        ({"S1_MINI_KV_CACHE_SIZE": "64MiB"}, {}, "S1_MINI_KV_CACHE_SIZE must be a number of cached prefixes"),
        ({"S1_MINI_BATCH_TIMEOUT_MS": "soon"}, {}, "S1_MINI_BATCH_TIMEOUT_MS must be a number"),
        ({"S1_MINI_COMPILE": "perhaps"}, {}, "S1_MINI_COMPILE must be auto, true or false"),
        ({"S1_MINI_COMPILE_BACKEND": "magic"}, {}, "S1_MINI_COMPILE_BACKEND must be one of auto, inductor"),
        ({}, {"slots": 0}, r"slots \(flag\)"),
        ({}, {"colour": "blue"}, "colour"),
        ({"S1_MINI_BATCH_TIMEOUT_MS": "10001"}, {}, r"batch_seconds .*: Input should be less than or equal to 10"),
        ({"SHOAL_CONFIG": "/nowhere.toml"}, {}, "/nowhere.toml"),
        ({}, {"gpu_memory": "5"}, r"gpu_memory \(flag\): gpu_memory = '5' has no unit"),
        ({}, {"gpu_memory": "0"}, r"gpu_memory \(flag\): gpu_memory = '0' is 0"),
        ({"SHOAL_QUANTIZE": "foo"}, {}, r"quantize \(SHOAL_QUANTIZE\): cannot quantize to 'foo'"),
        ({"S1_MINI_DEVICE": "abacus"}, {}, r"device \(S1_MINI_DEVICE\): unknown device 'abacus'"),
    ],
)
def test_an_invalid_setting_is_reported_with_its_source(
    variables: dict[str, str], flags: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read(variables, **flags)


DURATIONS = [name for name, field in Settings.model_fields.items() if name.endswith("_seconds")]


@pytest.mark.parametrize("name", DURATIONS)
@pytest.mark.parametrize("value", ["inf", "1e400", "nan"])
def test_a_duration_without_end_is_refused_by_name_instead_of_ending_the_start(name: str, value: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{name} \(SHOAL_{name.upper()}\): "):
        read({f"SHOAL_{name.upper()}": value})


def test_recordings_are_limited_to_an_hour_for_which_the_codec_has_tables() -> None:
    assert read({"SHOAL_REFERENCE_SECONDS": "3600"}).settings.limits().reference_seconds == 3600
    with pytest.raises(InvalidRequest, match="less than or equal to 3600"):
        read({"SHOAL_REFERENCE_SECONDS": "1000000"})


def test_an_unknown_key_of_the_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "shoal.toml"
    file.write_text("prot = 80\n")
    with pytest.raises(InvalidRequest, match=r"prot .*: no such setting; `shoal config` lists all settings"):
        read(file=file)
    file.write_text("port = ")
    with pytest.raises(InvalidRequest, match="not valid TOML"):
        read(file=file)


def test_a_public_address_requires_a_key_or_insecure() -> None:
    check_access(read(host="127.0.0.1").settings.server())
    check_access(read(host="::1").settings.server())
    check_access(read(host="0.0.0.0", insecure=True).settings.server())
    check_access(read(host="0.0.0.0", api_keys="a-long-enough-key").settings.server())
    with pytest.raises(InvalidRequest, match="no API key"):
        check_access(read(host="0.0.0.0").settings.server())


def test_a_port_in_use_is_an_error() -> None:
    port = free_port()
    first = bind(read(port=port).settings.server())
    with first, pytest.raises(InvalidRequest, match=f"cannot listen on 127.0.0.1 port {port}: Address already in use"):
        bind(read(port=port).settings.server())


def test_a_missing_model_is_an_error_before_the_port_is_opened(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    settings = read(model="no-such-model", port=0).settings
    with pytest.raises(ModelNotFound, match="no such directory and not a known name"):
        serve(settings.server(), settings.source(), settings.voice_directory())
    assert "listening" not in caplog.text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"device": "cuda:63"}, "cuda:63: this machine has"),
        ({"device": "cpu", "quantize": "fp8"}, "slow=fp8 is not"),
    ],
)
@pytest.mark.usefixtures("forked_preflight")
def test_missing_hardware_is_an_error_before_the_port_is_opened(
    flags: dict[str, str], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    settings = read(model="random:tiny", port=0, **flags).settings
    with pytest.raises(InvalidRequest, match=message):
        serve(settings.server(), settings.source(), settings.voice_directory())
    assert "listening" not in caplog.text


def test_the_cpu_needs_no_hardware_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiprocessing.get_context", None)
    check_device(read(device="cpu", quantize="none").settings.source())
    check_device(read().settings.source())


def test_secrets_are_not_shown() -> None:
    settings = read({"SHOAL_API_KEYS": "first-secret-key,second-secret-key"}).settings
    assert len(settings.server().api_keys) == 2
    assert "secret-key" not in repr(settings) + repr(settings.server())
