"""A fake of OSS: the part of its REST protocol that ossfs uses, over HTTP on loopback.

XML as in the documentation of OSS, without the name space that S3 has, for which ossfs refuses that of
S3 servers.  Bucket and key are in the path, as OSS has it for addresses of numbers.  Keys of accounts
are checked, signatures are not; there are no uploads in parts, which ossfs uses from 10 MiB on.
"""

import hashlib
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

__all__ = ["FakeOSS"]

_STATUS = {"NoSuchKey": 404, "NoSuchBucket": 404, "NotImplemented": 501}


class FakeOSS:
    """A server.

    Args:
        bucket: The only bucket.
        key: The only access key.

    Attributes:
        port: Where it listens.
        objects: Content and time by key.
    """

    def __init__(self, bucket="runs", key="testing"):
        self.bucket, self.key, self.objects = bucket, key, {}
        self.seconds = int(time.time())
        oss = self

        class Handler(_Handler):
            node = oss

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=[0.05], daemon=True).start()

    def close(self):
        """Stop it."""
        self._server.shutdown()
        self._server.server_close()


def _iso(seconds):
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(seconds))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    node: FakeOSS

    def log_message(self, *_):
        pass

    def _serve(self):
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        given = {
            key: values[-1] for key, values in parse_qs(url.query, keep_blank_values=True).items()
        }
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        account = self.headers.get("Authorization", "").removeprefix("OSS ").partition(":")[0]
        if account != self.node.key:
            code = "InvalidAccessKeyId" if account else "AccessDenied"
            self._error(code, "The OSS Access Key Id you provided does not exist in our records.")
        elif bucket != self.node.bucket:
            self._error("NoSuchBucket", "The specified bucket does not exist.")
        elif key:
            self._object(key, given, content)
        elif "bucketInfo" in given:
            self._bucket_info()
        elif self.command == "GET":
            self._list(given)
        else:
            self._error("NotImplemented", f"{self.command} {self.path}")

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

    def _object(self, key, given, content):
        objects = self.node.objects
        if self.command == "PUT" and not given:
            # Times are whole seconds, so that each object is a second younger than the one before.
            self.node.seconds += 1
            objects[key] = content, self.node.seconds
            self._answer(200, b"")
        elif self.command == "DELETE":
            objects.pop(key, None)
            self._answer(204, b"")
        elif self.command not in ("GET", "HEAD"):
            self._error("NotImplemented", f"{self.command} {self.path}")
        elif key not in objects:
            self._error("NoSuchKey", "The specified key does not exist.")
        else:
            data, modified = objects[key]
            self._answer(
                200,
                data if "objectMeta" not in given else b"",
                **{
                    "ETag": f'"{hashlib.md5(data).hexdigest().upper()}"',
                    "Last-Modified": time.strftime(
                        "%a, %d %b %Y %H:%M:%S GMT", time.gmtime(modified)
                    ),
                },
            )

    def _bucket_info(self):
        inside = (
            f"<Name>{self.node.bucket}</Name><CreationDate>{_iso(0)}</CreationDate>"
            "<StorageClass>Standard</StorageClass><ExtranetEndpoint>x</ExtranetEndpoint>"
            "<IntranetEndpoint>x</IntranetEndpoint><Location>oss-x</Location>"
            "<Owner><ID>1</ID><DisplayName>1</DisplayName></Owner>"
            "<AccessControlList><Grant>private</Grant></AccessControlList>"
        )
        self._xml(f"<BucketInfo><Bucket>{inside}</Bucket></BucketInfo>")

    def _list(self, given):
        """Answer GetBucket (ListObjects), a page of at most `max-keys`."""
        prefix, delimiter = given.get("prefix", ""), given.get("delimiter", "")
        marker, most = given.get("marker", ""), int(given.get("max-keys") or 100)
        found = {}
        for key in sorted(self.node.objects):
            if key.startswith(prefix):
                rest, slash, _ = key.removeprefix(prefix).partition(delimiter or "\0")
                found.setdefault(f"{prefix}{rest}{slash}" if slash else key, bool(slash))
        names = [name for name in found if name > marker]
        page = names[:most]
        parts = [f"<Name>{self.node.bucket}</Name><EncodingType>url</EncodingType>"]
        parts.append(f"<IsTruncated>{str(len(names) > most).lower()}</IsTruncated>")
        if len(names) > most:
            parts.append(f"<NextMarker>{quote(page[-1])}</NextMarker>")
        for name in page:
            if found[name]:
                parts.append(f"<CommonPrefixes><Prefix>{quote(name)}</Prefix></CommonPrefixes>")
                continue
            data, modified = self.node.objects[name]
            parts.append(
                f"<Contents><Key>{quote(name)}</Key><LastModified>{_iso(modified)}</LastModified>"
                f'<ETag>"{hashlib.md5(data).hexdigest().upper()}"</ETag><Type>Normal</Type>'
                f"<Size>{len(data)}</Size><StorageClass>Standard</StorageClass></Contents>"
            )
        self._xml(f"<ListBucketResult>{''.join(parts)}</ListBucketResult>")

    def _error(self, code, message):
        inside = f"<Code>{code}</Code><Message>{escape(message)}</Message>"
        self._xml(f"<Error>{inside}<RequestId>1</RequestId></Error>", _STATUS.get(code, 403))

    def _xml(self, text, status=200):
        data = f'<?xml version="1.0" encoding="UTF-8"?>\n{text}'.encode()
        self._answer(status, data, **{"Content-Type": "application/xml"})

    def _answer(self, status, data, **headers):
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("x-oss-request-id", "1")
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
