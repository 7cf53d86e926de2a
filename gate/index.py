"""Ask a package index which files it holds, and with which sha256.

Speaks the simple repository API as JSON (PEP 691) and as HTML (PEP 503). Of an index that names
no sha256 for a file, the file itself is fetched and hashed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import ssl
import threading
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.message import Message
from html.parser import HTMLParser
from http.client import HTTPException
from queue import Empty, SimpleQueue
from typing import Any, TypeVar
from urllib.error import HTTPError
from urllib.parse import SplitResult, unquote, urldefrag, urljoin, urlsplit

from packaging.utils import canonicalize_name

from gate.archive import printable
from gate.errors import EnvironmentFailed, IndexFailing, IndexRefused
from gate.wheels import MAX_WHEEL_BYTES

SIMPLE_JSON = "application/vnd.pypi.simple.v1+json"
SIMPLE_HTML = "application/vnd.pypi.simple.v1+html"
ACCEPT = f"{SIMPLE_JSON}, {SIMPLE_HTML};q=0.2, text/html;q=0.1"
MAX_PAGE_BYTES = 64 * 2**20
MAX_REDIRECTS = 5
_CHUNK = 2**20
# What is wanted of an answer.
_BODY, _DIGEST, _STATUS = "body", "digest", "status"
_SHA256 = re.compile(r"[0-9a-f]{64}")

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Held:
    """A file that an index lists.

    Attributes:
        name: its file name.
        url: where it is, absolute.
        sha256: its digest as the index states it, in hexadecimal, or None where it does not.
    """

    name: str
    url: str
    sha256: str | None


@dataclass(frozen=True, kw_only=True)
class _Answer:
    status: int
    headers: Message
    body: bytes
    url: str


@dataclass(frozen=True, kw_only=True)
class Index:
    """A package index, read.

    Attributes:
        simple: URL of the simple index, with a slash at its end.
        login: user name and password for reading, sent only where the index asks for them.
        ca_file: certificates to trust, or None for the system's.
        proxies: proxy by URL scheme.
        timeout: limit in seconds for a page, from looking up the host to the last byte.
        transfer: limit in seconds for fetching a file.
    """

    simple: str
    login: tuple[str, str] | None = field(default=None, repr=False)
    ca_file: str | None = None
    proxies: Mapping[str, str]
    timeout: float = 30.0
    transfer: float = 300.0

    def files(self, project: str) -> dict[str, Held] | None:
        """The files of a project by their name; None where the index does not know the project.

        Raises:
            IndexRefused: the index refuses to answer, or its answer makes no sense.
            IndexFailing: it answers with an error of its own.
            EnvironmentFailed: it does not answer.
        """
        answer = self._get(urljoin(self.simple, canonicalize_name(project) + "/"), ACCEPT)
        if answer is None:
            return None
        try:
            return _listing(answer)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise IndexRefused(
                f"The answer of {answer.url} is no simple index: {printable(str(error))}.",
                next_step="give the simple index with --index URL",
            ) from error

    def exists(self) -> bool:
        """Whether there is an index at this URL; errors as for :meth:`files`."""
        return self._get(self.simple, ACCEPT, want=_STATUS) is not None

    def sha256(self, file: Held) -> str:
        """The digest of a file, fetched if need be; errors as for :meth:`files`."""
        if file.sha256 is not None:
            return file.sha256
        answer = self._get(file.url, "*/*", want=_DIGEST, anywhere=True)
        if answer is None:
            raise IndexRefused(f"The index lists {file.url}, but does not have it.")
        return answer.body.hex()

    def _get(
        self, url: str, accept: str, *, want: str = _BODY, anywhere: bool = False
    ) -> _Answer | None:
        """Fetch a URL; None for what is not there.

        ``anywhere`` follows redirects to other hosts, which otherwise mean that the index itself
        has nothing.
        """
        for _ in range(MAX_REDIRECTS):
            answer = self._answer(url, accept, want)
            location = answer.headers.get("Location")
            if answer.status not in (301, 302, 303, 307, 308) or not location:
                return _judged(answer)
            target = urljoin(url, location)
            if not anywhere and _host(target) != _host(url):
                return None
            url = target
        raise IndexRefused(f"{url} redirects more than {MAX_REDIRECTS} times.")

    def _answer(self, url: str, accept: str, want: str) -> _Answer:
        limit = self.transfer if want == _DIGEST else self.timeout
        try:
            answer = _bounded(lambda: self._fetch(url, accept, want, None), limit)
            if answer.status == 401 and self.login and _host(url) == _host(self.simple):
                login = self.login
                answer = _bounded(lambda: self._fetch(url, accept, want, login), limit)
            return answer
        except (OSError, HTTPException, ValueError) as error:
            raise EnvironmentFailed(
                f"{url} does not answer: {printable(str(error) or type(error).__name__)}.",
                cause="the network, the URL, a proxy or the index's certificate",
                next_step="the same command again, once it answers",
            ) from error

    def _fetch(self, url: str, accept: str, want: str, login: tuple[str, str] | None) -> _Answer:
        request = urllib.request.Request(url, headers={"Accept": accept})
        # What the index held a minute ago is not what it holds.
        request.add_header("Cache-Control", "no-cache")
        if login:
            words = base64.b64encode(":".join(login).encode()).decode()
            request.add_unredirected_header("Authorization", f"Basic {words}")
        response: Any
        try:
            response = self._opener(url).open(request, timeout=self.timeout)
        except HTTPError as error:
            response = error
        with response:
            body = b"" if want == _STATUS else _read(response, want)
            return _Answer(status=response.status, headers=response.headers, body=body, url=url)

    def _opener(self, url: str) -> urllib.request.OpenerDirector:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https"):
            raise ValueError(f"{parts.scheme!r} is not http or https")
        proxies = {} if is_local(parts) else dict(self.proxies)
        handlers = [urllib.request.ProxyHandler(proxies), _NoRedirect()]
        if parts.scheme == "https":
            context = ssl.create_default_context(cafile=self.ca_file)
            handlers.append(urllib.request.HTTPSHandler(context=context))
        return urllib.request.build_opener(*handlers)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_arguments: Any) -> None:
        """Leave redirects to whoever asked."""


def is_local(parts: SplitResult) -> bool:
    """Whether a URL leads to this machine."""
    host = parts.hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def without_proxy(url: str) -> dict[str, str]:
    """Variables that keep proxies out of the way to this machine; none where ``url`` leaves it."""
    return {"no_proxy": "*", "NO_PROXY": "*"} if is_local(urlsplit(url)) else {}


def _host(url: str) -> str | None:
    return urlsplit(url).netloc.rpartition("@")[2]


def _bounded(call: Callable[[], Result], seconds: float) -> Result:
    """Return what ``call`` returns, unless that takes too long.

    A socket's own limit starts anew with every byte, and looking up a host name has none.
    """
    outcome: SimpleQueue[tuple[Result | None, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            outcome.put((call(), None))
        except Exception as error:
            outcome.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        result, error = outcome.get(timeout=seconds)
    except Empty:
        raise TimeoutError(f"no complete answer within {seconds:g} s") from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # None only beside an error


def _read(response: Any, want: str) -> bytes:
    digest, kept, total = hashlib.sha256(), [], 0
    limit = MAX_WHEEL_BYTES if want == _DIGEST else MAX_PAGE_BYTES
    while chunk := response.read(_CHUNK):
        total += len(chunk)
        if total > limit:
            raise ValueError(f"the answer is longer than {limit} bytes")
        if want == _DIGEST:
            digest.update(chunk)
        else:
            kept.append(chunk)
    return digest.digest() if want == _DIGEST else b"".join(kept)


def _judged(answer: _Answer) -> _Answer | None:
    if answer.status == 200:
        return answer
    if answer.status in (404, 410):
        return None
    what = f"{answer.url} answers {answer.status}"
    if answer.status >= 500 or answer.status == 429:
        raise IndexFailing(f"{what}: it is not working.", next_step="try the same command later")
    hint = "set TWINE_USERNAME and TWINE_PASSWORD" if answer.status in (401, 403) else ""
    raise IndexRefused(f"{what}.", next_step=hint)


def _listing(answer: _Answer) -> dict[str, Held]:
    kind = answer.headers.get_content_type()
    if kind in (SIMPLE_JSON, "application/json"):
        found = _json_files(answer)
    elif kind in (SIMPLE_HTML, "text/html"):
        found = _html_files(answer)
    else:
        raise ValueError(f"its content type is {kind}")
    files: dict[str, Held] = {}
    for file in found:
        if files.setdefault(file.name, file).sha256 != file.sha256:
            raise ValueError(f"it lists {file.name} twice, with different digests")
    return files


def _json_files(answer: _Answer) -> list[Held]:
    page = json.loads(answer.body)
    version = str(page["meta"]["api-version"])
    if version.partition(".")[0] != "1":
        raise ValueError(f"version {version} of the API is not known")
    return [
        Held(
            name=str(file["filename"]),
            url=urljoin(answer.url, file["url"]),
            sha256=_digest(file["hashes"].get("sha256")),
        )
        for file in page["files"]
    ]


def _digest(value: str | None) -> str | None:
    if value is not None and not _SHA256.fullmatch(value.lower()):
        raise ValueError(f"{value!r} is no sha256")
    return value.lower() if value is not None else None


class _Anchors(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.base = ""
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the targets of links."""
        target = dict(attrs).get("href")
        if tag == "base" and target and not self.base:
            self.base = target
        if tag == "a" and target:
            self.links.append(target)


def _html_files(answer: _Answer) -> list[Held]:
    anchors = _Anchors()
    anchors.feed(answer.body.decode("utf-8"))
    files = []
    for link in anchors.links:
        url, fragment = urldefrag(urljoin(urljoin(answer.url, anchors.base), link))
        name = unquote(urlsplit(url).path.rpartition("/")[2])
        algorithm, _, value = fragment.partition("=")
        digest = _digest(value) if algorithm == "sha256" else None
        files.append(Held(name=name, url=url, sha256=digest))
    return files
