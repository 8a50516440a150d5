"""Generated towns, goals and the way a user words them, in MultiWOZ's schema: SpeakRL's training ground without a download.

`scenario_pair(seed)` makes one ambiguous scenario and its clear twin. The seed says which split it belongs to; a venue's name
is in one split only, and the words of `test-new-words` are in no other. The wording of a request (`word_request`) and its
inverse (`read_request`, which the scripted oracle uses) stand side by side and share one table; goals of real MultiWOZ
are worded by the same function.

Left out: a calendar, prices and opening hours. Nothing is ever full.
"""
from __future__ import annotations

import hashlib
import random
import re

from env import AREAS, BOOK_SLOTS, DAYS, PRICES, VENUES, Database, Scenario

SPLITS = {"train": 0, "valid": 10**6, "test": 2 * 10**6, "test-new-words": 3 * 10**6}  # first seed of each
KINDS = ("branch", "underspecified", "vague", "reference", "contradiction")

# ------------------------------------------------------------------------------------------------- names

FIRST = ("golden silver amber crimson quiet little royal green blue iron copper velvet happy rustic lucky old ivory mellow hidden "
         "stony misty sunny windy proud gentle brave clever noble jolly merry salty sweet wild tall rapid early humble grand "
         "scarlet hazel").split()
LAST = {"restaurant": ("wok fork spoon kettle oven table pantry plate garden lantern pepper olive basil onion ladle noodle "
                       "dumpling grill skillet larder barrel cellar cork teapot").split(),
        "hotel": ("lodge inn manor court villa mansion retreat cottage hall tower gate abbey chapel pillow harp arms crown anchor "
                  "bridge mill orchard meadow willow oak").split(),
        "attraction": ("museum gallery theatre park pool castle library fountain arena palace cinema observatory").split()}
NEW_FIRST = "turquoise frosty bold dusty cosy polar mighty tidy royalist plum fabled sleepy violet eager hollow lively".split()
NEW_LAST = {"restaurant": "bistro tavern cauldron griddle saucer radish turnip mustard pickle tandoor walnut chestnut".split(),
            "hotel": "hostel residence quarters sanctuary hideaway chalet lighthouse hammock terrace pavilion priory grange".split(),
            "attraction": "aquarium planetarium monument cathedral zoo labyrinth".split()}
REAL_WORDS = {*FIRST, *NEW_FIRST, *(word for pool in (*LAST.values(), *NEW_LAST.values()) for word in pool)}
LETTERS = "eeeeetttaaaoooiinnsshrrddllccuummwwffggyyppbbvvkkjxqz"  # about as often as in English
ONSETS = "b c d f g h j k l m n p qu r s t v w z br ch cl cr dr fl gr pl sh st th tr".split()
VOWELS, CODAS = "a e i o u a e i o u ai ea ee oo ou".split(), ("", "", "", *"n r l s t m ck ll nd ng nt rd st".split())
BRANCHES = ("north", "south", "east", "west", "centre", "station", "market", "harbour", "riverside", "airport")
FOODS = ("chinese indian italian french thai british spanish turkish korean mexican greek japanese").split()
ATTRACTIONS = ("museum", "college", "theatre", "park", "swimmingpool", "nightclub")
STATIONS = ("castleford", "norwich", "stevenage", "ely", "leicester", "peterborough")
DINNER = tuple(f"{h:02d}:{m:02d}" for h in range(11, 22) for m in (0, 30))

# What the wording of a booking slot admits: the one table of vague words.
VAGUE = {"people": {"for a few of us": ("3", "4", "5"), "for a small group": ("4", "5", "6"), "for two or three people": ("2", "3")},
         "day": {"at the weekend": ("saturday", "sunday"), "midweek": ("tuesday", "wednesday", "thursday"),
                 "early in the week": ("monday", "tuesday")},
         "time": {"in the evening": ("18:00", "19:00", "20:00"), "around noon": ("11:30", "12:00", "12:30"),
                  "in the afternoon": ("14:00", "15:00", "16:00")},
         "stay": {"for a few nights": ("3", "4", "5"), "for two or three nights": ("2", "3"), "for most of a week": ("4", "5", "6")},
         "leaveAt": {"in the morning": ("08:00", "09:00", "10:00"), "in the evening": ("18:00", "19:00", "20:00")}}


def split_of(seed: int) -> str:
    """The split of a town's seed; ValueError outside [0, 4 * 10**6)."""
    if not 0 <= seed < 4 * 10**6:
        raise ValueError(f"town seed {seed} is in no split; seeds run from 0 to {4 * 10**6 - 1}")
    return list(SPLITS)[seed // 10**6]


def _name_split(name: str) -> str:
    bucket = hashlib.sha256(name.encode()).digest()[0] % 10
    return "valid" if bucket == 0 else "test" if bucket < 3 else "train"


def made_up_word(rng: random.Random) -> str:
    """Syllables, or letters in no order at all: a policy taught with syllables alone copied nothing else."""
    if rng.random() < 0.5:
        return "".join(rng.choices(LETTERS, k=rng.randrange(3, 9)))
    return "".join(rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(rng.choice((1, 2, 2, 3))))


def venue_names(domain: str, count: int, split: str, rng: random.Random, invented: float = 0.0) -> list[str]:
    """`count` distinct names of two words that belong to the split; a share of them with one or two made-up words (for
    pretraining: a policy that can copy any word also copies those it has never seen)."""
    first, last = (NEW_FIRST, NEW_LAST) if split == "test-new-words" else (FIRST, LAST)
    names: list[str] = []
    while len(names) < count:
        words = [rng.choice(first), rng.choice(last[domain])]
        if rng.random() < invented:
            for k in rng.choice(((0,), (1,), (0, 1), (0, 1))):
                words[k] = made_up_word(rng)
            if REAL_WORDS & {*words} - {*first, *last[domain]} or len({*words}) < 2:
                continue
        elif split != "test-new-words" and _name_split(" ".join(words)) != split:
            continue
        if " ".join(words) not in names:
            names.append(" ".join(words))
    return names


# ------------------------------------------------------------------------------------------------- wording a request, and back

PHRASES = {"people": ("for {} people", "for {} of us", "for a party of {}", "we are {}", "{} people"),
           "day": ("on {}", "this {}", "on {}", "{}"), "time": ("at {}", "at {}", "at {} sharp", "for {}"),
           "stay": ("for {} nights", "{} nights", "staying {} nights"),
           "leaveAt": ("leaving at {} or later", "leaving after {}"), "arriveBy": ("arriving by {}", "to be there by {}")}
FROM_DAY = ("from {}", "starting {}", "arriving {}", "from {} on")  # a hotel's day
HEADS = {"restaurant": {"name": ("I need a table at {}", "Book a table at {}", "We would like to eat at {}", "Can you get us a table at {}",
                                 "Please reserve a table at {}", "I want to have a table at {}"),
                        "wish": ("I am looking for {}", "Find me {}", "Can you find {}", "We would like to try {}", "Please book {}")},
         "hotel": {"name": ("I need a room at {}", "Book a room at {}", "We want to stay at {}", "Can you get us a room at {}",
                            "Please reserve a room at {}", "I would like to stay at {}"),
                   "wish": ("I am looking for {}", "Find me {}", "Can you find {}", "We need {}", "Please book {}")},
         "attraction": {"name": ("I would like to visit {}", "Tell me about visiting {}"),
                        "wish": ("I would like to visit {}", "Find us something to visit, {}")},
         "train": {"wish": ("I need a train {}", "Find me a train {}", "Book a train {}")},
         "taxi": {"wish": ("I need a taxi {}", "Get us a taxi {}", "Book a taxi {}")}}
ALSO = ("Also, {}", "And {}", "Next, {}", "{}")
ANY = ("Any of them is fine.", "I don't mind which one.", "Whichever you find first is fine.", "Any will do.")
ANY_PATTERN = re.compile(r"any of (?:them|those)|don't mind|whichever|any will do|any one|no preference", re.I)
DETAILS = ("That is", "It is", "Make it", "The details:")
PLAIN = {"phrases": PHRASES, "from_day": FROM_DAY, "heads": HEADS, "also": ALSO, "any": ANY, "details": DETAILS}

# The rich wording, for SpeakER: the same parts, more ways to say them, greetings, other orders. What is not a slot must say
# nothing that `read_request` would read: no digit, no day or area, no "a" or "an", no word for a venue, no "from" or "to".
_LEADS = ("I need", "We need", "I am looking for", "We are looking for", "Find me", "Find us", "Please find", "Please find me",
          "Can you find", "Can you find me", "Could you find us", "Can you get us", "Could you get me", "Please get us",
          "I would like to get", "We would like to get", "I would like to book", "We would like to book", "I want to book",
          "We want to book", "Book", "Please book", "Book me", "Can you book", "Could you book us", "Please reserve", "Can you reserve",
          "I would like to reserve", "Help me find", "Please help us find", "I am trying to find", "We are hoping to find",
          "Is there any way to get", "Would you book", "Would you find us", "I have to find", "We still need", "What I need is")


def _led(*rest: str) -> tuple[str, ...]:
    return tuple(f"{lead} {end}" for lead in _LEADS for end in rest)


_VISIT = ("I would like to visit {}", "We would like to visit {}", "I want to visit {}", "We want to visit {}", "We are looking forward to visiting {}",
          "I need to visit {}", "My friends want to visit {}")
RICH = {
    "phrases": {"people": PHRASES["people"] + ("for a group of {}", "there will be {} of us", "party of {}", "we will be {} people"),
                "day": ("on {}", "this {}", "{}", "for {}", "coming {}", "it has to be {}"),
                "time": ("at {}", "at {} sharp", "for {}", "starting at {}", "{} if possible"),
                "stay": PHRASES["stay"] + ("for {} nights in all", "{} nights in total", "we stay {} nights"),
                "leaveAt": PHRASES["leaveAt"] + ("leaving no earlier than {}", "departing after {}", "departing at {} or later"),
                "arriveBy": PHRASES["arriveBy"] + ("arriving before {}", "arriving no later than {}", "we have to be there by {}")},
    "from_day": FROM_DAY + ("from {} onwards", "we come on {}", "checking in on {}"),
    "heads": {"restaurant": {"name": _led("a table at {}") + ("We would like to eat at {}", "I would like to eat at {}", "We want to eat at {}",
                                                             "I want to eat at {}", "My friends want to eat at {}"),
                             "wish": _led("{}") + ("We would like to try {}", "We want to try {}")},
              "hotel": {"name": _led("a room at {}") + ("We want to stay at {}", "I want to stay at {}", "We would like to stay at {}",
                                                        "I would like to stay at {}", "My parents want to stay at {}"),
                        "wish": _led("{}")},
              "attraction": {"name": (*_VISIT, "Tell me about visiting {}", "What can you tell me about visiting {}"),
                             "wish": (*_VISIT, "Find us something to visit, {}", "I am looking for something to visit, {}")},
              "train": {"wish": _led("a train {}")}, "taxi": {"wish": _led("a taxi {}")}},
    "also": ALSO + ("Then {}", "Besides, {}", "One more thing: {}", "Now {}", "After that, {}", "I also have this: {}", "Moving on, {}"),
    "any": ANY + ("Any one of them will do.", "I have no preference beyond that.", "Otherwise I have no preference.", "We don't mind which.",
                  "Take whichever you like."),
    "details": DETAILS + ("It should be", "It would be", "In detail:", "That would be", "Let us say", "Here is the rest:", "What matters:")}
GREETINGS = ("Hello.", "Hi.", "Hi there.", "Good morning.", "Good afternoon.", "Good evening.", "Hello, can you help me?", "Hi, I hope you can help.",
             "Excuse me.", "Hello there!", "Hey.", "Good day.", "Greetings.")
CONTEXTS = ("It is our anniversary.", "We are planning our trip.", "This is our first time here.", "My friends and I are coming over.",
            "We are celebrating.", "My parents will be in town.", "I was told you can help.", "Some colleagues are joining me.",
            "I am new here.", "We are so excited about this trip.", "My plans have changed.", "My sister gave me your number.")
CLOSINGS = ("Thanks.", "Thank you.", "Thanks in advance.", "Can you do that?", "Is that possible?", "Thanks so much!", "Please let me know.",
            "That would be great.")


def word_request(domain: str, info: dict, book: dict, rng: random.Random, *, instead: dict[str, str] | None = None,
                 any_is_fine: bool = False, later: bool = False, extra: str = "", rich: bool = False) -> str:
    """A user's request in words: the wishes `info`, the booking slots `book`, in varying order and phrases.

    `instead` replaces the phrase of a slot (vague words, a reference, a part of a name); `any_is_fine` closes what the wishes
    leave open; `later` makes it follow an earlier request; `extra` is a sentence put at the end. `rich` draws from many more
    wordings and orders (SpeakER); without it the text stays what the embedded policy was taught.
    """
    instead, words = instead or {}, RICH if rich else PLAIN
    book = {s: v for s, v in book.items() if not isinstance(v, bool)}
    tail = []
    for slot in [s for s in ("people", "day", "time", "stay") if s in book] + ["day"] * (domain == "train" and "day" in info):
        forms = words["from_day"] if (domain, slot) == ("hotel", "day") else words["phrases"][slot]
        tail.append(instead.get(slot) or rng.choice(forms).format((book | info)[slot]))
    for slot in ("leaveAt", "arriveBy"):
        if slot in info:
            form = rng.choice(words["phrases"][slot]) if domain == "train" else {"leaveAt": "leaving at {}", "arriveBy": "arriving by {}"}[slot]
            tail.append(instead.get(slot) or form.format(info[slot]))
    rng.shuffle(tail)
    heads = words["heads"][domain]["name" if "name" in info else "wish"]
    if domain in BOOK_SLOTS and not book:  # a place to look up: a word such as "book" or "table" would ask for a booking
        heads = [head for head in heads if not re.search(r"\b(book|reserve|table|room)\b", head, re.I)]
    if "name" in info:
        head = rng.choice(heads).format(instead.get("name", info["name"]))
    elif domain in ("train", "taxi"):
        ends = [f"{word} {info[s]}" for s, word in (("departure", "from"), ("destination", "to")) if s in info]
        if rich and domain == "train":  # the end of a taxi's ride may be called "home from home"
            rng.shuffle(ends)
        head = rng.choice(heads).format(" ".join(ends)).strip()
    else:
        head = rng.choice(heads).format((_rich_noun_phrase if rich else _noun_phrase)(domain, info, rng))
    if later:
        form = rng.choice(words["also"])
        head = form.format(head if form == "{}" or re.match(r"I\b", head) else head[0].lower() + head[1:])
    if rich:
        return _arrange(head, tail, rng.choice(RICH["any"]) if any_is_fine else "", extra, later, rng)
    style = rng.random()
    if not tail:
        text = f"{head}."
    elif style < 0.6:
        text = f"{head}, {', '.join(tail)}."
    else:  # the details in a sentence of their own
        text = f"{head}. {rng.choice(DETAILS)} {', '.join(tail)}."
    if any_is_fine:
        text += " " + rng.choice(ANY)
    return text + (f" {extra}" if extra else "")


def _arrange(head: str, tail: list[str], closed: str, extra: str, later: bool, rng: random.Random) -> str:
    """Sentences from the parts of a rich request: details behind, before, or in a sentence or two of their own."""
    capital = lambda text: text[0].upper() + text[1:]
    listed = lambda parts: ", ".join(parts) if len(parts) < 2 or rng.random() < 0.5 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    clause = re.compile(r"(?:we|there|it) ")  # "we are 4" opens a sentence, and stands badly behind "That would be"
    sentence = lambda parts: f"{capital(listed(parts))}." if clause.match(parts[0]) else f"{rng.choice(RICH['details'])} {listed(parts)}."
    fronts = [part for part in tail if not clause.match(part)]
    end = "?" if re.search(r"\b(?:can|could|would) you\b|\bis there\b", head, re.I) else "."
    style = rng.random()
    if not tail:
        parts = [head + end]
    elif style < 0.45:
        parts = [f"{head}, {listed(tail)}{end}"]
    elif style < 0.65 and fronts:
        front = fronts[:rng.randrange(1, len(fronts) + 1)]
        rest = [part for part in tail if part not in front]
        opened = head if re.match(r"(?:I|My)\b", head) else head[0].lower() + head[1:]
        parts = [capital(f"{listed(front)}, {opened}{', ' if rest else ''}{listed(rest)}{end}")]
    elif style < 0.85 or len(tail) < 2:
        parts = [head + end, sentence(tail)]
    else:
        cut = rng.randrange(1, len(tail))
        parts = [f"{head}, {listed(tail[:cut])}{end}", sentence(tail[cut:])]
    parts += [part for part in (closed, extra) if part]
    if not later:
        parts[:0] = [rng.choice(CONTEXTS)] * (rng.random() < 0.25)
        parts[:0] = [rng.choice(GREETINGS)] * (rng.random() < 0.4)
    parts += [rng.choice(CLOSINGS)] * (rng.random() < 0.25)
    return re.sub(r"(?<!\d)1 (people|nights|of us)\b", lambda m: "1 night" if m[1] == "nights" else "1 person", " ".join(parts))


def _rich_noun_phrase(domain: str, info: dict, rng: random.Random) -> str:
    """"a cheap place to stay with parking in the north", each wish before or behind the noun."""
    noun = info.get("type") or {"restaurant": "restaurant", "hotel": "place to stay", "attraction": "attraction"}[domain]
    before, after = [], []
    for slot, front, forms in (("stars", "{} star", ("with {} stars",)), ("pricerange", "{}", ("in the {} price range", "with {} prices")),
                               ("food", "{}", ("serving {} food", "with {} food"))):
        if slot in info and rng.random() < 0.5:
            before.append(front.format(info[slot]))
        elif slot in info:
            after.append(rng.choice(forms).format(info[slot]))
    extras = rng.sample(("internet", "parking"), 2)
    if info.get("internet") and info.get("internet") == info.get("parking"):
        extras = [f"{extras[0]} and {extras[1]}"]
    after += [f"{'with' if info[s.split()[0]] == 'yes' else 'without'} {s}" for s in extras if s.split()[0] in info]
    if "area" in info:
        after.append(rng.choice(("in the {}", "in the {} of town", "in the {} part of town")).format(info["area"]))
    rng.shuffle(after)
    words = " ".join([*before, noun])
    return " ".join(["an" if words[0] in "aeiou" else "a", words, *after])


def _noun_phrase(domain: str, info: dict, rng: random.Random) -> str:
    noun = info.get("type") or {"restaurant": "restaurant", "hotel": "place to stay", "attraction": "attraction"}[domain]
    words = " ".join([*(info[s] for s in ("pricerange", "food") if s in info), noun])
    after = [f"with {info['stars']} stars"] if "stars" in info else []
    after += [f"{'with' if info[s] == 'yes' else 'without'} {s}" for s in ("internet", "parking") if s in info]
    if "area" in info:
        after.append(rng.choice(("in the {}", "in the {} of town")).format(info["area"]))
    return " ".join(["an" if words[0] in "aeiou" else "a", words, *after])


ARRIVALS = ("We arrive in town on {}.", "Our train gets in on {}.", "We get to town on {}.", "Our trip starts on {}.")  # a day to refer to
PARTIAL = r"(?:the|that) (.+) place|(.+) something|the one called (.+)"  # a part of a name: "the curry place"

DOMAIN_CUES = {"restaurant": r"\btable at\b|\beat at\b|\brestaurant\b", "train": r"\ba train\b", "taxi": r"\ba taxi\b",
               "hotel": r"\broom at\b|\bstay at\b|\bplace to stay\b|\bhotel\b|\bguesthouse\b", "attraction": r"\bvisit"}


def request_domain(text: str) -> str | None:
    """The domain that a request opens; None for an answer or a correction."""
    head = re.search(r"\b(?:need|book|like to|get|reserve|looking for|find|want to|visiting)\b", text, re.I)
    found = {d: m.start() for d, cue in DOMAIN_CUES.items() if (m := re.search(cue, text, re.I))}
    return min(found, key=found.get) if head and found else None


def read_request(text: str, domain: str) -> dict[str, str]:
    """The slots that a request states: the inverse of `word_request`. Vague words and references state nothing; of two
    contradicting statements the last one counts.

    >>> read_request("Book a table at golden wok, on friday, for 4 people, at 18:00.", "restaurant")
    {'name': 'golden wok', 'people': '4', 'day': 'friday', 'time': '18:00'}
    """
    said: dict[str, str] = {}
    low = re.sub("|".join(ARRIVALS).format(*[r"\w+"] * len(ARRIVALS)), "", text).lower()
    days = "|".join(DAYS)
    if domain in ("train", "taxi"):
        ride, stop = re.sub(rf"^.*?\ba {domain}\b", "", low), "to |from " if domain == "train" else "to "
        for slot, word in (("departure", "from"), ("destination", "to")):
            if found := re.search(rf"\b{word} (?!(?:{days}|be there)\b)(.+?)(?= (?:{stop})|[,.?!]|$)", ride):
                said[slot] = found[1]
    elif name := re.search(r"\b(?:table at|room at|eat at|stay at|visit(?:ing)?(?! an? |,)) (.+?)(?=[,.?!]|$)", low):
        partial = re.fullmatch(PARTIAL, name[1])
        said["name"] = next(part for part in partial.groups() if part) if partial else name[1]
    elif noun := re.search(r"\ban? ([^,.]*?) ?\b(restaurant|place to stay|hotel|guesthouse|attraction)\b", low) or (
            domain == "attraction" and re.search(r"\ban? ()([^,.]+?)(?= in the|[,.?]|$)", low)):
        words, kind = noun.groups()
        if stars := re.match(r"(\d) star ?", words):
            said["stars"], words = stars[1], words[stars.end():]
        if price := re.match(rf"({'|'.join(PRICES)})\b ?", words):
            said["pricerange"], words = price[1], words[price.end():]
        if words:
            said["food"] = words
        if kind not in ("restaurant", "place to stay", "attraction"):
            said["type"] = kind
        if area := re.search(rf"\bin the ({'|'.join(AREAS)})\b", low):
            said["area"] = area[1]
        if stars := re.search(r"\bwith (\d) stars", low):
            said["stars"] = stars[1]
        if price := re.search(rf"\b({'|'.join(PRICES)}) price", low):
            said["pricerange"] = price[1]
        if food := re.search(r"\b(?:serving|with) ((?:(?!with\b|serving\b)\w+ )+?)food\b", low):
            said["food"] = food[1].strip()
        found = re.findall(r"\b(with|without) (internet|parking)\b", re.sub(r"(with|without) (internet|parking) and ", r"\1 \2 \1 ", low))
        said |= {slot: "yes" if word == "with" else "no" for word, slot in found}
    rest = low.replace(said.get("name", "\0"), "")
    if people := re.findall(r"\b(?:(?:for|we are|(?:party|group) of|make it) (\d+)(?! nights?|:|\d)|(\d+) (?:people|person|of us))", rest):
        said["people"] = people[-1][0] or people[-1][1]
    if stay := re.findall(r"\b(\d+) nights?", rest):
        said["stay"] = stay[-1]
    if day := re.findall(rf"\b({days})\b", rest):
        said["day"] = day[-1]
    for cue, time in re.findall(r"(?:(leaving|departing|arriving|to be there) (?:at|after|by|before|no earlier than|no later than) )?(\d\d:\d\d)", rest):
        said[{"leaving": "leaveAt", "departing": "leaveAt", "": "time"}.get(cue, "arriveBy")] = time
    return said


# ------------------------------------------------------------------------------------------------- scenarios

ARRIVAL = ARRIVALS[0]
BASE_DOMAINS, BASE_KINDS = ("restaurant", "hotel"), ("branch", "underspecified", "vague")  # what the embedded policy was taught
POSSIBLE = {"restaurant": KINDS, "hotel": KINDS, "train": ("underspecified", "vague", "contradiction")}


def scenario_pair(seed: int, domains: tuple = BASE_DOMAINS, kinds: tuple = BASE_KINDS, invented: float = 0.0
                  ) -> tuple[Scenario, Scenario]:
    """(ambiguous scenario, its clear twin) of the town `seed`, a function of the arguments alone. ValueError: a seed in no split.

    A dialogue has one to three of `domains` (the default has two), one of them ambiguous, first or later. Twins: "plain", the user says it (or that any
    will do); "db", for half of the branch and underspecified ones, the same words in a town where one candidate is left.
    """
    rng = random.Random(f"town {seed}")
    town = _Town(rng, split_of(seed), invented)
    kind = rng.choice(kinds)
    target = rng.choice([d for d in domains if kind in POSSIBLE.get(d, ())])
    others = [d for d in domains if d != target]
    if kind == "reference":  # needs an earlier part with a day to refer to
        first = rng.choice([d for d in others if d in ("restaurant", "hotel")])
        order = [first, target]
    else:
        order = [target, *rng.sample(others, min(rng.choice((0, 0, 0, 0, 0, 0, 1, 2)), len(others)))]
        rng.shuffle(order)
    goals = {d: town.clear_goal(d) for d in order if d != target}
    plan = town.plan(target, kind, goals.get(order[0]))
    db_twin = bool(plan["rivals"]) and rng.random() < 0.5
    any_twin = kind == "underspecified" and target != "train" and not db_twin and rng.random() < 0.5
    name = f"town-{seed}-{kind}"

    def build(clear: bool) -> Scenario:
        plain = clear and not db_twin
        tables = {d: [r for r in rows if not (clear and db_twin and r in plan["rivals"])] for d, rows in town.tables.items()}
        goal, requests = {}, []
        for stage, domain in enumerate(order):
            words = random.Random(f"words {seed} {stage}")  # one stream for both twins: other requests are the same to the letter
            if domain != target:
                info, book, any_is_fine = goals[domain]
                goal[domain] = {"info": info, "book": book} if book else {"info": info}
                extra = plan["arrival"] if stage == 0 else ""
                text = word_request(domain, info, book, words, any_is_fine=any_is_fine, later=stage > 0, extra=extra)
            else:
                goal[domain] = {"info": plan["said"] if plain and any_twin else plan["info"], "book": plan["book"]}
                said = goal[domain]["info"] if plain else plan["said"]
                text = word_request(domain, said, {**plan["book"], **plan["book_said"]}, words, later=stage > 0,
                                    instead={} if plain else plan["instead"], any_is_fine=plain and any_twin,
                                    extra=plan["plain_extra"] if plain else plan["extra"])
            requests.append((domain, text))
        if clear:
            return Scenario(f"{name}-clear", goal, Database(tables), requests, None, name, "db" if db_twin else "plain")
        return Scenario(name, goal, Database(tables), requests, plan["ambiguity"], f"{name}-clear")

    return build(False), build(True)


def town_goal(seed: int) -> tuple[dict, Database]:
    """(what a visitor wants, the town), a function of the seed: one to three parts, at least one to book, in a fuller town where
    names share words and wishes are met by several rows. Nothing is planned as ambiguous; SpeakER looks for what is open."""
    rng = random.Random(f"goal {seed}")
    town = _Town(rng, split_of(seed), 0.0)
    booked = rng.sample(("restaurant", "hotel", "train"), rng.choice((1, 1, 2, 2, 3)))
    goal = {}
    for domain in booked + rng.sample(("attraction", "taxi"), rng.choice((0, 0, 0, 1)) if len(booked) < 3 else 0):
        if domain in VENUES:
            town.crowd(domain)
        info, book, _ = town.clear_goal(domain, 2 + (rng.random() < 0.4))
        goal[domain] = {"info": info, "book": book}
    return goal, Database(town.tables)


class _Town:
    """The venues and timetables of one town, and the goals that its visitors have."""

    def __init__(self, rng: random.Random, split: str, invented: float):
        self.rng, self.split, self.invented, self.tables = rng, split, invented, {}

    def names(self, domain: str, count: int) -> list[str]:
        taken = {" ".join(r["name"].split()[:2]) for r in self.tables.get(domain, [])}
        found = venue_names(domain, count + len(taken), self.split, self.rng, self.invented)
        return [n for n in found if n not in taken][:count]

    def row(self, domain: str, name: str, **fixed: str) -> dict:
        pick = self.rng.choice
        row = {"name": name, "area": pick(AREAS)}
        if domain == "restaurant":
            row |= {"pricerange": pick(PRICES), "food": pick(FOODS)}
        elif domain == "hotel":
            row |= {"pricerange": pick(PRICES), "type": pick(("hotel", "guesthouse")), "stars": pick("2345")}
        else:
            row["type"] = pick(ATTRACTIONS)
        return {**row, **fixed}

    def branches(self, domain: str, name: str, count: int) -> list[dict]:
        return [self.row(domain, f"{name} {b}", **({"area": b} if b in AREAS else {})) for b in self.rng.sample(BRANCHES, count)]

    def venues(self, domain: str) -> list[dict]:
        """The ordinary venues, made once: five to seven names, near ones among them, some with branches."""
        if domain not in self.tables:
            self.tables[domain] = []
            for name in self.names(domain, self.rng.randrange(5, 8)):
                if self.rng.random() < 0.25:
                    self.tables[domain] += self.branches(domain, name, self.rng.choice((1, 2, 3)))
                else:
                    self.tables[domain].append(self.row(domain, name))
        return self.tables[domain]

    def crowd(self, domain: str) -> None:
        """The venues of a fuller town: branches of many names, and names with the same first word."""
        rows = self.tables[domain] = []
        names = self.names(domain, self.rng.randrange(6, 9))
        words = (NEW_LAST if self.split == "test-new-words" else LAST)[domain]
        sisters = [f"{names[k].split()[0]} {word}" for k in (0, 0, 1) for word in self.rng.sample(words, 3)]
        fits = lambda name: self.split == "test-new-words" or _name_split(name) == self.split
        for name in dict.fromkeys(names + [s for s in sisters if fits(s)][:4]):
            rows += self.branches(domain, name, self.rng.choice((2, 3, 4))) if self.rng.random() < 0.25 else [self.row(domain, name)]
        self.rng.shuffle(rows)

    def trains(self) -> tuple[list[dict], dict]:
        """A timetable, all day long, past midnight too, and the wish for a train after some hour."""
        here, there, day = "cambridge", self.rng.choice(STATIONS), self.rng.choice(DAYS)
        rows = []
        for start, end, takes in ((here, there, 50), (there, here, 70)):
            for hour in range(5, 24):
                arrive = 60 * hour + takes
                rows.append({"trainID": f"TR{self.rng.randrange(1000, 10000)}", "departure": start, "destination": end, "day": day,
                             "leaveAt": f"{hour:02d}:00", "arriveBy": f"{arrive // 60:02d}:{arrive % 60:02d}"})
        self.tables["train"] = rows
        return rows[:19], {"departure": here, "destination": there, "day": day, "leaveAt": f"{self.rng.randrange(6, 22):02d}:00"}

    def book(self, domain: str) -> dict:
        values = {"people": str(self.rng.randrange(1, 9)), "day": self.rng.choice(DAYS), "time": self.rng.choice(DINNER),
                  "stay": str(self.rng.randrange(1, 8))}
        return {slot: values[slot] for slot in BOOK_SLOTS[domain]}

    def clear_goal(self, domain: str, count: int = 2) -> tuple[dict, dict, bool]:
        """(info, book, any will do): a full name, or `count` wishes that any match meets."""
        if domain == "train":
            return self.trains()[1], self.book("train"), True
        if domain == "taxi":
            ends = self.rng.sample(STATIONS, 2)
            return {"departure": ends[0], "destination": ends[1], "leaveAt": self.rng.choice(DINNER)}, {}, False
        row = self.rng.choice(self.venues(domain))
        named = self.rng.random() < 0.5
        info = {"name": row["name"]} if named else {s: row[s] for s in self.wishes(domain, count)}
        return info, {} if domain == "attraction" else self.book(domain), not named

    def wishes(self, domain: str, count: int = 2) -> list[str]:
        slots = {"restaurant": ("pricerange", "food", "area"), "hotel": ("pricerange", "type", "area", "stars"),
                 "attraction": ("type", "area")}
        return self.rng.sample(slots[domain], min(count, len(slots[domain])))

    def plan(self, domain: str, kind: str, first: tuple | None) -> dict:
        """What an ambiguous request leaves open, and how: `info` and `book` of the goal, what is `said` of them (`instead`: in
        other words; `book_said`, `extra`: beside or against it), the `rivals` (rows that a db twin lacks), the annotation."""
        rng = self.rng
        plan = {"instead": {}, "extra": "", "plain_extra": "", "rivals": [], "book_said": {}, "arrival": ""}
        rows: list[dict] = []
        if domain == "train":
            timetable, info = self.trains()
            book = self.book("train")
        else:
            info, book, _ = self.clear_goal(domain)
            venues = self.venues(domain)
            if "name" not in info:  # one row meets the wishes, so that nothing but the planned detail is open
                keep = next(r for r in venues if all(r[s] == v for s, v in info.items()))
                venues[:] = [r for r in venues if r is keep or any(r[s] != v for s, v in info.items())]
        said = dict(info)
        if kind == "branch":
            slot, name = "name", self.names(domain, 1)[0]
            rows = self.branches(domain, name, rng.choice((2, 3, 3, 4, 5)))
            info, said = {"name": rng.choice(rows)["name"]}, {"name": name}
        elif kind == "underspecified" and domain != "train":
            slot = rng.choice(("area", "area", "food" if domain == "restaurant" else "stars", "pricerange"))
            values = {"area": AREAS, "food": FOODS, "pricerange": PRICES, "stars": "2345"}[slot]
            values = rng.sample(values, rng.choice((2, 3, 3) if slot == "pricerange" else (2, 3, 3, 4)))
            model = self.row(domain, "")
            said = {s: model[s] for s in self.wishes(domain) if s != slot}
            venues[:] = [r for r in venues if any(r[s] != v for s, v in said.items())]
            # They differ in this slot alone: with another one open as well, no policy could know which one the user cares about.
            rows = [{**model, **said, "name": n, slot: v} for n, v in zip(self.names(domain, len(values)), values)]
            info = {**said, slot: rng.choice(values)}
        elif kind == "underspecified":
            slot, last = "leaveAt", timetable[rng.randrange(-5, -1):]
            exact = rng.choice(last)
            said = {**info, "leaveAt": last[0]["leaveAt"]}
            info = {**info, "leaveAt": exact["leaveAt"], "arriveBy": exact["arriveBy"]}
            rows = last
        if rows:
            candidates, value = [r[slot] for r in rows], info[slot]
            if domain != "train":
                plan["rivals"] = [r for r in rows if r[slot] != value]
                venues += rows
                rng.shuffle(venues)
                candidates = [r[slot] for r in venues if r in rows]  # in the order in which a result shows them
        elif kind == "vague":
            slot = "leaveAt" if domain == "train" else rng.choice(BOOK_SLOTS[domain])
            phrase = rng.choice(list(VAGUE[slot]))
            candidates = list(VAGUE[slot][phrase])
            value = rng.choice(candidates)
            plan["instead"] = {slot: phrase}
            if domain == "train":
                info = {**info, "leaveAt": value, "arriveBy": next(r["arriveBy"] for r in timetable if r["leaveAt"] == value)}
                said = {s: v for s, v in info.items() if s != "arriveBy"}
        elif kind == "contradiction":
            slot, candidates = "people", [str(n) for n in rng.sample(range(2, 9), 2)]
            value = rng.choice(candidates)
            plan |= {"book_said": {"people": candidates[0]}, "extra": f"There will be {candidates[1]} of us.",
                     "plain_extra": f"Sorry, make it {value} people."}
        else:
            arrival = rng.choice([d for d in DAYS if d != first[1]["day"]])
            slot, candidates = "day", [first[1]["day"], arrival]
            value = rng.choice(candidates)
            same = "on the same day" if domain == "restaurant" else "from the same day"
            plan |= {"arrival": ARRIVAL.format(arrival), "instead": {"day": same}}
        if slot in book:
            book[slot] = value
        return {**plan, "info": info, "book": book, "said": said,
                "ambiguity": {"kind": kind, "domain": domain, "slot": slot, "candidates": candidates, "value": value}}
