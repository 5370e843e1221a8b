"""All changes of Hydra's behaviour, in one place. Written for hydra-core 1.3.8 (1.4.0rc3 works as well).

1. Error messages of Hydra and OmegaConf span many lines and end with advice on an environment variable. Here they
become
   one line (`hydra_message`). To delete when Hydra can print an error without a traceback.
2. `run_and_report` of hydra._internal prints those lines itself and exits, so it is replaced (`run_main`). To delete
   when Hydra lets the caller handle errors.
3. In a sweep (-m) an exception ends all jobs that follow. `sweep_job` returns the failure instead, and `run_main` lists
   the failed jobs at the end. To delete when Hydra's basic launcher continues after a failed job.
4. `run_main` can rewrite arguments before Hydra parses them. `exp=NAME` is a config group of train.py, so eval.py and
   sample.py cannot have a plain setting of that name (`exp_selects_runs`). sample.py quotes its prompt.
"""

import functools
import os
import re
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from hydra._internal import utils as hydra_utils
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf.errors import OmegaConfBaseException

from conf.errors import UserError, exit_with, rank, user_errors_in_one_line


def hydra_message(e: BaseException) -> str:
    """The message of a Hydra or OmegaConf error in one line, without key types, search paths and links."""
    text = str(e) if e.__cause__ is None or not isinstance(e, HydraException) else f"{e}: {e.__cause__}"
    text = re.sub(r"\n\s*(full_key|object_type|reference_type)[^\n]*", "", text)
    text = re.sub(r"\n\s*Set the environment variable HYDRA_FULL_ERROR[^\n]*", "", text)
    text = re.sub(r"\s*Config search path:.*", "", text, flags=re.S)
    text = re.sub(r"\nSee https?://[^\n]*", "", text)
    return re.sub(r"\s+", " ", text.replace("\n\t", ", ").replace(":, ", ": ")).strip()


@contextmanager
def hydra_errors_are_user_errors() -> Generator[None]:
    """Context manager around the parsing of the command line: an error of Hydra or OmegaConf becomes a UserError."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as e:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        raise UserError(hydra_message(e)) from None


class JobBug(Exception):
    """Carries an exception that is our bug (its cause) through Hydra."""


class FailedJob(str):
    """What a failed job of a sweep returns in place of a result: its part of the command line."""


def sweep_job(function: Callable) -> Callable:
    """Decorate a Hydra main function: a UserError is printed as one line, and in a sweep (-m) the other jobs still run.

    A failed job of a sweep returns a FailedJob, which `run_jobs` counts. Any other exception is our bug: it is wrapped
    in JobBug, so that Hydra and `run_jobs` do not treat it as a user error, and unwrapped in `run_jobs`.
    """

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except UserError as e:
            if os.environ.get("HYDRA_FULL_ERROR") == "1":
                raise
            if HydraConfig.get().mode != RunMode.MULTIRUN:
                exit_with(str(e), e.on_all_ranks)  # here, since Hydra would print another line before it raises again
            job = " ".join(HydraConfig.get().overrides.task)
            if rank() == 0:
                print(f"error: {job}: {e}", file=sys.stderr)
            return FailedJob(job)
        except Exception as e:  # our bug: run_jobs must not report it as an error of the command line
            raise JobBug from e

    return wrapped


def run_jobs(launch: Callable) -> Any:
    """Run one Hydra launch. If jobs of a sweep failed, list them and exit with code 1."""
    try:
        with hydra_errors_are_user_errors():
            result = launch()
    except JobBug as e:
        raise e.__cause__ or e from None
    except (ValueError, OSError) as e:  # raised by Hydra for pos=null, or for a folder that it cannot create
        raise UserError(str(e)) from e
    batches = [batch for batch in result if isinstance(batch, list | tuple)] if isinstance(result, list) else []
    jobs = [job.return_value for batch in batches for job in batch if isinstance(job, JobReturn)]
    if failed := [job for job in jobs if isinstance(job, FailedJob)]:
        exit_with(f"{len(failed)} of {len(jobs)} jobs failed with the errors above: {'; '.join(failed)}")
    return result


def run_main(main: Callable[[], None], *rewrites: Callable[[str], str]) -> None:
    """Run a Hydra main function as a command, and report user errors in one line.

    rewrites: functions from one command-line argument to another, applied to sys.argv before Hydra parses it.
    """
    for rewrite in rewrites:
        sys.argv[1:] = [rewrite(argument) for argument in sys.argv[1:]]
    hydra_utils.run_and_report = user_errors_in_one_line(run_jobs)  # ty: ignore[invalid-assignment]
    main()


def exp_selects_runs(argument: str) -> str:
    """exp=NAME -> trained_with=NAME, which opens only runs that were trained with that experiment (see 4. above)."""
    return f"trained_with={argument[4:]}" if argument.startswith("exp=") else argument
