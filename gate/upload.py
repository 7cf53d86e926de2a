"""Run twine so that nothing but this command line and two variables decide what it does.

Neither ``.pypirc``, ``.netrc``, a keyring nor any other ``TWINE_*`` variable reaches it, and it
cannot ask questions.
"""

from __future__ import annotations

import base64
import html
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from gate.archive import printable
from gate.errors import EnvironmentFailed
from gate.index import without_proxy
from gate.runner import TAIL_LINES, Outcome, Runner

CHECK_TIMEOUT = 120.0
# Twine pads its lines to the width of the terminal that it believes in.
COLUMNS = 1000
OUTPUT_BYTES = 200 * COLUMNS
TOKEN_USER = "__token__"
PYPI_HOSTS = ("upload.pypi.org", "test.pypi.org")
CERTIFICATES = ("TWINE_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")
# With these, twine asks the platform for a short-lived token (trusted publishing).
PLATFORM = (
    "GITHUB_ACTIONS",
    "ACTIONS_ID_TOKEN_REQUEST_TOKEN",
    "ACTIONS_ID_TOKEN_REQUEST_URL",
    "GITLAB_CI",
    "PYPI_ID_TOKEN",
    "TESTPYPI_ID_TOKEN",
)
# Where the login came from, and the size of the file.
_CHATTER = re.compile(r"INFO +(username|password|/.*\.(whl|gz) \()|INFO$")
_HTTP_ERROR = re.compile(r"ERROR +HTTPError: (\d{3}) ")


@dataclass(frozen=True, kw_only=True)
class Access:
    """How a package index is reached: what the user's environment says about that, and no more.

    Attributes:
        login: user name and password, or None where none are given.
        variables: certificates, proxies and the platform's tokens, as environment variables.
    """

    login: tuple[str, str] | None = field(repr=False)
    variables: Mapping[str, str]

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Access:
        """Take from an environment what matters here.

        Raises:
            EnvironmentFailed: there is a user name without a password.
        """
        # A secret that was read from a file often ends with a line break.
        user = environ.get("TWINE_USERNAME", "").strip()
        password = environ.get("TWINE_PASSWORD", "").strip()
        if user and not password and user != TOKEN_USER:
            raise EnvironmentFailed(
                f"TWINE_USERNAME is {user!r}, but TWINE_PASSWORD is not set.",
                next_step="set both, or for an API token only TWINE_PASSWORD",
            )
        names = (*CERTIFICATES, *PLATFORM)
        kept = {name: environ[name] for name in names if environ.get(name)}
        for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
            kept |= {each: environ[each] for each in (name, name.upper()) if environ.get(each)}
        return cls(login=(user or TOKEN_USER, password) if password else None, variables=kept)

    @property
    def ca_file(self) -> str | None:
        """The certificates to trust in place of the system's."""
        return next(
            (self.variables[name] for name in CERTIFICATES if name in self.variables), None
        )

    @property
    def proxies(self) -> dict[str, str]:
        """Proxy by URL scheme."""
        return {
            scheme: value
            for scheme in ("http", "https")
            for name, value in self.variables.items()
            if name.lower() == f"{scheme}_proxy"
        }

    def demand_login(self, url: str) -> None:
        """Find out before anything is sent that there is nothing to log in with.

        Raises:
            EnvironmentFailed: PyPI needs a token, and there is none and no platform to get it of.
        """
        trusted = "GITHUB_ACTIONS" in self.variables or "GITLAB_CI" in self.variables
        if self.login is None and urlsplit(url).hostname in PYPI_HOSTS and not trusted:
            raise EnvironmentFailed(
                f"There is nothing to log in to {url} with.",
                cause="TWINE_PASSWORD is not set, and trusted publishing works in CI only",
                next_step="set TWINE_PASSWORD to an API token of the project",
            )

    def redact(self, text: str) -> str:
        """Take the password out of what twine and an index say."""
        if self.login is None:
            return text
        encoded = base64.b64encode(":".join(self.login).encode()).decode()
        return text.replace(encoded, "***").replace(self.login[1], "***")


@dataclass(frozen=True, kw_only=True)
class Failed:
    """An upload that failed: the status the index answered, if it did, and what twine says."""

    status: int | None
    said: str


@dataclass(frozen=True, kw_only=True)
class Twine:
    """Twine, in a home directory of its own below ``scratch``."""

    runner: Runner
    scratch: Path
    access: Access

    def check(self, files: list[Path]) -> str:
        """Check metadata as an index does, warnings included; return what is wrong, or ""."""
        command = ["check", "--strict", *map(str, files)]
        outcome = self._run("check", command, {}, CHECK_TIMEOUT)
        return "" if outcome.ok else _plain(outcome.output()[-OUTPUT_BYTES:])

    def upload(self, file: Path, url: str, timeout: float) -> Failed | None:
        """Upload one file in at most ``timeout`` seconds; return what went wrong, or None."""
        # Only when it is verbose does twine say what the index says.
        options = ["--non-interactive", "--disable-progress-bar", "--verbose"]
        variables = {**self.access.variables, **self._login(url), **without_proxy(url)}
        place = ["--repository-url", url, str(file)]
        outcome = self._run("upload", ["upload", *options, *place], variables, timeout)
        if outcome.ok:
            return None
        said = self.access.redact(_plain(outcome.output()[-OUTPUT_BYTES:]))
        return Failed(status=_status(said), said=f"{outcome.describe()}\n{said}".rstrip())

    def _login(self, url: str) -> dict[str, str]:
        if self.access.login:
            user, password = self.access.login
            return {"TWINE_USERNAME": user, "TWINE_PASSWORD": password}
        if urlsplit(url).hostname in PYPI_HOSTS:
            return {"TWINE_USERNAME": TOKEN_USER}
        # An index that asks for no login gets one all the same: twine insists on it.
        return {"TWINE_USERNAME": "anonymous", "TWINE_PASSWORD": "anonymous"}

    def _run(
        self, name: str, words: list[str], variables: Mapping[str, str], timeout: float
    ) -> Outcome:
        home = self.scratch / "twine"
        home.mkdir(exist_ok=True)
        return self.runner.run(
            [sys.executable, "-IBm", "twine", "--no-color", *words],
            env={
                "PATH": os.defpath,
                "HOME": str(home),
                "LANG": "C.UTF-8",
                "COLUMNS": str(COLUMNS),
                "PYTHON_KEYRING_BACKEND": "keyring.backends.null.Keyring",
                **variables,
            },
            cwd=home,
            log=self.scratch / f"twine-{name}.log",
            timeout=timeout,
        )


def _plain(text: str) -> str:
    """What a person wants to read of twine's output and of a page within it."""
    text = html.unescape(re.sub(r"(?s)<style.*?</style>|<[^<>]*>", "", text))
    lines = [printable(line.strip()) for line in text.splitlines()]
    kept = [re.sub("^INFO +", "", line) for line in lines if line and not _CHATTER.match(line)]
    return "\n".join(f"  {line}" for line in kept[-TAIL_LINES:])


def _status(said: str) -> int | None:
    if "RedirectDetected" in said:
        return 302
    found = _HTTP_ERROR.findall(said)
    return int(found[-1]) if found else None
