"""A user's mistake is one clear line and exit code 1, never a traceback."""

import functools
import os
import re
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from hydra._internal import utils as hydra_utils
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf.errors import OmegaConfBaseException


def check(ok: bool, setting: str, value: Any, right: str) -> None:
    if not ok:
        raise ValueError(f"{setting}={value}: must be {right}")


def one_line(e: BaseException) -> str:
    """Hydra's and OmegaConf's messages span lines; their first lines say it all."""
    text = str(e) if e.__cause__ is None or not isinstance(e, HydraException) else f"{e}: {e.__cause__}"
    text = re.sub(r"\n\s*(full_key|object_type|reference_type)[^\n]*", "", text)
    text = re.sub(r"\n\s*Set the environment variable HYDRA_FULL_ERROR[^\n]*", "", text)
    text = re.sub(r"\s*Config search path:.*", "", text, flags=re.S)
    text = re.sub(r"\nSee https?://[^\n]*", "", text)
    return re.sub(r"\s+", " ", text.replace("\n\t", ", ").replace(":, ", ": ")).strip()


USERS_MISTAKES = (ValueError, OSError, HydraException, OmegaConfBaseException)


def rank() -> int:
    """Which of torchrun's processes this is."""
    return int(os.environ.get("RANK", 0))


def end(line: str, everyones: bool = True) -> NoReturn:
    """Exit with this line and code 1. everyones: under torchrun all processes come to it, and one line is enough."""
    if rank() > 0 and everyones:
        time.sleep(2)  # until torchrun has seen rank 0 end, and ends this process before it repeats the line
    sys.exit(f"error: {line}" if rank() == 0 else f"error: rank {rank()}: {line}")


class Failed(str):
    """What a job of a sweep returns in place of a result: its part of the command line."""


def one_line_errors(function: Callable) -> Callable:
    """A user's mistake inside function becomes one clear line and exit code 1. HYDRA_FULL_ERROR=1 shows all.

    A job of a sweep (-m) says its line and returns Failed: an exit would take the jobs after it along.
    """

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except USERS_MISTAKES as e:
            if os.environ.get("HYDRA_FULL_ERROR") == "1":
                raise
            line, everyones = one_line(e), not isinstance(e, OSError)
        except KeyboardInterrupt:
            sys.exit(130)
        if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
            job = " ".join(HydraConfig.get().overrides.task)
            if rank() == 0:
                print(f"error: {job}: {line}", file=sys.stderr)
            return Failed(job)
        end(line, everyones)

    return wrapped


def whole(function: Callable) -> Any:
    """function(), which is Hydra's whole run. A sweep that lost jobs ends with their names and exit code 1."""
    result = function()
    jobs = [job.return_value for batch in result for job in batch] if isinstance(result, list) else []
    if failed := [job for job in jobs if isinstance(job, Failed)]:
        end(f"{len(failed)} of {len(jobs)} jobs failed, as said above: {'; '.join(failed)}")
    return result


def entry(main: Callable[[], None]) -> None:
    """Run a Hydra main; the mistakes that Hydra itself finds become one line, too."""
    hydra_utils.run_and_report = one_line_errors(whole)  # it would print many lines
    main()
