"""How a parameter and its state lie: whole, or in parts on the ranks of a mesh.

Each state tensor lies like its parameter. That of rows (the momentum's index and magnitudes, row
means) has the parameter's placements; what belongs to all rows, or to a parameter that is cut
within its rows, is the same on every rank. So torch's own tools gather and reshard it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gefen.errors import UnsupportedParameterError
from gefen.parameters import held, is_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from gefen.distributed.exchange import Lane


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where a parameter lies; made by :func:`layout_of`."""

    shape: torch.Size
    """Of the whole parameter."""
    mesh: DeviceMesh | None = None
    """None for a plain tensor."""
    placements: tuple[Any, ...] = ()
    """Of state that belongs to rows."""
    first: int = 0
    """The first row of this rank's part."""
    stop: int = 0
    """The row after its last one."""
    lane: Lane | None = None
    """The ranks among which dimension 0 is cut, if no other is; along one of the mesh's."""
    dimension: int = -1
    """That one."""
    gathered: bool = False
    """Whether the parameter is cut within rows: its state is then whole on every rank."""

    @property
    def cut(self) -> bool:
        """Whether no rank has all of the parameter."""
        return self.lane is not None or self.gathered

    @property
    def in_rows(self) -> bool:
        """Whether each rank holds whole rows, and state of those alone."""
        return self.lane is not None and not self.gathered

    @property
    def counts(self) -> bool:
        """Whether this rank is the one that counts its part: copies count once."""
        if self.mesh is None:
            return True
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None
        own = self.dimension if self.in_rows else None
        return not any(at for d, at in enumerate(coordinate) if d != own)

    def part(self, shape: Sequence[int], rowwise: bool) -> tuple[int, ...]:
        """Shape of what this rank holds of a state tensor."""
        if not (self.in_rows and rowwise):
            return tuple(shape)
        return (self.stop - self.first, *shape[1:])

    def share(self, full: Tensor, rowwise: bool) -> Tensor:
        """What this rank holds of a whole state tensor: a view."""
        return full[self.first : self.stop] if self.in_rows and rowwise else full

    def placed(self, part: Tensor, rowwise: bool) -> Tensor:
        """A state tensor of which this rank holds ``part``."""
        if self.mesh is None:
            return part
        from torch.distributed.tensor import DTensor, Replicate

        shape, places = part.shape, tuple(Replicate() for _ in self.placements)
        if rowwise and not self.gathered:
            places = self.placements
        if self.in_rows and rowwise:
            shape = torch.Size((self.shape[0], *part.shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            part, self.mesh, places, run_check=False, shape=shape, stride=stride
        )

    def fits(self, state: Any, rowwise: bool) -> str | None:
        """How a state tensor lies otherwise than :meth:`placed` would have it."""
        if self.mesh is None:
            return "is a DTensor, expected a plain tensor" if is_dtensor(state) else None
        if not is_dtensor(state):
            return "is a plain tensor, expected a DTensor"
        from torch.distributed.tensor import Replicate

        mesh, found = state.device_mesh, tuple(state.placements)
        if mesh != self.mesh:
            return f"has device_mesh {mesh}, the parameter {self.mesh}"
        problem = elsewhere(mesh, self.mesh)
        if problem is not None:
            return problem
        sharded = rowwise and not self.gathered
        places = self.placements if sharded else tuple(Replicate() for _ in found)
        return None if found == places else f"has placements {found}, expected {places}"


def layout_of(param: Tensor, name: str) -> Layout:
    """The layout of a parameter.

    Raises :class:`UnsupportedParameterError`, with its ``name``, where this rank's part is not
    the one that DTensor would place here: no exchange can tell what it holds.
    """
    if not is_dtensor(param):
        return Layout(param.shape)
    from torch.distributed.tensor import Replicate, Shard

    from gefen.distributed.exchange import lane_of, spans_of

    dtensor: Any = param
    mesh, shape = dtensor.device_mesh, dtensor.shape
    found = [
        (d, place)
        for d, place in enumerate(dtensor.placements)
        if mesh.size(d) > 1 and not isinstance(place, Replicate)
    ]
    everywhere = tuple(Replicate() for _ in dtensor.placements)
    if not found:
        return Layout(shape, mesh, everywhere)
    rows = len(found) == 1 and type(found[0][1]) is Shard and found[0][1].dim % len(shape) == 0
    if not rows or mesh.get_coordinate() is None:
        return Layout(shape, mesh, everywhere, gathered=True)
    dimension = found[0][0]
    lane = lane_of(mesh, dimension)
    span = spans_of(shape[0], lane)[lane.position]
    held = dtensor.to_local().shape[0]
    if held != span.stop - span.start:
        raise UnsupportedParameterError(
            f"Parameter {name!r} of shape {tuple(shape)} and placements {dtensor.placements} has "
            f"a shard of length {held} on this rank instead of {span.stop - span.start}: "
            "distribute it with distribute_tensor or fully_shard"
        )
    if len(shape) < 2:
        return Layout(shape, mesh, everywhere, *span, lane, dimension, gathered=True)
    places = tuple(Shard(0) if d == dimension else Replicate() for d in range(mesh.ndim))
    return Layout(shape, mesh, places, *span, lane, dimension)


def distributed_like(whole: Tensor, param: Tensor) -> Tensor:
    """A tensor that every rank has all of, lying as ``param`` does. Nothing is exchanged."""
    if not is_dtensor(param):
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    dtensor: Any = param
    mesh, everywhere = dtensor.device_mesh, [Replicate() for _ in dtensor.placements]
    own = DTensor.from_local(whole.to(dtensor.device), mesh, everywhere, run_check=False)
    placed: Tensor = own.redistribute(placements=dtensor.placements)
    return placed


def copied_to(tensor: Tensor, device: torch.device) -> Tensor:
    """A contiguous copy of a tensor, or of what this rank holds of one."""
    own = held(tensor.detach()).to(device, copy=True, memory_format=torch.contiguous_format)
    return like_other(own, tensor)


def like_other(part: Tensor, other: Any) -> Tensor:
    """A tensor of which this rank holds ``part``, lying as ``other`` does."""
    if not is_dtensor(other):
        return part
    from torch.distributed.tensor import DTensor

    stride = torch.empty(other.shape, device="meta").stride()
    mesh, places = other.device_mesh, other.placements
    return DTensor.from_local(
        part, mesh, places, run_check=False, shape=other.shape, stride=stride
    )


def elsewhere(mesh: DeviceMesh, own: DeviceMesh) -> str | None:
    """Whether a tensor that was loaded with its mesh is another rank's."""
    if mesh.get_coordinate() == own.get_coordinate():
        return None
    return (
        f"holds the part of the rank at {mesh.get_coordinate()} of the mesh, this one is at "
        f"{own.get_coordinate()}: each rank needs its own file, or one with the whole state"
    )
