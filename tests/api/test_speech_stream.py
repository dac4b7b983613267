import asyncio

import pytest

from shoal.api.exceptions import SlowReader
from shoal.api.speech_stream import ByteBuffer


def test_pieces_are_read_in_the_order_they_were_written() -> None:
    async def run() -> list[bytes]:
        buffer = ByteBuffer(100, "end")

        async def write() -> None:
            for number in range(20):
                await buffer.put(bytes([number]))
                await asyncio.sleep(0)
            buffer.close()

        task = asyncio.create_task(write())
        await buffer.wait_for_data()
        pieces = [piece async for piece in buffer.read()]
        await task
        return pieces

    assert asyncio.run(run()) == [bytes([number]) for number in range(20)]


def test_a_full_buffer_fails_the_writer() -> None:
    async def run() -> None:
        buffer = ByteBuffer(10, "end")
        await buffer.put(b"12345678")
        with pytest.raises(SlowReader):
            await buffer.put(b"12345678")

    asyncio.run(run())


def test_a_full_buffer_pauses_the_writer_if_the_policy_says_so() -> None:
    async def run() -> list[bytes]:
        buffer = ByteBuffer(10, "pause")

        async def write() -> None:
            for _ in range(5):
                await buffer.put(b"12345678")
            buffer.close()

        task = asyncio.create_task(write())
        await asyncio.sleep(0.01)
        assert not task.done()
        return [piece async for piece in buffer.read()]

    assert asyncio.run(run()) == [b"12345678"] * 5


def test_an_error_is_raised_after_the_pieces_before_it() -> None:
    async def run() -> None:
        buffer = ByteBuffer(10, "end")
        await buffer.put(b"a")
        buffer.close(ValueError("broken"))
        await buffer.wait_for_data()
        reading = buffer.read()
        assert await anext(reading) == b"a"
        with pytest.raises(ValueError, match="broken"):
            await anext(reading)

    asyncio.run(run())
