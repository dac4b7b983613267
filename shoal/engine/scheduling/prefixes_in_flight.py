"""Prompt blocks that a planned step computes and that are not in the prefix cache yet.

Requests that arrive together often start with the same prompt: the same voice, or the model's fixed instructions. Only
the first of them computes it; the others refer to its blocks. That is safe before the step has ended, because the
device runs steps in order, and within a step every layer writes the keys and values of all tokens before it reads any.
If a step fails, all sequences that it or a later step has run are recomputed.
"""

from dataclasses import dataclass, field

from shoal.engine.scheduling.blocks import Key
from shoal.engine.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class BlockInFlight:
    """A full block of a prompt that `sequence` computes; valid as long as its epoch is the same."""

    block: int
    index: int  # position of the block in the sequence
    sequence: Sequence
    epoch: int
    plan: int  # number of the plan that computes its last token

    @property
    def valid(self) -> bool:
        return self.sequence.epoch == self.epoch


@dataclass(slots=True)
class PrefixesInFlight:
    """Finds blocks in flight by key, and the sequences that refer to blocks of a sequence that was preempted."""

    plan: int = 0
    _blocks: dict[Key, BlockInFlight] = field(default_factory=dict)
    _borrowed: list[tuple[Sequence, BlockInFlight]] = field(default_factory=list)  # borrower and block, current plan

    def begin_plan(self) -> None:
        """Drop blocks that are in the prefix cache by now, and those of sequences that were cancelled or preempted."""
        self.plan += 1
        self._borrowed.clear()
        self._blocks = {
            key: each for key, each in self._blocks.items() if each.valid and each.index >= each.sequence.sealed
        }

    def add(self, sequence: Sequence, start: int, end: int, size: int) -> None:
        """Note the blocks of `size` tokens that are full when the current plan has computed the tokens [start, end).

        The last token of a prompt does not count: backends compute it after the prompts of the step, with the frames.
        """
        for index in range(start // size, min(end, sequence.length - 1) // size):
            block = BlockInFlight(sequence.blocks[index], index, sequence, sequence.epoch, self.plan)
            self._blocks.setdefault(sequence.keys[index], block)

    def borrow(self, key: Key, sequence: Sequence) -> int | None:
        """Return the block in flight with this key for another sequence; None if there is none."""
        found = self._blocks.get(key)
        if found is None or not found.valid:
            return None
        if found.plan == self.plan:
            self._borrowed.append((sequence, found))
        return found.block

    def invalid_borrowers(self) -> list[Sequence]:
        """Return the sequences that borrowed, in this plan, blocks of a sequence that was preempted since.

        They have to be preempted as well, which may invalidate blocks that others borrowed: call this again.
        """
        return [sequence for sequence, block in self._borrowed if not block.valid and sequence.blocks]
