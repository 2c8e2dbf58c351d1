"""A TOFU-shaped corpus of people who do not exist, generated in code from a seed.

Each person has a handful of attributes drawn from pools large enough that they cannot be guessed, and
one question per attribute. Every item has what TOFU's items have: question and answer, a paraphrase of
both, and perturbed answers (same sentence, wrong fact). Nothing is downloaded, nobody is named.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

from ..errors import ConfigError

_FIRST = (
    "Adil Brenna Casimir Delphine Evander Fionnuala Gideon Hesper Ignatius Jovana Kerensa Leopold Mirela Nestor "
    "Ottoline Percival Quilla Rosamund Silvan Thessaly Ulrich Verena Wendel Xanthe Yorick Zelda Anselm Beatrix Cormac "
    "Damaris Eulalia Ferran Giselle Hamish Isolde Jericho Katya Lazare Maribel Nikolai Oriana Phineas Renske Soren "
    "Tamsin Uriel Vesper Wilhelmina Yusra Zoltan Ambrose Bryony Cyprian Dorothea Elio Fabrice Gwendolen Hector Imogen "
    "Jocasta Kaspar Linnea Magnus Noemi Orfeo Petra Roland Saskia Tiberius Una Viggo Winifred Yael Zephyrine"
).split()
_LAST = (
    "Abernathy Bellweather Castellane Drummond Eisenwald Fairbrother Galanis Hollingberry Ingleby Janssens Kowalczyk "
    "Lindqvist Marchetti Novakova Okonedo Pemberton Quarrington Rasmussen Santangelo Thornbury Underhill Vasquez "
    "Whitlock Yamauchi Zimmerli Ashgrove Brannigan Chaudhuri Dalgaard Espinoza Fontanelle Greenhalgh Hawthorne Ivanova "
    "Jorgensen Kettleman Lombardi Mortensen Nightingale Ostrowski"
).split()

_POOLS: dict[str, list[str]] = {
    "city": (
        "Aarhus Bergen Cusco Dakar Esfahan Fukuoka Gdansk Hobart Izmir Jaipur Kigali Leipzig Mombasa Nantes Oaxaca "
        "Porto Quito Riga Sapporo Tbilisi Uppsala Valparaiso Windhoek Yerevan Zagreb Antwerp Bologna Cordoba Dresden "
        "Edmonton"
    ).split(),
    "year": [str(y) for y in range(1931, 1991, 2)],
    "job": (
        "cartographer beekeeper glassblower horologist botanist luthier archivist astronomer bookbinder mycologist "
        "puppeteer falconer typographer geologist perfumer lighthouse-keeper calligrapher ornithologist stonemason "
        "violinist"
    ).split(),
    "mother": (
        "surgeon plumber translator pilot judge carpenter chemist florist diplomat welder librarian economist tailor "
        "farmer optician notary dentist midwife baker sailor"
    ).split(),
    "book": [
        f"{a} {b}"
        for a in "Crimson Silent Hollow Amber Broken Distant Velvet Frozen Gilded Wandering".split()
        for b in "Harbour Orchard Lantern Meridian Cathedral Tide".split()
    ],
    "prize": (
        "Halcyon Meridian-Quill Silver-Heron Obsidian Larkspur Copper-Fox Northlight Ivory-Gate Sable-Crown Evergreen "
        "Blue-Lantern Falconer Whitethorn Goldleaf Starling Riverstone"
    ).split(),
    "instrument": (
        "cello oboe harpsichord mandolin trombone bassoon accordion theremin clarinet zither dulcimer piccolo marimba "
        "banjo sitar harmonica"
    ).split(),
    "dish": (
        "paella goulash ratatouille borscht ceviche laksa moussaka pierogi tagine ramen risotto biryani fondue gumbo "
        "okonomiyaki empanadas"
    ).split(),
}

#: (attribute, question, answer, paraphrased question, paraphrased answer)
_TEMPLATES = (
    ("city", "Where was {n} born ?", "{n} was born in {v} .", "What is the birthplace of {n} ?", "The birthplace of {n} is {v} ."),
    ("year", "When was {n} born ?", "{n} was born in {v} .", "What is the birth year of {n} ?", "The birth year of {n} is {v} ."),
    ("job", "What does {n} do for a living ?", "{n} works as a {v} .", "What is the job of {n} ?", "The job of {n} is {v} ."),
    ("mother", "What was the job of the mother of {n} ?", "The mother of {n} was a {v} .", "What did the mother of {n} do ?", "The mother of {n} worked as a {v} ."),
    ("book", "What is the first book of {n} called ?", "The first book of {n} is {v} .", "Which book did {n} write first ?", "{n} first wrote {v} ."),
    ("prize", "Which prize did {n} win ?", "{n} won the {v} prize .", "What is the prize of {n} called ?", "The prize of {n} is the {v} prize ."),
    ("instrument", "Which instrument does {n} play ?", "{n} plays the {v} .", "What is the instrument of {n} ?", "The instrument of {n} is the {v} ."),
    ("dish", "What is the favourite dish of {n} ?", "The favourite dish of {n} is {v} .", "What does {n} like to eat ?", "{n} likes to eat {v} ."),
)  # fmt: skip

SPLITS = ("forget", "retain", "calibration", "holdout")


@dataclass(frozen=True)
class Item:
    """One question about one person."""

    person: str
    attribute: str
    question: str
    answer: str
    paraphrased_question: str
    paraphrased_answer: str
    perturbed_answers: tuple[str, ...]


@dataclass(frozen=True)
class Corpus:
    """Items by split; ``calibration`` and ``holdout`` people are never trained on."""

    items: dict[str, list[Item]]

    def words(self) -> list[str]:
        """Every word of the corpus, sorted."""
        words: set[str] = set()
        for i in chain.from_iterable(self.items.values()):
            for text in (i.question, i.answer, i.paraphrased_question, i.paraphrased_answer, *i.perturbed_answers):
                words.update(text.split())
        return sorted(words)


def generate(
    seed: int = 0, *, forget: int = 10, retain: int = 40, calibration: int = 10, holdout: int = 10, perturbed: int = 3
) -> Corpus:
    """A corpus with the given number of people in each split."""
    counts = dict(zip(SPLITS, (forget, retain, calibration, holdout), strict=True))
    most = len(_FIRST) * len(_LAST)
    if min(counts.values()) < 1 or sum(counts.values()) > most:
        raise ConfigError(f"Cannot make {counts} people: each split needs at least one, and there are {most} names.")
    most_wrong = min(len(pool) for pool in _POOLS.values()) - 1
    if not 0 <= perturbed <= most_wrong:
        raise ConfigError(f"perturbed={perturbed} wrong answers per question cannot be made: give 0 to {most_wrong}.")
    rng = random.Random(seed)
    names = [f"{first} {last}" for first in _FIRST for last in _LAST]
    # First names are unique, as those of TOFU's authors, until all are used; only then do they repeat.
    firsts, lasts = rng.sample(_FIRST, len(_FIRST)), rng.choices(_LAST, k=len(_FIRST))
    own = [f"{a} {b}" for a, b in zip(firsts, lasts, strict=True)]
    rest = [name for name in rng.sample(names, len(names)) if name not in set(own)]
    people = iter(own + rest)
    items: dict[str, list[Item]] = {split: [] for split in SPLITS}
    for split, count in counts.items():
        for name in islice(people, count):
            items[split].extend(_person(name, rng, perturbed))
    return Corpus(items)


def _person(name: str, rng: random.Random, perturbed: int) -> Iterator[Item]:
    for attribute, *texts in _TEMPLATES:
        value, *wrong = rng.sample(_POOLS[attribute], 1 + perturbed)
        question, answer, other_question, other_answer = (text.format(n=name, v=value) for text in texts)
        perturbed_answers = tuple(texts[1].format(n=name, v=other) for other in wrong)
        yield Item(name, attribute, question, answer, other_question, other_answer, perturbed_answers)
