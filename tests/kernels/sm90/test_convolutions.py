"""CUDA C++ kernels for Hopper: the GPU tests compare them with the Triton kernels bit by bit."""

import logging
from pathlib import Path

import pytest
import torch

from shoal.checkpoint.random import random_checkpoint
from shoal.codec.fused import FusedCall, FusedCodec
from shoal.kernels.codec_decoder import conv as conv_kernels
from shoal.kernels.codec_decoder.conv import Taps
from shoal.kernels.codec_decoder.packing import Packing
from shoal.kernels.sm90 import convolutions, launch
from shoal.kernels.sm90.convolutions import Sm90Weights, neighbours, pack_conv, pack_layers, pack_residual_unit
from shoal.kernels.sm90.source import ConvVariant
from tests.kernels.codec_decoder.packs import pack
from tests.kernels.sm90.compiling import machine_code

RATES = {96: 2048, 192: 1024, 384: 256}


def taps(count: int, channels: int, device: str, dilation: int = 1) -> Taps:
    weight = torch.randn(count, channels, channels, device=device) / (count * channels) ** 0.5
    return Taps(weight.half(), torch.randn(channels, device=device), dilation)


def test_eight_neighbouring_channels_are_in_the_accumulators_of_one_thread() -> None:
    order = neighbours(64, torch.device("cpu"))
    assert sorted(order.tolist()) == list(range(64))
    for thread in range(4):
        columns = [8 * j + 2 * thread + e for j in range(4) for e in range(2)]
        assert order[columns].tolist() == list(range(8 * thread, 8 * thread + 8))
        assert order[[32 + each for each in columns]].tolist() == list(range(32 + 8 * thread, 40 + 8 * thread))


def test_weights_are_packed_in_columns_of_eight_inputs() -> None:
    inner, outer = taps(7, 96, "cpu"), taps(1, 96, "cpu")
    packed = pack_residual_unit(inner, outer).view(8, 12, 96, 8)
    assert torch.equal(packed[5, 3, 17], inner.weight[5, 17, 24:32])
    order = neighbours(96, torch.device("cpu"))
    assert torch.equal(packed[7, 11, 40], outer.weight[0, order[40], 88:])


def test_the_outputs_of_a_wide_convolution_are_packed_half_by_half() -> None:
    inner = taps(7, 384, "cpu")
    packed, order = pack_conv(inner).view(2, 7, 48, 192, 8), neighbours(384, torch.device("cpu"))
    assert torch.equal(packed[1, 6, 2, 5], inner.weight[6, order[192 + 5], 16:24])


def test_other_devices_use_the_triton_kernels_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert pack_layers([(taps(7, 96, "cpu"), taps(1, 96, "cpu"))] * 2) == [None, None]
    assert not caplog.records


def test_a_hopper_gpu_without_cuda_bindings_warns_and_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (convolutions, launch):
        monkeypatch.setattr(module, "is_hopper", lambda device: True)
    monkeypatch.setattr(launch, "driver", None)
    assert pack_layers([(taps(7, 96, "cpu"), taps(1, 96, "cpu"))]) == [None]
    assert "pip install 'shoal-tts[hopper]'" in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        launch.KernelError("residual_unit.cu does not compile for sm_90a: error"),
        RuntimeError("Failure finding libnvrtc.so"),
    ],
    ids=str,
)
def test_kernels_that_cannot_be_compiled_leave_those_of_triton(
    error: RuntimeError, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(variants: object, device: torch.device) -> None:
        raise error

    monkeypatch.setattr(convolutions, "kernels_unavailable", lambda device: None)
    monkeypatch.setattr(convolutions, "is_hopper", lambda device: True)
    monkeypatch.setattr(convolutions, "load_kernels", fail)
    assert pack_layers([(taps(7, 96, "cpu"), taps(1, 96, "cpu"))]) == [None]
    assert str(error) in caplog.text


def test_machine_code_that_cannot_be_cached_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "compile_source", lambda text, name: launch.ELF)
    # A directory of that name can neither be read nor replaced, as a file in the directory of another user.
    monkeypatch.setattr(launch, "_cached_file", lambda variant, text: tmp_path)
    assert launch.compiled.__wrapped__(convolutions.UNIT_96) == launch.ELF


@pytest.mark.parametrize(
    "unit",
    [
        (taps(7, 128, "cpu"), taps(1, 128, "cpu")),
        (taps(3, 96, "cpu"), taps(1, 96, "cpu")),
        (taps(7, 96, "cpu", 27), taps(1, 96, "cpu")),
        (Taps(torch.zeros(7, 96, 96), torch.zeros(96)), Taps(torch.zeros(1, 96, 96), torch.zeros(96))),
    ],
    ids=["channels", "taps", "dilation", "float32"],
)
def test_units_of_other_shapes_have_no_kernel(unit: tuple[Taps, Taps]) -> None:
    assert convolutions.unit_variant(*unit) is None


@pytest.mark.parametrize(
    ("shape", "dtype"), [((2, 192, 384), torch.float16), ((3, 192, 192), torch.float16), ((2, 192, 192), torch.float32)]
)
def test_upsampling_convolutions_of_other_shapes_have_no_kernel(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert convolutions.upsample_variant(Taps(torch.zeros(2, 768, 384).half(), torch.zeros(768))) is not None
    assert convolutions.upsample_variant(Taps(torch.zeros(shape, dtype=dtype), torch.zeros(shape[1]))) is None


@pytest.mark.parametrize("variant", convolutions.MIN_ROWS, ids=str)
def test_every_kernel_compiles(variant: ConvVariant, tmp_path: Path) -> None:
    assert machine_code(variant.source(), tmp_path).startswith(launch.ELF)


def test_a_cached_kernel_is_read_and_a_damaged_one_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_cached_file", lambda variant, text: tmp_path / "sm_90a" / "conv.cubin")
    monkeypatch.setattr(launch, "compile_source", lambda text, name: launch.ELF + b"new")
    variant = convolutions.CONV_384
    assert launch.compiled.__wrapped__(variant) == launch.ELF + b"new"
    (tmp_path / "sm_90a" / "conv.cubin").write_bytes(launch.ELF + b"old")
    assert launch.compiled.__wrapped__(variant) == launch.ELF + b"old"
    (tmp_path / "sm_90a" / "conv.cubin").write_bytes(b"")
    assert launch.compiled.__wrapped__(variant) == launch.ELF + b"new"


def test_a_kernel_with_an_error_names_the_line() -> None:
    pytest.importorskip("cuda.bindings", reason="messages of NVRTC")
    with pytest.raises(launch.KernelError, match=r"broken\.cu\(2\): error"):
        launch.compile_source("\nint x = ;", "broken.cu")


class Unit:
    """A residual unit of the released size on the GPU, with inputs and left context."""

    def __init__(self, channels: int, dilation: int, streams: list[tuple[int, int]], frames: int) -> None:
        torch.manual_seed(0)
        rows = frames * RATES[channels]
        self.x, self.activated = (torch.randn(rows, channels, device="cuda").half() for _ in range(2))
        self.inner, self.outer = taps(7, channels, "cuda", dilation), taps(1, channels, "cuda")
        self.alphas = torch.rand(2, channels, device="cuda") + 0.5
        self.past = torch.randn(65, self.inner.steps, channels, device="cuda").half()
        self.packing: Packing = pack(streams, "cuda", frames=frames)
        weights = pack_layers([(self.inner, self.outer)])[0]
        assert weights is not None
        self.weights: Sm90Weights = weights

    def by_triton(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        options = {"alpha": self.alphas[0], "plain": False}
        hidden = conv_kernels.conv(self.activated, self.inner, self.past, self.packing, **options)[1]  # type: ignore[arg-type]
        return (
            hidden,
            *conv_kernels.conv(hidden, self.outer, None, self.packing, residual=self.x, alpha=self.alphas[1]),
        )

    def by_cuda(self) -> tuple[torch.Tensor, torch.Tensor]:
        weights = self.inner, self.alphas[0], self.outer, self.alphas[1]
        return convolutions.residual_unit(self.x, self.activated, self.weights, *weights, self.past, self.packing)


STREAMS = {
    16: [(0, 9), (4, 3), (2, 1)],
    65: [(each, 1) for each in range(60)],
    100: [(5, 32), (1, 31), (0, 4), (3, 30)],
}


@pytest.mark.gpu
@pytest.mark.parametrize("frames", STREAMS)
@pytest.mark.parametrize("dilation", [1, 3, 9])
@pytest.mark.parametrize("channels", [96, 192])
def test_a_residual_unit_has_the_bits_of_triton(channels: int, dilation: int, frames: int) -> None:
    unit = Unit(channels, dilation, STREAMS[frames], frames)
    _, *expected = unit.by_triton()
    assert all(torch.equal(*pair) for pair in zip(unit.by_cuda(), expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("frames", STREAMS)
@pytest.mark.parametrize("dilation", [1, 3, 9])
def test_a_wide_convolution_has_the_bits_of_triton(dilation: int, frames: int) -> None:
    unit = Unit(384, dilation, STREAMS[frames], frames)
    _, ours = convolutions.conv(unit.activated, unit.weights, unit.inner, unit.alphas[0], unit.past, unit.packing)
    assert torch.equal(ours, unit.by_triton()[0])


@pytest.mark.gpu
@pytest.mark.parametrize("frames", STREAMS)
@pytest.mark.parametrize(("channels", "phases", "rate"), [(192, 2, 1024), (384, 4, 256)])
def test_an_upsampling_convolution_has_the_bits_of_triton(channels: int, phases: int, rate: int, frames: int) -> None:
    torch.manual_seed(0)
    outputs = phases * channels // 2
    layer = Taps((torch.randn(2, outputs, channels, device="cuda") / 20).half(), torch.randn(outputs, device="cuda"))
    x, past = (torch.randn(rows, channels, device="cuda").half() for rows in (frames * rate, 65))
    alpha, packing = torch.rand(channels // 2, device="cuda") + 0.5, pack(STREAMS[frames], "cuda", frames=frames)
    (weights,) = pack_layers([(layer,)])
    assert weights is not None
    ours = convolutions.conv(x, weights, layer, alpha, past[:, None], packing)
    expected = conv_kernels.conv(x, layer, past[:, None], packing, alpha=alpha)
    assert all(torch.equal(*pair) for pair in zip(ours, expected, strict=True))


@pytest.mark.gpu
def test_the_codec_decodes_the_same_samples_with_and_without_these_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = random_checkpoint("s1-mini", device="cuda", encoder=False).codec
    samples = []
    for kernels in (pack_layers, lambda layers: [None] * len(layers)):
        monkeypatch.setattr(convolutions, "pack_layers", kernels)
        fused = FusedCodec(codec, 64, torch.float16)
        assert any(each.sm90 is not None for each in fused.layers) == (kernels is pack_layers)
        call, calls = FusedCall(fused, 128), []
        for step in range(2):  # the second call starts from the state of the first
            inputs = call.padding()
            for stream in range(40):
                first, count = 3 * stream, 3
                inputs[:3, first : first + count] = [[stream], [first], [count]]
                inputs[3:, first : first + count] = (7 * stream + step) % 1000
            call.inputs.copy_(torch.from_numpy(inputs))
            with torch.inference_mode():
                call.run()
            calls.append(call.samples.clone())
        samples.append(torch.cat(calls))
    assert torch.equal(*samples)
    assert samples[0].abs().max() > 0
