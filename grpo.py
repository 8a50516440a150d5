"""GRPO without a KL term, written by hand: sample, score, compare within the group, clip. SFT and DPO on the same log-probs.

    completions = sample(model, prompts, G, ...)              # P prompts -> B = P*G completions, once a step
    adv_PG      = group_advantages(rewards_PG)                # who was better than the siblings
    weight_B    = row_weights(lengths_B, known_B, norm, n)    # once per optimiser update, over ALL of its rows
    for rows in micro_batches:
        logp_BT, mask_BT = token_logprobs(model, ...)         # with gradient; or shared_logprobs, the same for less
        loss, metrics    = policy_loss(logp_BT, ...)          # a plain sum: losses, gradients and metrics add up
        loss.backward()

The two baselines put another loss in the place of `policy_loss`. Their completions come from data, not from `sample`:

    loss, metrics = sft_loss(logp_BT, mask_BT, weight_B)                       # imitate every completion
    logp_N        = trajectory_logprobs(logp_BT, mask_BT, trajectory_B, N)     # the rows of a dialogue, added up
    loss, metrics = dpo_loss(chosen_N, rejected_N, ref_chosen_N, ref_rejected_N, weight_N, beta)

Axis suffixes: _P prompts, _G completions of one prompt, _B = P*G rows in prompt-major order (p0 g0, p0 g1, ..., p1 g0),
_T completion tokens, _V vocabulary, _N trajectories or pairs of them; in `shared_logprobs` _R rows of _F tokens
behind _L of prompts; in `attend` _N heads of keys and values, _h of queries for each, _K tokens of a prompt, _D numbers. Copy functions out:
they need torch and nothing else here, but that `prefill` needs `counts_columns`, `keep` and `recall`, and these `join`; `sample` also
`prefill`, `hold_once` and `attend`, and `shared_logprobs` also `prefill`, `head_logprobs` and `token_logprobs`.
`checkpoint_layers` trades time for memory in all of them. Tested with transformers 5.24: older ones say past_key_values for `cache`.
Left out: the optimiser, micro-batching, rewards, and everything about text. This file sees token ids and numbers.

Where this departs from the textbook (GRPO as in DeepSeekMath, arXiv 2402.03300, section 4.1):
1. No KL penalty and no reference model. SpeakRL (arXiv 2512.13159) trains without, which
   saves a second copy of the weights and a forward pass. What holds the policy near its start: few and small steps.
2. The two sides of the clip are separate numbers (low, high). Equal ones, (0.2, 0.2), are the textbook.
3. A reward can be unknown (NaN: the judge was not reachable). Such a row leaves mean, std, loss and denominator; it
   is never counted as 0. A group without differences has advantages of exactly 0.
4. The mean over tokens and rows is folded into one weight per row, computed over the whole optimiser update, so that
   the loss is a sum and does not depend on how the rows are cut into micro-batches.
5. No mask over turns. A multi-turn dialogue is a list of rows, one per decision point: the prompt holds all that was
   said before (user, tools, and the agent's own earlier turns), the completion is what the policy sampled just now.
   Only completion tokens are scored, so text of others cannot be trained on.
6. No value network: the mean of the group is the baseline. It includes the sample itself, which shrinks the expected
   gradient by (G-1)/G against leave-one-out (before the division by std); we keep it, as the paper does.
"""

import torch


@torch.no_grad()
def sample(model, prompts, G=1, *, max_new_tokens, temperature, eos_ids, pad_id, seeds, stretch=16, kept=None):
    """Sample G completions for each prompt from exactly the distribution that `token_logprobs` scores.

    prompts: P non-empty lists of token ids; seeds: P ints. Returns P*G lists of token ids, prompt-major. Each includes its end token
    if one was sampled; a completion that does not end in one of `eos_ids` was cut off by `max_new_tokens`. temperature 0 is greedy.
    The completions of a prompt depend on its ids, its seed, `max_new_tokens` and the weights, but for rounding not on the prompts beside it:
    one call or many, one process or several come to the same. The caller's random stream stays where it was.
    All rows go through the model at once. A prompt is computed once for its G completions and its keys and values are held once
    (`hold_once`); every `stretch` tokens the rows that have ended are dropped. With `kept`, the next turn of a dialogue computes
    only what is new in its prompt: see `keep`. The model comes back as it was: train/eval mode of every submodule, configs.

    >>> sample(model, [[5, 6], [7]], 2, max_new_tokens=3, temperature=1.0, eos_ids=[1], pad_id=0,
    ...        seeds=[0, 1])                                                                      # doctest: +SKIP
    [[9, 1], [9, 8, 7], [4, 1], [1]]
    """
    if not prompts:
        return []
    assert len(seeds) == len(prompts), f"{len(prompts)} prompts need as many seeds, not {len(seeds)}"
    eos_ids, device, config = sorted(eos_ids), model.device, model.get_decoder().config
    uniform_BT = torch.cat([torch.rand(G, max_new_tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
                            for seed in seeds]).to(device)

    def draw(ids_BL, logits_BV):
        """As scores for argmax, the first token whose cumulative probability exceeds the row's own number in [0, 1). generate()'s own
        draw takes random numbers for all tokens of all rows from one stream: slower, and no row could be dropped without changing others."""
        total_BV = (logits_BV / temperature).softmax(-1).cumsum(-1, dtype=torch.float64)
        if not total_BV[:, -1].isfinite().all():
            raise FloatingPointError("the probabilities of the next token are no numbers")
        number_B1 = uniform_BT[going, ids_BL.shape[1] - L, None] * total_BV[:, -1:]  # the last one is 1 but for rounding
        return torch.zeros_like(logits_BV).scatter_(1, torch.searchsorted(total_BV, number_B1, right=True), 1)

    # generate() fills everything that is not passed from model.generation_config: Qwen2.5 ships top_k 20, top_p 0.8,
    # repetition_penalty 1.05, others ban or force tokens. Each of these makes the sampler another distribution than
    # the one in the loss, and passing None does not switch it off. So generate() sees an empty config.
    generation_config, attention_name = model.generation_config, getattr(config, "_attn_implementation", None)
    modes = [(module, module.training) for module in model.modules()]
    # To hold a prompt once, its attention must be in our hands. Where it cannot be, a prompt is repeated for its completions.
    once = not counts_columns(model) and attention_name == "sdpa" and model._can_set_attn_implementation()
    try:
        model.generation_config = type(generation_config)()
        model.eval()  # no dropout, and gradient checkpointing, which would switch the cache off, is for train mode only
        ids, attention, cache = prefill(model, prompts, 1 if once else G, pad_id, kept)
        if once:
            ids, attention, once = ids.repeat_interleave(G, 0), attention.repeat_interleave(G, 0), cache is not None
        completions, L = [[] for _ in ids], ids.shape[1]
        going = stay = torch.arange(len(ids), device=device)  # rows without an end token yet; all of them are equally long
        prompt_B = going // G
        while len(going):
            length = ids.shape[1] - L
            if once:
                prompt_B = hold_once(cache, attention, prompt_B, stay, stretch)
                config._attn_implementation = "behind_prompts"
            out = model.generate(
                input_ids=ids, attention_mask=attention, cache=cache, use_cache=True, do_sample=False,
                logits_processor=[draw] if temperature else [], eos_token_id=eos_ids or None, pad_token_id=pad_id,
                max_new_tokens=min(max_new_tokens - length, max_new_tokens if cache is None else stretch),  # else all is computed anew
            )
            if once and not all(layer.asked for layer in cache.layers):  # it attends in a way of its own; what it has sampled is worthless
                for layer in cache.layers:
                    del layer.update, layer.get_seq_length
                cache.batch_repeat_interleave(G)
                once, config._attn_implementation = False, attention_name
                continue
            stay = []
            for i, (b, new) in enumerate(zip(going.tolist(), out[:, ids.shape[1]:].tolist())):
                # Cut behind the first end token, by id. Never by the pad: in many models it is the end token itself.
                # A row without an end token holds no pads, because generate() pads a row only after its end.
                end = next((t + 1 for t, token in enumerate(new) if token in eos_ids), None)
                completions[b] += new[:end]
                if end is None and length + len(new) < max_new_tokens:
                    stay.append(i)
            attention = torch.cat([attention, attention.new_ones(len(ids), out.shape[1] - ids.shape[1])], 1)
            # Most rows end early, and generate() would compute them on with the longest.
            stay = torch.tensor(stay, dtype=torch.long, device=device)
            if not once and cache is not None and 0 < len(stay) < len(ids):
                cache.batch_select_indices(stay)
            ids, attention, going, prompt_B = out[stay], attention[stay], going[stay], prompt_B[stay]
    finally:
        model.generation_config = generation_config
        if attention_name:
            config._attn_implementation = attention_name
        for module, mode in modes:
            module.training = mode
    return completions


def hold_once(cache, attention_BL, prompt_B, stay_B, columns):
    """Let the next `columns` tokens of B rows be decoded behind prompts whose keys and values are held once for all of their rows: what is
    new is written in place into buffers of the rows' own, and `attend` reads both. A repeated prompt would be read G times for every
    token, and by itself a cache copies all that it holds for every token. Whether `attend` was asked stands in `asked` of each layer.

    attention_BL: (B, L) int64; prompt_B: (B,) int64, ascending, which row of the cache is a row's prompt; stay_B: (B,) int64, which
    of the rows before it was. Returns prompt_B anew, because prompts whose rows have all ended are dropped. For caches of ordinary layers only.
    """
    import weakref
    from transformers import AttentionInterface
    AttentionInterface.register("behind_prompts", attend)
    alive_P, prompt_B = prompt_B.unique(return_inverse=True)
    if len(alive_P) < len(cache.layers[0].keys):
        cache.batch_select_indices(alive_P)
    P, _, K, _ = cache.layers[0].keys.shape
    first_P = torch.searchsorted(prompt_B, torch.arange(P, device=prompt_B.device))
    slot_B = torch.arange(len(prompt_B), device=prompt_B.device) - first_P[prompt_B]  # its number among those of its prompt
    G, hidden_P11K = int(slot_B.max()) + 1, attention_BL[first_P, None, None, :K] == 0
    # -inf would be NaN where all is hidden, a prompt of one token.
    bias_P11K = torch.zeros(hidden_P11K.shape, device=prompt_B.device).masked_fill(hidden_P11K, torch.finfo(torch.float32).min)

    def write_in_place(layer):
        layer = weakref.proxy(layer)  # a cycle would keep the old buffers until the garbage collector comes by
        own = vars(layer).get("own") or [x.new_empty(len(stay_B), x.shape[1], 0, x.shape[3]) for x in (layer.keys, layer.values)]
        room = [torch.cat([x[stay_B], x.new_empty(len(stay_B), x.shape[1], columns, x.shape[3])], 2) for x in own]
        layer.own, layer.asked = [x[:, :, :own[0].shape[2]] for x in room], False

        def update(*new, **kwargs):
            start = layer.own[0].shape[2]
            for buffer, x in zip(room, new):
                buffer[:, :, start:start + x.shape[2]] = x
            layer.own = [buffer[:, :, :start + new[0].shape[2]] for buffer in room]
            layer.own[0].behind = layer, bias_P11K, prompt_B, slot_B, G
            return layer.own
        return update

    for layer in cache.layers:
        layer.update = write_in_place(layer)
        layer.get_seq_length = lambda layer=weakref.proxy(layer): layer.keys.shape[2] + layer.own[0].shape[2]
    return prompt_B


def attend(module, query_BH1D, key_BNTD, value_BNTD, attention_mask=None, scaling=None, **kwargs):
    """Attention of one new token of each row to its prompt (`hold_once`) and to the T tokens of its own: (B, 1, H, D), None, as from the
    attention functions of transformers. The two parts have a softmax each, weighed by the sums that these divide by.

    The completions of a prompt ask its keys together, as one product of matrices. Source: Hydragen, arXiv 2402.05099, section 3.
    """
    layer, bias_P11K, prompt_B, slot_B, G = getattr(key_BNTD, "behind", [None] * 5)
    if layer is None or value_BNTD is not layer.own[1]:  # a model that changes what the cache gave it: see `asked`
        return query_BH1D.transpose(1, 2), None
    layer.asked, keys_PNKD, values_PNKD = True, layer.keys, layer.values

    def part(score, value):
        """(attention, log of the sum of exp(score)); the largest weight gives it without a second pass of exp."""
        weight = score.softmax(-1)
        return weight @ value.float(), score.amax(-1, keepdim=True) - weight.amax(-1, keepdim=True).log()

    with torch.autocast(key_BNTD.device.type, enabled=False):  # scores in float32, as in the kernels that this replaces
        (B, H, _, D), (P, N, _, _) = query_BH1D.shape, keys_PNKD.shape
        h = H // N
        query_BNhD = (query_BH1D.float() * (D ** -0.5 if scaling is None else scaling)).reshape(B, N, h, D)
        query_PNGhD = query_BNhD.new_zeros(P, N, G, h, D)
        query_PNGhD[prompt_B, :, slot_B] = query_BNhD
        behind = part(query_PNGhD.view(P, N, G * h, D) @ keys_PNKD.float().mT + bias_P11K, values_PNKD)
        behind, log_sum = (x.view(P, N, G, h, -1)[prompt_B, :, slot_B] for x in behind)
        own, own_log_sum = part(query_BNhD @ key_BNTD.float().mT, value_BNTD)
        return own.lerp(behind, (log_sum - own_log_sum).sigmoid()).reshape(B, 1, H, -1).to(value_BNTD.dtype), None


def prefill(model, prompts, G, pad_id, kept=None):
    """Forward P prompts once, all but their last token, and repeat what the model keeps of them G times.

    In two levels: what all prompts begin with (system text, tool schemas: S tokens) goes through the network once, and on
    top of it the rest of each prompt. So P prompts of S + p tokens cost S + P * (p - 1) tokens, whatever G is. One level (S = 0)
    where prompts of different lengths meet a model that counts columns. In place of the first level, what an earlier call has
    kept of every prompt (see `keep`).

    prompts: P non-empty lists of token ids. Returns (ids_BL, attention_BL, cache): int64, G rows a prompt, laid out as
    shared | padding | rest, with `kept` padding | prompt (the last prompt token must stand where the first completion token is
    predicted); and the cache of their first L - 1 columns, with gradient unless it is switched off. cache is None where there is nothing to
    keep (L = 1), and, with a warning, where the model keeps what cannot be repeated: recurrent states.
    """
    decoder, P, lengths = model.get_decoder(), len(prompts), [len(prompt) for prompt in prompts]
    assert min(lengths) > 0, f"every prompt needs at least one token, lengths are {lengths}"

    def lay_out(done_P):
        """(ids_PL, attention_PL, K): padding | the first done_P tokens, up to column K | padding | rest."""
        K, M = max(done_P), max(n - k for n, k in zip(lengths, done_P))
        rows = [(K - k, p[:k], M - len(p) + k, p[k:]) for p, k in zip(prompts, done_P)]
        ids = [[*[pad_id] * a, *head, *[pad_id] * b, *tail] for a, head, b, tail in rows]
        attention = [[0] * a + [1] * len(head) + [0] * b + [1] * len(tail) for a, head, b, tail in rows]
        return torch.tensor(ids, device=model.device), torch.tensor(attention, device=model.device), K

    # Padding between the two levels would push what is shared out of a sliding window.
    S = min(lengths) - 1 if min(lengths) == max(lengths) or not counts_columns(model) else 0
    S = next((t for t in range(S) if len({prompt[t] for prompt in prompts}) > 1), S)
    cache, done_P = kept and recall(kept[0], prompts) or (None, [S] * P)
    ids_PL, attention_PL, K = lay_out(done_P)
    L = ids_PL.shape[1]
    # Without position ids a model with absolute positions (GPT-2) counts the padding.
    positions_PL = (attention_PL.cumsum(1) - 1).clamp(min=0)
    for first, last, rows in ((0, K, 1), (K, L - 1, P))[cache is not None:]:
        if first < last:
            out = decoder(input_ids=ids_PL[:rows, first:last], attention_mask=attention_PL[:rows, :last],
                          position_ids=positions_PL[:rows, first:last], cache=cache, use_cache=True)
            cache = getattr(out, "cache", None)
            # By name, not by the method: what keeps more than keys and values inherits the method, and repeats only those.
            others = {type(x).__name__ for x in (cache, *getattr(cache, "layers", []))} - {"DynamicCache", "DynamicLayer", "DynamicSlidingWindowLayer"}
            if others:
                import warnings
                warnings.warn(f"{type(model).__name__} keeps what cannot be repeated ({', '.join(sorted(others))}): a prompt is computed "
                              "once for each completion")
                cache = None
                break
        if cache is not None and rows < P:
            cache.batch_repeat_interleave(P)
    if kept and cache is not None and not counts_columns(model):
        cache = keep(kept[1], prompts, attention_PL, cache)
        ids_PL, attention_PL, _ = lay_out([n - 1 for n in lengths])
    if cache is not None and G > 1:  # once would be a copy too
        cache.batch_repeat_interleave(G)
    return ids_PL.repeat_interleave(G, 0), attention_PL.repeat_interleave(G, 0), cache


def keep(kept, prompts, attention_PL, cache, max_bytes=2**31):
    """Put the keys and values of P prompts, all but their last tokens, into the dict `kept`, unless it would hold more than max_bytes then.
    Returns them as a cache with all padding on the left.

    For dialogues: the prompt of a turn begins with that of the turn before it, however the rows are sorted and grouped by then. The caller
    passes kept=(what the calls of the last turn kept, a new dict) to each call of `sample`, for one model while its weights stay as
    they are; models that count columns keep nothing.
    """
    real_PK, lengths = attention_PL[:, :-1].bool(), [len(prompt) - 1 for prompt in prompts]
    layers = [[x.transpose(1, 2)[real_PK].split(lengths) for x in (layer.keys, layer.values)] for layer in cache.layers]  # a copy
    rows = [[(keys[p], values[p]) for keys, values in layers] for p in range(len(prompts))]
    if sum(x.nbytes for row in [*rows, *(row for _, row in kept.values())] for pair in row for x in pair) <= max_bytes:
        kept |= {tuple(prompt[:-1]): (type(cache), row) for prompt, row in zip(prompts, rows) if len(prompt) > 1}
    return join(type(cache), rows)


def recall(kept, prompts):
    """(a cache with a row for each of P prompts, padded on the left; how many of its tokens each has there), from what `keep` has put
    into the dict `kept`, or None if a prompt does not begin with anything in it.
    """
    lengths = sorted({len(tokens) for tokens in kept}, reverse=True)
    found = [next((tokens for n in lengths if n < len(p) and (tokens := tuple(p[:n])) in kept), None) for p in prompts]
    if None in found:
        return None
    return join(kept[found[0]][0], [kept[tokens][1] for tokens in found]), [len(tokens) for tokens in found]


def join(kind, rows):
    """A cache of this class, from the keys and values of each row and layer, padded on the left."""
    cache = kind()
    for k, pairs in enumerate(zip(*rows)):
        keys, values = (torch.nn.utils.rnn.pad_sequence(x, batch_first=True, padding_side="left").transpose(1, 2) for x in zip(*pairs))
        cache.update(keys, values, k)
    return cache


def token_logprobs(model, prompts, completions, temperature, pad_id=0):
    """Log-probabilities of the completion tokens, at the sampling temperature, with gradient.

    prompts: P non-empty lists of token ids; completions: P*G lists, prompt-major, as they were sampled (never decoded
    and encoded again; an empty one gives a row that is all masked). temperature > 0: the one that was sampled with.
    Returns (logp_BT, mask_BT): float32, whatever dtype the model computes in, and bool; T is the longest completion,
    token t of row b stands at [b, t], and logp is 0 where mask is False. The mask comes from the lengths, so it does
    not matter which id `pad_id` is. Padding and batch mates change nothing (for a dense model, up to rounding).

    Dropout must be off, or the ratio of two passes over the same weights is not 1.
    Several tensors of B * T * V * 4 bytes live at the peak (16 rows, T 1024, V 151936: 9.3 GiB each): that, not the
    weights, decides how many rows a micro-batch can hold. `shared_logprobs` does without.
    """
    assert temperature > 0, f"temperature is {temperature}; score greedy samples at the temperature of the policy, 1.0"
    P, B = len(prompts), len(completions)
    assert P > 0 and B % P == 0, f"{B} completions are no multiple of {P} prompts"
    rows = [(prompts[b // (B // P)], completion) for b, completion in enumerate(completions)]
    lengths = [len(prompt) for prompt, _ in rows]
    assert min(lengths) > 0, f"every prompt needs at least one token, lengths are {lengths}"
    S, T = max(lengths), max(len(completion) for _, completion in rows)

    # Prompts are padded on the left, completions on the right: all completions are then the last T columns, and the
    # model computes logits (the large tensor) for these only.
    ids = [[pad_id] * (S - len(p)) + list(p) + list(c) + [pad_id] * (T - len(c)) for p, c in rows]
    real = [[0] * (S - len(p)) + [1] * (len(p) + len(c)) + [0] * (T - len(c)) for p, c in rows]
    ids = torch.tensor(ids, device=model.device)
    attention = torch.tensor(real, device=model.device)
    # Without position ids a model with absolute positions (GPT-2) counts the left padding.
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    # logits_to_keep = T + 1: the logits that predict token t stand one column before it. 0 would mean "all".
    logits_BTV = model(input_ids=ids, attention_mask=attention, position_ids=positions, logits_to_keep=T + 1,
                       use_cache=False).logits[:, :-1]
    # float32 before anything else: a bfloat16 log_softmax is off by up to 1 % of a probability. The temperature
    # divides the logits, not the log-probabilities. Gather minus logsumexp: log_softmax would hold V values per token.
    logits_BTV = logits_BTV.float() / temperature
    chosen_BT = logits_BTV.gather(-1, ids[:, S:, None])[..., 0]
    mask_BT = attention[:, S:].bool()
    return torch.where(mask_BT, chosen_BT - logits_BTV.logsumexp(-1), 0.0), mask_BT


def shared_logprobs(model, prompts, completions, temperature, pad_id=0):
    """`token_logprobs`, contract and result, with every token computed once, in memory that hardly depends on V.

    P prompts that share S tokens and have p more each, with G completions of c, cost S + P*p + P*G*c tokens and not
    P*G*(S + p + c). The G completions of a prompt stand one behind the other in one row, blind to each other, so keys and values of
    the prompt are held once; the gradient flows through the cache. Models that count columns get a row for each completion, and
    a copy of keys and values. Only tokens of completions reach the output head (`head_logprobs`). Models whose cache cannot be
    repeated take the plain function.
    """
    assert temperature > 0, f"temperature is {temperature}; score greedy samples at the temperature of the policy, 1.0"
    P, B = len(prompts), len(completions)
    assert P > 0 and B % P == 0, f"{B} completions are no multiple of {P} prompts"
    R = B if counts_columns(model) else P
    _, attention_RL, cache = prefill(model, prompts, R // P, pad_id)
    if cache is None:
        return token_logprobs(model, prompts, completions, temperature, pad_id)

    # A row, on the cache of L - 1 columns: the last prompt token, which predicts the first token of each completion, and then its
    # completions, all but their last tokens, which predict nothing. `part` says to which completion a token belongs (0: to the prompt),
    # `step` how far it is from the last prompt token, `source` in which column each completion token is predicted.
    rows = []
    for r in range(R):
        ids, part, step, source = [prompts[r * P // R][-1]], [0], [0], []
        for k, completion in enumerate(completions[r * B // R:(r + 1) * B // R]):
            source += [0, *range(len(ids), len(ids) + len(completion) - 1)][:len(completion)]
            ids += completion[:-1]
            part += [k + 1] * (len(completion) - 1)
            step += range(1, len(completion))
        rows.append([torch.tensor(x, dtype=torch.long) for x in (ids, part, step, source)])
    ids, part, step, source = zip(*rows)
    ids_RF, part_RF, step_RF = (torch.nn.utils.rnn.pad_sequence(x, batch_first=True, padding_value=value).to(model.device)
                                for x, value in ((ids, pad_id), (part, -1), (step, 0)))
    F = ids_RF.shape[1]
    if R < B:
        seen_RFF = ((part_RF[:, None] == part_RF[:, :, None]) | (part_RF[:, None] == 0)).tril()  # [r, query, key]
        seen_RFK = torch.cat([attention_RL[:, None, :-1].bool().expand(-1, F, -1), seen_RFF], 2)
        attention = torch.zeros(R, 1, *seen_RFK.shape[1:], dtype=model.dtype, device=model.device).masked_fill(~seen_RFK[:, None], -torch.inf)
    else:
        attention = torch.cat([attention_RL, (part_RF[:, 1:] > 0).long()], 1)  # windows and causality are then the model's own affair
    out = model.get_decoder()(input_ids=ids_RF, attention_mask=attention, position_ids=attention_RL.sum(1, keepdim=True) - 1 + step_RF,
                              cache=cache, use_cache=True)

    source_N = torch.cat([r * F + columns for r, columns in enumerate(source)]).to(model.device)
    tokens_N = torch.tensor([token for completion in completions for token in completion], dtype=torch.long, device=model.device)
    # index_select, not [source_N]: a prompt's last token is in there G times, and the backward pass of [] adds up in whatever order its threads come.
    hidden_ND = out.last_hidden_state.flatten(0, 1).index_select(0, source_N)
    logp_N = head_logprobs(model, type(out), hidden_ND, tokens_N, temperature)
    lengths_B = torch.tensor([len(completion) for completion in completions], device=model.device)
    mask_BT = torch.arange(int(lengths_B.max()), device=model.device) < lengths_B[:, None]
    return torch.zeros(mask_BT.shape, device=model.device).masked_scatter(mask_BT, logp_N), mask_BT


def counts_columns(model):
    """Whether the model tells the distance of two tokens by their columns and not by `position_ids`: sliding windows, chunks, ALiBi.
    It then cannot read a row with padding between its tokens, or with several completions in it."""
    import inspect
    decoder = model.get_decoder()
    return ("position_ids" not in inspect.signature(decoder.forward).parameters
            or any(getattr(decoder.config, name, None) for name in ("sliding_window", "attention_chunk_size", "window_size", "alibi")))


def head_logprobs(model, output_type, hidden_ND, tokens_N, temperature, chunk_bytes=2**26):
    """Log-probabilities of N tokens from the hidden states that predict them, without N * V logits in memory.

    hidden_ND: (N, D), the last hidden states of model.get_decoder(); output_type: the class it returned them in; tokens_N: (N,)
    int64. Returns logp_N, float32, with gradient. Logits are made for a chunk of tokens at a time (their float32 take
    chunk_bytes, and a few such tensors live at once), and, if there are several, again in the backward pass instead of being kept.
    """
    decoder = model.get_decoder()

    def logprobs(hidden_nD, tokens_n):
        # The model's own forward with the body skipped, not its output matrix: models scale or cap their logits (Gemma 2,
        # Cohere, Granite), each in its own way.
        own = vars(decoder).get("forward")
        decoder.forward = lambda *args, **kwargs: output_type(last_hidden_state=hidden_nD[None])
        try:
            logits_nV = model(input_ids=tokens_n[None], use_cache=False).logits[0].float() / temperature
        finally:
            del decoder.forward
            if own is not None:
                decoder.forward = own
        return logits_nV.gather(-1, tokens_n[:, None])[:, 0] - logits_nV.logsumexp(-1)

    n = max(1, chunk_bytes // (4 * len(model.get_output_embeddings().weight)))
    if len(tokens_N) <= n:
        return logprobs(hidden_ND, tokens_N)
    return torch.cat([torch.utils.checkpoint.checkpoint(logprobs, *chunk, use_reentrant=False, preserve_rng_state=False)
                      for chunk in zip(hidden_ND.split(n), tokens_N.split(n))])


def checkpoint_layers(model):
    """Gradient checkpointing that keeps the cache: from now on each layer of the decoder remembers what went in, no more, and
    the backward pass runs it again. About a third more work in the update; without gradients (sampling) nothing changes.

    transformers' own drops the cache, since a second run would append to it a second time, and with it all that is shared. Here
    the second run starts from the keys and values that the first one found. For a model in eval mode (dropout would differ).
    """
    import copy
    from torch.utils.checkpoint import checkpoint

    def checkpointed(forward, k):
        def wrapper(hidden_BTD, *args, **kwargs):
            if not torch.is_grad_enabled():
                return forward(hidden_BTD, *args, **kwargs)
            cache = next((a for a in (*args, *kwargs.values()) if hasattr(a, "layers")), None)
            if cache is None:
                return checkpoint(forward, hidden_BTD, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
            found = copy.copy(cache.layers[k])  # an update puts new tensors in its place and leaves these as they are

            def run(hidden_BTD):
                now, cache.layers[k] = cache.layers[k], copy.copy(found)
                try:
                    return forward(hidden_BTD, *args, **kwargs), cache.layers[k]
                finally:  # the second run is broken off by an exception as soon as it has made what is missing
                    cache.layers[k] = now

            out, cache.layers[k] = checkpoint(run, hidden_BTD, use_reentrant=False, preserve_rng_state=False)
            return out
        return wrapper

    layers = next(module for module in model.get_decoder().children() if isinstance(module, torch.nn.ModuleList))
    for k, layer in enumerate(layers):
        layer.forward = checkpointed(layer.forward, k)


def group_advantages(rewards_PG):
    """(r - mean) / (std + 1e-4) within each group; std is unbiased (divides by G-1).

    rewards_PG: (P, G) floats, one row per *draw* of a prompt (a prompt drawn twice is two groups); NaN = unknown.
    Returns adv_PG, float32. A row of unknown reward gets 0 and stays out of its group's mean and std (tell
    `row_weights` too). A flat group gets exactly 0: known rewards that differ by less than 1e-6, or fewer than two of
    them. No other group is all 0, so `(adv_PG == 0).all(1)` finds the flat groups (log their share: binary rewards and
    a small G make most groups flat). Source: DeepSeekMath 4.1.2; unbiased as in torch.std.

    >>> group_advantages(torch.tensor([[1., 0., 0., 0.], [1., float("nan"), 0., 1.], [1.6, 1.6, 1.6, 1.6]]))
    tensor([[ 1.4997, -0.4999, -0.4999, -0.4999],
            [ 0.5773,  0.0000, -1.1545,  0.5773],
            [ 0.0000,  0.0000,  0.0000,  0.0000]])
    """
    rewards_PG = rewards_PG.double()  # in float32 eight times 1.6 leaves a rounding residue with one sign for all
    known_PG = ~rewards_PG.isnan()
    count_P1 = known_PG.sum(1, keepdim=True)
    mean_P1 = rewards_PG.nansum(1, keepdim=True) / count_P1.clamp(min=1)
    diff_PG = torch.where(known_PG, rewards_PG - mean_P1, 0.0)
    std_P1 = (diff_PG.square().sum(1, keepdim=True) / (count_P1 - 1).clamp(min=1)).sqrt()
    highest_P1 = rewards_PG.masked_fill(~known_PG, -torch.inf).amax(1, keepdim=True)
    lowest_P1 = rewards_PG.masked_fill(~known_PG, torch.inf).amin(1, keepdim=True)
    flat_P1 = (count_P1 < 2) | (highest_P1 - lowest_P1 < 1e-6)
    return torch.where(flat_P1, 0.0, diff_PG / (std_P1 + 1e-4)).float()


def row_weights(lengths_B, known_B, norm, max_len):
    """The weight of each token of a row, so that sum(weight * mask * token_loss) is the mean that `norm` names.

    lengths_B: (B,) ints, completion lengths; known_B: (B,) bools, False where the reward is unknown; max_len: the
    sampling limit. Returns weight_B, float32. Only known rows weigh anything and count in the denominators:
      "sequence"  mean over rows of the mean over tokens    1 / (rows * length)           GRPO
      "token"     mean over all tokens                      1 / sum of lengths            DAPO, arXiv 2503.14476
      "constant"  sum of tokens over a constant             1 / (rows * max_len)          Dr. GRPO, arXiv 2503.20783
    Raises ValueError for another `norm`.

    Call it ONCE per optimiser update, with all rows of the update, before the micro-batch loop, and divide by nothing
    afterwards: a mean per micro-batch would weigh tokens by the company they happen to have. Rows of flat groups
    belong in here even if nobody forwards them: their gradient is 0, their place in the mean is not.

    >>> row_weights(torch.tensor([2, 6, 4]), torch.tensor([True, True, False]), "token", max_len=8)
    tensor([0.1250, 0.1250, 0.0000])
    """
    known_B = known_B.bool()
    lengths_B = torch.where(known_B, lengths_B, 0).double()
    rows = known_B.sum()
    if norm == "sequence":
        weight_B = 1 / (rows * lengths_B)
    elif norm == "token":
        weight_B = 1 / lengths_B.sum().expand_as(lengths_B)
    elif norm == "constant":
        weight_B = 1 / (rows * max_len).expand_as(lengths_B)
    else:
        raise ValueError(f"norm is {norm!r}; it must be sequence, token or constant")
    return torch.where(lengths_B > 0, weight_B, 0.0).float()  # nothing to train (all unknown, all empty): 0, not 1/0


def policy_loss(logp_BT, logp_old_BT, adv_B, mask_BT, weight_B, clip=(0.2, 0.2)):
    """The clipped policy loss: sum of weight * -min(r*A, clip(r, 1-low, 1+high)*A), r = exp(logp - logp_old).

    logp_BT: (B, T) with gradient; logp_old_BT: (B, T), of the weights that sampled (detached here, so `logp_BT` itself
    may be passed for the first and only update of a batch); adv_B, weight_B: (B,); mask_BT: (B, T) bool; clip: (low,
    high). Returns (loss, metrics): a 0-dim tensor, and a dict of detached 0-dim tensors. All are sums, so those of the
    micro-batches add up. Divide the first three by `weight` to read them as means over the rows that were forwarded:
      clip_fraction  share of tokens whose gradient the clip has cut off
      kl_old_new     KL(old || new) = E_old[r - 1 - log r], an estimator that is never negative (Schulman's k3)
      entropy        E_old[-logp_old], of the sampler at its temperature
      weight         sum of the weights
      tokens         number of tokens (unweighted)
    The loss of the first update (ratio 1) is about 0 with norm "sequence" and says nothing: the advantages of a group
    cancel. Its gradient does not.
    Source: PPO, arXiv 1707.06347, eq. 7; GRPO as above.

    >>> logp = torch.tensor([[-1., -2.], [-0.5, -3.]], requires_grad=True)
    >>> loss, metrics = policy_loss(logp, logp, torch.tensor([1., -1.]), torch.ones(2, 2).bool(), torch.full((2,), 1/4))
    >>> loss.backward(); loss.item(), logp.grad, metrics["clip_fraction"].item()
    (0.0, tensor([[-0.2500, -0.2500],
            [ 0.2500,  0.2500]]), 0.0)
    """
    low, high = clip
    logp_old_BT = logp_old_BT.detach()  # else the ratio is the constant 1 and the gradient vanishes
    # where() before exp(): an overflow on a masked token would come back as inf * 0 = NaN in the gradient.
    # The clamp keeps exp() finite, so that the branch which min() does not take has gradient 0 and not inf * 0. Beyond
    # 20 the token has gradient 0 also for A < 0, where PPO does not clip: there the ratio is above 4.8e8, and one such
    # token, true or broken, would be the whole update. Its loss stays in the sum, so it is not silent.
    log_ratio_BT = torch.where(mask_BT, logp_BT - logp_old_BT, 0.0).clamp(-20, 20)
    ratio_BT = log_ratio_BT.exp()
    free_BT = ratio_BT * adv_B[:, None]
    clipped_BT = ratio_BT.clamp(1 - low, 1 + high) * adv_B[:, None]
    weight_BT = torch.where(mask_BT, weight_B[:, None], 0.0)
    loss = (weight_BT * -torch.minimum(free_BT, clipped_BT)).sum()
    with torch.no_grad():
        # The entropy needs no pass over the vocabulary: -log p of a sampled token is an unbiased estimate of it.
        logp_old_BT = torch.where(mask_BT, logp_old_BT, 0.0)
        metrics = {
            "clip_fraction": (weight_BT * (clipped_BT < free_BT)).sum(),
            "kl_old_new": (weight_BT * (log_ratio_BT.expm1() - log_ratio_BT)).sum(),
            "entropy": -(weight_BT * logp_old_BT).sum(),
            "weight": weight_BT.sum(),
            "tokens": mask_BT.sum(),
        }
    return loss, metrics


def sft_loss(logp_BT, mask_BT, weight_B):
    """The supervised loss: sum of weight * -logp over the completion tokens.

    logp_BT: (B, T) with gradient and mask_BT: (B, T) bool, as `token_logprobs` returns them for completions taken from data.
    So the prompt is not in the loss, nothing is to be shifted, and the end of a turn is learnt if the completions end in
    their end token. weight_B: (B,), from `row_weights` over ALL rows of the update ("token" is the usual mean).
    Returns (loss, metrics): a 0-dim tensor, and a dict of detached 0-dim tensors. All are sums; micro-batches add up:
      weight  sum of the weights over tokens: 1 for a whole update, unless there was nothing to train
      tokens  number of tokens (unweighted)
      empty   rows without a token to train; they give loss 0 and gradient 0, never NaN

    >>> logp = torch.tensor([[-1., -2.], [-3., 0.]], requires_grad=True)
    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> loss, metrics = sft_loss(logp, mask, torch.tensor([1/3, 1/3]))
    >>> loss.backward(); loss.item(), logp.grad, metrics["tokens"].item()
    (2.0, tensor([[-0.3333, -0.3333],
            [-0.3333,  0.0000]]), 3)
    """
    weight_BT = torch.where(mask_BT, weight_B[:, None], 0.0)
    loss = -(weight_BT * torch.where(mask_BT, logp_BT, 0.0)).sum()  # where() twice: a masked -inf times 0 would be NaN
    return loss, {"weight": weight_BT.sum(), "tokens": mask_BT.sum(), "empty": (~mask_BT).all(1).sum()}


def trajectory_logprobs(logp_BT, mask_BT, trajectory_B, N):
    """The log-prob of each of N trajectories: the sum over the tokens of all of its rows.

    logp_BT: (B, T) with gradient, mask_BT: (B, T) bool; trajectory_B: (B,) ints, which trajectory a row belongs to. A
    multi-turn dialogue has one row per agent turn, so text of others is in no sum. Returns logp_N, (N,) float32.
    A sum, never a mean: the log-prob of a dialogue is one number however long it is.

    >>> logp = torch.tensor([[-1., -2.], [-3., 9.], [-4., -5.]])
    >>> mask = torch.tensor([[True, True], [True, False], [True, True]])
    >>> trajectory_logprobs(logp, mask, torch.tensor([0, 0, 1]), 2)
    tensor([-6., -9.])
    """
    row_B = torch.where(mask_BT, logp_BT, 0.0).sum(1)
    member_NB = trajectory_B == torch.arange(N, device=trajectory_B.device)[:, None]
    return torch.where(member_NB, row_B, 0.0).sum(1)  # index_add_ would add in another order each time on a GPU


def dpo_loss(chosen_N, rejected_N, ref_chosen_N, ref_rejected_N, weight_N, beta=0.1):
    """Direct preference optimisation: sum of weight * -log sigmoid(beta * margin), where margin is by how much more the
    policy prefers the chosen trajectory to the rejected one than the reference does.

    chosen_N, rejected_N: (N,) with gradient, log-probs of whole trajectories under the policy (`trajectory_logprobs`);
    ref_chosen_N, ref_rejected_N: (N,), the same under the frozen reference, usually the weights that training started from
    (detached here); weight_N: (N,), 1 / pairs of the update for the usual mean; beta: how far the policy may move.
    Returns (loss, metrics): a 0-dim tensor, and a dict of detached 0-dim tensors. All are sums; micro-batches add up:
      margin           (chosen - ref_chosen) - (rejected - ref_rejected), in nats
      accuracy         share of pairs with a margin above 0
      reward_chosen    beta * (chosen - ref_chosen)
      reward_rejected  beta * (rejected - ref_rejected)
      weight           sum of the weights
    At the start policy and reference are equal: loss ln 2, margin and accuracy 0, and a gradient that is not 0. Dropout must
    be off in both, or they are not equal. A falling reward_chosen is common: only the difference is trained.
    Source: DPO, arXiv 2305.18290, eq. 7.

    >>> chosen, rejected = torch.tensor([-2.], requires_grad=True), torch.tensor([-4.], requires_grad=True)
    >>> loss, metrics = dpo_loss(chosen, rejected, torch.tensor([-2.4]), torch.tensor([-4.8]), torch.ones(1))
    >>> loss.backward(); loss, chosen.grad, rejected.grad, metrics["margin"]
    (tensor(0.7133, grad_fn=<NegBackward0>), tensor([-0.0510]), tensor([0.0510]), tensor(-0.4000))
    """
    chosen_N, rejected_N = chosen_N - ref_chosen_N.detach(), rejected_N - ref_rejected_N.detach()
    margin_N = chosen_N - rejected_N
    loss = -(weight_N * torch.nn.functional.logsigmoid(beta * margin_N)).sum()  # log(sigmoid()) is -inf from about -100 on
    with torch.no_grad():
        metrics = {
            "margin": (weight_N * margin_N).sum(),
            "accuracy": (weight_N * (margin_N > 0)).sum(),
            "reward_chosen": (weight_N * beta * chosen_N).sum(),
            "reward_rejected": (weight_N * beta * rejected_N).sum(),
            "weight": weight_N.sum(),
        }
    return loss, metrics
