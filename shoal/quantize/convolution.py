"""Convolutions over int8 weights with one scale per output channel: y = conv(x, w) · scale + bias."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.model.linear import Quantized, quantize_rows


class Int8Conv(Quantized):
    """Replacement of a plain or transposed 1-D convolution without padding or groups."""

    mode = "int8"

    def __init__(self, conv: nn.Conv1d | nn.ConvTranspose1d) -> None:
        """Allocate for the shapes and the device of `conv`; `from_conv` also quantizes its weights."""
        super().__init__()
        self.transposed = isinstance(conv, nn.ConvTranspose1d)
        (self.stride,), (self.dilation,) = conv.stride, conv.dilation
        self.register_buffer("weight", torch.empty_like(conv.weight, dtype=torch.int8))
        self.register_buffer("scales", torch.empty(conv.out_channels, dtype=torch.bfloat16, device=conv.weight.device))
        self.register_buffer("bias", None if conv.bias is None else conv.bias.detach())

    @classmethod
    def from_conv(cls, conv: nn.Conv1d | nn.ConvTranspose1d) -> "Int8Conv":
        """Quantize a plain convolution."""
        layer = cls(conv)
        # The output channels of a transposed convolution are its second axis.
        by_output = conv.weight.transpose(0, 1) if layer.transposed else conv.weight
        q, layer.scales = quantize_rows(by_output.contiguous(), torch.int8)
        layer.weight = (q.transpose(0, 1) if layer.transposed else q).contiguous()
        return layer

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        if self.transposed:
            y = F.conv_transpose1d(x, weight, stride=self.stride, dilation=self.dilation)
        else:
            y = F.conv1d(x, weight, stride=self.stride, dilation=self.dilation)
        y = y * self.scales.to(x.dtype)[:, None]
        return y if self.bias is None else y + self.bias.to(x.dtype)[:, None]

    def dequantize(self) -> nn.Module:
        """Return a plain fp32 convolution with the dequantized weights."""
        weight = self.weight.float() * self.scales.float().view((1, -1, 1) if self.transposed else (-1, 1, 1))
        conv_type: type[nn.Conv1d | nn.ConvTranspose1d] = nn.ConvTranspose1d if self.transposed else nn.Conv1d
        channels, out = weight.shape[:2] if self.transposed else weight.shape[1::-1]
        conv = conv_type(channels, out, weight.shape[2], self.stride, dilation=self.dilation, bias=False, device="meta")
        conv.weight = nn.Parameter(weight, requires_grad=False)
        conv.bias = None if self.bias is None else nn.Parameter(self.bias, requires_grad=False)
        return conv
