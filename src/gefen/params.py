"""Where gefen-x keeps the functions that route parameters."""

from gefen.routing import split_params_for_muon, validate_split

__all__ = ["split_params_for_muon", "validate_split"]
