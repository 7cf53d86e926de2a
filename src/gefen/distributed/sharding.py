"""The step of optimizers whose parameters are shared between ranks: agree, exchange, close."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gefen.codebook import BINS
from gefen.distributed import stepping
from gefen.distributed.preflight import Member, Preflight
from gefen.errors import PeerFailureError
from gefen.parameters import is_shared, slots
from gefen.scaling import Unscaling, hand_on, has_overflowed
from gefen.state import STEP

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from gefen.distributed.mesh import Topology


_HALVES = 2
"""That an optimizer can have."""


class Agreement:
    """Through which the ranks of one optimizer step together, or none of them does."""

    def __init__(self) -> None:
        self._preflight = Preflight()
        self._signature: object = None
        self._members: list[Member] = []
        self._facts: dict[int, dict[str, Any]] = {}
        self._broken = False

    def step(
        self,
        owner: Any,
        halves: Sequence[Any],
        evaluate: Callable[[], Any],
    ) -> Any:
        """Step all halves of ``owner`` on all ranks; return what ``evaluate`` gave on this one.

        Where a gradient scaler found an infinity on any rank, no rank steps.

        Where any rank fails before anything changed, every rank of the component raises the
        same error. Where one fails later, every rank raises :class:`PeerFailureError`, and so
        do all following steps until a checkpoint is loaded.
        """
        plans: Sequence[Any] = []
        loss, failure, overflow = None, None, False
        try:
            # Also where this step will be refused: a closure may exchange with other ranks.
            loss = evaluate()
            if self._broken:
                raise PeerFailureError(_UNMENDED)
            overflow = has_overflowed(owner)
            hand_on(owner)
            plans = [half._prepare(half._collect()) for half in halves]
        except Exception as error:  # whatever it is, the other ranks are waiting to hear of it
            failure = error
        agreed = self._preflight.agree(
            self._listed(halves),
            active=any(
                p.grad is not None for h in halves for g in h.param_groups for p in g["params"]
            ),
            survey=any(half._wants_survey() for half in halves),
            skip=overflow,
            failure=failure,
        )
        if agreed.active and not agreed.skip:
            self._change(owner, halves, plans, agreed.survey)
        return loss

    def _listed(self, halves: Sequence[Any]) -> list[Member]:
        """The shared parameters; the same list as before while none was added."""
        signature = [_outline(group) for half in halves for group in half.param_groups]
        if signature != self._signature:
            self._facts = {id(half): {} for half in halves}
            self._members = [m for half in halves for m in self._shared(half)]
            self._signature = signature
        for half in halves:
            self._facts[id(half)].update(half._facts(), **_options(half))
        return self._members

    def _shared(self, half: Any) -> list[Member]:
        return [
            Member(
                slot.name,
                "param_names" in slot.group,
                slot.param,
                slot.group,
                half._sharded_mode(slot),
                half.defaults.keys() - {"sharded_mode"},
                self._facts[id(half)],
                partial(_steps, half, slot.param),
            )
            for slot in slots(half.param_groups)
            if is_shared(slot.param)
        ]

    def _change(
        self, owner: Any, halves: Sequence[Any], plans: Sequence[Any], survey: bool
    ) -> None:
        """A rank that fails from now on keeps up the exchanges even so."""
        unscaling = Unscaling(owner, revocable=survey)
        plans, failure = _replanned(unscaling, halves, plans)
        if survey:
            try:
                plans = self._survey(halves, plans, failure)
            except BaseException:
                unscaling.revoke()
                raise
            unscaling.settle()
        for half, plan in zip(halves, plans, strict=True):
            try:
                half._commit(plan, active=True)
            except Exception as error:  # the other ranks wait in the closing exchange
                failure = failure or error
        try:
            self._close(failure, "while updating parameters", _RELOAD)
        except PeerFailureError:
            self._broken = True
            raise

    def _survey(
        self, halves: Sequence[Any], plans: Sequence[Any], error: Exception | None
    ) -> list[Any]:
        failure = stepping.StepFailure(error)
        # Ranks need not have the same halves of a hybrid.
        total = torch.zeros(_HALVES, BINS, dtype=torch.int64)
        is_first = self._topology.ranks[0] == dist.get_rank()
        for half, plan in zip(halves, plans, strict=True):
            counts = half._survey(plan, failure, is_first)
            if counts is not None:
                total[half.place] += counts
        self._close(failure.error, "while learning the codebook", _AGAIN)
        total = stepping.total_over_component(total, self._preflight.channels, self._topology)
        pairs = zip(halves, plans, strict=True)
        return [half._surveyed(plan, total[half.place]) for half, plan in pairs]

    def report(self, halves: Sequence[Any], failure: Exception | None, purpose: str) -> None:
        """Raise on every rank where any has a ``failure`` in what all do outside of a step."""
        self._preflight.report(self._listed(halves), failure, purpose)

    def _close(self, failure: Exception | None, purpose: str, advice: str) -> None:
        stepping.close(failure, self._preflight.channels, self._topology, purpose, advice)

    @property
    def _topology(self) -> Topology:
        topology = self._preflight.topology
        assert topology is not None  # an optimizer that shares nothing has no agreement
        return topology

    def mended(self) -> None:
        """Forget a failed step: all state was replaced."""
        self._broken = False


def _outline(group: dict[str, Any]) -> tuple[Any, ...]:
    """What tells whether a group still holds the same parameters, in the same form."""
    params, names = group["params"], group.get("param_names", ())
    kinds = [param.dtype for param in params]
    return id(group), group.get("sharded_mode"), list(map(id, params)), kinds, [*names]


def _options(half: Any) -> dict[str, Any]:
    """What of a whole optimizer's options decides its bits."""
    options = getattr(half, "options", {})
    return {name: options[name] for name in ("deterministic", "fused") if name in options}


def _steps(half: Any, param: Tensor) -> int | None:
    """How many steps a parameter has taken here."""
    steps = half.state.get(param, {}).get(STEP, 0)
    if isinstance(steps, torch.Tensor):
        # Reading it elsewhere would wait for the device's queue.
        return int(steps) if steps.device.type == "cpu" else None
    return int(steps)


def _replanned(
    unscaling: Unscaling, halves: Sequence[Any], plans: Sequence[Any]
) -> tuple[Sequence[Any], Exception | None]:
    """Plans for unscaled gradients where they come scaled; the given ones and the error."""
    try:
        if unscaling.apply([group for half in halves for group in half.param_groups]):
            plans = [half._prepare(half._collect()) for half in halves]
    except Exception as error:  # the other ranks are in the exchanges that follow
        return plans, error
    return plans, None


_UNMENDED = (
    "an earlier step() failed while updating parameters and no checkpoint was loaded here since; "
    "load one of the parameters and of this optimizer on every rank"
)
_RELOAD = (
    "Some parameters may have been updated and others not: load a checkpoint of the parameters "
    "and of this optimizer before the next step()."
)
_AGAIN = (
    "No parameter, gradient or state was changed on any rank; correct it and call step() again."
)
