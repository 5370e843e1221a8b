"""Why a checkpoint cannot be read, in one line. Imported when one cannot.

No line advises to delete a file that may be good: without permission or memory nothing is known about it.
"""

import pickle
import sys
import zipfile
from pathlib import Path

from conf.errors import OneRankError, UserError
from conf.failures import is_out_of_memory, of_the_machine, os_error, reason
from conf.schema import TrainConfig
from engine import checkpoint

AGAIN = "restore it from a copy, or train again with fresh=true"


def explain_reading(path: Path, e: Exception) -> Exception:
    """The UserError that says what is wrong with the checkpoint at path; another exception is a bug, as it is."""
    error = os_error(e)
    if isinstance(error, FileNotFoundError):
        return UserError(f"{path}: not found")
    if error is not None:
        return OneRankError(f"{path}: cannot be read ({reason(error)})")
    if is_out_of_memory(e):
        return of_the_machine(e)
    if isinstance(e, UserError):
        return UserError(f"{path}: {e}")
    if isinstance(e, zipfile.BadZipFile) and not _begins_like_ours(path):
        return UserError(f"{path}: not a checkpoint that ropewalk wrote")
    if isinstance(e, zipfile.BadZipFile | zipfile.LargeZipFile | EOFError):
        return UserError(f"{path}: truncated or damaged ({reason(e)}): {AGAIN}")
    if isinstance(e, pickle.UnpicklingError):
        return UserError(f"{path}: not a checkpoint that ropewalk wrote: it has more than tensors and plain values")
    if isinstance(e, RuntimeError | ValueError | LookupError | TypeError | AttributeError | NotImplementedError):
        return UserError(f"{path}: not a checkpoint that ropewalk wrote: its parts do not fit together ({reason(e)})")
    return e


def _begins_like_ours(path: Path) -> bool:
    """Whether the file begins with the mark of a zip file, which torch.save writes, or is empty."""
    with path.open("rb") as f:
        return f.read(4) in (b"PK\x03\x04", b"")


def restore_settings(folder: Path, e: Exception) -> TrainConfig | None:
    """The settings of the run in folder, whose config.json cannot be read (e), from its ckpt.pt.

    config.json is then written again, if it is missing or damaged. None, with a line on stderr, if the checkpoint
    cannot be read either, as for a folder that is not a run.
    """
    try:
        cfg: TrainConfig = checkpoint.load(folder)["cfg"]
    except UserError as in_checkpoint:
        print(f"{in_checkpoint}; {folder.name} is left out", file=sys.stderr)
        return None
    if not isinstance(e, OSError) or isinstance(e, FileNotFoundError):  # not one that may only lack permission
        print(f"{folder}/config.json: restored from ckpt.pt", file=sys.stderr)
        checkpoint.write_settings(folder, cfg)
    return cfg
