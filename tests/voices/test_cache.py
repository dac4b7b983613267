import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from shoal.errors import AudioError, EngineStopped, InvalidRequest, TextError, VoiceNotFound
from shoal.text.prompt import tagged_transcripts
from shoal.voices.cache import DialogueSource, VoiceCache
from shoal.voices.encoder import CodecEncoder
from shoal.voices.store import VoiceStore
from tests.waiting import wait_until


@pytest.fixture
def cache(store, encoder) -> Iterator[VoiceCache]:
    with VoiceCache(store, encoder) as made:
        yield made
        encoder.gate.set()


# What is remembered


def test_a_recording_is_encoded_once(cache, encoder, wav):
    first = cache.resolve_blocking([(wav(), "hi")])
    assert cache.resolve_blocking([(wav(), "hi")]) is first
    assert encoder.encoded == 1
    assert (cache.statistics.hits, cache.statistics.misses, cache.statistics.entries) == (1, 1, 1)


def test_a_recording_is_known_by_its_bytes_and_its_transcript(cache, wav):
    said = [cache.resolve_blocking([clip]) for clip in ((wav(), "hi"), (wav(), "ho"), (wav(pitch=330), "hi"))]
    assert [voice.references[0].text for voice in said] == ["hi", "ho", "hi"]
    assert cache.statistics.misses == 3
    assert len({voice.key for voice in said}) == 3


def test_recordings_in_another_order_are_another_voice(cache, wav):
    one, two = (wav(), "one"), (wav(2.0), "two")
    assert cache.resolve_blocking([one, two]).key != cache.resolve_blocking([two, one]).key


def test_a_path_is_keyed_by_the_content_of_its_file(cache, wav, tmp_path):
    (tmp_path / "a.wav").write_bytes(wav())
    assert cache.resolve_blocking([(tmp_path / "a.wav", "hi")]) is cache.resolve_blocking([(wav(), "hi")])


def test_a_stored_voice_is_loaded_once(cache, store, encoder, wav):
    store.add("anna", wav(), "hi")
    first = cache.resolve_blocking("anna")
    assert cache.resolve_blocking("anna") is first
    assert first.name == "anna"
    assert (cache.statistics.hits, cache.statistics.misses, encoder.encoded) == (1, 1, 1)


def test_stored_codes_are_not_encoded_again(store, encoder, wav):
    store.add("anna", wav(), "hi")
    for _ in range(2):
        with VoiceCache(store, encoder) as cache:
            cache.resolve_blocking("anna")
    assert encoder.encoded == 1


def test_changes_on_disk_are_noticed(cache, store, wav):
    store.add("anna", wav(), "old")
    assert cache.resolve_blocking("anna").references[0].text == "old"
    store.rename("anna", "bell")
    with pytest.raises(VoiceNotFound):
        cache.resolve_blocking("anna")
    assert cache.resolve_blocking("bell").references[0].text == "old"
    store.add("anna", wav(), "new")
    assert cache.resolve_blocking("anna").references[0].text == "new"


def test_a_dialogue_has_the_voices_of_its_speakers(cache, store, encoder, wav):
    store.add("anna", wav(), "hi")
    cache.resolve_blocking("anna")
    both = cache.resolve_blocking(DialogueSource(("anna", [(wav(pitch=330), "ho"), (wav(2.0), "hu")])))
    assert [(each.text, each.speaker) for each in both.references] == [("hi", 0), ("ho", 1), ("hu", 1)]
    assert encoder.encoded == 3, "anna's recording was encoded before"
    assert cache.resolve_blocking(DialogueSource(("anna", [(wav(pitch=330), "ho"), (wav(2.0), "hu")]))) is both
    assert cache.resolve_blocking([(wav(pitch=330), "ho"), (wav(2.0), "hu")]).references[0].speaker is None
    assert encoder.encoded == 3, "the second speaker is cached too"
    assert tagged_transcripts(both.references) == "<|speaker:0|>hi\n<|speaker:1|>ho\n<|speaker:1|>hu"
    with pytest.raises(VoiceNotFound):
        cache.resolve_blocking(DialogueSource(("anna", "nobody")))


def test_the_least_recently_used_voice_is_evicted_first(store, encoder, wav):
    clips = {name: [(wav(), name)] for name in "abc"}
    with VoiceCache(store, encoder, entries=2) as cache:
        for name in ("a", "b", "a", "c", "a", "b"):
            cache.resolve_blocking(clips[name])
        statistics = cache.statistics
    assert (statistics.entries, statistics.evictions, statistics.hits, encoder.encoded) == (2, 2, 2, 4)


def test_statistics_count_the_encoded_seconds(cache, wav):
    cache.resolve_blocking([(wav(1.5), "a"), (wav(0.5), "b")])
    assert (cache.statistics.encodes, cache.statistics.seconds_encoded) == (2, 2.0)


def test_the_cache_works_with_the_real_codec(store, tiny, wav):
    encoder = CodecEncoder(tiny.codec)
    store.add("anna", wav(), "hi")
    with VoiceCache(store, encoder) as cache:
        assert cache.resolve_blocking("anna").key == cache.resolve_blocking([(wav(), "hi")]).key


# One encoding for all who ask


def test_the_same_recording_asked_for_at_once_is_encoded_once(store, encoder, wav):
    encoder.gate.clear()
    with VoiceCache(store, encoder, threads=4) as cache, ThreadPoolExecutor(8) as askers:
        asked = [askers.submit(cache.resolve_blocking, [(wav(), "hi")]) for _ in range(8)]
        wait_until(lambda: cache.statistics.joins == 7)
        encoder.gate.set()
        voices = {id(each.result()) for each in asked}
    assert len(voices) == encoder.encoded == 1


def test_tasks_of_one_loop_share_an_encoding_too(cache, encoder, wav):
    async def ask() -> None:
        voices = await asyncio.gather(*(cache.resolve([(wav(), "hi")]) for _ in range(5)))
        assert len({id(voice) for voice in voices}) == 1

    asyncio.run(ask())
    assert encoder.encoded == 1


def test_encoding_runs_in_threads_of_the_cache(store, encoder, wav):
    async def ask(cache: VoiceCache) -> None:
        await asyncio.gather(*(cache.resolve([(wav(), f"number {n}")]) for n in range(6)))

    with VoiceCache(store, encoder, threads=2) as cache:
        asyncio.run(ask(cache))
    assert len(encoder.threads) <= 2
    assert all(name.startswith("shoal-voices") for name in encoder.threads)


def test_one_thread_encodes_unless_more_are_asked_for(cache, encoder, wav):
    with ThreadPoolExecutor(4) as askers:
        list(askers.map(cache.resolve_blocking, [[(wav(), f"number {n}")] for n in range(8)]))
    assert len(encoder.threads) == 1


def test_neither_the_loop_nor_a_known_voice_waits_for_an_encoding(cache, encoder, wav):
    known = [(wav(), "known")]

    async def ask() -> None:
        await cache.resolve(known)
        encoder.gate.clear()
        slow = asyncio.create_task(cache.resolve([(wav(), "slow")]))
        for _ in range(20):
            assert await asyncio.wait_for(cache.resolve(known), 240)
        assert not slow.done()
        encoder.gate.set()
        assert (await slow).frames == 10

    asyncio.run(ask())


# Failing and cancelling


@pytest.mark.parametrize(
    ("wanted", "error"),
    [
        ("nobody", VoiceNotFound),
        ("../anna", InvalidRequest),
        ([], InvalidRequest),
        ([(b"\0junk" * 9, "hi")], AudioError),
        ([(b"", " ")], TextError),
    ],
)
def test_both_variants_raise_the_same_errors(cache, wanted, error):
    with pytest.raises(error):
        cache.resolve_blocking(wanted)
    with pytest.raises(error):
        asyncio.run(cache.resolve(wanted))


def test_a_failed_encoding_is_raised_to_all_callers_and_retried(cache, encoder, wav):
    encoder.error = RuntimeError("out of memory")
    encoder.gate.clear()
    with ThreadPoolExecutor(3) as askers:
        asked = [askers.submit(cache.resolve_blocking, [(wav(), "hi")]) for _ in range(3)]
        wait_until(lambda: cache.statistics.joins == 2)
        encoder.gate.set()
        assert [str(each.exception()) for each in asked] == ["out of memory"] * 3
    assert (cache.statistics.entries, cache.statistics.failures) == (0, 1)
    encoder.error = None
    assert cache.resolve_blocking([(wav(), "hi")]).frames == 10


def test_a_cancelled_caller_does_not_affect_the_others(cache, encoder, wav):
    async def ask() -> None:
        encoder.gate.clear()
        cancelled, other = (asyncio.create_task(cache.resolve([(wav(), "hi")])) for _ in range(2))
        while cache.statistics.joins == 0:
            await asyncio.sleep(0.002)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        encoder.gate.set()
        assert (await other).frames == 10
        assert cancelled.cancelled()

    asyncio.run(ask())


def test_an_encoding_without_callers_is_cancelled(cache, encoder, wav):
    async def ask() -> None:
        encoder.gate.clear()
        first = asyncio.create_task(cache.resolve([(wav(), "first")]))
        while not encoder.threads:
            await asyncio.sleep(0.002)
        left = [asyncio.create_task(cache.resolve([(wav(), "left")])) for _ in range(3)]
        while cache.statistics.joins < 2:
            await asyncio.sleep(0.002)
        for task in left:
            task.cancel()
        await asyncio.wait(left)
        encoder.gate.set()
        await first

    asyncio.run(ask())
    assert (encoder.encoded, cache.statistics.failures) == (1, 0)
    assert cache.resolve_blocking([(wav(), "left")]).frames == 10


def test_an_event_loop_closed_during_an_encoding_logs_no_error(cache, encoder, wav, caplog):
    async def cancel_early() -> None:
        task = asyncio.create_task(cache.resolve([(wav(), "hi")]))
        while not encoder.threads:
            await asyncio.sleep(0.002)
        task.cancel()

    encoder.gate.clear()
    asyncio.run(cancel_early())
    encoder.gate.set()
    assert cache.resolve_blocking([(wav(), "hi")]).frames == 10
    assert caplog.records == []


# Closing


def test_close_stops_the_threads_and_answers_all_callers(store, encoder, wav):
    before = set(threading.enumerate())
    encoder.gate.clear()
    cache = VoiceCache(store, encoder)
    with ThreadPoolExecutor(4) as askers:
        running = askers.submit(cache.resolve_blocking, [(wav(), "running")])
        wait_until(lambda: bool(encoder.threads))
        queued = [askers.submit(cache.resolve_blocking, [(wav(), f"number {n}")]) for n in range(2)]
        wait_until(lambda: cache.statistics.misses == 3)
        closing = askers.submit(cache.close)
        encoder.gate.set()
        closing.result()
        assert running.result().frames == 10
        assert all(isinstance(each.exception(), EngineStopped) for each in queued)
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("shoal-")]
    for ask in (lambda: cache.resolve_blocking([(wav(), "running")]), lambda: cache.warm(["anna"])):
        with pytest.raises(EngineStopped, match="closed"):
            ask()
    cache.close()


# VoicePreload


def add_voices(store: VoiceStore, wav, count: int) -> list[str]:
    names = [f"voice {number}" for number in range(count)]
    for name in names:
        store.add(name, wav(0.2), name)
    return names


def test_a_warm_cache_answers_from_memory(cache, store, wav):
    names = add_voices(store, wav, 5)
    warming = cache.warm(names)
    assert warming.wait(240)
    assert (warming.total, warming.loaded, warming.failed) == (5, 5, 0)
    for name in names:
        cache.resolve_blocking(name)
    assert cache.statistics.hits == 5


def test_preloading_continues_past_a_broken_voice(cache, store, directory, encoder, wav, caplog):
    names = add_voices(store, wav, 3)
    (directory / names[1] / "sample.lab").unlink()
    warming = cache.warm([*names, "nobody"])
    assert warming.wait(240)
    assert (warming.loaded, warming.failed) == (2, 2)
    assert "sample.lab" in caplog.text
    encoder.error = RuntimeError("out of memory")
    (directory / names[1] / "sample.lab").write_text("mended")
    again = cache.warm([names[1]])
    assert again.wait(240)
    assert again.failed == 1


def test_requests_overtake_the_preload(cache, store, encoder, wav):
    names = add_voices(store, wav, 10)
    encoder.gate.clear()
    warming = cache.warm(names)
    wait_until(lambda: bool(encoder.threads))
    with ThreadPoolExecutor(1) as asker:
        asked = asker.submit(cache.resolve_blocking, [(wav(), "now")])
        wait_until(lambda: cache.statistics.misses == 2)
        asked.add_done_callback(lambda _: seen.append(warming.loaded))
        seen: list[int] = []
        encoder.gate.set()
        asked.result()
    assert warming.wait(240)
    assert seen[0] <= 2


def test_a_preload_can_be_stopped(cache, store, encoder, wav):
    names = add_voices(store, wav, 10)
    encoder.gate.clear()
    warming = cache.warm(names)
    wait_until(lambda: bool(encoder.threads))
    assert not warming.finished
    warming.stop()
    encoder.gate.set()
    assert warming.wait(240)
    assert warming.loaded == 1


def test_close_stops_the_preload(store, encoder, wav):
    names = add_voices(store, wav, 10)
    cache = VoiceCache(store, encoder)
    warming = cache.warm(names)
    cache.close()
    assert warming.finished


def test_a_preload_is_limited_to_the_cache_size(store, encoder, wav):
    names = add_voices(store, wav, 4)
    with VoiceCache(store, encoder, entries=2) as cache:
        warming = cache.warm(names)
        assert warming.wait(240)
        assert (warming.total, cache.statistics.evictions) == (2, 0)


# Everything at once


def test_many_threads_get_the_requested_voices(store, encoder, wav):
    clips = [[(wav(0.1 * length), f"number {length}")] for length in range(1, 13)]
    random = np.random.default_rng(0)
    asked = random.integers(0, len(clips), 400)
    with VoiceCache(store, encoder, entries=5, threads=3) as cache, ThreadPoolExecutor(8) as askers:
        voices = list(askers.map(lambda place: cache.resolve_blocking(clips[place]), asked))
        statistics = cache.statistics
    assert [voice.references[0].text for voice in voices] == [clips[place][0][1] for place in asked]
    assert [voice.frames for voice in voices] == [place + 1 for place in asked]
    assert statistics.hits + statistics.joins + statistics.misses == 400
    assert statistics.misses == statistics.encodes == statistics.entries + statistics.evictions
    assert statistics.entries == 5
