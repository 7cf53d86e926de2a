"""The step of optimizers whose parameters are shared between ranks: agree, exchange, close."""

from __future__ import annotations

import hashlib
import math
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from gefen.codebook import BINS
from gefen.distributed import consolidate, stepping
from gefen.distributed.mesh import Channel, channel_of
from gefen.distributed.preflight import Member, Preflight
from gefen.distributed.stepping import Matrix, Routes
from gefen.errors import PeerFailureError, UnsupportedParameterError
from gefen.kernels.reference import agreeing
from gefen.parameters import is_shared, local, slots
from gefen.scaling import Unscaling, has_overflowed
from gefen.state import (
    CODEBOOK,
    INDEX,
    MAGNITUDE,
    NORMUON_STEP,
    PERIOD,
    SHARED,
    STEP,
    disagreement,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


class Agreement:
    """Through which the ranks of one optimizer step together, or none of them does."""

    def __init__(self) -> None:
        self._preflight = Preflight()
        self._signature: object = None
        self._members: list[Member] = []
        self._facts: dict[int, dict[str, Any]] = {}
        self._broken: str | None = None

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
        if self._broken is not None:
            raise PeerFailureError(self._broken)
        plans: Sequence[Any] = []
        loss, failure, overflow = None, None, False
        try:
            loss = evaluate()
            overflow = has_overflowed(owner)
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
        signature = [
            (id(group), group.get("sharded_mode"), list(map(id, group["params"])))
            for half in halves
            for group in half.param_groups
        ]
        if signature != self._signature:
            self._facts = {id(half): {} for half in halves}
            self._members = [m for half in halves for m in self._shared(half)]
            self._signature = signature
        for half in halves:
            self._facts[id(half)].update(half._facts())
        return self._members

    def _shared(self, half: Any) -> list[Member]:
        return [
            Member(
                slot.name,
                "param_names" in slot.group,
                slot.param,
                slot.group,
                half._sharded_mode(slot),
                self._facts[id(half)],
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
        except PeerFailureError as error:
            self._broken = str(error)
            raise

    def _survey(
        self, halves: Sequence[Any], plans: Sequence[Any], error: Exception | None
    ) -> list[Any]:
        failure, total = stepping.StepFailure(error), torch.zeros(BINS, dtype=torch.int64)
        for half, plan in zip(halves, plans, strict=True):
            counts = half._survey(plan, failure, self._is_first)
            total = total if counts is None else total + counts
        self._close(failure.error, "while learning the codebook", _AGAIN)
        topology = self._preflight.topology
        if topology is not None:
            total = stepping.total_over_component(total, self._preflight.channels, topology)
        return [half._surveyed(plan, total) for half, plan in zip(halves, plans, strict=True)]

    def _close(self, failure: Exception | None, purpose: str, advice: str) -> None:
        topology = self._preflight.topology
        if topology is not None:
            stepping.close(failure, self._preflight.channels, topology, purpose, advice)
        elif failure is not None:
            raise failure

    @property
    def _is_first(self) -> bool:
        """Whether this rank is the lowest of its component: the one that counts what all have."""
        topology = self._preflight.topology
        return topology is None or topology.ranks[0] == dist.get_rank()

    def mended(self) -> None:
        """Forget a failed step: all state was replaced."""
        self._broken = None


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


_RELOAD = (
    "Some parameters may have been updated and others not: load a checkpoint of the parameters "
    "and of this optimizer before the next step()."
)
_AGAIN = (
    "No parameter, gradient or state was changed on any rank; correct it and call step() again."
)


class WholeMatrices:
    """The part of a GefenMuon whose matrices are stepped as a whole although they are sharded."""

    def __init__(self, muon: Any) -> None:
        self._muon = muon
        self._signature: object = None
        self._matrices: dict[Tensor, Matrix] = {}
        self._routes = Routes([])
        self._known: tuple[Tensor | None, str] = (None, digest(None))

    def facts(self, codebook: Tensor | None) -> dict[str, str]:
        """What of the state ranks compare before a step."""
        if codebook is not self._known[0]:
            self._known = codebook, digest(codebook)
        return {"codebook": self._known[1]}

    def refresh(self) -> None:
        """Find the routes anew if parameters or modes have changed."""
        muon = self._muon
        held = [slot for slot in slots(muon.param_groups) if muon._is_whole(slot)]
        signature = [(id(s.param), s.group["sharded_mode"], s.group["cautious"]) for s in held]
        if signature != self._signature:
            self._matrices = {slot.param: _matrix(slot) for slot in held}
            if any(_is_cautious(slot) for slot in held):
                warnings.warn(
                    "cautious=True: the updates are not bfloat16, so these matrices are stepped "
                    "as in sharded_mode='exact'",
                    stacklevel=2,
                )
            self._routes = Routes(list(self._matrices.values()))
            self._signature = signature

    def owns(self, param: Tensor) -> bool:
        """Whether this rank computes the update of ``param`` and holds its momentum."""
        return self._routes.owned(self._matrices[param])

    def missing(self, work: Any) -> dict[str, Any]:
        """What the state of a matrix lacks before its whole gradient is here."""
        entry = self._muon.state.get(work.key)
        if not entry:
            return {STEP: 0}
        problem = None
        if self.owns(work.key):
            problem = disagreement(self._muon._spec(work.key, entry), entry)
        elif INDEX in entry:
            problem = "another rank owns it now"
        if problem is not None:
            raise UnsupportedParameterError(
                f"Parameter {work.slot.name!r} or its sharded_mode has changed since its state "
                f"was made: {problem}; load a checkpoint"
            )
        return {}

    def survey(
        self,
        works: Sequence[Any],
        missing: dict[Tensor, dict[str, Any]],
        counts: Tensor | None,
        failure: stepping.StepFailure,
    ) -> Tensor | None:
        """Add the histograms of the gradients that this rank counts to ``counts``. Collective.

        Each matrix's period goes to ``missing``.
        """

        def look(work: Any, counted: bool) -> Tensor | None:
            if PERIOD not in self._muon.state.get(work.key, {}):
                missing[work.key][PERIOD] = self._muon._period(work)
            return self._muon._histogram([work], missing) if counted else None

        matrices = [replace(self._matrices[work.key], handle=work) for work in works]
        for matrix, grad in stepping.whole_gradients(self._routes, matrices):
            work, counted = replace(matrix.handle, grad=grad), self._routes.counts(matrix)
            found = failure.keep(lambda w=work, c=counted: look(w, c), None)  # type: ignore[misc]
            if found is not None:
                counts = found if counts is None else counts + found
        return counts

    def step(self, works: Sequence[Any]) -> None:
        """Update the matrices; raise this rank's error after all exchanges are done."""
        matrices = [replace(self._matrices[work.key], handle=work) for work in works]
        error = stepping.step(self._routes, matrices, self._compute, self._apply)
        if error is not None:
            raise error

    def _compute(self, bucket: Sequence[tuple[Matrix, Tensor]]) -> dict[str, Tensor]:
        muon = self._muon
        works = [replace(matrix.handle, grad=grad) for matrix, grad in bucket]
        names = {matrix.handle.key: matrix.name for matrix, _ in bucket}
        for work in works:
            self._begin(work)
        updates = {}
        for work, update in muon._updates(works):
            if non_finite(update, (work.grad, muon.state[work.key][MAGNITUDE])):
                raise ArithmeticError(
                    f"the update of {work.slot.name!r} is not finite although its gradient is"
                )
            if work.settings["cautious"]:
                wide = torch.float64 if work.key.dtype == torch.float64 else torch.float32
                update = agreeing(update, work.grad, wide)
            updates[names[work.key]] = update
        return updates

    def _begin(self, work: Any) -> None:
        """Complete the state of a matrix whose gradient is here for the first time."""
        muon, entry = self._muon, self._muon.state[work.key]
        if INDEX not in entry:
            entry.update(muon._fresh(work, entry.get(PERIOD) or muon._period(work)))
        entry.update(muon._moments(work, entry))
        if work.settings["normuon"]:
            entry[NORMUON_STEP] += 1
        if CODEBOOK in entry and entry[CODEBOOK].device != entry[INDEX].device:
            entry[CODEBOOK] = entry[CODEBOOK].to(entry[INDEX].device)

    def _apply(self, matrix: Matrix, shard: Tensor) -> None:
        work = matrix.handle
        shape = work.key.shape
        part = replace(work, param=local(work.key), grad=local(work.grad))
        self._muon._apply(part, shard, shape, masked=True)

    def gathered(self) -> dict[Tensor, dict[str, Any]]:
        """Give complete entries of the matrices that only their owners hold. Collective.

        The ranks of each process group meet on their own: in others it may be nobody's turn.
        """
        self.refresh()
        found: dict[Channel, list[tuple[Tensor, Matrix, int]]] = {}
        for param, matrix in self._matrices.items():
            spread = self._routes.spread(matrix)
            if spread is not None and self._muon.state.get(param):
                channel = channel_of(spread[1], param.device.type)
                found.setdefault(channel, []).append((param, matrix, spread[0]))
        return {
            param: {**self._muon.state[param], **entry}
            for channel in sorted(found, key=lambda channel: channel.key)
            for param, entry in self._gather(channel, found[channel]).items()
        }

    def _gather(
        self, channel: Channel, held: Sequence[tuple[Tensor, Matrix, int]]
    ) -> dict[Tensor, dict[str, Any]]:
        rank = dist.get_rank()
        consolidate.meet("state_dict()", channel.key.ranks, rank, consolidate.ARRIVAL_S)
        holdings = [
            consolidate.Holding(
                matrix.name, owner, channel.group, param.device, self._part(param, owner)
            )
            for param, matrix, owner in held
        ]
        complete = consolidate.consolidate(holdings, channel)
        return {param: complete[matrix.name] for param, matrix, _ in held}

    def _part(self, param: Tensor, owner: int) -> dict[str, Any] | None:
        entry = self._muon.state[param]
        if owner != dist.get_rank() or INDEX not in entry:
            return None
        return {key: value for key, value in entry.items() if key not in (STEP, *SHARED)}

    def kept(self, entries: dict[Tensor, dict[str, Any]]) -> dict[Tensor, dict[str, Any]]:
        """Give what this rank holds of complete entries: of others' matrices, counts alone."""
        self.refresh()
        return {
            param: entry
            if param not in self._matrices or self.owns(param)
            else {key: value for key, value in entry.items() if key in (STEP, *SHARED)}
            for param, entry in entries.items()
        }


def _matrix(slot: Any) -> Matrix:
    parameter = slot.param
    assert isinstance(parameter, DTensor)
    name = slot.name if "param_names" in slot.group else _signature(parameter)
    mode = "exact" if _is_cautious(slot) else slot.group["sharded_mode"]
    return Matrix(name, parameter, mode)


def _is_cautious(slot: Any) -> bool:
    return bool(slot.group["cautious"] and slot.group["sharded_mode"] == "distributed")


def _signature(parameter: DTensor) -> str:
    """Name a parameter without a name by what all ranks see alike of it."""
    grid = parameter.device_mesh.mesh.tolist()
    return f"~{tuple(parameter.shape)} {parameter.dtype} {parameter.placements} {grid}"


def digest(codebook: Tensor | None) -> str:
    """Name a codebook, for ranks to compare."""
    if codebook is None:
        return "none"
    return hashlib.blake2b(codebook.cpu().numpy().tobytes(), digest_size=6).hexdigest()


def non_finite(update: Tensor, sources: Sequence[Tensor]) -> bool:
    """Whether ``update`` is not finite although all it came from is; False on accelerators.

    Reading it there would wait for the device's queue.
    """
    if update.device.type != "cpu" or math.isfinite(float(update.sum())):
        return False
    finite = bool(torch.isfinite(update).all())
    return not finite and all(bool(torch.isfinite(source).all()) for source in sources)
