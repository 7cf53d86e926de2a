"""GefenMuonHybrid: Muon for hidden matrices, a backup optimizer for everything else."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gefen import hyperparameters as check
from gefen.backup import BackupAdamW
from gefen.checkpoint import CheckpointedOptimizer
from gefen.errors import InvalidArgumentError, UnsupportedFeatureError
from gefen.gefen import Gefen
from gefen.gefen_muon import GefenMuon
from gefen.groups import RATES, Halves, Router
from gefen.parameters import is_shared, slots
from gefen.routing import BACKUP_SUBSTRINGS, NamedParams, tabulated, validate_split
from gefen.sides import BACKUP, MUON, Sides, check_sides
from gefen.step import stepped

if TYPE_CHECKING:
    from gefen.distributed.sharding import Agreement

logger = logging.getLogger("gefen")


class GefenMuonHybrid(CheckpointedOptimizer):
    """GefenMuon for hidden matrices, Gefen or AdamW for the other parameters.

    ``GefenMuonHybrid(model, lr=…)`` routes by :func:`~gefen.split_params_for_muon`;
    ``GefenMuonHybrid(model.named_parameters(), lr=…)`` does so by names and shapes alone, as
    pairs say nothing of modules; two lists of pairs are taken as they are. A parameter in both
    is an error. Frozen parameters are taken in, and stepped once they have gradients.
    ``backup_substrings`` and ``sides`` change what goes where, as in
    :func:`~gefen.split_params_for_muon`; :func:`~gefen.routing_table` shows it, and so does
    ``verbose``, in the log.

    Instead of pairs there may be groups of them, such as ``[{"params": pairs, "lr": 0.1}, …]``:
    each is routed, and its other keys are settings of both halves, or of the one that has them.

    ``lr`` and ``weight_decay`` hold for both halves, unless ``muon_lr``, ``backup_lr``,
    ``muon_weight_decay`` or ``backup_weight_decay`` are given. ``betas``, ``eps``,
    ``backup_1d_period_one``, ``backup_2d_period_one``, ``backup_factored_v_2d`` and
    ``no_decay_substrings`` (parts of names, in any case, that get no weight decay) are the
    backup's; the rest are those of :class:`~gefen.GefenMuon`. ``backup_optimizer`` is "gefen" or
    "adamw" (torch's, whose state has the parameters' dtypes).

    gefen-x has ``ns_schedule="tuned3"`` and ``backup_factored_v_2d=False``, with which small
    models train worse than with Muon and AdamW: see ``docs/convergence.md``.

    ``param_groups`` are Muon's, in the order given, then the backup's; they and ``state`` are
    those of both halves: schedulers, GradScaler and hooks treat this as one optimizer. With
    ``capturable`` and "adamw", the backup's parameters must be on an accelerator, as torch
    demands. A scheduler that cycles momentum moves Muon's alone.
    """

    muon: GefenMuon | None
    backup: Gefen | BackupAdamW | None

    def __init__(
        self,
        muon_named_params: nn.Module | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]],
        backup_named_params: Iterable[tuple[str, Tensor]] | None = None,
        *,
        lr: float | Tensor,
        backup_substrings: Iterable[str] | None = None,
        muon_lr: float | Tensor | None = None,
        backup_lr: float | Tensor | None = None,
        backup_optimizer: str = "gefen",
        weight_decay: float = 0.0,
        muon_weight_decay: float | None = None,
        backup_weight_decay: float | None = None,
        no_decay_substrings: Iterable[str] = (),
        backup_1d_period_one: bool = False,
        backup_2d_period_one: bool = False,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        fused: bool = True,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_schedule: str | Iterable[Iterable[float]] | None = "standard",
        adjust_lr_fn: str | None = "match_rms_adamw",
        sharded_mode: str = "exact",
        fp8_ns: bool = False,
        fp8_ns_compile: bool = True,
        batched_ns: bool = False,
        batched_ns_workspace_bytes: int = 268435456,
        stochastic_round: bool = False,
        deterministic: bool = False,
        normuon: bool = True,
        normuon_beta2: float = 0.95,
        normuon_eps: float = 1e-8,
        cautious: bool = False,
        capturable: bool = False,
        verbose: bool = False,
        maximize: bool = False,
        bf16_stochastic_round: bool = False,
        sides: Sides | None = None,
        backup_factored_v_2d: bool = True,
    ) -> None:
        given = locals()
        self._make_muon, self._make_backup = _muon_maker(given), _backup_maker(given)
        self._router = _router(given, self._make_backup.func)
        if backup_named_params is None:
            halves = self._router.routed(muon_named_params)
        else:
            halves = self._router.given(muon_named_params, backup_named_params)
        if not halves.muon and not halves.backup:
            raise InvalidArgumentError("there is no parameter to optimize")
        self._verbose = verbose
        self._begin({key: given[key] for key in ("lr", "weight_decay", "momentum")})
        self.muon = self._make_muon(halves.muon) if halves.muon else None
        self.backup = self._make_backup(halves.backup) if halves.backup else None
        self._adopt(halves)

    def _begin(self, defaults: dict[str, Any]) -> None:
        """Do what Optimizer.__init__ does, without insisting on groups of its own."""
        super().__setstate__(
            {"defaults": defaults, "state": defaultdict(dict), "param_groups": []}
        )

    def __getstate__(self) -> dict[str, Any]:
        own = ("muon", "backup", "_router", "_make_muon", "_make_backup", "_verbose")
        return {**super().__getstate__(), **{key: self.__dict__[key] for key in own}}

    @property
    def backup_optimizer(self) -> str:
        """What new backup parameters get: "gefen" or "adamw"."""
        return "adamw" if self._make_backup.func is BackupAdamW else "gefen"

    @property
    def capturable(self) -> bool:
        """Whether counts and tensor rates stay on the device, unread."""
        return bool(self._make_muon.keywords["capturable"])

    @property
    def fused(self) -> bool:
        """Whether kernels were asked for; may be changed between steps."""
        return bool(self._make_muon.keywords["fused"])

    @fused.setter
    def fused(self, value: bool) -> None:
        self._set("fused", value)

    @property
    def verbose(self) -> bool:
        """Whether what is learned is logged; may be changed between steps."""
        return self._verbose

    @verbose.setter
    def verbose(self, value: bool) -> None:
        self._set("verbose", value)
        self._verbose = value

    def _set(self, name: str, value: object) -> None:
        """Change an option of both halves, and of those to come."""
        chosen = check.flag(name, value)
        for made in (self._make_muon, self._make_backup):
            if name in made.keywords:
                made.keywords[name] = chosen
        for half in (self.muon, self.backup):
            if hasattr(half, "options"):
                setattr(half, name, chosen)

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__} ("]
        for label, half in (("Muon", self.muon), (f"Backup, {self._kind}", self.backup)):
            params = [param for _, param in _pairs(half)]
            elements = sum(param.numel() for param in params)
            lines.append(f"{label}: {len(params)} parameters, {elements} elements")
        own = [] if self.muon is None else self.muon.param_groups
        for number, group in enumerate(self.param_groups):
            side = "Muon" if any(group is known for known in own) else "Backup"
            lines.append(f"Parameter Group {number} ({side})")
            shown = sorted(group.keys() - {"params", "param_names"})
            lines += [f"    {key}: {group[key]}" for key in shown]
        return "\n".join([*lines, ")"])

    @property
    def _kind(self) -> str:
        return "AdamW" if self._make_backup.func is BackupAdamW else "Gefen"

    @classmethod
    def from_model(
        cls, model: nn.Module, *, backup_substrings: Iterable[str] | None = None, **kwargs: Any
    ) -> GefenMuonHybrid:
        """A hybrid for all parameters of ``model``, frozen ones too; ``lr`` is required."""
        return cls(model, backup_substrings=backup_substrings, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add (name, parameter) pairs, routed by name and shape, each to its half.

        The other keys are settings, as in the groups that the constructor takes.
        """
        halves = self._router.added(param_group)
        muon, backup = _named(halves.muon), _named(halves.backup)
        if not muon and not backup:
            raise InvalidArgumentError("Invalid params of a group: there is no parameter in it")
        validate_split(_pairs(self.muon) + muon, _pairs(self.backup) + backup)
        # Made on their own first: neither half refuses its groups once the other has some.
        new_muon = self._make_muon(halves.muon) if muon else None
        new_backup = self._make_backup(halves.backup) if backup else None
        self.muon = _extended(self.muon, new_muon, halves.muon)
        self.backup = _extended(self.backup, new_backup, halves.backup)
        self._adopt(halves)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step both halves; return what ``closure`` returns.

        Both have validated everything before either changes anything.
        """
        return stepped(self, closure)

    def _agreement(self) -> Agreement | None:
        """One for the parameters of both halves; none where their ranks step on their own."""
        together = any(half._shares() for half in self._halves())
        if self.muon is None and self._make_muon.keywords["sharded_mode"] != "approx":
            # Others may have matrices, in the mode that new ones get.
            together |= any(map(is_shared, self._params()))
        return self._joint_agreement() if together else None

    def _params(self) -> Iterator[Tensor]:
        return (param for half in self._made() for g in half.param_groups for param in g["params"])

    def _halves(self) -> list[Any]:
        """Both halves, with this optimizer's state and groups, also where code has put others."""
        halves = self._made()
        for half in halves:
            half.state = self.state
        held = {id(group) for half in halves for group in half.param_groups}
        if held != {id(group) for group in self.param_groups}:
            raise InvalidArgumentError(
                "Invalid param_groups: other groups were put in place of a hybrid's own; change "
                "their settings in place, or add some by add_param_group()"
            )
        return halves

    def _made(self) -> list[Any]:
        return [half for half in (self.muon, self.backup) if half is not None]

    def _adopt(self, halves: Halves) -> None:
        """Make groups and state of both halves this optimizer's, as the very same objects."""
        for half in self._made():
            half.state = self.state
            for group in half.param_groups:
                if not any(group is known for known in self.param_groups):
                    self.param_groups.append(group)
        if self._verbose:
            logger.info("parameters go to these halves:\n%s", tabulated(halves.routes))


def _router(given: dict[str, Any], backup: Any) -> Router:
    """How parameters are shared out, from the hybrid's arguments."""
    chosen, sides = given["backup_substrings"], check_sides(given["sides"])
    if given["backup_named_params"] is not None and (chosen is not None or sides is not None):
        raise InvalidArgumentError(
            f"{'sides' if chosen is None else 'backup_substrings'} decides how one model or list "
            "is routed, but two lists that are already routed are given: leave it out"
        )
    if chosen is None:
        chosen = BACKUP_SUBSTRINGS
    no_decay = check.strings("no_decay_substrings", given["no_decay_substrings"])
    checks = {MUON: {**GefenMuon.checks}, BACKUP: backup.checks}
    del checks[MUON]["eps"]  # a hybrid's is the backup's
    return Router(
        check.strings("backup_substrings", chosen),
        sides,
        tuple(part.lower() for part in no_decay),
        checks,
    )


def _muon_maker(given: dict[str, Any]) -> partial[GefenMuon]:
    """GefenMuon with the hybrid's arguments, which must be valid even if it has no matrix."""
    own = _rates(given, "muon") | {"eps": 1e-7}
    return _maker(GefenMuon, {**GefenMuon.checks, **GefenMuon.option_checks}, given | own)


def _backup_maker(given: dict[str, Any]) -> partial[Any]:
    own = _rates(given, "backup")
    for dimensions in ("1d", "2d"):
        name = f"backup_{dimensions}_period_one"
        own[f"force_{dimensions}_period_one"] = check.flag(name, given[name])
    if check.one_of("gefen", "adamw")("backup_optimizer", given["backup_optimizer"]) == "adamw":
        if check.flag("bf16_stochastic_round", given["bf16_stochastic_round"]):
            raise UnsupportedFeatureError(
                "bf16_stochastic_round=True with backup_optimizer='adamw': torch's AdamW rounds "
                "to the nearest; pass backup_optimizer='gefen'"
            )
        checks = {**BackupAdamW.checks, "capturable": check.flag}
        return _maker(BackupAdamW, checks, given | own)
    own["factored_v_2d"] = check.flag("backup_factored_v_2d", given["backup_factored_v_2d"])
    return _maker(Gefen, {**Gefen.checks, **Gefen.option_checks}, given | own)


def _rates(given: dict[str, Any], half: str) -> dict[str, Any]:
    """A half's learning rate and weight decay."""
    rates = {}
    for name in RATES:
        own = f"{half}_{name}"
        chosen = name if given[own] is None else own
        rates[name] = GefenMuon.checks[name](chosen, given[chosen])
    return rates


def _maker(kind: Any, checks: dict[str, check.Check], given: dict[str, Any]) -> partial[Any]:
    return partial(kind, **check.checked(given, {k: c for k, c in checks.items() if k in given}))


def _extended(half: Any, new: Any, groups: list[dict[str, Any]]) -> Any:
    if half is None:
        return new
    for group in groups:
        half.add_param_group(group)
    return half


def _named(groups: list[dict[str, Any]]) -> NamedParams:
    return [pair for group in groups for pair in group["params"]]


def _pairs(half: Any) -> NamedParams:
    return [] if half is None else [(s.name, s.param) for s in slots(half.param_groups)]
