"""SpeakER and SpeakER-DPO from goals: `python speakrl.py data`.

A goal and its database come in, of real MultiWOZ or of a generated town, neither changed to fit. For each attempt the builder
looks for what the database leaves open (`plan_*`: partial evidence in the user's words, two or more candidates, a user who
cares), words it, and lets the oracle ask and act in env.py. What is kept passed five filters, each counted in statistics.json:
a plan was found; the task succeeded through the questions alone; at least one candidate would have failed; no question repeats
an earlier one of its dialogue; no near-identical dialogue is in the set.

It stands beside speaker.py because it is another job: there, what a question is and when it is due; here, making many.
Rules plan and word the dialogues; a language model may then write them anew (`rewritten`). The paper has Claude do both, see the data card.
"""
from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from env import (AREAS, BOOK_SLOTS, DAYS, MAX_ROWS, PRICES, SPOKEN, Database, Dialogue, Scenario, ScriptedUser, arrival,
                 booking_satisfies, meets, name_key, normalise, parse_turn, score_dialogue, to_minutes)
from data.multiwoz import ORDER, bookable, human_turns, scenarios
from data.speaker import Oracle, clarify_due, play, points_of, with_thinks
from data.towns import ANY_PATTERN, ARRIVALS, FOODS, RICH, SPLITS, VAGUE, read_request, request_domain, town_goal, word_request
from rewards import NUMBERS, Reply, Request, data_block, judge_question

FILES = ("dialogues.jsonl", "twins.jsonl", "points.jsonl", "sft.jsonl", "sft_twins.jsonl", "dpo.jsonl")
COUNTS = (1, 1, 1, 1, 2, 2, 3)  # ambiguities in a dialogue, as far as its goal has parts to book
KIND_WEIGHTS = {"branch": 6, "underspecified": 5, "reference": 4, "vague": 2, "contradiction": 1}  # which is tried first
# Word n-gram similarity (Jaccard) of two questions of a dialogue (n = 2) and of two dialogues of a goal (n = 3), what users and
# questions say. Measured: of 458 pairs of questions about different things the highest is 0.43, of 479 dialogues of twelve
# real goals, 40 a goal, the nearest other one is at 0.17 (median), 0.30 (99 %), 0.35 (highest).
REPEATED, NEAR = 0.5, 0.5
DROPPED = ("nothing to leave open", "every candidate succeeds", "no success through its questions", "a question repeats an earlier one",
           "no success of the clear twin", "the wording of another, other values", "nearly the same as another of its goal")
# Why a dialogue is dropped that a language model has written anew. Other reasons in statistics.json, such as "refusal", are its service's.
UNFAITHFUL = ("the writer lost or added a value", "the writer's request reads differently", "the writer's question aims elsewhere",
              "the replay of the writer's words went another way")


# ------------------------------------------------------------------------------------------------- planning an ambiguity

@dataclass
class Plan:
    """What one request leaves open. `info`, `book`: what the user wants; `said`: which wishes are voiced; `instead`: phrases
    in place of values; `first`: booking values voiced before `extra` contradicts them; `plain_extra` puts it right in the twin.
    `arrival`: a day told in the dialogue's first message; `rivals`: rows that a database twin lacks; `anything`: may the twin
    say that any will do?"""
    info: dict
    book: dict
    ambiguity: dict
    said: dict
    instead: dict = field(default_factory=dict)
    first: dict = field(default_factory=dict)
    extra: str = ""
    plain_extra: str = ""
    arrival: str = ""
    rivals: list = field(default_factory=list)
    anything: bool = False


MORE_VAGUE = {"people": {"for one or two people": ("1", "2"), "for quite a few of us": ("5", "6", "7"), "for a large group": ("6", "7", "8"),
                         "for three or four of us": ("3", "4"), "for several people": ("3", "4", "5"), "for a family or two": ("4", "5", "6", "7", "8")},
              "day": {"late in the week": ("thursday", "friday"), "some time at the weekend": ("saturday", "sunday"),
                      "in the first half of the week": ("monday", "tuesday", "wednesday"), "towards the weekend": ("thursday", "friday")},
              "stay": {"for a night or two": ("1", "2"), "for a couple of nights or so": ("2", "3"), "for about a week": ("6", "7", "8"),
                       "for several nights": ("3", "4", "5")}}
ABOUT = ("around", "at about", "at roughly")
HOURS = "twelve one two three four five six seven eight nine ten eleven".split()
CONFLICTS = {"people": ("There will be {} of us.", "We are {} people in all.", "All {} of us are coming."),
             "day": ("We can only come on {}.", "Everyone is free on {}.", "I took {} off for this."),
             "time": ("We will be there at {}.", "Everyone can make it at {}.", "I told my friends {}."),
             "stay": ("We leave after {} nights.", "Our trip has {} nights.")}
PUT_RIGHT = {"people": "Sorry, make it {} people.", "day": "Sorry, make it {}.", "time": "Sorry, make it {}.", "stay": "Sorry, make it {} nights."}
SAME_DAY = {"restaurant": ("on the same day", "for the same day", "on that same day", "again on the same day"),
            "hotel": ("from the same day", "starting the same day", "arriving the same day", "from that same day")}
PART_OF_NAME = ("the {} place", "the {} place", "that {} place", "{} something", "the one called {}")


def vague_phrases(slot: str, value: str) -> dict[str, tuple]:
    """{phrase: what it admits} for every vague phrase that admits the value; times also "around six in the evening"."""
    phrases = {**VAGUE.get(slot, {}), **MORE_VAGUE.get(slot, {})}
    if slot == "time":
        minutes = to_minutes(value)
        for centre in (minutes - minutes % 30, minutes - minutes % 30 + 30):
            words = ("half past " if centre % 60 else "") + HOURS[centre // 60 % 12]
            part = "in the morning" if centre < 720 else "in the afternoon" if centre < 1080 else "in the evening"
            admits = tuple(f"{m // 60:02d}:{m % 60:02d}" for m in (centre - 15, centre, centre + 15))
            phrases |= {f"{about} {words} {part}": admits for about in ABOUT}
    return {phrase: admits for phrase, admits in phrases.items() if value in admits}


@functools.lru_cache(maxsize=4)
def name_groups(database: Database, domain: str) -> dict[str, list[dict]]:
    """{words that begin several names: those rows}: "golden wok" of its branches, "curry" of the curry king and the curry garden.
    Left out: articles and kinds, what is a whole name itself, more rows than a result shows, names that begin another."""
    names = {name_key(row["name"]): row for row in database.tables[domain]}
    groups: dict[str, list[dict]] = {}
    for prefix in {" ".join(name.split()[:k]) for name in names for k in range(1, len(name.split()))}:
        found = [name for name in names if name.startswith(prefix + " ")]
        branching = len({name.split()[len(prefix.split())] for name in found}) > 1
        nested = any(other.startswith(name + " ") for name in found for other in found)
        odd = prefix in names or prefix in ("the", "a", "la", "restaurant", "hotel", "museum")
        if branching and not nested and not odd and len(found) <= MAX_ROWS:
            groups[prefix] = [names[name] for name in found]
    return groups


def matching(database: Database, domain: str, wishes: dict) -> list[dict]:
    """The rows that meet wishes as a user says them."""
    return database.query(domain, {slot: normalise(slot, value) for slot, value in wishes.items()})


def plan_branch(domain: str, info: dict, book: dict, days: list, database: Database, rng: random.Random) -> Plan | None:
    """The user wants one venue, and says only what its name shares with others: golden wok (north?), the curry place."""
    if domain == "train":
        return None
    fits = [(prefix, row) for prefix, rows in sorted(name_groups(database, domain).items()) for row in rows
            if all(meets(row, slot, normalise(slot, value)) for slot, value in info.items())]
    if not fits or "name" in info and len({row["name"] for _, row in fits}) > 1:
        return None
    prefix, row = rng.choice(fits)
    rows = matching(database, domain, {"name": prefix})
    part = rng.choice(PART_OF_NAME).format(prefix) if " " not in prefix or rng.random() < 0.2 else prefix
    return Plan({"name": row["name"]}, book, about("branch", domain, "name", [r["name"] for r in rows], row["name"]),
                {"name": prefix}, instead={"name": part}, rivals=[r for r in rows if r is not row])


def plan_underspecified(domain: str, info: dict, book: dict, days: list, database: Database, rng: random.Random) -> Plan | None:
    """One wish is unsaid, and the rows that meet the others differ in it. Of trains: which one after that hour."""
    if domain == "train":
        rows = matching(database, domain, info)
        if not 2 <= len(rows) <= 10:
            return None
        row = rng.choice(rows)
        minutes = arrival(row)
        exact = {**info, "leaveAt": row["leaveAt"], "arriveBy": f"{minutes // 60:02d}:{minutes % 60:02d}"}
        return Plan(exact, book, about("underspecified", domain, "leaveAt", [r["leaveAt"] for r in rows], row["leaveAt"]),
                    info, rivals=[], anything=True)
    if "name" in info or len(info) < 2:
        return None  # without another wish there would be no evidence: a field not mentioned is no ambiguity
    for slot in rng.sample(("area", "pricerange", "food", "stars", "type"), 5):
        said = {s: v for s, v in info.items() if s != slot}
        rows = matching(database, domain, said) if slot in info else []
        values = list(dict.fromkeys(row[slot] for row in rows))
        if len(values) > 1 and info[slot] in values:
            return Plan(info, book, about("underspecified", domain, slot, values, info[slot]), said,
                        rivals=[row for row in rows if row[slot] != info[slot]], anything=True)
    return None


def plan_vague(domain: str, info: dict, book: dict, days: list, database: Database, rng: random.Random) -> Plan | None:
    """Words that admit several values of a booking slot; of a train's hour, where there is a train at each of them."""
    choices = [(slot, phrase, admits) for slot in BOOK_SLOTS[domain] if slot in book for phrase, admits in vague_phrases(slot, book[slot]).items()]
    slots = sorted({slot for slot, _, _ in choices})
    if domain == "train" and "leaveAt" in info:
        route = matching(database, domain, {s: v for s, v in info.items() if s not in ("leaveAt", "arriveBy")})
        at = {row["leaveAt"]: row for row in route}
        usual = [(phrase, admits) for phrase, admits in VAGUE["leaveAt"].items() if set(admits) <= set(at)]
        if usual and rng.random() < 0.6:
            phrase, admits = rng.choice(usual)
            row = at[rng.choice(admits)]
            exact = {**info, "leaveAt": row["leaveAt"], "arriveBy": row["arriveBy"]}
            return Plan(exact, book, about("vague", domain, "leaveAt", list(admits), row["leaveAt"]),
                        {s: v for s, v in exact.items() if s != "arriveBy"}, instead={"leaveAt": phrase})
    if not slots:
        return None
    slot = rng.choice(slots)
    _, phrase, admits = rng.choice([c for c in choices if c[0] == slot])
    return Plan(info, book, about("vague", domain, slot, list(admits), book[slot]), info, instead={slot: phrase})


def plan_reference(domain: str, info: dict, book: dict, days: list, database: Database, rng: random.Random) -> Plan | None:
    """"On the same day", after two days were mentioned: those of earlier parts and, where these are one, the day of arrival."""
    if domain not in SAME_DAY or not days or not book.get("day"):
        return None
    candidates, arrive = list(days), ""
    if len(days) < 2 or book["day"] not in days:
        other = book["day"] if book["day"] not in days else rng.choice([day for day in DAYS if day not in days])
        candidates, arrive = candidates + [other], rng.choice(ARRIVALS).format(other)
    return Plan(info, book, about("reference", domain, "day", candidates, book["day"]), info,
                instead={"day": rng.choice(SAME_DAY[domain])}, arrival=arrive)


def plan_contradiction(domain: str, info: dict, book: dict, days: list, database: Database, rng: random.Random) -> Plan | None:
    """Two statements that cannot both hold, about a booking slot; the user means one of them."""
    slots = [slot for slot in BOOK_SLOTS[domain] if slot in book and (slot, book[slot]) != ("people", "1")]
    if not slots:
        return None
    slot = rng.choice(slots)
    value = book[slot]
    if slot == "day":
        other = rng.choice([day for day in DAYS if day != value])
    elif slot == "time":
        minutes = to_minutes(value) + rng.choice((-60, -30, 30, 60))
        other = f"{minutes // 60:02d}:{minutes % 60:02d}"
    else:
        other = str(rng.choice([n for n in range(1 if slot == "stay" else 2, 9) if abs(n - int(value)) in (1, 2, 3)]))
    first, second = rng.sample((value, other), 2)
    extra, right = rng.choice(CONFLICTS[slot]).format(second), PUT_RIGHT[slot].format(value)
    return Plan(info, book, about("contradiction", domain, slot, [first, second], value), info, first={slot: first},
                extra=extra, plain_extra=right if first != value else "")


PLANNERS = {"branch": plan_branch, "underspecified": plan_underspecified, "vague": plan_vague, "reference": plan_reference,
            "contradiction": plan_contradiction}


def about(kind: str, domain: str, slot: str, candidates: list, value: str) -> dict:
    """The annotation of an ambiguity."""
    return {"kind": kind, "domain": domain, "slot": slot, "candidates": candidates, "value": value}


# ------------------------------------------------------------------------------------------------- a pair of scenarios

def slots_of(part: dict) -> tuple[dict, dict]:
    """(info, book without MultiWOZ's flags) of a part of a goal."""
    return dict(part["info"]), {s: v for s, v in part.get("book", {}).items() if not isinstance(v, bool)}


def make_pair(name: str, goal: dict, database: Database) -> tuple[Scenario, Scenario] | None:
    """(ambiguous scenario, clear twin) for a goal, a function of the arguments; None where nothing could be left open.

    One to three requests are ambiguous, each in one detail. Twins: "plain", the user says it (or that any will do); "db", for half
    of the dialogues that leave open only what the database decides: the same words, without the rows of the other candidates.
    """
    rng = random.Random(f"plan {name}")
    order = [domain for domain in ORDER if domain in goal and domain != "taxi"]
    rng.shuffle(order)
    order += ["taxi"] * ("taxi" in goal)
    targets = [domain for domain in order if domain in BOOK_SLOTS and goal[domain].get("book")]
    targets = set(rng.sample(targets, min(rng.choice(COUNTS), len(targets))))
    plans: dict[str, Plan] = {}
    days: list[str] = []  # that the user has stated before this part
    for domain in order:
        info, book = slots_of(goal[domain])
        if domain in targets:
            kinds = sorted(KIND_WEIGHTS, key=lambda kind: rng.random() ** (1 / KIND_WEIGHTS[kind]), reverse=True)
            known = [] if any(plan.ambiguity["slot"] == "day" or plan.arrival for plan in plans.values()) else list(dict.fromkeys(days))
            found = (PLANNERS[kind](domain, info, book, known, database, rng) for kind in kinds)
            if plan := next((plan for plan in found if plan), None):
                plans[domain] = plan
        if day := book.get("day") or (info.get("day") if domain == "train" else None):
            days.append(day)
    if not plans:
        return None
    database_decides = all(plan.rivals for plan in plans.values())
    db_twin = database_decides and rng.random() < 0.5
    anything = {domain for domain, plan in plans.items() if plan.anything and not db_twin and rng.random() < 0.4}
    annotations = [plans[domain].ambiguity for domain in order if domain in plans]
    arrivals = [plan.arrival for plan in plans.values() if plan.arrival]

    def build(clear: bool) -> Scenario:
        plain, wanted, requests, tables = clear and not db_twin, {}, [], dict(database.tables)
        for stage, domain in enumerate(order):
            words = random.Random(f"words {name} {stage}")  # one stream for both twins
            plan, (info, book) = plans.get(domain), slots_of(goal[domain])
            extra = arrivals if stage == 0 else []
            if plan is None:
                wanted[domain] = goal[domain]
                text = word_request(domain, info, book, words, any_is_fine="name" not in info and domain != "taxi", later=stage > 0,
                                    extra=" ".join(extra), rich=True)
            else:
                any_twin = plain and domain in anything
                info = plan.said if any_twin else plan.info
                wanted[domain] = {**goal[domain], "info": info, "book": {**goal[domain]["book"], **plan.book}}
                said, open_rows = (info if plain else plan.said), "name" not in info and len(matching(database, domain, info)) > 1
                fine = any_twin or open_rows and (plain or plan.ambiguity["kind"] not in ("branch", "underspecified"))
                text = word_request(domain, said, {**plan.book, **plan.first}, words, instead={} if plain else plan.instead, any_is_fine=fine,
                                    later=stage > 0, extra=" ".join(extra + [plan.plain_extra if plain else plan.extra]).strip(), rich=True)
                if clear and db_twin:
                    tables[domain] = [row for row in tables[domain] if row not in plan.rivals]
            requests.append((domain, text))
        if clear:
            return Scenario(f"{name}-clear", wanted, Database(tables) if db_twin else database, requests, None, name, "db" if db_twin else "plain")
        return Scenario(name, wanted, database, requests, annotations[0], f"{name}-clear", further=tuple(annotations[1:]))

    return build(False), build(True)


class Talker(ScriptedUser):
    """The scripted user with more words; where its answer still leaves several rows, it adds that any of these will do."""
    spoken = {slot: forms + more for slot, forms, more in (
        (slot, SPOKEN[slot], {"people": ("there are {} of us", "a party of {}"), "day": ("{}, that is", "it is {}", "this {}"), "time": ("{} sharp", "make that {}"),
                              "stay": ("we stay {} nights", "{} nights in all"), "area": ("somewhere in the {}", "{}", "the {} of town"),
                              "pricerange": ("something {}", "a {} one"), "food": ("{}, we love it", "some {} food"), "stars": ("{}", "one with {} stars"),
                              "leaveAt": ("the {} one", "the train at {}"), "type": ("{}",)}.get(slot, ())) for slot in SPOKEN)}
    answers = ScriptedUser.answers + ("{}, thanks.", "Oh, {}.", "That would be {}.", "Sorry, {}.", "{}. The rest stays as it is.", "{} would be best.",
                                      "{} is what I mean.", "Good question. {}.", "Let us say {}.", "{}, if that is possible.", "Well, {}, please.",
                                      "Right, {}.", "{}, as I see it.", "We had {} in mind.", "Did I not say? {}.", "My bad. {}, please.")

    def _answer(self, text: str) -> tuple[str, str]:
        said, outcome = super()._answer(text)
        said = re.sub(r"(?<=[.?] )[a-z]", lambda m: m[0].upper(), said)
        ambiguity = self.ambiguity
        if outcome == "continue" and ambiguity and ambiguity["slot"] in self.answered and ambiguity["kind"] == "underspecified":
            if len(matching(self.scenario.database, self.domain, self.wants["info"])) > 1:
                said += " " + self.rng.choice(RICH["any"])
        return said, outcome


# ------------------------------------------------------------------------------------------------- filters

def ngrams(text: str, n: int) -> set[tuple]:
    """The word n-grams of a text; one with fewer words is one n-gram as a whole.

    >>> sorted(ngrams("Which day, please?", 2)), ngrams("Which?", 2)
    ([('day', 'please'), ('which', 'day')], {('which',)})
    """
    words = re.findall(r"[\w:']+", text.lower())
    return {tuple(words[i:i + n]) for i in range(max(len(words) - n + 1, 1))}


def overlap(a: set, b: set) -> float:
    """Jaccard similarity of two sets of n-grams."""
    return len(a & b) / len(a | b)


def candidate_fails(scenario: Scenario, ambiguity: dict, candidate: str) -> bool:
    """Does the booking of an agent miss the goal that reads the open detail as `candidate`, and all else as the user means it?"""
    domain, slot = ambiguity["domain"], ambiguity["slot"]
    info, book = slots_of(scenario.goal[domain])
    if slot in book:
        book[slot] = candidate
    else:
        info[slot] = candidate
        if domain == "train":
            info.pop("arriveBy", None)
    rows = matching(scenario.database, domain, info)
    return not rows or not booking_satisfies(scenario.goal, {"domain": domain, "row": rows[0], **book})


def questions(dialogue: Dialogue) -> list[str]:
    """What the agent asked in well-formed clarify turns."""
    return [turn.clarify for _, _, turn in dialogue.steps if turn.clarify]


def clean(dialogue: Dialogue, asked: int) -> bool:
    """Success without a wrong booking or a correction, with so many questions."""
    outcome = score_dialogue(dialogue.scenario.goal, dialogue.session.ledger, dialogue.messages)
    return outcome == (True, 0) and dialogue.user.corrections == 0 and len(questions(dialogue)) == asked


OWN_WORDS = ("name", "food", "type", "departure", "destination")  # slots whose values no closed list holds


def skeleton(text: str, values: dict[str, str]) -> str:
    """A text with its values replaced by their slots, so that equal wordings are equal. `values`: what this user says, {value: slot}.

    >>> skeleton("A cheap table at red wok for 4 people on friday.", {"red wok": "name"})
    'a <price> table at <name> for <n> people on <day>.'
    """
    own = "|".join(re.escape(value) for value in sorted(values, key=len, reverse=True))
    text = re.sub(rf"\b(?:{own})\b", lambda m: f"<{values[m[0]]}>", text.lower()) if own else text.lower()
    return _CLOSED.sub(lambda m: f"<{m.lastgroup}>", text)


_CLOSED = re.compile("|".join(rf"(?P<{slot}>(?<![<\w])(?:{pattern})(?![>\w]))" for slot, pattern in {
    "vague": "|".join([p for table in (VAGUE, MORE_VAGUE) for phrases in table.values() for p in phrases]
                      + [rf"(?:{'|'.join(ABOUT)}) (?:half past )?(?:{'|'.join(HOURS)}) in the (?:morning|afternoon|evening)"]),
    "time": r"\d\d:\d\d", "day": "|".join(DAYS), "price": "|".join(PRICES), "area": "|".join(AREAS), "food": "|".join(FOODS), "n": r"\d+"}.items()))


# ------------------------------------------------------------------------------------------------- one attempt

def sft_rows(dialogue: Dialogue) -> list[dict]:
    """One row an agent turn: the visible history, which holds no think, and the turn with its own."""
    return [{"id": f"{dialogue.scenario.id}#{k}", "prompt": dialogue.messages[:length], "completion": [{"role": "assistant", "content": text}]}
            for k, (length, text, _) in enumerate(dialogue.steps)]


class Played(NamedTuple):
    """What an attempt came to, before it is written down: the dialogue that asks, its clear twin, and the one that guesses."""
    name: str
    goal_id: str
    dialogue: Dialogue
    twin: Dialogue
    careless: Dialogue
    writer: str = "rules"

    @property
    def failed(self) -> bool:
        """Does the guess miss the goal? Only then do `dialogue` and `careless` make a pair."""
        return score_dialogue(self.careless.scenario.goal, self.careless.session.ledger, self.careless.messages)[0] is False


def oracles(name: str, ambiguous: Scenario) -> tuple[Oracle, Oracle, Oracle]:
    """Fresh agents for the three dialogues of an attempt."""
    return (Oracle(ambiguous.ambiguity, name, 1.0, ambiguous.further, rich=True), Oracle(seed=name, rich=True),
            Oracle(ambiguous.ambiguity, name, 0.0, ambiguous.further, rich=True))


def repeated(asked: list[str]) -> bool:
    """Does one question of a dialogue repeat an earlier one?"""
    return any(overlap(ngrams(a, 2), ngrams(b, 2)) >= REPEATED for k, a in enumerate(asked) for b in asked[:k])


def attempt(number: int, seed: int, tasks: list | None) -> Played | dict:
    """One attempt, played; or {"dropped": the filter that caught it}."""
    if tasks is None:
        town = (250_000 * seed + number) % SPLITS["valid"]
        goal_id, (goal, database) = f"town-{town}", town_goal(town)
    else:
        goal_id, goal, database = tasks[number % len(tasks)]
    name = f"speaker-{seed}-{number:06d}"
    pair = make_pair(name, goal, database)
    if pair is None:
        return {"dropped": DROPPED[0]}
    ambiguous, clear = pair
    if not all(any(candidate_fails(ambiguous, a, c) for c in a["candidates"]) for a in ambiguous.ambiguities):
        return {"dropped": DROPPED[1]}
    asks, acts, guesses = oracles(name, ambiguous)
    dialogue = play(ambiguous, asks, user=Talker)
    if not clean(dialogue, len(ambiguous.ambiguities)):
        return {"dropped": DROPPED[2]}
    if repeated(questions(dialogue)):
        return {"dropped": DROPPED[3]}
    twin = play(clear, acts, user=Talker)
    if not clean(twin, 0):
        return {"dropped": DROPPED[4]}
    return Played(name, goal_id, dialogue, twin, play(ambiguous, guesses, max_corrections=0, user=Talker))


def own_values(ambiguous: Scenario) -> dict[str, str]:
    """{value: slot} of the slots that no closed list holds, as far as the user may say them."""
    values = {v.lower(): s for part in ambiguous.goal.values() if isinstance(part, dict) for s, v in part["info"].items() if s in OWN_WORDS}
    values |= {c: a["slot"] for a in ambiguous.ambiguities for c in a["candidates"] if a["slot"] in OWN_WORDS}
    return values | {v: s for domain, text in ambiguous.requests for s, v in read_request(text, domain).items() if s in OWN_WORDS}


def described(played: Played) -> dict:
    """Everything that is written and counted of a kept dialogue."""
    name, goal_id, dialogue, twin, careless, writer = played
    ambiguous, clear, failed, asked = dialogue.scenario, twin.scenario, played.failed, questions(dialogue)
    database = ambiguous.database
    start = next(length for length, _, turn in dialogue.steps if turn.clarify)
    assert careless.messages[:start] == dialogue.messages[:start] or not failed, name
    points, twin_points = points_of(dialogue), points_of(twin, ambiguous.ambiguities)
    other = [p for p in points + twin_points if p["stage"] == "other"]
    kept_points = [p for p in points + twin_points if p["stage"] != "other"] + [random.Random(f"other {name}").choice(other)]
    kept_points = [{**p, "goal_id": goal_id} for p in kept_points]
    record = lambda d, **more: {"id": d.scenario.id, "goal_id": goal_id, "goal": {k: v for k, v in d.scenario.goal.items() if k != "message"},
                                "ambiguities": d.scenario.ambiguities, "twin_id": d.scenario.twin_id, "twin_kind": d.scenario.twin_kind, **more,
                                "messages": with_thinks(d)}
    removed = {domain: [row["name"] for row in rows if row not in clear.database.tables[domain]] for domain, rows in database.tables.items()
               if len(rows) > len(clear.database.tables[domain])}
    files = {"dialogues.jsonl": [record(dialogue)], "twins.jsonl": [record(twin, removed=removed)], "points.jsonl": kept_points,
             "sft.jsonl": sft_rows(dialogue), "sft_twins.jsonl": sft_rows(twin),
             "dpo.jsonl": [{"id": name, "prompt": dialogue.messages[:start], "chosen": with_thinks(dialogue)[start:],
                            "rejected": with_thinks(careless)[start:]}] * failed}

    values = own_values(ambiguous)
    said = [m["content"] for m in dialogue.messages if m["role"] == "user"]
    answers = [dialogue.messages[length + 1]["content"] for length, _, turn in dialogue.steps if turn.clarify]
    visible = " | ".join(said + asked)
    domains = [domain for domain, _ in ambiguous.requests]
    return {"goal_id": goal_id, "files": {file: "".join(json.dumps(row) + "\n" for row in rows) for file, rows in files.items()},
            "grams": {hash_of(" ".join(gram)) for gram in ngrams(visible, 3)}, "skeleton": hash_of(skeleton(visible, values)),
            "first": skeleton(said[0], values), "answers": answers, "questions": asked, "said": said, "pair": failed,
            "marks": [(a["kind"], domains.index(a["domain"]) + 1, a["domain"], a["slot"]) for a in ambiguous.ambiguities],
            "twin_kind": clear.twin_kind, "turns": dialogue.turns, "writer": writer}


def hash_of(text: str) -> int:
    """64 bits that are the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


# ------------------------------------------------------------------------------------------------- a language model writes

WRITER_PROMPT = """\
You make planned dialogues sound like people. A user books restaurants, hotels, trains and taxis with an assistant. Given are the texts that
were said in up to three variants of one dialogue, who says each, and in which order each variant says them (by number, from 0). Write every
text anew, in other words and other sentences, as that speaker would say it there. A text may stand in several variants and must fit all of them.

The texts are read again by a program, and the whole dialogue is thrown away where what it reads has changed:
- The meaning stays. Nothing is added, left out, made more exact or less exact; what is vague or contradictory stays so.
- Everything in `keep` stands in the new text letter by letter, digits as digits. No other name, number, day, time, price, area or food does.
- A user's request still asks for it in one of these forms: "a table at NAME", "eat at NAME", "a room at NAME", "stay at NAME", "visit NAME", each
  with a comma or a full stop right behind the name; "a cheap thai restaurant in the north", "a 4 star hotel with parking", "a place to stay",
  "a guesthouse"; "a train from A to B", "a taxi from A to B"; with a verb such as need, book, find, get, looking for, want to, would like to.
  People and nights are said as "for 4 people", "4 of us", "party of 4", "4 nights"; trains as "leaving after TIME", "arriving by TIME".
- Where any place will do, one of these stays: "any of them", "I don't mind", "whichever", "any will do", "any one", "no preference".
- An answer of the user opens no new request: it holds none of those forms.
- A question of the assistant stays one question, asks for that detail alone, and names the same choices in the same order.
- The assistant's report of a booking states all that the planned one states."""
TEXTS = {"type": "object", "additionalProperties": False, "required": ["texts"],
         "properties": {"texts": {"type": "array", "items": {"type": "string"}}}}
FIXED = [phrase for phrases in SAME_DAY.values() for phrase in phrases]


def rewritten(some: list, complete) -> list[dict]:
    """What is to be written and counted of attempts, in their order, when a language model has written their words anew.

    One request an attempt: the texts of its dialogue, its twin and the guessing one together, each text once, so that what is the same
    in them stays the same (a database twin's request; all that stands before the first question). Every dialogue is then played again by the
    same user and the same oracle, who hear and read the new words; where anything goes another way than planned, it is dropped."""
    replies = iter(complete([request_for(one) for one in some if isinstance(one, Played)]))
    made = [retold(one, next(replies)) if isinstance(one, Played) else one for one in some]
    return [one if isinstance(one, dict) else described(one) for one in made]


def texts_of(plan: Played) -> dict[str, str]:
    """{text: who says it} of all that is visible in the dialogues of an attempt, each text once."""
    return {m["content"]: m["role"] for d in variants(plan) for m in d.messages if m["role"] != "tool" and not m["content"].startswith("<tool_call>")}


def variants(plan: Played) -> list[Dialogue]:
    """The dialogues of an attempt that are written down."""
    return [plan.dialogue, plan.twin] + [plan.careless] * plan.failed


def request_for(plan: Played) -> Request:
    """What a language model is asked: all texts of an attempt, with what has to stay in each."""
    texts, values = texts_of(plan), spoken_values(plan)
    numbers = {text: k for k, text in enumerate(texts)}
    asked = {"texts": [{"who": who, "text": text, "keep": kept(text, values)} for text, who in texts.items()],
             "variants": [[numbers[m["content"]] for m in d.messages if m["content"] in numbers] for d in variants(plan)]}
    user = (f"{data_block('dialogue', asked)}\n\nWrite the {len(texts)} texts anew by the rules. Answer with one JSON object: \"texts\", a list of "
            f"{len(texts)} strings in the order of the given ones.")
    return Request([{"role": "system", "content": WRITER_PROMPT}, {"role": "user", "content": user}], 8192, TEXTS,
                   functools.partial(read_texts, count=len(texts)))


def read_texts(text: str, count: int) -> list[str]:
    """The answer of a writer, strictly. Raises ValueError with what is wrong."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("too deep") from None
    texts = found.get("texts") if isinstance(found, dict) else None
    if not isinstance(texts, list) or len(texts) != count or not all(isinstance(t, str) and t.strip() for t in texts):
        raise ValueError(f"no {count} texts")
    return [" ".join(t.split()) for t in texts]


def spoken_values(plan: Played) -> set[str]:
    """All that a text of the attempt may name and no closed list holds: names, places, references."""
    values = set(own_values(plan.dialogue.scenario))
    for d in variants(plan):
        results = [json.loads(m["content"]) for m in d.messages if m["role"] == "tool"]
        rows = [row for result in results for row in [result, *result.get("rows", [])]]
        values |= {str(row[slot]).lower() for row in rows for slot in (*OWN_WORDS, "reference", "car") if slot in row}
    return values


def kept(text: str, values: set[str]) -> list[str]:
    """What of a text must stand in any other wording of it: its values, vague phrases, references to a day, arrivals.

    >>> kept("A table at red wok for a few of us, on the same day. We arrive in town on friday. Make it cheap.", {"red wok"})
    ['We arrive in town on friday.', 'cheap', 'for a few of us', 'on the same day', 'red wok']
    """
    found, rest = set(), text

    def take_out(m):
        found.add(text[m.start():m.end()])
        return "|" * len(m[0])

    arrivals = "|".join(re.escape(sentence).replace(r"\{\}", r"\w+") for sentence in ARRIVALS)
    own = "|".join(re.escape(value) for value in sorted([*values, *FIXED], key=len, reverse=True))
    numbers = rf"\b(?:{'|'.join(NUMBERS)})\b"  # "three of us" would make "a few of us" exact, unseen by the reader
    for pattern in (arrivals, rf"(?<!\w)(?:{own})(?!\w)", _CLOSED.pattern, numbers):  # what one has found, the next does not see
        rest = re.sub(pattern, take_out, rest, flags=re.I)
    return sorted(found)


def retold(plan: Played, reply: Reply) -> Played | dict:
    """The attempt in the words of a reply, or {"dropped": why}, if they say anything else than the planned ones."""
    if reply.text is None:
        return {"dropped": f"the writer gave no answer: {reply.reason.split(':')[0]}"}
    texts, values = texts_of(plan), spoken_values(plan)
    words = dict(zip(texts, read_texts(reply.text, len(texts))))
    for text, new in words.items():
        if {value.lower() for value in kept(text, values)} != {value.lower() for value in kept(new, values)}:
            return {"dropped": UNFAITHFUL[0]}
    for text, who in texts.items():
        if who == "user" and reading(text) != reading(words[text]):
            return {"dropped": UNFAITHFUL[1]}
    told = [told_again(d, oracle, words) for d, oracle in zip(variants(plan), oracles(plan.name, plan.dialogue.scenario))]
    if None in told:
        return {"dropped": UNFAITHFUL[3]}
    for length, _, turn in plan.dialogue.steps:
        if turn.clarify:
            ambiguity = next(a for a in plan.dialogue.scenario.ambiguities if clarify_due(plan.dialogue.messages[:length], a))
            before, after = (judge_question(told[0].messages[:length], question, ambiguity).scores for question in (turn.clarify, words[turn.clarify]))
            if any(after[name] < before[name] for name in ("relevance", "precision_clarity", "specificity")):
                return {"dropped": UNFAITHFUL[2]}
    if repeated(questions(told[0])):
        return {"dropped": DROPPED[3]}
    return Played(plan.name, plan.goal_id, *told, *[plan.careless] * (len(told) < 3), reply.model)


def reading(text: str) -> tuple:
    """What the oracle understands of a user's words by themselves."""
    domain = request_domain(text)
    return domain, read_request(text, domain) if domain else None, bool(ANY_PATTERN.search(text))


def told_again(plan: Dialogue, oracle: Oracle, words: dict[str, str]) -> Dialogue | None:
    """The dialogue in the new words, played again: the user hears what the agent says now, the oracle reads what the user says now. None
    unless each of them does what was planned, step by step: the same tool calls with the same results, the same answers."""
    class Says(Talker):
        def __call__(self, text):
            said, outcome = super().__call__(text)
            return words.get(said, said), outcome

    planned = iter(plan.steps)

    def agent(history):
        turn, (_, _, plan_turn) = parse_turn(oracle(history)), next(planned, (0, "", None))
        if plan_turn is None or turn.tool_call != plan_turn.tool_call or bool(turn.clarify) != bool(plan_turn.clarify):
            return None  # ends the dialogue: context_full
        if turn.tool_call:
            return f"<think>{turn.think}</think><tool_call>{json.dumps(turn.tool_call)}</tool_call>"
        said = words[plan_turn.clarify or plan_turn.reply]
        return f"<think>{turn.think}</think>" + (f"<clarify>{said}</clarify>" if turn.clarify else said)

    told = play(plan.scenario, agent, 0, plan.user.max_corrections, Says)
    expected = [{**m, "content": words.get(m["content"], m["content"])} for m in plan.messages]
    same = (told.messages, told.ended, told.user.corrections) == (expected, plan.ended, plan.user.corrections)
    outcome = lambda d: score_dialogue(d.scenario.goal, d.session.ledger, d.messages)
    return told if same and outcome(told) == outcome(plan) else None


def attempts(limit: int, seed: int, multiwoz: str):
    """The attempts one by one, in this process."""
    tasks = goals_of(multiwoz)
    return (attempt(number, seed, tasks) for number in range(limit))


def take(some, count: int):
    """The next attempts, up to the one that makes `count` of them played ones."""
    while count > 0 and (one := next(some, None)) is not None:
        count -= isinstance(one, Played)
        yield one


def planned_requests(n: int, seed: int = 0, multiwoz: str = ""):
    """(request, the answer if no word were changed) of the first n dialogues that a language model would be asked for."""
    for one in take(attempts(20 * n + 100, seed, multiwoz), n):
        if isinstance(one, Played):
            yield request_for(one), json.dumps({"texts": list(texts_of(one))})


# ------------------------------------------------------------------------------------------------- the data set

def _start(seed: int, multiwoz: str) -> None:
    """Set up a worker: Ctrl-C is the parent's to handle; MultiWOZ is read once."""
    global _attempt
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _attempt = functools.partial(attempt, seed=seed, tasks=goals_of(multiwoz))


def goals_of(multiwoz: str) -> list | None:
    """The training goals of a MultiWOZ folder; None: towns, each made when its turn comes."""
    return [(s.id, s.goal, s.database) for s in scenarios(multiwoz, "train") if bookable(s.goal)] if multiwoz else None


def _attempts(numbers: range) -> list[dict]:
    return [one if isinstance(one, dict) else described(one) for one in map(_attempt, numbers)]


def build(out: str | Path, n: int, seed: int = 0, multiwoz: str = "", processes: int | None = None, progress=lambda kept: None,
          complete=None) -> dict:
    """Write n ambiguous dialogues and what belongs to them into the folder `out`; returns the statistics.

    The same bytes for the same (n, seed, goals), whatever the number of processes: attempts are numbered, and taken in order.
    Files are written beside and renamed, one after the other, when all are complete; an interruption before leaves the old ones. Fewer
    than n are written if 20 n attempts do not suffice. Raises DataError for a folder that is no MultiWOZ, BlockingIOError if another
    process is building in `out`.
    `complete(requests) -> replies`: a language model that writes the words anew (`rewritten`), 256 dialogues at a time and no more
    than are still wanted; then all runs in this process, and the bytes are the same for the same replies.
    """
    out, limit = Path(out), 20 * n + 100
    human = human_turns(multiwoz) if multiwoz else []
    if multiwoz:
        scenarios(multiwoz, "train")  # here and now, so that a wrong folder is refused in this process
    out.mkdir(parents=True, exist_ok=True)
    lock = os.open(out, os.O_RDONLY)
    part = out / ".part"
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
    except OSError:
        os.close(lock)
        raise
    tally, by_goal, wordings = Tally(), {}, set()
    pool = None if complete else multiprocessing.Pool(processes, _start, (seed, multiwoz))

    def written():
        one_by_one = attempts(limit, seed, multiwoz)
        while some := list(take(one_by_one, min(256, n - tally.kept))):
            yield rewritten(some, complete)

    files = {name: open(part / name, "w", encoding="utf-8") for name in FILES}
    try:
        chunks = (range(k, min(k + 50, limit)) for k in range(0, limit, 50))
        for made in pool.imap(_attempts, chunks) if pool else written():
            for one in made:
                if tally.kept == n:
                    break
                if "dropped" not in one:
                    relatives = by_goal.setdefault(one["goal_id"], []) if multiwoz else []  # each town has one dialogue
                    if one["skeleton"] in wordings:
                        one = {"dropped": DROPPED[5]}
                    elif any(overlap(one["grams"], grams) >= NEAR for grams in relatives):
                        one = {"dropped": DROPPED[6]}
                    else:
                        wordings.add(one["skeleton"])
                        relatives.append(one["grams"])
                        for name, file in files.items():
                            file.write(one["files"][name])
                tally.add(one)
            progress(tally.kept)
            if tally.kept == n:
                break
        statistics = tally.statistics(human)
        (part / "statistics.json").write_text(json.dumps(statistics, indent=1) + "\n", encoding="utf-8")
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
        for name in (*FILES, "statistics.json"):
            os.replace(part / name, out / name)
    finally:
        if pool:
            pool.terminate()
        for file in files.values():
            file.close()
        shutil.rmtree(part, ignore_errors=True)
        os.close(lock)
    return statistics


class Tally:
    """Counts over the attempts."""

    def __init__(self):
        self.kept, self.turns = 0, 0
        self.counts = {name: Counter() for name in ("dropped", "kind", "stage", "domain", "slot", "twin", "writer", "ambiguities in a dialogue", "first")}
        self.pairs = Counter()
        self.texts: dict[str, list[str]] = {"first requests": [], "answers": [], "questions": [], "user turns": []}

    def add(self, one: dict) -> None:
        if "dropped" in one:
            self.counts["dropped"][one["dropped"]] += 1
            return
        self.kept, self.turns = self.kept + 1, self.turns + one["turns"]
        for kind, stage, domain, slot in one["marks"]:
            for name, value in (("kind", kind), ("stage", str(stage)), ("domain", domain), ("slot", slot)):
                self.counts[name][value] += 1
        self.counts["twin"][one["twin_kind"]] += 1
        self.counts["writer"][one["writer"]] += 1
        self.counts["ambiguities in a dialogue"][str(len(one["marks"]))] += 1
        self.counts["first"][one["first"]] += 1
        self.pairs["kept" if one["pair"] else "rejected side succeeded by luck"] += 1
        for name, texts in (("first requests", one["said"][:1]), ("answers", one["answers"]), ("questions", one["questions"]),
                            ("user turns", one["said"])):
            self.texts[name] += texts

    def statistics(self, human: list[list[str]]) -> dict:
        """`human`: the user turns of real dialogues, to compare with."""
        shares = {name: {value: round(count / sum(counter.values()), 4) for value, count in sorted(counter.items())}
                  for name, counter in self.counts.items() if name not in ("dropped", "first")}
        texts = {**self.texts, "human first turns": [turns[0] for turns in human], "human user turns": [t for turns in human for t in turns]}
        first = self.counts["first"].most_common(1)
        return {"dialogues": self.kept, "attempts": self.kept + sum(self.counts["dropped"].values()),
                "dropped": {**dict.fromkeys(DROPPED, 0), **self.counts["dropped"]},
                "dpo pairs": self.pairs["kept"], "rejected side succeeded by luck": round(self.pairs["rejected side succeeded by luck"] / max(self.kept, 1), 4),
                "turns a dialogue": round(self.turns / max(self.kept, 1), 2), "shares": shares,
                "first-request skeletons": len(self.counts["first"]), "commonest skeleton": round(first[0][1] / self.kept, 5) if first else None,
                "wording": {name: wording(found) for name, found in texts.items() if found}}


def wording(texts: list[str]) -> dict:
    """Length in words, and distinct-1, -2, -3 (different word n-grams over all) of the first 1 000 texts: it falls with the number."""
    words = [re.findall(r"[\w:']+", text.lower()) for text in texts]
    lengths, some = sorted(map(len, words)), words[:1000]
    grams = lambda n: [tuple(w[k:k + n]) for w in some for k in range(len(w) - n + 1)]
    distinct = {f"distinct-{n}": round(len(set(found)) / max(len(found), 1), 4) for n in (1, 2, 3) for found in [grams(n)]}
    at = lambda share: lengths[int(share * (len(lengths) - 1))]
    return {"texts": len(texts), "mean words": round(sum(lengths) / len(lengths), 1), "words at 10, 50, 90 %": [at(0.1), at(0.5), at(0.9)], **distinct}


def report(statistics: dict) -> str:
    """The statistics for the screen."""
    s = statistics
    lines = [f"{s['dialogues']} dialogues of {s['attempts']} attempts; dropped: " + ", ".join(f"{v} {k}" for k, v in s["dropped"].items()),
             f"{s['dpo pairs']} pairs for DPO; {s['rejected side succeeded by luck']:.1%} left out: the rejected side succeeded by luck",
             f"{s['first-request skeletons']} skeletons of first requests, the commonest {s['commonest skeleton'] or 0:.3%}; "
             f"{s['turns a dialogue']} turns a dialogue"]
    lines += [f"{name}: " + ", ".join(f"{value} {share:.1%}" for value, share in shares.items()) for name, shares in s["shares"].items()]
    for name, w in s["wording"].items():
        low, middle, high = w["words at 10, 50, 90 %"]
        lines.append(f"{name:<18}{w['texts']:>7} texts, {w['mean words']:>5} words ({low}, {middle}, {high} at 10, 50, 90 %), "
                     f"distinct-1/2/3 {w['distinct-1']:.3f} {w['distinct-2']:.3f} {w['distinct-3']:.3f}")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------- for reading

def readable(record: dict) -> str:
    """A dialogue of dialogues.jsonl as text: what the user sees, and indented what it does not (thinks, tool calls, results)."""
    text = [f"{record['id']} ({record['goal_id']})"]
    text += [f"    open: {a['kind']}, {a['domain']} {a['slot']}: {', '.join(a['candidates'])}; meant: {a['value']}" for a in record["ambiguities"]]
    for m in record["messages"]:
        turn = parse_turn(m["content"]) if m["role"] == "assistant" else None
        if turn:
            text += [f"    think: {turn.think}", f"    {json.dumps(turn.tool_call)}" if turn.tool_call else
                     f" asks: {turn.clarify}" if turn.clarify else f"agent: {turn.reply}"]
        else:
            text.append(f" user: {m['content']}" if m["role"] == "user" else f"    {m['content'][:200]}{' ...' * (len(m['content']) > 200)}")
    return "\n".join(text) + "\n"


if __name__ == "__main__":  # python -m data.build: the sample for reading
    with tempfile.TemporaryDirectory() as folder:
        build(folder, 200)
        rows = (Path(folder) / "dialogues.jsonl").read_text(encoding="utf-8").splitlines()
    Path(__file__).with_name("sample.txt").write_text("\n".join(readable(json.loads(row)) for row in rows), encoding="utf-8")
