"""What ranks spend on agreeing before a sharded step: gefen-cuda beside gefen-x.

- "R ranks, P parameters": ``GefenMuon.step()`` over P sharded [8, 4] matrices of which none has
  a gradient on any rank. Nothing is exchanged or updated then, so the step is the agreement and
  what surrounds it. Ranks are processes over gloo on this machine.
- "topology of 1000 ranks, bytes": what each rank of one mesh of 1000 holds once it has learned,
  in the first step, which ranks step together; no counterpart in gefen-x.

    python benchmarks/preflight.py [--peer-python PATH]
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from peer import OURS, Figures, compare, installed

COUNTS = (100, 1000)
WORLDS = (2, 4)
TURNS = 2
STEPS = 15


def agreeing(world: int, count: int) -> Figures:
    """Seconds of rank 0's fastest step."""
    import torch

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        pids = [forked(rank, world, count, scratch) for rank in range(world)]
        codes = [os.waitpid(pid, 0)[1] for pid in pids]
        if any(codes):
            sys.exit("a rank failed")
        fastest = float((scratch / "fastest").read_text())
    return {f"{world} ranks, {count} parameters": fastest}


def forked(rank: int, world: int, count: int, scratch: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        fastest = time_steps(rank, world, count, scratch / "store")
        if rank == 0:
            (scratch / "fastest").write_text(repr(fastest))
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def time_steps(rank: int, world: int, count: int, store: Path) -> float:
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
    return min(times)


def topology() -> Figures:
    if not installed().startswith(OURS):
        return {}
    from gefen.distributed.mesh import pack_ranks

    ranks = tuple(range(1000))
    known = {str(rank): [[pack_ranks(ranks), "mesh_dim_0"]] for rank in ranks}
    return {"topology of 1000 ranks, bytes": float(len(json.dumps(known)))}


PARTS = {
    f"{world}x{count}": partial(agreeing, world, count) for world in WORLDS for count in COUNTS
} | {"topology": topology}

if __name__ == "__main__":
    compare(__file__, PARTS, TURNS)
