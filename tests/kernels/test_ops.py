"""The updates as operations of torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from cases import DTYPES, QUANTIZER, Case, momentum
from torch import Tensor, nn

from gefen import Gefen, GefenMuon, kernels
from gefen.codebook import BINS
from gefen.kernels import ops
from gefen.kernels.tasks import Adam, BlockStep, DenseMomentum, FactoredStep

OPS = torch.ops.gefen
RATE, COUNT = 0.02, 3


def arguments(operation: str, random: bool = False, dtype: torch.dtype = DTYPES[1]) -> list[Any]:
    """Two parameters of 4 x 6 and 8 x 16 elements."""
    made = []
    for number, (rows, columns) in enumerate(((4, 6), (8, 16))):
        case = Case(
            rows, columns, dtype, dtype, "contiguous", "contiguous", "normal", False, number
        )
        made.append(momentum(case))
    tasks, params, moments = (list(items) for items in zip(*made, strict=True))
    generator = torch.Generator().manual_seed(5)
    columns = [torch.rand(p.shape[1], generator=generator) for p in params]
    momenta = [[getattr(t, name) for t in tasks] for name in ("index", "magnitude", "grad")]
    momenta.append([t.period for t in tasks])
    seed = [torch.tensor(7) if random else None, [0, 5]]
    adam = [torch.tensor(RATE), [torch.tensor(float(COUNT))] * 2, 0.1, 1e-8, 0.9, 0.99, *seed]
    book = QUANTIZER.codebook
    return {
        "momentum_update": [params, *momenta, book, 0.9, True, *seed],
        "block_step": [params, *momenta, moments, book, *adam],
        "factored_step": [params, *momenta, moments, columns, book, *adam],
        "histogram": [momenta[2], momenta[3], torch.zeros(BINS, dtype=torch.int64)],
    }[operation]


NAMES = ("momentum_update", "block_step", "factored_step", "histogram")


@pytest.mark.parametrize("name", NAMES)
def test_what_torch_asks_of_operations(name: str) -> None:
    torch.library.opcheck(getattr(OPS, name).default, tuple(arguments(name)))


def directly(name: str, args: list[Any], random: bool) -> None:
    if name == "histogram":
        kernels.histogram(list(zip(args[0], args[1], strict=True)), args[2], False)
        return
    params, index, magnitude, grad, period = args[:5]
    momenta = [
        kernels.tasks.Momentum(
            *(grad[i], index[i], magnitude[i], period[i], 0.9, QUANTIZER, torch.float32),
            (7, (0, 5)[i]) if random else None,
        )
        for i in range(2)
    ]
    adam = Adam(torch.tensor(RATE).item(), 0.1, 1e-8, 0.9, 0.99, COUNT)
    if name == "momentum_update":
        tasks: Any = [DenseMomentum(m, True, p) for m, p in zip(momenta, params, strict=True)]
    elif name == "block_step":
        tasks = [BlockStep(params[i], momenta[i], args[5][i], adam) for i in range(2)]
    else:
        tasks = [
            FactoredStep(params[i], momenta[i], args[5][i], args[6][i], adam) for i in range(2)
        ]
    getattr(kernels, name)(tasks, False)


def tensors(args: list[Any]) -> list[Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, Tensor)]


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_they_do_what_the_optimizers_call(name: str, random: bool) -> None:
    mine, theirs, before = (arguments(name, random, DTYPES[0]) for _ in range(3))
    getattr(OPS, name)(*mine)
    directly(name, theirs, random)
    for a, e in zip(tensors(mine), tensors(theirs), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-6, atol=1e-7)
    assert any(not torch.equal(a, b) for a, b in zip(tensors(mine), tensors(before), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_compiled(name: str) -> None:
    torch._dynamo.reset()

    def function(*args: Any) -> Tensor:
        getattr(OPS, name)(*args)
        return tensors(list(args))[0].float().sum()

    mine, theirs = arguments(name), arguments(name)
    expected = function(*theirs)
    found = torch.compile(function, backend="aot_eager", fullgraph=True)(*mine)
    assert torch.equal(found, expected)
    for a, e in zip(tensors(mine), tensors(theirs), strict=True):
        assert torch.equal(a, e)


def test_other_values_are_not_compiled_anew() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *args: OPS.block_step(*args), backend=counter, fullgraph=True)
    args = arguments("block_step")
    for rate in (0.1, 0.2, 0.3):
        args[7].fill_(rate)
        for step in args[8]:
            step.add_(1)
        compiled(*args)
    assert counter.frame_count == 1


def test_a_codebook_that_changes_in_place() -> None:
    book = QUANTIZER.codebook.clone()
    args = arguments("momentum_update")
    args[5] = book
    OPS.momentum_update(*args)
    book.mul_(0.5)
    assert ops._quantizer(book).codebook[-1] == 0.5


@pytest.mark.parametrize("name", NAMES)
def test_in_inference_mode(name: str) -> None:
    expected = arguments(name)
    getattr(OPS, name)(*expected)
    with torch.inference_mode():
        found = torch.utils._pytree.tree_map_only(Tensor, Tensor.clone, arguments(name))
        getattr(OPS, name)(*found)
    for a, e in zip(tensors(found), tensors(expected), strict=True):
        assert torch.equal(a, e)


# Dynamo itself looks at the gradient of the loss, which outlives the break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("make", [Gefen, GefenMuon])
def test_a_compiled_training_step(make: Any) -> None:
    """The optimizer's own step is a break in the graph."""
    torch._dynamo.reset()
    nets = []
    for compiles in (False, True):
        torch.manual_seed(0)
        net = nn.Linear(6, 8, bias=False)
        optimizer = make(net.parameters(), lr=0.01)

        def train(x: Tensor, net: Any = net, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = net(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        act = torch.compile(train, backend="aot_eager") if compiles else train
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            act(torch.randn(4, 6, generator=generator))
        nets.append(net.weight.detach())
    torch.testing.assert_close(*nets, rtol=1e-5, atol=1e-6)
    assert not torch.equal(nets[0], nn.Linear(6, 8, bias=False).weight)


def test_profiles_name_them() -> None:
    param = nn.Parameter(torch.ones(4, 4))
    optimizer = Gefen([param, nn.Parameter(torch.ones(4))])
    param.grad = torch.ones(4, 4)
    with torch.profiler.profile() as profile:
        optimizer.step()
        OPS.histogram(*arguments("histogram"))
    names = {event.key for event in profile.key_averages()}
    assert {"gefen::factored_step", "gefen::histogram"} <= names


def test_importing_registers_them() -> None:
    code = "import torch, gefen; print(torch.ops.gefen.block_step)"
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "gefen.block_step", done.stderr
