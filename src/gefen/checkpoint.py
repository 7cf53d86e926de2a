"""Checkpoints: ``state_dict`` and ``load_state_dict``.

A load first validates everything, then publishes; one that raises, in a hook of the user's too,
changes nothing. State dicts have torch's layout. In addition every parameter has an entry,
``{"step": 0}`` before its first gradient, so that a lost one is noticed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from gefen.blocks import UNDECIDED
from gefen.codebook import is_blank
from gefen.convert import from_gefen_x
from gefen.errors import CheckpointError, GefenError, InvalidArgumentError
from gefen.half import Half
from gefen.layout import copied_to, distributed_like
from gefen.parameters import Slot, comparable_names, held, is_dtensor, slots
from gefen.scaling import has_float16
from gefen.state import (
    BLOCKWISE,
    CODEBOOK,
    COUNT,
    COUNTED,
    COUNTS,
    GLOBAL_STEP,
    MAGNITUDE,
    PERIOD,
    ROWWISE,
    SHARED,
    STEP,
    Entry,
    Spec,
    counted_by_host,
    disagreement,
    impossible,
    is_unbegun,
)

if TYPE_CHECKING:
    from gefen.distributed.sharding import Agreement

OWN = ("params", "param_names", "sharded_mode", "capturable")
"""Group keys that a load does not replace: how to run is the run's choice, not the state's."""


def forbid_inference(what: str) -> None:
    """Raise where state would be made that no later step could change."""
    if torch.is_inference_mode_enabled():
        raise InvalidArgumentError(
            f"Invalid {what} under torch.inference_mode(): its tensors cannot be changed later; "
            "use torch.no_grad()"
        )


class CheckpointedOptimizer(torch.optim.Optimizer):
    """Saving and loading for optimizers made of one or more :class:`Half`."""

    def _halves(self) -> Sequence[Half]:
        raise NotImplementedError

    _joint: Agreement | None = None

    def _agreement(self) -> Agreement | None:
        """What this optimizer's ranks agree by before a step; None where they share nothing."""
        return None

    def _joint_agreement(self) -> Agreement:
        # Imported on first use: a module of torch that it needs takes seconds.
        if self._joint is None:
            from gefen.distributed.sharding import Agreement

            self._joint = Agreement()
        return self._joint

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # A scaler that skips the step of one rank alone would leave the others waiting, and
        # refuses to unscale float16.
        return self._agreement() is not None or has_float16(self)

    def state_dict(self) -> dict[str, Any]:
        """torch's state dict, with an entry for every parameter; refers to the live tensors.

        State of a DTensor consists of DTensors, which torch.distributed.checkpoint gathers and
        reshards. Nothing is exchanged here.
        """
        self._halves()
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        saved = _packed(self.param_groups, self.state)
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replaced = post_hook(self, saved)
            saved = saved if replaced is None else replaced
        return saved

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from ``state_dict``, bitwise; its tensors are copied.

        State keeps its dtypes whatever those of the parameters, and goes to the parameters'
        devices; steps become tensors or numbers as this optimizer's ``capturable`` wants. CUDA
        graphs captured before still use the replaced state: capture anew. A tensor ``lr`` of this
        optimizer is kept and takes the saved value. All settings of groups are loaded but
        ``sharded_mode`` and AdamW's ``capturable``, which stay this optimizer's. Raises
        :class:`CheckpointError`, and changes nothing, where anything does not fit; non-finite
        state fits, as gradients can lead to it, negative magnitudes or second moments do not.
        Hooks get a copy of ``state_dict``, and one that raises changes nothing either.
        """
        forbid_inference("load_state_dict()")
        with _undone_on_failure(self), self._all_or_none("load_state_dict()"):
            given = _containers(state_dict)
            for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
                replaced = pre_hook(self, given)
                given = given if replaced is None else replaced
            given = from_gefen_x(given, self.param_groups) or given
            self._publish(*_read(given, self.param_groups, self._halves()))
            for post_hook in self._optimizer_load_state_dict_post_hooks.values():
                post_hook(self)
        for half in self._halves():
            half._loaded()
        agreement = self._agreement()
        if agreement is not None:
            agreement.mended()

    @contextmanager
    def _all_or_none(self, purpose: str) -> Iterator[None]:
        """Raise on all ranks that share parameters where one of them raises."""
        agreement, failure = self._agreement(), None
        try:
            yield
        except Exception as error:  # whatever it is, the other ranks must not go on alone
            failure = error
        if agreement is not None:
            agreement.report(self._halves(), failure, purpose)
        elif failure is not None:
            raise failure

    def _publish(self, settings: list[dict[str, Any]], entries: dict[Tensor, Entry]) -> None:
        _keep_rates(self.param_groups, settings)
        for group, chosen in zip(self.param_groups, settings, strict=True):
            own = {key: group[key] for key in OWN if key in group}
            group.clear()
            group.update(chosen | own)
            for param in group["params"]:
                self.state.pop(param, None)
        self.state.update(entries)


def _packed(groups: list[dict[str, Any]], state: Mapping[Tensor, Entry]) -> dict[str, Any]:
    """Groups and state with numbers in place of parameters."""
    found = list(slots(groups))
    numbers = {slot.param: slot.number for slot in found}
    packed = [
        {key: value for key, value in group.items() if key != "params"}
        | {"params": [numbers[param] for param in group["params"]]}
        for group in groups
    ]
    for group in packed:
        # Those of parameters that a partition has taken the place of.
        if len(group.get("param_names", ())) != len(group["params"]):
            group.pop("param_names", None)
    entries = {slot.number: _shown(state.get(slot.param) or {STEP: 0}) for slot in found}
    return {"state": entries, "param_groups": packed}


def _shown(entry: Entry) -> Entry:
    """An entry for a state dict; without blocks where their length is undecided.

    The state that is loaded into it has other blocks, for which torch.distributed.checkpoint
    would have no room in those of a fresh optimizer.
    """
    if entry.get(PERIOD) != UNDECIDED:
        return entry
    blank = {key: held(entry[key]).new_empty(0) for key in BLOCKWISE if key in entry}
    return {**entry, **blank}


def _containers(saved: Any) -> Any:
    """A copy of a state dict down to its tensors and settings, for hooks to change."""
    if not isinstance(saved, Mapping):
        return saved
    own = dict(saved)
    groups, state = own.get("param_groups"), own.get("state")
    if isinstance(groups, list):
        own["param_groups"] = [dict(g) if isinstance(g, Mapping) else g for g in groups]
    if isinstance(state, Mapping):
        own["state"] = {k: dict(e) if isinstance(e, Mapping) else e for k, e in state.items()}
    return own


@contextmanager
def _undone_on_failure(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Give back groups, tensor rates and state as they were if the load raises after all."""
    groups = [(group, dict(group)) for group in optimizer.param_groups]
    rates = [group.get("lr") for group in optimizer.param_groups]
    kept = [(rate, rate.clone()) for rate in rates if isinstance(rate, Tensor)]
    state = dict(optimizer.state)
    try:
        yield
    except BaseException:
        for group, before in groups:
            group.clear()
            group.update(before)
        for rate, value in kept:
            rate.copy_(value)
        optimizer.state.clear()
        optimizer.state.update(state)
        raise


def _keep_rates(groups: list[dict[str, Any]], settings: list[dict[str, Any]]) -> None:
    """Load into the tensors that already are learning rates, where sharing groups agree."""
    wanted: dict[int, set[float]] = {}
    for group, chosen in zip(groups, settings, strict=True):
        wanted.setdefault(id(group.get("lr")), set()).add(float(chosen["lr"]))
    for group, chosen in zip(groups, settings, strict=True):
        rate = group.get("lr")
        if isinstance(rate, Tensor) and len(wanted[id(rate)]) == 1:
            chosen["lr"] = rate.fill_(float(chosen["lr"]))


def _read(
    saved: Any, groups: list[dict[str, Any]], halves: Sequence[Half]
) -> tuple[list[dict[str, Any]], dict[Tensor, Entry]]:
    """Validate a state dict; return a copy of each group's settings and each entry."""
    saved_groups, saved_state = _outline(saved, groups)
    numbers = [number for group in saved_groups for number in group["params"]]
    _check_names(saved_groups, groups)
    settings: list[dict[str, Any]] = [{} for _ in groups]
    entries: dict[Tensor, Entry] = {}
    for half in halves:
        own = set(map(id, half.param_groups))
        for at, (group, saved_group) in enumerate(zip(groups, saved_groups, strict=True)):
            if id(group) in own:
                settings[at] = _settings(half, at, saved_group)
        pairs = zip(slots(groups), numbers, strict=True)
        found = {
            slot.param: _entry(half, slot, saved_state[number])
            for slot, number in pairs
            if id(slot.group) in own
        }
        taken = {param: entry for param, entry in found.items() if entry}
        _check_shared(list(taken.values()))
        entries |= _copied(taken, half.capturable)
    return settings, entries


def _refuse(problem: str) -> NoReturn:
    raise CheckpointError(f"Nothing was loaded: {problem}")


def _outline(
    saved: Any, groups: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], Mapping[Any, Any]]:
    """The saved groups and state, once every parameter is known to have its entry."""
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= saved.keys():
        _refuse("this is no optimizer state dict, which has 'state' and 'param_groups'")
    saved_groups, saved_state = saved["param_groups"], saved["state"]
    if not isinstance(saved_state, Mapping) or not isinstance(saved_groups, list):
        _refuse("its 'state' is no dict or its 'param_groups' is no list")
    for number, group in enumerate(saved_groups):
        _check_group(number, group)
    sizes = [len(group["params"]) for group in groups]
    saved_sizes = [len(group["params"]) for group in saved_groups]
    if sizes != saved_sizes:
        _refuse(
            f"it has groups of {saved_sizes} parameters, this optimizer has groups of {sizes}; "
            "build the optimizer from the same parameters in the same groups"
        )
    numbers = [number for group in saved_groups for number in group["params"]]
    params = [param for group in groups for param in group["params"]]
    # torch.distributed.checkpoint leaves out those of frozen parameters.
    wanted = {n for n, param in zip(numbers, params, strict=True) if param.requires_grad}
    if len(set(numbers)) != len(numbers) or not wanted <= set(saved_state) <= set(numbers):
        lost = sorted(map(str, wanted - set(saved_state)))
        _refuse(
            f"its parameters do not match its state (no entry for {lost}): it is truncated, or "
            "another optimizer saved it"
        )
    return saved_groups, saved_state


def _check_group(number: int, group: Any) -> None:
    """Raise where ``group`` has not the form of a saved group."""
    if not isinstance(group, Mapping) or not all(isinstance(key, str) for key in group):
        _refuse(f"group {number} is no dict of settings with their names as keys")
    params, names = group.get("params"), group.get("param_names")
    if not isinstance(params, list) or not all(isinstance(p, (int, str)) for p in params):
        _refuse(f"group {number} has no list of parameter numbers as 'params'")
    if names is None:
        return
    if not isinstance(names, (list, tuple)) or len(names) != len(params):
        _refuse(f"group {number} has {names!r} as 'param_names', expected {len(params)} names")


def _check_names(saved_groups: list[dict[str, Any]], groups: list[dict[str, Any]]) -> None:
    """Raise where parameters are in another order, however the models are wrapped."""
    both = zip(comparable_names(saved_groups), comparable_names(groups), strict=True)
    for number, (saved, own) in enumerate(both):
        if saved is None or own is None or len(saved) != len(own) or saved == own:
            continue
        pair = next(pair for pair in zip(saved, own, strict=True) if pair[0] != pair[1])
        _refuse(
            f"group {number} was saved with parameter {pair[0]!r} where this optimizer has "
            f"{pair[1]!r}; a hook of register_load_state_dict_pre_hook can rename or reorder"
        )


def _settings(half: Half, number: int, saved: dict[str, Any]) -> dict[str, Any]:
    try:
        chosen = half._resumed(saved)
    except GefenError as error:
        _refuse(f"group {number}: {error}; did another optimizer save it?")
    extra = {key: value for key, value in saved.items() if key not in (*OWN, *chosen)}
    try:
        return copy.deepcopy(extra | chosen)
    except (TypeError, RuntimeError) as error:
        _refuse(f"group {number} holds a value that cannot be copied: {error}")


def _entry(half: Half, slot: Slot, saved: Any) -> Entry:
    """The saved entry of a parameter; empty where that had taken no step."""
    if not isinstance(saved, Mapping):
        _refuse(f"the state of parameter {slot.name!r} is no dict")
    entry, counted = dict(saved), counted_by_host(saved)
    if is_unbegun(entry):
        return {}
    spec = half._spec(slot, entry)
    if STEP in spec.counts:
        entry = counted
    entry = _placed(spec, entry)
    problem = disagreement(spec, entry) or impossible(entry)
    if problem is not None:
        _refuse(f"the state of parameter {slot.name!r} does not fit: {problem}")
    return entry


def _placed(spec: Spec, entry: Entry) -> Entry:
    """The entry with what is whole in it, which fits any layout, put where it belongs."""
    placed = dict(entry)
    for key, (dtype, shape) in spec.tensors.items():
        if key in SHARED or key in COUNTED:
            continue
        value, rowwise = _complete(entry.get(key)), key in ROWWISE
        if value is None:
            if is_dtensor(entry.get(key)) and spec.misplaced(key, entry[key]) is None:
                # A mesh that was loaded with it has no process groups.
                placed[key] = spec.relaid(key, held(entry[key]))
            continue
        if key in BLOCKWISE and entry.get(PERIOD) == UNDECIDED and not value.numel():
            value = torch.zeros(shape, dtype=dtype, device="cpu")
        if tuple(value.shape) != shape:
            continue
        if key in spec.like:
            placed[key] = distributed_like(value, spec.like[key])
        else:
            placed[key] = spec.layout.placed(spec.layout.share(value, rowwise), rowwise)
    return placed


def _complete(value: Any) -> Tensor | None:
    """A tensor that every rank has all of; None for anything else."""
    if type(value) is Tensor:
        return value
    if is_dtensor(value) and all(place.is_replicate() for place in value.placements):
        return held(value)
    return None


def _check_shared(entries: list[Entry]) -> None:
    """Raise where values that one optimizer shares differ, or are impossible."""
    entries = [entry for entry in entries if GLOBAL_STEP in entry]
    if not entries:
        return
    for key in SHARED:
        values = {(e[key].data_ptr(), e[key].stride()): e[key].cpu() for e in entries}.values()
        if not all(torch.equal(value, entries[0][key].cpu()) for value in values):
            _refuse(f"its parameters disagree on the {key}")
    if int(entries[0][GLOBAL_STEP]) < max(entry[STEP] for entry in entries):
        _refuse(f"{GLOBAL_STEP} is smaller than the steps of a parameter")
    codebook = entries[0][CODEBOOK].cpu()
    ends = codebook[0] == -1 and codebook[-1] == 1
    if not (ends and (codebook.diff() >= 0).all()):
        _refuse(f"its {CODEBOOK} does not ascend from -1 to 1")
    if is_blank(codebook) and any(_has_momentum(entry) for entry in entries):
        _refuse(f"its {CODEBOOK} was never learned, but there is momentum")


def _has_momentum(entry: Entry) -> bool:
    magnitude = held(entry[MAGNITUDE])
    return bool(((magnitude > 0) & magnitude.isfinite()).any())


def _copied(entries: dict[Tensor, Entry], capturable: bool) -> dict[Tensor, Entry]:
    """Own copies on the parameters' devices; shared values once per device.

    Counts go to the CPU, unless the device counts itself.
    """
    shared: dict[tuple[str, torch.device], Tensor] = {}

    def copied(key: str, value: Any, device: torch.device) -> Any:
        if not isinstance(value, Tensor):
            counts = capturable and key in COUNTED
            return torch.tensor(value, dtype=COUNT, device=device) if counts else value
        if key in COUNTS and not capturable:
            device = torch.device("cpu")
        if (key, device) in shared:
            return shared[key, device]
        own = copied_to(value, device)
        if key in SHARED:
            shared[key, device] = own
        return own

    return {
        param: {key: copied(key, value, param.device) for key, value in entry.items()}
        for param, entry in entries.items()
    }
