"""Records on a card that an index in host memory finds.

A worker's cache, whose plans are made and followed on the CPU; and rows that policies admit and drop.
"""
