"""AdamW and Muon at about one byte of optimizer state per parameter."""

from importlib.metadata import PackageNotFoundError, version

from gefen import kernels
from gefen.gefen import Gefen
from gefen.gefen_muon import GefenMuon
from gefen.hybrid import GefenMuonHybrid
from gefen.routing import routing_table, split_params_for_muon, validate_split

__all__ = [
    "Gefen",
    "GefenMuon",
    "GefenMuonHybrid",
    "__version__",
    "kernels",
    "routing_table",
    "split_params_for_muon",
    "validate_split",
]

try:
    __version__ = version("gefen-cuda")
except PackageNotFoundError:  # a checkout on the path, not installed
    __version__ = "0+unknown"
