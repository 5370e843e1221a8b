"""Text that continues a prompt, token by token: for sample.py, and for the end of a training."""

from collections.abc import Iterator

import torch
from torch import Tensor

from conf.errors import UserError
from conf.schema import SampleConfig
from data.corpus import Corpus
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


def words(model: GPT, change: ContextChange, corpus: Corpus, cfg: SampleConfig, device: torch.device) -> str:
    """What sample.py would print for these settings and a run trained with `change`, as one line of printable text."""
    encoding, decoder = corpus.encoding, Decoder(model, lambda n: change)
    with torch.compiler.set_stance("force_eager"):  # no compilation for each length
        ids = [*generate(decoder, [encoding.eot_token], cfg, encoding.n_vocab, device), encoding.eot_token]
    text = b"".join(map(encoding.decode_single_token_bytes, ids[: ids.index(encoding.eot_token)])).decode(
        errors="replace"
    )
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
