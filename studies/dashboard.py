"""Create a saved view of a wandb project, with log axes and runs grouped by encoding: python -m studies.dashboard

Needs an account and `pip install wandb-workspaces`. Where the view cannot be saved, the command says what to click.
"""

import argparse
import os
import sys
from typing import Any

from conf.errors import user_errors_in_one_line

NAME = "context length"
COLUMNS = (  # of the runs table
    "ppl@L", "bits_per_byte@L", "gain@2x", "gain@2x_low", "gain@2x_high", "gain@4x", "gain@4x_low", "gain@4x_high",
    "tax", "effective_context", "longest_not_worse", "minutes", "n_parameters",
)  # fmt: skip
CLICKS = """By hand, in the workspace of the project:
1. Group, above the list of runs: encoding, then eval.label.
2. Edit (pencil) the panel eval/ppl: X axis Step, which is the context length n; tick Log scale for X and for Y.
3. The same for eval/bits_per_byte, with Log scale for X only. eval/gain keeps its X axis eval/log2_n_over_L.
4. Columns, in the table of runs: pin ppl@L, gain@2x, gain@4x, tax and longest_not_worse.
5. Save view."""


@user_errors_in_one_line
def main() -> None:
    """Save the view and print its address. Exit code 1, after the instructions, if it cannot be saved."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--project", default="ropewalk", help="as project= of train.py and eval.py")
    parser.add_argument("--entity", help="user or team that owns the project; the default one of the account otherwise")
    args = parser.parse_args()
    try:
        print(f"view saved: {save(args.entity, args.project)}")
    except Exception as e:  # no package, no login, no connection, or a server that has no views
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        print(f"the view was not saved ({reason})\n{CLICKS}")
        sys.exit(1)


def save(entity: str | None, project: str) -> str:
    """Create the view in this project and return its address. Never asks for a login."""
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    if not wandb.login(prompt=False, verify=False):
        raise ConnectionError("not logged in: wandb login")
    return view(entity or str(wandb.Api(timeout=20).default_entity), project).save().url


def view(entity: str, project: str) -> Any:
    """The view, a wandb_workspaces Workspace that has not been saved.

    Runs are grouped by encoding and method, so that the seeds of one group share a line with its spread.
    """
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    length: dict[str, Any] = {"x": "Step", "title_x": "context length n, tokens", "log_x": True}
    ratio: dict[str, Any] = {"x": "eval/log2_n_over_L", "title_x": "log2(n / L)"}
    gains: list[Any] = ["eval/gain", "eval/gain_low", "eval/gain_high"]
    curves = [
        wr.LinePlot(title="perplexity", y=["eval/ppl"], log_y=True, **length),
        wr.LinePlot(title="bits per byte", y=["eval/bits_per_byte"], **length),
        wr.LinePlot(title="gain over the better control, nats/token [95 %]", y=gains, **ratio),
        wr.LinePlot(title="accuracy of tasks with an answer", y=["eval/accuracy"], **length),
        wr.MediaBrowser(title="curves of one evaluation", media_keys=["eval/figure"]),
        wr.WeavePanelSummaryTable(table_name="eval/rows"),
    ]
    training = [
        wr.LinePlot(title="training loss, nats/token", y=["train/loss"], log_x=True),
        wr.LinePlot(title="validation, bits per byte", y=["train/val_bits_per_byte"], log_x=True),
        wr.LinePlot(title="norm of the gradient", y=["train/grad_norm"], log_y=True),
        wr.LinePlot(title="tokens per second", y=["train/tokens_per_s"]),
    ]
    return ws.Workspace(
        entity=entity,
        project=project,
        name=NAME,
        sections=[
            ws.Section(name="Evaluation", panels=curves, is_open=True),
            ws.Section(name="Training", panels=training, is_open=True),
            ws.Section(name="Differences", panels=[wr.RunComparer(diff_only="split")]),
        ],
        settings=ws.WorkspaceSettings(max_runs=50),
        runset_settings=ws.RunsetSettings(
            groupby=[ws.Config("encoding"), ws.Config("eval.label")],
            pinned_columns=[f"summary:{name}" for name in COLUMNS],
        ),
    )


if __name__ == "__main__":
    main()
