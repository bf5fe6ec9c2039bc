"""A model hub on loopback: serves one directory as a repository, with the requests that huggingface_hub makes."""

import contextlib
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """Answers for `repo`, whose files are in `folder`. cut: bytes after which a download breaks off, once."""

    repo, folder, cut = "", None, None

    def do_HEAD(self):
        self._answer(body=False)

    def do_GET(self):
        self._answer(body=True)

    def log_message(self, *_):
        pass

    def _answer(self, *, body):
        path = unquote(urlsplit(self.path).path).strip("/")
        files = {file.name: file for file in self.folder.iterdir()}
        if path in (
            f"api/models/{self.repo}",
            f"api/models/{self.repo}/revision/{COMMIT}",
            f"api/models/{self.repo}/revision/main",
        ):
            siblings = [{"rfilename": name, "size": file.stat().st_size} for name, file in files.items()]
            self._json({"id": self.repo, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False})
        elif path.startswith(f"api/models/{self.repo}/tree/"):
            self._json(
                [
                    {"type": "file", "path": name, "size": file.stat().st_size, "oid": name}
                    for name, file in files.items()
                ]
            )
        elif (name := path.removeprefix(f"{self.repo}/resolve/").partition("/")[2]) in files:
            self._file(files[name], body=body)
        else:
            self.send_response(404)
            self.send_header("content-length", "0")
            self.end_headers()

    def _json(self, value):
        text = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _file(self, file, *, body):
        data = file.read_bytes()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", ""))
        begin = int(wanted[1]) if wanted else 0
        end = min(len(data), int(wanted[2]) + 1) if wanted and wanted[2] else len(data)
        self.send_response(206 if wanted else 200)
        self.send_header("etag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("x-repo-commit", COMMIT)
        self.send_header("accept-ranges", "bytes")
        if wanted:
            self.send_header("content-range", f"bytes {begin}-{end - 1}/{len(data)}")
        self.send_header("content-length", str(end - begin))
        self.end_headers()
        if body and file.suffix == ".safetensors" and type(self).cut is not None and end - begin > type(self).cut:
            end, type(self).cut = begin + type(self).cut, None
        if body:
            self.wfile.write(data[begin:end])


@contextlib.contextmanager
def served_hub(folder, repo, cut=None):
    """Serve a directory as a repository; yield the endpoint."""
    handler = type("Handler", (Hub,), {"repo": repo, "folder": folder, "cut": cut})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
