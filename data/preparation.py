"""Preparing a corpus: split the documents, train the tokenizer, write the files that data/corpus.py opens."""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

from conf.errors import UserError
from conf.failures import reason
from conf.files import locked
from data import tokenizer_training
from data.checkpoint_tokenizer import NAMES_OF_END, CheckpointTokenizer
from data.corpus import DAMAGE, call_corpus, checksum, open_prepared, sha256
from data.near_copies import find_copies

DOCUMENTS_AT_ONCE = 1024  # tokenised together: in Python's lists tokens take 10 times the memory of those in the file


def build(folder: Path, key: str, cfg: dict, tokenizer_json: str | None) -> None:
    """Write the corpus of cfg (a yaml of conf/data) to `folder`, unless it is there. UserError if it cannot be written.

    key: of the corpus. tokenizer_json: the content of that file, with data.tokenizer=checkpoint.

    Built in a temporary folder and renamed, so that a killed process or a full disk leaves no incomplete folder. Other
    processes wait meanwhile; what killed ones have left is removed.
    """
    documents = call_corpus(cfg, "documents")  # (name, text)
    try:
        with locked(folder.with_name(f"{folder.name}.lock"), wait=True):
            for leftover in folder.parent.glob(f"{folder.name}.*"):
                if leftover.suffix != ".lock":
                    shutil.rmtree(leftover, ignore_errors=True)
            if folder.exists():
                try:
                    open_prepared(folder, key, cfg["tokenizer"])
                    return  # another process has prepared it
                except (FileNotFoundError, *DAMAGE) as e:
                    print(f"cache: {folder} is damaged ({e}): preparing it again", file=sys.stderr)
                    shutil.rmtree(folder, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as temporary:
                _write(Path(temporary, "corpus"), cfg, documents, tokenizer_json)
                Path(temporary, "corpus").rename(folder)
    except OSError as e:
        raise UserError(f"cache={folder.parent}: cannot write {folder}: {reason(e)}") from None


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


def _write(folder: Path, cfg: dict, documents: list[tuple[str, str]], tokenizer_json: str | None) -> None:
    """Split and tokenise the documents and write the files of the corpus to a new folder."""
    train, held_out = split(documents, cfg["holdout"])
    if not train or not held_out:
        n = len(documents)
        raise UserError(f"data: {n} documents with text: at least 2 are needed, as whole ones are held out")
    if tokenizer_json:
        encoding = CheckpointTokenizer(tokenizer_json, cfg["vocab_size"])
        if encoding.eot_token < 0:
            raise UserError(f"the tokenizer has none of the tokens {', '.join(NAMES_OF_END)} to end a document with")
        sizes = encoding.token_bytes()
        for name, text in held_out:
            encoding.check(name, text, encoding.encode_ordinary(text), sizes)
    else:
        encoding = tokenizer_training.build(cfg["tokenizer"], cfg["vocab_size"], (text for _, text in train))
    dtype = np.dtype(np.uint16 if encoding.n_vocab <= 2**16 else np.uint32)
    folder.mkdir()
    with (folder / "train.bin").open("wb") as f:
        for start in range(0, len(train), DOCUMENTS_AT_ONCE):
            texts = [text for _, text in train[start : start + DOCUMENTS_AT_ONCE]]
            for tokens in encoding.encode_ordinary_batch(texts):
                f.write(np.array([*tokens, encoding.eot_token], dtype=dtype).tobytes())
        n_tokens = f.tell() // dtype.itemsize
    held_out_tokens = [np.array(t, dtype=dtype) for t in encoding.encode_ordinary_batch([text for _, text in held_out])]
    np.concatenate(held_out_tokens).tofile(folder / "val.bin")
    stream = np.memmap(folder / "train.bin", dtype=dtype, mode="r")
    np.concatenate(find_copies(stream, held_out_tokens)).tofile(folder / "copied.bin")
    if tokenizer_json:
        encoding.save(folder)  # ty: ignore[missing-union-attribute]
    else:
        tokenizer_training.save(encoding, folder)  # ty: ignore[invalid-argument-type]
    meta = {
        "dtype": dtype.name,
        "held_out": [[name, len(tokens)] for (name, _), tokens in zip(held_out, held_out_tokens, strict=True)],
        "sha256": {path.name: sha256(path) for path in sorted(folder.iterdir())},
    }
    (folder / "meta.json").write_text(json.dumps({**meta, "sum": checksum(meta)}, indent=1))
    print(
        f"data: {len(train)} training documents ({n_tokens:,} tokens), "
        f"{len(held_out)} held out ({sum(map(len, held_out_tokens)):,} tokens), vocabulary {encoding.n_vocab}",
        file=sys.stderr,
    )
