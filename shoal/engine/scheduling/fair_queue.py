"""Queue of the sequences that wait for a slot: preempted ones first, then round robin over the clients."""

from collections import OrderedDict, deque
from collections.abc import Iterator

from shoal.engine.scheduling.sequence import Sequence


class FairQueue:
    """A client with many waiting sequences delays another client's sequence by one turn, not by all of them.

    Sequences of one client start in order of arrival. Without client names this is a FIFO queue.
    """

    def __init__(self) -> None:
        self._preempted: deque[Sequence] = deque()
        self._by_client: OrderedDict[str, deque[Sequence]] = OrderedDict()  # the next client first; none is empty

    def __len__(self) -> int:
        return len(self._preempted) + sum(map(len, self._by_client.values()))

    def __bool__(self) -> bool:
        return bool(self._preempted or self._by_client)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._preempted
        for sequences in self._by_client.values():
            yield from sequences

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._preempted or sequence in self._by_client.get(sequence.client, ())

    @property
    def first(self) -> Sequence:
        """Return the sequence that starts next. Raises StopIteration if the queue is empty."""
        return next(iter(self))

    def add(self, sequence: Sequence) -> None:
        self._by_client.setdefault(sequence.client, deque()).append(sequence)

    def add_preempted(self, sequence: Sequence) -> None:
        """Put a sequence that has run before in front of all others."""
        self._preempted.appendleft(sequence)

    def pop(self) -> Sequence:
        """Remove and return the first sequence; its client goes to the end of the round."""
        if self._preempted:
            return self._preempted.popleft()
        sequence = self.first
        self.remove(sequence)
        if sequence.client in self._by_client:
            self._by_client.move_to_end(sequence.client)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence. Raises KeyError or ValueError if it is not in the queue."""
        if sequence in self._preempted:
            self._preempted.remove(sequence)
            return
        waiting = self._by_client[sequence.client]
        waiting.remove(sequence)
        if not waiting:
            del self._by_client[sequence.client]
