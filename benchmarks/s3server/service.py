"""What S3 answers: each operation as a method that takes a request and returns an answer. No faults here.

Checked against moto by the same client calls (``tests/unit/test_s3server.py``). Not here: versions, access lists,
tagging, encryption, ListObjects in version 1. Signatures are accepted unread: a server for tests keeps no secrets.
"""

from __future__ import annotations

import base64
import hashlib
import re
import xml.etree.ElementTree as ET
import zlib
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote
from xml.sax.saxutils import escape

from benchmarks.s3server.http import Answer, Request
from benchmarks.s3server.objects import About, ObjectError, Objects

if TYPE_CHECKING:
    from pathlib import Path

NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
SMALLEST_PART = 5 << 20
"""All parts but the last have at least so many bytes, in S3."""


class Service:
    """The operations, over buckets and objects in a folder."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._listed: dict[str, list[str]] = {}

    async def answer(self, request: Request) -> Answer:
        """Carry out a request; what S3 refuses is answered as S3 does."""
        try:
            return await self._carry_out(request)
        except ObjectError as error:
            body = f"<Code>{error.code}</Code><Message>{escape(str(error))}</Message>"
            body += f"<Resource>{escape(request.path)}</Resource><RequestId>0</RequestId>"
            answer = _xml("Error", body, status=error.status, namespace=False)
            return answer if request.method != "HEAD" else Answer(error.status, answer.headers)

    async def _carry_out(self, request: Request) -> Answer:
        bucket, _, key = request.path.removeprefix("/").partition("/")
        query, method = request.query, request.method
        if not bucket:
            return self._list_buckets()
        if key:
            return await self._on_object(request, bucket, key)
        if method == "PUT":
            self._objects.make_bucket(bucket)
            return Answer(200, {"Location": f"/{bucket}"})
        if method == "DELETE":
            self._objects.drop_bucket(bucket)
            return Answer(204)
        if method == "POST" and "delete" in query:
            return await self._drop_many(request, bucket)
        if method == "HEAD":
            self._objects.bucket(bucket)
            return Answer(200, {"x-amz-bucket-region": "us-east-1"})
        if method == "GET" and "location" in query:
            self._objects.bucket(bucket)
            return _xml("LocationConstraint", "")
        if method == "GET" and query.get("list-type") == "2":
            return self._list(bucket, query)
        raise ObjectError(501, "NotImplemented", "A header or query you provided implies functionality that is absent.")

    async def _on_object(self, request: Request, bucket: str, key: str) -> Answer:
        query, method = request.query, request.method
        if "uploadId" in query or "uploads" in query:
            return await self._on_upload(request, bucket, key)
        if method in ("GET", "HEAD"):
            return self._get(request, bucket, key)
        if method == "PUT":
            if "x-amz-copy-source" in request.headers:
                return self._copy(request, bucket, key)
            return await self._put(request, bucket, key)
        if method == "DELETE":
            self._objects.drop(bucket, key)
            return Answer(204)
        raise ObjectError(405, "MethodNotAllowed", "The specified method is not allowed against this resource.")

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

    async def _put(self, request: Request, bucket: str, key: str) -> Answer:
        self._objects.bucket(bucket)
        if request.headers.get("if-none-match") == "*" and self._objects.path(bucket, key).is_file():
            raise ObjectError(
                412, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold"
            )
        arrived, etag = await self._receive(request)
        self._objects.put(bucket, key, arrived, etag, _content_type(request), _metadata(request))
        return Answer(200, {"ETag": f'"{etag}"'})

    async def _receive(self, request: Request) -> tuple[Path, str]:
        """Write a body to a file; return it and its ETag; a body that is not what its headers say is an error."""
        arrived = self._objects.new_file()
        sums = {"md5": hashlib.md5(), "sha1": hashlib.sha1(), "sha256": hashlib.sha256()}
        crc = 0
        with arrived.open("wb") as file:
            async for piece in request.body():
                for digest in sums.values():
                    digest.update(piece)
                crc = zlib.crc32(piece, crc)
                file.write(piece)
        found = {f"x-amz-checksum-{name}": sums[name].digest() for name in ("sha1", "sha256")}
        found |= {"content-md5": sums["md5"].digest(), "x-amz-checksum-crc32": crc.to_bytes(4, "big")}
        wrong = [name for name, digest in found.items() if _said(request, name) not in (None, digest)]
        signed = request.headers.get("x-amz-content-sha256", "")
        if re.fullmatch("[0-9a-f]{64}", signed) and signed != sums["sha256"].hexdigest():
            wrong.append("x-amz-content-sha256")
        if wrong:
            arrived.unlink()
            raise ObjectError(400, "BadDigest", f"The {wrong[0]} you specified did not match what we received.")
        return arrived, sums["md5"].hexdigest()

    def _copy(self, request: Request, bucket: str, key: str) -> Answer:
        source_bucket, _, source_key = unquote(request.headers["x-amz-copy-source"]).removeprefix("/").partition("/")
        about = self._objects.about(source_bucket, source_key)
        self._objects.bucket(bucket)
        arrived = self._objects.new_file()
        arrived.write_bytes(self._objects.path(source_bucket, source_key).read_bytes())
        about = self._objects.put(bucket, key, arrived, about.etag, about.content_type, about.metadata)
        body = f"<LastModified>{_iso(about)}</LastModified><ETag>&quot;{about.etag}&quot;</ETag>"
        return _xml("CopyObjectResult", body)

    async def _drop_many(self, request: Request, bucket: str) -> Answer:
        self._objects.bucket(bucket)
        wanted = _parse(await request.whole_body())
        body = ""
        for entry in wanted.iter("Object"):
            key = entry.findtext("Key") or ""
            self._objects.drop(bucket, key)
            body += f"<Deleted><Key>{escape(key)}</Key></Deleted>"
        return _xml("DeleteResult", body if wanted.findtext("Quiet") != "true" else "")

    async def _on_upload(self, request: Request, bucket: str, key: str) -> Answer:
        query, method, objects = request.query, request.method, self._objects
        upload = query.get("uploadId", "")
        place = f"<Bucket>{escape(bucket)}</Bucket><Key>{escape(key)}</Key>"
        if method == "POST" and "uploads" in query:
            about = {"content_type": _content_type(request), "metadata": _metadata(request)}
            upload = objects.start_upload(bucket, key, about)
            return _xml("InitiateMultipartUploadResult", f"{place}<UploadId>{upload}</UploadId>")
        folder, _ = objects.upload(bucket, key, upload)
        if method == "PUT":
            number = int(query["partNumber"])
            if not 1 <= number <= 10_000:
                raise ObjectError(
                    400, "InvalidArgument", "Part number must be an integer between 1 and 10000, inclusive"
                )
            arrived, etag = await self._receive(request)
            objects.put_part(folder, number, arrived, etag)
            return Answer(200, {"ETag": f'"{etag}"'})
        if method == "POST":
            wanted = [
                (int(part.findtext("PartNumber") or 0), (part.findtext("ETag") or "").strip('"'))
                for part in _parse(await request.whole_body()).iter("Part")
            ]
            parts = objects.parts(folder)
            if any(n in parts and parts[n][0].stat().st_size < SMALLEST_PART for n, _ in wanted[:-1]):
                raise ObjectError(
                    400, "EntityTooSmall", "Your proposed upload is smaller than the minimum allowed object size."
                )
            etag = objects.join(bucket, key, upload, wanted).etag
            return _xml("CompleteMultipartUploadResult", f"{place}<ETag>&quot;{etag}&quot;</ETag>")
        if method == "DELETE":
            objects.drop_upload(bucket, key, upload)
            return Answer(204)
        parts = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>&quot;{etag}&quot;</ETag><Size>{path.stat().st_size}</Size></Part>"
            for number, (path, etag) in objects.parts(folder).items()
        )
        return _xml("ListPartsResult", f"{place}<UploadId>{upload}</UploadId><IsTruncated>false</IsTruncated>{parts}")

    def _list_buckets(self) -> Answer:
        then = datetime.fromtimestamp(0, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        names = "".join(
            f"<Bucket><Name>{escape(name)}</Name><CreationDate>{then}</CreationDate></Bucket>"
            for name in self._objects.buckets()
        )
        return _xml("ListAllMyBucketsResult", f"<Owner><ID>0</ID></Owner><Buckets>{names}</Buckets>")

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
    """Return 304, 412 or 0, in the order of RFC 9110, section 13.2.2."""
    changed = about.mtime_ns // 10**9
    if "if-match" in headers:
        if not _names(headers["if-match"], about.etag):
            return 412
    elif "if-unmodified-since" in headers and changed > _time(headers["if-unmodified-since"]):
        return 412
    if "if-none-match" in headers:
        return 304 if _names(headers["if-none-match"], about.etag) else 0
    return 304 if "if-modified-since" in headers and changed <= _time(headers["if-modified-since"]) else 0


def _names(header: str, etag: str) -> bool:
    return header.strip() == "*" or etag in [part.strip().removeprefix("W/").strip('"') for part in header.split(",")]


def _time(header: str) -> float:
    return parsedate_to_datetime(header).timestamp()


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


def _content_type(request: Request) -> str:
    return request.headers.get("content-type") or "binary/octet-stream"


def _metadata(request: Request) -> dict[str, str]:
    start = "x-amz-meta-"
    return {name.removeprefix(start): value for name, value in request.headers.items() if name.startswith(start)}


def _said(request: Request, name: str) -> bytes | None:
    value = request.headers.get(name)
    return base64.b64decode(value) if value else None


def _parse(body: bytes) -> ET.Element:
    try:
        tree = ET.fromstring(body)
    except ET.ParseError:
        raise ObjectError(400, "MalformedXML", "The XML you provided was not well-formed.") from None
    for element in tree.iter():
        element.tag = element.tag.rpartition("}")[2]
    return tree


def _iso(about: About) -> str:
    return datetime.fromtimestamp(about.mtime_ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def _xml(tag: str, body: str, *, status: int = 200, namespace: bool = True) -> Answer:
    opening = f'<{tag} xmlns="{NAMESPACE}">' if namespace else f"<{tag}>"
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n{opening}{body}</{tag}>'
    return Answer(status, {"Content-Type": "application/xml"}, text.encode())
