"""Which scaling to deploy: the choice, the time budget, what is measured, the setting for other software."""

import contextlib
import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import recommend
from conf.registry import yaml_values
from engine.run import Run
from hf.checkpoint import open_folder
from hf.deploy import deployment, scaled_keys
from hf.families import read_settings
from hf.open import open_checkpoint, read_checkpoint
from measure import recommendation
from measure.evaluation import NONE, Method
from measure.recommendation import choose, recall_sentence, sentences
from model import gpt
from tests.helpers import StubModel, error_of, eval_settings, held_out, run_command, stub_evaluation, train_smoke_runs

# ---- the choice ----

NOISE = 0.01 * np.array([-1.0, 1.0, -1.0, 1.0, 0.0])
COSTS = {m: np.full(5, cost) for m, cost in {"YaRN": 0.02, "NTK": 0.01, "PI": 0.3, "none": 0}.items()}


@pytest.mark.parametrize(
    "gains, chosen, words",
    [
        ({"YaRN": 0.10 + NOISE, "NTK": 0.02 + NOISE[::-1], "PI": -1 + NOISE}, ["YaRN"], "Use YaRN with factor 4: "),
        ({"YaRN": 0.10 + NOISE, "NTK": 0.099 - NOISE, "PI": 0.01 * NOISE}, ["NTK", "YaRN"], "apart from YaRN"),
        ({"YaRN": 0.005 + NOISE, "NTK": NOISE, "PI": -1 + NOISE}, [], "Not settled: "),
        ({"YaRN": -0.1 + NOISE, "NTK": -0.2 + NOISE, "PI": -0.01 + NOISE}, [], "keep 64 tokens (PI -0.010 ["),
        ({"YaRN": 0.1 + NOISE, "none": 0.2 + NOISE}, ["none"], "Use no scaling: "),  # as of layers=irope
    ],
)
def test_the_choice_is_the_best_beyond_its_interval_and_of_equals_the_cheapest(gains, chosen, words):
    costs = {m: COSTS[m] for m in gains}
    assert choose(gains, costs) == chosen
    lines = sentences("truncation to 64", gains, costs, {"YaRN": 4.0, "NTK": 4.0}, 256, 64)
    assert words in " ".join(lines)


def test_recall_decides_only_beyond_its_interval():
    window = np.array([10.0, 20.0, 15.0])
    steadily, by_chance = window + np.array([60, 61, 59]), window + np.array([-60, 90, 10])
    assert recall_sentence({"window": window, "YaRN": steadily, "NTK": window}, 64)[0] == ["YaRN"]
    assert recall_sentence({"window": window, "YaRN": by_chance}, 64)[0] == []


# ---- the budget ----


@pytest.mark.parametrize(
    "settings, found",
    [
        ({}, "a9 b9 c9 d9"),
        ({"until": 15}, "a3 b3 c3 d3"),  # 4 seconds each: no fourth round
        ({"until": 0.1}, "a2 b2 c2"),  # at least two rounds, of what is needed; half of the time was over before d
        ({"stop_at": 18}, "a4 b4 c4 d4"),  # in the fifth round: the complete ones count
        ({"stop_at": 5}, None),  # in the second round
    ],
)
def test_rounds_end_with_the_time_and_with_ctrl_c(settings, found, monkeypatch):
    now, stop_at = [0], settings.pop("stop_at", 0)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def measure(label: str, i: int) -> list[float]:
        now[0] += 1
        if now[0] == stop_at:
            raise KeyboardInterrupt
        return [0.1]

    with contextlib.nullcontext() if found else pytest.raises(KeyboardInterrupt):
        values = recommendation.rounds(9, "abcd", measure, **{"until": 1000, **settings})
        assert " ".join(f"{label}{len(x)}" for label, x in values.items()) == found


# ---- what is measured ----


class Ends(StubModel):
    """Asserts that the input ends where its targets do, and notes the groups of positions."""

    def losses(self, tokens, targets, change):
        self.groups = getattr(self, "groups", set()) | {getattr(change.position_map, "group", 0)}
        assert torch.equal(tokens[:, 1 - targets.shape[1] :], targets[:, :-1])
        return super().losses(tokens, targets, change)


def test_all_lengths_score_the_same_targets_and_have_one_factor_and_one_group(tmp_path):
    """A model that loses 1 nat with fewer than 120 tokens, and 2 with a window."""
    texts = held_out([np.random.default_rng(d).integers(9, size=3000 + d) for d in range(4)])
    task = ["task.scored_tokens=8", "task.windows=4"]
    model, grouped = Ends(needs=120, window_costs=2.0), Method("grouped", [yaml_values("scaling", "self_extend")])
    evaluation = stub_evaluation(model, texts, tmp_path, "ctx=[64,128]", *task)
    grouped, yarn, *_ = recommendation.candidates(evaluation.run, 128, grouped)
    assert [evaluation.change(yarn, n).factor for n in (8, 64, 128)] == [2, 2, 2]
    control, _, gains, costs = recommendation.compare(evaluation, [yarn, grouped], time.monotonic() + 60)
    assert model.groups == {0, 4}  # never 1, which auto is at L
    assert control == "truncation to 64" and costs["YaRN"] == pytest.approx(0)
    means = {label: x.mean() for label, x in gains.items()}
    assert means == pytest.approx({"truncation to 64": 0, "a window of 64": -2, "YaRN": 1, "grouped": 1, "none": 1})


# ---- the setting ----

reference = pytest.mark.reference


def opened(folder: Path, *ignored: str) -> tuple[Run, gpt.GPT]:
    settings, weights, vocab_size = read_checkpoint(open_checkpoint(f"hf:{folder}", ignore_keys=ignored), 1, None)
    model = gpt.from_weights(settings, vocab_size, weights).double().eval()
    context = gpt.trained_context(settings, model.pos)
    return Run("x", "", folder, settings, model, held_out([[1]]), context, 0, "0", scaling_follows_length=True), model


@reference
def test_what_is_doubtful_about_the_trained_context(tmp_path):
    """A factor that is not the quotient of the two contexts, and windows below L."""
    from tests import hf_models as hf

    hf.save_random("gemma3_text", {}, tmp_path)
    run, _ = opened(tmp_path)
    assert re.search(r"some layers see only \d+ tokens", str(recommendation.about_context(run)))
    hf.save_random("llama", {}, tmp_path)
    parameters = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
    hf.edit(tmp_path, rope_parameters=parameters, max_position_embeddings=64)
    run, _ = opened(tmp_path)
    assert "the factor 3 times 16 is not max_position_embeddings=64" in str(recommendation.about_context(run))


@reference
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3_text", "smollm3", "gemma3, tied"])
def test_the_given_setting_computes_what_was_measured(family, tmp_path):
    """transformers, with config.json as it is printed, has the logits of the deployed method, below, at and above L."""
    from tests import hf_models as hf

    hf.save_random(family, {}, tmp_path)
    run, model = opened(tmp_path)
    path, L, ctx = tmp_path / "config.json", run.context.train_ctx, 3 * run.context.train_ctx
    before = json.loads(path.read_text())
    methods = [m for m in recommendation.candidates(run, ctx, NONE) if len(m.scalings) == 1]
    assert len(methods) == 4
    for method in methods:
        config = open_folder(tmp_path).config
        read_settings(config, 1, None)
        keys = scaled_keys(run, config, method.scalings, ctx)
        if "text_config" in keys:
            keys = {"text_config": before["text_config"] | keys["text_config"]}
        path.write_text(json.dumps(before | keys))
        for n in (8, L, ctx):
            change = run.change(method.scalings, n, ctx)
            error, _ = hf.difference(
                lambda tokens, change=change: model(tokens, change=change).detach(), hf.load(tmp_path), n
            )
            assert error < 1e-4, (method.label, n)
        path.write_text(json.dumps(before))


@reference
def test_what_software_is_told(tmp_path):
    """Its flags, or why there are none: qwen2 would scale the layers with windows, too, and no software has ReRoPE."""
    from tests import hf_models as hf

    def told(family: str, rope_type: str = "default", ignored: str = "", **more: object) -> dict[str, dict[str, str]]:
        hf.save_random(family, hf.rope_types(4)[rope_type], tmp_path)
        hf.edit(tmp_path, **more)
        cfg = eval_settings(f"run='hf:{tmp_path}'", f"ignore_keys=[{ignored}]")
        run, _ = opened(tmp_path, *cfg.ignore_keys)
        return {m.label: deployment(run, cfg, m.scalings, 96) for m in recommendation.candidates(run, 96, NONE)}

    assert "qwen2 scales other layers" in str(told("qwen2, window")["YaRN"])
    of = told("llama", ignored="foo", foo=3)
    assert "scaling=rerope" in str(of["ReRoPE, log-n"])
    more = "-c 96 --override-kv llama.context_length=int:96"
    assert of["YaRN"]["llama.cpp"] == f"--rope-scaling yarn --rope-scale 3 --yarn-orig-ctx 32 {more}"
    assert of["PI"]["llama.cpp"] == f"--rope-scaling linear --rope-scale 3 {more}"
    bases = [float(x["NTK"]["llama.cpp"].split()[3]) for x in (of, told("mistral3, mistral"))]  # of text_config
    assert bases == pytest.approx([10_000 * 3 ** (8 / 6)] * 2) and "L = 8192" in of["Llama 3's ramp"]["llama.cpp"]
    assert of["NTK"]["llama.cpp"].startswith("--rope-scaling none ")  # also of a file that has one
    assert "no flag" in told("llama", "llama3")["NTK"]["llama.cpp"]
    full = told("olmo3", layer_types=["full_attention"] * 5)["NTK"]["llama.cpp"]
    assert float(full.split()[3]) > 100  # of a file with a base for each type of layer
    vllm, _, overrides = of["YaRN"]["vLLM"].partition(" --hf-overrides ")
    assert vllm == "--max-model-len 96" and json.loads(overrides.strip("'"))["rope_parameters"]["rope_type"] == "yarn"


# ---- the command ----


@pytest.fixture(scope="module")
def runs(tmp_path_factory, cache) -> Path:
    folder = tmp_path_factory.mktemp("recommend")
    return train_smoke_runs(folder, cache, ("steps=1", "name=x"), ("steps=1", "name=a", "pos=alibi"))


def test_a_run_of_ours_is_answered_in_80_columns_and_nothing_is_written(runs, monkeypatch):
    monkeypatch.chdir(runs)
    before = sorted(runs.rglob("*"))
    argv = ["run=x", "ctx=256", "minutes=0.02", "documents=3", "scaling=dual_chunk"]
    code, out, _ = run_command(recommend.main, argv, monkeypatch)
    assert code == 0 and max(map(len, out.splitlines())) <= 80 and sorted(runs.rglob("*")) == before
    assert all(word in out for word in ("L = 64", "truncation to 64", "dual_chunk", "hardly better than guessing"))


def test_a_ctx_too_short_for_copying_is_answered(runs, monkeypatch):
    monkeypatch.chdir(runs)
    code, out, _ = run_command(recommend.main, ["run=x", "ctx=100", "documents=3"], monkeypatch)
    assert code == 0 and "Copying from further than L back was not tried" in out


@pytest.mark.parametrize(
    "argv, words",
    [
        (["run=x", "ctx=64"], "ctx=64: must be above 64"),
        (["run=a", "ctx=128"], "only window and truncation apply"),
        (["run=x", "ctx=9000000"], "ctx=9000000: the longest held-out document of this corpus allows "),
        (["run=x"], "ctx=???: must be "),
        (["run=x", "ctx=128", "data=text"], "data=text: must be left out"),
    ],
)
def test_a_mistake_is_one_line(argv, words, runs, monkeypatch):
    monkeypatch.chdir(runs)
    assert words in error_of(recommend.main, argv, monkeypatch)
