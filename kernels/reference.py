"""Each kernel in plain torch: what it must compute, written to be read, on any device.

Arithmetic is fp32 where the kernels accumulate in fp32, and values are rounded to the storage type
at the same places. Signatures follow the kernels'.
"""

import torch
from torch import Tensor


def gather_pages(cache: Tensor, page_table: Tensor, length: int) -> Tensor:
    """[length, kv_heads, head_dim]: one sequence's rows in order.

    cache: [pages, kv_heads, page_size, head_dim]; page_table: [max_pages].
    """
    page_size = cache.shape[2]
    pages = cache[page_table[: -(-length // page_size)].long()]  # [P, kv_heads, page, dim]
    return pages.transpose(1, 2).flatten(0, 1)[:length]


def unpack_ancestors(bits: Tensor, nodes: int) -> Tensor:
    """bool [..., N, nodes] from packed bits [..., N, words]."""
    shift = torch.arange(32, device=bits.device)
    return ((bits[..., None] >> shift) & 1).flatten(-2)[..., :nodes].bool()


def pack_ancestors(parents: Tensor, sizes: Tensor, max_depth: int) -> Tensor:
    """int32 [B, N, ceil(N / 32)]: a node's bit and its ancestors'."""
    batch, nodes = parents.shape
    words = -(-nodes // 32)
    mask = torch.zeros(batch, nodes, words * 32, dtype=torch.bool)
    for row in range(batch):
        for node in range(int(sizes[row])):
            here = node
            while here >= 0:
                mask[row, node, here] = True
                here = int(parents[row, here])
    value = mask.view(batch, nodes, words, 32).long() << torch.arange(32)
    packed = value.sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int().to(parents.device)


def tree_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    prefix_lengths: Tensor,
    node_counts: Tensor,
    ancestor_bits: Tensor | None,
    *,
    scale: float | None = None,
) -> Tensor:
    """Softmax attention under the dense mask, fp32 inside; padding rows are zero."""
    batch, nodes, heads, head_dim = q.shape
    group = heads // keys.shape[1]
    scale = head_dim**-0.5 if scale is None else scale
    out = torch.zeros_like(q)
    for row in range(batch):
        prefix, count = int(prefix_lengths[row]), int(node_counts[row])
        if count == 0:
            continue
        k = gather_pages(keys, page_table[row], prefix + count).float()
        v = gather_pages(values, page_table[row], prefix + count).float()
        k = k.repeat_interleave(group, 1)
        v = v.repeat_interleave(group, 1)
        if ancestor_bits is None:
            tree = torch.ones(count, count, dtype=torch.bool, device=q.device).tril()
        else:
            tree = unpack_ancestors(ancestor_bits[row, :count], count)
        mask = torch.cat([tree.new_ones(count, prefix), tree], 1)  # [N, S]
        scores = torch.einsum("nhd,shd->hns", q[row, :count].float(), k) * scale
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        out[row, :count] = torch.einsum("hns,shd->nhd", weights, v).to(q.dtype)
    return out


def topk_logsumexp(logits: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Best logits first, equal ones by lower id; log-sum-exp of each row."""
    values, tokens = logits.float().sort(dim=-1, descending=True, stable=True)
    return values[:, :width], tokens[:, :width], logits.float().logsumexp(-1)


def build_best_first(
    tokens: Tensor, edge_scores: Tensor, anchors: Tensor, budget: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(tokens, parents, depths, scores, sizes) by sorting each level and then all levels.

    A stable sort keeps equal scores in (depth, parent, rank) order.
    """
    batch, depth, width = tokens.shape
    out = [
        anchors[:, None].repeat(1, budget + 1),
        torch.full((batch, budget + 1), -1),
        torch.zeros(batch, budget + 1, dtype=torch.long),
        torch.full((batch, budget + 1), -torch.inf),
        torch.ones(batch, dtype=torch.long),
    ]
    edges = edge_scores.float().clamp(max=0.0)
    for tree in range(batch):
        out[3][tree, 0] = 0.0
        level = [(0.0, 0, 0)]  # (score, rank, place in `nodes`)
        nodes: list[tuple[float, int, int, int]] = [(0.0, -1, 0, 0)]  # score, parent, depth, rank
        for slot in range(depth):
            children = []
            for score, rank, place in level:
                row = torch.tensor(score) + edges[tree, slot, rank]  # fp32, as on the GPU
                children += [(s, place, r) for r, s in enumerate(row.tolist()) if s > -torch.inf]
            best = sorted(range(len(children)), key=lambda i: -children[i][0])[:budget]
            level = []
            for i in sorted(best):
                score, parent, rank = children[i]
                level.append((score, rank, len(nodes)))
                nodes.append((score, parent, slot + 1, rank))
        chosen = sorted(range(1, len(nodes)), key=lambda i: -nodes[i][0])[:budget]
        number = {0: 0}
        for i in sorted(chosen):
            score, parent, deep, rank = nodes[i]
            number[i] = node = len(number)
            out[0][tree, node] = tokens[tree, deep - 1, rank]
            out[1][tree, node] = number[parent]
            out[2][tree, node] = deep
            out[3][tree, node] = score
        out[4][tree] = len(number)
    return out[0], out[1], out[2], out[3], out[4]


def accept_greedy(
    tokens: Tensor,
    parents: Tensor,
    sizes: Tensor,
    next_tokens: Tensor,
    max_depth: int,
    forced_lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(path, lengths, bonus): down from the root while a child carries the target's token."""
    batch = tokens.shape[0]
    path = torch.full((batch, max_depth + 1), -1)
    bonus = torch.zeros(batch, dtype=torch.long)
    lengths = torch.zeros(batch, dtype=torch.long)
    for row in range(batch):
        limit = max_depth + 1 if forced_lengths is None else int(forced_lengths[row])
        walk = [0]
        while len(walk) < min(limit, max_depth + 1):
            want = int(next_tokens[row, walk[-1]])
            children = [
                v
                for v in range(int(sizes[row]))
                if int(parents[row, v]) == walk[-1]
                and (forced_lengths is not None or int(tokens[row, v]) == want)
            ]
            if not children:
                break
            walk.append(children[0])
        path[row, : len(walk)] = torch.tensor(walk)
        lengths[row] = len(walk)
        bonus[row] = next_tokens[row, walk[-1]]
    return path, lengths, bonus


def compact_kv(
    kv: Tensor, page_table: Tensor, prefix_lengths: Tensor, path: Tensor, lengths: Tensor
) -> Tensor:
    """A copy of kv [layers, 2, pages, kv_heads, page, dim] with the accepted rows in place."""
    page_size = kv.shape[4]
    out = kv.clone()
    for row in range(path.shape[0]):
        for step in range(1, int(lengths[row])):
            source = int(prefix_lengths[row]) + int(path[row, step])
            target = int(prefix_lengths[row]) + step
            from_page = int(page_table[row, source // page_size])
            to_page = int(page_table[row, target // page_size])
            out[:, :, to_page, :, target % page_size] = kv[:, :, from_page, :, source % page_size]
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(norm(x + residual) * weight, x + residual) rounded where Hugging Face rounds."""
    x = (x.sum(0) if x.dim() == 3 else x).to(weight.dtype)
    if residual is not None:
        x = x + residual
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(weight.dtype)
    return normed * weight, x


def silu_mul(gate_up: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """SiLU(gate) * up."""
    dtype = dtype or gate_up.dtype
    x = (gate_up.sum(0) if gate_up.dim() == 3 else gate_up).to(dtype)
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate.float()).to(dtype) * up


def qkv_to_cache(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    rope_table: Tensor,
    positions: Tensor,
    cache_rows: Tensor,
    *,
    heads: int,
    bias: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Queries [T, heads, head_dim]; keys and values are written to the cache in place."""
    _, kv_heads, page_size, head_dim = keys.shape
    x = qkv.sum(0) if qkv.dim() == 3 else qkv.float()
    if bias is not None:
        x = x + bias.float()
    x = x.to(keys.dtype).unflatten(-1, (-1, head_dim))  # [T, heads + 2 kv_heads, dim]
    q, k, v = x.split([heads, kv_heads, kv_heads], 1)
    if q_norm is not None and k_norm is not None:
        q = add_rms_norm(q.reshape(-1, head_dim), None, q_norm, eps)[0].view_as(q)
        k = add_rms_norm(k.reshape(-1, head_dim), None, k_norm, eps)[0].view_as(k)
    cos, sin = rope_table[positions.long()].chunk(2, -1)  # [T, dim / 2]

    def turn(heads_of: Tensor) -> Tensor:
        low, high = heads_of.float().chunk(2, -1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat([low * c - high * s, high * c + low * s], -1).to(heads_of.dtype)

    for row, cache_row in enumerate(cache_rows.tolist()):
        if cache_row >= 0:
            page, offset = divmod(cache_row, page_size)
            keys[page, :, offset] = turn(k)[row]
            values[page, :, offset] = v[row]
    return turn(q)


def small_gemm(x: Tensor, w: Tensor) -> Tensor:
    """x @ w^T in fp32."""
    return x.float() @ w.float().T


def edge_scores(
    tokens: Tensor, best: Tensor, lse: Tensor, anchors: Tensor, parents: Tensor, children: Tensor,
    gates: Tensor | None = None, *, gate: str = "none",
) -> Tensor:  # fmt: skip
    """log-softmax of (log q + S) over the candidates, their mass kept."""
    batch, slots, width = tokens.shape
    before = torch.cat([anchors[:, None, None].expand(-1, 1, width), tokens[:, :-1]], 1)
    a, c = parents[before], children[tokens]  # [B, D, K, r]
    if gates is not None:
        turned = (gates.sum(0) if gates.dim() == 3 else gates).to(a.dtype).float()
        turned = 2 * torch.sigmoid(turned) if gate == "sigmoid" else turned
        a = a * turned.to(a.dtype).view(batch, slots, 1, -1)
    log_q = best.view(batch, slots, 1, width) - lse.view(batch, slots, 1, 1)
    bias = a.float() @ c.float().transpose(2, 3)
    scores = (log_q + bias).log_softmax(-1) + log_q.logsumexp(-1, keepdim=True)
    return scores.clamp(max=0)


def best_chain(tokens: Tensor, edges: Tensor) -> Tensor:
    """The likeliest child of the likeliest child ..."""
    out = torch.empty_like(tokens[:, :, 0])
    for row in range(len(tokens)):
        rank = 0
        for slot in range(tokens.shape[1]):
            rank = int(edges[row, slot, rank].argmax())
            out[row, slot] = tokens[row, slot, rank]
    return out


def fp8_gemm(x: Tensor, values: Tensor, exponents: Tensor) -> Tensor:
    """x @ (values * 2^exponents)^T in fp32."""
    return x.float() @ (values.float() * torch.exp2(exponents.float())[:, None]).T


def route(logits: Tensor, choices: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
    """Softmax in fp32, the best experts, their probabilities rounded to the logits' type."""
    weights, ids = logits.float().softmax(-1).sort(dim=-1, descending=True, stable=True)
    weights, ids = weights[:, :choices], ids[:, :choices]
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids.int(), weights.to(logits.dtype).float()


def experts(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """[C, T, d]: what each choice adds to its token."""
    out = torch.zeros(ids.shape[1], *x.shape)
    for token in range(len(x)):
        for choice, expert in enumerate(ids[token].tolist()):
            both = (gate_up[expert].float() @ x[token].float()).to(x.dtype)
            inner = silu_mul(both[None])[0]
            result = (down[expert].float() @ inner.float()).to(x.dtype).float()
            out[choice, token] = result * weights[token, choice]
    return out


def look_up(
    history: Tensor, prefix: Tensor, limits: Tensor, *, ngram: int, depth: int
) -> tuple[Tensor, Tensor]:
    """What followed the last of the longest earlier matches of each text's end."""
    tokens = torch.zeros(len(history), 1 + depth, dtype=torch.long)
    sizes = torch.ones(len(history), dtype=torch.long)
    for row, last in enumerate(prefix.tolist()):
        text = history[row, : last + 1].cpu().long()
        tokens[row, 0] = text[last]
        lengths = torch.zeros(last, dtype=torch.long)  # of the match that ends at each place
        same = torch.ones(last, dtype=torch.bool)
        for back in range(min(ngram, last)):
            same[:back] = False
            same &= text.roll(back)[:last] == text[last - back]
            lengths += same
        if last and int(lengths.max()):
            end = int((lengths == lengths.max()).nonzero()[-1])
            tokens[row, 1:] = text[end + 1 + torch.arange(depth) % (last - end)]
            sizes[row] = 1 + min(depth, int(limits[row]))
    return tokens.to(history.device), sizes.to(history.device)
