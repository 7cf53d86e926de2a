"""What a bug report needs: versions, devices, and what runs on each."""

from __future__ import annotations

import os
import platform
import sys
import warnings
from collections.abc import Iterator

import numpy
import torch
from torch.utils import collect_env

import gefen
from gefen import installed
from gefen.errors import CudaUnavailable
from gefen.kernels import cuda, images

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def report() -> Iterator[str]:
    """Lines with versions, devices, and what runs on each."""
    yield f"gefen {gefen.__version__} ({gefen.__file__})"
    for name in installed.others():
        yield f"also installed as gefen: {name}. {installed.repair([name])}"
    yield f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}"
    yield f"numpy {numpy.__version__}"
    yield f"python {platform.python_version()} ({sys.executable})"
    yield f"platform {platform.platform()}"
    capability = torch.backends.cpu.get_cpu_capability()
    yield (
        f"cpu: {gefen.kernels.active_backend('cpu')}, {capability}, "
        f"{torch.get_num_threads()} of {os.cpu_count()} threads"
    )
    yield f"kernel architectures: {_embedded()}"
    if not torch.cuda.is_available():
        yield f"cuda: not available (CUDA_VISIBLE_DEVICES={os.environ.get(_VISIBLE)!r})"
        return
    driver = collect_env.get_nvidia_driver_version(collect_env.run)  # type: ignore[no-untyped-call]
    yield f"driver {driver or 'unknown'}"
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        yield (
            f"cuda:{number}: {_backend(number)}, {properties.name}, "
            f"sm_{properties.major}{properties.minor}, {properties.total_memory / 2**30:.0f} GiB"
        )


def _embedded() -> str:
    found = images.manifest()
    if found is None:
        return "none embedded; what a GPU needs is compiled at first use by torch's NVRTC"
    return f"{', '.join(found.archs)}, by {found.compiler}"


def _backend(number: int) -> str:
    """What runs on a device, with the code that was loaded or why there is none."""
    device = torch.device("cuda", number)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the reason follows
        backend = gefen.kernels.active_backend(device)
    try:
        code = cuda.driver(device).code
    except CudaUnavailable as error:
        return f"{backend} (the kernels cannot run: {error})"
    return f"{backend} ({code.arch}, {code.origin})"
