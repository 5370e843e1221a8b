"""Variable tracking in real text: the default corpus with assignments between its lines.

`# K = a` gives K a value, `# Q = K` gives Q the value of K, and `# Q : a` states the value of Q, which is to be
predicted through the chain of assignments. The task is variable tracking of RULER (Hsieh et al. 2024, arXiv
2404.06654), between lines of code for the reason given in recall.py.
"""

import hashlib
import random
import re
import string
from collections.abc import Iterator

from conf.errors import check
from data.corpora import sympy

ASSIGNMENT = re.compile(r"# [A-Z] [=:] [A-Za-z]")


def annotate(lines: list[str], rng: random.Random, hops: int) -> str:
    """The lines with notes between them: assignments to new variables and statements of the values of current ones.

    The variables are forgotten after about 32 lines. hops: the longest chain, assignments from variable to variable.
    """
    text = ""
    value: dict[str, str] = {}
    depth: dict[str, int] = {}
    for line in lines:
        text += f"{line}\n"
        if rng.random() < 1 / 32:
            value, depth = {}, {}
        if rng.random() < 1 / 2:
            continue
        free = [x for x in string.ascii_uppercase if x not in value]
        sources = [x for x in value if depth[x] < hops]
        if free and (not value or rng.random() < 0.4):  # a new variable
            name = rng.choice(free)
            source = rng.choice(sources) if sources and rng.random() < 0.7 else rng.choice(string.ascii_lowercase)
            value[name], depth[name] = value.get(source, source), depth.get(source, -1) + 1
            text += f"# {name} = {source}\n"
        else:
            name = rng.choice(sorted(value))
            text += f"# {name} : {value[name]}\n"
    return text


def fingerprint(hops: int) -> dict:
    """hops: the longest chain of assignments."""
    check(0 <= hops <= 8, "data.hops", hops, "from 0 to 8")
    # A sample of notes, so that a change of the code above changes the fingerprint and the corpus is prepared again
    sample = hashlib.sha256(annotate(["x"] * 256, random.Random("tracking"), hops).encode()).hexdigest()
    return {"corpus": "tracking", "hops": hops, "of": sympy.SHA256, "sample": sample}


def documents(hops: int) -> Iterator[tuple[str, str]]:
    """(name, text) of SymPy's files with assignments, the same in every process."""
    for name, text in sympy.documents():
        yield name, annotate(text.splitlines(), random.Random(f"tracking {name}"), hops)
