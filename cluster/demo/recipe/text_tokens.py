"""The demo checkpoint's tokenizer: trained here, with Whisper's special tokens in Whisper's order.

A byte-level BPE on the corpus, then <|endoftext|>, <|startoftranscript|>, 99 languages, the tasks
and marks, and 1501 timestamps of 20 ms. `TextTokens` turns words into ids for the windows; the
files are read by `WhisperTokenizerFast` like any published checkpoint's.
"""

import json
from functools import cache
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from cluster.demo.recipe.speech import corpus, lexicon
from cluster.model.text.languages import LANGUAGES

N_LANGUAGES = 99
N_TIMESTAMPS = 1501  # 0.00 s to 30.00 s in steps of 20 ms
BASE_VOCAB = 2_304  # enough for nearly every known word to be one token
CORPUS_SENTENCES = 60_000
LANGUAGE_CODES = tuple(list(LANGUAGES)[:N_LANGUAGES])
SPECIALS = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    *(f"<|{code}|>" for code in LANGUAGE_CODES),
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
)


def train_tokenizer(folder: Path, seed: int = 0) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` into `folder`."""
    rng = Random(f"tokenizer/{seed}")
    words = lexicon.all_words()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BASE_VOCAB,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    texts = [" " + corpus.sentence(rng) for _ in range(CORPUS_SENTENCES)]
    texts += [f" {word} {word[0].upper()}{word[1:]}" for word in words] * 40
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    tokenizer.add_tokens(
        [
            AddedToken(f"<|{0.02 * i:.2f}|>", special=False, normalized=False)
            for i in range(N_TIMESTAMPS)
        ]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "WhisperTokenizer",
        "add_prefix_space": False,
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "errors": "replace",
        "model_max_length": 1024,
        "return_attention_mask": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


class TextTokens:
    """Ids of words and special tokens, from the tokenizer's file alone."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.eot = self.special("<|endoftext|>")
        self.sot = self.special("<|startoftranscript|>")
        self.english = self.special("<|en|>")
        self.languages = [self.special(f"<|{code}|>") for code in LANGUAGE_CODES]
        self.translate = self.special("<|translate|>")
        self.transcribe = self.special("<|transcribe|>")
        self.sot_prev = self.special("<|startofprev|>")
        self.no_speech = self.special("<|nospeech|>")
        self.no_timestamps = self.special("<|notimestamps|>")
        self.timestamp_begin = self.special("<|0.00|>")
        self.n_vocab = int(self.tokenizer.get_vocab_size())

    def special(self, token: str) -> int:
        """The id of a token that must exist."""
        token_id = self.tokenizer.token_to_id(token)
        if token_id is None:
            raise KeyError(token)
        return int(token_id)

    @cache  # noqa: B019 - a closed vocabulary, one instance per process
    def word(self, word: str) -> tuple[int, ...]:
        """Ids of one word of a sentence, its leading space and any full stop included."""
        return tuple(self.tokenizer.encode(" " + word).ids)

    def encode(self, text: str) -> list[int]:
        """Ids of a text as it stands."""
        return list(self.tokenizer.encode(text).ids)

    def decode(self, ids: list[int]) -> str:
        """Text of the ids, special tokens and timestamps left out."""
        kept = [i for i in ids if i < self.eot]
        return str(self.tokenizer.decode(kept, skip_special_tokens=True))
