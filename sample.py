"""Generate text with a trained run: python sample.py prompt="def " scaling=ntk tokens=400

Token by token, with a cache. At every length the next token is that of a full forward pass at that length, also where
the scaling changes with the length (dynamic NTK): see model/decode.py.
"""

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

from conf.eval_schema import TrainedRunConfig
from conf.hydra_patches import exp_selects_runs, run_main, sweep_job
from conf.registry import ROOT, describe
from conf.schema import at_least, check_rules, name_list, one_of, to_object
from data.corpus import Corpus
from engine import device as devices
from engine.run import Run, check_fits
from model.decode import Decoder


@dataclass
class SampleConfig(TrainedRunConfig):
    prompt: str = ""
    tokens: Annotated[int, at_least(1)] = MISSING
    temperature: Annotated[float, at_least(0)] = MISSING  # 0 takes the likeliest token
    top_k: Annotated[int | None, at_least(1)] = None
    seed: Annotated[int, at_least(0)] = 0
    decode: Annotated[str, one_of("exact", "rebased")] = "exact"


ConfigStore.instance().store(name="sample_schema", node=SampleConfig)


def sample_config(cfg: DictConfig) -> SampleConfig:
    """The checked settings. UserError names the first wrong one."""
    c: SampleConfig = to_object(cfg, SampleConfig)
    check_rules(c)
    c.plus = name_list(c.plus, "plus", "scaling")
    return c


def draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """One token from logits [V]: among the top_k likeliest, at that temperature; temperature 0 takes the likeliest."""
    if temperature == 0:
        return int(logits.argmax())
    best, tokens = logits.float().topk(min(top_k or len(logits), len(logits)))
    return int(tokens[torch.multinomial((best / temperature).softmax(-1), 1, generator=generator)])


def generate(
    decoder: Decoder, start: list[int], cfg: SampleConfig, n_vocab: int, device: torch.device
) -> Iterator[int]:
    """cfg.tokens tokens after start, one by one; the same for the same seed."""
    generator = torch.Generator().manual_seed(cfg.seed)
    text = torch.tensor([start], device=device)  # [1, n]
    for _ in range(cfg.tokens):
        with devices.autocast(device, cfg.dtype):
            logits = decoder.logits(text)[0, :n_vocab].float().cpu()  # without the padding of the vocabulary
        token = draw(logits, cfg.temperature, cfg.top_k, generator)
        yield token
        text = torch.cat((text, text.new_tensor([[token]])), dim=1)


@hydra.main(version_base="1.3", config_path=str(ROOT / "conf"), config_name="sample")
@sweep_job
def main(hydra_cfg: DictConfig) -> None:
    sample(sample_config(hydra_cfg))


def sample(cfg: SampleConfig) -> None:
    # ---- the run, and the prompt in its tokens ----
    device = devices.start(cfg.device, cfg.kernel)
    run = Run.open(cfg.run, runs=cfg.runs, cache=cfg.cache, device=device, scalings=cfg.scalings, exp=cfg.trained_with)
    assert isinstance(run.corpus, Corpus)  # our own runs have one
    encoding = run.corpus.encoding
    start = encoding.encode_ordinary(cfg.prompt) or [encoding.eot_token]
    longest = len(start) + cfg.tokens
    check_fits(run.cfg, run.model.pos, longest, cfg.scalings)
    pos = describe("pos", run.cfg.pos)
    print(f"run: {run.name} ({run.reason}): pos={pos}, trained at ctx {run.cfg.ctx}", file=sys.stderr)

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

    Unquoted, Hydra would drop its outer spaces and interpret its brackets and ${}.
    """
    if not argument.startswith("prompt="):
        return argument
    text = argument[7:].replace("${", "\\${")  # no interpolation
    # Backslashes count as themselves unless a quote follows, so only those are doubled
    return "prompt='" + re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text) + "'"


if __name__ == "__main__":
    run_main(main, exp_selects_runs, quote_prompt)
