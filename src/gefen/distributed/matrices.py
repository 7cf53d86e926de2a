"""The step of a GefenMuon whose matrices lie on several ranks."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from gefen.distributed import stepping
from gefen.distributed.diagnosis import first_few
from gefen.distributed.shards import own_part
from gefen.distributed.stepping import Matrix, StepFailure
from gefen.kernels.reference import agreeing_count, agreeing_share, masked
from gefen.newton_schulz import matrices_of
from gefen.parameters import held, slots
from gefen.state import NORMUON_V

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from gefen.distributed.exchange import Full
    from gefen.gefen_muon import GefenMuon
    from gefen.parameters import Slot
    from gefen.work import Work

_AVERAGE = 2
"""Numbers of 16 bits that a row's average takes: it travels with the row, as it is."""

Pending = list[tuple["Work", "Tensor"]]
"""Works and this rank's part of their cautious updates, of which all rows decide the size."""


def step(muon: GefenMuon, works: Sequence[Work]) -> None:
    """Update all matrices; raise this rank's error once all exchanges are done."""
    failure = StepFailure()
    rows = [work for work in works if _travels(work)]
    cut = [work for work in works if work.shared and not work.layout.in_rows]
    own = [work for work in works if not _travels(work) and work not in cut]
    failure.keep(lambda: muon._step_own(own), None)
    pending = _through_others(muon, rows, failure)
    _step_gathered(muon, cut, failure)
    shares = _shares(muon, pending, failure)
    for work, update in pending:
        shape, share = muon._shape(work), shares[work.key]
        failure.keep(partial(muon._apply, work, update, shape, share), None)
    if failure.error is not None:
        raise failure.error


def _travels(work: Work) -> bool:
    """Whether ranks must bring its rows together; of a stack each has whole matrices."""
    return work.shared and work.layout.in_rows and len(work.layout.shape) == 2


def _through_others(muon: GefenMuon, works: Sequence[Work], failure: StepFailure) -> Pending:
    """Step matrices whose rows other ranks have too, but for those with cautious updates."""
    pending: Pending = []
    matrices = [_matrix(muon, work.slot, work) for work in works]
    found = slots(muon.param_groups)
    all_ = [_matrix(muon, s) for s in found if muon._is_shared(s.group, s.param)]
    held_ = [m for m in all_ if m.layout.in_rows and len(m.layout.shape) == 2]

    def direct(bucket: list[Matrix]) -> Full:
        return {m.key: _sent(muon, m.handle) for m in bucket}

    def compute(bucket: list[tuple[Matrix, Tensor]]) -> Full:
        return {matrix.key: _updated(muon, matrix.handle, full) for matrix, full in bucket}

    def keep(matrix: Matrix, rows: Tensor) -> None:
        work: Work = matrix.handle
        update = rows[:, : work.layout.shape[1]]
        if work.settings["normuon"]:
            held(work.entry[NORMUON_V]).copy_(_averages(rows, work.layout.shape[1]))
        if work.settings["cautious"]:
            # What came is freed with its bucket.
            pending.append((work, update.clone()))
        else:
            muon._apply(work, update.contiguous(), muon._shape(work))

    stepping.step(stepping.trips(matrices, held_), direct, compute, keep, failure)
    return pending


def _matrix(muon: GefenMuon, slot: Slot, work: Any = None) -> Matrix:
    parameter: Any = slot.param
    name = slot.name if "param_names" in slot.group else _description(parameter)
    distributed = slot.group["sharded_mode"] == "distributed"
    columns = parameter.shape[-1] + _AVERAGE * slot.group["normuon"]
    return Matrix(name, parameter, muon._layout(slot), distributed, columns, work)


def _description(parameter: Any) -> str:
    """Name a parameter without a name by what all ranks see alike of it."""
    grid = parameter.device_mesh.mesh.tolist()
    return f"~{tuple(parameter.shape)} {parameter.dtype} {parameter.placements} {grid}"


def _sent(muon: GefenMuon, work: Work) -> Tensor:
    """This rank's rows of a direction, and of what must travel with them."""
    direction = muon._directions([work])[0]
    if not work.settings["normuon"]:
        return direction
    average = held(work.entry[NORMUON_V]).unsqueeze(1).view(torch.bfloat16)
    return torch.cat([direction, average], dim=1)


def _averages(rows: Tensor, columns: int) -> Tensor:
    # A row alone is contiguous wherever it lies, which four bytes may not be.
    own = rows[:, columns:].clone(memory_format=torch.contiguous_format)
    return own.view(torch.float32).squeeze(1)


def _updated(muon: GefenMuon, work: Work, full: Tensor) -> Tensor:
    """The whole update of a matrix, and the averages of its rows, from what all rows sent."""
    columns = work.layout.shape[1]
    direction = full[:, :columns].contiguous().unsqueeze(0)
    update = muon._orthogonal([work], direction)[0]
    if not work.settings["normuon"]:
        return _finite(work, update, direction)
    averages = _averages(full, columns)
    update = _finite(work, muon._evened(work, update, averages), direction)
    return torch.cat([update, averages.unsqueeze(1).view(torch.bfloat16)], dim=1)


def _finite(work: Work, update: Tensor, direction: Tensor) -> Tensor:
    """The update; raises where it is not finite although its direction is, on the CPU only.

    Reading it on an accelerator would wait for the device's queue.
    """
    on_host = update.device.type == "cpu"
    if on_host and not update.isfinite().all() and bool(direction.isfinite().all()):
        raise ArithmeticError(
            f"the update of {work.slot.name!r} is not finite although its direction is"
        )
    return update


def _step_gathered(muon: GefenMuon, works: Sequence[Work], failure: StepFailure) -> None:
    """Step matrices that are cut within rows: every rank has all of their momentum."""
    unserved = [w for w in works if w.settings["sharded_mode"] == "distributed"]
    _warn(muon, unserved)
    for work in muon._sharing().gathered(works, failure):
        failure.keep(partial(_step_whole, muon, work), None)


def _step_whole(muon: GefenMuon, work: Work) -> None:
    """Step this rank's part of a matrix whose gradient is whole in ``work``."""
    settings = {**work.settings, "cautious": False}
    own = replace(work, grad=held(work.slot.param.grad), settings=settings)
    for _, update in muon._updates([replace(work, param=work.grad)]):
        taken = _taken(work, update)
        if muon._rounding(work) is None:
            muon._apply(own, own_part(work, taken).contiguous(), muon._shape(own))
        else:
            _step_rounded(muon, replace(work, settings=settings), taken)


def _step_rounded(muon: GefenMuon, work: Work, update: Tensor) -> None:
    """Step this rank's part with the random numbers that its elements have in the whole."""
    shape = work.layout.shape
    places = torch.arange(shape.numel(), device=work.param.device).view(shape)
    target = work.param.new_zeros(shape)
    target.view(-1)[own_part(work, places).flatten()] = work.param.flatten()
    muon._apply(replace(work, param=target), update, muon._shape(work))
    work.param.copy_(own_part(work, target))


def _taken(work: Work, update: Tensor) -> Tensor:
    """A whole update as it is subtracted, where a cautious one has lost what it drops."""
    if not work.settings["cautious"]:
        return update
    wide = update.to(torch.float64 if work.param.dtype == torch.float64 else torch.float32)
    for own, grad in zip(matrices_of(wide), matrices_of(work.grad), strict=True):
        share = agreeing_share(agreeing_count(own, grad), own.numel())
        own.copy_(masked(own, grad.to(own.dtype), share))
    return wide


def _warn(muon: GefenMuon, works: Sequence[Work]) -> None:
    """Say, once for each matrix, which are not stepped in the mode that was asked for."""
    found: dict[str, list[str]] = {}
    for work in works:
        if work.key not in muon._warned:
            muon._warned.add(work.key)
            places = f"placements {work.slot.param.placements!r}"  # type: ignore[attr-defined]
            found.setdefault(places, []).append(repr(work.slot.name))
    for places, names in found.items():
        warnings.warn(
            f"sharded_mode='distributed' cannot serve {places}: {first_few(names)} are stepped "
            "as in 'exact'",
            stacklevel=2,
        )


def _shares(muon: GefenMuon, pending: Pending, failure: StepFailure) -> dict[Tensor, Tensor]:
    """Of the elements of all rows, how many agree in sign with the gradient. Collective."""
    updates = {work.key: update for work, update in pending}
    works = [work for work, _ in pending]

    def count(work: Work) -> Tensor:
        return agreeing_count(updates[work.key], work.grad).view(1)

    counts = muon._sharing().total(works, lambda work: 1, count, failure, torch.int64)
    return {
        work.key: agreeing_share(counts[work.key], work.layout.shape.numel()) for work in works
    }
