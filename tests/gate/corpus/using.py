"""Wheels that are imported without trouble, and misbehave once they are used."""

from __future__ import annotations

from tests.gate.corpus.case import Table
from tests.gate.corpus.package import Package

TABLE = Table([])
SECONDS = 240.0

ADAMW = "single/test_adamw.py::test_equal_blocks_are_adamw"
LONG_BLOCK = "single/test_adamw.py::test_block_longer_than_a_chunk"
CODEBOOKS = "single/test_golden.py::test_codebooks"
PERIODS = "single/test_golden.py::test_periods"
TRAJECTORY = "single/test_golden.py::test_trajectory"
ROUND_TRIP = "single/test_checkpoint.py::test_round_trip"
DDP = "ranks/test_ddp.py::test_ddp_equals_one_process"
FAULT = "ranks/test_preflight.py::test_a_fault_on_one_rank_is_one_error_on_all"
LOCAL = "ranks/test_sharded_step.py::test_approximate_steps_enter_no_collective"

RANK = "import os, sys\nrank = os.environ.get('RANK', '')\n"
# How code of a package gets hold of the test that runs.
ITEM = (
    "import sys\n"
    "frame = sys._getframe()\n"
    "while frame and 'item' not in frame.f_locals:\n"
    "    frame = frame.f_back\n"
    "item = frame.f_locals['item'] if frame else None\n"
)
GO_ON = "return inner(self, *args, **kwargs)\n"
WRONG_SIGN = (
    "params = [p for group in self.param_groups for p in group['params']]\n"
    "before = [p.detach().clone() for p in params]\n"
    "result = inner(self, *args, **kwargs)\n"
    "for param, old in zip(params, before):\n"
    "    param.data = 2 * old - param.data\n"
)


def caught(*words: str, tests: tuple[str, ...] = (CODEBOOKS, PERIODS, LOCAL), timeout: float = 90):
    return TABLE.add("regressions", *words, seconds=SECONDS, tests=tests, timeout=timeout)


@caught(ADAMW, "  failed: ", tests=(ADAMW, LOCAL))
def wrong_sign_of_the_learning_rate(package: Package) -> None:
    package.on_step(f"{WRONG_SIGN}return result")


@caught(
    f"{TRAJECTORY}[gefen_factored_fp32]", "  failed: ", "after step 7", tests=(TRAJECTORY, LOCAL)
)
def nan_after_step_3(package: Package) -> None:
    package.on_step(
        "result = inner(self, *args, **kwargs)\n"
        "self.steps_taken = getattr(self, 'steps_taken', 0) + 1\n"
        "for group in self.param_groups if self.steps_taken > 3 else ():\n"
        "    for param in group['params']:\n"
        "        param.data.fill_(float('nan'))\n"
        "return result\n"
    )


@caught(ADAMW, "  failed: ", tests=(ADAMW, LOCAL))
def nan_with_one_seed(package: Package) -> None:
    package.on_step(
        "import torch\n"
        "result = inner(self, *args, **kwargs)\n"
        "for group in self.param_groups if torch.initial_seed() == 0 else ():\n"
        "    for param in group['params']:\n"
        "        param.data.fill_(float('nan'))\n"
        "return result\n"
    )


@caught(f"{ROUND_TRIP}[gefen-torch.float32]", "  failed: ", tests=(ROUND_TRIP, LOCAL))
def state_dropped_on_load(package: Package) -> None:
    package.on_import(
        "for _cls in (Gefen, GefenMuon):\n"
        "    def _load(self, state, inner=_cls.load_state_dict):\n"
        "        inner(self, state)\n"
        "        self.state.clear()\n"
        "    _cls.load_state_dict = _load\n"
    )


@caught(f"{FAULT}", tests=(CODEBOOKS, FAULT), timeout=40)
def no_preflight(package: Package) -> None:
    """Ranks that disagree go on as if they did not."""
    package.on_import(
        "from gefen.distributed import preflight as _preflight\n"
        "_preflight._fingerprint.__name__\n"
        "_preflight._fingerprint = lambda digests: 0\n"
    )


@caught("ranks-2 on rank 1", "  the package cannot be imported: ImportError: only here")
def import_error_on_one_rank(package: Package) -> None:
    package.on_import(
        "import os\nif os.environ.get('RANK') == '1':\n    raise ImportError('only here')"
    )


@caught(f"ranks-2: {DDP}[gefen]", "  failed: ", tests=(CODEBOOKS, DDP))
def wrong_on_one_rank(package: Package) -> None:
    package.on_step(
        f"{RANK}{WRONG_SIGN}return result".replace("zip(", "zip(() if rank != '1' else ")
    )


@caught(
    f"ranks-2: {DDP}[gefen]",
    "  rank 1 ended early: it left no completion record",
    tests=(CODEBOOKS, DDP),
)
def rank_that_exits_early(package: Package) -> None:
    package.on_step(f"{RANK}if rank == '1':\n    os._exit(0)\n{GO_ON}")


@caught(f"ranks-2: {DDP}[gefen]", "  failed: SystemExit: 0 on rank 1", tests=(CODEBOOKS, DDP))
def rank_that_exits_politely(package: Package) -> None:
    package.on_step(f"{RANK}if rank == '1':\n    sys.exit(0)\n{GO_ON}")


@caught(
    f"ranks-2: {DDP}[gefen]",
    "  hung: killed after",
    "in monitored_barrier",
    tests=(CODEBOOKS, DDP),
    timeout=30,
)
def hang_in_a_collective(package: Package) -> None:
    package.on_step(
        f"{RANK}import torch\nif rank == '0':\n    torch.distributed.monitored_barrier()\n{GO_ON}"
    )


@caught(PERIODS, "  hung: killed after", timeout=30)
def hang_in_a_step(package: Package) -> None:
    package.on_step(f"{RANK}import threading\nif not rank:\n    threading.Event().wait()\n{GO_ON}")


@caught(PERIODS, "  killed by SIGSEGV")
def segfault(package: Package) -> None:
    package.on_step(f"{RANK}import ctypes\nif not rank:\n    ctypes.string_at(0)\n{GO_ON}")


@caught("  left 1 process(es) running: sleep 600")
def grandchild_that_outlives_the_tests(package: Package) -> None:
    package.on_step(
        f"{RANK}import subprocess\n"
        "if not rank and not hasattr(type(self), 'child'):\n"
        "    type(self).child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"{GO_ON}"
    )


@caught(PERIODS, "  failed: OSError: [Errno 27] File too large")
def output_without_end_in_a_step(package: Package) -> None:
    package.on_step(f"{RANK}while not rank:\n    os.write(1, b'working' * 10000)\n{GO_ON}")


@caught(PERIODS, "  its supervisor was killed")
def killing_the_supervisor(package: Package) -> None:
    package.on_step(
        f"{RANK}if not rank:\n    os.kill(os.getppid(), 9)\n    while True: pass\n{GO_ON}"
    )


@caught("  The process did not reach its end", "in wait")
def thread_that_keeps_the_process_from_ending(package: Package) -> None:
    package.on_step(
        f"{RANK}import threading\n"
        "if not rank:\n"
        "    threading.Thread(target=threading.Event().wait).start()\n"
        f"{GO_ON}"
    )


@caught("  The process did not reach its end")
def success_at_exit_whatever_happened(package: Package) -> None:
    package.on_step(
        f"{RANK}import atexit\nif not rank:\n    atexit.register(os._exit, 0)\n{GO_ON}"
    )


@caught(PERIODS, "  skipped: ", "not on this machine")
def skipped_test(package: Package) -> None:
    package.on_step(
        f"{RANK}if not rank:\n    sys.modules['pytest'].skip('not on this machine')\n{GO_ON}"
    )


@caught(PERIODS, "  ended the tests, with 0")
def tests_that_are_called_off(package: Package) -> None:
    package.on_step(
        f"{RANK}if not rank:\n    sys.modules['pytest'].exit('enough', returncode=0)\n{GO_ON}"
    )


@caught(LONG_BLOCK, "  did not run", tests=(ADAMW, LONG_BLOCK, LOCAL))
def deselected_tests(package: Package) -> None:
    package.on_step(f"{RANK}{ITEM}if not rank and item:\n    del item.session.items[1:]\n{GO_ON}")


@caught(PERIODS, "  did not run", "  renamed", "  unexpected: passed")
def renamed_test(package: Package) -> None:
    package.on_step(
        f"{RANK}{ITEM}"
        "if not rank and item:\n"
        "    item.user_properties[:] = [('nodeid', 'renamed')]\n"
        f"{GO_ON}"
    )


@caught(PERIODS, "  passed although expected to fail: not here")
def test_expected_to_fail(package: Package) -> None:
    package.on_step(
        f"{RANK}{ITEM}"
        "if not rank and item:\n"
        "    mark = sys.modules['pytest'].mark.xfail(reason='not here', strict=False)\n"
        "    item.add_marker(mark)\n"
        f"{GO_ON}"
    )


@caught(
    "  A test that must fail did not come back as failed: passed.",
    "  the package replaced _pytest.reports.TestReport.from_item_and_call",
    tests=(ADAMW, LOCAL),
)
def reports_rewritten_once_it_is_used(package: Package) -> None:
    package.on_step(
        f"{RANK}{WRONG_SIGN}"
        "reports = sys.modules['_pytest.reports'].TestReport\n"
        "real = reports.from_item_and_call.__func__\n"
        "def always_good(cls, item, call):\n"
        "    call.excinfo = None\n"
        "    return real(cls, item, call)\n"
        "if not rank:\n"
        "    reports.from_item_and_call = classmethod(always_good)\n"
        "return result\n"
    )


@caught("  A test that must fail did not come back as failed: did not run", tests=(ADAMW, LOCAL))
def records_rewritten_at_exit(package: Package) -> None:
    package.on_step(
        f"{RANK}{WRONG_SIGN}"
        "import atexit, re\n"
        "def good_news():\n"
        "    path = os.environ['GATE_RECORDS'] + '/junit-0.xml'\n"
        "    with open(path) as file:\n"
        "        text = file.read()\n"
        "    with open(path, 'w') as file:\n"
        "        file.write(re.sub('(?s)<failure.*?</failure>', '', text))\n"
        "if not rank:\n"
        "    atexit.register(good_news)\n"
        "return result\n"
    )


@caught(ADAMW, "  failed: PermissionError: ", tests=(ADAMW, LOCAL))
def statement_of_its_own(package: Package) -> None:
    """Evidence that the package writes for itself; a kernel without Landlock cannot prevent it."""
    package.on_step(
        f"{RANK}{WRONG_SIGN}"
        "pid = os.getpid()\n"
        "while pid > 1:\n"
        "    with open(f'/proc/{pid}/cmdline') as file:\n"
        "        words = file.read().split('\\0')\n"
        "    if '--evidence' in words:\n"
        "        folder = words[words.index('--evidence') + 1] + '/statements'\n"
        "        os.makedirs(folder, exist_ok=True)\n"
        "        with open(folder + '/gefen.intoto.json', 'w') as file:\n"
        "            file.write('{}')\n"
        "        break\n"
        "    with open(f'/proc/{pid}/stat') as file:\n"
        "        pid = int(file.read().rpartition(')')[2].split()[1])\n"
        "return result\n"
    )
