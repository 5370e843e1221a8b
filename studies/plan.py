"""The two plans of the study and its sizes: which runs are trained and how each is evaluated (a job)."""

import functools
import itertools
from dataclasses import dataclass, field
from typing import Any

from conf.cli import train_settings
from conf.errors import check
from conf.registry import build_from_knobs, choices, yaml_values
from conf.schema import TrainConfig
from measure.tasks.matched import NEAR

BASES = (100, 500, 1000, 100_000, 1_000_000)  # besides the default of 10000
EXTENSIONS = ("none", "pi", "ntk", "yarn")  # methods that are fine-tuned to 4 L; none: fine-tuned without scaling
FINETUNE_STEPS = (20, 50, 100, 200)
MAIN_METHODS = ("pi", "ntk", "yarn", "rerope", "logn")  # evaluated at all lengths; the others up to NEAR

# The runs of the plan `layers`: name -> the methods that it is evaluated with, besides none and the window control
REFERENCES = {"rope": ("yarn",), "alibi": ()}
NEWER_ENCODINGS = {"fox": (), "ssmax": ("yarn",), "kerple": (), "fire": ()}
SCHEDULES = {"gemma3": ("yarn",), "swan": ("logn",), "sssl": ("yarn",), "smollm3": ("yarn",)}
FURTHER_ENCODINGS = (
    *("none", "sink_logits", "cope", "none_tempered"),
    *("rope_tempered", "rope_resonance", "fope", "pope", "path"),
)
FURTHER_SCHEDULES = ("window_only", "gemma4", "gpt_oss")
GATES = {f"gate_{kind}": (f"model.attention_gate={kind}",) for kind in ("head", "element")}
LARGER_BASE = 500_000  # of ABF, as Xiong et al. have it


@dataclass(frozen=True)
class Size:
    """The study at one size of model and corpus, from conf/study/NAME.yaml."""

    lengths: tuple[int, ...]  # evaluated, tokens; past NEAR only with MAIN_METHODS
    train: tuple[str, ...] = ()  # overrides of train.py: conf/train/exp/NAME.yaml has the settings of the training
    documents: int = 32  # evaluated
    scored_tokens: int = 64  # at the end of each window
    windows: int = 8  # of each document
    far_windows: int = 2  # of each document at lengths past NEAR
    seeds: tuple[int, ...] = (0,)
    finetune: tuple[int, ...] = FINETUNE_STEPS
    # For the forecast of the duration:
    train_rate: float = 20_000  # tokens/s
    eval_rate: float = 30_000  # tokens/s
    start_seconds: float = 30  # to start and compile

    @functools.cached_property
    def training(self) -> TrainConfig:
        """The settings of the pre-training."""
        return train_settings(*self.train)

    @property
    def L(self) -> int:
        """The trained context, tokens."""
        return self.training.ctx

    @property
    def doublings(self) -> tuple[int, ...]:
        """The lengths without those between L and 2 L."""
        return tuple(n for n in self.lengths if n % self.L == 0 or n < self.L)


def load_size(name: str) -> Size:
    """The size with this name. UserError if there is none."""
    check(name in choices("study"), "size", name, f"one of {', '.join(choices('study'))}")
    values = yaml_values("study", name)
    knobs = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    return build_from_knobs(Size, knobs, "study")


# ---- the plan ----


@dataclass(frozen=True)
class Job:
    """One training run and its evaluation."""

    part: str  # encodings, base or finetune; of the plan `layers`: references, layers or further
    name: str
    seed: int
    train: tuple[str, ...]  # overrides of train.py
    steps: int
    lengths: tuple[int, ...]  # evaluated
    scalings: str = "controls"  # evaluated with: all methods that apply, those of MAIN_METHODS, or the controls only
    methods: tuple[str, ...] | None = None  # of the plan `layers`: evaluated with the controls and these only
    columns: dict[str, Any] = field(default_factory=dict)  # additional columns of its rows


def planned_jobs(size: Size, seeds: tuple[int, ...]) -> list[Job]:
    """All jobs of the matrix, ordered by seed: if it is stopped, the finished jobs are a study with fewer seeds."""
    jobs = []
    for seed in seeds:
        jobs += encoding_jobs(size, seed, first=seed == seeds[0])
        jobs += finetune_jobs(size, seed)
        jobs += base_jobs(size, seed)
    return jobs


def encoding_jobs(size: Size, seed: int, first: bool) -> list[Job]:
    """A run of every encoding but those of the plan `layers`. rope is first: the fine-tunings start from it."""
    jobs = []
    others = {*NEWER_ENCODINGS, *FURTHER_ENCODINGS} - {"none"}
    for pos in sorted(set(choices("pos")) - others, key=lambda pos: (pos != "rope", pos)):
        train = (*encoding(pos, size), *size.train, f"seed={seed}")
        # All methods are evaluated on rope, with all seeds. On the other encodings the results are similar, so there
        # the main methods with the first seed are enough
        scalings = "all" if pos == "rope" else "main" if first else "controls"
        jobs.append(Job("encodings", f"{pos}-s{seed}", seed, train, size.training.steps, size.lengths, scalings))
    return jobs


def encoding(pos: str, size: Size) -> tuple[str, ...]:
    """Overrides: one with a table of positions needs rows for the longest length that is evaluated."""
    table = (f"pos.max_positions={max(size.lengths)}",) if "max_positions" in yaml_values("pos", pos) else ()
    return f"pos={pos}", *table


def from_run(size: Size, seed: int, *settings: str, run: str = "rope") -> tuple[str, ...]:
    """Overrides of a short training that starts from this run with the same seed; other settings are those of it."""
    exp = (x for x in size.train if x.startswith("exp="))
    return *exp, f"init={run}-s{seed}", *settings, f"seed={seed}", "val_windows=64", "optim=finetune"


def finetune_jobs(size: Size, seed: int) -> list[Job]:
    """Fine-tuning of rope to a context of 4 L with each method of EXTENSIONS, for several numbers of steps.

    In addition one run that is trained at 4 L from scratch, for comparison. The columns `method`, `finetune_steps` and
    `percent` (of the pre-training's steps) identify them in the rows.
    """
    target = 4 * size.L
    lengths = tuple(size.L * k for k in (1, 2, 4, 5, 8))  # 4 L is the target, and 5 and 8 L are past it
    jobs = []
    for steps, method in itertools.product(size.finetune, EXTENSIONS):
        settings = from_run(size, seed, f"ctx={target}", f"scaling={method}", f"steps={steps}")
        train = (*settings, "optim.lr=5e-4", "optim.warmup=5")
        percent = round(100 * steps / size.training.steps, 2)
        columns = {"method": method, "finetune_steps": steps, "percent": percent}
        jobs.append(Job("finetune", f"{method}-{steps}-s{seed}", seed, train, steps, lengths, columns=columns))
    # From scratch with as many steps as pre-training and the longest fine-tuning have together
    steps = size.training.steps + max(size.finetune)
    train = ("pos=rope", *size.train, f"seed={seed}", f"ctx={target}", f"steps={steps}")
    columns = {"method": "from scratch"}
    return [*jobs, Job("finetune", f"scratch-{target}-s{seed}", seed, train, steps, lengths, columns=columns)]


def base_jobs(size: Size, seed: int) -> list[Job]:
    """Runs of rope that are pre-trained with each base of BASES."""
    jobs = []
    for base in BASES:
        train = ("pos=rope", f"pos.base={base}", *size.train, f"seed={seed}")
        jobs.append(Job("base", f"base{base}-s{seed}", seed, train, size.training.steps, size.lengths))
    return jobs


# ---- the second plan ----


def layer_jobs(size: Size, seeds: tuple[int, ...]) -> list[Job]:
    """The plan `layers`: newer encodings, layer schedules, and another encoding for a trained rope.

    Its parts are `references`, to compare with (the same runs as in the matrix); `layers`, the ten runs of newer
    encodings, schedules and changes; and `further`, which only some claims of studies/layers.py need.
    """
    abf = (f"pos.base={LARGER_BASE}", f"ctx={4 * size.L}")  # Xiong et al. train at a longer context, too
    jobs = []
    for seed in seeds:
        jobs += [scratch_job(size, seed, "references", *run) for run in REFERENCES.items()]
        jobs += [scratch_job(size, seed, "layers", *run) for run in (SCHEDULES | NEWER_ENCODINGS).items()]
        jobs.append(changed_job(size, seed, "layers", "drope", ("pos=none",), ("logn",)))
        jobs.append(changed_job(size, seed, "layers", "abf", abf, ()))
        further = (*FURTHER_SCHEDULES, *FURTHER_ENCODINGS, *GATES)
        jobs += [scratch_job(size, seed, "further", name, ()) for name in further]
        jobs.append(changed_job(size, seed, "further", "rope_to_swan", ("layers=swan",), ("logn",)))
        # A copy of gemma3 in which scaling methods apply to all layers: one step saves the setting, not other weights
        everywhere = ("layers=gemma3", "layers.L.scaled=true", "optim.lr=1e-30")
        train = from_run(size, seed, *everywhere, "steps=1", run="gemma3")
        jobs.append(Job("further", f"gemma3_all_scaled-s{seed}", seed, train, 1, size.doublings, methods=("yarn",)))
    return jobs


def scratch_job(size: Size, seed: int, part: str, name: str, methods: tuple[str, ...]) -> Job:
    """A training from scratch. name: of an encoding, a layer schedule or one of GATES."""
    settings = GATES.get(name) or (encoding(name, size) if name in choices("pos") else (f"layers={name}",))
    train = (*settings, *size.train, f"seed={seed}")
    return Job(part, f"{name}-s{seed}", seed, train, size.training.steps, size.doublings, methods=methods)


def changed_job(size: Size, seed: int, part: str, name: str, change: tuple[str, ...], methods: tuple[str, ...]) -> Job:
    """A short training that starts from rope with another encoding."""
    steps = max(size.finetune)
    train = from_run(size, seed, *change, f"steps={steps}")
    return Job(part, f"{name}-s{seed}", seed, train, steps, size.doublings, methods=methods)


PLANS = {"matrix": planned_jobs, "layers": layer_jobs}


def minutes(job: Job, size: Size) -> float:
    """A rough forecast of a job's duration in minutes: its tokens divided by the rates, plus the time to start."""
    # About 20 methods apply to an encoding that rotates, and few to the others
    curves = {"all": 20, "main": 2 + len(MAIN_METHODS), "controls": 2}[job.scalings] + len(job.methods or ())
    far = min(curves, 2 + len(MAIN_METHODS)) * size.far_windows * sum(n for n in job.lengths if n > NEAR)
    near = curves * size.windows * sum(n for n in job.lengths if n <= NEAR)
    eval_seconds = size.documents * (near + far) / size.eval_rate
    return (job.steps * size.training.batch_tokens / size.train_rate + eval_seconds + size.start_seconds) / 60


def select_jobs(jobs: list[Job], only: str | None) -> list[Job]:
    """The jobs whose part or name is in `only`, a list with commas; all of them for None."""
    if not only:
        return jobs
    wanted, parts = only.split(","), dict.fromkeys(job.part for job in jobs)
    for name in wanted:
        known = name in parts or any(name == job.name for job in jobs)
        check(known, "--only", name, f"{', '.join(parts)} or a job such as {jobs[0].name}")
    return [job for job in jobs if job.part in wanted or job.name in wanted]
