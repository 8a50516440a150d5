"""How long a GRPO step takes, and what computing each token once saves: `python tests/bench.py`, an hour on two cores.

Each shape is timed plain (every completion carries its prompt through the network, all logits of a prompt's completions at once),
shared (`grpo.prefill`, `grpo.head_logprobs`), shared with `--checkpointing`, and by TRL's GRPOTrainer where TRL is installed, in turn
and in one run, each measurement in a process of its own, so that its peak of memory is its own; each does its work three times,
less often if that takes over two minutes, and the fastest counts, since a process meets most of its memory for the first time in the
others. TRL is tried for one step with 1, 4, 8 and 16 rows a device batch (the moments of AdamW are not yet in its memory then), and
runs in turn with the others at the fastest of these. "forwarded" are the tokens that went through the network. "of the limit" compares
with this machine: in the update, the products that were needed (6 for each weight and forwarded token, 8 for the output head where it
runs once more, in chunks; attention's own left out) with the rate of a large product of matrices; in the rollout, the seconds with a bare loop
that does nothing but forward B rows token by token, on prompts that were computed once and are held once. The optimiser's own time is left out
everywhere, its memory is not. Times are of this machine and noisy: compare within a run.

`--dialogues`: whole dialogues in evaluation, in minutes, with `grpo.keep` and with every prompt computed anew. `--profile`: what the update and the
rollout spend their time on. `--growth`: how the cost of both ways, plain and shared, grows with G, the prompt and the width. `--model FOLDER`: these weights for the shapes
of SmolLM2-135M, instead of random ones of its size. `--claude`: what claude.py costs on top of the SDK, against a stand-in on loopback.
"""
import argparse
import json
import multiprocessing
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
TIMES, SECONDS = 3, 120  # what a measurement does over: so many times, but none after so many seconds

# name: prompts, completions of each, tokens that all prompts share, further prompt tokens, completion tokens, width, layers
SMOL = (576, 30)
DIALOGUES = {"135M-dialogues": (16, 1, 600, 100, 48, *SMOL), "tiny-dialogues": (2, 1, 5, 7, 4, 64, 2)}
SHAPES = {"default": None, "135M": (2, 8, 0, 300, 48, *SMOL), "135M-shared": (4, 8, 600, 200, 64, *SMOL), "tiny": (2, 2, 5, 7, 4, 64, 2)}
GROWTH = {**{f"G {G}": (2, G, 0, 300, 48, 256, 4) for G in (2, 4, 8, 16)}, **{f"prompt {p}": (2, 8, 0, p, 48, 256, 4) for p in (100, 200, 400, 800, 1600)},
          **{f"width {w}": (2, 8, 0, 300, 48, w, 4) for w in (128, 256, 512, 1024)}}


def build(shape: str, folder: str):
    """(model, prompts, G, completion tokens, end tokens): the default run's, or a Llama with prompts of random tokens."""
    import torch
    if shape == "default":
        import speakrl
        settings = speakrl.Settings(towns=40)
        policy = speakrl.Policy(settings.model, settings)
        stages, _ = speakrl.training_points(settings, policy)
        return policy.model, [p["prompt"] for p in speakrl.draw_points(stages, 0, settings)], settings.group, settings.max_new_tokens, sorted(policy.eos_ids)
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
    P, G, S, p, c, width, layers = {**SHAPES, **GROWTH, **DIALOGUES}[shape]
    torch.manual_seed(0)
    if folder and (width, layers) == SMOL:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    else:
        model = LlamaForCausalLM(LlamaConfig(vocab_size=49152, hidden_size=width, intermediate_size=width * 8 // 3, num_hidden_layers=layers,
                                             num_attention_heads=width // 64, num_key_value_heads=3 if width == 576 else 1, max_position_embeddings=2048,
                                             tie_word_embeddings=True)).eval()
    system = torch.randint(3, 49152, (S,)).tolist()
    return model, [system + own for own in torch.randint(3, 49152, (P, p)).tolist()], G, c, []


def nothing_prefilled(model, prompts, G, pad_id, kept):
    """In place of grpo.prefill: every row carries its prompt."""
    import torch
    L = max(map(len, prompts))
    rows = [([pad_id] * (L - len(p)) + p, [0] * (L - len(p)) + [1] * len(p)) for p in prompts for _ in range(G)]
    return *map(torch.tensor, zip(*rows)), None


def bare_loop(model, prompts, G, steps):
    """What a rollout of so many tokens cannot do without: each token of each row through the network, one after the other."""
    import torch
    import grpo
    with torch.no_grad():
        ids, attention, cache = grpo.prefill(model, prompts, 1, 0)
        rows, config = torch.arange(len(prompts) * G), model.get_decoder().config
        grpo.hold_once(cache, attention[rows // G], rows // G, rows, steps)
        way, config._attn_implementation = config._attn_implementation, "behind_prompts"
        ids = ids[rows // G, -1:]
        for _ in range(steps):
            ids = model(input_ids=ids, cache=cache, use_cache=True).logits[:, -1].argmax(-1, keepdim=True)
        config._attn_implementation = way


def measure(shape: str, part: str, way: str, folder: str, pipe) -> None:
    """One measurement of ours: seconds, completion tokens, tokens forwarded, products needed, peak memory in MB, and what it was before."""
    import torch
    import grpo
    model, prompts, G, c, eos_ids = build(shape, folder)
    prefill = grpo.prefill
    how = dict(max_new_tokens=c, temperature=1.0, eos_ids=eos_ids, pad_id=0, seeds=range(len(prompts)))
    if part == "rollout":
        if way == "plain":
            grpo.prefill = nothing_prefilled
        run = lambda: grpo.sample(model, prompts, G, **how)
    else:
        completions = grpo.sample(model, prompts, G, **how) if eos_ids else torch.randint(3, 49152, (len(prompts) * G, c)).tolist()
        weight_B, adv_B = torch.full((len(completions),), 0.01), torch.linspace(-1, 1, len(completions))
        optimiser = torch.optim.AdamW(model.parameters(), lr=0.0)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimiser.step()  # now its moments are there, as in every update but the first
        if way == "checkpointing":
            grpo.checkpoint_layers(model)

        def run():
            model.zero_grad()
            logprobs, rows = (grpo.token_logprobs, G) if way == "plain" else (grpo.shared_logprobs, len(completions))
            for k in range(0, len(completions), rows):
                here = slice(k, k + rows)
                logp, mask = logprobs(model, prompts[k // G:(k + rows) // G], completions[here], 1.0)
                grpo.policy_loss(logp, logp, adv_B[here], mask, weight_B[here])[0].backward()
            return completions
    before = peak_mb()
    times, forwarded = [], []
    model.get_input_embeddings().register_forward_pre_hook(lambda module, inputs: forwarded.append(inputs[0].numel()))
    while len(times) < TIMES and sum(times) < SECONDS:
        forwarded.clear()
        began = time.time()
        tokens = sum(map(len, run()))
        times.append(time.time() - began)
    grpo.prefill = prefill
    found = {"seconds": min(times), "tokens": tokens, "forwarded": sum(forwarded), "before_mb": before, "peak_mb": peak_mb()}
    if part == "rollout":
        began = time.time()
        bare_loop(model, prompts, G, tokens // (len(prompts) * G))  # of rows that end early the average length
        found["limit_seconds"] = time.time() - began
    else:
        head = model.get_output_embeddings().weight.numel()
        body = sum(p.numel() for p in model.get_decoder().parameters()) - model.get_input_embeddings().weight.numel()
        chunks = way != "plain" and 4 * tokens * len(model.get_output_embeddings().weight) > 2 ** 26
        found["limit_seconds"] = (6 * body * found["forwarded"] + (8 if chunks else 6) * head * tokens) / product_rate()
    if way == "profile":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            run()
        events = sorted(seen.key_averages(), key=lambda event: -event.self_cpu_time_total)
        found["profile"] = {event.key: event.self_cpu_time_total / sum(e.self_cpu_time_total for e in events) for event in events}
    pipe.send(found)


def measure_dialogues(shape: str, way: str, folder: str, pipe) -> None:
    """Seconds and tokens forwarded of dialogues of several turns. The default: an evaluation of the embedded policy on 100 goals and their twins. 135M: four
    turns of 16 dialogues, prompts of 600 shared and 100 more tokens, 48 sampled and shown, 50 of others behind them."""
    import random
    import torch
    import grpo
    import speakrl
    if shape == "default":
        settings = speakrl.Settings(goals=100)
        policy, sample = speakrl.Policy(settings.model, settings), speakrl.Policy.sample
        model, scenarios = policy.model, speakrl.evaluation_scenarios(settings)
        speakrl.Policy.sample = lambda *args, kept, **named: sample(*args, kept=kept if way == "kept" else None, **named)
        play = lambda: speakrl.play_scenarios(policy, scenarios, 0, settings)
    else:
        model, first, _, c, _ = build(f"{shape}-dialogues", folder)

        def play():
            prompts, before, draw = first, {}, random.Random(0)
            for _ in range(4):
                kept = (before, {})
                new = grpo.sample(model, prompts, max_new_tokens=c, temperature=1.0, eos_ids=[], pad_id=0, seeds=range(len(prompts)), kept=kept if way == "kept" else None)
                before = kept[1]
                prompts = [p + n + [draw.randrange(3, 49152) for _ in range(50)] for p, n in zip(prompts, new)]
    times, forwarded = [], []
    model.get_input_embeddings().register_forward_pre_hook(lambda module, inputs: forwarded.append(inputs[0].numel()))
    while len(times) < 2:
        forwarded.clear()
        began = time.time()
        play()
        times.append(time.time() - began)
    pipe.send({"seconds": min(times), "forwarded": sum(forwarded), "peak_mb": peak_mb()})


def peak_mb() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def product_rate(n: int = 1536) -> float:
    """Multiplications and additions a second of a product of two n x n matrices in float32, the best of five."""
    import torch
    a, b, seconds = torch.randn(n, n), torch.randn(n, n), []
    for _ in range(5):
        began = time.time()
        a @ b
        seconds.append(time.time() - began)
    return 2 * n ** 3 / min(seconds)


def measure_trl(shape: str, steps: int, way: str, folder: str, pipe) -> None:
    """So many steps of TRL's GRPOTrainer on the same model, prompts and lengths, `way` is "trl N" for N rows a device batch; the fastest
    rollout and update, None where TRL is not installed. A tokenizer whose words are the ids makes the prompts the same ids."""
    import logging
    try:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer
    except ImportError:
        return pipe.send(None)
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, PrinterCallback
    logging.disable()
    model, prompts, G, c, eos_ids = build(shape, folder)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(model.config.vocab_size)}, unk_token="t2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=f"t{(eos_ids or [1])[0]}", pad_token="t0")
    rows, spent, lengths = int(way.split()[1]), {"rollout": [], "step": []}, []
    cuts = len(prompts) * G // rows

    def reward(completion_ids, **_):
        lengths.extend(map(len, completion_ids))
        return [float(k % 2) for k in range(len(completion_ids))]

    def timed(name, function):
        def call(*args, **kwargs):
            began = time.time()
            result = function(*args, **kwargs)
            spent[name].append(time.time() - began)
            return result
        return call

    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(output_dir=out, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
                            max_steps=steps, learning_rate=1e-6, beta=0.0, loss_type="grpo", num_generations=G, max_completion_length=c,
                            per_device_train_batch_size=rows, gradient_accumulation_steps=cuts, shuffle_dataset=False,
                            temperature=1.0, top_p=1.0, top_k=0, generation_kwargs=None if eos_ids else {"min_new_tokens": c})
        trainer = GRPOTrainer(model=model, reward_funcs=reward, args=config, processing_class=tokenizer,
                              train_dataset=Dataset.from_list([{"prompt": " ".join(f"t{i}" for i in p)} for p in prompts]))
        trainer.remove_callback(PrinterCallback)
        trainer._generate_and_score_completions = timed("rollout", trainer._generate_and_score_completions)
        trainer.training_step = timed("step", trainer.training_step)
        before = peak_mb()
        trainer.train()
    update = min(sum(spent["step"][k * cuts:(k + 1) * cuts]) - rollout for k, rollout in enumerate(spent["rollout"]))
    pipe.send({"rollout": min(spent["rollout"]), "update": update, "tokens": sum(lengths) // steps, "before_mb": before, "peak_mb": peak_mb()})


def in_process(function, *args):
    """The function's result, from a process of its own; None if it died, for want of memory for example."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=function, args=(*args, theirs))
    process.start()
    theirs.close()
    try:
        found = ours.recv()
    except EOFError:
        found = None
    process.join()
    return found


def compare(shape: str, repeats: int, folder: str) -> dict:
    """Every way, `repeats` rounds: the measurements, and rows of the table (medians), printed as soon as they are complete."""
    runs: dict[str, list[dict]] = {"plain": [], "shared": []}
    tried = {}
    if shape in SHAPES:
        runs["checkpointing"] = []
        rows = SHAPES[shape][0] * SHAPES[shape][1] if SHAPES[shape] else 64
        for way in [f"trl {n}" for n in (1, 4, 8, 16) if rows % n == 0]:
            if run := in_process(measure_trl, shape, 1, way, folder):
                tried[way] = run
                print_row(shape, f"{way}, one step", [run], None)
    if tried:
        seconds, best = min((run["rollout"] + run["update"], way) for way, run in tried.items())
        runs[best], steps = [], min(TIMES, max(2, round(SECONDS / seconds)))
    for turn in range(repeats):
        for way, some in runs.items():
            rollout, update = ((in_process(measure_trl, shape, steps, way, folder),) * 2 if way.startswith("trl") else
                               (in_process(measure, shape, part, way, folder) for part in ("rollout", "update")))
            if not (rollout and update):
                print(f"{shape}, {way}: left out, the process that measured died; is there memory enough?", flush=True)
            elif way.startswith("trl"):
                some.append(rollout)
            else:
                some.append({"rollout": rollout["seconds"], "update": update["seconds"], "tokens": rollout["tokens"], "update_tokens": update["tokens"],
                             "forwarded": (rollout["forwarded"], update["forwarded"]), "rollout_mb": rollout["peak_mb"], "update_mb": update["peak_mb"],
                             "peak_mb": max(rollout["peak_mb"], update["peak_mb"]), "before_mb": update["before_mb"],
                             "of_limit": (rollout["limit_seconds"] / rollout["seconds"], update["limit_seconds"] / update["seconds"])})
            if turn == repeats - 1 and some:
                print_row(shape, way, some, runs["plain"] if way != "plain" else None)
    return {"shape": shape, "runs": runs, "trl_settings": tried}


def print_row(shape: str, way: str, runs: list[dict], plain: list[dict] | None) -> None:
    """One row of the table; its last cell compares with `plain`, where that is not None or empty."""
    middle = lambda some, part: statistics.median(run[part] for run in some)
    rollout, update = middle(runs, "rollout"), middle(runs, "update")
    step, ratio = rollout + update, ""
    if plain:
        ratio = f"{(middle(plain, 'rollout') + middle(plain, 'update')) / step:.1f} ({middle(plain, 'update') / update:.1f})"
    forwarded, limit = runs[0].get("forwarded", ("", "")), ""
    if "of_limit" in runs[0]:
        limit = ", ".join(f"{statistics.median(run['of_limit'][k] for run in runs):.0%}" for k in (0, 1))
    print(f"| {shape} | {way} | {forwarded[0]} | {forwarded[1]} | {rollout:.2f} | {update:.2f} | {step:.2f} | {runs[0]['tokens'] / step:.0f} "
          f"| {max(run['peak_mb'] for run in runs):.0f} | {runs[0]['before_mb']:.0f} | {limit} | {ratio} |", flush=True)


def compare_dialogues(repeats: int, folder: str) -> None:
    """A row of a table for each shape and way (medians), measured in turn."""
    print("| dialogues | way | forwarded | s | peak MB | anew / kept |\n" + "|---" * 6 + "|")
    for shape in ("default", "135M"):
        runs: dict[str, list[dict]] = {"anew": [], "kept": []}
        for _ in range(repeats):
            for way, some in runs.items():
                some.append(in_process(measure_dialogues, shape, way, folder))
        seconds = {way: statistics.median(run["seconds"] for run in some) for way, some in runs.items()}
        for way, some in runs.items():
            print(f"| {shape} | {way} | {some[0]['forwarded']} | {seconds[way]:.2f} | {max(run['peak_mb'] for run in some):.0f} "
                  f"| {seconds['anew'] / seconds['kept']:.2f} |", flush=True)


def measure_claude(calls: int = 2000) -> None:
    """Seconds for judgements, 64 at a time: a bare loop of threads over the SDK, and claude.py with its checks and its cache."""
    from concurrent.futures import ThreadPoolExecutor
    import anthropic
    from anthropic_server import KEY
    from claude import Claude
    from rewards import ClaudeJudge
    items = [([{"role": "user", "content": "A table for a few of us."}], f"For 3, 4 or {i} people?", None) for i in range(calls)]
    server = subprocess.Popen([sys.executable, str(ROOT / "tests" / "anthropic_server.py"), "--delay", "0.25"], stdout=subprocess.PIPE, text=True)
    try:
        url = server.stdout.readline().strip()
        with tempfile.TemporaryDirectory() as folder:
            ours = Claude(KEY, url, cache=f"{folder}/cache.jsonl")
            bodies = []
            ClaudeJudge(lambda requests: bodies.extend(ours._body(r, "claude-haiku-5-5") for r in requests) or [])(items)
            with anthropic.Anthropic(api_key=KEY, base_url=url) as bare, ThreadPoolExecutor(64) as pool:
                began = time.time()
                list(pool.map(lambda body: bare.messages.create(**body), bodies))
                plain = time.time() - began
            began = time.time()
            verdicts = ClaudeJudge(lambda requests: ours.complete(requests, "claude-haiku-5-5"))(items)
            checked = time.time() - began
            ours.close()
    finally:
        server.terminate()
    assert len(verdicts) == calls and all(v.scores for v in verdicts)
    print(f"{calls} calls of 250 ms: {plain:.1f} s bare, {checked:.1f} s with claude.py, {checked / plain:.2f} times")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["default", "135M", "135M-shared"], choices=list(SHAPES))
    parser.add_argument("--growth", action="store_true", help="the shapes that differ in G, prompt or width instead")
    parser.add_argument("--dialogues", action="store_true", help="dialogues of several turns instead")
    parser.add_argument("--profile", action="store_true", help="where the time of the shapes goes instead")
    parser.add_argument("--repeats", type=int, default=2, help="rounds of plain, shared, TRL, plain, shared, TRL, ...")
    parser.add_argument("--model", default="", help="folder of SmolLM2-135M")
    parser.add_argument("--json", help="also write the measurements to this file")
    parser.add_argument("--claude", action="store_true", help="measure claude.py instead")
    args = parser.parse_args()
    if args.claude:
        return measure_claude()
    if args.dialogues:
        return compare_dialogues(args.repeats, args.model)
    if args.profile:
        for shape in args.shapes:
            for part in ("rollout", "update"):
                found = in_process(measure, shape, part, "profile", args.model)
                print(f"{shape}, {part}: {found['seconds']:.2f} s;", ", ".join(f"{name.removeprefix('aten::')} {share:.0%}" for name, share in [*found["profile"].items()][:10]), flush=True)
        return
    print("| shape | way | forwarded in rollout | in update | rollout s | update s | step s | completion tokens/s | peak MB | MB before | of the limit: "
          "rollout, update | plain / way: step (update) |\n" + "|---" * 12 + "|")
    found = []
    for shape in GROWTH if args.growth else args.shapes:
        found.append(compare(shape, args.repeats, args.model))
        if args.json:
            Path(args.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
