"""Sentences for the demo checkpoint: from a grammar, and known words in free order.

A grammar alone would teach a model to complete its templates.
"""

from collections.abc import Callable, Mapping
from random import Random

from benchmark.shared.speech import lexicon as lex

KINDS = {"made": 0.35, "free": 0.30, "woven": 0.35}  # of all sentences
MAX_WORDS = 14


def sentence(rng: Random) -> str:
    return written(spoken_sentence(rng))


def spoken_sentence(rng: Random, shares: Mapping[str, float] = KINDS) -> str:
    kind = rng.choices(list(shares), list(shares.values()))[0]
    makers = {"made": made_sentence, "free": free_sentence, "woven": woven_sentence}
    return makers[kind](rng)


def written(text: str) -> str:
    """Return a sentence as the checkpoint writes it: no marks but the full stop at its end."""
    return "".join(c for c in text if c.isalnum() or c in " '") + "."


def made_sentence(rng: Random) -> str:
    while True:
        words = rng.choice(_SHAPES)(rng)
        if len(words) <= MAX_WORDS:
            return finish(words)


def free_sentence(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.62:
        words = _free_words(rng, _free_length(rng))
    elif kind < 0.74:
        words = _pieces(rng)
    elif kind < 0.86:
        words = _number_run(rng)
    else:
        words = _same_class(rng)
    return finish(words[:MAX_WORDS])


def woven_sentence(rng: Random) -> str:
    words: list[str] = []
    n_words = rng.randint(3, MAX_WORDS)
    while len(words) < n_words:
        for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4))):
            words.append(rng.choice(_SMALL))
        words += _with_neighbour(rng, rng.choice(_ALL))
    words = words[:MAX_WORDS]
    for i in range(1, len(words) - 1):
        if rng.random() < 0.07:
            words[i] += ","
    text = finish(words)
    return text[:-1] + "?" if rng.random() < 0.15 else text


def free_order(rng: Random) -> str:
    return finish(_free_words(rng, _free_length(rng)))


def finish(words: list[str]) -> str:
    text = " ".join(words)
    return text[0].upper() + text[1:] + "."


def _free_length(rng: Random) -> int:
    return rng.choice((1, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 10, 11, 12))


def _free_words(rng: Random, n_words: int) -> list[str]:
    words: list[str] = []
    while len(words) < n_words:
        words += _with_neighbour(rng, rng.choice(_ALL))
    return words


def _with_neighbour(rng: Random, word: str) -> list[str]:
    if word not in lex.PAIRED:
        return [word]
    before, after = lex.PAIRED[word]
    if before and after:
        return [rng.choice(before), word, rng.choice(after)]
    return [rng.choice(before), word] if before else [word, rng.choice(after)]


def _pieces(rng: Random) -> list[str]:
    words: list[str] = []
    for _ in range(rng.randint(2, 4)):
        made = rng.choice(_SHAPES)(rng)
        start = rng.randrange(len(made))
        words += made[start : start + rng.randint(1, 4)]
    return words


def _number_run(rng: Random) -> list[str]:
    words: list[str] = []
    for _ in range(rng.randint(1, 6)):
        words += rng.choice(([rng.choice(_DIGITS)], [rng.choice(lex.TEENS)], _number(rng)))
    return words


def _same_class(rng: Random) -> list[str]:
    group = [w for w in rng.choice(lex.CLASSES) if w not in lex.PAIRED] or list(lex.NAMES)
    return [rng.choice(group) for _ in range(rng.randint(1, 7))]


_ALL = lex.all_words()
_SMALL = tuple(w for w in lex.SMALL_WORDS if w not in lex.PAIRED)
_DIGITS = ("zero", *lex.UNITS)


def _number(rng: Random) -> list[str]:
    kind = rng.random()
    if kind < 0.3:
        return [rng.choice(lex.UNITS[1:])]
    if kind < 0.5:
        return [rng.choice(lex.TEENS)]
    if kind < 0.6:
        return [rng.choice(lex.TENS)]
    if kind < 0.8:
        return [rng.choice(lex.TENS), rng.choice(lex.UNITS)]
    return [rng.choice(lex.UNITS), rng.choice(lex.BIG)]


def _noun(rng: Random) -> str:
    return rng.choice(rng.choice((lex.PEOPLE, lex.THINGS, lex.THINGS, lex.PLACES, lex.ANIMALS)))


def _phrase(rng: Random, nouns: tuple[str, ...] = ()) -> list[str]:
    kind = rng.random()
    if kind < 0.12 and not nouns:
        return [rng.choice(lex.NAMES)]
    noun = rng.choice(nouns) if nouns else _noun(rng)
    if kind < 0.2:
        return [*_number(rng), rng.choice(lex.PLURALS)]
    head = rng.choice(("the", "the", *lex.DETERMINERS, "our", "their"))
    if kind < 0.6:
        return [head, rng.choice(lex.ADJECTIVES), noun]
    if kind < 0.66:
        return [head, rng.choice(lex.ADJECTIVES), rng.choice(lex.ADJECTIVES), noun]
    return [head, noun]


def _person(rng: Random) -> list[str]:
    if rng.random() < 0.4:
        return [rng.choice(lex.NAMES)]
    if rng.random() < 0.3:
        return [rng.choice(("he", "she", "someone", "everyone", "nobody"))]
    return _phrase(rng, lex.PEOPLE)


def _place(rng: Random) -> list[str]:
    return [rng.choice(lex.PREPOSITIONS), *_phrase(rng, lex.PLACES)]


def _when(rng: Random) -> list[str]:
    kind = rng.random()
    if kind < 0.25:
        return ["on", rng.choice(lex.DAYS)]
    if kind < 0.5:
        return ["in", rng.choice(lex.MONTHS)]
    if kind < 0.7:
        return [rng.choice(lex.DAY_WORDS)]
    if kind < 0.8:
        return ["at", *_number(rng)]
    return [rng.choice(("every", "this", "last", "one")), rng.choice(lex.EVENTS)]


def _act(rng: Random) -> list[str]:
    if rng.random() < 0.2:
        return [rng.choice(lex.VERBS_ALONE), *_place(rng)]
    return [rng.choice(lex.VERBS), *_phrase(rng)]


def _past(rng: Random) -> list[str]:
    if rng.random() < 0.2:
        return [rng.choice(lex.PASTS_ALONE), *_place(rng)]
    return [rng.choice(lex.PASTS), *_phrase(rng)]


def _base(rng: Random) -> list[str]:
    if rng.random() < 0.25:
        return [rng.choice(lex.BASES_ALONE), *rng.choice(([], _place(rng)))]
    return [rng.choice(lex.BASES), *_phrase(rng)]


def _adverb(rng: Random) -> list[str]:
    return [rng.choice(lex.ADVERBS)]


def _is(rng: Random) -> str:
    return rng.choice(("is", "was"))


def _are(rng: Random) -> str:
    return rng.choice(("are", "were"))


def _we(rng: Random) -> str:
    return rng.choice(("I", "we", "you", "they"))


_COUNTED = ("number", "price", "answer", "address")
_GREETINGS = tuple(
    (word,) for word in ("hello", "goodbye", "welcome", "thanks", "yes", "no", "well")
)
_SHAPES: tuple[Callable[[Random], list[str]], ...] = (
    lambda r: [*_person(r), *_act(r)],
    lambda r: [*_person(r), *_act(r), *_when(r)],
    lambda r: [*_person(r), *_adverb(r), *_act(r)],
    lambda r: [*_person(r), *_act(r), *_adverb(r)],
    lambda r: [*_person(r), *_act(r), *_place(r)],
    lambda r: [*_person(r), *_past(r)],
    lambda r: [*_person(r), *_past(r), *_when(r)],
    lambda r: [*_when(r), *_person(r), *_past(r)],
    lambda r: [*_person(r), *_past(r), *_place(r)],
    lambda r: [*_phrase(r), _is(r), r.choice(lex.ADJECTIVES)],
    lambda r: [*_phrase(r), _is(r), r.choice(lex.ADJECTIVES), *_place(r)],
    lambda r: [*_phrase(r), _is(r), *_place(r), *_when(r)],
    lambda r: ["the", r.choice(lex.PLURALS), _are(r), r.choice(lex.ADJECTIVES)],
    lambda r: [_we(r), r.choice(lex.MODALS), *_base(r)],
    lambda r: [*_person(r), r.choice(lex.MODALS), *_base(r), *_when(r)],
    lambda r: [*_person(r), r.choice(lex.MODALS), "not", *_base(r)],
    lambda r: [_we(r), r.choice(lex.BASES), *_phrase(r)],
    lambda r: [r.choice(("I", "we", "they")), "want", "to", *_base(r)],
    lambda r: [*_person(r), "wants", "to", *_base(r)],
    lambda r: ["please", *_base(r)],
    lambda r: ["please", *_base(r), *_when(r)],
    lambda r: [*_base(r), "and", *_base(r)],
    lambda r: [r.choice(lex.QUESTION_WORDS), _is(r), *_phrase(r)],
    lambda r: [r.choice(lex.QUESTION_WORDS), "do", r.choice(("you", "we", "they")), *_base(r)],
    lambda r: [r.choice(lex.MODALS), r.choice(("you", "we", "they", "I")), *_base(r)],
    lambda r: ["do", r.choice(("you", "we", "they")), *_base(r)],
    lambda r: [*_person(r), *_act(r), r.choice(lex.JOINERS), *_person(r), *_past(r)],
    lambda r: [r.choice(("if", "when", "while", "although")), *_person(r), *_act(r), *_base(r)],
    lambda r: [*_phrase(r), "and", *_phrase(r), _are(r), r.choice(lex.ADJECTIVES)],
    lambda r: ["there", _is(r), *_phrase(r), *_place(r)],
    lambda r: ["it", _is(r), *_number(r), "in", "the", r.choice(("morning", "evening"))],
    lambda r: ["the", r.choice(_COUNTED), "is", *_number(r), *_number(r)],
    lambda r: [*_person(r), r.choice(lex.PASTS), r.choice(lex.OBJECTS), *_when(r)],
    lambda r: [*_person(r), r.choice(lex.VERBS), r.choice(lex.OBJECTS), *_place(r)],
    lambda r: ["this", "is", *_phrase(r)],
    lambda r: [*_person(r), "knows", r.choice(lex.QUESTION_WORDS), *_person(r), *_past(r)],
    lambda r: ["tell", r.choice(lex.OBJECTS), r.choice(lex.QUESTION_WORDS), *_person(r), *_act(r)],
    lambda r: [*r.choice(_GREETINGS), *_phrase(r)],
    lambda r: [r.choice(lex.MONTHS), *_number(r), "was", "a", r.choice(lex.ADJECTIVES), "day"],
    lambda r: ["the", *_number(r), r.choice(lex.PLURALS), *_place(r)],
    lambda r: [*_place(r), *_person(r), *_act(r)],
    lambda r: [r.choice(lex.DAYS), "and", r.choice(lex.DAYS), "are", r.choice(lex.ADJECTIVES)],
    lambda r: [*_person(r), "works", *_when(r), *_place(r)],
    lambda r: [*_phrase(r), "for", *_person(r)],
    lambda r: [*_person(r), "needs", *_number(r), r.choice(lex.PLURALS), *_when(r)],
    lambda r: ["all", "the", r.choice(lex.PLURALS), _are(r), *_place(r)],
)  # fmt: skip
