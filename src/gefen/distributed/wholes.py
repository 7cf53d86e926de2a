"""Sharded matrices that are stepped as a whole: their owners, their exchanges, their state."""

from __future__ import annotations

import hashlib
import math
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from gefen.distributed import consolidate, stepping
from gefen.distributed.diagnosis import first_few
from gefen.distributed.exchange import Full
from gefen.distributed.mesh import Channel, channel_of
from gefen.distributed.stepping import Matrix, Routes
from gefen.errors import UnsupportedParameterError
from gefen.kernels.reference import agreeing
from gefen.parameters import is_shared, local, slots
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
    from collections.abc import Mapping, Sequence

    from torch import Tensor


class WholeMatrices:
    """The part of a GefenMuon whose matrices are stepped as a whole although they are sharded."""

    def __init__(self, muon: Any) -> None:
        self._muon = muon
        self._signature: object = None
        self._matrices: dict[Tensor, Matrix] = {}
        self._numbers: dict[Tensor, int] = {}
        self._routes = Routes([])
        self._warned: set[int] = set()
        self._known: tuple[Tensor | None, str] = (None, digest(None))

    def facts(self, codebook: Tensor | None, count: Tensor | None) -> dict[str, Any]:
        """What of the shared state ranks compare before a step."""
        if codebook is not self._known[0]:
            self._known = codebook, digest(codebook)
        return {"codebook": self._known[1], "global_step": 0 if count is None else int(count)}

    def refresh(self, anew: bool = False) -> None:
        """Find the routes anew if parameters or modes have changed.

        Who owns a matrix goes on owning it once it has state: all ranks have it then, and that
        of the owner cannot move. ``anew``: no state binds, as all of it was replaced.
        """
        muon = self._muon
        held = [slot for slot in slots(muon.param_groups) if muon._is_whole(slot)]
        signature = [
            (id(s.param), s.param.dtype, s.group["sharded_mode"], s.group["cautious"])
            for s in held
        ]
        if signature == self._signature and not anew:
            return
        bound = {} if anew else {id(p): o for p, o in muon._owners.items() if muon.state.get(p)}
        self._matrices, self._routes = self._routed(bound)
        owners = {param: self._routes.owner(matrix) for param, matrix in self._matrices.items()}
        muon._owners = {param: owner for param, owner in owners.items() if owner is not None}
        self._numbers, self._signature = _numbers(muon), signature

    def _routed(self, bound: Mapping[int, int]) -> tuple[dict[Tensor, Matrix], Routes]:
        """bound: owners that must stay, by the matrices' keys."""
        muon = self._muon
        held = [slot for slot in slots(muon.param_groups) if muon._is_whole(slot)]
        matrices = {slot.param: _matrix(slot) for slot in held}
        routes = Routes(list(matrices.values()), bound)
        cautious = [matrices[slot.param] for slot in held if _is_cautious(slot)]
        self._warn(routes.unserved, cautious)
        return matrices, routes

    def _warn(self, unserved: Sequence[Matrix], cautious: Sequence[Matrix]) -> None:
        """Say, once for each matrix, which are not stepped in the mode that was asked for."""
        reasons = [(m, f"placements {m.parameter.placements!r}") for m in unserved]
        reasons += [(m, "cautious=True, whose updates are not bfloat16") for m in cautious]
        found: dict[str, list[str]] = {}
        for matrix, reason in reasons:
            if matrix.key not in self._warned:
                self._warned.add(matrix.key)
                found.setdefault(reason, []).append(repr(matrix.name))
        for reason, names in found.items():
            warnings.warn(
                f"sharded_mode='distributed' cannot serve {reason}: {first_few(names)} are "
                "stepped as in 'exact'",
                stacklevel=2,
            )

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

    def _compute(self, bucket: Sequence[tuple[Matrix, Tensor]]) -> Full:
        muon = self._muon
        works = [self._numbered(matrix.handle, grad) for matrix, grad in bucket]
        for work in works:
            self._begin(work)
        updates: Full = {}
        for work, update in muon._updates(works):
            if non_finite(update, (work.grad, muon.state[work.key][MAGNITUDE])):
                raise ArithmeticError(
                    f"the update of {work.slot.name!r} is not finite although its gradient is"
                )
            if work.settings["cautious"]:
                wide = torch.float64 if work.key.dtype == torch.float64 else torch.float32
                update = agreeing(update, work.grad, wide)
            updates[id(work.key)] = update
        return updates

    def _numbered(self, work: Any, grad: Tensor) -> Any:
        """The work with the whole gradient, and with a number that all its ranks give it."""
        slot = work.slot._replace(number=self._numbers[work.key])
        return replace(work, grad=grad, slot=slot)

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
                matrix.name,
                self._muon.state[param][STEP],
                owner,
                channel.group,
                param.device,
                self._part(param, owner),
            )
            for param, matrix, owner in held
        ]
        complete = consolidate.consolidate(holdings, channel)
        return {param: entry for (param, *_), entry in zip(held, complete, strict=True)}

    def _part(self, param: Tensor, owner: int) -> dict[str, Any] | None:
        entry = self._muon.state[param]
        if owner != dist.get_rank() or INDEX not in entry:
            return None
        return {key: value for key, value in entry.items() if key not in (STEP, *SHARED)}

    def kept(self, entries: dict[Tensor, dict[str, Any]]) -> dict[Tensor, dict[str, Any]]:
        """Give what this rank holds of complete entries: of others' matrices, counts alone.

        Owners are chosen from parameters alone, so that all ranks that load agree on them.
        """
        matrices, routes = self._routed({})
        return {
            param: entry
            if param not in matrices or routes.owned(matrices[param])
            else {key: value for key, value in entry.items() if key in (STEP, *SHARED)}
            for param, entry in entries.items()
        }


def _matrix(slot: Any) -> Matrix:
    parameter = slot.param
    assert isinstance(parameter, DTensor)
    name = slot.name if "param_names" in slot.group else _description(parameter)
    mode = "exact" if _is_cautious(slot) else slot.group["sharded_mode"]
    return Matrix(name, parameter, mode)


def _is_cautious(slot: Any) -> bool:
    return bool(slot.group["cautious"] and slot.group["sharded_mode"] == "distributed")


def _numbers(muon: Any) -> dict[Tensor, int]:
    """Number matrices among those of the same ranks, which seeds stochastic rounding alike.

    Their place in the whole optimizer would not do: a rank may hold others before them.
    """
    counts: dict[tuple[int, ...], int] = {}
    numbers: dict[Tensor, int] = {}
    for slot in slots(muon.param_groups):
        if isinstance(slot.param, DTensor) and is_shared(slot.param):
            ranks = tuple(sorted(slot.param.device_mesh.mesh.flatten().tolist()))
            numbers[slot.param] = counts[ranks] = counts.get(ranks, -1) + 1
    return numbers


def _description(parameter: DTensor) -> str:
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
