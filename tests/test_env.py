"""Values, tools and bookings, success, the scripted user, the loop, and who sees what. Parsing: test_parse.py."""
import dataclasses
import doctest
import hashlib
import json
import random
import re
import threading

import pytest

import env
from env import (MAX_CALLS, MAX_TURNS, REFERENCE, SYSTEM_PROMPT, TOOLS, Database, HumanUser, Scenario, ScriptedUser,
                 Session, arrival, booking_satisfies, meets, merge_roles, misread, name_key, named, normalise,
                 render_prompt, run_dialogues, score_dialogue, start_dialogue, to_minutes)
from data.speaker import Oracle, play
from data.towns import KINDS, scenario_pair

EVERYTHING = ("restaurant", "hotel", "attraction", "train", "taxi")


def wok(area, food="chinese"):
    return {"name": f"golden wok {area}", "area": area, "pricerange": "cheap", "food": food,
            "secret": "cook's birthday"}


def train(leave, arrive, day="friday"):
    return {"trainID": "TR1234", "departure": "cambridge", "destination": "ely", "day": day, "leaveAt": leave,
            "arriveBy": arrive}


TOWN = Database({
    "restaurant": [wok("north"), wok("south"), wok("east"),
                   {"name": "kohinoor", "area": "centre", "pricerange": "cheap", "food": "indian"},
                   {"name": "pizza hut fen ditton", "area": "east", "pricerange": "moderate", "food": "italian"},
                   {"name": "pizza express fen ditton", "area": "east", "pricerange": "moderate", "food": "italian"}],
    "hotel": [{"name": "Gonville Hotel", "area": "centre", "pricerange": "expensive", "type": "hotel", "stars": "3"},
              {"name": "old mill", "area": "west", "pricerange": "cheap", "type": "guesthouse", "stars": "2"}],
    "attraction": [{"name": "theatre royal", "area": "centre", "type": "theatre"},
                   {"name": "themed bar", "area": "west", "type": "nightclub"}],
    "train": [train("05:01", "07:44"), train("19:00", "19:50"), train("23:00", "24:07"), train("9:15", "10:05")]})
TABLE = {"name": "golden wok north", "people": "4", "day": "friday", "time": "18:00"}
ROOM = {"name": "old mill", "people": "2", "day": "monday", "stay": "3"}


def session(seed="s"):
    return Session(TOWN, seed)


def test_doctests():
    assert doctest.testmod(env).failed == 0 and doctest.testmod(env).attempted >= 8


# ---- values

@pytest.mark.parametrize("text, expected", [
    ("5:45 pm", "17:45"), ("12:30 pm", "12:30"), ("12:30 am", "00:30"), ("5 pm", "17:00"), ("9:15", "09:15"),
    ("1745", "17:45"), ("17.45", "17:45"), ("after 9:15", "09:15"), ("24:07", "24:07"), ("5:45 P.M.", "17:45"),
    ("noon", "12:00"), ("Midnight", "00:00")])
def test_times(text, expected):
    """E02: 12- and 24-hour times; 24:07 stays on the next day."""
    assert normalise("time", text) == expected


@pytest.mark.parametrize("text", ["9", "soon", "17:60", "48:00", "13 pm", "0:30 pm", "12:345", "17:4"])
def test_no_times(text):
    with pytest.raises(ValueError, match="is no time such as 18:30"):
        normalise("time", text)


@pytest.mark.parametrize("slot, value, expected", [
    ("area", "Center", "centre"), ("area", " the  North ", "north"), ("pricerange", "moderately priced", "moderate"),
    ("type", "guest house", "guesthouse"), ("internet", "free", "yes"), ("parking", True, "yes"),
    ("parking", False, "no"),
    ("people", 4, "4"), ("people", "04", "4"), ("stay", "3", "3"), ("name", "The  Golden WOK", "golden wok"),
    ("name", "theatre royal", "theatre royal"), ("name", "themed bar", "themed bar"), ("name", "A Tavola", "tavola")])
def test_normalise(slot, value, expected):
    """E01: articles are whole words: "theatre royal" does not become "atre royal"."""
    assert normalise(slot, value) == expected
    assert normalise(slot, expected) == expected  # once is enough


@pytest.mark.parametrize("slot, value", [
    ("people", "0"), ("people", "-1"), ("people", "two"), ("people", "2.0"), ("people", "3 or 4"), ("people", "³"),
    ("stay", "0"),
    ("stay", [2]), ("day", "someday"), ("area", "northish"), ("parking", "maybe"), ("pricerange", {"a": 1})])
def test_what_cannot_be_understood_is_refused_in_words(slot, value):
    """E17"""
    with pytest.raises(ValueError, match=f"^{slot}: .* is no"):
        normalise(slot, value)


@pytest.mark.parametrize("nothing", ["dontcare", "don't care", "do n't care", "not mentioned", "", None, "Any"])
def test_dontcare_is_no_filter(nothing):
    """E10: all rows every time."""
    assert session().call("query_attraction", {"area": nothing, "type": nothing})["total"] == 2
    assert session().call("query_train", {"leaveAt": nothing, "day": "friday"})["total"] == 4


# ---- names

def test_names_of_one_venue():
    """E01"""
    assert name_key("The Gonville Hotel") == name_key("gonville hotel") == name_key("Gonville") == "gonville"
    assert TOWN.venue("hotel", "The Gonville Hotel")["stars"] == TOWN.venue("hotel", "gonville")["stars"] == "3"
    assert [TOWN.venue("hotel", name)
            for name in ("the hotel", "the", "hotel", "", "old", "mill", "old millstone")] == [None] * 7
    assert TOWN.venue("attraction", "The Theatre Royal")["area"] == "centre"
    assert TOWN.venue("attraction", "atre royal") is None


def test_bare_name_is_the_prefix_of_its_branches():
    assert TOWN.venue("restaurant", "golden wok")["name"] == "golden wok north"  # books the first
    assert TOWN.venue("restaurant", "golden wok east")["name"] == "golden wok east"
    assert session().call("query_restaurant", {"name": "golden wok"})["total"] == 3
    assert session().call("query_restaurant", {"name": "golden w"})["total"] == 0  # whole words
    assert session().call("query_restaurant", {"name": "wok"})["total"] == 0


def test_near_names_stay_two_venues_and_typos_do_not_book():
    """E11"""
    s = session()
    assert TOWN.venue("restaurant", "pizza hut fen ditton") is not TOWN.venue("restaurant", "pizza express fen ditton")
    assert s.call("book_restaurant", {**TABLE, "name": "kihinoor"}) == {
        "error": "no restaurant is called 'kihinoor'; did you mean 'kohinoor'?"}
    assert s.ledger == {}


@pytest.mark.parametrize("name",
                         ['x" OR "1"="1', "x' OR '1'='1", "name", "trainid", "*", "%", ".*",
                          "golden wok; DROP TABLE restaurant"])
def test_names_are_no_query_language(name):
    """E13, E14, E16"""
    s, before = session(), json.dumps(TOWN.tables)
    assert "no restaurant is called" in s.call("book_restaurant", {**TABLE, "name": name})["error"]
    assert s.call("query_restaurant", {"name": name})["total"] == 0
    assert s.ledger == {} and json.dumps(TOWN.tables) == before


def test_named_needs_whole_words():
    assert named("table 14 at 3:30", ["4", "3", "14"]) == ["14"]
    assert named("The Golden Wok North, please", ["golden wok north", "golden wok south"]) == ["golden wok north"]
    assert named("golden wok", ["golden wok north", "golden wok south"]) == []


# ---- tools and bookings

def test_query_shows_schema_fields_of_five_rows_and_the_total():
    result = session().call("query_restaurant", {})
    assert result["total"] == 6 and len(result["rows"]) == 5
    assert result["rows"][0] == {"name": "golden wok north", "area": "north", "pricerange": "cheap", "food": "chinese"}


def test_booking_goes_into_the_ledger():
    s = session()
    result = s.call("book_restaurant", {**TABLE, "people": 4, "time": "6 pm", "name": "The Golden Wok South"})
    assert result == {"reference": result["reference"], "name": "golden wok south", "area": "south"}
    booking = s.ledger[result["reference"]]
    assert booking == {"domain": "restaurant", "row": wok("south"), "people": "4", "day": "friday", "time": "18:00"}
    room = s.call("book_hotel", ROOM)
    assert s.ledger[room["reference"]]["stay"] == "3" and len(s.ledger) == 2


def test_references_are_eight_characters_and_unique():
    s = session()
    references = [s.call("book_hotel", ROOM)["reference"] for _ in range(300)]
    assert len(set(references)) == 300 == len(s.ledger)
    assert all(REFERENCE.fullmatch(r) and len(r) == 8 for r in references)
    assert not REFERENCE.search("Your BOOKINGS number 12345678, abc12345, K7Q2M9XAB")
    first = [session(seed).call("book_hotel", ROOM)["reference"] for seed in "aab"]
    assert first[0] == first[1] != first[2]  # seeded


def test_taxi_gives_a_car_and_no_reference():
    s = session()
    taxi = s.call("book_taxi", {"departure": "ely", "destination": "the station", "leaveAt": "5 pm"})
    assert set(taxi) == {"car", "phone"} and s.ledger == {}
    way = {"departure": "ely", "destination": "cambridge"}
    assert s.call("book_taxi", way) == {"error": "book_taxi needs leaveAt or arriveBy"}
    assert "car" in s.call("book_taxi", {**way, "arriveBy": "10:00", "leaveAt": ""})


@pytest.mark.parametrize("name, arguments, message", [
    ("find_hotel", {}, "no tool 'find_hotel'; there are query_restaurant"),
    ("book", {}, "no tool 'book'"),
    ("query_hotel", {"colour": "red"}, "query_hotel has no argument 'colour'; it takes name, area"),
    ("query_train", {"trainID": "TR1234"}, "query_train has no argument 'trainID'"),
    ("book_hotel", {"name": "old mill", "people": "2"}, "book_hotel needs day, stay"),
    ("book_hotel", {**ROOM, "day": None}, "book_hotel needs day"),
    ("book_hotel", {**ROOM, "day": "dontcare"}, "book_hotel needs a definite day"),
    ("book_hotel", {**ROOM, "name": "the"}, "book_hotel needs a definite name"),
    ("book_hotel", {**ROOM, "name": "the hotel"}, "no hotel is called 'hotel'"),
    ("book_hotel", {**ROOM, "stay": 0}, "stay: 0 is no positive whole number"),
    ("book_hotel", {**ROOM, "people": 0}, "people: 0 is no positive whole number"),
    ("book_hotel", {**ROOM, "people": "two"}, "people: 'two' is no positive whole number"),
    ("book_restaurant", {**TABLE, "time": "evening"}, "time: 'evening' is no time such as 18:30"),
    ("book_restaurant", {**TABLE, "day": "tomorrow"}, "day: 'tomorrow' is none of monday, tuesday"),
    ("query_restaurant", {"area": ["north"]}, "area: .* is none of centre"),
    ("book_train", {"departure": "cambridge", "destination": "ely", "day": "friday", "leaveAt": "5:02", "people": 1},
     "no train from cambridge to ely leaves at 05:02 on friday")])
def test_errors_are_sentences_and_book_nothing(name, arguments, message):
    """E17 and unknown tools, arguments, missing and unreadable values."""
    s = session()
    result = s.call(name, arguments)
    assert list(result) == ["error"] and re.match(message, result["error"]) and s.ledger == {}


def test_nothing_leaks_between_dialogues():
    """E21: two dialogues in threads; the other's reference counts for nothing, the tables stay as they were."""
    before = hashlib.sha256(json.dumps(TOWN.tables).encode()).hexdigest()
    a, b = session("a"), session("b")
    threads = [threading.Thread(target=lambda: [a.call("book_restaurant", TABLE) for _ in range(50)]),
               threading.Thread(target=lambda: [b.call("query_restaurant", {"name": "golden wok"}) for _ in range(50)])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(a.ledger) == 50 and b.ledger == {}
    a.call("query_restaurant", {})["rows"][0]["area"] = "moon"  # a result is a copy
    assert hashlib.sha256(json.dumps(TOWN.tables).encode()).hexdigest() == before
    goal = {"restaurant": {"info": {}, "book": {"people": "4"}}}
    quoted = [{"role": "assistant", "content": f"Booked: {' '.join(a.ledger)}"}]
    assert score_dialogue(goal, a.ledger, quoted)[0] is True and score_dialogue(goal, b.ledger, quoted)[0] is False
    scenario = Scenario("x", goal, TOWN, [("restaurant", "A table.")])
    assert start_dialogue(scenario, lambda text: ("hi", "continue")).session.ledger == {}


# ---- trains

def test_times_of_trains_compare_as_minutes():
    """E04, E06, E07"""
    assert to_minutes("24:07") == 1447 and arrival(TOWN.tables["train"][2]) - to_minutes("23:00") == 67
    assert arrival(train("23:50", "00:40")) == 1440 + 40  # written without 24: the next day as well
    late = train("23:00", "24:07")
    assert not meets(late, "arriveBy", "23:59") and meets(late, "arriveBy", "24:30")
    assert meets(train("19:00", "19:50"), "leaveAt", "9:15")  # "19:00" < "9:15" as strings
    wishes = ({"leaveAt": "09:00"}, {"arriveBy": "19:50"})
    leaving = [[row["leaveAt"] for row in TOWN.query("train", wish)] for wish in wishes]
    assert leaving == [["9:15", "19:00", "23:00"], ["05:01", "9:15", "19:00"]]  # in order


@pytest.mark.parametrize("info, expected", [
    ({"arriveBy": "15:45"}, True), ({"leaveAt": "05:00"}, True), ({"leaveAt": "05:01"}, True),
    ({"leaveAt": "05:02"}, False),
    ({"arriveBy": "07:43"}, False), ({"destination": "Ely", "departure": "cambridge", "day": "friday"}, True),
    ({"day": "monday"}, False)])
def test_train_goal_is_a_bound(info, expected):
    """E04"""
    goal = {"train": {"info": info, "book": {"people": "2"}}}
    assert booking_satisfies(goal, {"domain": "train", "row": train("05:01", "07:44"), "people": "2"}) is expected
    assert not booking_satisfies(goal, {"domain": "train", "row": train("05:01", "07:44"), "people": "3"})


def test_book_train_past_midnight():
    wish = {"departure": "Cambridge", "destination": "ely", "day": "friday", "leaveAt": "11 pm", "people": "2"}
    result = session().call("book_train", wish)
    assert result.items() >= {"leaveAt": "23:00", "arriveBy": "24:07"}.items() and "trainID" not in result


# ---- success

GOAL = {"restaurant": {"info": {"name": "golden wok north"}, "book": {"people": "4", "day": "friday", "time": "18:00"}}}
RIGHT = {"domain": "restaurant", "row": wok("north"), "people": "4", "day": "friday", "time": "18:00"}
WRONG = {**RIGHT, "row": wok("south")}
A, B = "AAAA1111", "BBBB2222"


def said(*texts, role="assistant"):
    return [{"role": role, "content": text} for text in texts]


@pytest.mark.parametrize("ledger, messages, expected", [
    ({A: RIGHT}, said(f"Booked, reference {A}."), (True, 0)),
    ({A: RIGHT}, said("Booked."), (False, 0)),
    ({A: RIGHT}, said(f"Booked, reference {A.lower()}."), (False, 0)),            # verbatim
    ({A: RIGHT}, said(f"reference {A}", role="tool") + said("Booked."), (False, 0)),  # the user saw none of these
    ({A: RIGHT}, said(f"reference {A}?", role="user"), (False, 0)),
    ({A: RIGHT}, said(f'<tool_call>{{"name": "{A}", "arguments": {{}}}}</tool_call>'), (False, 0)),
    ({}, said("Booked, reference ZLM0JQQT."), (False, 0)),                        # E20: made up
    ({A: RIGHT}, said("Booked, reference ZLM0JQQT."), (False, 0)),
    ({A: WRONG}, said(f"reference {A}"), (False, 1)),
    ({A: WRONG, B: RIGHT}, said(f"reference {A}", f"now {B}"), (True, 1)),        # the last booking counts
    ({A: RIGHT, B: WRONG}, said(f"reference {A}", f"now {B}"), (False, 1)),
    ({A: WRONG, B: RIGHT}, said(f"reference {A}"), (False, 1)),                   # and its own reference
    ({A: {**RIGHT, "people": "5"}}, said(A), (False, 1)), ({A: {**RIGHT, "time": "18:30"}}, said(A), (False, 1)),
    ({A: {"domain": "hotel", "row": {"name": "old mill"}, "people": "2", "day": "monday", "stay": "3"}}, said(A),
     (False, 1))])
def test_success(ledger, messages, expected):
    """E20 and the rule of success."""
    assert score_dialogue(GOAL, ledger, messages) == expected


def test_success_needs_every_domain_with_a_booking():
    goal = {**GOAL, "hotel": {"info": {"area": "west"}, "book": {"people": "2", "day": "monday", "stay": "3"}},
            "taxi": {"info": {"leaveAt": "10:00"}}, "attraction": {"info": {"area": "centre"}}}
    room = {"domain": "hotel", "row": TOWN.tables["hotel"][1], "people": "2", "day": "monday", "stay": "3"}
    assert score_dialogue(goal, {A: RIGHT, B: room}, said(f"{A} and {B}")) == (True, 0)
    assert score_dialogue(goal, {A: RIGHT}, said(f"{A} and {B}")) == (False, 0)


@pytest.mark.parametrize("goal",
                         [{}, {"attraction": {"info": {"area": "west"}}}, {"restaurant": {"info": {"area": "west"}}},
                                  {"restaurant": {"info": {}, "book": {}}}, {"taxi": {"info": {"leaveAt": "10:00"}}}])
def test_goals_without_a_booking_are_not_scored(goal):
    """A booking that nobody wanted is a wrong one all the same."""
    assert score_dialogue(goal, {}, []) == (None, 0) and score_dialogue(goal, {A: RIGHT}, said(A)) == (None, 1)


def test_fail_book_is_a_second_way_to_success():
    """{**book, **fail_book}, not a mixture of the two."""
    goal = {"restaurant": {**GOAL["restaurant"], "fail_book": {"time": "17:00", "day": "monday"}}}
    outcomes = [booking_satisfies(goal, {**RIGHT, **change})
                for change in ({}, {"time": "17:00", "day": "monday"}, {"time": "17:00"}, {"day": "monday"})]
    assert outcomes == [True, True, False, False]


def test_fail_info_plays_no_part():
    """E25: only info counts."""
    goal = {"restaurant": {"info": {"food": "italian"}, "fail_info": {"food": "modern european"},
                           "book": {"people": "4"}}}
    assert booking_satisfies(goal, {**RIGHT, "row": wok("north", "italian")})
    assert not booking_satisfies(goal, {**RIGHT, "row": wok("north", "modern european")})


def test_flags_among_the_slots_are_ignored():
    """E23: `invalid` is a flag, not a slot; fail_book may be missing or hold flags too."""
    goal = {"hotel": {"info": {"name": "old mill"},
                      "book": {"people": "5", "day": "thursday", "invalid": True, "stay": "5"},
                      "fail_book": {"pre_invalid": False}}}
    booking = {"domain": "hotel", "row": TOWN.tables["hotel"][1], "people": "5", "day": "thursday", "stay": "5"}
    assert score_dialogue(goal, {A: booking}, said(A)) == (True, 0)
    assert score_dialogue(goal, {A: {**booking, "stay": "4"}}, said(A)) == (False, 1)
    assert "True" not in "".join(ScriptedUser(Scenario("e23", goal, TOWN, [("hotel", "A room.")])).values.values())


def test_goal_is_read_as_the_tools_read_it():
    goal = {"restaurant": {"info": {"name": "The Golden Wok North", "area": "dontcare"},
                           "book": {"people": 4, "day": "Friday", "time": "6 pm"}}}
    assert booking_satisfies(goal, RIGHT)
    goal["restaurant"]["info"]["name"] = "golden wok"  # a goal names its venue in full
    assert not booking_satisfies(goal, RIGHT)


# ---- the scripted user

def scenario(ambiguous=True, **kwargs):
    ambiguity = {"kind": "branch", "domain": "restaurant", "slot": "name", "value": "golden wok north",
                 "candidates": ["golden wok north", "golden wok south", "golden wok east"]}
    request = "A table at golden wok, for 4 people, on friday."  # no time
    return Scenario("s", GOAL, TOWN, [("restaurant", request)], ambiguity if ambiguous else None, **kwargs)


def user(**kwargs):
    u = ScriptedUser(scenario(), **kwargs)
    assert u(None) == ("A table at golden wok, for 4 people, on friday.", "continue")  # U01: neither branch nor time
    return u


def report(reference=A, name="golden wok north", people=4, day="friday", time="18:00"):
    return f"Your table at {name} is booked for {people} people on {day} at {time}. The reference is {reference}."


@pytest.mark.parametrize("question, told", [
    ("Which branch?", "north"), ("Which area would you like?", "north"), ("Golden wok north, south or east?", "north"),
    ("Do you mean the south or the east one?", "north"), ("At what time?", "18:00"), ("How many people?", "4"),
    ("Which day?", "friday")])
def test_answers_what_is_asked_and_only_that(question, told):
    for seed in range(20):
        answer, outcome = user(seed=seed)(question)
        assert outcome == "continue" and [v for v in ("north", "4", "friday", "18:00") if named(answer, [v])] == [told]


def test_answers_every_slot_of_one_question():
    answer, _ = user()("Which branch do you mean, and at what time?")
    assert named(answer, ["north", "18:00", "4", "friday"]) == ["north", "18:00"]


@pytest.mark.parametrize("question, expected", [
    ("Do you mean the north one?", "Yes, that one."), ("Do you mean golden wok south?", "No, not that one."),
    ("Shall I book it?", "Yes, please."), ("Do you need parking?", "I don't mind."),
    ("Which price range?", "I don't mind.")])
def test_yes_no_and_dont_mind(question, expected):
    """U05: "Shall I book it?" gets a yes and the dialogue goes on, so that the agent can book."""
    assert user()(question) == (expected, "continue")


def test_vague_questions_get_vague_answers():
    for question in ("Which one?", "Could you be more precise?", "What do you mean?"):
        for seed in range(20):
            answer, outcome = user(seed=seed)(question)
            assert outcome == "continue" and not any(named(answer, [v]) for v in ("north", "4", "friday", "18:00"))


def test_what_was_said_is_told_again_without_progress():
    u = user()
    assert [named(u("How many people?")[0], ["4"]) for _ in range(2)] == [["4"], ["4"]]
    assert u("How many people?")[1] == "gave_up"
    u = user()
    assert u("At what time?")[1] == "continue" and u.idle == 0  # new to the agent
    assert u("At what time?")[1] == "continue" and u.idle == 1


def test_gives_up_after_three_in_a_row_that_advance_nothing():
    u = user()
    assert [u("Hm.")[1] for _ in range(3)] == ["continue", "continue", "gave_up"]
    u = user()
    told = [u(t)[1] for t in ("Hm.", "Which one?", "Which branch?", "Hm.", "Hm.", "Which one?")]
    assert told == ["continue"] * 5 + ["gave_up"]


def test_one_refusal_then_out_of_scope():
    u = user()
    assert u("Do you need a taxi?") == ("No, I do not need that.", "continue")
    assert u("Which branch?")[1] == "continue"
    assert u("And a train?") == ("No, I do not need that.", "out_of_scope")


def test_right_report_ends_the_dialogue():
    text, outcome = user()(report())
    assert outcome == "done" and text


@pytest.mark.parametrize("wrong, right", [({"name": "golden wok south"}, "golden wok north"), ({"people": 3}, "4"),
                                          ({"day": "monday"}, "friday"), ({"time": "19:00"}, "18:00")])
def test_corrects_with_the_right_value_at_most_twice(wrong, right):
    u = user()
    for count, reference in enumerate((A, B), start=1):
        text, outcome = u(report(reference, **wrong))
        assert outcome == "continue" and named(text, [right]) and u.corrections == count
        assert not any(named(text, [v]) for v in ("golden wok north", "4", "friday", "18:00")
                       if v != right)  # that and no more
    text, outcome = u(report("CCCC3333", **wrong))
    assert outcome == "done" and u.corrections == 2


def test_corrections_off_accepts_a_wrong_report():
    u = user(max_corrections=0)
    assert u(report(name="golden wok south"))[1] == "done" and u.corrections == 0


def test_a_reference_heard_before_is_no_new_report():
    u = user()
    u(report(people=3))
    assert u(f"As I said, {A}.")[1] == "continue" and u.stage == 0


def test_user_is_not_able_to_tell_a_made_up_reference():
    """E20: it closes; the ledger decides."""
    assert user()("All booked, reference ZLM0JQQT.")[1] == "done"


def test_next_request_follows_the_report():
    goal = {**GOAL, "attraction": {"info": {"area": "west"}}}
    two = Scenario("two", goal, TOWN, [("restaurant", "A table."), ("attraction", "Something to visit.")])
    u = ScriptedUser(two)
    assert [u(None), u(report())] == [("A table.", "continue"), ("Something to visit.", "continue")]
    assert u("I found themed bar, in the west.")[1] == "done"  # nothing to book: what was said settles it


def test_same_seed_same_user():
    talk = ["Which branch?", "At what time?", "Which one?", report(people=3), report(B)]
    replies = [[u(t) for t in talk] for u in (user(seed=1), user(seed=1), user(seed=2), user(seed=3), user(seed=4))]
    assert replies[0] == replies[1] and any(r != replies[0] for r in replies[2:])


def test_never_tells_a_goal_value_nobody_asked_for():
    """U01: over 200 scenarios and random talk that asks for nothing; its own requests are all that it volunteers."""
    talk = ("Lovely weather.", "Do you like music?", "Let me check.", "", "Is it urgent?", "I can help with that!",
            "Which one?", "Could you be more precise?", "Shall I book it?", "Anything else?", "What do you mean?",
            "I found several places.", "Would you like me to go ahead and book?", "<think>x</think>", "Reference?",
            "Please wait...", "Why?")
    for seed in range(100):
        for pair in scenario_pair(seed, EVERYTHING, KINDS):
            rng, u = random.Random(seed), ScriptedUser(pair, seed)
            requests = [text for _, text in pair.requests]
            values = {str(v) for part in pair.goal.values() for slots in part.values() for v in slots.values()}
            text, outcome = u(None)
            assert (text, outcome) == (requests[0], "continue")
            while outcome == "continue":
                text, outcome = u(rng.choice(talk))
                assert text in requests or not [v for v in values if named(text, [v])], (pair.id, text)
            assert outcome in ("gave_up", "done")


def test_a_question_gets_its_own_value_only():
    """Over 200 scenarios of every kind: asked for the people, the user tells no other value."""
    for seed in range(100):
        for pair in scenario_pair(seed, EVERYTHING, KINDS):
            u = ScriptedUser(pair, seed)
            u(None)
            values = u.values
            text, outcome = u("How many people will it be?")
            others = {v for slot, v in values.items() if v != values.get("people")}
            assert outcome == "continue" and not [v for v in others if named(text, [v])], (pair.id, text)
            assert "people" not in values or named(text, [values["people"]]), (pair.id, text)


def test_misread_judges_the_text_alone():
    values = {"name": "golden wok north", "people": "4", "day": "friday"}
    assert misread("Booked, reference AAAA1111.", values) is None  # says nothing, so nothing is wrong
    assert misread("Golden wok north, for 4 people on friday.", values) is None
    assert misread("Golden wok south, for 4 people on friday.", values) == "name"
    assert misread("Booked the oak for 2 nights, with 3 stars", {"stay": "3", "stars": "3"}) == "stay"


def test_an_or_in_a_question_is_no_key_to_the_hidden_value():
    """Alternatives that are no venues and no candidates get nothing; two venues by name get what the user cares about."""
    from data.towns import scenario_pair
    ambiguous = next(a for seed in range(50) for a in scenario_pair(seed, ("hotel",), ("underspecified",)) if a.ambiguity)
    rows = [r["name"] for r in ambiguous.database.tables["hotel"]]
    value = ambiguous.ambiguity["value"]
    hear = lambda question: (u := ScriptedUser(ambiguous), u(None))[0](question)[0]
    assert value not in hear("Would you like tea or coffee?")
    assert value in hear(f"Would you like {rows[0]} or {rows[1]}?")


def test_human_user():
    prompts, lines = [], iter(["A table, please. ", ""])
    human = HumanUser(lambda prompt: prompts.append(prompt) or next(lines))
    assert human(None) == ("A table, please.", "continue") and human("Which day?") == ("", "done")
    assert prompts == ["you> ", "agent> Which day?\nyou> "] and human.corrections == 0

    def closed(prompt):
        raise EOFError
    assert HumanUser(closed)("Which day?") == ("", "done")


# ---- the loop

THINK = "<think>t</think>"
QUERY = THINK + '<tool_call>{"name": "query_restaurant", "arguments": {"name": "kohinoor"}}</tool_call>'


def agent_of(*texts):
    """Says the texts in turn, the last one for ever."""
    script = list(texts)
    return lambda histories: [script.pop(0) if len(script) > 1 else script[0] for _ in histories]


def user_of(*replies):
    """A spy: gives the replies in turn, the last one for ever, and keeps what it was told."""
    script, heard = list(replies), []

    def spy(text):
        heard.append(text)
        return script.pop(0) if len(script) > 1 else script[0]
    spy.heard = heard
    return spy


def talk(agent, u, **kwargs):
    return run_dialogues(agent, [start_dialogue(scenario(), u)], **kwargs)[0]


HI, ON = ("Hello.", "continue"), ("Go on.", "continue")


@pytest.mark.parametrize("agent, u, expected", [
    (agent_of(THINK + "Bye."), user_of(HI, ("Thanks.", "done")), "done"),
    (agent_of(THINK + "Hm."), user_of(HI, ("Useless.", "gave_up")), "gave_up"),
    (agent_of(THINK + "A taxi?"), user_of(HI, ("No.", "out_of_scope")), "out_of_scope"),
    (agent_of(THINK + "Hm."), user_of(HI, ("", "error")), "user_error"),
    (agent_of(THINK + "Hm."), user_of(("", "error")), "user_error"),  # before the first word
    (agent_of(THINK + "Hm."), user_of(HI, ON), "turn_limit"),
    (agent_of(QUERY), user_of(HI), "tool_limit"),
    (agent_of("<think>never closed"), user_of(HI), "malformed"),
    (agent_of(*[QUERY] * 5, "<think>never closed"), user_of(HI), "malformed"),   # the sixth step says which
    (agent_of(*["<think>"] * 5, QUERY), user_of(HI), "tool_limit"),
    (agent_of(None), user_of(HI), "context_full")])
def test_every_way_to_end(agent, u, expected):
    assert talk(agent, u).ended == expected


def test_turn_limit_is_exact_and_asks_for_no_answer_that_nobody_reads():
    """U03, U07: 20 agent turns, 19 answers and the opening."""
    u, calls = user_of(HI, ON), []
    dialogue = talk(lambda histories: calls.append(1) or [THINK + "keep going"], u)
    assert dialogue.ended == "turn_limit" and dialogue.turns == MAX_TURNS == 20 == len(calls) == len(dialogue.steps)
    assert u.heard == [None] + ["keep going"] * 19
    u = user_of(HI, ON)
    assert talk(agent_of(THINK + "x"), u, max_turns=5).turns == 5 and len(u.heard) == 5


def test_sixth_tool_slot_of_a_turn_ends():
    dialogue = talk(agent_of(QUERY), user_of(HI))
    assert MAX_CALLS == 5 and [m["role"] for m in dialogue.messages] == ["user"] + ["assistant", "tool"] * 5
    assert len(dialogue.steps) == 6 and dialogue.turns == 0
    again = talk(agent_of(*[QUERY] * 5, THINK + "Found it.", *[QUERY] * 5, THINK + "Found it."),
                 user_of(HI, ON, ("Bye.", "done")))
    assert again.ended == "done" and again.turns == 2  # the slots are a turn's


def test_malformed_turn_gets_one_readable_line_and_uses_a_slot():
    dialogue = talk(agent_of("<think>hm", *[QUERY] * 4, THINK + "Found it."), user_of(HI, ("Bye.", "done")))
    assert dialogue.messages[1] == {"role": "tool",
                                    "content": '{"error": "your turn could not be read: unclosed think"}'}
    assert dialogue.messages[2]["role"] == "assistant" and dialogue.ended == "done"
    assert talk(agent_of("<think>hm", QUERY), user_of(HI)).messages[-1]["role"] == "tool"
    assert len(talk(agent_of("<think>hm", QUERY), user_of(HI)).messages) == 1 + 1 + 2 * 4


@pytest.mark.parametrize("text, message", [
    ("<clarify>Which day?</clarify>", "Which day?"), ("<think></think><clarify>Which day?</clarify>", "Which day?"),
    (THINK + "Let me see. <clarify>Which day?</clarify>", "Which day?"), ("Which day?", "Which day?"),
    ('So: <tool_call>{"name": "query_train", "arguments": {}}</tool_call>',
     '<tool_call>{"name": "query_train", "arguments": {}}</tool_call>')])
def test_recoverable_malformed_turn_is_acted_on(text, message):
    dialogue = start_dialogue(scenario(), user_of(HI, ON))
    dialogue.step(text)
    assert dialogue.messages[1] == {"role": "assistant", "content": message} and dialogue.steps[0][2].errors


def test_unknown_tool_is_answered_and_the_dialogue_goes_on():
    dialogue = talk(agent_of(THINK + '<tool_call>{"name": "fly", "arguments": {}}</tool_call>', THINK + "Sorry."),
                    user_of(HI, ("Bye.", "done")))
    assert json.loads(dialogue.messages[2]["content"])["error"].startswith("no tool 'fly'") and dialogue.ended == "done"


def test_last_words_of_the_user_are_kept_and_silence_adds_no_message():
    """U04"""
    ends = (("No, that is all.", "done"), ("", "done"))
    last = [talk(agent_of(THINK + "Done."), user_of(HI, end)).messages[-1] for end in ends]
    assert last == [{"role": "user", "content": "No, that is all."}, {"role": "assistant", "content": "Done."}]


def test_yes_leaves_the_agent_a_turn_to_book():
    """U05: asks, books, reports; the booking is there."""
    book = THINK + f'<tool_call>{json.dumps({"name": "book_restaurant", "arguments": TABLE})}</tool_call>'

    def agent(histories):
        last = json.loads(histories[0][-1]["content"]) if histories[0][-1]["role"] == "tool" else {}
        if last:
            return [THINK + report(last["reference"])]
        return [THINK + "Shall I book it?"] if len(histories[0]) == 1 else [book]
    dialogue = talk(agent, ScriptedUser(scenario()))
    assert dialogue.ended == "done" and score_dialogue(GOAL, dialogue.session.ledger, dialogue.messages) == (True, 0)


def test_all_live_dialogues_advance_together():
    sizes, ends = [], [1, 3, 2]
    users = [user_of(HI, *[ON] * (n - 1), ("Bye.", "done")) for n in ends]
    dialogues = [start_dialogue(scenario(), u) for u in users]
    same = run_dialogues(lambda histories: sizes.append(len(histories)) or [THINK + "x"] * len(histories), dialogues)
    assert same is dialogues and sizes == [3, 2, 1] and [d.turns for d in dialogues] == ends


def test_steps_remember_the_history_they_saw():
    dialogue = talk(agent_of(QUERY, THINK + "Found it."), user_of(HI, ("Bye.", "done")))
    assert [(n, text) for n, text, _ in dialogue.steps] == [(1, QUERY), (3, THINK + "Found it.")]


def test_prefilled_think():
    """C06: told that the template opened the think, the loop reads the question; not told, it cannot."""
    text = "It is unclear which area.\n</think>\n<clarify>Which area?</clarify>"
    turns = [talk(agent_of(text), user_of(HI, ("Bye.", "done")), prefilled_think=p).steps[0][2] for p in (True, False)]
    assert turns[0][:2] == ("It is unclear which area.", "Which area?") and turns[0].errors == () and turns[1].errors


# ---- who sees what

def test_a_think_reaches_no_user_and_no_later_history():
    """C05: the visible history holds the bare question."""
    mark, u, seen = "S3CRET", user_of(HI, ON, ON, ("Bye.", "done")), []
    script = iter([f"<think>{mark}</think><clarify>Which day?</clarify>", QUERY.replace("t</think>", f"{mark}</think>"),
                   f"<think>{mark}<clarify>x</clarify></think>", f"<think>{mark}</think>It is open.", f"<think>{mark}",
                   f"<think>{mark}</think> so <think>{mark}</think>Good bye."])
    dialogue = talk(lambda histories: seen.append(json.dumps(histories)) or [next(script)], u)
    assert u.heard == [None, "Which day?", "It is open.", "Good bye."]
    assert mark not in json.dumps(dialogue.messages) and mark not in "".join(seen)
    assert dialogue.messages[1] == {"role": "assistant", "content": "Which day?"}
    assert mark in "".join(text for _, text, _ in dialogue.steps)  # kept as it was sampled


def test_the_user_hears_visible_agent_text_only():
    pair, heard = scenario_pair(1)[0], []

    class Spy(ScriptedUser):
        def __call__(self, text):
            heard.append(text)
            return super().__call__(text)
    oracle = Oracle(pair.ambiguity)
    dialogue = run_dialogues(lambda hs: [oracle(h) for h in hs], [start_dialogue(pair, Spy(pair))])[0]
    spoken = [m["content"] for m in dialogue.messages if m["role"] == "assistant"]
    visible = [text for text in spoken if not text.startswith("<tool_call>")]
    assert heard == [None, *visible] and not any("<" in text or "{" in text for text in visible)


def test_the_hidden_value_changes_no_prompt():
    for seed in range(40):
        pair = scenario_pair(seed, EVERYTHING, KINDS)[0]
        other = next(c for c in pair.ambiguity["candidates"] if c != pair.ambiguity["value"])
        changed = dataclasses.replace(pair, ambiguity={**pair.ambiguity, "value": other})
        assert play(pair).messages == play(changed).messages


def test_the_policy_sees_neither_goal_nor_hidden_fields():
    dialogue = talk(agent_of(THINK + '<tool_call>{"name": "query_restaurant", "arguments": {}}</tool_call>',
                             THINK + "x"), user_of(HI, ("Bye.", "done")))
    assert "birthday" not in json.dumps(dialogue.messages) and "18:00" not in json.dumps(dialogue.messages)


# ---- the prompt and other people's templates

CHATML = (  # Qwen2.5-like
    "{%- if tools %}{{ '<|im_start|>system\n' }}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{{ '\n# Tools\n' }}{%- for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{%- for m in messages %}{% if m.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{% elif not (loop.first and m.role == 'system') %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
LOOP, SHOW = "{{ bos_token }}{% for m in messages %}", "[{{ m.role }}]{{ m.content }}[/]"
CLOSE = "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
DROPS_TOOLS = LOOP + SHOW + CLOSE
NO_SYSTEM = (  # Gemma-like: raises on the system role and on two turns of one role in a row
    LOOP + "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    + SHOW + CLOSE)
NO_TOOL_ROLE = LOOP + "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + SHOW + CLOSE
FORGETS_TOOL_ROLE = LOOP + "{% if m.role != 'tool' %}" + SHOW + "{% endif %}" + CLOSE
HISTORY = [{"role": "user", "content": "A table."}, {"role": "assistant", "content": "Which day?"},
           {"role": "user", "content": "Friday."},
           {"role": "assistant", "content": '<tool_call>{"name": "query_restaurant", "arguments": {}}</tool_call>'},
           {"role": "tool", "content": '{"total": 0, "rows": []}'}]


def tokenizer_of(template):
    """One token a byte, a beginning-of-text token that the tokenizer adds on its own, and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(["<s>", *alphabet])}, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", clean_up_tokenization_spaces=False)
    tokenizer.chat_template = template
    return tokenizer


def prompt_text(template, messages):
    tokenizer = tokenizer_of(template)
    return tokenizer.decode(render_prompt(tokenizer, messages))


def test_prompt_is_ids_with_one_beginning():
    """C01, C02: a list of ints; the template's beginning-of-text is not doubled."""
    tokenizer = tokenizer_of(DROPS_TOOLS)
    ids = render_prompt(tokenizer, HISTORY)
    assert isinstance(ids, list) and all(type(i) is int for i in ids) and len(ids) > 1000
    assert tokenizer.encode("x")[0] == tokenizer.bos_token_id  # this one would add it
    assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id


def test_chatml_prompt():
    """C03: ends with the assistant's header; tools by the template, the system text as it is."""
    text = prompt_text(CHATML, HISTORY)
    assert text.endswith("<|im_start|>assistant\n") and text.startswith("<|im_start|>system\n" + SYSTEM_PROMPT)
    assert text.count('"query_restaurant", "description"') == 1 and all(f'"name": "{name}"' in text for name in TOOLS)
    assert '<|im_start|>user\n<tool_response>\n{"total": 0, "rows": []}\n</tool_response><|im_end|>' in text
    assert text.count("<|im_start|>") == text.count("<|im_end|>") + 1


def test_history_grows_by_appending():
    """C05: the prompt without its header is a prefix of every later prompt."""
    header = "<|im_start|>assistant\n"
    texts = [prompt_text(CHATML, HISTORY[:k]).removesuffix(header) for k in range(1, 6)]
    assert all(b.startswith(a) and b != a for a, b in zip(texts, texts[1:]))


def test_a_template_that_drops_tools_gets_them_in_the_system_text():
    text = prompt_text(DROPS_TOOLS, HISTORY)
    assert text.startswith("<s>[system]" + SYSTEM_PROMPT + "\nTools:\n")
    assert text.endswith("[tool]" + HISTORY[-1]["content"] + "[/][assistant]")
    assert all(f'"name": "{name}"' in text for name in TOOLS)


@pytest.mark.parametrize("template", [NO_SYSTEM, NO_TOOL_ROLE, FORGETS_TOOL_ROLE])
def test_a_template_without_system_or_tool_role_gets_them_in_the_users_turn(template):
    text = prompt_text(template, HISTORY)
    assert text.startswith("<s>[user]" + SYSTEM_PROMPT) and all(f'"name": "{name}"' in text for name in TOOLS)
    assert "\n\nA table.[/][assistant]Which day?[/][user]Friday.[/]" in text and "[system]" not in text
    assert "[tool]" not in text
    assert '[user]<tool_response>{"total": 0, "rows": []}</tool_response>[/]' in text


def test_merge_roles():
    merged = merge_roles([{"role": "system", "content": "s"}, *HISTORY, {"role": "tool", "content": "r"}])
    assert [m["role"] for m in merged] == ["user", "assistant", "user", "assistant", "user"]
    assert merged[0]["content"] == "s\n\nA table."
    assert merged[-1]["content"] == ('<tool_response>{"total": 0, "rows": []}</tool_response>\n\n'
                                     "<tool_response>r</tool_response>")


def test_system_prompt_shows_turns_that_parse():
    """The prompt's own examples obey the grammar and call tools that exist."""
    examples = [line for line in SYSTEM_PROMPT.splitlines() if line.startswith("<think>")]
    turns = [env.parse_turn(line) for line in examples]
    assert [turn.errors for turn in turns] == [(), (), ()]
    assert turns[0].clarify and turns[1].tool_call["name"] in TOOLS and REFERENCE.search(turns[2].reply)
    assert set(turns[1].tool_call["arguments"]) == set(TOOLS["book_restaurant"]["parameters"]["required"])


# ---- copying

def test_env_works_from_a_copy_of_its_file_alone(tmp_path):
    import shutil
    import subprocess
    import sys
    from pathlib import Path
    import env
    shutil.copy(Path(env.__file__), tmp_path / "env.py")
    code = "import env; print(env.parse_turn('<think>a</think>b').reply, env.Database({}).query('hotel', {}))"
    done = subprocess.run([sys.executable, "-I", "-c", "import sys; sys.path.insert(0, '.'); " + code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == "b []", done.stderr
