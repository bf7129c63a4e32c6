"""Live transcription: the audio of a session comes in as it is spoken, and its text goes out.

Each word below has one meaning in the package. Client, item, turn, commit, delta and buffer are
words of OpenAI's realtime API.

- session: what one client opened; engine: all sessions of one model in this process.
- turn: audio that becomes one item of OpenAI's API; it ends by silence or by the client's commit.
- utterance: a part of a turn that is decoded as one window. It grows with the audio, begins where
  the one before was cut, and is at most 20 s long (`turns`, `turn_detector`).
- update: one decode of an utterance's audio so far (`updates`). hop: the time from one to the
  next. final update: the one after which no audio of the utterance follows.
- confirmed token: it will not change, so that its text is sent as a delta, and the next update is
  forced to begin with it (`partial_transcript`). All others may still change.
- event: what the engine says of a turn, in `interface`; `protocol` turns it into OpenAI's events.
- announced: a turn of which an event was sent, so that its end must be sent too.
- VAD frame: 512 samples, 32 ms, with one probability of speech (`activity`).
- position: one output of the encoder, 20 ms. attention peak: the position at which a token's
  cross-attention was strongest, which tells when the token was said.
- Other numbers that name a place in the audio are samples at 16 kHz from the session's start.
"""
