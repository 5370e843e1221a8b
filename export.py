"""Write a trained run as a Hugging Face checkpoint: python export.py run=rope out=DIR

DIR then contains config.json, model.safetensors and tokenizer.json, which AutoModelForCausalLM and AutoTokenizer load.
A setting of the run that transformers cannot express ends in an error that names the setting; nothing is approximated.
"""

if __name__ == "__main__":
    import conf.interrupt  # noqa: F401 (first: Ctrl-C while torch is imported)

import sys
from pathlib import Path

from conf.errors import UserError, user_errors_in_one_line
from conf.leftovers import check_writable
from engine.run import Run
from hf.write import write_checkpoint

DEFAULTS = {"runs": "runs", "cache": ".cache"}
REQUIRED = ("run", "out")


def parse(arguments: list[str]) -> dict[str, str]:
    """KEY=VALUE arguments over the defaults. UserError for an unknown key or a missing value."""
    settings = dict(DEFAULTS)
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key not in (*REQUIRED, *DEFAULTS) or not value:
            raise UserError(f"{argument}: must be one of {', '.join(f'{k}=...' for k in (*REQUIRED, *DEFAULTS))}")
        settings[key] = value
    for key in REQUIRED:
        if key not in settings:
            raise UserError(f"{key}: must be given a value: python export.py run=NAME out=DIR")
    return settings


@user_errors_in_one_line
def main() -> None:
    """Open the run and write it to the new folder out=.

    UserError if the folder exists or the run cannot be expressed.
    """
    if {"--help", "-h"} & set(sys.argv[1:]):
        return print(__doc__)
    settings = parse(sys.argv[1:])
    out = Path(settings["out"])
    if out.exists():  # before the corpus is prepared
        raise UserError(f"out={out}: exists already: choose another folder or remove it")
    check_writable("out", out)
    run = Run.open(settings["run"], runs=settings["runs"], cache=settings["cache"])
    model_type = write_checkpoint(run, out)
    print(f"{out}: {run.folder} as transformers' {model_type}: AutoModelForCausalLM.from_pretrained('{out}')")


if __name__ == "__main__":
    main()
