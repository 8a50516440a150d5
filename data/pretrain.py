"""Make data/tiny/, the embedded base policy: `python -m data.pretrain` (two cores, over an hour, seeded).

It plays the part of an instruct model: good at everything but asking. A demonstrator (the scripted oracle made careless)
plays generated towns; a small Llama learns its turns by next-token prediction. Departures from ordinary pretraining:

1. One dialogue is one row, though every turn must be predicted from a history without earlier thinks: the row holds the visible
   history once and every completion once, and a 4-D attention mask hides the completions from all that follows.
2. In three of four ambiguous dialogues the demonstrator always asks, but the tokens that decide to ask carry no loss: the policy
   learns how a question reads and what to do with its answer, without learning to ask.
3. Slips of form and poor questions are put in on purpose, so that reinforcement learning has something to choose from.

Left out: a real language. The policy knows the towns' words, restaurants and hotels, and three kinds of ambiguity.
"""
from __future__ import annotations

import argparse
import gc
import json
import math
import multiprocessing
import os
import random
import re
import time
from pathlib import Path

import torch

from data.speaker import Oracle, clarify_due, play, read_history, word_question, word_think
from data.towns import scenario_pair
from env import ScriptedUser, run_dialogues, start_dialogue

ROLES = ("<|user|>", "<|assistant|>", "<|tool|>")
END, PAD = "<|end|>", "<|pad|>"
TAGS = ("<think>", "</think>", "<clarify>", "</clarify>", "<tool_call>", "</tool_call>")
# The system prompt and the tools are dropped on purpose: this policy was never taught to read instructions.
TEMPLATE = ("{% for m in messages %}{% if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}")


# ------------------------------------------------------------------------------------------------- the demonstrator

class Demonstrator(Oracle):
    """The oracle made careless: thinks of every length, seldom asks, often poorly, and slips in form.

    `always_ask`: asks whenever a question is due; `self.unlearned` then lists the steps whose decision to ask carries no loss."""

    STYLES, ASK = (0.4, 0.32, 0.28), (0.04, 0.12, 0.5)  # shares of think styles; chance of asking when due, by style
    UNLEARNED_STYLES = (0.2, 0.2, 0.6)                    # the same where asking is not learned: nor is the choice of the style
    NEEDLESS = 0.004                                      # chance of asking when nothing is due, per step

    def __init__(self, ambiguity, seed: str, always_ask: bool):
        super().__init__(ambiguity, seed)
        self.always_ask, self.unlearned, self.step, self.asked = always_ask, [], 0, 0

    def __call__(self, history: list[dict]) -> str:
        rng, belief, due = self.rng, read_history(history), clarify_due(history, self.ambiguity)
        style = rng.choices((0, 1, 2), self.UNLEARNED_STYLES if due and self.always_ask else self.STYLES)[0]
        ambiguity = self.ambiguity
        asks = due and (self.always_ask or rng.random() < self.ASK[style])
        if not due and not belief.booked and rng.random() < self.NEEDLESS:
            slot = rng.choice(("people", "day", "area", "pricerange"))
            asks, ambiguity = True, {"kind": "vague", "domain": belief.domain, "slot": slot, "candidates": ["1", "2"]}
        if asks:
            shares = (0.05, 0.2, 0.35, 0.4) if self.always_ask and due else (0.2, 0.3, 0.3, 0.2)
            level = rng.choices((0, 1, 2, 3), shares)[0] if due else 1
            level = max(level, 1) if self.asked and self.always_ask else level
            think, question = word_think("ask", belief, ambiguity if due else None, style, rng), word_question(ambiguity, belief, level, rng)
            action = question if rng.random() < 0.12 else f"<clarify>{question}</clarify>"
            self.asked += 1
            if self.always_ask and due:
                self.unlearned.append(self.step)
        else:
            kind, action = self.decide(belief)
            think = word_think(kind, belief, ambiguity if due else None, style, rng)
        self.step += 1
        return self.slip(think, action)

    def slip(self, think: str, action: str) -> str:
        """Right in two of three turns; the slips are of the kinds that can be recovered."""
        roll = self.rng.random()
        if roll < 0.13:
            return action
        if roll < 0.23:
            return f"<think></think>{action}"
        if roll < 0.36 and action.startswith("<"):
            between = self.rng.choice(("Let me see.", "One moment.", "So:", "Okay,"))
            return f"<think>{think}</think>{between}{action}"
        return f"<think>{think}</think>{action}"


def demonstrate(seed: int) -> list[tuple[list[dict], list[tuple[int, str, list]]]]:
    """The demonstrator's dialogues in one town: (visible messages, [(messages before the step, text, learned spans of it)])
    for the ambiguous scenario (asking or careless) and its clear twin."""
    rng, made = random.Random(f"pretrain {seed}"), []
    for scenario in scenario_pair(seed, kinds=("branch", "underspecified", "underspecified", "vague"), invented=0.5):
        agent = Demonstrator(scenario.ambiguity, scenario.id, always_ask=rng.random() < 0.75)
        dialogue = play(scenario, agent, max_corrections=2)
        made.append((dialogue.messages, [(n, text, undecided(text) if k in agent.unlearned else [(0, len(text) + 1)])
                                         for k, (n, text, _) in enumerate(dialogue.steps)]))
    return made


def undecided(text: str) -> list[tuple[int, int]]:
    """What is learned of a turn whose decision to ask is not: the inside of a slot-by-slot think (neither its first word, which chooses
    that style, nor its last sentence, which decides), and what stands behind <clarify>."""
    spans = []
    if check := re.match(r"<think>[a-z]+ (.*)Ask the user\.</think>", text):
        spans.append(check.span(1))
    if "<clarify>" in text:
        spans.append((text.index("<clarify>") + len("<clarify>"), len(text) + 1))
    return spans


# ------------------------------------------------------------------------------------------------- tokenizer and rows

def train_tokenizer(texts: list[str], vocab: int):
    """A byte-level BPE. A word takes the blank *behind* it, so that a name reads the same after a quote, a blank or a comma."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"\p{L}+ ?|\p{N}{1,2} ?|[^\s\p{L}\p{N}]+(?: [^\s\p{L}\p{N}]+)* ?|\s+"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token=PAD, extra_special_tokens=list(ROLES), clean_up_tokenization_spaces=False)
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])  # special ones would vanish in decoding
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def to_row(tokenizer, messages: list[dict], steps: list) -> tuple[list[int], list[int], list[int], list[bool]]:
    """(ids, positions, part, learned) of one dialogue: the history is part 0, the k-th completion part k. A completion stands
    where its turn begins and sees the history before it; nothing sees it but itself."""
    at = {n: (text, spans) for n, text, spans in steps}
    ids, positions, part, learned, place, count = [], [], [], [], 0, 0

    def put(new: list[int], start: int, which: int, learn: list[bool]):
        ids.extend(new), positions.extend(range(start, start + len(new))), part.extend([which] * len(new)), learned.extend(learn)

    for n, m in enumerate([*messages, None]):
        if n in at:
            count += 1
            text, spans = at[n]
            new = tokenizer(text + END, add_special_tokens=False, return_offsets_mapping=True)
            opening = tokenizer.encode("<|assistant|>", add_special_tokens=False)
            learn = [any(start <= begin < end for start, end in spans) for begin, _ in new["offset_mapping"]]
            put(opening + new["input_ids"], place, count, [False] * len(opening) + learn)
        if m is not None:
            new = tokenizer.encode(f"<|{m['role']}|>{m['content']}{END}", add_special_tokens=False)
            put(new, place, 0, [False] * len(new))
            place += len(new)
    return ids, positions, part, learned


WIDTH, LEARNED = 32, 512  # rows are filled up to a multiple of WIDTH tokens, learned tokens to one of LEARNED: a matrix product of
#                           a shape never seen before is compiled first, and with a new shape every step that costs more than the step


def padded(row: tuple) -> int:
    """The length of a row, filled up."""
    return -(-len(row[0]) // WIDTH) * WIDTH


def collate(rows: list, pad: int):
    """ids_BT, positions_BT, mask_B1TT (bfloat16, 0 or -inf, added to the attention logits), learned_BT."""
    width = padded(max(rows, key=lambda row: len(row[0])))
    fill = lambda k, value: torch.tensor([list(row[k]) + [value] * (width - len(row[k])) for row in rows])
    ids, positions, part, learned = fill(0, pad), fill(1, 0), fill(2, -1), fill(3, False)
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    attend = causal & ((part[:, None, :] == 0) | (part[:, None, :] == part[:, :, None]))
    mask = torch.zeros(attend.shape, dtype=torch.bfloat16).masked_fill(~attend, -math.inf)
    return ids, positions, mask[:, None], learned


def make_batches(rows: list, tokens: int, rng: random.Random) -> list[list]:
    """Rows of about one length together, `tokens` a batch; the batches, and the rows of one length, in random order."""
    batches, batch = [], []
    for row in sorted(rows, key=lambda row: (padded(row), rng.random())):
        if batch and (padded(row) != padded(batch[0]) or (len(batch) + 1) * padded(row) > tokens):
            batches.append(batch)
            batch = []
        batch.append(row)
    batches.append(batch)
    rng.shuffle(batches)
    return batches


# ------------------------------------------------------------------------------------------------- training

def learned_loss(model, rows: list, pad: int) -> torch.Tensor:
    """Mean of -log p of the learned tokens of a batch; products in bfloat16, log-softmax in float32."""
    ids, positions, mask, learned = collate(rows, pad)
    where = learned[:, 1:].flatten().nonzero()[:, 0]  # a learned token is predicted from the place before it, in its own part
    target = torch.nn.functional.pad(ids[:, 1:].flatten()[where], (0, -len(where) % LEARNED), value=-100)  # -100 carries no loss
    where = torch.nn.functional.pad(where, (0, -len(where) % LEARNED))
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[:, :-1].flatten(0, 1)[where])
    return torch.nn.functional.cross_entropy(logits.float(), target)


def _rows_of(args):
    tokenizer, seeds = args
    return [to_row(tokenizer, *dialogue) for seed in seeds for dialogue in demonstrate(seed)]


def gate(folder: str, goals: int) -> None:
    """How good a base is, before any reinforcement learning: printed, on `goals` valid towns and their twins, at temperature 1."""
    import speakrl
    settings = speakrl.Settings(model=folder, goals=goals)
    policy, scenarios = speakrl.Policy(folder, settings), speakrl.evaluation_scenarios(settings)
    figures, dialogues = speakrl.evaluate(policy, speakrl.make_judge(settings, lambda: policy), scenarios, settings)
    ambiguous = [s for s in scenarios if s.ambiguity]
    asks = [any(turn.clarify or "?" in (turn.reply or "") for _, _, turn in d.steps) for d in dialogues if d.scenario.ambiguity]

    # The same policy with the oracle's question put in wherever one is due: what does it make of a good answer?
    answered = [start_dialogue(s, ScriptedUser(s)) for s in ambiguous]
    oracles = {id(d.messages): Oracle(d.scenario.ambiguity, d.scenario.id) for d in answered}
    agent = policy.agent(1)
    run_dialogues(lambda histories: [oracles[id(h)](h) if clarify_due(h, oracles[id(h)].ambiguity) else text
                                     for h, text in zip(histories, agent(histories))], answered)
    told = [speakrl.goal_record(d)["uncorrected"] for d in answered]
    print(f"{folder}, {goals} valid towns, temperature 1\n"
          f"clear goals, booked right without a correction     {figures['success_uncorrected_clear']:.3f}   (at least 0.95)\n"
          f"ambiguous goals, given a good question's answer    {sum(told) / len(told):.3f}   (at least 0.95)\n"
          f"ambiguous goals, asks in whatever form             {sum(asks) / len(asks):.3f}   (at most 0.33)\n"
          f"ambiguous goals, booked right without a correction {figures['success_uncorrected_ambiguous']:.3f}\n"
          f"turns of the right form                            {figures['format']:.3f}   (0.40 to 0.80)")


SAVE_EVERY = 500  # steps


def save_state(path: Path, step: int, asked: dict, model, optimisers: list) -> None:
    """Weights, state of the optimisers and what was asked for, whole or not at all; no pickle."""
    from safetensors.torch import save_file
    from speakrl import sync
    names, tensors = {p: name for name, p in model.named_parameters()}, {}
    for optimiser in optimisers:
        for p in optimiser.param_groups[0]["params"]:
            tensors |= {f"{names[p]} {key}": value for key, value in {"weight": p.detach(), **optimiser.state[p]}.items()}
    part = path.with_name(path.name + ".part")
    save_file(tensors, part, {"step": str(step), "asked": json.dumps(asked)})
    sync(part)
    os.replace(part, path)


def load_state(path: Path, model, optimisers: list) -> int:
    """Puts back what save_state wrote; returns the number of steps that were made."""
    from safetensors import safe_open
    names = {p: name for name, p in model.named_parameters()}
    with safe_open(path, "pt") as file:
        found = {}
        for key in file.keys():
            name, _, part = key.partition(" ")
            found.setdefault(name, {})[part] = file.get_tensor(key)
        for optimiser in optimisers:
            for p in optimiser.param_groups[0]["params"]:
                p.data.copy_(found[names[p]].pop("weight"))
                optimiser.state[p] = found[names[p]]
        return int(file.metadata()["step"])


def check_resume(path: Path, asked: dict) -> None:
    """Exits with a line if there is nothing to go on from, or something else was asked for."""
    from safetensors import safe_open
    if not path.exists():
        raise SystemExit(f"data.pretrain: --resume: there is no {path}; without --resume a run begins")
    with safe_open(path, "pt") as file:
        before = json.loads(file.metadata()["asked"])
    if changed := [f"--{key.replace('_', '-')} was {before[key]}, is {value}" for key, value in asked.items() if before[key] != value]:
        raise SystemExit(f"data.pretrain: --resume: the settings differ from those of {path}: {'; '.join(changed)}")


def main() -> None:
    """Generate the corpus, train tokenizer and model, save an ordinary Hugging Face folder."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", default="data/tiny")
    parser.add_argument("--towns", type=int, default=60000, help="each gives two dialogues")
    parser.add_argument("--steps", type=int, default=5400, help="the first third on short dialogues, half the tokens a step")
    parser.add_argument("--batch-tokens", type=int, default=12000)
    parser.add_argument("--lr", type=float, default=1e-2, help="peak of both optimisers; warmed up over 100 steps, then linearly down to 0")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=0, choices=range(4), help="each has 200 000 training towns of its own")
    parser.add_argument("--gate", metavar="FOLDER", help="train nothing; print how good the base in FOLDER is")
    parser.add_argument("--resume", action="store_true", help=f"go on with a run of these settings that was stopped: from the last {SAVE_EVERY} steps that it saved")
    args = parser.parse_args()
    if args.gate:
        return gate(args.gate, 400)
    asked, state = {key: value for key, value in vars(args).items() if key not in ("resume", "gate", "out")}, Path(args.out) / "pretraining.safetensors"
    if args.resume:
        check_resume(state, asked)
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    began = time.time()
    first = 200_000 * (args.seed + 1)
    tokenizer = train_tokenizer([m["content"] for seed in range(first, first + min(1000, args.towns)) for messages, steps in demonstrate(seed)
                                 for m in [*messages, *({"content": text} for _, text, _ in steps)]], args.vocab)
    with multiprocessing.Pool() as pool:
        chunks = [(tokenizer, range(s, min(s + 500, first + args.towns))) for s in range(first, first + args.towns, 500)]
        rows = [row for chunk in pool.imap(_rows_of, chunks) for row in chunk]
    rows = [row for row in rows if len(row[0]) <= 1000]
    gc.freeze()  # or the collector walks through millions of numbers every now and then
    print(f"{len(rows)} dialogues, {sum(len(r[0]) for r in rows) / 1e6:.1f} M tokens, {sum(sum(r[3]) for r in rows) / 1e6:.1f} M learned, "
          f"{time.time() - began:.0f} s", flush=True)

    torch.manual_seed(args.seed)
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=args.width, intermediate_size=int(2.75 * args.width) // 8 * 8,
                         num_hidden_layers=args.layers, num_attention_heads=4, max_position_embeddings=1024, tie_word_embeddings=True,
                         bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model = LlamaForCausalLM(config)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim == 1 or "embed" in name]
    optimisers = [torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),  # learns to copy sooner than AdamW
                  torch.optim.AdamW(others, lr=args.lr, weight_decay=0.0, betas=(0.9, 0.98))]
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, vocabulary {len(tokenizer)}", flush=True)
    made = load_state(state, model, optimisers) if args.resume else 0

    batches, epoch = [], 0
    for step in range(args.steps):
        early = step < args.steps // 3  # copying is learnt sooner from short dialogues and many small steps
        if not batches or step == args.steps // 3:
            some = [row for row in rows if not early or len(row[0]) < 350]
            batches = make_batches(some, args.batch_tokens // (2 if early else 1), random.Random(f"epoch {args.seed} {epoch}"))
            epoch += 1
        batch = batches.pop()
        if step < made:
            continue
        rate = args.lr * min((step + 1) / 100, (args.steps - step) / args.steps)
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate
        loss = learned_loss(model, batch, tokenizer.pad_token_id)
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
        if step % 50 == 0 or step + 1 == args.steps:
            print(f"step {step} loss {loss.item():.4f} lr {rate:.5f} {time.time() - began:.0f} s", flush=True)
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == args.steps:
            model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
            model.save_pretrained(args.out)
            tokenizer.save_pretrained(args.out)
            save_state(state, step + 1, asked, model, optimisers)
    state.unlink()


if __name__ == "__main__":
    main()
