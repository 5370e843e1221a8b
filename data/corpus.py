"""A prepared corpus: tokens of the training documents and of the held-out ones, with the tokenizer.

A corpus is prepared once, as files under .cache/ that are memory-mapped from then on. The name of their folder contains
a hash of everything that determines their content: the text, the tokenizer and the number of held-out documents.

    train.bin                       the training stream, uint16 or uint32, with END after every document
    val.bin                         the held-out documents one after another, the longest first
    copied.bin                      for each token of val.bin, whether it repeats training text: data/held_out.py
    ranks.tiktoken, pattern.txt     the tokenizer; none where it is a tokenizer.json, of a user or a foreign checkpoint
    meta.json                       dtype, names and lengths of the held-out documents
"""

import hashlib
import json
import shutil
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from conf.errors import check, ensure, file_errors
from conf.registry import build_from_knobs, load_kind, yaml_name
from data import tokenizer
from data.held_out import Document, HeldOut, find_copies
from data.tokenizer import NAMES_OF_END, CheckpointTokenizer

FORMAT = 1  # version of the files; raise it when their format changes
TOKENIZER_SETTINGS = ("tokenizer", "vocab_size", "holdout")  # keys of every yaml of conf/data; the others are knobs
DOCUMENTS_AT_ONCE = 1024  # tokenised together: in Python's lists tokens take 10 times the memory of those in the file


@dataclass(frozen=True)
class Corpus(HeldOut):
    """A prepared corpus: in addition to the held-out documents the training stream.

    train: an integer array [N], all training documents one after another with END after each.
    """

    train: np.ndarray  # memory-mapped


def prepare(cfg: dict, cache: str, tokenizer_json: str | None = None) -> Corpus:
    """The corpus of these settings (a yaml of conf/data), from the folder `cache` or else built now and stored there.

    tokenizer_json: the content of that file, with data.tokenizer=checkpoint, or of a run with a tokenizer of the user's
    own, whose file need not be there any more. UserError if the text cannot be read or the
    cache cannot be written.
    """
    kind = "own" if cfg["tokenizer"].endswith(".json") else cfg["tokenizer"]
    shaping = {name: cfg[name] for name in TOKENIZER_SETTINGS} | {"tokenizer": kind}
    shaping |= {"format": FORMAT, "corpus": call_corpus(cfg, "fingerprint")}
    if kind not in ("bpe", "checkpoint"):  # the other vocabularies have a fixed size
        shaping["vocab_size"] = None
    if kind == "own" and not tokenizer_json:
        with file_errors(f"data.tokenizer={cfg['tokenizer']}"):
            tokenizer_json = Path(cfg["tokenizer"]).expanduser().read_text(encoding="utf-8", errors="replace")
    given = None
    if tokenizer_json:
        given = CheckpointTokenizer(tokenizer_json, None if kind == "own" else cfg["vocab_size"])
        shaping["tokenizer_json"] = hashlib.sha256(tokenizer_json.encode()).hexdigest()
    key = hashlib.sha256(json.dumps(shaping, sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(cache) / f"{cfg['kind']}-{kind}-{key}"
    with file_errors(f"cache={cache}: {folder.name}"):
        if not folder.exists():
            build(folder, cfg, given)
        return open_prepared(folder, key, given or tokenizer.load(kind, folder))


def call_corpus(cfg: dict, function: str) -> Any:
    """Call `fingerprint` or `documents` of the corpus that cfg names with its knobs; the documents as a list.

    An OSError while the files are read becomes a UserError that names the corpus.
    """
    knobs = {k: v for k, v in cfg.items() if k not in TOKENIZER_SETTINGS}
    with file_errors(f"data={yaml_name('data', cfg)}"):
        result = build_from_knobs(load_kind("data.corpora", cfg["kind"], function, "data"), knobs, "data")
        return result if isinstance(result, dict) else list(result)  # reads the files


def open_prepared(folder: Path, key: str, encoding: tokenizer.AnyTokenizer) -> Corpus:
    """The corpus in a folder that `build` wrote."""
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    dtype = np.dtype(meta["dtype"])
    train, val = (np.memmap(folder / name, dtype=dtype, mode="r") for name in ("train.bin", "val.bin"))
    copied = np.fromfile(folder / "copied.bin", dtype=bool)
    names, lengths = zip(*meta["held_out"], strict=True)
    ends = np.cumsum(lengths)[:-1]
    held_out = [Document(*x) for x in zip(names, np.split(val, ends), np.split(copied, ends), strict=True)]
    sizes = tokenizer.token_bytes(encoding)
    return Corpus(key, len(sizes), held_out, sizes, encoding, train)


# ---- preparing ----


def build(folder: Path, cfg: dict, given: CheckpointTokenizer | None) -> None:
    """Write the corpus of cfg (a yaml of conf/data) to a new folder. given: its tokenizer, None for one of ours.

    One process at a time does so; the others wait and use its folder.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / ".lock"):
        if folder.exists():
            return
        with new_folder(folder) as temporary:
            _write(temporary, cfg, call_corpus(cfg, "documents"), given)


@contextmanager
def new_folder(folder: Path) -> Generator[Path]:
    """Context manager: a temporary folder that is renamed in the end, so that no reader ever sees an incomplete one.

    What a killed process left there is removed, and what an error leaves, so that a full disk is not kept full.
    """
    temporary = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def split(documents: list[tuple[str, str]], holdout: int) -> tuple[list, list]:
    """Split (name, text) pairs into (training documents, held-out documents); no document is cut.

    In the order of decreasing length, every third document is held out, until there are `holdout`. So many held-out
    documents are long enough for long contexts, and the training documents have similar lengths and content.
    """
    longest_first = sorted(documents, key=lambda d: (-len(d[1]), d[0]))
    held_out = longest_first[0::3][:holdout]
    names = {name for name, _ in held_out}
    return [d for d in documents if d[0] not in names], held_out


def held_out_texts(cfg: dict) -> list[tuple[str, str]]:
    """(name, text) of the documents that the corpus of cfg holds out."""
    return split(call_corpus(cfg, "documents"), cfg["holdout"])[1]


def _write(folder: Path, cfg: dict, documents: list[tuple[str, str]], given: CheckpointTokenizer | None) -> None:
    """Split and tokenise the documents and write the files of the corpus."""
    train, held_out = split(documents, cfg["holdout"])
    few = f"data: {len(documents)} documents with text: at least 2 are needed, as some are held out"
    ensure(train and held_out, few)
    encoding = given or tokenizer.train(cfg["tokenizer"], cfg["vocab_size"], (text for _, text in train))
    if isinstance(encoding, CheckpointTokenizer):
        check_tokenizer(encoding, cfg["tokenizer"], held_out)
    else:
        tokenizer.save(encoding, folder)
    dtype = np.dtype(np.uint16 if encoding.n_vocab <= 2**16 else np.uint32)
    with (folder / "train.bin").open("wb") as f:
        for start in range(0, len(train), DOCUMENTS_AT_ONCE):
            texts = [text for _, text in train[start : start + DOCUMENTS_AT_ONCE]]
            for tokens in encoding.encode_ordinary_batch(texts):
                f.write(np.array([*tokens, encoding.eot_token], dtype=dtype).tobytes())
    held_out_tokens = [np.array(t, dtype=dtype) for t in encoding.encode_ordinary_batch([text for _, text in held_out])]
    val = np.concatenate(held_out_tokens)
    val.tofile(folder / "val.bin")
    stream = np.memmap(folder / "train.bin", dtype=dtype, mode="r")
    np.concatenate(find_copies(stream, held_out_tokens)).tofile(folder / "copied.bin")
    lengths = [[name, len(tokens)] for (name, _), tokens in zip(held_out, held_out_tokens, strict=True)]
    meta = json.dumps({"dtype": dtype.name, "held_out": lengths}, indent=1)
    (folder / "meta.json").write_text(meta, encoding="utf-8")
    counts = f"{len(train)} training documents ({len(stream):,} tokens), {len(held_out)} held out ({len(val):,} tokens)"
    print(f"data: {counts}, vocabulary {encoding.n_vocab}", file=sys.stderr)


def check_tokenizer(encoding: CheckpointTokenizer, setting: str, held_out: list[tuple[str, str]]) -> None:
    """UserError if a tokenizer.json does not fit these (name, text) pairs. setting: data.tokenizer."""
    ensure(encoding.eot_token >= 0, f"the tokenizer has none of {', '.join(NAMES_OF_END)} to end a document with")
    sizes = tokenizer.token_bytes(encoding)
    for name, text in held_out:
        ids = encoding.encode_ordinary(text)
        right = f"a tokenizer that decodes to the text it has encoded, as byte-level ones do: {name} comes back changed"
        check(setting == "checkpoint" or encoding.decode(ids) == text, "data.tokenizer", setting, right)
        encoding.check(name, text, ids, sizes)
