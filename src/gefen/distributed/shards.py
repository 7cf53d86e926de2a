"""What ranks that each hold some rows of a parameter must know of the others' rows.

Every exchange is one all_reduce for each group of ranks, whatever the number of parameters, in the
order of the meshes' keys and, within one, of registration; the preflight has compared both.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from gefen.blocks import block_sums, candidates, choose_period
from gefen.distributed.mesh import channel_of, identify_meshes, peers_expected
from gefen.layout import distributed_like, like_other
from gefen.parameters import held, is_shared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from gefen.distributed.exchange import Lane
    from gefen.distributed.mesh import MeshKey
    from gefen.distributed.stepping import StepFailure
    from gefen.parameters import Slot
    from gefen.work import Work


class Shards:
    """The meshes of one optimizer's parameters, and the sums over them."""

    def __init__(self) -> None:
        self._signature: list[int] = []
        self._keys: dict[int, MeshKey] = {}

    def refresh(self, found: Iterable[Slot]) -> None:
        """Look at the meshes anew where parameters have changed."""
        shared: list[Any] = [slot.param for slot in found if is_shared(slot.param)]
        meshes = {id(param.device_mesh): param.device_mesh for param in shared}
        if list(meshes) != self._signature:
            keys = identify_meshes(meshes.values())
            self._signature, self._keys = list(meshes), dict(zip(meshes, keys, strict=True))

    def key(self, work: Work) -> MeshKey:
        """That of the mesh that a parameter lies on."""
        return self._keys[id(work.layout.mesh)]

    def _lanes(self, works: Iterable[Work]) -> Iterator[tuple[Lane, list[Work]]]:
        found: dict[Any, list[Work]] = {}
        for work in works:
            if work.layout.lane is not None:
                found.setdefault((self.key(work), work.layout.dimension), []).append(work)
        for key in sorted(found):
            lane = found[key][0].layout.lane
            assert lane is not None
            yield lane, found[key]

    def total(
        self,
        works: Sequence[Work],
        size: Callable[[Work], int],
        make: Callable[[Work], Tensor],
        failure: StepFailure,
        dtype: torch.dtype,
    ) -> dict[Tensor, Tensor]:
        """Sums over the ranks of ``make(work)``, ``size(work)`` numbers, by parameter. Collective.

        A rank on which one fails adds zeros, and notes the error.
        """
        sums: dict[Tensor, Tensor] = {}
        for lane, some in self._lanes(works):
            sizes, device = list(map(size, some)), some[0].param.device
            buffer = torch.zeros(sum(sizes), dtype=dtype, device=device)
            for work, part in zip(some, torch.split(buffer, sizes), strict=True):
                failure.keep(lambda w=work, p=part: p.copy_(make(w)), None)  # type: ignore[misc]
                sums[work.key] = part
            with peers_expected(channel_of(lane.group, device.type), "adding up rows"):
                dist.all_reduce(buffer, group=lane.group)
        return sums

    def periods(
        self, works: Sequence[Work], deterministic: bool, failure: StepFailure
    ) -> dict[Tensor, int]:
        """Periods by the gradients of all rows, 0 where these are zero. Collective."""

        def sums(work: Work) -> Tensor:
            found = block_sums(work.grad, candidates(work.layout.shape), deterministic)
            return torch.tensor(found, dtype=torch.float64)

        def size(work: Work) -> int:
            return 2 + len(candidates(work.layout.shape))

        rows = [work for work in works if work.layout.in_rows]
        totals = self.total(rows, size, sums, failure, torch.float64)
        found = {key: total.tolist() for key, total in totals.items()}
        for work in self.gathered([w for w in works if not w.layout.in_rows], failure):
            periods = candidates(work.grad.shape)
            found[work.key] = block_sums(work.grad, periods, deterministic)
        by_key = {work.key: work.layout.shape for work in works}
        return {key: choose_period(sums, by_key[key]) for key, sums in found.items()}

    def gathered(self, works: Sequence[Work], failure: StepFailure) -> list[Work]:
        """The works with whole gradients, in the order given. Collective."""
        found = {work.key: grad for work, grad in self._gradients(works, failure)}
        return [replace(work, grad=found[work.key]) for work in works]

    def _gradients(
        self, works: Sequence[Work], failure: StepFailure
    ) -> Iterator[tuple[Work, Tensor]]:
        """Vectors as sums of what ranks hold, others by DTensor's own exchange."""
        cut = [work for work in works if work.layout.lane is not None]
        found: dict[Tensor, Tensor] = {}
        for dtype in (torch.float32, torch.float64):
            wide = dtype == torch.float64
            some = [work for work in cut if (work.grad.dtype == torch.float64) is wide]
            found |= self.total(some, lambda w: w.layout.shape.numel(), _spread, failure, dtype)
        for work in cut:
            yield work, found[work.key].to(work.grad.dtype).view(work.layout.shape)
        rest = [work for work in works if work.layout.lane is None]
        for work in sorted(rest, key=self.key):
            # Of the parameter's own gradient, what was unscaled may be a copy.
            grad: Any = like_other(work.grad, work.slot.param.grad)
            yield work, grad.full_tensor()

    def whole_target(self, work: Work) -> Tensor:
        """A tensor of the whole parameter's shape that holds this rank's part. Collective.

        What lies elsewhere may be anything.
        """
        if work.layout.lane is None:
            param = work.slot.param.detach()
            assert isinstance(param, DTensor)
            return param.full_tensor()
        whole = work.param.new_zeros(work.layout.shape)
        whole[work.layout.first : work.layout.stop] = work.param
        return whole

    def keep_part(self, work: Work, whole: Tensor) -> None:
        """Write this rank's part of a whole tensor to the parameter."""
        work.param.copy_(own_part(work, whole))


def _spread(work: Work) -> Tensor:
    """This rank's part of a vector's gradient, among zeros."""
    whole = work.grad.new_zeros(work.layout.shape)
    whole[work.layout.first : work.layout.stop] = work.grad
    return whole


def own_part(work: Work, whole: Tensor) -> Tensor:
    """This rank's part of a whole tensor, of a parameter that is cut within rows."""
    if work.layout.lane is not None:
        return whole[work.layout.first : work.layout.stop]
    part: Tensor = held(distributed_like(whole, work.slot.param))
    return part
