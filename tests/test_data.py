"""Generated towns, the oracle and its rules, decision points, and the rows and tokenizer of pretraining."""
import contextlib
import doctest
import hashlib
import json
import random
import re
from types import SimpleNamespace

import pytest
import torch

import data.pretrain
import data.speaker
import data.towns
from env import BOOK_SLOTS, FIELDS, MAX_ROWS, booking_satisfies, meets, render_prompt, score_dialogue
from data.pretrain import END, TAGS, Demonstrator, collate, demonstrate, make_batches, padded, to_row, train_tokenizer, undecided
from data.speaker import Belief, Oracle, clarify_due, decision_points, play, word_question, word_think
from data.towns import (ANY_PATTERN, BASE_DOMAINS, BASE_KINDS, KINDS, NEW_FIRST, NEW_LAST, SPLITS, VAGUE, read_request,
                        request_domain, scenario_pair, split_of, venue_names)

EVERYTHING = ("restaurant", "hotel", "attraction", "train", "taxi")
BASE, FULL = (BASE_DOMAINS, BASE_KINDS), (EVERYTHING, KINDS)


def pairs(count, kind=FULL, first=SPLITS["valid"]):
    return [scenario_pair(seed, *kind) for seed in range(first, first + count)]


def shown(scenario):
    return [scenario.id, scenario.goal, scenario.requests, scenario.ambiguity, scenario.database.tables,
            scenario.twin_id, scenario.twin_kind]


@pytest.mark.parametrize("module", [data.towns, data.speaker])
def test_doctests(module):
    assert doctest.testmod(module).failed == 0


# ---- towns and splits

def test_scenario_is_a_function_of_its_seed():
    for seed in range(40):
        a = [shown(s) for s in scenario_pair(seed, *FULL)]
        random.seed(seed)  # the global generator plays no part
        scenario_pair(seed + 1)
        assert a == [shown(s) for s in scenario_pair(seed, *FULL)]
    assert len({json.dumps(shown(scenario_pair(seed)[0])) for seed in range(40)}) == 40


def test_splits():
    assert [split_of(s) for s in (0, 10**6 - 1, 10**6, 2 * 10**6, 3 * 10**6, 4 * 10**6 - 1)] == [
        "train", "train", "valid", "test", "test-new-words", "test-new-words"]
    for seed in (-1, 4 * 10**6):
        with pytest.raises(ValueError, match=f"town seed {seed} is in no split"):
            scenario_pair(seed)


def bare_names(first, invented=0.0):
    """The venues' names of 300 towns, without what tells branches apart."""
    return {" ".join(row["name"].split()[:2]) for seed in range(first, first + 300)
            for s in scenario_pair(seed, *FULL, invented=invented)
            for domain in ("restaurant", "hotel", "attraction") for row in s.database.tables[domain]}


def test_no_name_in_two_splits_and_no_new_word_elsewhere():
    """Pretraining included: it draws from train with made-up words among the names."""
    names = {split: bare_names(first) for split, first in SPLITS.items()}
    names["train"] |= bare_names(200_000, invented=0.5)
    assert all(len(n) > 90 for n in names.values())
    for a in SPLITS:
        for b in SPLITS:
            assert a == b or not names[a] & names[b], (a, b)
    new = set(NEW_FIRST).union(*NEW_LAST.values())
    assert {w for n in names["test-new-words"] for w in n.split()} <= new
    assert not new & {w for split in ("train", "valid", "test") for n in names[split] for w in n.split()}
    words = {w for seed in range(200_000, 200_300) for s in scenario_pair(seed, *FULL, invented=0.5)
             for w in re.findall(r"[a-z]+", json.dumps([s.requests, s.database.tables]).lower())}
    assert not new & words  # in no other place either


def test_invented_names_are_made_up():
    rng = random.Random(0)
    names = venue_names("hotel", 200, "train", rng, invented=1.0)
    known = set(data.towns.FIRST) | set(data.towns.LAST["hotel"])
    strange = [sum(word not in known for word in name.split()) for name in names]
    assert len(set(names)) == 200 and set(strange) == {1, 2} and 60 < strange.count(2) < 140  # both words of about half of them
    assert not {word for name in names for word in name.split()} & (data.towns.REAL_WORDS - known)


def test_full_names_are_unique_in_a_town():
    for s in [s for pair in pairs(200) for s in pair]:
        for domain in ("restaurant", "hotel", "attraction"):
            names = [row["name"] for row in s.database.tables[domain]]
            assert len(names) == len(set(names)), s.id


def test_scenarios_cover_kinds_domains_twins_and_stages():
    many = pairs(300)
    kinds = {(a.ambiguity["kind"], a.ambiguity["domain"]) for a, _ in many}
    assert {k for k, _ in kinds} == set(KINDS) and {d for _, d in kinds} == {"restaurant", "hotel", "train"}
    assert {d for a, _ in many for d, _ in a.requests} == set(EVERYTHING)
    assert {len(a.requests) for a, _ in many} == {1, 2, 3}
    assert {[d for d, _ in a.requests].index(a.ambiguity["domain"]) for a, _ in many} == {0, 1, 2}  # first, and later
    assert any(row["arriveBy"] >= "24:00" for a, _ in many for row in a.database.tables["train"])
    small = pairs(300, BASE)
    assert {a.ambiguity["kind"] for a, _ in small} == set(BASE_KINDS)
    assert {d for a, _ in small for d, _ in a.requests} == set(BASE_DOMAINS)


def test_twins():
    many = pairs(300)
    for ambiguous, clear in many:
        assert (ambiguous.twin_id, clear.twin_id) == (clear.id, ambiguous.id) and ambiguous.twin_kind is None
        assert clear.ambiguity is None and clear.twin_kind in ("plain", "db")
        assert [d for d, _ in ambiguous.requests] == [d for d, _ in clear.requests]
        changed = [d for (d, a), (_, c) in zip(ambiguous.requests, clear.requests) if a != c]
        target, slot = ambiguous.ambiguity["domain"], ambiguous.ambiguity["slot"]
        if clear.twin_kind == "db":  # the same words, in a town where one candidate is left
            assert changed == [] and ambiguous.goal == clear.goal
            wishes = {s: v for s, v in read_request(dict(clear.requests)[target], target).items()
                      if s in FIELDS[target]}
            for town, count in ((clear, 1), (ambiguous, len(ambiguous.ambiguity["candidates"]))):
                left = {row[slot] for row in town.database.query(target, wishes)}
                left &= set(ambiguous.ambiguity["candidates"])
                assert len(left) == count and ambiguous.ambiguity["value"] in left
            assert ambiguous.ambiguity["kind"] in ("branch", "underspecified")
        else:  # later requests may be phrased anew, and say the same
            assert target in changed and ambiguous.database.tables == clear.database.tables
            for (domain, a), (_, c) in zip(ambiguous.requests, clear.requests):
                if domain != target:
                    assert read_request(a, domain) == read_request(c, domain)
                    assert bool(ANY_PATTERN.search(a)) == bool(ANY_PATTERN.search(c))
                    assert ambiguous.goal[domain] == clear.goal[domain]
    half = [c.twin_kind for a, c in many if a.ambiguity["kind"] == "branch"]
    assert 0.35 < half.count("db") / len(half) < 0.65


def candidate_booking(scenario, candidate):
    """The booking that an agent makes which reads the open detail as `candidate`."""
    ambiguity, goal = scenario.ambiguity, scenario.goal[scenario.ambiguity["domain"]]
    domain, slot = ambiguity["domain"], ambiguity["slot"]
    info = {s: v for s, v in goal["info"].items() if s != slot and not (domain == "train" and s == "arriveBy")}
    if slot in FIELDS[domain] and not (slot in BOOK_SLOTS[domain]):
        info[slot] = candidate
    row = next(r for r in scenario.database.tables[domain] if all(
        r[s] == v if domain == "train" else meets(r, s, v) for s, v in info.items()))
    return {"domain": domain, "row": row, **goal["book"], **({slot: candidate} if slot in BOOK_SLOTS[domain] else {})}


def test_every_candidate_but_one_leads_to_failure():
    """So asking is what success needs: two or more readings, and the user cares which."""
    for ambiguous, _ in pairs(300):
        candidates, value = ambiguous.ambiguity["candidates"], ambiguous.ambiguity["value"]
        assert len(candidates) >= 2 and len(set(candidates)) == len(candidates) and value in candidates
        for candidate in candidates:
            satisfied = booking_satisfies(ambiguous.goal, candidate_booking(ambiguous, candidate))
            assert satisfied is (candidate == value), (ambiguous.id, candidate, value)


def test_value_is_no_matter_of_place():
    """The candidate that counts stands at every place, so that no fixed guess is good."""
    places = [a.ambiguity["candidates"].index(a.ambiguity["value"]) for a, _ in pairs(300, BASE)
              if len(a.ambiguity["candidates"]) == 3]
    assert len(places) > 80 and all(0.2 < places.count(k) / len(places) < 0.47 for k in range(3))


def test_default_wording_is_what_the_base_was_taught():
    """SpeakER's richer wording is switched on by its builder; a change here would make the embedded policy a stranger."""
    texts = json.dumps([s.requests for seed in range(50) for s in scenario_pair(seed)]
                       + [demonstrate(200_000 + seed) for seed in range(10)])
    assert hashlib.sha256(texts.encode()).hexdigest()[:16] == "6efd0e4ab2c78138"


# ---- wording a request, and back

def stated_slots(scenario, domain):
    """What the request says of the goal, by the annotation: vague words and references say nothing."""
    goal, ambiguity = scenario.goal[domain], scenario.ambiguity
    said = {**goal["info"], **goal.get("book", {})}
    if ambiguity is None or ambiguity["domain"] != domain:
        return said
    kind, slot = ambiguity["kind"], ambiguity["slot"]
    if kind == "branch":
        return {**said, "name": " ".join(said["name"].split()[:2])}
    if kind == "contradiction":
        return {**said, "people": ambiguity["candidates"][1]}
    if domain == "train":
        del said["arriveBy"]
        if kind == "underspecified":
            return {**said, "leaveAt": ambiguity["candidates"][0]}  # the earliest hour
    return {s: v for s, v in said.items() if s != slot}


@pytest.mark.parametrize("kind", [BASE, FULL], ids=["base", "full"])
def test_read_request_inverts_word_request(kind):
    for ambiguous, clear in pairs(300, kind):
        spoken = [(ambiguous, domain, text) for domain, text in ambiguous.requests]
        if clear.twin_kind == "plain":  # a db twin says the words of the ambiguous one
            spoken += [(clear, domain, text) for domain, text in clear.requests]
        for scenario, domain, text in spoken:
            assert request_domain(text) == domain, text
            assert read_request(text, domain) == stated_slots(scenario, domain), text


def test_the_open_value_is_not_in_the_request():
    """U01: what is held back until asked is not in the first words (references, contradictions name all)."""
    for ambiguous, _ in pairs(300):
        domain, slot, value = (ambiguous.ambiguity[k] for k in ("domain", "slot", "value"))
        told = ambiguous.ambiguity["kind"] in ("reference", "contradiction") or (slot, domain) == ("leaveAt", "train")
        assert told or read_request(dict(ambiguous.requests)[domain], domain).get(slot) != value


def test_vague_words_state_nothing():
    for slot, table in VAGUE.items():
        domain = {"stay": "hotel", "leaveAt": "train"}.get(slot, "restaurant")
        for phrase, candidates in table.items():
            assert slot not in read_request(f"Book a table at red wok, {phrase}.", domain) and len(candidates) >= 2


def test_answers_open_no_request():
    for text in ("The north one, please.", "4 people.", "As I said, on friday.", "No, it should be for 4 people.",
                 "Yes, please.", "I don't mind.", "That is wrong, I wanted it on monday.", "Just the one I mean.",
                 "Thanks, that is all."):
        assert request_domain(text) is None, text


# ---- when a question is due

def u(text):
    return {"role": "user", "content": text}


def a(text):
    return {"role": "assistant", "content": text}


def tool(**result):
    return {"role": "tool", "content": json.dumps(result)}


def rows(*rs):
    return tool(total=len(rs), rows=list(rs))


CALL = a('<tool_call>{"name": "query_restaurant", "arguments": {}}</tool_call>')


def about(kind, slot, *candidates, domain="restaurant"):
    return {"kind": kind, "domain": domain, "slot": slot, "candidates": list(candidates), "value": candidates[0]}


BRANCH = about("branch", "name", "red wok north", "red wok south")
AREA = about("underspecified", "area", "north", "south")
TRAIN = about("underspecified", "leaveAt", "20:00", "21:00", domain="train")
PEOPLE = about("vague", "people", "3", "4", "5")
DAY = about("reference", "day", "monday", "friday", domain="hotel")
CLASH = about("contradiction", "people", "2", "6")
WOK = u("Book a table at red wok, on friday, for 4 people, at 18:00.")
CHEAP = u("Find me a cheap restaurant, on friday, for 4 people, at 18:00.")
FEW = u("Book a table at red wok north, for a few of us, on friday, at 18:00.")
BOTH = u("Book a table at red wok north, on friday, for 2 people, at 18:00. There will be 6 of us.")
TWO_BRANCHES = rows({"name": "red wok north", "area": "north"}, {"name": "red wok south", "area": "south"})
ONE_AREA = rows({"name": "old fork", "area": "north"}, {"name": "tall oven", "area": "north"})
TWO_AREAS = rows({"name": "old fork", "area": "north"}, {"name": "tall oven", "area": "south"})
LATE = u("I need a train from cambridge to ely, on friday, leaving at 20:00 or later.")
STAY = [u("Book a table at red wok north, on monday, for 2 people, at 18:00. We arrive in town on friday."),
        a("Booked, reference AAAA1111."),
        u("Also, book a room at old mill, from the same day, for 2 nights, for 2 people.")]


@pytest.mark.parametrize("history, ambiguity, expected", [
    # branch: not before the result, then until one is named
    ([WOK], BRANCH, False),
    ([WOK, CALL, TWO_BRANCHES], BRANCH, True),
    ([WOK, CALL, TWO_BRANCHES, a("Which one?"), u("The usual one.")], BRANCH, True),                   # still open
    ([WOK, CALL, TWO_BRANCHES, a("Which branch?"), u("The south one.")], BRANCH, False),
    ([WOK, CALL, TWO_BRANCHES, a("The north one?"), u("Yes, that one.")], BRANCH, False),
    ([WOK, CALL, TWO_BRANCHES, a("The north one?"), u("No, not that one.")], BRANCH, True),
    ([WOK, CALL, TWO_BRANCHES, a("Which branch?"), u("Any of them is fine.")], BRANCH, False),
    ([WOK, CALL, TWO_BRANCHES, CALL, tool(reference="AAAA1111", name="red wok north")], BRANCH, False),  # booked
    ([WOK, CALL, tool(error="no restaurant"), CALL, TWO_BRANCHES], BRANCH, True),
    ([WOK, CALL, TWO_BRANCHES, CALL, rows({"name": "red wok north"})], BRANCH, False),  # narrowed
    ([WOK, CALL, rows({"name": "red wok north", "area": "north"})], BRANCH, False),  # db twin: one is left
    ([u("Book a table at red wok south, for 4 people."), CALL, TWO_BRANCHES], BRANCH, False),  # plain twin: said
    # underspecified: a wish that several places meet
    ([CHEAP], AREA, False),
    ([CHEAP, CALL, TWO_AREAS], AREA, True),
    ([CHEAP, CALL, TWO_AREAS, a("Which area?"), u("In the north.")], AREA, False),
    ([CHEAP, CALL, rows({"name": "old fork", "area": "north"})], AREA, False),                         # db twin
    ([CHEAP, CALL, ONE_AREA], AREA, False),                                                            # alike in it
    ([u("Find me a cheap restaurant in the north, for 4 people."), CALL, TWO_AREAS], AREA, False),     # plain: said
    ([u("Find me a cheap restaurant, for 4 people. Any will do."), CALL, TWO_AREAS], AREA, False),     # plain twin: any
    # trains: the earliest hour leaves the later ones open
    ([LATE, CALL, rows({"leaveAt": "20:00"}, {"leaveAt": "21:00"})], TRAIN, True),
    ([LATE, CALL, rows({"leaveAt": "20:00"})], TRAIN, False),
    # vague words: at once, whatever a result shows
    ([FEW], PEOPLE, True),
    ([FEW, CALL, rows({"name": "red wok north"})], PEOPLE, True),
    ([FEW, a("How many?"), u("4 of us.")], PEOPLE, False),
    ([FEW, a("3, 4 or 5?"), u("3 or 4, I think.")], PEOPLE, True),                                     # two are left
    ([FEW, CALL, tool(reference="AAAA1111", name="red wok north")], PEOPLE, False),
    # references: in the request that refers, not before
    (STAY[:1], DAY, False), (STAY[:2], DAY, False),
    (STAY, DAY, True),
    (STAY + [a("Monday or friday?"), u("From friday.")], DAY, False),
    # contradictions: at once
    ([BOTH], CLASH, True),
    ([BOTH, a("2 or 6 people?"), u("6 people, please.")], CLASH, False),
    # a clear scenario has no annotation
    ([FEW], None, False), ([WOK, CALL, TWO_BRANCHES], None, False), (STAY, None, False), ([], BRANCH, False),
    ([u("We would like to stay at old mill.")], PEOPLE, False)])  # another domain's request
def test_clarify_due_by_hand(history, ambiguity, expected):
    assert clarify_due(history, ambiguity) is expected
    if ambiguity:  # the hidden value is not read
        assert clarify_due(history, {**ambiguity, "value": ambiguity["candidates"][-1]}) is expected
        assert clarify_due(history, {k: v for k, v in ambiguity.items() if k != "value"}) is expected


def test_candidates_are_visible_when_a_question_is_due():
    """At most five rows are shown, with the candidates among them: the question can name what the policy has seen."""
    for ambiguous, _ in pairs(150):
        ambiguity, dialogue = ambiguous.ambiguity, play(ambiguous)
        spot = next(n for n, _, turn in dialogue.steps if turn.clarify)
        seen = json.dumps(dialogue.messages[:spot])
        if ambiguity["kind"] != "vague":
            assert all(c in seen for c in ambiguity["candidates"][:MAX_ROWS]), ambiguous.id


# ---- the oracle and the careless agent

def outcome(scenario, dialogue):
    success, wrong = score_dialogue(scenario.goal, dialogue.session.ledger, dialogue.messages)
    return success, wrong, dialogue.user.corrections, dialogue.ended


def questions(dialogue):
    return sum(turn.clarify is not None for _, _, turn in dialogue.steps)


@pytest.mark.parametrize("kind", [BASE, FULL], ids=["base", "full"])
def test_oracle_plays_to_success_and_asks_where_it_must(kind):
    for scenario in [s for pair in pairs(200, kind) for s in pair]:
        dialogue = play(scenario)
        assert outcome(scenario, dialogue) == (True, 0, 0, "done"), scenario.id
        assert questions(dialogue) == (scenario.ambiguity is not None), scenario.id
        assert not any(turn.errors for _, _, turn in dialogue.steps)


def test_oracle_sees_what_an_agent_sees():
    """The annotation's value is not among it; a second oracle without it plays the same."""
    for ambiguous, _ in pairs(60):
        blind = {k: v for k, v in ambiguous.ambiguity.items() if k != "value"}
        assert play(ambiguous, Oracle(blind, f"{ambiguous.id} 0")).messages == play(ambiguous).messages


def test_careless_agent_fails_often_where_asking_is_due():
    """Corrections off, as for rejected dialogues: the dialogue ends at the report of the wrong booking."""
    results = [outcome(s, play(s, Oracle(s.ambiguity, s.id, ask=0.0), max_corrections=0)) for s, _ in pairs(200, BASE)]
    assert 0.2 < sum(success for success, *_ in results) / 200 < 0.5
    assert all(rest == [not success, 0, "done"] for success, *rest in results)


def test_a_wrong_report_of_a_venue_is_put_right_by_one_correction():
    """Name and area stand in every report, so the user can tell: success, at the price of a wrong booking."""
    for scenario in [s for s, _ in pairs(200, BASE) if s.ambiguity["slot"] in ("name", "area")]:
        agents = [Oracle(scenario.ambiguity, scenario.id, ask=0.0) for _ in range(2)]
        careless = [outcome(scenario, play(scenario, agent, max_corrections=n)) for agent, n in zip(agents, (0, 2))]
        wrong = careless[0][1]
        assert careless == [(not wrong, wrong, 0, "done"), (True, wrong, wrong, "done")], scenario.id


def test_question_levels():
    belief = data.speaker.read_history([WOK, CALL, TWO_BRANCHES])
    rng = random.Random(0)
    asked = [{word_question(BRANCH, belief, level, rng) for _ in range(30)} for level in range(4)]
    assert all("north" not in q for q in asked[0] | asked[1]) and all("branch" in q for q in asked[1])
    assert all("north or south?" in q for q in asked[2] | asked[3]) and all("red wok" in q for q in asked[3])
    assert data.speaker.alternatives(list("abcdef")) == "a or b"
    assert data.speaker.alternatives(list("abcde")) == "a, b, c, d or e"


def test_places_left_open_differ_in_one_field_alone():
    """Else no policy could know which of two open fields the user cares about."""
    for scenario, _ in pairs(100, kind=(("restaurant", "hotel"), ("underspecified",))):
        ambiguity = scenario.ambiguity
        query = {s: v for s, v in scenario.goal[ambiguity["domain"]]["info"].items() if s != ambiguity["slot"]}
        rows = scenario.database.query(ambiguity["domain"], query)
        assert sorted(row[ambiguity["slot"]] for row in rows) == sorted(ambiguity["candidates"])
        assert [s for s in rows[0] if len({row[s] for row in rows}) > 1 and s != "name"] == [ambiguity["slot"]], scenario.id


# ---- decision points

def test_decision_points():
    keys = {"id", "goal_id", "messages", "clarify_expected", "ambiguity", "twin_id", "twin_kind", "stage"}
    for ambiguous, clear in pairs(100):
        asking, acting = decision_points(ambiguous), decision_points(clear, ambiguous.ambiguity)
        for scenario, points in ((ambiguous, asking), (clear, acting)):
            assert len(points) == len(play(scenario).steps) and len({p["id"] for p in points}) == len(points)
            for p in points:
                assert set(p) == keys and p["goal_id"] == scenario.id and p["messages"][-1]["role"] in ("user", "tool")
                assert (p["twin_id"], p["twin_kind"]) == (scenario.twin_id, scenario.twin_kind)
                assert p["ambiguity"] == scenario.ambiguity
                assert p["clarify_expected"] is (p["stage"] == "ask")
                json.dumps(p)
        due = [p["stage"] for p in asking].index("ask")
        assert [p["stage"] for p in asking if p["stage"] != "other"] == ["ask", "answered"] and asking[due + 1]["stage"] == "answered"
        stages = [p["stage"] for p in acting]
        assert "ask" not in stages and stages.count("twin") + stages.count("any") == 1, clear.id
        if "any" in stages:
            history = acting[stages.index("any")]["messages"]
            assert json.loads(history[-1]["content"])["total"] > 1 and any(ANY_PATTERN.search(m["content"]) for m in history)
        if clear.twin_kind == "db":  # the same words up to here; the result differs
            at = stages.index("twin")
            talk = [[m for m in p["messages"] if m["role"] == "user"] for p in (acting[at], asking[due])]
            assert talk[0] == talk[1] and acting[at]["messages"][-1] != asking[due]["messages"][-1]
        assert all(p["stage"] == "other" for p in decision_points(clear))


def test_candidates_stand_in_the_order_in_which_the_result_shows_them():
    """Or the next option of a question could only be guessed: a policy then offers "south, south or east"."""
    seen = set()
    for seed in range(60):
        scenario = scenario_pair(seed)[0]
        if scenario.ambiguity["kind"] in ("branch", "underspecified"):
            slot, candidates = scenario.ambiguity["slot"], scenario.ambiguity["candidates"]
            point = next(p for p in decision_points(scenario) if p["stage"] == "ask")
            rows = json.loads(point["messages"][-1]["content"])["rows"]
            assert [row[slot] for row in rows] == candidates[:len(rows)], scenario.id
            seen.add(scenario.ambiguity["kind"])
    assert seen == {"branch", "underspecified"}


def test_slot_by_slot_think_says_why():
    rows = [{"name": "a", "area": "east", "pricerange": "cheap", "food": "thai"}, {"name": "b", "area": "west", "pricerange": "cheap", "food": "thai"}]
    belief = Belief("restaurant", {"food": "thai"}, rows=rows, total=2)
    doubt = {"kind": "underspecified", "domain": "restaurant", "slot": "area", "candidates": ["east", "west"]}
    think = lambda kind, doubt: word_think(kind, belief, doubt, 2, random.Random(0))
    assert think("ask", doubt) == "food thai. 2 match. area east, west. area is open. Ask the user."
    belief.any_will_do = True
    assert think("book", None) == "food thai. 2 match. Any will do. Book it."
    belief = Belief("restaurant", {"name": "wok"}, rows=rows, total=2)
    doubt = {"kind": "branch", "domain": "restaurant", "slot": "name", "candidates": ["wok north", "wok south"]}
    assert think("ask", doubt) == "name wok. 2 match. name is open: north or south. Ask the user."

    rows = [{"name": "a", "area": "north", "pricerange": "cheap", "food": "thai"}, {"name": "b", "area": "north", "pricerange": "cheap", "food": "greek"}]
    belief = Belief("restaurant", {"area": "north"}, rows=rows, total=2)  # column by column, up to the open one
    doubt = {"kind": "underspecified", "domain": "restaurant", "slot": "food", "candidates": ["thai", "greek"]}
    assert think("ask", doubt) == "area north. 2 match. pricerange cheap, cheap; food thai, greek. food is open. Ask the user."


# ---- pretraining: demonstrator, rows, tokenizer

def test_unlearned_steps_are_the_questions_of_one_who_always_asks():
    seen = set()
    for seed in range(200_000, 200_150):
        for scenario in scenario_pair(seed, invented=0.5):
            for always in (True, False):
                agent = Demonstrator(scenario.ambiguity, scenario.id, always)
                dialogue = play(scenario, agent)
                due = [k for k, (n, _, _) in enumerate(dialogue.steps)
                       if clarify_due(dialogue.messages[:n], scenario.ambiguity)]
                assert agent.unlearned == (due if always else [])
                assert all("?" in dialogue.steps[k][1] for k in agent.unlearned)
                assert not set(due) or scenario.ambiguity
                seen.add((always, len(due)))
    assert {(True, 0), (True, 1), (False, 0), (False, 1)} <= seen


def test_demonstrate_is_seeded_and_marks_what_is_learned():
    made = demonstrate(200_003)
    assert made == demonstrate(200_003) and len(made) == 2
    for messages, steps in made:
        assert all(0 < n <= len(messages) and text for n, text, _ in steps)
    assert all(spans == [(0, len(text) + 1)] for _, text, spans in made[1][1])  # a clear twin has nothing to leave out


@pytest.mark.parametrize("text, learned", [
    ("<think>x</think><clarify>Which day?</clarify>", ["Which day?</clarify>"]),
    ("<think>2 match. Ask the user.</think><clarify>Which day?</clarify>", ["Which day?</clarify>"]),
    ("<think>name golden wok. day is open: friday or sunday. Ask the user.</think>So:<clarify>Which day?</clarify>",
     ["golden wok. day is open: friday or sunday. ", "Which day?</clarify>"]),
    ("<think>name golden wok. day is open: friday or sunday. Ask the user.</think>Which day?", ["golden wok. day is open: friday or sunday. "]),
    ("Which day?", [])])
def test_of_a_question_that_must_not_be_learnt_only_what_decides_nothing_is(text, learned):
    """Neither the style of the think, nor to ask, nor the end that follows (of a plain reply it stands behind the decision)."""
    assert [(text + "$")[start:end].rstrip("$") for start, end in undecided(text)] == learned


@pytest.fixture(scope="module")
def tokenizer():
    dialogues = [d for seed in range(200_000, 200_008) for d in demonstrate(seed)]
    texts = [m["content"] for messages, _ in dialogues for m in messages]
    return train_tokenizer(texts + [text for _, steps in dialogues for _, text, _ in steps], 400)


MESSAGES = [u("Hi."), a("Which day?"), u("Friday."), a("Booked.")]
ASKED = "<think>x</think><clarify>"
STEPS = [(1, ASKED + "Which day?</clarify>", [(len(ASKED), 99)]), (3, "<think></think>Booked.", [(0, 99)])]


def test_row_of_two_turns_by_hand(tokenizer):
    ids, positions, part, learned = to_row(tokenizer, MESSAGES, STEPS)
    n = [len(tokenizer.encode(f"<|{m['role']}|>{m['content']}{END}", add_special_tokens=False)) for m in MESSAGES]
    k = [len(tokenizer.encode(f"<|assistant|>{text}{END}", add_special_tokens=False)) for _, text, _ in STEPS]
    assert part == [0] * n[0] + [1] * k[0] + [0] * (n[1] + n[2]) + [2] * k[1] + [0] * n[3]
    first, third = n[0], n[0] + n[1] + n[2]
    assert positions == [*range(n[0]), *range(first, first + k[0]), *range(n[0], third), *range(third, third + k[1]),
                         *range(third, third + n[3])]
    words = len(tokenizer.encode("Which day?</clarify>" + END, add_special_tokens=False))
    assert learned == [False] * (n[0] + k[0] - words) + [True] * words + [False] * (n[1] + n[2]) + [False] + [True] * (k[1] - 1) \
        + [False] * n[3]
    history, completion = (tokenizer.decode([i for i, p in zip(ids, part) if p == k]) for k in (0, 2))
    assert completion == "<|assistant|><think></think>Booked.<|end|>"
    assert history == ("<|user|>Hi.<|end|><|assistant|>Which day?<|end|>"
                       "<|user|>Friday.<|end|><|assistant|>Booked.<|end|>")
    assert ids[part.index(1) + k[0] - 1] == tokenizer.eos_token_id


def test_collate_hides_completions_from_all_that_follows():
    """q of part 2 sees the history (0) before it and itself; a pad sees pads: no row of the softmax is empty."""
    rows = [([7, 8, 9, 5, 6], [0, 1, 1, 2, 2], [0, 1, 0, 2, 0], [False, True, False, True, False]),
            ([7], [0], [0], [False])]
    ids, positions, mask, learned = collate(rows, pad=3)
    assert ids.shape == (2, 32)  # filled up to a multiple of 32
    assert ids[:, :6].tolist() == [[7, 8, 9, 5, 6, 3], [7, 3, 3, 3, 3, 3]] and positions.tolist()[1] == [0] * 32
    assert learned.sum() == 2
    assert (mask[0, 0, :5, :5] == 0).int().tolist() == [[1, 0, 0, 0, 0],
                                                        [1, 1, 0, 0, 0],
                                                        [1, 0, 1, 0, 0],
                                                        [1, 0, 1, 1, 0],
                                                        [1, 0, 1, 0, 1]]
    assert mask.shape == (2, 1, 32, 32) and (mask == 0).any(-1).all() and not (mask[0, 0, :5, 5:] == 0).any()
    assert set(mask.unique().tolist()) == {0.0, float("-inf")}


def test_batches_have_few_shapes():
    """Lengths 1..100: four padded widths, at most 320 tokens a batch: 10, 5, 3 and 2 rows."""
    batches = make_batches([([0] * n,) for n in range(1, 101)], 320, random.Random(0))
    shapes = {(len({padded(row) for row in b}), padded(b[0]), max(len(c) for c in batches if padded(c[0]) == padded(b[0]))) for b in batches}
    assert shapes == {(1, 32, 10), (1, 64, 5), (1, 96, 3), (1, 128, 2)} and sum(map(len, batches)) == 100


def tiny_llama(tokenizer):
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48,
                                        num_hidden_layers=2, num_attention_heads=2,
                                        max_position_embeddings=1024, initializer_range=0.3,
                                        tie_word_embeddings=True)).eval()


@torch.no_grad()
def test_packed_row_equals_plain_prompts_and_completions(tokenizer):
    """C03, C05: same ids as the rendered prompt followed by the completion, and the same logits to 1e-4."""
    model = tiny_llama(tokenizer)
    for messages, steps in [(MESSAGES, STEPS), *demonstrate(200_001)]:
        row, other = to_row(tokenizer, messages, steps), to_row(tokenizer, MESSAGES, STEPS)
        ids, positions, mask, _ = collate([row, other, row], tokenizer.pad_token_id)
        packed = model(input_ids=ids, position_ids=positions, attention_mask=mask.float(), use_cache=False).logits[0]
        part = torch.tensor(row[2])
        for k, (n, text, _) in enumerate(steps, start=1):
            prompt = render_prompt(tokenizer, messages[:n])
            completion = tokenizer.encode(text + END, add_special_tokens=False)
            plain = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1:]  # from the header on
            spot = (part == k).nonzero().flatten()
            assert ids[0, spot].tolist() == [prompt[-1], *completion]
            before = [i for i, p in zip(row[0][:spot[0]], row[2]) if p == 0]
            assert before == prompt[:-1]
            assert (packed[spot] - plain).abs().max() < 1e-4


def test_tokenizer_is_the_same_after_a_reload(tokenizer, tmp_path):
    """C03, C08, C13: a tokenizer that changes on reload makes a good base look broken; the head is as wide as it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    tiny_llama(tokenizer).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, model = AutoTokenizer.from_pretrained(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)
    texts = ["Book a table at golden wok north, for 4 people.",
             '<tool_call>{"name": "query_restaurant", "arguments": {"name": "xyzzy"}}</tool_call>',
             "<think>a, b. 18:30</think><clarify>Which one?</clarify><|end|>", " two  blanks\nand ünïcode €", ""]
    texts += [t for _, steps in demonstrate(200_009) for _, t, _ in steps]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert again.encode(text, add_special_tokens=False) == again.encode(text) == ids  # nothing is added on its own
        assert again.decode(ids, skip_special_tokens=False) == tokenizer.decode(ids) == text
    assert len(again) == len(tokenizer) and (again.eos_token, again.pad_token) == (END, "<|pad|>")
    assert again.eos_token_id != again.pad_token_id
    assert again.chat_template == tokenizer.chat_template
    assert render_prompt(again, MESSAGES) == render_prompt(tokenizer, MESSAGES)
    assert model.lm_head.weight.shape[0] == len(again)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_tags_are_one_token_each_and_survive_decoding(tokenizer):
    """C09: no special tokens, or decoding would drop them; the end of a turn is one and goes."""
    text = "<think>a</think><clarify>b?</clarify><tool_call>{}</tool_call>"
    ids = tokenizer.encode(text + END, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text and ids[-1] == tokenizer.eos_token_id
    assert [len(tokenizer.encode(tag, add_special_tokens=False)) for tag in TAGS] == [1] * 6
    assert not set(tokenizer.convert_tokens_to_ids(list(TAGS))) & set(tokenizer.all_special_ids)


def test_embedded_template_holds_the_visible_dialogue_only(tokenizer):
    """The system text and the tools are dropped on purpose; the prompt ends where the agent's turn begins."""
    text = tokenizer.decode(render_prompt(tokenizer, [*MESSAGES[:3], CALL, tool(total=0, rows=[])]))
    assert text == ("<|user|>Hi.<|end|><|assistant|>Which day?<|end|><|user|>Friday.<|end|><|assistant|>"
                    + CALL["content"] + '<|end|><|tool|>{"total": 0, "rows": []}<|end|><|assistant|>')


def test_a_name_reads_the_same_wherever_it_stands(tokenizer):
    """A word takes the blank behind it, so that copying a name from a result or a request is copying its tokens."""
    inside = [tokenizer.encode(t, add_special_tokens=False) for t in ('"golden wok"', "(golden wok)", "at golden wok,")]
    name = tokenizer.encode("golden wok", add_special_tokens=False)
    assert all(any(ids[i:i + len(name)] == name for i in range(len(ids))) for ids in inside)


def test_pretraining_that_is_stopped_goes_on_to_the_same_weights(tmp_path, monkeypatch, capsys):
    """Six steps, saved every two; stopped in the fourth. The third is made again, and nothing is left but an ordinary folder."""
    step, calls = data.pretrain.learned_loss, []

    def pretrain(out, *flags, stop=None):
        def loss(*args):
            calls.append(out)
            if calls.count(out) == stop:
                raise KeyboardInterrupt
            return step(*args)
        monkeypatch.setattr(data.pretrain, "learned_loss", loss)
        monkeypatch.setattr("sys.argv", ["data.pretrain", "--out", str(tmp_path / out), "--towns", "60", "--steps", "6", "--batch-tokens", "1000",
                                         "--width", "16", "--layers", "1", *flags])
        data.pretrain.main()
        return (tmp_path / out / "model.safetensors").read_bytes()

    monkeypatch.setattr(data.pretrain, "SAVE_EVERY", 2)
    monkeypatch.setattr(data.pretrain.multiprocessing, "Pool", lambda: contextlib.nullcontext(SimpleNamespace(imap=map)))
    whole = pretrain("whole")
    with pytest.raises(SystemExit, match="there is no .*pretraining.safetensors"):
        pretrain("stopped", "--resume")
    with pytest.raises(KeyboardInterrupt):
        pretrain("stopped", stop=4)
    with pytest.raises(SystemExit, match=r"--lr was 0.01, is 0.1"):
        pretrain("stopped", "--resume", "--lr", "0.1")
    calls.clear()
    assert pretrain("stopped", "--resume") == whole and len(calls) == 4
    assert sorted(p.name for p in (tmp_path / "stopped").iterdir()) == sorted(p.name for p in (tmp_path / "whole").iterdir())
    assert not (tmp_path / "stopped" / "pretraining.safetensors").exists()


# ---- faults that were found once

def test_a_guess_is_reported_so_that_the_user_can_correct_it():
    """The careless agent guesses a vague slot; its report names the guess, and a wrong one is corrected."""
    corrected = 0
    for ambiguous, _ in pairs(60, (BASE_DOMAINS, ("vague",))):
        dialogue = play(ambiguous, Oracle(ambiguous.ambiguity, ambiguous.id, ask=0))
        text = " ".join(m["content"] for m in dialogue.messages)
        assert "None" not in text and "for  people" not in text
        corrected += dialogue.user.corrections
    assert corrected > 20


def test_the_other_requests_of_twins_are_the_same_to_the_letter():
    for ambiguous, clear in pairs(200):
        for (domain, a), (_, b) in zip(ambiguous.requests, clear.requests):
            if domain != ambiguous.ambiguity["domain"] and ambiguous.ambiguity["kind"] != "reference":
                assert a == b
