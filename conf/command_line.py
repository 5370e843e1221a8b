"""Answer --help and names that do not exist before torch is imported, which takes seconds."""

import re
import sys

from conf.errors import UserError, user_errors_in_one_line
from conf.registry import choices, yaml_values


@user_errors_in_one_line
def answer_early(config: str) -> None:
    """Print the help and exit, or UserError for a setting or a choice of a group that does not exist; else return.

    config: train, eval or sample. What needs Hydra's grammar is left to Hydra.
    """
    if {"--help", "-h"} & set(sys.argv[1:]):
        from conf.help import help_text

        print(help_text(config))
        sys.exit()
    values = yaml_values("", config)
    groups = [group for entry in values["defaults"] if isinstance(entry, dict) for group in entry]
    known = {*values, *groups, "exp", "eval_exp", "hydra"}
    matches = (re.fullmatch(r"([+~]*)(\w+)([\w./]*)=(.*)", argument, flags=re.S) for argument in sys.argv[1:])
    given = [match.groups() for match in matches if match]
    # A group of several choices, or one that an exp= may choose, has settings that are not known here
    open_groups = {name for _, name, rest, value in given if name == "exp" or (not rest and value not in choices(name))}
    for sign, name, rest, value in given:
        wrong = name not in known
        if name in groups and not rest and re.fullmatch(r"[\w,]+", value):
            wrong = not {*value.split(",")} <= {*choices(name), "null"}
        elif name in groups and rest and not sign and not {name, "exp"} & open_groups:
            from conf.help import setting_names

            wrong = name + rest not in setting_names(config)
        if wrong:
            from conf.help import explain

            raise UserError(explain(config, name + rest, value))
