"""What S3 answers to those who read: each operation takes a request and returns an answer. No faults here.

Checked against moto by the same client calls (``tests/unit/test_s3server.py``). Not here: whatever writes, versions,
access lists, ListObjects in version 1, conditions by time. Signatures are accepted unread: a server for tests keeps no
secrets.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from urllib.parse import quote
from xml.sax.saxutils import escape

from benchmarks.s3server.http import Answer, Request
from benchmarks.s3server.objects import About, ObjectError, Objects

NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"


class Service:
    """The operations, over buckets and objects in a folder."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._listed: dict[str, list[str]] = {}

    def answer(self, request: Request) -> Answer:
        """Carry out a request; what S3 refuses is answered as S3 does."""
        try:
            return self._carry_out(request)
        except ObjectError as error:
            body = f"<Code>{error.code}</Code><Message>{escape(str(error))}</Message>"
            body += f"<Resource>{escape(request.path)}</Resource><RequestId>0</RequestId>"
            answer = _xml("Error", body, status=error.status, namespace=False)
            return answer if request.method != "HEAD" else Answer(error.status, answer.headers)

    def _carry_out(self, request: Request) -> Answer:
        bucket, _, key = request.path.removeprefix("/").partition("/")
        if request.method not in ("GET", "HEAD"):
            raise ObjectError(405, "MethodNotAllowed", "The specified method is not allowed against this resource.")
        if key:
            return self._get(request, bucket, key)
        if request.method == "HEAD":
            self._objects.bucket(bucket)
            return Answer(200, {"x-amz-bucket-region": "us-east-1"})
        if request.query.get("list-type") == "2":
            return self._list(bucket, request.query)
        raise ObjectError(501, "NotImplemented", "A header or query you provided implies functionality that is absent.")

    def _get(self, request: Request, bucket: str, key: str) -> Answer:
        about = self._objects.about(bucket, key)
        headers = dict(about.headers)
        status = _precondition(request.headers, about)
        if status == 304:
            return Answer(304, {"ETag": headers["ETag"], "Last-Modified": headers["Last-Modified"]})
        if status:
            raise ObjectError(
                412, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold"
            )
        span = _span(request.headers.get("range"), about.nbytes)
        start, stop = span or (0, about.nbytes)
        if span:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{about.nbytes}"
        headers["Content-Length"] = str(stop - start)
        path = self._objects.file(bucket, key) if request.method == "GET" else None
        return Answer(206 if span else 200, headers, file=path, start=start, nbytes=stop - start if path else 0)

    def _list(self, bucket: str, query: dict[str, str]) -> Answer:
        """Answer ListObjectsV2; a listing that goes on is of the keys that were there when it began."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        most = min(int(query.get("max-keys") or 1000), 1000)
        token = query.get("continuation-token")
        if token is None or bucket not in self._listed:
            self._listed[bucket] = self._objects.keys(bucket)
        after = bytes.fromhex(token).decode() if token else query.get("start-after", "")
        as_text = quote if query.get("encoding-type") == "url" else escape
        entries: list[str] = []
        last, is_cut, seen = "", False, ""
        for key in self._listed[bucket]:
            if not key.startswith(prefix):
                continue
            head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            common = prefix + head + delimiter if found else ""
            name = common or key
            if name.encode() <= after.encode() or (common and common == seen):
                continue
            if len(entries) >= most:
                is_cut = most > 0
                break
            last = seen = name
            if common:
                entries.append(f"<CommonPrefixes><Prefix>{as_text(common)}</Prefix></CommonPrefixes>")
                continue
            try:
                about = self._objects.about(bucket, key)
            except ObjectError:  # removed while it was listed
                continue
            entries.append(
                f"<Contents><Key>{as_text(key)}</Key><LastModified>{_iso(about)}</LastModified>"
                f"<ETag>&quot;{about.etag}&quot;</ETag><Size>{about.nbytes}</Size>"
                "<StorageClass>STANDARD</StorageClass></Contents>"
            )
        body = f"<Name>{escape(bucket)}</Name><Prefix>{as_text(prefix)}</Prefix><MaxKeys>{most}</MaxKeys>"
        body += f"<KeyCount>{len(entries)}</KeyCount><IsTruncated>{str(is_cut).lower()}</IsTruncated>"
        for name in ("delimiter", "start-after"):
            if query.get(name):
                tag = "Delimiter" if name == "delimiter" else "StartAfter"
                body += f"<{tag}>{as_text(query[name])}</{tag}>"
        body += "<EncodingType>url</EncodingType>" if as_text is quote else ""
        body += f"<ContinuationToken>{escape(token)}</ContinuationToken>" if token else ""
        if is_cut:
            body += f"<NextContinuationToken>{last.encode().hex()}</NextContinuationToken>"
        return _xml("ListBucketResult", body + "".join(entries))


def _precondition(headers: dict[str, str], about: About) -> int:
    """Return 304, 412 or 0; conditions are by ETag only."""
    if "if-match" in headers and not _names(headers["if-match"], about.etag):
        return 412
    return 304 if "if-none-match" in headers and _names(headers["if-none-match"], about.etag) else 0


def _names(header: str, etag: str) -> bool:
    return header.strip() == "*" or etag in [part.strip().removeprefix("W/").strip('"') for part in header.split(",")]


def _span(header: str | None, nbytes: int) -> tuple[int, int] | None:
    """Return the half-open range that a header asks for; None where it asks for all, or cannot be read."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header or "")
    if not match or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if not first:
        start, stop = max(0, nbytes - int(last)), nbytes if int(last) else 0
    else:
        start, stop = int(first), min(int(last) + 1, nbytes) if last else nbytes
        if last and int(last) < int(first):
            return None
    if start >= stop:
        raise ObjectError(416, "InvalidRange", "The requested range is not satisfiable")
    return start, stop


def _iso(about: About) -> str:
    return datetime.fromtimestamp(about.mtime_ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def _xml(tag: str, body: str, *, status: int = 200, namespace: bool = True) -> Answer:
    opening = f'<{tag} xmlns="{NAMESPACE}">' if namespace else f"<{tag}>"
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n{opening}{body}</{tag}>'
    return Answer(status, {"Content-Type": "application/xml"}, text.encode())
