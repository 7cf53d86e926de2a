"""What an optimizer does where ranks have parts of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gefen.blocks import UNDECIDED
from gefen.checkpoint import CheckpointedOptimizer
from gefen.codebook import digest
from gefen.half import Half
from gefen.layout import Layout, layout_of
from gefen.momentum import learn_from
from gefen.parameters import Slot, is_dtensor, is_shared, slots
from gefen.state import CODEBOOK, GLOBAL_STEP, PERIOD, Entry
from gefen.work import Plan, Work

if TYPE_CHECKING:
    from gefen.distributed.sharding import Agreement
    from gefen.distributed.shards import Shards
    from gefen.distributed.stepping import StepFailure


class Together(Half, CheckpointedOptimizer):
    """An optimizer whose parameters may be DTensors: ranks choose blocks and codebook together."""

    options: dict[str, Any]
    _layouts: dict[Tensor, tuple[Any, Layout]]
    _shards: Shards | None

    _digested: tuple[Tensor | None, str] = (None, "none")
    """A codebook, and its name."""

    def _layout(self, slot: Slot) -> Layout:
        param: Any = slot.param
        if not is_dtensor(param):
            return Layout(param.shape)
        form = param.device_mesh, param.placements, param.shape, param.to_local().shape
        known = self._layouts.get(param)
        if known is None or known[0] != form:
            known = self._layouts[param] = form, layout_of(param, slot.name)
        return known[1]

    def _is_shared(self, group: Mapping[str, Any], param: Tensor) -> bool:
        """Whether ranks that have parts of a parameter step it together."""
        return is_shared(param)

    def _shares(self) -> bool:
        # Most optimizers have plain parameters, which is seen at once.
        return any(
            self._is_shared(group, param)
            for group in self.param_groups
            for param in filter(is_dtensor, group["params"])
        )

    def _agreement(self) -> Agreement | None:
        return self._joint_agreement() if self._shares() else None

    def _facts(self) -> dict[str, Any]:
        facts = super()._facts()
        # Ranks that each step their own need not have taken as many steps.
        if self._shares():
            count = self._shared(GLOBAL_STEP)
            facts |= {
                "codebook": self._digest(self._shared(CODEBOOK)),
                "global_step": 0 if count is None else int(count),
            }
        return facts

    def _digest(self, codebook: Tensor | None) -> str:
        """Name a codebook, for ranks to compare."""
        if codebook is not self._digested[0]:
            self._digested = codebook, digest(codebook)
        return self._digested[1]

    def _sharing(self) -> Shards:
        """What ranks exchange; imported on first use, as a module of torch takes seconds."""
        if self._shards is None:
            from gefen.distributed.shards import Shards

            self._shards = Shards()
        self._shards.refresh(slots(self.param_groups))
        return self._shards

    def _wants_survey(self) -> bool:
        if not self._shares():
            return False
        if self._wants_codebook():
            return True
        pairs = ((group, param) for group in self.param_groups for param in group["params"])
        shared = (param for group, param in pairs if self._is_shared(group, param))
        entries = (self.state.get(p) or {} for p in shared if p.grad is not None)
        return any(entry.get(PERIOD, UNDECIDED) == UNDECIDED for entry in entries)

    def _survey(self, plan: Plan, failure: StepFailure, first: bool) -> Tensor | None:
        if not self._shares():
            return None
        sharing, missing = self._sharing(), plan.missing
        together = [work for work in plan.works if work.shared]
        undecided = [w for w in together if self._known_period(w, missing) == UNDECIDED]
        periods = sharing.periods(undecided, self.options["deterministic"], failure)
        for work in undecided:
            period = periods.get(work.key, UNDECIDED)
            failure.keep(partial(self._decide, work, missing, period), None)
        if not self._wants_codebook():
            return None
        cut = [w for w in together if not w.layout.in_rows]
        found = [w for w in plan.works if w.layout.in_rows or not w.layout.cut]
        found += sharing.gathered(cut, failure)
        counted = [w for w in found if w.layout.counts and (first or is_dtensor(w.key))]
        return failure.keep(lambda: self._histogram(counted, missing), None)

    def _decide(self, work: Work, missing: dict[Tensor, Entry], period: int) -> None:
        missing.setdefault(work.key, {}).update(self._decided(work, period))

    def _surveyed(self, plan: Plan, counts: Tensor) -> Plan:
        if self._shares() and self._wants_codebook():
            return replace(plan, codebook=learn_from(counts))
        return plan

    def _wants_codebook(self) -> bool:
        """Whether this step learns a codebook."""
        raise NotImplementedError

    def _shared(self, key: str) -> Any:
        """What all parameters' state has in common."""
        raise NotImplementedError

    def _known_period(self, work: Work, missing: dict[Tensor, Entry]) -> int:
        """The block length of a parameter, as far as it is decided."""
        raise NotImplementedError

    def _decided(self, work: Work, period: int) -> Entry:
        """What changes in a parameter's state once its block length is known."""
        raise NotImplementedError

    def _histogram(self, works: list[Work], missing: dict[Tensor, Entry]) -> Tensor:
        """Counts of normalised gradients, to learn a codebook from."""
        raise NotImplementedError
