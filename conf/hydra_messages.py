"""Error messages of Hydra and OmegaConf in one line. Imported when there is one."""

import re
import sys
import typing
from dataclasses import fields
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from conf.errors import UserError
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
    if isinstance(e, OverflowError) and (key := re.search(r"full_key: ([\w.]+)", str(e))):
        return f"{key[1]}: must be a finite number below 2^63"
    return text or "an argument cannot be read: each must be KEY=VALUE"


def settings_error(e: OmegaConfBaseException, cfg: DictConfig) -> UserError:
    """The error for settings that do not fit their dataclass: it names the setting and its value."""
    if not isinstance(e, ConfigKeyError):
        return UserError(hydra_message(e))
    there_are = ", ".join(f.name for f in fields(typing.cast(Any, e.object_type)))
    value = OmegaConf.to_container(cfg, resolve=False)
    for key in str(e.full_key).split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return UserError(f"{e.full_key}={value}: no such setting; there are {there_are}")
