"""Rows of conversations: several short ones share a row, none sees another, and only answers count."""

import numpy as np

from tpuswarm.errors import InputError
from tpuswarm.recipes.language.chat.conversations import COUNTED, STARTS, TOKEN_BITS
from tpuswarm.train.data.source import shuffled_epochs


class ChatSource:
    """Rows of whole conversations, for inputs of T = context tokens.

    - tokens: int32 (count, T + 1), padded with 0.
    - segments: int32 (count, T); tokens of one conversation have the same number, padding has 0.
    - counted: bool (count, T); whether the loss of the next token counts.

    A longer conversation is cut at the end of its row; without a counted token before that it is left out. Every
    epoch has each row once, shuffled.
    """

    def __init__(self, array: np.ndarray, context: int, seed: int, digest: str, name: str):
        """Pack conversations, an array of tokens with the bits of `chat`."""
        self._array, self._context, self._seed, self.digest = array, context, seed, digest
        bounds = np.append(np.flatnonzero(array & STARTS), len(array))
        self._first, lengths = bounds[:-1], np.diff(bounds)
        self._length = np.minimum(lengths, context + 1)
        counted = np.flatnonzero(array & COUNTED)
        used = np.flatnonzero(np.diff(np.searchsorted(counted, [self._first, self._first + self._length]), axis=0)[0])
        self.conversations, self.left_out = len(used), len(lengths) - len(used)
        self.cut = int((lengths[used] > context + 1).sum())
        if not self.conversations:
            raise InputError(f"{name} has no conversation with an answer within {context} tokens")
        self._rows = _pack(used, self._length, context + 1)
        self.rows_per_epoch = len(self._rows)

    @property
    def description(self) -> str:
        """What there is to train on."""
        notes = [
            f"{self.cut:,} are longer than the context of {self._context:,} and end there" if self.cut else "",
            f"{self.left_out:,} more are left out, because their answers begin after it" if self.left_out else "",
        ]
        note = "; ".join(filter(None, notes))
        total = f"{self.conversations:,} conversations in {self.rows_per_epoch:,} rows to train on"
        return f"{total} ({note})" if note else total

    def rows(self, start: int, count: int) -> dict[str, np.ndarray]:
        """Return rows start to start + count of the order."""
        packed = np.zeros((count, self._context + 1), np.uint32)
        segments = np.zeros((count, self._context + 1), np.int32)
        order = shuffled_epochs(start, count, self.rows_per_epoch, self._seed)
        for at, row in enumerate(np.concatenate([rows for _, rows in order])):
            end = 0
            for number, conversation in enumerate(self._rows[row], 1):
                begin, end = end, end + self._length[conversation]
                first = self._first[conversation]
                packed[at, begin:end] = self._array[first : first + end - begin]
                segments[at, begin:end] = number
        tokens = (packed & TOKEN_BITS).astype(np.int32)
        return {"tokens": tokens, "segments": segments[:, :-1], "counted": packed[:, 1:] & COUNTED != 0}


def _pack(used: np.ndarray, length: np.ndarray, capacity: int) -> list[list[int]]:
    """Return the conversations of each row: the longest first, each into the fullest row that has room for it."""
    rows = list[list[int]]()
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0
    """Bit n is set if some row has room for exactly n tokens."""
    for conversation in used[np.argsort(-length[used], kind="stable")].tolist():
        size = int(length[conversation])
        if fitting := rooms >> size:
            room = size + (fitting & -fitting).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(conversation)
        by_room[room - size].append(row)
        rooms |= 1 << (room - size)
    return rows


def first_pieces(array: np.ndarray, context: int) -> list[tuple[list[int], bool]]:
    """Return the tokens of the first conversation, cut where tokens begin or cease to count."""
    tokens = array[: context + 1]
    tokens = tokens[: next(iter(np.flatnonzero(tokens[1:] & STARTS) + 1), len(tokens))]
    counts = tokens & COUNTED != 0
    cuts = np.flatnonzero(np.diff(counts)) + 1
    parts = np.split(tokens & TOKEN_BITS, cuts)
    return [(part.tolist(), bool(counts[at])) for at, part in zip([0, *cuts], parts, strict=True)]


def split_conversations(array: np.ndarray, split: str, share: float) -> np.ndarray:
    """Return the part `train`, `validation` (the last `share` of the conversations) or `all`."""
    starts = np.flatnonzero(array & STARTS)
    held_out = int(len(starts) * share)
    cut = int(starts[len(starts) - held_out]) if held_out else len(array)
    return {"train": array[:cut], "validation": array[cut:], "all": array}[split]
