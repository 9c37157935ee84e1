"""A conversation as a client keeps it: the system message, the turns so far, and the answer that is coming in."""

from ...v1 import inference_pb2 as pb


class Conversation:
    """Turns alternate, user first. An answer grows while it streams, so that whatever ends it, what came is kept."""

    def __init__(self, system: str | None = None) -> None:
        """`system`: stands before all turns; None or empty: nothing does, or what the model's template puts there."""
        self.system = system or None
        self._turns: list[tuple[str, str]] = []
        self._answer: list[str] | None = None

    def __len__(self) -> int:
        """Turns, the system message not counted."""
        return len(self._turns)

    def chat(self) -> pb.Chat:
        """All of it, for a request."""
        messages = [pb.ChatMessage(role="system", content=self.system)] if self.system else []
        messages += [pb.ChatMessage(role=role, content=content) for role, content in self._turns]
        return pb.Chat(messages=messages)

    def ask(self, text: str) -> None:
        """The user's turn. Closes the answer before."""
        self.close()
        self._turns.append(("user", text))
        self._answer = []

    def hear(self, text: str) -> None:
        """A piece of the answer."""
        if self._answer is not None:
            self._answer.append(text)

    def close(self) -> bool:
        """The answer is over. Where nothing came the question goes too, and False is returned."""
        if self._answer is None:
            return True
        answer, self._answer = "".join(self._answer), None
        if answer:
            self._turns.append(("assistant", answer))
        else:
            self._turns.pop()
        return bool(answer)

    def reset(self) -> None:
        """Forgets the turns; the system message stays."""
        self._turns.clear()
        self._answer = None
