"""SpeakER and SpeakER-DPO: plans, wording and its inverse, filters, and the written files, by replaying them."""
import doctest
import json
import os
import random
import re
import time
from itertools import combinations
from pathlib import Path

import pytest

import data.build
import speakrl
from data.build import (FILES, NEAR, PLANNERS, REPEATED, UNFAITHFUL, Talker, build, candidate_fails, make_pair, name_groups, ngrams, overlap, repeated,
                        read_texts, skeleton, slots_of, vague_phrases)
from data.multiwoz import bookable, load_database, scenarios
from data.speaker import Oracle, clarify_due, play, read_history
from data.towns import read_request, request_domain, town_goal
from env import (BOOK_SLOTS, Database, Scenario, Session, booking_satisfies, meets, misread, normalise, parse_turn, score_dialogue)
from rewards import Reply


def test_doctests():
    assert doctest.testmod(data.build) == (0, 3)


def pairs(count, first=10**6):
    return [make_pair(f"t{k}", *town_goal(first + k)) for k in range(count)]


# ---- planning

RED = {"name": "red wok north", "area": "north", "pricerange": "cheap", "food": "thai"}
ROWS = [RED, {**RED, "name": "red wok south", "area": "south"}, {**RED, "name": "the red cork", "area": "east"},
        {**RED, "name": "old fork", "area": "west"}, {**RED, "name": "old fork city", "food": "greek"}]
TOWN = Database({"restaurant": ROWS})
BOOK = {"people": "4", "day": "friday", "time": "18:15"}


def plan(kind, info, book=BOOK, days=(), domain="restaurant", database=TOWN):
    return PLANNERS[kind](domain, info, dict(book), list(days), database, random.Random(0))


def test_words_that_begin_several_names():
    """"the red cork" begins like the red woks, for a user who says no article; "old fork" is a name itself."""
    assert {prefix: len(rows) for prefix, rows in name_groups(TOWN, "restaurant").items()} == {"red": 3, "red wok": 2}


def test_branch_plan():
    made = plan("branch", {"name": "red wok south"})
    assert made.ambiguity["value"] == "red wok south" == made.info["name"] and made.said["name"] in ("red", "red wok")
    assert made.ambiguity["candidates"] == [r["name"] for r in TOWN.query("restaurant", made.said)]
    assert plan("branch", {"name": "old fork"}) is None and plan("branch", {"food": "greek"}) is None


def test_underspecified_plan_needs_evidence_and_a_difference():
    """A single wish left unsaid would be mere omission: no ambiguity."""
    made = plan("underspecified", {"food": "thai", "area": "south"})  # only thai is served in the south
    assert made.ambiguity["slot"] == "area" and made.said == {"food": "thai"}
    assert made.ambiguity["candidates"] == ["north", "south", "east", "west"]
    assert plan("underspecified", {"area": "south"}) is None
    assert plan("underspecified", {"pricerange": "cheap", "food": "greek"}, database=Database({"restaurant": ROWS[4:]})) is None
    assert plan("underspecified", {"name": "old fork"}) is None


def test_reference_plan_needs_two_days():
    assert plan("reference", {"name": "old fork"}) is None
    made = plan("reference", {"name": "old fork"}, days=["monday"])
    assert made.ambiguity["candidates"] == ["monday", "friday"] and "friday" in made.arrival
    made = plan("reference", {"name": "old fork"}, days=["friday"])
    assert made.ambiguity["candidates"][0] == "friday" and made.ambiguity["candidates"][1] in made.arrival
    made = plan("reference", {"name": "old fork"}, days=["friday", "monday"])
    assert made.ambiguity["candidates"] == ["friday", "monday"] and made.arrival == ""


def test_vague_phrases_admit_the_value():
    assert vague_phrases("time", "18:15")["around six in the evening"] == ("17:45", "18:00", "18:15")
    assert vague_phrases("time", "18:15")["around half past six in the evening"] == ("18:15", "18:30", "18:45")
    for slot, values in (("people", "12345678"), ("stay", "12345678"), ("day", data.build.DAYS), ("time", ("09:00", "12:30", "23:45"))):
        for value in values:
            found = vague_phrases(slot, value)
            assert found and all(value in admits and len(admits) > 1 for admits in found.values())


def test_plans_cover_kinds_stages_and_several_in_one_dialogue():
    marks = [(a["kind"], [d for d, _ in s.requests].index(a["domain"])) for s, _ in pairs(250) for a in s.ambiguities]
    assert {m for m in marks} == {(kind, stage) for kind in data.build.KIND_WEIGHTS for stage in (0, 1, 2)} - {("reference", 0)}
    counts = [len(s.ambiguities) for s, _ in pairs(250)]
    assert {1, 2, 3} == set(counts) and all(len({a["domain"] for a in s.ambiguities}) == len(s.ambiguities) for s, _ in pairs(50))
    assert {c.twin_kind for _, c in pairs(100)} == {"plain", "db"}


# ---- wording

def test_rich_requests_read_back():
    """The clear plain twin says its goal, whole; the ambiguous one does not say what is open."""
    for ambiguous, clear in pairs(400):
        for domain, text in clear.requests if clear.twin_kind == "plain" else ():
            info, book = slots_of(clear.goal[domain])
            assert (request_domain(text), read_request(text, domain)) == (domain, {**info, **book}), text
        for a in ambiguous.ambiguities:
            said = read_request(dict(ambiguous.requests)[a["domain"]], a["domain"])
            if a["kind"] in ("vague", "reference") or (a["kind"], a["domain"] != "train") == ("underspecified", True):
                assert a["slot"] not in said
            if a["kind"] == "contradiction":
                assert said[a["slot"]] == a["candidates"][1]


def test_rich_answers_open_no_request_and_close():
    for ambiguous, _ in pairs(150):
        opened = [text for _, text in ambiguous.requests]
        said = [m["content"] for m in play(ambiguous, Oracle(ambiguous.ambiguity, "x", 1.0, ambiguous.further, rich=True), user=Talker).messages if m["role"] == "user"]
        assert [text for text in said if request_domain(text)] == opened


@pytest.mark.parametrize("text, expected", [
    ("Could you get me a restaurant with expensive prices serving italian food?", {"pricerange": "expensive", "food": "italian"}),
    ("For a party of 2 and this friday, find me a 4 star hotel.", {"people": "2", "day": "friday", "stars": "4", "type": "hotel"}),
    ("For a few of us, please book a cheap place to stay without internet and parking in the east.",
     {"pricerange": "cheap", "internet": "no", "parking": "no", "area": "east"}),
    ("I want a table at the curry place.", {"name": "curry"}), ("Book a table at golden something, for 1 person.", {"name": "golden", "people": "1"}),
    ("Our train gets in on monday. Book a table at red wok, on friday.", {"name": "red wok", "day": "friday"})])
def test_read_request_by_hand(text, expected):
    assert read_request(text, "hotel" if "star" in text or "stay" in text else "restaurant") == expected


def test_read_request_of_trains_by_hand():
    ends = {"departure": "cambridge", "destination": "ely"}
    for text, more in (("On friday, I would like to get a train to ely from cambridge, we have to be there by 10:00.", {"day": "friday", "arriveBy": "10:00"}),
                       ("Help me find a train from cambridge to ely. We are 4, departing at 09:00 or later.", {"people": "4", "leaveAt": "09:00"})):
        assert read_request(text, "train") == ends | more


# ---- filters

@pytest.mark.parametrize("n, expected", [(1, 9 / 11), (2, 7 / 11), (3, 5 / 11), (5, 3 / 9)])
def test_similarity_of_templates_that_differ_in_one_slot(n, expected):
    """D02."""
    north, south = (ngrams(f"I need a cheap hotel in the {area} of town", n) for area in ("north", "south"))
    assert overlap(north, south) == pytest.approx(expected)


def test_short_texts_are_no_duplicates_of_each_other():
    """D01: a text with fewer than n words is one n-gram."""
    kept = []
    for text in ("cat", "dog", "cat", "ok thanks"):
        if all(overlap(ngrams(text, 5), ngrams(old, 5)) < NEAR for old in kept):
            kept.append(text)
    assert kept == ["cat", "dog", "ok thanks"]


def test_a_candidate_fails_unless_the_goal_takes_it():
    """A real goal's fall-back booking is a success, so it is no failure to guess it."""
    goal = {"restaurant": {"info": {"name": "old fork"}, "book": BOOK, "fail_book": {"time": "18:30"}}}
    task = Scenario("x", goal, TOWN, [])
    about = {"kind": "vague", "domain": "restaurant", "slot": "time", "candidates": ["18:00", "18:15", "18:30"], "value": "18:15"}
    assert [candidate_fails(task, about, c) for c in about["candidates"]] == [True, False, False]


def test_skeleton():
    assert skeleton("At half past six? Around half past six in the evening, a thai table for 4 at red wok.", {"red wok": "name"}) \
        == "at half past six? <vague>, a <food> table for <n> at <name>."


# ---- the written files

@pytest.fixture(scope="module")
def built(tmp_path_factory):
    out = tmp_path_factory.mktemp("speaker")
    return out, build(out, 40, processes=1), lambda record: town_goal(int(record["goal_id"].removeprefix("town-")))[1]


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def visible(messages):
    """The messages as the user and the next turn see them."""
    shown = []
    for m in messages:
        turn = parse_turn(m["content"]) if m["role"] == "assistant" and m["content"].startswith("<think>") else None
        assert turn is None or turn.errors == ()
        said = turn and (turn.clarify or turn.reply or f"<tool_call>{json.dumps(turn.tool_call)}</tool_call>")
        shown.append({**m, "content": said or m["content"]})
    return shown


def replay(record, messages, database, change=lambda call: call):
    """(success, wrong bookings) of the tool calls of `messages`, run anew; the results on file must be what comes out."""
    removed = record.get("removed", {})
    database = Database({d: [r for r in rows if r.get("name") not in removed.get(d, ())] for d, rows in database.tables.items()})
    session, shown = Session(database, f"{record['id']} 0"), visible(messages)
    for call, result in zip(shown, shown[1:]):
        if call["role"] == "assistant" and call["content"].startswith("<tool_call>"):
            call = change(json.loads(call["content"][len("<tool_call>"):-len("</tool_call>")]))
            made = session.call(call["name"], call["arguments"])
            assert change is not UNCHANGED or json.loads(result["content"]) == made
    return score_dialogue(record["goal"], session.ledger, shown)


def UNCHANGED(call):
    return call


def misled(record, ambiguity, candidate, database):
    """What the dialogue comes to if its booking reads the open detail as `candidate`."""
    domain, slot = ambiguity["domain"], ambiguity["slot"]

    def change(call):
        if call["name"] == f"book_{domain}":
            arguments = dict(call["arguments"])
            if slot in arguments:
                arguments[slot] = candidate
            else:  # a wish: the first place that meets the others and has this value
                info, _ = slots_of(record["goal"][domain])
                wishes = {s: normalise(s, v) for s, v in {**info, slot: candidate}.items()}
                arguments["name"] = next(r["name"] for r in database.tables[domain] if all(meets(r, s, v) for s, v in wishes.items()))
            call = {**call, "arguments": arguments}
        return call
    return replay(record, record["messages"], database, change)[0]


def check_files(out, statistics, database_of):
    records = {name: lines(out / name) for name in FILES}
    dialogues = {d["id"]: d for d in records["dialogues.jsonl"]}
    assert len(dialogues) == len(records["dialogues.jsonl"]) == statistics["dialogues"] == len(records["twins.jsonl"])
    for d in dialogues.values():
        shown, database = visible(d["messages"]), database_of(d)
        assert replay(d, d["messages"], database, UNCHANGED) == (True, 0)
        asked = [k for k, m in enumerate(d["messages"]) if "<clarify>" in m["content"]]
        due = [[a for a in d["ambiguities"] if clarify_due(shown[:k], a)] for k in asked]
        assert [[a] for a in d["ambiguities"]] == due, d["id"]  # each asked once, where it is due
        for a in d["ambiguities"]:
            assert len(set(a["candidates"])) == len(a["candidates"]) >= 2 and a["value"] in a["candidates"]
            assert not all(misled(d, a, c, database) for c in a["candidates"]), d["id"]
        for x, y in combinations([shown[k]["content"] for k in asked], 2):
            assert overlap(ngrams(x, 2), ngrams(y, 2)) < REPEATED
    for twin in records["twins.jsonl"]:
        assert dialogues[twin["twin_id"]]["twin_id"] == twin["id"] and bool(twin["removed"]) == (twin["twin_kind"] == "db")
        assert replay(twin, twin["messages"], database_of(twin), UNCHANGED) == (True, 0)
        assert not any("<clarify>" in m["content"] for m in twin["messages"])
    for pair in records["dpo.jsonl"]:
        d = dialogues[pair["id"]]
        assert pair["prompt"] + pair["chosen"] == visible(d["messages"])[:len(pair["prompt"])] + d["messages"][len(pair["prompt"]):]
        assert "<clarify>" in pair["chosen"][0]["content"] and not any("<clarify>" in m["content"] for m in pair["rejected"])
        assert replay(d, pair["prompt"] + pair["rejected"], database_of(d), UNCHANGED)[0] is False
    assert len(records["dpo.jsonl"]) == statistics["dpo pairs"] > 0
    for name, of in (("sft.jsonl", records["dialogues.jsonl"]), ("sft_twins.jsonl", records["twins.jsonl"])):
        expected = [(visible(d["messages"][:k]), [m]) for d in of for k, m in enumerate(d["messages"]) if m["role"] == "assistant"]
        assert [(row["prompt"], row["completion"]) for row in records[name]] == expected
    points = speakrl.read_points(str(out / "points.jsonl"), "rule")
    assert {"ask", "answered", "twin", "other"} <= {p["stage"] for p in points} <= {"ask", "answered", "twin", "any", "other"}
    for p in points:
        assert p["clarify_expected"] is (p["stage"] == "ask") and p["messages"] == visible(p["messages"])
        assert not p["clarify_expected"] or clarify_due(p["messages"], p["ambiguity"])


def test_files_hold_what_they_promise(built):
    check_files(*built)


def test_statistics_add_up(built):
    out, statistics, _ = built
    assert statistics == json.loads((out / "statistics.json").read_text())
    assert statistics["attempts"] == statistics["dialogues"] + sum(statistics["dropped"].values())
    assert all(sum(shares.values()) == pytest.approx(1, abs=0.01) for shares in statistics["shares"].values())
    assert statistics["wording"]["first requests"]["texts"] == 40


def test_same_seed_same_bytes_on_any_number_of_processes(built, tmp_path):
    build(tmp_path / "a", 40, processes=3)
    build(tmp_path / "b", 10, seed=1, processes=2)
    for name in (*FILES, "statistics.json"):
        assert (tmp_path / "a" / name).read_bytes() == (built[0] / name).read_bytes()
    assert not set((tmp_path / "b" / "dialogues.jsonl").read_text().splitlines()) & set((built[0] / "dialogues.jsonl").read_text().splitlines())


@pytest.mark.parametrize("before", [0, 3])
def test_an_interruption_leaves_complete_files_only(tmp_path, before):
    if before:
        build(tmp_path, before, processes=1)
    held = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def stop(kept):
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path, 5, seed=7, processes=1, progress=stop)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == held and len(held) == (7 if before else 0)


@pytest.fixture
def one_goal(tmp_path):
    """A MultiWOZ folder of one validation goal: all its dialogues have the same goal."""
    table = {"info": {"food": "thai", "area": "south"}, "book": {**BOOK, "invalid": False}}
    for name, content in {"goals_val.json": {"A": {"restaurant": table}}, "restaurant_db.json": ROWS,
                          "hotel_db.json": [{**RED, "type": "hotel", "stars": "4", "internet": "yes", "parking": "no"}],
                          "attraction_db.json": [{**RED, "type": "park"}],
                          "train_db.json": [{"trainID": "T", "departure": "x", "destination": "y", "day": "monday", "leaveAt": "10:00", "arriveBy": "11:00"}]}.items():
        (tmp_path / name).write_text(json.dumps(content))
    return tmp_path


def test_near_identical_dialogues_of_a_goal_are_dropped(one_goal, monkeypatch):
    monkeypatch.setattr(data.build, "NEAR", 0.2)  # at toy size; filtered in this process
    statistics = build(one_goal / "out", 25, multiwoz=str(one_goal), processes=1)
    assert statistics["dropped"]["nearly the same as another of its goal"] > 0
    check_files(one_goal / "out", statistics, lambda record: load_database(one_goal))
    grams = [ngrams(" | ".join([m["content"] for m in visible(d["messages"]) if m["role"] == "user"]
                               + [m["content"] for m, raw in zip(visible(d["messages"]), d["messages"]) if "<clarify>" in raw["content"]]), 3)
             for d in lines(one_goal / "out" / "dialogues.jsonl")]
    assert max(overlap(a, b) for a, b in combinations(grams, 2)) < 0.2


def test_fewer_where_the_goals_give_no_more(one_goal):
    """A goal without a booking leaves nothing open that could fail."""
    goal = {"restaurant": {"info": {"food": "thai"}, "book": {**BOOK, "people": "1"}}}
    (one_goal / "goals_val.json").write_text(json.dumps({"A": goal}))
    (one_goal / "restaurant_db.json").write_text(json.dumps(ROWS[3:]))
    statistics = build(one_goal / "out", 2, multiwoz=str(one_goal), processes=1)
    assert 0 < statistics["dialogues"] <= 2


def test_the_sample_for_reading_is_what_the_builder_makes(built):
    sample = (Path(data.build.__file__).with_name("sample.txt")).read_text(encoding="utf-8")
    assert sample.startswith("\n".join(data.build.readable(d) for d in lines(built[0] / "dialogues.jsonl")))
    assert sample.count("    open: ") >= 200 and len(sample) < 500_000


def test_command(tmp_path, capsys):
    assert speakrl.main(["data", "--n", "4", "--out", str(tmp_path / "out")]) == 0
    assert "4 dialogues of" in capsys.readouterr().out and len(lines(tmp_path / "out" / "dialogues.jsonl")) == 4
    assert speakrl.main(["data", "--n", "4", "--multiwoz", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == f"speakrl: --multiwoz: {tmp_path}: no goals_val.json and no data.json in it\n"
    assert speakrl.main(["data", "--n", "0"]) == 2
    (tmp_path / "file").write_text("")
    assert speakrl.main(["data", "--n", "4", "--out", str(tmp_path / "file" / "x")]) == 2
    assert "x cannot be built: [Errno 20] Not a directory" in capsys.readouterr().err


# ---- a language model writes

def writer(change, said=None):
    """A language model that changes the planned texts: change(who, text) -> text."""
    def complete(requests):
        replies = []
        for request in requests:
            asked = json.loads(request.messages[1]["content"].split("<dialogue>\n")[1].split("\n</dialogue>")[0])
            text = json.dumps({"texts": [change(one["who"], one["text"]) for one in asked["texts"]]})
            request.check(text)
            if said is not None:
                said.append(asked)
            replies.append(Reply(text, model="fake"))
        return replies
    return complete


def test_a_writer_that_changes_nothing_gives_the_same_files(built, tmp_path):
    build(tmp_path, 40, complete=writer(lambda who, text: text))
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (built[0] / name).read_bytes()


def other_words(who, text):
    return f"Well, {text}" if who == "user" else text.replace("Which", "So, which") if "?" in text else f"All right. {text}"


def test_other_words_reach_every_file_and_are_replayed(built, tmp_path):
    """One request a dialogue holds all its variants, so what is the same in them stays the same; the careless side only where it makes a pair."""
    said = []
    statistics = build(tmp_path, 40, complete=writer(other_words, said))
    check_files(tmp_path, statistics, built[2])
    assert statistics["shares"]["writer"] == {"fake": 1.0} and len(said) == statistics["attempts"] == 40
    assert {len(asked["variants"]) for asked in said} == {2, 3} and all(len(set(map(str, a["texts"]))) == len(a["texts"]) for a in said)
    for name in FILES:
        for record in lines(tmp_path / name):
            some = [m for key in ("messages", "prompt", "completion", "chosen", "rejected") for m in record.get(key, [])]
            assert all(m["content"].startswith("Well, ") for m in some if m["role"] == "user")


@pytest.fixture(scope="module")
def plans():
    """A few planned dialogues with every kind of ambiguity."""
    played = [one for k in range(30) if isinstance(one := data.build.attempt(k, 0, None), data.build.Played)]
    of_kind = lambda kind: [p for p in played if p.dialogue.scenario.ambiguity["kind"] == kind][:3]
    return [plan for kind in PLANNERS for plan in of_kind(kind)]


def test_what_has_to_stay_is_named_to_the_writer(plans):
    """Vague words and "the same day" whole; references to the letter."""
    assert {a["kind"] for plan in plans for a in plan.dialogue.scenario.ambiguities} == set(PLANNERS)
    for plan in plans:
        asked = json.loads(data.build.request_for(plan).messages[1]["content"].split("\n")[1])["texts"]
        keep = {one["text"]: one["keep"] for one in asked}
        for a in plan.dialogue.scenario.ambiguities:
            text = dict(plan.dialogue.scenario.requests)[a["domain"]]
            phrases = [k for k in keep[text] if k.lower() in (*VAGUE_PHRASES, *data.build.FIXED) or k.lower().startswith(data.build.ABOUT)]
            assert phrases or a["kind"] not in ("vague", "reference"), text
        for reference in plan.dialogue.session.ledger:
            assert any(reference in keep[text] for text in keep if reference in text)


VAGUE_PHRASES = [phrase for table in (data.build.VAGUE, data.build.MORE_VAGUE) for phrases in table.values() for phrase in phrases]


def of(speaker, old, new):
    return lambda who, text: re.sub(old, new, text) if who == speaker else text


@pytest.mark.parametrize("change, why", [
    (of("user", "friday", "saturday"), {0}), (of("user", r"\b(\d) people", "many people"), {0}), (of("assistant", "friday", "that day"), {0}),
    (of("user", "|".join(VAGUE_PHRASES), "whenever"), {0}), (of("user", "same day", "day as before"), {0}), (of("user", r"\.$", ". At 18:00."), {0}),
    (of("user", r"\.$", ", three of us."), {0}),
    (of("user", "(table|room|eat|stay) at ", "seat near "), {1}), (of("user", r"\.$", ". I don't mind."), {1}),
    (of("user", r"\.$", ". I need a room at it."), {1}), (of("assistant", r"\?$", "? What is your budget?"), {2, 3}), (of("assistant", r"\?$", ", or paris?"), {2}),
    (of("assistant", r"\?$", "."), {3}), (of("assistant", "[A-Z0-9]{8}", lambda m: m[0].lower()), {3}), (of("assistant", r"\?$", "</clarify>?"), {3})])
def test_words_that_say_something_else_are_dropped(change, why, plans):
    """Each wherever it can: what it left as it was is kept, all else is dropped, and the reason is told."""
    made = data.build.rewritten(plans, writer(change))
    changed = [any(change(m["role"], m["content"]) != m["content"] for d in data.build.variants(plan) for m in d.messages
                   if m["role"] != "tool" and "<tool_call>" not in m["content"]) for plan in plans]
    assert any(changed) and {one.get("dropped") for one, other in zip(made, changed) if other} == {UNFAITHFUL[k] for k in why}
    assert not any("dropped" in one for one, other in zip(made, changed) if not other)


def test_a_writer_without_an_answer_is_counted_and_nothing_stands_in(tmp_path):
    turns = iter(range(10**6))
    refuse = lambda replies: [Reply(None, "refusal") if next(turns) % 2 else reply for reply in replies]
    statistics = build(tmp_path, 5, complete=lambda requests: refuse(writer(other_words)(requests)))
    assert statistics["dialogues"] == 5 and statistics["dropped"]["the writer gave no answer: refusal"] == 4
    for text in ("", "{}", '{"texts": []}', '{"texts": ["a"]}', '{"texts": ["a", " "]}', '{"texts": ["a", 5]}', "[" * 10**5):
        with pytest.raises(ValueError):
            read_texts(text, 2)
    assert read_texts('{"texts": ["a\\n b", "c"]}', 2) == ["a b", "c"]


# ---- faults that real goals showed

def test_an_arrival_that_is_also_a_candidate_is_no_misreading():
    """Trains every hour that take one: 06:01 is when this one arrives and the next one leaves."""
    wants, open_hours = {"leaveAt": "05:01", "arriveBy": "06:01"}, ("05:01", "06:01", "07:01")
    assert misread("Your train leaves at 05:01, for 2 people.", wants, open_hours) is None
    assert misread("Your train leaves at 07:01, for 2 people.", wants, open_hours) == "leaveAt"


def test_an_answer_about_leaving_says_nothing_of_arriving():
    rows = [{"departure": "cambridge", "destination": "ely", "day": "friday", "leaveAt": f"{h}:01", "arriveBy": f"{h + 1}:01"} for h in (20, 21, 22)]
    history = [("user", "I need a train from cambridge to ely, on friday."), ("assistant", '<tool_call>{"name": "query_train", "arguments": {}}</tool_call>'),
               ("tool", json.dumps({"total": 3, "rows": rows})), ("assistant", "At what time?"), ("user", "The 22:01 one.")]
    said = read_history([{"role": role, "content": text} for role, text in history]).said
    assert said == {"departure": "cambridge", "destination": "ely", "day": "friday", "leaveAt": "22:01"}


def test_no_preference_is_not_no_internet():
    rows = [{"name": "avalon", "stars": "4", "internet": "no"}, {"name": "old mill", "stars": "3", "internet": "yes"}]
    history = [("user", "I am looking for a hotel."), ("assistant", '<tool_call>{"name": "query_hotel", "arguments": {}}</tool_call>'),
               ("tool", json.dumps({"total": 2, "rows": rows})), ("assistant", "How many stars?"), ("user", "4 stars. I have no preference beyond that.")]
    assert read_history([{"role": role, "content": text} for role, text in history]).said == {"type": "hotel", "stars": "4"}


def test_an_answer_may_name_what_the_five_rows_do_not_show():
    about = {"kind": "underspecified", "domain": "restaurant", "slot": "food", "candidates": ["thai", "greek", "indian"], "value": "indian"}
    history = [("user", "I am looking for a cheap restaurant."), ("assistant", '<tool_call>{"name": "query_restaurant", "arguments": {}}</tool_call>'),
               ("tool", json.dumps({"total": 9, "rows": ROWS})), ("assistant", "Which food: thai or greek?"), ("user", "Indian, please.")]
    said = read_history([{"role": role, "content": text} for role, text in history], [about]).said
    assert said == {"pricerange": "cheap", "food": "indian"}


# ---- real MultiWOZ

@pytest.fixture(scope="module")
def folder():
    if "MULTIWOZ_DIR" not in os.environ:
        pytest.skip("MULTIWOZ_DIR is not set: tests on real MultiWOZ data are skipped")
    return os.environ["MULTIWOZ_DIR"]


def test_files_from_real_goals(folder, tmp_path):
    database, statistics = load_database(folder), build(tmp_path, 40, multiwoz=folder, processes=1)
    check_files(tmp_path, statistics, lambda record: database)
    train = {s.id for s in scenarios(folder, "train") if bookable(s.goal)}
    assert {d["goal_id"] for d in lines(tmp_path / "dialogues.jsonl")} <= train
    assert statistics["wording"]["human user turns"]["texts"] > 7000


def test_real_name_groups(folder):
    groups = {prefix: [row["name"] for row in rows] for prefix, rows in name_groups(load_database(folder), "restaurant").items()}
    assert set(groups) == {"cambridge", "curry", "golden", "pizza hut", "rice", "royal"}
    assert groups["pizza hut"] == ["pizza hut city centre", "pizza hut cherry hinton", "pizza hut fen ditton"] or len(groups["pizza hut"]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("source", ["towns", "multiwoz"])
def test_full_size(source, request, tmp_path):
    """25 000 in five minutes on two free cores, with at least 2 000 skeletons of first requests, none above 1 %."""
    folder = request.getfixturevalue("folder") if source == "multiwoz" else ""
    began = time.time()
    statistics = build(tmp_path, 25000, multiwoz=folder, processes=2)
    print(data.build.report(statistics))
    assert time.time() - began < 300 and statistics["dialogues"] == 25000
    assert statistics["first-request skeletons"] >= 2000 and statistics["commonest skeleton"] < 0.01
    database = load_database(folder) if folder else None
    check_files(tmp_path, statistics, lambda record: database or town_goal(int(record["goal_id"].removeprefix("town-")))[1])


def test_repeated_questions():
    """D02."""
    assert repeated(["Which day should I book?", "How many?", "Which day should I book?"])
    assert not repeated(["Which day?", "How many people?"]) and not repeated([])
