"""AdamW with one of Gefen's two approximations each, to tell what a difference is due to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Control(torch.optim.Optimizer):
    """AdamW without weight decay, in float32.

    ``factored`` keeps the second moments of a matrix as means of its rows and columns.
    ``quantised`` keeps a matrix's momentum in one byte an element: the nearest entry of Gefen's
    fixed codebook, and the largest magnitude of each row. Vectors keep theirs in float32.
    """

    def __init__(
        self, params: Iterable[Any], lr: float, *, factored: bool = False, quantised: bool = False
    ) -> None:
        super().__init__(params, {"lr": lr, "factored": factored, "quantised": quantised})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, self.state[param], group)

    def _update(self, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        grad, step = param.grad, state.get("step", 0) + 1
        assert grad is not None
        momentum = state.get("momentum", torch.zeros_like(grad)).lerp(grad, 0.1)
        if group["quantised"]:
            momentum = rounded(momentum)
        moments = [grad.square()]
        if group["factored"] and grad.ndim == 2:
            moments = [moments[0].mean(1, keepdim=True), moments[0].mean(0, keepdim=True)]
        seconds = state.get("seconds", [torch.zeros_like(each) for each in moments])
        seconds = [old.lerp(new, 0.001) for old, new in zip(seconds, moments, strict=True)]
        second = seconds[0]
        if len(seconds) == 2:
            second = seconds[0] * seconds[1] / seconds[1].mean().clamp_min(1e-30)
        denominator = (second / (1 - 0.999**step)).sqrt().add(1e-8)
        param.addcdiv_(momentum / (1 - 0.9**step), denominator, value=-group["lr"])
        self.state[param] = {"step": step, "momentum": momentum, "seconds": seconds}


def rounded(momentum: Tensor) -> Tensor:
    """Momentum as it comes back from one byte an element."""
    from gefen.codebook import Quantizer, fixed

    flat = momentum.reshape(len(momentum), -1) if momentum.ndim > 1 else momentum.view(-1, 1)
    largest = flat.abs().amax(1, keepdim=True).clamp_min(1e-30)
    quantizer = Quantizer(fixed())
    return (quantizer.decode(quantizer.encode(flat / largest)) * largest).view_as(momentum)
