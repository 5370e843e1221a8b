"""wandb runs, online or offline, that need no account and no network and never stop what they log.

This module imports wandb, so it is imported only through engine/tracking.py.
"""

import hashlib
import json
import os
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

os.environ.setdefault("WANDB_SILENT", "true")
# Seconds. Logging an artifact asks the server something, by default for 19 seconds, if it dies in just that moment
os.environ.setdefault("WANDB_HTTP_TIMEOUT", "5")
import wandb
from tqdm import tqdm

# Seconds to wait for the server. Without limits, the end of a run waits for ever for a server that has gone
ANSWER, CONNECT, FINISH = 5.0, 10.0, 8.0
FINISH_WITH_CHECKPOINT = 600.0

_said: set[str] = set()  # lines that were printed
_failed: set[str] = set()  # modes that did not start in this process: they are not tried again


def say(line: str, file: TextIO | None = None) -> None:
    """Print a line about wandb, to stderr unless a file is given, if it has not been printed before."""
    if line not in _said:
        _said.add(line)
        tqdm.write(f"wandb: {line}", file=file or sys.stderr)  # above a progress bar, if there is one


@contextmanager
def problems_are_said() -> Generator[None]:
    """Context manager: an exception inside becomes a line."""
    try:
        yield
    except Exception as e:
        say(f"{type(e).__name__} ({_first_line(e)}): something is missing in wandb, nothing else is affected")


def _first_line(e: Exception) -> str:
    return str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__


# ---- names ----


def slug(text: str) -> str:
    """text with everything replaced that an id or the name of an artifact may not contain."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-")


def stable_id(name: str, identity: Any) -> str:
    """A readable id, the same for the same identity (JSON values): NAME-HASH, at most 109 characters."""
    key = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:8]
    return f"{slug(name)[:100]}-{key}"


def weights_artifact(run: str, digest: str, config: dict) -> wandb.Artifact:
    """The artifact that links the training of some weights to their evaluations: their digest, and as metadata config.

    Artifacts of one content are one version. So each side can make it, and nothing has to be downloaded or waited for.
    """
    artifact = wandb.Artifact(f"weights-{slug(run)}", type="weights", metadata=config)
    with artifact.new_file("digest.json") as f:
        json.dump({"sha256": digest}, f)
    return artifact


# ---- a run ----


def check_server(url: str) -> None:
    """ConnectionError if nothing answers at this address within `ANSWER` seconds; an HTTP error is an answer, too.

    Functions of wandb that ask the server try again and again, for 10 to 20 seconds.
    """
    try:
        urllib.request.urlopen(url, timeout=ANSWER).close()
    except urllib.error.HTTPError:
        pass
    except (OSError, ValueError) as e:
        raise ConnectionError(f"no answer from {url}: {getattr(e, 'reason', e)}") from None


def log_artifacts(run: Any, inputs: Sequence[wandb.Artifact] = (), outputs: Sequence[wandb.Artifact] = ()) -> None:
    """Log artifacts that a run has used and has made. ConnectionError if it is online and the server has gone."""
    if run.url:
        check_server(run.settings.base_url)
    for artifact in inputs:
        # What run.use_artifact does, but also offline, and without waiting for the upload without a limit
        run._log_artifact(artifact, is_user_created=True, use_after_commit=True)
    for artifact in outputs:
        run.log_artifact(artifact)


@contextmanager
def open_run(
    project: str, job_type: str, group: str, name: str, run_id: str, config: dict, *,
    resume: bool = False, finish_timeout: float = FINISH,
) -> Generator[Any]:  # fmt: skip
    """Context manager: the wandb run of this id. No exception comes from wandb: neither at its start nor at its end.

    WANDB_MODE sets the mode; without it, online if this machine is logged in, else offline. If a mode does not start,
    the next one is tried, and in this process the first is not tried again. `disabled` always starts. resume: continue
    the run of this id, if there is one; otherwise replace it. One line says where the run can be seen or how to upload.
    """
    mode = os.environ.get("WANDB_MODE")
    if mode is None:
        with suppress(Exception):
            mode = "online" if wandb.login(prompt=False, verify=False) else None
    labels: dict[str, Any] = {"job_type": job_type, "group": group, "name": name, "id": run_id, "config": config}
    finish_timeout = float(os.environ.get("WANDB_FINISH_TIMEOUT", finish_timeout))
    settings: dict[str, Any] = {"init_timeout": CONNECT, "finish_timeout": finish_timeout}
    settings |= {"x_graphql_timeout_seconds": 30.0}  # of uploads: otherwise that of WANDB_HTTP_TIMEOUT
    # A run of a second has no use for the load of the machine, nor has a page for panels of it
    settings |= {
        "finish_timeout_raises": True,
        "silent": True,
        "console": "off",
        "x_disable_stats": job_type != "train",
    }
    for attempt in dict.fromkeys((mode or "offline", "offline", "disabled")):
        if attempt in _failed:
            continue
        try:
            if attempt == "online":
                check_server(wandb.setup().settings.base_url)
            run = wandb.init(
                project=project, mode=attempt, resume="allow" if resume else None,  # ty: ignore[invalid-argument-type] (wandb checks the mode)
                settings=wandb.Settings(**settings), **labels,
            )  # fmt: skip
            break
        except Exception as e:
            _failed.add(attempt)
            say(f"{attempt} did not start ({_first_line(e)})")
            with suppress(Exception):
                wandb.teardown()  # frees the id, which the next attempt uses again
    if run.disabled:
        pass
    elif run.offline:
        say(f"offline; to upload: wandb sync --yes {_shown(Path(run.dir).parent.parent)}", sys.stdout)
    else:
        say(str(run.url if job_type == "train" else run.project_url), sys.stdout)
    try:
        yield run
    except BaseException:
        _finish(run, 1)
        raise
    _finish(run, 0)


def _finish(run: Any, exit_code: int) -> None:
    """End a run. If the server has gone, the later runs of this process are offline."""
    folder = Path(run.dir).parent
    try:
        run.finish(exit_code=exit_code)
    except TimeoutError:
        slow = "the upload takes long (WANDB_FINISH_TIMEOUT: seconds to wait for it)"
        try:
            check_server(run.settings.base_url)
        except ConnectionError as e:
            _failed.add("online")
            slow = str(e)
        say(f"{slow}; to upload the rest: wandb sync --yes --include-online {_shown(folder)}")
    except Exception as e:
        say(f"the run did not end well ({_first_line(e)}); its data: {_shown(folder)}")


def _shown(path: Path) -> str:
    """path as a user in the current folder would type it."""
    return f"./{path.relative_to(Path.cwd())}" if path.is_relative_to(Path.cwd()) else str(path)
