"""Names of gefen-x that have a better way here; using one raises an error that says which."""

from __future__ import annotations

from typing import NoReturn

from gefen.errors import UnsupportedFeatureError

_DCP = (
    "torch.distributed.checkpoint saves optimizer.state_dict() itself and loads it on any number "
    "of ranks, after gefen.prepare_load(model, optimizer, checkpoint); see docs/checkpoints.md"
)


class _Unavailable:
    """Raises when made."""

    _instead = _DCP

    def __init__(self, *_: object, **__: object) -> None:
        self._refuse()

    @classmethod
    def _refuse(cls) -> NoReturn:
        raise UnsupportedFeatureError(
            f"{cls.__name__} of gefen-x is not available, nor needed: {cls._instead}"
        )


class GefenDCPState(_Unavailable):
    """In gefen-x a wrapper that makes an optimizer's checkpoints reshardable."""


class GefenSavePlanner(_Unavailable):
    """In gefen-x a planner that bounds the memory of a save."""


class GefenFileSystemWriter(_Unavailable):
    """In gefen-x a writer for asynchronous saves."""

    _instead = _DCP + "; torch's own FileSystemWriter stages it for async_save()"


NAMES = {kind.__name__: kind for kind in (GefenDCPState, GefenSavePlanner, GefenFileSystemWriter)}
