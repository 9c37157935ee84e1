"""Counts the fields of a protobuf message before it is read: each becomes an object, of two bytes, and reading millions
of them holds the interpreter, and with it every other stream."""

import re
from contextlib import suppress

from google.protobuf.descriptor import Descriptor

LIGHT_BYTES = 1 << 18  # read within some 5 ms, whatever is in them
MAX_FIELDS = 1 << 14  # of all levels, in a message that is not light; counted within some 10 ms
_VARINT_BYTES = 10
_LAST = re.compile(rb"[\x00-\x7f]")  # byte of a number


class FieldCount:
    """Of messages of any kinds."""

    def __init__(self, most: int = MAX_FIELDS, light: int = LIGHT_BYTES) -> None:
        """`most`: fields of a message that has more than `light` bytes."""
        self.most = most
        self._light = light
        self._inner: dict[Descriptor, dict[int, Descriptor]] = {}

    def exceeded(self, kind: Descriptor, data: bytes) -> bool:
        """Whether a serialized message of this kind has more fields than it may. What is malformed counts as far as it
        can be read: whoever parses it stops there too."""
        if len(data) <= self._light:
            return False
        left, spans = self.most, [(0, len(data), kind)]
        while spans and left >= 0:
            at, end, kind = spans.pop()
            left -= _fields(data, at, end, self._messages_in(kind), spans, left)
        return left < 0

    def _messages_in(self, kind: Descriptor) -> dict[int, Descriptor]:
        """By the number of the field. A map is a list of messages."""
        found = self._inner.get(kind)
        if found is None:
            found = self._inner[kind] = {
                field.number: field.message_type for field in kind.fields if field.message_type is not None
            }
        return found


def _fields(
    data: bytes, at: int, end: int, inner: dict[int, Descriptor], spans: list[tuple[int, int, Descriptor]], most: int
) -> int:
    """How many there are from `at` to `end`, at this level, or one more than `most`; those that are messages are added
    to `spans`. A group is a field, and so are those in it. What breaks off counts as far as it goes."""
    count = 0
    with suppress(IndexError):
        while at < end and count <= most:
            count += 1
            tag = data[at]
            at += 1
            if tag > 127:
                tag, at = _number(data, at - 1)
            kind = tag & 7
            if kind == 2:  # so many bytes
                size = data[at]
                at += 1
                if size > 127:
                    size, at = _number(data, at - 1)
                message = inner.get(tag >> 3)
                if message is not None:
                    spans.append((at, min(at + size, end), message))
                at += size
            elif kind == 0:  # a number
                at = at + 1 if data[at] < 128 else _end(data, at)
            elif kind in (1, 5):  # 64 or 32 bits
                at += 8 if kind == 1 else 4
            elif kind > 5:
                break
    return count


def _end(data: bytes, at: int) -> int:
    """Of a number of several bytes. IndexError."""
    last = _LAST.search(data, at, at + _VARINT_BYTES)
    if last is None:
        raise IndexError
    return last.end()


def _number(data: bytes, at: int) -> tuple[int, int]:
    """Its value, and where it ends. IndexError."""
    end = _end(data, at)
    value = 0
    for byte in reversed(data[at:end]):
        value = value << 7 | byte & 127
    return value, end
