"""A frozen causal language model as the method sees it: hidden states in, logits out."""

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from jetspec.errors import JetspecError
from jetspec.targets.attention import grouped
from jetspec.targets.kv_cache import KVCache


@dataclass
class TargetOutput:
    """What one forward gives.

    Attributes:
        hidden: [B, T, d] after the final norm, the input of the output embedding.
        taps: [B, T, n·d], outputs of the asked layers side by side in the asked order (layer i is
            Hugging Face's `hidden_states[i + 1]`), or None when none was asked.
    """

    hidden: Tensor
    taps: Tensor | None


class Target:
    """The frozen target over any transformers causal LM with full attention in every layer.

    Args:
        model: a causal LM; put into eval mode, its parameters frozen.
        tokenizer: needs `apply_chat_template`, `__call__` and `decode` only where text is used.
        name: how records name it.
        fingerprint: sha256 over its files (targets/fingerprint.py).

    Raises:
        JetspecError: a layer keeps anything but plain keys and values, or the attention
            implementation takes no mask of its own.
    """

    def __init__(self, model: Any, tokenizer: Any, name: str, fingerprint: str) -> None:
        self.name = name
        self.fingerprint = fingerprint
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.config = model.config.get_text_config(decoder=True)
        self._base = model.base_model
        self._lm_head = model.get_output_embeddings()
        if self._base is model or self._lm_head is None:
            raise JetspecError("target.source", name, "not a causal language model; give one")
        weight = self._lm_head.weight
        self.vocab_size = int(weight.shape[0])
        self.hidden_size = int(weight.shape[1])
        self.num_layers = int(self.config.num_hidden_layers)
        self.device = weight.device
        self.dtype = weight.dtype
        self.eos_token_ids = _eos_token_ids(model, tokenizer)
        self._attention = _attention(model, name)
        _refuse_bounded_layers(self.config, name)
        parameters = inspect.signature(self._base.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor,
        mask: Tensor,
        cache: KVCache | None = None,
        taps: Sequence[int] = (),
    ) -> TargetOutput:
        """One pass over T new tokens behind the S - T rows already cached.

        Args:
            input_ids: [B, T] long.
            position_ids: [B, T] long, the rotary position of each token.
            mask: [B, T, S] bool, True where a token may attend. A row without any True (padding)
                gives an unused but finite output.
            cache: T rows are appended to it.
            taps: layers whose outputs are wanted.
        """
        held = 0 if cache is None else cache.length
        batch, new = input_ids.shape
        if mask.shape != (batch, new, held + new):
            raise ValueError(f"mask {tuple(mask.shape)}, wanted {(batch, new, held + new)}")
        self.check_taps(taps)
        # A softmax over nothing is NaN in some kernels, and NaN in the cache would reach every
        # later row even where it is masked (0 · NaN).
        mask = (mask | ~mask.any(-1, keepdim=True))[:, None]
        if self._attention == "eager":
            zero = torch.zeros((), dtype=self.dtype, device=mask.device)
            mask = torch.where(mask, zero, torch.finfo(self.dtype).min)
        sdpa = self._attention == "sdpa"
        with grouped(self.config) if sdpa else contextlib.nullcontext():
            output = self._base(
                input_ids=input_ids,
                attention_mask=mask,
                position_ids=position_ids,
                output_hidden_states=bool(taps),
                use_cache=cache is not None,
                **{self._cache_argument: None if cache is None else cache.dynamic},
            )
        tapped = None
        if taps:
            tapped = torch.cat([output.hidden_states[layer + 1] for layer in taps], dim=-1)
        return TargetOutput(output.last_hidden_state, tapped)

    @torch.no_grad()
    def logits(self, hidden: Tensor, projection: Tensor | None = None) -> Tensor:
        """hidden [..., d] -> [..., V] in fp32, with the config's scaling and soft cap.

        Args:
            projection: [V, d] in place of the target's own.
        """
        return self.project(hidden, projection)

    def project(self, hidden: Tensor, projection: Tensor | None = None) -> Tensor:
        """As `logits`, but gradients reach `hidden`: a head in training shares the projection."""
        logits = self._product(hidden, projection).float()
        if (divisor := getattr(self.config, "logits_scaling", None)) is not None:
            logits = logits / divisor
        if (factor := getattr(self.config, "logit_scale", None)) is not None:
            logits = logits * factor
        if (cap := getattr(self.config, "final_logit_softcapping", None)) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    def project_rounded(self, hidden: Tensor, projection: Tensor | None = None) -> Tensor:
        """`project` without the copy to fp32 where nothing follows the product: its values in the
        target's dtype are the same."""
        follows = ("logits_scaling", "logit_scale", "final_logit_softcapping")
        if any(getattr(self.config, name, None) is not None for name in follows):
            return self.project(hidden, projection)
        return self._product(hidden, projection)

    def _product(self, hidden: Tensor, projection: Tensor | None) -> Tensor:
        hidden = hidden.to(self.dtype)
        product: Tensor
        product = self._lm_head(hidden) if projection is None else F.linear(hidden, projection)
        return product

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """ids [...] long -> [..., d]."""
        embedded: Tensor = self.model.get_input_embeddings()(ids)
        return embedded

    def new_cache(self) -> KVCache:
        return KVCache()

    def check_taps(self, taps: Sequence[int]) -> None:
        for layer in taps:
            if not 0 <= layer < self.num_layers:
                raise JetspecError(
                    "head.taps", layer, f"{self.name} has layers 0 to {self.num_layers - 1}"
                )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        enable_thinking: bool = False,
    ) -> list[int]:
        """The chat template's token ids for `messages`.

        Raises:
            JetspecError: the template refuses these messages.
        """
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                enable_thinking=enable_thinking,
            )
        except Exception as error:  # a template raises whatever its author chose
            raise JetspecError(
                "messages",
                [m.get("role") for m in messages],
                f"chat template refuses them: {error}",
            ) from error
        # The template writes its own special tokens; the tokenizer must not add them again.
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode_text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


def _eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends an answer, from the generation config, the config and the tokenizer."""
    found: set[int] = set()
    holders = (getattr(model, "generation_config", None), model.config, tokenizer)
    for holder in holders:
        value = getattr(holder, "eos_token_id", None)
        if isinstance(value, int):
            found.add(value)
        elif value is not None:
            found.update(int(token) for token in value)
    return frozenset(found)


def _attention(model: Any, name: str) -> str:
    implementation = str(getattr(model.config, "_attn_implementation", "eager"))
    if implementation not in ("sdpa", "eager"):
        raise JetspecError(
            "target.source", name, f"attention {implementation} takes no tree mask; use sdpa"
        )
    return implementation


def _refuse_bounded_layers(config: Any, name: str) -> None:
    """Sliding windows, chunks and recurrent states forget rows that a tree may still need."""
    for index, layer in enumerate(DynamicCache(config=config).layers):
        if type(layer).__name__ != "DynamicLayer":
            raise JetspecError(
                "target.source",
                name,
                f"layer {index} is {type(layer).__name__.removeprefix('Dynamic')}, not full "
                "attention; the reference path holds full-attention decoders only",
            )
