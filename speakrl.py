"""SpeakRL in one script: a language model learns, by reinforcement, to notice that a request is ambiguous and to ask.

    python speakrl.py train                       learns when and what to ask, on two cores, in minutes
    python speakrl.py eval --model runs/grpo-001  dialogues with the user simulator; --json FILE, --show N
    python speakrl.py chat --model runs/grpo-001  you play the user
    python speakrl.py train --method sft          the baselines: sft imitates, dpo prefers asking to guessing; --data FILE
    python speakrl.py data --n 25000              builds SpeakER and SpeakER-DPO; --multiwoz DIR, --out DIR
    python speakrl.py compare                     base, SFT, DPO and SpeakRL at equal numbers of trained tokens, as a table
    torchrun --nproc_per_node 2 speakrl.py train  several processes, the prompts of a step split among them

Reads top to bottom: settings (1), the policy and its data (2), one step of GRPO, SFT and DPO (3), evaluation (4), the one
training loop with its checkpoints (5), the comparison (6), the commands (7). What is learnt from and how stands in env.py,
rewards.py and grpo.py.

Where this departs from the textbook:
1. No reference model and no KL: nothing pulls the policy back to its start, so a guard measures whether acting decays.
2. An example is one decision point of a dialogue, not a rollout through the simulator: the history is given, one turn is sampled.
3. Groups without differences are not forwarded, but keep their place in the denominator.
4. Random streams are derived from (seed, purpose, step), never saved: a resumed run repeats the uninterrupted one bit for bit.
"""
from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import fcntl
import functools
import hashlib
import json
import math
import os
import random
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from data.speaker import Oracle, decision_points, play, with_thinks
from data.towns import SPLITS, scenario_pair
from env import (MAX_TURNS, SYSTEM_PROMPT, TOOLS, HumanUser, ModelUser, Scenario, ScriptedUser, merge_roles, parse_turn, render_chat,
                 render_prompt, run_dialogues, score_dialogue, shown, start_dialogue)
from grpo import (checkpoint_layers, dpo_loss, group_advantages, policy_loss, row_weights, sample, sft_loss, shared_logprobs,
                  trajectory_logprobs)
from rewards import (MODES, ClaudeJudge, Reply, Request, RuleJudge, SelfJudge, Stop, checked, judge_question, needs_judge,
                     reward_parts)

ROOT = Path(__file__).resolve().parent
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))  # this process, of so many; from torchrun
# Of a step's prompts: a question is due; was just answered; would be due in the ambiguous twin; is not, as any place will do; the rest.
STAGES = ("ask", "answered", "twin", "any", "other")  # of a decision point: why one asks there, or not
CYCLE = ("ask", "twin", "ask", "other", "ask", "twin", "answered", "any")  # the stages of eight prompts, one after the other
SIDES = {"sft": ("completion",), "dpo": ("chosen", "rejected")}  # what an example of a baseline's data holds beside its prompt


class UserError(Exception):
    """A mistake of the person at the keyboard: shown as one line, without a traceback."""


# ------------------------------------------------------------------------------------------------- 1. settings

@dataclass(frozen=True)
class Settings:
    """Every field is a flag (`--max-new-tokens 64`); the resolved values go into the run folder."""
    method: str = "grpo"         # training method: grpo (SpeakRL), or a baseline: sft, dpo
    model: str = str(ROOT / "data" / "tiny")  # folder or hub id of the policy to start from; a run folder means its last checkpoint
    data: str = ""               # JSONL file of decision points (sft: rows, dpo: pairs; compare: folder); empty: generated towns
    towns: int = 400             # generated towns to train on; each gives an ambiguous dialogue and its clear twin
    out: str = ""                # run folder; empty: the next free runs/METHOD-NNN
    steps: int = 200             # optimiser steps in all (a resumed run may ask for more)
    prompts: int = 8             # decision points a step (P); sft: agent turns, dpo: pairs
    group: int = 8               # grpo: completions of each (G)
    minibatch: int = 0           # grpo: prompts per optimiser update; 0: all of the step's
    epochs: int = 1              # grpo: passes over the completions of a step
    lr: float = 3e-4             # AdamW, constant (a schedule would depend on --steps)
    adam_eps: float = 1e-4       # of AdamW; far below the gradient's size, every step is full-sized, however little there is to learn
    grad_clip: float = 1.0       # largest norm of the gradient
    clip_low: float = 0.2        # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.2       # see clip_low
    beta: float = 0.1            # dpo: the smaller, the further the policy may move from its start
    norm: str = "sequence"       # grpo, sft: what the loss is a mean over: sequence, token, constant
    temperature: float = 1.0     # of sampling, and of the log-probs in the loss
    max_prompt: int = 900        # tokens; a longer training point is dropped and counted, a longer dialogue ends context_full
    max_new_tokens: int = 90     # tokens of a completion; sft, dpo: examples with a longer turn are dropped and counted
    micro_tokens: int = 4096     # tokens forwarded at once in the update, padding counted (dpo: always the turns of one pair)
    dtype: str = "fp32"          # of forward and backward passes: fp32 or bf16; weights, optimiser and log-softmax are float32 always
    checkpointing: bool = False  # keep only the inputs of layers for the backward pass and compute the rest again: less memory, more time
    zero: bool = False           # several processes: each keeps its share of the optimiser's state
    reward: str = "conditional"  # conditional: format * when + clarify; literal: the paper's text, format + clarify where due; total: everywhere; or one part
    ask_cost: float = 0.0        # grpo: price of a question, off the reward of every turn that asks
    judge: str = "rule"          # who scores the questions: rule (reads the annotation), claude, or self (the policy's model)
    judge_model: str = ""        # judge claude: the model, empty: claude-haiku-5-5; judge self: a folder, empty: the start (the embedded one: its rater)
    self_judge: str = "frozen"   # judge self: frozen (the start, a second model in memory) or current (the policy as it is)
    base_url: str = ""           # claude: address of a compatible server; empty: ANTHROPIC_BASE_URL, or Anthropic's own
    cache: str = "runs/claude.jsonl"  # claude: file of its answers; what stands there is not paid for again
    budget_usd: float = 0.0      # claude: stop before a command has spent more; 0: no limit
    user: str = "script"         # who plays the user in evaluation: script, claude, or model (a local one)
    user_model: str = ""         # user claude: the model, empty: claude-haiku-5-5; user model: folder or hub id, empty: the policy
    n: int = 25000               # data: ambiguous dialogues to build
    writer: str = "rules"        # data: who words them: rules, claude (claude-haiku-5-5) or claude:MODEL
    dry_run: bool = False        # data: print what --writer would cost; nothing is sent or written
    multiwoz: str = ""           # eval, compare, data: folder with MultiWOZ; its goals take the place of generated towns
    split: str = "valid"         # eval, compare: valid, test or test-new-words
    goals: int = 40              # ambiguous goals of an evaluation, each with its twin
    repeats: int = 1             # eval, compare: dialogues per goal (pass@k: success in any of them)
    seeds: int = 3               # compare: runs of each method, seeds 0, 1, ...
    guard_every: int = 10        # steps between two looks at 64 fixed acting turns; 0: never
    save_every: int = 50         # steps between two checkpoints
    keep: int = 2                # checkpoints kept
    seed: int = 0                # of every random stream
    device: str = "cpu"          # cpu, cuda, cuda:1, ...
    json: str = ""               # eval: also write the figures to this file
    show: int = 0                # eval: print this many dialogues
    town: int = 2 * 10**6        # chat: seed of the town
    resume: bool = False         # train, compare: continue the run in --out (or the newest one) from its last checkpoint


CHOICES = {"method": ("grpo", "sft", "dpo"), "norm": ("sequence", "token", "constant"), "reward": MODES,
           "judge": ("rule", "claude", "self"), "self_judge": ("frozen", "current"), "user": ("script", "claude", "model"),
           "dtype": ("fp32", "bf16"), "split": ("train", "valid", "test", "test-new-words")}
CLAUDE_MODEL = "claude-haiku-5-5"  # where no model of Claude is named
RATER = ROOT / "data" / "tiny-rater"  # the embedded policy was not taught to rate: this copy was, by python -m data.rater
# Not part of what a run *is*: these may change when it is resumed.
MAY_CHANGE = {"steps", "resume", "out", "goals", "repeats", "json", "show", "save_every", "keep", "town", "split", "multiwoz", "seeds",
              "base_url", "cache", "budget_usd", "zero"}
# What differs from the defaults above, by method and by command. None: each method's own; a flag that is set speaks to all of them.
# Those of the baselines were searched for on valid (tests/study.py --search): steps are two epochs of SFT's rows, four of DPO's pairs.
DEFAULTS = {"sft": dict(prompts=32, norm="token", adam_eps=1e-8, steps=225), "dpo": dict(lr=3e-5, adam_eps=1e-8, steps=117),
            "compare": dict(method="compare", split="test", goals=200, lr=None, adam_eps=None, prompts=None, norm=None)}
# The paper's own numbers are not published; these are its closest kin's (ToolRL). Its judge is Claude; the model that it names is retired.
PRESETS = {"paper": dict(model="Qwen/Qwen2.5-7B-Instruct", judge="claude", prompts=512, minibatch=128, group=4, lr=1e-6, adam_eps=1e-8, max_prompt=2048,
                         max_new_tokens=1024, micro_tokens=8192, dtype="bf16", checkpointing=True, towns=20000, device="cuda")}


def parse_settings(argv: list[str]) -> tuple[str, Settings]:
    """(command, settings) from the command line; UserError for what is unknown or impossible."""
    class Parser(argparse.ArgumentParser):
        def error(self, message):
            raise UserError(f"{message}; see python speakrl.py --help")

    notes = {}
    for line in Path(__file__).read_text().split("class Settings", 1)[1].split("CHOICES =", 1)[0].splitlines():
        if ":" in line and "#" in line:
            notes[line.split(":")[0].strip()] = line.split("#", 1)[1].strip()
    parser = Parser(prog="python speakrl.py", description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=tuple(COMMANDS))
    parser.add_argument("--preset", choices=tuple(PRESETS), help="paper: the settings of the paper's kin for Qwen2.5-7B")
    for field in dataclasses.fields(Settings):
        flag, kind = "--" + field.name.replace("_", "-"), {"int": int, "float": float, "str": str}.get(field.type)
        others = "".join(f"; {name}: {values[field.name]}" for name, values in DEFAULTS.items() if values.get(field.name) is not None)
        note = f"{notes[field.name]} (default: {field.default}{others})".replace("%", "%%")
        if field.type == "bool":
            parser.add_argument(flag, action="store_true", default=None, help=note)
        else:
            parser.add_argument(flag, type=kind, choices=CHOICES.get(field.name), help=note)
    given = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    command, preset = given.pop("command"), PRESETS.get(given.pop("preset", ""), {})
    if given.get("resume") and command not in ("train", "compare"):
        raise UserError(f"--resume is for train and compare; for {command} name a run with --model")
    saved = saved_settings(Path(given.get("out") or newest_run(command))) if given.get("resume") else {}
    own = DEFAULTS.get(command, {}) | DEFAULTS.get({**saved, **given}.get("method"), {})
    settings = Settings(**{**own, **preset, **saved, **given})  # a resumed run keeps what is not said anew
    for name, least in dict(steps=0, prompts=1, group=2, minibatch=0, epochs=1, towns=1, max_prompt=1, max_new_tokens=1,
                            micro_tokens=1, n=1, goals=1, repeats=1, seeds=1, guard_every=0, save_every=1, keep=1, seed=0, show=0).items():
        if getattr(settings, name) is not None and getattr(settings, name) < least:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(settings, name)}, it must be at least {least}")
    for name in ("lr", "adam_eps", "grad_clip", "temperature", "clip_low", "clip_high", "beta", "ask_cost"):
        value = getattr(settings, name)
        if value is not None and not (math.isfinite(value) and (value > 0 or (name in ("lr", "ask_cost") and value == 0))):
            raise UserError(f"--{name.replace('_', '-')} is {value}, it must be a positive number")
    if not 0 <= settings.town < len(SPLITS) * 10**6:
        raise UserError(f"--town is {settings.town}, it must be from 0 to {len(SPLITS) * 10**6 - 1}")
    if settings.json and not Path(settings.json).parent.is_dir():
        raise UserError(f"--json {settings.json}: there is no folder {Path(settings.json).parent}")
    if not 0 <= settings.budget_usd < math.inf:
        raise UserError(f"--budget-usd is {settings.budget_usd}, it must be a number of dollars, or 0 for no limit")
    if settings.minibatch and (settings.prompts or Settings.prompts) % settings.minibatch:
        raise UserError(f"--minibatch {settings.minibatch} does not divide --prompts {settings.prompts}")
    if settings.writer != "rules" and settings.writer.split(":")[0] != "claude":
        raise UserError(f"--writer {settings.writer}: it must be rules, claude or claude:MODEL")
    if settings.dry_run and (command != "data" or settings.writer == "rules"):
        raise UserError("--dry-run says what data --writer claude would cost; nothing else costs anything before it is run")
    if settings.judge == "self" and settings.self_judge == "current" and settings.judge_model:
        raise UserError(f"--self-judge current and --judge-model {settings.judge_model} do not go together: either the policy rates, or that model")
    here = command != "eval" or settings.judge == "self" or settings.user == "model" and not settings.user_model
    if settings.model.startswith("claude:") and here:
        raise UserError(f"--model {settings.model}: Claude can be evaluated (eval), but neither trained nor loaded here")
    if WORLD > 1 and command != "train":
        raise UserError(f"{command} runs in one process: python speakrl.py {command}; torchrun is for train")
    if (command == "compare") != (settings.method == "compare"):
        raise UserError(f"{command} and --method {settings.method} do not go together: compare trains with all methods, and goes on with "
                        "compare --resume")
    return command, settings


def saved_settings(folder: Path) -> dict:
    """The settings of a run; UserError if there is none."""
    try:
        return {**json.loads((folder / "settings.json").read_text()), "out": str(folder)}
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"--resume: {folder} holds no run ({error}); name its folder with --out") from error


def newest_run(command: str) -> Path:
    """The folder in runs/ that this command wrote to last; runs/ itself if there is none."""
    found = [f for f in Path("runs").glob("*-[0-9][0-9][0-9]") if f.name.startswith("compare") == (command == "compare")]
    return max(found, key=lambda folder: max(file.stat().st_mtime for file in [folder, *folder.glob("*.json*")]), default=Path("runs"))


def stream(*key) -> int:
    """A seed for one purpose, such as stream(seed, "sample", step): the same everywhere, unrelated to its neighbours."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:6])


# ------------------------------------------------------------------------------------------------- 2. the policy and its data

class Policy:
    """A causal language model with its tokenizer, as a text-in text-out agent. Weights are float32 whatever the folder holds:
    in bfloat16 a step at lr 1e-6 is lost in rounding."""

    def __init__(self, path: str, settings: Settings):
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar
        disable_progress_bar()  # one for every file loaded and saved would bury ours
        from safetensors import SafetensorError
        if settings.device.startswith("cuda") and not torch.cuda.is_available():
            raise UserError(f"--device {settings.device}: torch finds no CUDA device here; leave the flag away to train on the CPU")
        if settings.dtype == "bf16" and not has_bf16(settings.device):
            raise UserError(f"--dtype bf16: {settings.device} has no bfloat16 arithmetic here; train with --dtype fp32")
        last = newest_checkpoint(path)
        if not last and (Path(path) / "SHA256SUMS").exists() and (fault := damage(Path(path))):
            raise UserError(f"--model {path} is damaged: {fault}")
        path = last or path
        if not Path(path).exists() and (path.startswith((".", "/")) or path.count("/") != 1 or Path(path).parent.is_dir()):
            raise UserError(f"--model {path}: no such folder, and no hub id such as Qwen/Qwen2.5-0.5B-Instruct")
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(path)
            # Never a pickle, never code that comes with a model: both could do anything.
            self.model, loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, use_safetensors=True, output_loading_info=True)
            if missing := sorted(loaded["missing_keys"]):  # transformers would fill them with random numbers
                raise ValueError(f"it lacks {', '.join(missing[:3])}{' ...' * (len(missing) > 3)}")
            self.model.to(settings.device)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise UserError(f"--model {path} cannot be loaded: {str(error).splitlines()[0]}") from error
        self.model.eval()  # and stays so: with dropout, the ratio of two passes over the same weights would not be 1
        if settings.checkpointing:
            checkpoint_layers(self.model)
        self.settings = settings
        ends = self.model.generation_config.eos_token_id
        self.eos_ids = {self.tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
        self.pad_id = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else min(self.eos_ids)
        # Some templates open the think themselves; then the completion starts inside it and the parser must know.
        hello = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hello."}]
        self.prefilled_think = self.tokenizer.decode(self.prompt(hello[:1])).rstrip().endswith("<think>")
        # The end token that the template writes behind an agent message: the one a completion from data has to end in.
        self.end_id = next((t for t in reversed(self.prompt(hello)) if t in self.eos_ids), self.tokenizer.eos_token_id)

    def prompt(self, messages: list[dict]) -> list[int]:
        """Prompt ids of a visible history."""
        return render_prompt(self.tokenizer, messages)

    def completion(self, text: str) -> list[int]:
        """Ids of an agent turn from data as the policy would sample them: inside a think that the prompt opened, with the end token."""
        text = text.removeprefix("<think>") if self.prefilled_think else text
        return self.tokenizer.encode(text, add_special_tokens=False) + [self.end_id]

    def text(self, completion: list[int]) -> str:
        """What the policy wrote, without its end token (cut by id, so that no end text can spoil the form)."""
        return self.tokenizer.decode([t for t in completion if t not in self.eos_ids], skip_special_tokens=True)

    def compute(self):
        """The context of every forward pass: with --dtype bf16 its products are made in bfloat16."""
        # A weight's bfloat16 copy is kept for the length of the context, 2 bytes a parameter: worth it for each token that is sampled.
        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.settings.dtype == "bf16",
                              cache_enabled=not (self.settings.checkpointing and torch.is_grad_enabled()))

    def logprobs(self, prompts: list[list[int]], completions: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """grpo.shared_logprobs with this policy's settings."""
        with self.compute():
            return shared_logprobs(self.model, prompts, completions, self.settings.temperature, self.pad_id)

    def sample(self, prompts: list[list[int]], G: int, seeds: list[int], temperature: float | None = None, rows: int = 128,
               max_new_tokens: int | None = None, kept: tuple[dict, dict] | None = None) -> list[list[int]]:
        """grpo.sample with this policy's settings and a seed for each prompt, about `rows` completions at a time, those of similar prompts
        together (a short prompt beside a long one pays for the long one)."""
        order = sorted(range(len(prompts)), key=lambda p: len(prompts[p]))
        longest = max(map(len, prompts), default=0) + (max_new_tokens or self.settings.max_new_tokens)
        rows = min(rows, 2**18 // longest)  # the cache grows with both: of a 7B model, 2**18 tokens are 22 GB
        completions_B: list = [None] * (len(prompts) * G)
        for k in range(0, len(order), max(1, rows // G)):
            chunk = order[k:k + max(1, rows // G)]
            try:
                with torch.no_grad(), self.compute():
                    new = sample(self.model, [prompts[p] for p in chunk], G, eos_ids=self.eos_ids, pad_id=self.pad_id,
                                 max_new_tokens=max_new_tokens or self.settings.max_new_tokens, seeds=[seeds[p] for p in chunk], kept=kept,
                                 temperature=self.settings.temperature if temperature is None else temperature)
            except FloatingPointError as error:
                raise UserError("the policy is broken: its probabilities are no numbers. Take an earlier checkpoint, or a lower --lr") from error
            for i, p in enumerate(chunk):
                completions_B[p * G:(p + 1) * G] = new[i * G:(i + 1) * G]
        return completions_B

    def agent(self, seed: int):
        """`agent(histories) -> texts` for run_dialogues; a history over `max_prompt` tokens gives None (context_full).
        What a turn computes of a dialogue is there for the next one (`grpo.keep`)."""
        calls, before = 0, {}

        def act(histories: list[list[dict]]) -> list[str | None]:
            nonlocal calls, before
            calls += 1
            after: dict = {}
            prompts = [self.prompt(h) for h in histories]
            fits = [i for i, prompt in enumerate(prompts) if len(prompt) <= self.settings.max_prompt]
            texts: list[str | None] = [None] * len(prompts)
            for i, completion in zip(fits, self.sample([prompts[i] for i in fits], 1, [stream(seed, calls, i) for i in fits], kept=(before, after))):
                texts[i] = self.text(completion)
            before = after
            return texts
        return act


def has_bf16(device: str) -> bool:
    """Whether a device computes in bfloat16 itself (emulated, it is slower than float32)."""
    if device.startswith("cuda"):
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    return device == "cpu" and torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class ClaudeAgent:
    """Claude in the place of the policy, in evaluation: the same prompt, the same grammar, the same tools as text."""
    prefilled_think = False

    def __init__(self, settings: Settings):
        self.complete = claude(settings, settings.model.removeprefix("claude:"))

    def agent(self, seed: int):
        """`agent(histories) -> texts`. What was refused or cut off is a turn that cannot be read; no answer at all raises Stop, for
        it would be scored as the model's failure."""
        system = {"role": "system", "content": SYSTEM_PROMPT + "\nTools:\n" + "\n".join(map(json.dumps, TOOLS.values()))}

        def act(histories: list[list[dict]]) -> list[str]:
            replies = self.complete([Request([system, *merge_roles(history)], 4096, draw=seed) for history in histories])
            for reply in replies:
                if reply.text is None and reply.usage is None:
                    raise Stop(f"the agent gave no answer: {reply.reason}")
            return [reply.text or "" for reply in replies]
        return act


def newest_checkpoint(folder: str) -> str | None:
    """The last complete checkpoint of a run folder, None if it has none; UserError if all it has are damaged."""
    found = sorted(Path(folder, "checkpoints").glob("step-*"), reverse=True) if folder else []
    for path in found:
        if not (fault := damage(path)):
            return str(path)
        print(f"{path} is damaged ({fault}) and not used", flush=True)
    if found:
        raise UserError(f"every checkpoint in {folder} is damaged; start again with another --out")
    return None


def checksums(checkpoint: Path) -> str:
    """What `sha256sum *` prints in the folder of a checkpoint."""
    return "".join(f"{hashlib.file_digest(file.open('rb'), 'sha256').hexdigest()}  {file.name}\n"
                   for file in sorted(checkpoint.iterdir()) if file.name != "SHA256SUMS" and not file.name.startswith("."))


def damage(checkpoint: Path) -> str:
    """What is wrong with a checkpoint, "" if every file is as it was written."""
    try:
        was = (checkpoint / "SHA256SUMS").read_text(errors="replace").split("\n")
    except OSError as error:
        return str(error)
    files = sorted({line.split("  ")[-1] for line in set(was) ^ set(checksums(checkpoint).split("\n"))})
    return f"{', '.join(files)}: not as in SHA256SUMS" if files else ""


def read_jsonl(path: str, wrong) -> list[dict]:
    """Records of a JSONL file, read strictly: a bad line stops with file, line and what is wrong, which is `wrong(record)` or ""."""
    records = []
    try:
        with open(path, encoding="utf-8-sig") as file:
            lines = file.read().split("\n")  # splitlines() would cut inside a text that holds U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--data {path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue  # blank lines are allowed in JSONL
        try:
            record = json.loads(line)
            reason = wrong(record) if isinstance(record, dict) else "no JSON object"
        except json.JSONDecodeError as error:
            reason = f"no JSON ({error.msg})"
        if reason:
            raise UserError(f"{path}, line {number}: {reason}")
        records.append(record)
    if not records:
        raise UserError(f"{path} holds no line")
    return records


def lacks_messages(record: dict, *keys: str) -> str:
    """What is wrong with the message lists of a record, "" if nothing."""
    for key in keys:
        if not isinstance(record[key], list) or not record[key] or not all(
                isinstance(m, dict) and m.get("role") in ("user", "assistant", "tool") and isinstance(m.get("content"), str)
                for m in record[key]):
            return f"{key} must be a list of {{role: user|assistant|tool, content: text}}"
    return ""


def read_points(path: str, judge: str) -> list[dict]:
    """Decision points {id, messages, clarify_expected, ambiguity} from a JSONL file."""
    def wrong(point):
        if not {"id", "messages", "clarify_expected"} <= set(point):
            return "a decision point needs id, messages and clarify_expected"
        if reason := lacks_messages(point, "messages"):
            return reason
        if point["clarify_expected"] is not None and not isinstance(point["clarify_expected"], bool):
            return "clarify_expected must be true, false or null"
        if judge == "rule" and point["clarify_expected"] is not False and not point.get("ambiguity"):
            return "the rule judge needs `ambiguity`; without it use another judge"
        if judge == "rule" and point["clarify_expected"] is not False:
            try:
                judge_question(point["messages"], "Which one?", point["ambiguity"])
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                return f"the rule judge cannot read it: {error!r}"
        return "" if point.get("stage", "other") in STAGES else f"stage must be one of {', '.join(STAGES)}"
    return [{"ambiguity": None, **point} for point in read_jsonl(path, wrong)]


def read_examples(path: str, sides: tuple) -> list[dict]:
    """SFT rows {prompt, completion} or DPO pairs {prompt, chosen, rejected} from a JSONL file. All are message lists; a side is a
    whole continuation with the messages of user and tools, and its agent messages keep their think."""
    def wrong(example):
        if missing := [key for key in ("prompt", *sides) if key not in example]:
            return f"it has no {missing[0]}; needed are prompt, {', '.join(sides)}"
        if reason := lacks_messages(example, "prompt", *sides):
            return reason
        silent = [side for side in sides if all(m["role"] != "assistant" for m in example[side])]
        return f"{silent[0]} holds no message of the assistant" if silent else ""
    return read_jsonl(path, wrong)


def training_points(settings: Settings, policy: Policy) -> tuple[dict[str, list[dict]], int]:
    """({stage: decision points with their prompt ids}, number dropped because they are too long)."""
    if settings.data:
        points = read_points(settings.data, settings.judge)
    else:
        points = [p for seed in range(settings.towns) for p in points_of_pair(scenario_pair(SPLITS["train"] + seed))]
    stages: dict[str, list[dict]] = {}
    dropped = 0
    for point in points:
        prompt = policy.prompt(point["messages"])
        stage = "ask" if point["clarify_expected"] else point.get("stage", "other")
        if settings.reward in ("literal", "clarify") and point["clarify_expected"] is False:
            continue  # the paper's text speaks of turns where a clarify is due; over-asking costs nothing
        if len(prompt) > settings.max_prompt:
            dropped += 1
        else:
            stages.setdefault(stage, []).append({**point, "prompt": prompt})
    if not stages:
        raise UserError(f"no decision point is left: of {len(points)}, {dropped} are longer than --max-prompt {settings.max_prompt}"
                        + f"; --reward {settings.reward} has no use for the others" * (len(points) > dropped))
    return stages, dropped


def points_of_pair(pair: tuple[Scenario, Scenario]) -> list[dict]:
    """The decision points of an ambiguous scenario and its twin."""
    ambiguous, clear = pair
    return decision_points(ambiguous) + decision_points(clear, twin_of=ambiguous.ambiguity)


def draw(items: list, first: int, count: int, *key) -> list:
    """`count` items from number `first` on of an endless sequence, a function of key: all in a random order, then in another."""
    drawn = []
    while len(drawn) < count:
        k = first + len(drawn)
        order = list(range(len(items)))
        random.Random(stream(*key, k // len(items))).shuffle(order)
        drawn += [items[i] for i in order[k % len(items):][:count - len(drawn)]]
    return drawn


def draw_points(stages: dict[str, list[dict]], step: int, settings: Settings) -> list[dict]:
    """The P decision points of a step, by stage, never by this run's rewards."""
    cycle = [stage for stage in CYCLE if stage in stages]
    points = []
    for stage in (stage for stage in STAGES if stage in stages):
        first, end = (n // len(cycle) * cycle.count(stage) + cycle[:n % len(cycle)].count(stage)  # of n prompts, those of this stage
                      for n in (step * settings.prompts, (step + 1) * settings.prompts))
        points += draw(stages[stage], first, end - first, settings.seed, "order", stage)
    return points


def training_examples(settings: Settings, policy: Policy) -> tuple[list[dict], int]:
    """(SFT rows {completion} or DPO pairs {chosen, rejected}, number dropped because they are too long). A side is a list of
    (prompt ids, completion ids), one an agent turn; `tokens` counts what is trained: the completions of all sides."""
    sides = SIDES[settings.method]
    if settings.data:
        read = read_examples(settings.data, sides)
    else:
        read = {"sft": town_dialogues, "dpo": town_pairs}[settings.method](settings.towns)
    examples = [{side: turn_rows(policy, e["prompt"], e[side]) for side in sides} for e in read]
    if settings.method == "sft":  # turn by turn; a DPO trajectory is one thing
        examples = [{"completion": [row]} for e in examples for row in e["completion"]]
    examples = [{**e, "tokens": sum(len(completion) for side in sides for _, completion in e[side])} for e in examples]
    kept = [e for e in examples if all(len(prompt) <= settings.max_prompt and len(completion) <= settings.max_new_tokens
                                       for side in sides for prompt, completion in e[side])]
    if not kept:
        raise UserError(f"nothing to train: none of {len(examples)} examples is within --max-prompt {settings.max_prompt} and "
                        f"--max-new-tokens {settings.max_new_tokens}")
    return kept, len(examples) - len(kept)


def turn_rows(policy: Policy, prompt: list[dict], continuation: list[dict]) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, completion ids) of every agent turn of a continuation. Histories show what a Dialogue shows, so earlier thinks
    are gone; the messages of user and tools stand in prompts only and are never trained."""
    rows, history = [], []
    for k, m in enumerate([*prompt, *continuation]):
        text = m["content"]
        if m["role"] == "assistant":
            if k >= len(prompt):
                rows.append((policy.prompt(history), policy.completion(text)))
            text = shown(parse_turn(text))
        if text is not None:  # an agent turn that could not be read showed nothing
            history.append({"role": m["role"], "content": text})
    return rows


def town_dialogues(towns: int) -> list[dict]:
    """SFT examples from generated towns, in the form of the files: the oracle's dialogues, ambiguous ones and their clear twins."""
    scenarios = [s for seed in range(towns) for s in scenario_pair(SPLITS["train"] + seed)]
    told = {s.id: with_thinks(play(s)) for s in scenarios}
    return [{"id": s.id, "ambiguous": s.ambiguity is not None, "prompt": told[s.id][:1], "completion": told[s.id][1:]} for s in scenarios]


def town_pairs(towns: int) -> list[dict]:
    """DPO pairs from generated towns, in the form of the files: the oracle's dialogue against one that guesses instead of asking
    and is not corrected. Where they part is where the prompt ends. A guess that succeeds by luck makes no pair."""
    pairs = []
    for seed in range(towns):
        ambiguous, _ = scenario_pair(SPLITS["train"] + seed)
        careless = play(ambiguous, Oracle(ambiguous.ambiguity, f"{ambiguous.id} 0", ask=0), max_corrections=0)
        if not goal_record(careless)["success"]:
            chosen, rejected = with_thinks(play(ambiguous)), with_thinks(careless)
            same = next(k for k, (a, b) in enumerate(zip(chosen, rejected)) if a != b)
            pairs.append({"id": ambiguous.id, "prompt": chosen[:same], "chosen": chosen[same:], "rejected": rejected[same:]})
    lucky = towns - len(pairs)
    print(f"{lucky} of {towns} careless dialogues ({lucky / towns:.0%}) succeeded by luck and make no pair", flush=True)
    return pairs


# ------------------------------------------------------------------------------------------------- 3. one step: GRPO, SFT, DPO

def score_completions(policy: Policy, points_B: list[dict], completions_B: list[list[int]], judge, mode: str, ask_cost: float = 0.0) -> list[dict]:
    """Parse and reward each completion: {text, turn, question's verdict, format, when, clarify, reward, ...} a row."""
    turns = [parse_turn(policy.text(c), policy.prefilled_think) for c in completions_B]
    asking = [b for b, (turn, point) in enumerate(zip(turns, points_B)) if needs_judge(turn, point["clarify_expected"])]
    verdicts = dict(zip(asking, judge([(points_B[b]["messages"], turns[b].clarify, points_B[b]["ambiguity"]) for b in asking])))
    rows = []
    for b, (turn, point, completion) in enumerate(zip(turns, points_B, completions_B)):
        parts = reward_parts(turn, point["clarify_expected"], verdicts.get(b), mode, ask_cost)
        rows.append({"id": point["id"], "text": policy.text(completion), "due": point["clarify_expected"], "turn": turn, **parts,
                     "judge": verdicts[b].why if b in verdicts else None, "tokens": len(completion),
                     "truncated": not completion or completion[-1] not in policy.eos_ids})
    return rows


def micro_batches(groups: list[list[int]], prompts_B, completions_B, budget: int) -> list[list[int]]:
    """Rows that are forwarded together: as many groups as fit into a budget of tokens (padding counted), those of similar length
    together. A group, the rows of one prompt, stays whole, since its prompt is computed once, unless it is over the budget alone."""
    def tokens(*groups):
        rows = [b for group in groups for b in group]
        return len(groups) * max(len(prompts_B[b]) for b in rows) + len(rows) * max(len(completions_B[b]) for b in rows)

    batches: list[list[list[int]]] = []
    for group in sorted(groups, key=tokens):
        n = next((n for n in range(len(group), 1, -1) if tokens(group[:n]) <= budget), 1)
        if batches and n == len(group) and tokens(*batches[-1], group) <= budget:
            batches[-1].append(group)
        else:
            batches += [[group[k:k + n]] for k in range(0, len(group), n)]
    return [[b for group in batch for b in group] for batch in batches]


def all_sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor over all processes, in its place; exactly the same in each of them."""
    if WORLD > 1:
        with together():
            torch.distributed.all_reduce(tensor)
    return tensor


@contextlib.contextmanager
def together():
    """What all processes do at once fails in each of them when one has died."""
    try:
        yield
    except RuntimeError as error:
        if WORLD == 1 or isinstance(error, torch.OutOfMemoryError):  # that is this process's own
            raise
        raise UserError(f"another process of this run has ended early ({str(error).splitlines()[0]}). The last checkpoint is complete: go on "
                        "with --resume") from error


def grpo_step(policy: Policy, optimiser, points: list[dict], judge, settings: Settings, step: int) -> tuple[dict, list[dict]]:
    """Sample G completions for each of P points, reward them, and improve the policy. Returns (metrics, rows of samples).

    With several processes each samples and forwards every WORLD-th prompt; completions, rewards and gradients are added up, so that
    all of them know the whole step: the same denominators, the same update."""
    P, G = len(points), settings.group
    prompts_B, mine = [p["prompt"] for p in points for _ in range(G)], range(RANK, P, WORLD)
    began = time.time()
    new = policy.sample([points[p]["prompt"] for p in mine], G, [stream(settings.seed, "sample", step, p) for p in mine])
    ids_BT = torch.zeros(P * G, settings.max_new_tokens, dtype=torch.long)
    for b, completion in zip([p * G + g for p in mine for g in range(G)], new):
        ids_BT[b, :len(completion)] = torch.tensor(completion, dtype=torch.long) + 1
    completions_B = [[t - 1 for t in row if t] for row in all_sum(ids_BT).tolist()]
    sampled = time.time() - began
    rows_B, rewards_B, stop = [], torch.zeros(P * G), None
    if RANK == 0:  # one process asks the judge: one budget, one cache
        try:
            rows_B = score_completions(policy, [p for p in points for _ in range(G)], completions_B, judge, settings.reward,
                                       settings.ask_cost)
            rewards_B = torch.tensor([math.nan if row["reward"] is None else row["reward"] for row in rows_B])
        except Stop as error:
            stop, rewards_B = error, rewards_B + math.inf  # the others, too, have to hear of it
    if all_sum(rewards_B).isinf().any():
        raise stop or Stop("process 0 has stopped")
    adv_B = group_advantages(rewards_B.view(P, G)).flatten()
    known_B, lengths_B = ~rewards_B.isnan(), torch.tensor([len(c) for c in completions_B])
    flat_P = (adv_B.view(P, G) == 0).all(1)

    def logprobs(rows):
        return policy.logprobs([points[p]["prompt"] for p in dict.fromkeys(b // G for b in rows)], [completions_B[b] for b in rows])

    def cut(prompts):
        """This process's micro-batches: the groups that have a gradient."""
        groups = [list(range(p * G, (p + 1) * G)) for p in prompts if p in mine and not flat_P[p]]
        return micro_batches(groups, prompts_B, completions_B, settings.micro_tokens)

    updates = [range(k, k + (settings.minibatch or P)) for k in range(0, P, settings.minibatch or P)]
    old_logp: dict[int, torch.Tensor] = {}
    if len(updates) * settings.epochs > 1:  # fixed before the first update; for a single update the new ones are the old ones
        with torch.no_grad():
            for prompts in updates:
                for rows in cut(prompts):  # as below: before anything has moved, the ratio is 1 to the last bit
                    logp_BT, mask_BT = logprobs(rows)
                    old_logp |= {b: logp_BT[i, mask_BT[i]] for i, b in enumerate(rows)}

    totals = dict.fromkeys(("clip_fraction", "kl_old_new", "entropy", "weight", "tokens"), 0.0)
    norms = []
    for prompts in updates * settings.epochs:
        rows_all = [b for p in prompts for b in range(p * G, (p + 1) * G)]
        # Over ALL rows of the update, before the micro-batch loop: flat groups keep their place, unknown rewards have none.
        weight_B = dict(zip(rows_all, row_weights(lengths_B[rows_all], known_B[rows_all], settings.norm, settings.max_new_tokens)))
        for rows in cut(prompts):
            logp_BT, mask_BT = logprobs(rows)
            old_BT = logp_BT.detach()
            if old_logp:
                old_BT = torch.zeros_like(old_BT)
                for i, b in enumerate(rows):
                    old_BT[i, :len(old_logp[b])] = old_logp[b]
            weights = torch.stack([weight_B[b] for b in rows]).to(logp_BT.device)
            loss, metrics = policy_loss(logp_BT, old_BT, adv_B[rows].to(logp_BT.device), mask_BT, weights,
                                        (settings.clip_low, settings.clip_high))
            loss.backward()
            totals = {name: value + metrics[name].item() for name, value in totals.items()}
        norms.append(update(policy, optimiser, settings, step))

    totals = add_up(totals)
    trained, weight = int(totals.pop("tokens")), totals.pop("weight") or 1.0
    metrics = {**summarise(rows_B, policy), **{name: value / weight for name, value in totals.items()},
               "flat": flat_P.float().mean().item(), "grad_norm": sum(norms) / len(norms), "examples": P * G,
               "trained_tokens": trained, "sampled_tokens": lengths_B.sum().item(), "sample_seconds": sampled,
               "tokens_per_second": lengths_B.sum().item() / sampled}
    return metrics, rows_B


def add_up(totals: dict[str, float]) -> dict[str, float]:
    """The sums of all processes."""
    return dict(zip(totals, all_sum(torch.tensor(list(totals.values()), dtype=torch.float64)).tolist()))


def update(policy: Policy, optimiser, settings: Settings, step: int) -> float:
    """Add up the gradients of all processes, clip, step, and drop the gradients; the norm before clipping."""
    parameters = list(policy.model.parameters())
    # Without any gradient AdamW stands still; at 0 its momentum would move the weights.
    if WORLD > 1 and all_sum(torch.tensor([float(any(p.grad is not None for p in parameters))])) > 0:
        for p in parameters:
            p.grad = all_sum(torch.zeros_like(p) if p.grad is None else p.grad)
    norm = torch.nn.utils.clip_grad_norm_(parameters, settings.grad_clip).item()
    if not math.isfinite(norm):
        raise UserError(f"step {step + 1}: the gradient is {norm}; the last checkpoint is intact: start again with a lower --lr")
    with together():
        optimiser.step()
    optimiser.zero_grad(set_to_none=True)  # and the next rollout has their memory
    return norm


def sft_step(policy: Policy, optimiser, examples: list[dict], settings: Settings, step: int) -> dict:
    """Imitate the agent turns of `examples`. Returns metrics."""
    began, totals = time.time(), {"loss": 0.0}
    prompts_B, completions_B = zip(*(row for e in examples for row in e["completion"]))
    lengths_B = torch.tensor([len(completion) for completion in completions_B])
    weight_B = row_weights(lengths_B, torch.ones(len(lengths_B)), settings.norm, settings.max_new_tokens)
    for rows in micro_batches([[b] for b in range(RANK, len(lengths_B), WORLD)], prompts_B, completions_B, settings.micro_tokens):
        logp_BT, mask_BT = policy.logprobs([prompts_B[b] for b in rows], [completions_B[b] for b in rows])
        loss, _ = sft_loss(logp_BT, mask_BT, weight_B[rows].to(logp_BT.device))
        loss.backward()
        totals["loss"] += loss.item()
    norm, trained = update(policy, optimiser, settings, step), lengths_B.sum().item()
    return {**add_up(totals), "grad_norm": norm, "examples": len(lengths_B), "trained_tokens": trained, "sampled_tokens": 0,
            "tokens_per_second": trained / (time.time() - began)}


def pair_logprobs(policy: Policy, pair: dict) -> torch.Tensor:
    """[log-prob of chosen, log-prob of rejected], each the sum over its agent turns, in one pass: all turns begin with one prompt."""
    logp_BT, mask_BT = policy.logprobs(*zip(*(pair["chosen"] + pair["rejected"])))
    side_B = torch.tensor([0] * len(pair["chosen"]) + [1] * len(pair["rejected"]), device=logp_BT.device)
    return trajectory_logprobs(logp_BT, mask_BT, side_B, 2)


@torch.no_grad()
def add_reference(pairs: list[dict], policy: Policy, settings: Settings, done: int) -> None:
    """The reference of DPO: pair_logprobs under the frozen start for every pair that the steps from `done` on will draw.
    Computed once, so that no second model stays in memory, and pair by pair as in training, so that the first margin is exactly 0."""
    from tqdm import tqdm  # comes with transformers
    start = policy if done == 0 else Policy(settings.model, settings)
    drawn = {id(p): p for step in range(done, settings.steps) for p in draw(pairs, step * settings.prompts, settings.prompts, settings.seed, "order")[RANK::WORLD]}
    for pair in tqdm(drawn.values(), unit="pair", disable=RANK > 0 or not sys.stderr.isatty(), leave=False):
        pair["reference"] = pair_logprobs(start, pair)


def dpo_step(policy: Policy, optimiser, pairs: list[dict], settings: Settings, step: int) -> dict:
    """Prefer the chosen dialogues of `pairs` to the rejected ones, more than the start did. Returns metrics."""
    began, totals = time.time(), dict.fromkeys(("loss", "margin", "accuracy", "reward_chosen", "reward_rejected"), 0.0)
    for pair in pairs[RANK::WORLD]:  # a pair is one term of the loss, so all of its turns go through the model together
        logp_2, reference_2 = pair_logprobs(policy, pair), pair["reference"]
        weight_1 = torch.full_like(logp_2[:1], 1 / len(pairs))
        loss, metrics = dpo_loss(logp_2[:1], logp_2[1:], reference_2[:1], reference_2[1:], weight_1, settings.beta)
        loss.backward()
        totals = {name: value + (loss if name == "loss" else metrics[name]).item() for name, value in totals.items()}
    norm, trained = update(policy, optimiser, settings, step), sum(pair["tokens"] for pair in pairs)
    return {**add_up(totals), "grad_norm": norm, "examples": len(pairs), "trained_tokens": trained, "sampled_tokens": 0,
            "tokens_per_second": trained / (time.time() - began)}


def mean(values) -> float | None:
    """The mean of what is known, None of nothing: an empty mean is no 0."""
    values = [v for v in values if v is not None]
    return sum(values) / len(values) if values else None


def summarise(rows: list[dict], policy: Policy) -> dict:
    """Means over scored completions, for the log and for held-out decision points."""
    def length(name):
        texts = [getattr(row["turn"], name) for row in rows if getattr(row["turn"], name)]
        return mean([len(policy.tokenizer.encode(t, add_special_tokens=False)) for t in texts])

    asked = [row["turn"].clarify is not None for row in rows]
    return {"reward": mean([row["reward"] for row in rows]), "format": mean([row["format"] for row in rows]),
            "when": mean([row["when"] for row in rows]),
            "clarify_over_due": mean([row["clarify"] for row in rows if row["due"]]),
            "clarify_over_asked": mean([row["clarify"] for row in rows if row["judge"] is not None]),
            "ask_due": mean([a for a, row in zip(asked, rows) if row["due"]]),
            "ask_clear": mean([a for a, row in zip(asked, rows) if row["due"] is False]),
            "think_tokens": length("think"), "clarify_tokens": length("clarify"),
            "truncated": mean([row["truncated"] for row in rows]), "judge_failed": sum(row["reward"] is None for row in rows)}


class Guard:
    """Does acting decay? Nothing rewards what an acting turn contains, and there is no KL: 64 acting turns of the oracle on valid towns,
    each behind a fixed think. Of a tool call every token counts, of a report the reference of the booking and what follows it."""

    THINK = "<think>I can go ahead.</think>"

    def __init__(self, policy: Policy, count: int = 64):
        self.policy, self.turns = policy, []  # (prompt ids, ids of the turn, where it begins to count)
        encode = lambda text: policy.tokenizer.encode(text, add_special_tokens=False)
        seed = SPLITS["valid"] + 500_000  # not the towns of the evaluation
        think = encode(self.THINK.removeprefix("<think>" if policy.prefilled_think else ""))
        while len(self.turns) < count:
            for scenario in scenario_pair(seed):
                dialogue = play(scenario)
                for length, text, turn in dialogue.steps:
                    said = text[text.index("</think>") + len("</think>"):]
                    reference = next((at for r in dialogue.session.ledger if (at := said.find(r)) >= 0), 0)
                    if (turn.tool_call or reference) and len(self.turns) < count:
                        self.turns.append((policy.prompt(dialogue.messages[:length]) + think, encode(said), len(encode(said[:reference].rstrip()))))
            seed += 1

    @torch.no_grad()
    def __call__(self) -> dict:
        logp = tokens = exact = 0.0
        for prompt, turn, first in self.turns:
            ids = torch.tensor([prompt + turn], device=self.policy.model.device)
            with self.policy.compute():
                logits_TV = self.policy.model(input_ids=ids, logits_to_keep=len(turn) + 1).logits[0, first:-1].float()
            target_T = ids[0, len(prompt) + first:]
            logp += logits_TV.log_softmax(-1).gather(1, target_T[:, None]).sum().item()
            tokens += len(target_T)
            # Greedy decoding writes it exactly if each token is the likeliest given the ones before: no need to decode.
            exact += bool((logits_TV.argmax(-1) == target_T).all())
        return {"guard_logp": logp / tokens, "guard_exact": exact / len(self.turns)}


# ------------------------------------------------------------------------------------------------- 4. evaluation

MAX_POINTS = 1000  # decision points sampled in one evaluation

# (what eval prints, its key in eval --json)
SHOWN = (("success, ambiguous", "success_ambiguous"), ("  without a correction", "success_uncorrected_ambiguous"),
         ("success, clear", "success_clear"), ("  without a correction", "success_uncorrected_clear"),
         ("asks, ambiguous", "ask_rate_ambiguous"), ("asks, clear, plain twin", "ask_rate_clear_plain"),
         ("asks, clear, database twin", "ask_rate_clear_db"), ("questions a dialogue", "questions_per_dialogue"),
         ("repeated questions", "repeat_questions"), ("questions as plain replies", "reply_questions"),
         ("wrong bookings", "wrong_bookings"), ("corrections", "corrections"), ("turns", "turns"),
         ("turns, failures as 20", "turns_cap"), ("format, held-out points", "format"), ("when", "when"),
         ("clarify, missing as 0", "clarify"), ("think tokens", "think_tokens"), ("question tokens", "clarify_tokens"))


def wilson(p: float, n: int) -> tuple[float, float]:
    """95 % interval of a rate p over n goals (Wilson); goals, not dialogues, are the independent units."""
    z = 1.96
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n)


def evaluation_scenarios(settings: Settings) -> list[Scenario]:
    """Held-out scenarios: `goals` ambiguous ones and their clear twins of the split, or that many goals of a MultiWOZ folder."""
    if settings.multiwoz:
        from data.multiwoz import DataError, scenarios
        try:
            found = scenarios(settings.multiwoz, settings.split)
            return random.Random(0).sample(found, min(settings.goals, len(found)))  # by id, the first hundreds are all of several domains
        except DataError as error:
            raise UserError(f"--multiwoz: {error}") from error
    return [s for k in range(settings.goals) for s in scenario_pair(SPLITS[settings.split] + k)]


def play_scenarios(policy: Policy, scenarios: list[Scenario], repeat: int, settings: Settings) -> list:
    """One dialogue of the policy with a user for each scenario, all in step."""
    from tqdm import tqdm  # comes with transformers
    user = make_user(settings, policy)
    dialogues = [start_dialogue(s, user(s, repeat), repeat) for s in scenarios]
    act = policy.agent(stream(settings.seed, "eval", repeat))
    with tqdm(total=len(dialogues), unit="dialogue", disable=not sys.stderr.isatty(), leave=False) as bar:
        def agent(histories):
            bar.update(len(dialogues) - len(histories) - bar.n)
            return act(histories)
        return run_dialogues(agent, dialogues, prefilled_think=policy.prefilled_think)


def goal_record(dialogue) -> dict:
    """What one dialogue came to."""
    success, wrong = score_dialogue(dialogue.scenario.goal, dialogue.session.ledger, dialogue.messages)
    questions = [turn.clarify.lower() for _, _, turn in dialogue.steps if turn.clarify and not turn.errors]
    scenario, user = dialogue.scenario, dialogue.user
    return {"id": scenario.id, "twin_kind": scenario.twin_kind, "ambiguous": scenario.ambiguity is not None, "success": success,
            "uncorrected": success and user.corrections == 0, "turns": dialogue.turns, "ended": dialogue.ended,
            "asked": bool(questions), "questions": len(questions), "repeat_questions": len(questions) - len(set(questions)),
            "reply_questions": sum("?" in (turn.reply or "") for _, _, turn in dialogue.steps),
            "corrections": user.corrections, "wrong_bookings": wrong, "user_forged": getattr(user, "forged", 0)}  # a model's only


def evaluate(policy: Policy, judge, scenarios: list[Scenario], settings: Settings) -> tuple[dict, list]:
    """(figures with 95 % intervals and a record per dialogue, the dialogues of the first repeat)."""
    runs = [play_scenarios(policy, scenarios, repeat, settings) for repeat in range(settings.repeats)]
    records = [[goal_record(d) for d in run] for run in runs]
    every = [r for run in records for r in run if r["ended"] != "user_error"]
    groups = {"": lambda r: True, "_ambiguous": lambda r: r["ambiguous"], "_clear": lambda r: not r["ambiguous"],
              "_clear_plain": lambda r: r["twin_kind"] == "plain", "_clear_db": lambda r: r["twin_kind"] == "db"}
    figures, intervals = {}, {}
    for key, name in (("success", "success"), ("uncorrected", "success_uncorrected"), ("asked", "ask_rate")):
        for group, belongs in groups.items():
            some = [r for r in every if belongs(r) and r[key] is not None]
            figures[name + group] = mean([float(r[key]) for r in some])
            if some:
                intervals[name + group] = wilson(figures[name + group], len({r["id"] for r in some}))
    for key in ("turns", "questions", "repeat_questions", "reply_questions", "wrong_bookings", "corrections"):
        figures[key] = mean([float(r[key]) for r in every])
    figures["questions_per_dialogue"] = figures.pop("questions")
    scored = [r for r in every if r["success"] is not None]
    figures["turns_cap"] = mean([float(r["turns"] if r["success"] else MAX_TURNS) for r in scored])
    figures["pass_at_k"] = mean([float(any(r["success"] for r in scored if r["id"] == goal)) for goal in dict.fromkeys(r["id"] for r in scored)])
    figures |= evaluate_points(policy, judge, scenarios, settings)
    ended = {reason: sum(r["ended"] == reason for r in every) for reason in sorted({r["ended"] for r in every})}
    return {**figures, "episodes": len(every), "repeats": settings.repeats, "user_errors": sum(map(len, records)) - len(every),
            "user_forged": sum(r["user_forged"] for run in records for r in run), "without_booking": len(every) - len(scored), "ended": ended,
            "intervals": intervals, "dialogues": [r for run in records for r in run]}, runs[0]


def evaluate_points(policy: Policy, judge, scenarios: list[Scenario], settings: Settings) -> dict:
    """One sample on each held-out decision point (at most MAX_POINTS, the same every time): format, when, clarify (a missing
    question counts 0), lengths."""
    if isinstance(policy, ClaudeAgent):  # it is compared by its dialogues
        return dict.fromkeys(("format", "when", "clarify", "think_tokens", "clarify_tokens")) | {"judge_failed": 0, "points": 0}
    points = [p for s in scenarios for p in decision_points(s)]
    points = random.Random(0).sample(points, min(len(points), MAX_POINTS))
    points = [p for p in ({**p, "prompt": policy.prompt(p["messages"])} for p in points) if len(p["prompt"]) <= settings.max_prompt]
    completions = policy.sample([p["prompt"] for p in points], 1, [stream(settings.seed, "points", k) for k in range(len(points))])
    figures = summarise(score_completions(policy, points, completions, judge, "conditional"), policy)
    return {"format": figures["format"], "when": figures["when"], "clarify": figures["clarify_over_due"],
            "think_tokens": figures["think_tokens"], "clarify_tokens": figures["clarify_tokens"], "judge_failed": figures["judge_failed"],
            "points": len(points)}


def transcript(dialogue) -> str:
    """A dialogue for reading: what the user sees, and indented what it does not (thinks, tool calls, results)."""
    lines, steps = [], {length: turn for length, _, turn in dialogue.steps}
    for k, m in enumerate([*dialogue.messages, None]):
        turn = steps.get(k)
        if turn is not None:
            lines.append(f"    think: {turn.think or '(none)'}" + "".join(f"   [malformed: {e}]" for e in turn.errors))
        if m is not None:
            text = m["content"] if len(m["content"]) < 400 else m["content"][:400] + " ..."
            hidden = m["role"] == "tool" or text.startswith("<tool_call>")
            speaker = "user" if m["role"] == "user" else "ASKS" if turn is not None and turn.clarify else "agent"
            lines.append(f"    {text}" if hidden else f"{speaker:>5}: {text}")
    record = goal_record(dialogue)
    return "\n".join([*lines, f"    -> {dialogue.ended}; success {record['success']}; corrections {record['corrections']}"])


# ------------------------------------------------------------------------------------------------- 5. the training loop

def write_json(path: Path, value) -> None:
    """Write a JSON file whole or not at all."""
    part = path.with_name(path.name + ".part")
    with open(part, "w") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def sync(*paths: Path) -> None:
    """Wait until files and folders are on disk."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def append_lines(path: Path, *records: dict) -> None:
    """More lines of a JSONL file, on disk before we go on."""
    with open(path, "a") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records))
        file.flush()
        os.fsync(file.fileno())


def cut_back(path: Path, step: int) -> None:
    """Drop the lines after `step`, written by an interrupted run behind its last checkpoint, and a last line cut short."""
    if path.exists():
        kept = []
        for line in path.read_text().splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except json.JSONDecodeError:
                break  # the process was killed inside this line; it is the last one
        part = path.with_name(path.name + ".part")
        part.write_text("".join(kept))
        os.replace(part, path)


def save_checkpoint(folder: Path, step: int, policy: Policy, optimiser, state: dict, keep: int) -> None:
    """checkpoints/step-000100: a Hugging Face folder, the optimiser in safetensors, the rest in JSON, checksums; no pickle. Written
    beside, synced and renamed, and only then are older ones removed: whenever the process dies, the newest folder is complete.
    Every process has to call this; the first one writes all but the others' shares of the optimiser (--zero)."""
    final, part = folder / f"step-{step:06d}", folder / f".part-step-{step:06d}"
    if final.exists():
        return  # a step has one outcome, and this one is complete
    try:
        if RANK == 0:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        all_sum(torch.zeros(1))  # the folder is there
        write_checkpoint(part, step, policy, optimiser, state)
        all_sum(torch.zeros(1))  # all have written
        if RANK == 0:
            (part / "SHA256SUMS").write_text(checksums(part))
            sync(*part.iterdir(), part)
            os.replace(part, final)
            sync(folder)
    except UserError:
        raise
    except Exception as error:  # on a full disk safetensors and tokenizers raise errors of their own, no OSError
        shutil.rmtree(part, ignore_errors=True)
        raise UserError(f"{final} could not be saved: {error}; {shutil.disk_usage(folder.parent).free >> 20} MB are free. "
                        "The checkpoint before it is intact: make room and go on with --resume") from error
    for old in sorted(folder.glob("step-*"))[:-keep] if RANK == 0 else ():
        shutil.rmtree(old)


def write_checkpoint(folder: Path, step: int, policy: Policy, optimiser, state: dict) -> None:
    """This process's files of a checkpoint."""
    from safetensors.torch import save_file
    own = getattr(optimiser, "optim", optimiser)  # of a ZeroRedundancyOptimizer, the part that has this process's share
    if RANK == 0 or own is not optimiser:
        tensors = {f"{name}.{key}": value for name, p in policy.model.named_parameters() for key, value in own.state.get(p, {}).items()}
        save_file(tensors, folder / f"optimiser{RANK or ''}.safetensors")
    if RANK == 0:
        policy.model.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)
        write_json(folder / "trainer.json", {"step": step, **state})


def make_optimiser(policy: Policy, settings: Settings):
    """AdamW without weight decay; there is no learning-rate schedule, since --steps may change when a run is resumed."""
    parameters = list(policy.model.parameters())
    # fused: without temporary copies of the moments, which would be the largest thing in a GPU's memory
    how = dict(lr=settings.lr, weight_decay=0.0, eps=settings.adam_eps, fused=parameters[0].is_cuda)
    if settings.zero and WORLD > 1:
        from torch.distributed.optim import ZeroRedundancyOptimizer
        return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, **how)
    return torch.optim.AdamW(parameters, **how)


def load_optimiser(folder: Path, policy: Policy, optimiser) -> None:
    """The moments of AdamW back from a checkpoint, by parameter name; however many processes wrote it, a process takes its share."""
    from safetensors import safe_open
    own = getattr(optimiser, "optim", optimiser)
    share = {p for group in own.param_groups for p in group["params"]}
    for path in folder.glob("optimiser*.safetensors"):
        with safe_open(path, "pt") as file:
            known = set(file.keys())
            for name, p in policy.model.named_parameters():
                if p in share and f"{name}.exp_avg" in known:  # no moments yet where every group so far was flat
                    own.state[p] = {key: file.get_tensor(f"{name}.{key}").to(p.device) for key in ("step", "exp_avg", "exp_avg_sq")}


def open_run(settings: Settings) -> tuple:
    """(settings with --out resolved, run folder, checkpoint to resume from or None, the folder's lock). Refuses to write over a run, to
    resume another, and to share a folder; the lock holds until it is closed or forgotten, or its process dies."""
    used = sorted(Path("runs").glob(f"{settings.method}-[0-9][0-9][0-9]"))
    folder = Path(settings.out or f"runs/{settings.method}-{int(used[-1].name[-3:]) + 1 if used else 1:03d}")
    # The start as it is now: a run may be trained on, and DPO's reference is made again when a run is resumed.
    settings = dataclasses.replace(settings, out=str(folder), model=newest_checkpoint(settings.model) or settings.model)
    all_sum(torch.zeros(1))  # all processes have named the same folder, before there is one
    lock = take_folder(folder, settings) if RANK == 0 else None
    all_sum(torch.zeros(1))
    checkpoint = max((folder / "checkpoints").glob("step-*"), default=None) if settings.resume else None  # the damaged ones are out of the way
    return settings, folder, checkpoint, lock


def take_folder(folder: Path, settings: Settings):
    """Lock the run folder, check that this run may write there, and clear away what an interrupted or damaged one left."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / "lock", "w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(f"another process is writing to {folder}: wait for its end, or name another folder with --out") from error
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error}") from error
    if (folder / "settings.json").exists() and not settings.resume:
        raise UserError(f"{folder} holds a run already: continue it with --resume, or name another folder with --out")
    if settings.resume:
        before = saved_settings(folder)
        now = dataclasses.asdict(settings)
        # A comparison keeps its evaluations: they must stay comparable.
        may_change = MAY_CHANGE - ({"steps", "goals", "repeats", "split", "multiwoz"} if settings.method == "compare" else set())
        changed = [f"--{k.replace('_', '-')} was {before.get(k)}, is {v}" for k, v in now.items()
                   if k not in may_change and before.get(k) != v]
        if changed:
            raise UserError(f"--resume: the settings differ from those of {folder}: {'; '.join(changed)}")
        for left in (folder / "checkpoints").glob(".part-*"):
            shutil.rmtree(left)
        newest = newest_checkpoint(str(folder))
        for path in (folder / "checkpoints").glob("step-*"):
            if str(path) > newest:  # damaged, and said so
                shutil.rmtree(path.with_name(f"damaged-{path.name}"), ignore_errors=True)
                os.replace(path, path.with_name(f"damaged-{path.name}"))
    try:
        write_json(folder / "settings.json", dataclasses.asdict(settings))
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error}") from error
    return lock


class Progress:
    """A bar on a terminal, plain lines elsewhere."""

    def __init__(self, start: int, total: int):
        from tqdm import tqdm  # comes with transformers
        self.bar = tqdm(total=total, initial=start, unit="step") if sys.stderr.isatty() and RANK == 0 else None
        self.total, self.began, self.start = total, time.time(), start

    def __call__(self, m: dict) -> None:
        figures = (("reward", "reward"), ("format", "format"), ("when", "when"), ("clarify", "clarify_over_due"),
                   ("asks due", "ask_due"), ("asks clear", "ask_clear"), ("flat", "flat"), ("loss", "loss"), ("margin", "margin"),
                   ("accuracy", "accuracy"))
        text = "  ".join(f"{name} {m[key]:.2f}" for name, key in figures if m.get(key) is not None)
        text += f"  {m['tokens_per_second']:.0f} tok/s"
        if self.bar is not None:
            self.bar.set_postfix_str(text)
            self.bar.update()
        elif m["step"] % 5 == 0 or m["step"] in (self.start + 1, self.total):
            left = (time.time() - self.began) / (m["step"] - self.start) * (self.total - m["step"])
            print(f"step {m['step']}/{self.total}  {text}  {left:.0f} s left", flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def training_step(settings: Settings, policy: Policy, judge, done: int) -> tuple:
    """(take_step(optimiser, step) -> (metrics, rows of samples), what is learnt from): the one place where the methods differ."""
    if settings.method == "grpo":
        stages, dropped = training_points(settings, policy)
        about = "decision points " + ", ".join(f"{len(points)} {stage}" for stage, points in stages.items())
        take_step = lambda optimiser, step: grpo_step(policy, optimiser, draw_points(stages, step, settings), judge, settings, step)
    else:
        examples, dropped = training_examples(settings, policy)
        about = f"{len(examples)} {'agent turns' if settings.method == 'sft' else 'pairs'}"
        if settings.method == "dpo":
            add_reference(examples, policy, settings, done)
        one_step = {"sft": sft_step, "dpo": dpo_step}[settings.method]
        take_step = lambda optimiser, step: (
            one_step(policy, optimiser, draw(examples, step * settings.prompts, settings.prompts, settings.seed, "order"), settings, step), [])
    return take_step, f"{about}, {dropped} too long"


def train(settings: Settings) -> Path:
    """The training loop: data order, optimiser, progress, evaluation, checkpoints, resume. Returns the run folder. Of several
    processes, all of which run this, the first one judges, evaluates, logs and saves."""
    if WORLD > 1 and not torch.distributed.is_initialized():
        cuda = settings.device == "cuda" and torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        # The others wait while the first one evaluates; of a process that has died they hear at once.
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=datetime.timedelta(hours=12))
    judge = make_judge(settings, lambda: policy) if RANK == 0 else None  # before there is a folder: it may refuse its key or model
    settings, folder, checkpoint, lock = open_run(settings)  # the lock is held until this returns
    policy = Policy(str(checkpoint or settings.model), settings)
    optimiser = make_optimiser(policy, settings)
    state = {"samples_seen": 0}
    done = 0
    if checkpoint:
        state = json.loads((checkpoint / "trainer.json").read_text())
        done = state.pop("step")
        load_optimiser(checkpoint, policy, optimiser)
    for name in ("metrics.jsonl", "samples.jsonl", "evals.jsonl") if RANK == 0 else ():
        cut_back(folder / name, done)
    take_step, about = training_step(settings, policy, judge, done)
    print(f"{folder}: {sum(p.numel() for p in policy.model.parameters()) / 1e6:.1f} M parameters, {about}"
          + f", {WORLD} processes" * (WORLD > 1), flush=True)
    guard = Guard(policy) if settings.guard_every and RANK == 0 else None
    if done == 0 and RANK == 0:
        record_evaluation(policy, judge, settings, folder, 0)
    stop = stopping = False

    def interrupt(signum, frame):
        nonlocal stop
        if stop and WORLD == 1:  # torchrun passes on the Ctrl-C that the terminal has sent already
            raise KeyboardInterrupt
        stop = True
        print("\nfinishing this step, then saving (press again to stop at once)", flush=True)

    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    progress = Progress(done, settings.steps)
    try:
        for step in range(done, settings.steps):
            began = time.time()
            metrics, rows = take_step(optimiser, step)
            state["samples_seen"] += metrics["examples"]
            metrics = {"step": step + 1, "samples_seen": state["samples_seen"], **metrics}
            if guard and (step + 1) % settings.guard_every == 0:
                metrics |= guard()
            metrics |= CLAUDE[0].report() if CLAUDE else {}
            metrics["seconds"] = time.time() - began
            if rows:
                turns = [row.pop("turn")._asdict() for row in rows]
                append_lines(folder / "samples.jsonl", *({"step": step + 1, **row, "question": turn.pop("clarify"), **turn} for row, turn in zip(rows, turns)))
            if RANK == 0:
                append_lines(folder / "metrics.jsonl", metrics)
            progress(metrics)
            done = step + 1
            stopping = all_sum(torch.tensor([float(stop)])).item() > 0  # a signal to one stops all, after the same step
            if stopping or done % settings.save_every == 0 or done == settings.steps:
                save_checkpoint(folder / "checkpoints", done, policy, optimiser, state, settings.keep)
            if stopping:
                break
    except Stop:  # raised by the judge, before the update of its step: the weights are still those of step `done`
        if done:
            save_checkpoint(folder / "checkpoints", done, policy, optimiser, state, settings.keep)
        if lock:
            lock.close()  # the exception knows this frame, and may live on
        raise
    finally:
        progress.close()
        for number, handler in previous.items():
            signal.signal(number, handler)
    if stopping:
        print(f"stopped after step {done}; go on with: python speakrl.py train --resume --out {folder}", flush=True)
    elif RANK == 0:
        record_evaluation(policy, judge, settings, folder, done)
        print_evaluations(folder)
        print(f"\nthe trained policy: --model {folder}", flush=True)
    return folder


def record_evaluation(policy: Policy, judge, settings: Settings, folder: Path, step: int) -> None:
    """Evaluate on valid (never on test) and add the figures to evals.jsonl; once a step, however often the run was resumed."""
    path = folder / "evals.jsonl"
    if path.exists() and any(json.loads(line)["step"] == step for line in path.read_text().splitlines()):
        return
    print(f"evaluating on valid: {settings.goals} ambiguous goals and their clear twins ...", flush=True)
    settings = dataclasses.replace(settings, split="valid", repeats=1, multiwoz="")
    figures, _ = evaluate(policy, judge, evaluation_scenarios(settings), settings)
    figures.pop("dialogues")
    append_lines(path, {"step": step, **figures})


def print_evaluations(folder: Path) -> None:
    """The first and the last evaluation of a run, and their difference."""
    lines = [json.loads(line) for line in (folder / "evals.jsonl").read_text().splitlines()]
    first, last = lines[0], lines[-1]
    print(f"\n{'':<28}{'step ' + str(first['step']):>10}{'step ' + str(last['step']):>10}{'change':>10}")
    for label, name in SHOWN:
        a, b = first[name], last[name]
        show = lambda v: "-" if v is None else f"{v:.3f}"
        print(f"{label:<28}{show(a):>10}{show(b):>10}{'-' if None in (a, b) else f'{b - a:+.3f}':>10}")


# ------------------------------------------------------------------------------------------------- 6. the comparison

# Row of the table: method, and its files in the data folder. SpeakRL first: the tokens it trains are the measure of the others.
COMPARED = {"SpeakRL": ("grpo", "points.jsonl"), "SpeakRL (self-judge)": ("grpo", "points.jsonl"), "DPO": ("dpo", "dpo.jsonl"),
            "SFT, with twins": ("sft", "sft.jsonl", "sft_twins.jsonl"), "SFT": ("sft", "sft.jsonl"), "base": ("",), CLAUDE_MODEL: ("",)}
COLUMNS = {"success": "success, Avg@{}", "turns": "turns", "success_ambiguous": "success, ambiguous", "success_clear": "success, clear",
           "success_uncorrected_ambiguous": "uncorrected, ambiguous", "success_uncorrected_clear": "uncorrected, clear",
           "ask_rate_ambiguous": "asks, ambiguous", "ask_rate_clear_plain": "asks, plain twin", "ask_rate_clear_db": "asks, database twin",
           "questions_per_dialogue": "questions", "wrong_bookings": "wrong bookings", "success_train": "success where trained",
           "trained_tokens": "trained tokens", "sampled_tokens": "sampled tokens", "seconds": "seconds"}
EACH_SEED = {key: COLUMNS[key] for key in ("success", "success_uncorrected_ambiguous", "success_uncorrected_clear", "ask_rate_ambiguous")}
PAIRED = {"success": "success", "uncorrected": "uncorrected", "turns": "turns", "asked": "asks", "wrong_bookings": "wrong bookings"}


def compare(settings: Settings) -> None:
    """`compare`: from one base and one data set, every method with equal numbers of trained tokens and every seed; the table in
    compare.md and compare.json. What was done is not done again: training resumes, each evaluation lies in a file."""
    names = rows_to_make(settings)
    settings, folder, _, lock = open_run(settings)  # the lock is held until this returns
    data = Path(settings.data) if settings.data else write_town_data(folder / "data", settings.towns)
    for file in (file for _, *files in COMPARED.values() for file in files):
        if not (data / file).exists():
            raise UserError(f"--data {data} holds no {file}; make such a folder with python speakrl.py data")
    rows: dict[str, list[dict]] = {name: [] for name in reversed(names)}
    for seed in range(settings.seeds):
        for name in names:
            budget = rows["SpeakRL"][seed]["trained_tokens"] if COMPARED[name][0] in SIDES else 0
            figures = compare_one(name, budget, folder, data, dataclasses.replace(settings, seed=seed))
            if figures is None:
                print(f"go on with: python speakrl.py compare --resume --out {folder}", flush=True)
                return
            rows[name].append(figures)
    dialogues = {name: [r for figures in some for r in figures["dialogues"]] for name, some in rows.items()}
    ours = dialogues.pop("SpeakRL")
    result = {"rows": {name: {key: mean([figures.get(key) for figures in some]) for key in COLUMNS} for name, some in rows.items()},
              "each_seed": {name: {key: [figures.get(key) for figures in some] for key in EACH_SEED} for name, some in rows.items()},
              "speakrl_minus": {name: {key: paired(theirs, ours, key)[2:] for key in PAIRED} for name, theirs in dialogues.items()}}
    write_json(folder / "compare.json", result)
    (folder / "compare.md").write_text(comparison_table(result, settings))
    print("\n" + comparison_table(result, settings), flush=True)


def rows_to_make(settings: Settings) -> list[str]:
    """The rows of the table. Said, and left out: the self-judge without a model that can rate; Claude without a key, and without a
    budget, for a key alone is no leave to spend."""
    left_out = {}
    if not (os.environ.get("ANTHROPIC_API_KEY") and settings.budget_usd):
        left_out[CLAUDE_MODEL] = "it takes ANTHROPIC_API_KEY and --budget-usd"
    try:
        rater(self_judged(settings))
    except UserError as error:
        left_out["SpeakRL (self-judge)"] = str(error)
    for name, why in left_out.items():
        print(f"without the row {name}: {why}", flush=True)
    return [name for name in COMPARED if name not in left_out]


def self_judged(settings: Settings) -> Settings:
    """The same run with the self-judge; a judge's model that was named for Claude is not its."""
    return dataclasses.replace(settings, judge="self", judge_model=settings.judge_model if settings.judge == "self" else "")


def compare_one(name: str, budget: int, folder: Path, data: Path, settings: Settings) -> dict | None:
    """Train one row of the table with one seed (on `budget` tokens, 0: --steps) and evaluate it. Returns the figures, from their
    file if they are there already; None if training was interrupted."""
    method, *files = COMPARED[name]
    run = folder / f"{name.translate(str.maketrans(' ', '-', ',()')).lower()}-{settings.seed}"
    path, training = run.with_suffix(".json"), {"trained_tokens": 0, "sampled_tokens": 0, "seconds": 0.0}
    if path.exists():
        return json.loads(path.read_text())
    if method:
        file = data / files[0]
        if files[1:]:  # joined in one file
            file = run.with_suffix(".jsonl")
            file.write_text("".join((data / part).read_text().rstrip("\n") + "\n" for part in files))
        unset = {k: DEFAULTS.get(method, {}).get(k, getattr(Settings, k)) for k in DEFAULTS["compare"] if getattr(settings, k) is None}
        own = dataclasses.replace(settings, **unset, method=method, data=str(file.resolve()), out=str(run), goals=1,  # the evaluation follows
                                  resume=(run / "settings.json").exists())
        if name == "SpeakRL (self-judge)":
            own = self_judged(own)
        if budget:
            own = dataclasses.replace(own, steps=steps_for(budget, own))
        train(own)
        if newest_checkpoint(str(run)) != str(run / "checkpoints" / f"step-{own.steps:06d}"):
            return None
        for line in (run / "metrics.jsonl").read_text().splitlines():
            training = {key: value + json.loads(line)[key] for key, value in training.items()}
    print(f"\nevaluating {name}, seed {settings.seed}, on {settings.split} ...", flush=True)
    policy = ClaudeAgent(dataclasses.replace(settings, model=name)) if name == CLAUDE_MODEL else Policy(str(run) if method else settings.model, settings)
    judge = make_judge(settings, lambda: policy)
    figures, _ = evaluate(policy, judge, evaluation_scenarios(settings), settings)
    if method == "sft" and (settings.multiwoz or not settings.data):  # the paper says that SFT overfits: how does it do on the goals it
        seen = dataclasses.replace(settings, split="train", goals=min(settings.goals, settings.towns),  # was trained on? Of --data alone
                                   multiwoz=settings.multiwoz if settings.data else "")                 # nobody knows them.
        figures["success_train"] = evaluate(policy, judge, evaluation_scenarios(seen), seen)[0]["success"]
    write_json(path, {**training, **figures})
    return {**training, **figures}


def steps_for(tokens: int, settings: Settings) -> int:
    """How many steps of SFT or DPO train `tokens` tokens: counted beforehand, for the order is a function of seed and step."""
    examples, _ = training_examples(settings, Policy(settings.model, settings))
    steps = 0
    while tokens > 0:
        tokens -= sum(e["tokens"] for e in draw(examples, steps * settings.prompts, settings.prompts, settings.seed, "order"))
        steps += 1
    return steps


def write_town_data(folder: Path, towns: int) -> Path:
    """The data folder of a comparison on generated towns: the same towns as decision points, SFT rows and DPO pairs."""
    if not folder.exists():
        points = [p for seed in range(towns) for p in points_of_pair(scenario_pair(SPLITS["train"] + seed))]
        dialogues = town_dialogues(towns)
        files = {"points.jsonl": points, "sft.jsonl": [e for e in dialogues if e["ambiguous"]],
                 "sft_twins.jsonl": [e for e in dialogues if not e["ambiguous"]], "dpo.jsonl": town_pairs(towns)}
        part = folder.with_name(".part-data")
        part.mkdir(exist_ok=True)
        for name, records in files.items():
            (part / name).write_text("".join(json.dumps(record) + "\n" for record in records))
        os.replace(part, folder)  # whole or not at all
    return folder


def comparison_table(result: dict, settings: Settings) -> str:
    """Markdown: the figures of every row, and what SpeakRL changes against each."""
    def table(head, rows):
        return "".join("| " + " | ".join(cells) + " |\n" for cells in [["", *head], ["---"] * (len(head) + 1), *rows])

    def show(key, value):
        return "-" if value is None else f"{value:,.0f}" if key in ("trained_tokens", "sampled_tokens", "seconds") else f"{value:.3f}"

    where = f"at most {settings.goals} goals of {settings.multiwoz}" if settings.multiwoz else f"{settings.goals} ambiguous goals and their twins"
    return (f"{settings.model} on {where}, {settings.split}; means over seeds 0 to {settings.seeds - 1}, {settings.repeats} dialogue(s) a "
            "goal and seed. `uncorrected` is success without a correction by the user.\n\n"
            + table([label.format(settings.repeats) for label in COLUMNS.values()],
                    [[name, *(show(key, value) for key, value in row.items())] for name, row in result["rows"].items()])
            + "\nEach seed:\n\n"
            + table([label.format(settings.repeats) for label in EACH_SEED.values()],
                    [[name, *(", ".join(show(key, value) for value in values) for key, values in row.items())] for name, row in result["each_seed"].items()])
            + "\nSpeakRL minus the row, paired by goal, with 95 % intervals over goals:\n\n"
            + table(PAIRED.values(), [[name, *(f"{change:+.3f} ± {half:.3f}" for change, half in row.values())]
                                      for name, row in result["speakrl_minus"].items()])
            + "\nA difference smaller than its interval is not resolved; the paper's 0.44 points between SpeakRL and DPO would need one "
            "below 0.004.\n")


def paired(before: list[dict], after: list[dict], key: str) -> tuple[float, float, float, float]:
    """(mean before, mean after, change, half its 95 % interval) of dialogue records, paired by goal. Seeds and repeats are
    averaged within a goal, so the interval speaks of other goals, not of other seeds. nan: no goal (in common); of one, no interval."""
    def by_goal(records):
        goals: dict[str, list[float]] = {}
        for r in records:
            if r[key] is not None and r.get("ended") != "user_error":  # as in every other rate
                goals.setdefault(r["id"], []).append(float(r[key]))
        return {goal: mean(values) for goal, values in goals.items()}
    a, b = by_goal(before), by_goal(after)
    changes = [b[goal] - a[goal] for goal in a if goal in b]
    change = mean(changes) if changes else math.nan
    spread = math.sqrt(sum((c - change) ** 2 for c in changes) / (len(changes) - 1) / len(changes)) if changes[1:] else math.nan
    return *(mean(side.values()) if side else math.nan for side in (a, b)), change, 1.96 * spread


# ------------------------------------------------------------------------------------------------- 7. the commands

def make_judge(settings: Settings, policy):
    """The judge by name; a judge is any callable judge(items) -> verdicts. `policy()` is the one in training, asked for when used."""
    if settings.judge == "claude":
        return ClaudeJudge(claude(settings, settings.judge_model or CLAUDE_MODEL))
    if settings.judge == "self":
        path = rater(settings)
        start = Policy(path, settings) if settings.self_judge == "frozen" else None
        return SelfJudge(lambda requests: local_complete(start or policy(), requests))
    return RuleJudge()


def rater(settings: Settings) -> str:
    """Folder or hub id of the model that is the frozen self-judge: the start, also where a trained run is evaluated."""
    start = settings.model
    run_of = lambda start: Path(start).parents[1] if Path(start).parent.name == "checkpoints" else Path(start)
    while (run_of(start) / "settings.json").exists():
        start = saved_settings(run_of(start))["model"]
    embedded = Path(start).resolve() == Path(Settings.model)
    if embedded and settings.self_judge == "current":
        raise UserError("--self-judge current: the embedded policy was not taught to rate; --self-judge frozen takes a copy that was")
    if embedded and not settings.judge_model and not RATER.exists():
        raise UserError(f"--judge self: the embedded policy was not taught to rate, and {RATER} is not there; make it with python -m data.rater")
    return settings.judge_model or str(RATER if embedded else start)


def make_user(settings: Settings, policy):
    """`user(scenario, repeat)`: who plays the user of a scenario, by name."""
    if settings.user == "claude":
        complete = claude(settings, settings.user_model or CLAUDE_MODEL)
    elif settings.user == "model":
        model = Policy(settings.user_model, settings) if settings.user_model else policy
        complete = functools.partial(local_complete, model)
    else:
        return ScriptedUser
    return lambda scenario, repeat: ModelUser(scenario, complete, repeat)


CLAUDE: list = []  # the one client of a command, made when Claude is first used


def claude(settings: Settings, model: str):
    """`complete(requests) -> replies` by a model of Claude, which is looked up before anything is paid for."""
    from claude import Claude  # only here: whoever does without Claude does without its SDK
    try:
        if not CLAUDE:
            CLAUDE.append(Claude(os.environ.get("ANTHROPIC_API_KEY"), settings.base_url, settings.cache, settings.budget_usd))
        if model not in CLAUDE[0].checked:
            note = CLAUDE[0].check(model)
            print(f"{model} at {CLAUDE[0].host}" + f": {note}" * bool(note), flush=True)
    except Stop as error:
        raise UserError(str(error)) from None
    return functools.partial(CLAUDE[0].complete, model=model)


def local_complete(policy: Policy, requests: list) -> list[Reply]:
    """`complete(requests) -> replies` by a local model: greedy, and nothing of the model or of a random stream changes. An answer
    that is cut off, or a request that is too long for the model, is a failed reply."""
    prompts = [tuple(render_chat(policy.tokenizer, request.messages)) for request in requests]
    room = getattr(policy.model.config, "max_position_embeddings", math.inf)
    fits = {p: r.max_tokens for p, r in zip(prompts, requests) if len(p) + r.max_tokens <= room}  # equal prompts once
    completions = policy.sample([list(p) for p in fits], 1, [0] * len(fits), 0.0, max_new_tokens=max(fits.values(), default=1))
    texts = {p: policy.text(c) if c and c[-1] in policy.eos_ids else None for p, c in zip(fits, completions)}
    return [Reply(None, f"{len(p)} tokens are too long for this model") if p not in texts
            else Reply(None, "cut off") if texts[p] is None else checked(Reply(texts[p]), r) for p, r in zip(prompts, requests)]


def run_eval(settings: Settings) -> None:
    """`eval`: figures on the screen, with intervals; everything, and a record per dialogue, in --json FILE."""
    scenarios = evaluation_scenarios(settings)
    policy = ClaudeAgent(settings) if settings.model.startswith("claude:") else Policy(settings.model, settings)
    figures, dialogues = evaluate(policy, make_judge(settings, lambda: policy), scenarios, settings)
    for dialogue in dialogues[:settings.show]:
        print(transcript(dialogue) + "\n")
    where = settings.multiwoz or f"{settings.goals} ambiguous goals and their clear twins of {settings.split}"
    print(f"{settings.model} on {where}, {settings.repeats} repeat(s), temperature {settings.temperature}")
    for label, name in (*SHOWN, *[("success in any repeat", "pass_at_k")] * (settings.repeats > 1)):
        if figures[name] is not None:
            low, high = figures["intervals"].get(name, (None, None))
            print(f"{label:<28}{figures[name]:>8.3f}" + (f"   [{low:.3f}, {high:.3f}]" if low is not None else ""))
    print("ended: " + ", ".join(f"{reason} {count}" for reason, count in figures["ended"].items()))
    if left_out := {name: figures[name] for name in ("user_errors", "user_forged", "judge_failed", "without_booking") if figures.get(name)}:
        print("left out: " + ", ".join(f"{name} {count}" for name, count in left_out.items()))
    if settings.json:
        spent = CLAUDE[0].report() if CLAUDE else {}
        write_json(Path(settings.json), {"settings": dataclasses.asdict(settings), **figures, **spent})


def run_chat(settings: Settings) -> None:
    """`chat`: a person plays the user, in the town --town."""
    policy = Policy(settings.model, settings)
    scenario = scenario_pair(settings.town)[0]
    print("In this town, among others:")
    for domain, rows in scenario.database.tables.items():
        for row in rows[:6]:
            print(f"  {domain}: " + ", ".join(f"{value}" for slot, value in row.items()))
    print(f"You could say: {scenario.requests[0][1]}\nAn empty line ends the dialogue.\n")
    dialogue = run_dialogues(policy.agent(stream(settings.seed, "chat")), [start_dialogue(scenario, HumanUser())],
                             prefilled_think=policy.prefilled_think)[0]
    print("\nThe whole dialogue, with what you did not see:\n" + transcript(dialogue))


def run_data(settings: Settings) -> None:
    """`data`: SpeakER and SpeakER-DPO from generated towns or the training goals of --multiwoz, into --out; prints the statistics."""
    from tqdm import tqdm  # comes with transformers
    from data.build import build, report
    from data.multiwoz import DataError
    out = settings.out or "runs/speaker"
    model = settings.writer.removeprefix("claude").removeprefix(":") or CLAUDE_MODEL
    try:
        if settings.dry_run:
            return print(writer_cost(settings, model))
        complete = claude(settings, model) if settings.writer != "rules" else None
        with tqdm(total=settings.n, unit="dialogue", disable=not sys.stderr.isatty(), leave=False) as bar:
            statistics = build(out, settings.n, settings.seed, settings.multiwoz, progress=lambda kept: bar.update(kept - bar.n), complete=complete)
    except DataError as error:
        raise UserError(f"--multiwoz: {error}") from error
    except BlockingIOError as error:
        raise UserError(f"another process is writing to {out}: wait for its end, or name another folder with --out") from error
    except OSError as error:
        raise UserError(f"{out} cannot be built: {error}") from error
    print(f"{out}:\n{report(statistics)}")


def writer_cost(settings: Settings, model: str) -> str:
    """What `data --writer` would cost, counted on the requests of the first dialogues."""
    from claude import CHARACTERS_PER_TOKEN, PRICED_ON, dollars
    from data.build import planned_requests
    counted = [(sum(len(m["content"]) for m in request.messages), len(answer))
               for request, answer in planned_requests(min(settings.n, 500), settings.seed, settings.multiwoz)]
    if not counted:
        raise UserError("--dry-run: these goals leave nothing open, no dialogue can be planned")
    sent, written = (int(sum(part) / len(counted) * settings.n / CHARACTERS_PER_TOKEN) for part in zip(*counted))
    cost = dollars(model, {"input_tokens": sent, "output_tokens": written})
    return (f"{settings.n} dialogues by {model}: {settings.n} requests, about {sent / 1e6:.2f} M tokens in and {written / 1e6:.2f} M out ({len(counted)} "
            f"requests counted, {CHARACTERS_PER_TOKEN:g} characters a token): {'price unknown' if cost is None else f'${cost:.2f}'}, "
            f"by the prices of {PRICED_ON}.\n"
            "Thinking costs more, dialogues that are dropped are paid too, and what stands in --cache costs nothing. Nothing was sent.")


COMMANDS = {"train": train, "eval": run_eval, "data": run_data, "compare": compare, "chat": run_chat}


def main(argv: list[str] | None = None) -> int:
    """Run one command; mistakes of the user come back as one line and exit code 2."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM is another Ctrl-C
    speaker, command = "speakrl" + f" (process {RANK})" * (RANK > 0), ""
    try:
        command, settings = parse_settings(sys.argv[1:] if argv is None else argv)
        with contextlib.redirect_stdout(sys.stdout if RANK == 0 else open(os.devnull, "w")):  # of the others only errors are heard
            COMMANDS[command](settings)
    except UserError as error:
        print(f"{speaker}: {error}", file=sys.stderr)
        return 2
    except (Stop, OSError) as error:
        resume = " --resume" if command in ("train", "compare") else ""
        kept = f". What was done is kept: go on with {command}{resume}" * bool(resume or isinstance(error, Stop))
        print(f"{speaker}: {error}{kept}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{speaker}: stopped at once" + "; the last checkpoint is complete" * (command in ("train", "compare")), file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
        if CLAUDE:
            print(CLAUDE[0], flush=True)
            CLAUDE.pop().close()
    return 0


if __name__ == "__main__":
    code = main()
    if WORLD > 1:  # gloo's threads may abort a process on its way out, all work done ("terminate called without an active exception")
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
