"""Preflight: everything that has made a good head draft badly without an error.

Each check is a finding with its reason; a head serves only when all of them are well.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from jetspec.errors import JetspecError
from jetspec.heads.base import DraftHead
from jetspec.heads.files import read_beside, read_config, read_weights
from jetspec.heads.formats import FOREIGN
from jetspec.heads.layers import RotaryEmbedding, rope_frequencies
from jetspec.heads.parallel import ParallelHead
from jetspec.heads.registry import load_head
from jetspec.heads.sizes import target_rope
from jetspec.storage import content_hash
from jetspec.targets.target import Target
from jetspec.training.blocks import block_mask_function, dense_mask

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True)
class Finding:
    """One check's result.

    Attributes:
        ok: False stops the head from serving.
        check: what was compared; detail: what was found, and how to mend it.
    """

    ok: bool
    check: str
    detail: str


def check_head(
    directory: str, target: Target, *, enable_thinking: bool | None = None
) -> list[Finding]:
    """Every check of the head at `directory` against the target that is to verify it.

    Args:
        enable_thinking: the thinking mode it will serve in; None does not compare it.
    """
    try:
        raw = read_config(directory)
        head = load_head(directory)
        state = read_weights(directory) | read_beside(directory)
    except JetspecError as error:
        return [Finding(False, "files", str(error))]
    head = head.to(target.device)
    fit = list(_fit(head, target))
    findings = [
        Finding(True, "files", f"{sum(t.numel() for t in state.values()):,} weights"),
        *_weights(raw, state),
        _finite(head, state),
        *fit,
        *_training(raw.get("jetspec_training") or {}, target, enable_thinking),
    ]
    trunk = getattr(head, "trunk", head)  # heads may be built around a parallel one
    if isinstance(trunk, ParallelHead):
        findings += [_mask_token(trunk, target), _causal_keys(raw)]
    if isinstance(getattr(trunk, "rotary", None), RotaryEmbedding):
        findings.append(_rope(trunk, target))
    if isinstance(trunk, ParallelHead) and all(finding.ok for finding in fit):
        findings += _slots(raw if trunk is head else {}, trunk, target)
    return findings


def require_fit(head: DraftHead, target: Target, name: str) -> None:
    """Refuse a head whose shapes do not fit the target.

    Raises:
        JetspecError: the first reason.
    """
    for finding in _fit(head, target):
        if not finding.ok:
            raise JetspecError("head", name, f"does not fit {target.name}: {finding.detail}")


def training_record(target: Target, *, enable_thinking: bool) -> dict[str, Any]:
    """What a trained head remembers of its target, for `check_head` to compare."""
    return {
        "target_name": target.name,
        "tokenizer_hash": tokenizer_hash(target),
        "chat_template_hash": content_hash(_template(target)),
        "enable_thinking": enable_thinking,
    }


def tokenizer_hash(target: Target) -> str:
    return content_hash(sorted(target.tokenizer.get_vocab().items(), key=lambda item: item[1]))


def _template(target: Target) -> str:
    return str(getattr(target.tokenizer, "chat_template", None) or "")


def _fit(head: DraftHead, target: Target) -> Iterator[Finding]:
    sizes = [
        ("hidden size", head.hidden_size, target.hidden_size),
        ("vocabulary", head.vocab_size, target.vocab_size),
        ("target layers", head.num_target_layers, target.num_layers),
    ]
    for check, own, wanted in sizes:
        same = own == wanted
        detail = f"{own}" if same else f"{check} {own}, the target's is {wanted}"
        yield Finding(same, check, detail)
    outside = [layer for layer in head.taps if not 0 <= layer < target.num_layers]
    detail = f"{list(head.taps)}"
    if outside:
        detail = f"layer ids {outside} are outside the target's 0 to {target.num_layers - 1}"
    yield Finding(not outside, "layer ids", detail)


def _weights(raw: dict[str, Any], state: dict[str, torch.Tensor]) -> Iterator[Finding]:
    foreign = sorted(name for name in state if name.startswith(FOREIGN))
    detail = "none saved" if not foreign else f"{foreign[0]} is saved; a reader may use it: drop it"
    yield Finding(not foreign, "target's own weights", detail)
    said = raw.get("dtype", raw.get("torch_dtype"))
    held = sorted({_NAMES.get(tensor.dtype, str(tensor.dtype)) for tensor in state.values()})
    same = said is None or held == [str(said).removeprefix("torch.")]
    detail = held[0] if same else f"config says {said}, the weights are {', '.join(held)}"
    yield Finding(same, "dtype", detail)


def _finite(head: DraftHead, state: dict[str, torch.Tensor]) -> Finding:
    """Weights, and the numbers that a head fits once it is trained."""
    fitted = {"calibration": torch.tensor(getattr(head, "calibration", ()))}
    broken = [name for name, t in (state | fitted).items() if not torch.isfinite(t).all()]
    detail = "all finite" if not broken else f"{broken[0]} holds NaN or infinity; train again"
    return Finding(not broken, "finite weights", detail)


def _mask_token(head: ParallelHead, target: Target) -> Finding:
    token, check = head.mask_token_id, "mask token"
    if not 0 <= token < target.vocab_size:
        return Finding(False, check, f"{token} is outside the vocabulary of {target.vocab_size}")
    tokenizer = target.tokenizer
    if token in target.eos_token_ids:
        return Finding(False, check, f"{token} ends answers; take an unused token")
    for name in ("pad_token_id", "bos_token_id", "unk_token_id"):
        if token == getattr(tokenizer, name, None):
            return Finding(False, check, f"{token} is the {name}; take an unused token")
    if token < len(tokenizer):
        text = tokenizer.convert_ids_to_tokens(token)
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = token in added and added[token].special
        if not special and not _placeholder(text):
            return Finding(
                False, check, f"{token} is {text!r}, which texts contain; it must be unused"
            )
        if text in _template(target):
            return Finding(False, check, f"{token} is {text!r}, which the chat template writes")
    return Finding(True, check, f"{token}, unused")


def _placeholder(text: Any) -> bool:
    """Vocabularies are filled up with bracketed names that no text contains."""
    return isinstance(text, str) and text.startswith("<") and text.endswith(">") and len(text) > 2


def _causal_keys(raw: dict[str, Any]) -> Finding:
    own, check = raw.get("dflash_config"), "causal keys"
    if own is None:
        return Finding(True, check, "one key in this format")
    held = {key: own[key] for key in ("causal_head", "causal") if key in own}
    if len(held) == 1 and True in held.values():
        (key,) = held
        other = "causal" if key == "causal_head" else "causal_head"
        return Finding(False, check, f"only {key} is set; a reader of {other} runs bidirectionally")
    return Finding(True, check, f"both say {next(iter(held.values()), False)}")


def _rope(head: Any, target: Target) -> Finding:
    """Compared as numbers, since one RoPE has several spellings."""
    check = "RoPE"
    own, factor = head.rotary.frequencies, head.rotary.factor
    assert head.config.head_dim and head.config.max_position_embeddings
    wanted, wanted_factor = rope_frequencies(
        target_rope(target), head.config.head_dim, int(target.config.max_position_embeddings)
    )
    if torch.allclose(own, wanted, rtol=1e-5) and abs(factor - wanted_factor) < 1e-6:
        return Finding(True, check, "frequencies equal the target's")
    theta = (head.config.rope_parameters or {}).get("rope_theta")
    return Finding(
        False,
        check,
        f"frequencies differ from the target's (rope_theta {theta} against "
        f"{target_rope(target)['rope_theta']})",
    )


def _training(
    record: dict[str, Any], target: Target, enable_thinking: bool | None
) -> Iterator[Finding]:
    now: dict[str, Any] = {
        "target_fingerprint": target.fingerprint,
        "tokenizer_hash": tokenizer_hash(target),
        "chat_template_hash": content_hash(_template(target)),
    }
    if enable_thinking is not None:
        now["enable_thinking"] = enable_thinking
    for key, value in now.items():
        check = key.removesuffix("_hash").replace("_", " ")
        if key not in record:
            yield Finding(True, check, "not recorded by its trainer; not compared")
            continue
        same = record[key] == value
        shown = [str(v)[:12] for v in (record[key], value)]
        detail = shown[0] if same else f"trained with {shown[0]}, serving has {shown[1]}"
        yield Finding(same, check, detail)


@torch.no_grad()
def _slots(raw: dict[str, Any], head: ParallelHead, target: Target) -> Iterator[Finding]:
    shifted = [key for key in ("sample_from_anchor", "shift_label") if raw.get(key)]
    if shifted:
        yield Finding(
            False, "anchor slot", f"{shifted[0]}: slot 0 must hold the anchor, unpredicted"
        )
    trained, decoded, moved = slot_logits_both_ways(head, target)
    scale = trained.std()
    gap = float((trained - decoded).abs().max() / scale)
    limit = 1e-3 if target.dtype == torch.float32 else 0.1  # bf16 logits round by up to 1/128
    if not shifted:
        felt = float((moved - decoded).abs().max() / scale) > 1e-5
        detail = "slot 0" if felt else "the drafted slots do not depend on the anchor's token"
        yield Finding(felt, "anchor slot", detail)
    detail = f"largest difference {gap:.1e} of their spread"
    yield Finding(gap <= limit, "training forward equals decoding forward", detail)


def slot_logits_both_ways(
    head: ParallelHead, target: Target, length: int = 24
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Slot logits [D, V] of one sequence: by the training forward, by the decoding forward, and by
    the decoding forward with another anchor token."""
    device, block = target.device, head.config.block_size
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(target.vocab_size, (1, length + 1), generator=generator).to(device)
    positions = torch.arange(length, device=device)[None]
    causal = torch.ones(1, length, length, dtype=torch.bool, device=device).tril()
    taps = target.forward(
        tokens[:, :length], position_ids=positions, mask=causal, taps=head.taps
    ).taps
    assert taps is not None
    taps = taps.to(head.dtype)
    ids = torch.full((1, block), head.mask_token_id, device=device)
    ids[:, 0] = tokens[:, length]
    slot_positions = torch.arange(length, length + block, device=device)[None]
    anchors = torch.tensor([[length]], device=device)
    mask = block_mask_function(
        anchors, torch.zeros_like(anchors), length, block, causal=head.config.mask == "causal"
    )
    trained = head(
        head.fuse(taps),
        positions,
        target.embed(ids).to(head.dtype),
        slot_positions,
        dense_mask(mask, 1, block, length + block, device),
    )
    cache = head.new_cache(1)
    for begin, end in ((0, 5), (5, length)):  # as decoding does: in pieces
        valid = torch.ones(1, end - begin, dtype=torch.bool, device=device)
        head.extend(cache, taps[:, begin:end], positions[:, begin:end], valid)
    decoded = head.draft_hidden(cache, target.embed(ids), slot_positions)
    ids[:, 0] = (ids[:, 0] + 1) % target.vocab_size
    moved = head.draft_hidden(cache, target.embed(ids), slot_positions)
    trained, decoded, moved = (target.logits(x[0, 1:]) for x in (trained, decoded, moved))
    return trained, decoded, moved
