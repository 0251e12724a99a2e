"""A fake of HDFS: WebHDFS's REST protocol over HTTP on loopback, as Hadoop's documentation has it.

No Hadoop is behind it.  A name node redirects (307) what reads or writes a file's content to a data
node, which listens on another port; errors are `RemoteException` in JSON, with Hadoop's status codes;
CREATE without `overwrite=true` and RENAME do not replace a file.  The file system is a dict.
"""

import json
import posixpath
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote, urlsplit

__all__ = ["FakeWebHDFS"]

_PREFIX = "/webhdfs/v1"
_STATUS = {
    "IllegalArgumentException": 400,
    "UnsupportedOperationException": 400,
    "SecurityException": 401,
    "FileNotFoundException": 404,
    "RuntimeException": 500,
}


class _RemoteError(Exception):
    def __init__(self, name, message):
        super().__init__(message)
        self.name = name


class FakeWebHDFS:
    """Two servers: a name node and a data node.

    Args:
        owner: The user that may write; any other reads.

    Attributes:
        port: The name node's.
        files: Content by path; None for a folder.
        requests: What was asked of the name node: operation and path.
    """

    def __init__(self, owner="hadoop"):
        self.owner = owner
        self.files = {"/": None}
        self.modified = {"/": 0}
        self.requests = []
        self.lock = threading.RLock()
        self._servers = [self._server(name=True), self._server(name=False)]
        self.port, self.data_port = (each.server_address[1] for each in self._servers)

    def close(self):
        """Stop both."""
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def _server(self, *, name):
        hdfs = self

        class Handler(_Handler):
            is_name_node = name
            node = hdfs

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=[0.05], daemon=True).start()
        return server

    def status(self, path, suffix):
        content = self.files[path]
        is_folder = content is None
        return {
            "accessTime": 0 if is_folder else self.modified[path],
            "blockSize": 0 if is_folder else 128 << 20,
            "group": "supergroup",
            "length": 0 if is_folder else len(content),
            "modificationTime": self.modified[path],
            "owner": self.owner,
            "pathSuffix": suffix,
            "permission": "755" if is_folder else "644",
            "replication": 0 if is_folder else 1,
            "type": "DIRECTORY" if is_folder else "FILE",
        }

    def check(self, path):
        if path not in self.files:
            raise _RemoteError("FileNotFoundException", f"File does not exist: {path}")

    def children(self, path):
        return sorted(
            each for each in self.files if each != "/" and posixpath.dirname(each) == path
        )

    def make_folders(self, path):
        while path != "/":
            if self.files.get(path, None) is not None:
                raise _RemoteError("ParentNotDirectoryException", f"{path} is not a directory")
            if path in self.files:
                return
            self.put(path, None)
            path = posixpath.dirname(path)

    def put(self, path, content):
        self.files[path] = content
        self.modified[path] = time.time_ns() // 1_000_000

    def create(self, path, content, *, overwrite):
        if path in self.files and self.files[path] is None:
            raise _RemoteError(
                "FileAlreadyExistsException", f"{path} already exists as a directory"
            )
        if path in self.files and not overwrite:
            raise _RemoteError(
                "FileAlreadyExistsException", f"{path} for client 127.0.0.1 already exists"
            )
        self.make_folders(posixpath.dirname(path))
        self.put(path, content)

    def append(self, path, content):
        self.check(path)
        self.put(path, self.files[path] + content)

    def delete(self, path, *, recursive):
        if path not in self.files:
            return False
        below = [each for each in self.files if each.startswith(f"{path}/")]
        if below and not recursive:
            raise _RemoteError("PathIsNotEmptyDirectoryException", f"`{path} is non empty': ")
        for each in [*below, path]:
            del self.files[each]
        return True

    def rename(self, source, target):
        if self.files.get(target, b"") is None:
            target = posixpath.join(target, posixpath.basename(source))
        known = source in self.files and posixpath.dirname(target) in self.files
        if not known or target in self.files:
            return False
        for each in [
            each for each in self.files if each == source or each.startswith(f"{source}/")
        ]:
            moved = target + each[len(source) :]
            self.files[moved], self.modified[moved] = self.files.pop(each), self.modified.pop(each)
        return True


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    is_name_node = True
    node: FakeWebHDFS

    def log_message(self, *_):
        pass

    def _serve(self):
        size = int(self.headers.get("Content-Length") or 0)
        content = self.rfile.read(size)
        url = urlsplit(self.path)
        given = {key: values[-1] for key, values in parse_qs(url.query).items()}
        path = unquote(url.path.removeprefix(_PREFIX)).rstrip("/") or "/"
        op = f"{self.command} {given.get('op', '').upper()}"
        try:
            with self.node.lock:
                if self.is_name_node:
                    self.node.requests.append((op, path))
                    self._name_node(op, path, given)
                else:
                    self._data_node(op, path, given, content)
        except _RemoteError as error:
            about = {"exception": error.name, "message": str(error)}
            about["javaClassName"] = f"org.apache.hadoop.{error.name}"
            self._answer(_STATUS.get(error.name, 403), {"RemoteException": about})

    do_GET = do_PUT = do_POST = do_DELETE = _serve

    def _name_node(self, op, path, given):
        node, user = self.node, given.get("user.name", "dr.who")
        if not op.startswith("GET ") and user != node.owner:
            raise _RemoteError(
                "AccessControlException",
                f'Permission denied: user={user}, access=WRITE, inode="/":{node.owner}:supergroup:drwxr-xr-x',
            )
        if op in ("PUT CREATE", "POST APPEND", "GET OPEN"):
            if op != "PUT CREATE":
                node.check(path)
            query = self.path.partition("?")[2]
            place = f"http://127.0.0.1:{node.data_port}{_PREFIX}{quote(path)}?{query}"
            self._answer(307, None, Location=place)
        elif op == "GET GETFILESTATUS":
            node.check(path)
            self._answer(200, {"FileStatus": node.status(path, "")})
        elif op == "GET LISTSTATUS":
            node.check(path)
            below = node.children(path) if node.files[path] is None else [path]
            listed = [
                node.status(each, "" if each == path else posixpath.basename(each))
                for each in below
            ]
            self._answer(200, {"FileStatuses": {"FileStatus": listed}})
        elif op == "PUT MKDIRS":
            node.make_folders(path)
            self._answer(200, {"boolean": True})
        elif op == "PUT RENAME":
            self._answer(200, {"boolean": node.rename(path, given["destination"])})
        elif op == "DELETE DELETE":
            recursive = given.get("recursive") == "true"
            self._answer(200, {"boolean": node.delete(path, recursive=recursive)})
        else:
            raise _RemoteError("UnsupportedOperationException", f"{op} is not supported")

    def _data_node(self, op, path, given, content):
        node = self.node
        if op == "PUT CREATE":
            node.create(path, content, overwrite=given.get("overwrite") == "true")
            self._answer(201, None, Location=f"webhdfs://127.0.0.1:{node.port}{path}")
        elif op == "POST APPEND":
            node.append(path, content)
            self._answer(200, None)
        elif op == "GET OPEN":
            node.check(path)
            begin = int(given.get("offset") or 0)
            if begin > len(node.files[path]):
                raise _RemoteError("IOException", f"Offset={begin} out of the range")
            length = int(given.get("length") or len(node.files[path]))
            self._answer(200, node.files[path][begin : begin + length])
        else:
            raise _RemoteError("IllegalArgumentException", f"Invalid operation {op}")

    def _answer(self, status, content, **headers):
        is_json = isinstance(content, dict)
        data = json.dumps(content).encode() if is_json else content or b""
        self.send_response(status)
        self.send_header(
            "Content-Type", "application/json" if is_json else "application/octet-stream"
        )
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)
