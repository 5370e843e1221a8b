"""The encodings of models whose layers differ in encoding, base or window: conf/layer_schedule.py has their settings.

The angles of each type of layer are computed once per forward pass and shared by its layers. A window applies in
training and at every later length.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from conf.errors import UserError, check
from conf.layer_schedule import LayerSchedule
from conf.registry import describe, yaml_name
from model import pos as encodings
from model.pos import Encoding, Shape
from model.scaling import ContextChange, TrainedContext, with_own_window


class ScheduledEncodings(Encoding):
    """The encodings of a model with a layer schedule, in place of a single encoding.

    Embeddings are those of the run's own encoding, pos=. Types of layer with equal knobs share an encoding and its
    parameters.
    """

    encodings: Any  # a ModuleList of Encoding

    def __init__(self, shape: Shape, own: Encoding, pos: dict[str, Any], schedule: LayerSchedule):
        """own: the encoding of pos=, whose knobs are `pos`."""
        super().__init__(shape)
        self.encodings, self.knobs, self.schedule = nn.ModuleList([own]), [pos], schedule
        self.of_type: dict[str, int] = {}  # letter -> place in `encodings`
        for letter, layer_type in schedule.types.items():
            wanted = layer_type.pos or pos
            if wanted not in self.knobs:
                self.knobs.append(wanted)
                self.encodings.append(other := encodings.build(wanted, shape))
                ok = type(other).embed is Encoding.embed
                right = "an encoding that acts in the layers: only pos= can add to the embeddings"
                check(ok, f"layers.{letter}.pos", yaml_name("pos", wanted), right)
            self.of_type[letter] = self.knobs.index(wanted)
        if 0 not in self.of_type.values():
            reason = f"no layer of layers={schedule.name} uses it, each type of layer has its own pos or base"
            raise UserError(f"pos={describe('pos', pos)}: {reason}")
        parts: list[Any] = list(self.encodings)
        self.max_positions = min((e.max_positions for e in parts if e.max_positions is not None), default=None)
        rates = {e.lr_factor for e in parts if list(e.parameters())}
        check(len(rates) < 2, "pos.lr_factor", sorted(rates), "the same for all encodings of a layer schedule")
        self.lr_factor, self.lr_scale = rates.pop() if rates else 1.0, min(e.lr_scale for e in parts)
        # Of the types that read-time scaling applies to, for the line about the spectrum
        scaled = [self.encoding(x).inv_freq for x, layer_type in schedule.types.items() if layer_type.scaled]
        self.inv_freq = next((inv_freq for inv_freq in scaled if inv_freq is not None), None)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.encodings[0].embed(x, positions)

    def layer_module(self, layer: int) -> nn.Module | None:
        return self.encoding(self.schedule.pattern[layer]).layer_module(layer)

    def encoding(self, letter: str) -> Encoding:
        """The encoding of a type of layer."""
        return self.encodings[self.of_type[letter]]

    def prepare_layers(
        self, n_layers: int, positions: Tensor, change: ContextChange
    ) -> list[tuple[Encoding, Any, ContextChange]]:
        types, pattern = self.schedule.types, self.schedule.pattern
        assert n_layers == len(pattern) and (change.by_type or change.inv_freq is None)
        prepared = {}
        for (letter, own), its_change in zip(types.items(), change.by_type or [change] * len(types), strict=True):
            its_change, encoding = with_own_window(own, its_change), self.encoding(letter)
            prepared[letter] = encoding, encoding.prepare(positions, its_change), its_change
        return [prepared[letter] for letter in pattern]

    def with_types(self, context: TrainedContext) -> TrainedContext:
        """The context of a run with this schedule, named such as rope+swan, with the contexts of its types of layer."""
        name, by_type = self.schedule.name, []
        for letter, layer_type in self.schedule.types.items():
            pos = f"{yaml_name('pos', self.knobs[self.of_type[letter]])} (layers {letter} of {name})"
            by_type.append(replace(context, pos=pos, frequencies=self.encoding(letter).inv_freq, layer_type=layer_type))
        return replace(context, pos=f"{context.pos}+{name}", by_type=tuple(by_type))
