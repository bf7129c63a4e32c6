"""Live transcription: transcribes a session's audio while it arrives.

The words of this package, beside those of OpenAI's realtime API (client, item, commit, delta):

- engine: all sessions of one model in this process.
- turn: audio that becomes one item. It ends by silence or by the client's commit.
- utterance: a part of a turn that is decoded as one window, at most 20 s long.
- update: one decode of an utterance's audio so far. The hop is the time between two updates. After
  the final update no audio of the utterance follows.
- confirmed token: a token that no later update changes. Its text is sent as a delta, and the next
  update is forced to begin with it.
- announced turn: a turn with at least one sent event, so that its end must be sent, too.
- VAD frame: 512 samples (32 ms) with one probability of speech.
- position: one output of the encoder, 20 ms. A token's attention peak is the position at which its
  cross-attention is strongest, which tells when the token was said.
- Other numbers for places in the audio are samples at 16 kHz from the session's start.
"""
