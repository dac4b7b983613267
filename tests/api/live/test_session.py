import asyncio

from shoal.api.live.session import IdleTimer


def test_messages_that_have_arrived_do_not_keep_the_event_loop_from_others() -> None:
    """One client sends many small messages at once; every other connection gets its turn between them."""
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def receive_all() -> None:
        timer, others = IdleTimer(60.0), asyncio.create_task(other())
        for _ in range(50):
            async with timer.limit():
                pass  # the next message is there
        others.cancel()

    asyncio.run(receive_all())
    assert turns >= 49
