"""What parsing JSON costs, before it is done: it holds the interpreter, and with it every other stream, whatever thread
it is in."""

LIGHT_BYTES = 1 << 18  # parsed within some 10 ms, whatever is in them
MAX_WORK = 1 << 19  # as many token ids; some 20 ms
_WORK = {b",": 1, b"\\": 1, b'"': 2, b"[": 12, b"{": 4, b":": 4}
"""By the marks that it goes by; a token id among others is 1."""


def too_much_work(text: bytes) -> bool:
    """Whether it has too many values, names or escapes. What stands in texts is counted too; counting is quick."""
    return len(text) > LIGHT_BYTES and sum(text.count(mark) * weight for mark, weight in _WORK.items()) > MAX_WORK
