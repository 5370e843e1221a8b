"""config.json of a Hugging Face checkpoint.

Every key must be read by our code, be known as harmless, or have a value that turns it off; any other key is an error.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

from conf.errors import UserError

# Keys that do not change the logits of one text
HARMLESS = """
    architectures model_type torch_dtype dtype transformers_version use_cache initializer_range gradient_checkpointing
    _name_or_path _model_name_or_path _commit_hash model_name auto_map custom_pipelines tokenizer_class
    transformers.js_config transformers_weights torchscript use_bfloat16 tf_legacy_loss is_decoder is_llama_config
    _attn_implementation _attn_implementation_autoset attn_implementation use_flash_attention_2 _flash_attn_2_enabled

    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id decoder_start_token_id
    attention_dropout hidden_dropout classifier_dropout resid_pdrop embd_pdrop attn_pdrop embedding_dropout
    residual_dropout attention_probs_dropout_prob hidden_dropout_prob pretraining_tp max_window_layers n_ctx
    max_sequence_length model_max_length rotary
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj

    task_specific_params finetuned finetuned_from finetuning_task id2label label2id num_labels problem_type
    output_attentions output_hidden_states output_scores return_dict return_dict_in_generate use_return_dict
    chunk_size_feed_forward generation_config max_length min_length max_new_tokens min_new_tokens do_sample temperature
    top_k top_p min_p typical_p epsilon_cutoff eta_cutoff num_beams num_beam_groups num_return_sequences early_stopping
    diversity_penalty length_penalty repetition_penalty encoder_no_repeat_ngram_size no_repeat_ngram_size bad_words_ids
    suppress_tokens begin_suppress_tokens forced_bos_token_id forced_eos_token_id remove_invalid_values prefix
    renormalize_logits exponential_decay_length_penalty penalty_alpha tie_encoder_decoder
""".split()  # noqa: SIM905
# Keys of tools that write only notes about themselves: not an error, but a line on stderr names each
HARMLESS_PREFIXES = ("unsloth_", "finetun", "wandb_", "mlflow_", "axolotl_")
OFF = (None, False, 0, [], {})  # values that turn a feature off
# Values that do no more than leaving the key out; the last two are in the files of Phi-4-mini, for other code
NEUTRAL = {"partial_rotary_factor": 1, "full_attn_mod": 1, "interpolate_factor": 1}

LARGEST = 2**24  # of whole numbers: far above any model's sizes, and products of sizes fit 64 bits


class Config:
    """The values of config.json. It records the keys that were read, so that `finish` can report any other key.

    UserError if the file is missing or is not a JSON object, and from every method for a value of a wrong type.
    """

    def __init__(self, path: Path, values: dict[str, Any]):
        """path: of the file that they are from, for messages."""
        self.path, self.values = path, values
        self.keys_read: set[str] = set(HARMLESS)

    @classmethod
    def of_folder(cls, folder: Path) -> "Config":
        path = folder / "config.json"
        try:
            values = json.loads(path.read_text())
            if not isinstance(values, dict):
                raise ValueError("not an object")
        except FileNotFoundError:
            raise UserError(f"hf:{folder}: no Hugging Face checkpoint: it has no config.json") from None
        except (OSError, ValueError, RecursionError):
            raise UserError(f"{path}: not a JSON object") from None
        return cls(path, values)

    def get(self, *keys: str, default: Any = None) -> Any:
        """The value of the first of these keys that has one; several keys are names of the same setting."""
        return self._first(keys, default)[1]

    def _first(self, keys: tuple[str, ...], default: Any) -> tuple[str, Any]:
        """(key, value) of the first of these keys that has a value; (the first key, default) if none has."""
        self.keys_read |= set(keys)
        present = [(key, self.values[key]) for key in keys if self.values.get(key) is not None]
        return present[0] if present else (keys[0], default)

    def count(self, *keys: str, default: int | None = None) -> int:
        """Like `get`, for a whole number of at least 1. UserError for another value, or for none without a default."""
        return self.check_count(*self._first(keys, default))

    def optional_count(self, *keys: str, default: int | None = None) -> int | None:
        """Like `count`; the default, which may be None, where no key has a value."""
        key, value = self._first(keys, default)
        return None if value is None else self.check_count(key, value)

    def check_count(self, key: str, value: Any) -> int:
        """value as it is, if it is a whole number of at least 1. UserError names the key."""
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST:
            raise self.refuse(key, value, f"must be a whole number of at least 1 and at most {LARGEST}")
        return value

    def number(self, *keys: str, default: float | None = None, least: float = 0) -> float:
        """Like `get`, for a finite number of at least `least`."""
        return self.check_number(*self._first(keys, default), least)

    def check_number(self, key: str, value: Any, least: float = 0) -> float:
        """value as it is, if it is a finite number of at least `least`. UserError names the key."""
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= 1e12:
            raise self.refuse(key, value, f"must be a number of at least {least:g}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """Like `get`, for true or false."""
        value = self.get(key, default=default)
        if not isinstance(value, bool):
            raise self.refuse(key, value, "must be true or false")
        return value

    def require(self, key: str, right: Any) -> None:
        """UserError unless the key has the value `right`, or none."""
        value = self.get(key, default=right)
        if type(value) is not type(right) or value != right:
            raise self.refuse(key, value, f"not supported: must be {str(right).lower()}")

    def ignore(self, keys: str) -> None:
        """These keys, separated by spaces, do not change the logits of this family."""
        self.keys_read |= set(keys.split())

    def object(self, key: str) -> dict:
        """A copy of the object under this key; empty if it is null or not there."""
        value = self.get(key, default={})
        if not isinstance(value, dict):
            raise self.refuse(key, value, "must be an object")
        return dict(value)

    def refuse(self, key: str, value: Any, reason: str) -> UserError:
        """The error to raise: `PATH: key=value: reason`."""
        return UserError(f"{self.path}: {key}={' '.join(str(value).split())[:60]}: {reason}")

    def finish(self) -> None:
        """UserError for the first key that was not read and is not off. Keys with a harmless prefix are only named."""
        notes = []
        for key, value in self.values.items():
            if key in self.keys_read or value in OFF or value == NEUTRAL.get(key, math.nan):
                continue
            if not key.startswith(HARMLESS_PREFIXES):
                raise self.refuse(key, value, "not supported, and not ignored either")
            notes.append(key)
        if notes:
            print(f"note: {self.path}: {', '.join(notes)}: ignored, as notes of a training tool", file=sys.stderr)
