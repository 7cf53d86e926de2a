from __future__ import annotations

import random

from gefen.distributed.ownership import (
    assign_owners,
    decoder_shapes,
    heaviest_over_mean,
    index_modulo,
    newton_schulz_cost,
)


def test_cost_counts_the_three_products_of_an_iteration() -> None:
    assert newton_schulz_cost(2, 3) == newton_schulz_cost(3, 2) == 5 * 2 * (6 + 2 * 3 * 2)
    assert newton_schulz_cost(0, 8) == 0


def test_owners_do_not_depend_on_the_order_of_names() -> None:
    shapes = decoder_shapes(layers=3)
    names = list(shapes)
    random.Random(0).shuffle(names)
    shuffled = {name: shapes[name] for name in names}
    assert assign_owners(shapes, 5) == assign_owners(shuffled, 5)


def test_ties_go_by_name_to_the_lowest_owner() -> None:
    assert assign_owners({"c": (4, 4), "a": (4, 4), "b": (4, 4)}, 2) == {"a": 0, "b": 1, "c": 0}


def test_a_decoder_on_eight_ranks_is_balanced() -> None:
    shapes = decoder_shapes()
    owned = heaviest_over_mean(shapes, assign_owners(shapes, 8), 8)
    assert owned <= 1.02
    assert heaviest_over_mean(shapes, index_modulo(shapes, 8), 8) > owned
