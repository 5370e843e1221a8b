"""All changes of Hydra's behaviour, in one place. Written for hydra-core 1.3.8 (1.4.0rc3 works as well).

1. Error messages of Hydra and OmegaConf span many lines and end with advice on an environment variable. Here they
   become one line (conf/hydra_messages.py). To delete when Hydra can print an error without a traceback.
2. `run_and_report` of hydra._internal prints those lines itself and exits, so it is replaced (`run_main`). To delete
   when Hydra lets the caller handle errors.
3. In a sweep (-m) an exception ends all jobs that follow. `sweep_job` returns the failure instead, and `run_main` lists
   the failed jobs at the end (conf/sweeps.py). To delete when Hydra's basic launcher continues after a failed job.
4. `run_main` can rewrite arguments before Hydra parses them. `exp=NAME` is a config group of train.py, so eval.py and
   sample.py cannot have a plain setting of that name (`exp_selects_runs`, `exp_sets_evaluation`). sample.py quotes its
   prompt. With init=RUN a setting of `pos` or `layers` is one of that run's (`init_keeps_groups`).
5. hydra-core 1.4 warns of `version_base`, without which 1.3 warns. To delete, with the argument, with 1.3.
"""

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

from hydra._internal import utils as hydra_utils
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf.errors import OmegaConfBaseException

from conf.command_line import groups_of_parent
from conf.errors import UserError, user_errors_in_one_line
from conf.registry import choices

warnings.filterwarnings("ignore", "The version_base parameter is deprecated")  # by 1.4; 1.3 needs it


class JobFailed(BaseException):
    """Carries an exception (its cause) through Hydra, which would print a line and take our bugs for its own errors."""


def sweep_job(function: Callable) -> Callable:
    """Decorate a Hydra main function: its exceptions reach the caller of `run_jobs` as they are.

    In a sweep (-m) the other jobs still run: conf/sweeps.py.
    """

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as e:
            if HydraConfig.get().mode == RunMode.MULTIRUN:
                from conf.sweeps import failed_job

                return failed_job(e)
            raise JobFailed from e

    return wrapped


def run_jobs(launch: Callable) -> Any:
    """Run one Hydra launch and return its result. An error of Hydra or OmegaConf becomes a UserError.

    Exceptions of the jobs are raised as they are.
    """
    try:
        result = launch()
    except JobFailed as e:
        raise e.__cause__ or e from None
    # Hydra raises a ValueError for pos=null, an AssertionError for +=x, an OverflowError for a
    # number of 400 digits, an OSError for a folder that it cannot create
    except (HydraException, OmegaConfBaseException, ValueError, OSError, AssertionError, OverflowError) as e:
        from conf.hydra_messages import hydra_message

        raise UserError(hydra_message(e)) from e
    if isinstance(result, list):  # of a sweep
        from conf.sweeps import raise_failures

        raise_failures(result)
    return result


def run_main(main: Callable[[], None], *rewrites: Callable[[str], str]) -> None:
    """Run a Hydra main function as a command, and report user errors in one line.

    rewrites: functions from one command-line argument to another, applied to sys.argv before Hydra parses it.
    """
    for rewrite in rewrites:
        sys.argv[1:] = [rewrite(argument) for argument in sys.argv[1:]]
    hydra_utils.run_and_report = user_errors_in_one_line(run_jobs)  # ty: ignore[invalid-assignment]
    main()


def init_keeps_groups(argument: str) -> str:
    """pos.KNOB=VALUE -> ++pos.KNOB=VALUE where pos is that of the run of init=. The same for `layers`.

    Hydra would refuse a knob that the default choice does not have.
    """
    return f"++{argument}" if argument.partition(".")[0] in groups_of_parent() else argument


def exp_selects_runs(argument: str) -> str:
    """exp=NAME -> trained_with=NAME, which opens only runs that were trained with that experiment (see 4. above)."""
    return f"trained_with={argument[4:]}" if argument.startswith("exp=") else argument


def exp_sets_evaluation(argument: str) -> str:
    """exp=NAME -> eval_exp=NAME where conf/eval_exp/NAME.yaml has settings for evaluating such runs."""
    name = argument.removeprefix("exp=")
    return f"eval_exp={name}" if name != argument and name in choices("eval_exp") else exp_selects_runs(argument)
