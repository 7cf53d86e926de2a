"""Print how evenly ownership divides the Newton-Schulz work of a 0.6B-parameter decoder.

python benchmarks/ownership.py
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gefen.distributed.ownership import Shape, assign_owners, newton_schulz_cost

WIDTHS = (8, 64, 512)


def decoder_shapes(layers: int = 28) -> dict[str, Shape]:
    """Hidden matrices of a decoder with hidden size 1024, MLP 3072 and grouped attention.

    All 28 layers have 0.44 billion elements; with embeddings the model has 0.6 billion.
    """
    block: dict[str, Shape] = {
        "self_attn.q_proj": (2048, 1024),
        "self_attn.k_proj": (1024, 1024),
        "self_attn.v_proj": (1024, 1024),
        "self_attn.o_proj": (1024, 2048),
        "mlp.gate_proj": (3072, 1024),
        "mlp.up_proj": (3072, 1024),
        "mlp.down_proj": (1024, 3072),
    }
    return {f"layers.{i}.{name}": shape for i in range(layers) for name, shape in block.items()}


def index_modulo(names: Iterable[str], width: int) -> dict[str, int]:
    """The usual alternative: matrix number i belongs to rank i modulo ``width``."""
    return {name: index % width for index, name in enumerate(names)}


def heaviest_over_mean(
    shapes: Mapping[str, Shape], owners: Mapping[str, int], width: int
) -> float:
    """Load of the busiest owner over the mean load; 1 is perfect balance."""
    loads = [0] * width
    for name, owner in owners.items():
        loads[owner] += newton_schulz_cost(*shapes[name])
    return max(loads) * width / sum(loads)


def main() -> None:
    shapes = decoder_shapes()
    print(f"{len(shapes)} matrices; heaviest rank's cost over the mean")
    print(f"{'ranks':>6} {'longest first':>14} {'index modulo':>13}")
    for width in WIDTHS:
        ours = heaviest_over_mean(shapes, assign_owners(shapes, width), width)
        theirs = heaviest_over_mean(shapes, index_modulo(shapes, width), width)
        print(f"{width:>6} {ours:>14.3f} {theirs:>13.3f}")


if __name__ == "__main__":
    main()
