"""Optimizer state: its keys, what a valid entry looks like, and checkpoints.

A load first validates everything, then publishes; a checkpoint that is truncated, foreign or
made for other parameters changes nothing. State dicts have torch's layout. In addition every
parameter has an entry, ``{"step": 0}`` before its first gradient, so that a lost one is noticed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeAlias

import torch
from torch import Tensor

from gefen.codebook import SIZE
from gefen.errors import CheckpointError, GefenError
from gefen.parameters import Slot, is_dtensor, slots

if TYPE_CHECKING:
    from gefen.distributed.sharding import Agreement

STEP = "step"
"""Steps that this parameter has taken, int."""
PERIOD = "period"
"""Elements per block, int."""
INDEX = "index"
"""uint8 [n]: codebook entry of each element of the momentum."""
MAGNITUDE = "magnitude"
"""float32 [n / period]: largest magnitude in each block of the momentum."""
V = "v"
"""float32 [n / period]: EMA of the mean of g² in each block."""
V_ROW = "v_row"
"""float32 [rows]: EMA of the row means of g²."""
V_COL = "v_col"
"""float32 [columns]: EMA of the column means of g²."""
NORMUON_V = "normuon_v"
"""float32 [rows]: EMA of the mean square of each row of the update."""
NORMUON_STEP = "normuon_step"
"""Steps that ``normuon_v`` has seen, int."""
CODEBOOK = "codebook"
"""float32 [256], one tensor shared by all parameters of an optimizer on a device."""
GLOBAL_STEP = "global_step"
"""int64 scalar on the CPU, shared likewise: steps that this optimizer has taken."""

SHARED = (CODEBOOK, GLOBAL_STEP)

OWN = ("params", "param_names", "sharded_mode")
"""Group keys that a load does not replace: the mode is the run's, not the state's."""

Entry: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Spec:
    """Exactly what the state of one parameter must hold."""

    counts: dict[str, int]
    """Keys of whole numbers ≥ 1, each with what it must divide; any number divides 0."""
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]


class Saved(Protocol):
    """An optimizer, or one of the two inside a hybrid, as a checkpoint sees it."""

    param_groups: list[dict[str, Any]]

    def _resumed(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """A saved group's settings in canonical form; :class:`InvalidArgumentError` if bad."""

    def _spec(self, param: Tensor, entry: Entry) -> Spec:
        """What ``entry`` must hold, complete."""

    def _view(self, slot: Slot) -> Tensor:
        """What it sees of a parameter: all of it, or this rank's shard."""

    def _gathered(self) -> dict[Tensor, Entry]:
        """Complete entries of the parameters whose state other ranks hold. Collective."""

    def _kept(self, entries: dict[Tensor, Entry]) -> dict[Tensor, Entry]:
        """What this rank holds of complete entries that are loaded."""


def momentum_spec(param: Tensor, entry: Entry) -> Spec:
    """The part of the state that all quantised optimizers have."""
    n = param.numel()
    period = entry.get(PERIOD)
    blocks = n // period if isinstance(period, int) and period > 0 else n
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        INDEX: (torch.uint8, (n,)),
        MAGNITUDE: (torch.float32, (blocks,)),
        GLOBAL_STEP: (torch.int64, ()),
    }
    if CODEBOOK in entry:
        tensors[CODEBOOK] = (torch.float32, (SIZE,))
    return Spec({STEP: 0, PERIOD: n}, tensors)


def disagreement(spec: Spec, entry: Entry) -> str | None:
    """How ``entry`` differs from ``spec``, in words; None where it does not."""
    expected = {*spec.counts, *spec.tensors}
    if expected != entry.keys():
        lacking, excess = (
            sorted(expected - entry.keys()),
            sorted(map(str, entry.keys() - expected)),
        )
        return f"it lacks {lacking} and has {excess} beyond what is expected"
    for key, total in spec.counts.items():
        value = entry[key]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            return f"{key} is {value!r}, expected a whole number >= 1"
        if total % value:
            return f"{key} is {value}, which does not divide {total} elements"
    for key, (dtype, shape) in spec.tensors.items():
        value = entry[key]
        if type(value) is not Tensor and not is_dtensor(value):
            return f"{key} is of type {type(value).__name__}, expected a tensor"
        if (value.dtype, tuple(value.shape)) != (dtype, shape):
            return f"{key} is {value.dtype} {tuple(value.shape)}, expected {dtype} {shape}"
    return None


class CheckpointedOptimizer(torch.optim.Optimizer):
    """Saving and loading for optimizers made of one or more :class:`Saved`."""

    def _halves(self) -> Sequence[Saved]:
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
        # A scaler that skips the step of one rank alone would leave the others waiting.
        return self._agreement() is not None

    def state_dict(self) -> dict[str, Any]:
        """torch's state dict, with an entry for every parameter; refers to the live tensors.

        Where ``sharded_mode="distributed"`` spreads the state over ranks, all of them must call
        this together and each gets the complete state; :class:`PeerFailureError` on a rank that
        waits in vain.
        """
        gathered: dict[Tensor, Entry] = {}
        for half in self._halves():
            gathered |= half._gathered()
        saved = super().state_dict()
        params = (param for group in self.param_groups for param in group["params"])
        for number, param in enumerate(params):
            if param in gathered:
                saved["state"][number] = gathered[param]
        for group in saved["param_groups"]:
            for number in group["params"]:
                saved["state"].setdefault(number, {STEP: 0})
        return saved

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from ``state_dict``, bitwise; its tensors are copied.

        State keeps its dtypes whatever those of the parameters, and goes to the parameters'
        devices. A tensor ``lr`` of this optimizer is kept and takes the saved value. All
        settings of groups are loaded but ``sharded_mode``, which stays this optimizer's. Raises
        :class:`CheckpointError`, and changes nothing, where anything does not fit.
        """
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        settings, entries = _read(state_dict, self.param_groups, self._halves())
        _keep_rates(self.param_groups, settings)
        for group, chosen in zip(self.param_groups, settings, strict=True):
            for param in group["params"]:
                self.state.pop(param, None)
            own = {key: group[key] for key in OWN if key in group}
            group.clear()
            group.update(chosen | own)
        for half in self._halves():
            entries = half._kept(entries)
        self.state.update(entries)
        agreement = self._agreement()
        if agreement is not None:
            agreement.mended()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)


def _keep_rates(groups: list[dict[str, Any]], settings: list[dict[str, Any]]) -> None:
    """Load into the tensors that already are learning rates, where sharing groups agree."""
    wanted: dict[int, set[float]] = {}
    for group, chosen in zip(groups, settings, strict=True):
        wanted.setdefault(id(group["lr"]), set()).add(float(chosen["lr"]))
    for group, chosen in zip(groups, settings, strict=True):
        rate = group["lr"]
        if isinstance(rate, Tensor) and len(wanted[id(rate)]) == 1:
            chosen["lr"] = rate.fill_(float(chosen["lr"]))


def _read(
    saved: Any, groups: list[dict[str, Any]], halves: Sequence[Saved]
) -> tuple[list[dict[str, Any]], dict[Tensor, Entry]]:
    """Validate a state dict; return a copy of each group's settings and each entry."""
    saved_groups, saved_state = _outline(saved, groups)
    settings: list[dict[str, Any]] = [{} for _ in groups]
    entries: dict[Tensor, Entry] = {}
    for half in halves:
        found: dict[Tensor, Entry] = {}
        for number, (group, saved_group) in enumerate(zip(groups, saved_groups, strict=True)):
            if any(group is own for own in half.param_groups):
                settings[number] = _settings(half, number, group, saved_group)
                found |= _entries(half, group, saved_group, saved_state)
        _check_shared(list(found.values()))
        entries |= _copied(found)
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
    if not isinstance(saved_state, Mapping) or not _are_groups(saved_groups):
        _refuse("its 'state' is no dict or its 'param_groups' is no list of groups")
    sizes = [len(group["params"]) for group in groups]
    saved_sizes = [len(group["params"]) for group in saved_groups]
    if sizes != saved_sizes:
        _refuse(
            f"it has groups of {saved_sizes} parameters, this optimizer has groups of {sizes}; "
            "build the optimizer from the same parameters in the same groups"
        )
    numbers = [number for group in saved_groups for number in group["params"]]
    if len(set(numbers)) != len(numbers) or set(numbers) != set(saved_state):
        lost = sorted(map(str, set(numbers) - set(saved_state)))
        _refuse(
            f"its parameters do not match its state (no entry for {lost}): it is truncated, or "
            "another optimizer saved it"
        )
    return saved_groups, saved_state


def _are_groups(groups: Any) -> bool:
    return isinstance(groups, list) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups
    )


def _settings(
    half: Saved, number: int, group: dict[str, Any], saved: dict[str, Any]
) -> dict[str, Any]:
    names, saved_names = group.get("param_names"), saved.get("param_names")
    if names and saved_names and list(names) != list(saved_names):
        pair = next(pair for pair in zip(saved_names, names, strict=False) if pair[0] != pair[1])
        _refuse(
            f"group {number} was saved with parameter {pair[0]!r} where this optimizer has "
            f"{pair[1]!r}; a hook of register_load_state_dict_pre_hook can rename or reorder"
        )
    try:
        chosen = half._resumed(saved)
    except KeyError as error:
        _refuse(f"group {number} has no {error}; did another optimizer save it?")
    except GefenError as error:
        _refuse(f"group {number}: {error}")
    extra = {key: value for key, value in saved.items() if key not in (*OWN, *chosen)}
    return copy.deepcopy(extra | chosen)


def _entries(
    half: Saved, group: dict[str, Any], saved_group: dict[str, Any], saved_state: Mapping[Any, Any]
) -> dict[Tensor, Entry]:
    """The saved entries of the parameters that had taken a step."""
    entries = {}
    for slot, number in zip(slots([group]), saved_group["params"], strict=True):
        entry = saved_state[number]
        if not isinstance(entry, Mapping):
            _refuse(f"the state of parameter {slot.name!r} is no dict")
        if entry == {STEP: 0}:
            continue
        entries[slot.param] = dict(entry)
        problem = disagreement(half._spec(half._view(slot), dict(entry)), dict(entry))
        if problem is not None:
            _refuse(f"the state of parameter {slot.name!r} does not fit: {problem}")
    return entries


def _check_shared(entries: list[Entry]) -> None:
    """Raise where values that one optimizer shares differ, or are impossible."""
    entries = [entry for entry in entries if GLOBAL_STEP in entry]
    if not entries:
        return
    for key in (GLOBAL_STEP, CODEBOOK):
        if any((key in entry) != (key in entries[0]) for entry in entries):
            _refuse(f"some parameters have a {key}, others have none")
        if key in entries[0]:
            values = {entry[key].data_ptr(): entry[key].cpu() for entry in entries}.values()
            if not all(torch.equal(value, entries[0][key].cpu()) for value in values):
                _refuse(f"its parameters disagree on the {key}")
    if entries[0][GLOBAL_STEP] < max(entry[STEP] for entry in entries):
        _refuse(f"{GLOBAL_STEP} is smaller than the steps of a parameter")
    codebook = entries[0].get(CODEBOOK)
    if codebook is not None:
        ends = codebook[0] == -1 and codebook[-1] == 1
        if not (ends and (codebook.diff() >= 0).all()):
            _refuse(f"its {CODEBOOK} does not ascend from -1 to 1")


def _copied(entries: dict[Tensor, Entry]) -> dict[Tensor, Entry]:
    """Own copies on the parameters' devices, scalars on the CPU; shared values once per device."""
    shared: dict[tuple[str, torch.device], Tensor] = {}

    def copied(key: str, value: Any, device: torch.device) -> Any:
        if not isinstance(value, Tensor):
            return value
        device = device if value.dim() else torch.device("cpu")
        if (key, device) in shared:
            return shared[key, device]
        own = value.detach().to(device, copy=True, memory_format=torch.contiguous_format)
        if key in SHARED:
            shared[key, device] = own
        return own

    return {
        param: {key: copied(key, value, param.device) for key, value in entry.items()}
        for param, entry in entries.items()
    }
