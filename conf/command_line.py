"""What can be answered from sys.argv alone: --help and names that do not exist, before the seconds that torch takes."""

import sys

from conf import interrupt  # noqa: F401 (first: Ctrl-C while torch is imported)
from conf.errors import rank
from conf.registry import choices, yaml_values


def answer_early(config: str) -> None:
    """Print the help and exit, or exit with a line on a setting or a choice of a group that does not exist; or return.

    config: train, eval or sample.
    """
    settings = yaml_values("", config)
    groups = {group for entry in settings["defaults"] if isinstance(entry, dict) for group in entry}
    given = [argument.partition("=")[::2] for argument in sys.argv[1:]]
    if not all(value in choices(name) if name in groups else name in settings for name, value in given):
        from conf.help import help_text, wrong_setting

        if {"--help", "-h"} & set(sys.argv[1:]):
            print(help_text(config))
            sys.exit()
        if line := wrong_setting(config):
            sys.exit(f"error: {line}" if rank() == 0 else 1)


def groups_of_parent() -> set[str]:
    """The groups whose settings are those of the run of init=: pos and layers, unless the command line chooses them."""
    given = {argument.lstrip("+~").partition("=")[0] for argument in sys.argv[1:]}
    return {"pos", "layers"} - given if "init" in given else set()
