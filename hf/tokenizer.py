"""Tokenizers of the tokenizers package, from the tokens of a run or a GGUF file and their ranks, merges or scores."""

from pathlib import Path
from typing import Any

import tiktoken
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from conf.errors import UserError, check
from data.tokenizer import END, byte_letters

# tokenizer.ggml.pre -> the patterns that split the text before byte-pair merges, as in llama.cpp (src/llama-vocab.cpp)
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
WORDS: dict[str, list[str]] = {
    "gpt-2": [GPT2_WORDS],
    "smollm": [r"\p{N}", GPT2_WORDS],
    "llama-bpe": [LLAMA3_WORDS],
    "qwen2": [LLAMA3_WORDS.replace("{1,3}", "")],
}
CONTROL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

Merges = list[tuple[str, str]]


def of_run(encoding: tiktoken.Encoding) -> Tokenizer:
    """Our byte-pair vocabulary: the same text has the same token ids.

    tiktoken repeatedly joins the two neighbours whose concatenation has the lowest rank. The tokenizers package has a
    list of merges instead: every split of a token into two becomes one, in the order of the tokens' ranks.
    """
    letters, ranks = byte_letters(), encoding._mergeable_ranks
    ids = {"".join(letters[b] for b in token): rank for token, rank in sorted(ranks.items(), key=lambda x: x[1])}
    merges = [pair for token in ids for pair in splits(token, ids)]
    # The id of END is the next one: encoding.eot_token
    return with_special(byte_level(ids, merges, [encoding._pat_str], ignore_merges=True), [END])


def of_gguf(path: Path, values: dict[str, Any]) -> Tokenizer:
    """The one in the metadata of a GGUF file. UserError if there is none, or one of a kind that we do not read."""
    metadata = {key.removeprefix("tokenizer.ggml."): value for key, value in values.items()}
    kind, pre = metadata.get("model"), str(metadata.get("pre"))
    check(kind in ("gpt2", "llama"), f"{path}: tokenizer.ggml.model", kind, "gpt2 or llama")
    check(kind == "llama" or pre in WORDS, f"{path}: tokenizer.ggml.pre", pre, ", ".join(WORDS))
    if not (tokens := metadata.get("tokens")) or (kind == "llama" and not metadata.get("scores")):
        raise UserError(f"{path}: tokenizer.ggml.tokens and, of model=llama, scores: must be given")
    ids = {token: i for i, token in enumerate(tokens)}
    types = zip(tokens, metadata.get("token_type") or [], strict=False)
    special = [token for token, token_type in types if token_type in (CONTROL, USER_DEFINED)]
    if kind == "llama":
        unknown, space = tokens[metadata.get("unknown_token_id", 0)], metadata.get("add_space_prefix", True)
        return with_special(sentencepiece(ids, metadata["scores"], unknown, space), special)
    merges = [(a, b) for a, _, b in (merge.partition(" ") for merge in metadata.get("merges", []))]
    tokenizer = byte_level(ids, merges, WORDS[pre], ignore_merges=pre == "llama-bpe")
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return with_special(tokenizer, special)


def with_special(tokenizer: Tokenizer, special: list[str]) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return tokenizer


def splits(token: str, ids: dict[str, int]) -> Merges:
    """Every way to split a token into two tokens."""
    pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
    return [(a, b) for a, b in pairs if a in ids and b in ids]


def byte_level(ids: dict[str, int], merges: Merges, words: list[str], ignore_merges: bool) -> Tokenizer:
    """GPT-2's kind: text is split into words by patterns, one after another, and the bytes of a word are merged.

    ignore_merges: a word that is a token becomes this token, even if no merges lead to it.
    """
    tokenizer = Tokenizer(models.BPE(ids, merges, ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = split_words(words), decoders.ByteLevel()
    return tokenizer


def split_words(words: list[str]) -> pre_tokenizers.PreTokenizer:
    patterns = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in words]
    return pre_tokenizers.Sequence([*patterns, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def sentencepiece(ids: dict[str, int], scores: list[float], unknown: str, space: bool) -> Tokenizer:
    """SentencePiece's kind: ▁ stands for a space, and the pairs that make the tokens of the highest scores are merged.

    space: whether one is put before the text. SentencePiece has no list of merges: every split of a token becomes one.
    """
    merges: Merges = []
    for token in sorted(ids, key=lambda token: -scores[ids[token]]):
        merges += sorted(splits(token, ids), key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token=unknown, byte_fallback=True, fuse_unk=True))
    begin, end = ([normalizers.Prepend("▁")], [decoders.Strip(" ", 1, 0)]) if space else ([], [])
    tokenizer.normalizer = normalizers.Sequence([*begin, normalizers.Replace(" ", "▁")])
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, *end])
    return tokenizer
