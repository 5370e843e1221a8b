"""Long documents from a dataset on the Hugging Face hub: data=pg19, data=fineweb_edu and fineweb_edu_large.

They are streamed, so the download ends with the last one.
"""

import os
from collections.abc import Iterator

from conf.errors import UserError, ensure


def fingerprint(dataset: str, load: dict, documents: int, min_bytes: int) -> dict:
    return {"corpus": dataset, "load": load, "documents": documents, "min_bytes": min_bytes}


def documents(dataset: str, load: dict, documents: int, min_bytes: int) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of the first `documents` rows whose text has at least min_bytes bytes of UTF-8.

    dataset: the name on the hub. load: further arguments of datasets.load_dataset. UserError without the package or a
    network, and if the dataset has too few such documents.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError(f"data: {dataset} needs Hugging Face's datasets: pip install -e '.[hub]'") from None
    found = 0
    try:
        for i, row in enumerate(load_dataset(dataset, streaming=True, **load)):
            if len(row["text"].encode()) >= min_bytes:
                found += 1
                yield f"{i:08}", row["text"]
            if found == documents:
                return
    except Exception as e:  # of requests, httpx, huggingface_hub, fsspec and others: all mean the same to a user
        first = str(e).partition("\n")[0][:120]
        error = f"{dataset} could not be read from the hub ({type(e).__name__}: {first})"
        raise UserError(f"data: {error}: go online, or use data=sympy, data=books or data=text") from None
    ensure(found == documents, f"data.documents={documents}: {dataset} has {found} documents of {min_bytes} bytes")
