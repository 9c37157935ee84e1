"""WaitingQueue: ranks, ages, parking."""

import random

from hypothesis import given
from hypothesis import strategies as st

from twostroke.engine.request import Request, SamplingParams, SequenceKey, Work
from twostroke.engine.sequence import Sequence
from twostroke.engine.waiting import WaitingQueue


def sequence_of(
    order: int, arrival: float, work: Work = Work.ALL, *, start_now: bool = True, priority: int = 0
) -> Sequence:
    key = SequenceKey(1, order, 0, 0)
    request = Request(key, [1], SamplingParams(), work, start_now=start_now, priority=priority)
    return Sequence(request, arrival, order, 2, b"", [1], 1)


def order_of(queue: WaitingQueue) -> list[int]:
    return [sequence.order for sequence in queue.in_order()]


def test_ranks_then_age_then_order_of_addition() -> None:
    queue = WaitingQueue()
    preempted = sequence_of(1, 9.0)
    preempted.preempted = True
    ticketed = sequence_of(2, 2.0, Work.PREFILL)
    ticketed.ticketed = True
    unticketed = sequence_of(3, 0.0, Work.PREFILL)
    again = sequence_of(4, 5.0, Work.PREFILL)
    again.preempted = True
    for sequence in (again, sequence_of(6, 3.0), sequence_of(5, 3.0), unticketed, ticketed, preempted):
        queue.push(sequence)
    assert order_of(queue) == [1, 2, 5, 6, 3, 4]
    assert len(queue) == 6


def test_priority_comes_before_rank_and_age_but_a_ticket_before_all() -> None:
    queue = WaitingQueue()
    preempted = sequence_of(4, 0.0, priority=0)
    preempted.preempted = True
    again = sequence_of(6, 9.0, priority=1)
    again.preempted = True
    unticketed = [sequence_of(number, 0.0, Work.PREFILL, priority=priority) for number, priority in ((9, 0), (8, -9))]
    urgent, remote = sequence_of(2, 9.0, priority=-7), sequence_of(1, 9.0, Work.DECODE, priority=-8)
    plain, late = sequence_of(5, 1.0), sequence_of(7, 0.0, priority=1)
    for sequence in (late, *unticketed, again, plain, preempted, urgent, remote):
        queue.push(sequence)
    assert order_of(queue) == [1, 2, 4, 5, 6, 7, 8, 9]
    assert [sequence.order for sequence in queue.all()] == [1, 2, 4, 5, 6, 7, 8, 9]
    ticketed = unticketed[0]
    queue.remove(ticketed)
    ticketed.ticketed = True
    queue.push(ticketed)
    assert order_of(queue) == [1, 2, 4, 9, 5, 6, 7, 8]
    for sequence in (plain, urgent, again, unticketed[1], remote, late, preempted, ticketed):
        queue.remove(sequence)
    assert (queue.total(), queue.prompt_tokens) == (0, 0)


@given(
    st.lists(
        st.tuples(st.integers(-2, 2), st.integers(0, 3), st.sampled_from(list(Work)), st.booleans(), st.booleans()),
        max_size=30,
    ),
    st.randoms(use_true_random=False),
)
def test_the_order_is_that_of_its_definition(
    told: list[tuple[int, int, Work, bool, bool]], chance: random.Random
) -> None:
    queue, inside = WaitingQueue(), list[Sequence]()
    for order, (priority, arrival, work, preempted, ticketed) in enumerate(told):
        sequence = sequence_of(order, float(arrival), work, priority=priority)
        sequence.preempted, sequence.ticketed = preempted, ticketed
        queue.push(sequence)
        inside.append(sequence)
        if chance.random() < 0.3:
            queue.remove(inside.pop(chance.randrange(len(inside))))

    def place(one: Sequence) -> tuple[bool, int, bool, float, int]:
        new = not one.preempted and not one.unticketed  # among those without a ticket it makes no difference
        return one.unticketed, one.request.priority, new, one.arrival, one.order

    wanted = sorted(inside, key=place)
    assert list(queue.in_order()) == wanted
    assert len(queue) == len(wanted)


def test_parked_ones_wait_for_their_ticket() -> None:
    queue = WaitingQueue()
    parked = sequence_of(1, 0.0, Work.PREFILL, start_now=False)
    queue.push(parked)
    assert (len(queue), queue.total(), order_of(queue), queue.all()) == (0, 1, [], [parked])
    queue.remove(parked)
    parked.ticketed = True
    queue.push(parked)
    assert (len(queue), order_of(queue)) == (1, [1])


def test_removing_while_iterating() -> None:
    queue = WaitingQueue()
    for order in range(6):
        queue.push(sequence_of(order, 0.0))
    seen = []
    for sequence in queue.in_order():
        seen.append(sequence.order)
        if sequence.order % 2 == 0:
            queue.remove(sequence)
    assert seen == [0, 1, 2, 3, 4, 5]
    assert order_of(queue) == [1, 3, 5]


def test_counts_the_prompt_tokens_to_be_computed_here() -> None:
    queue = WaitingQueue()
    local, remote, parked = (
        sequence_of(1, 0.0),
        sequence_of(2, 0.0, Work.DECODE),
        sequence_of(3, 0.0, Work.PREFILL, start_now=False),
    )
    for sequence in (local, remote, parked):
        queue.push(sequence)
    assert queue.prompt_tokens == 2
    queue.remove(remote)
    remote.preempted = True  # it will compute its KV itself
    queue.push(remote)
    assert queue.prompt_tokens == 3
    for sequence in (local, remote, parked):
        queue.remove(sequence)
    assert (queue.prompt_tokens, queue.total()) == (0, 0)


def test_removing_finds_the_right_one_among_equal_arrivals() -> None:
    queue = WaitingQueue()
    sequences = [sequence_of(order, 1.0) for order in range(5)]
    for sequence in reversed(sequences):
        queue.push(sequence)
    queue.remove(sequences[3])
    assert order_of(queue) == [0, 1, 2, 4]
