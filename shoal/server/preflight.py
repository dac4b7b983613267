"""Can this machine do what the settings ask for? Told before anything listens or is loaded.

Only torch knows, and a server does without it; so a process of its own looks, and ends.
"""

import multiprocessing
import signal
from multiprocessing.connection import Connection

from shoal.engine.process.worker import EngineSource
from shoal.errors import InvalidRequest


def check_machine(source: EngineSource) -> None:
    """Raises InvalidRequest for a device that is not here, or weights that it cannot compute with."""
    wish = source.device, source.config.quantize
    if wish[0] in ("auto", "cpu") and wish[1] in ("auto", "none"):
        return  # any machine can
    context = multiprocessing.get_context("spawn")
    answer, told = context.Pipe(duplex=False)
    process = context.Process(target=_look, args=(told, *wish), name="shoal-look", daemon=True)
    process.start()
    told.close()
    try:
        problem = answer.recv()
    except EOFError:
        problem = None  # it did not come so far; what keeps it from that, the engine will tell
    process.join()
    if problem is not None:
        raise problem


def _look(told: Connection, device: str, quantize: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the server's to answer
    import torch

    from shoal.engine.load import choose_device
    from shoal.quantize.policy import check_requested

    try:
        check_requested(quantize, torch.device(choose_device(device)))
        told.send(None)
    except InvalidRequest as problem:
        told.send(problem)
