"""Fake Hugging Face hub on loopback with the routes that a download uses; it can be configured to fail."""

import hashlib
import json
import re
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "reef/tiny"


@dataclass
class FakeHub:
    """`files` of one repository. `cut` drops the connection after this many bytes of a file, `cuts_left` times."""

    files: dict[str, bytes]
    repository: str = REPOSITORY
    gated: bool = False
    cut: dict[str, int] = field(default_factory=dict)
    cuts_left: int = 1000
    requests: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, Range
    address: str = ""

    def fetched(self) -> set[str]:
        return {path.rpartition("/")[2] for method, path, _ in self.requests if method == "GET" and "/resolve/" in path}

    def ranges(self, name: str) -> list[str]:
        return [range_ for method, path, range_ in self.requests if method == "GET" and path.endswith(f"/{name}")]


class HubRequestHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        self.hub.requests.append((self.command, path, self.headers.get("Range", "")))
        if self.hub.gated:
            self.refuse(403, "GatedRepo")
        elif f"/{self.hub.repository}/" not in f"{path}/":
            self.refuse(404, "RepoNotFound")
        elif file := re.fullmatch(rf"/{self.hub.repository}/resolve/[^/]+/(.+)", path):
            self.send_file(file[1], body)
        elif "/revision/" in path and not path.endswith(("/main", COMMIT)):
            self.refuse(404, "RevisionNotFound")
        elif "/tree/" in path:
            tree = [{"type": "file", "path": n, "size": len(b), "oid": etag(b)} for n, b in self.hub.files.items()]
            self.send_json(tree)
        else:
            siblings = [{"rfilename": n, "size": len(b)} for n, b in self.hub.files.items()]
            self.send_json({"id": self.hub.repository, "sha": COMMIT, "siblings": siblings})

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send_json(self, document: object) -> None:
        content = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def send_file(self, name: str, body: bool) -> None:
        content = self.hub.files[name]
        start = int((re.match(r"bytes=(\d+)", self.headers.get("Range", "")) or ["", "0"])[1])
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{etag(content)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if not body:
            return
        cut = self.hub.cut.get(name) if self.hub.cuts_left else None
        self.wfile.write(content[start:cut])
        if cut is not None:
            self.hub.cuts_left -= 1
            self.close_connection = True


def etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
