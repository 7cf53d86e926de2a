"""One optimizer as steps and checkpoints see it: a whole one, or a half of a hybrid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gefen.parameters import Slot, check_parameter
from gefen.state import Entry, Spec

if TYPE_CHECKING:
    from gefen.distributed.stepping import StepFailure


class Half:
    """What steps and checkpoints ask of an optimizer, or of one of the two in a hybrid.

    Here, of one that shares nothing: its parameters may be DTensors, but each rank then steps its
    own shard.
    """

    param_groups: list[dict[str, Any]]

    place: int = 0
    """Among the halves of a hybrid: 0 or 1."""

    @property
    def capturable(self) -> bool:
        """Whether counts and tensor rates stay on the device, unread."""
        return False

    def _check(self, slot: Slot) -> None:
        """Raise where the parameter cannot be optimized."""
        check_parameter(slot.param, slot.name)

    def _resumed(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """A group's settings in canonical form; :class:`InvalidArgumentError` if bad."""
        raise NotImplementedError

    def _spec(self, slot: Slot, entry: Entry) -> Spec:
        """What ``entry``, the state of a parameter, must hold, complete."""
        raise NotImplementedError

    def _shares(self) -> bool:
        """Whether ranks step some of the parameters together."""
        return False

    def _loaded(self) -> None:
        """Forget what belonged to the state before a load."""

    def _ended(self) -> None:
        """Forget what a step that failed had begun with."""

    def _sharded_mode(self, slot: Slot) -> str:
        """How ranks step a parameter that they share."""
        return "local"

    def _facts(self) -> dict[str, Any]:
        """What must be equal on all ranks, besides parameters and settings."""
        return {"optimizer": type(self).__name__}

    def _wants_survey(self) -> bool:
        """Whether the next step needs a histogram of the gradients of all ranks."""
        return False

    def _survey(self, plan: Any, failure: StepFailure, first: bool) -> Tensor | None:
        """Decide together what needs all ranks; this rank's histogram. Collective.

        Errors go to ``failure``, so that it goes on. first: whether this rank counts what all
        ranks have.
        """
        return None

    def _surveyed(self, plan: Any, counts: Tensor) -> Any:
        """The plan, knowing the histogram of all ranks."""
        return plan
