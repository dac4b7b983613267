"""Ray Serve request router that applies a routing strategy."""

from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from shoal.cluster.routing import Candidate, Strategy, make_strategy, voice_key
from shoal.speech import SpeechRequest


class StrategyRouter(RequestRouter):  # type: ignore[misc]  # Ray's classes are not followed
    """Request router of one deployment handle.

    It counts its own requests from the moment of the choice, so that simultaneous requests see each other. With
    several frontends the load from the others arrives from Ray with a delay; the higher of the two counts is the better
    estimate. With one frontend its own count is exact, and Ray's is not: it includes calls for statistics that were
    running when a replica last reported.
    """

    def initialize_state(self, strategy: str, slots: int, frontends: int) -> None:
        self._strategy: Strategy = make_strategy(strategy)
        self._slots, self._frontends = slots, frontends
        self._in_flight: dict[str, tuple[ReplicaID, PendingRequest]] = {}  # by Ray's request id

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = self._loads()
        candidates = [self._candidate(replica.replica_id, loads) for replica in candidate_replicas]
        chosen = [by_id[each.id] for each in self._strategy.order(_voice(pending_request), candidates)]
        if chosen and pending_request is not None:
            self.on_request_routed(pending_request, chosen[0].replica_id, None)
        # One replica per rank: Ray takes the first with free capacity.
        return [[replica] for replica in chosen]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._in_flight[pending_request.metadata.internal_request_id] = (replica_id, pending_request)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._in_flight.pop(internal_request_id, None)

    def _loads(self) -> Counter[ReplicaID]:
        # Ray sends no completion for a request that was cancelled before it was sent.
        cancelled = [id for id, (_, pending) in self._in_flight.items() if pending.future.cancelled()]
        for id in cancelled:
            del self._in_flight[id]
        return Counter(replica for replica, _ in self._in_flight.values())

    def _candidate(self, id: ReplicaID, loads: Counter[ReplicaID]) -> Candidate:
        reported = 0 if self._frontends == 1 else self.replica_queue_len_cache.get(id) or 0
        return Candidate(id.unique_id, max(loads[id], reported), self._slots)


def _voice(pending: PendingRequest | None) -> str | None:
    speeches = [each for each in pending.args if isinstance(each, SpeechRequest)] if pending else []
    return voice_key(speeches[0]) if speeches else None
