"""PG-19: books of Project Gutenberg from before 1919 (Rae et al. 2019, arXiv 1911.05507), the corpus that the papers on
context extension report. From the hub as parquet (emozilla/pg19; deepmind/pg19 is a script that datasets refuses)."""

from collections.abc import Iterator

from data.corpora.hub import stream

DATASET = "emozilla/pg19"


def fingerprint(documents: int, min_bytes: int) -> dict:
    return {"corpus": DATASET, "documents": documents, "min_bytes": min_bytes}


def documents(documents: int, min_bytes: int) -> Iterator[tuple[str, str]]:
    yield from stream("pg19", DATASET, documents, min_bytes, split="train")
