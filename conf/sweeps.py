"""Sweeps (-m): a job that fails does not end the others; the failed jobs are listed at the end."""

import os
import sys
from dataclasses import dataclass
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn

from conf.errors import UserError, rank


@dataclass
class FailedJob:
    """What a failed job returns in place of a result: its part of the command line, and its error."""

    job: str
    error: Exception


def failed_job(error: Exception) -> FailedJob:
    """What the current job is to return because of this error, of which a user error is printed in one line."""
    job = " ".join(HydraConfig.get().overrides.task)
    if isinstance(error, UserError) and rank() == 0:
        print(f"error: {job}: {error}", file=sys.stderr)
    return FailedJob(job, error)


def raise_failures(batches: list[Any]) -> None:
    """Raise the first bug of ours among the jobs' errors, or else a UserError that lists the failed jobs.

    With HYDRA_FULL_ERROR=1 in the environment a user error counts as a bug. batches: what Hydra's launch of a sweep
    returns.
    """
    jobs = [job.return_value for batch in batches for job in batch if isinstance(job, JobReturn)]
    failed = [job for job in jobs if isinstance(job, FailedJob)]
    for job in failed:
        if not isinstance(job.error, UserError) or os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise job.error
    if failed:
        names = "; ".join(job.job for job in failed)
        raise UserError(f"{len(failed)} of {len(jobs)} jobs failed with the errors above: {names}")
