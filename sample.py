"""Generate text with a trained run: python sample.py prompt="'def '" scaling=ntk tokens=400

Tokens are generated one by one, with a cache of each layer's projections. At every length the logits equal those of a
full forward pass at that length, also where the scaling changes with the length (dynamic NTK): see model/decode.py. The
text goes to stdout, everything else to stderr.
"""

import codecs
import sys
import time

from conf.cli import command
from conf.schema import SampleConfig
from engine import device as devices
from engine.generate import generate
from engine.run import Run, check_fits
from model.decode import Decoder


def sample(cfg: SampleConfig) -> None:
    """Open the run, print the prompt and its continuation as it is generated, and then the speed in tokens per second.

    Generation ends after cfg.tokens tokens or at the end-of-text token. An empty prompt starts with that token, which
    separates documents in training. UserError if encoding or scaling cannot be used at the final length.
    """
    # ---- the run, and the prompt in its tokens ----
    device = devices.start(cfg.device, cfg.kernel, many_lengths=True)
    run = Run.open(cfg, device)
    encoding = run.corpus.encoding
    start = encoding.encode_ordinary(cfg.prompt)
    longest = max(1, len(start)) + cfg.tokens
    check_fits(run.cfg, run.model.pos, longest, cfg.scalings)
    print(run.describe(), file=sys.stderr)

    # ---- generate: each token is printed as it comes ----
    decoder = Decoder(run.model, lambda n: run.change(cfg.scalings, n, longest))
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")  # a token can end in the middle of a character
    began, count = time.monotonic(), 0
    print(cfg.prompt, end="", flush=True)
    try:
        for token in generate(decoder, start, cfg, encoding, device):
            print(utf8.decode(encoding.decode_single_token_bytes(token)), end="", flush=True)
            count += 1
    finally:
        print(flush=True)
    speed = count / (time.monotonic() - began)
    print(f"{count} tokens, {speed:.0f} tokens/s, {len(start) + count} tokens in all", file=sys.stderr)


main = command("sample", sample)

if __name__ == "__main__":
    main()
