"""The rows of a benchmark, appended to a file one by one, and the machine that they were measured on."""

import csv
import json
import platform
from pathlib import Path

import torch

from engine.checkpoint import write_atomically
from engine.code_version import commit, output_of


def append_json(path: Path, row: dict) -> None:
    """Add a row as the last line of a .jsonl file, which is created if it does not exist."""
    before = path.read_text() if path.exists() else ""
    write_atomically(path, lambda f: f.write((before + json.dumps(row) + "\n").encode()))


def machine() -> dict[str, str]:
    """GPU, driver, versions and commit."""
    import triton

    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version(),
        "commit": commit(),
    }  # fmt: skip


class Rows:
    """A table of rows, each of which is on the disk as soon as it is appended."""

    def __init__(self, path: Path):
        """path: a csv file, which may exist, with the same columns."""
        self.path, self.machine, self.count = path, machine(), 0

    def has(self, **columns: object) -> bool:
        """Whether the file has a row with these values, of this machine and commit."""
        if not self.path.exists():
            return False
        wanted = {name: str(value) for name, value in {**self.machine, **columns}.items()}
        with self.path.open(newline="") as file:
            return any(wanted.items() <= row.items() for row in csv.DictReader(file))

    def append(self, row: dict) -> None:
        """Add a row, with the columns of the machine before its own. ValueError: the file has other columns."""
        row = {**self.machine, **row}
        header = self.path.open().readline().strip() if self.path.exists() else ""
        if header and header != ",".join(row):
            raise ValueError(f"{self.path}: has other columns: choose another file with --out")
        with self.path.open("a", newline="") as file:
            table = csv.DictWriter(file, row.keys(), lineterminator="\n")
            if not header:
                table.writeheader()
            table.writerow(row)
        self.count += 1
