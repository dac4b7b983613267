"""Bytes that weights take in a quantization mode; also for models on the meta device."""

import torch
from torch import nn

from shoal.codec.dac import Codec
from shoal.model.dual_ar import DualAR
from shoal.model.linear import QUANTIZED_LINEARS
from shoal.model.slow import candidate_ids
from shoal.quantize.apply import decode_side, is_large_conv, mode_of
from shoal.quantize.modes import Mode, WeightModes


def model_bytes(model: DualAR, modes: WeightModes, dtype: torch.dtype) -> int:
    """Return the bytes of both transformers after `prepare_model` on a GPU, with a head copied from tied embeddings."""
    components = ((model.slow, modes.slow), (model.fast, modes.fast))
    size = sum(_bytes(module, mode, dtype.itemsize) for part, mode in components for module in part.modules())
    candidates, dim = len(candidate_ids(model.config)), model.config.slow.dim
    if model.config.tie_word_embeddings:
        return size + candidates * dim * dtype.itemsize
    if not model.slow.pruned:
        vocabulary = model.config.vocab_size
        full, pruned = (_matrix(rows, dim, modes.slow, dtype.itemsize) for rows in (vocabulary, candidates))
        size -= full - pruned
    return size


def codec_bytes(codec: Codec, mode: Mode) -> int:
    """Return the bytes of a codec in fp32, with its decode side in `mode`."""
    small = {id(module) for part in decode_side(codec) for module in part.modules()} if mode == "int8" else set[int]()
    return sum(_bytes(module, mode if id(module) in small else "none", 4) for module in codec.modules())


def stack_bytes(stack: nn.Module, mode: Mode, dtype: torch.dtype) -> int:
    """Return the bytes of all weights of a module and its children."""
    return sum(_bytes(module, mode, dtype.itemsize) for module in stack.modules())


def _bytes(module: nn.Module, mode: Mode, itemsize: int) -> int:
    held = [*module.parameters(recurse=False), *module._buffers.values()]
    if mode_of(module) != "none":
        return sum(tensor.nbytes for tensor in held if tensor is not None)
    floats = sum(tensor.numel() for tensor in module.parameters(recurse=False)) * itemsize
    if mode == "none" or not (isinstance(module, nn.Linear) or is_large_conv(module)):
        return floats
    rows = module.out_features if isinstance(module, nn.Linear) else module.out_channels
    weight = module.weight.numel()
    return floats - weight * itemsize + _matrix(rows, weight // rows, mode, itemsize)


def _matrix(rows: int, columns: int, mode: Mode, itemsize: int) -> int:
    return rows * columns * itemsize if mode == "none" else QUANTIZED_LINEARS[mode].storage_bytes(rows, columns)
