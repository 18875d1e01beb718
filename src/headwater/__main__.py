"""`python -m headwater` is the command line, as `torchrun -m headwater` needs it."""

from headwater.cli import main

main()
