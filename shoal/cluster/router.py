"""Ray Serve request router that applies a routing strategy."""

import asyncio
from collections import Counter
from typing import Any
from weakref import WeakKeyDictionary

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from shoal.cluster.routing import Candidate, Strategy, make_strategy, voice_key
from shoal.speech import SpeechRequest


class StrategyRouter(RequestRouter):  # type: ignore[misc]  # Ray's classes are not followed
    """Request router of one deployment handle.

    It counts its own requests from the moment a replica is chosen, so that simultaneous requests see each other. With
    several frontends, Ray reports the load of the others with a delay, and the higher of the two counts is the better
    estimate. With one frontend its own count is exact; Ray's also includes statistics calls that were running when a
    replica last reported.
    """

    def initialize_state(self, strategy: str, slots: int, frontends: int) -> None:
        self._strategy: Strategy = make_strategy(strategy)
        self._slots, self._frontends = slots, frontends
        # First choice per attempt to send a request. The keys are weak: an attempt that is cancelled, or that the
        # replica refuses, ends without a call of `on_request_routed`, and Ray drops its future.
        self._chosen: WeakKeyDictionary[asyncio.Future[Any], ReplicaID] = WeakKeyDictionary()
        self._accepted: Counter[ReplicaID] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = self._loads()
        candidates = [self._candidate(replica.replica_id, loads) for replica in candidate_replicas]
        chosen = [by_id[each.id] for each in self._strategy.order(_voice(pending_request), candidates)]
        if chosen and pending_request is not None:
            self._chosen[pending_request.future] = chosen[0].replica_id
        # One replica per rank: Ray takes the first with free capacity.
        return [[replica] for replica in chosen]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Count a request that a replica has accepted until its result is complete.

        `on_request_completed` is not used: Ray calls it before this method if a short request ends before the router
        has read that it was accepted, and with the same id for all calls of one HTTP request.
        """
        self._chosen.pop(pending_request.future, None)
        self._accepted[replica_id] += 1
        loop = asyncio.get_running_loop()
        # The callback runs in a thread of Ray, or here if the result is already complete.
        result.add_done_callback(lambda _: loop.call_soon_threadsafe(self._release, replica_id))

    def _release(self, replica_id: ReplicaID) -> None:
        self._accepted -= Counter([replica_id])  # also drops zeros, so that replaced replicas do not accumulate

    def _loads(self) -> Counter[ReplicaID]:
        # The future of a cancelled attempt may live until the next garbage collection.
        return self._accepted + Counter(id for attempt, id in self._chosen.items() if not attempt.cancelled())

    def _candidate(self, id: ReplicaID, loads: Counter[ReplicaID]) -> Candidate:
        reported = 0 if self._frontends == 1 else self.replica_queue_len_cache.get(id) or 0
        return Candidate(id.unique_id, max(loads[id], reported), self._slots)


def _voice(pending: PendingRequest | None) -> str | None:
    speeches = [each for each in pending.args if isinstance(each, SpeechRequest)] if pending else []
    return voice_key(speeches[0]) if speeches else None
