"""`rowhaul report`: one self-contained page about a run, and a trace for profilers' viewers."""
