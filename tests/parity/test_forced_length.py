"""The benchmark's checkpoints of a forced length: the reference, too, samples that many tokens."""

from __future__ import annotations

from pathlib import Path

from benchmark.shared.forced_length import forced_checkpoint
from tests.support.checkpoints import ModelShape
from tests.support.references.hugging_face import hf_features, hf_model, make_pcm

N_TOKENS = 9
SMALL = ModelShape(64, 2, 2, 2, n_vocab=4_000, n_languages=4)


def test_a_window_takes_the_forced_number_of_tokens(tmp_path: Path) -> None:
    checkpoint = forced_checkpoint(tmp_path, SMALL, N_TOKENS)
    features = hf_features(checkpoint, [make_pcm(2.0), make_pcm(28.0, seed=1)])
    rows = hf_model(checkpoint).generate(
        features, return_timestamps=True, language="en", task="transcribe"
    )
    eot = hf_model(checkpoint).config.eos_token_id
    sampled = [[token for token in row if token != eot] for row in rows.tolist()]
    assert [len(row) for row in sampled] == [N_TOKENS, N_TOKENS]
    assert len(set(sampled[0])) > N_TOKENS // 2  # the layers choose the text
