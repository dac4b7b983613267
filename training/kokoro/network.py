"""Kokoro-82M as a torch module: loading, dequantization, and a decoder that is fast at large batch sizes."""

from __future__ import annotations

import json
import math
import sys
import warnings
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Network(nn.Module):
    """The modules of Kokoro-82M under their original names. No package ships its config file; these sizes fit."""

    def __init__(self) -> None:
        from transformers import AlbertConfig

        from kokoro.istftnet import Decoder
        from kokoro.modules import CustomAlbert, ProsodyPredictor, TextEncoder

        super().__init__()
        albert = AlbertConfig(
            vocab_size=178,
            hidden_size=768,
            num_attention_heads=12,
            intermediate_size=2048,
            max_position_embeddings=512,
            num_hidden_layers=12,
        )
        self.bert = CustomAlbert(albert)
        self.bert_encoder = nn.Linear(768, 512)
        self.predictor = ProsodyPredictor(style_dim=128, d_hid=512, nlayers=3, max_dur=50, dropout=0.2)
        self.text_encoder = TextEncoder(channels=512, kernel_size=5, depth=3, n_symbols=178)
        self.decoder = Decoder(
            dim_in=512,
            style_dim=128,
            dim_out=80,
            resblock_kernel_sizes=[3, 7, 11],
            upsample_rates=[10, 6],
            upsample_initial_channel=512,
            resblock_dilation_sizes=[[1, 3, 5]] * 3,
            upsample_kernel_sizes=[20, 12],
            gen_istft_n_fft=20,
            gen_istft_hop_size=5,
        )


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Join the weight parts and dequantize them to float32."""
    packed = b"".join(path.read_bytes() for path in sorted(folder.glob("weights.[0-9]*")))
    header, _, payload = packed.partition(b"\n")
    raw, offset, tensors = zlib.decompress(payload), 0, {}
    for name, dtype, shape, scale, zero in json.loads(header):
        data = np.frombuffer(raw, dtype, math.prod(shape), offset).reshape(shape)
        offset += data.nbytes
        value = data.astype(np.float32)
        tensors[name] = torch.from_numpy(value if scale is None else (value - np.float32(zero)) * np.float32(scale))
    return tensors


def load_network(folder: Path) -> Network:
    """Build the network from the files that `training.kokoro.convert` writes, in float32 on the CPU."""
    sys.path.insert(0, str(folder))
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*weight_norm")
    network = Network()
    for module in network.modules():
        if hasattr(module, "weight_g"):
            nn.utils.remove_weight_norm(module)
    missing, unexpected = network.load_state_dict(read_weights(folder), strict=False)
    # Not in the ONNX file: the unused pooler, and the affine terms of the instance norms, which are the identity.
    missing = [name for name in missing if not name.startswith("bert.pooler") and ".norm." not in name]
    if missing or unexpected:
        raise ValueError(f"weights do not fit the network: missing {missing}, unexpected {unexpected}")
    prepare_generator(network.decoder.generator)
    return network.eval().requires_grad_(False)


# The generator runs in [B, T, C] layout: cuDNN's half-precision convolutions are 1.5 to 3 times faster there than in
# [B, C, T], and the normalization becomes two simple kernels.


def prepare_generator(generator: nn.Module) -> None:
    """Give the convolutions channels-last 2-d weights and gather the biases that only shift a stage's output."""
    constants = []
    for stage in range(generator.num_upsamples):
        blocks = generator.resblocks[stage * generator.num_kernels : (stage + 1) * generator.num_kernels]
        sums = [sum(conv.bias for conv in block.convs2) for block in (generator.noise_res[stage], *blocks)]
        constants.append(nn.Parameter(sums[0] + sum(sums[1:]) / len(blocks)))
    generator.constants = nn.ParameterList(constants)
    for module in generator.modules():
        if isinstance(module, nn.Conv1d | nn.ConvTranspose1d):
            module.weight = nn.Parameter(module.weight[:, :, None].contiguous(memory_format=torch.channels_last))


def convolve(layer: nn.Conv1d | nn.ConvTranspose1d, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply a prepared convolution to x [B, T, C]."""
    function = F.conv_transpose2d if isinstance(layer, nn.ConvTranspose1d) else F.conv2d
    stride, padding, dilation = (1, *layer.stride), (0, *layer.padding), (1, *layer.dilation)
    y = function(x.transpose(1, 2)[:, :, None], layer.weight, bias, stride=stride, padding=padding, dilation=dilation)
    return y.squeeze(2).transpose(1, 2)


def residual_block(block: nn.Module, x: Tensor, style: Tensor) -> Tensor:
    """AdaINResBlock1.forward without biases: the norms remove them, and `prepare_generator` keeps what is left."""
    for conv1, conv2, norm1, norm2, alpha1, alpha2 in zip(
        block.convs1, block.convs2, block.adain1, block.adain2, block.alpha1, block.alpha2, strict=True
    ):
        y = convolve(conv1, norm_snake(x, norm1.fc(style), alpha1))
        y = convolve(conv2, norm_snake(y, norm2.fc(style), alpha2))
        x = x + y
    return x


def generate(generator: nn.Module, x: Tensor, style: Tensor, f0: Tensor) -> Tensor:
    """Generator.forward with the harmonic source and the inverse STFT in float32, the rest in the dtype of x."""
    source, _, _ = generator.m_source(generator.f0_upsamp(f0[:, None]).transpose(1, 2))
    harmonics = torch.cat(generator.stft.transform(source.squeeze(2)), dim=1).to(x.dtype)
    harmonics, x = harmonics.transpose(1, 2).contiguous(), x.transpose(1, 2).contiguous()
    for stage, upsample in enumerate(generator.ups):
        noise = generator.noise_convs[stage]
        side = residual_block(generator.noise_res[stage], convolve(noise, harmonics, noise.bias), style)
        x = convolve(upsample, F.leaky_relu(x, 0.1), upsample.bias)
        if stage == generator.num_upsamples - 1:
            x = torch.cat([x[:, 1:2], x], dim=1)  # reflection padding by one
        x += side
        first, *blocks = generator.resblocks[stage * generator.num_kernels : (stage + 1) * generator.num_kernels]
        total = residual_block(first, x, style)
        for block in blocks:
            total += residual_block(block, x, style)
        x = torch.add(generator.constants[stage], total, alpha=1 / generator.num_kernels)
    x = convolve(generator.conv_post, F.leaky_relu(x), generator.conv_post.bias).float().transpose(1, 2)
    bins = generator.post_n_fft // 2 + 1
    return generator.stft.inverse(torch.exp(x[:, :bins]), torch.sin(x[:, bins:])).squeeze(1)


def decode(decoder: nn.Module, text: Tensor, f0: Tensor, energy: Tensor, style: Tensor) -> Tensor:
    """Decoder.forward: text [B, 512, T], f0 and energy [B, 2T], style [B, 128] -> audio [B, 600 T] in float32."""
    dtype = decoder.generator.conv_post.weight.dtype
    text, style = text.to(dtype), style.to(dtype)
    pitch, energy = decoder.F0_conv(f0[:, None].to(dtype)), decoder.N_conv(energy[:, None].to(dtype))
    x = decoder.encode(torch.cat([text, pitch, energy], dim=1), style)
    extra = torch.cat([decoder.asr_res(text), pitch, energy], dim=1)
    for block in decoder.decode:
        x = block(torch.cat([x, extra], dim=1), style)
    return generate(decoder.generator, x, style, f0)


def norm_snake(x: Tensor, style: Tensor, alpha: Tensor) -> Tensor:
    """Instance norm of x [B, T, C] over T, scale and shift by style [B, 2C], then Snake with alpha [1, C, 1]."""
    if x.is_cuda:
        from training.kokoro import norm_snake as kernels  # here, because a host without a GPU may have no Triton

        return kernels.norm_snake(x, style, alpha)
    var, mean = torch.var_mean(x.float(), dim=1, keepdim=True, correction=0)
    scale, shift = style.float()[:, None].chunk(2, dim=2)
    y, alpha = (1 + scale) * (x.float() - mean) * torch.rsqrt(var + 1e-5) + shift, alpha.float().view(-1)
    return (y + torch.sin(alpha * y).square() / alpha).to(x.dtype)
