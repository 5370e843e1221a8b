"""Generate text with a trained run: python sample.py prompt="def " scaling=ntk tokens=400

Tokens are generated one by one, with a cache of each layer's projections. At every length the logits equal those of a
full forward pass at that length, also where the scaling changes with the length (dynamic NTK): see model/decode.py. The
text goes to stdout, everything else to stderr.
"""

if __name__ == "__main__":  # before the imports: torch takes seconds
    from conf.command_line import answer_early

    answer_early("sample")


import codecs
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import hydra
import torch
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig
from torch import Tensor

from conf.errors import UserError
from conf.eval_schema import TrainedRunConfig
from conf.hydra_patches import exp_selects_runs, run_main, sweep_job
from conf.registry import ROOT
from conf.schema import SEED, Rule, at_least, check_rules, name_list, one_of, to_object
from data.corpus import Corpus
from engine import device as devices
from engine.run import Run, check_fits
from model import gpt
from model.decode import Decoder

TEMPERATURE = Rule(lambda x: x == 0 or x >= 0.001, "0 or at least 0.001")  # logits are divided by it, in float32


@dataclass
class SampleConfig(TrainedRunConfig):
    """The settings of sample.py; their meaning is documented in conf/sample.yaml."""

    prompt: str = ""
    tokens: Annotated[int, at_least(1)] = MISSING
    temperature: Annotated[float, TEMPERATURE] = MISSING  # 0 takes the likeliest token
    top_k: Annotated[int | None, at_least(1)] = None
    seed: Annotated[int, SEED] = 0
    decode: Annotated[str, one_of("exact", "rebased")] = "exact"


ConfigStore.instance().store(name="sample_schema", node=SampleConfig)


def sample_config(cfg: DictConfig) -> SampleConfig:
    """The checked settings. UserError names the first wrong one."""
    c: SampleConfig = to_object(cfg, SampleConfig)
    check_rules(c)
    c.plus = name_list(c.plus, "plus", "scaling")
    return c


def draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """Draw one token id from logits [V].

    Only the top_k most likely tokens can be drawn (None: all), with probabilities softmax(logits / temperature).
    temperature 0: the most likely token. generator: a CPU generator, so that a seed gives the same text on any device.
    """
    if temperature == 0:
        return int(logits.argmax())
    best, tokens = logits.float().topk(min(top_k or len(logits), len(logits)))
    return int(tokens[torch.multinomial((best / temperature).softmax(-1), 1, generator=generator)])


def generate(
    decoder: Decoder, start: list[int], cfg: SampleConfig, n_vocab: int, device: torch.device
) -> Iterator[int]:
    """Yield cfg.tokens token ids that continue `start`, one by one; the same ids for the same seed.

    start: the ids of the prompt, at least one. n_vocab: the number of real tokens; the model's logits have more
    columns, because the vocabulary is padded to a multiple of 64 (data/corpus.py).
    """
    generator = torch.Generator().manual_seed(cfg.seed)
    text = torch.tensor([start], device=device)  # [1, n]
    for _ in range(cfg.tokens):
        with devices.autocast(device, cfg.dtype):
            logits = decoder.logits(text)[0, :n_vocab].float().cpu()  # without the padding of the vocabulary
        if not logits.isfinite().all():
            raise UserError(f"the logits after {text.shape[1]} tokens are not finite (NaN or Inf)")
        token = draw(logits, cfg.temperature, cfg.top_k, generator)
        yield token
        text = torch.cat((text, text.new_tensor([[token]])), dim=1)


@hydra.main(version_base="1.3", config_path=str(ROOT / "conf"), config_name="sample")
@sweep_job
def main(hydra_cfg: DictConfig) -> None:
    sample(sample_config(hydra_cfg))


def sample(cfg: SampleConfig) -> None:
    """Open the run, print the prompt and its continuation as it is generated, and then the speed in tokens per second.

    Generation ends after cfg.tokens tokens or at the end-of-text token. An empty prompt starts with that token, which
    separates documents in training. UserError if encoding or scaling cannot be used at the final length.
    """
    # ---- the run, and the prompt in its tokens ----
    device = devices.start(cfg.device, cfg.kernel, many_lengths=True)
    run = Run.open(cfg.run, runs=cfg.runs, cache=cfg.cache, device=device, scalings=cfg.scalings, exp=cfg.trained_with)
    assert isinstance(run.corpus, Corpus)  # our own runs have one
    encoding = run.corpus.encoding
    start = encoding.encode_ordinary(cfg.prompt) or [encoding.eot_token]
    longest = len(start) + cfg.tokens
    check_fits(run.cfg, run.model.pos, longest, cfg.scalings)
    encoding_text = gpt.describe_encoding(run.cfg)
    print(f"run: {run.name} ({run.reason}): {encoding_text}, trained at ctx {run.cfg.ctx}", file=sys.stderr)

    # ---- generate: each token is printed as it comes ----
    decoder = Decoder(run.model, lambda n: run.change(cfg.scalings, n, longest), cfg.decode)
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")  # a token can end in the middle of a character
    began, count = time.monotonic(), 0
    print(cfg.prompt, end="", flush=True)
    try:
        for token in generate(decoder, start, cfg, encoding.n_vocab, device):
            if token == encoding.eot_token:
                break
            print(utf8.decode(encoding.decode_single_token_bytes(token)), end="", flush=True)
            count += 1
    finally:
        print(flush=True)
    speed = count / (time.monotonic() - began)
    print(f"{count} tokens, {speed:.0f} tokens/s, {len(start) + count} tokens in all", file=sys.stderr)


def quote_prompt(argument: str) -> str:
    """prompt=TEXT -> prompt='TEXT', a quoted string of Hydra's grammar whose value is exactly TEXT.

    Without quotes, Hydra would remove spaces at both ends and interpret brackets, commas and ${}. Other arguments are
    returned unchanged.
    """
    if not argument.startswith("prompt="):
        return argument
    text = argument[7:].replace("${", "\\${")  # no interpolation
    # In Hydra's grammar a backslash is an escape only before a quote (or at the end), so only these are doubled
    return "prompt='" + re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text) + "'"


if __name__ == "__main__":
    run_main(main, exp_selects_runs, quote_prompt)
