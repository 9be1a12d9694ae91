"""The tokenizer of a GGUF file.

Byte-level BPE tokenizers are rebuilt here from the file's own tables, so that every library
version gives the same ids: GGUF names the text splitter but does not carry it, and numbers get
other ids under a wrong one.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)
from transformers import AutoTokenizer

from jetspec.errors import JetspecError

# GGUF token types that are matched in text before it is split.
_CONTROL, _USER_DEFINED = 3, 4

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True)
class _Splitter:
    """How a family cuts text into words before merging bytes."""

    pre_tokenizer: Callable[[], Any]
    nfc: bool = False
    ignore_merges: bool = False


def _byte_level(*before: Any, use_regex: bool) -> Any:
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    return pre_tokenizers.Sequence([*before, last])


def _pattern(regex: str) -> Any:
    return _byte_level(pre_tokenizers.Split(Regex(regex), "isolated"), use_regex=False)


def _single_digits() -> Any:
    return _byte_level(pre_tokenizers.Digits(individual_digits=True), use_regex=True)


_GPT2 = _Splitter(lambda: _byte_level(use_regex=True))
_SMOLLM = _Splitter(_single_digits)
_LLAMA3 = _Splitter(lambda: _pattern(_LLAMA3_SPLIT), ignore_merges=True)
_QWEN2 = _Splitter(lambda: _pattern(_QWEN2_SPLIT), nfc=True)
_SPLITTERS = {
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "qwen3": _QWEN2,
    "qwen3moe": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def save_tokenizer(gguf: Path, directory: Path) -> None:
    """Write the tokenizer and chat template of `gguf` into `directory` as Hugging Face files.

    Raises:
        JetspecError: the file names a text splitter that is not known here.
    """
    from gguf import GGUFReader

    fields = GGUFReader(str(gguf)).fields

    def read(name: str) -> Any:
        field = fields.get(name)
        return None if field is None else field.contents()

    if read("tokenizer.ggml.model") != "gpt2":
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)
        return
    # Older files name no splitter; the architecture then stands for its family.
    kind = read("tokenizer.ggml.pre") or read("general.architecture")
    if kind not in _SPLITTERS:
        raise JetspecError(
            "target.source", gguf, f"text splitter {kind!r} is unknown; give the original directory"
        )
    tokens = read("tokenizer.ggml.tokens")
    types = read("tokenizer.ggml.token_type")
    tokenizer = _byte_bpe(tokens, types, read("tokenizer.ggml.merges"), _SPLITTERS[kind])
    tokenizer.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for ours, theirs in names.items():
        index = read(f"tokenizer.ggml.{theirs}_token_id")
        if index is not None:
            config[f"{ours}_token"] = tokens[index]
    if (length := read(f"{read('general.architecture')}.context_length")) is not None:
        config["model_max_length"] = length
    text = json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
    if (template := read("tokenizer.chat_template")) is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


def _byte_bpe(
    tokens: list[str], types: list[int], merges: list[str], splitter: _Splitter
) -> Tokenizer:
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[(left, right) for left, right in (merge.split(" ") for merge in merges)],
            ignore_merges=splitter.ignore_merges,
        )
    )
    if splitter.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = splitter.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    defined = [t for t, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in defined])
    return tokenizer
