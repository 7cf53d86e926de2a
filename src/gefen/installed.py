"""Other packages that install into ``gefen/`` as well, such as gefen-x.

Two of them overwrite each other's files, and removing one removes files of the other. What is here
imports nothing of this package: it runs in a broken installation too.
"""

from __future__ import annotations

from importlib.metadata import packages_distributions
from pathlib import Path
from types import ModuleType

OWN = "gefen-cuda"

_GEFEN_X = ("partitioning.py", "quantization.py")
"""Files that gefen-x has in ``gefen/`` and this package never had."""


def beside(folder: Path) -> str | None:
    """What to say where gefen-x has files in the package's ``folder``; None where it has none."""
    if not any((folder / name).exists() for name in _GEFEN_X):
        return None
    return (
        f"gefen-x is installed over {OWN} or the other way round, both into {folder}: removing "
        f"or upgrading one breaks the other. {repair(['gefen-x'])}"
    )


def broken(package: ModuleType) -> str | None:
    """What to say where the ``package`` imported as gefen is not this one; None where it is."""
    if getattr(package, "__distribution__", None) == OWN:
        return None
    if getattr(package, "__file__", None) is None:
        what = f"Files of {OWN} are missing: another package that also owns them was removed"
    else:
        what = f"{package.__file__} is not of {OWN}: another package has overwritten it"
    return f"{what}. {repair(others() or ['gefen-x'])}"


def others() -> list[str]:
    """Installed distributions that have a package called gefen, besides this one."""
    found = packages_distributions().get("gefen", [])
    return sorted({name for name in found if name.lower().replace("_", "-") != OWN})


def repair(names: list[str]) -> str:
    """The command that leaves this package alone, and whole."""
    return f"To repair: pip uninstall -y {' '.join(names)} {OWN} && pip install {OWN}"
