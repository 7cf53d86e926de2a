"""Records tests/regression/golden/gefen-x, in an environment that has it and not this package:

python -m venv /tmp/peer && /tmp/peer/bin/pip install torch==2.13.0 gefen-x==0.5.0
/tmp/peer/bin/python tests/peer/record.py
"""

from __future__ import annotations

import copy
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "regression" / "single"))
from gefen_x_runs import AFTER, BEFORE, DATA, MAKERS, make, start, train


def values(params: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in params.items()}


def record(kind: str) -> dict[str, Any]:
    params = start(kind)
    optimizer = make(kind, params)
    train(optimizer, kind, params, range(BEFORE))
    saved, before = copy.deepcopy(optimizer.state_dict()), values(params)
    train(optimizer, kind, params, range(BEFORE, BEFORE + AFTER))
    return {"state_dict": saved, "before": before, "after": values(params)}


def migrated() -> dict[str, Any]:
    """A run that went from the factored form to blocks."""
    params = start("gefen")
    first = make("gefen", params)
    train(first, "gefen", params, range(2))
    second = make("gefen-block", params)
    second.load_state_dict(first.state_dict())
    train(second, "gefen", params, range(2, BEFORE))
    return {"state_dict": copy.deepcopy(second.state_dict()), "before": values(params)}


def main() -> None:
    assert version("gefen-x") == "0.5.0"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    DATA.mkdir(exist_ok=True)
    for kind in MAKERS:
        torch.save(record(kind), DATA / f"{kind}.pt")
    torch.save(migrated(), DATA / "migrated.pt")


if __name__ == "__main__":
    main()
