"""Check that this machine supports the configured device and weights, before the server listens or loads a model.

The check needs torch, which the server process must not import, so a short-lived child process runs it.
"""

import multiprocessing
import signal
from multiprocessing.connection import Connection

from shoal.engine.process.worker import EngineSource
from shoal.errors import InvalidRequest


def check_device(source: EngineSource) -> None:
    """Raise InvalidRequest for a device this machine does not have, or weights the device does not support."""
    device, quantize = source.device, source.config.quantize
    if device in ("auto", "cpu") and quantize in ("auto", "none"):
        return  # every machine supports these
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_check, args=(sender, device, quantize), name="shoal-preflight", daemon=True)
    process.start()
    sender.close()
    try:
        problem = receiver.recv()
    except EOFError:
        problem = None  # the check itself crashed; the engine process will report the cause
    process.join()
    if problem is not None:
        raise problem


def _check(sender: Connection, device: str, quantize: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server handles Ctrl-C
    import torch

    from shoal.engine.load import choose_device
    from shoal.quantize.policy import check_requested

    try:
        check_requested(quantize, torch.device(choose_device(device)))
        sender.send(None)
    except InvalidRequest as problem:
        sender.send(problem)
