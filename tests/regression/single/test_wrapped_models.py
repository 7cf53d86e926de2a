"""Models that are wrapped: what they save resumes however the next run wraps its model."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel
from workload import OPTIMIZERS, bytes_of, model

from gefen import Gefen, GefenMuonHybrid
from gefen.errors import CheckpointError, InvalidArgumentError, UnsupportedParameterError


@pytest.fixture(autouse=True, scope="module")
def world(device: torch.device) -> Iterator[None]:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(net: nn.Module) -> Any:
    return torch.compile(net, backend="eager")


def ddp(net: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(net)


def own_copy(saved: Any) -> Any:
    """Through torch.save, as a user would get it."""
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


WRAPPINGS: dict[str, Callable[[nn.Module], Any]] = {
    "plain": lambda net: net,
    "ddp": ddp,
    "compiled": compiled,
    "ddp-of-compiled": lambda net: ddp(compiled(net)),
    "compiled-ddp": lambda net: compiled(ddp(net)),
    "data-parallel": nn.DataParallel,
    "averaged-ddp": lambda net: AveragedModel(ddp(net)),
    "layerwise": lambda net: nn.Sequential(
        compiled(net[0]), checkpoint_wrapper(net[1]), checkpoint_wrapper(net[2]), net[3]
    ),
}
FOUR = ("plain", "ddp", "compiled", "ddp-of-compiled")
PAIRS = [
    *itertools.permutations(FOUR, 2),
    *((kind, "plain") for kind in WRAPPINGS if kind not in FOUR),
    *(("plain", kind) for kind in WRAPPINGS if kind not in FOUR),
]


def loss(net: Any, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(24, (6,), generator=generator)
    targets = torch.randn(6, 8, generator=generator)
    device = next(net.parameters()).device
    result: Tensor = (net(tokens.to(device)) * targets.to(device)).square().mean()
    return result


def train(net: Any, optimizer: torch.optim.Optimizer, numbers: range) -> Any:
    for number in numbers:
        optimizer.zero_grad()
        loss(net, number).backward()
        optimizer.step()
    return bytes_of(list(net.parameters()))


KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    **{kind: OPTIMIZERS[kind] for kind in ("gefen", "muon", "hybrid", "hybrid-adamw")},
    "named-stochastic": lambda net: Gefen(net.named_parameters(), lr=1e-2, stochastic_round=True),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("saved", "resumed"), PAIRS)
def test_a_run_resumes_wrapped_in_another_way(
    saved: str, resumed: str, kind: str, device: torch.device
) -> None:
    net = WRAPPINGS[saved](model(device=device))
    optimizer = KINDS[kind](net)
    train(net, optimizer, range(3))
    weights = own_copy([param.detach() for param in net.parameters()])
    state = own_copy(optimizer.state_dict())
    expected = train(net, optimizer, range(3, 5))

    net = WRAPPINGS[resumed](model(device=device, seed=1))
    optimizer = KINDS[kind](net)
    with torch.no_grad():
        for param, weight in zip(net.parameters(), weights, strict=True):
            param.copy_(weight)
    optimizer.load_state_dict(state)
    assert train(net, optimizer, range(3, 5)) == expected


def test_weight_decay_goes_by_names_without_wrappers() -> None:
    net = WRAPPINGS["layerwise"](model())
    optimizer = GefenMuonHybrid(net, lr=0.1, weight_decay=0.1, no_decay_substrings=("1.bias",))
    exempt = [group for group in optimizer.param_groups if group["weight_decay"] == 0]
    assert [group["param_names"] for group in exempt] == [["1._checkpoint_wrapped_module.bias"]]


def test_names_in_errors_and_settings_are_those_without_wrappers() -> None:
    net = WRAPPINGS["layerwise"](model())
    optimizer = Gefen(net.named_parameters(), period_one_substrings=("2.bias",))
    assert optimizer.param_groups[0]["param_names"] == [name for name, _ in net.named_parameters()]
    train(net, optimizer, range(1))
    assert optimizer.state[net[2].bias]["period"] == 1
    net[2].bias.grad = torch.zeros(8, dtype=torch.int64).to_sparse().to(torch.float32)
    with pytest.raises(UnsupportedParameterError, match=r"parameter '2\.bias' is sparse"):
        optimizer.step()


def test_another_order_is_refused_however_it_is_wrapped() -> None:
    net = model()
    optimizer = Gefen(net.named_parameters())
    pairs = [*ddp(compiled(model())).named_parameters()]
    other = Gefen([*pairs[:3], pairs[4], pairs[3], *pairs[5:]])
    with pytest.raises(CheckpointError, match=r"'2\.weight' where this optimizer has '2\.bias'"):
        other.load_state_dict(optimizer.state_dict())


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(4))


def test_two_parameters_never_become_one() -> None:
    """A user's own modules may be called as wrappers are."""
    groups = [("module.w", "w"), ("_orig_mod.w", "w"), ("a._orig_mod.w", "a.w", "module.a.w")]
    for names in groups:
        params = [parameter() for _ in names]
        optimizer = Gefen(zip(names, params, strict=True))
        for number, param in enumerate(params):
            param.grad = torch.full((4,), number + 1.0)
        optimizer.step()
        saved = own_copy(optimizer.state_dict())
        swapped = Gefen((name, parameter()) for name in reversed(names))
        with pytest.raises(CheckpointError, match="was saved with parameter"):
            swapped.load_state_dict(saved)
        wrapped = Gefen((f"module._orig_mod.{name}", parameter()) for name in names)
        if "_orig_mod" not in "".join(names):
            wrapped.load_state_dict(saved)


def test_a_module_of_the_users_called_module_is_told_from_a_wrapper() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(3, 4)
            self.head = nn.Linear(4, 2)

    optimizer = Gefen(Net().named_parameters())
    Gefen(ddp(Net()).named_parameters()).load_state_dict(optimizer.state_dict())
    other = Gefen([(name.replace("module.", ""), p) for name, p in Net().named_parameters()])
    with pytest.raises(CheckpointError, match=r"'module\.weight' where this .* 'weight'"):
        other.load_state_dict(optimizer.state_dict())


def flattened(optimizer: torch.optim.Optimizer, count: int = 1) -> list[nn.Parameter]:
    """Put ``count`` flat partitions in place of each group's parameters, as ZeRO does."""
    made = []
    for group in optimizer.param_groups:
        flat = torch.cat([param.detach().flatten() for param in group["params"]])
        group["params"] = [nn.Parameter(part.clone()) for part in flat.chunk(count)]
        made += group["params"]
    return made


def with_gradients(params: list[nn.Parameter], number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)


@pytest.mark.parametrize("count", [1, 3])
def test_partitions_step_save_and_resume(count: int) -> None:
    def started() -> tuple[Gefen, list[nn.Parameter]]:
        net = model()
        split = [*net.named_parameters()]
        optimizer = Gefen([{"params": split[:3]}, {"params": split[3:], "lr": 0.1}])
        return optimizer, flattened(optimizer, count)

    optimizer, params = started()
    for number in range(2):
        with_gradients(params, number)
        optimizer.step()
    saved = own_copy(optimizer.state_dict())
    other, others = started()
    other.load_state_dict(saved)
    with torch.no_grad():
        for mine, theirs in zip(others, params, strict=True):
            mine.copy_(theirs)
    for stepped, its in ((optimizer, params), (other, others)):
        with_gradients(its, 2)
        stepped.step()
    assert bytes_of(others) == bytes_of(params)


def test_partitions_have_names() -> None:
    optimizer = Gefen(model().named_parameters())
    params = flattened(optimizer, 2)
    params[1].grad = torch.ones(len(params[1])).to_sparse()
    with pytest.raises(UnsupportedParameterError, match="parameter 'partition_1' is sparse"):
        optimizer.step()


def test_partitions_may_come_one_by_one() -> None:
    """As in ZeRO's third stage, which steps one after the other and registers none between."""
    whole, steps = Gefen(model().named_parameters()), 3
    params = flattened(whole, 2)
    single = Gefen(model().named_parameters())
    singles = flattened(single, 2)
    for number in range(steps):
        with_gradients(params, number)
        with_gradients(singles, number)
        whole.step()
        for param in singles:
            single.param_groups[0]["params"] = [param]
            single.step()
        single.param_groups[0]["params"] = []
    single.param_groups[0]["params"] = singles
    assert [single.state[param]["step"] for param in singles] == [steps, steps]
    saved = own_copy(single.state_dict())
    single.load_state_dict(saved)
    for number in range(2):
        with_gradients(singles, number)
        single.step()


def test_partitions_are_no_matrices() -> None:
    optimizer = GefenMuonHybrid(model(), lr=0.1)
    with_gradients(flattened(optimizer), 0)
    with pytest.raises(UnsupportedParameterError, match="'partition_0' has shape"):
        optimizer.step()


def test_names_that_do_not_fit_when_a_group_is_added_are_refused() -> None:
    group = {"params": [parameter()], "param_names": ["w", "v"]}
    with pytest.raises(InvalidArgumentError, match="2 names for 1 parameters"):
        Gefen([group])
    optimizer = Gefen([("a", parameter())])
    with pytest.raises(InvalidArgumentError, match="2 names for 1 parameters"):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
