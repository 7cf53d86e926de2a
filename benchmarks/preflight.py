"""Time what ranks spend on agreeing, beside gefen-x 0.5.0 in the same run.

    python benchmarks/preflight.py --peer PYTHON     # an interpreter that has gefen-x 0.5.0

Measured is ``GefenMuon.step()`` over sharded [8, 4] matrices of which none has a gradient on any
rank: nothing is exchanged or updated then, so the step is the agreement and what surrounds it.
Ranks are processes over gloo on this machine; the packages take turns and each figure is the
best of its repetitions, so that other load on the machine does not decide.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

COUNTS = (100, 1000)
WORLDS = (2, 4)
TURNS = 2
STEPS = 15


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--peer", required=True, help="an interpreter that has gefen-x 0.5.0")
    peer = options.parse_args().peer
    print(f"{'ranks':>5} {'parameters':>10} {'gefen ms':>9} {'gefen-x ms':>10} {'ratio':>6}")
    for world in WORLDS:
        for count in COUNTS:
            turns = [
                (measure(sys.executable, world, count), measure(peer, world, count))
                for _ in range(TURNS)
            ]
            ours, theirs = (min(times) for times in zip(*turns, strict=True))
            row = f"{world:>5} {count:>10} {ours:>9.2f} {theirs:>10.2f} {theirs / ours:>6.1f}"
            print(row, flush=True)


def measure(python: str, world: int, count: int) -> float:
    """Milliseconds of the fastest step on rank 0."""
    command = [python, __file__, "--rank-count", str(world), str(count)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment, check=True
    )
    return float(done.stdout.split()[-1])


def run_ranks(world: int, count: int) -> None:
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        pids = []
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    time_steps(rank, world, count, Path(scratch) / "store")
                    code = 0
                finally:
                    sys.stdout.flush()
                    os._exit(code)
            pids.append(pid)
        sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids))


def time_steps(rank: int, world: int, count: int, store: Path) -> None:
    import time

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    import gefen

    meeting = dist.FileStore(str(store), world)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=world)
    mesh = DeviceMesh("cpu", list(range(world)))
    local = torch.zeros(8 // world, 4)
    named = [
        (f"w{i}", torch.nn.Parameter(DTensor.from_local(local.clone(), mesh, [Shard(0)])))
        for i in range(count)
    ]
    optimizer = gefen.GefenMuon(named, fused=False)
    optimizer.step()
    times = []
    for _ in range(STEPS):
        dist.barrier()
        start = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - start)
    if rank == 0:
        print(1e3 * min(times))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank-count"]:
        run_ranks(int(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
