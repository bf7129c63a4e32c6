"""The state of each sequence on the device that a decode step reads and writes, by slot.

The host writes a slot only when an attempt begins or a search chose otherwise. The last slot is
inert: it pads batches, stays at position 0 and is always stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.common.model.streams import upload
from decoder_worker.sampling.logit_rules import NO_TIMESTAMP, History

# Columns of the table; a step writes the first six.
TOKEN, POSITION, N_SAMPLED, LAST_TIMESTAMP, LAST_IS, BEFORE_IS = range(6)
TIMED, LIMIT, NOISE_KEY = range(6, 9)
N_COLUMNS = 9


@dataclass(frozen=True, slots=True)
class SlotOptions:
    """limit: tokens that may be sampled, those of a prefix included."""

    timed: bool
    temperature: float
    noise_key: int
    limit: int


@dataclass(frozen=True, slots=True)
class SlotRows:
    """int64 [n] each except temperature (float32) and history. token: to be fed at `position`."""

    index: Tensor
    token: Tensor
    position: Tensor
    limit: Tensor
    noise_key: Tensor
    temperature: Tensor
    history: History


class SlotTable:
    """table: int64 [n_slots + 1, columns]."""

    def __init__(self, n_slots: int, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.inert = n_slots
        empty = [0] * N_COLUMNS
        empty[BEFORE_IS], empty[LAST_TIMESTAMP] = 1, NO_TIMESTAMP
        self.table = torch.tensor([empty] * (n_slots + 1), device=device)
        self._temperature = torch.zeros(n_slots + 1, dtype=torch.float32, device=device)

    def load(
        self,
        slots: Sequence[int],
        options: Sequence[SlotOptions],
        tokens: Sequence[Sequence[int]],
        positions: Sequence[int],
        timestamp_begin: int,
    ) -> None:
        """Set slots to their state after `tokens` were sampled (none: an attempt begins).

        positions: of the last token, which the next step feeds; without any, the prompt's last.
        """
        begun = zip(options, tokens, positions, strict=True)
        rows = [_row(*each, timestamp_begin) for each in begun]
        index = upload(slots, torch.int64, self.device)
        flat = upload([value for row in rows for value in row], torch.int64, self.device)
        self.table.index_copy_(0, index, flat.view(len(rows), N_COLUMNS))
        temperatures = [each.temperature for each in options]
        self._temperature.index_copy_(0, index, upload(temperatures, torch.float32, self.device))

    def rows(self, index: Tensor) -> SlotRows:
        return read_rows(self.table, self._temperature, index)


def read_rows(table: Tensor, temperature: Tensor, index: Tensor) -> SlotRows:
    """Copy some slots. index: int64 [n], in which only the inert one may repeat."""
    values = table[index]
    columns = values.unbind(1)
    last_is, before_is, timed = values[:, LAST_IS : TIMED + 1].bool().unbind(1)
    return SlotRows(
        index=index,
        token=columns[TOKEN],
        position=columns[POSITION],
        limit=columns[LIMIT],
        noise_key=columns[NOISE_KEY],
        temperature=temperature[index],
        history=History(
            n_sampled=columns[N_SAMPLED],
            last_is_timestamp=last_is,
            before_is_timestamp=before_is,
            last_timestamp=columns[LAST_TIMESTAMP],
            timed=timed,
        ),
    )


def advance(table: Tensor, rows: SlotRows, tokens: Tensor, eot: int, timestamp_begin: int) -> None:
    """Note in `table` that `tokens` (int64 [n]) were sampled for `rows`.

    A row that stops, at end of text or at its limit, keeps its position: what is launched for it
    before the host knows overwrites the same place.
    """
    after = rows.history.after(tokens, timestamp_begin)
    goes_on = (tokens != eot) & (after.n_sampled < rows.limit)
    columns = (
        tokens,
        rows.position + goes_on,
        after.n_sampled,
        after.last_timestamp,
        after.last_is_timestamp.long(),
        after.before_is_timestamp.long(),
    )
    table[:, : len(columns)].index_copy_(0, rows.index, torch.stack(columns, 1))


def _row(
    options: SlotOptions, tokens: Sequence[int], position: int, timestamp_begin: int
) -> list[int]:
    stamps = [token - timestamp_begin for token in tokens if token >= timestamp_begin]
    row = [0] * N_COLUMNS
    row[TOKEN] = tokens[-1] if tokens else 0
    row[POSITION] = position
    row[N_SAMPLED] = len(tokens)
    row[LAST_TIMESTAMP] = stamps[-1] if stamps else NO_TIMESTAMP
    row[LAST_IS] = int(bool(tokens) and tokens[-1] >= timestamp_begin)
    row[BEFORE_IS] = int(len(tokens) < 2 or tokens[-2] >= timestamp_begin)
    row[TIMED] = int(options.timed)
    row[LIMIT] = options.limit
    row[NOISE_KEY] = options.noise_key
    return row
