"""What a conversation keeps."""

from twostroke.services.client.conversation import Conversation


def told(conversation: Conversation) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in conversation.chat().messages]


def test_turns_alternate() -> None:
    it = Conversation("be brief")
    it.ask("a")
    assert told(it) == [("system", "be brief"), ("user", "a")]
    it.hear("b")
    it.hear("")
    it.hear("c")
    assert it.close()
    it.ask("d")
    assert told(it) == [("system", "be brief"), ("user", "a"), ("assistant", "bc"), ("user", "d")]


def test_a_partial_answer_is_kept_without_being_closed() -> None:
    it = Conversation()
    it.ask("a")
    it.hear("half")
    it.ask("b")
    assert told(it) == [("user", "a"), ("assistant", "half"), ("user", "b")]


def test_a_question_without_an_answer_is_forgotten() -> None:
    it = Conversation("")
    it.ask("a")
    it.hear("")
    assert not it.close()
    assert told(it) == []
    it.ask("b")
    it.ask("c")
    assert told(it) == [("user", "c")]
    assert len(it) == 1


def test_reset_keeps_the_system_message() -> None:
    it = Conversation("s")
    it.ask("a")
    it.hear("b")
    it.reset()
    it.hear("late")
    assert it.close()
    assert told(it) == [("system", "s")]
    it.system = None
    assert told(it) == []
