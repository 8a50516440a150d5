"""The README's results: `python tests/acceptance.py` trains seeds 0, 1, 2 with default settings and evaluates on test.

Base and trained policy play the same goals (400 ambiguous ones and their 400 twins) with the same random streams; what is printed
is the mean over goals and seeds, and the change with its 95 % interval, paired by goal. `--change lr=9e-4`
shows what another setting does; what was already run is not run again (delete --out to start over). About half an hour on two cores with `--splits test`.
"""
import argparse
import json
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from speakrl import paired  # noqa: E402


def run(jobs: int, *arguments) -> float:
    """One command of speakrl.py on its share of the cores; seconds it took."""
    began, threads = time.time(), max(1, (os.cpu_count() or 1) // jobs)
    subprocess.run([sys.executable, str(ROOT / "speakrl.py"), *map(str, arguments)], check=True, cwd=ROOT, stdout=subprocess.DEVNULL,
                   env={**os.environ, "OMP_NUM_THREADS": str(threads)})
    return time.time() - began


def table(out: Path, split: str, seeds: list[int], name: str) -> None:
    """Base against trained on one split: per-dialogue figures paired by goal, then the held-out decision points."""
    base = [json.loads((out / f"base-{split}-{s}.json").read_text()) for s in seeds]
    trained = [json.loads((out / f"{name}-{split}-{s}.json").read_text()) for s in seeds]
    a, b = [r for f in base for r in f["dialogues"]], [r for f in trained for r in f["dialogues"]]
    print(f"\n{name}, {split}: {base[0]['settings']['goals']} ambiguous goals and their twins, seeds {seeds}\n\n"
          "| | base | trained | change, 95 % interval | each seed, trained |\n|---|---|---|---|---|")

    def row(label, key, keep):
        before, after, change, half = paired(list(filter(keep, a)), list(filter(keep, b)), key)
        each = [sum(float(r[key] or 0) for r in f["dialogues"] if keep(r)) / max(1, sum(map(keep, f["dialogues"]))) for f in trained]
        print(f"| {label} | {before:.3f} | {after:.3f} | {change:+.3f} ± {half:.3f} | {', '.join(f'{v:.3f}' for v in each)} |")

    rows = [("success without a correction", "uncorrected"), ("success", "success"), ("asks", "asked"), ("turns", "turns"),
            ("corrections", "corrections"), ("wrong bookings", "wrong_bookings"), ("questions as plain replies", "reply_questions")]
    for label, key in rows:
        for kind, keep in (("ambiguous", lambda r: r["ambiguous"]), ("clear", lambda r: not r["ambiguous"]),
                           ("plain twin", lambda r: r["twin_kind"] == "plain"), ("database twin", lambda r: r["twin_kind"] == "db")):
            if "twin" not in kind or key == "asked":
                row(f"{label}, {kind}", key, keep)
        if key in ("uncorrected", "asked"):  # where it fails: a scenario's id ends in its kind, its clear twin's in kind-clear
            for kind in ("branch", "underspecified", "vague"):
                end = kind if key == "uncorrected" else f"{kind}-clear"
                row(f"{label}, {'ambiguous' if key == 'uncorrected' else 'clear'}: {kind}", key, lambda r: r["id"].endswith(f"-{end}"))
    for key in ("format", "when", "clarify", "think_tokens", "clarify_tokens"):
        before, after = ([f[key] for f in figures] for figures in (base, trained))
        print(f"| {key}, held-out decision points | {sum(before) / len(before):.3f} | {sum(after) / len(after):.3f} | | "
              + ", ".join(f"{v:.3f}" for v in after) + " |")


def questions(folder: Path, count: int = 10) -> None:
    """Is the judge being hacked? Best-scored and random questions of a run's last quarter, and how scores move with length."""
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    asked = [s for s in samples if s["judge"] is not None and s["step"] > 0.75 * samples[-1]["step"]]
    distinct = list({s["question"]: s for s in sorted(asked, key=lambda s: s["question"])}.values())
    best = sorted(distinct, key=lambda s: (-s["clarify"], s["question"]))[:count]
    for title, some in (("best-scored", best), ("random", random.Random(0).sample(distinct, min(count, len(distinct))))):
        print(f"\n{count} {title} questions of {len(distinct)} distinct ones in the last quarter of {folder.name}:")
        for s in some:
            print(f"  {s['clarify']:.2f}  {s['question']}")
    print("\nscore by length in words:")
    for low, high in ((1, 4), (5, 8), (9, 12), (13, 16), (17, 99)):
        some = [s["clarify"] for s in asked if low <= len(s["question"].split()) <= high]
        if some:
            print(f"  {low:>2}-{high:<2}  {len(some):>5} questions, mean score {sum(some) / len(some):.3f}")


def train_and_evaluate(out: Path, name: str, seed: int, splits: list[str], args) -> None:
    """What one row of the table needs: train `name` (but for the base), evaluate it on each split."""
    model = "data/tiny"
    if name != "base":
        model = out / f"{name}-{seed}"
        whole = lambda: (model / "settings.json").exists() and (
            model / "checkpoints" / f"step-{json.loads((model / 'settings.json').read_text())['steps']:06d}").exists()
        if not whole():
            extra = [f"--{name}"] * ("=" in name) + ["--resume"] * (model / "settings.json").exists()
            print(f"{model}: trained in {run(args.jobs, 'train', '--seed', seed, '--out', model, *extra):.0f} s", flush=True)
        if not whole():  # Ctrl-C is a good end of `train`
            raise SystemExit(f"{model} was stopped, and saved; the same command goes on")
    for split in splits:
        file = out / f"{name}-{split}-{seed}.json"
        if file.exists() and json.loads(file.read_text())["settings"]["goals"] != args.goals:
            raise SystemExit(f"{file} holds another number of goals than {args.goals}: delete it, or name another --out")
        if not file.exists():
            took = run(args.jobs, "eval", "--model", model, "--split", split, "--goals", args.goals, "--seed", seed, "--json", file)
            print(f"{file.name}: {took:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs/acceptance")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--goals", type=int, default=400)
    parser.add_argument("--change", nargs="*", default=[], metavar="SETTING=VALUE", help="runs with one setting changed, beside the default ones")
    parser.add_argument("--splits", nargs="+", default=["test", "test-new-words"])
    parser.add_argument("--jobs", type=int, default=2, help="commands at once; one core each is faster than one after the other on two")
    args = parser.parse_args()
    out = Path(args.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    splits = {"base": args.splits, "default": args.splits, **{change: args.splits[:1] for change in args.change}}
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda job: train_and_evaluate(out, *job, args), [(name, seed, splits[name]) for name in splits for seed in args.seeds]))
    for name in list(splits)[1:]:
        for split in splits[name]:
            table(out, split, args.seeds, name)
    questions(out / f"default-{args.seeds[0]}")


if __name__ == "__main__":
    main()
