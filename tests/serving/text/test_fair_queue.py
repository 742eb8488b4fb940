"""Clients take turns in a queue, and one that floods it delays itself."""

from faser_trtllm.serving.text.fair_queue import FairQueue


def taken(queue):
    found = []
    while (item := queue.take()) is not None:
        found.append(item)
    return found


def filled(items, max_items=100):
    """A queue with items of (client's key, number), and what it had no room for."""
    queue = FairQueue(max_items)
    lost = [queue.put(item[0], item[1], item) for item in items]
    return queue, [item for item in lost if item is not None]


def test_clients_take_turns_and_the_newest_is_first():
    queue, lost = filled([("a", 0), ("a", 1), ("a", 2), ("b", 3), ("b", 4), ("c", 5)])
    assert taken(queue) == [("a", 2), ("b", 4), ("c", 5), ("a", 1), ("b", 3), ("a", 0)]
    assert queue.take() is None
    assert not lost


def test_an_item_that_comes_back_keeps_its_age():
    queue, _ = filled([("a", 3), ("a", 5), ("a", 4)])
    assert taken(queue) == [("a", 5), ("a", 4), ("a", 3)]


def test_where_there_is_no_room_the_client_with_most_loses_its_oldest():
    flood = [("a", i) for i in range(10)]
    queue, lost = filled([("b", 100), *flood, ("b", 101), ("c", 102)], max_items=10)
    assert lost == flood[:3]
    assert [item for item in taken(queue) if item[0] != "a"] == [("b", 101), ("c", 102), ("b", 100)]
