"""A learning rate for a model and a few batches of its data, as gefen-x's ``find_lr`` finds it.

``python -m gefen.tools.find_lr`` of gefen-x, which loads a model and a data set from Hugging Face,
has no counterpart: call :func:`find_lr` with the model and blocks of token numbers.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from gefen.errors import InvalidArgumentError, UnsupportedFeatureError
from gefen.gefen import Gefen
from gefen.gefen_muon import GefenMuon
from gefen.hybrid import GefenMuonHybrid
from gefen.routing import split_params_for_muon
from gefen.tools.lr_calibration import LRRangeResult, lr_range_test
from gefen.tools.trial import Closure, backward, set_rate, taken_back

SWEEP_LRS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3)
"""What ``method="sweep"`` tries where no rates are given."""

_OPTIMIZERS = ("gefen", "gefen_muon", "hybrid", "adamw")
_METHODS = ("range_test", "sweep")

_INSTEAD = {
    "find_lr_parallel_sweep": "call find_lr(method='sweep') in one process for each device",
    "find_lr_sharded_sweep": "call lr_range_test() on all ranks of the sharded model",
    "build_token_stream": "pass blocks of token numbers [N, length] to find_lr()",
    "distribute_lrs": "pass each process its own sweep_lrs",
}


@dataclass
class FindLRResult:
    """What :func:`find_lr` recommends, and what it saw."""

    lr: float
    optimizer: str
    method: str
    min_loss_lr: float | None = None
    diverged_at: float | None = None
    range_result: LRRangeResult | None = None
    sweep: dict[float, float] = field(default_factory=dict)
    """Loss on the ``eval_blocks`` by learning rate; infinite where training diverged."""


def build_optimizer(
    model: nn.Module,
    optimizer: str,
    lr: float,
    *,
    weight_decay: float = 0.0,
    fused: bool = True,
    adjust_lr_fn: str = "match_rms_adamw",
) -> Any:
    """The optimizer of that name: "gefen", "gefen_muon" (matrices alone), "hybrid", "adamw"."""
    _check_one("optimizer", optimizer, _OPTIMIZERS)
    common: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
    if optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), **common)
    common["fused"] = fused
    if optimizer == "gefen":
        return Gefen(model.named_parameters(), **common)
    common["adjust_lr_fn"] = adjust_lr_fn
    if optimizer == "hybrid":
        return GefenMuonHybrid(model, **common)
    return GefenMuon(split_params_for_muon(model)[0], **common)


def find_lr(
    model: nn.Module,
    train_data: Tensor | Closure,
    *,
    optimizer: str = "gefen",
    method: str = "range_test",
    eval_blocks: Tensor | None = None,
    device: str | torch.device | None = None,
    weight_decay: float = 0.0,
    fused: bool = True,
    adjust_lr_fn: str = "match_rms_adamw",
    restore: bool = True,
    num_iter: int = 100,
    start_lr: float = 1e-6,
    end_lr: float = 0.1,
    smooth_beta: float = 0.9,
    diverge_factor: float = 5.0,
    sweep_lrs: Sequence[float] | None = None,
    sweep_steps: int = 80,
    warmup: int = 10,
    bs: int = 8,
    seed: int = 0,
    verbose: bool = True,
) -> FindLRResult:
    """A learning rate for ``optimizer`` on ``model``.

    ``train_data``: int64 [N, length], blocks of token numbers for a model that is called as
    ``model(input_ids=…, labels=…)`` and returns something with a ``loss``, in an order that
    ``seed`` decides, ``bs`` at a time; or a closure that computes a loss, calls ``backward`` and
    returns it.

    ``method="range_test"``: one ramp, see :func:`~gefen.tools.lr_range_test`. ``"sweep"``:
    ``sweep_steps`` steps, the first ``warmup`` at rising rates, with each of ``sweep_lrs``, and
    the one with the lowest loss on ``eval_blocks`` [N, length].

    The model is as before afterwards. ``device``: where the model is moved to first.
    """
    _check_one("method", method, _METHODS)
    if not restore:
        raise UnsupportedFeatureError(
            "restore=False is not available: trials are always taken back; train with the rate"
        )
    if device is not None:
        model.to(device)
    settings: dict[str, Any] = {"weight_decay": weight_decay, "fused": fused}
    settings["adjust_lr_fn"] = adjust_lr_fn
    make: Callable[..., Any] = partial(build_optimizer, model, optimizer, **settings)
    closure = partial(_closure, model, train_data, bs, seed)
    if method == "range_test":
        found = lr_range_test(
            make(start_lr),
            closure(),
            num_iter=num_iter,
            start_lr=start_lr,
            end_lr=end_lr,
            smooth_beta=smooth_beta,
            diverge_factor=diverge_factor,
            model=model,
        )
        result = FindLRResult(
            found.suggested_lr, optimizer, method, found.min_loss_lr, found.diverged_at, found
        )
    else:
        if eval_blocks is None:
            raise InvalidArgumentError("Invalid eval_blocks=None: method='sweep' compares by them")
        losses = {
            rate: _arm(make(rate), model, closure(), rate, sweep_steps, warmup, eval_blocks)
            for rate in sweep_lrs or SWEEP_LRS
        }
        result = FindLRResult(min(losses, key=losses.__getitem__), optimizer, method, sweep=losses)
    if verbose:
        _show(result)
    return result


def _show(result: FindLRResult) -> None:
    print(f"find_lr[{result.optimizer}/{result.method}]: lr {result.lr:.3e}")
    for rate, loss in result.sweep.items():
        print(f"  lr {rate:.3e}: loss {loss:.4f}")


def _check_one(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidArgumentError(f"Invalid {name}={value!r}: must be one of {choices}")


def _closure(model: nn.Module, data: Tensor | Closure, bs: int, seed: int) -> Closure:
    if not isinstance(data, Tensor):
        return data
    if data.dim() != 2 or not len(data) or bs < 1:
        raise InvalidArgumentError(
            f"Invalid train_data of shape {tuple(data.shape)} with {bs=}: must be blocks of token "
            "numbers [N, length], at least one of them in a batch"
        )
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
    at = 0

    def closure() -> Tensor:
        nonlocal at
        rows = order[torch.arange(at, at + bs) % len(order)]
        at += bs
        loss = _loss(model, data[rows.to(data.device)])
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return closure


def _loss(model: nn.Module, blocks: Tensor) -> Tensor:
    blocks = blocks.to(next(model.parameters()).device)
    loss: Tensor = model(input_ids=blocks, labels=blocks).loss
    return loss


def _arm(
    optimizer: Any,
    model: nn.Module,
    closure: Closure,
    rate: float,
    steps: int,
    warmup: int,
    eval_blocks: Tensor,
) -> float:
    """The loss after training with one rate."""
    with taken_back(optimizer, model):
        for number in range(steps):
            set_rate(optimizer, rate * min(1.0, (number + 1) / max(warmup, 1)))
            if not math.isfinite(backward(optimizer, closure)):
                return math.inf
            optimizer.step()
        training = model.training
        model.eval()
        try:
            with torch.no_grad():
                losses = [float(_loss(model, block[None])) for block in eval_blocks]
        finally:
            model.train(training)
    mean = sum(losses) / len(losses)
    return mean if math.isfinite(mean) else math.inf


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name not in _INSTEAD:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def unavailable(*_: object, **__: object) -> NoReturn:
        raise UnsupportedFeatureError(f"{name} of gefen-x is not available: {_INSTEAD[name]}")

    return unavailable


def main() -> None:
    """Say what to call instead."""
    sys.exit(
        "gefen.tools.find_lr has no command line, which in gefen-x loads models and data from "
        "Hugging Face: load them yourself and call gefen.tools.find_lr.find_lr(model, blocks)"
    )


if __name__ == "__main__":
    main()
