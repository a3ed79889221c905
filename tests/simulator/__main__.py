"""`python -m tests.simulator --seed N --events N [--per-world N] [--planted NAME] [--keep-going]`"""

import argparse
import sys

from tests.simulator.campaign import EVENTS_PER_WORLD, campaign
from tests.simulator.planted_bugs import PLANTED, planted


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulator", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first world; later worlds count up from it")
    parser.add_argument("--events", type=int, default=100_000, help="minimum number of events in all worlds together")
    parser.add_argument("--per-world", type=int, default=EVENTS_PER_WORLD)
    parser.add_argument("--planted", default="", choices=["", *PLANTED], help="bug to put into the controller")
    parser.add_argument("--keep-going", action="store_true", help="continue with the next world after a violation")
    arguments = parser.parse_args()
    with planted(arguments.planted):
        result = campaign(
            arguments.seed, arguments.events, arguments.per_world, keep_going=arguments.keep_going, on_line=print_line
        )
    print_line(result.summary())
    return 1 if result.violations else 0


def print_line(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
