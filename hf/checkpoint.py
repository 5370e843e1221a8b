"""What a model is read from: the settings in config.json, tensors and tokenizer of a Hugging Face folder.

Of a folder the weights are model.safetensors or else the files of model.safetensors.index.json; no other file is read,
and never a pickle. A GGUF file takes the same form in hf/gguf_file.py. Every key of config.json must be read by our
code, be known as harmless, or have a value that turns it off; any other key is an error.
"""

import contextlib
import functools
import json
import math
import re
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
from tokenizers import Tokenizer
from torch import Tensor

from conf.cli import short
from conf.errors import UserError, ensure
from conf.registry import has_type

# Keys that do not change the logits of one text
HARMLESS = """
    architectures model_type torch_dtype dtype transformers_version use_cache initializer_range gradient_checkpointing
    _name_or_path _model_name_or_path _commit_hash model_name auto_map custom_pipelines tokenizer_class internal_version
    transformers.js_config transformers_weights torchscript use_bfloat16 tf_legacy_loss is_decoder is_llama_config
    _attn_implementation _attn_implementation_autoset attn_implementation use_flash_attention_2 _flash_attn_2_enabled
    pretraining_tp max_window_layers n_ctx max_sequence_length model_max_length predict_special_tokens

    task_specific_params finetuned finetuned_from finetuning_task id2label label2id num_labels _num_labels problem_type
    output_attentions output_hidden_states output_past output_scores return_dict return_dict_in_generate use_return_dict
    chunk_size_feed_forward generation_config max_length min_length max_new_tokens min_new_tokens do_sample temperature
    top_k top_p min_p typical_p epsilon_cutoff eta_cutoff num_beams num_beam_groups num_return_sequences early_stopping
    penalty_alpha encoder_no_repeat_ngram_size no_repeat_ngram_size bad_words_ids suppress_tokens begin_suppress_tokens
    remove_invalid_values prefix renormalize_logits tie_encoder_decoder cache_implementation

    attention_softmax_in_fp32 bias_dropout_fusion masked_softmax_fusion offset_alibi skip_bias_add skip_bias_add_qkv
    slow_but_exact reorder_and_upcast_attn
""".split()  # noqa: SIM905
HARMLESS_ENDS = ("_token_id", "dropout", "pdrop", "dropout_prob", "_penalty")
HARMLESS_STARTS = ("summary_", "unsloth_", "finetun", "wandb_", "mlflow_", "axolotl_")  # most are notes of tools
OFF = (None, False, 0, [], {})  # values that turn a feature off
# Values that do no more than leaving the key out; the last two are in the files of Phi-4-mini, for other code
NEUTRAL = {"partial_rotary_factor": 1, "full_attn_mod": 1, "interpolate_factor": 1}

LARGEST = 2**24  # of whole numbers: far above any model's sizes, and products of sizes fit 64 bits
# The least value of a number, where it is not 0
LEAST = dict.fromkeys(("rope_theta", "rope_local_base_freq", "query_pre_attn_scalar", "factor"), 1.0)
LEAST |= dict.fromkeys(("rms_norm_eps", "logits_scaling", "attn_logit_softcapping", "final_logit_softcapping"), 1e-20)
# Of which null is another value than an absent key
NULLS = ("num_key_value_heads", "sliding_window", "truncate")
NULLS += ("attn_logit_softcapping", "final_logit_softcapping")
RIGHT: dict[type, str] = {
    int: f"a whole number of at least 1 and at most {LARGEST}",
    float: "a number of at least {least:g}",
}
RIGHT |= {bool: "true or false", str: "a text", list: "a list", dict: "an object"}

# Of the part of a model that reads images
IMAGE_TENSORS = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")

# Key -> its value where it is absent, which has the type of every other value; or a type, where there must be a value
# (int), or where None stands for an absent one (int | None)
Keys = Mapping[str, Any]


def read_json(path: Path) -> dict[str, Any]:
    """UserError for a file that is missing or no JSON object."""
    values: Any = None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        values = json.loads(path.read_text(encoding="utf-8"))
    ensure(isinstance(values, dict), f"{path}: not a JSON object")
    return values


class Config:
    """The values of config.json, or of an object in it. It records the keys that were read, for `finish`."""

    def __init__(self, path: Path, values: dict[str, Any], prefix: str = ""):
        """path: of the file, for messages. prefix: of the keys of an object."""
        self.path, self.values, self.prefix = path, values, prefix
        self.keys_read: set[str] = set(HARMLESS)
        self.settings: dict[str, Any] = {}  # what the family reads of it: hf/families.py
        self.names: dict[str, str] = {}  # key -> its name in this file, where the family has another for it
        self.ignore: set[str] = set()  # unknown keys to pass over, with their prefixes; found ones are removed

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
        self.check(isinstance(value, dict), key, value, f"must be {RIGHT[dict]}")
        inner = Config(self.path, value, f"{self.prefix}{key}.")
        inner.ignore = self.ignore
        return inner

    def require(self, right: Mapping[str, Any]) -> None:
        """UserError unless each of these keys has this value, or none."""
        for key, value in self.read(right).items():
            self.check(value == right[key], key, value, f"not supported: must be {str(right[key]).lower()}")

    def refuse(self, key: str, value: Any, reason: str) -> UserError:
        """The error to raise: `PATH: key=value: reason`, with the key's name in this file."""
        name, text = self.prefix + self.names.get(key, key), " ".join(str(value).split())[:60]
        return UserError(f"{self.path}: {name}={text}: {reason}")

    def check(self, ok: Any, key: str, value: Any, reason: str) -> None:
        ensure(ok, str(self.refuse(key, value, reason)))

    def finish(self, off: tuple = OFF) -> None:
        """UserError for the first key that was not read and is not off.

        Those that ignore_keys= names are only named.
        """
        self.names = {}  # from here on keys have the names in this file
        for key, value in self.values.items():
            harmless = key.endswith(HARMLESS_ENDS) or key.startswith(HARMLESS_STARTS)
            if harmless or key in self.keys_read or value in off or value == NEUTRAL.get(key, math.nan):
                continue
            full = self.prefix + key
            if full in self.ignore:
                self.ignore.remove(full)
                print(f"note: ignored {self.refuse(key, value, 'ignore_keys names it')}", file=sys.stderr)
                continue
            reason = f"not supported, and not ignored either without ignore_keys=[{full}]"
            raise self.refuse(key, value, reason)


# ---- a checkpoint ----


@dataclass(frozen=True)
class Checkpoint:
    """Where a model comes from. Only the settings are read at once, so that a mistake in them is found first."""

    name: str  # of the run, such as hf-FOLDER
    path: Path  # for messages
    config: Config
    open_tensors: Callable[[], dict[str, Callable[[], Tensor]]]  # name -> what loads it
    tokenizer: Callable[[], Tokenizer]  # UserError if there is none, or a damaged one
    notes: tuple[str, ...] = ()  # what a reader of its curves should know
    rename: Callable[[str], str] = str  # a tensor's name in the family -> in these tensors
    tokens: int = 0  # of the pre-training; 0: unknown


def run_name(prefix: str, path: Path) -> str:
    """A folder's name for the curves of a model: letters, digits, . _ and - only."""
    return short(f"{prefix}-" + re.sub(r"[^A-Za-z0-9._-]+", "_", path.resolve().name))


def open_folder(folder: Path) -> Checkpoint:
    """The Hugging Face checkpoint in a local folder. UserError for anything in it that is missing or damaged."""
    file, path = folder / "config.json", folder / "tokenizer.json"
    ensure(file.exists(), f"hf:{folder}: no folder of a Hugging Face checkpoint: it has no config.json")
    config = Config(file, read_json(file))

    def tokenizer() -> Tokenizer:
        ensure(path.exists(), f"{path}: not found: the text to score needs the checkpoint's tokenizer")
        try:
            return Tokenizer.from_file(str(path))
        except Exception as e:  # the tokenizers package raises Exception itself
            raise UserError(f"{path}: not a tokenizer ({str(e).splitlines()[0][:80]})") from None

    return Checkpoint(
        name=run_name("hf", folder),
        path=folder,
        config=config,
        open_tensors=lambda: open_tensors(weight_files(folder)),
        tokenizer=tokenizer,
    )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of the model: model.safetensors, or else the files that the index names, as transformers.

    Never any other: a folder may also contain an adapter, or the same weights in another format. UserError if there is
    neither, or if the index names a file outside the folder.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if index.exists():
        files = read_json(index).get("weight_map")
        if not files or not has_type(files, dict[str, str]) or any(Path(x).name != x for x in files.values()):
            raise UserError(f"{index}: not an index of safetensors files")
        return [folder / name for name in sorted(set(files.values()))]
    raise UserError(f"hf:{folder}: no {single.name} there, and no {index.name}; adapters and pickles are not read")


def open_tensors(paths: list[Path]) -> dict[str, Callable[[], Tensor]]:
    """The tensors of these safetensors files. UserError if a file is missing or incomplete.

    Of a model that also reads images: those of its text part, by the names that models without images have.
    """
    tensors: dict[str, Callable[[], Tensor]] = {}
    for path in paths:
        try:
            file = safetensors.safe_open(path, framework="pt")
            tensors |= {name: functools.partial(file.get_tensor, name) for name in file.keys()}  # noqa: SIM118
        except (OSError, safetensors.SafetensorError) as e:
            raise UserError(f"{path}: not a complete safetensors file ({str(e).splitlines()[0][:80]})") from None
    text = {name: x for name, x in tensors.items() if not IMAGE_TENSORS.match(name)}
    return {name.replace("language_model.", "", 1): x for name, x in text.items()}
