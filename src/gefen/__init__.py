"""AdamW and Muon at about one byte of optimizer state per parameter."""

import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gefen import installed, kernels
from gefen.gefen import Gefen
from gefen.gefen_muon import GefenMuon
from gefen.hybrid import GefenMuonHybrid
from gefen.resume import prepare_load
from gefen.routing import routing_table, split_params_for_muon, validate_split

__all__ = [
    "Gefen",
    "GefenMuon",
    "GefenMuonHybrid",
    "__version__",
    "kernels",
    "prepare_load",
    "routing_table",
    "split_params_for_muon",
    "validate_split",
]

__distribution__ = installed.OWN

try:
    __version__ = version(__distribution__)
except PackageNotFoundError:  # a checkout on the path, not installed
    __version__ = "0+unknown"

if mixed := installed.beside(Path(__file__).parent):
    warnings.warn(mixed, stacklevel=2)


def __getattr__(name: str) -> Any:
    from gefen.unavailable import NAMES

    if name in NAMES:
        return NAMES[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
