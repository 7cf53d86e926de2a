"""What training code that moves over relies on: public names, and how classes are called."""

from __future__ import annotations

import inspect
import operator
from typing import Any

import pytest

import gefen

# Names, order, kinds and defaults of gefen-x 0.5.0, then what is new: before "*" arguments are
# positional or keywords, after it keywords only; "**" takes any others.
REQUIRED = inspect.Parameter.empty
NEW = {"maximize": False, "bf16_stochastic_round": False}
QUANTISED = {"deterministic": False, "capturable": False, "verbose": False}
SHARDED = {
    "sharded_mode": "exact",
    "fp8_ns": False,
    "fp8_ns_compile": True,
    "batched_ns": False,
    "batched_ns_workspace_bytes": 268435456,
    "stochastic_round": False,
    "deterministic": False,
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "Gefen": {
        "params": REQUIRED,
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "*": None,
        "fused": True,
        "force_1d_period_one": False,
        "force_2d_period_one": False,
        "period_one_substrings": (),
        "factored_v_2d": True,
        "codebook_refresh_every": 0,
        "stochastic_round": False,
        **QUANTISED,
        **NEW,
    },
    "GefenMuon": {
        "params": REQUIRED,
        "lr": 1e-3,
        "weight_decay": 0.1,
        "momentum": 0.95,
        "nesterov": True,
        "ns_coefficients": (3.4445, -4.775, 2.0315),
        "eps": 1e-7,
        "ns_steps": 5,
        "ns_schedule": None,
        "adjust_lr_fn": None,
        "*": None,
        "fused": True,
        **SHARDED,
        "normuon": False,
        "normuon_beta2": 0.95,
        "normuon_eps": 1e-8,
        "cautious": False,
        "capturable": False,
        "verbose": False,
        **NEW,
    },
    "GefenMuonHybrid": {
        "muon_named_params": REQUIRED,
        "backup_named_params": None,
        "*": None,
        "lr": REQUIRED,
        "backup_substrings": None,
        "muon_lr": None,
        "backup_lr": None,
        "backup_optimizer": "gefen",
        "weight_decay": 0.0,
        "muon_weight_decay": None,
        "backup_weight_decay": None,
        "no_decay_substrings": (),
        "backup_1d_period_one": False,
        "backup_2d_period_one": False,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "fused": True,
        "momentum": 0.95,
        "nesterov": True,
        "ns_steps": 5,
        "ns_schedule": "standard",  # "tuned3" in gefen-x
        "adjust_lr_fn": "match_rms_adamw",
        **SHARDED,
        "normuon": True,
        "normuon_beta2": 0.95,
        "normuon_eps": 1e-8,
        "cautious": False,
        "capturable": False,
        "verbose": False,
        **NEW,
        "sides": None,  # not of gefen-x
        "backup_factored_v_2d": True,  # not of gefen-x
    },
    "GefenMuonHybrid.from_model": {
        "model": REQUIRED,
        "*": None,
        "backup_substrings": None,
        "**": "kwargs",
    },
    "split_params_for_muon": {
        "model": REQUIRED,
        "backup_substrings": ("embed", "wte", "wpe", "lm_head", "classifier", "score"),
        "*": None,
        "sides": None,  # not of gefen-x
    },
    "prepare_load": {"model": REQUIRED, "optimizer": REQUIRED, "checkpoint": REQUIRED},
    "routing_table": {  # not of gefen-x
        "model": REQUIRED,
        "backup_substrings": ("embed", "wte", "wpe", "lm_head", "classifier", "score"),
        "*": None,
        "sides": None,
    },
    "validate_split": {
        "muon_named_params": REQUIRED,
        "backup_named_params": REQUIRED,
        "model": None,
    },
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name: str) -> None:
    found: list[tuple[str, Any]] = []
    for argument in inspect.signature(operator.attrgetter(name)(gefen)).parameters.values():
        if argument.kind is argument.VAR_KEYWORD:
            found.append(("**", argument.name))
            continue
        if argument.kind is argument.KEYWORD_ONLY and ("*", None) not in found:
            found.append(("*", None))
        assert argument.kind in (argument.POSITIONAL_OR_KEYWORD, argument.KEYWORD_ONLY)
        found.append((argument.name, argument.default))
    assert found == list(ARGUMENTS[name].items())


def test_public_names() -> None:
    assert set(gefen.__all__) == {
        "Gefen",
        "GefenMuon",
        "GefenMuonHybrid",
        "__version__",
        "kernels",
        "prepare_load",
        "routing_table",
        "split_params_for_muon",
        "validate_split",
    }
