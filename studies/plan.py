"""The study: which runs each of its plans trains, with how many seeds, and how a run is evaluated; its sizes.

    rope        rope with every method, and fine-tuned to 2, 4 and 8 L
    encodings   every encoding, layer schedule and gate, drawn positions, bases of rope, a trained rope that was changed
    books       rope on another kind of text
    ladder      rope at several sizes on a larger corpus, with the same tokens, and with the same for each parameter
    tasks       every encoding, schedule and gate that learned to recall or mqar, by the share of right answers
    real        SmolLM2-135M, which is not trained here, on code and on books; and how well it copies

The published rows of a plan are results/PLAN.jsonl; of the tasks at the sizes `small` and `small_recall`,
results/tasks_small.jsonl. All rows of a file are of the same texts.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from conf.cli import train_settings
from conf.errors import check
from conf.registry import build_from_knobs, choices, yaml_values
from conf.schema import TrainConfig
from model.spectrum import frequencies, rotations

NEAR, BETWEEN, FAR = (0.5, 1, 2, 4, 8), (1.125, 1.25, 1.5, 1.75), (16, 32)  # evaluated lengths, in trained contexts L
FACTOR = 8.0  # of the methods whose loss within L is measured with one factor for all lengths
METHODS, WITH_LOGN = ("pi", "ntk", "yarn", "rerope"), ("rerope",)  # on all seeds of rope
FURTHER = ("ntk_by_parts", "ntk_mixed", "llama3", "yarn_paper", "logn")
FURTHER_WITH_LOGN = ("rerope_leaky",)
FURTHER_SEEDS = 2
# Fine-tuned to so many L -> with these methods, evaluated at so many L; 1: what the further steps alone are worth
EXTENSIONS = {1: ("none",), 2: ("none", "yarn"), 4: ("none", "pi", "ntk", "yarn"), 8: ("none", "yarn")}
FINETUNED = "optim.lr=5e-4", "optim.warmup=5"
EXTENDED_LENGTHS = {1: (1,), 2: (2,), 4: (4, 5, 8), 8: (8,)}
BASES = (100, 500, 500_000, 1_000_000)  # besides the default of 10000
# Of each part
SEEDS = {"rope": 8, "finetune": 6, "base": 4, "encodings": 4, "books": 4, "ladder": 4, "tasks": 3, "real": 1}
FEWER_WINDOWS = ("encodings", "base", "ladder")  # a quarter of the others'
# Methods -> the runs that are evaluated with them, besides none and the window control
EVALUATED_WITH = {
    ("yarn",): (
        *("xpos", "pope", "fope", "rope_resonance", "rope_proportional", "gate_head", "gate_element"),
        *("ssmax", "sink_logits", "rope_tempered", "rope_partial", "rope_interleaved"),
        *("gemma3", "gemma4", "sssl", "smollm3", "rope_qk_norm"),
    ),
    ("logn",): ("swan", "drope", "drope_qk_norm", "rope_to_swan"),
    ("pi",): ("random_float", "rope_half", "rope_quarter"),  # random_float as its paper reads
    ("pi", "ntk", "yarn"): ("rope", "complete_pairs", *(f"base{base}" for base in BASES)),
}
OWN = {name: methods for methods, names in EVALUATED_WITH.items() for name in names}
OTHERS: dict[str, tuple[str, ...]] = {f"gate_{kind}": (f"model.attention_gate={kind}",) for kind in ("head", "element")}
OTHERS |= {"random_float": ("positions=random_float", "longest={L}")}  # then positions are within L, as in its paper
OTHERS |= {"linear_attention": ("pos=rope", "attention=linear"), "rope_qk_norm": ("pos=rope", "model.qk_norm=true")}
SHORTER = {"rope_half": 2, "rope_quarter": 4}  # rope with fewer steps, to compare at equal losses within L
LARGER_BASE = 500_000  # of ABF, as Xiong et al. have it
# Parameters -> the model; all heads have 64 dimensions, so the same frequencies
SHAPES = {"0.7M": (2, 128), "3.7M": (4, 256), "11M": (6, 384)}  # layers, width
LADDER = {M: (f"model.n_layers={n}", f"model.n_heads={w // 64}", f"model.width={w}") for M, (n, w) in SHAPES.items()}
LADDER_THIRD = "3.7M"  # with a third of the steps it has as many tokens for each parameter as the largest
TASKS = ("recall", "mqar")
SOLVED = 0.8  # the accuracy of the effective context
TEXTS = 96  # of a task, at each distance of the answer
SHORTEST_TEXT = 128  # of a task, tokens
REAL, REAL_CTX = "pretrained:smollm2", 8192  # the real model and its L
REAL_DOCUMENTS, REAL_TOKENS = {"sympy": 10, "books": 10}, 512  # at most; scored of each
COPIED_AT, COPIED_BACK, COPIES = 1.5, 0.5, 6  # length and shortest distance in L; texts at each distance


@dataclass(frozen=True)
class Size:
    """The study at one size of model and corpus, from conf/study/NAME.yaml."""

    train: list[str] = field(default_factory=list)  # overrides of train.py, such as exp=NAME
    documents: int = 32  # evaluated
    scored_tokens: int = 64  # at the end of each window
    windows: int = 32  # of each document; of FEWER_WINDOWS a quarter
    far_windows: int = 2  # of each document at lengths past 2048
    seeds: int = 8  # at most; SEEDS has those of each part
    finetune_steps: int = 200

    @functools.cached_property
    def training(self) -> TrainConfig:
        """The settings of the pre-training."""
        return train_settings(*self.train)

    @property
    def L(self) -> int:
        """The trained context, tokens."""
        return self.training.ctx

    def lengths(self, *multiples: float) -> tuple[int, ...]:
        """In tokens."""
        return tuple(round(m * self.L) for m in multiples)


def load_size(name: str) -> Size:
    """The size with this name. UserError if there is none."""
    check(name in choices("study"), "size", name, f"one of {', '.join(choices('study'))}")
    return build_from_knobs(Size, yaml_values("study", name), "study")


# ---- jobs ----


@dataclass(frozen=True)
class Evaluation:
    """One command `eval.py -m`. none and the window control come with every one."""

    lengths: tuple[int, ...]  # tokens
    methods: tuple[str, ...] = ("none",)
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Job:
    """One training run and its evaluations."""

    part: str
    name: str
    seed: int
    train: tuple[str, ...]  # overrides of train.py
    evaluations: tuple[Evaluation, ...]
    task: str = "matched"
    model: str = ""  # that is evaluated instead of a trained run: run= of eval.py
    scored: tuple[str, ...] = ()  # settings of eval.py that choose the targets, in place of those of the size

    @property
    def longest(self) -> int:
        return max(n for evaluation in self.evaluations for n in evaluation.lengths)


def from_scratch(size: Size, part: str, name: str, seed: int, *evaluations: Evaluation, settings: tuple = ()) -> Job:
    """name: of an encoding, a layer schedule, one of OTHERS, or any other with `settings`."""
    others = tuple(x.format(L=size.L) for x in OTHERS.get(name, ()))
    chosen = settings or others or ((f"pos={name}",) if name in choices("pos") else (f"layers={name}",))
    if name in choices("pos") and "max_positions" in yaml_values("pos", name):  # a table of positions needs all rows
        chosen += (f"pos.max_positions={max(n for x in evaluations for n in x.lengths)}",)
    train = (*size.train, *chosen, f"seed={seed}")  # of two values of one setting the later one counts
    return Job(part, f"{name}-s{seed}", seed, train, evaluations)


def every_encoding() -> list[str]:
    """rope first, then all other encodings, layer schedules and OTHERS by name."""
    schedules = {*choices("layers")} - {"uniform", "olmo3"}  # with 4, 8, ... layers olmo3 is sssl
    return sorted((*choices("pos"), *schedules, *OTHERS), key=lambda name: (name != "rope", name))


def own_methods(name: str, lengths: tuple[int, ...]) -> tuple[Evaluation, ...]:
    """The evaluations of an encoding, layer schedule, or one of OTHERS with the methods that belong to it."""
    if name == "gpt_oss":  # whose YaRN does not round its ramp
        return (Evaluation(lengths, ("yarn",), ("++scaling.truncate=false",)),)
    own = Evaluation(lengths, OWN.get(name, ("none",)))
    return (own, Evaluation(lengths, WITH_LOGN, ("plus=logn",))) if name == "rope" else (own,)


def from_run(
    size: Size, part: str, name: str, seed: int, *settings: str, evaluations: tuple, run: str = "rope", steps: int = 0
) -> Job:
    """A short training that starts from this run with the same seed; other settings are those of it.

    steps: 0 for those of the size.
    """
    exp = (x for x in size.train if x.startswith("exp="))
    common = (f"steps={steps or size.finetune_steps}", f"seed={seed}", "val_windows=64", "optim=finetune")
    train = (*exp, f"init={run}-s{seed}", *common, *settings)
    return Job(part, f"{name}-s{seed}", seed, train, evaluations)


def rope_jobs(size: Size, seed: int) -> Iterator[Job]:
    """rope with every method, and its fine-tunings."""
    near = size.lengths(*NEAR)
    methods = (
        Evaluation(near, METHODS),
        Evaluation(near, WITH_LOGN, ("plus=logn",)),
        Evaluation(size.lengths(*BETWEEN), ("yarn",)),
        Evaluation((size.L,), ("pi", "ntk", "yarn"), (f"++scaling.factor={FACTOR}",)),
    )
    further = Evaluation(near, FURTHER), Evaluation(near, FURTHER_WITH_LOGN, ("plus=logn",))
    yield from_scratch(size, "rope", "rope", seed, *methods, *(further if seed < FURTHER_SEEDS else ()))
    for multiple, method in ((k, m) for k, of_length in EXTENSIONS.items() for m in of_length):
        lengths = Evaluation(size.lengths(*EXTENDED_LENGTHS[multiple]))
        settings = (f"ctx={multiple * size.L}", f"scaling={method}", *FINETUNED)
        yield from_run(size, "finetune", f"{method}-{multiple}L", seed, *settings, evaluations=(lengths,))


def encoding_jobs(size: Size, seed: int) -> Iterator[Job]:
    """Every encoding and schedule at up to 32 L with the methods that belong to it, rope among them; bases to 8 L."""
    near = size.lengths(*NEAR)
    lengths = near + size.lengths(*FAR)
    own = functools.partial(own_methods, lengths=lengths)
    for name in every_encoding():
        yield from_scratch(size, "encodings", name, seed, *own(name))
    for name, divisor in SHORTER.items():
        settings = ("pos=rope", f"steps={size.training.steps // divisor}")
        yield from_scratch(size, "encodings", name, seed, *own(name), settings=settings)
    for base in BASES:
        settings = ("pos=rope", f"pos.base={base}")
        yield from_scratch(size, "base", f"base{base}", seed, *own(f"base{base}", lengths=near), settings=settings)
    turns = rotations(frequencies(size.training.model.head_width, 10000.0), size.L)  # of each pair within L
    complete = ("pos=rope_proportional", f"pos.rotary_fraction={(turns >= 1).double().mean().item()}")
    yield from_scratch(size, "base", "complete_pairs", seed, *own("complete_pairs", lengths=near), settings=complete)
    abf = (f"pos.base={LARGER_BASE}", f"ctx={4 * size.L}")  # Xiong et al. train at a longer context, too
    changes: dict[str, tuple[str, ...]] = {"drope": ("pos=none",), "abf": abf, "rope_to_swan": ("layers=swan",)}
    for name, change in changes.items():
        yield from_run(size, "encodings", name, seed, *change, evaluations=own(name))
    long: Any = {"evaluations": own("drope_qk_norm"), "run": "rope_qk_norm", "steps": size.training.steps}
    yield from_run(size, "encodings", "drope_qk_norm", seed, "pos=none", **long)
    # A copy of gemma3 in which scaling methods apply to all layers: one step saves the setting, not other weights
    everywhere = ("layers=gemma3", "layers.L.scaled=true", "optim.lr=1e-30")
    given: Any = {"evaluations": (Evaluation(lengths, ("yarn",)),), "run": "gemma3", "steps": 1}
    yield from_run(size, "encodings", "gemma3_all_scaled", seed, *everywhere, **given)


def book_jobs(size: Size, seed: int) -> Iterator[Job]:
    near = size.lengths(*NEAR)
    methods = Evaluation(near, ("pi", "ntk", "yarn", "rerope")), Evaluation(near, ("rerope",), ("plus=logn",))
    yield from_scratch(size, "books", "books-rope", seed, *methods, settings=("pos=rope", "data=books"))


def ladder_jobs(size: Size, seed: int) -> Iterator[Job]:
    near = size.lengths(*NEAR)
    methods = Evaluation(near, ("pi", "ntk", "yarn")), Evaluation(near, ("rerope",), ("plus=logn",))
    sizes = LADDER | {f"{LADDER_THIRD}-third": (*LADDER[LADDER_THIRD], f"steps={size.training.steps // 3}")}
    for name, model in sizes.items():
        run, tuned = f"ladder-{name}", Evaluation(size.lengths(4))
        yield from_scratch(size, "ladder", run, seed, *methods, settings=("pos=rope", "data=python", *model))
        further = f"ctx={4 * size.L}", "scaling=yarn", *FINETUNED
        yield from_run(size, "ladder", f"{run}-yarn-4L", seed, *further, evaluations=(tuned,), run=run)


def task_jobs(size: Size, seed: int) -> Iterator[Job]:
    lengths = tuple(n for n in size.lengths(1, 2, 4, 8) if n >= SHORTEST_TEXT)
    methods = (Evaluation(lengths, ("yarn", "ntk", "llama3")), Evaluation(lengths, ("rerope",), ("plus=logn",)))
    for task, name in itertools.product(TASKS, every_encoding()):
        evaluations = methods if name == "rope" else own_methods(name, lengths)
        job = from_scratch(size, "tasks", name, seed, *evaluations)
        yield replace(job, name=f"{task}-{job.name}", train=(*job.train, f"data={task}"), task=task)


def real_jobs(size: Size, seed: int) -> Iterator[Job]:
    def job(name: str, lengths: tuple[int, ...], *scored: str, **more: Any) -> Job:
        methods = Evaluation(lengths, ("pi", "ntk", "yarn")), Evaluation(lengths, WITH_LOGN, ("plus=logn",))
        return Job("real", name, seed, (), methods, model=REAL, scored=scored, **more)

    both = (REAL_CTX, 2 * REAL_CTX)
    for corpus, most in REAL_DOCUMENTS.items():
        documents = f"documents={min(most, size.documents)}"
        scored = f"task.scored_tokens={REAL_TOKENS}", "task.windows=1", documents, f"data={corpus}"
        found = job(f"smollm2-{corpus}", both, *scored)
        shorter = tuple(REAL_CTX // k for k in (8, 4, 2))  # of what worth is context within L
        yield replace(found, evaluations=(Evaluation((*shorter, *both)), *found.evaluations))
    scored = f"task.nearest={round(COPIED_BACK * REAL_CTX)}", f"documents={min(COPIES, size.documents)}"
    yield job("copying-smollm2", (round(COPIED_AT * REAL_CTX),), *scored, task="copying")


PLANS = {"rope": rope_jobs, "encodings": encoding_jobs, "books": book_jobs}
PLANS |= {"ladder": ladder_jobs, "tasks": task_jobs, "real": real_jobs}


def planned_jobs(plan: str, size: Size, seeds: tuple[int, ...] | None = None) -> list[Job]:
    """The jobs of a plan ordered by seed: if it is stopped, the finished ones are a study with fewer seeds.

    seeds: of all parts; None: those of each part.
    """
    found = [job for seed in seeds or range(size.seeds) for job in PLANS[plan](size, seed)]
    return found if seeds else [job for job in found if job.seed < SEEDS[job.part]]


def targets(job: Job, size: Size) -> tuple[str, ...]:
    """The settings of eval.py that say which tokens are scored."""
    if job.scored:
        return f"task={job.task}", *job.scored
    if job.task != "matched":
        return f"task={job.task}", f"documents={min(TEXTS, 3 * size.documents)}"
    windows = max(1, size.windows // (4 if job.part in FEWER_WINDOWS else 1))
    scored = f"task.scored_tokens={size.scored_tokens}", f"task.windows={windows}"
    return f"documents={size.documents}", *scored, f"task.far_windows={size.far_windows}"


def select_jobs(jobs: list[Job], only: str | None) -> list[Job]:
    """The jobs whose part or name is in `only`, a list with commas; all of them for None."""
    if not only:
        return jobs
    wanted, parts = only.split(","), dict.fromkeys(job.part for job in jobs)
    for name in wanted:
        known = name in parts or any(name == job.name for job in jobs)
        check(known, "--only", name, f"{', '.join(parts)} or a job such as {jobs[0].name}")
    return [job for job in jobs if job.part in wanted or job.name in wanted]
