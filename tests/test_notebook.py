"""docs/walkthrough.ipynb: all of its cells run."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests.helpers import copy_of_the_repo, import_or_skip


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(1800)
def test_every_cell_runs(tmp_path, cache, monkeypatch):
    nbclient, nbformat = import_or_skip("nbclient"), import_or_skip("nbformat")
    import_or_skip("ipykernel")
    copy_of_the_repo(tmp_path, cache)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")  # for !python
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("MATPLOTLIBRC")
    notebook = nbformat.read(tmp_path / "docs/walkthrough.ipynb", as_version=4)
    kernel = {"metadata": {"path": str(tmp_path / "docs")}}  # as Jupyter starts it: in the folder of the notebook
    nbclient.NotebookClient(notebook, timeout=1500, resources=kernel).execute()  # an exception in a cell is raised

    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    text = ["".join(output.get("text", "") for output in cell.outputs) for cell in code]
    assert not re.search("Traceback|error: ", "".join(text))  # of a command, which raises nothing
    assert text[2].count("gain") == 5 and "n = 1024" in text[2]  # n = 64 to 1024
    for cell in (code[3], code[4]):
        assert any("image/png" in output.get("data", {}) for output in cell.outputs)
    assert "alibi" in text[4] and (tmp_path / "runs/compare.png").exists()
    assert "| `mine` |" in text[7] and (tmp_path / "results/board/mine/verdict.md").exists()
