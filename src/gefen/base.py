"""What Gefen and GefenMuon have in common: groups, the order of a step, the shared codebook."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from gefen import capture
from gefen.blocks import UNDECIDED, find_period, row_length, row_period
from gefen.codebook import Quantizer, blank, fixed, is_blank
from gefen.errors import InvalidArgumentError
from gefen.hyperparameters import (
    Check,
    checked,
    current_rate,
    flag,
    refuse,
    refuse_in_group,
    unread_rate,
)
from gefen.kernels.tasks import Momentum
from gefen.momentum import adapt, histogram, learn_from
from gefen.parameters import (
    Slot,
    check_distinct,
    check_names,
    held,
    named,
    slots,
)
from gefen.scaling import unscaled
from gefen.state import (
    BLOCKWISE,
    CODEBOOK,
    COUNT,
    GLOBAL_STEP,
    INDEX,
    MAGNITUDE,
    PERIOD,
    ROWWISE,
    SHARED,
    STEP,
    Entry,
    advance,
    block_shape,
    check_unchanged,
    is_unbegun,
)
from gefen.steady import Steady
from gefen.step import gradients, stepped
from gefen.together import Together
from gefen.work import Plan, Work

logger = logging.getLogger("gefen")


class QuantisedOptimizer(Together):
    """Base of the optimizers whose momentum is quantised with a learned codebook.

    A step has three parts: ``_collect`` validates every gradient, ``_prepare`` computes new
    state and codebook aside, ``_commit`` publishes and updates. Only the last one changes
    anything, so a step that raises has changed nothing.
    """

    checks: ClassVar[dict[str, Check]]
    """One for each setting of a group."""

    option_checks: ClassVar[dict[str, Check]] = {
        "fused": flag,
        "deterministic": flag,
        "capturable": flag,
        "verbose": flag,
    }
    """One for each setting of the whole optimizer."""

    deciding: ClassVar[tuple[str, ...]] = ()
    """Settings that decide which state a parameter has, once it has some."""

    _scaled_by: Any = None
    """The optimizer that a gradient scaler has given its scale, if this step has to unscale."""

    _examined: tuple[Tensor | None, bool] = (None, True)
    """A codebook, and whether it still has to be learned."""

    def __init__(self, params: Any, arguments: Mapping[str, Any]) -> None:
        """``arguments`` holds at least the settings that the two tables of checks name."""
        self.options = checked(arguments, self.option_checks)
        self._begin()
        super().__init__(_groups(params), checked(arguments, self.checks))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "options": self.options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._begin()
        super().__setstate__(state)

    def _begin(self) -> None:
        """Make what no copy of this optimizer takes over."""
        self._quantizers: dict[int, tuple[Tensor, Quantizer]] = {}
        self._spare: Entry = {}
        self._steady: Steady | None = None
        self._shards = None
        self._layouts = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own settings; those not given are the defaults.

        Raises, and adds nothing, for a bad setting, a parameter that cannot be optimized or
        one that is already here.
        """
        if not isinstance(param_group, dict) or "params" not in param_group:
            refuse("param_group", param_group, "a dict that holds parameters as 'params'")
        group = dict(param_group)
        group["params"], names = named(group["params"])
        if names is not None:
            group["param_names"] = names
        check_names(group)
        refuse_in_group(group.keys() & self.options.keys())
        group |= checked({**self.defaults, **group}, self.checks)
        added = list(slots([*self.param_groups, group]))
        for slot in added[len(added) - len(group["params"]) :]:
            self._check(slot)
        check_distinct(added)
        super().add_param_group(group)

    @property
    def capturable(self) -> bool:
        """Whether counts and tensor rates stay on the device, unread."""
        return bool(self.options["capturable"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return what ``closure`` returns.

        ``closure`` runs first, with gradients enabled. Whatever raises before the update
        (closure, a bad gradient, a bad setting) leaves all parameters and state as they were;
        where ranks share parameters, all that could wait on each other raise the same error.
        """
        return stepped(self, closure)

    def _collect(self) -> list[Work]:
        """Every parameter with a gradient, all of it validated; none where a scaler says so."""
        settings = {id(group): self._current(group) for group in self.param_groups}
        works = self._collected(settings)
        if self.capturable:
            places = {(id(work.settings), work.param.get_device()): work for work in works}
            for work in places.values():
                unread_rate("lr", work.settings["lr"], work.param.device)
        if self._scaled_by is None:
            return works
        found = unscaled(self._scaled_by, works)
        if works and not found:
            self._ended()
        return found

    def _collected(self, settings: dict[int, dict[str, Any]]) -> list[Work]:
        steady, known = self._steady, None
        if steady is not None:
            known = steady.revive(self.param_groups, self.state)
        if known is not None:
            for work in known:
                work.settings = settings[id(work.slot.group)]
            return known
        self._steady = None
        self._drop_unbegun()
        found = gradients(self.param_groups, self._check)
        return [self._work(slot, grad, settings[id(slot.group)]) for slot, grad in found]

    def _work(self, slot: Slot, grad: Tensor, settings: dict[str, Any]) -> Work:
        layout = self._layout(slot)
        shared = layout.cut and self._is_shared(slot.group, slot.param)
        return Work(slot, held(slot.param), held(grad), settings, layout, shared)

    def _drop_unbegun(self) -> None:
        """Forget entries that say that nothing was done, which wrappers load as they are."""
        for group in self.param_groups:
            for param in group["params"]:
                if is_unbegun(self.state.get(param) or {}):
                    del self.state[param]

    def _current(self, group: dict[str, Any]) -> dict[str, Any]:
        """A group's settings for one step; ``lr`` as a float, or a tensor not to be read."""
        rate = group.get("lr")
        deferred = self.capturable and isinstance(rate, Tensor)
        if deferred and not capture.reads_rate(group["lr"], group["params"]):
            return self._resumed({**group, "lr": 0.0}) | {"lr": rate}
        settings = self._resumed(group)
        settings["lr"] = float(settings["lr"])
        return settings

    def _prepare(self, works: list[Work]) -> Plan:
        if not works:
            return Plan(works)
        if capture.under_way():
            self._check_known(works)
        plan = Plan(works)
        if not self._repeats(works):
            plan.missing.update((work.key, self._missing(work)) for work in works)
        if self._wants_codebook() and not self._shares():
            return replace(plan, codebook=self._learned(works, plan.missing))
        return plan

    def _learned(self, works: list[Work], missing: dict[Tensor, Entry]) -> Tensor | None:
        """A codebook by gradients that no other rank has; where none can be told, a fixed one."""
        if any(self._layout(slot).cut for slot in slots(self.param_groups)):
            return fixed()
        return learn_from(self._histogram(works, missing))

    def _check_known(self, works: list[Work]) -> None:
        """Raise where a step would make or learn something, rather than update what is there."""
        for work in works:
            entry = self.state.get(work.key)
            if not entry or self._moments(work, entry):
                capture.refuse_first(work.slot.name, "gets its state")
            elif entry[PERIOD] == UNDECIDED:
                capture.refuse_first(work.slot.name, "waits for a gradient that is not zero")
            elif entry[INDEX].device != work.param.device:
                capture.refuse_first(work.slot.name, "gets its state moved")
            elif (
                self._quantizers.get(entry[INDEX].get_device(), (None,))[0] is not entry[CODEBOOK]
            ):
                capture.refuse_first(work.slot.name, "meets its codebook for the first time")
        if self.options.get("codebook_refresh_every"):
            raise InvalidArgumentError(
                f"Invalid codebook_refresh_every={self.options['codebook_refresh_every']}: a "
                "captured step learns no codebook; pass 0"
            )
        if self._shared(CODEBOOK) is not self._examined[0] or self._examined[1]:
            capture.refuse_first(works[0].slot.name, "waits for a codebook to be learned")

    def _repeats(self, works: list[Work]) -> bool:
        """Whether all is known to be as it was when the last step had ended."""
        return self._steady is not None and self._steady.works is works

    def _histogram(self, works: list[Work], missing: dict[Tensor, Entry]) -> Tensor:
        periods = [self._known_period(work, missing) for work in works]
        pairs = [(w.grad, p) for w, p in zip(works, periods, strict=True) if p != UNDECIDED]
        return histogram(pairs, self.options["fused"])

    def _known_period(self, work: Work, missing: dict[Tensor, Entry]) -> int:
        known = missing.get(work.key, {})
        period: int = known[PERIOD] if PERIOD in known else self.state[work.key][PERIOD]
        return period

    def _missing(self, work: Work) -> Entry:
        """What the parameter's state lacks before this step, on the parameter's device."""
        param, entry = work.param, self.state.get(work.key)
        if not entry:
            return {STEP: self._zero(param)} | self._fresh(work, self._period(work))
        spec = self._spec(work.slot, entry)
        check_unchanged(spec.on_device() if self.capturable else spec, entry, work.slot.name)
        moved = {
            key: value.to(param.device)
            for key, value in entry.items()
            if isinstance(value, Tensor) and key not in SHARED and value.device != param.device
        }
        if entry[PERIOD] == UNDECIDED:
            moved |= self._decided(work, self._period(work))
        return moved | self._moments(work, entry)

    def _fresh(self, work: Work, period: int) -> Entry:
        """The state of a parameter before its first step, but for the count."""
        new: Entry = {
            PERIOD: period,
            INDEX: self._zeros(work, INDEX, work.layout.shape, torch.uint8),
            MAGNITUDE: self._zeros(work, MAGNITUDE, block_shape(work.layout.shape, period)),
        }
        return new | self._moments(work, new)

    def _decided(self, work: Work, period: int) -> Entry:
        """What changes in the state of a parameter that has had no momentum until now."""
        fresh = {} if period == UNDECIDED else self._fresh(work, period)
        return {key: value for key, value in fresh.items() if key in (PERIOD, *BLOCKWISE)}

    def _zeros(
        self, work: Work, key: str, shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """A tensor of the state, by the shape of the whole parameter's."""
        rowwise = key in ROWWISE
        part = torch.zeros(work.layout.part(shape, rowwise), dtype=dtype, device=work.param.device)
        return work.layout.placed(part, rowwise)

    def _period(self, work: Work) -> int:
        """The block length of a parameter, from its first gradient; 0 where it does not tell.

        That of a parameter which ranks step together they decide together.
        """
        forced = self._forced(work)
        if forced is not None:
            return forced
        if work.shared:
            return UNDECIDED
        if work.layout.cut:
            return row_period(work.layout.shape)
        return find_period(work.grad, self.options["deterministic"])

    def _forced(self, work: Work) -> int | None:
        """The block length that settings demand, whatever the gradient."""
        return None

    def _zero(self, param: Tensor) -> int | Tensor:
        """A count of a parameter's steps, before the first."""
        return torch.zeros((), dtype=COUNT, device=param.device) if self.capturable else 0

    def _wants_codebook(self) -> bool:
        known = self._shared(CODEBOOK)
        if known is not self._examined[0]:
            self._examined = known, known is None or is_blank(known)
        every = self.options.get("codebook_refresh_every", 0)
        return self._examined[1] or bool(every and self._shared(GLOBAL_STEP) % every == 0)

    def _entries(self) -> Iterator[Entry]:
        """The state of every parameter that has one."""
        params = (param for group in self.param_groups for param in group["params"])
        return filter(None, map(self.state.get, params))

    def _shared(self, key: str) -> Any:
        found = (entry[key] for entry in self._entries() if key in entry)
        return next(found, self._spare.get(key))

    def _commit(self, plan: Plan, active: bool = False) -> None:
        """Publish and update; ``active``: count the step even if this rank has no gradient."""
        if not plan.works and not active:
            return
        if self._repeats(plan.works) and plan.codebook is None:
            for count in self._counts().values():
                count.add_(1)
        else:
            for param, entry in plan.missing.items():
                self.state[param].update(entry)
            self._share(plan.codebook)
            for work in plan.works:
                work.entry = self.state[work.key]
        self._count(plan.works)
        if self.options["verbose"]:
            self._log(plan)
        self._update(plan.works)
        self._remember(plan.works)

    def _remember(self, works: list[Work]) -> None:
        """Keep what was validated for the next step, but no gradient."""
        if any(work.entry[PERIOD] == UNDECIDED for work in works):
            self._steady = None
        elif not self._repeats(works):
            self._steady = Steady(self.param_groups, works, self.deciding)
        elif self._steady is not None:
            self._steady.forget()

    def _count(self, works: list[Work]) -> None:
        advance([work.entry for work in works], STEP)

    def _share(self, learned: Tensor | None) -> None:
        """Count the step and hand codebook and count to every parameter's state."""
        entries = list(self._entries())
        codebook, counts = self._shared(CODEBOOK), self._counts()
        for count in counts.values():
            count.add_(1)
        count = next(iter(counts.values()))
        if learned is not None or codebook is None:
            by_device, codebook = {}, blank() if learned is None else learned
        else:
            by_device = {e[CODEBOOK].device: e[CODEBOOK] for e in entries if CODEBOOK in e}
        by_device.setdefault(codebook.device, codebook)
        self._spare = {GLOBAL_STEP: count, CODEBOOK: codebook}
        for entry in entries:
            device = entry.get(INDEX, codebook).device
            if device not in by_device:
                by_device[device] = codebook.to(device)
            home = device if self.capturable else count.device
            if home not in counts:
                counts[home] = count.to(home)
            adapt(entry, by_device[device])
            entry |= {GLOBAL_STEP: counts[home], CODEBOOK: by_device[device]}
        if learned is not None:
            self._examined = self._shared(CODEBOOK), False

    def _counts(self) -> dict[torch.device, Tensor]:
        """The steps of this optimizer: one tensor, or one for each device that reads it."""
        counts: dict[torch.device, Tensor] = {}
        for entry in chain(self._entries(), [self._spare]):
            if GLOBAL_STEP in entry:
                counts.setdefault(entry[GLOBAL_STEP].device, entry[GLOBAL_STEP])
                if not self.capturable:
                    break
        return counts or {_CPU: torch.zeros((), dtype=torch.int64, device=_CPU)}

    def _log(self, plan: Plan) -> None:
        if plan.codebook is not None:
            logger.info("learned a codebook from %d gradients", len(plan.works))
        for work in plan.works:
            period = plan.missing.get(work.key, {}).get(PERIOD)
            if period:
                logger.info("%s %s: period %d", work.slot.name, tuple(work.layout.shape), period)

    def _quantizer(self, codebook: Tensor) -> Quantizer:
        known = self._quantizers.get(codebook.get_device())
        if known is None or known[0] is not codebook:
            known = self._quantizers[codebook.get_device()] = codebook, Quantizer(codebook)
        return known[1]

    def _momentum(self, work: Work, beta: float) -> Momentum:
        """The arguments of this parameter's momentum update."""
        entry, codebook = work.entry, work.entry[CODEBOOK]
        return Momentum(
            work.grad,
            held(entry[INDEX]),
            held(entry[MAGNITUDE]),
            entry[PERIOD] or max(row_length(work.layout.shape), 1),
            beta,
            self._quantizer(codebook),
            torch.float64 if work.param.dtype is torch.float64 else torch.float32,
            self._seed(work) if work.settings["stochastic_round"] else None,
            self._offset(work),
        )

    def _offset(self, work: Work) -> int:
        """Elements of the whole parameter before those that a work has."""
        layout = work.layout
        return layout.first * row_length(layout.shape) if layout.in_rows else 0

    def _seed(self, work: Work) -> tuple[int | Tensor, int]:
        """What the random numbers of a parameter in this step depend on."""
        count = work.entry[GLOBAL_STEP]
        return count if self.capturable else int(count), work.slot.stream

    def _rounding(self, work: Work) -> tuple[int | Tensor, int] | None:
        """What a bfloat16 parameter's values are rounded by, if not to the nearest."""
        wanted = work.settings["bf16_stochastic_round"] and work.param.dtype == torch.bfloat16
        return self._seed(work) if wanted else None

    def _halves(self) -> Sequence[QuantisedOptimizer]:
        return [self]

    def _loaded(self) -> None:
        self._spare = {}
        self._steady = None

    def _ended(self) -> None:
        self._steady = None

    def _resumed(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        return checked(settings, {**self.checks, "lr": current_rate})

    def _moments(self, work: Work, entry: Entry) -> Entry:
        """Second moments that ``entry`` lacks."""
        raise NotImplementedError

    def _update(self, works: list[Work]) -> None:
        """Update parameters and state; none is empty and all state is in place."""
        raise NotImplementedError


_CPU = torch.device("cpu")


def _groups(params: Any) -> list[dict[str, Any]]:
    """What a constructor takes as ``params``, as one or more groups."""
    if isinstance(params, Tensor):
        refuse("params", "a tensor", "an iterable, such as model.named_parameters()")
    items, names = named(params)
    if not items:
        raise InvalidArgumentError("params is empty: there is nothing to optimize")
    if all(isinstance(item, dict) for item in items):
        return items
    return [{"params": items if names is None else list(zip(names, items, strict=True))}]
