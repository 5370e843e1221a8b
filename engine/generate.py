"""Text that continues a prompt, token by token: for sample.py, and for the end of a training."""

from collections.abc import Iterator

import torch
from torch import Tensor

from conf.errors import ensure
from conf.schema import SampleConfig
from data.tokenizer import AnyTokenizer
from engine import device as devices
from model.decode import Decoder
from model.gpt import GPT
from model.scaling import ContextChange


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
    decoder: Decoder, start: list[int], cfg: SampleConfig, encoding: AnyTokenizer, device: torch.device
) -> Iterator[int]:
    """Yield at most cfg.tokens token ids that continue `start`, one by one; the same ids for the same seed.

    Ends before the end-of-text token. start: the ids of the prompt; without any it is that token, which separates
    documents in training.
    """
    generator = torch.Generator().manual_seed(cfg.seed)
    text = torch.tensor([start or [encoding.eot_token]], device=device)  # [1, n]
    for _ in range(cfg.tokens):
        with devices.autocast(device, cfg.dtype):
            # The vocabulary of the model is padded to a multiple of 64 (data/tokenizer.py)
            logits = decoder.logits(text)[0, : encoding.n_vocab].float().cpu()
        ensure(logits.isfinite().all(), f"the logits after {text.shape[1]} tokens are not finite (NaN or Inf)")
        token = draw(logits, cfg.temperature, cfg.top_k, generator)
        if token == encoding.eot_token:
            return
        yield token
        text = torch.cat((text, text.new_tensor([[token]])), dim=1)


def words(model: GPT, change: ContextChange, encoding: AnyTokenizer, cfg: SampleConfig, device: torch.device) -> str:
    """What sample.py would print for these settings and a run trained with `change`, as one line of printable text."""
    with torch.compiler.set_stance("force_eager"):  # no compilation for each length
        ids = list(generate(Decoder(model, lambda n: change), [], cfg, encoding, device))
    text = b"".join(map(encoding.decode_single_token_bytes, ids)).decode(errors="replace")
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
