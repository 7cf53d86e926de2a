"""Runs inside the environment under test: tries what a profile needs and reports what happened.

Usage: gate_machine.py FACTS, where FACTS receives a JSON object. CUDA is only ever touched in
forked children: a driver call made before a fork would break every later child.
"""

import ctypes
import json
import os
import platform
import sys
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

COLLECTIVE_TIMEOUT = timedelta(seconds=60)


def in_child(function, *arguments):
    """Start ``function`` in a forked child; return a call that waits for its (answer, problem)."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            message = [function(*arguments), ""]
        except BaseException as error:  # whatever it is, the gate reports it
            message = [None, f"{type(error).__name__}: {error}".splitlines()[0]]
        with os.fdopen(writing, "w") as pipe:
            json.dump(message, pipe)
        os._exit(0)
    os.close(writing)

    def answer():
        with os.fdopen(reading) as pipe:
            text = pipe.read()
        status = os.waitpid(pid, 0)[1]
        return json.loads(text) if text else [None, f"the check crashed (wait status {status})"]

    return answer


def cuda_facts():
    """What CUDA itself says about the visible devices."""
    if not torch.backends.cuda.is_built():
        return {"gpus": [], "reason": "this torch is built without CUDA"}
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(
            {
                "name": properties.name,
                "arch": f"sm_{properties.major}{properties.minor}",
                "memory": properties.total_memory,
                "uuid": str(getattr(properties, "uuid", index)),
            }
        )
    return {"gpus": gpus, "reason": "" if gpus else "CUDA reports no visible device"}


def try_device(index):
    """Allocate, launch, copy back."""
    values = torch.arange(1024, device=torch.device("cuda", index), dtype=torch.float32)
    if (values + 1).sum().item() != 1024 * 1025 / 2:
        raise RuntimeError("a kernel returned a wrong result")


def try_collective(backend, rank, world, store_path):
    """One all_reduce among ``world`` ranks."""
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    store = dist.FileStore(store_path, world)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=COLLECTIVE_TIMEOUT
    )
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    if total.item() != world:
        raise RuntimeError("all_reduce returned a wrong result")
    dist.destroy_process_group()


def collective_problem(backend, world, folder):
    store = os.path.join(folder, f"{backend}.store")
    waiting = [in_child(try_collective, backend, rank, world, store) for rank in range(world)]
    problems = [problem for _, problem in (answer() for answer in waiting) if problem]
    return problems[0] if problems else ""


def driver_version():
    """The driver's version from NVML, "" without one."""
    with suppress(OSError):
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        text = ctypes.create_string_buffer(96)
        if nvml.nvmlInit_v2() == 0 and nvml.nvmlSystemGetDriverVersion(text, 96) == 0:
            return text.value.decode()
    return ""


def main():
    folder = os.path.dirname(os.path.abspath(sys.argv[1]))
    cuda, problem = in_child(cuda_facts)()
    cuda = cuda or {"gpus": [], "reason": problem}
    gpus = cuda["gpus"]
    distinct = len({gpu["uuid"] for gpu in gpus})
    facts = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "driver": driver_version(),
        "gpus": gpus,
        "no_gpu_reason": cuda["reason"],
        "gpu_problems": [
            f"GPU {index} ({gpus[index]['name']}): {problem}"
            for index, (_, problem) in enumerate(
                in_child(try_device, index)() for index in range(len(gpus))
            )
            if problem
        ],
        "gloo_problem": collective_problem("gloo", 2, folder)
        if dist.is_gloo_available()
        else "this torch has no gloo",
        "nccl_problem": "",
    }
    if distinct >= 2:
        facts["nccl_problem"] = (
            collective_problem("nccl", len(gpus), folder)
            if dist.is_nccl_available()
            else "this torch has no NCCL"
        )
    if distinct < len(gpus):
        facts["gpu_problems"].append("CUDA_VISIBLE_DEVICES names one GPU more than once")
    with open(sys.argv[1] + ".part", "w") as file:
        json.dump(facts, file)
    os.replace(sys.argv[1] + ".part", sys.argv[1])


if __name__ == "__main__":
    main()
