"""What an engine says about how busy it is."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """A moment's figures."""

    free_pages: int  # free or evictable
    pages: int  # usable: without the sink
    held_pages: int  # under a ticket, quarantined ones counted in
    running: int  # in the batch, those that await KV counted in
    waiting: int
    waiting_tokens: int  # prompt tokens still to be computed here, waiting and running sequences'
    steps: int  # since the start
    prefilled_tokens: int = 0  # of prompts, and of output computed anew; since the start
    covered_positions: int = 0  # by block tables; a page that two sequences share counts twice
    unused_positions: int = 0  # of these, without a token
    mean_length: float = 0.0  # tokens of a sequence, over time; 0: none was seen
    prefill_s: float = 0.0  # that `prefilled_tokens` took: see `StepMeter`
    decode_step_s: float = 0.0  # of a step that only decodes, over recent ones; 0: none was seen
    preemptions: int = 0  # sequences that lost their pages for want of room, to be computed anew; since the start
