"""Which code made a row or a wandb run."""

import subprocess
from pathlib import Path

from conf.registry import ROOT


def output_of(*command: str) -> str:
    """What a command prints; "unknown" where it does not exist, fails, or takes more than 10 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def commit(checkout: Path = ROOT) -> str:
    """The short hash of a checkout's commit, followed by + if its code differs from it; "unknown" without git.

    Results and texts may differ: they do not change a number.
    """
    git = ("git", "-C", str(checkout))
    changed = output_of(*git, "diff", "HEAD", "--name-only", "--", ".", ":!results", ":!*.md")
    return output_of(*git, "rev-parse", "--short", "HEAD") + "+" * (changed not in ("", "unknown"))
