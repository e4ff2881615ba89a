"""The precise index against a model that keeps plain sets, and the keys it is made of."""

from __future__ import annotations

from array import array
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from smg_grpc_proto.generated import common_pb2

from npufleet.cluster.router.prefix.guess import PrefixGuess
from npufleet.cluster.router.prefix.index import PrefixIndex
from npufleet.cluster.router.prefix.prompt import Media, TokenPrompt, chain, namespace, pack
from npufleet.cluster.router.prefix.wire import apply

SIZE = 4


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def prompt(*tokens: int, **kind: object) -> TokenPrompt:
    return TokenPrompt(tokens=pack(tokens), **kind)  # type: ignore[arg-type]


def blocks(made: TokenPrompt, copy: int = 0) -> list[tuple[int, int]]:
    """Engine hashes (any will do) with our keys."""
    return [(key ^ copy, key) for key in made.keys(SIZE)]


def store(index: PrefixIndex, engine: str, made: TokenPrompt, **where: int) -> None:
    index.stored(engine, blocks(made), block_size=SIZE, **where)


def test_keys_depend_on_all_that_decides_about_reuse():
    base = prompt(*range(12))
    assert len(base.keys(SIZE)) == 3 and base.keys(SIZE) == prompt(*range(12)).keys(SIZE)
    assert base.keys(SIZE)[:2] == prompt(*range(11)).keys(SIZE)
    others = [
        prompt(*range(12), lora="a"),
        prompt(*range(12), salt="a"),
        prompt(99, *range(1, 12)),
        prompt(*range(12), media=(Media(identifier="cat", offset=1, length=2),)),
        prompt(*range(12), media=(Media(identifier="dog", offset=1, length=2),)),
        prompt(*range(12), media=(Media(identifier="cat", offset=2, length=2),)),
    ]
    firsts = [other.keys(SIZE)[0] for other in [base, *others]]
    assert len(set(firsts)) == len(firsts)
    late = prompt(*range(12), media=(Media(identifier="cat", offset=9, length=2),))
    assert late.keys(SIZE)[:2] == base.keys(SIZE)[:2] and late.keys(SIZE)[2] != base.keys(SIZE)[2]


def test_a_match_is_the_unbroken_prefix_and_never_the_last_token():
    index = PrefixIndex()
    store(index, "a", prompt(*range(12)))
    store(index, "b", prompt(*range(8)))
    assert index.match(prompt(*range(13))) == {"a": 12, "b": 8}
    assert index.match(prompt(*range(12))) == {"a": 8, "b": 8}
    assert index.match(prompt(*range(8), 77, 77, 77, 77, 77)) == {"a": 8, "b": 8}
    assert index.match(prompt(77, *range(1, 13))) == {}
    index.removed("a", [prompt(*range(12)).keys(SIZE)[1]])
    assert index.match(prompt(*range(13))) == {"a": 4, "b": 8}


def test_copies_of_a_block_go_one_at_a_time_and_reports_of_reuse_are_no_copies():
    index = PrefixIndex()
    made = prompt(*range(4))
    store(index, "a", made)
    index.stored("a", blocks(made), block_size=SIZE, copies=False)
    index.stored("a", blocks(made), block_size=SIZE)
    index.removed("a", made.keys(SIZE))
    assert index.match(prompt(*range(5))) == {"a": 4}
    index.removed("a", made.keys(SIZE))
    assert index.match(prompt(*range(5))) == {} and index.blocks == 0


def test_what_was_just_sent_counts_until_its_event_had_time_to_arrive():
    clock = Clock()
    index = PrefixIndex(clock=clock, linger=2.0)
    store(index, "z", prompt(77, 77, 77, 77))  # from here on the block size is known
    made = prompt(*range(9))
    ticket = index.expect("a", made)
    clock.now += 100
    assert index.match(made) == {"a": 8}
    index.started(ticket)
    index.ended(ticket)
    clock.now += 1.9
    assert index.match(made) == {"a": 8}
    clock.now += 0.2
    assert index.match(made) == {} and index.expected == 0
    index.ended(index.expect("a", made))  # it never started
    assert index.match(made) == {} and index.expected == 0


def test_an_event_ends_what_was_expected_of_its_block():
    index = PrefixIndex(clock=Clock(), linger=2.0)
    made = prompt(*range(8))
    store(index, "a", made)
    tickets = [index.expect("a", made) for _ in range(2)]
    index.started(tickets[0])
    index.removed("a", made.keys(SIZE))  # while a request that was sent is still to compute it anew
    assert index.match(prompt(*range(9))) == {"a": 8}
    index.started(tickets[1])
    store(index, "a", made)
    index.removed("a", made.keys(SIZE)[1:])  # evicted before the time of an event is over
    assert index.match(prompt(*range(9))) == {"a": 4} and index.expected == 0
    for ticket in tickets:
        index.ended(ticket)
    assert index.match(prompt(*range(9))) == {"a": 4}


def test_an_engine_that_is_dropped_leaves_nothing_to_the_next_one():
    index = PrefixIndex()
    store(index, "a", prompt(*range(8)))
    ticket = index.expect("a", prompt(*range(100, 108)))
    index.drop("a")
    store(index, "b", prompt(50, 51, 52, 53))
    assert index.match(prompt(*range(9))) == {} == index.match(prompt(*range(100, 109)))
    index.started(ticket)
    index.ended(ticket)
    assert index.match(prompt(*range(100, 109))) == {} and index.expected == 0


def test_a_sliding_window_needs_only_the_blocks_it_sees():
    index = PrefixIndex()
    made = prompt(*range(20))
    store(index, "a", made, group=0)
    index.stored("a", blocks(made), block_size=SIZE, group=1, window=6)
    keys = made.keys(SIZE)
    longer = prompt(*range(20), 7)
    index.removed("a", [keys[0], keys[1]], group=1)  # far behind the window
    assert index.match(longer) == {"a": 20}
    index.removed("a", [keys[4]], group=1)
    assert index.match(longer) == {"a": 16}
    index.removed("a", [keys[3]], group=1)
    assert index.match(longer) == {}  # 12 tokens would need block 1 of the window
    assert PrefixIndex().match(longer) == {}


def test_two_full_groups_both_have_to_hold_the_prefix():
    index = PrefixIndex()
    made = prompt(*range(16))
    store(index, "a", made, group=0)
    index.stored("a", blocks(made)[:2], block_size=SIZE, group=1)
    store(index, "b", made, group=0)
    store(index, "b", made, group=1)
    assert index.match(prompt(*range(17))) == {"a": 8, "b": 16}


def test_bounds_hold():
    index = PrefixIndex(max_blocks=10, max_engine_blocks=7)
    for start in range(0, 400, 4):
        store(index, "a", prompt(*range(start, start + 4)))
        store(index, "b", prompt(*range(start, start + 4)))
    assert index.blocks <= 10 and index.engine_blocks("a") <= 7
    small = PrefixIndex(max_expected=4)
    store(small, "z", prompt(9, 9, 9, 9))
    for start in range(0, 400, 4):
        small.expect("a", prompt(*range(start, start + 4)))
    assert small.expected <= 4


def test_a_key_that_is_used_outlives_one_that_is_not():
    index = PrefixIndex(max_blocks=8)
    used = prompt(*range(8))
    store(index, "a", used)
    for start in range(100, 180, 4):
        store(index, "b", prompt(*range(start, start + 4)))
        assert index.match(prompt(*range(9))) == {"a": 8}


steps = st.lists(
    st.tuples(
        st.sampled_from(["store", "remove", "clear", "drop", "match"]),
        st.sampled_from("abc"),
        st.lists(st.integers(0, 1), min_size=1, max_size=6),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(steps)
def test_it_agrees_with_plain_counters(script):
    """Each engine as a counter of its blocks; prompts are paths in a binary tree, so they share prefixes."""
    index = PrefixIndex()
    held: dict[str, Counter[int]] = {name: Counter() for name in "abc"}
    for what, engine, path in script:
        made = prompt(*[token for step in path for token in [step] * SIZE])
        keys = made.keys(SIZE)
        if what == "store":
            store(index, engine, made)
            held[engine].update(keys)
        elif what == "remove":
            index.removed(engine, keys[-1:])
            if held[engine][keys[-1]]:
                held[engine][keys[-1]] -= 1
        elif what in ("clear", "drop"):
            (index.cleared if what == "clear" else index.drop)(engine)
            held[engine].clear()
        longer = prompt(*array("I", made.tokens), 5)
        want = {}
        for name, counts in held.items():
            depth = next((i for i, key in enumerate(keys) if not counts[key]), len(keys))
            if depth:
                want[name] = depth * SIZE
        assert index.match(longer) == want
    assert index.blocks == len({key for counts in held.values() for key in counts if counts[key]})


def batch(*events: common_pb2.KvCacheEvent) -> common_pb2.KvEventBatch:
    return common_pb2.KvEventBatch(sequence_number=1, events=events)


def stored(tokens: list[int], first_hash: int, parent: int | None = None, **more) -> common_pb2.KvCacheEvent:
    made = [
        common_pb2.KvBlock(block_hash=first_hash + i, token_ids=tokens[at : at + SIZE], block_size=SIZE)
        for i, at in enumerate(range(0, len(tokens), SIZE))
    ]
    event = common_pb2.KvBlocksStored(blocks=made, **more)
    if parent is not None:
        event.parent_block_hash = parent
    return common_pb2.KvCacheEvent(stored=event)


def test_events_become_blocks_and_children_inherit_their_parents_namespace():
    index = PrefixIndex()
    apply(index, "a", batch(stored(list(range(8)), 10, lora_name="x", cache_salt="s")))
    apply(index, "a", batch(stored(list(range(8, 12)), 12, parent=11)))
    assert index.match(prompt(*range(13), lora="x", salt="s")) == {"a": 12}
    assert index.match(prompt(*range(13), lora="x")) == {} == index.match(prompt(*range(13)))
    apply(index, "a", batch(stored([1, 2, 3, 4], 99, parent=77)))
    assert index.orphans == 1
    gone = common_pb2.KvCacheEvent(removed=common_pb2.KvBlocksRemoved(block_hashes=[12]))
    apply(index, "a", batch(gone))
    assert index.match(prompt(*range(13), lora="x", salt="s")) == {"a": 8}
    apply(index, "a", batch(common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared())))
    assert index.blocks == 0


@pytest.mark.parametrize(
    "elsewhere",
    [{"tier": common_pb2.KV_CACHE_TIER_HOST}, {"locality": common_pb2.KV_CACHE_LOCALITY_REMOTE}],
)
def test_blocks_that_are_not_on_the_device_do_not_count(elsewhere):
    index = PrefixIndex()
    apply(index, "a", batch(stored(list(range(8)), 10, **elsewhere)))
    assert index.blocks == 0


def test_media_of_an_event_and_of_a_request_meet_in_one_key():
    index = PrefixIndex()
    event = stored(list(range(8)), 10)
    multimodal = common_pb2.KvMultimodalKey(identifier="cat", offset=2)
    event.stored.blocks[0].extra_keys.add(multimodal=multimodal)
    event.stored.blocks[1].extra_keys.add(multimodal=common_pb2.KvMultimodalKey(identifier="cat", offset=-2))
    apply(index, "a", batch(event))
    seen = prompt(*range(9), media=(Media(identifier="cat", offset=2, length=4),))
    assert index.match(seen) == {"a": 8} and index.match(prompt(*range(9))) == {}
    assert chain(namespace(), pack(range(4)), [("cat", 2)]) == seen.keys(SIZE)[0]


def test_a_guess_remembers_what_was_sent_and_forgets_by_use_and_time():
    clock = Clock()
    guess = PrefixGuess(block_size=SIZE, engine_blocks=4, ttl=60, clock=clock)
    guess.expect("a", prompt(*range(8)))
    assert guess.match(prompt(*range(9))) == {"a": 8}
    guess.expect("a", prompt(*range(100, 112)))
    assert guess.match(prompt(*range(9))) == {"a": 4}
    clock.now += 61
    guess.expect("a", prompt(1, 2, 3, 4))
    assert guess.match(prompt(*range(100, 113))) == {} and guess.blocks == 1
    guess.drop("a")
    assert guess.blocks == 0
