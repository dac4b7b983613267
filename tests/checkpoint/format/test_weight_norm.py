import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from shoal.checkpoint.format.weight_norm import codec_tensors, fold_weight_norm, unfold_weight_norm
from shoal.checkpoint.load import Checkpoint


@pytest.mark.parametrize("layer", [nn.Conv1d(4, 6, 3), nn.ConvTranspose1d(4, 6, 3)], ids=["conv", "transposed"])
def test_folding_gives_the_weight_that_torch_computes(layer: nn.Module) -> None:
    """Axis 0 is the output channel of a convolution and the input channel of a transposed one."""
    normed = parametrizations.weight_norm(layer, dim=0)
    with torch.no_grad():
        normed.parametrizations.weight.original0.mul_(3.0)
    stored = {f"layer.{name}": tensor for name, tensor in normed.state_dict().items()}
    folded = fold_weight_norm(stored)
    assert set(folded) == {"layer.weight", "layer.bias"}
    torch.testing.assert_close(folded["layer.weight"], normed.weight.detach())


def test_the_older_spelling_gives_the_same_weights() -> None:
    g, v = torch.rand(5, 1, 1), torch.randn(5, 4, 1)
    new = fold_weight_norm({"x.parametrizations.weight.original0": g, "x.parametrizations.weight.original1": v})
    assert torch.equal(new["x.weight"], fold_weight_norm({"x.weight_g": g, "x.weight_v": v})["x.weight"])


def test_unfolding_is_undone_by_folding(tiny: Checkpoint) -> None:
    tensors = tiny.codec.state_dict()
    again = fold_weight_norm(unfold_weight_norm(tensors))
    assert set(again) == set(tensors)
    for name, tensor in tensors.items():
        torch.testing.assert_close(again[name], tensor, rtol=1e-6, atol=1e-7)


def test_buffers_that_are_derived_are_ignored() -> None:
    stored = {"quantizer.pre_module.freqs_cis": torch.zeros(1), "quantizer.pre_module.causal_mask": torch.zeros(1)}
    assert codec_tensors(stored, encoder=True) == {}


def test_without_an_encoder_the_encode_side_is_dropped() -> None:
    names = ("encoder.block.0.conv.bias", "quantizer.pre_module.norm.weight", "quantizer.downsample.0.1.gamma",
             "quantizer.post_module.norm.weight", "decoder.model.0.conv.bias")  # fmt: skip
    stored = {name: torch.zeros(1) for name in names}
    assert set(codec_tensors(stored, encoder=False)) == set(names[3:])
    assert set(codec_tensors(stored, encoder=True)) == set(names)
