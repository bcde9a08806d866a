"""`python -m syncline.sync`."""

from syncline.runtime.service import run
from syncline.sync.loop import main

run("sync", main)
