"""Parameters as the agreement before a step sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from gefen.distributed.preflight import Member


def mesh_over(*ranks: int) -> DeviceMesh:
    return DeviceMesh("cpu", list(ranks))


def weight(
    mesh: DeviceMesh,
    shape: Sequence[int] = (4, 4),
    dtype: torch.dtype = torch.float32,
    placement: Any = Shard(0),  # noqa: B008
) -> torch.Tensor | None:
    """A parameter with a gradient, or None where this rank is not in the mesh."""
    if mesh.get_coordinate() is None:
        return None
    local = torch.zeros(shape, dtype=dtype)
    made = DTensor.from_local(local, mesh, [placement] * mesh.ndim, run_check=False)
    made.grad = made.clone()
    return made


def group(**values: Any) -> dict[str, Any]:
    return {"lr": 0.01, "momentum": 0.95, "ns_schedule": "tuned3", **values}


def members(mode: str, named: dict[str, torch.Tensor | None], **values: Any) -> list[Member]:
    held = group(**values)
    return [Member(n, True, p, held, mode, held) for n, p in named.items() if p is not None]


def one_mesh(mode: str, world: int) -> list[Member]:
    mesh = mesh_over(*range(world))
    named = {"a": weight(mesh), "b": weight(mesh, (4, 6)), "c": weight(mesh)}
    return members(mode, named)


def two_on_each(mode: str, meshes: list[DeviceMesh]) -> list[Member]:
    """Parameters 0 and 1 of mesh i are named wi.0 and wi.1."""
    named = {f"w{i}.{j}": weight(m) for i, m in enumerate(meshes) for j in range(2)}
    return members(mode, named)


def without_grad(mine: list[Member], *names: str) -> list[Member]:
    """Without the gradients of those that are named, by default of all."""
    return [
        replace(m, parameter=m.parameter.detach().clone()) if not names or m.name in names else m
        for m in mine
    ]
