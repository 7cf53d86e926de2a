"""Upload gated wheels, and nothing else, and see that the index holds exactly these bytes.

Everything is decided before the first byte is sent, on a private copy. What the index already
holds is compared by digest, so that an upload that broke off is finished by running it again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urljoin, urlsplit

from gate import policy
from gate.attested import File, Release, attested
from gate.errors import (
    EnvironmentFailed,
    GateError,
    IndexFailing,
    IndexRefused,
    UsageFailure,
    WheelRejected,
)
from gate.index import Index
from gate.policy import Policy, PublishPolicy
from gate.report import Display, Phase, Report
from gate.repository import ROOT, Repository
from gate.runner import Runner
from gate.scratch import scratch
from gate.upload import Access, Failed, Twine
from gate.wheels import sha256_of

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 5.0
AGAIN = "run the same command again: it sends only what the index does not hold"
UPLOADED, ALREADY_THERE = "uploaded", "already there"
NOT_SENT, PERHAPS_SENT, REFUSED = "not sent", "perhaps sent", "refused"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What ``publish`` is asked to do.

    Attributes:
        files: wheels, and sdists that were built with them.
        base: directory that relative files count from.
        repository: name of an index in ``[tool.gate.publish]``, or the URL uploads go to.
        evidence: the evidence folder.
        index: URL of the simple index, where ``repository`` is a URL that does not tell.
        timeout: seconds for each upload, and for the index to show what was sent.
        environ: where credentials, certificates and proxies are taken from.
        root: the checkout that is released.
    """

    files: tuple[str, ...]
    base: Path
    repository: str
    evidence: Path
    index: str | None = None
    timeout: float = 300.0
    verbose: bool = False
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)
    root: Path = ROOT


@dataclass(frozen=True, kw_only=True)
class Published:
    """A file of which the index holds exactly the attested bytes; ``how`` says since when."""

    name: str
    sha256: str
    how: str


def publish(options: Options, display: Display) -> list[Published]:
    """Publish files; return them, in order.

    Raises:
        UsageFailure: the command makes no sense.
        WheelRejected: a wheel fails the audit, or an index would refuse its metadata.
        EvidenceRejected: evidence or the checkout does not allow it; the index was not asked.
        IndexRefused: the index holds other bytes (nothing was sent), or does not take ours.
        EnvironmentFailed: the index does not answer, or there is nothing to log in with.
    """
    with scratch("publish") as folder:
        return _Publication(options, display, folder).run()


class _Publication:
    def __init__(self, options: Options, display: Display, scratch: Path) -> None:
        self._options, self._display, self._scratch = options, display, scratch
        self._runner = Runner(verbose=options.verbose, on_tick=display.tick)
        self._access = Access.of(options.environ)
        self._twine = Twine(runner=self._runner, scratch=scratch, access=self._access)
        self._report = Report(wheel="")
        self._state: dict[str, str] = {}

    def run(self) -> list[Published]:
        with self._told():
            rules = policy.load(self._options.root)
            target = rules.publishing_to(self._options.repository)
            demand_plain_url(target.url)
            files = self._files(rules, target)
            with self._phase("index") as phase:
                index = self._index(target)
                there = self._compare(index, files)
                phase.detail = f"{index.simple} holds {len(there)} of {len(files)}"
            missing = [file for file in files if file.name not in there]
            if missing:
                self._access.demand_login(target.url)
                self._send(missing, index, target)
                with self._phase("confirm", f"at most {self._options.timeout:g} s") as phase:
                    self._confirm(index, files)
                    phase.detail = "the index has the same sha256"
        return [
            Published(
                name=file.name,
                sha256=file.sha256,
                how=ALREADY_THERE if file.name in there else UPLOADED,
            )
            for file in files
        ]

    def _files(self, rules: Policy, target: PublishPolicy) -> list[File]:
        """The files, after everything that can be found out without the index."""
        release = Release(
            repository=Repository(runner=self._runner, root=self._options.root),
            rules=rules,
            target=target,
            evidence=self._options.evidence,
            base=self._options.base,
            scratch=self._scratch,
        )
        with self._phase("verify") as phase:
            files = attested(self._options.files, release)
            phase.detail = ", ".join(file.name for file in files)
        for file in files:
            for statement in file.statements:
                self._display.say(f"gate: {file.name}: {statement.about()}")
        self._display.say(f"gate: {self._options.repository} requires {target.describe()}")
        with self._phase("metadata"):
            if problem := self._twine.check([file.copy for file in files]):
                raise WheelRejected(f"An index would refuse the metadata.\n{problem}")
        return files

    # What the index holds

    def _index(self, target: PublishPolicy) -> Index:
        """The simple index that shows what is uploaded to the target."""
        given = self._options.index
        if given and target.index:
            raise UsageFailure(
                f"--index {given!r}: pyproject.toml says that it is {target.index}.",
                next_step="leave --index away",
            )
        known = [url for url in (target.index, given) if url]
        choices = [
            Index(
                simple=url.rstrip("/") + "/",
                # What is for uploads stays with the host of the uploads.
                login=self._access.login if _origin(url) == _origin(target.url) else None,
                ca_file=self._access.ca_file,
                proxies=self._access.proxies,
                timeout=min(30.0, self._options.timeout),
                transfer=self._options.timeout,
            )
            for url in known or simple_urls(target.url)
        ]
        for index in choices:
            demand_plain_url(index.simple)
            # Those that pyproject.toml names are there, and PyPI's first page is large.
            if target.index or index.exists():
                return index
        tried = ", ".join(index.simple for index in choices)
        raise UsageFailure(
            f"There is no package index at {tried}.", next_step="name it with --index URL"
        )

    def _compare(self, index: Index, files: Sequence[File]) -> set[str]:
        """The names of the files that the index already holds.

        Raises:
            IndexRefused: it holds other bytes under a name.
        """
        there, others = set(), []
        for project in dict.fromkeys(file.project for file in files):
            held = index.files(project) or {}
            for file in files:
                if file.project == project and file.name in held:
                    digest = index.sha256(held[file.name])
                    if digest != file.sha256:
                        others.append(_other_bytes(file, digest))
                    else:
                        there.add(file.name)
                        self._state.setdefault(file.name, ALREADY_THERE)
        if others:
            raise IndexRefused(
                f"{index.simple} holds other bytes under the same name",
                findings=others,
                next_step="what is published stays: raise the version, then build and gate again",
            )
        return there

    # Sending

    def _send(self, files: Sequence[File], index: Index, target: PublishPolicy) -> None:
        for file in files:
            self._state[file.name] = NOT_SENT
        for number, file in enumerate(files, 1):
            note = f"{number} of {len(files)}: {file.name}"
            with self._phase("upload", note) as phase:
                phase.detail = note
                if sha256_of(file.copy) != file.sha256:
                    raise EnvironmentFailed(f"The private copy of {file.name} was changed.")
                self._state[file.name] = PERHAPS_SENT
                failed = self._twine.upload(file.copy, target.url, self._options.timeout)
                if failed:
                    self._explain(file, failed, index, target)
                self._state[file.name] = UPLOADED

    def _explain(self, file: File, failed: Failed, index: Index, target: PublishPolicy) -> None:
        """Accept a failed upload after which the index holds our bytes all the same.

        An upload that broke off may have arrived, and then its repetition is refused.
        """
        status = failed.status
        if status is not None and status < 500:
            self._state[file.name] = REFUSED
        with suppress(EnvironmentFailed, IndexFailing):
            if status in (400, 409) and "already exist" in failed.said:
                self._confirm(index, [file])
                return
            if file.name in self._compare(index, [file]):
                return
        if status is None:
            raise EnvironmentFailed(
                f"Uploading {file.name} to {target.url} failed: {failed.said}", next_step=AGAIN
            )
        what = f"{target.url} did not accept {file.name}: {failed.said}"
        hint = "check TWINE_USERNAME and TWINE_PASSWORD, then " if status in (401, 403) else ""
        raise (IndexFailing if status >= 500 else IndexRefused)(what, next_step=hint + AGAIN)

    def _confirm(self, index: Index, files: Sequence[File]) -> None:
        """Wait until the index lists every file, with the digest it was sent with.

        Raises:
            IndexRefused: it lists another digest, or not all of them within the time limit.
        """
        deadline, pause = time.monotonic() + self._options.timeout, FIRST_PAUSE
        while True:
            why = f"{index.simple} does not list them all"
            try:
                missing = {file.name for file in files} - self._compare(index, files)
                if not missing:
                    return
            except (EnvironmentFailed, IndexFailing) as error:
                why, missing = error.what, {file.name for file in files}
            if time.monotonic() + pause > deadline:
                raise IndexRefused(
                    f"Within {self._options.timeout:g} s the index did not show what was sent: "
                    f"{why}",
                    findings=sorted(missing),
                    next_step="wait, then " + AGAIN,
                )
            self._idle(pause)
            pause = min(pause * 1.5, LONGEST_PAUSE)

    def _idle(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))
            self._display.tick()

    # Telling

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Have every failure say what is at the index, and what is not."""
        try:
            yield
        except GateError as error:
            told = [f"{state}: {', '.join(names)}" for state, names in self._by_state().items()]
            if not {UPLOADED, PERHAPS_SENT} & set(self._state.values()):
                told.insert(0, "nothing was published")
            error.state = "; ".join(told)
            raise

    def _by_state(self) -> dict[str, list[str]]:
        states: dict[str, list[str]] = {}
        for name, state in self._state.items():
            states.setdefault(state, []).append(name)
        return states

    def _phase(self, name: str, note: str = "") -> AbstractContextManager[Phase]:
        return self._display.phase(self._report, name, note)


def demand_plain_url(url: str) -> None:
    """Refuse a URL that carries a password, which every message would show.

    Raises:
        UsageFailure: it does.
    """
    if "@" in urlsplit(url).netloc:
        raise UsageFailure(
            "A URL must not hold a user name or password.",
            next_step="set TWINE_USERNAME and TWINE_PASSWORD instead",
        )


def simple_urls(upload: str) -> list[str]:
    """Where the simple index of an upload URL may be: as with PyPI, pypiserver and devpi."""
    url = upload.rstrip("/") + "/"
    if url.endswith("/legacy/"):
        return [urljoin(url, "../simple/")]
    if url.endswith("/simple/"):
        return [url]
    return [url + "simple/", url + "+simple/"]


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


def _other_bytes(file: File, digest: str) -> str:
    return f"{file.name}: the index has sha256 {digest}, the file given {file.sha256}"
