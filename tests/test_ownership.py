from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from types import ModuleType

from gefen.distributed.ownership import assign_owners, newton_schulz_cost


def test_cost_counts_the_three_products_of_an_iteration() -> None:
    assert newton_schulz_cost(2, 3) == newton_schulz_cost(3, 2) == 5 * 2 * (6 + 2 * 3 * 2)
    assert newton_schulz_cost(0, 8) == 0


def benchmark() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "ownership.py"
    spec = importlib.util.spec_from_file_location("ownership_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_owners_do_not_depend_on_the_order_of_names() -> None:
    shapes = benchmark().decoder_shapes(layers=3)
    names = list(shapes)
    random.Random(0).shuffle(names)
    shuffled = {name: shapes[name] for name in names}
    assert assign_owners(shapes, 5) == assign_owners(shuffled, 5)


def test_ties_go_by_name_to_the_lowest_owner() -> None:
    assert assign_owners({"c": (4, 4), "a": (4, 4), "b": (4, 4)}, 2) == {"a": 0, "b": 1, "c": 0}


def test_a_decoder_on_eight_ranks_is_balanced() -> None:
    script = benchmark()
    shapes = script.decoder_shapes()
    owned = script.heaviest_over_mean(shapes, assign_owners(shapes, 8), 8)
    assert owned <= 1.02
    assert script.heaviest_over_mean(shapes, script.index_modulo(shapes, 8), 8) > owned
