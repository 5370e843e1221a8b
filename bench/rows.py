"""Append a row of measurements to a file of JSON lines."""

import argparse
import json
import platform
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from conf.registry import ROOT
from engine.files import commit


def parser(doc: str | None, out: str) -> argparse.ArgumentParser:
    """The command line of a benchmark. doc: of its module; out: the file in results/ that gets the rows by default."""
    made = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    made.add_argument("--out", type=Path, default=ROOT / "results" / out, help="the file that rows are appended to")
    return made


def append(path: Path, row: dict[str, Any]) -> None:
    """Print the row, and append it as a line of JSON, after the command, the commit and the machine."""
    cpuinfo = Path("/proc/cpuinfo")
    cpu = re.search(r"model name\s*: (.*)", cpuinfo.read_text(encoding="utf-8")) if cpuinfo.exists() else None
    code = {"command": shlex.join(["python", *sys.orig_argv[1:]]), "commit": commit(), "torch": torch.__version__}
    where = {"cpu": cpu[1] if cpu else platform.processor(), "threads": torch.get_num_threads()}
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**code, **where, **gpu, **row}) + "\n")
    print(json.dumps(row), flush=True)
