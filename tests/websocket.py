"""WebSocket client of the tests: like `websockets.sync.client.connect`, patient with a server on a busy machine."""

from functools import partial

from websockets.sync.client import connect as default_connect

from tests.waiting import TIMEOUT_SECONDS

# By default a handshake has 10 seconds and the answer to a ping 20.
PATIENT = {"proxy": None, "open_timeout": TIMEOUT_SECONDS, "ping_timeout": None}
connect = partial(default_connect, **PATIENT)
