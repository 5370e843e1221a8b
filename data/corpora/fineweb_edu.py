"""FineWeb-Edu: educational web pages (Penedo et al. 2024, arXiv 2406.17557; ODC-By), streamed from its sample-10BT.

documents, min_bytes: the first so many pages with at least min_bytes bytes of UTF-8 text.
"""

from collections.abc import Iterator

from data.corpora.hub import stream

DATASET = "HuggingFaceFW/fineweb-edu"


def fingerprint(documents: int, min_bytes: int) -> dict:
    return {"corpus": DATASET, "documents": documents, "min_bytes": min_bytes}


def documents(documents: int, min_bytes: int) -> Iterator[tuple[str, str]]:
    yield from stream("fineweb_edu", DATASET, documents, min_bytes, name="sample-10BT", split="train")
