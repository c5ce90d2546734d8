"""A local server of the Hugging Face hub's protocol, as far as downloads need it, with faults.

    with Hub(folder) as hub:  # folder/datasets/owner/repository/file, folder/models/...
        hub.faults["a_000001.bin"] = ["drop", 429, 503, "short"]  # of the next GETs of it

drop: the connection ends in the middle of the body. short: a whole reply of half the file.
"""

import hashlib
import http.server
import json
import re
import threading
from pathlib import Path

SHA = "0123456789abcdef0123456789abcdef01234567"  # of the one commit


class Hub(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.faults, self.asked = Path(folder), {}, []
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        path, hub = self.path.partition("?")[0], self.server
        hub.asked.append((self.command, path, self.headers.get("Range")))
        faults = next((f for end, f in hub.faults.items() if path.endswith(end)), None)
        fault = faults.pop(0) if faults and self.command == "GET" else None
        if isinstance(fault, int):
            return self.reply(fault, b"busy", {"Retry-After": "0"} if fault == 429 else {})
        if file := re.fullmatch(r"(?:/(datasets))?/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self.file(hub.folder / (file[1] or "models") / file[2] / file[4], fault)
        api = r"/api/(datasets|models)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+).*)?"
        if call := re.fullmatch(api, path):
            return self.api(hub.folder / call[1] / call[2], call[2], call[3], fault)
        return self.reply(404, b"{}", {"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_POST = do_GET

    def api(self, folder, name, call, fault):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if not folder.is_dir():
            return self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        files = {
            p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("*")) if p.is_file()
        }
        if call == "paths-info":
            files = {path: files[path] for path in json.loads(body)["paths"] if path in files}
        if call in ("tree", "paths-info"):
            found = [
                dict(type="file", path=p, size=f.stat().st_size, oid=etag(f))
                for p, f in files.items()
            ]
        else:
            siblings = [{"rfilename": path} for path in files]
            found = dict(id=name, sha=SHA, private=False, gated=False, tags=[], siblings=siblings)
        return self.reply(
            200, json.dumps(found).encode(), {"Content-Type": "application/json"}, fault
        )

    def file(self, path, fault):
        if not path.is_file():
            return self.reply(404, b"", {"X-Error-Code": "EntryNotFound"})
        data = path.read_bytes()
        more = {"ETag": f'"{etag(path)}"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"}
        more["X-Linked-Size"] = str(len(data))
        if part := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(part[1]), min(int(part[2] or len(data) - 1), len(data) - 1)
            more["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            return self.reply(206, data[first : last + 1], more, fault)
        return self.reply(200, data, more, fault)

    def reply(self, status, data, headers, fault=None):
        self.send_response(status)
        data = data[: len(data) // 2] if fault == "short" else data
        for key, value in ({"Content-Length": str(len(data))} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if fault == "drop" else data)
        self.close_connection = self.close_connection or fault == "drop"


def etag(path):
    return hashlib.sha1(path.read_bytes()).hexdigest()
