"""A process that compiles constraints to see whether they can be used. It can be killed: a hostile one may take
minutes, exhaust the stack, or the memory.

Lines of JSON: first one that says why it cannot work, or nothing (`{"error": ""}`); then for each
`{"kind": 2, "text": "..."}` one of the same form. It ends when its input does, or its parent.
"""

import json
import os
import resource
import sys
from pathlib import Path

from llguidance import LLTokenizer

from ...engine.grammar import compile_grammar, in_deep_stack
from ...engine.request import Constraint, ConstraintKind
from ...engine.vocabulary import read_vocabulary
from ...errors import TwostrokeError
from ..supervisor.parent import die_with

STACK_BYTES = 8 << 20  # an eighth of what a worker gives the same compiler
MEMORY_BYTES = 192 << 20  # beside what the vocabulary takes, the stack counted in; ordinary ones take less than 20 MiB
NICE = 5  # whoever streams goes first


def verdict(vocabulary: LLTokenizer, constraint: Constraint) -> str:
    """Why it cannot be used; empty: it can."""
    told = ["it cannot be compiled"]

    def work() -> None:
        try:
            compile_grammar(vocabulary, constraint)
            told[0] = ""
        except TwostrokeError as error:
            told[0] = error.message

    in_deep_stack(work, "grammar", STACK_BYTES).join()
    return told[0]


def main(folder: Path, parent: int) -> None:
    """`folder`: the model's. `parent`: process id."""
    die_with(parent)
    os.nice(NICE)
    try:
        vocabulary = read_vocabulary(folder)
    except TwostrokeError as error:
        _tell(f"outputs cannot be constrained: {error.message}")
        return
    _limit_memory()
    _silence()
    _tell("")
    for line in sys.stdin:
        asked = json.loads(line)
        _tell(verdict(vocabulary, Constraint(ConstraintKind(asked["kind"]), asked["text"])))


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _silence() -> None:
    """A library's last words may hold what a request says."""
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), sys.stderr.fileno())


def _tell(error: str) -> None:
    sys.stdout.write(json.dumps({"error": error}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
