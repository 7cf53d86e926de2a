"""Which half of a hybrid a parameter belongs to, and why."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeAlias

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy

from gefen.errors import InvalidArgumentError, UnsupportedParameterError
from gefen.hyperparameters import refuse
from gefen.parameters import check_parameter, plain

MUON, BACKUP, LEFT_OUT = "muon", "backup", "left out"

Decision: TypeAlias = tuple[str, str]
"""A side, and the reason in one phrase."""

Sides: TypeAlias = Mapping[str, str] | Callable[[str, Tensor], str | None]
"""A caller's choices: sides by name or pattern, or a function that gives one or None."""

HEADS = frozenset(
    (
        *("lm_head", "head", "output", "output_layer", "output_projection", "proj_out"),
        *("logits", "to_logits", "unembed", "unembedding", "classifier", "score", "fc"),
        *("qa_outputs", "seq_relationship"),
    )
)
"""What the one layer behind all others is called, where it is not in a numbered one."""

EXPERTS = frozenset(
    ("gate_up_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "w13", "wi", "wo")
)
"""What a tensor with one matrix for each expert is called."""

_NO_WEIGHT = re.compile(
    r"bias|(^|_)log($|_)|_table$|(^|_)pos(_|$)|position|embed|token|quer(y|ies)$|scale|gamma|"
    r"^beta|latent|mask|prompt|prefix|sink|^lambda|codebook|codevector|norm|^original\d?$",
    re.IGNORECASE,
)
_NO_WEIGHTS_MODULE = re.compile(r"bias|(^|_)emb|^(shared|tokens?)$", re.IGNORECASE)
_WEIGHT = re.compile(
    r"weight|kernel|(proj|projection|matrix)$|^lora_[ab]$|^[wW]_?(\d*|[a-z]{1,3})$", re.IGNORECASE
)
_ONE_EXPERT = re.compile(r"expert\w*\.\d+\.", re.IGNORECASE)
_EMBEDDING = re.compile(r"Embed(ding)?s?(Bag|Table|\dD)?$")
_NORM = re.compile(r"Norm(\dd|alization|Gated)?$")
_CONVOLUTION = re.compile(r"Convolution$|ShortConv$")
"""Not Conv1D, which is a linear layer of transformers."""
_MIXTURE = re.compile(r"Mo[Ee](Layer|Block|MLP|FFN|FeedForward)?$")
_HEAD = re.compile(r"(?<!^[a-z])_head$", re.IGNORECASE)
"""Not q_head and the like, which are attention's."""


class Place(NamedTuple):
    """An attribute of a module that is the parameter; tied ones have several."""

    module: nn.Module
    path: str

    @property
    def kind(self) -> str:
        """The name of the module's class."""
        return type(self.module).__name__


@dataclass(frozen=True)
class Survey:
    """What a model says of its parameters, by their ids; nothing, where there are pairs only."""

    places: dict[int, list[Place]] = field(default_factory=dict)
    heads: dict[int, str] = field(default_factory=dict)


class Subject(NamedTuple):
    """A parameter that a side is looked for."""

    name: str
    param: Tensor
    places: list[Place]
    head: str | None
    """Why the model shows it to be an output head."""

    @property
    def names(self) -> Iterator[str]:
        """Its name, and those that it is tied to."""
        yield self.name
        yield from (place.path for place in self.places)

    @property
    def attribute(self) -> str:
        """The last part of its name that is no number."""
        return next((p for p in reversed(self.name.split(".")) if not p.isdigit()), "")


def survey(model: nn.Module) -> Survey:
    """Where a model's parameters lie, and which are output heads."""
    places: dict[int, list[Place]] = {}
    for path, module in model.named_modules():
        for attribute, param in module._parameters.items():
            if param is not None:
                place = Place(module, f"{path}.{attribute}" if path else attribute)
                places.setdefault(id(param), []).append(place)
    return Survey(places, _heads_by_shape(model) | _heads_that_are_declared(model))


def _heads_that_are_declared(model: nn.Module) -> dict[int, str]:
    """What ``get_output_embeddings()`` of transformers' models returns."""
    heads: dict[int, str] = {}
    for module in model.modules():
        ask = getattr(module, "get_output_embeddings", None)
        try:
            head = ask() if callable(ask) else None
        except (NotImplementedError, AttributeError):  # it has none, or lost it
            continue
        if isinstance(head, nn.Module):
            why = "output head: get_output_embeddings() returns its module"
            heads |= dict.fromkeys(map(id, head.parameters()), why)
    return heads


def _heads_by_shape(model: nn.Module) -> dict[int, str]:
    """The one linear layer with as many rows as a table, whose outputs no other takes in."""
    tables, rows, columns = {}, dict[int, list[Tensor]](), set[int]()
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or is_lazy(weight) or weight.dim() != 2:
            continue
        if isinstance(module, nn.Embedding):
            tables[weight.shape[0]] = name
        elif isinstance(module, nn.Linear):
            rows.setdefault(weight.shape[0], []).append(weight)
            columns.add(weight.shape[1])
    return {
        id(rows[size][0]): f"output head: it has a row for each entry of {name!r}"
        for size, name in tables.items()
        if len(rows.get(size, ())) == 1 and size not in columns
    }


def decide(
    named_params: Iterable[tuple[str, Tensor]],
    known: Survey,
    substrings: Iterable[str],
    sides: Sides | None,
) -> list[tuple[str, Tensor, Decision]]:
    """Each parameter's side; ``sides`` goes before every rule, but for what cannot be stepped."""
    parts = [part.lower() for part in substrings]
    found = []
    for name, param in named_params:
        places, head = known.places.get(id(param), []), known.heads.get(id(param))
        subject = Subject(name, param, places, head)
        decision = _unusable(subject) or _chosen(subject, sides) or _decided(subject, parts)
        found.append((name, param, decision))
    return found


def check_sides(sides: Sides | None) -> Sides | None:
    """``sides`` itself, once it is known to be one of the things that it may be."""
    if isinstance(sides, Mapping):
        for key, side in sides.items():
            if not isinstance(key, str):
                refuse("sides", sides, "a mapping from names or patterns to 'muon' or 'backup'")
            _check_side(key, side)
    elif sides is not None and not callable(sides):
        refuse("sides", sides, "a mapping of names or patterns, or a function (name, parameter)")
    return sides


def check_all_meant(sides: Sides | None, names: list[str]) -> None:
    """Raise where ``sides`` names what is not there."""
    for pattern in sides if isinstance(sides, Mapping) else ():
        if not any(_matches(name, pattern) for name in names):
            raise InvalidArgumentError(
                f"Invalid sides: no parameter is called {pattern!r}; names are those of "
                "model.named_parameters(), and '*' stands for any part of one"
            )


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(plain(name), pattern)


def _check_side(name: str, side: object) -> str:
    if side not in (MUON, BACKUP):
        refuse(f"sides[{name!r}]", side, f"{MUON!r} or {BACKUP!r}")
    return str(side)


def _chosen(subject: Subject, sides: Sides | None) -> Decision | None:
    side: str | None = None
    if isinstance(sides, Mapping):
        side = next((s for key, s in sides.items() if _matches(subject.name, key)), None)
    elif sides is not None:
        side = sides(subject.name, subject.param)
    return None if side is None else (_check_side(subject.name, side), "chosen by the caller")


def _unusable(subject: Subject) -> Decision | None:
    """Quantised weights, for instance: nothing that is trained later."""
    if is_lazy(subject.param):
        return BACKUP, "not initialized"
    if subject.param.requires_grad:
        return None
    try:
        check_parameter(subject.param, subject.name)
    except UnsupportedParameterError as error:
        return LEFT_OUT, f"frozen, and could not be stepped: {error}"
    return None


def _decided(subject: Subject, parts: list[str]) -> Decision:
    dimensions = subject.param.dim()
    if dimensions < 2:
        return BACKUP, "no matrix, but a " + ("vector" if dimensions else "number")
    apart = _typed(subject) or _head(subject) or _named(subject, parts) or _thin(subject)
    if apart is not None:
        return BACKUP, apart
    if dimensions == 2:
        return _matrix(subject)
    if dimensions == 3 and _of_experts(subject):
        return MUON, f"matrices of {subject.param.shape[0]} experts"
    return BACKUP, f"{dimensions} dimensions, and not known to be matrices of experts"


def _typed(subject: Subject) -> str | None:
    """What its module's type says it is, if that is no weight matrix."""
    for module, kind in ((place.module, place.kind) for place in subject.places):
        # Those of torch, subclasses of them, and what other libraries have in their place.
        sized = hasattr(module, "num_embeddings") and hasattr(module, "embedding_dim")
        if sized or _EMBEDDING.search(kind):
            return f"table of an embedding ({kind})"
        if isinstance(module, _ConvNd) or _CONVOLUTION.search(kind):
            return f"kernel of a convolution ({kind})"
        if _NORM.search(kind):
            return f"scales of a norm ({kind})"
        if kind.endswith("Loss"):
            return f"output head, in a loss ({kind})"
    return None


def _head(subject: Subject) -> str | None:
    if subject.head is not None:
        return subject.head
    for name in subject.names:
        *path, attribute = plain(name).split(".")
        if not path or "weight" not in attribute:
            continue
        alone = not any(part.isdigit() for part in path)
        lone_decoder = path[-2:-1] in ([], ["predictions"]) and path[-1] == "decoder"
        called = path[-1].lower() in HEADS or _HEAD.search(path[-1])
        if alone and (called or lone_decoder):
            return f"output head, being called {path[-1]!r}"
    return None


def _named(subject: Subject, parts: list[str]) -> str | None:
    found = (part for part in parts for name in subject.names if part in name.lower())
    part = next(found, None)
    return None if part is None else f"its name contains {part!r}"


def _thin(subject: Subject) -> str | None:
    thin = 1 in subject.param.shape[-2:]
    return "vectors, as matrices of one row or one column are" if thin else None


def _matrix(subject: Subject) -> Decision:
    attribute, places = subject.attribute, subject.places
    holder = "".join(subject.name.split(".")[-2:-1])
    for place in places:
        if isinstance(place.module, nn.Linear) and attribute == "weight":
            if holder.lower().endswith("bias"):
                return BACKUP, f"a table of biases, as a linear layer ({place.kind})"
            return MUON, f"weight of a linear layer ({place.kind})"
    module = "" if places or attribute != "weight" else holder
    if _NO_WEIGHT.search(attribute) or _NO_WEIGHTS_MODULE.search(module):
        return BACKUP, "no weight matrix by its name"
    if not places:
        return MUON, "a matrix, and its name says nothing else"
    kind = places[0].kind
    if any(map(_is_stacked, places)):
        return BACKUP, f"matrices of several experts below each other ({kind})"
    if _WEIGHT.search(attribute):
        return MUON, f"weight matrix of {kind}"
    return BACKUP, f"a parameter of {kind} that is not called a weight"


def _is_stacked(place: Place) -> bool:
    numbers = [v for key, v in vars(place.module).items() if "expert" in key and type(v) is int]
    rows = getattr(place.module, place.path.rpartition(".")[2]).shape[0]
    several = any(number > 1 and rows % number == 0 and rows > number for number in numbers)
    return several and "expert" in place.kind.lower()


def _of_experts(subject: Subject) -> bool:
    if _NO_WEIGHT.search(subject.attribute) or "conv" in subject.name.lower():
        return False
    kinds = [place.kind for place in subject.places]
    told = any("expert" in word.lower() for word in (*subject.names, *kinds))
    told |= any(map(_MIXTURE.search, kinds))
    told |= any("moe" in name.lower().split(".")[-2:-1] for name in subject.names)
    return (told and not _ONE_EXPERT.search(subject.name)) or subject.attribute in EXPERTS
