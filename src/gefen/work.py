"""What a step works on, and what it is about to publish."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gefen.layout import Layout
from gefen.parameters import Slot
from gefen.state import Entry


@dataclass(slots=True, eq=False)
class Work:
    """A parameter that has a gradient, and its group's settings at the time of this step."""

    slot: Slot
    param: Tensor
    """What is updated: the parameter, or this rank's shard of it."""
    grad: Tensor
    """Likewise."""
    settings: dict[str, Any]
    layout: Layout
    shared: bool = False
    """Whether its ranks step it together."""
    entry: Entry = field(default_factory=dict)
    """The parameter's state, once the step updates it."""

    @property
    def key(self) -> Tensor:
        """The parameter as it is registered, which its state is found by."""
        return self.slot.param


@dataclass(frozen=True, slots=True)
class Plan:
    """What a step is about to publish; making it changes nothing."""

    works: list[Work]
    missing: dict[Tensor, Entry] = field(default_factory=dict)
    """What each parameter's state lacks; those that lack nothing may be left out."""
    codebook: Tensor | None = None
    """Learned in this step, on the CPU."""
