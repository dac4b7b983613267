"""A real browser reads a stream, from our own origin and from others."""

import contextlib
import http.server
import threading
from collections.abc import Iterator

from tests.browser import chromium
from tests.server.conftest import Serving, Start

FETCH = """async (url) => {
  const body = JSON.stringify({text: "Hello there.", max_new_tokens: 40, seed: 3, streaming: true, format: "pcm"});
  const headers = {"Content-Type": "application/json"};
  try {
    const answer = await fetch(url + "/v1/tts", {method: "POST", body, headers});
    let bytes = 0;
    for (const reader = answer.body.getReader(); ;) {
      const {done, value} = await reader.read();
      if (done) break;
      bytes += value.length;
    }
    // A whole answer has a length. How many pieces a browser sees depends on how busy it is.
    return {bytes, streamed: !answer.headers.has("Content-Length"), seed: answer.headers.get("X-Seed")};
  } catch (error) {
    return error.name;
  }
}"""
FORM = """async (url) => {
  const body = new FormData();
  body.append("text", "Hello there.");
  return (await fetch(url + "/v1/tts", {method: "POST", body, mode: "no-cors"})).type;
}"""
SOCKET = """(url) => new Promise(done => {
  const socket = new WebSocket(url.replace("http", "ws") + "/v1/tts/live");
  socket.onopen = () => done("open");
  socket.onerror = () => done("refused");
})"""
HEARD = {"bytes": 40 * 640 * 2, "streamed": True, "seed": "3"}


@contextlib.contextmanager
def another_origin() -> Iterator[str]:
    """An empty page of another origin."""

    class Empty(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>Another</title>")

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Empty)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://localhost:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_fetch_reads_a_stream(server: Serving) -> None:
    with chromium() as browser:
        page = browser.new_page()
        page.goto(f"{server.url}/health")
        assert page.evaluate(FETCH, server.url) == HEARD


def test_a_page_of_another_origin_is_rejected(server: Serving) -> None:
    spoken = 'shoal_requests_total{api="fish",outcome="completed"}'
    with server.client() as client, another_origin() as elsewhere, chromium() as browser:
        page = browser.new_page()
        page.goto(elsewhere)
        before = [line for line in client.get("/metrics").text.splitlines() if line.startswith(spoken)]
        assert page.evaluate(FETCH, server.url) == "TypeError"
        assert page.evaluate(FORM, server.url) == "opaque"
        assert page.evaluate(SOCKET, server.url) == "refused"
        assert [line for line in client.get("/metrics").text.splitlines() if line.startswith(spoken)] == before


def test_a_page_named_in_cors_origins_is_accepted(start_server: Start) -> None:
    with another_origin() as elsewhere, chromium() as browser:
        serving = start_server(cors_origins=elsewhere)
        page = browser.new_page()
        page.goto(elsewhere)
        assert page.evaluate(FETCH, serving.url) == HEARD
        assert page.evaluate(SOCKET, serving.url) == "open"
