"""Seeds as one group, the verdict between two groups, and the reason why a curve is left out."""

import dataclasses
import re

import compare
from conf.schema import TrainConfig
from measure.curves import Curve, write_jsonl
from measure.groups import group_names, missing_seeds, print_verdicts, verdict
from studies.figures import curves_of
from studies.rows import RESULTS, read_rows
from tests.helpers import curve_of, run_command, run_eval, run_train, train_settings

LENGTHS = (256, 512, 1024, 2048)


def configs(**runs: tuple[str, ...]) -> dict[str, TrainConfig]:
    return {run.replace("_", "-"): train_settings("exp=smoke", *overrides) for run, overrides in runs.items()}


# ---- groups ----


def test_runs_that_differ_only_in_their_seed_are_a_group():
    found = group_names(
        configs(
            rope=(),
            rope_seed2=("seed=2", "device=cpu"),
            my_run=("seed=1",),
            again=(),  # the seed of rope once more
            rope_lr_seed1_x=("optim.lr=0.01", "seed=1"),
            rope_s3=("steps=10", "seed=3"),  # not of the group whose name it seems to have
        )
    )
    of_rope = {"again": "again", "my-run": "again", "rope-seed2": "again"}
    assert found == of_rope | {"rope": "rope", "rope-lr-seed1-x": "rope-lr-x", "rope-s3": "rope-s3"}


def test_fine_tunings_of_one_run_are_no_further_seeds():
    parents = configs(rope=(), rope_s1=("seed=1",))
    tuned = [dataclasses.replace(parents["rope"], init="rope", pretrained={"weights": "a"}, seed=k) for k in (0, 1)]
    assert len({*group_names(parents | {"x": tuned[0], "y": tuned[1]}).values()}) == 3
    assert len({*group_names({"x": tuned[0], "y": tuned[1]}).values()}) == 2  # also where that run is gone


def test_a_run_in_training_is_no_seed_of_its_group(tmp_path, monkeypatch):
    cfgs = configs(rope=(), rope_seed1=("seed=1",))
    for run, step in (("rope", 1), ("rope-seed1", cfgs["rope"].steps)):
        (tmp_path / run / "eval").mkdir(parents=True)
        write_jsonl(tmp_path / run / "eval/none.jsonl", curve_of(run, "none", {64: 3.0}, step=step).rows)
    monkeypatch.setattr(compare.checkpoint, "digest_of", lambda folder: curve_of("x", "none", {64: 3.0}).first.weights)
    groups = {c.run: c.group for c in compare.read_curves(str(tmp_path), [], cfgs)}
    assert groups == {"rope": "rope (in training)", "rope-seed1": "rope"}
    assert {c.group for c in compare.read_curves(str(tmp_path), ["rope-seed1"], cfgs)} == {"rope-seed1"}


def test_the_missing_seeds_are_named_with_the_command_that_trains_them():
    (row,) = curve_of("my-run", "none", {64: 3.0}, seed=1).rows
    cfgs = configs(my_run=("seed=1", "name=my-run", "optim.lr=0.01"))
    assert missing_seeds([row], cfgs) == "python train.py -m exp=smoke optim.lr=0.01 seed=0,2,3"
    assert "not named: my-run-s2: name my-run" in missing_seeds(
        [row], cfgs | configs(my_run_s2=("optim.lr=0.01", "seed=2"))
    )


# ---- verdicts on rows of the study; the numbers were computed with numpy and scipy.stats alone ----

ROWS = read_rows(RESULTS / "adamw.jsonl").rows


def study(**groups: tuple[str, ...]) -> list:
    """The curves without scaling of these groups of the study's runs."""
    names = {name: group for group, of_group in groups.items() for name in of_group}
    chosen = [row for row in ROWS if row.label == "none" and row.n in LENGTHS]
    rows = [row for row in chosen if row.run.rpartition("-s")[0] in names]
    return [dataclasses.replace(c, named=names[c.run.rpartition("-s")[0]]) for c in curves_of(rows)]


def test_the_verdict_between_six_and_six_seeds(capsys):
    groups = study(rope=("rope", "rope_interleaved"), flat=("alibi", "xpos"))
    print_verdicts(groups, ["rope", "flat"], ["none"], {})
    out = capsys.readouterr().out
    for n, text in (
        (256, "+0.192 [-0.047, +0.431]"),
        (512, "-0.819 [-1.094, -0.545]"),
        (2048, "-1.780 [-2.054, -1.506]"),
    ):
        assert re.search(rf"\n +{n}  loss  {re.escape(text)}", out), out
    sentence = " ".join(out.split())
    assert re.search(r"verdict from 6 and 6 seeds: flat is undecided at n = 256 \(\d+ seeds of each would", sentence)
    assert "better at n = 512, 1024, 2048" in sentence and "rise" not in out


def test_where_losses_differ_within_the_context_the_rise_is_compared(capsys):
    alibi, rope = ({n: [c.by_length()[n] for c in study(x=(name,))] for n in LENGTHS} for name in ("alibi", "rope"))
    sentence, out = verdict(alibi, rope, LENGTHS, 256), capsys.readouterr().out
    assert "+0.398 [+0.276, +0.519]" in out and "rise since 256  -0.897 [-1.417, -0.377]" in out
    assert sentence.startswith("worse at n = 256; better at n = 512, 1024, 2048; past 256 by the rise of the loss")


# ---- what is left out ----


def test_what_is_left_out_has_its_true_reason(capsys):
    cfgs = configs(rope=(), other=("data.vocab_size=300",), books=("data=books",), far=())
    here = curve_of("rope", "none", {64: 3.0})
    away = [curve_of(run, "none", {64: 3.0}, texts="x", ctx=4096) for run in ("other", "books", "far")]
    away.append(curve_of("rope", "none", {64: 3.0}, texts="x", task="recall key=1"))
    away.append(curve_of("few", "none", {64: 3.0}, texts="x", scored_windows=[0, 1]))
    compare.print_left_out([here, *away], here.first, cfgs)
    assert capsys.readouterr().out.splitlines()[2:] == [
        "  books: corpus books, not sympy: python compare.py books",
        "  far: ctx 4096, not 2048: python eval.py run=far ctx=2048 documents=32",
        "  few: task.windows 2, not 1: python eval.py run=few ctx=2048 documents=32 task.windows=1",
        "  other: vocabulary bpe 300, not bpe 512: python compare.py other",
        "  rope: task recall key=1, not matched: python compare.py rope --task recall",
    ]


def test_of_two_measurements_that_of_more_targets_is_shown():
    rows = [curve_of("rope", "none", {64: 3.0}, texts=texts, tokens=n).first for texts, n in (("z", 9), ("y", 10))]
    assert all(compare.most_shared_texts([Curve(x)]) == "y" for x in (rows, rows[::-1]))


# ---- the command ----


def test_compare_merges_seeds_and_tells_what_a_verdict_needs(here, monkeypatch):
    for overrides in ([], ["seed=1"], ["pos=alibi"]):
        run_train("steps=1", *overrides)
    for run in ("rope-smoke-steps1", "rope-smoke-seed1-steps1", "alibi-smoke-steps1"):
        run_eval(f"run={run}", "ctx=128", "documents=2")
    code, out, _ = run_command(compare.main, ["rope-smoke-steps1", "alibi-smoke-steps1"], monkeypatch)
    assert code == 0 and re.search(r"\nrope-smoke-steps1  none +0,1 +\d\.\d+ +\d\.\d+\n", out), out
    assert "verdict from 1 and 2 seeds: none" in out and max(map(len, out.splitlines())) <= 80
    assert "\n  python train.py -m exp=smoke steps=1 pos=alibi seed=1,2,3\n" in out
    _, out, _ = run_command(compare.main, ["rope-smoke-seed1-steps1"], monkeypatch)
    assert re.search(r"\nrope-smoke-seed1-steps1  none +1 ", out)  # a run by its own name is shown alone
