"""The grammar of a turn: what is well formed, which rules broke, and what of a malformed turn may be shown."""
import random
import time

import pytest

from env import Turn, parse_turn

CALL = '{"name": "find_hotel", "arguments": {"area": "north"}}'
CALL_DICT = {"name": "find_hotel", "arguments": {"area": "north"}}
END_MARKERS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "</s>")
NOTHING = (None, None, None)


def asks(question):
    return (question, None, None)


def calls(call):
    return (None, call, None)


def says(reply):
    return (None, None, reply)


def action(turn):
    return (turn.clarify, turn.tool_call, turn.reply)


# ---- well-formed turns

@pytest.mark.parametrize("text, think, expected", [
    ("<think>a</think><clarify>Which day?</clarify>", "a", asks("Which day?")),
    ("<think>\nThe area is missing.\n</think>\n<clarify>Which area?</clarify>", "The area is missing.",
     asks("Which area?")),  # P01
    ("\n <think>two\nlines</think>\n\n<clarify>\nWhich day?\nWhich time?\n</clarify>\n", "two\nlines",
     asks("Which day?\nWhich time?")),
    (f"<think>a</think><tool_call>{CALL}</tool_call>", "a", calls(CALL_DICT)),
    (f"<think>a</think>\n<tool_call>\n{CALL}\n</tool_call>\n", "a", calls(CALL_DICT)),
    ('<think>a</think><tool_call>{"arguments": {}, "name": "f"}</tool_call>', "a",
     calls({"name": "f", "arguments": {}})),
    ("<think>a</think>It is booked.", "a", says("It is booked.")),
    ("<think>a</think>\n\nIt is booked.\nReference X1.\n", "a", says("It is booked.\nReference X1.")),
    ("<think>a < b > c <b>bold</b> </thinking></think>1 < 2 <b>bold</b>", "a < b > c <b>bold</b> </thinking>",
     says("1 < 2 <b>bold</b>")),  # only tags of the grammar count
])
def test_clean_turn(text, think, expected):
    """P01, P04: blanks and new lines are free between the blocks, and '.' must match a new line."""
    assert parse_turn(text) == Turn(think, *expected, ())


def test_private_text_stays_in_the_think():
    """P17: a stop word inside the think reaches nobody."""
    turn = parse_turn("<think>secret ###STOP###</think><clarify>Which day?</clarify>")
    assert turn == Turn("secret ###STOP###", "Which day?", None, None, ())


# ---- malformed turns: which rules broke, and what may still be shown
# text, expected (clarify, tool_call, reply), expected errors

MALFORMED = {
    "empty blocks (P13)": [
        ("<think></think><clarify></clarify>", NOTHING, ("blank think", "blank clarify")),
        ("<think> </think><clarify> ? </clarify>", asks("?"), ("blank think",)),
        ("<think> \n </think>Hello.", says("Hello."), ("blank think",)),
        ("<think>a</think><clarify> \n</clarify>", NOTHING, ("blank clarify",)),
        ("<think>a</think><tool_call> </tool_call>", NOTHING, ("blank tool_call",)),
        ("<think>a</think>", NOTHING, ("no action",)),
        ("<think>a</think> \n", NOTHING, ("no action",)),
        ("", NOTHING, ("no think", "no action")),
        (" \n", NOTHING, ("no think", "no action")),
    ],
    "no think": [
        ("<clarify>Which day?</clarify>", asks("Which day?"), ("no think",)),
        (f"<tool_call>{CALL}</tool_call>", calls(CALL_DICT), ("no think",)),
        ("Hello.", says("Hello."), ("no think",)),
        ("Sure! <clarify>Which day?</clarify>", asks("Which day?"), ("text before", "no think")),
    ],
    "two thinks (P02)": [
        ("<think>a</think><think>b</think><clarify>c</clarify>", asks("c"), ("two thinks",)),
        ("<think>a</think> hm <think>b</think>c", says("c"), ("text between", "two thinks")),
        ("<think>a</think><clarify>b?</clarify><think>c</think>", NOTHING, ("wrong order", "two thinks")),
        ("<think>a</think><clarify>b?</clarify><think>c</think>d", says("d"),
         ("wrong order", "two thinks", "text after")),
        ("<think>a</think><clarify>b?</clarify>" * 50, asks("b?"), ("wrong order", "two thinks", "two actions")),  # P16
    ],
    "two actions": [
        ("<think>a</think><clarify>b?</clarify><clarify>c?</clarify>", NOTHING, ("two actions",)),
        (f"<think>a</think><clarify>b?</clarify><tool_call>{CALL}</tool_call>", NOTHING, ("two actions",)),
        ("<think>a</think>" + f"<tool_call>{CALL}</tool_call>" * 2, NOTHING, ("two actions",)),
        ("<think>a</think><clarify>b?</clarify><tool_call>{</tool_call>", NOTHING, ("two actions", "bad json")),
        ("<think>a</think><clarify></clarify><clarify>b?</clarify>", NOTHING, ("blank clarify", "two actions")),
    ],
    "order and nesting (P14)": [
        ("<clarify>b?</clarify><think>a</think>", NOTHING, ("wrong order",)),
        ("Hello. <think>a</think>", NOTHING, ("text before", "no action")),
        ("</think>a<think>", NOTHING, ("stray tag", "text before", "unclosed think")),
        ("<think>a</think></clarify>b?<clarify>", NOTHING, ("stray tag", "text between", "unclosed clarify")),
        ("<think>a</think>b?</clarify>", NOTHING, ("text between", "stray tag", "no action")),
        ("<think>a</think><clarify>b?</tool_call>", NOTHING, ("tag in clarify", "unclosed clarify")),
        (f"<think>a</think>{CALL}</tool_call><clarify>", NOTHING, ("text between", "stray tag", "unclosed clarify")),
        ("<think>a</think><clarify>b <clarify>c?</clarify></clarify>", NOTHING, ("tag in clarify", "stray tag")),
        (f"<think>a</think><clarify>b <tool_call>{CALL}</tool_call></clarify>", NOTHING, ("tag in clarify",)),
        ("<think>a</think><clarify>b <think>c</think> d?</clarify>", NOTHING, ("tag in clarify",)),
        ("<think>a</think><clarify>b </think> c?</clarify>", NOTHING, ("tag in clarify",)),
        ('<think>a</think><tool_call>{"name": "f", "arguments": {"x": "</think>"}}</tool_call>', NOTHING,
         ("tag in tool_call",)),
        ("<clarify>b?<think>a</think></clarify>", NOTHING, ("tag in clarify", "no think")),
        ("<think>a<think>b</think> outer text", NOTHING, ("tag in think",)),  # the outer think is still open
        ("<think>a<think>b</think> c</think>d", says("d"), ("tag in think", "text between", "stray tag")),
    ],
    "tags quoted inside the think (P09)": [
        ("<think>I could use <clarify> here</think><clarify>Which day?</clarify>", asks("Which day?"),
         ("tag in think",)),
        ("<think>they typed </think> before</think><clarify>Which day?</clarify>", asks("Which day?"),
         ("text between", "stray tag")),
        ("<think>no </clarify> yet</think>Hello.", says("Hello."), ("tag in think",)),
        ("<think>a <clarify>b?</clarify></think><clarify>Which day?</clarify>", NOTHING, ("tag in think",)),
        ("<think>a <clarify>b?</clarify></think>Hello.", NOTHING, ("tag in think",)),
        (f"<think>or <clarify> or <tool_call>{CALL}</tool_call></think>Hello.", NOTHING, ("tag in think",)),
        (f"<think>a</think><tool_call>{CALL}</tool_call></think>Hello.", NOTHING, ("stray tag", "text after")),
    ],
    "text outside the blocks (P04)": [
        ("Sure! <think>a</think><clarify>b?</clarify>", asks("b?"), ("text before",)),
        ("<think>a</think> so <clarify>b?</clarify>", asks("b?"), ("text between",)),
        ("<think>a</think><clarify>b?</clarify> Thanks!", asks("b?"), ("text after",)),
        (f"x<think>a</think>y<tool_call>{CALL}</tool_call>z", calls(CALL_DICT),
         ("text before", "text between", "text after")),
        ("Sure! <think>a</think>Hello.", says("Hello."), ("text before",)),
    ],
    "unclosed blocks (P06, P07, P08)": [
        ("<think>The user did not say which", NOTHING, ("unclosed think",)),
        ("<think>", NOTHING, ("unclosed think",)),
        ("<think>a<clarify>b?</clarify>", NOTHING, ("tag in think", "unclosed think")),
        ("<think>a</think>Hello.<think>b", NOTHING, ("text between", "two thinks", "unclosed think")),
        ("<clarify>b?</clarify><think>a", NOTHING, ("wrong order", "unclosed think")),
        ("<think>a</think><clarify>Which area?", NOTHING, ("unclosed clarify",)),
        ("<think>a</think><clarify>Which day?<clarify>", NOTHING, ("tag in clarify", "unclosed clarify")),
        ('<think>a</think><tool_call>{"name": "f", "argu', NOTHING, ("unclosed tool_call",)),
        ("<think>a</think><clarify>b?</clarify><tool_call>{", asks("b?"), ("two actions", "unclosed tool_call")),
        ("<think>a</think><clarify>b?</clarify", NOTHING, ("unclosed clarify",)),
    ],
    "look-alike tags": [  # never a block, never shown as a plain reply
        ("<Think>a</Think>Hello.", NOTHING, ("misspelt tag", "text before", "no think")),
        ("<Think>a</Think><clarify>b?</clarify>", asks("b?"), ("misspelt tag", "text before", "no think")),
        ("<THINK>a <clarify>draft</clarify></THINK>", NOTHING, ("misspelt tag", "text before", "no think")),
        ("<THINK>a <clarify>draft</clarify>", NOTHING, ("misspelt tag", "text before", "no think")),
        ("<think>a</Think><clarify>b?</clarify>", NOTHING, ("misspelt tag", "tag in think", "unclosed think")),
        ("<think>a</think><CLARIFY>b?</CLARIFY>", NOTHING, ("misspelt tag", "text between", "no action")),
        ("<think>a</think><clarify>b?</Clarify>", NOTHING, ("misspelt tag", "tag in clarify", "unclosed clarify")),
        ("<think>a</think>Hello <Tool_Call>", NOTHING, ("text between", "misspelt tag", "no action")),
        ("<think >a</think >Hello.", NOTHING, ("misspelt tag", "text before", "no think")),
        ("<think>a</think>Hello < / clarify >", NOTHING, ("text between", "misspelt tag", "no action")),
    ],
    "tool calls that are none": [
        (f"<think>a</think><tool_call>{body}</tool_call>", NOTHING, errors) for body, errors in [
            ("find_hotel(north)", ("bad json",)),
            ("{'name': 'f', 'arguments': {}}", ("bad json",)),
            ('{"name": "f", "arguments": {},}', ("bad json",)),
            ('{"name": "f", "arguments": {"x": NaN}}', ("bad json",)),
            ('{"name": "f", "arguments": {"x": 1e999}}', ("bad json",)),
            ('{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}", ("bad json",)),
            ('{"name": "f", "name": "g", "arguments": {}}', ("bad json",)),
            ('{"name": "f", "arguments": {"x": 1, "x": 2}}', ("bad json",)),
            (CALL + CALL, ("bad json",)),
            ("[" * 100_000, ("bad json",)),
            (f"```json\n{CALL}\n```", ("bad json",)),  # a fence is not opened
            (f"\u200b{CALL}", ("bad json",)),
            (f"[{CALL}]", ("not an object",)),
            ('"f"', ("not an object",)),
            ("null", ("not an object",)),
            ("{}", ("no name", "no arguments")),
            ('{"arguments": {}}', ("no name",)),
            ('{"name": " ", "arguments": {}}', ("no name",)),
            ('{"name": 7, "arguments": {}}', ("no name",)),
            ('{"name": "f"}', ("no arguments",)),
            ('{"name": "f", "arguments": null}', ("no arguments",)),
            ('{"name": "f", "arguments": "{}"}', ("no arguments",)),
            ('{"name": "f", "arguments": {}, "id": 1}', ("extra key",)),
        ]
    ],
    "code fences around a block": [
        (f"<think>a</think>\n```\n<tool_call>{CALL}</tool_call>\n```", calls(CALL_DICT),
         ("text between", "text after")),
        ("```\n<think>a</think><clarify>b?</clarify>\n```", asks("b?"), ("text before", "text after")),
    ],
}


@pytest.mark.parametrize("text, expected, errors", [
    pytest.param(*row, id=f"{group} {i}") for group, rows in MALFORMED.items() for i, row in enumerate(rows)])
def test_malformed_turn(text, expected, errors):
    """P02, P04, P06, P07, P08, P09, P13, P14, P16: every broken rule is named; only what is safe is shown."""
    turn = parse_turn(text)
    assert action(turn) == expected
    assert turn.errors == errors


@pytest.mark.parametrize("text, think", [
    ("<think>The user did not say which", "The user did not say which"),  # P06
    ("Sure! <think> a </think><clarify>b?</clarify>", "a"),
    ("<clarify>b?</clarify><think>a</think>", "a"),
    ("<think>a</think><think>b</think>c", "a\nb"),
    ("<think>a</think>c<think>b", "a\nb"),
    ("<think>they typed </think> before</think>c", "they typed \n before"),  # P09
    ("<think>a<think>b</think>c", "a<think>b</think>c"),
    ("<think></think>c", None),
    ("<think>\u200b</think>c", None),
    ("c", None),
    ("", None),
])
def test_think_holds_the_text_of_all_thinks(text, think):
    """P06, P09: private text is kept as think, whatever broke."""
    assert parse_turn(text).think == think


@pytest.mark.parametrize("body", ['{"name": "fly_to_the_moon", "arguments": {}}',
                                  '{"name": "find_hotel", "arguments": {"colour": [1, 2.5, null]}}'])
def test_unknown_tool_or_argument_is_no_parse_error(body):
    """The tool answers it with an error that the policy can read."""
    turn = parse_turn(f"<think>a</think><tool_call>{body}</tool_call>")
    assert turn.errors == () and turn.tool_call is not None


# ---- prefilled think, end markers

@pytest.mark.parametrize("prefilled, errors", [(True, ()), (False, ("text before", "stray tag", "no think"))])
def test_prefilled_think(prefilled, errors):
    """C06: the prompt may end with '<think>'; only a parser that was told so takes such a turn as well formed."""
    text = "It is unclear which area.\n</think>\n<clarify>Which area?</clarify>"
    assert parse_turn(text, prefilled) == Turn("It is unclear which area.", "Which area?", None, None, errors)


@pytest.mark.parametrize("text, expected", [
    ("No area", Turn("No area", None, None, None, ("unclosed think",))),
    ("", Turn(None, None, None, None, ("unclosed think",))),
    ("</think>b", Turn(None, None, None, "b", ("blank think",))),
    ("<think>a</think>b", Turn("<think>a</think>b", None, None, None, ("tag in think",))),  # opened twice
])
def test_prefilled_think_malformed(text, expected):
    """C06: the prefilled think is open from the first character on."""
    assert parse_turn(text, prefilled_think=True) == expected


@pytest.mark.parametrize("marker", END_MARKERS + ("<|im_end|><|endoftext|>", "<|im_end|>\n", " \n<|end|> </s>\n"))
@pytest.mark.parametrize("text", ["<think>a</think><clarify>q?</clarify>", "<think>a</think>Hello.", "<think>a</think>",
                                  "<think>a"])
def test_end_marker_left_at_the_end_is_cut(text, marker):
    """C09, C10: the turn reads the same with end-of-turn markers behind it."""
    assert parse_turn(text + marker) == parse_turn(text)


def test_end_marker_inside_the_text_stays():
    """C10: only the end is cut."""
    assert parse_turn("<think>a</think>x</s>y").reply == "x</s>y"
    assert parse_turn("<think>a</think><clarify>q?<|im_end|></clarify>").clarify == "q?<|im_end|>"


# ---- odd characters, size

@pytest.mark.parametrize("text, expected", [
    ("<think>\u200b</think><clarify>\ufeff</clarify>", Turn(None, None, None, None, ("blank think", "blank clarify"))),
    ("<think>a</think>\u200b\u2060", Turn("a", None, None, None, ("no action",))),
    ("\ufeff<think>a</think>\u200b<clarify>b?</clarify>\u200d", Turn("a", "b?", None, None, ())),
    ("<think>a</think><clarify>\u200bb\u200d? </clarify>", Turn("a", "\u200bb\u200d?", None, None, ())),
    ("<think>a</think>b\u200bc", Turn("a", None, None, "b\u200bc", ())),
])
def test_zero_width_characters_are_blank_but_stay_in_text(text, expected):
    """P13: a block that looks empty is empty."""
    assert parse_turn(text) == expected


def test_half_surrogate_is_text():
    """P06: no str makes the parser raise."""
    assert parse_turn("<think>\ud800</think><clarify>\udfff</clarify>") == Turn("\ud800", "\udfff", None, None, ())
    assert parse_turn("\ud800").reply == "\ud800"
    assert parse_turn("<think>a</think><tool_call>\ud800</tool_call>").errors == ("bad json",)


@pytest.mark.parametrize("piece", [
    "<think>", "</think>", "<Think>", "<clarify>", "</clarify>", "<tool_call>", "<tool_call>{}</tool_call>",
    "<", "< ", "</", " ", "\u200b", "<think", "<|im_end|>", "</s> ", "<think>a</think>\n",
    "<think>a</think><clarify>b?</clarify>"])
def test_a_megabyte_takes_linear_time(piece):
    """P15: no backtracking and no copy per tag, whatever a broken policy repeats."""
    start = time.process_time()
    turn = parse_turn(piece * (1_000_000 // len(piece)))
    assert time.process_time() - start < 10  # about 1 here; one copy of the rest per tag would take minutes
    assert turn.errors != ()


@pytest.mark.parametrize("text", ["<think>a</think>\n" * 5000 + "<clarify>x", "<" * 100_000])
def test_truncated_repeated_blocks_do_not_hang(text):
    """P15: the text of the public report."""
    start = time.process_time()
    assert parse_turn(text).errors != ()
    assert time.process_time() - start < 5  # a hang is minutes


@pytest.mark.parametrize("body", ["[" * 1_000_000, '{"a":' * 200_000, "1" * 1_000_000, " " * 1_000_000 + "x"])
def test_a_megabyte_inside_a_tool_call(body):
    """P15: the JSON reader is no way around the limit, and its RecursionError does not get out."""
    start = time.process_time()
    assert parse_turn(f"<think>a</think><tool_call>{body}</tool_call>").errors == ("bad json",)
    assert time.process_time() - start < 10  # about 1 here; one copy of the rest per tag would take minutes


# ---- properties over random strings

TAGS = ["<think>", "</think>", "<clarify>", "</clarify>", "<tool_call>", "</tool_call>"]
GOOD_CALL, BAD_CALLS = '{"name": "f", "arguments": {}}', ['{"name": "f"}', '{"name": "f", "arguments": {}', "[]"]
PIECES = TAGS + ["<Think>", "</Think>", "</CLARIFY>", "<clarify >", GOOD_CALL, *BAD_CALLS, "SECRET", "x", " ", "\n",
                 "\u200b", "<", ">", "</", "<|im_end|>", "</s>", "\ud800"]
CLEAN = [["<think>", "SECRET", "</think>", *rest] for rest in (
    ["<clarify>", "x", "</clarify>"], ["<tool_call>", GOOD_CALL, "</tool_call>"], ["x"], ["\n", "x", " ", "<"])]


def random_text(rng):
    """Random pieces, or a clean turn with up to three pieces inserted, removed or swapped; secrets are numbered."""
    pieces = [rng.choice(PIECES) for _ in range(rng.randrange(12))]
    if rng.random() < 0.7:
        pieces = list(rng.choice(CLEAN))
        for _ in range(rng.randrange(4)):
            i, j = rng.randrange(len(pieces)), rng.randrange(len(pieces))
            change = rng.randrange(4)
            if change == 0 and len(pieces) > 1:
                del pieces[i]
            elif change == 1:
                pieces[i], pieces[j] = pieces[j], pieces[i]
            else:
                pieces.insert(i, rng.choice(PIECES if change == 2 else [" ", "\n", "\u200b", "x"]))
    return "".join(f"SECRET{i};" if piece == "SECRET" else piece for i, piece in enumerate(pieces))


def well_formed(text):
    """The strict grammar said again, without regular expressions and for the pieces above only."""
    def blank(part):
        return part.strip(" \n\u200b") == ""

    def has_tag(part):
        return any(tag in "".join(part.lower().split()) for tag in TAGS)

    text = text.rstrip()
    while text.endswith(("<|im_end|>", "</s>")):
        text = text.removesuffix("<|im_end|>").removesuffix("</s>").rstrip()
    before, opened, text = text.partition("<think>")
    think, closed, text = text.partition("</think>")
    if not (opened and closed and blank(before)) or blank(think) or has_tag(think):
        return False
    if not has_tag(text):
        return not blank(text)
    for name in ("clarify", "tool_call"):
        before, opened, rest = text.partition(f"<{name}>")
        body, closed, after = rest.partition(f"</{name}>")
        if opened and closed and blank(before) and blank(after) and not blank(body) and not has_tag(body):
            return name == "clarify" or body.strip() == GOOD_CALL
    return False


def test_properties_of_random_turns():
    """P02, P04, P09, P17: strict rule as a second reader has it; one action at most; closed thinks stay private."""
    rng, n_clean = random.Random(0), 0
    for _ in range(2000):
        text = random_text(rng)
        turn = parse_turn(text)
        shown = f"{turn.clarify}|{turn.tool_call}|{turn.reply}"
        assert (turn.errors == ()) == well_formed(text), repr(text)
        assert sum(part is not None for part in action(turn)) <= 1, repr(text)
        assert not turn.errors or len(set(turn.errors)) == len(turn.errors), repr(text)
        assert turn.errors or (turn.think and action(turn) != NOTHING), repr(text)
        assert not any(tag in shown for tag in TAGS), repr(text)
        for secret in (part.split(";")[0] for part in text.split("SECRET")[1:]):
            before, after = text.split(f"SECRET{secret};")
            if "<think>" in before and "</think>" in after:
                assert f"SECRET{secret};" not in shown, repr(text)
            around = before.rpartition("<think>")[2] + after.partition("</think>")[0]
            if "<think>" in before and "</" not in around:
                assert f"SECRET{secret};" in turn.think, repr(text)
        if "<think>" in text.rpartition("</think>")[2]:
            assert action(turn) == NOTHING, repr(text)
        if text.startswith("<think>"):
            assert parse_turn(text.removeprefix("<think>"), prefilled_think=True) == turn, repr(text)
        n_clean += turn.errors == ()
    assert 400 < n_clean < 1600  # the strings are neither all broken nor all clean
