"""`python -m syncline.trainer`: the trainer of the job that SYNCLINE_JOB names."""

from syncline.runtime.service import run
from syncline.trainer.loop import main

if __name__ == "__main__":
    run("trainer", main)
