"""Google Cloud Storage in this process: the part of its JSON API that clients use."""

import json
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

PAGE = 3  # Objects in a page of a list; the real one gives 1,000.


@dataclass
class Bucket:
    """Objects by name: content and generation; `writes` counts those of each."""

    name: str
    is_closed: bool = False  # The account may do nothing here.
    objects: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    writes: Counter[str] = field(default_factory=Counter)
    on_put: Callable[[str], object] = field(default=lambda name: None)
    _generation: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def empty(self):
        self.objects.clear()
        self.writes.clear()
        self.on_put = lambda name: None

    def files(self, folder):
        """The content of the files that lie right in a folder, by name."""
        paths = [name for name in [*self.objects] if name.rpartition("/")[0] == folder]
        return {name.rpartition("/")[2]: self.objects[name][0] for name in paths}

    def folders(self, folder):
        """The names of the folders in a folder."""
        inside = [name for name in [*self.objects] if name.startswith(f"{folder}/")]
        tails = [name.removeprefix(f"{folder}/").split("/") for name in inside]
        return {tail[0] for tail in tails if len(tail) > 1}

    def put(self, name, content, match=None):
        with self._lock:
            if match is not None and self.generation(name) != int(match):
                return None
            self.on_put(name)
            self._generation += 1
            self.objects[name] = content, self._generation
            self.writes[name] += 1
            return self.resource(name)

    def generation(self, name):
        return self.objects[name][1] if name in self.objects else 0

    def resource(self, name):
        content, generation = self.objects[name]
        return {
            "kind": "storage#object",
            "bucket": self.name,
            "name": name,
            "size": str(len(content)),
            "generation": str(generation),
            "metageneration": "1",
            "timeCreated": "2026-01-01T00:00:00.000Z",
            "updated": "2026-01-01T00:00:00.000Z",
        }

    def page(self, *, prefix="", delimiter="", after="", limit=PAGE):
        """A page of names, those behind a delimiter folded into prefixes."""
        items, prefixes, last = [], [], ""
        with self._lock:
            for name in sorted(self.objects):
                folded = _fold(name, prefix, delimiter)
                if not name.startswith(prefix) or folded <= after or folded in prefixes:
                    continue
                if len(items) + len(prefixes) == limit:
                    return items, prefixes, last
                if folded == name:
                    items.append(self.resource(name))
                else:
                    prefixes.append(folded)
                last = folded
        return items, prefixes, None


def _fold(name, prefix, delimiter):
    head, found, _ = name[len(prefix) :].partition(delimiter or "\0")
    return prefix + head + found


@contextmanager
def serve(bucket):
    handler = type("Handler", (_Handler,), {"bucket": bucket})
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        # Clients drop connections; anything else is a defect of this file.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    bucket: Bucket
    protocol_version = "HTTP/1.1"
    # Head and body in one packet; in two, each answer waits for an acknowledgement.
    wbufsize = -1

    def log_message(self, format, *args):
        pass

    def handle_any(self):
        url = urlsplit(self.path)
        self.query = {k: v[0] for k, v in parse_qs(url.query).items()}
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.bucket.is_closed:
            return self._error(403, "the account may not")
        at = re.escape(self.bucket.name)
        for pattern, method in (
            (f"/storage/v1/b/{at}", "bucket"),
            (f"/storage/v1/b/{at}/o", "list"),
            (f"/upload/storage/v1/b/{at}/o", "upload"),
            (f"/(?:download/)?storage/v1/b/{at}/o/([^/]+)", "object"),
        ):
            match = re.fullmatch(pattern, url.path)
            answer = match and getattr(self, f"{self.command}_{method}", None)
            if answer:
                return answer(*map(unquote, match.groups()))
        return self._error(404, f"{self.command} {self.path} is not here")

    do_GET = do_POST = do_DELETE = handle_any

    def GET_bucket(self):
        self._json({"kind": "storage#bucket", "name": self.bucket.name})

    def GET_list(self):
        items, prefixes, last = self.bucket.page(
            prefix=self.query.get("prefix", ""),
            delimiter=self.query.get("delimiter", ""),
            after=self.query.get("pageToken", ""),
            limit=min(PAGE, int(self.query.get("maxResults", PAGE))),
        )
        page = {"kind": "storage#objects", "items": items, "prefixes": prefixes}
        self._json(page | ({"nextPageToken": last} if last else {}))

    def GET_object(self, name):
        content, generation = self.bucket.objects.get(name, (None, 0))
        if content is None:
            return self._error(404, f"no object {name}")
        if self.query.get("ifGenerationMatch", str(generation)) != str(generation):
            return self._error(412, "another generation")
        if self.query.get("generation", str(generation)) != str(generation):
            return self._error(404, "no object of this generation")
        if self.query.get("alt") != "media":
            return self._json(self.bucket.resource(name))
        status, headers = 200, {"x-goog-generation": str(generation)}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked:
            first, total = int(asked[1]), len(content)
            content = content[first : int(asked[2]) + 1 if asked[2] else None]
            last = first + len(content) - 1
            status, headers["Content-Range"] = 206, f"bytes {first}-{last}/{total}"
        return self._answer(status, content, headers)

    def DELETE_object(self, name):
        with self.bucket._lock:
            match = self.query.get("ifGenerationMatch")
            if name not in self.bucket.objects:
                return self._error(404, f"no object {name}")
            if match is not None and self.bucket.generation(name) != int(match):
                return self._error(412, "another generation")
            del self.bucket.objects[name]
        return self._answer(204, b"")

    def POST_upload(self):
        kind, match = self.query["uploadType"], self.query.get("ifGenerationMatch")
        if kind == "multipart":
            meta, content = self._parts()
            return self._put(json.loads(meta)["name"], content, match)
        if kind == "media" or "upload_id" in self.query:
            return self._put(self.query["name"], self.body, match)
        # The content of what is called resumable comes at once, too.
        where = f"http://{self.headers['Host']}{self.path}&upload_id=0"
        return self._answer(200, b"", {"Location": where})

    def _put(self, name, content, match):
        resource = self.bucket.put(name, content, match)
        if resource is None:
            return self._error(412, "another generation")
        return self._json(resource)

    def _parts(self):
        boundary = re.search(r'boundary="?([^";]+)', self.headers["Content-Type"])[1]
        # Lines end as the client likes.
        line = b"\r\n" if b"\r\n--" in self.body else b"\n"
        parts = self.body.split(b"--" + boundary.encode())[1:-1]
        return [part.split(line * 2, 1)[1].removesuffix(line) for part in parts]

    def _json(self, content):
        self._answer(200, json.dumps(content).encode())

    def _error(self, status, message):
        body = json.dumps({"error": {"code": status, "message": message}})
        self._answer(status, body.encode())

    def _answer(self, status, content, headers=()):
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
