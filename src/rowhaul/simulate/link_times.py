"""The compiled loop of the time model: links at work."""

from __future__ import annotations

import numpy as np

from rowhaul._kernels import kernel


@kernel
def finish_times(order, start, link, seconds, num_links, finish):
    """When each message leaves its link, alone on which it would take ``seconds``.

    A link serves what starts first first, without gaps, and messages that start together in equal parts: the
    shorter ones are done earlier. ``order`` sorts messages by start, then by seconds; those
    that have no finite start do not travel yet.
    """
    free = np.zeros(num_links)  # when each link is done with all that has started
    sharing = np.zeros(num_links, np.int64)  # messages that start together and are not done
    served = np.zeros(num_links)  # seconds that each of them has had
    first = 0
    while first < len(order) and start[order[first]] < np.inf:
        began = start[order[first]]
        end = first
        while end < len(order) and start[order[end]] == began:
            on = link[order[end]]
            free[on] = max(free[on], began)
            sharing[on] += 1
            served[on] = 0.0
            end += 1
        for place in range(first, end):
            message = order[place]
            on = link[message]
            free[on] += (seconds[message] - served[on]) * sharing[on]
            served[on] = seconds[message]
            sharing[on] -= 1
            finish[message] = free[on]
        first = end
