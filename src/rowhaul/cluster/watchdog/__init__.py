"""The process beside each rank that beats for it and watches the others, without the rank's GIL.

A rank can be busy for long in code that holds the GIL: it is alive, but none of its Python threads runs. So
every rank starts a small process without PyTorch that reads the rank's page of activity, tells the hub once a
second, and hears from it which ranks are lost or stuck. The hub is in rank 0's watchdog.
"""
