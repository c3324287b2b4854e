"""Mutated input for code that reads bytes of strangers. It is seeded, bounded, and compared with an independent reader.

`python -m tests.fuzz [GROUP ...] [--seed N] [--count N]` runs the groups, all of them without a name. A group is a
module of this package with

    COUNT: int                                    inputs of a full run
    def run(seed: int, count: int) -> list[str]   one line for each surprise, with what is needed to see it again

The same seed and count make the same inputs. `make fuzz` runs every group in full, `make test` a small part of each.
"""
