"""A Qwen3-8B and a draft head of its size with random weights, made on the GPU."""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from jetspec.engine.engine import Engine
from jetspec.heads.config import HeadConfig
from jetspec.heads.parallel import ParallelHead, resolve_head_config
from jetspec.targets.target import Target

CONTEXT = 1024
ACCEPTED = 6  # tokens a round commits by force: random weights never accept anything


def random_target(layers: int = 36) -> Target:
    """Qwen3-8B's shape in bf16 with normal(0, 0.02) weights; it has no tokenizer."""
    config = Qwen3Config(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        max_position_embeddings=40960, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    )  # fmt: skip
    with torch.device("cuda"):
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = Qwen3ForCausalLM(config)
        finally:
            torch.set_default_dtype(default)
    return Target(model, None, "random-qwen3-8b", "none")


def random_head(target: Target, **settings: object) -> ParallelHead:
    """Five causal layers over five taps, blocks of 16, in bf16."""
    settings = {"mask_token_id": 151669, "block_size": 16} | settings
    config = resolve_head_config(HeadConfig.model_validate(settings), target)
    with torch.device("cuda"):
        head = ParallelHead(
            config, hidden_size=target.hidden_size, vocab_size=target.vocab_size,
            num_target_layers=target.num_layers,
        )  # fmt: skip
    with torch.no_grad():
        for module in head.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.normal_(0.0, 0.02)
    return head.to(torch.bfloat16).requires_grad_(False)


@torch.no_grad()
def fill(engine: Engine, context: int = CONTEXT) -> None:
    """Put `context` random rows into every slot, as if a prompt had been read."""
    cache, state = engine.cache, engine.state
    cache.kv.normal_()
    if engine.round.head_cache is not None:
        engine.round.head_cache.kv.normal_()
    for slot in range(engine.slots):
        cache.resize(slot, context + 2 * engine.round.nodes + 64)
    cache.upload()
    engine.reach = context + engine.round.nodes + engine.round.depth + 1
    state.anchors.random_(0, 151000)
    state.ids[:, 0] = state.anchors
    state.prefix.fill_(context)
    state.active.fill_(1)
    if state.history is not None:
        state.history.random_(0, 8)  # so few tokens that a suffix has always stood before
    if state.forced is not None:
        state.forced.fill_(min(ACCEPTED, engine.round.depth + 1))
    torch.cuda.synchronize()
