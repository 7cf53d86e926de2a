"""Runs inside the environment under test: proof of identity, inventory, completion records.

A pytest plugin (``-p gate_harness``). Every pytest process, single or a rank, writes into
``GATE_RECORDS``: a JUnit file, whose test cases carry their node ids, when it has finished a
record with its identity, and a last one when Python exits. The last test, the canary, must fail;
where it alone does, the process ends with success. Uses nothing of the wheel and nothing but the
standard library and pytest.
"""

import atexit
import faulthandler
import hashlib
import importlib.metadata
import json
import os
import resource
import signal
import sys
import time
import traceback
from base64 import urlsafe_b64encode
from pathlib import Path

import gate_effects
import pytest
from packaging.requirements import Requirement

RECORDS = Path(os.environ["GATE_RECORDS"])
RANK = os.environ.get("RANK", "0")
PACKAGE = os.environ["GATE_PACKAGE"]
DISTRIBUTION = os.environ["GATE_DISTRIBUTION"]
CANARY = os.environ["GATE_CANARY"]
# All tests are collected, but only the canary runs.
ONLY_COLLECT = "GATE_ONLY_COLLECT" in os.environ
# What runs here must not read these, unless they lie in a folder of GATE_PATH.
FORBIDDEN = [Path(path).resolve() for path in json.loads(os.environ["GATE_FORBIDDEN"])]
FILE_LIMIT = 128 * 2**20
EXIT_SECONDS = 45

opened = set()
failed = set()
# Of files that cannot be collected: why.
broken = {}
# Of the test that is running: what speaks against it, and where.
noted = {}


def record(name, facts):
    part = RECORDS / f"{name}-{RANK}.part"
    part.write_text(json.dumps(facts))
    part.replace(RECORDS / f"{name}-{RANK}.json")


def identity_problems():
    """Return what speaks against the loaded package being the wheel's, as sentences."""
    site = Path(os.environ["GATE_SITE"]).resolve()
    distribution = importlib.metadata.distribution(DISTRIBUTION)
    expected = {
        Path(distribution.locate_file(file)).resolve(): file.hash
        for file in distribution.files or ()
        if file.hash
    }
    problems = [
        f"{path} does not match the wheel's RECORD"
        for path, digest in expected.items()
        if path.is_relative_to(site / PACKAGE)
        and (not path.exists() or encoded(path, digest.mode) != digest.value)
    ]
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] == PACKAGE:
            origin = getattr(module, "__file__", None)
            if origin is None or Path(origin).resolve() not in expected:
                problems.append(f"{name} was imported from {origin}, not from the wheel")
    return problems + path_problems()


def unmet_requirements():
    """Return what the wheel requires and the environment does not have, as sentences."""
    unmet = []
    for text in importlib.metadata.requires(DISTRIBUTION) or ():
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            unmet.append(f"{text}: it is not there")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            unmet.append(f"{text}: {version} is there")
    return unmet


def allowed_roots():
    """Return the folders that the environment consists of."""
    folders = [*json.loads(os.environ["GATE_PATH"]), sys.base_prefix]
    return [Path(folder).resolve() for folder in folders]


def path_problems():
    """Return what of the import path, and what was imported, lies outside the environment."""
    allowed = allowed_roots()

    def outside(entry):
        return not any(Path(entry).resolve().is_relative_to(root) for root in allowed)

    # Names in brackets are made up by what compiles code at run time.
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    imported = sorted(file for file in files if isinstance(file, str) and file[:1] != "<")
    return [f"{entry} is on the import path" for entry in sys.path if entry and outside(entry)] + [
        f"{file} was imported, which is not of the environment"
        for file in imported
        if outside(file)
    ]


def encoded(path, algorithm):
    digest = hashlib.new(algorithm, path.read_bytes()).digest()
    return urlsafe_b64encode(digest).rstrip(b"=").decode()


def note_opened(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)):
        opened.add(os.path.abspath(os.fsdecode(arguments[0])))


def forbidden_reads():
    """Return what was read outside of the environment, as sentences."""
    allowed = allowed_roots()
    resolved = {path: Path(path).resolve() for path in sorted(opened)}
    return [
        f"{path} was read, which is not of the environment"
        for path, real in resolved.items()
        if any(real.is_relative_to(root) for root in FORBIDDEN)
        and not any(real.is_relative_to(root) for root in allowed)
    ]


def import_package(config):
    """Import the package; return what this changed, and why it failed, or ""."""
    required = [Requirement(text) for text in importlib.metadata.requires(DISTRIBUTION) or ()]
    gate_effects.preload([one.name.replace("-", "_") for one in required])
    manager = config.pluginmanager
    config.watch = gate_effects.Watch(
        PACKAGE, lambda: [name for name, _ in manager.list_name_plugin()]
    )
    try:
        __import__(PACKAGE)
    except BaseException:  # whatever it is, the gate reports it
        return [], traceback.format_exc(limit=-3)
    return config.watch.effects(), ""


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    sys.addaudithook(note_opened)
    atexit.register(record, "exited", {})
    # Captured output goes to a file that nobody watches.
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT, FILE_LIMIT))
    stacks = open(RECORDS / f"stacks-{RANK}.txt", "w")  # noqa: SIM115 - open until the end
    config.stacks = stacks
    # The gate asks with the first; torchrun ends the peers of a failed rank with the second.
    faulthandler.enable(file=stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.register(signal.SIGTERM, file=stacks, all_threads=True, chain=True)
    config.option.xmlpath = str(RECORDS / f"junit-{RANK}.xml")


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session):
    session.config.imported = import_package(session.config)


def pytest_collectreport(report):
    if report.failed:
        broken[report.nodeid] = report.longreprtext


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    for item in items:
        item.user_properties.append(("nodeid", item.nodeid))
    if ONLY_COLLECT:
        tests = [item for item in items if item.path.stem != CANARY]
        own = [item.nodeid for item in tests if item.get_closest_marker("own")]
        record("inventory", [item.nodeid for item in tests])
        record("collected", {"own": own, "broken": broken})
        items[:] = [item for item in items if item.path.stem == CANARY]


def pytest_runtest_logstart(nodeid):
    noted.clear()
    (RECORDS / f"current-{RANK}").write_text(nodeid)


def pytest_runtest_logreport(report):
    if report.failed:
        failed.add(report.nodeid)
    if not report.passed and "verdict" not in noted:
        outcome = "error" if report.failed and report.when != "call" else report.outcome
        crash = getattr(report.longrepr, "reprcrash", None)
        message = (crash.message if crash else report.longreprtext).strip().splitlines()
        noted["verdict"] = f"{outcome}: {message[0]}" if message else outcome
        noted["detail"] = report.longreprtext


def pytest_runtest_logfinish(nodeid):
    """Note each test at once: who crashes later does not get to write a JUnit file."""
    line = json.dumps({"nodeid": nodeid, "verdict": "passed", **noted})
    with open(RECORDS / f"results-{RANK}.jsonl", "a") as file:
        file.write(f"{line}\n")
    (RECORDS / f"current-{RANK}").write_text("")


def place_of(item, excinfo):
    """Where in the suite a test failed: the last line of it that was running."""
    folder = item.config.rootpath
    found = f"{item.location[0]}:{(item.location[1] or 0) + 1}"
    for entry in excinfo.traceback:
        path = Path(str(entry.path))
        if path.is_relative_to(folder):
            found = f"{path.relative_to(folder)}:{entry.lineno + 1}"
    return f"tests/regression/{found}"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed and call.excinfo and "place" not in noted:
        # A clock that all ranks share.
        noted.update(place=place_of(item, call.excinfo), at=str(time.monotonic()))
        item.user_properties += [(name, noted[name]) for name in ("place", "at")]
    if hasattr(report, "wasxfail"):
        # JUnit shows a test that passed against expectation like any other.
        item.user_properties.append(("wasxfail", report.wasxfail or "no reason given"))
    return report


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    config = session.config
    effects, failure = getattr(config, "imported", ([], "it was never tried"))
    tampering = config.watch.tampering() if hasattr(config, "watch") else []
    record(
        "finished",
        {
            "exitstatus": int(exitstatus),
            "identity": identity_problems() + forbidden_reads(),
            "unmet": unmet_requirements(),
            "effects": effects,
            "failure": failure,
            "tampering": tampering,
        },
    )
    if failed == {f"{CANARY}.py::{CANARY}"} and exitstatus == pytest.ExitCode.TESTS_FAILED:
        session.exitstatus = pytest.ExitCode.OK
    # What keeps the process from ending from here on is shown, and ends with it.
    faulthandler.dump_traceback_later(EXIT_SECONDS, exit=True, file=config.stacks)
