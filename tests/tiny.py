"""Tiny random models for tests: real architectures, a vocabulary of characters, milliseconds."""

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from jetspec.targets.load import from_model
from jetspec.targets.target import Target
from jetspec.trees.draft import Draft

ARCHITECTURES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}
EOS = 1
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}.{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def tiny_tokenizer(vocab_size: int = 64) -> PreTrainedTokenizerFast:
    """One token a character (lower case, digits, some punctuation); unknown ones become <unk>."""
    characters = "abcdefghijklmnopqrstuvwxyz0123456789 .,:;!?'()+-*/="
    words = ["<unk>", "<eos>", "<pad>", "<mask>", *characters]
    words += [f"<{index}>" for index in range(len(words), vocab_size)]
    vocabulary = {word: index for index, word in enumerate(words[:vocab_size])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex("."), behavior="isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="<eos>",
        pad_token="<pad>",
        mask_token="<mask>",
        chat_template=_TEMPLATE,
    )


def tiny_model(
    arch: str = "llama",
    *,
    seed: int = 0,
    vocab_size: int = 64,
    hidden_size: int = 32,
    num_layers: int = 3,
    spread: float = 0.25,
) -> Any:
    """A random fp32 causal LM of one architecture.

    Args:
        spread: standard deviation of the weights; far above the usual 0.02, so that the next
            token depends on the context and near ties are rare.
    """
    config_class, model_class = ARCHITECTURES[arch]
    extra: dict[str, Any] = {}
    if arch == "qwen3_moe":
        extra = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = config_class(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        max_position_embeddings=2048,
        initializer_range=spread,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=2,
        tie_word_embeddings=False,
        **extra,
    )
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        return model_class(config).eval()
    finally:
        torch.set_rng_state(state)


def tiny_target(arch: str = "llama", seed: int = 0, vocab_size: int = 64, **shape: Any) -> Target:
    """A target over `tiny_model`, complete with tokenizer and chat template."""
    model = tiny_model(arch, seed=seed, vocab_size=vocab_size, **shape)
    return from_model(model, tiny_tokenizer(vocab_size), f"tiny-{arch}")


def tiny_head(target: Target, mask: Any = "causal", *, seed: int = 0, **settings: Any) -> Any:
    """A random draft head that fits `target`; `settings` go to HeadConfig."""
    from jetspec.heads.config import HeadConfig
    from jetspec.heads.parallel import new_head
    from jetspec.heads.sizes import resolve_head_config

    shape = {"num_layers": 2, "block_size": 8, "num_taps": 2, **settings}
    config = resolve_head_config(HeadConfig(mask=mask, **shape), target)
    return new_head(config, target, seed)


def random_draft(
    seed: int, batch: int, depth: int, width: int, *, path: bool, coarse: bool
) -> Draft:
    """Random candidates below 50; `coarse` scores are full of ties, `path` rows differ."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.stack(
        [torch.randperm(50, generator=generator)[:width] for _ in range(batch * depth)]
    ).view(batch, depth, width)
    rows = width if path else 1
    logits = torch.randn(batch, depth, rows, width + 3, generator=generator) * 2
    if coarse:
        logits = logits.round()
    log_q = logits.log_softmax(-1)[..., :width]
    if coarse:
        log_q = (log_q * 2).round() / 2
    return Draft(tokens, log_q.expand(-1, -1, width, -1))


class NoisyOracle:
    """A drafter that knows the answers and spoils them, so that acceptance is neither 0 nor 1.

    Args:
        answers: per prompt the true continuation.
        miss: how often a slot lacks the true token.
        sure: how often it is the first candidate where it is one; otherwise its rank is random.
        path: edge rows that differ by parent.
        steep: how far apart the candidates' scores lie; trees grow deeper with it.
        taps: layers to ask for; what is observed is only kept in `observed`.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        vocab_size: int,
        *,
        depth: int = 7,
        width: int = 4,
        miss: float = 0.15,
        sure: float = 0.5,
        path: bool = False,
        steep: float = 2.0,
        seed: int = 0,
        taps: tuple[int, ...] = (),
    ) -> None:
        self.taps = taps
        self.observed: list[list[tuple[int, int, torch.Tensor | None]]] = [[] for _ in prompts]
        self._truth = [[*p, *a] for p, a in zip(prompts, answers, strict=True)]
        self._vocab_size, self._depth, self._width = vocab_size, depth, width
        self._miss, self._sure, self._path = miss, sure, path
        self._steep = steep
        self._generator = torch.Generator().manual_seed(seed)

    def begin(self, batch: int, target: Target) -> None:
        self._rows = list(range(batch))

    def observe(
        self,
        taps: torch.Tensor | None,
        positions: torch.Tensor,
        valid: torch.Tensor,
        tokens: torch.Tensor,
    ) -> None:
        for row, number in enumerate(self._rows):
            for column in range(int(valid[row].sum())):
                tap = None if taps is None else taps[row, column]
                entry = (int(positions[row, column]), int(tokens[row, column]), tap)
                self.observed[number].append(entry)

    def keep_sequences(self, rows: torch.Tensor) -> None:
        self._rows = [self._rows[row] for row in rows.tolist()]

    def propose(self, anchors: torch.Tensor, histories: Sequence[Sequence[int]]) -> Draft:
        batch, width = len(self._rows), min(self._width, self._vocab_size)
        shape = (batch, self._depth)
        first = torch.randint(self._vocab_size, (*shape, 1), generator=self._generator)
        tokens = (first + torch.arange(width)) % self._vocab_size
        chance = torch.rand(*shape, 2, generator=self._generator)
        for row, number in enumerate(self._rows):
            truth = self._truth[number]
            assert int(anchors[row]) == histories[row][-1]
            if list(histories[row]) != truth[: len(histories[row])]:
                continue  # the text has left the answer: every candidate is a guess
            for slot, token in enumerate(truth[len(histories[row]) :][: self._depth]):
                if chance[row, slot, 0] < self._miss or token in tokens[row, slot]:
                    continue
                luck = float(chance[row, slot, 1]) - self._sure
                rank = 0 if luck < 0 else 1 + int(luck / (1 - self._sure) * (width - 1))
                tokens[row, slot, rank] = token
        rows = width if self._path else 1
        logits = torch.randn(*shape, rows, width + 1, generator=self._generator)
        logits = logits.sort(dim=-1, descending=True).values * self._steep
        log_q = logits.log_softmax(-1)[..., :width].expand(-1, -1, width, -1)
        return Draft(tokens, log_q)
