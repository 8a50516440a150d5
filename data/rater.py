"""Make data/tiny-rater/, the embedded policy's self-judge: `python -m data.rater` (20 minutes on one core, seeded).

A copy of data/tiny learns to answer rubric calls as the rule judge would. This is plumbing, not evidence: it lets `train --judge self`
run offline and shows that the path works; what it knows of good questions it has from the rules. `--check FOLDER` prints how its scores
rank questions beside the rule judge's, on towns and questions that neither has seen.

1. Its chat template drops the rubric and turns the JSON of a rubric call back into the dialogue that the policy was taught to read: history,
   then the question, then scores. Nothing but the tags of tool calls is unescaped: a question that holds <|end|> cannot end anything.
2. One history is one row: its questions branch off it, each with its scores, and a mask hides them from each other, as in pretrain.py.
3. Questions come in all qualities: the oracle's at four levels, and the same spoilt in the ways that a policy spoils them.
"""
from __future__ import annotations

import argparse
import json
import multiprocessing
import os.path
import random
import time

import torch

from data.pretrain import END, learned_loss, make_batches
from data.speaker import BARE, SLOT_QUESTIONS, alternatives, decision_points, read_history, tails, word_question
from data.towns import SPLITS, scenario_pair
from env import AREAS, DAYS, PRICES, render_chat
from rewards import DIMENSIONS, RuleJudge, SelfJudge, clarify_reward, rubric_prompt

FIRST_TOWN = 800_000  # of the training split; pretraining with its seed 0 and the default run use others
# What rubric_prompt wrote, as the roles that the policy knows. The order matters: quotes inside a text are escaped until the last step.
_STEPS = (("<dialogue>\n[{\"role\": \"", "<|"), ("\"}, {\"role\": \"", "<|end|><|"), ("\", \"content\": \"", "|>"),
          ("\"}]\n</dialogue>\n\n<question>\n\"", "<|end|><|assistant|>"), ("\\u003ctool_call\\u003e", "<tool_call>"),
          ("\\u003c/tool_call\\u003e", "</tool_call>"), ("\\\"", "\""))
TEMPLATE = ("{% for m in messages %}{% if m.role == 'user' and m.content.startswith('<dialogue>') %}{{ m.content.split('\"\\n</question>')[0]"
            + "".join(f".replace({json.dumps(old)}, {json.dumps(new)})" for old, new in _STEPS) + " }}<|end|>"
            "{% elif m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}")


# ------------------------------------------------------------------------------------------------- questions of all qualities

def make_questions(history: list[dict], ambiguity: dict, rng: random.Random, count: int) -> list[str]:
    """Different questions that a policy might ask at a point where one is due, from good ones to word salad."""
    belief, found = read_history(history), {}
    while len(found) < count:
        about = dict(ambiguity)
        candidates, roll = list(ambiguity["candidates"]), rng.random()
        if roll < 0.2 and len(candidates) > 1:                     # names some, one twice, or one that is not there
            candidates = rng.choice((candidates[:-1], candidates[1:], [*candidates, rng.choice(candidates)], [candidates[0], candidates[0]],
                                     [*candidates, rng.choice((*AREAS, *DAYS, *PRICES))], [rng.choice((*AREAS, *PRICES, "2", "6"))] * 2))
            about["candidates"] = candidates
        elif roll < 0.4:                                           # asks for something that is not in doubt
            about["slot"] = rng.choice([slot for slot in ("people", "day", "area", "pricerange", "name", "time") if slot != ambiguity["slot"]])
            about["candidates"] = rng.sample({"day": DAYS, "pricerange": PRICES, "people": "23456", "time": ("18:00", "19:00", "20:00")}.get(
                about["slot"], AREAS), 2)
        text = word_question(about, belief, rng.choice((0, 1, 1, 2, 2, 2, 3, 3, 3)), rng)
        spoil = rng.random()
        if spoil < 0.05:
            text = f"{text} {rng.choice(SLOT_QUESTIONS[rng.choice(('people', 'day', 'area', 'pricerange'))])}"
        elif spoil < 0.1:
            text = " ".join(rng.sample(text.split(), len(text.split())))
        elif spoil < 0.14:
            text = " ".join(text.split()[:rng.randrange(1, len(text.split()) + 1)])
        elif spoil < 0.17:
            text = f"{rng.choice(BARE)} {text}"
        elif spoil < 0.2:
            text = f"{alternatives(tails(ambiguity, belief))}?".capitalize()
        elif spoil < 0.22:
            text = rng.choice(("All 5.", "?", "Which", "I can go ahead.", "Please tell me more."))
        found[text] = None
    return list(found)


def judged(town: int, count: int, invented: float = 0.3) -> list[list[tuple]]:
    """For each point of a town where a question is due: [(history, question, ambiguity, scores of the rule judge)]."""
    rng, made = random.Random(f"rater {town}"), []
    for point in decision_points(scenario_pair(town, invented=invented)[0]):
        if point["clarify_expected"]:
            history, ambiguity = point["messages"], point["ambiguity"]
            items = [(history, question, ambiguity) for question in make_questions(history, ambiguity, rng, count)]
            made.append([(*item, verdict.scores) for item, verdict in zip(items, RuleJudge()(items))])
    return made


# ------------------------------------------------------------------------------------------------- rows and training

def to_row(tokenizer, some: list[tuple]) -> tuple[list[int], list[int], list[int], list[bool]]:
    """(ids, positions, part, learned), as in pretrain.py: what all prompts begin with is part 0, the rest of the k-th with its answer is
    part k. The prompts are those that a self-judge is asked with, to the token."""
    prompts = [render_chat(tokenizer, rubric_prompt(history, question)) for history, question, _, _ in some]
    answers = [tokenizer.encode(json.dumps(scores) + END, add_special_tokens=False) for *_, scores in some]
    shared = min(len(os.path.commonprefix(prompts)), min(map(len, prompts)) - 1)
    ids, positions, part, learned = prompts[0][:shared], list(range(shared)), [0] * shared, [False] * shared
    for k, (prompt, answer) in enumerate(zip(prompts, answers), 1):
        rest = prompt[shared:] + answer
        ids, positions, part = ids + rest, positions + list(range(shared, shared + len(rest))), part + [k] * len(rest)
        learned += [False] * (len(prompt) - shared) + [True] * len(answer)
    return ids, positions, part, learned


def _rows_of(args):
    tokenizer, towns, count = args
    return [to_row(tokenizer, some) for town in towns for some in judged(town, count)]


def learn(model, batches: list, pad: int, lr: float, report=print) -> float:
    """Next-token prediction of the answers, one step a batch, the rate falling to 0. Returns the last loss."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, betas=(0.9, 0.98))
    began, loss = time.time(), None
    for step, rows in enumerate(batches):
        for group in optimiser.param_groups:
            group["lr"] = lr * min((step + 1) / 50, 1 - step / len(batches))
        loss = learned_loss(model, rows, pad)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if step % 50 == 0 or step + 1 == len(batches):
            report(f"step {step + 1}/{len(batches)} loss {loss.item():.4f} {time.time() - began:.0f} s", flush=True)
    return loss.item()


# ------------------------------------------------------------------------------------------------- how good it is

def spearman(a: list[float], b: list[float]) -> float:
    """Rank correlation: Pearson's of the ranks, equal values sharing the mean of theirs. nan where one side is constant.

    >>> round(spearman([1, 2, 3, 4], [10, 20, 20, 40]), 4), spearman([1, 2, 3], [3, 2, 1])
    (0.9487, -1.0)
    """
    def ranks(values):
        values = torch.tensor(values, dtype=torch.float64)
        below, same = (values[None, :] < values[:, None]).sum(1), (values[None, :] == values[:, None]).sum(1)
        return below + (same - 1) / 2
    return torch.corrcoef(torch.stack([ranks(a), ranks(b)]))[0, 1].item()


def check(folder: str, towns: int) -> str:
    """A rater beside the rule judge, on questions of valid towns."""
    import speakrl
    policy = speakrl.Policy(folder, speakrl.Settings())
    rated = [one for town in range(towns) for some in judged(SPLITS["valid"] + 700_000 + town, 4, invented=0.0) for one in some]
    judge = SelfJudge(lambda requests: speakrl.local_complete(policy, requests))
    judge.tally = lambda *_: None  # counted below
    verdicts = judge([one[:3] for one in rated])
    read = [(one, verdict.scores) for one, verdict in zip(rated, verdicts) if verdict.scores]
    if len(read) < 2:
        return f"{folder}: {len(read)} of {len(rated)} answers could be read, such as {verdicts[0].why!r}: this model cannot rate"
    own, rule = [clarify_reward(scores) for _, scores in read], [clarify_reward(one[3]) for one, _ in read]
    length = [len(one[1].split()) for one, _ in read]
    lines = [f"{folder}, {len(rated)} questions at points of {towns} valid towns; {len(read) / len(rated):.3f} of the answers could be read",
             f"rank correlation with the rule judge    {spearman(own, rule):.3f}",
             *(f"  {name:<37} {spearman([s[name] for _, s in read], [one[3][name] for one, _ in read]):.3f}" for name in DIMENSIONS),
             f"mean score, its own and the rules'      {sum(own) / len(own):.3f} {sum(rule) / len(rule):.3f}",
             f"mean distance from the rules'           {sum(abs(a - b) for a, b in zip(own, rule)) / len(own):.3f}",
             f"rank correlation with length in words   {spearman(own, length):.3f} (the rules' {spearman(rule, length):.3f})"]
    return "\n".join(lines)


def main() -> None:
    """Make the rater, or check one."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--start", default="data/tiny")
    parser.add_argument("--out", default="data/tiny-rater")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-tokens", type=int, default=12000)
    parser.add_argument("--lr", type=float, default=2e-3, help="peak; warmed up over 50 steps, then linearly down to 0")
    parser.add_argument("--questions", type=int, default=8, help="at each point")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", metavar="FOLDER", help="train nothing; print how the rater in FOLDER ranks questions")
    args = parser.parse_args()
    if args.check:
        return print(check(args.check, 100))
    from transformers import AutoModelForCausalLM, AutoTokenizer
    tokenizer, model = AutoTokenizer.from_pretrained(args.start), AutoModelForCausalLM.from_pretrained(args.start, dtype=torch.float32)
    tokenizer.chat_template = TEMPLATE
    began, rows, rng = time.time(), [], random.Random(f"rater {args.seed}")
    batches: list[list] = []
    with multiprocessing.Pool() as pool:  # a town is met once: there are as many as the steps take
        chunks = ((tokenizer, range(k, k + 100), args.questions) for k in range(FIRST_TOWN, SPLITS["valid"], 100))
        for chunk in pool.imap(_rows_of, chunks):
            rows += chunk
            batches = make_batches(rows, args.batch_tokens, rng) if sum(len(r[0]) for r in rows) > args.steps * args.batch_tokens else []
            if len(batches) >= args.steps:
                break
        pool.terminate()
    print(f"{len(rows)} points, {len(rows) * args.questions} questions, {time.time() - began:.0f} s", flush=True)
    torch.manual_seed(args.seed)
    learn(model, batches[:args.steps], tokenizer.pad_token_id, args.lr)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(check(args.out, 100))


if __name__ == "__main__":
    main()
