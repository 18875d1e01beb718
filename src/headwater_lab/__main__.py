"""Run the command line with `python -m headwater_lab`, as `torchrun -m headwater_lab` does."""

from importlib import import_module

from headwater.util.layout import COMMAND_LINE

import_module(COMMAND_LINE).main()
