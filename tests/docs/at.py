"""`python -m tests.docs.at DIRECTORY WORD…`: what `diloco WORD…` does in that directory."""

import os
import sys

import torch

from diloco.cli import main

torch.set_num_threads(1)
sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))  # a fork's are of files
os.chdir(sys.argv[1])
main(sys.argv[2:])
