"""Counts what Triton compiles, or loads from its cache: each makes the step that it happens in late."""

from types import TracebackType
from typing import Any


class CompileCount:
    """While entered, notes the kernels that got a new variant, by name."""

    def __init__(self) -> None:
        """Nothing was seen; without Triton nothing ever is."""
        self.seen: list[str] = []
        self._before: Any = None
        self._runtime: Any = None

    def _note(self, *, repr: str, **told: Any) -> None:
        """As `triton.knobs.JITHook`, of 3.6 and 3.7."""
        self.seen.append(repr)
        if self._before is not None:
            self._before(repr=repr, **told)

    def __enter__(self) -> "CompileCount":
        try:
            from triton import knobs
        except ImportError:
            return self
        self._runtime = knobs.runtime
        self._before = self._runtime.jit_post_compile_hook
        self._runtime.jit_post_compile_hook = self._note
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._runtime is not None:
            self._runtime.jit_post_compile_hook = self._before
