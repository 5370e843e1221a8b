"""Generate text with a trained run: python sample.py prompt="'def '" scaling=ntk tokens=400

Tokens are generated one by one, with a cache of each layer's projections. At every length the logits equal those of a
full forward pass at that length, also where the scaling changes with the length (dynamic NTK): see model/decode.py. The
text goes to stdout, everything else to stderr.
"""

import codecs
import sys
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from conf.cli import command
from conf.errors import UserError
from conf.schema import SampleConfig
from data.corpus import Corpus
from engine import device as devices
from engine.run import Run, check_fits
from model import gpt
from model.decode import Decoder


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
    columns, because the vocabulary is padded to a multiple of 64 (data/tokenizer.py).
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


@command("sample")
def main(cfg: SampleConfig) -> None:
    sample(cfg)


def sample(cfg: SampleConfig) -> None:
    """Open the run, print the prompt and its continuation as it is generated, and then the speed in tokens per second.

    Generation ends after cfg.tokens tokens or at the end-of-text token. An empty prompt starts with that token, which
    separates documents in training. UserError if encoding or scaling cannot be used at the final length.
    """
    # ---- the run, and the prompt in its tokens ----
    device = devices.start(cfg.device, cfg.kernel, many_lengths=True)
    run = Run.open(cfg.run, runs=cfg.runs, cache=cfg.cache, device=device, scalings=cfg.scalings, exp=cfg.exp)
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


if __name__ == "__main__":
    main()
