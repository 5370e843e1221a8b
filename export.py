"""Write a trained run as a Hugging Face checkpoint: python export.py run=rope out=DIR

DIR then contains config.json, model.safetensors and tokenizer.json, which AutoModelForCausalLM and AutoTokenizer load.
A setting of the run that transformers cannot express ends in an error that names the setting; nothing is approximated.
"""

import sys
from pathlib import Path

from conf.errors import UserError, ensure, user_errors
from conf.schema import TrainedRunConfig
from engine.run import Run
from hf.write import write_checkpoint


@user_errors
def main() -> None:
    """Open the run and write it to the new folder out=.

    UserError if the folder exists or the run cannot be expressed.
    """
    if {"--help", "-h"} & set(sys.argv[1:]):
        return print(__doc__)
    settings = {"runs": "runs", "cache": ".cache"} | dict(x.partition("=")[::2] for x in sys.argv[1:])
    if settings.keys() != {"run", "out", "runs", "cache"} or not all(settings.values()):
        raise UserError("usage: python export.py run=NAME out=DIR, and if needed runs=FOLDER cache=FOLDER")
    out = Path(settings["out"])
    # Before the corpus is prepared
    ensure(not out.exists(), f"out={out}: exists already: choose another folder or remove it")
    run = Run.open(TrainedRunConfig(run=settings["run"], runs=settings["runs"], cache=settings["cache"]))
    model_type = write_checkpoint(run, out)
    print(f"{out}: {run.folder} as transformers' {model_type}: AutoModelForCausalLM.from_pretrained('{out}')")


if __name__ == "__main__":
    main()
