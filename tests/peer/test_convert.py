"""State dicts that gefen-x did not save."""

from __future__ import annotations

import torch
from torch import nn

from gefen import Gefen
from gefen.convert import from_gefen_x


def test_other_state_dicts_are_none_of_its_business() -> None:
    param = nn.Parameter(torch.ones(3))
    for optimizer in (torch.optim.AdamW([param]), Gefen([param])):
        assert from_gefen_x(optimizer.state_dict(), optimizer.param_groups) is None
    for value in (None, {}, {"state": 1, "param_groups": 2}, [1]):
        assert from_gefen_x(value, []) is None
