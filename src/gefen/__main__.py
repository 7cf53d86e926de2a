"""``python -m gefen``: what a bug report needs, or how to mend an installation that is broken."""

import sys

import gefen
from gefen import installed

if __name__ == "__main__":
    problem = installed.broken(gefen)
    if problem is not None:
        sys.exit(problem)
    from gefen.report import report

    print("\n".join(report()))
