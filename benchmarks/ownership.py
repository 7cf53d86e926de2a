"""Print how evenly ownership divides the Newton-Schulz work of a 0.6B-parameter decoder.

python benchmarks/ownership.py
"""

from __future__ import annotations

from gefen.distributed.ownership import (
    assign_owners,
    decoder_shapes,
    heaviest_over_mean,
    index_modulo,
)

WIDTHS = (8, 64, 512)


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
