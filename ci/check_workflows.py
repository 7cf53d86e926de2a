#!/usr/bin/env python3
"""Check the workflows below a folder with actionlint and zizmor, offline.

Usage: check_workflows.py [FOLDER], by default the repository's .github.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path


def main() -> int:
    """Run both tools, whatever the first one finds; return 1 if one found something."""
    default = Path(__file__).parent.parent / ".github"
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    tools = Path(sysconfig.get_path("scripts"))
    workflows = sorted((folder / "workflows").glob("*.y*ml"))
    if not workflows:
        sys.exit(f"there are no workflows in {folder}")
    # Neither what else is on the machine nor the network may change the verdict.
    actionlint = ["-shellcheck=", "-pyflakes=", "-no-color"]
    zizmor = ["--offline", "--no-config", "--persona=pedantic", "--strict-collection", "--quiet"]
    config = folder / "actionlint.yaml"
    commands = [
        [tools / "actionlint", *actionlint, "-config-file", config, *workflows],
        [tools / "zizmor", *zizmor, *workflows],
    ]
    codes = [subprocess.run(command).returncode for command in commands]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
