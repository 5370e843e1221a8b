"""Scripts in child processes, which save when they are stopped, and several jobs at a time."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed

import torch

from conf.errors import UserError
from conf.registry import ROOT
from studies.plan import Job
from studies.rows import Rows


class Stopped(Exception):
    """The deadline has passed, or the user pressed Ctrl-C."""


children: set[subprocess.Popen] = set()  # those of `run_script` that run now, in any thread
stopping = threading.Event()  # set when no further ones may be started


def run_script(argv: list[str], deadline: float) -> None:
    """Run a script of this repository in a child process until it ends.

    argv: the script and its arguments. deadline: in seconds of time.monotonic(); when it passes, the child gets
    SIGTERM, saves, and Stopped is raised. UserError if the child fails.
    """
    if stopping.is_set():
        raise Stopped
    child = subprocess.Popen([sys.executable, str(ROOT / argv[0]), *argv[1:]], preexec_fn=end_with_parent)
    children.add(child)
    timeout = max(0.1, deadline - time.monotonic()) if deadline < float("inf") else None
    try:
        code = child.wait(timeout)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):  # Ctrl-C, or SIGTERM: see `main`
        child.send_signal(signal.SIGTERM)
        child.wait()
        raise Stopped from None
    finally:
        children.discard(child)
    if code in (130, 143, -signal.SIGINT, -signal.SIGTERM):  # it was stopped by a signal, perhaps as it started
        raise Stopped
    if code:
        raise UserError(
            f"`python {' '.join(argv)}` failed with exit code {code}; run the same command again to resume from there"
        )


def end_with_parent() -> None:
    """Called in the child before it starts: it gets SIGTERM, and saves, when its parent is killed. On Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def finished_jobs(todo: Sequence[Job], run: Callable[[Job], Rows], jobs: int) -> Iterator[tuple[Job, Rows]]:
    """Run every job, `jobs` of them at a time, and yield each with its rows when it is finished.

    A job that starts from the run of another one (init=NAME) waits for it. The first exception of a job is raised after
    the jobs that have begun have ended; no other is begun.
    """
    futures: dict[str, Future[Rows]] = {}
    stopping.clear()

    def after_its_parent(job: Job) -> Rows:
        parent = next((x.removeprefix("init=") for x in job.train if x.startswith("init=")), None)
        if parent in futures:  # which comes first in the queue, so it has begun
            futures[parent].result()
        print(f"\n=== {job.name} ===", flush=True)
        return run(job)

    with ThreadPoolExecutor(jobs) as pool:
        try:
            for job in todo:
                futures[job.name] = pool.submit(after_its_parent, job)
            by_future = {futures[job.name]: job for job in todo}
            for future in as_completed(by_future):
                yield by_future[future], future.result()
        except KeyboardInterrupt:  # only the main thread gets it, and the jobs run in others
            stopping.set()
            for child in tuple(children):
                child.send_signal(signal.SIGTERM)
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def share_cores(jobs: int) -> None:
    """Give each of several jobs at a time its part of the threads, unless OMP_NUM_THREADS says how many."""
    if jobs > 1 and "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, torch.get_num_threads() // jobs)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # of the child processes
        torch.set_num_threads(threads)  # which the rows name
