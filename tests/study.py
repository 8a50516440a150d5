"""The reward study, the paper's findings as measurements, and the search for the baselines' settings.

    python tests/study.py                         all of it, seeds 0, 1, 2: about two and a quarter hours on two free cores
    python tests/study.py --only base default format --seeds 0
    python tests/study.py --larger runs/larger    beside them a larger base, without reinforcement learning, made by
                                                  python -m data.pretrain --width 320 --layers 6 --lr 4e-3 --towns 36000 --steps 2400 --out runs/larger
    python tests/study.py --search --seeds 0      learning rates and epochs of SFT and DPO, on valid: about 75 minutes a seed

Each name in TRAINED is a training that differs from the default one in one thing, on generated towns; it is evaluated on test (200
goals and their twins), and the tables are printed at the end. Any other flag is a setting of speakrl.py, and speaks to all of them
(`--steps 300`). What was done is not done again: a run that was stopped goes on from its last checkpoint, every evaluation lies in a
file (delete --out to start over).

speakrl.py has no switches for these experiments. Where a flag does not suffice, one of its functions is replaced for the length of a
training or an evaluation: what is replaced stands in REPLACED and PLAYED, and everything else is the code that a reader has read.
"""
from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import sys
import time
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import torch  # noqa: E402

import speakrl  # noqa: E402
from data.speaker import DONE, Oracle, clarify_due, decision_points, play  # noqa: E402
from data.towns import scenario_pair  # noqa: E402
from env import Dialogue, ScriptedUser, parse_turn, run_dialogues, start_dialogue  # noqa: E402
from rewards import judge_question  # noqa: E402
from speakrl import (COMPARED, Policy, Settings, UserError, draw, evaluation_scenarios, goal_record, group_advantages, grpo_step, mean,  # noqa: E402
                     paired, parse_settings, score_completions, stream, write_json, write_town_data)


@contextlib.contextmanager
def replaced(**functions):
    """speakrl with some of its functions replaced, as long as the block lasts."""
    before = {name: vars(speakrl)[name] for name in functions}
    vars(speakrl).update(functions)
    try:
        yield
    finally:
        vars(speakrl).update(before)


# ------------------------------------------------------------------------------------------------- what is trained

class OneChance(ScriptedUser):
    """Leaves at the first correction: there is no success without one any more, and nobody needs to play on."""

    def __call__(self, text):
        answer, outcome = super().__call__(text)
        return answer, "gave_up" if self.corrections else outcome


def scenario_of(point_id: str):
    """(scenario, number of the agent turn) of a decision point of generated towns, such as "town-17-branch-clear#2"."""
    name, turn = point_id.rsplit("#", 1)
    scenario = scenario_pair(int(name.split("-")[1]))[name.endswith("-clear")]
    assert scenario.id == name, (scenario.id, name)
    return scenario, int(turn)


@functools.lru_cache(maxsize=4096)
def oracle_turns(point_id: str) -> list[str]:
    """What the oracle wrote in its dialogue before this decision point."""
    scenario, turn = scenario_of(point_id)
    return [text for _, text, _ in play(scenario).steps][:turn]


def dialogue_at(point_id: str) -> Dialogue:
    """The oracle's dialogue at a decision point, alive: messages, bookings and the user's state are those of the training data,
    for oracle, user and tools are functions of the scenario."""
    scenario, _ = scenario_of(point_id)
    dialogue = start_dialogue(scenario, OneChance(scenario))
    for text in oracle_turns(point_id):
        dialogue.step(text)
    return dialogue


def roll_out(policy, point_ids: list[str], texts: list[str], seed: int) -> list[float]:
    """For each decision point and completion 1.0 if the dialogue then ends in success without a correction, else 0.0: the policy
    plays the rest itself, with the scripted user, one draw each."""
    dialogues = [dialogue_at(point_id) for point_id in point_ids]
    for dialogue, text in zip(dialogues, texts):
        dialogue.step(text, prefilled_think=policy.prefilled_think)
    run_dialogues(policy.agent(seed), dialogues, prefilled_think=policy.prefilled_think)
    return [float(goal_record(dialogue)["uncorrected"]) for dialogue in dialogues]


def success_step(policy, optimiser, points, judge, settings, step):
    """grpo_step with task success as the only reward: neither form nor questions earn anything, and no judge has a say. The decision
    points stay; each completion is worth what comes of it."""
    def score(policy, points_B, completions_B, *rest):
        rows = score_completions(policy, points_B, completions_B, *rest)
        won = roll_out(policy, [p["id"] for p in points_B], [policy.text(c) for c in completions_B], stream(settings.seed, "roll out", step))
        return [{**row, "reward": reward} for row, reward in zip(rows, won)]
    with replaced(score_completions=score):
        return grpo_step(policy, optimiser, points, judge, settings, step)


def shuffled_step(policy, optimiser, points, judge, settings, step):
    """grpo_step whose rewards are dealt out anew within each group: as much noise and as many flat groups, and nothing to learn."""
    rng = random.Random(stream(settings.seed, "shuffle", step))
    with replaced(group_advantages=lambda rewards_PG: group_advantages(shuffled(rewards_PG, rng))):
        return grpo_step(policy, optimiser, points, judge, settings, step)


def shuffled(rewards_PG: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """Each group's rewards in random order. ValueError for an unknown one: the loss has noted already whose it is."""
    if rewards_PG.isnan().any():
        raise ValueError("an unknown reward cannot go to another completion")
    return torch.stack([rewards_G[rng.sample(range(len(rewards_G)), len(rewards_G))] for rewards_G in rewards_PG])


CYCLE = 400  # prompts in which the shares below come out exactly


def draw_with_share(share: float):
    """`draw_points` in which this share of the prompts shows an ambiguity that is due or was just resolved, three to one, and the
    rest clear twins and turns that only act, as in the default: which is a share of one half. Beside the share it differs from the
    default in that a step's prompts are drawn from a shuffled cycle: at 10 % half of the steps meet no due prompt, the default three each."""
    counts = {"ask": 0.75 * share, "answered": 0.25 * share, "twin": 0.5 * (1 - share), "any": 0.25 * (1 - share), "other": 0.25 * (1 - share)}

    def draw_points(stages: dict[str, list[dict]], step: int, settings: Settings) -> list[dict]:
        def cycle(number):
            points = [p for stage, part in counts.items() for p in draw(stages[stage], number * round(part * CYCLE), round(part * CYCLE), settings.seed, "order", stage)]
            random.Random(stream(settings.seed, "order", number)).shuffle(points)
            return points
        places = range(step * settings.prompts, (step + 1) * settings.prompts)
        cycles = {number: cycle(number) for number in {k // CYCLE for k in places}}
        return [cycles[k // CYCLE][k % CYCLE] for k in places]
    return draw_points


# What differs from the default settings, and the functions that are replaced while it trains.
TRAINED = {"success": {}, "default": {}, "literal": dict(reward="literal"), "format": dict(reward="format"), "clarify": dict(reward="clarify"),
           **{f"cost={c:g}": dict(reward="total", ask_cost=c) for c in (0.0, 0.1, 0.3, 1.0)},
           "ambiguous=10%": {}, "ambiguous=100%": {}, "shuffled": {},
           "constant": dict(norm="constant")}
REPLACED = {"success": dict(grpo_step=success_step), "shuffled": dict(grpo_step=shuffled_step),
            "ambiguous=10%": dict(draw_points=draw_with_share(0.1)), "ambiguous=100%": dict(draw_points=draw_with_share(1.0))}


def trained(name: str, seed: int, settings: Settings, out: Path) -> str:
    """The folder of a run, trained to its last step: from the start, from its last checkpoint, or not at all if it is there."""
    run = out / f"{name}-{seed}"
    settings = dataclasses.replace(settings, seed=seed, out=str(run), goals=min(10, settings.goals), **TRAINED[name],
                                   resume=(run / "settings.json").exists())
    if name == "constant":  # completions take about half of max_new_tokens, so this loss is about half as large; eps is compared with the gradient
        settings = dataclasses.replace(settings, adam_eps=settings.adam_eps / 2)
    last = run / "checkpoints" / f"step-{settings.steps:06d}"
    if name in REPLACED and not run.exists():  # its settings.json alone would tell half of the truth
        run.mkdir(parents=True)
        (run / "README").write_text(f"{name}: trained by tests/study.py with {', '.join(REPLACED[name])} replaced; only there it can go on.\n")
    if not last.exists():
        with replaced(**REPLACED.get(name, {})):
            speakrl.train(settings)
    if not last.exists():
        raise UserError(f"{run} was stopped, and saved; the same command goes on")
    return str(run)


# ------------------------------------------------------------------------------------------------- how it is played

def with_gold_questions(agent, dialogues: list[Dialogue], **more) -> list[Dialogue]:
    """run_dialogues with the oracle's question put in wherever one is due; all other turns are the agent's own."""
    scenarios = {id(d.messages): d.scenario for d in dialogues}
    oracles = {key: Oracle(scenario.ambiguity, f"{scenario.id} gold") for key, scenario in scenarios.items()}

    def act(histories):
        return [oracles[id(h)](h) if clarify_due(h, scenarios[id(h)].ambiguity) else text for h, text in zip(histories, agent(histories))]
    return run_dialogues(act, dialogues, **more)


def with_guesses(agent, dialogues: list[Dialogue], **more) -> list[Dialogue]:
    """run_dialogues in which the careless oracle acts, on a guess, wherever the agent would ask; all other turns are the agent's own."""
    oracles = {id(d.messages): Oracle(d.scenario.ambiguity, f"{d.scenario.id} guess", ask=0) for d in dialogues}

    def act(histories):
        texts = agent(histories)
        turns = [parse_turn(text or "", more.get("prefilled_think", False)) for text in texts]
        return [oracles[id(h)](h) if turn.clarify or "?" in (turn.reply or "") else text for h, text, turn in zip(histories, texts, turns)]
    return run_dialogues(act, dialogues, **more)


def bar(policy) -> None:
    """From now on the policy cannot write `<clarify>`. What it writes instead, after a think that wants to ask, it was never trained on."""
    policy.model.generate = functools.partial(policy.model.generate, bad_words_ids=[policy.tokenizer.encode("<clarify>", add_special_tokens=False)])


# Way of playing: the functions that are replaced meanwhile. "" is as it is.
PLAYED = {"": {}, "gold": dict(run_dialogues=with_gold_questions), "guess": dict(run_dialogues=with_guesses), "barred": {}}
WAYS = {"base": ("", "gold"), "default": ("", "gold", "guess", "barred")}


def one_run(work: tuple) -> str:
    """Everything that needs one policy: train it, play it in all of its ways, and look at its questions and thinks. What the commands
    would print goes into a log beside the run folder. Returns a line for the screen."""
    name, seed, settings, out, larger = work
    began, settings = time.time(), dataclasses.replace(settings, seed=seed)
    with open(out / f"{name}-{seed}.log", "a") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        model = {"base": settings.model, "larger": larger}.get(name) or trained(name, seed, settings, out)
        for way in WAYS.get(name, ("",)):
            file = out / f"{name}{'+' * bool(way)}{way}-{seed}.json"
            if not file.exists():
                policy = Policy(model, settings)
                if way == "barred":
                    bar(policy)
                with replaced(**PLAYED[way]):
                    judge = speakrl.make_judge(settings, lambda: policy)
                    figures, _ = speakrl.evaluate(policy, judge, evaluation_scenarios(settings), settings)
                write_json(file, {**figures, "parameters": sum(p.numel() for p in policy.model.parameters())})
        if name == "default":
            for stem, look in (("questions", look_at_questions), ("thinks", look_at_thinks)):
                if not (out / f"{stem}-{seed}.json").exists():
                    write_json(out / f"{stem}-{seed}.json", look(Path(model), settings))
    return f"{name}, seed {seed}: {time.time() - began:.0f} s"


# ------------------------------------------------------------------------------------------------- questions and thinks of a run

def read_lines(path: Path) -> list[dict]:
    """The records of a JSONL file of a run folder."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def names_slot_and_two(point_id: str, question: str) -> bool:
    """Does a question at a decision point ask for the slot in doubt and name two of its candidates or more? As the rule judge reads it."""
    ambiguity = scenario_of(point_id)[0].ambiguity
    found = re.match(r"names (\d+) of \d+ candidates, asks (.*)", judge_question(dialogue_at(point_id).messages, question, ambiguity).why)
    return bool(found) and int(found[1]) > 1 and ambiguity["slot"] in found[2].split(" and ")


def look_at_questions(run: Path, settings: Settings, count: int = 200) -> list[dict]:
    """The first and the last `count` questions that a run made where one was due, well formed: {early, late, in_first and in_last (of
    the first, last `count` completions), tokens, score, names_two, won}. `won`: the *trained* policy plays on from the question, so
    that early and late ones are measured by the same hands."""
    samples, policy = read_lines(run / "samples.jsonl"), Policy(str(run), settings)
    asked = [k for k, s in enumerate(samples) if s["judge"] is not None]
    early, late = set(asked[:count]), set(asked[-count:])
    chosen = sorted(early | late)
    some = [samples[k] for k in chosen]
    opened = "" if policy.prefilled_think else "<think>"
    won = roll_out(policy, [s["id"] for s in some], [f"{opened}{s['think']}</think><clarify>{s['question']}</clarify>" for s in some],
                   stream(settings.seed, "questions"))
    return [{"early": k in early, "late": k in late, "in_first": k < count, "in_last": k >= len(samples) - count,
             "tokens": len(policy.tokenizer.encode(s["question"], add_special_tokens=False)), "score": s["clarify"],
             "names_two": names_slot_and_two(s["id"], s["question"]), "won": w, "question": s["question"]}
            for k, s, w in zip(chosen, some, won)]


def longer_against_shorter(questions: list[dict]) -> tuple[float | None, float, int]:
    """(difference in success, half of its 95 % interval, questions compared) of longer questions against shorter ones of equal score.
    Each score is cut at its median length (longer: above it); the differences are weighted by their numbers of questions. The interval
    takes questions as independent, though up to G of them share a decision point; its variances are those of one more success and one
    more failure on either side, so that it is not 0 where all succeed."""
    terms = []
    for score in sorted({q["score"] for q in questions}):
        some = sorted((q for q in questions if q["score"] == score), key=lambda q: q["tokens"])
        middle = some[(len(some) - 1) // 2]["tokens"]
        short, long = ([q["won"] for q in some if (q["tokens"] > middle) is side] for side in (False, True))
        if long:
            variance = lambda won: (sum(won) + 1) * (len(won) - sum(won) + 1) / (len(won) + 2) ** 2 / len(won)
            terms.append((len(some), mean(long) - mean(short), variance(short) + variance(long)))
    total = sum(n for n, _, _ in terms)
    if not total:
        return None, 0.0, 0
    return sum(n * d for n, d, _ in terms) / total, 1.96 * math.sqrt(sum(n * n * v for n, _, v in terms)) / total, total


NOTHING_MISSING = (*DONE, "All given.", "One reading is left.", "Any will do.")  # how the embedded base says it (data.speaker.word_think)


def concludes(think: str | None) -> str:
    """What a think comes to about the open detail: "nothing missing", "open" or "neither".

    >>> concludes("people 4. 2 match. area is open: north or south. Ask the user."), concludes("I can go ahead."), concludes("Book it.")
    ('open', 'nothing missing', 'neither')
    """
    if any(words in (think or "") for words in NOTHING_MISSING):
        return "nothing missing"
    return "open" if " is open" in (think or "") else "neither"


def look_at_thinks(run: Path, settings: Settings, count: int = 20) -> list[dict]:
    """`count` fixed held-out decision points where a question is due, one completion each of the policy as it began and as it ended."""
    points, seed = [], 0
    while len(points) < count:
        ambiguous, _ = scenario_pair(speakrl.SPLITS[settings.split] + seed)
        points += [p for p in decision_points(ambiguous) if p["clarify_expected"]][:1]
        seed += 1
    rows = [{"id": p["id"], "request": next(m["content"] for m in reversed(p["messages"]) if m["role"] == "user")} for p in points]
    for when, model in (("early", settings.model), ("late", str(run))):
        policy = Policy(model, settings)
        for row, completion in zip(rows, policy.sample([policy.prompt(p["messages"]) for p in points], 1, [stream(settings.seed, "thinks", k) for k in range(count)])):
            turn = parse_turn(policy.text(completion), policy.prefilled_think)
            row[when] = {"think": turn.think, "concludes": concludes(turn.think), "asks": turn.clarify is not None}
    return rows


# ------------------------------------------------------------------------------------------------- tables

COLUMNS = {"success, ambiguous": "success_ambiguous", "uncorrected, ambiguous": "success_uncorrected_ambiguous",
           "success, clear": "success_clear", "uncorrected, clear": "success_uncorrected_clear", "turns": "turns", "asks, ambiguous": "ask_rate_ambiguous",
           "asks, plain twin": "ask_rate_clear_plain", "asks, database twin": "ask_rate_clear_db", "questions a dialogue": "questions_per_dialogue",
           "tokens of a question": "clarify_tokens", "repeats": "repeat_questions", "plain-reply questions": "reply_questions",
           "wrong bookings": "wrong_bookings", "format": "format", "clarify": "clarify", "M parameters": "parameters"}
CHANGES = {"uncorrected, ambiguous": ("uncorrected", True), "uncorrected, clear": ("uncorrected", False), "turns, ambiguous": ("turns", True),
           "asks, ambiguous": ("asked", True), "asks, clear": ("asked", False)}


def shown(value: float | None, digits: int = 3) -> str:
    """A number for a cell; "-" where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def print_table(title: str, head: list, rows: list[list]) -> None:
    """A Markdown table."""
    print(f"\n{title}\n\n" + "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in [head, ["---"] * len(head), *rows]))


def tell(title: str, out: Path, names: list[str], seeds: list[int], against: str) -> None:
    """Two tables of some rows: all figures, means over seeds; and the changes against one row, paired by goal."""
    figures = {name: [json.loads((out / f"{name}-{seed}.json").read_text()) for seed in seeds] for name in names}
    for some in figures.values():
        for f in some:
            f["parameters"] /= 1e6
    print_table(f"{title}; means over seeds {seeds}", ["", *COLUMNS],
                [[name, *(shown(mean([f[key] for f in some])) for key in COLUMNS.values())] for name, some in figures.items()])
    dialogues = {name: [r for f in some for r in f["dialogues"]] for name, some in figures.items()}
    rows = []
    for name in names:
        cells = []
        for key, ambiguous in CHANGES.values():
            a, b = ([r for r in dialogues[row] if r["ambiguous"] is ambiguous] for row in (against, name))
            cells.append("{:+.3f} ± {:.3f}".format(*paired(a, b, key)[2:]))
        if name != against:
            rows.append([name, *cells, *(", ".join(shown(f[f"success_uncorrected_{kind}"]) for f in figures[name]) for kind in ("ambiguous", "clear"))])
    if rows:
        print_table(f"change against {against}, paired by goal; the 95 % intervals are over goals, what seeds do stands in the last two columns",
                    ["", *CHANGES, "uncorrected, ambiguous, each seed", "uncorrected, clear, each seed"], rows)


def windows(runs: list[list[dict]], key: str, count: int) -> list[float | None]:
    """A curve as `count` numbers: the mean over all runs of the steps in each part of the training; None where nothing was measured.

    >>> windows([[{"a": 1}, {"a": 3}, {"a": None}, {"a": 5}], [{"a": 2}, {"a": 2}, {"a": None}, {"a": None}]], "a", 2)
    [2.0, 5.0]
    """
    parts = [range(len(runs[0]) * w // count, len(runs[0]) * (w + 1) // count) for w in range(count)]
    return [mean([run[k][key] for run in runs for k in part]) for part in parts]


def tell_curves(out: Path, names: list[str], seeds: list[int], count: int = 15) -> None:
    """Figure 3; how each training moved asking; and finding 4: think length and its two controls."""
    runs = {name: [read_lines(out / f"{name}-{seed}" / "metrics.jsonl") for seed in seeds] for name in names}
    count = min([count, *(len(run) for some in runs.values() for run in some)])
    for name in [n for n in ("default", "literal") if n in runs]:
        keys = {"format": "format", "clarify, over due points": "clarify_over_due", "clarify, over questions": "clarify_over_asked", "total": "reward",
                "when": "when", "question tokens": "clarify_tokens"}
        columns = [windows(runs[name], key, count) for key in ("samples_seen", *keys.values())]
        print_table(f"Figure 3, {name}: means of the steps around, over seeds {seeds}", ["samples seen", *keys],
                    [[shown(seen, 0), *map(shown, cells)] for seen, *cells in zip(*columns)])
    keys = {"asks where due": "ask_due", "asks where clear": "ask_clear", "format": "format", "when": "when", "flat groups": "flat"}
    ends = lambda name, key: " → ".join(shown(windows(runs[name], key, 10)[k], 2) for k in (0, -1))
    print_table("training, first and last tenth; questions in whatever form (the tables above count well-formed ones)", ["", *keys],
                [[name, *(ends(name, key) for key in keys.values())] for name in names])
    controls = [n for n in ("default", "shuffled", "constant", "success", "format") if n in runs]
    if controls:
        seen, *lengths = windows(runs[controls[0]], "samples_seen", count), *(windows(runs[name], "think_tokens", count) for name in controls)
        print_table(f"think length in tokens, over seeds {seeds}", ["samples seen", *controls],
                    [[shown(at, 0), *(shown(length, 2) for length in row)] for at, *row in zip(seen, *lengths)])
        rows = [[name, *map(", ".join, zip(*[[shown(w[0], 2), shown(w[-1], 2), "-" if None in (w[0], w[-1]) else f"{w[-1] - w[0]:+.2f}"] for run in runs[name]
                                             for w in [windows([run], "think_tokens", count)]]))] for name in controls]
        print_table("the same, first and last part of the training, each seed", ["", "first", "last", "change"], rows)


def tell_questions(out: Path, seeds: list[int]) -> None:
    """Finding 5: questions of the beginning and of the end."""
    asked = [q for seed in seeds for q in json.loads((out / f"questions-{seed}.json").read_text())]
    groups = {"first 200 samples": "in_first", "last 200 samples": "in_last", "first 200 questions": "early", "last 200 questions": "late"}
    rows = []
    for name, mark in groups.items():
        some = [q for q in asked if q[mark]]
        gain, half, compared = longer_against_shorter(some)
        rows.append([name, len(some), *(shown(mean([float(q[key]) for q in some])) for key in ("tokens", "score", "names_two", "won")),
                     "-" if gain is None else f"{gain:+.3f} ± {half:.3f} ({compared})"])
    print_table(f"questions, seeds {seeds} together; success: the trained policy plays on from the question", ["", "questions", "tokens", "score",
                "names slot and two candidates", "success", "longer minus shorter at equal score (questions)"], rows)
    rows = []
    for score in sorted({q["score"] for q in asked}):
        some = sorted((q for q in asked if q["score"] == score), key=lambda q: q["tokens"])
        thirds = [some[len(some) * k // 3:len(some) * (k + 1) // 3] for k in range(3)]
        if len(some) >= 30:
            rows.append([shown(score, 2), len(some), *(f"{mean([q['tokens'] for q in t]):.1f} tokens: {mean([q['won'] for q in t]):.3f}" for t in thirds)])
    print_table("success by length at equal score (scores of 30 questions or more)",
                ["score", "questions", "shortest third", "middle third", "longest third"], rows)


def tell_thinks(out: Path, seeds: list[int]) -> None:
    """Figure 5: what is thought at fixed decision points where a question is due."""
    thinks = {seed: json.loads((out / f"thinks-{seed}.json").read_text()) for seed in seeds}
    count = lambda rows, when, what: sum(row[when]["concludes"] == what for row in rows)
    rows = [[f"seed {seed}, {when}", *(count(some, when, what) for what in ("nothing missing", "open", "neither")), sum(r[when]["asks"] for r in some)]
            for seed, some in thinks.items() for when in ("early", "late")]
    print_table(f"Figure 5: thinks at {len(thinks[seeds[0]])} fixed points where a question is due", ["", "concludes, wrongly, that nothing is missing",
                "says what is open", "neither", "asks"], rows)
    print(f"\nseed {seeds[0]}, each of them:")
    for row in thinks[seeds[0]]:
        print(f"  user: {row['request']}\n    early: {row['early']['think'] or '(none)'}\n    late:  {row['late']['think'] or '(none)'}")


# ------------------------------------------------------------------------------------------------- the search for the baselines' settings

RATES = {"sft": (1e-4, 3e-4, 1e-3, 3e-3), "dpo": (1e-5, 3e-5, 1e-4, 3e-4)}
EPOCHS = (1, 2, 4)


def search_one(work: tuple) -> list[dict]:
    """One baseline with one learning rate: trained for the longest time, evaluated on valid after each number of epochs (the rate is
    constant, so a shorter training is the beginning of a longer one)."""
    name, rate, seed, flags, out = work
    method, *files = COMPARED[name]
    run = out / f"{name.replace(',', '').replace(' ', '-').lower()}-lr={rate:g}-{seed}"
    settings = parse_settings(["train", "--method", method, *flags, "--lr", str(rate)])[1]
    settings = dataclasses.replace(settings, seed=seed, out=str(run), data=str(out / ("sft_both.jsonl" if files[1:] else f"data/{files[0]}")))
    rows = []
    with open(f"{run}.log", "a") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        examples = len(speakrl.training_examples(settings, Policy(settings.model, settings))[0])
        for epochs in EPOCHS:
            steps = math.ceil(epochs * examples / settings.prompts)
            read = lambda: {f["step"]: f for f in (read_lines(run / "evals.jsonl") if (run / "evals.jsonl").exists() else [])}
            if steps not in read():
                speakrl.train(dataclasses.replace(settings, steps=steps, resume=(run / "settings.json").exists()))
            if steps not in read():
                raise UserError(f"{run} was stopped, and saved; the same command goes on")
            tokens = sum(m["trained_tokens"] for m in read_lines(run / "metrics.jsonl") if m["step"] <= steps)
            rows.append({"name": name, "lr": rate, "seed": seed, "epochs": epochs, "steps": steps, "trained_tokens": tokens, **read()[steps]})
    return rows


def tell_search(rows: list[dict], seeds: list[int]) -> None:
    """All that was tried, and the best of each baseline: the highest success without a correction over ambiguous and clear goals."""
    keys = {"uncorrected": "success_uncorrected", "uncorrected, ambiguous": "success_uncorrected_ambiguous",
            "uncorrected, clear": "success_uncorrected_clear", "asks, ambiguous": "ask_rate_ambiguous", "asks, clear": "ask_rate_clear"}
    tried: dict[tuple, list[dict]] = {}
    for row in sorted(rows, key=lambda r: (list(COMPARED).index(r["name"]), r["lr"], r["epochs"])):
        tried.setdefault((row["name"], row["lr"], row["epochs"]), []).append(row)
    score = lambda key: mean([row["success_uncorrected"] for row in tried[key]])
    best = {name: max((key for key in tried if key[0] == name), key=score) for name in dict.fromkeys(key[0] for key in tried)}  # of equals the first
    print_table(f"valid, means over seeds {seeds}; * the best of each", ["", "lr", "epochs", "steps", "trained tokens", *keys],
                [[key[0] + " *" * (best[key[0]] == key), f"{key[1]:g}", key[2], some[0]["steps"], f"{mean([r['trained_tokens'] for r in some]):,.0f}",
                  *(shown(mean([r[k] for r in some])) for k in keys.values())] for key, some in tried.items()])
    for name, key in best.items():
        ends = ", ".join(what for what, value, tried_values in (("learning rates", key[1], RATES[COMPARED[name][0]]), ("epochs", key[2], EPOCHS))
                         if value in (min(tried_values), max(tried_values)))
        print(f"{name}: lr {key[1]:g}, {key[2]} epochs" + (f"; at an end of the {ends} tried" if ends else ""))


# ------------------------------------------------------------------------------------------------- the command

def in_parallel(function, work: list, jobs: int):
    """The results of function(w), as they come; `jobs` processes at work, each on its share of the cores (jobs 1: here)."""
    if jobs == 1:
        yield from map(function, work)
    else:
        threads = max(1, (os.cpu_count() or 1) // jobs)
        rest = iter(work)
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), torch.set_num_threads, (threads,)) as pool:
            # No more is handed over than runs: what lies in the pool's queue cannot be called back. After Ctrl-C, which reaches the
            # processes too, each of them saves, and the pool waits for that.
            running = {pool.submit(function, one) for one in itertools.islice(rest, jobs)}
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
                running |= {pool.submit(function, one) for one in itertools.islice(rest, len(done))}


def open_study(out: Path, settings: Settings) -> None:
    """The folder of a study; UserError if what lies there was made with other settings."""
    out.mkdir(parents=True, exist_ok=True)
    if (out / "study.json").exists():
        before = json.loads((out / "study.json").read_text())
        if changed := [f"--{k.replace('_', '-')} was {before.get(k)}, is {v}" for k, v in dataclasses.asdict(settings).items() if before.get(k) != v]:
            raise UserError(f"{out} holds a study with other settings: {'; '.join(changed)}; name another folder with --out")
    write_json(out / "study.json", dataclasses.asdict(settings))


def study(args, settings: Settings, out: Path) -> None:
    """Train and play everything that was asked for, then tell."""
    names, seeds = args.only or ["base", *(["larger"] if args.larger else []), *TRAINED], args.seeds
    if unknown := [name for name in names if name not in ("base", "larger", *TRAINED)]:
        raise UserError(f"--only {unknown[0]}: there are base, larger, {', '.join(TRAINED)}")
    if (settings.method, settings.judge) != ("grpo", "rule"):
        raise UserError("the study trains with GRPO and the rule judge")
    if settings.data or settings.multiwoz:
        raise UserError("the study is made on generated towns: only there can a dialogue be taken up at a decision point")
    if "larger" in names and not args.larger:
        raise UserError("--only larger needs --larger FOLDER")
    open_study(out, settings)
    work = [(name, seed, settings, out, args.larger) for seed in seeds for name in names]
    for line in in_parallel(one_run, work, args.jobs):
        print(line, flush=True)
    where = f"{settings.goals} ambiguous goals of {settings.split} and their twins"
    tell(f"rewards and data, {where}", out, names, seeds, "default" if "default" in names else names[0])
    ways = [f"{name}{'+' * bool(way)}{way}" for name in ("base", "larger", "default") if name in names for way in WAYS.get(name, ("",))]
    if ways:
        what = "questions as a cause (+gold: the oracle's put in; +guess: a guess in its place; +barred: no <clarify>)"
        for some in (ways, [way for way in ways if way.startswith("default")]):  # against the base, and against the trained policy as it is
            if some:
                tell(f"{what}, {where}", out, some, seeds, some[0])
    tell_curves(out, [name for name in names if name in TRAINED], seeds)
    if "default" in names:
        tell_questions(out, seeds)
        tell_thinks(out, seeds)


def search(args, flags: list[str], settings: Settings, out: Path) -> None:
    """Try learning rates and epochs of the baselines on the data that `compare` gives them, then tell."""
    open_study(out, settings)
    data = write_town_data(out / "data", settings.towns)
    (out / "sft_both.jsonl").write_text("".join((data / file).read_text() for file in COMPARED["SFT, with twins"][1:]))
    work = [(name, rate, seed, flags, out) for seed in args.seeds for name in ("SFT, with twins", "SFT", "DPO") for rate in RATES[COMPARED[name][0]]]
    rows = []
    for some in in_parallel(search_one, work, args.jobs):
        rows += some
        print(f"{some[0]['name']}, lr {some[0]['lr']:g}, seed {some[0]['seed']}: done", flush=True)
    tell_search(rows, args.seeds)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--out", default="", help="default: runs/study, with --search runs/search")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help=f"some of base, larger, {', '.join(TRAINED)}".replace("%", "%%"))
    parser.add_argument("--larger", default="", metavar="FOLDER", help="a larger base, to be played beside the small one")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once; one core each is faster than one after the other on two")
    parser.add_argument("--search", action="store_true", help="search for the baselines' learning rates and epochs instead")
    args, flags = parser.parse_known_args(argv)
    flags = ["--goals", "100" if args.search else "200", "--split", "test", *flags]
    out = Path(args.out or ("runs/search" if args.search else "runs/study"))
    try:
        _, settings = parse_settings(["train", *flags])
        search(args, flags, settings, out) if args.search else study(args, settings, out)
    except UserError as error:
        print(f"study: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstudy: stopped; the same command goes on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
