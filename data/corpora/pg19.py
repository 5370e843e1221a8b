"""PG-19: books of Project Gutenberg from before 1919 (Rae et al. 2019, arXiv 1911.05507).

Many papers on context extension report perplexity on it. Loaded as parquet files from emozilla/pg19, because
deepmind/pg19 is a loading script, which current versions of datasets do not run.

documents, min_bytes: the first so many books with at least min_bytes bytes of UTF-8 text.
"""

from collections.abc import Iterator

from data.corpora.hub import stream

DATASET = "emozilla/pg19"


def fingerprint(documents: int, min_bytes: int) -> dict:
    return {"corpus": DATASET, "documents": documents, "min_bytes": min_bytes}


def documents(documents: int, min_bytes: int) -> Iterator[tuple[str, str]]:
    yield from stream("pg19", DATASET, documents, min_bytes, split="train")
