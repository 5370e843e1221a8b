"""Error messages of Hydra and OmegaConf in one line. Imported when there is one."""

import re
import sys
from pathlib import Path

from hydra.errors import HydraException

from conf.help import explain


def hydra_message(e: BaseException) -> str:
    """The message of a Hydra or OmegaConf error in one line, without key types, search paths and links."""
    text = str(e) if e.__cause__ is None or not isinstance(e, HydraException) else f"{e}: {e.__cause__}"
    unwanted = "full_key|object_type|reference_type|Set the environment variable HYDRA_FULL_ERROR|See https?://"
    if wrong := re.search(r"Could not (?:override|find) '([\w.]+)(?:/(\w+))?'", text):
        config = re.search(r"In '(\w+)'", text)
        return explain(config[1] if config else Path(sys.argv[0]).stem, wrong[1], wrong[2] or "")
    text = re.sub(rf"\n\s*({unwanted})[^\n]*|(?s:\s*Config search path:.*)", "", text)
    text = re.sub(r"\s+", " ", text.replace("\n\t", ", ").replace(":, ", ": ")).strip()
    if match := re.match(r"LexerNoViableAltException: ([^=]*)=(.*?)( \^|$)", text):
        key, value = match[1], match[2]
        quoted = value.replace("'", "\\'")
        return f"{key}={value}: has a character that needs quotes: \"{key}='{quoted}'\""
    return text
