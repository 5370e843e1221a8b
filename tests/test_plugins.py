"""A new encoding, scaling method, corpus or task is one .py and one .yaml: added to a copy of the repo."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conf.registry import choices
from measure.curves import read_curve
from tests.helpers import command, copy_of_the_repo

FILES = {
    "model/pos/toy.py": '''
from model.pos.rope import Rope


class Toy(Rope):
    def __init__(self, shape, base: float, interleaved: bool, twist: float):
        super().__init__(shape, base, interleaved)
        self.inv_freq = self.inv_freq * twist


build = Toy
''',
    "conf/pos/toy.yaml": "kind: toy\nbase: 100.0\ninterleaved: true\ntwist: 0.5\n",
    # no frequencies, and a bias
    "model/pos/toy_bias.py": '''
from model.pos import Encoding


class ToyBias(Encoding):
    def __init__(self, shape, slope: float):
        super().__init__(shape)
        self.slope = slope

    def bias(self, q_positions, k_positions):
        distance = q_positions.unsqueeze(-1) - k_positions.unsqueeze(-2)
        return (-self.slope * distance.clamp(min=0).sqrt()).unsqueeze(-3)


build = ToyBias
''',
    "conf/pos/toy_bias.yaml": "kind: toy_bias\nslope: 0.7\n",
    # a table, hence a last position
    "model/pos/toy_table.py": '''
from model.pos.learned import Learned


class ToyTable(Learned):
    def embed(self, x, positions):
        return super().embed(x, positions) * 2


build = ToyTable
''',
    "conf/pos/toy_table.yaml": "kind: toy_table\nmax_positions: ${ctx}\n",
    # parameters in every layer, which see its input
    "model/pos/toy_content.py": '''
from torch import nn

from model import attention
from model.content_attention import map_queries
from model.pos import Encoding


class Sharpness(nn.Module):
    def __init__(self, shape, layer: int):
        super().__init__()
        self.layer, self.linear = layer, nn.Linear(shape.width, shape.n_heads)

    def forward(self, x, heads, pos, positions, change, cache):
        scored = x[:, -heads.q.shape[2] :]
        factor = 1 + (1 + self.layer) * self.linear(scored).tanh().transpose(1, 2).unsqueeze(-1)  # [B, H, S, 1]
        return attention.attend(map_queries(heads, lambda q: (q * factor).to(q.dtype)), pos, positions, change)


class ToyContent(Encoding):
    def layer_module(self, layer):
        return Sharpness(self.shape, layer)


build = ToyContent
''',
    "conf/pos/toy_content.yaml": "kind: toy_content\n",
    "conf/layers/toy_layers.yaml": """pattern: AB
last: null
A: { pos: toy_content, base: null, window: 5, sinks: 1, scaled: false }
B: { pos: null, base: null, window: null, sinks: 0, scaled: true }
""",
    "model/scaling/toy_half.py": '''
from model.scaling import ContextChange


def scale(trained, n: int, factor: float, share: float):
    return ContextChange(inv_freq=trained.inv_freq / (1 + share * (factor - 1)), factor=factor)
''',
    "conf/scaling/toy_half.yaml": "kind: toy_half\nfactor: auto\nshare: 0.5\n",
    # no frequencies, only attention
    "model/scaling/toy_window.py": '''
from model.scaling import ContextChange

PREFIX_CONSISTENT = False


def scale(trained, n: int, share: float):
    L = trained.longest_trained_ctx
    return ContextChange(window=max(1, int(share * L))) if n > L else ContextChange()
''',
    "conf/scaling/toy_window.yaml": "kind: toy_window\nshare: 0.5\n",
    "data/corpora/toy_corpus.py": '''
def fingerprint(words: int):
    return {"corpus": "toy_corpus", "words": words}


def documents(words: int):
    for i in range(12):
        yield f"toy {i}", " ".join(f"word{(i * j) % 17}" for j in range(words + i))
''',
    "conf/data/toy_corpus.yaml": "kind: toy_corpus\nwords: 300\ntokenizer: bytes\nvocab_size: 257\nholdout: 4\n",
    "measure/tasks/toy_task.py": '''
import numpy as np
import torch

from data.held_out import long_documents
from measure.tasks import Piece, Task


class EveryOther(Task):
    def __init__(self, corpus, ctx: int, documents: int, pairs: int):
        cuts = long_documents(corpus, ctx, documents)
        self.label, self.names = f"toy_task pairs={pairs}", [d.name for d in cuts]
        self.shortest = self.minimum = 2 * pairs
        self.text = torch.from_numpy(np.stack([d.tokens[: ctx + 1] for d in cuts]).astype(np.int64))
        self.scored = torch.tensor([True, False] * pairs)

    def pieces(self, n):
        cut = self.text[:, -n - 1 :]
        return [Piece(cut[:, :-1], cut[:, -len(self.scored) :], self.scored)]

    def describe(self):
        return f"every other of the last {len(self.scored)} tokens"


build = EveryOther
''',
    "conf/task/toy_task.yaml": "kind: toy_task\npairs: 8\n",
}  # fmt: skip


@pytest.fixture(scope="module")
def toys(tmp_path_factory, cache) -> Path:
    """A copy of the repo with the toys, and nothing else edited."""
    folder = tmp_path_factory.mktemp("toys")
    copy_of_the_repo(folder, cache)
    for name, text in FILES.items():
        assert not (folder / name).exists()
        (folder / name).write_text(text.lstrip("\n"))
    return folder


def run(folder: Path, script: str, *args: str) -> str:
    done = command(str(folder / script), *args, cwd=folder, PYTHONPATH=str(folder))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.process
def test_toys_train_and_are_evaluated(toys):
    run(toys, "train.py", "exp=smoke", "steps=2", "pos=toy", "data=toy_corpus", "name=toy")
    settings = ("run=toy", "ctx=[64,128]", "documents=3", "scaling=toy_half", "task=toy_task")
    out = run(toys, "eval.py", *settings)
    assert "pos=toy" in out and "toy_half" in out and "every other of the last 16 tokens of 3 held-out documents" in out
    (file,) = (toys / "runs/toy/eval").glob("toy_half-*.jsonl")
    rows = read_curve(file).rows
    assert [(row.n, row.factor) for row in rows] == [(64, 1), (128, 2)]
    for row in rows:
        assert (row.run, row.pos, row.label, row.task) == ("toy", "toy", "toy_half", "toy_task pairs=8")
        assert row.tokens == row.bytes == 3 * 8 and len(row.nll) == 3  # every byte is a token
    assert {f.name.split("-")[0] for f in (toys / "runs/toy/eval").glob("*.jsonl")} == {"none", "window", "toy_half"}


@pytest.mark.process
def test_a_toy_schedule_with_an_encoding_that_sees_content_is_trained_and_evaluated(toys):
    settings = ("steps=2", "pos=toy", "layers=toy_layers", "data=toy_corpus", "name=mixed")
    run(toys, "train.py", "exp=smoke", *settings)
    out = run(toys, "eval.py", "run=mixed", "ctx=[64,128]", "documents=3", "scaling=toy_half")
    assert "toy_layers" in out and "toy_half" in out
    weights = torch.load(toys / "runs/mixed/ckpt.pt", weights_only=True)["model"]
    assert [name for name in weights if "content.linear.bias" in name] == ["blocks.0.attention.content.linear.bias"]


@pytest.mark.process
def test_the_tests_of_every_entry_need_no_edit_for_the_toys(toys):
    """The default tests iterate over the yaml files: those of the toys pass in the copy."""
    files = [f"tests/test_{name}.py" for name in ("pos", "attention", "scaling", "sample", "eval", "data", "registry")]
    chosen = "toy and not cached_decoding or toy-toy_half or toy_bias-toy_window or toy_table-toy_window"
    start = [sys.executable, "-m", "pytest", "-q", "-rA", "-n", "0", "-p", "no:cacheprovider", *files, "-k", chosen]
    env = {**os.environ, "PYTHONPATH": str(toys)}
    done = subprocess.run(start, cwd=toys, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:]
    for passed in (
        "test_pos.py::test_causality_by_gradient[toy]",
        "test_pos.py::test_causality_by_gradient[toy_content]",
        "test_pos.py::test_a_table_of_positions_ends_with_an_error_never_a_clamp[toy_table]",
        "test_scaling.py::test_factor_one_changes_no_bit[toy_half]",
        "test_scaling.py::test_what_needs_frequencies_is_not_applicable_to_encodings_without[toy_window]",
        "test_scaling.py::test_every_encoding_with_every_scaling[toy_bias-linear]",
        "test_sample.py::test_cached_decoding_equals_a_full_forward_at_every_length[toy-toy_half]",
        "test_eval.py::test_every_task_keeps_the_contract[toy_task]",
        "test_data.py::test_every_corpus_takes_the_settings_of_its_yaml[toy_corpus]",
        "test_registry.py::test_every_yaml_describes_itself_by_its_own_name[data-toy_corpus]",
    ):
        assert f"PASSED tests/{passed}" in done.stdout, passed


def test_nothing_of_the_toys_is_left_here(toys):
    assert importlib.util.find_spec("model.pos.toy") is None and "toy" not in choices("pos")
