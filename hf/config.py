"""config.json of a Hugging Face checkpoint.

Every key must be read by our code, be known as harmless, or have a value that turns it off; any other key is an error.
"""

import json
import math
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conf.errors import UserError
from conf.registry import has_type

# Keys that do not change the logits of one text
HARMLESS = """
    architectures model_type torch_dtype dtype transformers_version use_cache initializer_range gradient_checkpointing
    _name_or_path _model_name_or_path _commit_hash model_name auto_map custom_pipelines tokenizer_class internal_version
    transformers.js_config transformers_weights torchscript use_bfloat16 tf_legacy_loss is_decoder is_llama_config
    _attn_implementation _attn_implementation_autoset attn_implementation use_flash_attention_2 _flash_attn_2_enabled
    pretraining_tp max_window_layers n_ctx max_sequence_length model_max_length rotary predict_special_tokens

    task_specific_params finetuned finetuned_from finetuning_task id2label label2id num_labels _num_labels problem_type
    output_attentions output_hidden_states output_past output_scores return_dict return_dict_in_generate use_return_dict
    chunk_size_feed_forward generation_config max_length min_length max_new_tokens min_new_tokens do_sample temperature
    top_k top_p min_p typical_p epsilon_cutoff eta_cutoff num_beams num_beam_groups num_return_sequences early_stopping
    penalty_alpha encoder_no_repeat_ngram_size no_repeat_ngram_size bad_words_ids suppress_tokens begin_suppress_tokens
    remove_invalid_values prefix renormalize_logits tie_encoder_decoder
""".split()  # noqa: SIM905
HARMLESS_ENDS = ("_token_id", "dropout", "pdrop", "dropout_prob", "_penalty")
HARMLESS_BEGINNING = "summary_"
# Keys of tools that write only notes about themselves: not an error, but a line on stderr names each
HARMLESS_PREFIXES = ("unsloth_", "finetun", "wandb_", "mlflow_", "axolotl_")
OFF = (None, False, 0, [], {})  # values that turn a feature off
# Values that do no more than leaving the key out; the last two are in the files of Phi-4-mini, for other code
NEUTRAL = {"partial_rotary_factor": 1, "full_attn_mod": 1, "interpolate_factor": 1}

LARGEST = 2**24  # of whole numbers: far above any model's sizes, and products of sizes fit 64 bits
# The least value of a number, where it is not 0
LEAST = dict.fromkeys(("rope_theta", "rope_local_base_freq", "query_pre_attn_scalar", "factor"), 1.0)
LEAST |= dict.fromkeys(("rms_norm_eps", "logits_scaling"), 1e-20)
NULLS = ("num_key_value_heads", "sliding_window", "rotary_dim")  # of which null is another value than an absent key
RIGHT = {
    int: f"a whole number of at least 1 and at most {LARGEST}",
    float: "a number of at least {least:g}",
    **{bool: "true or false", str: "a text", list: "a list", dict: "an object"},
}

# Key -> its value where it is absent, which has the type of every other value; or a type, where there must be a value
# (int), or where None stands for an absent one (int | None)
Keys = Mapping[str, Any]


class Config:
    """The values of config.json, or of an object in it. It records the keys that were read, for `finish`."""

    def __init__(self, path: Path, values: dict[str, Any], prefix: str = ""):
        """path: of the file, for messages. prefix: of the keys of an object."""
        self.path, self.values, self.prefix = path, values, prefix
        self.keys_read: set[str] = set(HARMLESS)
        self.settings: dict[str, Any] = {}  # what the family reads of it: hf/families.py
        self.names: dict[str, str] = {}  # key -> its name in this file, where the family has another for it

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

    def read(self, keys: Keys, names: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The values of these keys. UserError for one of a wrong type or out of range.

        names: the names of a key in this file where it has others, separated by spaces; the first with a value counts.
        """
        result: dict[str, Any] = {}
        for key, default in keys.items():
            aliases = (names or {}).get(key, key).split()
            self.keys_read |= set(aliases)
            name = next((x for x in aliases if self.values.get(x) is not None), aliases[0])
            self.names[key], value, kind = name, self.values.get(name), type(default)
            if isinstance(default, types.UnionType):
                kind, default = default.__args__[0], None
            elif isinstance(default, type):
                kind = default
            if value is None and key in NULLS and name in self.values:
                default = None
            result[key] = default if value is None else value
            least, most = (1, LARGEST) if kind is int else (LEAST.get(key, 0), 1e12)
            ok = has_type(value, kind) and (not isinstance(value, int | float) or least <= value <= most)
            if not ok and (value is not None or isinstance(default, type)):
                raise self.refuse(key, value, f"must be {RIGHT[kind].format(least=least)}")
        return result

    def object(self, key: str, value: Any) -> "Config":
        """value, the object under this key, whose unread keys `finish` of the file does not report."""
        if not isinstance(value, dict):
            raise self.refuse(key, value, f"must be {RIGHT[dict]}")
        return Config(self.path, value, f"{self.prefix}{key}.")

    def require(self, right: Mapping[str, Any]) -> None:
        """UserError unless each of these keys has this value, or none; an object also for every other key in it."""
        for key, value in self.read(right).items():
            if isinstance(right[key], dict):
                inner = self.object(key, value)
                inner.keys_read |= self.keys_read  # transformers 5 writes the harmless keys of every config here, too
                inner.require(right[key])
                inner.finish()
            elif value != right[key]:
                raise self.refuse(key, value, f"not supported: must be {str(right[key]).lower()}")

    def ignore(self, keys: str) -> None:
        """These keys, separated by spaces, do not change the logits of this family, or shall be ignored."""
        self.keys_read |= set(keys.split())

    def refuse(self, key: str, value: Any, reason: str) -> UserError:
        """The error to raise: `PATH: key=value: reason`, with the key's name in this file."""
        name, text = self.prefix + self.names.get(key, key), " ".join(str(value).split())[:60]
        return UserError(f"{self.path}: {name}={text}: {reason}")

    def finish(self, off: tuple = OFF) -> None:
        """UserError for the first key that was not read and is not off. Keys with a harmless prefix are only named."""
        notes, self.names = [], {}  # from here on keys have the names in this file
        for key, value in self.values.items():
            harmless = key.endswith(HARMLESS_ENDS) or key.startswith(HARMLESS_BEGINNING)
            if harmless or key in self.keys_read or value in off or value == NEUTRAL.get(key, math.nan):
                continue
            if not key.startswith(HARMLESS_PREFIXES):
                raise self.refuse(key, value, "not supported, and not ignored either")
            notes.append(key)
        if notes:
            print(f"note: {self.path}: {', '.join(notes)}: ignored, as notes of a training tool", file=sys.stderr)
