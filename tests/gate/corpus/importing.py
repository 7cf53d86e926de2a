"""Wheels that pass the audit, but that pip refuses or that misbehave once imported."""

from __future__ import annotations

from tests.gate.corpus.case import Table
from tests.gate.corpus.package import Package

TABLE = Table([])
SECONDS = 90.0
TESTS = (
    "single/test_golden.py::test_codebooks",
    "ranks/test_sharded_step.py::test_approximate_steps_enter_no_collective",
)


def caught(phase: str, *words: str, timeout: float = 60.0):
    return TABLE.add(phase, *words, seconds=SECONDS, tests=TESTS, timeout=timeout)


@caught("identity", "gefen cannot be imported", "No module named 'gefen.absent'")
def import_error(package: Package) -> None:
    """Of a name that is put together, so that the audit does not see it."""
    package.on_import("import importlib\nimportlib.import_module('gefen.' + 'absent')")


@caught("identity", "gefen cannot be imported", "OSError: once")
def import_error_the_first_time_only(package: Package) -> None:
    package.on_import(
        "import os\n"
        "if 'GEFEN_WAS_HERE' not in os.environ:\n"
        "    os.environ['GEFEN_WAS_HERE'] = '1'\n"
        "    raise OSError('once')\n"
    )


@caught("identity", "cannot be collected: it ended early, without a record")
def exit_while_importing(package: Package) -> None:
    package.on_import("import os\nos._exit(0)")


@caught("identity", "gefen cannot be imported", "SystemExit: 0")
def polite_exit_while_importing(package: Package) -> None:
    package.on_import("raise SystemExit(0)")


@caught("identity", "gefen cannot be imported", "Skipped: no GPU here")
def skip_while_importing(package: Package) -> None:
    package.on_import(
        "import sys\n"
        "if 'pytest' in sys.modules:\n"
        "    sys.modules['pytest'].skip('no GPU here', allow_module_level=True)\n"
    )


@caught("identity", "did not reach its end: its exit was forced")
def success_whatever_happens(package: Package) -> None:
    package.on_import("import atexit, os\natexit.register(os._exit, 0)")


@caught("identity", "cannot be collected: killed by SIGSEGV")
def segfault_while_importing(package: Package) -> None:
    package.on_import("import ctypes\nctypes.string_at(0)")


@caught("identity", "cannot be collected: hung: killed after", "in _wait_for_ever", timeout=20)
def hang_while_importing(package: Package) -> None:
    package.on_import(
        "def _wait_for_ever():\n    import threading\n    threading.Event().wait()\n"
        "_wait_for_ever()\n"
    )


@caught("identity", "cannot be collected: printed more than 64 MiB")
def output_without_end(package: Package) -> None:
    package.on_import("while True:\n    print('working' * 1000)")


@caught("identity", "cannot be collected: printed more than 64 MiB")
def output_past_the_capture(package: Package) -> None:
    """Straight to the file that the gate keeps its log in."""
    package.on_import(
        "import os\n"
        "_mine = [int(fd) for fd in os.listdir('/proc/self/fd')]\n"
        "_logs = [fd for fd in _mine if os.path.exists(f'/proc/self/fd/{fd}')\n"
        "         and os.readlink(f'/proc/self/fd/{fd}').endswith('output.log')]\n"
        "while True:\n"
        "    for _fd in _logs:\n"
        "        os.write(_fd, b'working' * 10000)\n"
    )


@caught("identity", "cannot be collected: left 1 process(es) running: sleep 600")
def grandchild_that_holds_the_pipes(package: Package) -> None:
    package.on_import(
        "import subprocess\n"
        "if not globals().get('_child'):\n"
        "    _child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    )


@caught("identity", "cannot be collected: left 1 process(es) running")
def daemon_that_leaves_its_parents(package: Package) -> None:
    package.on_import(
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork():\n"
        "        os._exit(0)\n"
        "    time.sleep(600)\n"
        "    os._exit(0)\n"
    )


@caught("identity", "Importing gefen started the thread telemetry")
def daemon_thread(package: Package) -> None:
    package.on_import(
        "import threading\n"
        "_event = threading.Event()\n"
        "threading.Thread(target=_event.wait, name='telemetry', daemon=True).start()\n"
    )


@caught("identity", "Importing gefen started the thread telemetry")
def thread_that_keeps_the_process_alive(package: Package) -> None:
    package.on_import(
        "import threading\n"
        "_event = threading.Event()\n"
        "threading.Thread(target=_event.wait, name='telemetry').start()\n"
    )


@caught("identity", "/src is on the import path")
def import_from_the_checkout(package: Package) -> None:
    package.on_import("import sys\nsys.path.insert(0, 'CHECKOUT/src')")


@caught("identity", "pyproject.toml was read, which is not of the environment")
def reading_the_checkout(package: Package) -> None:
    package.on_import("with open('CHECKOUT/pyproject.toml') as _file:\n    _file.read()")


@caught("identity", "gefen.errors was imported from None, not from the wheel")
def module_made_while_importing(package: Package) -> None:
    package.on_import(
        "import sys, types\n"
        "_made = types.ModuleType('gefen.errors')\n"
        "_made.__dict__.update(sys.modules['gefen.errors'].__dict__, __file__=None)\n"
        "sys.modules['gefen.errors'] = _made\n"
    )


@caught("identity", "gefen/errors.py does not match the wheel's RECORD")
def module_that_rewrites_another(package: Package) -> None:
    package.on_import(
        "from pathlib import Path\n"
        "with (Path(__file__).parent / 'errors.py').open('a') as _file:\n"
        "    _file.write('# patched')\n"
    )


@caught("identity", "suite/conftest.py was changed by the test process")
def rewriting_the_tests(package: Package) -> None:
    package.on_import(
        "import os\n"
        "_folder = os.environ.get('GATE_RECORDS', '').rpartition('/records')[0]\n"
        "if _folder:\n"
        "    with open(f'{_folder}/suite/conftest.py', 'a') as _file:\n"
        "        _file.write('\\ncollect_ignore_glob = [\"*\"]\\n')\n"
    )


@caught("identity", "Importing gefen changed the finders of imports")
def import_hook(package: Package) -> None:
    package.on_import(
        "import sys\n"
        "class _Finder:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        return None\n"
        "sys.meta_path.insert(0, _Finder)\n"
    )


@caught("identity", "Importing gefen changed pytest's plugins")
def plugin_that_rewrites_results(package: Package) -> None:
    package.on_import(
        "import gc\n"
        "class _Plugin:\n"
        "    @staticmethod\n"
        "    def pytest_runtest_logreport(report):\n"
        "        report.outcome, report.longrepr = 'passed', None\n"
        "for _object in gc.get_objects():\n"
        "    if type(_object).__name__ == 'PytestPluginManager':\n"
        "        _object.register(_Plugin(), 'gefen')\n"
    )


@caught("identity", "Importing gefen replaced _pytest.python.Function.runtest")
def tests_that_do_nothing(package: Package) -> None:
    package.on_import(
        "import sys\n"
        "if '_pytest.python' in sys.modules:\n"
        "    sys.modules['_pytest.python'].Function.runtest = lambda self: None\n"
    )


@caught("identity", "Importing gefen replaced _pytest.python.Function.runtest (its code)")
def tests_whose_code_does_nothing(package: Package) -> None:
    """The function stays the same object."""
    package.on_import(
        "import sys\n"
        "if '_pytest.python' in sys.modules:\n"
        "    _run = sys.modules['_pytest.python'].Function.runtest\n"
        "    _run.__code__ = (lambda self: None).__code__\n"
    )


@caught("identity", "Importing gefen replaced torch.testing")
def comparisons_that_always_hold(package: Package) -> None:
    package.on_import("import torch\ntorch.testing.assert_close = lambda *a, **k: None")


@caught("identity", "Importing gefen replaced torch.optim")
def reference_that_is_replaced(package: Package) -> None:
    package.on_import("import torch\ntorch.optim.AdamW.step = lambda self: None")


@caught("identity", "Importing gefen replaced builtins.open")
def replaced_builtin(package: Package) -> None:
    package.on_import(
        "import builtins\n"
        "_open = builtins.open\n"
        "builtins.open = lambda *args, **named: _open(*args, **named)\n"
    )


@caught("identity", "Importing gefen changed the environment variable LD_PRELOAD")
def changed_environment(package: Package) -> None:
    package.on_import("import os\nos.environ['LD_PRELOAD'] = ''")


@caught("identity", "Importing gefen changed the working directory")
def changed_directory(package: Package) -> None:
    package.on_import("import os\nos.chdir('/')")


@caught("identity", "Importing gefen changed what happens at SIGINT")
def signal_handler(package: Package) -> None:
    package.on_import("import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)")


@caught("identity", "Importing gefen changed torch's default dtype")
def other_default_dtype(package: Package) -> None:
    package.on_import("import torch\ntorch.set_default_dtype(torch.float64)")


@caught("identity", "Importing gefen changed torch's random numbers")
def seeded_while_importing(package: Package) -> None:
    package.on_import("import torch\ntorch.manual_seed(1234)")


@caught("identity", "Importing gefen changed the filters of warnings")
def silenced_warnings(package: Package) -> None:
    package.on_import("import warnings\nwarnings.simplefilter('ignore')")
