"""`python -m headwater_lab` is the command line, as `torchrun -m headwater_lab` needs it."""

from importlib import import_module

from headwater.util.layout import COMMAND_LINE

import_module(COMMAND_LINE).main()
