"""Bytes that weights take once they are in a mode. Works on skeletons without storage."""

import torch
from torch import nn

from shoal.codec.dac import Codec
from shoal.model.dual_ar import DualAR
from shoal.model.linear import GROUP_SIZE
from shoal.model.slow import candidate_ids
from shoal.quantize.apply import decode_side, is_large_conv, mode_of
from shoal.quantize.modes import Mode, WeightModes

SCALE_BYTES = 2


def model_bytes(model: DualAR, modes: WeightModes, dtype: torch.dtype) -> int:
    """Bytes of both transformers as `prepare_model` leaves them on a GPU, with the head copied from tied embeddings."""
    parts = ((model.slow, modes.slow), (model.fast, modes.fast))
    size = sum(_bytes(module, mode, dtype.itemsize) for part, mode in parts for module in part.modules())
    legal, slow = len(candidate_ids(model.config)), model.config.slow.dim
    if model.config.tie_word_embeddings:
        return size + legal * slow * dtype.itemsize
    if not model.slow.pruned:
        whole, cut = (_matrix(rows, slow, modes.slow, dtype.itemsize) for rows in (model.config.vocab_size, legal))
        size -= whole - cut
    return size


def codec_bytes(codec: Codec, mode: Mode) -> int:
    """Kept in fp32, but for what int8 takes of the decode side."""
    small = {id(module) for part in decode_side(codec) for module in part.modules()} if mode == "int8" else set[int]()
    return sum(_bytes(module, mode if id(module) in small else "none", 4) for module in codec.modules())


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
    if mode == "none":
        return rows * columns * itemsize
    if mode == "int4":
        return rows * columns // 2 + rows * -(-columns // GROUP_SIZE) * 2 * SCALE_BYTES
    return rows * (columns + SCALE_BYTES)
