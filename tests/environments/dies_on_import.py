"""A reward module that takes its process with it."""

import os

os._exit(5)
