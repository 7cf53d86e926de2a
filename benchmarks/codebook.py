"""Learning the codebook: gefen-cuda beside gefen-x.

"learning" is the first step of an optimizer minus a later one, so block search, histogram and
k-means; with one 256 x 1031 parameter of uniformly distributed gradients, which fills all 4096
bins, it is nearly all k-means.

- "no compiler cache", "compiler cache": the first optimizer of a process, which pays for
  compilation at run time; numba's cache directory is empty for the former.
- "same process": later optimizers of a process, with everything compiled.
- "k-means alone": gefen.codebook.solve, which has no counterpart in gefen-x.

    python benchmarks/codebook.py [--peer-python PATH]
"""

from __future__ import annotations

import warnings

from peer import OURS, Figures, compare, installed, seconds

SHAPE = (256, 1031)


def learning() -> float:
    import torch

    import gefen

    warnings.simplefilter("ignore")
    param = torch.nn.Parameter(torch.zeros(SHAPE))
    param.grad = torch.rand(SHAPE, generator=torch.Generator().manual_seed(1)) * 2 - 1
    optimizer = gefen.Gefen([("w", param)], fused=False)
    first = seconds(optimizer.step)
    return first - seconds(optimizer.step, 5)


def cold() -> Figures:
    return {"learning, no compiler cache": learning()}


def warm() -> Figures:
    figures = {
        "learning, compiler cache": learning(),
        "learning, same process": min(learning() for _ in range(3)),
    }
    if installed().startswith(OURS):
        figures["k-means alone"] = solving()
    return figures


def solving() -> float:
    import torch

    from gefen.codebook import BINS, solve

    noise = torch.rand(SHAPE, generator=torch.Generator().manual_seed(1)).view(-1)
    counts = torch.bincount((noise * BINS).long(), minlength=BINS)
    return seconds(lambda: solve(counts), 5)


if __name__ == "__main__":
    compare(__file__, {"cold": cold, "warm": warm})
