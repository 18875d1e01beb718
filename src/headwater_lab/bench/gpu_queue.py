"""`headwater bench gpu`: the phases of `bench.gpu` in order until a deadline, to be continued on another day.

Each phase is a separate process, so that an error or a hanging compiler in one does not affect the others. Each row is
appended to `gpu.jsonl` as soon as it is measured, so whatever ends the command loses nothing that was measured.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch

from headwater import __version__
from headwater.util.errors import HeadwaterError, check_known
from headwater.util.files import explain_absence, sha256_of
from headwater.util.processor import describe_cpu
from headwater_lab.util.clone import find_commit, today
from headwater_lab.util.outputs import check_replaceable
from headwater_lab.util.workers import show_one_gpu

REPORT = "gpu.jsonl"
# The preset of the recommended mechanisms.
RECOMMENDED = "headwater-base"
# The queue: what later phases rely on comes first.
PHASES = ("environment", "correctness", "training", "decoding", "mechanisms", "prose", "conversion")
# The paths that a phase needs.
NEEDS = {"prose": ("prose", "tokenizer"), "conversion": ("prose", "model")}
# All that it reads, if they are given.
READS = NEEDS | {"conversion": ("prose", "model", "task_files")}
WRONG, FAILED = "WRONG", "failed"
# Outcomes of rows that the next call measures again.
LATE, CUT = "skipped: no time left", "cut"
# Seconds reserved before the deadline to stop a phase and exit, and the minimum for which a phase is started.
RESERVE, LEAST = 3.0, 2.0
# How Python starts a phase.
RUN = ["-P", "-m", "headwater_lab.api.gpu_worker"]

Line = dict[str, Any]


@dataclass(frozen=True)
class SpeedTarget:
    """A bound on a figure of a phase. row: what its rows have; key: the figure's column; device: part of its name.

    limit: the most for a ratio of times, divided by that of FLOPs, which a mechanism may add; the least for a share.
    """

    phase: str
    row: Mapping[str, Any]
    key: str
    limit: float
    device: str = ""

    @property
    def bound(self) -> str:
        return f"at {'most' if self.key == _RATIO else 'least'} {self.limit:.2f}"

    def read_figure(self, phase: str, columns: Mapping[str, Any], device: str) -> float | None:
        """Read the figure that this target bounds; None if it bounds none of these columns."""
        if phase != self.phase or self.device not in device or self.key not in columns:
            return None
        if any(columns.get(key) != value for key, value in self.row.items()):
            return None
        return columns[self.key] / columns.get("FLOPs, ratio", 1.0)

    def is_met(self, figure: float) -> bool:
        return figure <= self.limit if self.key == _RATIO else figure >= self.limit


_ALL_PAIRS, _SHARE, _RATIO = "MFU, all pairs", "of the copy bandwidth", "ratio"
_ONE_ROW = {"batch": 1, "step": "compiled"}
# The first that fits a row counts.
TARGETS = (
    SpeedTarget("training", {"model": "124M"}, _ALL_PAIRS, 0.50, "H200"),
    SpeedTarget("training", {"model": "350M"}, _ALL_PAIRS, 0.53, "H200"),
    SpeedTarget("training", {"model": "124M"}, _ALL_PAIRS, 0.46, "H100"),
    SpeedTarget("training", {"model": "350M"}, _ALL_PAIRS, 0.49, "H100"),
    SpeedTarget("decoding", {"model": "1.5B", **_ONE_ROW}, _SHARE, 0.50),
    SpeedTarget("decoding", {"model": "124M", **_ONE_ROW}, _SHARE, 0.30),
    SpeedTarget("mechanisms", {"mechanism": RECOMMENDED}, _RATIO, 1.05),
    SpeedTarget("mechanisms", {}, _RATIO, 1.03),
)


def judge_row(phase: str, columns: Mapping[str, Any], device: str) -> tuple[SpeedTarget, float] | None:
    """Find the target that bounds a row, and the figure; None without one."""
    for target in TARGETS:
        if (figure := target.read_figure(phase, columns, device)) is not None:
            return target, figure
    return None


def bench_gpu(
    out: Path,
    *,
    device: str = "cuda",
    deadline: float = 540.0,
    only: Sequence[str] = (),
    inputs: Mapping[str, Path | None] = {},
    tell: Callable[[str], None] = lambda line: None,
) -> list[Line]:
    """Measure what `out`/gpu.jsonl lacks of the phases, or of `only` some, until `deadline` seconds have passed.

    inputs: paths by name; phases whose `NEEDS` are not there are left out. tell: called with progress lines. Returns
    the rows of all calls (`list_rows`). Raises `HeadwaterError` for an unknown phase, an input that does not exist, and
    rows of another device or of other inputs.
    """
    end = time.monotonic() + deadline
    paths = _check_inputs(only, inputs)
    missing = {name: [f"--{need}" for need in NEEDS.get(name, ()) if need not in paths] for name in only or PHASES}
    digests = _digest_inputs([name for name in missing if not missing[name]], paths)
    report = _begin_report(out, device, digests)
    for name in (name for name in PHASES if name in missing):
        if missing[name]:
            tell(f"{name}: skipped; give {' and '.join(missing[name])}")
        elif is_finished(read_lines(report), name):
            tell(f"{name}: measured before")
        elif end - time.monotonic() < RESERVE + LEAST:
            tell(f"{name}: no time left; run the command again to continue")
        else:
            append_line(report, {"phase": name, "inputs": digests[name]})
            _run_phase(name, report, device, end - RESERVE, tell, paths)
    return list_rows(read_lines(report))


def _check_inputs(only: Sequence[str], inputs: Mapping[str, Path | None]) -> dict[str, str]:
    """Find the paths of the inputs. Raises `HeadwaterError` for an unknown phase, and a file that does not exist."""
    for name in only:
        check_known("There is no phase named", name, PHASES)
    paths = {name: str(path.absolute()) for name, path in inputs.items() if path is not None}
    if missing := [path for path in paths.values() if not Path(path).exists()]:
        raise HeadwaterError(f"{explain_absence(missing[0])}.")
    return paths


def _digest_inputs(phases: Sequence[str], paths: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Compute a digest of each input of these phases."""
    read = {name: [key for key in READS.get(name, ()) if key in paths] for name in phases}
    digests = {
        key: _digest_path(Path(path)) for key, path in paths.items() if any(key in keys for keys in read.values())
    }
    return {name: {key: digests[key] for key in keys} for name, keys in read.items()}


def _digest_path(path: Path) -> str:
    """Compute a digest of a file, or of the names and content of the files of a folder. Raises `HeadwaterError`."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    digest = hashlib.sha256()
    try:
        for file in files:
            digest.update(f"{file.relative_to(path).as_posix()}\0{sha256_of(file)}\n".encode())
    except OSError as error:
        raise HeadwaterError(f"{str(path)!r} cannot be read: {error.strerror}.") from error
    return digest.hexdigest()


def _begin_report(out: Path, device: str, digests: Mapping[str, Mapping[str, str]]) -> Path:
    """Begin a call's rows. Raises `HeadwaterError` if the report has rows of another device or of other inputs."""
    report = out.absolute() / REPORT
    check_replaceable(report)
    device_name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else describe_cpu()
    for line in read_lines(report):
        if line.get("device", device_name) != device_name:
            raise HeadwaterError(f"{str(report)!r} has rows of another device, {line['device']}; choose another --out.")
    for name, inputs in digests.items():
        if names := _list_changed_inputs(read_lines(report), name, inputs):
            raise HeadwaterError(
                f"{str(report)!r} has rows of {name} with another {' and '.join(names)}; choose another --out."
            )
    out.mkdir(parents=True, exist_ok=True)
    append_line(report, {"headwater": __version__, "device": device_name, "date": today(), "commit": find_commit()})
    return report


def _list_changed_inputs(lines: Sequence[Line], phase: str, inputs: Mapping[str, str]) -> list[str]:
    """List the options of inputs that differ from those of a phase's rows, if it has any."""
    of_phase = [line for line in lines if line.get("phase") == phase]
    if not any("row" in line for line in of_phase):
        return []
    earlier: dict[str, str] = next((line["inputs"] for line in reversed(of_phase) if "inputs" in line), {})
    changed = {key for key, _ in earlier.items() ^ inputs.items()}
    return [f"--{key.replace('_', '-')}" for key in READS.get(phase, ()) if key in changed]


def append_line(report: Path, line: Line) -> None:
    """Append a line to a report, on the disk when this returns. An incomplete last line is ended first."""
    with open(report, "ab+") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        broken = size > 0 and file.read(1) != b"\n"
        file.write(b"\n" * broken + json.dumps(line).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_lines(report: Path) -> list[Line]:
    """Read the complete lines of a report; none if there is no file."""
    lines = []
    for line in report.read_bytes().splitlines() if report.exists() else ():
        with suppress(ValueError):
            lines.append(json.loads(line))
    return lines


def is_open(row: Line) -> bool:
    """Whether a row has no result, so that the next call measures it."""
    return str(row["result"].get("outcome", "")).startswith((LATE, CUT, FAILED))


def list_rows(lines: Sequence[Line]) -> list[Line]:
    """List the last line of each row: {"phase": …, "row": what is measured, "result": the figures}."""
    rows = {json.dumps([line["phase"], line["row"]]): line for line in lines if "row" in line}
    return list(rows.values())


def is_finished(lines: Sequence[Line], phase: str) -> bool:
    """Whether a phase has run to its end, and every row of it has a result."""
    ends = [line["status"] for line in lines if "status" in line and line["phase"] == phase]
    rows = (row for row in list_rows(lines) if row["phase"] == phase)
    return ends[-1:] == ["done"] and not any(map(is_open, rows))


def _run_phase(
    name: str, report: Path, device: str, end: float, tell: Callable[[str], None], paths: Mapping[str, str]
) -> None:
    """Run a phase in a separate process until `end`, by `time.monotonic`."""
    started = time.monotonic()
    tell(f"{name}: at most {end - started:.0f} s")
    # The deadline is an absolute time, so that the process's imports count too.
    kind, _, index = device.partition(":")
    environment = os.environ | (show_one_gpu(int(index), torch.cuda.device_count()) if index else {})
    arguments = [name, str(report), kind, str(time.time() + end - started), json.dumps(paths), str(os.getpid())]
    command = [sys.executable, *RUN, *arguments]
    line_count = len(read_lines(report))
    with TemporaryFile() as log:
        # In its own session, so that the phase's child processes, such as compilers, are stopped with it.
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
        try:
            while process.poll() is None and time.monotonic() < end:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(min(1.0, max(0.0, end - time.monotonic())))
                line_count = _tell_rows(report, line_count, tell)
        finally:
            code = process.poll()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        _tell_rows(report, line_count, tell)
        log.seek(0)
        output = log.read().decode(errors="replace").strip()
    status: Line = {"phase": name, "status": "cut" if code is None else "done" if code == 0 else FAILED}
    if status["status"] == FAILED:
        status |= {"error": (output.splitlines() or ["no output"])[-1], "log": output[-4000:]}
    append_line(report, status | {"seconds": round(time.monotonic() - started, 1)})
    tell(f"{name}: {status['status']}, {time.monotonic() - started:.0f} s")


def _tell_rows(report: Path, line_count: int, tell: Callable[[str], None]) -> int:
    """Report the rows below line `line_count`, and return the number of lines."""
    lines = read_lines(report)
    for line in lines[line_count:]:
        if "row" in line and line["result"].get("outcome") != CUT:
            columns = line["row"] | line["result"]
            cells = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in columns.items()}
            tell(f"  {', '.join(f'{key} {cell}' for key, cell in cells.items())}")
    return len(lines)


def find_problems(lines: Sequence[Line]) -> list[str]:
    """List problems: phases that failed, results that differ, measurements that raised errors."""
    ends = {line["phase"]: line for line in lines if "status" in line}
    problems = [f"{name}: {line['error']}" for name, line in ends.items() if "error" in line]
    for row in list_rows(lines):
        outcome = row["result"].get("outcome", "")
        if outcome == WRONG or outcome.startswith(FAILED):
            problems.append(f"{row['phase']}, {', '.join(map(str, row['row'].values()))}: {outcome}")
    return problems
