"""Corpora: one file each. conf/data/NAME.yaml says `kind: FILE`; FILE.py defines two functions of the yaml's knobs.

    fingerprint(**knobs) -> dict                     what identifies the text; a change prepares the corpus again
    documents(**knobs) -> Iterator[(name, text)]     the whole documents, in a fixed order

The yaml also says tokenizer, vocab_size and holdout (documents held out), which data/corpus.py reads.
"""
