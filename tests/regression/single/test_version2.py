"""What version 2 promises to users: what AdamW leaves alone stays, and nothing runs away."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gefen import Gefen, GefenMuon, GefenMuonHybrid
from gefen.errors import InvalidArgumentError

LR = 0.01
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "block": {"factored_v_2d": False},
    "stochastic": {"stochastic_round": True},
    "stochastic block": {"stochastic_round": True, "factored_v_2d": False},
}
MUON_FORMS: dict[str, dict[str, Any]] = {
    "muon": {},
    "plain": {"nesterov": False},
    "normuon": {"normuon": True, "ns_schedule": "tuned3", "adjust_lr_fn": "match_rms_adamw"},
    "stochastic": {"normuon": True, "stochastic_round": True},
}

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
every_form = pytest.mark.parametrize("form", FORMS)
every_muon = pytest.mark.parametrize("form", MUON_FORMS)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parameters(
    shape: tuple[int, ...], count: int, dtype: torch.dtype, device: torch.device
) -> list[nn.Parameter]:
    """Equal ones."""
    start = random(*shape, seed=7) * 0.1
    return [nn.Parameter(start.to(device, dtype, copy=True)) for _ in range(count)]


def zeros(
    shape: tuple[int, ...], count: int, dtype: torch.dtype, device: torch.device
) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape, dtype=dtype, device=device)) for _ in range(count)]


def step(optimizer: Any, param: Tensor, grad: Tensor) -> None:
    param.grad = grad.to(param)
    optimizer.step()


def decayed(param: Tensor, weight_decay: float, steps: int) -> Tensor:
    """``param`` after steps of AdamW with gradients of 0; float16 has no eps of 1e-8."""
    copy = nn.Parameter(param.detach().clone())
    adamw = torch.optim.AdamW([copy], LR, eps=1e-4, weight_decay=weight_decay)
    for _ in range(steps):
        step(adamw, copy, torch.zeros_like(copy))
    return copy.detach()


# Nothing that AdamW leaves alone moves

TOKENS, LENGTH, WIDTH, STEPS = 60, 24, 40, 25


class Model(nn.Module):
    """Only some tokens, positions, features and outputs are used, and one layer is cut off."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.wide = nn.Linear(WIDTH + 8, 48)
        self.conv = nn.Conv1d(48, 16, 3, padding=1)
        self.head = nn.Linear(16, TOKENS)
        self.unused = nn.Linear(48, 48)

    def forward(self, tokens: Tensor) -> Tensor:
        """``tokens`` [batch, length]; the last 8 features are dead."""
        x = self.embed(tokens) + self.positions.weight[: tokens.shape[1]]
        x = torch.cat([x, x.new_zeros(*x.shape[:-1], 8)], dim=-1)
        x = torch.relu(self.wide(x)) + 0 * self.unused(x.new_ones(48))
        x = self.conv(x.mT * (torch.arange(48, device=x.device) < 30).to(x.dtype)[:, None])
        return self.head(torch.relu(x.mT))


def trained_model(
    make: Callable[[nn.Module], Any], dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Parameters of :class:`Model` before and after, and where all gradients were 0."""
    torch.manual_seed(0)
    model = Model().to(device, dtype)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    still = {name: torch.ones_like(param, dtype=torch.bool) for name, param in before.items()}
    optimizer = make(model)
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, 20, (4, 12), generator=generator).to(device)
        optimizer.zero_grad()
        logits = model(tokens)[..., :50]  # the other outputs are masked
        nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()).backward()
        for name, param in model.named_parameters():
            still[name] &= param.grad == 0
        optimizer.step()
    assert all(mask.any() for name, mask in still.items() if name.endswith("weight"))
    assert still["unused.weight"].all()
    return {name: (before[name], p.detach(), still[name]) for name, p in model.named_parameters()}


MODEL_OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "default": lambda model, **own: Gefen(model.parameters(), LR, **own),
    "stochastic block": lambda model, **own: Gefen(
        model.parameters(), LR, stochastic_round=True, factored_v_2d=False, **own
    ),
    "hybrid": lambda model, **own: GefenMuonHybrid(model, lr=LR, **own),
    "stochastic hybrid": lambda model, **own: GefenMuonHybrid(
        model, lr=LR, stochastic_round=True, **own
    ),
}


@every_dtype
@pytest.mark.parametrize("kind", MODEL_OPTIMIZERS)
def test_what_has_no_gradient_stays(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    trained = trained_model(MODEL_OPTIMIZERS[kind], dtype, device)
    for name, (before, after, still) in trained.items():
        assert torch.equal(after[still], before[still]), name
        if not still.all():
            assert not torch.equal(after, before)


@pytest.mark.parametrize("kind", MODEL_OPTIMIZERS)
def test_what_has_no_gradient_decays_as_with_adamw(kind: str, device: torch.device) -> None:
    make = MODEL_OPTIMIZERS[kind]
    trained = trained_model(lambda model: make(model, weight_decay=0.5), torch.float32, device)
    for name, (before, after, still) in trained.items():
        assert torch.equal(after[still], decayed(before, 0.5, STEPS)[still]), name


def trained_with_dead_parts(
    make: Callable[..., Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    weight_decay: float,
    device: torch.device,
) -> None:
    """Dead rows, columns and single elements; a row that only lives for the first step."""
    (param,) = parameters(shape, 1, dtype, device)
    wanted = decayed(param, weight_decay, STEPS)
    optimizer = make([param], lr=LR, weight_decay=weight_decay)
    live = torch.ones(shape, dtype=torch.bool)
    live[[0, 7, 8, 9]] = False
    live[..., -3:] = False
    if len(shape) > 1:
        live[:, 3] = False
    for number in range(STEPS):
        grad = random(*shape, seed=number) * live * (1 + number)
        if number:
            grad[5] = 0
        step(optimizer, param, grad)
    live = live.to(device)
    assert torch.isfinite(param).all()
    assert torch.equal(param[~live], wanted[~live])
    assert (param[live] != wanted[live]).float().mean() > 0.9


@every_dtype
@every_form
@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
@pytest.mark.parametrize("shape", [(30, 48), (97,), (10, 4, 6)], ids=str)
def test_dead_parts_stay(
    shape: tuple[int, ...],
    weight_decay: float,
    form: str,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    trained_with_dead_parts(partial(Gefen, **FORMS[form]), shape, dtype, weight_decay, device)


@every_dtype
@every_muon
@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
@pytest.mark.parametrize("shape", [(30, 48), (48, 30)], ids=str)
def test_muon_leaves_dead_neurons_and_inputs_alone(
    shape: tuple[int, ...],
    weight_decay: float,
    form: str,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    trained_with_dead_parts(
        partial(GefenMuon, **MUON_FORMS[form]), shape, dtype, weight_decay, device
    )


@every_muon
def test_a_neuron_that_dies_and_lives_again(form: str, device: torch.device) -> None:
    (param,) = parameters((16, 24), 1, torch.float32, device)
    optimizer = GefenMuon([param], LR, weight_decay=0.0, **MUON_FORMS[form])
    for number in range(12):
        grad = random(16, 24, seed=number)
        if number < 6:
            grad[3] = 0
        before = param.detach().clone()
        step(optimizer, param, grad)
        assert torch.isfinite(param).all()
        moved = (param - before).norm(dim=1)
        assert (moved[3] == 0) == (number < 6)
        # Beside what the others move, more at first under normuon, but no outburst.
        assert moved[3] <= 5 * moved[4:].mean()


# A first gradient of zeros

ZERO_FIRST: dict[str, Callable[..., Any]] = {
    **{form: partial(Gefen, lr=LR, **own) for form, own in FORMS.items()},
    **{f"muon {form}": partial(GefenMuon, lr=LR, **own) for form, own in MUON_FORMS.items()},
}


@every_dtype
@pytest.mark.parametrize("kind", ZERO_FIRST)
def test_zeros_at_first_are_only_decay(
    kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    (param,) = parameters((16, 24), 1, dtype, device)
    wanted = decayed(param, 0.5, 5)
    optimizer = ZERO_FIRST[kind]([param], weight_decay=0.5)
    for _ in range(5):
        step(optimizer, param, torch.zeros(16, 24))
    assert torch.equal(param, wanted)


def rows_of_runs(steps: int) -> list[Tensor]:
    """[16, 24] of one size in each run of 8: blocks of 8 need no rounding at all."""
    size = (torch.arange(48) % 7 + 1.0).repeat_interleave(8).view(16, 24)
    return [size * random(16, 24).sign() * (number + 1) for number in range(steps)]


@pytest.mark.parametrize("silent", [0, 1, 4])
def test_zeros_at_first_decide_no_blocks(silent: int, device: torch.device) -> None:
    """What comes then is AdamW, whose count goes on, as it is without them."""
    param, reference = parameters((16, 24), 2, torch.float32, device)
    optimizer = Gefen([param], LR, factored_v_2d=False, weight_decay=0.1)
    adamw = torch.optim.AdamW([reference], LR, weight_decay=0.1)
    for grad in [torch.zeros(16, 24)] * silent + rows_of_runs(6):
        step(optimizer, param, grad)
        step(adamw, reference, grad)
    torch.testing.assert_close(param, reference, rtol=1e-6, atol=1e-6 * LR)


@pytest.mark.parametrize("kind", ZERO_FIRST)
def test_a_run_that_starts_with_zeros_resumes(kind: str, device: torch.device) -> None:
    """Saved before there is anything to save but a count, it goes on like the one that stayed."""
    param, other = parameters((16, 24), 2, torch.float32, device)
    stayed, resumed = ZERO_FIRST[kind]([param]), ZERO_FIRST[kind]([other])
    for _ in range(2):
        step(stayed, param, torch.zeros(16, 24))
    other.data.copy_(param.data)
    resumed.load_state_dict(stayed.state_dict())
    for number in range(3):
        step(stayed, param, random(16, 24, seed=number))
        step(resumed, other, random(16, 24, seed=number))
    assert torch.equal(param, other)


# Nothing runs away

LARGEST = 10 * LR * (1 + 1e-5)
# Total movement beside AdamW's. One moment for a block makes its largest elements move more than
# others; in the factored form an outlier enlarges the mean of all rows, and so makes the second
# moments of all other rows and columns too small until it is forgotten.
TOTAL = {"default": 40, "block": 3}


def run(
    grads: list[Tensor], device: torch.device, dtype: torch.dtype = torch.float32, **chosen: Any
) -> tuple[Tensor, Tensor, float]:
    """Movement by Gefen and by AdamW, and the largest one of an element in a step."""
    shape = tuple(grads[0].shape)
    param, reference = zeros(shape, 2, dtype, device)
    optimizer = Gefen([param], LR, **chosen)
    adamw = torch.optim.AdamW([reference], LR, weight_decay=0)
    largest = 0.0
    for grad in grads:
        before = param.detach().clone()
        step(optimizer, param, grad)
        step(adamw, reference, grad)
        largest = max(largest, (param.detach() - before).abs().max().item())
    return param.detach().cpu(), reference.detach().cpu(), largest


def outliers(kind: str, shape: tuple[int, ...], size: float) -> list[Tensor]:
    """Noise with an outlier in the first step, in the tenth, or in each."""
    what, when = kind.split()
    grads = [random(*shape, seed=number) for number in range(30)]
    for number, grad in enumerate(grads):
        if when == "always" or number == {"first": 0, "later": 10}[when]:
            part = {"element": grad.view(-1)[5:6], "row": grad[:1], "gradient": grad}[what]
            part *= size
    return grads


@pytest.mark.parametrize("form", TOTAL)
@pytest.mark.parametrize("size", [1e4, 1e6])
@pytest.mark.parametrize("when", ["first", "later", "always"])
@pytest.mark.parametrize("what", ["element", "row", "gradient"])
@pytest.mark.parametrize("shape", [(40, 60), (96,), (8, 4, 3, 3)], ids=str)
def test_an_outlier_throws_nothing_out(
    shape: tuple[int, ...], what: str, when: str, size: float, form: str, device: torch.device
) -> None:
    ours, adamw, largest = run(outliers(f"{what} {when}", shape, size), device, **FORMS[form])
    assert largest <= LARGEST
    assert ours.norm() <= TOTAL[form] * adamw.norm()


@every_form
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_an_outlier_throws_nothing_out_in_other_dtypes(
    dtype: torch.dtype, form: str, device: torch.device
) -> None:
    grads = outliers("row later", (40, 60), 1e4)
    ours, adamw, largest = run(grads, device, dtype, **FORMS[form])
    assert largest <= LARGEST + torch.finfo(dtype).eps
    assert ours.norm() <= 40 * adamw.norm()


@pytest.mark.parametrize("form", ["default", "block"])
@pytest.mark.parametrize(("rows", "width"), [(20011, 8), (20000, 8), (2003, 16)])
def test_a_rare_row_moves_about_as_with_adamw(
    rows: int, width: int, form: str, device: torch.device
) -> None:
    """Words by Zipf's law: a few of them are in every batch, most are in one or none."""
    weights = 1 / torch.arange(1, rows + 1)
    generator = torch.Generator().manual_seed(0)
    seen, grads = torch.zeros(rows), []
    for number in range(40):
        words = torch.multinomial(weights, 256, replacement=True, generator=generator)
        counts = torch.bincount(words, minlength=rows)[:, None]
        grads.append(random(rows, width, seed=number) * counts.sqrt() / 256)
        seen += counts[:, 0] > 0
    ours, adamw, largest = run(grads, device, **FORMS[form])
    assert largest <= LARGEST
    ratio = ours.norm(dim=1) / adamw.norm(dim=1)
    assert (ours[seen == 0] == 0).all()
    assert ratio[seen > 0].max() <= 2.5
    assert 0.8 <= ratio[seen == 1].median() <= 1.25
    assert 0.8 <= ratio[seen > 10].median() <= 1.25


@pytest.mark.parametrize("shape", [(64, 256), (256, 64), (200, 200)], ids=str)
@pytest.mark.parametrize("schedule", ["standard", "tuned3", "tuned4"])
def test_a_gradient_of_one_sample_moves_muon_no_further(
    schedule: str, shape: tuple[int, int], device: torch.device
) -> None:
    """Its only singular value is exactly 1, from where tuned3 leads far off if it is 1.004."""
    for seed in range(12):
        (param,) = zeros(shape, 1, torch.float32, device)
        optimizer = GefenMuon([param], 1.0, weight_decay=0.0, ns_schedule=schedule)
        step(
            optimizer, param, random(shape[0], 1, seed=seed) @ random(1, shape[1], seed=-1 - seed)
        )
        ratio = max(1, shape[0] / shape[1]) ** 0.5
        assert 0.6 <= torch.linalg.matrix_norm(param.detach(), 2) / ratio <= 1.3


# Sizes at the ends of float32: squares are within its range, but sums of 400 of them are not


def movements(optimizer: Any, param: Tensor, grads: list[Tensor]) -> list[Tensor]:
    out = []
    for grad in grads:
        before = param.detach().clone()
        step(optimizer, param, grad)
        out.append(param.detach() - before)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@every_form
@pytest.mark.parametrize("shape", [(8, 1000), (1000, 8), (2048,), (4, 16, 5, 5)], ids=str)
@pytest.mark.parametrize("size", [1e18, 1e-18])
def test_extreme_gradients_move_as_with_adamw(
    size: float, shape: tuple[int, ...], form: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Also later, when gradients have become normal."""
    grads = [random(*shape, seed=i) * (size if i < 5 else 1) for i in range(10)]
    param, reference = zeros(shape, 2, dtype, device)
    ours = movements(Gefen([param], LR, **FORMS[form]), param, grads)
    adamw = movements(torch.optim.AdamW([reference], LR, weight_decay=0), reference, grads)
    for number, (own, wanted) in enumerate(zip(ours, adamw, strict=True)):
        assert torch.isfinite(own).all(), number
        assert 0.5 * wanted.norm() <= own.norm() <= 2 * wanted.norm(), number


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@every_muon
@pytest.mark.parametrize("shape", [(64, 1000), (1000, 64)], ids=str)
@pytest.mark.parametrize("size", [1e18, 1e-18])
def test_extreme_gradients_move_muon(
    size: float, shape: tuple[int, int], form: str, dtype: torch.dtype, device: torch.device
) -> None:
    grads = [random(*shape, seed=i) * (size if i < 5 else 1) for i in range(10)]
    (param,) = zeros(shape, 1, dtype, device)
    optimizer = GefenMuon([param], LR, **MUON_FORMS[form])
    for number, own in enumerate(movements(optimizer, param, grads)):
        assert torch.isfinite(own).all(), number
        assert own.norm() > 0, number
        if size > 1 or number >= 5:
            assert own.norm() > 0.02 * LR * min(shape) ** 0.5, number


# Settings that would divide by zero


@pytest.mark.parametrize(
    "make",
    [
        lambda params: Gefen(params, eps=0.0),
        lambda params: Gefen([{"params": list(params), "eps": 0.0}]),
        lambda params: GefenMuon(params, normuon=True, normuon_eps=0.0),
        lambda params: GefenMuonHybrid([("w", p) for p in params], lr=LR, eps=0.0),
        lambda params: GefenMuonHybrid([("w", p) for p in params], lr=LR, normuon_eps=0.0),
    ],
)
def test_an_eps_of_zero_is_refused(make: Callable[[Any], Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="eps=0"):
        make(parameters((16, 24), 1, torch.float32, torch.device("cpu")))
