"""`python -m syncline.scheduler`: the scheduler as a process."""

from syncline.runtime.service import run
from syncline.scheduler.loop import main

if __name__ == "__main__":
    run("scheduler", main)
