"""key_tokens=RUN of eval.py: the gain on key tokens, the targets whose prediction needs long context.

Key tokens are chosen by a reference run that was fine-tuned at a longer context, never by the evaluated run: targets
whose loss with that context is more than 2 nats lower than with L tokens, and below 2 nats (LongPPL, Fang et al. 2024,
arXiv 2410.23771, which measures perplexity on these tokens only).
"""

from pathlib import Path

import numpy as np

from conf.errors import UserError, check
from measure.curves import read_curve
from measure.evaluation import Evaluation
from measure.groups import Groups, matched_task, target_losses
from measure.tasks.matched import NEAR

SAVES, BELOW = 2.0, 2.0  # nats


def key_token_groups(evaluation: Evaluation, reference: str, runs: str) -> Groups:
    """The targets in two groups, `key` and `others`, by the reference's curve without scaling on the same targets.

    UserError if the reference is the evaluated run, has not been evaluated on these targets, or was not trained at a
    longer context.
    """
    task, run = matched_task(evaluation, f"key_tokens={reference}"), evaluation.run
    check(reference != run.name, "key_tokens", reference, "another run than the evaluated one")
    files = Path(runs, reference, "eval").glob("none-*.jsonl")
    for file in sorted(files, key=lambda file: -file.stat().st_mtime):  # the newest weights first
        curve = read_curve(file)
        if curve.label != "none":  # such as `none + logn`
            continue
        rows, short, long = curve.by_length(), curve.first.train_ctx, curve.first.extended_ctx
        right = f"a run that was fine-tuned at more than {short} and at most {NEAR} tokens"
        check(short < long <= NEAR, "key_tokens", reference, right)
        if all(n in rows and rows[n].targets in evaluation.targets.values() for n in (short, long)):
            losses = {n: target_losses(file, rows[n]) for n in (short, long)}  # [documents, windows, scored]
            key = (losses[short] - losses[long] > SAVES) & (losses[long] < BELOW)
            return Groups("key_tokens", f"key tokens, chosen by {reference}", ["others", "key"], key.astype(np.int64))
    settings = f"ctx={evaluation.ctx} documents={len(task.names)}"
    raise UserError(
        f"key_tokens={reference}: not evaluated on these targets: first python eval.py run={reference} {settings}"
    )
