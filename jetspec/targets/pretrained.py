"""Loading through transformers, quietly and without made-up weights."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging


def load_causal_lm(directory: Path, **options: Any) -> Any:
    """The causal LM in `directory`.

    Raises:
        ValueError: weights that the config asks for are missing; the library would draw random
            ones with no more than a warning.
    """
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        directory, output_loading_info=True, **options
    )
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"{len(missing)} weights missing, first {missing[0]}")
    if shapes := sorted(str(key) for key in info.get("mismatched_keys", ())):
        raise ValueError(f"{len(shapes)} weights of another shape, first {shapes[0]}")
    return model


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def sdpa_or_eager(directory: Path, dtype: torch.dtype) -> Any:
    """The model with SDPA, or with eager attention where its family has no SDPA."""
    try:
        return load_causal_lm(directory, dtype=dtype, attn_implementation="sdpa")
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        return load_causal_lm(directory, dtype=dtype, attn_implementation="eager")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the library's bars and warnings, which would break our own progress output."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
