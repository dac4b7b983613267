import torch

from shoal.kernels.codec_decoder.packing import Packing

SPARE = 6


def pack(streams: list[tuple[int, int]], device: str, frames: int = 8) -> Packing:
    """Pack (slot, frame count) streams and pad to `frames` with the spare slot."""
    slots, starts, counts = [], [], []
    for slot, count in streams:
        starts += [len(slots)] * count
        slots += [slot] * count
        counts += [count] * count
    for place in range(len(slots), frames):
        slots, starts, counts = [*slots, SPARE], [*starts, place], [*counts, 0]
    return Packing(*(torch.tensor(each, dtype=torch.int32, device=device) for each in (slots, starts, counts)))
