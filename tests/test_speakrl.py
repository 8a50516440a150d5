"""What holds speakrl.py: settings, data order, one step, evaluation, checkpoints and resume, chat, the README's commands."""
import dataclasses
import json
import math
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

import grpo
import speakrl
from data.speaker import play, with_thinks
from data.towns import scenario_pair
from rewards import DIMENSIONS, RuleJudge, Verdict
from test_env import CHATML, tokenizer_of
from speakrl import (Guard, Policy, Settings, UserError, cut_back, damage, draw, draw_points, grpo_step, main, micro_batches, newest_checkpoint, paired, parse_settings,
                     points_of_pair, read_examples, read_points, save_checkpoint, town_pairs, training_examples, training_points,
                     turn_rows, wilson)

ROOT = Path(__file__).resolve().parent.parent
SMALL = dict(towns=6, prompts=2, group=4, goals=1, max_new_tokens=60, guard_every=2, save_every=1)
FLAGS = [f"--{k.replace('_', '-')}={v}" for k, v in SMALL.items()]
TIMES = ("seconds", "sample_seconds", "tokens_per_second")


@pytest.fixture(scope="module")
def policy():
    return Policy(Settings().model, Settings(**SMALL))


def run_cli(*arguments, cwd=ROOT, **kw):
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, str(ROOT / "speakrl.py"), *map(str, arguments)], cwd=cwd, env=env, capture_output=True, text=True, **kw)


# ------------------------------------------------------------------------------------------------- settings

@pytest.mark.parametrize("argv, words", [
    (["train", "--stepz", "3"], ["--stepz"]), (["tran"], ["tran"]), (["train", "--steps", "many"], ["--steps", "many"]),
    (["train", "--lr", "-1"], ["--lr", "-1"]), (["train", "--lr", "nan"], ["--lr"]), (["train", "--group", "1"], ["--group", "at least 2"]),  # G04
    (["train", "--norm", "tokens"], ["--norm", "token"]), (["train", "--prompts", "8", "--minibatch", "3"], ["--minibatch 3"]),
    (["train", "--judge", "gpt"], ["--judge"]), (["train", "--model", "/no/such/folder"], ["/no/such/folder"]),
    (["eval", "--model", "here/grpo-01"], ["here/grpo-01", "no such folder"]),  # looks like a hub id, but for the folder of its name
    (["train", "--data", "/no/such.jsonl"], ["/no/such.jsonl"]), (["train", "--resume", "--out", "/tmp/no-such-run"], ["holds no run"]),
    (["eval", "--multiwoz", "/no/such/folder"], ["/no/such/folder"]), (["train", "--method", "dpo", "--beta", "0"], ["--beta"]),
    (["eval", "--resume"], ["--resume", "--model"]), (["compare", "--method", "sft"], ["compare", "--method sft"]), (["compare", "--seeds", "0"], ["--seeds"])])
def test_what_is_mistyped_is_refused_in_one_line(argv, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert main(argv) == 2
    error = capsys.readouterr().err.strip().splitlines()
    error = [line for line in error if "Loading" not in line]
    assert len(error) == 1 and error[0].startswith("speakrl: ") and all(word in error[0] for word in words), error


def test_every_field_is_a_flag_with_a_comment(capsys):
    with pytest.raises(SystemExit):
        parse_settings(["--help"])
    text = capsys.readouterr().out
    for field in dataclasses.fields(Settings):
        assert "--" + field.name.replace("_", "-") in text


def test_the_paper_preset_resolves_and_flags_win_over_it():
    _, settings = parse_settings(["train", "--preset", "paper", "--group", "8"])
    assert settings.judge == "claude" and parse_settings(["train", "--preset", "paper", "--judge", "rule"])[1].judge == "rule"
    assert (settings.model, settings.prompts, settings.minibatch, settings.group, settings.lr) == ("Qwen/Qwen2.5-7B-Instruct", 512, 128, 8, 1e-6)


def test_methods_and_commands_have_defaults_of_their_own_and_flags_win():
    assert parse_settings(["train", "--method", "sft"])[1].norm == "token" and parse_settings(["train"])[1].norm == "sequence"
    assert parse_settings(["train", "--method", "sft", "--prompts", "8"])[1].prompts == 8
    assert parse_settings(["compare", "--goals", "3"])[1].goals == 3 and parse_settings(["compare"])[1].split == "test"


# ------------------------------------------------------------------------------------------------- data

def write(path, *lines, raw=None):
    path.write_bytes(raw if raw is not None else "\n".join(lines).encode())
    return str(path)


ROW = {"id": "a", "messages": [{"role": "user", "content": "A table for a few of us."}], "clarify_expected": False}


def test_points_are_read_past_a_byte_order_mark_and_crlf(tmp_path):
    """D04"""
    line = json.dumps(ROW).encode()
    points = read_points(write(tmp_path / "d.jsonl", raw=b"\xef\xbb\xbf" + line + b"\r\n\r\n" + line + b"\r\n"), "rule")
    assert [p["id"] for p in points] == ["a", "a"]


@pytest.mark.parametrize("line, words", [
    ("bad", "line 2: no JSON"), ("[1]", "line 2: no JSON object"), ("{}", "line 2: a decision point needs"), (json.dumps({**ROW, "messages": []}), "line 2: messages"),
    (json.dumps({**ROW, "messages": [{"role": "system", "content": "x"}]}), "line 2: messages"),
    (json.dumps({**ROW, "clarify_expected": "yes"}), "line 2: clarify_expected"),
    (json.dumps({**ROW, "clarify_expected": 0}), "line 2: clarify_expected"),
    (json.dumps({**ROW, "stage": "end"}), "line 2: stage must be one of ask, "),
    (json.dumps({**ROW, "clarify_expected": True}), "line 2: the rule judge needs"),
    (json.dumps({**ROW, "clarify_expected": True, "ambiguity": {"kind": "vague", "domain": "pub", "slot": "area", "candidates": ["a", "b"]}}),
     "line 2: the rule judge cannot read it: "),
    (json.dumps({"id": "a", "messages": [*ROW["messages"], {"role": "tool", "content": "{no JSON"}], "clarify_expected": True,
                 "ambiguity": {"kind": "vague", "domain": "restaurant", "slot": "area", "candidates": ["north", "south"]}}),
     "line 2: the rule judge cannot read it: ")])
def test_a_bad_line_stops_with_file_line_and_reason(tmp_path, line, words):
    """D06"""
    with pytest.raises(UserError, match=re.escape("d.jsonl, " + words)):
        read_points(write(tmp_path / "d.jsonl", json.dumps(ROW), line), "rule")


def test_a_line_separator_inside_a_text_is_no_new_line(tmp_path):
    """D04, its kind: only line feeds end a line of JSONL."""
    row = {**ROW, "messages": [{"role": "user", "content": "A table\u2028for two\u0085."}]}
    path = write(tmp_path / "d.jsonl", json.dumps(row, ensure_ascii=False), json.dumps(row, ensure_ascii=False))
    assert [p["messages"] for p in read_points(path, "rule")] == [row["messages"]] * 2


PAIR = {"prompt": [{"role": "user", "content": "A table at golden wok for 3."}],
        "chosen": [{"role": "assistant", "content": "<think>Two.</think><clarify>North or south?</clarify>"},
                   {"role": "user", "content": "North."},
                   {"role": "assistant", "content": '<think>Book.</think><tool_call>{"name": "book", "arguments": {"a": "b"}}</tool_call>'},
                   {"role": "tool", "content": '{"reference": "AB12CD34"}'},
                   {"role": "assistant", "content": "<think>Done.</think>Booked, AB12CD34."}, {"role": "user", "content": "Thanks."}],
        "rejected": [{"role": "assistant", "content": "<think>Fine.</think>Booked."}, {"role": "user", "content": "Thanks."}]}


@pytest.mark.parametrize("change, words", [
    ({"chosen": None}, "chosen must be a list"), ({"rejected": []}, "rejected must be a list"), ({"prompt": "hi"}, "prompt must be a list"),
    ({"rejected": PAIR["prompt"]}, "rejected holds no message of the assistant"),
    ({"chosen": [{"role": "assistant", "content": None}]}, "chosen must be a list")])
def test_a_bad_pair_stops_with_file_line_and_reason(tmp_path, change, words):
    """D06"""
    with pytest.raises(UserError, match=re.escape("d.jsonl, line 2: " + words)):
        read_examples(write(tmp_path / "d.jsonl", json.dumps(PAIR), json.dumps({**PAIR, **change})), ("chosen", "rejected"))
    with pytest.raises(UserError, match="line 1: it has no completion; needed are prompt, completion"):
        read_examples(str(tmp_path / "d.jsonl"), ("completion",))


def test_a_trajectory_becomes_one_row_an_agent_turn_with_the_history_a_dialogue_shows(policy):
    """S02, S04: thinks only in the turn that is trained, user and tool text only in prompts, the end token trained."""
    rows = turn_rows(policy, PAIR["prompt"], PAIR["chosen"])
    end = policy.tokenizer.convert_tokens_to_ids("<|end|>")
    assert policy.end_id == end and end in policy.eos_ids and all(completion[-1] == end for _, completion in rows)
    assert [policy.text(completion) for _, completion in rows] == [m["content"] for m in PAIR["chosen"] if m["role"] == "assistant"]
    history = [*PAIR["prompt"], {"role": "assistant", "content": "North or south?"}, PAIR["chosen"][1],
               {"role": "assistant", "content": '<tool_call>{"name": "book", "arguments": {"a": "b"}}</tool_call>'}, PAIR["chosen"][3]]
    assert [prompt for prompt, _ in rows] == [policy.prompt(history[:n]) for n in (1, 3, 5)]
    later = turn_rows(policy, PAIR["prompt"] + PAIR["chosen"][:2], PAIR["chosen"][2:])
    assert later == rows[1:]  # a turn in the prompt is not trained, and its think is gone too


def test_rows_of_a_dialogue_are_its_decision_points(policy):
    """The loader strips what env.Dialogue hides: same prompts as the oracle's decision points, malformed turns included."""
    for scenario in scenario_pair(3):
        messages = with_thinks(play(scenario))
        assert [p for p, _ in turn_rows(policy, messages[:1], messages[1:])] == [policy.prompt(p["messages"]) for p in speakrl.decision_points(scenario)]
    texts = iter(["<think>Cut off", '<think>a</think>So: <tool_call>{"arguments": {"area": "north"}, "name": "query_hotel"}</tool_call>', "Hm?"])
    seen = []
    dialogue = play(scenario_pair(3)[0], lambda history: seen.append(list(history)) or next(texts, "<think>x</think>No."))
    messages = with_thinks(dialogue)
    assert [p for p, _ in turn_rows(policy, messages[:1], messages[1:])] == [policy.prompt(history) for history in seen]


def test_a_think_that_the_template_opens_is_not_in_the_completion(policy):
    """C-cases of prefilled thinks: the prompt ends with <think>, so the completion must not begin with it again."""
    opened = SimpleNamespace(tokenizer=policy.tokenizer, prefilled_think=True, end_id=policy.end_id)
    whole = policy.completion("<think>a</think>b")
    assert Policy.completion(opened, "<think>a</think>b") == whole[1:] and policy.tokenizer.decode(whole[:1]) == "<think>"


def test_town_pairs_ask_against_guess_and_fail(policy, capsys):
    """Both sides leave the prompt at once, the chosen one with a question that is due; pairs whose guess succeeded are counted and gone."""
    settings = dataclasses.replace(policy.settings, method="dpo", towns=20)
    pairs, (lucky, towns) = town_pairs(20), map(int, re.findall(r"\d+", capsys.readouterr().out)[:2])
    assert towns == 20 == lucky + len(pairs) and 0 < lucky < 20
    for pair in pairs:
        assert "<clarify>" in pair["chosen"][0]["content"] and "<clarify>" not in json.dumps(pair["rejected"])
    examples, dropped = training_examples(dataclasses.replace(settings, max_new_tokens=90), policy)
    assert dropped == 0 and len(examples) == len(pairs)
    assert examples[0]["tokens"] == sum(len(c) for side in ("chosen", "rejected") for _, c in examples[0][side])
    _, dropped = training_examples(dataclasses.replace(settings, max_new_tokens=45), policy)
    assert dropped > 0  # whole pairs: half a trajectory has another log-prob


def test_points_that_are_too_long_are_dropped_and_counted_never_cut(policy):
    """D08, D09"""
    settings = dataclasses.replace(policy.settings, max_prompt=150)
    stages, dropped = training_points(settings, policy)
    whole, none = training_points(policy.settings, policy)
    assert none == 0 and dropped > 0
    assert sum(map(len, stages.values())) + dropped == sum(map(len, whole.values()))
    assert all(len(p["prompt"]) <= 150 for points in stages.values() for p in points)


def test_literal_mode_trains_only_where_a_question_is_due(policy):
    stages, _ = training_points(dataclasses.replace(policy.settings, reward="literal"), policy)
    assert set(stages) == {"ask"}


def test_order_is_a_function_of_seed_and_step_and_goes_through_all():
    """K08, K10: the points of steps 0..n are the same whether or not the run was interrupted, none repeated within a pass."""
    stages = {"ask": [{"id": f"a{i}"} for i in range(8)], "answered": [{"id": f"n{i}"} for i in range(4)],
              "twin": [{"id": f"t{i}"} for i in range(4)], "any": [{"id": f"y{i}"} for i in range(4)], "other": [{"id": f"o{i}"} for i in range(4)]}
    settings = Settings(prompts=8)
    seen = [[p["id"] for p in draw_points(stages, step, settings)] for step in range(4)]
    assert [[i[0] for i in s] for s in seen] == [["a"] * 3 + ["n"] + ["t"] * 2 + ["y", "o"]] * 4  # in eighths: 3, 1, 2, 1, 1
    assert seen[3] == [p["id"] for p in draw_points(stages, 3, settings)]
    asks = [i for step in range(6) for i in (p["id"] for p in draw_points(stages, step, settings)) if i[0] == "a"]
    assert sorted(asks[:8]) == sorted(asks[8:16]) == [f"a{i}" for i in range(8)] and asks[:8] != asks[8:16]
    assert seen != [[p["id"] for p in draw_points(stages, step, Settings(prompts=8, seed=1))] for step in range(4)]


def test_a_missing_stage_leaves_its_place_to_the_others():
    assert len(draw_points({"ask": [{"id": "a"}]}, 0, Settings(prompts=8))) == 8


# ------------------------------------------------------------------------------------------------- the policy

def test_weights_are_float32_whatever_the_folder_holds(policy, tmp_path):
    policy.model.to(torch.bfloat16).save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    policy.model.float()
    assert {p.dtype for p in Policy(str(tmp_path), Settings()).model.parameters()} == {torch.float32}
    policy.model.load_state_dict(Policy(Settings().model, Settings()).model.state_dict())  # the rounding is undone


def test_tags_survive_decoding_and_the_end_token_does_not(policy):
    """C09, C10"""
    text = "<think>a</think><clarify>b?</clarify>"
    assert policy.text(policy.tokenizer.encode(text, add_special_tokens=False) + sorted(policy.eos_ids)) == text


def test_saved_and_reloaded_tokenizer_gives_the_same_ids(policy, tmp_path):
    policy.model.save_pretrained(tmp_path), policy.tokenizer.save_pretrained(tmp_path)
    again = Policy(str(tmp_path), Settings())
    for point in points_of_pair(scenario_pair(0)) + points_of_pair(scenario_pair(3 * 10**6)):
        assert again.prompt(point["messages"]) == policy.prompt(point["messages"])
        assert policy.tokenizer.decode(policy.prompt(point["messages"])[:-1]).count("<|user|>") >= 1


def test_the_agent_gives_none_for_a_history_that_is_too_long(policy):
    short, long = [{"role": "user", "content": "Hello."}], [{"role": "user", "content": "Hello. " * 2000}]
    texts = policy.agent(0)([long, short])
    assert texts[0] is None and isinstance(texts[1], str)


@pytest.mark.parametrize("rows", [128, 3])  # at a time: with 3, other rows are beside each other in every turn
def test_the_agent_computes_a_dialogue_once(policy, monkeypatch, rows):
    """Whole dialogues, the same greedily whether the agent keeps what it has computed of them or not, with at most half of the prompt tokens; a new
    agent (other weights) begins anew, and what is kept is of the last turn."""
    seen, runs, calls = [], [], []
    handle = policy.model.get_input_embeddings().register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].numel() - len(inputs[0])))
    real = Policy.sample
    for keep in (True, False):
        def sample(self, prompts, G, seed, kept):
            calls.append((len(kept[0]), len(kept[1]), len(prompts)))
            return real(self, prompts, G, seed, temperature=0, rows=rows, kept=kept if keep else None)
        monkeypatch.setattr(Policy, "sample", sample)
        seen.clear()
        calls.append((0, 0, 0))
        found = speakrl.play_scenarios(policy, [s for k in range(2) for s in scenario_pair(k)], 0, policy.settings)
        runs.append(([d.messages for d in found], sum(seen)))
    handle.remove()
    assert runs[0][0] == runs[1][0] and runs[0][1] < 0.5 * runs[1][1]
    assert all(there <= last_turn and new == 0 for (there, new, _), (*_, last_turn) in zip(calls[1:], calls))


def test_bf16_computes_in_bf16_and_keeps_float32():
    """Log-probs change by rounding (8 bits), weights, gradients and log-probs stay float32; the same with layers computed again."""
    if not speakrl.has_bf16("cpu"):
        pytest.skip("this CPU has no bfloat16 arithmetic")
    prompts, completions, got = [[5, 6, 7], [5, 6]], [[8, 9, 10]] * 4, []
    for settings in (dict(), dict(dtype="bf16"), dict(dtype="bf16", checkpointing=True)):
        policy = Policy(Settings().model, Settings(**settings))
        seen = []
        policy.model.get_decoder().layers[0].self_attn.q_proj.register_forward_hook(lambda module, inputs, out: seen.append(out.dtype))
        logp_BT, _ = policy.logprobs(prompts, completions)
        logp_BT.sum().backward()
        assert set(seen) == {torch.bfloat16 if settings else torch.float32} and logp_BT.dtype == torch.float32
        assert {t.dtype for p in policy.model.parameters() for t in (p, p.grad)} == {torch.float32}
        got.append((logp_BT.detach(), policy.model.get_input_embeddings().weight.grad))
        seen.clear()
        assert len(policy.sample(prompts, 2, [0, 1], max_new_tokens=3)) == 4 and set(seen) == {torch.bfloat16 if settings else torch.float32}
    assert 1e-4 < (got[0][0] - got[1][0]).abs().max() < 0.3
    assert all(torch.equal(a, b) for a, b in zip(got[1], got[2]))


def test_what_the_machine_cannot_do_is_refused(monkeypatch):
    monkeypatch.setattr(speakrl, "has_bf16", lambda device: False)
    with pytest.raises(UserError, match="--dtype bf16: cpu has no bfloat16 arithmetic here"):
        Policy(Settings().model, Settings(dtype="bf16"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="--device cuda:1: torch finds no CUDA device"):
        Policy(Settings().model, Settings(device="cuda:1"))


def test_neither_a_pickle_nor_code_of_a_model_is_loaded(policy, tmp_path):
    """Both would leave a mark: a pickle that touches a file when it is read, and a model folder that brings a module."""
    mark = tmp_path / "mark"
    for name in ("pickle", "code"):
        policy.model.save_pretrained(tmp_path / name), policy.tokenizer.save_pretrained(tmp_path / name)
    evil = type("Evil", (), {"__reduce__": lambda self: (open, (str(mark), "w"))})
    (tmp_path / "pickle" / "model.safetensors").unlink()
    torch.save({"model.norm.weight": evil()}, tmp_path / "pickle" / "pytorch_model.bin")
    config = tmp_path / "code" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}))
    (tmp_path / "code" / "own.py").write_text(f"open({str(mark)!r}, 'w')")
    for name in ("pickle", "code"):
        with pytest.raises(UserError, match=f"--model .*{name} cannot be loaded"):
            Policy(str(tmp_path / name), Settings())
        assert not mark.exists()


# ------------------------------------------------------------------------------------------------- one step

def test_micro_batches_by_hand():
    """Prompts of 6, 2, 2 and 9 tokens with two completions each. Group 1: 2 + 2*1 = 4 tokens, and 2*2 + 4*3 = 16 with group 2, which
    fit; with group 0 it would be 3*6 + 6*3 = 36. Group 3 alone is 9 + 2*8 = 25, more than 20: in two parts."""
    prompts_B = [[0] * n for n in (6, 6, 2, 2, 2, 2, 9, 9)]
    completions_B = [[0] * n for n in (3, 1, 1, 1, 3, 2, 8, 1)]
    groups = [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert micro_batches(groups, prompts_B, completions_B, 20) == [[2, 3, 4, 5], [0, 1], [6], [7]]
    assert micro_batches(groups, prompts_B, completions_B, 1) == [[2], [3], [4], [5], [0], [1], [6], [7]]
    assert micro_batches(groups, prompts_B, completions_B, 100) == [[2, 3, 4, 5, 0, 1, 6, 7]]  # 4*9 + 8*8 = 100
    assert micro_batches([], prompts_B, completions_B, 20) == []


def points_for(policy, count=2):
    points = [p for seed in range(8) for p in points_of_pair(scenario_pair(seed)) if p["stage"] == "ask"][:count]
    return [{**p, "prompt": policy.prompt(p["messages"])} for p in points]


def fresh(policy_path, **changes):
    policy = Policy(policy_path, Settings(**{**SMALL, **changes}))
    return policy, torch.optim.AdamW(policy.model.parameters(), lr=policy.settings.lr, weight_decay=0.0)


def test_unknown_rewards_leave_the_group_and_never_become_numbers(monkeypatch):
    """G10, G11: a judge that fails on every question; only rows without a question have a reward."""
    policy, optimiser = fresh(Settings().model, group=16)
    outage = lambda items: [Verdict(None, "unreachable") for _ in items]
    seen, real = [], speakrl.group_advantages
    monkeypatch.setattr(speakrl, "group_advantages", lambda rewards: seen.append(rewards) or real(rewards))
    metrics, rows = grpo_step(policy, optimiser, points_for(policy), outage, policy.settings, 0)
    asked = [r for r in rows if r["judge"] == "unreachable"]
    assert asked and all(r["reward"] is None and r["clarify"] is None for r in asked)
    assert seen[0].isnan().flatten().tolist() == [r["judge"] == "unreachable" for r in rows]
    assert metrics["judge_failed"] == len(asked) and metrics["clarify_over_asked"] is None
    assert all(math.isfinite(v) for p in policy.model.parameters() for v in (p.sum().item(),))


def test_minibatches_and_epochs_use_log_probs_fixed_before_the_first_update():
    policy, optimiser = fresh(Settings().model, minibatch=1, epochs=2, group=8, reward="literal")
    metrics, _ = grpo_step(policy, optimiser, points_for(policy), RuleJudge(), policy.settings, 0)
    assert metrics["flat"] < 1 and metrics["kl_old_new"] > 0  # later updates see ratios that are not 1
    policy, optimiser = fresh(Settings().model, group=8)
    metrics, _ = grpo_step(policy, optimiser, points_for(policy), RuleJudge(), policy.settings, 0)
    assert metrics["kl_old_new"] == 0 and metrics["clip_fraction"] == 0  # one update: ratio 1


def test_micro_batches_do_not_change_the_update():
    weights = []
    for micro_tokens in (1, 500, 10**6):  # rows alone; groups in parts; all at once
        policy, optimiser = fresh(Settings().model, micro_tokens=micro_tokens, group=8)
        grpo_step(policy, torch.optim.SGD(policy.model.parameters(), lr=1.0), points_for(policy), RuleJudge(), policy.settings, 0)
        weights.append(torch.cat([p.detach().flatten() for p in policy.model.parameters()]))
    assert (weights[0] - weights[2]).abs().max() < 1e-5 and (weights[1] - weights[2]).abs().max() < 1e-5


def test_a_step_of_flat_groups_changes_nothing():
    policy, optimiser = fresh(Settings().model, group=8, reward="literal")
    metrics, _ = grpo_step(policy, optimiser, points_for(policy), RuleJudge(), policy.settings, 0)
    assert metrics["flat"] < 1  # AdamW has momentum now, and would move the weights by it
    before = [p.clone() for p in policy.model.parameters()]
    full = lambda items: [Verdict(dict.fromkeys(DIMENSIONS, 1), "") for _ in items]
    points = points_for(policy)
    policy.sample = lambda prompts, G, seeds: [[5, *policy.eos_ids]] * (len(prompts) * G)
    metrics, _ = grpo_step(policy, optimiser, points, full, policy.settings, 0)
    assert metrics["flat"] == 1 and all(torch.equal(a, b) for a, b in zip(before, policy.model.parameters()))


def test_the_hidden_value_changes_no_prompt_and_no_reward(policy):
    rows = []
    for value in ("x", "y"):
        points = [{**p, "ambiguity": {**p["ambiguity"], "value": value}} for p in points_for(policy, 4)]
        completions = policy.sample([p["prompt"] for p in points], 2, range(4))
        scored = speakrl.score_completions(policy, [p for p in points for _ in range(2)], completions, RuleJudge(), "conditional")
        rows.append([(r["reward"], r["format"], r["clarify"]) for r in scored])
    assert rows[0] == rows[1]


def test_a_marker_in_thinks_reaches_no_judge():
    heard = []
    judge = lambda items: heard.extend(items) or [Verdict(dict.fromkeys(DIMENSIONS, 3), "") for _ in items]
    policy = SimpleNamespace(text=lambda c: c, prefilled_think=False, eos_ids={1})
    point = {"id": "a", "messages": ROW["messages"], "clarify_expected": True, "ambiguity": {"kind": "vague"}}
    speakrl.score_completions(policy, [point], ["<think>MARKER</think><clarify>How many?</clarify>"], judge, "conditional")
    assert heard == [(ROW["messages"], "How many?", {"kind": "vague"})]


def test_the_guard_knows_a_policy_that_lost_its_skill(policy):
    guard = Guard(policy, 8)
    before = guard()
    state = {k: v.clone() for k, v in policy.model.state_dict().items()}
    with torch.no_grad():
        policy.model.lm_head.weight.normal_()
    after = guard()
    policy.model.load_state_dict(state)
    assert before["guard_exact"] > 0.5 > after["guard_exact"] and before["guard_logp"] > after["guard_logp"]
    assert guard() == before


# ------------------------------------------------------------------------------------------------- one step of SFT and DPO

def test_sft_lowers_its_loss_and_micro_batches_do_not_change_the_update():
    weights = []
    for micro_tokens in (1, 10**6):
        policy, _ = fresh(Settings().model, method="sft", micro_tokens=micro_tokens, norm="token", max_new_tokens=90)
        examples = training_examples(policy.settings, policy)[0][:6]
        optimiser = torch.optim.SGD(policy.model.parameters(), lr=0.3)
        losses = [speakrl.sft_step(policy, optimiser, examples, policy.settings, step)["loss"] for step in range(3)]
        assert losses[0] > losses[1] > losses[2]
        weights.append(torch.cat([p.detach().flatten() for p in policy.model.parameters()]))
    assert (weights[0] - weights[1]).abs().max() < 1e-5


def test_dpo_starts_at_ln_2_and_widens_the_margin():
    """S06, S09, in the loop's own functions: the first margin is exactly 0."""
    policy, _ = fresh(Settings().model, method="dpo", max_new_tokens=90, towns=12)
    pairs = training_examples(policy.settings, policy)[0]
    assert len(pairs) > 1
    settings = dataclasses.replace(policy.settings, prompts=len(pairs), steps=1)
    speakrl.add_reference(pairs, policy, settings, 0)
    optimiser = torch.optim.SGD(policy.model.parameters(), lr=0.05)
    first, second = (speakrl.dpo_step(policy, optimiser, pairs, settings, step) for step in range(2))
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6) and first["margin"] == first["reward_chosen"] == first["accuracy"] == 0
    assert first["grad_norm"] > 0 and second["margin"] > 0 and second["loss"] < first["loss"]
    assert second["reward_chosen"] - second["reward_rejected"] == pytest.approx(0.1 * second["margin"], abs=1e-5)
    assert first["trained_tokens"] == sum(pair["tokens"] for pair in pairs) and first["sampled_tokens"] == 0


def test_a_pair_of_equal_sides_trains_nothing():
    """S06, up to the rounding of the model's backward pass."""
    policy, optimiser = fresh(Settings().model, method="dpo")
    rows = turn_rows(policy, PAIR["prompt"], PAIR["chosen"])
    pair = {"chosen": rows, "rejected": rows, "tokens": 2}
    speakrl.add_reference([pair], policy, dataclasses.replace(policy.settings, steps=1), 0)
    assert speakrl.dpo_step(policy, optimiser, [pair], policy.settings, 0)["grad_norm"] < 1e-5


# ------------------------------------------------------------------------------------------------- evaluation

def test_a_few_goals_of_multiwoz_are_a_sample_and_always_the_same(monkeypatch):
    """Their ids begin with MUL, PMUL, SNG: the first 200 of the test goals hold none of a single domain."""
    import data.multiwoz
    monkeypatch.setattr(data.multiwoz, "scenarios", lambda folder, split: [f"{kind}{i}" for kind in ("MUL", "PMUL", "SNG") for i in range(100)])
    some, again, every = (speakrl.evaluation_scenarios(Settings(multiwoz="x", goals=goals)) for goals in (30, 30, 999))
    assert some == again and len(set(some)) == 30 and {s.rstrip("0123456789") for s in some} == {"MUL", "PMUL", "SNG"} and len(set(every)) == 300


def test_wilson_interval():
    assert [round(v, 3) for v in wilson(0.5, 100)] == [0.404, 0.596]
    assert wilson(1.0, 400)[0] < 0.995


def test_pass_at_k_leaves_out_what_the_user_ended(monkeypatch):
    """Goal a: no user, then a success; b: two failures; c: no user at all. pass@2 is 1 of 2."""
    record = lambda id, success, ended="done": {
        "id": id, "twin_kind": None, "ambiguous": True, "success": success, "uncorrected": success, "asked": False, "ended": ended,
        **dict.fromkeys(("turns", "questions", "repeat_questions", "reply_questions", "wrong_bookings", "corrections", "user_forged"), 1)}
    runs = [[record("a", False, "user_error"), record("b", False), record("c", False, "user_error")],
            [record("a", True), record("b", False), record("c", False, "user_error")]]
    monkeypatch.setattr(speakrl, "play_scenarios", lambda policy, scenarios, repeat, settings: runs[repeat])
    monkeypatch.setattr(speakrl, "goal_record", lambda record: record)
    monkeypatch.setattr(speakrl, "evaluate_points", lambda *_: {})
    figures, _ = speakrl.evaluate(None, None, [], Settings(repeats=2))
    assert (figures["pass_at_k"], figures["success"], figures["user_errors"], figures["user_forged"]) == (0.5, pytest.approx(1 / 3), 3, 6)


def test_eval_writes_every_promised_key(tmp_path, capsys):
    assert main(["eval", "--goals", "2", "--repeats", "2", "--show", "1", "--max-new-tokens", "60", "--json", str(tmp_path / "e.json")]) == 0
    figures = json.loads((tmp_path / "e.json").read_text())
    promised = """success success_ambiguous success_clear success_uncorrected success_uncorrected_ambiguous success_uncorrected_clear pass_at_k
        turns turns_cap ask_rate_ambiguous ask_rate_clear ask_rate_clear_plain ask_rate_clear_db questions_per_dialogue repeat_questions
        reply_questions wrong_bookings corrections format when clarify think_tokens clarify_tokens episodes repeats ended intervals"""
    assert set(promised.split()) <= set(figures)
    assert figures["episodes"] == 8 and figures["repeats"] == 2 and sum(figures["ended"].values()) == 8
    assert figures["pass_at_k"] >= figures["success"]
    assert "user:" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------- the run folder

def tensors(folder):
    from safetensors.torch import load_file
    return {**load_file(folder / "model.safetensors"), **{"opt." + k: v for k, v in load_file(folder / "optimiser.safetensors").items()}}


def lines(path, drop=()):
    return [{k: v for k, v in json.loads(line).items() if k not in drop} for line in path.read_text().splitlines()]


def same_run(a, b, step):
    x, y = (tensors(f / "checkpoints" / f"step-{step:06d}") for f in (a, b))
    assert x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)
    assert (a / "samples.jsonl").read_bytes() == (b / "samples.jsonl").read_bytes()
    assert lines(a / "metrics.jsonl", TIMES) == lines(b / "metrics.jsonl", TIMES)


BROKEN = "probabilities are no numbers"


def test_a_broken_policy_ends_in_one_line():
    """A loss that is no number stops before the update, sampling from such weights too; neither leaves a traceback."""
    policy, optimiser = fresh(Settings().model, method="sft", max_new_tokens=90)
    examples = training_examples(policy.settings, policy)[0][:2]
    with torch.no_grad():
        policy.model.get_input_embeddings().weight[:] = math.nan
    with pytest.raises(UserError, match="step 3: the gradient is nan; the last checkpoint is intact"):
        speakrl.sft_step(policy, optimiser, examples, policy.settings, 2)
    with pytest.raises(UserError, match=BROKEN):
        grpo_step(policy, optimiser, points_for(policy), RuleJudge(), policy.settings, 0)
    assert not optimiser.state


@pytest.mark.parametrize("method", ["sft", pytest.param("dpo", marks=pytest.mark.slow)])
def test_the_baselines_resume_exactly_too(method, tmp_path):
    """K09: four steps equal two and two, every tensor of model and optimiser; DPO's reference is the start, not the checkpoint."""
    flags = ["--method", method, "--towns", "4", "--prompts", "2", "--goals", "1", "--guard-every", "0", "--save-every", "2"]
    assert main(["train", "--steps", "4", "--out", str(tmp_path / "a"), *flags]) == 0
    assert main(["train", "--steps", "2", "--out", str(tmp_path / "b"), *flags]) == 0
    assert main(["train", "--steps", "4", "--out", str(tmp_path / "b"), "--resume"]) == 0
    x, y = (tensors(tmp_path / f / "checkpoints" / "step-000004") for f in "ab")
    assert x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)
    a, b = (lines(tmp_path / f / "metrics.jsonl", TIMES) for f in "ab")
    assert a == b and [m["step"] for m in a] == [1, 2, 3, 4] and a[0] != a[2]
    assert {"loss", "grad_norm", "trained_tokens", "sampled_tokens", "samples_seen"} <= set(a[0]) and a[-1]["samples_seen"] == 8
    start = Policy(Settings().model, Settings()).model.state_dict()
    assert any(not torch.equal(x[k], start[k]) for k in start if k in x), "nothing was learnt: the test could not fail"
    if method == "dpo":
        assert a[0]["margin"] == 0 and a[2]["margin"] != 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert main(["train", "--steps", "6", "--out", str(folder), *FLAGS]) == 0
    return folder


def test_resume_is_exact(whole, tmp_path):
    """K09, K10, K14: six steps equal three, a new process's worth of forgetting, and three more."""
    assert main(["train", "--steps", "3", "--out", str(tmp_path / "r"), *FLAGS]) == 0
    torch.manual_seed(12345)  # no generator state is needed
    assert main(["train", "--steps", "6", "--resume", "--out", str(tmp_path / "r"), *FLAGS]) == 0
    same_run(whole, tmp_path / "r", 6)
    changed = tensors(whole / "checkpoints" / "step-000006")
    start = Policy(Settings().model, Settings()).model.state_dict()
    assert any(not torch.equal(changed[k], start[k]) for k in start if k in changed), "nothing was learnt: the test could not fail"


def test_a_run_killed_between_checkpoints_resumes_from_the_last_one(whole, tmp_path):
    """K04: lines behind the checkpoint, a half line, and a half-written checkpoint are dropped."""
    folder = tmp_path / "r"
    assert main(["train", "--steps", "2", "--out", str(folder), *FLAGS]) == 0
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "reward": 9}\n{"step": 4, "rew')
    (folder / "checkpoints" / ".part-step-000003").mkdir()
    (folder / "checkpoints" / ".part-step-000003" / "model.safetensors").write_text("half")
    assert main(["train", "--steps", "6", "--resume", "--out", str(folder), *FLAGS]) == 0
    same_run(whole, folder, 6)
    assert not list((folder / "checkpoints").glob(".part*"))


def test_only_the_last_checkpoints_are_kept_and_no_pickle_is_written(whole):
    assert [p.name for p in sorted((whole / "checkpoints").iterdir())] == ["step-000005", "step-000006"]
    assert not [p for p in whole.rglob("*") if p.suffix in (".pt", ".pth", ".bin", ".pkl")]


def test_a_checkpoint_is_an_ordinary_model_folder(whole):
    """K01, K02: tied weights come back tied, logits equal."""
    from transformers import AutoModelForCausalLM
    path = newest_checkpoint(str(whole))
    a, b = AutoModelForCausalLM.from_pretrained(path), Policy(str(whole), Settings()).model
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(a(ids).logits, b(ids).logits)
    assert b.lm_head.weight.data_ptr() == b.model.embed_tokens.weight.data_ptr()


def test_changed_settings_are_refused_on_resume_and_all_named(whole, capsys):
    """K11"""
    flags = [f for f in FLAGS if "group" not in f]
    assert main(["train", "--steps", "7", "--resume", "--out", str(whole), "--lr", "5e-6", "--group", "8", *flags]) == 2
    error = capsys.readouterr().err
    assert "--lr was 0.0003, is 5e-06" in error
    assert "--group was 4, is 8" in error


def test_a_run_is_not_written_over(whole, capsys):
    before = (whole / "metrics.jsonl").read_bytes()
    assert main(["train", "--steps", "6", "--out", str(whole), *FLAGS]) == 2
    assert "holds a run already" in capsys.readouterr().err and (whole / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("file", ["model.safetensors", "optimiser.safetensors", "trainer.json", "tokenizer.json", "SHA256SUMS"])
def test_a_flipped_bit_and_a_cut_file_are_damage(whole, tmp_path, file):
    shutil.copytree(whole / "checkpoints" / "step-000006", tmp_path / "c")
    assert damage(tmp_path / "c") == ""
    path = tmp_path / "c" / file
    content = path.read_bytes()
    for place in (0, len(content) // 2, len(content) - 2):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1:])
        assert damage(tmp_path / "c").endswith("not as in SHA256SUMS"), place
        path.write_bytes(content[:place])
        assert damage(tmp_path / "c").endswith("not as in SHA256SUMS"), place
    path.unlink()
    assert file in damage(tmp_path / "c")


def test_a_damaged_checkpoint_is_not_used_and_the_one_before_it_is(whole, tmp_path, capsys):
    folder = tmp_path / "r"
    shutil.copytree(whole, folder)
    path = folder / "checkpoints" / "step-000006" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    before = json.loads((folder / "settings.json").read_text())
    (folder / "settings.json").write_text(json.dumps({**before, "out": str(folder)}))
    assert main(["train", "--resume", "--out", str(folder)]) == 0
    assert "step-000006 is damaged (model.safetensors: not as in SHA256SUMS) and not used" in capsys.readouterr().out
    same_run(whole, folder, 6)
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["damaged-step-000006", "step-000005", "step-000006"]
    for step in (5, 6):
        (folder / "checkpoints" / f"step-{step:06d}" / "trainer.json").unlink()
    for argv in (["train", "--resume", "--out", str(folder)], ["eval", "--model", str(folder)]):
        assert main(argv) == 2 and f"every checkpoint in {folder} is damaged" in capsys.readouterr().err


def test_two_runs_do_not_share_a_folder(tmp_path, capsys):
    settings = Settings(out=str(tmp_path / "r"))
    lock = speakrl.take_folder(tmp_path / "r", settings)
    for resume in ([], ["--resume"]):
        assert main(["train", "--out", str(tmp_path / "r"), *resume]) == 2
        assert f"another process is writing to {tmp_path / 'r'}" in capsys.readouterr().err
    lock.close()
    speakrl.take_folder(tmp_path / "r", dataclasses.replace(settings, resume=True))


def test_a_folder_that_cannot_be_written_to_is_named_before_anything_is_done(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["train", "--out", str(tmp_path / "file" / "r")]) == 2
    error = capsys.readouterr().err
    assert "cannot write to" in error and error.count("\n") == 1


def test_sigterm_anywhere_ends_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(speakrl, "open_run", lambda settings: signal.raise_signal(signal.SIGTERM))
    assert main(["train", "--out", str(tmp_path / "r")]) == 130
    assert "stopped at once; the last checkpoint is complete" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.fixture(params=["limit", pytest.param("tmpfs", marks=pytest.mark.slow)])
def small_disk(request, tmp_path):
    """(a folder, a call that leaves room for so many bytes more): a limit on the size of files, or a small file system."""
    if request.param == "limit":
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
        yield tmp_path, lambda room: resource.setrlimit(resource.RLIMIT_FSIZE, (room or unlimited[0], unlimited[1]))
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        return
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    used = lambda: shutil.disk_usage(disk).used
    yield disk, lambda room: subprocess.run(["mount", "-o", f"remount,size={used() + room if room else 2**30}", str(disk)], check=True)
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_fills_up_loses_nothing(whole, small_disk, capsys):
    """K06: at the checkpoint (2 MB are left, the weights have 4), and in the middle of a log; then there is room again."""
    disk, leave = small_disk
    assert main(["train", "--steps", "3", "--out", str(disk / "r"), *FLAGS]) == 0
    leave(2 * 10**6)
    assert main(["train", "--steps", "6", "--resume", "--out", str(disk / "r")]) == 2
    error = capsys.readouterr().err
    assert re.search(r"step-000004 could not be saved: .*MB are free. The checkpoint before it is intact", error), error
    leave(4096)
    assert main(["train", "--steps", "6", "--resume", "--out", str(disk / "r")]) == 2
    assert "go on with" in capsys.readouterr().err
    assert newest_checkpoint(str(disk / "r")).endswith("step-000003")
    leave(0)
    assert main(["train", "--steps", "6", "--resume", "--out", str(disk / "r")]) == 0
    same_run(whole, disk / "r", 6)


def test_a_full_disk_leaves_the_old_checkpoint_and_says_so(whole, tmp_path, monkeypatch):
    """K06"""
    policy, optimiser = fresh(Settings().model)
    save_checkpoint(tmp_path, 1, policy, optimiser, {"samples_seen": 8}, keep=1)
    monkeypatch.setattr(speakrl, "write_json", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(UserError, match=r"step-000002.*No space left.*free"):
        save_checkpoint(tmp_path, 2, policy, optimiser, {"samples_seen": 16}, keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]
    Policy(str(tmp_path / "step-000001"), Settings())


def test_run_folder_holds_what_the_readme_says(whole):
    settings = json.loads((whole / "settings.json").read_text())
    assert settings["prompts"] == 2 and settings["out"] == str(whole)
    metrics = lines(whole / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(1, 7)) and metrics[-1]["samples_seen"] == 48
    assert {"reward", "format", "when", "clarify_over_due", "clarify_over_asked", "ask_due", "ask_clear", "think_tokens", "clarify_tokens", "flat",
            "truncated", "entropy", "grad_norm", "kl_old_new", "clip_fraction"} <= set(metrics[0])
    assert all(0 <= m["trained_tokens"] <= m["sampled_tokens"] for m in metrics)
    assert "guard_logp" in metrics[1] and "guard_logp" not in metrics[0]
    assert [e["step"] for e in lines(whole / "evals.jsonl")] == [0, 6]
    samples = lines(whole / "samples.jsonl")
    assert len(samples) == 48 and {"step", "id", "text", "due", "think", "question", "format", "when", "clarify", "reward", "judge"} <= set(samples[0])


def test_resume_takes_the_run_that_was_written_to_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, time in ((1, 30), (2, 20)):  # the second one was started later, and has ended
        folder = Path(f"runs/grpo-00{number}")
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("")
        os.utime(folder / "metrics.jsonl", (time, time))
        os.utime(folder, (10 * number, 10 * number))
    assert speakrl.newest_run("train") == Path("runs/grpo-001")


def test_a_file_cut_inside_a_line_is_cut_back(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    cut_back(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def start_run(out, *flags, **env):
    """`speakrl.py train` in a process of its own."""
    return subprocess.Popen([sys.executable, str(ROOT / "speakrl.py"), "train", "--out", str(out), *FLAGS, *flags], text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **env})


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_finishes_the_step_and_saves(number, tmp_path):
    process = start_run(tmp_path / "r", "--steps=500")
    for line in process.stdout:
        if line.startswith("step 1/"):
            process.send_signal(number)
            break
    rest = process.communicate(timeout=60)[0]
    assert process.returncode == 0 and "stopped after step" in rest, rest
    step = int(re.search(r"stopped after step (\d+)", rest)[1])
    assert newest_checkpoint(str(tmp_path / "r")).endswith(f"step-{step:06d}")
    assert [m["step"] for m in lines(tmp_path / "r" / "metrics.jsonl")] == list(range(1, step + 1))


@pytest.mark.slow
def test_fifty_kills_at_random_moments_end_in_the_same_weights(tmp_path):
    """A checkpoint every step; one in four kills falls into the start, the others into the first steps after it, saving included."""
    import random
    rng, folder = random.Random(0), tmp_path / "r"
    assert main(["train", "--steps", "200", "--out", str(tmp_path / "whole"), *FLAGS]) == 0
    seconds = sum(m["seconds"] for m in lines(tmp_path / "whole" / "metrics.jsonl")) / 200
    for kill in range(50):
        process = start_run(folder, "--steps=200", *["--resume"] * (folder / "settings.json").exists())
        if rng.random() < 0.25:
            time.sleep(rng.uniform(0, 10))
        elif not any(line.startswith("step ") for line in process.stdout):
            break
        time.sleep(rng.uniform(0, 4 * seconds))
        process.kill()
        process.communicate()
    assert kill == 49 and len(lines(folder / "metrics.jsonl")) < 200, "the run ended before it was killed fifty times"
    assert not (found := newest_checkpoint(str(folder))) or damage(Path(found)) == ""
    assert main(["train", "--steps", "200", "--resume", "--out", str(folder)]) == 0
    same_run(tmp_path / "whole", folder, 200)


# ------------------------------------------------------------------------------------------------- several processes

def as_processes(count, *command):
    """The command in so many processes that know each other, as torchrun starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(count)}
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", **where}
    return [subprocess.Popen([sys.executable, *command], env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}, cwd=ROOT, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE) for rank in range(count)]


def steps_on_given_completions(folder):
    """The gradients of five GRPO steps on five prompts, and of a step of SFT and DPO, as the optimiser gets them, into a file."""
    from safetensors.torch import save_file
    if speakrl.WORLD > 1:
        torch.distributed.init_process_group("gloo")
    texts = json.loads((folder / "completions.json").read_text())
    found = {}
    for dtype in (torch.float64, torch.float32):
        policy, _ = fresh(Settings().model, norm="token", max_new_tokens=90, group=4)
        policy.model.to(dtype)
        optimiser = torch.optim.SGD(policy.model.parameters(), lr=0.02)
        grads = []
        optimiser.register_step_pre_hook(lambda *_: grads.append(torch.cat([p.grad.flatten() for p in policy.model.parameters()])))
        points = points_for(policy, 5)
        known = {tuple(p["prompt"]): [policy.completion(text) for text in some] for p, some in zip(points, texts)}
        policy.sample = lambda prompts, G, seeds: [c for p in prompts for c in known[tuple(p)]]
        judge = lambda items: [Verdict(None, "unknown") if "when" in q else RuleJudge()([(h, q, a)])[0] for h, q, a in items]
        metrics = [grpo_step(policy, optimiser, points, judge, policy.settings, step)[0] for step in range(5)]
        for step in (speakrl.sft_step, speakrl.dpo_step):
            policy.settings = dataclasses.replace(policy.settings, method=step.__name__[:3], prompts=5, steps=1)
            examples = training_examples(policy.settings, policy)[0][:5]
            if step is speakrl.dpo_step:
                speakrl.add_reference(examples, policy, dataclasses.replace(policy.settings, prompts=len(examples)), 0)
                examples = speakrl.draw(examples, 0, len(examples), policy.settings.seed, "order")
            metrics.append(step(policy, optimiser, examples, policy.settings, 0))
        found[str(dtype)] = torch.stack(grads)
        found[f"{dtype} metrics"] = torch.tensor([[m.get(key, 0.0) for key in ("grad_norm", "entropy", "trained_tokens", "flat", "loss", "margin")]
                                                  for m in metrics], dtype=torch.float64)
    save_file(found, folder / f"{speakrl.WORLD}-{speakrl.RANK}.safetensors")


@pytest.mark.slow
def test_two_processes_have_the_gradients_of_one(tmp_path):
    """float64: 1e-6 relative over five steps; float32: 1e-5 from equal weights. Five prompts, so three and two; texts of unequal
    lengths; one group is flat, one has an unknown reward."""
    texts = [["<think>Ask.</think><clarify>How many people?</clarify>", "<think>All is said, so go on.</think>Fine, I do that.", "Which one?",
              "<think>Ask.</think><clarify>Do you want north or south, or any other place that we have?</clarify>"] for _ in range(5)]
    texts[1] = ["Hello."] * 4
    texts[2][0] = "<think>Ask.</think><clarify>At what time, and when?</clarify>"  # no judge answers this one
    (tmp_path / "completions.json").write_text(json.dumps(texts))
    steps_on_given_completions(tmp_path)
    command = f"import pathlib, os, test_speakrl; test_speakrl.steps_on_given_completions(pathlib.Path({str(tmp_path)!r})); os._exit(0)"
    for process in as_processes(2, "-c", command):
        out, error = process.communicate(timeout=600)
        assert process.returncode == 0, error
    from safetensors.torch import load_file
    one, first, second = (load_file(tmp_path / f"{name}.safetensors") for name in ("1-0", "2-0", "2-1"))
    for dtype, tolerance in (("torch.float64", [1e-6] * 7), ("torch.float32", [1e-5] + [1e-3] * 6)):
        assert torch.equal(first[dtype], second[dtype])  # identical updates, so identical parameters
        assert len(one[dtype]) == 7
        for a, b, most in zip(one[dtype], first[dtype], tolerance):
            assert (a - b).abs().max() <= most * a.abs().max() and a.abs().max() > 0
        assert torch.allclose(one[f"{dtype} metrics"], first[f"{dtype} metrics"], rtol=1e-4, atol=1e-5)
    assert one["torch.float64 metrics"][0, 3] == pytest.approx(0.2)  # one flat group of five


def runs_of_two(folder):
    """Four runs in the same two processes: two steps; one and one more; the same with shared optimiser state; a refusal."""
    speakrl.record_evaluation = speakrl.print_evaluations = lambda *_: None  # only to save time
    flags = [*FLAGS, "--prompts=3", "--lr=1e-3"]
    assert main(["train", "--steps", "2", "--out", str(folder / "a"), *flags]) == 0
    for name, more in (("b", []), ("zero", ["--zero"])):
        assert main(["train", "--steps", "1", "--out", str(folder / name), *flags, *more]) == 0
        assert main(["train", "--steps", "2", "--out", str(folder / name), "--resume"]) == 0
    assert main(["eval", "--goals", "1"]) == 2


@pytest.mark.slow
def test_two_processes_resume_exactly_and_share_the_optimiser(tmp_path):
    processes = as_processes(2, "-c", f"import pathlib, os, test_speakrl; test_speakrl.runs_of_two(pathlib.Path({str(tmp_path)!r})); os._exit(0)")
    heard = [process.communicate(timeout=600) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], heard
    assert "2 processes" in heard[0][0] and heard[1][0] == ""  # the first one speaks
    assert all("eval runs in one process" in error for _, error in heard)
    same_run(tmp_path / "a", tmp_path / "b", 2)
    a, zero = (tensors(tmp_path / name / "checkpoints" / "step-000002") for name in ("a", "zero"))
    from safetensors.torch import load_file
    theirs = {f"opt.{k}": v for k, v in load_file(tmp_path / "zero" / "checkpoints" / "step-000002" / "optimiser1.safetensors").items()}
    assert 0.3 < len(theirs) / len([k for k in a if k.startswith("opt.")]) < 0.7 and not theirs.keys() & zero.keys()
    zero |= theirs
    assert a.keys() == zero.keys() and all(torch.equal(a[k], zero[k]) for k in a)
    start = Policy(Settings().model, Settings()).model.state_dict()
    assert any(not torch.equal(a[k], start[k]) for k in start if k in a), "nothing was learnt: the test could not fail"
    samples = lines(tmp_path / "a" / "samples.jsonl")
    assert len(samples) == 2 * 3 * 4 and len({s["id"] for s in samples if s["step"] == 1}) == 3  # those of both processes
    assert main(["train", "--steps", "1", "--out", str(tmp_path / "one"), *FLAGS, "--prompts=3", "--lr=1e-3"]) == 0
    assert [s["text"] for s in lines(tmp_path / "one" / "samples.jsonl")] == [s["text"] for s in samples if s["step"] == 1]  # what one would draw
    # One process goes on with what two have written, the moments of both among it.
    assert main(["train", "--steps", "3", "--out", str(tmp_path / "zero"), "--resume"]) == 0
    alone = tensors(tmp_path / "zero" / "checkpoints" / "step-000003")
    assert alone.keys() == a.keys() and all(alone[k] >= a[k] for k in a if k.endswith(".step"))


@pytest.mark.slow
@pytest.mark.parametrize("killed", [1, 0])
def test_when_one_process_is_killed_the_other_ends_and_says_why(killed, tmp_path):
    processes = as_processes(2, str(ROOT / "speakrl.py"), "train", "--steps=500", "--out", str(tmp_path / "r"), *FLAGS)
    assert any(line.startswith("step 5/") for line in processes[0].stdout)  # so there are checkpoints
    processes[killed].kill()
    _, error = processes[1 - killed].communicate(timeout=60)
    assert processes[1 - killed].returncode == 2 and "Traceback" not in error
    assert "another process of this run has ended early" in error and "go on with --resume" in error
    processes[killed].communicate()
    assert damage(Path(newest_checkpoint(str(tmp_path / "r")))) == ""


@pytest.mark.slow
def test_torchrun_as_in_the_readme(tmp_path):
    """Finished is 0 and failed is not 0, twenty times: gloo may abort at exit, which must neither spoil the one nor hide the other."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(ROOT / "speakrl.py"), "train", *FLAGS]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    for k in range(20):
        done = subprocess.run([*torchrun, "--steps", "1", "--out", str(tmp_path / str(k))], env=env, capture_output=True, text=True)
        assert done.returncode == 0 and "terminate called" not in done.stderr, done.stderr
    done = subprocess.run([*torchrun, "--steps", "1", "--out", str(tmp_path / "0")], env=env, capture_output=True, text=True)
    assert done.returncode != 0 and "holds a run already" in done.stderr


# ------------------------------------------------------------------------------------------------- compare

def test_paired_differences_by_hand():
    """Goals a and b change by 1 and 0: mean 0.5, standard error sqrt(0.5 / 2) = 0.5. Unknown values and goals of one side stay out."""
    record = lambda id, value: {"id": id, "v": value}
    before = [record("a", 0), record("a", 0), record("b", True), record("c", None), record("d", 1)]
    after = [record("a", 1), record("b", True), record("b", True), record("c", 1)]
    assert paired(before, after, "v") == (pytest.approx(2 / 3), 1.0, 0.5, pytest.approx(0.98))
    assert paired([*before, {**record("a", 9), "ended": "user_error"}], after, "v") == paired(before, after, "v")  # an outage is no change
    one = paired([record("a", 0)], [record("a", 1)], "v")
    assert one[:3] == (0, 1, 1) and math.isnan(one[3])  # one goal says nothing about others
    assert all(map(math.isnan, paired([record("a", 0)], [record("b", 1)], "v")[2:]))


def test_compare_trains_all_on_equal_tokens_and_does_nothing_twice(tmp_path, capsys, monkeypatch):
    out = tmp_path / "c"
    flags = ["--towns", "6", "--prompts", "2", "--group", "8", "--steps", "4", "--seeds", "1", "--goals", "1", "--guard-every", "0",
             "--max-new-tokens", "80", "--lr", "3e-4"]
    real, calls = speakrl.train, []

    def train(settings):
        calls.append((settings.method, settings.prompts, settings.lr, settings.adam_eps, settings.norm))
        if len(calls) == 2:  # as if interrupted in the second training: nothing is evaluated, and it is resumed
            return real(dataclasses.replace(settings, steps=1))
        return real(settings)

    monkeypatch.setattr(speakrl, "train", train)
    monkeypatch.setattr(speakrl, "RATER", tmp_path / "none")  # the row of the self-judge has a test of its own
    monkeypatch.setattr(speakrl, "record_evaluation", lambda *_: None)  # only to save time
    monkeypatch.setattr(speakrl, "print_evaluations", lambda *_: None)
    assert main(["compare", "--out", str(out), *flags]) == 0
    assert "go on with: python speakrl.py compare --resume --out" in capsys.readouterr().out and not (out / "compare.md").exists()
    kept = (out / "speakrl-0.json").read_bytes()
    assert main(["compare", "--resume", "--out", str(out)]) == 0
    sft = ("sft", 2, 3e-4, 1e-8, "token")  # what is set speaks to all, also where it equals a default; the rest is each method's own
    assert calls == [("grpo", 2, 3e-4, 1e-4, "sequence"), *2 * [("dpo", 2, 3e-4, 1e-8, "sequence")], sft, sft] and (out / "speakrl-0.json").read_bytes() == kept
    rows = json.loads((out / "compare.json").read_text())["rows"]
    assert list(rows) == ["base", "SFT", "SFT, with twins", "DPO", "SpeakRL"] and rows["base"]["trained_tokens"] == 0
    budget = rows["SpeakRL"]["trained_tokens"]
    assert budget > 0, "nothing was trained: the test could not fail"
    for name, folder in (("SFT", "sft-0"), ("SFT, with twins", "sft-with-twins-0"), ("DPO", "dpo-0")):
        steps = [m["trained_tokens"] for m in lines(out / folder / "metrics.jsonl")]
        assert sum(steps) == rows[name]["trained_tokens"] >= budget > sum(steps[:-1])  # the last step crosses the line
    ambiguous = {name: {json.loads(line)["ambiguous"] for line in open(out / name)} for name in ("data/sft.jsonl", "sft-with-twins-0.jsonl")}
    assert ambiguous == {"data/sft.jsonl": {True}, "sft-with-twins-0.jsonl": {True, False}}
    table = (out / "compare.md").read_text()
    assert table in capsys.readouterr().out and table.count("| SFT, with twins |") == 3 and "success, Avg@1" in table
    assert main(["compare", "--resume", "--out", str(out), "--goals", "2"]) == 2  # kept evaluations would not be comparable
    assert "--goals was 1, is 2" in capsys.readouterr().err
    assert main(["train", "--resume", "--out", str(out)]) == 2 and "compare --resume" in capsys.readouterr().err


def test_compare_names_a_missing_file_before_it_trains(tmp_path, capsys):
    assert main(["compare", "--data", str(tmp_path), "--out", str(tmp_path / "c")]) == 2
    assert "holds no points.jsonl" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------- chat, and the README

def test_chat_talks_and_shows_what_was_hidden():
    done = run_cli("chat", "--max-new-tokens", "60", input="I need a table at golden wok, for 4 people, on friday, at 18:00.\n\n")
    assert done.returncode == 0 and "you>" in done.stdout and "think:" in done.stdout, done.stderr


def readme_commands():
    text = (ROOT / "README.md").read_text()
    return sorted({line.strip().split("  #")[0].strip() for block in re.findall(r"```(?:bash|sh)\n(.*?)```", text, re.S)
                   for line in block.splitlines() if line.strip().startswith("python speakrl.py")})


def test_every_readme_command_parses():
    commands = readme_commands()
    assert len(commands) >= 5
    for command in commands:
        if "--resume" not in command:  # resumed settings come from a run; the test below resumes one
            parse_settings(command.split()[2:])


def test_readme_commands_run_at_toy_size(whole, tmp_path):
    """All but the paper-scale ones (a preset), and chat, compare, Claude and the self-judge, which have their own tests; a run folder in them becomes
    the small run's."""
    for command in readme_commands():
        if any(part in command for part in ("claude", "--judge self", "--preset", " chat", " compare", "multiwoz", "MULTIWOZ", "--data")):
            continue
        argv = [str(whole) if re.match(r"runs/", part) else part for part in command.split()[2:]]
        argv = [a for i, a in enumerate(argv) if a not in ("--goals", "--steps", "--repeats", "--show", "--out") and
                (i == 0 or argv[i - 1] not in ("--goals", "--steps", "--repeats", "--show", "--out"))]
        argv = [str(tmp_path / "e.json") if a.endswith(".json") else a for a in argv]
        if "--resume" in argv:
            argv += ["--out", str(whole), "--steps", "6", *FLAGS]
        elif argv[0] == "train":
            argv += ["--out", str(tmp_path / f"run{time.time_ns()}"), "--steps", "1", *FLAGS, "--max-new-tokens", "90"]
        elif argv[0] == "data":
            argv += ["--n", "3", "--out", str(tmp_path / "speaker")]
        else:
            argv += ["--goals", "1", "--show", "1"]
        assert main(argv) == 0, command


# ------------------------------------------------------------------------------------------------- from the losses to the loop

def test_loop_uses_what_the_settings_say(monkeypatch):
    """G10, G15, G20, G33."""
    policy, optimiser = fresh(Settings().model, group=8, norm="token", temperature=0.6, clip_low=0.1, clip_high=0.3, max_new_tokens=60, reward="total")
    seen, weights, loss = [], speakrl.row_weights, speakrl.policy_loss
    monkeypatch.setattr(speakrl, "row_weights", lambda *a: seen.append(("weights", *a)) or weights(*a))
    monkeypatch.setattr(speakrl, "policy_loss", lambda *a: seen.append(("loss", *a)) or loss(*a))
    words = [policy.completion(t) for t in ("<think>a</think><clarify>Which day?</clarify>", "<think>a</think>No.", "Hm", "<think>a</think>Yes.") * 2]
    policy.sample = lambda prompts, G, seeds: words * len(prompts)
    judge = lambda items: [Verdict(None, "outage") for _ in items]
    metrics, rows = grpo_step(policy, optimiser, points_for(policy), judge, policy.settings, 0)
    (_, lengths, known, norm, limit), = [s for s in seen if s[0] == "weights"]
    assert (lengths.tolist(), known.tolist(), norm, limit) == ([len(w) for w in words] * 2, [r["reward"] is not None for r in rows], "token", 60)
    assert {s[-1] for s in seen if s[0] == "loss"} == {(0.1, 0.3)} and known.tolist().count(False) == 4
    one, other = (grpo.token_logprobs(policy.model, [[5, 6]], [[7, 8]], t)[0] for t in (0.6, 1.0))
    assert torch.allclose(policy.logprobs([[5, 6]], [[7, 8]])[0], one, atol=1e-5) and not torch.allclose(one, other, atol=1e-2)


def test_completions_rewards_and_prompts_stay_together(monkeypatch):
    """G07, G09, C07: scripted ids, id 0 and an empty completion among them; one prompt drawn twice is two groups."""
    policy, optimiser = fresh(Settings().model, group=2)
    a, b = points_for(policy)
    points, end = [a, b, a], policy.end_id
    scripted = [[0, 7, end], [9, 0, 0, end], [11, end], [], [13, 5, end], [0]]
    policy.sample = lambda prompts, G, seeds: scripted
    trained, adv = [], []
    real, group = policy.logprobs, speakrl.group_advantages
    policy.logprobs = lambda prompts, completions: trained.append((prompts, completions)) or real(prompts, completions)
    monkeypatch.setattr(speakrl, "group_advantages", lambda r: adv.append(r.clone()) or torch.ones_like(r))  # no group is flat
    monkeypatch.setattr(speakrl, "reward_parts", lambda turn, due, verdict, mode, cost: {"format": 1.0, "when": 1.0, "clarify": None, "reward": 0.0})
    _, rows = grpo_step(policy, optimiser, points, RuleJudge(), policy.settings, 0)
    assert [r["id"] for r in rows] == [p["id"] for p in points for _ in range(2)] and adv[0].shape == (3, 2)
    got = sorted(((prompts[k // 2], c) for prompts, some in trained for k, c in enumerate(some)), key=str)
    assert got == sorted(((points[k // 2]["prompt"], c) for k, c in enumerate(scripted)), key=str)
    assert [r["truncated"] for r in rows] == [False, False, False, True, False, True]  # G26


def test_before_an_update_moves_it_the_ratio_is_exactly_one(monkeypatch):
    """G37."""
    policy, _ = fresh(Settings().model, prompts=4, minibatch=1, group=8, reward="total")
    seen, real = [], speakrl.policy_loss
    monkeypatch.setattr(speakrl, "policy_loss", lambda new, old, *a: seen.append(torch.equal(new, old)) or real(new, old, *a))
    grpo_step(policy, torch.optim.SGD(policy.model.parameters(), lr=0.0), points_for(policy, 4), RuleJudge(), policy.settings, 0)
    assert len(seen) > 1 and all(seen)


def test_a_step_whose_rewards_are_all_unknown_moves_nothing():
    """G25, behind a step that moved something."""
    policy, optimiser = fresh(Settings().model, group=4)
    grpo_step(policy, optimiser, points_for(policy), lambda items: [Verdict(dict.fromkeys(DIMENSIONS, k % 5 + 1), "") for k, _ in enumerate(items)], policy.settings, 0)
    before = [p.clone() for p in policy.model.parameters()]
    policy.sample = lambda prompts, G, seeds: [policy.completion("<think>a</think><clarify>Which day?</clarify>")] * (len(prompts) * G)
    metrics, rows = grpo_step(policy, optimiser, points_for(policy), lambda items: [Verdict(None, "outage") for _ in items], policy.settings, 1)
    assert (metrics["judge_failed"], metrics["flat"], metrics["grad_norm"], metrics["reward"]) == (8, 1.0, 0.0, None)
    assert all(torch.equal(a, b) for a, b in zip(before, policy.model.parameters()))
    json.dumps(metrics, allow_nan=False)


def test_dpo_step_by_hand(monkeypatch):
    """S07, S08: the sides and beta, in the loop: chosen -1 * 2 and rejected -0.5 * 8 against -1.2 * 2 and -0.6 * 8."""
    policy, optimiser = fresh(Settings().model, method="dpo", beta=0.5)
    one = torch.zeros((), requires_grad=True)
    rows = {"chosen": [([1], [2]), ([1], [3])], "rejected": [([1], [4])]}
    policy.logprobs = lambda prompts, completions: (torch.tensor([[-1.0], [-1.0], [-4.0]]) + one, torch.ones(3, 1).bool())
    assert speakrl.pair_logprobs(policy, rows).tolist() == [-2, -4]
    pair = {**rows, "tokens": 3, "reference": torch.tensor([-2.4, -4.8])}
    metrics = speakrl.dpo_step(policy, optimiser, [pair], policy.settings, 0)
    assert metrics["margin"] == pytest.approx(-0.4, abs=1e-6) and metrics["loss"] == pytest.approx(math.log(1 + math.exp(0.2)), abs=1e-6)


def test_the_reference_of_a_resumed_dpo_is_the_start():
    policy, _ = fresh(Settings().model, method="dpo", steps=2, prompts=1)
    rows = turn_rows(policy, PAIR["prompt"], PAIR["chosen"])
    pair = {"chosen": rows, "rejected": rows[:1], "tokens": 1}
    speakrl.add_reference([pair], policy, policy.settings, 0)
    want = pair.pop("reference")
    with torch.no_grad():
        policy.model.get_input_embeddings().weight.mul_(0.9)
    speakrl.add_reference([pair], policy, policy.settings, 1)
    assert torch.equal(pair["reference"], want)


def test_sft_step_by_hand():
    """S01, S02, G20 in the loop: the mean of the norm that is set."""
    policy, optimiser = fresh(Settings().model, method="sft", norm="token")
    policy.logprobs = lambda prompts, completions: (torch.tensor([[-4.0, 0.0], [-1.0, -1.0]], requires_grad=True), torch.tensor([[True, False], [True, True]]))
    metrics = speakrl.sft_step(policy, optimiser, [{"completion": [([1], [4]), ([1], [2, 3])]}], policy.settings, 0)
    assert metrics["loss"] == pytest.approx(2.0)  # (1 + 1 + 4) / 3; of rows it would be 2.5


def test_turns_that_are_too_long_are_no_example():
    """S03."""
    policy, _ = fresh(Settings().model, method="sft", towns=6, max_new_tokens=45)
    kept, dropped = training_examples(policy.settings, policy)
    assert dropped > 0 and all(0 < len(c) <= 45 for e in kept for _, c in e["completion"])


def chatml_policy(folder, opened=""):
    """(policy, id of <|im_end|>) of a tiny model whose template ends turns with another token than its tokenizer's end token."""
    tokenizer = tokenizer_of(CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n" + opened))
    tokenizer.add_special_tokens({"eos_token": "<|endoftext|>", "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    im_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1)
    model = transformers.LlamaForCausalLM(config)
    model.generation_config.eos_token_id = [im_end, tokenizer.eos_token_id]
    model.save_pretrained(folder), tokenizer.save_pretrained(folder)
    return Policy(str(folder), Settings()), im_end


def test_the_end_of_a_turn_is_the_templates_not_the_tokenizers(tmp_path):
    """S04, C03, C16."""
    policy, im_end = chatml_policy(tmp_path / "a")
    assert policy.completion("ok") == [*policy.tokenizer.encode("ok", add_special_tokens=False), im_end]
    assert policy.eos_ids == {im_end, policy.tokenizer.eos_token_id} and policy.prefilled_think is False
    save_checkpoint(tmp_path, 1, policy, torch.optim.AdamW(policy.model.parameters()), {}, 1)
    assert im_end in json.loads((tmp_path / "step-000001" / "generation_config.json").read_text())["eos_token_id"]
    (prompt, completion), = turn_rows(policy, [{"role": "user", "content": "hi"}], [{"role": "assistant", "content": "<think>a</think>ok"}])
    text = policy.tokenizer.decode(prompt + completion)
    assert text.endswith("<|im_start|>assistant\n<think>a</think>ok<|im_end|>") and policy.tokenizer.decode(prompt).endswith("<|im_start|>assistant\n")


def test_a_template_that_opens_the_think_is_noticed(tmp_path):
    """C06."""
    policy, im_end = chatml_policy(tmp_path / "a", "<think>\n")
    assert policy.prefilled_think is True
    completion = policy.completion("<think>It is unclear.\n</think>\n<clarify>Which area?</clarify>")
    point = {"id": "a", "messages": ROW["messages"], "clarify_expected": True, "ambiguity": {"kind": "vague"}}
    judge = lambda items: [Verdict(dict.fromkeys(DIMENSIONS, 5), "") for _ in items]
    row, = speakrl.score_completions(policy, [point], [completion], judge, "conditional")
    assert row["turn"].errors == () and row["turn"].clarify == "Which area?" and row["format"] == 1


def test_a_folder_without_one_of_its_weights_is_refused(tmp_path):
    """K02."""
    from safetensors.torch import load_file, save_file
    shutil.copytree(Settings().model, tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    name = next(k for k in tensors if "q_proj" in k)
    for change in ({}, {name: tensors[name][:-1]}):
        save_file({**{k: v for k, v in tensors.items() if k != name}, **change}, tmp_path / "m" / "model.safetensors", {"format": "pt"})
        with pytest.raises(UserError, match="cannot be loaded"):
            Policy(str(tmp_path / "m"), Settings())


def test_exactly_at_the_limits_is_kept(tmp_path):
    """D09."""
    policy, _ = fresh(Settings().model)
    path = write(tmp_path / "d.jsonl", json.dumps(ROW))
    n = len(policy.prompt(ROW["messages"]))
    at = lambda limit: dataclasses.replace(policy.settings, data=path, max_prompt=limit)
    assert training_points(at(n), policy)[1] == 0
    with pytest.raises(UserError, match="of 1, 1 are longer"):
        training_points(at(n - 1), policy)


def test_the_bytes_of_the_case(tmp_path):
    """D04."""
    row = json.dumps(ROW).encode()
    with pytest.raises(UserError, match="line 3: no JSON"):
        read_points(write(tmp_path / "d.jsonl", raw=b"\xef\xbb\xbf" + row + b"\r\n" + row + b"\r\nbad\r\n\r\n" + row), "rule")


def test_killed_inside_a_save(tmp_path, monkeypatch):
    """K04: as if the process had died behind the weights: nothing is tidied up."""
    policy, optimiser = fresh(Settings().model)
    save_checkpoint(tmp_path / "checkpoints", 1, policy, optimiser, {"samples_seen": 8}, keep=1)
    with monkeypatch.context() as m:
        m.setattr(speakrl, "write_json", lambda *a: (_ for _ in ()).throw(SystemExit(9)))
        with pytest.raises(SystemExit):
            save_checkpoint(tmp_path / "checkpoints", 2, policy, optimiser, {"samples_seen": 16}, keep=1)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [".part-step-000002", "step-000001"]
    assert newest_checkpoint(str(tmp_path)).endswith("step-000001")
    save_checkpoint(tmp_path / "checkpoints", 2, policy, optimiser, {"samples_seen": 16}, keep=1)
    assert newest_checkpoint(str(tmp_path)).endswith("step-000002")


# ------------------------------------------------------------------------------------------------- the cycle of stages, what is refused early, the start of a run, stopping

def test_prompts_that_are_no_eight_go_through_the_same_cycle():
    """4 a step: two steps make the eight of the default; without stages three of four are due."""
    stages = {stage: [{"id": f"{stage}{i}"} for i in range(9)] for stage in speakrl.STAGES}
    count = lambda P, steps, stages=stages: [sum(p["id"].startswith(stage) for step in range(steps) for p in draw_points(stages, step, Settings(prompts=P)))
                                             for stage in speakrl.STAGES]
    assert count(8, 1) == count(4, 2) == [3, 1, 2, 1, 1] and count(6, 4) == [9, 3, 6, 3, 3]
    assert count(4, 1) == [2, 0, 1, 0, 1]
    assert count(8, 1, {stage: stages[stage] for stage in ("ask", "other")}) == [6, 0, 0, 0, 2]
    both = [p["id"] for step in range(6) for p in draw_points(stages, step, Settings(prompts=4)) if p["id"].startswith("ask")]
    assert sorted(both) == [f"ask{i}" for i in range(9)]  # each once before any comes again


def test_one_endless_sequence_however_it_is_cut():
    items = list("abcde")
    whole = draw(items, 0, 12, "key")
    assert draw(items, 0, 7, "key") + draw(items, 7, 5, "key") == whole and sorted(whole[:5]) == items and draw(items, 3, 0, "key") == []


@pytest.mark.parametrize("argv, words", [(["chat", "--town", "4000000"], "--town is 4000000"), (["chat", "--town", "-1"], "--town is -1"),
                                         (["eval", "--json", "no/such/file.json"], "there is no folder no/such")])
def test_refused_before_anything_is_done(argv, words):
    with pytest.raises(UserError, match=words):
        parse_settings(argv)


def test_nothing_to_pair():
    assert all(map(math.isnan, paired([], [], "success")))


def test_a_run_keeps_the_start_that_it_had(tmp_path):
    """A run started from another run names the checkpoint: DPO's reference and the frozen self-judge stay what they were."""
    policy, optimiser = fresh(Settings().model)
    (tmp_path / "a").mkdir()
    speakrl.write_json(tmp_path / "a" / "settings.json", dataclasses.asdict(Settings(out=str(tmp_path / "a"))))
    save_checkpoint(tmp_path / "a" / "checkpoints", 1, policy, optimiser, {}, keep=1)
    settings, *_ = speakrl.open_run(Settings(model=str(tmp_path / "a"), out=str(tmp_path / "b")))
    checkpoint = tmp_path / "a" / "checkpoints" / "step-000001"
    assert settings.model == str(checkpoint) == speakrl.saved_settings(tmp_path / "b")["model"]
    assert speakrl.rater(settings) == speakrl.rater(Settings(model=str(tmp_path / "a"))) == str(speakrl.RATER)
    with open(checkpoint / "model.safetensors", "r+b") as file:  # a checkpoint named itself is checked, too
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    with pytest.raises(UserError, match="is damaged: model.safetensors"):
        Policy(str(checkpoint), Settings())


def test_a_signal_while_processes_wait_for_each_other_is_not_lost(tmp_path, monkeypatch):
    """It comes while the sum over "stop" is under way: the next step's sum carries it."""
    real, sums = speakrl.all_sum, []

    def all_sum(tensor):
        if tensor.shape == (1,) and tensor.dtype == torch.float32 and (tmp_path / "r" / "metrics.jsonl").exists():
            sums.append(0)
            if len(sums) == 1:
                signal.raise_signal(signal.SIGTERM)
        return real(tensor)
    monkeypatch.setattr(speakrl, "all_sum", all_sum)
    speakrl.train(Settings(**{**SMALL, "steps": 6, "guard_every": 0, "out": str(tmp_path / "r")}))
    assert len((tmp_path / "r" / "metrics.jsonl").read_text().splitlines()) < 6


def test_a_second_data_command_on_a_folder_is_refused(tmp_path, capsys):
    import fcntl
    holder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    try:
        assert main(["data", "--n", "1", "--out", str(tmp_path)]) == 2
    finally:
        os.close(holder)
    assert "another process is writing" in capsys.readouterr().err and list(tmp_path.iterdir()) == []
