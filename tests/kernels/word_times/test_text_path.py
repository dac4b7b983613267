import numpy as np
import torch

from shoal.kernels.word_times.text_attention import Texts
from shoal.kernels.word_times.text_path import BLOCK_N, TILES, text_path, text_path_reference
from shoal.kernels.word_times.text_path_numpy import KEPT_FRAMES, MAX_TOKENS, extend_paths, new_scores

SLOTS = torch.tensor([2, 0, 1], dtype=torch.int32)
LENGTHS = torch.tensor([1, 0, 100], dtype=torch.int32)  # the second row has no text
FRAMES = 7
WIDTH = 128


def random_weights() -> torch.Tensor:
    """Return weights [frames, rows, heads, width], with many equal ones."""
    rng = np.random.default_rng(0)
    found = rng.choice([0.0, 0.06, 0.25, 0.5], (FRAMES, 3, 2, WIDTH), p=[0.6, 0.2, 0.1, 0.1])
    return torch.from_numpy(found.astype(np.float32))


def test_kernel_and_operators_find_the_path_of_the_numpy_reference(device: str) -> None:
    texts = Texts(SLOTS.to(device), torch.zeros_like(SLOTS).to(device), LENGTHS.to(device))
    kernel, operators = (torch.zeros(3, KEPT_FRAMES, MAX_TOKENS, dtype=torch.int32, device=device) for _ in range(2))
    known, counts = new_scores(3), torch.tensor([9, 0, 0], device=device)
    ours, reference = (torch.zeros(TILES, 3, BLOCK_N, dtype=torch.int16, device=device) for _ in range(2))
    padded = torch.zeros(3, 2, MAX_TOKENS, device=device)
    for number, weights in enumerate(random_weights()):
        counts[1:] = number + 1
        padded[..., :WIDTH] = weights.to(device)
        text_path(padded, texts, counts, kernel, ours)
        text_path_reference(weights.to(device), texts, counts, operators, reference[:3])
        slots, frames = SLOTS.numpy(), counts.cpu().numpy()[SLOTS.numpy()] - 1
        expected = extend_paths(weights.numpy(), LENGTHS.numpy(), slots, frames, known)
        for row in (0, 2):
            end = 1 + int(LENGTHS[row])
            for found in (ours, reference):
                assert found[:, row].flatten()[:end].tolist() == expected[row, :end].tolist()
    assert (kernel[1, :, :100] - operators[1, :, :100]).abs().max() <= 2 * FRAMES  # rounded logarithms
    assert kernel[0].eq(0).all()


def test_a_frame_that_is_repeated_gives_the_same_path() -> None:
    """After a preemption the device generates a frame again that it has counted already."""
    weights = random_weights()[:, 2:].numpy()
    scores, slot, length = new_scores(1), np.zeros(1, np.int64), np.array([100])
    once = [extend_paths(each, length, slot, slot + number, scores) for number, each in enumerate(weights)]
    repeated = [extend_paths(weights[number], length, slot, slot + number, scores) for number in (5, 6)]
    assert all(np.array_equal(one, other) for one, other in zip(once[5:], repeated, strict=True))
