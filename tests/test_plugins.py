"""A new encoding, scaling method, corpus or task is one .py and one .yaml: added to a copy of the repo.

The recipes of CONTRIBUTING.md are added, and toys of other kinds.
"""

import re
from pathlib import Path

import pytest
import torch

from measure.curves import read_curve
from tests.helpers import ROOT, command, copy_of_the_repo


@pytest.fixture(scope="module")
def extended(tmp_path_factory, cache) -> Path:
    """A copy of the repo with the recipes and the toys, and nothing else edited."""
    folder = tmp_path_factory.mktemp("extended")
    copy_of_the_repo(folder, cache)
    pages = ((ROOT / page).read_text() for page in ("CONTRIBUTING.md", "tests/data/toys.md"))
    recipes, toys = (re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", page, flags=re.S) for page in pages)
    assert len(recipes) == 8 and len(toys) == 9
    for name, text in [*recipes, *toys]:
        assert not (folder / name).exists()
        (folder / name).write_text(text)
    return folder


def run(folder: Path, script: str, *args: str) -> str:
    done = command(script, *args, cwd=folder, PYTHONPATH=str(folder))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    return done.stdout


@pytest.mark.process
def test_recipes_and_a_toy_schedule_with_an_encoding_that_sees_content_are_trained_and_evaluated(extended):
    settings = ("pos=half_rope", "layers=toy_layers", "data=counting", "data.vocab_size=300", "steps=2", "name=new")
    run(extended, f"{extended}/train.py", "exp=smoke", *settings)
    settings = ("run=new", "ctx=[64,128]", "documents=2", "scaling=half_pi", "task=last_token")
    out = run(extended, f"{extended}/eval.py", *settings)
    assert all(x in out for x in ("pos=half_rope", "toy_layers", "half_pi", "the last token of 2 held-out documents"))
    weights = torch.load(extended / "runs/new/ckpt.pt", weights_only=True)["model"]
    assert [name for name in weights if "content.linear.bias" in name] == ["blocks.0.attention.content.linear.bias"]
    curves = {c.label: c.rows for c in map(read_curve, (extended / "runs/new/eval").glob("*.jsonl"))}
    assert curves.keys() == {"none", "window", "half_pi"}
    assert [(row.n, row.factor) for row in curves["half_pi"]] == [(64, 1), (128, 2)]
    for row in curves["half_pi"]:
        assert (row.run, row.label, row.task) == ("new", "half_pi", "last_token")
        assert row.tokens == len(row.nll) == 2


PASSED = """
    pos.py::test_causality_by_gradient[half_rope] | pos.py::test_causality_by_gradient[toy_content]
    pos.py::test_a_table_of_positions_ends_with_an_error_never_a_clamp[toy_table]
    scaling.py::test_factor_one_changes_no_bit[half_pi]
    scaling.py::test_what_needs_frequencies_is_not_applicable_to_encodings_without[toy_window]
    scaling.py::test_every_encoding_with_every_scaling[toy_bias-linear]
    sample.py::test_cached_decoding_equals_a_full_forward_at_every_length[half_rope-dynamic_ntk]
    sample.py::test_cached_decoding_equals_a_full_forward_at_every_length[rope-half_pi]
    eval.py::test_every_task_keeps_the_contract[last_token]
    data.py::test_every_corpus_takes_the_settings_of_its_yaml[counting]
    cli.py::test_every_yaml_describes_itself_by_its_own_name[data-counting]
"""


@pytest.mark.process
def test_the_tests_of_every_entry_need_no_edit(extended):
    """The default tests iterate over the yaml files: those of the new ones pass in the copy."""
    files = [f"tests/test_{name}.py" for name in ("pos", "attention", "scaling", "sample", "eval", "data", "cli")]
    new = "(toy or half_rope or half_pi or [counting or -counting or last_token]) and not cached_decoding"
    chosen = f"{new} or rope-half_pi or half_rope-dynamic_ntk or toy_bias-window or toy_table-window"
    options = ("-q", "-rA", "-n", "0", "-p", "no:cacheprovider", "-m", "not process")
    out = run(extended, "-m=pytest", *options, *files, "-k", chosen)
    for name in re.split(r"\s*[|\n]\s*", PASSED.strip()):
        assert f"PASSED tests/test_{name}" in out, name
