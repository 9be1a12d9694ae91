"""The sizes of a head that a run file leaves open: they follow the target's."""

from typing import Any

from jetspec.errors import JetspecError
from jetspec.heads.config import HeadConfig
from jetspec.targets.target import Target


def resolve_head_config(config: HeadConfig, target: Target) -> HeadConfig:
    """Fill every size left at None from the target.

    Raises:
        JetspecError: a tap outside the target, a mask token outside its vocabulary, or no unused
            token to be found.
    """
    source = target.config
    heads = config.num_attention_heads or source.num_attention_heads
    shared = config.num_key_value_heads
    if shared is None:
        shared = getattr(source, "num_key_value_heads", None) or heads
        if heads % shared:
            shared = heads
    head_dim = config.head_dim or getattr(source, "head_dim", None)
    taps = config.taps or spread_taps(target.num_layers, config.num_taps)
    for layer in taps:
        if not 0 <= layer < target.num_layers:
            raise JetspecError(
                "head.taps", layer, f"the target has layers 0 to {target.num_layers - 1}"
            )
    mask_token = config.mask_token_id
    if mask_token is None:
        mask_token = unused_token(target)
    elif not 0 <= mask_token < target.vocab_size:
        raise JetspecError(
            "head.mask_token_id", mask_token, f"the target has {target.vocab_size} tokens"
        )
    resolved = config.model_dump() | {
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "head_dim": head_dim or target.hidden_size // source.num_attention_heads,
        "intermediate_size": config.intermediate_size or source.intermediate_size,
        "taps": taps,
        "num_taps": len(taps),
        "mask_token_id": mask_token,
        "rms_norm_eps": config.rms_norm_eps or getattr(source, "rms_norm_eps", 1e-6),
        "rope_parameters": config.rope_parameters or target_rope(target),
        "max_position_embeddings": config.max_position_embeddings or source.max_position_embeddings,
    }
    return HeadConfig.model_validate(resolved)


def spread_taps(num_layers: int, count: int) -> tuple[int, ...]:
    """`count` layers from the second to the third last: round(1 + k·(L - 4)/(count - 1)).

    A target too shallow for that is tapped evenly, every layer at most once.
    """
    first, last = 1, num_layers - 3
    if last - first + 1 < count:
        first, last, count = 0, num_layers - 1, min(count, num_layers)
    if count == 1:
        return (last,)
    step = (last - first) / (count - 1)
    return tuple(round(first + k * step) for k in range(count))


def target_rope(target: Target) -> dict[str, Any]:
    """The target's rotary parameters, without what only its own attention uses."""
    source = target.config
    parameters = dict(getattr(source, "rope_parameters", None) or {})
    if "full_attention" in parameters:  # one entry a layer type
        parameters = dict(parameters["full_attention"])
    theta = parameters.get("rope_theta") or getattr(source, "rope_theta", None) or 10000.0
    kind = parameters.get("rope_type", "default")
    if kind not in ("linear", "llama3", "yarn"):
        return {"rope_type": "default", "rope_theta": float(theta)}
    for key in ("partial_rotary_factor", "mrope_section", "mrope_interleaved"):
        parameters.pop(key, None)
    return parameters | {"rope_theta": float(theta)}


def unused_token(target: Target) -> int:
    """A token of the target's vocabulary that no text contains, to stand for an undecided slot.

    First choice: a row behind the tokenizer's last token; then a special token that neither ends
    nor pads text and that the chat template does not write.

    Raises:
        JetspecError: every token is in use.
    """
    tokenizer = target.tokenizer
    try:
        known = len(tokenizer)
    except TypeError:
        known = target.vocab_size
    reserved = set(target.eos_token_ids)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"):
        value = getattr(tokenizer, name, None)
        if isinstance(value, int):
            reserved.add(value)
    for token in range(known, target.vocab_size):
        if token not in reserved:
            return token
    template = str(getattr(tokenizer, "chat_template", None) or "")
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    for token, details in sorted(added.items(), reverse=True):
        special = getattr(details, "special", False) and token < target.vocab_size
        if special and token not in reserved and str(details) not in template:
            return int(token)
    raise JetspecError("head.mask_token_id", "null", "no unused token was found; set the id of one")
