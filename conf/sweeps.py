"""Sweeps (-m): a job that fails does not end the others; the failed jobs are listed at the end."""

import os
import sys
import traceback
from dataclasses import dataclass
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn

from conf.errors import OneRankError, UserError, rank
from conf.failures import of_the_machine
from conf.hydra_patches import JobFailed


@dataclass
class FailedJob:
    """What a failed job returns in place of a result. Not the exception, whose frames would keep the job's tensors."""

    job: str  # its part of the command line
    bug: bool  # of ours, rather than a user error


def failed_job(error: Exception) -> FailedJob:
    """Print the error of the current job, a user error in one line, and return what the job is to return.

    With HYDRA_FULL_ERROR=1 in the environment a user error counts as a bug. An error that only one rank has is raised
    again: the other ranks wait for this one in the middle of the job, so there can be no next one.
    """
    if isinstance(error, OneRankError) and os.environ.get("WORLD_SIZE", "1") != "1":
        raise JobFailed from error
    error = of_the_machine(error)
    job = " ".join(HydraConfig.get().overrides.task)
    bug = not isinstance(error, UserError) or os.environ.get("HYDRA_FULL_ERROR") == "1"
    if bug:
        traceback.print_exception(error)
    elif rank() == 0:
        print(f"error: {job}: {error}", file=sys.stderr)
    return FailedJob(job, bug)


def raise_failures(batches: list[Any]) -> None:
    """Raise an error that lists the failed jobs, if there are any: a UserError unless one of them is a bug of ours.

    batches: what Hydra's launch of a sweep returns. hydra-core 1.4 launches other work the same way, which may return a
    list of something else.
    """
    lists = [batch for batch in batches if isinstance(batch, list)]
    jobs = [job.return_value for batch in lists for job in batch if isinstance(job, JobReturn)]
    failed = [job for job in jobs if isinstance(job, FailedJob)]
    if failed:
        names = "; ".join(job.job for job in failed)
        kind = RuntimeError if any(job.bug for job in failed) else UserError
        raise kind(f"{len(failed)} of {len(jobs)} jobs failed with the errors above: {names}")
