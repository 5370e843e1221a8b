"""Layer schedules: models whose layers differ in encoding, base or window. Imported only for such models.

A kind of layer is a letter of the schedule (conf/layers). The angles of each kind are computed once per forward pass
and shared by its layers. A window applies in training and at every later length.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from conf.errors import UserError, check
from conf.layer_schedule import check_resolved, closest_yaml
from conf.registry import describe, yaml_name
from conf.schema import TrainConfig
from model import pos as encodings
from model.combination import combine
from model.pos import Encoding, Shape
from model.scaling import NO_CHANGE, ContextChange, NotApplicable, TrainedContext, resolve


@dataclass(frozen=True)
class Kind:
    """A kind of layer."""

    letter: str
    encoding: int  # its place in LayerSchedule.encodings
    window: int | None  # each query sees this many keys, itself included; None: all
    sinks: int  # the first keys, which every query sees in addition to the window
    scaled: bool  # whether read-time scaling applies to it


class LayerSchedule(Encoding):
    """The encodings of a model with a layer schedule, in place of a single encoding.

    Embeddings are those of the run's own encoding, pos=. Kinds of layer with equal knobs share an encoding and its
    parameters.
    """

    def __init__(self, shape: Shape, own: Encoding, cfg: TrainConfig):
        """own: the encoding of pos=. UserError for encodings that cannot be combined."""
        super().__init__(shape)
        check_resolved(cfg)
        if cfg.attention == "linear":
            raise UserError(f"attention=linear: needs layers=uniform, not layers={closest_yaml(cfg)}")
        self.encodings, self.knobs, self.kinds = nn.ModuleList([own]), [cfg.pos], []
        letters = {key: value for key, value in cfg.layers.items() if key != "pattern"}
        for letter, kind in letters.items():
            wanted = kind["pos"] or cfg.pos
            if wanted not in self.knobs:
                self.knobs.append(wanted)
                self.encodings.append(other := encodings.build(wanted, shape))
                ok = type(other).embed is Encoding.embed
                right = "an encoding that acts in the layers: only pos= can add to the embeddings"
                check(ok, f"layers.{letter}.pos", yaml_name("pos", wanted), right)
            self.kinds.append(Kind(letter, self.knobs.index(wanted), kind["window"], kind["sinks"], kind["scaled"]))
        if all(kind.encoding for kind in self.kinds):
            reason = f"no layer of layers={closest_yaml(cfg)} uses it, each kind of layer has its own pos or base"
            raise UserError(f"pos={describe('pos', cfg.pos)}: {reason}")
        self.kind_of_layer = [list(letters).index(letter) for letter in cfg.layers["pattern"]]
        parts: list[Any] = list(self.encodings)
        self.relative = all(e.relative for e in parts)
        self.max_positions = min((e.max_positions for e in parts if e.max_positions is not None), default=None)
        rates = {e.lr_factor for e in parts if any(True for _ in e.parameters())}
        check(len(rates) < 2, "pos.lr_factor", sorted(rates), "the same for all encodings of a layer schedule")
        self.lr_factor = rates.pop() if rates else 1.0
        # Of the kinds that read-time scaling applies to, for the line about the spectrum
        scaled = [f for kind in self.kinds if kind.scaled and (f := parts[kind.encoding].inv_freq) is not None]
        self.inv_freq = scaled[0] if scaled else None

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.encoding(0).embed(x, positions)

    def layer_module(self, layer: int) -> nn.Module | None:
        return self.of_layer(layer).layer_module(layer)

    def encoding(self, i: int) -> Encoding:
        encoding = self.encodings[i]
        assert isinstance(encoding, Encoding)
        return encoding

    def of_layer(self, layer: int) -> Encoding:
        """The encoding of a layer, counted from 0."""
        return self.encoding(self.kinds[self.kind_of_layer[layer]].encoding)

    def prepare_layers(
        self, n_layers: int, positions: Tensor, change: ContextChange
    ) -> list[tuple[Encoding, Any, ContextChange]]:
        assert n_layers == len(self.kind_of_layer) and (change.kinds or change.inv_freq is None)
        prepared = []
        for kind, of_kind in zip(self.kinds, change.kinds or [change] * len(self.kinds), strict=True):
            if sees_less(kind.window, of_kind):
                of_kind = replace(of_kind, window=kind.window, sinks=kind.sinks)
            encoding = self.encoding(kind.encoding)
            prepared.append((encoding, encoding.prepare(positions, of_kind), of_kind))
        return [prepared[kind] for kind in self.kind_of_layer]


def sees_less(window: int | None, change: ContextChange) -> bool:
    """Whether a layer's own window is narrower than what a change lets it see."""
    return window is not None and (change.window is None or window < change.window + change.sinks)


# ---- scaling, of each kind of layer ----


@dataclass(frozen=True)
class KindContext(TrainedContext):
    """The facts about one kind of layer that scaling methods may use."""

    window: int | None = None
    sinks: int = 0
    scaled: bool = True


def with_kinds(context: TrainedContext, schedule: Encoding, cfg: TrainConfig) -> TrainedContext:
    """The context of a run with a layer schedule, named such as rope+swan, with the contexts of its kinds of layer."""
    assert isinstance(schedule, LayerSchedule)
    name = closest_yaml(cfg)
    kinds = []
    for kind in schedule.kinds:
        pos = f"{yaml_name('pos', schedule.knobs[kind.encoding])} (layers {kind.letter} of {name})"
        frequencies = schedule.encoding(kind.encoding).inv_freq
        common = (pos, context.train_ctx, frequencies, context.attention, context.extended_ctx)
        kinds.append(KindContext(*common, window=kind.window, sinks=kind.sinks, scaled=kind.scaled))
    return replace(context, pos=f"{context.pos}+{name}", kinds=tuple(kinds))


def resolve_kinds(scalings: Sequence[dict], trained: TrainedContext, n: int, ctx: int) -> ContextChange:
    """The change by these methods, of each kind of layer (ContextChange.kinds). See model/scaling, `resolve`.

    A method that limits what queries see (window, window_sink) applies to all kinds, and a kind whose own window is
    narrower keeps it. Any other method applies to the kinds with scaled=true. Kinds that it does not fit, such as
    layers without frequencies under NTK, stay as they are; NotApplicable if it fits none.
    """
    by_method = [resolve_method(knobs, trained, n, ctx) for knobs in scalings]
    changes = [combine(of_kind) for of_kind in zip(*by_method, strict=True)]
    seen = []  # by each kind: (window, sinks)
    for kind, change in zip(trained.kinds, changes, strict=True):
        assert isinstance(kind, KindContext)
        own = sees_less(kind.window, change)
        seen.append((kind.window, kind.sinks) if own else (change.window, change.sinks))
    widest = None if any(window is None for window, _ in seen) else max(window or 0 for window, _ in seen)
    return ContextChange(
        inv_freq=next((change.inv_freq for change in changes if change.inv_freq is not None), None),
        factor=max(change.factor for change in changes),
        attention_factor=max(change.attention_factor for change in changes),
        window=widest,
        sinks=0 if widest is None else max(sinks for _, sinks in seen),
        position_map=next((change.position_map for change in changes if change.position_map is not None), None),
        kinds=tuple(changes),
    )


def resolve_method(knobs: dict, trained: TrainedContext, n: int, ctx: int) -> list[ContextChange]:
    """The change of each kind of layer by one method."""
    changes, refused, applies = [], None, False
    for kind in trained.kinds:
        assert isinstance(kind, KindContext)
        try:
            change = resolve(knobs, kind, n, ctx)
        except NotApplicable as e:
            refused, change = e, None
        if change is None or not (kind.scaled or change.window is not None):
            changes.append(NO_CHANGE)
            continue
        applies = True
        changes.append(NO_CHANGE if change.window is not None and sees_less(kind.window, change) else change)
    if applies or knobs["kind"] == "none":
        return changes
    if refused:
        raise refused
    raise NotApplicable(f"scaling={yaml_name('scaling', knobs)} is not applicable: no layer of {trained.pos} is scaled")
