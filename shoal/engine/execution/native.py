"""The native backend: a whole step on the CPU in one call of the native library."""

import torch

from shoal.engine.execution.attention_reader import PathReader
from shoal.engine.execution.native_steps import NativeSteps
from shoal.engine.execution.runner import EagerRunner, PendingStep
from shoal.engine.scheduling.scheduler import Batch
from shoal.kernels.sampling.sample_token import SamplingState
from shoal.model.slow import Head
from shoal.native.choice import open_context
from shoal.native.dual_ar import NativeDualAR, SlotArrays
from shoal.native.library import NativeUnavailable
from shoal.native.modules import model_arrays


class NativeRunner:
    """Runs steps through the native library, over the KV cache and the slot states of the eager runner."""

    def __init__(self, eager: EagerRunner, head: Head, *, isa: str = "auto") -> None:
        """Pack the model. Raises NativeUnavailable if the library cannot be built or does not support this model."""
        arrays = model_arrays(eager.model, head)
        self.context = open_context(isa, torch.get_num_threads(), int8_activations=arrays.int8_activations)
        model = NativeDualAR(arrays, self.context)
        keys, values = eager.kv.keys, eager.kv.values
        if keys.dtype != torch.float32:
            raise NativeUnavailable(f"the KV cache is {keys.dtype}: float32 is supported")
        slots, reader = slot_arrays(eager.slots.memory), eager.attention_reader
        # None: the weights are recorded. The scores are those of the eager runner, so that either continues the other.
        scores = reader.scores.numpy() if isinstance(reader, PathReader) else None
        self.steps = NativeSteps(model, keys.numpy(), values.numpy(), eager.tables, slots, reader.heads, scores)

    def launch(self, batch: Batch) -> PendingStep:
        return PendingStep(batch, output=self.steps.run(batch))


def slot_arrays(state: SamplingState) -> SlotArrays:
    """Return the slot states of the eager runner as arrays that share their memory."""
    return SlotArrays(**{name: getattr(state, name).numpy() for name in SlotArrays.__dataclass_fields__})
