"""``python -m gate``."""

import sys

try:
    from gate.cli import main
except ModuleNotFoundError as error:
    sys.exit(
        f"gate: {error.name} is not installed here.\n"
        "  next:  ./ci/nox -s gate -- ARGUMENTS brings everything the gate needs"
    )

if __name__ == "__main__":
    main()
