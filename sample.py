"""Let a trained run write: python sample.py prompt="def " scaling=ntk tokens=400

Token by token, with a cache of what was read. At every length the next token is that of a full forward at that length,
also where the scaling changes with it (dynamic NTK): see `Decoder`.
"""

import codecs
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig
from torch import Tensor

import eval as evaluation
import kernels
from conf.errors import entry, one_line_errors
from conf.registry import ROOT, usual
from conf.schema import SampleConfig, sample_config
from data import tokens
from model import checkpoint, gpt, runtime, scaling
from model.attention import Cache


class Decoder:
    """The logits after a text that grows, each token read once where that is exact.

    A method whose frequencies change with the length changes what every layer but the first has made of all earlier
    tokens. decode=exact then reads the text afresh, so that each step equals a full forward. decode=rebased keeps what
    was made and only turns the earlier keys to the new frequencies: exact for one layer, close for more, and as fast as
    a static method. (Caching turned keys, as Hugging Face does, is neither: transformers#25104.)
    """

    def __init__(self, model: gpt.GPT, resolve, decode: str = "exact"):
        """resolve: a length -> Scaled."""
        self.model, self.resolve, self.decode = model, resolve, decode
        self.cache, self.scaled = Cache(), None

    @torch.inference_mode()
    def logits(self, text: Tensor) -> Tensor:
        """Of the token after text [B, n], [B, V]. text: that of the last call, and at least one token more."""
        scaled = self.resolve(text.shape[1])
        stale = self.scaled is not None and not scaling.same(scaled, self.scaled)
        if stale and self.decode == "exact":
            self.cache = Cache()
        self.scaled = scaled
        return self.model.scores(text[:, self.cache.tokens :], 1, scaled, self.cache)[:, 0]


def draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """One token from logits [V]: of the top_k likeliest, at that temperature; 0 takes the likeliest."""
    if temperature == 0:
        return int(logits.argmax())
    best, which = logits.float().topk(min(top_k or len(logits), len(logits)))
    return int(which[torch.multinomial((best / temperature).softmax(-1), 1, generator=generator)])


def generate(
    decoder: Decoder, start: list[int], cfg: SampleConfig, n_vocab: int, device: torch.device
) -> Iterator[int]:
    """cfg.tokens tokens after start, one by one; the same for the same seed."""
    generator = torch.Generator().manual_seed(cfg.seed)
    text = torch.tensor([start], device=device)
    for _ in range(cfg.tokens):
        with runtime.autocast(device, cfg.dtype):
            logits = decoder.logits(text)[0, :n_vocab].float().cpu()  # the padded end of the vocabulary never occurs
        token = draw(logits, cfg.temperature, cfg.top_k, generator)
        yield token
        text = torch.cat((text, text.new_tensor([[token]])), dim=1)


def verbatim(text: str) -> str:
    """text as a quoted string of Hydra's grammar, which would take off its spaces and read its brackets and ${}."""
    return "'" + re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text.replace("${", "\\${")) + "'"


@hydra.main(version_base="1.3", config_path=str(ROOT / "conf"), config_name="sample")
@one_line_errors
def main(hydra_cfg: DictConfig) -> None:
    cfg = sample_config(hydra_cfg)
    name, why = evaluation.choose(cfg, 1)
    device = runtime.pick_device(cfg.device)
    kernels.choose(cfg.kernel, device)
    state = checkpoint.load(Path(cfg.runs) / name, device)
    train = state["cfg"]
    corpus = tokens.prepare(train.data, cfg.cache)
    if corpus.key != state["corpus"]:
        raise ValueError(
            f"run={name}: its corpus, and its tokens with it, has changed since it was trained: train again"
        )
    model = gpt.build(train, corpus.vocab_size).to(device).eval()
    model.load_state_dict(state["model"])
    trained, own = gpt.trained(train, model.pos), gpt.own_scaling(train, model.pos)
    start = corpus.encoding.encode_ordinary(cfg.prompt) or [corpus.encoding.eot_token]
    longest = len(start) + cfg.tokens
    evaluation.fits(cfg, train, longest)
    print(f"run: {name} ({why}): pos={train.pos['kind']}, trained at ctx {train.ctx}", file=sys.stderr)

    knobs = [usual("scaling", k) for k in cfg.plus]
    resolve = lambda n: scaling.on_top(own, scaling.resolve(cfg.scaling, trained, n, longest, knobs))  # noqa: E731
    decoder, text = Decoder(model, resolve, cfg.decode), codecs.getincrementaldecoder("utf-8")("replace")
    began, count = time.monotonic(), 0
    print(cfg.prompt, end="", flush=True)
    try:
        for token in generate(decoder, start, cfg, corpus.encoding.n_vocab, device):
            if token == corpus.encoding.eot_token:
                break
            print(text.decode(corpus.encoding.decode_single_token_bytes(token)), end="", flush=True)
            count += 1
    finally:
        print(flush=True)
    speed = count / (time.monotonic() - began)
    print(f"{count} tokens, {speed:.0f} tokens/s, {len(start) + count} tokens in all", file=sys.stderr)


if __name__ == "__main__":
    sys.argv[1:] = [f"trained_with={a[4:]}" if a.startswith("exp=") else a for a in sys.argv[1:]]
    sys.argv[1:] = [f"prompt={verbatim(a[7:])}" if a.startswith("prompt=") else a for a in sys.argv[1:]]
    entry(main)
