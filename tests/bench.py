"""How long a GRPO step takes, and what computing each prompt once saves: `python tests/bench.py`. With `--claude`: what claude.py
costs on top of the SDK, against a stand-in on loopback that takes 250 ms for an answer.

Each shape is timed plain (every completion carries its prompt through the network, all logits at once) and shared (`grpo.prefill`,
`grpo.head_logprobs`), in turn and in one run, each measurement in a process of its own, so that its peak of memory is its own.
"forwarded" are the tokens that went through the network. Times are of this machine and noisy: compare within a run. Left out: TRL,
several processes.
"""
import argparse
import json
import multiprocessing
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# name: prompts, completions of each, tokens that all prompts share, further prompt tokens, completion tokens; None: the default run's
SHAPES = {"default": None, "135M": (2, 8, 0, 300, 48), "135M-shared": (4, 8, 600, 200, 64)}


def build(shape: str):
    """(model, prompts, G, completion tokens, end tokens): the embedded policy, or a random one of SmolLM2-135M's size, as fast as the real one."""
    import torch
    if shape == "default":
        import speakrl
        settings = speakrl.Settings(towns=40)
        policy = speakrl.Policy(settings.model, settings)
        stages, _ = speakrl.training_points(settings, policy)
        return policy.model, [p["prompt"] for p in speakrl.draw_points(stages, 0, settings)], settings.group, settings.max_new_tokens, policy.eos_ids
    from transformers import LlamaConfig, LlamaForCausalLM
    P, G, S, p, c = SHAPES[shape]
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
                                         num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True)).eval()
    system = torch.randint(3, 49152, (S,)).tolist()
    return model, [system + own for own in torch.randint(3, 49152, (P, p)).tolist()], G, c, []


def nothing_kept(model, prompts, G, pad_id):
    """In place of grpo.prefill: every row carries its prompt."""
    import torch
    L = max(map(len, prompts))
    rows = [([pad_id] * (L - len(p)) + p, [0] * (L - len(p)) + [1] * len(p)) for p in prompts for _ in range(G)]
    return *map(torch.tensor, zip(*rows)), None


def measure(shape: str, part: str, way: str, pipe) -> None:
    """One measurement: seconds, completion tokens, tokens forwarded, peak memory in MB, and what the memory was before."""
    import torch
    import grpo
    model, prompts, G, c, eos_ids = build(shape)
    how = dict(max_new_tokens=c, temperature=1.0, eos_ids=eos_ids, pad_id=0, seed=0)
    if part == "rollout":
        if way == "plain":
            grpo.prefill = nothing_kept
        run = lambda: grpo.sample(model, prompts, G, **how, **({"stretch": c} if way == "plain" else {}))
    else:
        completions = grpo.sample(model, prompts, G, **how) if eos_ids else torch.randint(3, 49152, (len(prompts) * G, c)).tolist()
        weight_B, adv_B = torch.full((len(completions),), 0.01), torch.linspace(-1, 1, len(completions))

        def run():
            model.zero_grad()
            logp, mask = (grpo.token_logprobs if way == "plain" else grpo.shared_logprobs)(model, prompts, completions, 1.0)
            grpo.policy_loss(logp, logp, adv_B, mask, weight_B)[0].backward()
            return completions
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    times, forwarded = [], []
    model.get_input_embeddings().register_forward_pre_hook(lambda module, inputs: forwarded.append(inputs[0].numel()))
    for _ in range(3 if shape == "default" else 1):
        forwarded.clear()
        began = time.time()
        tokens = sum(map(len, run()))
        times.append(time.time() - began)
    pipe.send({"seconds": min(times), "tokens": tokens, "forwarded": sum(forwarded), "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "before_mb": before})


def measure_claude(calls: int = 2000) -> None:
    """Seconds for judgements, 64 at a time: a bare loop of threads over the SDK, and claude.py with its checks and its cache."""
    import tempfile
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
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=2, help="rounds of plain, shared, plain, shared, ...")
    parser.add_argument("--json", help="also write the measurements to this file")
    parser.add_argument("--claude", action="store_true", help="measure claude.py instead")
    args = parser.parse_args()
    if args.claude:
        return measure_claude()
    context, found = multiprocessing.get_context("spawn"), []
    print("| shape | part | way | forwarded | seconds | completion tokens/s | peak MB | plain / shared |\n|---|---|---|---|---|---|---|---|")
    for shape in args.shapes:
        for part in ("rollout", "update"):
            runs = {"plain": [], "shared": []}
            for _ in range(args.repeats):
                for way, some in runs.items():
                    ours, theirs = context.Pipe()
                    process = context.Process(target=measure, args=(shape, part, way, theirs))
                    process.start()
                    some.append(ours.recv())
                    process.join()
            found += [{"shape": shape, "part": part, "way": way, "runs": some} for way, some in runs.items()]
            seconds = {way: statistics.median(r["seconds"] for r in some) for way, some in runs.items()}
            for way, some in runs.items():
                ratio = f"{seconds['plain'] / seconds['shared']:.1f}" if way == "shared" else ""
                print(f"| {shape} | {part} | {way} | {some[0]['forwarded']} | {seconds[way]:.2f} | {statistics.median(r['tokens'] for r in some) / seconds[way]:.0f} "
                      f"| {max(r['peak_mb'] for r in some):.0f} | {ratio} |", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
