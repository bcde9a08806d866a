"""`python -m syncline.rollout`: one rollout worker, named by `SYNCLINE_WORKER`, for the job `SYNCLINE_JOB`."""

import torch

from syncline.rollout.loop import main
from syncline.runtime.service import run

if __name__ == "__main__":
    # a small model's step is many small operations: a second thread costs more than it gives
    torch.set_num_threads(1)
    run("rollout", main)
