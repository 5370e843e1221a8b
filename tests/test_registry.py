"""Names of the yaml files, and what is printed of a choice: the name that the user typed and what differs from it."""

import pytest
from hydra.core.hydra_config import HydraConfig

from conf import compose
from conf.errors import UserError
from conf.registry import build_from_knobs, choices, describe, load_kind, yaml_name, yaml_values
from tests.helpers import ROOT, composed, eval_settings, train_settings

PACKAGES = {"pos": "model.pos", "scaling": "model.scaling", "data": "data.corpora", "task": "measure.tasks"}
ATTRIBUTES = {"pos": "build", "scaling": "scale", "data": "documents", "task": "build"}
YAMLS = [(group, name) for group in PACKAGES for name in choices(group)]


@pytest.mark.parametrize("group, name", YAMLS)
def test_every_yaml_describes_itself_by_its_own_name(group, name):
    assert yaml_name(group, yaml_values(group, name)) == describe(group, yaml_values(group, name)) == name
    assert callable(load_kind(PACKAGES[group], yaml_values(group, name)["kind"], ATTRIBUTES[group], group))


@pytest.mark.parametrize("pos", choices("pos"))
def test_composed_settings_have_the_name_that_was_typed(pos):
    """Also where a value of the yaml is an interpolation such as ${ctx}."""
    assert describe("pos", train_settings(f"pos={pos}", "ctx=128").pos) == pos


@pytest.mark.parametrize(
    "config, overrides",
    [
        ("train", ("exp=smoke", "name=x", "steps=3")),
        ("train", ("ctx=128", "pos=learned", "data.files=docs/*.txt", "exp=smoke", "optim.lr=1e-3", "data=text")),
        ("train", ("init=a", "scaling=yarn", "scaling.beta_fast=4", "plus=[logn]", "+model.extra=1")),
        ("eval", ("run=a", "ctx=[64,128]", "task=sliding", "task.stride=3", "scaling.factor=fixed", "scaling=ntk")),
    ],
)
def test_the_fast_composition_of_the_tests_is_hydras(config, overrides):
    """Of tests/helpers.py, which applies some settings to what it has composed before."""
    want, hydra = compose.compose(config, *overrides), HydraConfig.get()
    assert composed(config, *overrides) == want
    fast = HydraConfig.get()
    assert fast is not hydra and fast.overrides.task == hydra.overrides.task == list(overrides)
    assert fast.runtime.choices == hydra.runtime.choices
    for cfg in (want, composed(config, *overrides)):
        with pytest.raises(Exception, match="stepz"):
            cfg.stepz = 3  # no new keys


def test_changed_knobs_are_described():
    assert describe("pos", train_settings("pos=rope", "pos.base=500").pos) == "rope base=500"
    assert describe("pos", train_settings("pos=rope_partial", "pos.base=500").pos) == "rope_partial base=500"
    yarn = eval_settings("scaling=yarn", "scaling.beta_fast=4.0", "scaling.factor=fixed").scaling
    assert describe("scaling", yarn) == "yarn factor=fixed beta_fast=4.0"
    assert describe("task", eval_settings("task=sliding", "task.stride=8").task) == "sliding stride=8"
    assert describe("scaling", {"kind": "deleted", "share": 1}) == "deleted"  # a run whose method is gone


def test_every_file_of_a_group_has_a_yaml():
    """A .py without a yaml could not be chosen. Files that only others import are named here."""
    shared = {"data": {"hub"}}
    for group, package in PACKAGES.items():
        files = {path.stem for path in (ROOT / package.replace(".", "/")).glob("*.py")} - {"__init__"}
        kinds = {yaml_values(group, name)["kind"] for name in choices(group)}
        assert files - kinds == shared.get(group, set())


def test_knobs_are_checked_against_the_type_hints():
    def scale(trained: object, n: int, factor: float, size: int | None = None, exact: bool = False) -> tuple:
        return trained, n, factor, size, exact

    def build(**knobs):
        return build_from_knobs(scale, {"kind": "toy", **knobs}, "scaling", None, 5)

    assert build(factor=2, size=3) == (None, 5, 2, 3, False)  # a whole number is a fine float
    for knobs, message in [
        ({}, r"scaling\.factor: must be given a value"),
        ({"factor": True}, r"scaling\.factor=True: must be of type float"),
        ({"factor": 1.0, "size": 2.5}, r"scaling\.size=2\.5: must be of type int \| None"),
        ({"factor": 1.0, "exact": 1}, r"scaling\.exact=1: must be of type bool"),
        ({"factor": 1.0, "n": 3}, r"scaling\.n=3: no such setting of scaling=toy, which has factor, size, exact"),
    ]:
        with pytest.raises(UserError, match=message):
            build(**knobs)


def test_a_kind_is_a_file_of_its_package_and_nothing_else():
    for kind in ("nothing", "../pos/rope", "__init__.py", 3, None):
        with pytest.raises(UserError, match=r"scaling\.kind=.*: no model/scaling/.*\.py that defines `scale`"):
            load_kind("model.scaling", kind, "scale")
    with pytest.raises(UserError, match=r"task\.kind=matched: no measure/tasks/matched\.py that defines `scale`"):
        load_kind("measure.tasks", "matched", "scale", "task")
