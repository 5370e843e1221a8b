"""Whether tests notice wrong code: python -m tests.mutations [--only WORD]

Each mutation changes one place of layer schedules, encodings that see content, position maps, init=RUN or Hugging Face
families, in a copy of the checkout, and a test has to fail there. Exit code 1 if a mutation survives.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from conf.registry import ROOT


class Mutation(NamedTuple):
    """What becomes wrong, in which file, the text and its replacement, and the test that must fail (below tests/)."""

    wrong: str
    file: str
    text: str
    replacement: str
    test: str


PLAIN = "test_attention.py::test_blocked_and_written_out_attention_equal_the_plain_formula[4-5-none]"
FORMULAS = "test_layers.py::test_logits_equal_the_formulas_in_training_and_at_any_length"
SINKS = "test_attention.py::test_window_with_sinks_keeps_the_first_keys_at_distance_L[7]"
SCALED = "test_layers.py::test_scaling_applies_to_the_kinds_that_the_schedule_says[gemma3-methods0-kinds0]"
PAPERS = "test_content_encodings.py::test_attention_is_the_papers_formula"
CACHED = "test_content_encodings.py::test_several_new_tokens_at_once_continue_a_cache"
PAIRS = "test_position_maps.py::test_every_pair_has_the_published_relative_position"
REROPE = "test_attention.py::test_rerope_clips_relative_positions"
CHANGES = "test_encoding_changes.py::test_"
LENGTHS = "test_row_length.py::test_lengths_grow_linearly_from_the_first_to_all_tokens"
READ, WRITTEN = ("test_hf.py::test_logits_equal_transformers", "test_hf.py::test_exported_logits_equal_transformers")

# Two that show nowhere are left out: ReRoPE's border one key further, where both rotations are the same, and a gate of
# CoPE counted outside a window without sinks, since it belongs to hidden keys only
MUTATIONS = [Mutation(*fields) for fields in (
    # Windows and layer schedules
    ("a window of one key more", "model/attention.py",
     "(oldest + window - queries.start)", "(oldest + window - queries.start + 1)", PLAIN),
    ("a window of one key less", "model/attention.py",
     "(oldest + window - queries.start)", "(oldest + window - queries.start - 1)", PLAIN),
    ("the first block's oldest visible key left out", "model/attention.py",
     "queries.start - window + 1)", "queries.start - window + 2)", PLAIN),
    ("a fused part, without a mask, of one query too many", "model/attention.py",
     "start = window  # the first queries see all earlier keys\n"
     "        outputs.append(attend_causal(*(x[:, :, :window] for x",
     "start = window + 1\n        outputs.append(attend_causal(*(x[:, :, : window + 1] for x", f"{FORMULAS}[olmo3]"),
    ("no window in training", "model/attention.py",
     "return attend_unfused(heads, pos, positions, change, window)",
     "return attend_unfused(heads, pos, positions, change, None)", f"{FORMULAS}[olmo3]"),
    ("sinks outside the window dropped", "model/attention.py",
     "min(change.sinks, local.start)", "0", SINKS),
    ("a layer's own sinks dropped", "model/layers.py",
     "window=kind.window, sinks=kind.sinks)\n            encoding", "window=kind.window)\n            encoding",
     "test_layers.py::test_sinks_are_always_seen"),
    ("scaling applied to local layers, too", "model/layers.py",
     "if change is None or not (kind.scaled or change.window is not None):", "if change is None:", SCALED),
    ("scaling applied to local layers in place of global ones", "model/layers.py",
     "scaled=kind.scaled)", "scaled=not kind.scaled)", SCALED),
    ("the control takes a local layer's window away", "model/layers.py",
     "window < change.window + change.sinks)", "window < change.window)",
     "test_layers.py::test_a_window_that_sees_no_more_than_the_control_stays"),
    ("a layer without positions rotated", "model/layers.py",
     'kind["pos"] or cfg.pos', 'cfg.pos if kind["pos"] == {"kind": "none"} else kind["pos"] or cfg.pos',
     f"{FORMULAS}[smollm3]"),
    ("one base for local and global layers", "conf/layer_schedule.py",
     'return {**knobs, "base": base}', "return knobs", f"{FORMULAS}[gemma3]"),
    # Encodings that see content, KERPLE and FIRE
    ("FoX: sign of the gate", "model/pos/fox.py",
     "log_f = F.logsigmoid(", "log_f = -F.logsigmoid(", f"{PAPERS}[fox-None-change0-train]"),
    ("FoX: sign of the bias by key, without a mask", "model/pos/fox.py",
     "self.c[..., -1:] - self.c ", "self.c - self.c[..., -1:] ", f"{PAPERS}[fox-None-change0-eval]"),
    ("FoX: the key's gate instead of the query's (sum off by one)", "model/pos/fox.py",
     "c = log_f.cumsum(dim=1).", "c = (log_f.cumsum(dim=1) - log_f).", f"{PAPERS}[fox-None-change0-train]"),
    ("SSMax: log of one key more", "model/pos/ssmax.py",
     "torch.arange(T - S + 1, T + 1,", "torch.arange(T - S + 2, T + 2,", f"{PAPERS}[ssmax-None-change0-train]"),
    ("SSMax: log of the new tokens alone in decoding", "model/pos/ssmax.py",
     "torch.arange(T - S + 1, T + 1,", "torch.arange(1, S + 1,", f"{CACHED}[ssmax-change0]"),
    ("SSMax: log of all keys under a window", "model/pos/ssmax.py",
     "if change.window is not None:", "if False:", f"{PAPERS}[ssmax-None-change1-train]"),
    ("sink logit left out of the denominator in training", "model/pos/sink_logits.py",
     "(self.logit[:, None] * (k_index == 0)).", "((self.logit[:, None] - 1e9) * (k_index == 0)).",
     f"{PAPERS}[sink_logits-None-change0-train]"),
    ("sink logit left out of the denominator without a mask", "model/pos/sink_logits.py",
     "self.logit.float()[:, None] *", "(self.logit.float()[:, None] - 1e9) *",
     f"{PAPERS}[sink_logits-None-change0-eval]"),
    ("sink logit hidden by a window", "model/pos/sink_logits.py",
     "sinks=change.sinks + 1)", "sinks=change.sinks)", f"{PAPERS}[sink_logits-None-change1-train]"),
    ("CoPE: the query's own gate not counted", "model/pos/cope.py",
     "visible = distance >= 0", "visible = distance > 0", f"{PAPERS}[cope-None-change0-train]"),
    ("CoPE: the key's own gate not counted", "model/pos/cope.py",
     "gates.flip(-1).cumsum(dim=-1).flip(-1)", "(gates.flip(-1).cumsum(dim=-1).flip(-1) - gates)",
     f"{PAPERS}[cope-None-change0-train]"),
    ("CoPE: a gate outside the window counted for sinks", "model/pos/cope.py",
     "(distance < change.window)", "(distance <= change.window)", f"{PAPERS}[cope-None-change2-train]"),
    ("KERPLE: sign", "model/pos/kerple.py",
     "return -p *", "return p *", "test_content_encodings.py::test_kerple_is_its_formula"),
    ("FIRE: normaliser without the threshold", "model/pos/fire.py",
     "torch.maximum(q_positions.to(c.dtype), threshold)", "q_positions.to(c.dtype)",
     "test_content_encodings.py::test_fire_is_its_formula[32]"),
    # Maps of positions
    ("ReRoPE: border", "model/position_maps.py",
     "m - self.size + 1,", "m - self.size + 2,", f"{REROPE}[None-7]"),
    ("leaky ReRoPE: start of the slow positions", "model/position_maps.py",
     "start=self.size)", "start=self.size - 1)", f"{REROPE}[4.0-7]"),
    ("SelfExtend: border of the neighbours", "model/scaling/self_extend.py",
     "m - self.w + 1,", "m - self.w,", f"{PAIRS}[Grouped(w=6, group=4)--7]"),
    ("SelfExtend: shift", "model/scaling/self_extend.py",
     "shift = self.w - self.w // self.group", "shift = self.w - self.w // self.group - 1",
     f"{PAIRS}[Grouped(w=6, group=4)--7]"),
    ("Dual Chunk: border of the own chunk", "model/scaling/dual_chunk.py",
     "m // s * s,", "m // s * s + 1,", f"{PAIRS}[Chunks(s=5, c=7)--7]"),
    ("Dual Chunk: border between the chunk before and earlier ones", "model/scaling/dual_chunk.py",
     "m // s * s - s,", "m // s * s - s - 1,", f"{PAIRS}[Chunks(s=5, c=7)--7]"),
    ("Dual Chunk: largest position", "model/scaling/dual_chunk.py",
     "min(c, 2 * s - 1)", "min(c, 2 * s)", f"{PAIRS}[Chunks(s=6, c=30)--7]"),
    # init=RUN with another encoding, and ctx_start
    ("init=: weights that are called kept are new", "engine/finetune.py",
     "own | kept)", "kept | own)", f"{CHANGES}drope_keeps_all_weights_and_drops_the_rotation"),
    ("init=: weights of another shape kept in part", "engine/finetune.py",
     "{name: x for name, x in kept.items() if x.shape == own[name].shape}",
     "{name: x[: len(own[name])] for name, x in kept.items()}",
     f"{CHANGES}parameters_of_an_encoding_are_dropped_kept_or_new"),
    ("init=: weights of an encoding in a schedule dropped", "engine/finetune.py",
     'name.replace("pos.encodings.0.", "pos.")', "name",
     f"{CHANGES}parameters_of_an_encoding_are_dropped_kept_or_new"),
    ("init=: another base keeps the parent's trained context", "engine/finetune.py",
     "if not (kept if now else cfg.pos == old.pos):", "if False:",
     f"{CHANGES}a_larger_base_in_continued_training"),
    ("ctx_start: a step too early", "data/row_length.py",
     "* step / (", "* (step + 1) / (", LENGTHS),
    ("ctx_start: a length that is a divisor left out", "data/row_length.py",
     "range(1, length + 1)", "range(1, length)", LENGTHS),
    # Hugging Face
    ("Gemma 3: embedding scale dropped", "hf/folds.py",
     "m.width**0.5)", "1.0)", f"{READ}[gemma3_text-default]"),
    ("Gemma 3: the norms' + 1 dropped", "hf/folds.py",
     "ours[name] + 1", "ours[name]", f"{READ}[gemma3_text-default]"),
    ("Gemma 3: query_pre_attn_scalar dropped", "hf/folds.py",
     "*= (m.head_width / score_width(c)) ** 0.5", "*= 1", f"{READ}[gemma3_text-default]"),
    ("Gemma 3: query_pre_attn_scalar of the width in export", "hf/write.py",
     '"query_pre_attn_scalar": m.head_width', '"query_pre_attn_scalar": m.width', f"{WRITTEN}[gemma3]"),
    ("Gemma 3: local layers have the rope_parameters of global ones", "hf/layer_types.py",
     "parameters[layer_type], base", "parameters[FULL], base", f"{READ}[gemma3_text-longrope]"),
    ("Cohere 2: logit_scale dropped", "hf/folds.py",
     'ours["norm.weight"] * c.number("logit_scale", default=0.0625)', 'ours["norm.weight"]',
     f"{READ}[cohere2-default]"),
    ("SmolLM3: no_rope_layers inverted in reading", "hf/layer_types.py",
     "[bool(x) for x in", "[not x for x in", f"{READ}[smollm3-default]"),
    ("SmolLM3: no_rope_layers inverted in export", "hf/layer_types.py",
     "int(layer.rope is not None)", "int(layer.rope is None)", f"{WRITTEN}[smollm3]"),
    ("a window of one key less than in config.json", "hf/layer_types.py",
     "[window if x == SLIDING else None for", "[window and window - 1 if x == SLIDING else None for",
     f"{READ}[mistral, window-default]"),
    ("a method at reading applied to local layers", "hf/layer_types.py",
     "else not windowed or (window or 0) > context.train_ctx", "else True",
     "test_hf_layers.py::test_a_method_at_reading_changes_the_layers_that_the_schedule_says"),
    ("Cohere 2: pairs in the order of Llama in export", "hf/write.py",
     'in_hf_form(cfg, state, model_type == "cohere2")', "in_hf_form(cfg, state, False)", f"{WRITTEN}[cohere2]"),
)]  # fmt: skip


def mutated(mutation: Mutation) -> str:
    """The file's text with the mutation. SystemExit if the text is not there exactly once."""
    source = (ROOT / mutation.file).read_text()
    if (count := source.count(mutation.text)) != 1:
        sys.exit(f"error: {mutation.wrong}: {mutation.file} has {mutation.text!r} {count} times, not once")
    source = source.replace(mutation.text, mutation.replacement)
    compile(source, mutation.file, "exec")  # a syntax error would fail any test
    return source


def copy_checkout(folder: Path) -> None:
    """The tracked files, as they are now. A new folder each time: Python would reuse compiled files of equal size."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.rstrip("\0").split("\0"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)


def run_tests(folder: Path, tests: list[str]) -> tuple[bool, str]:
    """(whether all tests pass in this copy, the output). SystemExit if they could not be run."""
    options = ["-x", "-q", "-n0", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *(f"tests/{test}" for test in tests)]
    env = {**os.environ, "PYTHONPATH": str(folder)}  # not the checkout, whose code is right
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        sys.exit(f"error: pytest ended with exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.returncode == 0, done.stdout


def main() -> None:
    """Check that the tests pass, mutate the code in one way after another, and print what was found as a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", metavar="WORD", help="mutations with this word in description or file")
    word = parser.parse_args().only.lower()
    chosen = [(m, mutated(m)) for m in MUTATIONS if word in f"{m.wrong} {m.file}".lower()]
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        copy_checkout(folder := Path(temporary) / "as-it-is")
        passed, output = run_tests(folder, sorted({m.test for m, _ in chosen}))
        if not passed:
            sys.exit(f"error: a test fails without a mutation\n{output}")
        for i, (m, source) in enumerate(chosen):
            copy_checkout(folder := Path(temporary) / str(i))
            (folder / m.file).write_text(source)
            passed, output = run_tests(folder, [m.test])
            reason = next((line for line in output.splitlines() if line.startswith("E  ")), "")
            print(f"{'SURVIVED' if passed else 'caught'}: {m.wrong} ({m.file}){reason[1:]}", flush=True)
            rows.append(f"| {'SURVIVED: ' if passed else ''}{m.wrong} | {m.file} | `{m.test}` |")
            shutil.rmtree(folder)
    survived = sum("SURVIVED" in row for row in rows)
    print("\n| mutation | file | test that fails |\n|---|---|---|\n" + "\n".join(rows))
    print(f"\n{len(rows) - survived} of {len(rows)} mutations caught")
    sys.exit(1 if survived else 0)


if __name__ == "__main__":
    main()
