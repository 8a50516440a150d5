"""Real MultiWOZ as scenarios: database and goals from a folder that the user names, worded like the generated towns.

Two layouts are read, from a folder or a zip, there also from the one sub-folder that holds them: a release (data.json, valListFile
and testListFile as .txt or .json, *_db.json), and goals alone (goals_val.json, goals_test.json, *_db.json; dialogues, if any,
in */data_*.json); the tables lie in the folder or in its db/.
Left out: downloading, the states and acts of the dialogues (goals, texts and tables are the same in 2.1 and 2.4, states are
what 2.4 corrects), and MultiWOZ itself: none of it is in this repository.

Where this departs from the usual use of MultiWOZ:
1. Only `info` and `book` are voiced. `fail_info` and `fail_book` are not: no booking fails here, and nothing has to be
   searched in vain first (a booking that meets `fail_book` still counts). `reqt` is not asked for.
2. A part that names no venue says that any match will do, for goals leave several rows open and prefer none.
   So no goal is ambiguous as loaded; what is ambiguous was made so by the builder of the training data.
3. Parts are voiced in one fixed order, taxi last: its ends are often the places found before, filled in from there.
4. Validation goals are train and valid, test goals are test. Training goals can be loaded, and make no scenarios.

    python -m data.multiwoz FOLDER      counts the goals and lets the scripted oracle play those with a booking
"""
from __future__ import annotations

import hashlib
import json
import random
import re
import zipfile
import zlib
from pathlib import Path

from env import BOOK_SLOTS, FIELDS, TIMES, VENUES, Database, Scenario, normalise
from data.towns import word_request

ORDER = ("restaurant", "hotel", "attraction", "train", "taxi")  # police and hospital: no tool, no goal of valid or test
TRAIN_GOALS = 900  # of the 999 validation goals; the other 99 are valid
NO_DIALOGUE = "PMUL4707.json"  # on the validation list, but some copies lack it: left out of all, so that splits agree


class DataError(ValueError):
    """A folder or file that is not MultiWOZ as released; the message is one line: which file, and what is wrong."""


def load_database(folder: str | Path) -> Database:
    """The four tables that have tools, from FOLDER/db/restaurant_db.json ... or FOLDER/restaurant_db.json ...

    Rows keep their text fields; names are lower-cased (one of the release has capitals). Raises DataError.
    """
    root = open_folder(folder)
    return Database({domain: _table(root, domain) for domain in FIELDS})


def _table(root: Path | zipfile.Path, domain: str) -> list[dict]:
    path = _find(root, f"db/{domain}_db.json", f"{domain}_db.json")
    rows = _read_json(path, list)
    for i, row in enumerate(rows):
        for slot in FIELDS[domain]:
            if not isinstance(row, dict) or not isinstance(row.get(slot), str):
                raise DataError(f"{path}: row {i} has no text {slot!r}")
            try:
                normalise(slot, row[slot])
            except ValueError as error:
                raise DataError(f"{path}: row {i}: {error}") from None
    # What is no text (location, price by room, integer ids) has no tool that would show it.
    rows = [{slot: value for slot, value in row.items() if isinstance(value, str)} for row in rows]
    return [{**row, "name": row["name"].lower()} if "name" in row else row for row in rows]


def load_goals(folder: str | Path, split: str) -> dict[str, dict]:
    """{id: goal} of an official split, "train", "valid" or "test", sorted by id; ids as in the release, PMUL1635.json.

    A goal keeps the parts that it has, {domain: {info, book, fail_info, fail_book, ...}}, and `message`. Unused parts,
    which are empty, are dropped (what is no key, the user does not need), and so is `topic`, junk. Times become HH:MM:
    five restaurants have "9:30" or the like. Raises DataError.
    """
    if split not in ("train", "valid", "test"):
        raise DataError(f"MultiWOZ has no split {split!r}; its splits are train, valid, test")
    name = {"valid": "goals_val.json"}.get(split, f"goals_{split}.json")
    root = open_folder(folder)
    if (root / "data.json").is_file():
        path = root / "data.json"
        raw = {key: dialogue["goal"] for key, dialogue in _release(root, split, "goal").items()}
    else:
        path = _find(root, name, "data.json")
        raw = _read_json(path, dict)
    return {key: _clean_goal(goal, f"{path}: goal {key}") for key, goal in sorted(_with_suffix(raw).items())}


def _with_suffix(by_id: dict) -> dict:
    ids = {key: f"{key.removesuffix('.json')}.json" for key in by_id}
    return {ids[key]: value for key, value in by_id.items() if ids[key] != NO_DIALOGUE}


def _release(root: Path | zipfile.Path, split: str, part: str) -> dict[str, dict]:
    """The dialogues of a split of data.json, each of which must hold `part`: "goal" or "log"."""
    path, listed = root / "data.json", {}
    dialogues = _with_suffix(_read_json(path, dict))
    for name, stem in (("valid", "valListFile"), ("test", "testListFile")):
        ids_file = _find(root, f"{stem}.txt", f"{stem}.json")  # an id a line and no JSON, whatever its name says
        lines = ids_file.read_text(encoding="utf-8", errors="replace").split()
        listed[name] = _with_suffix(dict.fromkeys(lines)).keys()
    ids = listed[split] if split in listed else dialogues.keys() - listed["valid"] - listed["test"]
    if unknown := sorted(ids - dialogues.keys()):
        raise DataError(f"{path}: lacks {len(unknown)} of {len(ids)} dialogues that the list of {split} names, first "
                        f"{unknown[0]}")
    if broken := sorted(i for i in ids if not isinstance(dialogues[i], dict) or part not in dialogues[i]):
        raise DataError(f"{path}: dialogue {broken[0]} has no {part}")
    return {i: dialogues[i] for i in ids}


def load_dialogues(folder: str | Path, split: str) -> dict[str, list[tuple[str, str]]]:
    """{id: [("user" or "system", text), ...]} of a split, sorted by id, white space collapsed; {} where a folder of goals has
    no */data_*.json that holds any. Raises DataError."""
    root = open_folder(folder)
    if (root / "data.json").is_file():
        found, where = _release(root, split, "log"), root / "data.json"
    else:
        pieces = sorted((path for sub in root.iterdir() if sub.is_dir() for path in sub.iterdir()
                         if re.fullmatch(r"data_\d+\.json", path.name)), key=str)
        goals, where = load_goals(folder, split) if pieces else {}, root
        found = {key: d for path in pieces for key, d in _with_suffix(_read_json(path, dict)).items() if key in goals}
    dialogues = {}
    for key, dialogue in sorted(found.items()):
        try:
            texts = [" ".join(turn["text"].split()) for turn in dialogue["log"]]
        except (KeyError, TypeError, AttributeError):
            raise DataError(f"{where}: dialogue {key} has no log of turns with a text") from None
        dialogues[key] = [("system" if k % 2 else "user", text) for k, text in enumerate(texts)]
    return dialogues


def human_turns(folder: str | Path) -> list[list[str]]:
    """What people said as users in the dialogues at hand (validation, else test), by dialogue."""
    dialogues = load_dialogues(folder, "valid") or load_dialogues(folder, "test")
    return [[text for role, text in dialogue if role == "user"] for dialogue in dialogues.values() if dialogue]


def _clean_goal(goal: dict, where: str) -> dict:
    if not isinstance(goal, dict):
        raise DataError(f"{where} is no object")
    clean = {"message": goal.get("message", [])}
    for domain in [d for d in ORDER if goal.get(d)]:
        try:
            parts = {kind: dict(goal[domain].get(kind) or {}) for kind in ("info", "book", "fail_info", "fail_book")}
            for slots in parts.values():
                for slot, value in slots.items():
                    known = normalise(slot, value)  # refused here: scoring would raise in the middle of an evaluation
                    slots[slot] = known if slot in TIMES else value
        except (AttributeError, TypeError, ValueError) as error:
            raise DataError(f"{where}: {domain}: {error}") from None
        clean[domain] = {**goal[domain], **parts}
    return clean


def plain_message(goal: dict) -> list[str]:
    """The goal in MultiWOZ's own words, as a person who played the user read it; without the HTML.

    >>> plain_message({"message": ["You want a <span class='emphasis'>cheap</span> hotel"]})
    ['You want a cheap hotel']
    """
    return [re.sub(r"<[^>]*>", "", line) for line in goal["message"]]


def bookable(goal: dict) -> bool:
    """Can success be told: does some part with a reference have a `book`?"""
    return any(goal.get(domain, {}).get("book") for domain in BOOK_SLOTS)


def scenarios(folder: str | Path, split: str) -> list[Scenario]:
    """The goals of "train", "valid" (900 and 99 of the validation goals, by rank of the sha256 of the id) or "test",
    sorted by id, each worded by a random stream of its own. Raises DataError."""
    if split not in ("train", "valid", "test"):
        raise DataError(f"no split {split!r} of MultiWOZ scenarios; they are train, valid, test")
    goals = load_goals(folder, "test" if split == "test" else "valid")
    if split != "test":
        ranked = sorted(goals, key=lambda i: hashlib.sha256(i.encode()).hexdigest())
        goals = {i: goals[i] for i in sorted(ranked[:TRAIN_GOALS] if split == "train" else ranked[TRAIN_GOALS:])}
    database = load_database(folder)
    return [scenario(i, goal, database) for i, goal in goals.items()]


def scenario(goal_id: str, goal: dict, database: Database) -> Scenario:
    """One goal as a scenario. A taxi's missing ends are written into the scenario's goal: the user can tell them."""
    rng, requests = random.Random(f"words {goal_id}"), []
    if goal.get("taxi"):
        goal = {**goal, "taxi": {**goal["taxi"], "info": {**_taxi_ends(goal), **goal["taxi"]["info"]}}}
    for domain in [d for d in ORDER if d in goal]:
        info = goal[domain]["info"]
        any_is_fine = "name" not in info and domain != "taxi"
        text = word_request(domain, info, goal[domain]["book"], rng, any_is_fine=any_is_fine, later=bool(requests))
        requests.append((domain, text))
    return Scenario(goal_id, goal, database, requests)


def _taxi_ends(goal: dict) -> dict[str, str]:
    """"You want a taxi to commute between the two places": the first two of the goal, by name where it names them."""
    places = [goal[d]["info"].get("name", f"the {d}") for d in VENUES if d in goal]
    places += [place for place in ("the hotel", "the restaurant") if place not in places]
    return dict(zip(("departure", "destination"), places))


def open_folder(folder: str | Path) -> Path | zipfile.Path:
    """The place of the files: a folder, or a zip's top or its only sub-folder with files of MultiWOZ. Raises DataError."""
    if Path(folder).is_dir():
        return Path(folder)
    if not Path(folder).exists():
        raise DataError(f"{folder}: no such folder or zip")
    try:
        top = zipfile.Path(folder)
    except (zipfile.BadZipFile, OSError) as error:
        raise DataError(f"{folder}: neither a folder nor a zip ({error})") from None
    known = lambda place: any(path.name in ("data.json", "goals_val.json") for path in place.iterdir())
    subs = [place for place in top.iterdir() if place.is_dir() and known(place)]
    return subs[0] if len(subs) == 1 and not known(top) else top


def _find(root: Path | zipfile.Path, *names: str) -> Path | zipfile.Path:
    """The first of the files that exists."""
    for name in names:
        if (root / name).is_file():
            return root / name
    raise DataError(f"{root}: no {' and no '.join(names)} in it")


def _read_json(path: Path | zipfile.Path, kind: type) -> list | dict:
    """The content of a JSON file, a filled list or object; DataError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, zipfile.BadZipFile, zlib.error) as error:  # no JSON, no UTF-8, or damaged inside the zip
        raise DataError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, kind) or not content:
        raise DataError(f"{path}: expected a filled JSON {'object' if kind is dict else 'list'}")
    return content


def main(folder: str) -> None:
    """Play the scripted oracle over every bookable goal of a folder; print successes, and each failure with its cause."""
    from data.speaker import play
    from env import score_dialogue
    for split in ("train", "valid", "test"):
        loaded = scenarios(folder, split)
        tasks, played, success, causes = [s for s in loaded if bookable(s.goal)], 0, 0, []
        for task in tasks:
            try:
                dialogue = play(task)
            except Exception as error:  # of any kind: this command is there to find it, and prints it with its goal
                causes.append(f"  {task.id}: {type(error).__name__}: {error}")
                continue
            won, _ = score_dialogue(task.goal, dialogue.session.ledger, dialogue.messages)
            played, success = played + 1, success + won
            causes += [] if won else [f"  {task.id}: no success, ended {dialogue.ended}"]
        print(f"{split}: {len(loaded)} goals, {len(tasks)} bookable, {played} played, {success} success, "
              f"{len(tasks) - played} exceptions", *causes, sep="\n")


if __name__ == "__main__":
    import sys
    if len(sys.argv) != 2:
        sys.exit("usage: python -m data.multiwoz FOLDER")
    try:
        main(sys.argv[1])
    except DataError as error:
        sys.exit(str(error))
