"""Corpora: one file each, with `fingerprint` and `documents`. conf/data/NAME.yaml says `kind: FILE`."""
