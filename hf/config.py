"""config.json of a Hugging Face checkpoint.

Every key must be read by our code, be in HARMLESS, or have a value that turns it off; any other key is an error.
"""

import json
from pathlib import Path
from typing import Any

from conf.errors import UserError

# Keys that do not change the logits of one text
HARMLESS = """
    architectures model_type torch_dtype dtype transformers_version _name_or_path bos_token_id eos_token_id
    pad_token_id unk_token_id sep_token_id decoder_start_token_id use_cache initializer_range attention_dropout
    hidden_dropout classifier_dropout resid_pdrop embd_pdrop attn_pdrop pretraining_tp max_window_layers
    is_llama_config n_ctx gradient_checkpointing scale_attn_weights summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj task_specific_params tokenizer_class rotary
    transformers.js_config id2label label2id output_attentions output_hidden_states return_dict use_return_dict
    problem_type chunk_size_feed_forward _attn_implementation_autoset max_length min_length
    max_sequence_length model_max_length
""".split()  # noqa: SIM905


class Config:
    """The values of config.json. It records the keys that were read, so that `finish` can report any other key.

    UserError if the file is missing or is not a JSON object.
    """

    def __init__(self, folder: Path):
        self.path = folder / "config.json"
        try:
            self.values = json.loads(self.path.read_text())
            if not isinstance(self.values, dict):
                raise ValueError("not an object")
        except FileNotFoundError:
            raise UserError(f"run=hf:{folder}: no Hugging Face checkpoint: it has no config.json") from None
        except (OSError, ValueError):
            raise UserError(f"{self.path}: not a JSON object") from None
        self.keys_read: set[str] = set(HARMLESS)

    def get(self, *keys: str, default: Any = None) -> Any:
        """The value of the first of these keys that has one; several keys are names of the same setting."""
        self.keys_read |= set(keys)
        return next((self.values[key] for key in keys if self.values.get(key) is not None), default)

    def count(self, *keys: str, default: int | None = None) -> int:
        """Like `get`, for a whole number of at least 1. UserError for another value, or for none without a default."""
        value = self.get(*keys, default=default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refuse(keys[0], value, "must be a whole number of at least 1")
        return value

    def refuse(self, key: str, value: Any, reason: str) -> UserError:
        """The error to raise: `PATH: key=value: reason`."""
        return UserError(f"{self.path}: {key}={str(value)[:60]}: {reason}")

    def finish(self) -> None:
        """UserError for the first key that was not read and is not off."""
        for key, value in self.values.items():
            if key not in self.keys_read and value not in (None, False, 0, [], {}):
                raise self.refuse(key, value, "not supported, and not ignored either")
