"""The waiting queue against a sorted list, whatever is pushed, ended and asked."""

from hypothesis import given
from hypothesis import strategies as st

from faser_trtllm.core.request import Request, RequestState
from faser_trtllm.core.sampling_params import SamplingParams
from faser_trtllm.scheduler.queue import WaitingQueue


def make_request(number, priority):
    params = SamplingParams(max_tokens=4)
    return Request(str(number), [1], params, max_seq_len=8, max_draft_len=0, priority=priority)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("push"), st.sampled_from([0.0, 0.5, 1.0])),
            st.tuples(st.just("first"), st.integers(0, 6)),
            st.tuples(st.just("end"), st.integers(0, 10)),
            st.tuples(st.just("pop"), st.none()),
        ),
        max_size=40,
    )
)
def test_the_next_requests_are_those_of_a_sorted_list(actions):
    queue, waiting, number = WaitingQueue(), [], 0
    for action, value in actions:
        if action == "push":
            request = make_request(number, value)
            queue.push(request)
            waiting.append(request)
            waiting.sort(key=lambda r: (-r.priority, int(r.request_id)))
            number += 1
        elif action == "first":
            assert queue.first(value) == waiting[:value]
        elif action == "end" and waiting:
            request = waiting.pop(value % len(waiting))
            request.state = RequestState.FINISHED
            queue.note_removed()
        elif action == "pop" and waiting:
            assert queue.peek() is waiting.pop(0)
            queue.pop()
        assert len(queue) == len(waiting)
        assert queue.peek() is (waiting[0] if waiting else None)
