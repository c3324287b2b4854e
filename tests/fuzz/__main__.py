"""Run the groups of `tests.fuzz`."""

import argparse
import sys
import time

from tests.fuzz.groups import groups

SHOWN = 20
"""Surprises that are printed."""


def main() -> int:
    known = groups()
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Send mutated input to every reader.")
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"all without a name: {', '.join(known)}")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, help="inputs of each group; its own number without this")
    given = parser.parse_args()
    unknown = set(given.groups) - set(known)
    if unknown:
        parser.error(f"there is no group {', '.join(sorted(unknown))}: take {', '.join(known)}")
    surprises = 0
    for name in given.groups or known:
        count = given.count or known[name].COUNT
        began = time.monotonic()
        found = known[name].run(given.seed, count)
        surprises += len(found)
        print(f"{name}: {count} inputs, seed {given.seed}, {time.monotonic() - began:.0f} s: {len(found)} surprises")
        for line in found[:SHOWN]:
            print(f"  {line}")
    return 1 if surprises else 0


if __name__ == "__main__":
    sys.exit(main())
