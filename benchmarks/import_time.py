"""How long does `import tvmhet` take beyond torch and TVM?

    python benchmarks/import_time.py [--runs 5]

Each run is a fresh process. "import tvmhet" loads names at first use, so the second row touches every public name
after torch and tvm are there: that is what tvmhet itself adds. The goal is under 1 s, judged by the median CPU time,
which other processes disturb less. The list below names the modules that take the longest (`python -X importtime`).
"""

from __future__ import annotations

import argparse
import platform
import re
import shlex
import statistics
import subprocess
import sys

GOAL_S = 1.0
_TIMER = "import time; wall, cpu = time.perf_counter(), time.process_time(); {}; "
_TIMER += "print(time.perf_counter() - wall, time.process_time() - cpu)"
_ALL_NAMES = "import tvmhet; [getattr(tvmhet, name) for name in tvmhet.__all__]"
CASES = {
    "import tvmhet, alone": _TIMER.format("import tvmhet"),
    "every public name, after torch and tvm": "import torch, tvm; " + _TIMER.format(_ALL_NAMES),
    "for comparison: import torch, tvm": _TIMER.format("import torch, tvm"),
}
_LINE = re.compile(r"import time:\s*(\d+) \|\s*(\d+) \|( *)(\S+)")


def run(program: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a fresh interpreter."""
    return subprocess.run([sys.executable, *options, "-c", program], capture_output=True, text=True, check=True)


def seconds(program: str, runs: int) -> tuple[list[float], list[float]]:
    """Return (wall, CPU) seconds that `program` prints, over fresh processes; one more first warms the file cache."""
    pairs = [run(program).stdout.split()[-2:] for _ in range(runs + 1)][1:]
    return [float(wall) for wall, _ in pairs], [float(cpu) for _, cpu in pairs]


def slowest(top: int) -> list[tuple[str, float]]:
    """Return (module, seconds of its own code) of what tvmhet imports once torch and tvm are there."""
    mark = "tvmhet_import_begins"
    program = f"import torch, tvm, sys; sys.stderr.write('{mark}\\n'); {_ALL_NAMES}"
    after = run(program, "-X", "importtime").stderr.split(mark)[1]
    own = {m[4]: int(m[1]) / 1e6 for m in _LINE.finditer(after)}
    return sorted(own.items(), key=lambda item: -item[1])[:top]


def main() -> None:
    """Print the table; end with status 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    print(f"{platform.machine()}, Python {platform.python_version()}, {runs} runs after a warm-up")
    print(f"command: python {shlex.join(sys.argv)}\n")
    print(f"{'':42}{'wall':>9}{'lowest':>9}{'highest':>9}{'CPU':>9}")
    medians = {}
    for name, program in CASES.items():
        wall, cpu = seconds(program, runs)
        medians[name] = statistics.median(cpu)
        print(
            f"{name:42}{statistics.median(wall):>7.3f} s{min(wall):>7.3f} s{max(wall):>7.3f} s{medians[name]:>7.3f} s"
        )
    print("\nslowest modules, own time:")
    for module, own_s in slowest(8):
        print(f"  {own_s * 1e3:6.1f} ms  {module}")
    added = max(medians[name] for name in list(CASES)[:2])
    print(f"\nadded by tvmhet: {added:.3f} s of CPU; goal: under {GOAL_S} s: {'met' if added < GOAL_S else 'MISSED'}")
    sys.exit(added >= GOAL_S)


if __name__ == "__main__":
    main()
