"""`make chaos SECONDS=600`: injects faults for so long, records what came of each, and writes the page.

The first half goes to trainers and messages (many, cheap), the second to the whole stack behind a proxy (few, dear).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / part) for part in ("", "loop", "reliability", "chaos")]


def say(line: str) -> None:
    """To whoever watches."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    """The exit code: 0 if everything was survived."""
    import cases
    import tally
    from own_redis import OwnRedis

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=1 << 30, help="cases below the stack, at most")
    parser.add_argument("--stack", type=float, default=0.5, help="share of the time for the whole stack")
    parser.add_argument("--json", type=Path, default=tally.RECORDED)
    parser.add_argument("--add", action="store_true", help="to what is recorded already")
    asked = parser.parse_args()
    recorded = tally.load(asked.json) if asked.add else tally.Recorded(seed=asked.seed)
    began, before = time.monotonic(), recorded.seconds
    server = OwnRedis()
    try:
        if asked.cases:
            cases.warm_up(server.url)
        for number, (case, seed) in enumerate(cases.cases(asked.seed)):
            if number >= asked.cases or time.monotonic() - began > asked.seconds * (1 - asked.stack):
                break
            cases.run(case, seed, recorded, server.url)
            recorded.seconds = before + time.monotonic() - began
            tally.save(recorded, asked.json)
            say(f"{recorded.injections:5d} {len(recorded.failures)} {case} seed {seed}")
    finally:
        server.remove()
    if asked.stack > 0:
        import storm

        seed = asked.seed
        while time.monotonic() - began < asked.seconds:
            storm.campaign(seed, recorded)
            seed += 1
            recorded.seconds = before + time.monotonic() - began
            tally.save(recorded, asked.json)
            say(f"{recorded.injections:5d} {len(recorded.failures)} storm seed {seed - 1}")
    if asked.json == tally.RECORDED:
        tally.PAGE.write_text(tally.page(recorded))
    for failure in recorded.failures:
        say(str(failure))
    return 1 if recorded.failures else 0


if __name__ == "__main__":
    sys.exit(main())
