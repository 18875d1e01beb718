"""The function `lab.load_results`."""

from headwater.util import extras
from headwater.util.files import local
from headwater_lab.api.common import PathLike
from headwater_lab.api.comparing import Compared
from headwater_lab.api.training import Run
from headwater_lab.reports import read_comparisons
from headwater_lab.training.records import RECORD, read_record


def load_results(folder: PathLike) -> Run | Compared:
    """Load the results of `train` or `compare` from their folder, without training.

    Returns what the function returned, without trials that failed. Raises `HeadwaterError` if the folder has neither a
    run nor a finished run of a comparison.
    """
    extras.check_extra("report")
    path = local(folder, "folder")
    if (path / RECORD).is_file():
        return Run(path, read_record(path), path)
    return Compared(path, list(dict.fromkeys(comparison.name for comparison in read_comparisons(path))), [])
