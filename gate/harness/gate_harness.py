"""Runs inside the environment under test: proof of identity, inventory, completion records.

A pytest plugin (``-p gate_harness``). Every pytest process, single or a rank, writes into
``GATE_RECORDS``: a JUnit file, whose test cases carry their node ids, and when it has finished a
record with its identity. Uses nothing of the wheel and nothing but the standard library and
pytest.
"""

import faulthandler
import hashlib
import importlib.metadata
import json
import os
import signal
import sys
from base64 import urlsafe_b64encode
from pathlib import Path

import pytest
from packaging.requirements import Requirement

RECORDS = Path(os.environ["GATE_RECORDS"])
RANK = os.environ.get("RANK", "0")
PACKAGE = os.environ["GATE_PACKAGE"]
DISTRIBUTION = os.environ["GATE_DISTRIBUTION"]
# Where it is given, all tests are collected, but only this one runs.
CANARY = os.environ.get("GATE_CANARY")


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


def path_problems():
    """Return what of the import path, and what was imported, lies outside the environment."""
    allowed = [Path(entry).resolve() for entry in json.loads(os.environ["GATE_PATH"])]
    allowed.append(Path(sys.base_prefix).resolve())

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


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    stacks = open(RECORDS / f"stacks-{RANK}.txt", "w")  # noqa: SIM115 - open until the end
    # The gate asks with the first; torchrun ends the peers of a failed rank with the second.
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.register(signal.SIGTERM, file=stacks, all_threads=True, chain=True)
    config.option.xmlpath = str(RECORDS / f"junit-{RANK}.xml")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    __import__(PACKAGE)
    for item in items:
        item.user_properties.append(("nodeid", item.nodeid))
    if CANARY:
        record("inventory", [item.nodeid for item in items if item.path.stem != CANARY])
        items[:] = [item for item in items if item.path.stem == CANARY]


def pytest_runtest_logstart(nodeid):
    (RECORDS / f"current-{RANK}").write_text(nodeid)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item):
    report = yield
    if hasattr(report, "wasxfail"):
        # JUnit shows a test that passed against expectation like any other.
        item.user_properties.append(("wasxfail", report.wasxfail or "no reason given"))
    return report


def pytest_sessionfinish(exitstatus):
    record(
        "finished",
        {
            "exitstatus": int(exitstatus),
            "identity": identity_problems(),
            "unmet": unmet_requirements(),
        },
    )
