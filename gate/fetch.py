"""Get a released wheel back from a package index, as its users do."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from packaging.version import Version

from gate.errors import EnvironmentFailed
from gate.index import without_proxy
from gate.layer import NETWORK_VARIABLES
from gate.runner import Runner

TIMEOUT = 600.0


def fetch(
    distribution: str, version: Version, *, index: str, folder: Path, runner: Runner
) -> Path:
    """Download the wheel that pip would install on this machine, without what it requires.

    Args:
        distribution: name of the project.
        version: exactly this one.
        index: URL of a simple index; no other is asked, whatever pip's configuration says.
        folder: where to put it.
        runner: starts pip.

    Returns:
        The wheel.

    Raises:
        EnvironmentFailed: the index does not answer, or has no such wheel.
    """
    requirement = f"{distribution}=={version}"
    outcome = runner.run(
        [
            *(sys.executable, "-IBm", "pip", "download", "--isolated", "--no-input"),
            *("--no-deps", "--only-binary", ":all:", "--no-cache-dir"),
            *("--index-url", index, "--dest", folder / "wheels", requirement),
        ],
        env={
            "PATH": os.defpath,
            "HOME": str(folder),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            **{name: os.environ[name] for name in NETWORK_VARIABLES if name in os.environ},
            **without_proxy(index),
        },
        cwd=folder,
        log=folder / "download.log",
        timeout=TIMEOUT,
    )
    if not outcome.ok:
        raise EnvironmentFailed(
            f"Could not download {requirement} from {index}: {outcome.describe()}.\n"
            f"{outcome.tail()}",
            next_step="just published: try again in a minute; the index may show it only then",
        )
    (wheel,) = (folder / "wheels").glob("*.whl")
    return wheel
