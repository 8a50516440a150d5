"""SpeakER: when a question is due, the scripted oracle that asks it, and the decision points that GRPO trains on.

The oracle sees only what an agent sees (the visible history; plus, to know when to ask, the annotation without its value).
It reads users with `towns.read_request`, so it plays generated towns and real MultiWOZ goals alike.

The full SpeakER data set, its filters and SpeakER-DPO are made from these pieces in build.py.
"""
from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass, field

from env import (ASKS, BOOK_SLOTS, DAYS, FIELDS, VENUES, Dialogue, Scenario, ScriptedUser, meets, named, run_dialogues, start_dialogue)
from data.towns import ANY_PATTERN, read_request, request_domain

# ------------------------------------------------------------------------------------------------- when a question is due


def clarify_due(history: list[dict], ambiguity: dict | None) -> bool:
    """Is a question due now? A function of what the policy sees and of the annotation (its `value` is not read).

    Due from the moment on when at least two candidates are visible (vague words, references and contradictions: at once; names
    and wishes: when the latest result shows two or more) until the user names one, says that any will do, or it is booked.
    """
    if ambiguity is None:
        return False
    domain, candidates = ambiguity["domain"], ambiguity["candidates"]
    start = next((i for i, m in enumerate(history) if m["role"] == "user" and request_domain(m["content"]) == domain), None)
    if start is None:
        return False
    database_slot = ambiguity["kind"] in ("branch", "underspecified")
    rows: list[dict] = []
    for i, m in enumerate(history[start:], start):
        if m["role"] == "user":
            if closes(m["content"], history[i - 1]["content"], candidates) if i > start else stated(m["content"], ambiguity):
                return False
        elif m["role"] == "tool":
            result = json.loads(m["content"])
            if "reference" in result:
                return False
            rows = result.get("rows", rows)
    return not database_slot or len({row.get(ambiguity["slot"]) for row in rows} & set(candidates)) > 1


def stated(request: str, ambiguity: dict) -> bool:
    """Does the request itself settle the slot? A bare name, a train's earliest hour and vague words do not."""
    slot, said = ambiguity["slot"], read_request(request, ambiguity["domain"])
    if ambiguity["kind"] not in ("branch", "underspecified"):
        return False
    if slot == "name":
        return said.get("name") in ambiguity["candidates"]
    return bool(ANY_PATTERN.search(request)) or (slot in said and slot != "leaveAt")


def closes(answer: str, question: str, candidates: list[str]) -> bool:
    """Does the user's answer leave one reading: names exactly one candidate, confirms the one in the question, or any will do?"""
    return bool(ANY_PATTERN.search(answer)) or len(named(answer, candidates)) == 1 or (
        answer.lower().startswith("yes") and len(named(question, candidates)) == 1)


# ------------------------------------------------------------------------------------------------- what an agent can know

@dataclass
class Belief:
    """What the visible history says about the request in play."""
    domain: str = ""
    said: dict[str, str] = field(default_factory=dict)  # slots, as stated by the user
    vague: str = ""                                     # the request's own words
    rows: list[dict] | None = None                      # of the latest query
    total: int = 0
    any_will_do: bool = False                           # the user said so
    asked_with: dict | None = None                      # arguments of the latest query
    result: dict | None = None                          # of the latest tool call, if it is the last message
    booked: dict | None = None                          # result of the latest booking
    booked_with: dict = field(default_factory=dict)     # and its arguments


def read_history(history: list[dict], ambiguities: list[dict] = ()) -> Belief:
    """Follow the dialogue message by message; a new request starts a new belief. An answer is understood by the rows that the
    latest result shows, and by the candidates of `ambiguities`, for a result shows five rows at most."""
    belief = Belief()
    for i, m in enumerate(history):
        belief.result = None
        if m["role"] == "user":
            domain = request_domain(m["content"])
            if domain:
                belief = Belief(domain, read_request(m["content"], domain), m["content"])
            else:
                _read_answer(belief, m["content"], history[i - 1]["content"], ambiguities)
            belief.any_will_do |= bool(ANY_PATTERN.search(m["content"]))
        elif m["role"] == "tool":
            belief.result = json.loads(m["content"])
            if "rows" in belief.result:
                belief.rows, belief.total = belief.result["rows"], belief.result["total"]
            elif "error" not in belief.result:
                belief.booked = belief.result
        elif m["content"].startswith("<tool_call>"):
            call = json.loads(m["content"][len("<tool_call>"):-len("</tool_call>")])
            if call["name"].startswith("query_"):
                belief.asked_with = call["arguments"]
            else:
                belief.booked_with = call["arguments"]
    return belief


def _read_answer(belief: Belief, answer: str, question: str, ambiguities: list[dict]) -> None:
    low, rows = answer.lower(), belief.rows or []
    text = question if low.startswith("yes") else low
    venues = named(text, [row["name"] for row in rows if "name" in row])
    if len(venues) == 1:
        belief.said["name"] = venues[0]
    else:
        for slot in FIELDS.get(belief.domain, ()):
            known = [c for a in ambiguities if (a["domain"], a["slot"]) == (belief.domain, slot) for c in a["candidates"]]
            values = [v for v in dict.fromkeys([row.get(slot) for row in rows] + known) if v and slot not in ("name", "day", "arriveBy", "internet", "parking")]
            if len(values) > 1 and len(found := named(text, values)) == 1:
                belief.said.pop("name", None)
                belief.said[slot] = found[0]
    if day := re.findall(rf"\b({'|'.join(DAYS)})\b", low):
        belief.said["day"] = day[-1]
    if time := re.findall(r"\b\d\d:\d\d\b", low):
        belief.said["leaveAt" if belief.domain == "train" else "time"] = time[-1]
    elif number := re.findall(r"\b(\d+)(?: (nights?|stars?|people|of us))?\b", low):
        value, unit = number[-1]
        asked = next((s for s in ("stay", "stars", "people") if re.search(ASKS[s], question.lower())), "people")
        belief.said[{"n": "stay", "s": "stars", "p": "people", "o": "people"}.get(unit[:1], asked)] = value
    belief.booked = None


# ------------------------------------------------------------------------------------------------- the oracle

class Oracle:
    """A scripted agent: `oracle(history) -> text` of one well-formed turn. Asks the annotated question when it is due and
    acts on the answer. `ask` is the probability of asking when due (1 = the oracle, 0 = the careless agent, which then
    guesses one of the candidates). `further`: the ambiguities of other requests, at most one a domain; `self.ambiguity` is
    that of the request in play. `rich`: questions in many more words."""

    def __init__(self, ambiguity: dict | None = None, seed: str = "", ask: float = 1.0, further: tuple = (), rich: bool = False):
        self.ambiguity, self.ask, self.rng, self.rich = ambiguity, ask, random.Random(f"oracle {seed}"), rich
        self.ambiguities = [ambiguity, *further] if ambiguity else []

    def __call__(self, history: list[dict]) -> str:
        think, action = self.act(history)
        return f"<think>{think}</think>{action}"

    def act(self, history: list[dict]) -> tuple[str, str]:
        """(think, action text) of the next turn."""
        belief = read_history(history, self.ambiguities)
        self.ambiguity = next((a for a in self.ambiguities if a["domain"] == belief.domain), None)
        due = clarify_due(history, self.ambiguity)
        asks = due and self.rng.random() < self.ask
        if asks:
            word = word_rich_question if self.rich else word_question
            return (word_think("ask", belief, self.ambiguity, 2, self.rng),
                    f"<clarify>{word(self.ambiguity, belief, self.rng.choice((2, 3, 3)), self.rng)}</clarify>")
        kind, action = self.decide(belief)
        return word_think(kind, belief, self.ambiguity if due else None, self.rng.choice((0, 1, 2)), self.rng), action

    def decide(self, belief: Belief) -> tuple[str, str]:
        """(kind of step, action text) without asking."""
        rng, domain, said = self.rng, belief.domain, belief.said
        if belief.booked:
            return "report", word_report(belief, rng)
        if domain == "taxi":
            return "book", call("book_taxi", {s: said[s] for s in ("departure", "destination", "leaveAt", "arriveBy") if s in said})
        wishes = {s: said[s] for s in FIELDS[domain] if s in said}
        rows = [row for row in belief.rows or [] if all(meets(row, s, v) for s, v in wishes.items())]
        exact = [row for row in rows if row.get("name") == said.get("name") and "name" in said]
        if belief.rows is None or (wishes != belief.asked_with and not exact):  # an answer gave one wish more: look again
            return "query", call(f"query_{domain}", wishes)
        if not rows:
            return "none", "I am sorry, I found nothing that matches."
        row = (exact or rows)[0]
        if self.ambiguity and domain == self.ambiguity["domain"] and not exact and domain in VENUES:
            row = rng.choice(rows)
        if domain not in BOOK_SLOTS or not (set(BOOK_SLOTS[domain]) & set(said) or re.search(r"\bbook\b", belief.vague, re.I)):
            return "report", word_found(domain, row, rng)
        slots = {s: said.get(s) or self.guess(s) for s in BOOK_SLOTS[domain]}
        if domain == "train":
            return "book", call("book_train", {**{s: row[s] for s in ("departure", "destination", "day", "leaveAt")}, **slots})
        return "book", call(f"book_{domain}", {"name": row["name"], **slots})

    def guess(self, slot: str) -> str:
        """A value for a booking slot that the user left open: one of the candidates, or the least there can be."""
        if self.ambiguity and self.ambiguity["slot"] == slot:
            return self.rng.choice(self.ambiguity["candidates"])
        return {"people": "1", "stay": "1", "day": "monday", "time": "18:00"}[slot]


def call(name: str, arguments: dict) -> str:
    """The text of a tool call."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


# ------------------------------------------------------------------------------------------------- wording

BARE = ("Which one?", "Which one would you like?", "Which one do you mean?", "Could you be more precise?")
SLOT_QUESTIONS = {"name": ("Which branch?", "Which branch do you mean?", "Which branch would you like?"),
                  "area": ("Which area?", "Which area would you like?", "In which part of town?"),
                  "pricerange": ("Which price range?", "Which price range would you like?"),
                  "food": ("Which food?", "What kind of food would you like?"),
                  "type": ("Which type?", "What type of place?"), "stars": ("How many stars?", "How many stars should it have?"),
                  "people": ("How many people?", "How many people will it be?", "How many of you are coming?"),
                  "day": ("Which day?", "Which day exactly?", "On which day?"), "time": ("What time?", "At what time exactly?"),
                  "stay": ("How many nights?", "How many nights exactly?"),
                  "leaveAt": ("Which train, leaving at what time?", "What time do you want to leave?")}
NOUNS = {"restaurant": "table", "hotel": "room", "train": "train"}


def tails(ambiguity: dict, belief: Belief) -> list[str]:
    """The candidates as one speaks of them: of branches only what tells them apart ("north", not "golden wok north")."""
    base = belief.said.get("name", "") if ambiguity["slot"] == "name" else ""
    return [c[len(base):].strip() if base and c.startswith(base + " ") else c for c in ambiguity["candidates"]]


def alternatives(values: list[str]) -> str:
    """"north, south or east"; above five candidates, two of them."""
    values = values if len(values) <= 5 else values[:2]
    return f"{', '.join(values[:-1])} or {values[-1]}" if len(values) > 1 else values[0]


def word_question(ambiguity: dict, belief: Belief, level: int, rng: random.Random) -> str:
    """A question at one of four levels: 0 bare, 1 names the slot, 2 also the candidates, 3 also what is in play."""
    slot, candidates = ambiguity["slot"], ambiguity["candidates"]
    if level == 0:
        return rng.choice(BARE)
    question = rng.choice(SLOT_QUESTIONS[slot])
    if level == 1:
        return question
    options = alternatives(tails(ambiguity, belief))
    if level == 2:
        return question.rstrip("?") + f": {options}?"
    domain, total, ask = ambiguity["domain"], len(candidates), question.rstrip("?")
    if slot == "name":
        base = belief.said.get("name", "")
        return rng.choice((f"There are {total} places called {base}. Which branch do you mean: {options}?",
                           f"Which {base} do you mean: {options}?", f"Do you want the {base} branch {options}?"))
    if ambiguity["kind"] == "underspecified" and domain != "train":
        wishes = " ".join(v for s, v in belief.said.items() if s in ("pricerange", "food", "type")) or "such"
        noun = {"restaurant": "restaurant", "hotel": "place"}[domain]
        return rng.choice((f"I found {total} {wishes} {noun}s. {ask}: {options}?", f"Several {noun}s match. {ask}: {options}?",
                           f"{ask} for the {noun}: {options}?"))
    noun = NOUNS[domain]
    return rng.choice((f"{ask} for the {noun}: {options}?", f"For the {noun}, {ask[0].lower()}{ask[1:]}: {options}?"))


RICH_QUESTIONS = {  # to be followed by the choices
    "name": ("Which branch do you mean", "Which branch would you like", "Which branch should I take", "Which one of them do you have in mind",
             "Which place do you mean", "Which of these places is the right one", "Which place would you like", "Which branch shall it be", "Can you tell me which branch"),
    "area": ("Which area would you like", "In which part of town should it be", "Which area suits you", "Which part of town do you prefer",
             "Where in town should it be", "Which area do you have in mind", "Could you tell me which area"),
    "pricerange": ("Which price range would you like", "What price range do you have in mind", "Which price range suits you",
                   "What is your budget", "Could you tell me the price range", "Which price range should it be"),
    "food": ("What kind of food would you like", "Which food do you prefer", "Which cuisine would you like", "What food are you thinking of",
             "Which kind of food should it be", "Could you tell me which food"),
    "type": ("Which type would you like", "What type of place should it be", "Which kind do you prefer", "Could you tell me which type"),
    "stars": ("How many stars should it have", "How many stars would you like", "Which star rating do you want", "Could you tell me how many stars"),
    "people": ("How many people will it be", "How many of you are coming", "How many people are you", "How many people should I book for",
               "How many people is it for", "Could you tell me how many people"),
    "day": ("Which day do you mean", "On which day exactly", "Which day should I book", "What day shall it be", "Which day suits you",
            "Could you tell me which day"),
    "time": ("At what time exactly", "What time would you like", "What time suits you", "Which time should I book", "What time shall it be",
             "Could you tell me what time"),
    "stay": ("How many nights exactly", "How many nights will you stay", "How many nights should I book", "How many nights shall it be",
             "Could you tell me how many nights"),
    "leaveAt": ("What time do you want to leave", "Which train do you want, leaving at what time", "When would you like to leave",
                "What time should the train leave", "Could you tell me what time you want to leave")}
_FRAMES = ("{ask}: {options}?", "{ask}, {options}?", "{ask}: is it {options}?")
_LEADS = {"branch": ("There are {total} that match {base}.", "I see {total} places by the name of {base}.", "{base} could be {total} places.",
                     "More than one place is called {base}."),
          "underspecified": ("I found {total} {wishes} {noun}s.", "Several {noun}s match.", "{total} {noun}s fit what you said.",
                             "More than one {noun} fits.", "I have {total} {noun}s for you.", "That leaves {total} {noun}s."),
          "vague": ("That could mean several things.", "Let me be exact with your {noun}.", "One thing about the {noun} before I book it.",
                    "Just so that I book the right thing.", "I would like to get the {noun} right."),
          "reference": ("You mentioned more than one day.", "There is more than one day that you could mean.", "Two days came up so far.",
                        "I am not sure which day you refer to with the {noun}."),
          "contradiction": ("You told me two different things.", "I heard two things about the {noun}.", "These do not go together.",
                            "I want to be sure about the {noun}.", "You said both.")}


def word_rich_question(ambiguity: dict, belief: Belief, level: int, rng: random.Random) -> str:
    """As `word_question` at levels 2 and 3, in many more words. Of more than five candidates it names those on show."""
    slot, candidates, base = ambiguity["slot"], ambiguity["candidates"], belief.said.get("name", "")
    if len(candidates) > 5:
        candidates = list(dict.fromkeys(row[slot] for row in belief.rows or [] if row.get(slot) in candidates)) or candidates
    if slot == "name" and rng.random() < 0.7 and all(c.startswith(base + " ") for c in candidates):
        candidates = [c.removeprefix(base + " ") for c in candidates]
    asks = [ask for ask in RICH_QUESTIONS[slot] if slot != "name" or " " in base or "branch" not in ask]  # one word: different places
    question = rng.choice(_FRAMES[:1] * 4 + _FRAMES).format(ask=rng.choice(asks), options=alternatives(candidates))
    if level == 2:
        return question
    wishes = " ".join(v for s, v in belief.said.items() if s in ("pricerange", "food", "type")) or "such"
    noun = NOUNS[ambiguity["domain"]] if ambiguity["kind"] != "underspecified" else {"restaurant": "restaurant", "hotel": "place"}.get(
        ambiguity["domain"], "train")
    lead = rng.choice(_LEADS[ambiguity["kind"]]).format(total=belief.total, base=base, wishes=wishes, noun=noun)
    return f"{lead[0].upper()}{lead[1:]} {question}"


DONE = ("All information is there.", "I can go ahead.", "Nothing is missing.", "Everything is clear.")


def word_think(kind: str, belief: Belief, open_detail: dict | None, style: int, rng: random.Random) -> str:
    """A think of style 0 (one closing sentence), 1 (the step at hand) or 2 (a check, slot by slot). `open_detail` is the
    annotation when something is open here: a careful think notices it."""
    if style == 0:
        return rng.choice(DONE)
    step = {"query": "Look it up first.", "book": "Book it.", "ask": "Ask the user."}.get(kind, "Tell the user.")
    total = "" if belief.rows is None else f"{belief.total} match. "
    if style == 1:
        return rng.choice((step, total + step))
    check = ", ".join(f"{slot} {value}" for slot, value in belief.said.items()) + ". "
    if kind == "report":
        return f"{'Booked' if belief.booked else 'Found'}: {check}{step}"
    if open_detail and open_detail["kind"] == "underspecified" and belief.domain in VENUES:
        return f"{check}{total}{columns(belief, open_detail['slot'])}. {open_detail['slot']} is open. {step}"
    if open_detail:
        return f"{check}{total}{open_detail['slot']} is open: {alternatives(tails(open_detail, belief))}. {step}"
    return f"{check}{total}{'Any will do. ' if belief.any_will_do else rng.choice(('All given. ', 'One reading is left. '))}{step}"


def columns(belief: Belief, slot: str) -> str:
    """The result column by column, up to the open one: "pricerange cheap, cheap; food thai, greek"."""
    fields = [field for field in FIELDS[belief.domain] if field != "name" and field not in belief.said]
    shown = [field for field in fields[:fields.index(slot)] if field in belief.rows[0]] + [slot]
    return "; ".join(f"{field} {', '.join(str(row.get(field)) for row in belief.rows)}" for field in shown)


def word_report(belief: Belief, rng: random.Random) -> str:
    """What was booked, every slot named, with the reference."""
    made, result = belief.booked_with, belief.booked
    if belief.domain == "taxi":
        return f"Your taxi is a {result['car']}, phone {result['phone']}."
    people = made["people"]
    if belief.domain == "train":
        what = (f"Your train from {result['departure']} to {result['destination']} leaves on {result['day']} at {result['leaveAt']}, "
                f"for {people} people")
    else:
        when = f"on {made['day']} at {made['time']}" if belief.domain == "restaurant" else f"from {made['day']} for {made['stay']} nights"
        place = f"{result['name']}, in the {result['area']},"
        what = rng.choice((f"Your {NOUNS[belief.domain]} at {place} is booked for {people} people {when}",
                           f"I booked {place} for {people} people {when}"))
    return f"{what}. {rng.choice(('The reference is', 'Reference'))} {result['reference']}."


def word_found(domain: str, row: dict, rng: random.Random) -> str:
    """What was found, for a request without a booking."""
    if domain == "train":
        return f"A train leaves at {row['leaveAt']} and arrives at {row['arriveBy']}."
    return f"I found {row['name']}, in the {row['area']}."


# ------------------------------------------------------------------------------------------------- decision points

def play(scenario: Scenario, agent=None, seed: int = 0, max_corrections: int = 2, user: type = ScriptedUser) -> Dialogue:
    """One dialogue of the scenario's scripted user with `agent(history) -> text`, by default the oracle."""
    agent = agent or Oracle(scenario.ambiguity, f"{scenario.id} {seed}", further=scenario.further)
    dialogue = start_dialogue(scenario, user(scenario, seed, max_corrections), seed)
    return run_dialogues(lambda histories: [agent(h) for h in histories], [dialogue])[0]


def decision_points(scenario: Scenario, twin_of: dict | None = None) -> list[dict]:
    """`points_of` the oracle's dialogue."""
    return points_of(play(scenario), [twin_of] if twin_of else [])


def points_of(dialogue: Dialogue, twin_of: list[dict] = ()) -> list[dict]:
    """Every agent turn of a dialogue as a decision point {id, goal_id, messages, clarify_expected, ambiguity, twin_id, twin_kind,
    stage}. `stage` is "ask" where a question is due, "answered" right after, "twin" where it would be due in the ambiguous twin
    (whose annotations are `twin_of`), "any" if there several places are left and any of them will do, "other" elsewhere; training
    draws by stage, never by this run's rewards. Of several ambiguities a point keeps the one that is due, or the first."""
    scenario, points = dialogue.scenario, []
    for k, (length, _, _) in enumerate(dialogue.steps):
        history = dialogue.messages[:length]
        due = next((a for a in scenario.ambiguities if clarify_due(history, a)), None)
        stage = "ask" if due else "answered" if points and points[-1]["stage"] == "ask" else next(
            filter(None, (_twin_spot(history, a) for a in twin_of)), "other")
        points.append({"id": f"{scenario.id}#{k}", "goal_id": scenario.id, "messages": history, "clarify_expected": due is not None,
                       "ambiguity": due or scenario.ambiguity, "twin_id": scenario.twin_id, "twin_kind": scenario.twin_kind,
                       "stage": stage})
    return points


def _twin_spot(history: list[dict], ambiguity: dict) -> str:
    """"twin" (or "any", see above) where the ambiguous twin asks: right after the request, or right after the first result of its
    query. "" elsewhere."""
    belief = read_history(history)
    if ambiguity["kind"] in ("branch", "underspecified"):
        here, any_will_do = "rows" in (belief.result or {}), belief.any_will_do and belief.total > 1
    else:
        here, any_will_do = history[-1]["role"] == "user" and bool(request_domain(history[-1]["content"])), False
    return ("any" if any_will_do else "twin") if here and belief.domain == ambiguity["domain"] else ""


def with_thinks(dialogue: Dialogue) -> list[dict]:
    """The messages of a dialogue, with the agent's turns as they were written."""
    written, messages = {length: text for length, text, _ in dialogue.steps}, []
    for k, m in enumerate(dialogue.messages):
        if k in written:
            messages.append({"role": "assistant", "content": written[k]})
        if m["role"] != "assistant":  # every agent message is shown by a step
            messages.append(m)
    return messages
