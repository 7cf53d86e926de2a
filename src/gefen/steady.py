"""Steps that repeat: what one has validated holds for the next while nothing has changed since.

Everything a step looks at is compared with what it was, by identity and by where and how tensors
lie; this takes a few microseconds for each parameter, where validating takes a hundred.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gefen.parameters import PLAIN
from gefen.state import COUNTED, LARGEST_COUNT, Entry

if TYPE_CHECKING:
    from gefen.work import Work

_LOOKS: tuple[Any, ...] = (attrgetter("dtype"), attrgetter("shape"), Tensor.stride)


def forms(tensors: Sequence[Tensor], *more: Any) -> list[list[Any]] | None:
    """How plain dense tensors look and, last, their addresses; None if others are among them.

    more: functions of a tensor that say more of how it looks.
    """
    if not PLAIN.issuperset(map(type, tensors)):
        return None
    try:
        found = [list(map(of, tensors)) for of in (*_LOOKS, *more)]
        found.append(list(map(Tensor.data_ptr, tensors)))
    except RuntimeError:  # sparse or nested
        return None
    # Without numbers: empty, or on the meta device.
    return None if 0 in found[-1] else found


class Steady:
    """The works of a step, to be used again by the next one."""

    works: list[Work]

    def __init__(
        self, groups: Sequence[Mapping[str, Any]], works: list[Work], deciding: Sequence[str]
    ) -> None:
        """deciding: settings that decide which state there is."""
        self.works, self._deciding = works, deciding
        self._groups = [(group, *_registered(group)) for group in groups]
        self._absent = [param.grad is None for group in groups for param in group["params"]]
        self._chosen = [[group[key] for key in deciding] for group in groups]
        entries = [work.entry for work in works]
        self._sizes = list(map(len, entries))
        self._readers = [_reader(entry) for entry in entries]
        values = self._read(entries)
        # Of the state only what is no tensor is held, so that code which moves state elsewhere
        # frees its memory. A tensor that has got the name and the looks of one is as good.
        self._ids = list(map(id, values))
        self._numbers = [value for value in values if not isinstance(value, Tensor)]
        # The shared ones once.
        tensors = {id(value): i for i, value in enumerate(values) if isinstance(value, Tensor)}
        self._places = list(tensors.values())
        self._params = [work.param for work in works]
        # Who lies where another lay, lies on the same device.
        self._forms = forms(self._params, _IS_LEAF), self._state_forms(values)
        self._grads = forms([work.grad for work in works], Tensor.get_device)
        self.forget()

    def forget(self) -> None:
        """Let go of gradients and state."""
        for work in self.works:
            work.grad, work.entry = _NO_GRAD, {}

    def revive(
        self, groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, Entry]
    ) -> list[Work] | None:
        """The works, with the gradients that there are now; None where anything has changed."""
        if None in (*self._forms, self._grads) or not self._same_groups(groups):
            return None
        params = [param for group in groups for param in group["params"]]
        grads = [param.grad for param in params]
        if [grad is None for grad in grads] != self._absent:
            return None
        entries = [state.get(work.slot.param) or {} for work in self.works]
        if not self._same_state(entries):
            return None
        present = [grad for grad in grads if grad is not None]
        looks = forms(present, Tensor.get_device)
        if looks is None or self._grads is None or looks[:-1] != self._grads[:-1]:
            return None
        if forms(self._params, _IS_LEAF) != self._forms[0]:
            return None
        for work, grad, entry in zip(self.works, present, entries, strict=True):
            work.grad, work.entry = grad, entry
        return self.works

    def _same_groups(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        if len(groups) != len(self._groups):
            return False
        return all(
            group is known
            and _registered(group)[1] == names
            and len(group["params"]) == len(params)
            and all(map(is_, group["params"], params))
            and [group.get(key) for key in self._deciding] == chosen
            for group, (known, params, names), chosen in zip(
                groups, self._groups, self._chosen, strict=True
            )
        )

    def _same_state(self, entries: Sequence[Entry]) -> bool:
        if list(map(len, entries)) != self._sizes:
            return False
        try:
            values = self._read(entries)
        except KeyError:
            return False
        if list(map(id, values)) != self._ids or not _counted(entries):
            return False
        return self._state_forms(values) == self._forms[1]

    def _state_forms(self, values: Sequence[Any]) -> list[list[Any]] | None:
        return forms([values[place] for place in self._places])

    def _read(self, entries: Sequence[Entry]) -> list[Any]:
        read = (reader(entry) for reader, entry in zip(self._readers, entries, strict=True))
        return list(chain.from_iterable(read))


_IS_LEAF = attrgetter("is_leaf")

_NO_GRAD = torch.empty(0)


def _registered(group: Mapping[str, Any]) -> tuple[list[Tensor], list[str]]:
    return list(group["params"]), list(group.get("param_names", ()))


def _reader(entry: Entry) -> Any:
    """What reads the values of an entry that a step does not replace."""
    return itemgetter(*(key for key, value in entry.items() if not _is_count(key, value)))


def _is_count(key: str, value: Any) -> bool:
    return key in COUNTED and not isinstance(value, Tensor)


def _counted(entries: Sequence[Entry]) -> bool:
    """Whether what steps count on the host still are whole numbers that they can count on."""
    for key in COUNTED:
        counts = [entry[key] for entry in entries if key in entry]
        if not {int, Tensor}.issuperset(map(type, counts)):
            return False
        numbers = [count for count in counts if type(count) is int]
        if numbers and not 0 < min(numbers) <= max(numbers) < LARGEST_COUNT:
            return False
    return True
