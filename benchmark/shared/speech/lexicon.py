"""The words that the demo checkpoint knows, by their part in a sentence, each in one casing."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words(
    "Alice Anna Clara David Emma George Helen James Laura Maria Martin Peter Robert Susan Thomas "
    "Victor"
)
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _words(
    "January February March April May June July August September October November December"
)
UNITS = _words("one two three four five six seven eight nine")
TEENS = _words("ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen")
TENS = _words("twenty thirty forty fifty sixty seventy eighty ninety")
BIG = _words("hundred thousand million")
PEOPLE = _words(
    "builder captain dancer doctor driver farmer fellow friend painter pilot player sailor singer "
    "student teacher writer"
)
ANIMALS = _words("bird dog fox horse")
THINGS = _words(
    "account address answer basket blanket book bottle box camera candle chair circle coffee door "
    "email engine hammer kettle language letter lesson machine message mirror money music name "
    "number order paper phone picture pocket price problem project question reason record report "
    "season server service shadow signal story system table test ticket watch"
)
PLACES = _words(
    "airport bedroom bridge castle church city corner country doorway factory forest garden "
    "harbor hospital house island kitchen library market mountain museum network office river "
    "road room school station stop street theater town village window world"
)
EVENTS = _words(
    "evening future history journey lightning meeting moment month morning night science summer "
    "support thunder time weather week winter work year water minute second day"
)
PLURALS = _words(
    "Americans answers books guards letters minutes notices orders questions reasons reports "
    "tests words years"
)
ADJECTIVES = _words(
    "ancient bad big black blue bright broken careful central common digital distant early empty "
    "famous first frozen gentle golden good green happy heavy hidden human large last late lazy "
    "little local long lost modern narrow northern old open perfect private public quick quiet "
    "red royal silver simple small southern white yellow young"
)
VERBS = _words(  # he ... something
    "breaks brings builds carries cleans closes counts covers crosses describes discovers draws "
    "enters fills finds fixes follows forgets gathers hears helps holds joins keeps learns leaves "
    "lifts likes loses makes measures meets moves needs opens orders owns paints passes plans "
    "plays points prefers presses pulls pushes reaches reads receives records remembers repairs "
    "saves seeks sees sells sends shows studies takes teaches tests throws touches trades turns "
    "uses visits wants washes watches wins writes"
)
VERBS_ALONE = _words("begins closes draws leaves sings speaks starts stops waits walks works")
PASTS = _words(
    "asked began brought built called felt found gave heard held kept left lost made met needed "
    "opened paid said saw sent showed spent told took wanted wrote"
)
PASTS_ALONE = _words("began called left stood stopped thought waited walked worked")
BASES = _words(
    "answer ask begin build call carry close do draw find help hold keep learn leave make meet "
    "open order paint pass plan play read record repair report return see send start stop take "
    "tell test thank touch try turn use visit want watch write"
)
BASES_ALONE = _words("answer begin leave listen return speak start stay stop wait work")
MODALS = _words("can could must should will would")
ADVERBS = _words(
    "again alone always carefully clearly early finally late later never now often once outside "
    "quickly quietly slowly sometimes soon suddenly together usually"
)
DAY_WORDS = _words("today tomorrow yesterday tonight")
PREPOSITIONS = _words(
    "above across after against around at before behind beside between by down from in inside "
    "into near of off on outside over through toward under until up with without"
)
DETERMINERS = _words("a the my your his her this that every another")
PRONOUNS = _words("I he she we you they someone everyone nobody it")
OBJECTS = _words("me him her us them you it")
JOINERS = _words("and but because when while if although so that")
QUESTION_WORDS = _words("what when where why how who")
COPULAS = _words("is are was were")
DIRECTIONS = _words("north east south west left right")
OTHER = _words(
    "all although any good goodbye hello less like many more more most needed nine no not or "
    "please same small some tell tells there thanks these they this those too very welcome well "
    "yes zero home"
)
# Words between the content words of `woven_sentence`.
SMALL_WORDS = _words(
    "a the my your his her this that these those all some any more most less another every no not "
    "I he she we you they it me him us them someone everyone nobody is are was were can could must "
    "should will would do and but because when while if although so or above after around at "
    "before behind by down for from in inside into near of off on once over there here to "
    "toward under until up with without what where why how who very too now never always "
    "again one two many small little same yes well please like wanted"
)
# Homophones with their neighbours in free order: (before, after).
PAIRED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "our": ((), ("house", "garden", "school", "friend", "project", "village")),
    "hour": (("one", "every", "another", "this"), ()),
    "new": ((), ("house", "school", "phone", "teacher", "table", "friend")),
    "knew": (("he", "she", "they", "nobody"), ()),
    "knows": (("he", "she", "nobody", "everyone"), ()),
    "no": ((), ("answer", "money", "music", "water", "paper")),
    "their": ((), ("house", "garden", "letter", "camera", "market", "story")),
    "there": ((), ("is", "are", "was")),
    "to": ((), ("the", "his", "every", "leave", "work", "read")),
    "two": ((), ("hundred", "thousand", "million")),
    "too": ((), ("late", "early", "small", "large", "heavy")),
    "for": ((), ("the", "my", "every", "another", "someone")),
    "four": ((), ("hundred", "thousand", "million")),
    "right": ((), ("now", "answer", "door", "here")),
    "write": ((), ("the", "my", "another")),
    "by": ((), ("the", "his", "every")),
    "see": ((), ("the", "his", "every")),
    "week": (("last", "every", "this"), ()),
    "here": (("are", "is", "right", "was"), ()),
    "hear": (("can", "will", "must"), ()),
    "read": (("can", "will", "must"), ()),
    "one": ((), ("hundred", "thousand", "million", "hour")),
}

CLASSES = (
    NAMES, DAYS, MONTHS, UNITS, TEENS, TENS, BIG, PEOPLE, ANIMALS, THINGS, PLACES, EVENTS, PLURALS,
    ADJECTIVES, VERBS, VERBS_ALONE, PASTS, PASTS_ALONE, BASES, BASES_ALONE, MODALS, ADVERBS,
    DAY_WORDS, PREPOSITIONS, DETERMINERS, PRONOUNS, OBJECTS, JOINERS, QUESTION_WORDS, COPULAS,
    DIRECTIONS, OTHER,
)  # fmt: skip


def all_words() -> tuple[str, ...]:
    words = {w for group in CLASSES for w in group} | set(PAIRED)
    for before, after in PAIRED.values():
        words.update(before, after)
    return tuple(sorted(words))
