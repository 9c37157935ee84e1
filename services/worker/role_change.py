"""A worker's change of role: it ends with a code that tells whoever started it what to start next.

Another process, because peers hold on to the old one until its death is proven, which no living process can do.
"""

from collections.abc import Mapping, Sequence

EXIT_CODES: Mapping[str, int] = {"prefill": 71, "decode": 72, "both": 73}
"""Exit code of a worker that shall come back in this role; none that shells or Python use."""


def successors(command: Sequence[str], words: Sequence[str]) -> dict[int, tuple[str, ...]]:
    """By exit code: the arguments of the process that follows. `command` comes before the role, `words` after it."""
    return {code: (*command, role, *words) for role, code in EXIT_CODES.items()}
