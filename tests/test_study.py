"""What holds study.py: the replaced functions on fakes, the roll-out by hand, the statistics on a few records, one run at toy size.
And bench.py: what it forwards, and where a measurement dies."""
import doctest
import json
import operator
import os
import random
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bench
import speakrl
import study
from data.speaker import DONE, Belief, Oracle, play, word_think
from data.towns import scenario_pair
from env import ScriptedUser, start_dialogue
from rewards import RuleJudge
from speakrl import STAGES as NAMES, Policy, Settings, goal_record, points_of_pair

SEED = next(s for s in range(99) if "vague" in scenario_pair(s)[0].id and len(scenario_pair(s)[0].requests) == 1)
AMBIGUOUS, CLEAR = scenario_pair(SEED)  # one request with vague words
ASK, VALUE, HISTORY = f"{AMBIGUOUS.id}#0", AMBIGUOUS.ambiguity["value"], [{"role": "user", "content": AMBIGUOUS.requests[0][1]}]
QUESTION = Oracle(AMBIGUOUS.ambiguity, "x")(HISTORY)  # a whole turn that asks well


def test_doctests():
    assert doctest.testmod(study).failed == 0


def test_functions_are_replaced_and_come_back_even_after_an_error():
    real = speakrl.draw
    with pytest.raises(KeyError), study.replaced(draw=len):
        assert speakrl.draw is len
        raise KeyError
    assert speakrl.draw is real


# ------------------------------------------------------------------------------------------------- the roll-out

def test_a_dialogue_at_a_decision_point_is_the_one_of_the_training_data():
    """Same messages, same bookings; and the user is where it was: the oracle plays on from there to success."""
    for seed in range(12):
        for scenario in scenario_pair(seed):
            oracle = Oracle(scenario.ambiguity, "again")
            for point in (p for p in points_of_pair(scenario_pair(seed)) if p["goal_id"] == scenario.id):
                dialogue = study.dialogue_at(point["id"])
                assert dialogue.messages == point["messages"] and dialogue.ended is None
                assert all(r in json.dumps(point["messages"]) for r in dialogue.session.ledger)
                while dialogue.ended is None:
                    dialogue.step(oracle(dialogue.messages))
                assert goal_record(dialogue)["uncorrected"], point["id"]


def fake_policy():
    """Plays on as the oracle would, and never asks: what the completion leaves open, it guesses."""
    oracle = Oracle(AMBIGUOUS.ambiguity, "careless", ask=0)
    return SimpleNamespace(prefilled_think=False, agent=lambda seed: lambda histories: [oracle(h) for h in histories])


def booking(value):
    """The oracle's own booking, with another value of the open slot."""
    dialogue = play(AMBIGUOUS)
    _, _, turn = next(step for step in dialogue.steps if step[2].tool_call and step[2].tool_call["name"].startswith("book"))
    call = {**turn.tool_call, "arguments": {**turn.tool_call["arguments"], AMBIGUOUS.ambiguity["slot"]: value}}
    return f"<think>Book.</think><tool_call>{json.dumps(call)}</tool_call>"


def test_success_of_a_completion_is_what_comes_of_it():
    wrong = next(c for c in AMBIGUOUS.ambiguity["candidates"] if c != VALUE)
    # a question is answered, and what was asked is no guess any more; a lucky guess needs no correction; a wrong one does
    assert study.roll_out(fake_policy(), [ASK] * 3, [QUESTION, booking(VALUE), booking(wrong)], 0) == [1.0, 1.0, 0.0]
    assert study.roll_out(fake_policy(), [], [], 0) == []


def test_nobody_plays_on_after_a_correction():
    """The patient user corrects, and the dialogue goes on; with one chance it is over."""
    wrong = next(c for c in AMBIGUOUS.ambiguity["candidates"] if c != VALUE)
    report = f"<think>Done.</think>Booked for {wrong} people on {wrong} at {wrong}, {wrong} nights. Reference AB12CD34."
    for user, ended in ((ScriptedUser, None), (study.OneChance, "gave_up")):
        dialogue = start_dialogue(AMBIGUOUS, user(AMBIGUOUS))
        dialogue.step(report)
        assert (dialogue.ended, dialogue.user.corrections) == (ended, 1)


def test_task_success_takes_the_place_of_the_reward_in_training_only(monkeypatch):
    def step(policy, optimiser, points, judge, settings, step):  # as speakrl.grpo_step does
        return speakrl.score_completions(policy, [p for p in points for _ in range(2)], ["a", "b"], judge, settings.reward, 0.0)
    monkeypatch.setattr(study, "score_completions", lambda policy, points, completions, *rest: [{"format": 1.0, "reward": 9.0} for _ in completions])
    monkeypatch.setattr(study, "roll_out", lambda policy, ids, texts, seed: [float(text == "B") for text in texts] if ids == ["p", "p"] else None)
    monkeypatch.setattr(study, "grpo_step", step)
    real = speakrl.score_completions
    rows = study.success_step(SimpleNamespace(text=str.upper), None, [{"id": "p"}], None, Settings(), 0)
    assert rows == [{"format": 1.0, "reward": 0.0}, {"format": 1.0, "reward": 1.0}]
    assert speakrl.score_completions is real


# ------------------------------------------------------------------------------------------------- rewards and draws

def test_the_price_of_a_question_reaches_every_turn_that_asks():
    """format + clarify - c * asked: on due points clarify is the judge's (here 1.0), on clear ones 0."""
    act, broken = "<think>t</think>Hello.", "<clarify>Which one?</clarify>"
    due, clear = ({"id": "p", "messages": HISTORY, "clarify_expected": is_due, "ambiguity": AMBIGUOUS.ambiguity} for is_due in (True, False))
    policy = SimpleNamespace(text=lambda c: c, prefilled_think=False, eos_ids=(">", "."))
    rewards = [row["reward"] for row in speakrl.score_completions(policy, [due] * 3 + [clear] * 3, [QUESTION, act, broken] * 2, RuleJudge(), "total", 0.3)]
    assert rewards == pytest.approx([1 + 1 - 0.3, 1, -0.3, 1 - 0.3, 1, -0.3])


def test_shuffled_rewards_stay_in_their_group():
    rewards = torch.arange(24.0).view(3, 8)
    dealt = study.shuffled(rewards, random.Random(0))
    assert dealt.sort(1)[0].equal(rewards) and not dealt.equal(rewards)  # rows were in order, so sorted is the original
    with pytest.raises(ValueError, match="unknown"):
        study.shuffled(torch.tensor([[1.0, float("nan")]]), random.Random(0))


def test_the_step_learns_from_the_shuffled_rewards_and_of_a_step_always_from_the_same(monkeypatch):
    rewards = torch.tensor([[0.0, 0, 0, 0, 0, 0, 0, 1], [2.0] * 8])
    monkeypatch.setattr(study, "grpo_step", lambda *_: speakrl.group_advantages(rewards))
    deal = lambda step: study.shuffled_step(None, None, None, None, Settings(), step)
    plain = speakrl.group_advantages(rewards)
    assert deal(0).sort(1)[0].allclose(plain.sort(1)[0]) and deal(0).equal(deal(0))
    assert len({int(deal(step)[0].argmax()) for step in range(20)}) > 3  # the winner is anyone
    assert speakrl.group_advantages is study.group_advantages


STAGES = {stage: [{"id": f"{stage}{i}"} for i in range(n)] for stage, n in (("ask", 7), ("answered", 5), ("twin", 9), ("any", 3), ("other", 50))}


@pytest.mark.parametrize("share, counts", [(0.1, [30, 10, 180, 90, 90]), (0.5, [150, 50, 100, 50, 50]), (1.0, [300, 100, 0, 0, 0])])
def test_the_share_of_ambiguous_data_is_exact(share, counts):
    """Over 50 steps of 8 prompts; each stage is gone through evenly; a step is a function of its number."""
    draw, settings = study.draw_with_share(share), Settings()
    steps = [draw(STAGES, step, settings) for step in range(100)]
    assert all(len(points) == 8 for points in steps) and draw(STAGES, 63, settings) == steps[63]
    both = Counter()
    for half in (steps[:50], steps[50:]):
        drawn = Counter(p["id"] for points in half for p in points)
        assert [sum(drawn[p["id"]] for p in points) for points in STAGES.values()] == counts
        both += drawn
    assert max(both[p["id"]] for p in STAGES["ask"]) - min(both[p["id"]] for p in STAGES["ask"]) <= 1 and steps[:50] != steps[50:]


def test_the_default_shows_ambiguous_data_half_of_the_time():
    drawn = Counter(p["id"].rstrip("0123456789") for step in range(50) for p in speakrl.draw_points(STAGES, step, Settings()))
    assert [drawn[stage] for stage in NAMES] == [150, 50, 100, 50, 50]


def test_every_training_differs_from_the_default_in_what_its_name_says():
    plain = study.TRAINED["default"]
    assert plain == {} and "default" not in study.REPLACED
    assert all(changes or name in study.REPLACED for name, changes in study.TRAINED.items() if name != "default")
    assert study.TRAINED["cost=0.3"] == dict(reward="total", ask_cost=0.3) and study.TRAINED["cost=0"] == dict(reward="total", ask_cost=0.0)
    for name, changes in study.TRAINED.items():
        flags = [part for k, v in changes.items() for part in (f"--{k.replace('_', '-')}", str(v))]
        speakrl.parse_settings(["train", *flags])  # each is something that speakrl.py accepts


def test_a_flag_speaks_to_all_and_a_refused_command_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    seen = []
    monkeypatch.setattr(speakrl, "train", lambda settings: seen.append(settings))
    for name in ("default", "constant"):
        with pytest.raises(speakrl.UserError, match="was stopped"):
            study.trained(name, 0, Settings(adam_eps=1e-6), tmp_path)
    assert [s.adam_eps for s in seen] == [1e-6, 5e-7]
    for refused in (["--judge", "self"], ["--method", "sft"], ["--multiwoz", "x"], ["--only", "larger"], ["--only", "nothing"]):
        assert study.main(["--out", "s", "--steps", "3", *refused]) == 2 and not (tmp_path / "s").exists(), refused
    assert "--only nothing" in capsys.readouterr().err


def count_up(started: str) -> str:
    """A run of `in_parallel`: leaves a file, fails if told so."""
    Path(started).write_text("")
    if "bad" in started:
        raise ValueError("bad")
    time.sleep(1)
    return started


def test_a_failed_run_starts_no_further_one(tmp_path):
    """Two at a time; the first fails while the second runs. The six others are never begun."""
    work = [str(tmp_path / name) for name in ("bad", *"bcdefgh")]
    with pytest.raises(ValueError, match="bad"):
        list(study.in_parallel(count_up, work, 2))
    assert sorted(p.name for p in tmp_path.iterdir()) in (["b", "bad"], ["bad"])


# ------------------------------------------------------------------------------------------------- ways of playing

def test_gold_questions_are_put_in_where_one_is_due_and_nowhere_else():
    dialogues = [start_dialogue(s, ScriptedUser(s)) for seed in range(8) for s in scenario_pair(seed)]
    oracles = {id(d.messages): Oracle(d.scenario.ambiguity, d.scenario.id, ask=0) for d in dialogues}  # books right, but never asks
    study.with_gold_questions(lambda histories: [oracles[id(h)](h) for h in histories], dialogues)
    for dialogue in dialogues:
        record = goal_record(dialogue)
        assert (record["asked"], record["uncorrected"]) == (dialogue.scenario.ambiguity is not None, True), record["id"]


def test_a_guess_is_put_in_wherever_the_agent_asks_and_nowhere_else():
    """Of an agent that asks well, in a clarify or in a plain reply: nobody is asked, and clear goals are booked as before."""
    for ask in (QUESTION, "<think>Hm.</think>Which one?"):
        dialogues = [start_dialogue(s, ScriptedUser(s)) for seed in range(8) for s in scenario_pair(seed)]
        oracles = {id(d.messages): Oracle(d.scenario.ambiguity, d.scenario.id) for d in dialogues}
        own = lambda h: oracles[id(h)](h)
        study.with_guesses(lambda histories: [ask if "<clarify>" in (text := own(h)) else text for h in histories], dialogues)
        records = [goal_record(d) for d in dialogues]
        assert not any(r["asked"] or r["reply_questions"] for r in records) and all(r["uncorrected"] for r in records if not r["ambiguous"])
        assert 0 < sum(r["uncorrected"] for r in records if r["ambiguous"]) < 8  # a guess may be right


def test_what_is_barred_is_not_written():
    """At the end of a think that says so, the base asks."""
    policy = Policy(Settings().model, Settings(max_new_tokens=24))
    prompt = policy.prompt(HISTORY) + policy.tokenizer.encode("<think>Ask the user.</think>", add_special_tokens=False)
    write = lambda: policy.text(policy.sample([prompt], 1, [0], 0.0)[0])
    free = write()
    study.bar(policy)
    assert "<clarify>" in free and "<clarify>" not in write(), (free, write())


# ------------------------------------------------------------------------------------------------- statistics

def test_longer_against_shorter_at_equal_score_by_hand():
    """Score 1.0 is cut at its lower median 8: 2 of 3 shorter ones won, 0 of 1 longer; score 0.5: 1 of 1, 1 of 1. Weighted by
    4 and 2 questions: (4 * (-2/3) + 2 * 0) / 6 = -4/9. A score without two lengths says nothing."""
    q = lambda score, tokens, won: {"score": score, "tokens": tokens, "won": won}
    questions = [q(1.0, 9, 0.0), q(1.0, 8, 1.0), q(1.0, 7, 1.0), q(1.0, 8, 0.0), q(0.5, 3, 1.0), q(0.5, 12, 1.0), q(0.2, 5, 1.0), q(0.2, 5, 0.0)]
    difference, half, compared = study.longer_against_shorter(questions)
    # variances, with one more success and one more failure each: 3 * 2 / 25 / 3 of the three shorter ones of score 1.0, 2 / 9 of all others
    assert (difference, half, compared) == (pytest.approx(-4 / 9), pytest.approx(1.96 / 6 * (16 * (0.08 + 2 / 9) + 4 * 4 / 9) ** 0.5), 6)
    assert study.longer_against_shorter([q(0.2, 5, 1.0)]) == (None, 0.0, 0)


def test_a_question_names_slot_and_two_candidates():
    slot, (first, second, *_) = AMBIGUOUS.ambiguity["slot"], AMBIGUOUS.ambiguity["candidates"]
    ask = {"people": "How many people", "day": "Which day", "time": "What time", "stay": "How many nights"}[slot]
    found = [study.names_slot_and_two(ASK, text) for text in (f"{ask}: {first} or {second}?", f"{first} or {second}?", f"{ask}: {first}?", f"{ask}?", "judge " * 80)]
    assert found == [True, False, False, False, False]


@pytest.mark.parametrize("kind, style, open_detail, expected", [
    ("book", 0, True, "nothing missing"), ("book", 2, False, "nothing missing"), ("query", 2, False, "nothing missing"),
    ("ask", 2, True, "open"), ("book", 2, True, "open"), ("book", 1, True, "neither")])
def test_what_a_think_concludes_in_the_words_of_the_embedded_base(kind, style, open_detail, expected):
    """If data.speaker words thinks otherwise one day, the count of Figure 5 must follow."""
    doubt = {"kind": "vague", "domain": "restaurant", "slot": "people", "candidates": ["3", "4"]}
    for seed in range(8):
        think = word_think(kind, Belief("restaurant", {"name": "golden wok"}), doubt if open_detail else None, style, random.Random(seed))
        assert study.concludes(think) == expected, think
    assert set(DONE) < set(study.NOTHING_MISSING) and study.concludes(None) == "neither"


# ------------------------------------------------------------------------------------------------- the command

TOY = ["--seeds", "0", "--jobs", "1", "--goals", "1", "--towns", "12", "--prompts", "2", "--group", "4", "--guard-every", "0", "--max-new-tokens", "60"]


@pytest.fixture
def quick(monkeypatch):
    """Only to save time: no evaluation around a training, few held-out points, few questions and thinks to look at."""
    monkeypatch.setattr(speakrl, "record_evaluation", lambda *_: None)
    monkeypatch.setattr(speakrl, "print_evaluations", lambda *_: None)
    monkeypatch.setattr(speakrl, "MAX_POINTS", 4)
    monkeypatch.setattr(study, "look_at_thinks", lambda run, settings: REAL_THINKS(run, settings, 2))
    monkeypatch.setattr(study, "WAYS", {"default": ("", "gold")})


REAL_THINKS = study.look_at_thinks


@pytest.mark.slow
def test_the_study_at_toy_size_is_told_and_nothing_is_done_twice(tmp_path, capsys, monkeypatch, quick):
    command = ["--out", str(tmp_path), "--steps", "2", "--ask-cost", "0.3", "--only", "default", "success", *TOY]
    real, calls = speakrl.train, []

    def train(settings):
        calls.append(settings.out)
        return real(settings if len(calls) > 1 else speakrl.dataclasses.replace(settings, steps=1))  # as if stopped after one step
    monkeypatch.setattr(speakrl, "train", train)
    assert study.main(command) == 2 and "default-0 was stopped" in capsys.readouterr().err
    assert study.main(command) == 0 and [c.rsplit("/", 1)[1] for c in calls] == ["default-0", "default-0", "success-0"]
    told = capsys.readouterr().out
    for title in ("rewards and data", "questions as a cause", "default+gold", "Figure 3, default", "training, first and last tenth", "think length", "longer minus shorter", "Figure 5"):
        assert title in told, title
    samples = {name: study.read_lines(tmp_path / f"{name}-0" / "samples.jsonl") for name in ("default", "success")}
    assert all(len(some) == 16 for some in samples.values())
    assert {s["reward"] for s in samples["success"]} <= {0.0, 1.0}
    for s in samples["default"]:  # the flag reached the step
        assert s["reward"] == pytest.approx(s["format"] * s["when"] + (s["clarify"] or 0) - 0.3 * (s["question"] is not None))
    assert any(s["question"] for s in samples["default"]), "nobody asked: the price was not seen"
    assert "grpo_step replaced" in (tmp_path / "success-0" / "README").read_text()
    files = {path: path.read_bytes() for path in tmp_path.glob("*.json")}
    assert study.main(command) == 0 and len(calls) == 3 and files == {path: path.read_bytes() for path in tmp_path.glob("*.json")}
    assert capsys.readouterr().out.split("\n\n", 1)[1] == told.split("\n\n", 1)[1]
    assert study.main([*command, "--lr", "1e-3"]) == 2 and "--lr was 0.0003, is 0.001" in capsys.readouterr().err


@pytest.mark.parametrize("argv, words", [
    (["--only", "defualt"], ["defualt", "cost=0.3"]), (["--only", "larger"], ["--larger FOLDER"]), (["--stepz", "3"], ["--stepz"]),
    (["--multiwoz", "x"], ["generated towns"])])
def test_what_is_mistyped_is_refused_in_one_line(argv, words, capsys, tmp_path):
    assert study.main(["--out", str(tmp_path), *argv]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("study: ") and "\n" not in error and all(word in error for word in words)


@pytest.mark.slow
def test_the_search_at_toy_size_tells_what_was_tried_and_the_best(tmp_path, capsys, monkeypatch, quick):
    def record(policy, judge, settings, folder, step):  # in the place of an evaluation: the rate 1e-3 is the best after two epochs
        good = 0.9 if (settings.lr, settings.method) == (1e-3, "sft") and step > 2 else 0.5
        keys = ("success_uncorrected_ambiguous", "success_uncorrected_clear", "ask_rate_ambiguous", "ask_rate_clear")
        speakrl.append_lines(folder / "evals.jsonl", {"step": step, "success_uncorrected": good, **dict.fromkeys(keys, 0.25)})
    monkeypatch.setattr(speakrl, "record_evaluation", record)
    monkeypatch.setattr(study, "RATES", {"sft": (1e-4, 1e-3), "dpo": (1e-4,)})
    monkeypatch.setattr(study, "EPOCHS", (1, 2))
    command = ["--search", "--out", str(tmp_path), *TOY[:6], "--towns", "2", "--guard-every", "0", "--prompts", "8"]
    assert study.main(command) == 0
    told = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in told.splitlines() if line.startswith(("| SFT", "| DPO"))]
    assert [(row[0].rstrip(" *"), row[1], row[2]) for row in rows] == [
        *((name, lr, epochs) for name, rates in (("DPO", ("0.0001",)), ("SFT, with twins", ("0.0001", "0.001")), ("SFT", ("0.0001", "0.001")))
          for lr in rates for epochs in ("1", "2"))]
    twice = {row[0].rstrip(" *"): int(row[3]) for row in rows if row[2] == "2"}
    once = {row[0].rstrip(" *"): int(row[3]) for row in rows if row[2] == "1"}
    assert twice["SFT, with twins"] > twice["SFT"] and all(once[name] <= twice[name] <= 2 * once[name] for name in once)  # steps are rounded up
    assert "SFT, with twins: lr 0.001, 2 epochs; at an end of the learning rates, epochs tried" in told
    metrics = study.read_lines(tmp_path / "sft-lr=0.001-0" / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(1, twice["SFT"] + 1))  # the second epoch went on from the first
    monkeypatch.setattr(speakrl, "train", None)  # what is there is not trained again
    assert study.main(command) == 0 and capsys.readouterr().out.split("valid, means", 1)[1] == told.split("valid, means", 1)[1]


def test_jobs_run_in_processes_of_their_own():
    assert os.getpid() not in study.in_parallel(eval, ["__import__('os').getpid()"] * 3, 2)
    assert list(study.in_parallel(eval, ["__import__('os').getpid()"], 1)) == [os.getpid()]


# ------------------------------------------------------------------------------------------------- bench.py

def test_bench_a_process_that_ends_without_an_answer_is_none():
    assert bench.in_process(operator.methodcaller("send", 3)) == 3  # f(pipe) is pipe.send(3)
    assert bench.in_process(operator.methodcaller("close")) is None


@pytest.mark.parametrize("part, way, forwarded", [
    ("rollout", "plain", 4 * 12 + 4 * 3), ("rollout", "shared", 5 + 2 * 6 + 4 * 4), ("update", "plain", 4 * (12 + 4)),
    ("update", "shared", 5 + 2 * 7 + 4 * 3), ("update", "checkpointing", 5 + 2 * 7 + 4 * 3), ("update", "profile", 5 + 2 * 7 + 4 * 3)])
def test_bench_measures_what_it_says(part, way, forwarded):
    """Two prompts of 5 shared and 7 more tokens, two completions of 4 tokens each."""
    found = []
    bench.measure("tiny", part, way, "", SimpleNamespace(send=found.append))
    assert found[0]["forwarded"] == forwarded and found[0]["tokens"] == 16 and 0 < found[0]["seconds"] < 60
    assert ("profile" in found[0]) == (way == "profile") and sum(found[0].get("profile", {"": 1}).values()) == pytest.approx(1)


def test_bench_dialogues_differ_in_what_is_forwarded():
    """Two prompts of 5 shared and 7 more tokens, four turns; each samples 4 tokens and adds 54. Anew, a turn computes what is shared once and the rest of
    each prompt; kept, from the second turn on, the 54 new tokens of each."""
    found = []
    for way in ("anew", "kept"):
        bench.measure_dialogues("tiny", way, "", SimpleNamespace(send=found.append))
    anew, kept = (run["forwarded"] for run in found)
    assert anew == sum(5 + 2 * (6 + 54 * turn) + 2 * 4 for turn in range(4)) and kept == 5 + 2 * 6 + 3 * 2 * 54 + 4 * 2 * 4


def test_bench_what_dies_is_left_out_and_named_and_the_others_are_compared(monkeypatch, capsys):
    mine = {"seconds": 2.0, "tokens": 8, "forwarded": 16, "before_mb": 1, "peak_mb": 3, "limit_seconds": 1.0}
    trl = {"trl 1": {"rollout": 9.0, "update": 9.0, "tokens": 8, "before_mb": 1, "peak_mb": 5}, "trl 4": {"rollout": 4.0, "update": 4.0, "tokens": 8, "before_mb": 1, "peak_mb": 7}}

    def stand_in(function, shape, part, way, folder):
        return trl.get(way) if function is bench.measure_trl else None if (way, part) == ("checkpointing", "update") else mine

    monkeypatch.setattr(bench, "in_process", stand_in)
    found = bench.compare("tiny", 1, "")
    assert capsys.readouterr().out.splitlines() == [
        "| tiny | trl 1, one step |  |  | 9.00 | 9.00 | 18.00 | 0 | 5 | 1 |  |  |",
        "| tiny | trl 4, one step |  |  | 4.00 | 4.00 | 8.00 | 1 | 7 | 1 |  |  |",
        "| tiny | plain | 16 | 16 | 2.00 | 2.00 | 4.00 | 2 | 3 | 1 | 50%, 50% |  |",
        "| tiny | shared | 16 | 16 | 2.00 | 2.00 | 4.00 | 2 | 3 | 1 | 50%, 50% | 1.0 (1.0) |",
        "tiny, checkpointing: left out, the process that measured died; is there memory enough?",
        "| tiny | trl 4 |  |  | 4.00 | 4.00 | 8.00 | 1 | 7 | 1 |  | 0.5 (0.5) |"]
    assert list(found["runs"]) == ["plain", "shared", "checkpointing", "trl 4"]
