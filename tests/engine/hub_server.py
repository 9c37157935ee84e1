"""A local HTTP server that speaks what huggingface_hub's `snapshot_download` asks of a hub."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves the files of `folder` as `org/tiny`; `org/gated` and all others are refused as the hub refuses them."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        self.requests: list[str] = []  # "METHOD path"
        self.broken = False  # answers 500

    def fetched(self) -> set[str]:
        """The files that were downloaded."""
        return {line.rpartition("/")[2] for line in self.requests if line.startswith("GET") and "/resolve/" in line}


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, *, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        parts = path.removeprefix("/api/models").strip("/").split("/")
        if self.server.broken:
            self._send(500, b"", body)
        elif parts[:2] == ["org", "gated"]:
            self._send(403, b"{}", body, {"X-Error-Code": "GatedRepo"})
        elif parts[:2] != ["org", "tiny"]:
            self._send(401, b"{}", body, {"X-Error-Code": "RepoNotFound"})
        elif len(parts) < 4 or parts[3] not in ("main", "v1", COMMIT):
            self._send(404, b"{}", body, {"X-Error-Code": "RevisionNotFound"})
        elif parts[2] == "resolve":
            self._file("/".join(parts[4:]), body)
        else:
            self._send(200, json.dumps(self._listing(parts[2])).encode(), body, {"Content-Type": "application/json"})

    def _listing(self, kind: str) -> object:
        files = sorted(file for file in self.server.folder.rglob("*") if file.is_file())
        names = [file.relative_to(self.server.folder).as_posix() for file in files]
        if kind == "tree":
            return [
                {
                    "type": "file",
                    "path": name,
                    "size": file.stat().st_size,
                    "oid": hashlib.sha1(name.encode()).hexdigest(),
                }
                for name, file in zip(names, files, strict=True)
            ]
        return {"id": "org/tiny", "modelId": "org/tiny", "sha": COMMIT, "siblings": [{"rfilename": n} for n in names]}

    def _file(self, name: str, body: bool) -> None:
        content = (self.server.folder / name).read_bytes()
        etag = hashlib.sha256(content).hexdigest()
        self._send(200, content, body, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "none"})

    def _send(self, status: int, content: bytes, body: bool, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)


@contextmanager
def serve(folder: Path) -> Iterator[Hub]:
    """Runs the server in a thread."""
    with Hub(folder) as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
