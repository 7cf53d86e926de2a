"""What importing a package may not change is noticed; the harness runs it for each wheel."""

from __future__ import annotations

import builtins
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import _pytest.python
import pytest
import torch

from gate.harness import gate_effects

pytestmark = pytest.mark.processes

Patch = pytest.MonkeyPatch


def replace_code(patch: Patch) -> None:
    patch.setattr(_pytest.python.Function.runtest, "__code__", (lambda self: None).__code__)


CHANGES: dict[str, tuple[Callable[[Patch], Any], str]] = {
    "function": (
        lambda patch: patch.setattr(_pytest.python.Function, "runtest", None),
        "replaced _pytest.python.Function.runtest",
    ),
    "code": (replace_code, "replaced _pytest.python.Function.runtest (its code)"),
    "inherited": (
        lambda patch: patch.setattr(torch.optim.AdamW, "step", lambda self: None),
        "replaced torch.optim.adamw.AdamW.step",
    ),
    "gone": (lambda patch: patch.delattr(os, "fork"), "replaced os.fork"),
    "builtin": (lambda patch: patch.setattr(builtins, "open", len), "replaced builtins.open"),
    "module": (
        lambda patch: patch.setitem(sys.modules, "shutil", sys.modules["os"]),
        "replaced shutil.move",
    ),
    "variable": (
        lambda patch: patch.setenv("LD_PRELOAD", "x"),
        "changed the environment variable LD_PRELOAD",
    ),
    "directory": (lambda patch: patch.chdir("/"), "changed the working directory"),
    "path": (lambda patch: patch.syspath_prepend("/"), "changed the import path"),
    "finder": (
        lambda patch: patch.setattr(sys, "meta_path", [*sys.meta_path, None]),
        "changed the finders of imports",
    ),
    "stream": (lambda patch: patch.setattr(sys, "stdin", None), "changed the standard streams"),
    "signal": (
        lambda patch: patch.setattr(signal, "getsignal", lambda number: None),
        "changed what happens at SIGTERM",
    ),
    "logging": (lambda patch: patch.setattr(logging.root, "level", 1), "changed logging"),
    "warnings": (
        lambda patch: patch.setattr(warnings, "filters", [("ignore", None, Warning, None, 0)]),
        "changed the filters of warnings",
    ),
}


def ours(effects: list[str]) -> list[str]:
    """Without what pytest itself changes from test to test."""
    changing = ("PYTEST_CURRENT_TEST", "_pytest.assertion.util.", "warnings._showwarnmsg_impl")
    return [effect for effect in effects if not any(part in effect for part in changing)]


@pytest.fixture(scope="module")
def watch() -> gate_effects.Watch:
    return gate_effects.Watch("mini", list)


@pytest.mark.parametrize("name", CHANGES)
def test_changes_outside_of_the_package(
    name: str, watch: gate_effects.Watch, monkeypatch: Patch
) -> None:
    change, words = CHANGES[name]
    with monkeypatch.context() as patch:
        change(patch)
        effects = watch.effects()
    assert words in effects


def test_nothing_is_found_where_nothing_changed(watch: gate_effects.Watch) -> None:
    assert ours(watch.effects()) == []


def test_plugins_and_threads() -> None:
    plugins, event = ["one"], threading.Event()
    watch = gate_effects.Watch("mini", lambda: plugins)
    plugins.append("two")
    thread = threading.Thread(target=event.wait, name="telemetry")
    thread.start()
    assert watch.effects() == ["changed pytest's plugins", "started the thread telemetry"]
    event.set()
    thread.join()


def test_torch_is_watched_too(watch: gate_effects.Watch) -> None:
    dtype, state = torch.get_default_dtype(), torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    torch.rand(1)
    effects = watch.effects()
    torch.set_default_dtype(dtype)
    torch.set_rng_state(state)
    assert {"changed torch's default dtype", "changed torch's random numbers"} <= {*effects}


def test_what_belongs_to_the_package_is_its_own(monkeypatch: Patch) -> None:
    watch = gate_effects.Watch("_pytest", list)
    monkeypatch.setattr(_pytest.python.Function, "runtest", None)
    assert watch.effects() == []


def test_only_tools_are_looked_at_while_tests_run(
    watch: gate_effects.Watch, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(_pytest.python.Function, "runtest", None)
    monkeypatch.setattr(threading, "excepthook", None)
    assert ours(watch.tampering()) == ["replaced _pytest.python.Function.runtest"]
