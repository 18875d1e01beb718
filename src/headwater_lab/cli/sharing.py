"""`headwater records`: comparisons as files that others can check."""

from pathlib import Path

from headwater.util import extras
from headwater.util.errors import HeadwaterError
from headwater_lab.cli.arguments import check_writable, say
from headwater_lab.cli.compare import print_comparison
from headwater_lab.cli.options import LOOK, FilePath, FolderPath, add_group, command
from headwater_lab.util.terminal import counted

records = add_group(LOOK, "records", "Comparisons as files that others can check.")


@command(records, 'records pack runs/mine --out mine.jsonl --by "Ada Lovelace"')
def pack_records(folder: FolderPath, *, out: FilePath, by: str) -> None:
    """Pack the records of comparisons into one file, without weights.

    folder: The output folder of `headwater compare`.
    out: The file to write, JSON Lines.
    by: Who ran them; runs that were unpacked from a file keep the name that is there.
    """
    extras.check_extra("report")
    from headwater_lab.papers.kept import write_runs
    from headwater_lab.papers.shared_records import pack_records

    check_writable(out)
    if out.exists():
        raise HeadwaterError(f"{str(out)!r} already exists; choose another --out, or move it away.")
    runs = pack_records(folder, by)
    write_runs(out, runs)
    say(f"{counted(len(runs), 'run')} written to {out}")


@command(records, "records unpack mine.jsonl --out runs/mine")
def unpack_records(path: FilePath, *, out: FolderPath) -> None:
    """Unpack a file of records into a folder, where `headwater compare` trains what is missing.

    path: A file of `headwater records pack`.
    out: The output folder of `headwater compare`.
    """
    extras.check_extra("report")
    from headwater_lab.papers.kept import read_runs
    from headwater_lab.papers.shared_records import unpack_runs

    check_writable(out, folder=True)
    say(f"{counted(unpack_runs(read_runs(path), out), 'run')} unpacked to {out}")


@command(records, "records check mine.jsonl")
def check_records(path: Path) -> None:
    """Check records, and compute their verdicts anew.

    Each run needs a recipe with its identity, hardware, versions, a commit, a curve and a last evaluation. A comparison
    needs at least three seeds an arm, the same for all arms, on the same data.

    path: A file of `headwater records pack`, or the output folder of `headwater compare`, to check before packing.
    """
    extras.check_extra("report")
    from headwater_lab.papers import shared_records
    from headwater_lab.papers.kept import read_runs
    from headwater_lab.papers.result import describe_machine

    runs = shared_records.pack_records(path, "whoever packs them") if path.is_dir() else read_runs(path)
    comparisons, problems = shared_records.check_runs(runs)
    for comparison in comparisons:
        print_comparison(comparison)
    machines = sorted({describe_machine(run.record) for run in runs})
    say(f"run by {', '.join(sorted({run.by or 'nobody named' for run in runs}))} on {'; '.join(machines)}")
    if problems:
        raise HeadwaterError("\n".join(problems))
    say(f"{counted(len(runs), 'run')}: nothing is missing")
