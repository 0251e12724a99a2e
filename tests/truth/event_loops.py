"""A simulation of agent-loop workers whose event loops are blocked; shares no code with the analyses.

A loop runs one thing at a time, in the order in which things are ready: the prompt building of a request,
what follows a generate call, and the return of the load balancer and of a tool.
"""

import heapq
from dataclasses import replace
from itertools import count


def blocked(step, blocks_us):
    """Make the step with each worker's loop blocked for so long by each prompt and after each call.

    What requests wait for their loop is where it would be recorded: before they begin, on the ways to
    the engine and back, and in their tools.
    """
    number = count()
    heap = [
        (request.begin_us, next(number), place, _passes(request, blocks_us[request.worker]))
        for place, request in enumerate(step.requests)
    ]
    heap = [(at, order, place, passes, next(passes)) for at, order, place, passes in heap]
    heapq.heapify(heap)
    free_us = dict.fromkeys(range(len(blocks_us)), 0)
    made = {}
    while heap:
        ready_us, _, place, passes, block_us = heapq.heappop(heap)
        worker = step.requests[place].worker
        begin_us = max(ready_us, free_us[worker])
        free_us[worker] = begin_us + block_us
        try:
            ready_us, block_us = passes.send((ready_us, begin_us, free_us[worker]))
        except StopIteration as done:
            made[place] = done.value
        else:
            heapq.heappush(heap, (ready_us, next(number), place, passes, block_us))
    return replace(step, requests=tuple(made[place] for place in range(len(step.requests))))


def _passes(request, block_us):
    """Run one request: yield when it is ready for its loop, and for how long it blocks it."""
    _, begin_us, now_us = yield block_us
    first_us = begin_us
    turns = []
    for turn in request.turns:
        ready_us, began_us, now_us = yield now_us + turn.acquire_us, 0
        acquired = turn.acquire_us + began_us - ready_us
        engine = turn.way_us + turn.prefill_us + turn.decode_us
        ready_us, began_us, now_us = yield now_us + engine + turn.back_us, block_us
        waited = began_us - ready_us
        tools = max((length for _, length in turn.tools), default=0)
        back = turn.back_us + waited
        made = replace(turn, acquire_us=acquired, back_us=back, own_us=block_us)
        if tools:
            ready_us, began_us, now_us = yield now_us + tools, 0
            longest = tools + began_us - ready_us
            name = turn.tools[0][0]
            made = replace(made, tools=((name, longest),))
        turns.append(made)
    return replace(request, begin_us=first_us, build_us=block_us, turns=tuple(turns))
