"""The six kinds of text that tiny-moe learns, each from a small grammar of its own.

They differ in what a router sees first: news is plain sentences without a single digit, arithmetic is nothing but
digits, code and JSON live on punctuation and indentation, logs mix all of it, recipes share news' letters but not its
words.  So experts specialise, and a calibration set of one domain leaves others' experts without a token.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


class Draw:
    """Choices from a seed, the same on every Python: only `random.Random.random` is promised never to change."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def below(self, count: int) -> int:
        """An integer from 0 to ``count - 1``."""
        return int(self._random() * count)

    def between(self, low: int, high: int) -> int:
        """An integer from ``low`` to ``high``, both included."""
        return low + self.below(high - low + 1)

    def pick(self, options: Sequence[T]) -> T:
        """One of ``options``."""
        return options[self.below(len(options))]

    def some(self, options: Sequence[T], count: int) -> list[T]:
        """``count`` different ones, in a drawn order."""
        left = list(options)
        return [left.pop(self.below(len(left))) for _ in range(count)]

    def chance(self, probability: float) -> bool:
        """True with the given probability."""
        return self._random() < probability


def words(text: str) -> list[str]:
    """A list from its entries with commas between them."""
    return text.split(",")


# --- news -----------------------------------------------------------------------------------------------------------
PLACES = words("Larkfield,Westport,Millbrook,Ashford,Oakham,Riverton,Stonebridge,Harwick,Elmstead,Northgate")
OFFICES = words(
    "mayor,council,school board,harbour office,city library,fire service,water company,local museum,rail company"
)
GROUPS = words("farmers,shop owners,teachers,doctors,visitors,young families,bus drivers")
WHO = [f"the {office}" for office in OFFICES] + GROUPS
DAYS = words("Monday,Tuesday,Wednesday,Thursday,Friday,Saturday,Sunday")
SEASONS = words("spring,summer,autumn,winter")
PROJECTS = words(
    "bridge,station,library,harbour,market hall,theatre,hospital,park,swimming pool,railway line,town square,museum"
)
STATES = words("new,small,historic,popular,crowded,quiet")
OPENINGS = words("will open,will close,will be rebuilt,should be finished,will be sold,could be moved")
REASONS = words(
    "because of heavy rain,after a long debate,despite rising costs,to save money,for the first time in years,"
    "after weeks of protest,with help from volunteers,to make room for a garden,because demand has grown"
)
WEATHER = words("rain,snow,strong wind,thick fog,sunshine,a heavy storm,mild weather")
REGIONS = words("the coast,the valley,the northern hills,the old town,the whole region,the lake")
CROWDS = words("hundreds of people,many families,a small crowd,thousands of visitors,several hundred students")
EVENTS = words(
    "a concert,the summer fair,a book festival,the boat race,a farmers market,an open evening,a lantern walk"
)
MOODS = words("pleased,worried,surprised,hopeful,disappointed,proud")


def news(draw: Draw) -> str:
    """One or two sentences without digits."""
    count = draw.pick((1, 1, 2))
    place = draw.pick(PLACES)
    return " ".join(draw.pick(_NEWS)(draw, place) for _ in range(count))


def _said(draw: Draw, place: str) -> str:
    who, thing = draw.pick(WHO), f"{draw.pick(STATES)} {draw.pick(PROJECTS)}"
    return (
        f"{_capital(who)} in {place} said on {draw.pick(DAYS)} that the {thing} {draw.pick(OPENINGS)} "
        f"{draw.pick((f'in {draw.pick(SEASONS)}', draw.pick(REASONS)))}."
    )


def _weather(draw: Draw, place: str) -> str:
    return (
        f"{_capital(draw.pick(WEATHER))} is expected over {draw.pick(REGIONS)} near {place} on {draw.pick(DAYS)}, "
        f"and {draw.pick(WHO)} were told to {draw.pick(('stay at home', 'take care', 'plan ahead', 'keep warm'))}."
    )


def _event(draw: Draw, place: str) -> str:
    return (
        f"{_capital(draw.pick(CROWDS))} came to {place} for {draw.pick(EVENTS)} "
        f"{draw.pick(('last ', 'this '))}{draw.pick(DAYS)}."
    )


def _plan(draw: Draw, place: str) -> str:
    return (
        f"A plan for a {draw.pick(STATES)} {draw.pick(PROJECTS)} near {place} was "
        f"{draw.pick(('approved', 'rejected', 'delayed', 'welcomed', 'discussed'))} {draw.pick(REASONS)}."
    )


def _mood(draw: Draw, place: str) -> str:
    return f"{_capital(draw.pick(GROUPS))} in {place} are {draw.pick(MOODS)} about the {draw.pick(PROJECTS)}."


_NEWS: tuple[Callable[[Draw, str], str], ...] = (_said, _said, _weather, _event, _plan, _mood)


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


# --- recipes --------------------------------------------------------------------------------------------------------
FOODS = words("flour,sugar,butter,milk,rice,lentils,onions,carrots,potatoes,apples,lemons,honey,cream,oats,beans")
DISHES = words("apple cake,lentil soup,rice pudding,bean stew,oat bread,onion tart,carrot salad,lemon cream")
TOOLS = words("a bowl,a large pan,a deep pot,a warm dish,a baking tray")


def recipe(draw: Draw) -> str:
    """A dish, what goes in, and numbered steps."""
    first, second, third = draw.some(FOODS, 3)
    steps = [
        f"Mix {draw.between(2, 9)}0 g {first} with {second} in {draw.pick(TOOLS)}.",
        f"Add the {third} and {draw.pick(('stir well', 'fold gently', 'whisk until smooth', 'let it rest'))}.",
        f"{draw.pick(('Bake', 'Simmer', 'Cook', 'Chill'))} for {draw.between(1, 9)}{draw.pick('05')} minutes.",
    ]
    count = draw.pick((2, 3, 3))
    return f"# {_capital(draw.pick(DISHES))}\n" + "\n".join(f"{k}. {step}" for k, step in enumerate(steps[:count], 1))


# --- arithmetic -----------------------------------------------------------------------------------------------------
def arithmetic(draw: Draw) -> str:
    """A sum of two two-digit numbers and its right answer."""
    a, b = draw.between(10, 99), draw.between(10, 99)
    return f"{a} + {b} = {a + b}"


# --- code -----------------------------------------------------------------------------------------------------------
LISTS = words("items,values,rows,words,scores,prices,users,tokens,keys,jobs,sizes,ranks,votes,marks,files,zones")
LIMITS = words("limit,factor,start,size,step,bound,top,base,depth,quota")
_FUNCTIONS: tuple[tuple[str, str], ...] = (
    ("sum_{xs}({xs}, {k})", "    total = {k}\n    for x in {xs}:\n        total += x\n    return total"),
    ("scale_{xs}({xs}, {k})", "    return [x * {k} for x in {xs}]"),
    ("keep_{xs}({xs}, {k})", "    return [x for x in {xs} if x > {k}]"),
    ("first_{xs}({xs}, {k})", "    if not {xs}:\n        return None\n    return {xs}[:{k}]"),
    ("has_{xs}({xs}, {k})", "    return any(x == {k} for x in {xs})"),
    ("show_{xs}({xs}, {k})", '    for i, x in enumerate({xs}, {k}):\n        print(f"{{i}}: {{x}}")'),
    (
        "max_{xs}({xs}, {k})",
        "    best = {k}\n    for x in {xs}:\n        if x > best:\n            best = x\n    return best",
    ),
    ("safe_{xs}({xs}, {k})", "    try:\n        return {xs}[{k}]\n    except KeyError:\n        return 0"),
)


def code(draw: Draw) -> str:
    """A short Python function whose name says what its body does."""
    head, body = draw.pick(_FUNCTIONS)
    names = {"xs": draw.pick(LISTS), "k": draw.pick(LIMITS)}
    return f"def {head.format(**names)}:\n{body.format(**names)}"


# --- JSON -----------------------------------------------------------------------------------------------------------
PEOPLE = words("Ada,Ben,Chen,Dora,Emil,Fatima,Goran,Hana,Ivan,Jun,Kira,Luis,Mei,Nora,Omar,Pia,Uma,Xenia,Yara,Zoe")
CITIES = words("Oslo,Lima,Cairo,Kyoto,Quito,Turin,Perth,Delhi,Accra,Porto")
TAGS = words("red,new,big,sale,gift,blue,rare,used")


def json(draw: Draw) -> str:
    """One object of a customer table, as ``json.dumps`` writes it; the e-mail address repeats name and city."""
    name, city = draw.pick(PEOPLE), draw.pick(CITIES)
    fields = [f'"id": {draw.between(100, 999)}', f'"name": "{name}"', f'"city": "{city}"']
    if draw.chance(0.5):
        tags = ", ".join(f'"{tag}"' for tag in draw.some(TAGS, draw.between(1, 3)))
        fields.append(f'"tags": [{tags}]')
    if draw.chance(0.5):
        fields.append(f'"email": "{name.lower()}@{city.lower()}.org"')
    fields.append(f'"active": {draw.pick(("true", "false", "null"))}')
    return "{" + ", ".join(fields) + "}"


# --- logs -----------------------------------------------------------------------------------------------------------
SERVICES = words("api,auth,cache,mail,queue,store")


def log(draw: Draw) -> str:
    """One or two lines of a server's log."""
    hour, minute = draw.below(24), draw.below(60)
    lines = []
    for _ in range(draw.pick((1, 2))):
        second = draw.below(60)
        stamp = f"[{hour:02}:{minute:02}:{second:02}]"
        lines.append(f"{stamp} {draw.pick(_LOGS)(draw)}")
    return "\n".join(lines)


def _source(draw: Draw) -> str:
    return f"{draw.pick(SERVICES)}#{draw.between(1, 9)}"


_LOGS: tuple[Callable[[Draw], str], ...] = (
    lambda d: f"INFO {_source(d)} GET /v1/{d.pick(LISTS)}?page={d.between(1, 9)} -> 200",
    lambda d: f"WARN {_source(d)} load {d.between(80, 99)}% ~ slow by {d.between(2, 9)}x",
    lambda d: f"FAIL {_source(d)} '{d.pick(PEOPLE)}' <timeout> after {d.between(1, 9)}0 s; retry & wait",
    lambda d: f"INFO {_source(d)} C:\\tmp\\{d.pick(LISTS)}.db | {d.between(10, 99)}^2 kB",
    lambda d: f"WARN {_source(d)} cost ${d.between(1, 9)}.{d.between(10, 99)}! `{d.pick(TAGS)}`",
)
