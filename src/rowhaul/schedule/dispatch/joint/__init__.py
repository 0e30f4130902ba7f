"""`joint`: a dispatcher beyond the papers, in steps of a millisecond or less.

`problem` prices rows by the set of workers that train them; `growth` makes a first assignment; `search`
improves it, with the state of the rows kept in `spread`.
"""

from rowhaul.schedule.dispatch.joint.joint import Joint

__all__ = ["Joint"]
