"""Registry of the comparison groups and the function that runs them."""

from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path

import torch

from shoal.errors import CheckpointError, InvalidRequest
from shoal.tools.verify import codec, model, text
from shoal.tools.verify.comparison import ParityComparison
from shoal.tools.verify.golden import Golden

Group = Callable[[Golden], Iterator[ParityComparison]]

GROUPS: dict[str, Group] = {
    "s1/tokenizer": partial(text.tokenizer, family="s1"),
    "s2/tokenizer": partial(text.tokenizer, family="s2"),
    "s1/prompts": text.s1_prompts,
    "s2/prompts": text.s2_prompts,
    "s2/batches": text.s2_batches,
    "s1/prefill": partial(model.prefill, family="s1"),
    "s2/prefill": partial(model.prefill, family="s2"),
    "s1/fast": partial(model.fast, family="s1"),
    "s2/fast": partial(model.fast, family="s2"),
    "s1/sampler": partial(model.sampler, family="s1"),
    "s2/sampler": partial(model.sampler, family="s2"),
    "s2/legal": model.candidate_ids,
    "s1/decode": partial(model.decode, family="s1"),
    "s2/decode": partial(model.decode, family="s2"),
    "s1/noise": partial(model.decode_with_noise, family="s1"),
    "s2/noise": partial(model.decode_with_noise, family="s2"),
    "s2/ras": model.repetition,
    "codec/decode": codec.decode,
    "codec/prefixes": codec.prefixes,
    "codec/clamp": codec.out_of_range,
    "codec/streaming": codec.streaming,
    "codec/encode": codec.encode,
    "codec/short": codec.short_recordings,
    "quant/int8": model.int8,
    "quant/int4": model.int4,
}


def verify(
    directory: Path,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    only: Collection[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> list[ParityComparison]:
    """Run the comparisons stored in `directory`; `progress` is called with the name of each group before it runs.

    `only` selects groups (`s1/prefill`) or families of groups (`codec`). The tolerances are those of fp32, whatever
    the dtype. Raises InvalidRequest for a directory or group that does not exist, and CheckpointError with the name of
    the file for one that is missing or invalid.
    """
    if not directory.is_dir():
        raise InvalidRequest(f"{directory}: no such directory; give a directory laid out like tests/golden")
    golden, done = Golden(directory, device, dtype), []
    for name in select_groups(only):
        if progress is not None:
            progress(name)
        done += _compare(name, golden)
    return done


def select_groups(only: Collection[str] | None) -> list[str]:
    unknown = sorted(name for name in only or () if not any(_belongs(group, name) for group in GROUPS))
    if unknown:
        raise InvalidRequest(f"no group is called {', '.join(unknown)}; the groups are {', '.join(GROUPS)}")
    return [group for group in GROUPS if only is None or any(_belongs(group, name) for name in only)]


def _belongs(group: str, name: str) -> bool:
    return name in (group, group.partition("/")[0])


def _compare(name: str, golden: Golden) -> list[ParityComparison]:
    """Run one group. Raises CheckpointError for an empty group, which would pass without comparing anything."""
    try:
        # cuDNN uses TF32 for convolutions by default, whose rounding exceeds the tolerances.
        with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            comparisons = list(GROUPS[name](golden))
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as problem:
        reason = f"{type(problem).__name__}: {problem}"
        raise CheckpointError(f"{golden.directory}: the files of {name} are inconsistent: {reason}") from problem
    if not comparisons:
        raise CheckpointError(f"{golden.directory}: nothing to compare for {name}")
    return comparisons
